"""Time variants of one step against each other, in interleaved rounds.

The command's help names the variants. Ratios are relative to the first one.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.config import ZEROTH_ORDER, RunConfig, ZoConfig, check_world, config_from_dict, load_config
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.generation import SAMPLE_KEYS, write_tokens
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import make_directory
from lezo_ds.forward.batch import LossFunction, MicroBatch, to_device
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.model.checkpoint import DTYPES, resolve_model
from lezo_ds.runs.directory import library_versions
from lezo_ds.runs.trainer import make_engine
from lezo_ds.sharding import zero3
from lezo_ds.step import decide, perturbation
from lezo_ds.tools.memory_plan import OPT_SHAPES, opt_config
from lezo_ds.tools.mezo_reference import InPlaceSteps

LENGTHS = {"sst2": 32, "boolq": 200}
"""Tokens of a typical prompt and answer, in OPT's tokens."""

PUBLISHED = ("mezo_reference", "naive_zero3")
KINDS = (*PUBLISHED, "ours", "tensor_parallel", "recipe", "generate")
WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it


def main(arguments: Namespace) -> None:
    """Measure, print the rows and append them to a CSV. A collective."""
    changes = [word for word in arguments.variants if "=" in word]
    variants = [word for word in arguments.variants if "=" not in word]
    for variant in variants:
        parse_variant(variant)
    needs_recipe = changes or not {"recipe", "generate"}.isdisjoint(variants)
    if not variants or (arguments.config is None and needs_recipe) or "generate" in variants[1:]:
        what = "the benchmark needs variants; key=value, recipe, and generate alone need --config"
        raise UserError(what, fix="lezo-ds benchmark mezo_reference ours:0 ours:0.75")
    config = None if arguments.config is None else load_config(arguments.config, changes)
    distributed.init_distributed()
    if config is not None and "generate" in variants:
        print(answer_speeds(config, arguments.rounds))
        return
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
    """Return the kind of a variant and its sparsity: ("ours", 0.75) for "ours:0.75", 0 without a number."""
    kind, _, number = text.partition(":")
    try:
        sparsity = float(number or 0)
    except ValueError:
        sparsity = math.nan
    if kind not in KINDS or not 0 <= sparsity <= 1 or (kind in ("recipe", "generate") and number):
        raise UserError(f"unknown variant {text}", fix=f"use {', '.join(KINDS)}, such as ours:0.75")
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
    batches: Callable[[int], Sequence[MicroBatch]]
    published_batches: Callable[[int], Sequence[MicroBatch]]
    common_batches: Callable[[int], Sequence[MicroBatch]]  # of ranks that all run the same examples

    @cached_property
    def engine(self) -> LezoEngine:
        return make_engine(self.config)

    @cached_property
    def split_engine(self) -> LezoEngine:
        ranks = distributed.world_size()
        return make_engine(replace(self.config, tensor_parallel=ranks, partition_size=None, deepspeed=None))

    @cached_property
    def plain_model(self) -> nn.Module:
        return _plain_model(self.config)


def _plain_model(config: RunConfig) -> nn.Module:
    directory, dtype = resolve_model(config.model.path), DTYPES[config.model.dtype]
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=False)
    return model.to(distributed.device()).eval().requires_grad_(False)


def recipe_inputs(config: RunConfig) -> Inputs:
    """Return a recipe's model and batches: real texts of unequal lengths."""
    supported = config.method in ZEROTH_ORDER and config.peft.kind == "none" and not config.zo.only_blocks
    if not supported or config.train.objective != "task":
        fix = "set method=lezo peft.kind=none zo.only_blocks=false train.objective=task"
        raise UserError("the benchmark compares steps on all weights with MeZO's code", fix=fix)
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

    def ours(step: int) -> list[MicroBatch]:
        return list(data.step_batch(config, step))

    def common(step: int) -> list[MicroBatch]:
        size = config.train.micro_batch_size * ranks
        return list(
            data.step_batch(replace(config, train=replace(config.train, micro_batch_size=size)), step)
        )

    length = round(statistics.mean(example.num_tokens for example in data.train.encoded))
    return Inputs(config, Path(config.model.path).name, length, data.loss, ours, published, common)


def answer_speeds(config: RunConfig, rounds: int) -> str:
    """Time how a pass of a step writes answers, and how transformers does on as many sequences. A collective.

    Answers have the maximum length. The update and the reward are left out.
    """
    data, engine = load_task_data(config), make_engine(config)
    batch = data.step_batch(config, 0)
    one = engine.passes_of_rank(distributed.rank(), len(batch))[0]
    prompts = to_device(batch[one.micro_batch], engine.device)
    if prompts.generation is None:
        raise UserError(
            "generate compares answers, and this recipe trains on none", fix="set train.objective"
        )
    settings = replace(prompts.generation, stop_ids=(), has_ended=None, sampling=None)
    rows = {name: values for name, values in prompts.inputs.items() if name != SAMPLE_KEYS}
    prompts = replace(prompts, inputs=rows, generation=settings)
    all_rows = {name: torch.cat([values] * len(one.probes)) for name, values in rows.items()}
    change = perturbation(engine, decide(engine), one)
    plain = _plain_model(config)
    actions = {
        "generate": lambda: write_tokens(plain, settings, **all_rows),
        "ours": lambda: engine.run(prompts, change),
    }
    with torch.no_grad():
        times = interleaved(actions, rounds)
    number = len(all_rows["input_ids"]) * settings.max_new_tokens
    best = {name: min(seconds) for name, seconds in times.items()}
    lines = [
        f"{n:9} {number / s:6.0f} tokens a second, ratio {best['generate'] / s:.2f}" for n, s in best.items()
    ]
    return "\n".join([f"{number} tokens, {len(one.probes)} probes", *lines])


def random_inputs(setting: Namespace, directory: Path) -> Inputs:
    """Return a random OPT, written to `directory`, and one batch of random tokens of the same length."""
    if setting.shape not in OPT_SHAPES:
        raise UserError(f"unknown --shape {setting.shape}", fix=f"use one of {', '.join(OPT_SHAPES)}")
    config = config_from_dict(
        {
            "run_dir": str(directory),
            "model": {"path": str(directory), "dtype": setting.dtype},
            "data": {"task": setting.task},
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
    prompts = torch.randint(3, shape.vocab_size, (setting.batch, length - 1), generator=generator).tolist()
    examples = [EncodedExample(((*p, 17), (*p, 42)), (1, 1), i % 2, False) for i, p in enumerate(prompts)]
    parts = [examples[rank::ranks] for rank in range(ranks)]
    ours = [candidate_batch(part, pad_id=1) for part in parts]
    published = [candidate_batch(part, pad_id=1, deduplicate=False) for part in parts]
    common = [candidate_batch(examples, pad_id=1)]
    name = setting.shape if setting.layers is None else f"{setting.shape} with {setting.layers} blocks"
    batches = (ours, published, common)
    return Inputs(config, name, length, classification_loss, *(partial(_constant, one) for one in batches))


def _constant(batches: Sequence[MicroBatch], _: int) -> Sequence[MicroBatch]:
    return batches


def start_steps(variant: str, inputs: Inputs) -> Callable[[], float]:
    """Return the function that does one step of a variant and returns its (first) projected gradient."""
    kind, sparsity = parse_variant(variant)
    zo = inputs.config.zo
    if kind != "recipe":  # the papers' step
        zo = ZoConfig(
            learning_rate=zo.learning_rate,
            perturbation_scale=zo.perturbation_scale,
            update_precision=zo.update_precision,
            sparsity=sparsity,
        )
    if kind in PUBLISHED:
        is_plain, number = kind == "mezo_reference", itertools.count()
        steps = mezo_reference(zo, inputs.plain_model) if is_plain else naive_zero3(zo, inputs.engine)
        return lambda: steps.step(inputs.published_batches(next(number))[distributed.rank()], inputs.loss)
    is_split = kind == "tensor_parallel"
    engine = (inputs.split_engine if is_split else inputs.engine).with_config(zo)
    batches = inputs.common_batches if is_split else inputs.batches

    def step() -> float:
        record = engine.train_batch(batches(engine.global_steps), inputs.loss)
        return record.projected_grads[0] if record.applied else math.nan

    return step


def mezo_reference(zo: ZoConfig, model: nn.Module) -> InPlaceSteps:
    """Return MeZO's steps on every rank's own model.

    What differs from the published code is to its advantage: no mask, as the padding is on the right, and a
    loss of the candidates' tokens alone.
    """
    layout = find_blocks(model)
    weights = [(values, layout.block_of(name)) for name, values in model.named_parameters()]

    def forward(batch: MicroBatch) -> Tensor:
        logits: Tensor = model(**batch.inputs).logits
        return logits

    return InPlaceSteps(zo, weights, layout.num_blocks, forward, published=True)


def naive_zero3(zo: ZoConfig, engine: LezoEngine) -> InPlaceSteps:
    """Return MeZO's steps as one would first write them on ZeRO-3, on the shards."""
    weights = []
    for parameter in engine.weights.parameters:
        with parameter.shard() as shard:  # the view stays valid, except for weights on NVMe
            if parameter.count:
                weights.append((shard, parameter.named.block))

    def forward(batch: MicroBatch) -> Tensor:
        zero3.finish_updates()  # DeepSpeed gathers on another stream, and the shards have just been perturbed
        return engine.forward(replace(batch, selection=None))

    return InPlaceSteps(zo, weights, engine.layout.num_blocks, forward, published=False)


def measure(inputs: Inputs, variants: Sequence[str], rounds: int) -> pd.DataFrame:
    """Return a row for each variant. A collective.

    seconds is the median of the rounds; ratio is the median of the first variant's time by this one's; tokens
    are those of a step's batch, padding included; the bytes are rank 0's in one step.
    """
    actions = {variant: partial(_checked_step, variant, start_steps(variant, inputs)) for variant in variants}
    for action in actions.values():
        for _ in range(WARM_UP_STEPS):
            action()
    times = interleaved(actions, rounds)
    is_on_gpu = distributed.device().type == "cuda"
    versions, config = library_versions(), inputs.config
    shared = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if is_on_gpu else distributed.cpu_name(),
        "lezo_ds": versions["lezo_ds"],
        "torch": versions["torch"],
        "ranks": distributed.world_size(),
        "model": inputs.model,
        "task": config.data.task,
        "length": inputs.length,
        "batch": config.train.batch_size,
        "dtype": config.model.dtype,
        "update_precision": config.zo.update_precision,
        "partition_size": config.partition_size,
        "rounds": rounds,
    }
    rows = []
    for variant, action in actions.items():
        is_published = parse_variant(variant)[0] in PUBLISHED
        batches = inputs.published_batches if is_published else inputs.batches
        timed = range(WARM_UP_STEPS, WARM_UP_STEPS + rounds)
        ratios = [first / own for first, own in zip(times[variants[0]], times[variant], strict=True)]
        with distributed.counted_bytes() as counts:
            peak = peak_bytes(action)
        # Of weights; or of activations, besides the few bytes of the losses.
        is_split = parse_variant(variant)[0] == "tensor_parallel"
        moved = "all_reduce" if is_split else "all_gather"
        gathered = sum(count for operation, count in counts.items() if operation.startswith(moved))
        row = {
            "variant": variant,
            "seconds": statistics.median(times[variant]),
            "ratio": statistics.median(ratios),
            "tokens": round(statistics.mean(_num_tokens(batches(step)) for step in timed)),
            "peak_bytes": peak,
            "gathered_bytes": gathered * distributed.world_size(),
        }
        rows.append(shared | row)
    return pd.DataFrame(rows)


def interleaved(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each action once per round, so that all of them see the same changes of the machine's speed."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            start = _now()
            action()
            times[name].append(_now() - start)
    return times


def peak_bytes(step: Callable[[], object]) -> int | None:
    """Do a step and return its peak memory above what was in use before; None on a CPU."""
    if distributed.device().type != "cuda":
        step()
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def table(rows: pd.DataFrame) -> str:
    """Return what was measured as a line, and below it the results of each variant."""
    names = ["model", "task", "length", "batch", "dtype", "update_precision", "partition_size", "ranks"]
    first = rows.iloc[0].dropna()
    shown = rows[["variant", "seconds", "ratio", "tokens"]].assign(
        **{"peak GB": rows["peak_bytes"].astype(float) / 1e9, "gathered GB": rows["gathered_bytes"] / 1e9}
    )
    setting = ", ".join(f"{name} {first[name]}" for name in names if name in first)
    return f"{setting}\n{shown.to_string(index=False, na_rep='-', float_format='{:.4g}'.format)}"


def append(path: Path, rows: pd.DataFrame) -> None:
    """Add rows to a CSV, which is created if it does not exist."""
    make_directory(path.parent)
    exists = path.exists()
    if exists and path.read_text().partition("\n")[0] != ",".join(rows):
        raise UserError(f"{path} is not a table of benchmark results", fix="give another file")
    rows.to_csv(path, mode="a", header=not exists, index=False)


def _checked_step(variant: str, step: Callable[[], float]) -> None:
    gradient = step()
    if gradient == 0 or not math.isfinite(gradient):
        raise LezoError(f"{variant} skipped its update (projected gradient {gradient}); use another dtype")


def _num_tokens(batches: Iterable[MicroBatch]) -> int:
    return sum(batch.inputs["input_ids"].numel() for batch in batches)


def _now() -> float:
    """Return the time at which all ranks are done with their work."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
    distributed.barrier()
    return time.perf_counter()
