"""TRL's GRPO on the prompts and the reward of keywords.yaml, to compare with: one process, in fp32.

It needs TRL, which lezo_ds does not install, next to it:

    pip install -c constraints.txt trl==1.16.0
    OMP_NUM_THREADS=1 python docs/studies/grpo_reference.py --steps 10

It prints the mean reward and the share of answers in the form on the test prompts, greedy, before
and after, with the processor's seconds of training and the peak memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from lezo_ds.config import load_config
from lezo_ds.config.paths import ROOT
from lezo_ds.data.examples import Example
from lezo_ds.data.task_data import load_task_data

RECIPE = ROOT / "launch" / "recipes" / "keywords.yaml"
NUM_PROMPTS = 8
NUM_ANSWERS = 8  # to each prompt
TEST_BATCH = 50


def first_line(text: str) -> str:
    """Return the answer in a text, as the recipe's generation.stop ends it."""
    return text.partition("\n")[0].strip()


@torch.no_grad()
def test_scores(
    model: AutoModelForCausalLM,
    tokenizer: AutoTokenizer,
    examples: Sequence[Example],
    max_new_tokens: int,
) -> str:
    """Return the mean reward and the share in the form of greedy answers, as a line."""
    from keywords import share_in_form, three_words  # of the recipe's folder

    answers = []
    for start in range(0, len(examples), TEST_BATCH):
        batch = examples[start : start + TEST_BATCH]
        inputs = tokenizer([example.prompt for example in batch], return_tensors="pt", padding=True)
        tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        written = tokens[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        answers += [first_line(text) for text in texts]
    rewards = three_words(answers, [example.record for example in examples])
    reward = sum(rewards) / len(rewards)
    in_form = share_in_form(answers, examples)
    return f"reward {reward:.3f}, in the form {in_form:.3f}, of {len(answers)} answers"


def main() -> None:
    """Train and print both scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--schedule", default="constant", help="constant or linear")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of keywords.yaml")
    arguments = parser.parse_args()
    sys.path.insert(0, str(RECIPE.parent))
    from keywords import three_words

    config = load_config(RECIPE, ["model.dtype=fp32", *arguments.overrides])
    data = load_task_data(config)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    max_new_tokens = config.generation.max_new_tokens

    def reward(completions: list[str], sentence: list[str], **_: object) -> list[float]:
        answers = [first_line(text) for text in completions]
        return three_words(answers, [{"sentence": text} for text in sentence])

    train = Dataset.from_list(
        [
            {"prompt": example.prompt, "sentence": example.record["sentence"]}
            for example in data.train.examples
        ]
    )
    settings = GRPOConfig(
        output_dir=f"{config.run_dir}-grpo",
        max_steps=arguments.steps,
        per_device_train_batch_size=NUM_PROMPTS * NUM_ANSWERS,
        num_generations=NUM_ANSWERS,
        max_completion_length=max_new_tokens,
        learning_rate=arguments.rate,
        lr_scheduler_type=arguments.schedule,
        temperature=1.0,
        gradient_checkpointing=False,  # with it, transformers generates without a cache
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        seed=config.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=train,
        processing_class=tokenizer,
    )
    questions = list(data.test.examples)
    print("before:", test_scores(model, tokenizer, questions, max_new_tokens))
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    model.eval()
    print("after:", test_scores(model, tokenizer, questions, max_new_tokens))
    print(f"{arguments.steps} steps: {seconds:.0f} processor seconds, peak {peak:.1f} GB")


if __name__ == "__main__":
    main()
