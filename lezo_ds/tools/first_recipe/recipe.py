"""A commented recipe for a model and a file that were looked at, for lezo-ds init."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.parquet import read_schema

from lezo_ds.config import RunConfig, config_from_dict
from lezo_ds.data.tables import read_source
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.recipes import commented_recipe
from lezo_ds.sharding.checkpoint_files import resolve_model
from lezo_ds.shipped import deepspeed_command
from lezo_ds.tools.first_recipe.columns import read_columns
from lezo_ds.tools.first_recipe.guess import Guess, guess_task
from lezo_ds.tools.first_recipe.machine import Machine, this_machine
from lezo_ds.tools.first_recipe.settings import first_settings, fitted, model_settings
from lezo_ds.tools.planning.model_sizes import ModelSizes, model_sizes

_OTHER_SPLITS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
_SECTIONS = ("run_dir", "model", "data", "zo", "train", "partition_size", "deepspeed")


@dataclass(frozen=True)
class FirstRecipe:
    """A recipe, and what to say about it.

    Attributes:
        text: the recipe as commented YAML.
        summary: what was guessed, in one line.
        commands: the next commands, with a heading each.
    """

    text: str
    summary: str
    commands: Mapping[str, str]


def write_first_recipe(model: str, source: str, target: Path, *, label: str | None = None) -> FirstRecipe:
    """Look at a model and a file of records, and write a recipe that trains the one on the other.

    The data is read, checked and tokenized as a run would do it. No weights are loaded.

    Args:
        model: directory of a model, or its hub id.
        source: file of records, or a split on the hub; see `read_source`.
        target: the recipe to write. There must be no such file.
        label: name of the field with the right answer; None to guess it.

    Raises:
        UserError: a file is missing or cannot be read, the task cannot be guessed, or the model does not fit.
    """
    _refuse_existing(target)
    columns, unusable = read_columns([record for _, record in read_source("DATA", source)])
    guess = guess_task(columns, label=label, names=_label_names(source))
    machine = this_machine()
    sources = {"train": source} | _other_files(source)
    is_near = target.absolute().parent == Path.cwd()
    settings, notes = first_settings(machine)
    values = {
        "run_dir": f"runs/{_run_name(source)}",
        "model.path": _as_written(model, is_near),
        **{f"data.{split}": _as_written(found, is_near) for split, found in sources.items()},
        **{f"data.{key}": value for key, value in guess.data.items()},
        **settings,
    }
    config = _configuration(values)
    sizes = model_sizes(config, resolve_model(config.model.path))
    values |= model_settings(sizes)
    data = load_task_data(_configuration(values))
    changed, memory = fitted(_configuration(values), data, sizes, machine)
    values |= changed
    notes |= {f"data.{key}": note for key, note in guess.notes.items()}
    notes |= _model_notes(sizes, data, values) | _split_notes(data, sources)
    command = shlex.join(_training(machine, target))
    text = commented_recipe(
        f"{guess.summary[:1].upper()}{guess.summary[1:]}, with {Path(model).name}",
        command,
        _about(
            guess,
            machine,
            memory,
            unused=[c.name for c in columns if c.name not in guess.used],
            unusable=unusable,
        ),
        _nested(values),
        notes,
    )
    with failures_named(target):
        write_atomically(target, text)
    return FirstRecipe(text, guess.summary, _next_commands(machine, target, values["run_dir"]))


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise UserError(
            f"{target} exists",
            got="a file" if target.is_file() else "a directory",
            expected="the name of a new file",
            fix="give another --out, or remove it",
        )
    if not target.absolute().parent.is_dir():
        raise UserError(
            f"the folder of {target} does not exist",
            got=str(target.parent),
            expected="a folder that exists",
            fix="make it, or give another --out",
        )


def _label_names(source: str) -> Mapping[str, Sequence[str]]:
    """Return the names of numbered labels that the data sets library has written into a parquet file."""
    if not source.endswith(".parquet"):
        return {}
    try:
        features = json.loads((read_schema(source).metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature["names"] for name, feature in features.items() if "names" in feature}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _other_files(source: str) -> dict[str, str]:
    """Return the files next to train.csv whose names say that they are its validation and test splits."""
    path, found = Path(source), {}
    for split, names in _OTHER_SPLITS.items():
        for name in names:
            other = path.with_name(re.sub("train", name, path.name))
            if "train" in path.name and split not in found and other.is_file():
                found[split] = str(other)
    return found


def _run_name(source: str) -> str:
    """Return tickets for data/tickets.csv, and the data set's name for a split of the hub."""
    hub_name, colon, _ = source.rpartition(":")
    return Path(hub_name if colon else source).stem.replace(" ", "-") or "first"


def _as_written(path: str, is_near: bool) -> str:
    """Return a path as the recipe has it: as it was given, or absolute for a recipe in another folder."""
    return path if is_near or not Path(path).exists() else os.path.abspath(path)  # noqa: PTH100 (links stay)


def _configuration(values: Mapping[str, Any]) -> RunConfig:
    return config_from_dict(values, "the recipe that was guessed")


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {name: {} for name in _SECTIONS}
    for key, value in values.items():
        section, dot, name = key.rpartition(".")
        (nested[section] if dot else nested)[name] = value
    return {name: value for name, value in nested.items() if value != {}}


def _model_notes(sizes: ModelSizes, data: TaskData, values: Mapping[str, Any]) -> dict[str, str]:
    examples = [example for split in (data.train, data.dev, data.test) for example in split.encoded]
    lengths = sorted(example.num_tokens for example in examples)
    limit = values["data.max_length"]
    note = f"the longest input has {lengths[-1]} tokens, half have at most {lengths[len(lengths) // 2]}"
    if num_cut := sum(length >= limit for length in lengths):
        note = f"{num_cut} of {len(lengths)} inputs have as many or more, and are cut on the left"
    rate = f"for {sizes.num_parameters:,} parameters; if the loss grows, divide it by 3"
    return {"data.max_length": note, "zo.learning_rate": rate}


def _split_notes(data: TaskData, sources: Mapping[str, str]) -> dict[str, str]:
    drawn = [name for name in ("validation", "test") if name not in sources]
    sizes = {"validation": len(data.dev.examples), "test": len(data.test.examples)}
    note = f"{len(data.train.examples)} records train"
    if drawn:
        shares = " and ".join(f"{sizes[name]} for {name}" for name in drawn)
        note += f"; {shares} are drawn by data.seed"
    return {"data.train": note}


def _about(
    guess: Guess, machine: Machine, memory: str, *, unused: Sequence[str], unusable: Sequence[str]
) -> dict[str, str]:
    about = {"Hardware": f"{machine}; {memory} (lezo-ds plan says what fits on given GPUs)."}
    about["Guessed"] = " ".join(guess.reasons)
    if unused:
        about["Not used"] = f"{', '.join(unused)}."
    if unusable:
        about["Unusable"] = f"{', '.join(map(repr, unusable))}: rename these to use them in a template."
    about["Check"] = "Change what was guessed wrong. lezo-ds train --help describes every key."
    return about


def _training(machine: Machine, target: Path) -> list[str]:
    config = ["--config", str(target)]
    if machine.num_ranks == 1:
        return ["lezo-ds", "train", *config]
    return [*deepspeed_command(machine.num_ranks), *config]


def _next_commands(machine: Machine, target: Path, run_dir: str) -> dict[str, str]:
    commands = {
        "check": ["lezo-ds", "train", "--config", str(target), "--dry-run"],
        "train": _training(machine, target),
        "export": ["lezo-ds", "export", "--run", run_dir, "--out", f"{run_dir}-model"],
        "report": ["lezo-ds", "report", run_dir],
    }
    return {heading: shlex.join(words) for heading, words in commands.items()}
