"""lezo-ds init: a commented recipe for a model and a file of records."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.config import load_config
from lezo_ds.data.tables import read_source
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.model.checkpoint import build_on_meta, load_model_config, resolve_model
from lezo_ds.tasks.base import Record
from lezo_ds.tasks.template import field_text
from lezo_ds.tools.dry_run import dry_run

MAX_LABELS = 50  # a column with more different values holds texts
_MAX_LABEL_LENGTH = 60
_RATES = ((4e8, 3e-5), (1e9, 1e-5), (4e9, 3e-6), (float("inf"), 1e-6))
"""Numbers of parameters and the learning rate of models below them, for LeZO with sparsity 0.75. The first is
the demonstration's, the last two are the paper's for OPT-1.3B and for OPT-13B and 30B."""

_TEMPLATE = """\
# {title}. Written by lezo-ds init: check the prompt and the labels.
#
# Command: {command}
run_dir: runs/{name}

model:
  path: {model}
  dtype: {dtype}

data:
  train: {train}  # data.validation and data.test name other files
{task}  max_length: {max_length}  # tokens; longer inputs are cut on the left

zo:
  learning_rate: {rate}  # for {size:,} parameters; if the loss grows, divide it by 3
  perturbation_scale: 1.0e-3
  sparsity: 0.75  # the share of the transformer blocks that each step leaves out; 0 is MeZO

train:
  steps: 1000  # a start: the papers train for 20,000; more steps continue the same run
  batch_size: {batch}  # examples in a step, over all ranks
  micro_batch_size: {micro_batch}
  eval_every: 100

deepspeed: {deepspeed}
"""


def main(arguments: Namespace) -> None:
    """Write a recipe, check it as a run would, and print what it will do."""
    target = arguments.out
    if target.exists():
        raise UserError(f"{target} exists", fix="give another --out, or remove it")
    records = [record for _, record in read_source("DATA", arguments.data)]
    title, task = describe_task(records, text=arguments.text, label=arguments.label)
    directory = resolve_model(arguments.model)
    config = load_model_config(directory)
    size = sum(parameter.numel() for parameter in build_on_meta(config, torch.float32).parameters())
    on_gpu = distributed.device().type != "cpu"
    ranks = torch.cuda.device_count() if on_gpu else 1
    dtype = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "fp32"
    launcher = f"deepspeed --num_gpus {ranks} --module lezo_ds" if ranks > 1 else "lezo-ds"
    command = f"{launcher} train --config {target}"
    max_positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    recipe = _TEMPLATE.format(
        title=title,
        command=command,
        name=Path(arguments.data).stem,
        model=json.dumps(_relative(arguments.model, target)),
        dtype=dtype,
        train=json.dumps(_relative(arguments.data, target)),
        # JSON is YAML on one line.
        task="".join(f"  {key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in task.items()),
        max_length=min(2048, max_positions),
        rate=next(rate for limit, rate in _RATES if size < limit),
        size=size,
        batch=max(1, 16 // ranks) * ranks,
        micro_batch=max(1, 16 // ranks),
        deepspeed=f"zero3_{dtype}" if on_gpu else "zero3_cpu",
    )
    with failures_named(target):
        write_atomically(target, recipe)
    try:
        print(dry_run(load_config(target, []), num_gpus=ranks if on_gpu else None))
    except UserError:
        target.unlink()
        raise
    print(f"\n{target} is written; next: {command}")


def describe_task(
    records: Sequence[Record], *, text: str | None = None, label: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return a title and the keys of the section `data` that describe the task of some records."""
    columns = {name: [record.get(name) for record in records] for name in records[0]}
    for option, name in (("--text", text), ("--label", label)):
        if name is not None and name not in columns:
            raise UserError(f"{option} {name} is not a column", fix=f"use one of {', '.join(columns)}")
    messages = [name for name, values in columns.items() if _are_messages(values)]
    if len(messages) == 1 and text is None and label is None:
        return f"Chat: the messages in {messages[0]}", {"messages": messages[0]}
    if label is None:
        label = _only("label", "few different values", _few_valued(columns, without=text))
    if text is None:
        text = _only("text", "texts", [n for n in columns if n != label and _are_texts(columns[n])])
    labels = {field_text(label, value) for value in columns[label]}
    prompt = f"{{{text}}}\n{label.replace('_', ' ').capitalize()}:"
    if len(labels) > MAX_LABELS:
        return f"Generation of {label} from {text}", {"prompt": prompt, "completion": f"{{{label}}}"}
    task = {"prompt": prompt, "label_field": label, "labels": sorted(labels)}
    return f"Classification of {text} by {label}", task


def _few_valued(columns: Mapping[str, Sequence[object]], without: str | None) -> list[str]:
    names = []
    for name, values in columns.items():
        labels = {field_text(name, value) for value in values if isinstance(value, str | int)}
        is_label = 2 <= len(labels) <= min(MAX_LABELS, len(values) / 2)
        if name != without and is_label and max(map(len, labels)) <= _MAX_LABEL_LENGTH:
            names.append(name)
    return names


def _are_texts(values: Sequence[object]) -> bool:
    """Return whether most values are different strings of several words."""
    texts = {value for value in values if isinstance(value, str)}
    return len(texts) > len(values) / 2 and sum(" " in text.strip() for text in texts) > len(texts) / 2


def _are_messages(values: Sequence[object]) -> bool:
    first = values[0]
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict) and "role" in first[0]


def _only(option: str, meaning: str, names: Sequence[str]) -> str:
    if len(names) != 1:
        listed = f"several columns hold {meaning}: {', '.join(names)}"
        raise UserError(listed if names else f"no column holds {meaning}", fix=f"give --{option} COLUMN")
    return names[0]


def _relative(path: str, target: Path) -> str:
    """Return a path as the recipe has it: as it was written, or absolute for a recipe in another folder."""
    is_near = target.absolute().parent == Path.cwd()
    return path if is_near or not Path(path).exists() else os.path.abspath(path)  # noqa: PTH100 (links stay)
