"""Time variants of one step against each other, in interleaved rounds.

A variant is mezo_reference (MeZO as published, in plain PyTorch), naive_zero3 (MeZO on ZeRO-3 as one would
first write it), ours (the papers' step), each with [:SPARSITY], or recipe (the step that a recipe describes).
Ratios are relative to the first variant. Without a recipe, weights are random, and all examples have the same
length: that of a typical example of SST-2 or BoolQ.
"""

from __future__ import annotations

import csv
import datetime
import functools
import math
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.config import ZEROTH_ORDER, RunConfig, ZoConfig, check_world, config_from_dict, load_config
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import make_directory
from lezo_ds.forward.batch import LossFunction, MicroBatch
from lezo_ds.model.checkpoint import DTYPES, resolve_model
from lezo_ds.runs.directory import library_versions
from lezo_ds.runs.trainer import make_engine
from lezo_ds.tools.mezo_reference import InPlaceSteps, plain_weights, sharded_weights
from lezo_ds.tools.opt_shapes import OPT_SHAPES, opt_config

COLUMNS = (
    *("date", "machine", "lezo_ds", "torch", "ranks", "model", "task", "length", "batch", "dtype"),
    *("update_precision", "partition_size", "variant", "rounds", "seconds", "ratio", "tokens"),
    *("peak_bytes", "gathered_bytes"),
)
"""seconds is the median of the rounds; ratio is the median of the first variant's time by this one's; tokens
are those of a step's batch, padding included; the bytes are rank 0's in one step."""

LENGTHS = {"sst2": 32, "boolq": 200}
"""Tokens of a typical prompt and answer, in OPT's tokens."""

KINDS = ("mezo_reference", "naive_zero3", "ours", "recipe")
WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it
_PAD, _FIRST_WORD = 1, 3  # of OPT's vocabulary


def main(arguments: Namespace) -> None:
    """Measure, print the rows and append them to a CSV. A collective.

    Args:
        arguments: variants (words: variants, and key=value changes to the recipe), config, rounds and out;
            without config shape, layers, task, batch, dtype, update_precision and partition_size.
    """
    changes = [word for word in arguments.variants if "=" in word]
    variants = [word for word in arguments.variants if "=" not in word]
    for variant in variants:
        parse_variant(variant)
    if not variants or (arguments.config is None and (changes or "recipe" in variants)):
        raise UserError(
            "the benchmark needs variants; key=value and the variant recipe need --config",
            fix="lezo-ds benchmark mezo_reference ours:0 ours:0.75",
        )
    config = None if arguments.config is None else load_config(arguments.config, changes)
    distributed.init_distributed()
    if config is not None:
        rows = measure(recipe_inputs(config), variants, arguments.rounds)
    else:
        with ExitStack() as stack:
            directory = distributed.on_rank_zero(lambda: stack.enter_context(tempfile.TemporaryDirectory()))
            rows = measure(random_inputs(arguments, Path(directory)), variants, arguments.rounds)
            distributed.barrier()
    if distributed.rank() == 0:
        print(table(rows))
        if arguments.out is not None:
            append(arguments.out, rows)


def parse_variant(text: str) -> tuple[str, float]:
    """Return the kind of a variant and its sparsity.

    >>> parse_variant("ours:0.75"), parse_variant("mezo_reference")
    (('ours', 0.75), ('mezo_reference', 0.0))
    """
    kind, _, number = text.partition(":")
    try:
        sparsity = float(number or 0)
    except ValueError:
        sparsity = math.nan
    if kind not in KINDS or not 0 <= sparsity <= 1 or (kind == "recipe" and number):
        raise UserError(
            f"unknown variant {text}",
            fix="for example mezo_reference naive_zero3 ours:0 ours:0.75, or recipe",
        )
    return kind, sparsity


@dataclass(frozen=True)
class Inputs:
    """A model and the batch of each step in two layouts. All variants get the same examples at a step.

    Our trainer sorts examples by length, lets them share rows, and runs one row for all one-token candidates
    of an example. MeZO's code runs the same examples in the order drawn, without any of this.
    """

    config: RunConfig
    model: str
    length: int  # tokens of an example, on average
    loss: LossFunction
    batches: Callable[[int], list[MicroBatch]]
    published_batches: Callable[[int], list[MicroBatch]]

    def zo(self, kind: str, sparsity: float) -> ZoConfig:
        """Return the recipe's own step for "recipe", else the papers' with its rate, scale and precision."""
        zo = self.config.zo
        if kind == "recipe":
            return zo
        return ZoConfig(
            learning_rate=zo.learning_rate,
            perturbation_scale=zo.perturbation_scale,
            update_precision=zo.update_precision,
            sparsity=sparsity,
        )

    def plain_model(self) -> nn.Module:
        directory = resolve_model(self.config.model.path)
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[self.config.model.dtype], trust_remote_code=False
        )
        return model.to(distributed.device()).eval().requires_grad_(False)


def recipe_inputs(config: RunConfig) -> Inputs:
    """Return a recipe's model and batches: real texts of unequal lengths."""
    supported = config.method in ZEROTH_ORDER and config.peft.kind == "none" and not config.zo.only_blocks
    if not supported or config.train.objective != "task":
        raise UserError(
            "the benchmark compares steps on all weights with MeZO's code",
            fix="set method=lezo peft.kind=none zo.only_blocks=false train.objective=task",
        )
    ranks = distributed.world_size()
    check_world(config, ranks)
    data = load_task_data(config)
    build = data.objective.build_batch
    assert build is not None, "an objective that reads logits"
    if build is candidate_batch:
        build = partial(candidate_batch, deduplicate=False)

    def published(step: int) -> list[MicroBatch]:
        examples = [data.train.encoded[row] for row in data.step_rows(config, step)]
        return [build(examples[rank::ranks], data.tokenizer.pad_id) for rank in range(ranks)]

    length = round(statistics.mean(example.num_tokens for example in data.train.encoded))

    def batches(step: int) -> list[MicroBatch]:
        return list(data.step_batch(config, step))

    return Inputs(config, Path(config.model.path).name, length, data.loss, batches, published)


def random_inputs(setting: Namespace, directory: Path) -> Inputs:
    """Return a random OPT, written to `directory`, and one batch of random tokens, the same at every step.

    All examples have the same length, so that no layout pays for padding.
    """
    if setting.shape not in OPT_SHAPES:
        raise UserError(f"unknown --shape {setting.shape}", fix=f"use one of {', '.join(OPT_SHAPES)}")
    config = config_from_dict(
        {
            "run_dir": str(directory),
            "model": {"path": str(directory), "dtype": setting.dtype},
            "data": {"task": setting.task},
            # A learning rate that changes the weights very little.
            "zo": {"learning_rate": 1e-7, "sparsity": 0.0, "update_precision": setting.update_precision},
            "train": {"steps": 1, "batch_size": setting.batch, "micro_batch_size": setting.batch},
            "partition_size": setting.partition_size,
        },
        "the benchmark",
    )
    ranks, length = distributed.world_size(), LENGTHS[setting.task]
    if setting.batch % ranks:
        raise UserError(f"a batch of {setting.batch} does not split into {ranks} parts", fix="change --batch")
    shape = opt_config(setting.shape, setting.layers)

    def write() -> None:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape, dtype=DTYPES[setting.dtype]).save_pretrained(directory)

    distributed.on_rank_zero(write)
    generator = torch.Generator().manual_seed(length)
    size = (setting.batch, length - 1)
    prompts = torch.randint(_FIRST_WORD, shape.vocab_size, size, generator=generator).tolist()
    examples = [
        EncodedExample(((*prompt, 17), (*prompt, 42)), (1, 1), index % 2, False)
        for index, prompt in enumerate(prompts)
    ]
    parts = [examples[rank::ranks] for rank in range(ranks)]
    ours = [candidate_batch(part, _PAD) for part in parts]
    published = [candidate_batch(part, _PAD, deduplicate=False) for part in parts]
    name = setting.shape if setting.layers is None else f"{setting.shape} with {setting.layers} blocks"
    return Inputs(config, name, length, classification_loss, lambda _: ours, lambda _: published)


class EngineSteps:
    """The engine's own steps, which are "ours" and "recipe"."""

    def __init__(self, engine: LezoEngine, inputs: Inputs, zo: ZoConfig) -> None:
        self._engine, self._inputs = engine.with_config(zo), inputs

    def step(self) -> float:
        """Do one step and return its first projected gradient; NaN if it was skipped. A collective."""
        batches = self._inputs.batches(self._engine.global_steps)
        record = self._engine.train_batch(batches, self._inputs.loss)
        return record.projected_grads[0] if record.applied else math.nan

    def num_tokens(self, step: int) -> int:
        return sum(batch.inputs["input_ids"].numel() for batch in self._inputs.batches(step))


def start_steps(
    variant: str, inputs: Inputs, *, plain: Callable[[], nn.Module], engine: Callable[[], LezoEngine]
) -> InPlaceSteps | EngineSteps:
    """Return the steps of a variant, which change the weights of `plain()` or of `engine()`."""
    kind, sparsity = parse_variant(variant)
    zo = inputs.zo(kind, sparsity)
    if kind == "mezo_reference":
        return InPlaceSteps(zo, plain_weights(plain()), inputs.published_batches, inputs.loss)
    if kind == "naive_zero3":
        return InPlaceSteps(zo, sharded_weights(engine()), inputs.published_batches, inputs.loss)
    return EngineSteps(engine(), inputs, zo)


def measure(inputs: Inputs, variants: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Return a row of COLUMNS for each variant. A collective."""
    plain = functools.cache(inputs.plain_model)
    engine = functools.cache(partial(make_engine, inputs.config))
    steps = {variant: start_steps(variant, inputs, plain=plain, engine=engine) for variant in variants}
    actions = {variant: partial(_checked_step, variant, entry) for variant, entry in steps.items()}
    for action in actions.values():
        for _ in range(WARM_UP_STEPS):
            action()
    times = interleaved(actions, rounds)
    versions, config = library_versions(), inputs.config
    shared = {
        "model": inputs.model,
        "task": config.data.task,
        "length": inputs.length,
        "batch": config.train.batch_size,
        "dtype": config.model.dtype,
        "update_precision": config.zo.update_precision,
        "partition_size": config.partition_size,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "lezo_ds": versions["lezo_ds"],
        "torch": versions["torch"],
        "ranks": distributed.world_size(),
        "rounds": rounds,
    }
    rows = []
    for variant, action in actions.items():
        ratios = [first / own for first, own in zip(times[variants[0]], times[variant], strict=True)]
        with distributed.counted_bytes() as counts:
            peak = peak_bytes(action)
        gathered = sum(count for operation, count in counts.items() if "all_gather" in operation)
        timed = range(WARM_UP_STEPS, WARM_UP_STEPS + rounds)
        row = {
            "variant": variant,
            "seconds": statistics.median(times[variant]),
            "ratio": statistics.median(ratios),
            "tokens": round(statistics.mean(map(steps[variant].num_tokens, timed))),
            "peak_bytes": peak,
            "gathered_bytes": gathered * distributed.world_size(),
        }
        rows.append(shared | row)
    return rows


def interleaved(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each action once per round, so that all of them see the same changes of the machine's speed."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            _synchronize()
            distributed.barrier()
            start = time.perf_counter()
            action()
            _synchronize()
            distributed.barrier()
            times[name].append(time.perf_counter() - start)
    return times


def peak_bytes(step: Callable[[], object]) -> int | None:
    """Run a step and return its peak memory above what was in use before; None on a CPU."""
    if distributed.device().type != "cuda":
        step()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what was measured as a line, and below it the results of each variant."""
    first = rows[0]
    names = ("model", "task", "length", "batch", "dtype", "update_precision", "partition_size", "ranks")
    lines = [", ".join(f"{name} {first[name]}" for name in names if first[name] is not None)]
    lines.append(
        f"{'variant':20} {'seconds':>9} {'ratio':>6} {'tokens':>8} {'peak GB':>8} {'gathered GB':>11}"
    )
    for row in rows:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.3f}"
        speed = f"{row['seconds']:9.4f} {row['ratio']:6.2f}"
        gathered = row["gathered_bytes"] / 1e9
        lines.append(f"{row['variant']:20} {speed} {row['tokens']:8} {peak:>8} {gathered:11.3f}")
    return "\n".join(lines)


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV, which is created if it does not exist."""
    make_directory(path.parent)
    exists = path.exists()
    if exists and path.read_text().partition("\n")[0] != ",".join(COLUMNS):
        raise UserError(f"{path} is not a table of benchmark results", fix="give another file")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not exists:
            writer.writeheader()
        writer.writerows(rows)


def _checked_step(variant: str, steps: InPlaceSteps | EngineSteps) -> None:
    gradient = steps.step()
    if gradient == 0 or not math.isfinite(gradient):
        raise LezoError(f"{variant} skipped its update (projected gradient {gradient}); use another dtype")


def _synchronize() -> None:
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()


def _machine() -> str:
    if distributed.device().type == "cuda":
        return torch.cuda.get_device_name()
    return distributed.cpu_name()
