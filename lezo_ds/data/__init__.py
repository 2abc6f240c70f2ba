"""Data: from a file to batches, and from the model's outputs to losses and scores.

A record goes one way, and returns to no module:

    file          records     pandas, json, pyarrow and datasets read it
    record        tasks       a task makes texts of it: those of the papers (mezo), or those that a
                              recipe describes (described, with template and turns)
    example       splits      checked, drawn, and put after demonstrations (examples has the types)
    token ids     encode      texts; chat: what a chat template writes
    row           reader      a row of an Arrow file, which the ranks of a machine share (store)
    batch         batches     rows of tensors; packing: several sequences in a row
    step          task_data   the batches of a step; prefetch: those of the next one, in a thread
    outputs       generation  new tokens after prompts, which prompt_reading reads first
    loss          objectives  of logits or answers; rewards: user functions
    score         score       the loss and score of a split, on all ranks; metrics: its functions
"""
