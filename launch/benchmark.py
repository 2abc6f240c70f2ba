"""Times variants of one training step against each other, the writing of answers, or updates.

    python launch/benchmark.py mezo_reference ours:0 ours:0.75
    python launch/benchmark.py --config RECIPE mezo_reference recipe zo.sparsity=0.5
    deepspeed --num_gpus 2 launch/benchmark.py --config RECIPE ours:0 tensor_parallel:0
    python launch/benchmark.py --config RECIPE generate
    python launch/benchmark.py --rounds 50 update

A variant is one of

    mezo_reference[:SPARSITY]   MeZO as published, in plain PyTorch
    ours[:SPARSITY]             the papers' step of lezo_ds, on weights that ZeRO-3 shards
    tensor_parallel[:SPARSITY]  the same step, on weights that are split among all ranks
    low_rank[:SPARSITY]         a step of lezo_ds with a direction of rank 1
    int8, int4[:SPARSITY]       the papers' step, on a base in 8 or 4 bits; with peft.kind=lora
    recipe                      the step that the recipe describes
    generate                    alone: answers written by lezo_ds, and by transformers' generate
    update                      alone: one matrix updated by 16 directions of rank 1, and by one
                                dense direction

SPARSITY, 0 by default, is the share of the blocks that a step drops. Ratios are relative to the
first variant. Without --config, weights are random and examples are random tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import re
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import pandas as pd
import torch
from mezo_reference import MezoReference
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import DTYPES, resolve_model
from lezo_ds.cli import end_process_after
from lezo_ds.config import RunConfig, ZoConfig, check_world, load_config, make_law
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.generation import generate
from lezo_ds.data.objectives import classification_loss
from lezo_ds.data.task_data import load_task_data
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import LezoError, UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, to_device
from lezo_ds.forward.directions import directions_of
from lezo_ds.forward.probes import Perturbation
from lezo_ds.noise import Elements, UpdateTarget
from lezo_ds.runs.trainer import make_engine
from lezo_ds.tools.memory_plan import OPT_SHAPES, opt_config
from lezo_ds.zo.laws import DenseLaw, LowRankLaw
from lezo_ds.zo.updates import Update, UpdatePrecision

NUM_TOKENS = {"sst2": 32, "boolq": 200}
"""Tokens of a typical prompt and answer of a task, counted by OPT's tokenizer."""
NUM_UPDATE_DIRECTIONS = 16
UPDATE_SHAPE = (3072, 768)
WARM_UP_STEPS = 2
"""DeepSpeed records the order of the modules in the first pass, and prefetches weights after it."""
LAYOUTS = {
    "mezo_reference": "published",
    "ours": "ours",
    "tensor_parallel": "common",
    "low_rank": "ours",
    "int8": "ours",
    "int4": "ours",
    "recipe": "ours",
}
"""How the batch of a step is laid out for a kind of variant:

published: one micro-batch a rank, with a row for each candidate, examples in the order drawn
ours:      micro-batches of the recipe's size, and candidates of one token share a row
common:    the same rows as ours, in micro-batches that all ranks run together
"""
VARIANT = re.compile(
    r"(?P<kind>mezo_reference|ours|tensor_parallel|low_rank|int8|int4)(:(?P<sparsity>0|1|0?\.\d+))?"
    r"|recipe|generate|update"
)


class Variant(NamedTuple):
    """What is timed: a key of LAYOUTS, "generate" or "update", and the share of dropped blocks."""

    kind: str
    sparsity: float


@dataclass(frozen=True)
class Inputs:
    """A model and the batch of each step. All variants get the same examples.

    Attributes:
        config: The run that the steps belong to.
        title: The model and the length of its inputs, as a heading of the results.
        loss: Maps logits and a micro-batch to the loss of each example.
        batches: Maps a layout and the index of a step to the micro-batches of all ranks.
        engines: Those that were started, by the kind of a variant.
    """

    config: RunConfig
    title: str
    loss: LossFunction
    batches: Callable[[str, int], Sequence[MicroBatch]]

    engines: dict[str, LezoEngine] = field(default_factory=dict)

    def engine(self, kind: str) -> LezoEngine:
        """Return the engine of a kind of variant. Kinds with the same weights share one."""
        config = self.config
        match kind:
            case "tensor_parallel":
                ranks = distributed.world_size()
                config = config.model_copy(
                    update={"tensor_parallel": ranks, "partition_size": None, "deepspeed": None}
                )
            case "low_rank":  # trains nothing but matrices of the blocks
                config = config.with_section("zo", noise_rank=1)
            case "int8" | "int4":
                config = config.with_section("model", bits=int(kind[-1]))
            case _:
                kind = "ours"
        if kind not in self.engines:
            self.engines[kind] = make_engine(config)
        return self.engines[kind]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("variants", nargs="+", metavar="VARIANT", help="a variant, or key=value of the recipe")
    add("--config", metavar="RECIPE", help="measure the model and the batches of this recipe")
    add("--rounds", type=int, default=5, metavar="N", help="timed steps of a variant (default: 5)")
    add("--out", type=Path, metavar="FILE", help="write the results to this CSV")
    add("--shape", default="opt-125m", help="of a random model: opt-tiny, opt-125m ... opt-66b")
    add("--task", choices=NUM_TOKENS, default="sst2", help="32 or 200 random tokens an example")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    return parser.parse_intermixed_args()  # options and words may alternate


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the results and write them to a CSV file. A collective.

    Raises:
        UserError: The variants, or the recipe, cannot be measured.
    """
    changes = [word for word in arguments.variants if "=" in word]
    variants = [word for word in arguments.variants if "=" not in word]
    kinds = [parse_variant(word).kind for word in variants]
    needs_recipe = "recipe" in kinds or "generate" in kinds
    has_recipe = arguments.config is not None
    runs_alone = kinds in (["generate"], ["update"])
    is_mixed = not runs_alone and not {"generate", "update"}.isdisjoint(kinds)
    if not variants or (needs_recipe and not has_recipe) or is_mixed:
        problem = "the benchmark needs variants; recipe, and generate alone, need --config"
        raise UserError(problem, fix="python launch/benchmark.py mezo_reference ours:0 ours:0.75")
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds} is below 1", fix="give --rounds 5")
    distributed.init_distributed()
    if kinds == ["generate"]:
        speeds = answer_speeds(load_config(arguments.config, changes), arguments.rounds)
        if distributed.rank() == 0:
            print(speeds)
    elif kinds == ["update"]:
        print(update_times(arguments.rounds))
    elif has_recipe:
        show(recipe_inputs(load_config(arguments.config, changes)), variants, arguments)
    else:
        config = random_config(arguments.shape, arguments.task, changes)
        write = partial(write_random_model, arguments.shape, config.model.dtype)
        with folder_on_every_node(write) as folder:
            inputs = random_inputs(arguments.shape, arguments.task, config, folder)
            show(inputs, variants, arguments)


def show(inputs: Inputs, variants: Sequence[str], arguments: argparse.Namespace) -> None:
    """Measure variants; print the rows and write them to a CSV file on rank 0. A collective."""
    rows = measure(inputs, variants, arguments.rounds)
    if distributed.rank() == 0:
        print(f"{inputs.title}, {distributed.world_size()} ranks")
        print(rows.to_string(index=False, float_format="{:.4g}".format))
        if arguments.out is not None:
            rows.to_csv(arguments.out, index=False)


def parse_variant(word: str) -> Variant:
    """Return the variant that a word names: ("ours", 0.75) for "ours:0.75".

    Raises:
        UserError: No variant has this name, or the sparsity is not from 0 to 1.
    """
    match = VARIANT.fullmatch(word)
    if match is None:
        fix = "use mezo_reference, ours or tensor_parallel, as in ours:0.75; recipe, or generate"
        raise UserError(f"unknown variant {word}", fix=fix)
    return Variant(match["kind"] or word, float(match["sparsity"] or 0))


@cache
def plain_model(name: str, dtype: str) -> nn.Module:
    """Return a model as transformers loads it, whole on the device of each rank."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        resolve_model(name), dtype=DTYPES[dtype], trust_remote_code=False
    )
    return model.to(distributed.device()).eval().requires_grad_(False)


def recipe_inputs(config: RunConfig) -> Inputs:
    """Return a recipe's model and batches: real texts of unequal lengths.

    Raises:
        UserError: MeZO's code cannot do the recipe's steps.
    """
    trains_all_weights = config.peft.kind == "none" and not config.zo.only_blocks
    if not (trains_all_weights and config.train.objective == "task"):
        fix = "set peft.kind=none zo.only_blocks=false train.objective=task"
        raise UserError("the benchmark compares steps on all weights with MeZO's code", fix=fix)
    ranks = distributed.world_size()
    check_world(config, ranks)
    data = load_task_data(config)
    build_batch = data.objective.build_batch
    assert build_batch is not None, "an objective that reads logits"
    if build_batch is candidate_batch:
        build_batch = partial(candidate_batch, deduplicate=False)

    def published_batches(step: int) -> list[MicroBatch]:
        examples = [data.train.encoded[row] for row in data.step_rows(config, step)]
        return [
            build_batch(examples[rank::ranks], data.reader.tokenizer.pad_id)
            for rank in range(ranks)
        ]

    def batches(layout: str, step: int) -> Sequence[MicroBatch]:
        if layout == "published":
            return published_batches(step)
        size = config.train.micro_batch_size
        if layout == "common":
            size *= ranks  # so that a rank runs as many rows as with layout "ours"
        sized = config.with_section("train", micro_batch_size=size)
        return list(data.step_batch(sized, step))

    mean_length = round(statistics.mean(example.num_tokens for example in data.train.encoded))
    title = f"{Path(config.model.path).name}, {mean_length} tokens an example"
    return Inputs(config, title, data.loss, batches)


def random_config(shape: str, task: str, changes: Sequence[str]) -> RunConfig:
    """Return the run of a random model; its folder is not known yet."""
    if shape not in OPT_SHAPES:
        raise UserError(f"unknown --shape {shape}", fix=f"use one of {', '.join(OPT_SHAPES)}")
    keys = [
        "run_dir=none",
        "model.path=none",
        "model.dtype=fp32",
        f"data.task={task}",
        "zo.learning_rate=1e-7",
        "zo.sparsity=0",
        "train.steps=1",
    ]
    return load_config(None, [*keys, *changes])


@contextmanager
def folder_on_every_node(write: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a temporary folder that holds what `write` puts into it. A collective.

    Each node usually has a temporary directory of its own, but nodes may also share one. So rank 0
    only draws the folder's name. The rank that is the first to make the folder in its file system
    writes the files there, and removes them when all ranks have left the context.
    """
    # Nobody can guess the name, so nobody else can have prepared a link of this name.
    name = distributed.on_rank_zero(lambda: f"lezo_ds-{secrets.token_hex(16)}")
    folder = Path(gettempdir(), name)
    try:
        folder.mkdir(mode=0o700)
        is_owner = True
    except FileExistsError:
        is_owner = False
    try:
        if is_owner:
            write(folder)
        distributed.barrier()  # from here on, the files are complete on every node
        yield folder
        distributed.barrier()  # no rank reads them any more
    finally:
        if is_owner:
            shutil.rmtree(folder, ignore_errors=True)


def write_random_model(shape: str, dtype: str, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.device(distributed.device()):  # a GPU draws 13 billion numbers within seconds
        model = AutoModelForCausalLM.from_config(opt_config(shape), dtype=DTYPES[dtype])
    # The model's own save_pretrained writes nothing on ranks above 0 (transformers 5.23).
    model.config.save_pretrained(folder)
    weights = dict(model.named_parameters())  # without the head, which is tied
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_inputs(shape: str, task: str, config: RunConfig, folder: Path) -> Inputs:
    """Return the random model in `folder`, and one batch of random tokens of the same length."""
    config = config.model_copy(update={"run_dir": str(folder)})
    config = config.with_section("model", path=str(folder))
    num_tokens = NUM_TOKENS[task]
    generator = torch.Generator().manual_seed(num_tokens)
    # A prompt and the one token of a candidate are num_tokens together.
    prompts = torch.randint(
        low=3,  # OPT's tokens below 3 have a meaning
        high=opt_config(shape).vocab_size,
        size=(config.train.batch_size, num_tokens - 1),
        generator=generator,
    ).tolist()
    examples = [
        EncodedExample(
            sequences=((*prompt, 17), (*prompt, 42)),
            masks=((False,) * len(prompt) + (True,),) * 2,
            label=index % 2,
        )
        for index, prompt in enumerate(prompts)
    ]
    ranks = distributed.world_size()
    of_ranks = [examples[rank::ranks] for rank in range(ranks)]
    layouts = {
        "ours": [candidate_batch(own, pad_id=1) for own in of_ranks],
        "published": [candidate_batch(own, pad_id=1, deduplicate=False) for own in of_ranks],
        "common": [candidate_batch(examples, pad_id=1)],
    }

    def batches(layout: str, step: int) -> Sequence[MicroBatch]:
        return layouts[layout]

    title = f"{shape}, {num_tokens} tokens an example"
    return Inputs(config, title, classification_loss, batches)


def start_steps(word: str, inputs: Inputs) -> Callable[[], float]:
    """Return the function that does one step of a variant.

    The function returns the projected gradient along the step's first direction, and NaN if the
    step is skipped.
    """
    variant = parse_variant(word)
    zo = inputs.config.zo
    if variant.kind != "recipe":  # the papers' step
        zo = ZoConfig(
            sparsity=variant.sparsity,
            learning_rate=zo.learning_rate,
            perturbation_scale=zo.perturbation_scale,
            update_precision=zo.update_precision,
            noise_rank=1 if variant.kind == "low_rank" else 0,
        )
    if variant.kind == "mezo_reference":
        model = plain_model(inputs.config.model.path, inputs.config.model.dtype)
        reference = MezoReference(zo, model)
        step_indices = itertools.count()

        def published_step() -> float:
            batches = inputs.batches("published", next(step_indices))
            return reference.step(batches[distributed.rank()], inputs.loss)

        return published_step
    shared = inputs.engine(variant.kind)
    # Another engine on the same weights, with its own settings, at step 0.
    num_steps = inputs.config.train.steps
    directions = directions_of(make_law(zo))
    perturbed = shared._perturbed
    perturbed.directions = directions
    engine = LezoEngine((perturbed, shared.sharded), zo, shared.seed, num_steps)
    layout = LAYOUTS[variant.kind]

    def step() -> float:
        perturbed.directions = directions
        record = engine.train_batch(inputs.batches(layout, engine.global_steps), inputs.loss)
        return record.projected_grads[0] if record.applied else math.nan

    return step


def measure(inputs: Inputs, variants: Sequence[str], rounds: int) -> pd.DataFrame:
    """Time variants of a step, after their warm-up. A collective.

    Returns:
        A row for each variant: the median of its seconds, of the ratio to the first variant in the
        same round, the mean of the tokens of a step, and the peak of rank 0's memory above what is
        there before the step, in GB.

    Raises:
        LezoError: A variant skips its updates, which would make its steps shorter.
    """
    actions = {variant: start_steps(variant, inputs) for variant in variants}
    for variant, action in actions.items():
        gradients = [action() for _ in range(WARM_UP_STEPS)]
        if 0 in gradients or not all(map(math.isfinite, gradients)):
            problem = f"{variant} skips its updates (gradients {gradients}); use another dtype"
            raise LezoError(problem)
    times = interleaved(actions, rounds)
    rows = []
    for variant, action in actions.items():
        layout = LAYOUTS[parse_variant(variant).kind]
        timed_steps = range(WARM_UP_STEPS, WARM_UP_STEPS + rounds)
        num_tokens = [
            sum(micro_batch.inputs["input_ids"].numel() for micro_batch in batches)
            for batches in (inputs.batches(layout, step) for step in timed_steps)
        ]
        in_rounds = zip(times[variants[0]], times[variant], strict=True)
        ratios = [first / own for first, own in in_rounds]
        row = {
            "variant": variant,
            "seconds": statistics.median(times[variant]),
            "ratio": statistics.median(ratios),
            "tokens": round(statistics.mean(num_tokens)),
            "peak GB": peak_memory_of(action) / 1e9,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def interleaved(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each action once a round; return the seconds of each in all rounds. A collective.

    In this order, all actions see the same changes of the machine's speed.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            distributed.barrier()
            start = now()
            action()
            distributed.barrier()
            times[name].append(now() - start)
    return times


def now() -> float:
    """Return a clock in seconds, when the GPU has done what it was given."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def answer_speeds(config: RunConfig, rounds: int) -> str:
    """Time how a forward pass of a recipe writes answers, and how transformers does. A collective.

    All answers have the maximum length. Both write the same number of them: those of one
    micro-batch at the probes of a pass.

    Returns:
        Lines with the number of tokens, and for transformers and lezo_ds the tokens a second and
        the peak of memory above what is in memory before, which includes the model.
    """
    data = load_task_data(config)
    engine = make_engine(config)
    batch = data.step_batch(config, 0)
    step = engine.plan_step(batch)
    forward_pass = engine.workers.passes_of(engine.worker, step.passes)[0]
    prompts = to_device(batch[forward_pass.micro_batch], engine.device)
    if prompts.prompts is None:
        raise UserError("generate needs a recipe that trains on answers", fix="set train.objective")
    settings = replace(prompts.prompts.settings, stop_ids=(), has_ended=None)
    greedy = replace(prompts.prompts, settings=settings, sample_keys=None)
    prompts = replace(prompts, prompts=greedy)
    num_probes = len(forward_pass.probes)
    repeated = replace(
        prompts,
        inputs={name: torch.cat([rows] * num_probes) for name, rows in prompts.inputs.items()},
        prompts=replace(greedy, common_ids=None),
    )
    at_probes = Perturbation(forward_pass.probes, frozenset(step.plan.dropped_layers))
    plain = plain_model(config.model.path, config.model.dtype)
    # generate passes the last states of the prompts as a strided view, and torch would copy the
    # head's weight for each row of it.
    head: nn.Module = plain.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_pre_hook(lambda _, states: (states[0].contiguous(),))
    actions = {
        "generate": lambda: generate(plain, repeated),
        "ours": lambda: engine.run(prompts, at_probes),
    }
    with torch.no_grad():
        peaks = {name: peak_memory_of(action) for name, action in actions.items()}
        times = interleaved(actions, rounds)
    num_tokens = len(repeated.inputs["input_ids"]) * settings.max_new_tokens
    lines = [f"{num_tokens} tokens, {num_probes} probes"]
    for name, seconds in times.items():
        speed = num_tokens / min(seconds)
        ratio = min(times["generate"]) / min(seconds)
        speed_line = f"{name:9} {speed:6.0f} a second, ratio {ratio:.2f}"
        lines.append(f"{speed_line}, {peaks[name] / 1e9:.3f} GB above the model")
    num_bytes = sum(tensor.nbytes for tensor in plain.parameters())
    lines.append(f"one copy of the weights has {num_bytes / 1e9:.3f} GB")
    return "\n".join(lines)


def update_times(rounds: int) -> str:
    """Time updates of a matrix of OPT-125M: 16 directions of rank 1, and one dense direction.

    Returns:
        A line for each format of the weights, with the shortest milliseconds of each and the ratio.
    """
    many = [
        Update(key, coefficient=1e-4, begins_step=key == 0) for key in range(NUM_UPDATE_DIRECTIONS)
    ]
    one = [Update(key=0, coefficient=1e-4)]
    device = distributed.device()
    low_rank = directions_of(LowRankLaw("normal", rank=1))
    dense = directions_of(DenseLaw("normal"))
    formats: Mapping[str, tuple[torch.dtype, UpdatePrecision]] = {
        "fp32": (torch.float32, "fp32_master"),
        "bf16, fp32_master": (torch.bfloat16, "fp32_master"),
        "bf16, stochastic": (torch.bfloat16, "stochastic"),
    }
    lines = []
    for title, (dtype, precision) in formats.items():
        values = torch.randn(math.prod(UPDATE_SHAPE), device=device).mul_(0.02).to(dtype)
        low = None
        if dtype != torch.float32 and precision == "fp32_master":
            low = torch.zeros_like(values, dtype=torch.int16)
        target = [UpdateTarget(values, Elements.all_of(1, UPDATE_SHAPE), low)]
        actions = {
            "16 of rank 1": partial(low_rank.update, target, many, precision),
            "1 dense": partial(dense.update, target, one, precision),
        }
        interleaved(actions, rounds=3)
        times = {name: 1e3 * min(each) for name, each in interleaved(actions, rounds).items()}
        ratio = times["16 of rank 1"] / times["1 dense"]
        shown = ", ".join(f"{name} {shortest:.2f} ms" for name, shortest in times.items())
        lines.append(f"{title:17} {shown}, ratio {ratio:.2f}")
    return "\n".join(lines)


def peak_memory_of(action: Callable[[], object]) -> float:
    """Run an action; return the bytes by which memory rose at the most while it ran.

    It is the memory of the GPU or, without one, of this process, as Linux counts it.
    """
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    # The C library keeps freed memory. Given back, it counts again when the action uses it.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = resident_bytes("VmRSS")
    action()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """Return a field of Linux's status of this process, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    end_process_after(lambda: run(read_arguments()))
