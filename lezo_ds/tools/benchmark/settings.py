"""What a benchmark measures: variants of a step, on random inputs of a given size or on a recipe."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import get_args

from lezo_ds.config import Dtype, RunConfig
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.tasks import TASKS
from lezo_ds.tools.arguments import positive
from lezo_ds.tools.opt_shapes import MAX_LENGTH, SHAPES
from lezo_ds.tools.workloads import Workload, typical_workload
from lezo_ds.zo.updates import UpdatePrecision

KINDS = ("mezo_reference", "naive_zero3", "ours", "recipe")


@dataclass(frozen=True)
class Variant:
    """One way to do a training step.

    Attributes:
        text: as on the command line: KIND[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]][@LEARNING_RATE]. Only
            "ours" has the second and third number, and "recipe" has none.
        kind: one of KINDS.
        sparsity: share of the blocks that a step drops, 0 to 1; 0 is MeZO. NaN for "recipe".
        probes_per_pass: perturbed copies of the batch in a forward pass, at least 1.
        directions: directions per step, at least 1.
        learning_rate: None for that of the inputs.
    """

    text: str
    kind: str
    sparsity: float = 0.0
    probes_per_pass: int = 2
    directions: int = 1
    learning_rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a variant.

        >>> Variant.parse("ours:0.75:1@1e-6") == Variant("ours:0.75:1@1e-6", "ours", 0.75, 1, 1, 1e-6)
        True

        Raises:
            UserError: there is no such variant.
        """
        named, at, rate = text.partition("@")
        kind, *numbers = named.split(":")
        try:
            learning_rate = float(rate) if at else None
            sparsity = float(numbers[0]) if numbers else 0.0
            probes_per_pass = int(numbers[1]) if len(numbers) > 1 else 2
            directions = int(numbers[2]) if len(numbers) > 2 else 1
        except ValueError:
            raise _unknown(text) from None
        known = kind in KINDS and len(numbers) <= {"ours": 3, "recipe": 0}.get(kind, 1)
        is_rate = learning_rate is None or 0 < learning_rate < math.inf
        if not known or not is_rate or not 0 <= sparsity <= 1 or min(probes_per_pass, directions) < 1:
            raise _unknown(text)
        if kind == "recipe":
            sparsity = math.nan
        return cls(text, kind, sparsity, probes_per_pass, directions, learning_rate)


def _unknown(text: str) -> UserError:
    return UserError(
        "unknown variant",
        got=text,
        expected="mezo_reference or naive_zero3 with [:SPARSITY], recipe, or "
        "ours[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]], each with [@LEARNING_RATE]; "
        "SPARSITY from 0 to 1, PROBES_PER_PASS and DIRECTIONS at least 1, LEARNING_RATE above 0",
        fix="for example mezo_reference ours:0 ours:0.75 ours:0.75:1",
    )


@dataclass(frozen=True)
class Setting:
    """Random inputs on which variants are measured; each attribute is a column of `table.COLUMNS`.

    `micro_batches` may be None for one per rank.
    """

    shape: str
    layers: int
    ds_config: str | None
    partition_size: int | None
    dtype: Dtype
    update_precision: UpdatePrecision
    task: str
    length: int
    batch: int
    micro_batches: int | None

    @property
    def workload(self) -> Workload:
        """Size of a step's batch."""
        return replace(typical_workload(TASKS.find(self.task)), length=self.length, batch_size=self.batch)


def typical_setting(shape: str, task: str) -> Setting:
    """Return fp32 weights of a shape, and inputs of a task's typical size, in any case of its letters."""
    workload = typical_workload(TASKS.find(task))
    return Setting(
        shape=shape,
        layers=SHAPES[shape].num_blocks,
        ds_config=None,
        partition_size=None,
        dtype="fp32",
        update_precision="fp32_master",
        task=task.lower(),
        length=workload.length,
        batch=workload.batch_size,
        micro_batches=None,
    )


@dataclass(frozen=True)
class Job:
    """What a command measures.

    Attributes:
        inputs: random inputs, or a recipe.
        variants: what is compared.
    """

    inputs: Setting | RunConfig
    variants: tuple[Variant, ...]

    @property
    def dtype(self) -> Dtype:
        """Type of the weights."""
        return self.inputs.dtype if isinstance(self.inputs, Setting) else self.inputs.model.dtype


_RANDOM_INPUTS = (
    *("shape", "layers", "ds_config", "partition_size", "task", "length"),
    *("micro_batches", "batch", "dtype", "update_precision"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read_job` reads."""
    recipe_help = "measure the model and the batches of this recipe, as for launch/train.py"
    parser.add_argument("--config", metavar="RECIPE", help=recipe_help)
    variants_help = "what is compared (ratios are relative to the first), or a change to a key of the recipe"
    parser.add_argument("variants", nargs="*", metavar="VARIANT | key=value", help=variants_help)
    random = parser.add_argument_group("random inputs of equal lengths, without --config")
    add = random.add_argument
    add("--shape", choices=SHAPES, help="size of the model (default: opt-125m)")
    add("--layers", type=positive, metavar="N", help="number of blocks (default: the shape's)")
    add("--ds-config", metavar="FILE", help="DeepSpeed JSON; see ds_configs")
    add("--partition-size", type=positive, metavar="N", help="number of ranks that share the weights")
    add("--task", help="use typical inputs of this task (default: sst2)")
    add("--length", type=positive, metavar="N", help="tokens per example (default: typical of the task)")
    add(
        "--micro-batches", type=positive, metavar="N", help="parts that our step runs (default: one per rank)"
    )
    add("--batch", type=positive, metavar="N", help="examples per step, over all ranks (default: 16)")
    add("--dtype", choices=get_args(Dtype), help="of the weights (default: fp32)")
    precision_help = "of 16-bit weights (default: fp32_master)"
    add("--update-precision", choices=get_args(UpdatePrecision), help=precision_help)


def read_job(arguments: argparse.Namespace) -> Job:
    """Return what the command asks for.

    Args:
        arguments: those of `add_arguments`.

    Raises:
        UserError: an unknown variant, task, recipe or key; a length that does not fit; nothing to measure; or
            arguments that exclude each other.
    """
    overrides = [text for text in arguments.variants if "=" in text]
    variants = tuple(Variant.parse(text) for text in arguments.variants if "=" not in text)
    if not variants:
        raise UserError(
            "nothing to measure",
            got="no variant",
            expected="variants",
            fix="for example mezo_reference ours:0 ours:0.75",
        )
    if arguments.config is None:
        if overrides:
            raise UserError(
                "key=value changes a recipe, but there is none",
                got=overrides[0],
                expected="--config RECIPE",
                fix="add --config, or use the options of random inputs (see --help)",
            )
        if any(variant.kind == "recipe" for variant in variants):
            raise UserError(
                "the variant recipe is a recipe's own step, but there is none",
                got="no --config",
                expected="--config RECIPE",
                fix="add --config, or use another variant",
            )
        return Job(_read_setting(arguments), variants)
    for name in _RANDOM_INPUTS:
        value = getattr(arguments, name)
        if value is not None:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} describes random inputs, but --config names a recipe",
                got=f"{option} {value} --config {arguments.config}",
                expected="one of them",
                fix="change the recipe with key=value, such as train.batch_size=16",
            )
    recipe = load_recipe(arguments.config, overrides)
    others = [variant.text for variant in variants if variant.kind in ("naive_zero3", "ours")]
    if recipe.zo.only_blocks and others:
        raise UserError(
            "the papers' steps also train weights outside the blocks, but this recipe does not",
            got=f"zo.only_blocks=true and {others[0]}",
            expected="recipe or mezo_reference",
            fix="leave out the other variants, or set zo.only_blocks=false",
        )
    return Job(recipe, variants)


def _read_setting(arguments: argparse.Namespace) -> Setting:
    given = {
        name: getattr(arguments, name) for name in _RANDOM_INPUTS if getattr(arguments, name) is not None
    }
    typical = typical_setting(given.pop("shape", "opt-125m"), given.pop("task", "sst2"))
    setting = replace(typical, **given)
    if not setting.workload.candidate_tokens < setting.length <= MAX_LENGTH:
        raise UserError(
            "--length does not fit",
            got=str(setting.length),
            expected=f"{setting.workload.candidate_tokens + 1} to {MAX_LENGTH} tokens",
            fix="give another --length",
        )
    return setting
