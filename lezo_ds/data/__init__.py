"""Data: from text to batches, and from logits to losses and scores.

Records become the batches of steps and of evaluations:

    tables       records of files and of the hub, each with its place
    splits       records, checked and drawn, as the examples of train, dev and test
    encoding     examples as token ids; chat: those that a chat template writes
    batches      token ids as rows of tensors; packing: several sequences in a row
    task_data    all of this for a run and its steps; prefetch: the next step, in a thread

What the model makes of them becomes losses, answers and scores:

    objectives   logits or answers -> loss of each example
    generation   prompts -> new tokens -> answers; prompt_reading: the prompts, before new tokens
    metrics      predictions -> score
    evaluation   the loss and score of a split, on all ranks
"""
