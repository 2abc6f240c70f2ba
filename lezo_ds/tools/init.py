"""lezo-ds init: a commented recipe for a model and a file of records."""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import load_config
from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.data.tables import read_source
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.tasks.base import Record
from lezo_ds.tasks.template import field_text
from lezo_ds.tools.dry_run import dry_run

logger = logging.getLogger(__name__)

_FEWEST_RECORDS = 10
_MAX_LABELS = 200  # a column with more different values is not taken for labels, unless it is named
_MAX_LABEL_LENGTH = 60
_MANY_LABELS = 30
_WIDTH = 576
"""Hidden size of the demonstration's model. Weights of wider models are smaller by the root of the width, and
FZOO's perturbations and steps with them; LeZO's rates for OPT-1.3B to 30B follow its third power."""

_TEMPLATE = """\
# {title}. Written by lezo-ds init: check the prompt and the labels.
#
# Command: {command}
run_dir: {run_dir}

model:
  path: {model}
  dtype: {dtype}

data:
  train: {train}  # data.validation and data.test name other files
{task}  max_length: {max_length}  # tokens; longer inputs are cut

zo:
{zo}
train:
{objective}  steps: {steps}
  batch_size: 16  # examples in a step, over all ranks
  micro_batch_size: {micro_batch}
  eval_every: {eval_every}

deepspeed: {deepspeed}
"""
_FZOO = """\
  estimator: fzoo
  directions: 15  # with the weights as they are, 16 probes a step
  probes_per_pass: {probes}  # perturbed copies in a forward pass: 2 needs the least memory
  noise_distribution: rademacher
  layer_policy: fixed  # the last third of the blocks is trained, and nothing else
  sparsity: 0.6667
  only_blocks: true
  perturbation_scale: {scale:.2g}
  learning_rate: {rate:.2g}  # the demonstration's, at this width; if the loss grows, divide it by 3
  lr_schedule: linear  # falls to 0 at the last step
"""
_LEZO = """\
  learning_rate: {rate:.1g}  # the demonstration's, at this width; if the loss grows, divide it by 3
  perturbation_scale: 1.0e-3
  sparsity: {sparsity}  # the share of the transformer blocks that each step leaves out; 0 is MeZO
"""


def main(arguments: Namespace) -> None:
    target = arguments.out
    if target.exists():
        raise UserError(f"{target} exists", fix="give another --out, or remove it")
    if Path(arguments.model).is_file():
        fix = f"lezo-ds init {arguments.data} {arguments.model}"
        raise UserError(f"{arguments.model} is a file, not the directory of a model", fix=fix)
    distributed.init_distributed()
    rows = read_source("DATA", arguments.data)
    records = [
        record for _, record in rows if isinstance(record, Mapping)
    ]  # the dry run refuses the others
    directory = resolve_model(arguments.model)
    has_template = bool(load_tokenizer(str(directory)).backend.chat_template)
    columns = {"text": arguments.text, "label": arguments.label, "answer": arguments.answer}
    title, task = describe_task(records, **columns, reward=arguments.reward, in_chat=has_template)
    task |= {"skip_unusable": True} if arguments.skip_unusable else {}
    config = load_model_config(directory)
    on_gpu = distributed.device().type != "cpu"
    # A power of two, so that the ranks share the 16 probes of a step, or else its examples.
    ranks = min(16, 1 << torch.cuda.device_count().bit_length() - 1) if on_gpu else 1
    dtype = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "fp32"
    launcher = f"deepspeed --num_gpus {ranks} --module lezo_ds" if ranks > 1 else "lezo-ds"
    command = f"{launcher} train --config {target}"
    max_positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    is_fzoo = arguments.method == "fzoo"
    steps = num_steps(len(records)) if is_fzoo else 1000
    recipe = _TEMPLATE.format(
        title=" ".join(title.split()),
        command=command,
        run_dir=json.dumps(f"runs/{Path(arguments.data).stem}"),
        model=json.dumps(_relative(arguments.model, target)),
        dtype=dtype,
        train=json.dumps(_relative(arguments.data, target)),
        # JSON is YAML on one line.
        task="".join(
            f"  {key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in task.items()
        ),
        max_length=min(2048, max_positions),
        zo=_zo_keys(
            arguments.method, config.get_text_config().hidden_size, ranks, arguments.reward
        ),
        objective=f"  objective: {arguments.reward}  # judges answers\n"
        if arguments.reward
        else "",
        steps=steps,
        eval_every=steps // 5,
        micro_batch=16 if is_fzoo else 16 // ranks,
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


def num_steps(num_records: int) -> int:
    """Return the steps of about five passes over the records that train, 100 to 1,000: then FZOO overfits."""
    num_train = num_records - min(500, num_records // 5) - min(1000, num_records // 5)
    return max(100, min(1000, 5 * num_train // 16 // 10 * 10))


def _zo_keys(method: str, width: int, ranks: int, reward: str | None) -> str:
    shrink = min(1.0, (_WIDTH / width) ** 0.5)
    if method == "fzoo":
        scale = 1e-2 if reward else 5e-3  # fewer answers than losses change with the weights
        return _FZOO.format(probes=16 // max(2, ranks), scale=scale * shrink, rate=8e-3 * shrink)
    return _LEZO.format(rate=3e-5 * shrink**3, sparsity=0.75 if method == "lezo" else 0.0)


def describe_task(
    records: Sequence[Record],
    *,
    text: str | None = None,
    label: str | None = None,
    answer: str | None = None,
    reward: str | None = None,
    in_chat: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Return a title and the keys of the section `data` that describe the task of some records."""
    if len(records) < _FEWEST_RECORDS:
        fix = f"add records: {_FEWEST_RECORDS} at least, and better 30 of each kind"
        raise UserError(f"{len(records)} records are too few to train on and to score", fix=fix)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    for option, name in (("--text", text), ("--label", label), ("--answer", answer)):
        if name is not None and name not in columns:
            raise UserError(
                f"{option} {name} is not a column", fix=f"use one of {', '.join(columns)}"
            )
    messages = [name for name, values in columns.items() if any(map(_are_turns, values))]
    if len(messages) == 1 and text is None and label is None and answer is None:
        return f"Chat: the messages in {messages[0]}", {"messages": messages[0]}
    if answer is None and label is None and reward is None:
        label = _only("label", "few different values", _few_valued(columns, without=text))
    target = str(answer or label)
    if text is None:
        text = _only(
            "text", "texts", [n for n in columns if n != target and _are_texts(columns[n])]
        )
    template = {"chat_template": True} if in_chat else {}
    if reward is not None:
        return f"Answers to {text}, judged by {reward}", {"prompt": f"{{{text}}}", **template}
    prompt = f"{{{text}}}\n{target.replace('_', ' ').capitalize()}:"
    if answer is not None:
        title = f"Generation of {answer} from {text}"
        return title, {"prompt": prompt, "completion": f"{{{answer}}}", **template}
    labels = _labels(target, columns[target])
    task = {"prompt": prompt, "label_field": label, "labels": labels, **template}
    return f"Classification of {text} by {label}", task


def _labels(name: str, values: Sequence[object]) -> list[str]:
    """Return the labels in a column, sorted. Cells without one are left out."""
    labels = {field_text(name, value).strip() for value in values if value is not None} - {""}
    if len(labels) > len(values) / 2:
        what = f"the column {name} has {len(labels)} different labels in {len(values)} records"
        fix = f"add records of each class or, if the model shall write them, give --answer {name}"
        raise UserError(what, fix=fix)
    if len(labels) > _MANY_LABELS:
        text = "%d labels, each read after each example. With --answer %s, the model writes one: faster"
        logger.warning(text, len(labels), name)
    return sorted(labels)


def _few_valued(columns: Mapping[str, Sequence[object]], without: str | None) -> list[str]:
    """Return the columns of short values that repeat; those with one value only if there are no others."""
    sizes = {}
    for name, values in columns.items():
        labels = {field_text(name, value) for value in values if isinstance(value, str | int)} - {
            ""
        }
        is_short = max(map(len, labels), default=_MAX_LABEL_LENGTH + 1) <= _MAX_LABEL_LENGTH
        if name != without and is_short and len(labels) <= min(_MAX_LABELS, len(values) / 2):
            sizes[name] = len(labels)
    return [name for name, size in sizes.items() if size > 1] or list(sizes)


def _are_texts(values: Sequence[object]) -> bool:
    """Return whether most values are different strings of several words."""
    texts = {value for value in values if isinstance(value, str)}
    return (
        len(texts) > len(values) / 2 and sum(" " in text.strip() for text in texts) > len(texts) / 2
    )


def _are_turns(value: object) -> bool:
    turn = value[0] if isinstance(value, list) and value else None
    return isinstance(turn, Mapping) and not {"role", "from"}.isdisjoint(turn)


def _only(option: str, meaning: str, names: Sequence[str]) -> str:
    if len(names) != 1:
        listed = f"several columns hold {meaning}: {', '.join(names)}"
        fix = f"give --{option} COLUMN" + (
            ", or --answer COLUMN for texts to write" * (option == "label")
        )
        raise UserError(listed if names else f"no column holds {meaning}", fix=fix)
    return names[0]


def _relative(path: str, target: Path) -> str:
    """Return a path as the recipe has it: as it was written, or absolute for a recipe in another folder."""
    is_near = target.absolute().parent == Path.cwd()
    return path if is_near or not Path(path).exists() else os.path.abspath(path)  # noqa: PTH100 (links stay)
