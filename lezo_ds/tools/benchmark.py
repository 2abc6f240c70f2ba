"""Time variants of one step, which the command's help names, against each other in interleaved rounds."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.config import ZEROTH_ORDER, RunConfig, ZoConfig, check_world, load_config
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.generation import SAMPLE_KEYS, write_tokens
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import LezoError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, to_device
from lezo_ds.model.checkpoint import DTYPES, resolve_model
from lezo_ds.runs.trainer import make_engine
from lezo_ds.step import decide, perturbation
from lezo_ds.tools.memory_plan import OPT_SHAPES, opt_config
from lezo_ds.tools.mezo_reference import MezoReference
from lezo_ds.tools.time_plan import now

LENGTHS = {"sst2": 32, "boolq": 200}  # of a typical prompt and answer, in OPT's tokens
LAYOUTS = {
    "mezo_reference": "published",
    "tensor_parallel": "common",
}  # of the batches; ours for the others
WARM_UP_STEPS = (
    2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it
)


def main(arguments: Namespace) -> None:
    """Measure, print the rows and write them to a CSV. A collective."""
    changes = [word for word in arguments.variants if "=" in word]
    variants = [word for word in arguments.variants if "=" not in word]
    for variant in variants:
        parse_variant(variant)
    needs_recipe = not {"recipe", "generate"}.isdisjoint(variants)
    if not variants or (arguments.config is None and needs_recipe) or "generate" in variants[1:]:
        what = "the benchmark needs variants; recipe, and generate alone, need --config"
        raise UserError(what, fix="lezo-ds benchmark mezo_reference ours:0 ours:0.75")
    distributed.init_distributed()
    with ExitStack() as stack:
        if arguments.config is not None:
            config = load_config(arguments.config, changes)
            if variants == ["generate"]:
                speeds = answer_speeds(config, arguments.rounds)
                if distributed.rank() == 0:
                    print(speeds)
                return
            inputs = recipe_inputs(config)
        else:
            folder = distributed.on_rank_zero(
                lambda: stack.enter_context(tempfile.TemporaryDirectory())
            )
            inputs = random_inputs(arguments.shape, arguments.task, changes, Path(folder))
        rows = measure(inputs, variants, arguments.rounds)
        distributed.barrier()
    if distributed.rank() == 0:
        print(inputs.title, f"{distributed.world_size()} ranks", sep=", ")
        print(rows.to_string(index=False, float_format="{:.4g}".format))
        if arguments.out is not None:
            rows.to_csv(arguments.out, index=False)


def parse_variant(text: str) -> tuple[str, float]:
    """Return the kind of a variant and its sparsity: ("ours", 0.75) for "ours:0.75", 0 without a number."""
    if not re.fullmatch(
        r"(mezo_reference|ours|tensor_parallel)(:(0|1|0?\.\d+))?|recipe|generate", text
    ):
        fix = (
            "use mezo_reference, ours or tensor_parallel, also as in ours:0.75; recipe, or generate"
        )
        raise UserError(f"unknown variant {text}", fix=fix)
    kind, _, number = text.partition(":")
    return kind, float(number or 0)


@dataclass(frozen=True)
class Inputs:
    """A model and the batch of each step. Variants get the same examples, MeZO's code in the order drawn."""

    config: RunConfig
    title: str
    loss: LossFunction
    batches: Callable[[str, int], Sequence[MicroBatch]]  # of a layout and a step

    @cached_property
    def engine(self) -> LezoEngine:
        return make_engine(self.config)

    @cached_property
    def split_engine(self) -> LezoEngine:
        ranks = distributed.world_size()
        return make_engine(
            replace(self.config, tensor_parallel=ranks, partition_size=None, deepspeed=None)
        )


@cache
def plain_model(name: str, dtype: str) -> nn.Module:
    path, kind = resolve_model(name), DTYPES[dtype]
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=kind, trust_remote_code=False
    )
    return model.to(distributed.device()).eval().requires_grad_(False)


def recipe_inputs(config: RunConfig) -> Inputs:
    """Return a recipe's model and batches: real texts of unequal lengths."""
    supported = (
        config.method in ZEROTH_ORDER and config.peft.kind == "none" and not config.zo.only_blocks
    )
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

    def batches(layout: str, step: int) -> list[MicroBatch]:
        if layout == "published":
            examples = [data.train.encoded[row] for row in data.step_rows(config, step)]
            return [build(examples[rank::ranks], data.tokenizer.pad_id) for rank in range(ranks)]
        size = config.train.micro_batch_size * (ranks if layout == "common" else 1)
        shared = replace(config, train=replace(config.train, micro_batch_size=size))
        return list(data.step_batch(shared, step))

    length = round(statistics.mean(example.num_tokens for example in data.train.encoded))
    return Inputs(
        config, f"{Path(config.model.path).name}, {length} tokens an example", data.loss, batches
    )


def answer_speeds(config: RunConfig, rounds: int) -> str:
    """Time how a pass writes answers of the maximum length, and how transformers does. A collective."""
    data, engine = load_task_data(config), make_engine(config)
    batch = data.step_batch(config, 0)
    one = engine.passes_of_rank(distributed.rank(), len(batch))[0]
    prompts = to_device(batch[one.micro_batch], engine.device)
    if prompts.generation is None:
        raise UserError("generate needs a recipe that trains on answers", fix="set train.objective")
    settings = replace(prompts.generation, stop_ids=(), has_ended=None, sampling=None)
    rows = {name: values for name, values in prompts.inputs.items() if name != SAMPLE_KEYS}
    prompts = replace(prompts, inputs=rows, generation=settings)
    all_rows = {
        name: torch.cat([rows[name]] * len(one.probes)) for name in ("input_ids", "attention_mask")
    }
    change = perturbation(engine, decide(engine), one)
    plain = plain_model(config.model.path, config.model.dtype)
    # Of the last states of prompts, torch would multiply as many copies of the head's weight.
    head: nn.Module = plain.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_pre_hook(lambda _, states: (states[0].contiguous(),))
    actions = {
        "generate": lambda: write_tokens(plain, settings, **all_rows),
        "ours": lambda: engine.run(prompts, change),
    }
    with torch.no_grad():
        times = interleaved(actions, rounds)
    number = len(all_rows["input_ids"]) * settings.max_new_tokens
    best = {name: min(each) for name, each in times.items()}
    lines = [f"{number} tokens, {len(one.probes)} probes"]
    for name, seconds in best.items():
        lines.append(
            f"{name:9} {number / seconds:6.0f} a second, ratio {best['generate'] / seconds:.2f}"
        )
    return "\n".join(lines)


def random_inputs(shape: str, task: str, changes: Sequence[str], directory: Path) -> Inputs:
    """Return a random OPT, written to `directory`, and one batch of random tokens of the same length."""
    if shape not in OPT_SHAPES:
        raise UserError(f"unknown --shape {shape}", fix=f"use one of {', '.join(OPT_SHAPES)}")
    keys = [
        f"run_dir={directory}",
        f"model.path={directory}",
        "model.dtype=fp32",
        f"data.task={task}",
    ]
    keys += ["zo.learning_rate=1e-7", "zo.sparsity=0", "train.steps=1", *changes]
    config, opt, length = load_config(None, keys), opt_config(shape), LENGTHS[task]

    def write() -> None:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(opt, dtype=DTYPES[config.model.dtype]).save_pretrained(
            directory
        )

    distributed.on_rank_zero(write)
    generator = torch.Generator().manual_seed(length)
    size = (config.train.batch_size, length - 1)
    prompts = torch.randint(3, opt.vocab_size, size, generator=generator).tolist()
    examples = [
        EncodedExample(((*p, 17), (*p, 42)), (1, 1), i % 2, False) for i, p in enumerate(prompts)
    ]
    ranks = distributed.world_size()
    parts = [examples[rank::ranks] for rank in range(ranks)]
    layouts = {
        "ours": [candidate_batch(part, pad_id=1) for part in parts],
        "published": [candidate_batch(part, pad_id=1, deduplicate=False) for part in parts],
        "common": [candidate_batch(examples, pad_id=1)],
    }
    title = f"{shape}, {length} tokens an example"
    return Inputs(config, title, classification_loss, lambda layout, _: layouts[layout])


def start_steps(variant: str, inputs: Inputs) -> Callable[[], float]:
    """Return the function that does one step of a variant and returns its (first) projected gradient."""
    kind, sparsity = parse_variant(variant)
    zo = inputs.config.zo
    if kind != "recipe":  # the papers' step
        kept = ("learning_rate", "perturbation_scale", "update_precision")
        zo = ZoConfig(sparsity=sparsity, **{key: getattr(zo, key) for key in kept})
    if kind == "mezo_reference":
        model, rank, number = inputs.config.model, distributed.rank(), itertools.count()
        steps = MezoReference(zo, plain_model(model.path, model.dtype))
        return lambda: steps.step(inputs.batches("published", next(number))[rank], inputs.loss)
    engine = (inputs.split_engine if kind == "tensor_parallel" else inputs.engine).with_config(zo)
    layout = LAYOUTS.get(kind, "ours")

    def step() -> float:
        record = engine.train_batch(inputs.batches(layout, engine.global_steps), inputs.loss)
        return record.projected_grads[0] if record.applied else math.nan

    return step


def measure(inputs: Inputs, variants: Sequence[str], rounds: int) -> pd.DataFrame:
    """Return a row for each variant: medians, rank 0's memory and all ranks' bytes. A collective."""
    actions = {variant: start_steps(variant, inputs) for variant in variants}
    for variant, action in actions.items():
        gradients = [action() for _ in range(WARM_UP_STEPS)]
        if 0 in gradients or not all(map(math.isfinite, gradients)):
            raise LezoError(
                f"{variant} skips its updates (gradients {gradients}); use another dtype"
            )
    times = interleaved(actions, rounds)
    rows = []
    for variant, action in actions.items():
        layout = LAYOUTS.get(parse_variant(variant)[0], "ours")
        batches = [inputs.batches(layout, WARM_UP_STEPS + number) for number in range(rounds)]
        num_tokens = [sum(batch.inputs["input_ids"].numel() for batch in step) for step in batches]
        ratios = [
            first / own for first, own in zip(times[variants[0]], times[variant], strict=True)
        ]
        before = torch.cuda.memory_allocated()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with distributed.counted_bytes() as counts:
            action()
        moved = "all_reduce" if layout == "common" else "all_gather"
        gathered = sum(count for operation, count in counts.items() if operation.startswith(moved))
        row = {
            "variant": variant,
            "seconds": statistics.median(times[variant]),
            "ratio": statistics.median(ratios),
            "tokens": round(statistics.mean(num_tokens)),
            "peak GB": (torch.cuda.max_memory_allocated() - before) / 1e9,
            "gathered GB": gathered * distributed.world_size() / 1e9,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def interleaved(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each action once per round, so that all of them see the same changes of the machine's speed."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            distributed.barrier()
            start = now()
            action()
            distributed.barrier()
            times[name].append(now() - start)
    return times
