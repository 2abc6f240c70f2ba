"""The configuration of a run: every key, and strict reading of recipes and overrides."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from lezo_ds.errors import UserError
from lezo_ds.model.blocks import num_dropped_from_sparsity
from lezo_ds.noise.precision import UpdatePrecision
from lezo_ds.tasks import get_task
from lezo_ds.tasks.base import Protocol

Dtype = Literal["fp32", "bf16", "fp16"]
"""In which the weights are stored, gathered and multiplied."""

Method = Literal["lezo", "mezo", "adamw", "zero_shot", "icl"]
"""The rows of the papers' tables; zero_shot and icl (in-context learning) train nothing."""

ZEROTH_ORDER: frozenset[Method] = frozenset({"lezo", "mezo"})
TRAINED: frozenset[Method] = ZEROTH_ORDER | {"adamw"}

PeftKind = Literal["none", "lora", "prefix"]
"""What is trained: all weights, low-rank adapters, or key and value vectors before every sequence."""

Forward = Literal["dual", "two_pass"]
"""Both signs of a perturbation in one forward pass over a doubled batch, or one after the other."""

RESUME_MAY_DIFFER: frozenset[str] = frozenset(
    {
        "run_dir",
        "model.path",  # the model is checked by its fingerprint
        "data.path",
        "train.steps",  # may grow: no schedule depends on it
        "train.eval_batch_size",
        "train.snapshot_every",
        "train.keep_snapshots",
        "train.check_every",
        "train.timeout_seconds",
        "partition_size",
        "deepspeed",
    }
)
"""Dotted keys that may differ between a run and its resumption."""


@dataclass(frozen=True)
class Range:
    """Which numbers a key takes, written beside its type.

    Attributes:
        minimum: the least.
        maximum: the greatest; None for no limit.
        above: the minimum itself is left out.
    """

    minimum: int
    maximum: int | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        if value < self.minimum or (self.above and value == self.minimum):
            return False
        return self.maximum is None or value <= self.maximum

    def __str__(self) -> str:
        if self.maximum is not None:
            return f"{self.minimum} to {self.maximum}"
        return f"{'above' if self.above else 'at least'} {self.minimum}"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is tuned."""

    path: str
    """Hub id or directory of a decoder language model, in the Hugging Face layout."""

    dtype: Dtype
    """In which the weights are stored, gathered and multiplied; fp16 needs a GPU, or a CPU that has it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which examples it is tuned and scored on."""

    task: str = "SST2"
    """Name of the task, in upper or lower case."""

    path: str | None = None
    """Directory that holds the task's train and validation files (.jsonl or .parquet); null reads the hub."""

    protocol: Protocol = "clean"
    """Default split sizes: clean fits them to the task, mezo takes those of MeZO's published scripts."""

    num_train: Annotated[int | None, Range(1)] = None
    """Number of training examples; null for the protocol's."""

    num_dev: Annotated[int | None, Range(1)] = None
    """Number of examples whose loss picks the best step; null for the protocol's."""

    num_test: Annotated[int | None, Range(1)] = None
    """Number of examples of the final score, at most; null for the protocol's."""

    max_length: Annotated[int, Range(1)] = 2048
    """Longest input, in tokens; what is longer is cut on its left."""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Decides which examples are drawn for each split."""

    num_demonstrations: Annotated[int, Range(1)] = 32
    """Number of training examples shown before each question, with method icl."""

    calibrated: bool = False
    """Whether a candidate's log-probability behind an empty prompt is subtracted from its score."""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """Parameter-efficient fine-tuning: the model's own weights stay as they are."""

    kind: PeftKind = "none"
    """What is trained: all weights (none), low-rank adapters (lora), or key and value vectors before every
    sequence (prefix)."""

    lora_rank: Annotated[int, Range(1)] = 8
    """Rank r of the adapters."""

    lora_alpha: Annotated[float, Range(0, above=True)] = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""

    lora_targets: str = "q_proj,v_proj"
    """Names of the linear modules that get an adapter, with commas between them."""

    prefix_length: Annotated[int, Range(1)] = 5
    """Number of key and value vectors before every sequence, in each block."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """First-order fine-tuning, the papers' row FT; the learning rate falls linearly to 0."""

    learning_rate: Annotated[float, Range(0)] = 1e-5
    """At the first step."""

    weight_decay: Annotated[float, Range(0)] = 0.0
    """Decoupled weight decay."""

    epochs: Annotated[int, Range(1)] = 5
    """Number of passes over the training examples, where train.steps is null."""


@dataclass(frozen=True, kw_only=True)
class ZoConfig:
    """The zeroth-order optimizer (LeZO, Algorithm 1). Give exactly one of sparsity and num_dropped_layers."""

    learning_rate: Annotated[float | None, Range(0)] = None
    """eta, constant over the run; methods lezo and mezo need it."""

    perturbation_scale: Annotated[float, Range(0, above=True)] = 1e-3
    """mu, "eps" in the paper's tables: half the distance between the two losses, per unit of noise."""

    sparsity: Annotated[float | None, Range(0, 1)] = None
    """Share of the transformer blocks that a step leaves out; 0 is MeZO, 1 tunes what lies outside blocks."""

    num_dropped_layers: Annotated[int | None, Range(0)] = None
    """Number of transformer blocks that a step leaves out."""

    update_precision: UpdatePrecision = "fp32_master"
    """How an update is stored in 16-bit weights: fp32_master keeps their 16 low bits too (2 more bytes a
    parameter), stochastic rounds at random without bias, nearest loses most of a small update."""

    directions: Annotated[int, Range(1)] = 1
    """Number of directions whose estimates a step averages, each over the whole batch; N of them on N ranks
    take the time of one on one rank."""

    forward: Forward = "dual"
    """Both signs in one forward pass over a doubled batch, or in two_pass (the reference; gathers twice)."""

    outlier_factor: Annotated[float | None, Range(1, above=True)] = None
    """A step is skipped whose projected gradient is, in absolute value, more than so many times the median of
    the last 100 steps applied (at least 20); null skips none."""

    max_skipped_steps: Annotated[int, Range(1)] = 10
    """Number of steps in a row, skipped as their losses are not finite or outliers, that ends the run."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at once, and what happens between steps."""

    steps: Annotated[int | None, Range(1)] = None
    """Number of steps of the whole run; methods lezo and mezo need it, adamw also knows adamw.epochs."""

    batch_size: Annotated[int, Range(1)] = 16
    """Number of examples in a step, over all ranks."""

    micro_batch_size: Annotated[int, Range(1)] = 16
    """Number of examples in one forward pass of one rank; divides batch_size. Changing it changes the last
    bits of the losses, changing the number of ranks does not."""

    packed: bool = True
    """Whether examples of a forward pass share rows, for less padding, where the model keeps them apart (see
    lezo_ds/data/packing.py). It changes the last bits of the losses."""

    eval_batch_size: Annotated[int, Range(1)] = 16
    """Number of sequences in one forward pass of an evaluation: prompts, or prompts with a candidate."""

    eval_every: Annotated[int | None, Range(1)] = None
    """Number of steps between evaluations; null for a tenth of the run, as in the papers."""

    objective: str = "task"
    """What is minimised: the task's own loss (task), minus the mean F1 of generated answers (f1), or your own
    function (package.module:function; see lezo_ds/data/objectives.py)."""

    snapshot_every: Annotated[int | None, Range(0)] = None
    """Number of steps between snapshots; null for eval_every, 0 for none but the last."""

    keep_snapshots: Annotated[int, Range(1)] = 2
    """Number of snapshots kept, the newest."""

    check_every: Annotated[int, Range(1)] = 100
    """Number of steps between checks that each rank's weights are what the steps made of them; they are
    checked before each evaluation and snapshot too. What the ranks work on is compared at every step."""

    timeout_seconds: Annotated[int, Range(1)] = 1800
    """A run ends when a rank has not answered for so long; longer than writing a snapshot takes."""

    cpu_threads: Annotated[int, Range(1)] = 1
    """Number of threads of an operation, of each rank on a CPU. Results depend on it in their last bits,
    so it does not follow the number of cores. Beside a GPU a rank takes at least its share of the cores."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run."""

    run_dir: str
    """Directory of the run; one that exists is resumed."""

    seed: Annotated[int, Range(0, 2**64 - 1)] = 0
    """Decides the noise, the blocks left out and the order of the examples."""

    method: Method = "lezo"
    """lezo, mezo (lezo that drops no block), adamw (first-order), zero_shot or icl (no training)."""

    model: ModelConfig
    data: DataConfig
    zo: ZoConfig
    adamw: AdamWConfig
    peft: PeftConfig
    train: TrainConfig

    partition_size: Annotated[int | None, Range(1)] = None
    """Number of ranks that share the weights; it divides the number of ranks. Each such group holds the whole
    model and exchanges only scalars with the others: 1 where a GPU holds the model. Null for all ranks."""

    deepspeed: str | None = None
    """Path of the DeepSpeed JSON; see ds_configs. Null for ZeRO-3 with DeepSpeed's own settings."""


@dataclass(frozen=True)
class _Key:
    """One dotted key, as the dataclasses above declare it; `default` is MISSING where it is required."""

    name: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    range: Range | None
    default: Any
    text: str

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def expected(self) -> str:
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        kind = f"one of {', '.join(self.choices)}" if self.choices else names[self.kind]
        limits = f" {self.range}" if self.range else ""
        return kind + limits + (" or null" if self.optional else "")


def load_config(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Read a recipe and change it by `key=value` overrides.

    Args:
        path: YAML file; None takes everything from the overrides.
        overrides: dotted keys and YAML scalars, such as "zo.learning_rate=1e-6"; the last of a key counts.

    Raises:
        UserError: no such file, not YAML, an unknown, missing or repeated key, a value of the wrong type
            or out of range, or values that do not go together.
    """
    values = {} if path is None else flatten(_read_yaml(path))
    values.update(_parse_override(override) for override in overrides)
    sources = ([str(path)] if path else []) + (["the command line"] if overrides or not path else [])
    return _config_from_flat(values, " and ".join(sources))


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain dicts: what config.yaml and the journal hold."""
    return dataclasses.asdict(config)


def config_from_dict(values: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that nested plain dicts hold: the inverse of `config_to_dict`.

    Args:
        values: sections and keys; keys with a default may be left out.
        where: where they come from, for messages.
        overrides: as in `load_config`.

    Raises:
        UserError: as `load_config`.
    """
    flat = flatten(values) | dict(_parse_override(override) for override in overrides)
    return _config_from_flat(flat, where)


def describe() -> str:
    """Return every key with its type, range, default and meaning, as the help of the command shows it."""
    lines = []
    for key in _KEYS.values():
        default = "required" if key.required else f"default {_yaml_scalar(key.default)}"
        lines.append(f"{key.name}: {key.expected}; {default}")
        lines.append(textwrap.fill(key.text, 96, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse a batch, or a partition, that does not go evenly into the ranks.

    Args:
        config: of the run.
        world_size: number of ranks, at least 1.

    Raises:
        UserError: names the micro-batch sizes that would do, or batch sizes where none does; or
            partition_size does not divide the number of ranks.
    """
    if config.partition_size is not None and world_size % config.partition_size:
        raise UserError(
            "partition_size does not divide the number of ranks",
            got=f"partition_size={config.partition_size}, {world_size} ranks",
            expected=f"a divisor of {world_size}",
            fix="set partition_size=1, or null",
        )
    batch, micro, directions = config.train.batch_size, config.train.micro_batch_size, config.zo.directions
    if batch % micro == 0 and batch // micro * directions % world_size == 0:
        return
    sizes = [size for size in range(1, batch + 1) if batch % (size * world_size) == 0]
    if sizes:
        fix = "set train.micro_batch_size to one of " + ", ".join(map(str, sizes))
    else:
        above = math.ceil(batch / world_size) * world_size
        fix = f"set train.batch_size={above} train.micro_batch_size={above // world_size}, or use fewer ranks"
    raise UserError(
        f"a batch of {batch} does not split into micro-batches of {micro}, equally many for each rank",
        got=f"train.batch_size={batch}, train.micro_batch_size={micro}, {world_size} ranks",
        expected="train.batch_size a multiple of train.micro_batch_size times the number of ranks",
        fix=fix,
    )


def num_dropped(zo: ZoConfig, num_blocks: int) -> int:
    """Return how many of a model's `num_blocks` transformer blocks a step leaves out.

    Raises:
        UserError: more than there are.
    """
    if zo.num_dropped_layers is None:
        assert zo.sparsity is not None, "exactly one of the two is given"
        return num_dropped_from_sparsity(zo.sparsity, num_blocks)
    if zo.num_dropped_layers > num_blocks:
        raise UserError(
            "zo.num_dropped_layers is more than the model has blocks",
            got=zo.num_dropped_layers,
            expected=f"0 to {num_blocks}",
            fix=f"set zo.num_dropped_layers={num_dropped_from_sparsity(0.75, num_blocks)} (sparsity 0.75)",
        )
    return zo.num_dropped_layers


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys; an empty section (null in YAML) has none.

    >>> flatten({"seed": 1, "train": {"steps": 2}, "data": None})
    {'seed': 1, 'train.steps': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, key + ".")
        elif value is not None or key not in _SECTIONS:
            flat[key] = value
    return flat


def _config_from_flat(values: Mapping[str, Any], where: str) -> RunConfig:
    for name in values:
        if name not in _KEYS:
            raise _unknown_key(name, where)
    missing = [key for key in _KEYS.values() if key.required and key.name not in values]
    if missing:
        raise UserError(
            f"missing in {where}: {', '.join(key.name for key in missing)}",
            got="nothing",
            expected="; ".join(f"{key.name}, {key.expected}" for key in missing),
            fix=f"add it to the file, or {missing[0].name}=... on the command line",
        )
    checked = {name: _check_value(_KEYS[name], value, where) for name, value in values.items()}
    config: RunConfig = _build(RunConfig, checked, "")
    _check_together(config, where)
    if config.method == "mezo":
        return replace(config, zo=replace(config.zo, sparsity=0.0, num_dropped_layers=None))
    return config


def _build(section: type, values: Mapping[str, Any], prefix: str) -> Any:  # noqa: ANN401 (a dataclass)
    arguments: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(section)):
        key = prefix + name
        if key in _SECTIONS:
            arguments[name] = _build(_SECTIONS[key], values, key + ".")
        elif key in values:
            arguments[name] = values[key]
    return section(**arguments)


def _unknown_key(name: str, where: str) -> UserError:
    if name in _SECTIONS:
        keys = [key for key in _KEYS if key.startswith(name + ".")]
        return UserError(
            f"{name} in {where} is a section, not a value",
            got="a single value",
            expected="the keys " + ", ".join(keys),
            fix=f"write them below {name}:, or {keys[0]}=... on the command line",
        )
    section, _, leaf = name.rpartition(".")
    siblings = [key for key in _KEYS if key.rpartition(".")[0] == section]
    elsewhere = [key for key in _KEYS if key.rpartition(".")[2] == leaf]
    near = elsewhere or _nearest(name, siblings) or _nearest(name, _KEYS)
    return UserError(
        f"unknown key in {where}",
        got=name,
        expected="one of " + ", ".join(siblings or _KEYS),
        fix=f"did you mean {near[0]}?" if near else "remove it",
    )


def _nearest(name: str, candidates: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(candidates), n=1)


def _check_value(key: _Key, value: object, where: str) -> Any:  # noqa: ANN401 (one of the key's type)
    if value is None and key.optional:
        return None
    if key.kind is float:
        value = _as_float(value)
    fits = type(value) is key.kind and (not key.choices or value in key.choices)
    if fits and key.range is not None:
        fits = value in key.range  # type: ignore[operator]  # a number, or it would not have a range
    if fits:
        return value
    raise UserError(
        f"{key.name} in {where} is not valid",
        got=_shown(value),
        expected=key.expected,
        fix=_fix_of_value(key, value),
    )


def _fix_of_value(key: _Key, value: object) -> str:
    if key.choices:
        near = _nearest(str(value), key.choices)
        return f"did you mean {near[0]}?" if near else f"set {key.name} to one of these"
    if key.kind is str and value is not None:
        return f"write it in quotes ({key.name}='\"{value}\"' on the command line)"
    if key.required or key.default is None:
        return f"set {key.name} to {key.expected}"
    return f"set {key.name}={_yaml_scalar(key.default)}"


def _as_float(value: object) -> object:
    """Take whole numbers, and the 1e-6 that YAML 1.1 reads as text for want of a point, as floats."""
    scientific = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    if type(value) in (int, float) or scientific:
        number = float(value)  # type: ignore[arg-type]
        # "Not a number" and infinity are values of no key: as text they are refused.
        return number if math.isfinite(number) else str(number)
    return value


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def _check_together(config: RunConfig, where: str) -> None:
    get_task(config.data.task)
    if config.method in TRAINED:
        check_world(replace(config, partition_size=None), world_size=1)
    if config.method in ZEROTH_ORDER:
        _check_zeroth_order(config, where)


def _check_zeroth_order(config: RunConfig, where: str) -> None:
    zo = config.zo
    for key, value in (("zo.learning_rate", zo.learning_rate), ("train.steps", config.train.steps)):
        if value is None:
            raise UserError(
                f"missing in {where}: {key}",
                got="null",
                expected=f"{_KEYS[key].expected.removesuffix(' or null')}, with method {config.method}",
                fix=f"add it to the file, or {key}=... on the command line",
            )
    if config.method == "mezo":
        if zo.sparsity or zo.num_dropped_layers:
            raise UserError(
                f"method mezo in {where} drops no blocks",
                got=f"zo.sparsity={_yaml_scalar(zo.sparsity)}, "
                f"zo.num_dropped_layers={_yaml_scalar(zo.num_dropped_layers)}",
                expected="zo.sparsity 0 or null",
                fix="set zo.sparsity=0, or method=lezo",
            )
    elif (zo.sparsity is None) == (zo.num_dropped_layers is None):
        raise UserError(
            f"zo.sparsity and zo.num_dropped_layers in {where} say the same thing twice, or not at all",
            got=f"zo.sparsity={_yaml_scalar(zo.sparsity)}, "
            f"zo.num_dropped_layers={_yaml_scalar(zo.num_dropped_layers)}",
            expected="exactly one of the two",
            fix="give one and leave the other out (or null): zo.sparsity=0.75 zo.num_dropped_layers=null",
        )


def _parse_override(override: str) -> tuple[str, Any]:
    name, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", name):
        raise UserError(
            "an argument is not an override",
            got=override,
            expected="key=value, with a dotted key",
            fix="write for instance zo.learning_rate=1e-6",
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"the value of {name} on the command line is not YAML",
            got=text,
            expected="a number, text or null",
            fix=f"write it in quotes: {name}='\"...\"'",
        ) from error
    if isinstance(value, dict | list):
        raise UserError(
            f"the value of {name} on the command line is not a single value",
            got=text,
            expected="a number, text or null",
            fix="give each key of its own, as section.key=value",
        )
    return name, value


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), "", set())
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path}", got=str(error), expected="a YAML recipe", fix="see launch/recipes"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(
            f"{path} is not valid YAML",
            got=" ".join(str(error).split()),
            expected="key: value lines, each once, sections indented",
            fix="correct the line named; launch/recipes has examples",
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds no keys",
            got=type(values).__name__,
            expected="key: value lines",
            fix="see launch/recipes",
        )
    return values


def _refuse_repeated_keys(node: yaml.Node | None, prefix: str, seen: set[str]) -> None:
    """YAML forbids a repeated key, but safe_load silently keeps the last: half a recipe would be lost."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in seen:
            raise yaml.MarkedYAMLError(problem=f"repeated key {name}", problem_mark=key.start_mark)
        seen.add(name)
        _refuse_repeated_keys(value, name + ".", seen)


def _yaml_scalar(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys_of(section: type, prefix: str = "") -> list[_Key]:
    hints = get_type_hints(section, include_extras=True)
    texts = _field_docstrings(section)
    keys = []
    for field in dataclasses.fields(section):
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            keys += _keys_of(hints[field.name], name + ".")
        else:
            keys.append(_key_of(name, hints[field.name], field.default, texts[field.name]))
    return keys


def _key_of(name: str, hint: object, default: object, text: str) -> _Key:
    limits = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = str if choices else hint
    assert isinstance(kind, type), f"{name} has a type that _check_value does not know"
    return _Key(name, kind, choices, optional, limits, default, text)


def _field_docstrings(section: type) -> dict[str, str]:
    """Return the string that stands below each field in the source: Python itself throws it away."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    texts = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts


_SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in get_type_hints(RunConfig).items()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint)
}
_KEYS: dict[str, _Key] = {key.name: key for key in _keys_of(RunConfig)}
