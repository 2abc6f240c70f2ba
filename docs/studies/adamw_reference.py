"""AdamW on the data of a recipe, to compare with: the papers' row FT.

transformers' Trainer trains; the records, prompts and scores are the package's. As in MeZO's own
fine-tuning (Malladi et al. 2023), dropout is on, the learning rate falls linearly to 0, and the
weights of the lowest validation loss are scored at the end. The prompts of a recipe, its splits and
its keys of the sections model, data, train and peft are read; those of zo are not.

    python docs/studies/adamw_reference.py --config RECIPE --rate 1e-5 [--decay 0] key=value ...
    torchrun --nproc-per-node 2 docs/studies/adamw_reference.py ...          more ranks
    ... --deepspeed JSON                                                     the Trainer's settings

run_dir gets config.yaml, results.json and predictions/ as of a run, so that `lezo-ds report` shows
them. A run does not resume.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import RunConfig, eval_every, load_config, with_steps
from lezo_ds.data.generation import generate
from lezo_ds.data.score import EvaluationResult, evaluate, prediction_rows
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlainModel:
    """What the package's evaluation calls: a model of transformers, whole on each rank."""

    tensor_parallel = 1

    def __init__(self, model: Any) -> None:
        self.module = model

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits that a micro-batch selects, or new tokens."""
        self.module.eval()
        with torch.no_grad():
            return selected_logits(self.module, to_device(micro_batch, self.module.device))


def selected_logits(model: Any, batch: MicroBatch) -> Tensor:
    """Return the selected logits of a batch, [N, vocabulary] or [N, K], or its new tokens."""
    if batch.prompts is not None:
        tokens: Tensor = generate(model, batch)
        return tokens
    logits: Tensor = model(**batch.inputs).logits
    selection = batch.selection
    if selection is None:
        return logits
    logits = logits[selection.rows, selection.positions]
    return logits if selection.vocabulary is None else logits[:, selection.vocabulary]


class Reference(Trainer):  # type: ignore[misc]
    """A Trainer on the batches of a run, which are a function of the step."""

    model_accepts_loss_kwargs = False

    def __init__(self, config: RunConfig, data: TaskData, **options: Any) -> None:
        super().__init__(**options)
        self._config = config
        self._data = data
        self._per_step = config.train.batch_size // config.train.micro_batch_size

    def get_train_dataloader(self) -> Any:
        """Return the numbers of this rank's micro-batches: rank r has r, r + ranks, ..."""
        number = (self._config.train.steps or 0) * self._per_step
        own = range(self.args.process_index, number, self.args.world_size)
        return _Loader(list(own))

    def compute_loss(self, model: Any, inputs: dict[str, int], **_: Any) -> Tensor:
        """Return this micro-batch's share of the mean loss over the batch of its step."""
        step, place = divmod(inputs["number"], self._per_step)
        batch = self._data.step_batch(self._config, step)
        micro_batch = to_device(batch[place], self.args.device)
        losses = self._data.loss(selected_logits(model, micro_batch), micro_batch)
        # The Trainer averages over the ranks and over the micro-batches that a rank accumulates.
        return losses.sum() * self._per_step / batch.total_weight


class _Loader:
    """An iterable of a known length, as the Trainer takes it."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"number": number} for number in self._numbers)


class Validation(TrainerCallback):  # type: ignore[misc]
    """Scores the validation split now and then, and keeps the weights of the lowest loss.

    Attributes:
        best_loss, best_step: of the lowest validation loss so far.
        best: the weights at this step, on the CPU.
    """

    def __init__(self, config: RunConfig, data: TaskData) -> None:
        self._config = config
        self._data = data
        self._every = eval_every(config)
        self.best_loss = float("inf")
        self.best_step = 0
        self.best: dict[str, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Score the split, if it is due."""
        step = state.global_step
        if step % self._every == 0 or step == state.max_steps:
            self.validate(model, step)
            model.train()

    def validate(self, model: Any, step: int) -> None:
        """Score the split, and keep the weights if they are the best so far."""
        loss = scores(model, self._data, "dev", self._config).loss
        print(f"step {step}: validation loss {loss:.4f}", flush=True)
        if loss < self.best_loss:
            self.best_loss = loss
            self.best_step = step
            weights = getattr(model, "module", model).state_dict()
            self.best = {name: each.detach().cpu().clone() for name, each in weights.items()}


def scores(model: Any, data: TaskData, split: str, config: RunConfig) -> EvaluationResult:
    """Return the package's scores of a split."""
    inner = getattr(model, "module", model)  # of DistributedDataParallel
    examples = data.dev if split == "dev" else data.test
    return evaluate(PlainModel(inner), data.reader, examples, config.train.eval_batch_size)


def train(config: RunConfig, rate: float, decay: float, deepspeed: str | None) -> RunResults:
    """Train, and return the results, whose files rank 0 writes."""
    began = time.monotonic()
    distributed.init_distributed()
    data = replace(load_task_data(config), packed=False)
    config = with_steps(config, len(data.train.examples))
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(config.model.path), dtype=DTYPES[config.model.dtype]
    )
    if config.peft.kind == "lora":
        from peft import LoraConfig, get_peft_model

        targets = config.peft.lora_targets.split(",")
        lora = LoraConfig(
            r=config.peft.lora_rank, lora_alpha=config.peft.lora_alpha, target_modules=targets
        )
        model = get_peft_model(model, lora)
    elif config.peft.kind != "none":
        raise UserError("this program trains no prefix", fix="set peft.kind=none or lora")
    ranks = distributed.world_size()
    per_step = config.train.batch_size // config.train.micro_batch_size
    arguments = TrainingArguments(
        output_dir=str(Path(config.run_dir, "trainer")),
        use_cpu=not torch.cuda.is_available(),
        deepspeed=deepspeed,
        bf16=config.model.dtype == "bf16",
        per_device_train_batch_size=1,  # an item is a micro-batch
        gradient_accumulation_steps=per_step // ranks,
        max_steps=config.train.steps or 0,
        learning_rate=rate,
        weight_decay=decay,
        lr_scheduler_type="linear",
        seed=config.seed,
        save_strategy="no",
        report_to="none",
        logging_steps=max(1, (config.train.steps or 0) // 20),
    )
    validation = Validation(config, data)
    trainer = Reference(config, data, model=model, args=arguments, callbacks=[validation])
    before = scores(model.to(arguments.device), data, "test", config)
    validation.validate(model, 0)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.load_state_dict(validation.best)
    after = scores(model, data, "test", config)
    results = RunResults(
        task=data.task.name,
        method="AdamW",
        peft=config.peft.kind,
        metric=data.task.metric,
        protocol=config.data.protocol,
        finished=True,
        zero_shot=before.score,
        test=after.score,
        majority_class=after.majority_class,
        macro_f1=after.macro_f1,
        by_label=after.by_label,
        best_step=validation.best_step,
        best_dev_loss=validation.best_loss,
        worse_than_base=validation.best_step == 0,
        steps=config.train.steps or 0,
        early_stop_step=None,
        seed=config.seed,
        seconds=round(time.monotonic() - began, 3),
        peak_memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        skipped_steps=0,
        model_fingerprint="",
        weights_digest="",
        world_size=arguments.world_size,
    )
    if trainer.is_world_process_zero():
        directory = RunDirectory(config.run_dir)
        rows = prediction_rows(data.task, data.test.examples, after.predicted)
        directory.write_predictions(validation.best_step, rows)
        directory.write_config(config)
        directory.write_json(directory.results, asdict(results))
    return results


def main() -> None:
    """Read the arguments, train, and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--deepspeed")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    results = train(config, arguments.rate, arguments.decay, arguments.deepspeed)
    print(f"test {results.metric}: {results.zero_shot:.3f} before, {results.test:.3f} after")


if __name__ == "__main__":
    sys.exit(main())
