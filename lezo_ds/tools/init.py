"""lezo-ds init: writes a commented recipe for a model and a table of records.

The task follows from the columns of the table (columns.py), the sizes of a step from the
number of records and GPUs, and the learning rate from the width of the model. On GPUs, the memory
plan chooses how they share the weights. On a CPU, a step that would take long is made smaller. A
dry run then checks the recipe before it is written. recipe.jinja is its template.
"""

from __future__ import annotations

import logging
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import Dtype, RunConfig, config_from_dict
from lezo_ds.config.run_config import tokens_of_turn
from lezo_ds.config.yaml_text import inline_yaml, load_written
from lezo_ds.data.batches import shared_candidates
from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.data.tables import READERS, UTF_8, kind_of
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import UserError, one_line, printable
from lezo_ds.files import filled_template, write_output
from lezo_ds.tasks.base import Record
from lezo_ds.tools.columns import answers_have_lines, describe_task, read_records
from lezo_ds.tools.dry_run import LONG_STEP, dry_run, measured_step
from lezo_ds.tools.memory_plan import GIB, Plan
from lezo_ds.tools.sizes import ModelSizes, measured_inputs

logger = logging.getLogger(__name__)

_BATCH_SIZE = 16
_MAX_RANKS = 16  # which share the 16 probes of FZOO's step, or the 16 examples of other steps
_MAX_STEPS = 1000
_MAX_STEPS_BY_EXAMPLE = 600
# Of each example, by the method. Others have one more than a size has directions.
_NUM_PROBES = {"evolution-strategies": 6, "lezo": 2, "mezo": 2}
_DEFAULT_POSITIONS = 2048

# Hidden size of the demonstration's model, whose scale and rates these recipes have. Weights of
# wider models are smaller by the root of the width, and FZOO's perturbations and steps with them.
# LeZO's rates for OPT-1.3B to 30B follow the third power of that root.
_WIDTH = 576
# A plan is accurate to 20 %, so it may use this part of a GPU's memory.
_USABLE_PART = 0.8

# bf16 rounds losses eight times as coarsely as fp16: with a perturbation scale of 1e-3, the error
# of the projected gradient is 41 % instead of 4.6 % (docs/opt-30b.md). So bf16 is for models whose
# activations leave the range of fp16. These are those that vLLM refuses in fp16 (vllm/config).
_BEYOND_FP16 = {"gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"}
# By the dtype, LeZO's scale. In bf16, the differences of losses must exceed its rounding.
_SCALES: Mapping[Dtype, float] = {"fp32": 1e-3, "fp16": 1e-3, "bf16": 5e-3}
_SHORTEST_TOKEN = 3  # letters of a token that stands for a label, unless it is a whole word of it

_TOKENS_NOTE = "# Labels are scored by a token of each; a list scores whole labels.\n"


class _StepSize(NamedTuple):
    """How much a step computes."""

    examples: int
    directions: int  # of FZOO, which has one probe more; a reward has one direction more

    def num_probes(self, method: str) -> int:
        """Return the number of probes of each example."""
        return _NUM_PROBES.get(method, self.directions + 1)


# From the best to the fastest.
_STEP_SIZES = (
    _StepSize(_BATCH_SIZE, 15),
    _StepSize(8, 15),
    _StepSize(4, 15),
    _StepSize(4, 7),
)


@dataclass(frozen=True)
class _Machine:
    """What the ranks of a run would compute with here.

    Attributes:
        num_ranks: One rank for each GPU, as far as ranks can share a step evenly; else 1.
        gpu_bytes: Memory of the smallest GPU; None if the ranks compute on CPUs.
        has_bf16: Whether the GPUs multiply bf16 by themselves.
    """

    num_ranks: int
    gpu_bytes: int | None
    has_bf16: bool

    def dtype_for(self, model_type: str) -> Dtype:
        """Return the type of the weights: the finest of 16 bits that holds the activations."""
        if self.gpu_bytes is None:
            return "fp32"
        return "bf16" if self.has_bf16 and model_type in _BEYOND_FP16 else "fp16"


@dataclass
class _Draft:
    """A recipe whose settings are found one after the other. Nothing is written meanwhile.

    Attributes:
        arguments: Those of the command.
        method: That of the run.
        machine: What the run will compute with.
        directory: The model's folder.
        task: Keys of the section `data` that describe the task.
        records: Of the table.
        heading: The first lines, which are comments.
        size: Of a step.
        sharing: Keys that follow from the memory of the GPUs.
    """

    arguments: Namespace
    method: str
    machine: _Machine
    directory: Path
    task: dict[str, Any]
    records: Sequence[Record]
    heading: str
    size: _StepSize = _STEP_SIZES[0]
    sharing: dict[str, object] = field(default_factory=dict)

    def config(self) -> RunConfig:
        """Return the configuration that the recipe stands for."""
        target = self.arguments.out
        return config_from_dict(load_written(_recipe(self)), str(target), folder=target.parent)

    def with_short_labels(self, data: TaskData) -> TaskData:
        """Let tokens stand for labels where that works. Return the data with them."""
        labels = self.task.get("labels")
        if labels is None or "choices" in self.task:
            return data
        shorter = _shorter_labels(labels, data)
        if shorter == labels:
            return data
        self.task["labels"] = shorter
        short_data = load_task_data(self.config())
        if max(short_data.train.encoded[0].option_lengths) == 1:
            self.heading += _TOKENS_NOTE
            return short_data
        # Alone, a token that follows a space in its label may be several tokens.
        self.task["labels"] = labels
        return data

    def fit(self, data: TaskData) -> tuple[float | None, str]:
        """Choose the size of a step on CPUs, or how GPUs share the weights.

        Return a step's seconds, if measured, and the problem, or "".
        """
        gpu_bytes = self.machine.gpu_bytes
        if gpu_bytes is None:
            return self.shorten_steps(data), ""
        plan = self._plan(data)
        best, problem = best_plan(plan, gpu_bytes)
        if problem:
            self.heading += f"# {problem}\n"
        self.sharing = best.keys_from(plan.config)
        if best.config.partition_size == best.num_ranks:
            del self.sharing["partition_size"]  # the default, for any number of ranks
        return None, problem

    def shorten_steps(self, data: TaskData) -> float | None:
        """Make a step cheaper that would take long. Return its seconds; None: not measured."""
        times = self._step_times(data)
        if not times:
            return None
        full_step = times[_STEP_SIZES[0]]
        if full_step <= LONG_STEP:
            return full_step
        short = [size for size in _STEP_SIZES if times[size] <= LONG_STEP]
        self.size = (*short, _STEP_SIZES[-1])[0]
        step = times[self.size]
        self.heading += (
            f"# A step takes about {step:.0f} s here; with {_BATCH_SIZE} examples and all "
            f"directions, it would take {full_step:.0f} s.\n"
        )
        return step

    def _step_times(self, data: TaskData) -> Mapping[_StepSize, float]:
        """Return the seconds of a step of each size, from one of the last size. {}: not measured.

        They are in proportion to examples and probes.
        """
        last = _STEP_SIZES[-1]
        seconds = measured_step(replace(self, size=last)._plan(data), data)
        if seconds is None:
            return {}
        times = {}
        for size in _STEP_SIZES:
            share = size.examples / last.examples
            share *= size.num_probes(self.method) / last.num_probes(self.method)
            times[size] = seconds * share
        return times

    def _plan(self, data: TaskData) -> Plan:
        config = self.config()
        model = ModelSizes(config, self.directory)
        inputs = measured_inputs(config, data)
        on_gpu = self.machine.gpu_bytes is not None
        return Plan(config, model, inputs, self.machine.num_ranks, on_gpu)


def main(arguments: Namespace) -> None:
    """Write the recipe, and print its dry run."""
    target = arguments.out
    if target.exists():
        raise UserError(f"{target} exists", fix="give another --out, or remove it")
    if Path(arguments.model).is_file() and kind_of(Path(arguments.model)) in READERS:
        fix = f"lezo-ds init {arguments.data} {arguments.model}"
        raise UserError(f"{arguments.model} is a file, not the directory of a model", fix=fix)
    distributed.init_distributed()
    records = read_records(arguments.data, arguments.encoding)
    directory = resolve_model(arguments.model)
    title, task = describe_task(
        records,
        text=arguments.text,
        label=arguments.label,
        answer=arguments.answer,
        reward=arguments.reward,
        in_chat=bool(load_tokenizer(str(directory)).backend.chat_template),
        label_map=dict(arguments.label_map),
    )
    if arguments.skip_unusable:
        task["skip_unusable"] = True
    if arguments.encoding != UTF_8:
        task["encoding"] = arguments.encoding
    machine = _this_machine()
    launcher = "lezo-ds"
    if machine.num_ranks > 1:
        launcher = f"deepspeed --num_gpus {machine.num_ranks} --module lezo_ds"
    command = f"{launcher} train --config {shlex.quote(str(target))}"
    title = one_line(title)
    heading = printable(f"# {title}. Check the prompt and the labels.\n# {command}\n")
    method = _method(arguments, task)
    draft = _Draft(arguments, method, machine, directory, task, records, heading)
    data = draft.with_short_labels(load_task_data(draft.config()))
    try:
        step_seconds, problem = draft.fit(data)
    except UserError as error:
        if arguments.method is not None or method != "evolution-strategies":
            raise
        reason, _, _ = str(error).partition("; fix: ")
        logger.warning("the recipe uses fzoo, because %s", reason)
        draft.method = "fzoo"
        step_seconds, problem = draft.fit(data)
    num_gpus = None if machine.gpu_bytes is None else machine.num_ranks
    ending = f"is written. {problem}." if problem else f"is written; next: {command}"
    for line in dry_run(draft.config(), num_gpus, step_seconds=step_seconds):
        print(line, flush=True)
    config = draft.config()
    if _has_head_to_fit(config, data):
        fit = f"{launcher} fit-head"
        out = shlex.quote(f"{config.run_dir}-fitted")
        after_run = f"{fit} --run {shlex.quote(config.run_dir)} --out {out}"
        model = shlex.quote(arguments.model)
        at_once = f"{fit} --model {model} --config {shlex.quote(str(target))} --out {out}"
        draft.heading += printable(
            f"# After the run, fit the output head to the labels:\n# {after_run}\n"
            f"# Or fit it without training, in minutes:\n# {at_once}\n"
        )
        if not problem:
            ending += f"; or, in minutes and without training: {at_once}"
    write_output(target, draft.heading + _recipe(draft))
    print(f"\n{target} {ending}")


def _has_head_to_fit(config: RunConfig, data: TaskData) -> bool:
    """Return whether `fit-head` can fit the output head of the run's model."""
    has_tokens = data.task.has_classes and shared_candidates(data.train.encoded) is not None
    return has_tokens and config.peft.kind == "none"


def _method(arguments: Namespace, task: Mapping[str, Any]) -> str:
    """Return the method that was asked for, or that which learns most in a time (docs/results.md).

    "population" is evolution-strategies for a reward, whose members write answers.
    """
    if arguments.reward is not None and arguments.method not in ("lezo", "mezo"):
        return "population"
    if arguments.method is not None:
        return str(arguments.method)
    has_labels = not {"labels", "choices"}.isdisjoint(task)
    return "evolution-strategies" if has_labels else "fzoo"


def best_plan(plan: Plan, gpu_bytes: float) -> tuple[Plan, str]:
    """Return the fastest way of a run to share the weights among GPUs of so many bytes.

    Where updates in two numbers do not fit, they are rounded at random, which needs no low bits.

    Returns:
        The plan of the run with this way, and "". If the GPUs cannot hold the weights, the plan
        with the weights in the host's memory, and what the problem is and what may help.
    """
    usable = _USABLE_PART * gpu_bytes
    stochastic = plan.changed(zo=replace(plan.config.zo, update_precision="stochastic"))
    for run, size in ((plan, usable), (stochastic, usable), (stochastic, gpu_bytes)):
        best = run.ways(size)[0]
        if best.fits(size):
            return best, ""
    offloaded = stochastic.offloaded(gpu_bytes)
    return offloaded, (
        f"It does not fit: a rank needs {best.peak / GIB:.1f} GiB of a GPU's "
        f"{gpu_bytes / GIB:.1f}, or {offloaded.peak / GIB:.1f} if each step moves all "
        "weights from the host's memory, which is slow; take more GPUs, or set model.bits=4 "
        "peft.kind=lora"
    )


def _shorter_labels(
    labels: list[str] | dict[str, str], data: TaskData
) -> list[str] | dict[str, str]:
    """Return labels with a token for the text of each, or as they are if one has none of its own.

    The model then scores all labels after one row of tokens, instead of a row for each label.

    Args:
        labels: The texts of the labels, or a map to them from the values of the column.
        data: The run's examples, with these labels.
    """
    example = data.train.encoded[0]
    if max(example.option_lengths) == 1:
        return labels
    lengths = zip(example.sequences, example.option_lengths, strict=True)
    options = [ids[-length:] for ids, length in lengths]
    counts = Counter(token for option in options for token in set(option))
    whole = labels if isinstance(labels, dict) else {label: label for label in labels}
    shorter = {}  # by the text of a label, which several values may have
    for label, option in zip(dict.fromkeys(whole.values()), options, strict=True):
        own = [data.tokenizer.decode([token]).strip() for token in option if counts[token] == 1]
        shorter[label] = shortened_label(label, own)
    different = {text.casefold() for text in shorter.values() if text}
    if len(different) < len(shorter):
        return labels
    return {value: shorter[label] for value, label in whole.items()}


def shortened_label(label: str, tokens: Sequence[str]) -> str:
    """Return the token that stands for a label, or "" if none does and all labels stay whole.

    It is the first one that is a whole word of the label, or begins one with enough letters to
    recall it. A single letter, as in b for billing, says nothing to a model.

    Args:
        label: The text of the label.
        tokens: The texts of its tokens that no other label has, in their order.

    >>> shortened_label("Rechnung offen", ["Rech", "nung", "offen"]), shortened_label("bug", ["b"])
    ('Rech', '')
    """
    for token in tokens:
        is_word = f" {token} " in f" {label} "
        begins_word = f" {token}" in f" {label}" and len(token) >= _SHORTEST_TOKEN
        if token and (is_word or begins_word):
            return token
    return ""


def _this_machine() -> _Machine:
    if distributed.device().type == "cpu":
        return _Machine(num_ranks=1, gpu_bytes=None, has_bf16=False)
    gpus = range(torch.cuda.device_count())
    # torch.cuda.is_bf16_supported() is also true where bf16 is emulated: on V100 (7.0), T4 (7.5).
    has_bf16 = all(torch.cuda.get_device_capability(gpu) >= (8, 0) for gpu in gpus)
    num_ranks = 1
    while 2 * num_ranks <= min(len(gpus), _MAX_RANKS):
        num_ranks *= 2
    return _Machine(
        num_ranks=num_ranks,
        gpu_bytes=min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus),
        has_bf16=has_bf16,
    )


def _recipe(draft: _Draft) -> str:
    """Return the recipe as YAML with comments, without its first lines."""
    size = draft.size
    machine = draft.machine
    task = draft.task
    decoder = load_model_config(draft.directory).get_text_config()
    dtype = machine.dtype_for(decoder.model_type)
    max_positions = getattr(decoder, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    max_length = min(_DEFAULT_POSITIONS, max_positions)
    has_lines = answers_have_lines(draft.records, task)
    steps = num_steps(len(draft.records), size.examples)
    if draft.method == "evolution-strategies":
        steps = min(_MAX_STEPS_BY_EXAMPLE, steps)
    elif draft.method in ("lezo", "mezo"):
        steps = _MAX_STEPS
    ranks_share_probes = draft.method in ("fzoo", "population")
    num_sharing = 1 if ranks_share_probes else machine.num_ranks
    return filled_template(
        Path(__file__).with_name("recipe.jinja"),
        draft=draft,
        yaml=inline_yaml,
        name=Path(draft.arguments.data).stem,
        dtype=dtype,
        max_length=max_length,
        in_turns=has_lines or "messages" in task or "chat_template" in task,
        tokens_of_turn=tokens_of_turn(max_length),
        shrinking=min(1.0, (_WIDTH / decoder.hidden_size) ** 0.5),
        batch_share=size.examples / _BATCH_SIZE,  # the best rate is in proportion (docs/results.md)
        lezo_scale=_SCALES[dtype],
        steps=steps,
        of_machine={
            "train.micro_batch_size": size.examples // num_sharing,
            "deepspeed": "zero3_cpu" if machine.gpu_bytes is None else f"zero3_{dtype}",
            **draft.sharing,
        },
    )


def num_steps(num_records: int, batch_size: int = _BATCH_SIZE) -> int:
    """Return the number of steps for a table: about five passes over the records that train.

    The number is a multiple of 10 from 100 to 1,000. With more steps, FZOO overfits.

    >>> [num_steps(num_records) for num_records in (30, 1667, 100_000)]
    [100, 310, 1000]
    """
    num_validation = min(500, num_records // 5)
    num_test = min(1000, num_records // 5)
    num_train = num_records - num_validation - num_test
    five_passes = 5 * num_train // batch_size
    return max(100, min(_MAX_STEPS, five_passes // 10 * 10))
