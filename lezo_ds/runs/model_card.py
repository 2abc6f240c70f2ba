"""The README.md of an exported model, in the form of the hub's model cards.

Its header has what the hub reads (license, base model, data sets); its text says how the model was
trained, its scores, and how to load, serve and share it. A journal may come from anyone, so no
string of a run acts as Markdown, HTML or YAML in a card. Cards are filled from model_card.jinja,
and from head_card.jinja for `fit-head`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.checkpoints.sharded_model import BaseModel
from lezo_ds.config import RunConfig, flatten, keys_with, load_yaml
from lezo_ds.config.paths import public_name, split_revision
from lezo_ds.data.chat import end_of_turn, lead_of_answers
from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.files import DAMAGE, filled_template
from lezo_ds.runs.records import RecordedRun, evaluations_of, is_worse_than_base
from lezo_ds.runs.screen import WORSE

_LICENSE = ("license", "license_name", "license_link")
_TRAINED = {"none": "all weights", "lora": "low-rank adapters", "prefix": "a prefix in each block"}
_LIBRARIES = {"none": "transformers", "lora": "peft", "prefix": "lezo_ds"}
_AUTO_CLASS = "AutoModelForCausalLM"
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes as the largest rank of an adapter."""


def model_card(
    run: RecordedRun,
    step: int,
    weights_sha256: str,
    *,
    merged: bool = False,
    opened_by: str = _AUTO_CLASS,
    license_of: Path | None = None,
) -> str:
    """Return the README.md of an exported model.

    Args:
        run: the run.
        step: number of updates that the weights have seen.
        weights_sha256: what `sha256sum *.safetensors | sha256sum` prints in the model's directory.
        merged: whether the adapter of the run is part of the weights.
        opened_by: the name of the class of transformers that opens the model.
        license_of: the directory of the base model, whose own card may name a license.
    """
    config = run.config
    data = config.data
    kind = "none" if merged else config.peft.kind
    name, revision = split_revision(config.model.path)
    base = plain(public_name(name))
    options = data.chat_template_kwargs
    has_candidates = data.labels is not None or data.choices is not None
    has_example = kind == "none" and has_candidates
    begin_ids: Sequence[int] = ()
    ends: set[int] = set()
    lead = None
    if has_example or data.in_chat:
        tokenizer = load_tokenizer(str(resolve_model(config.model.path)), None, options)
        begin_ids = tokenizer.begin_ids
        ends = set(tokenizer.end_ids)
        if data.in_chat:
            ends |= set(end_of_turn(tokenizer).ids)
            if has_example:
                lead = lead_of_answers(tokenizer, data.system_prompt)
    return filled_template(
        Path(__file__).with_name("model_card.jinja"),
        config=config,
        header=_header(config, _LIBRARIES[kind], opened_by, license_of).to_yaml(),
        base=base,
        loaded=base if revision is None else f'{base}", revision="{plain(revision)}',
        task=plain(data.task),
        trained=_TRAINED[config.peft.kind],
        merged=merged,
        kind=kind,
        step=step,
        num_steps=run.num_steps,
        worse=WORSE if is_worse_than_base(evaluations_of(run.records)) else "",
        scores=_scores(run),
        vllm_rank=_vllm_rank(config.peft.lora_rank),
        weights_sha256=weights_sha256,
        opened_by=opened_by,
        has_example=has_example,
        begin_ids=list(begin_ids),
        lead=lead,
        ends=sorted(ends),
        options="".join(f"{name}={value!r}, " for name, value in options.items()),
    )


def head_card(
    base: BaseModel,
    source: Mapping[str, object],
    metric: str,
    scores: Mapping[str, Any],
    is_changed: bool,
    weights_sha256: str,
) -> str:
    """Return the README.md of a model whose output head was fitted to labels.

    Args:
        base: the model on disk.
        source: what was opened, such as a run and a step.
        metric: of the task.
        scores: by split, what `runs.fit_head` has changed.
        is_changed: whether any fit helped.
        weights_sha256: as of `model_card`.
    """
    name, _ = split_revision(base.name)
    header = ModelCardData(
        library_name=_LIBRARIES["none"],
        tags=["lezo_ds"],
        base_model=_hub_name(name),
        **_license(base.directory),
    )
    return filled_template(
        Path(__file__).with_name("head_card.jinja"),
        header=header.to_yaml(),
        base=plain(public_name(name)),
        step=source.get("step"),
        metric=plain(metric),
        scores=scores,
        is_changed=is_changed,
        weights_sha256=weights_sha256,
    )


def _header(
    config: RunConfig, library: str, opened_by: str, license_of: Path | None
) -> ModelCardData:
    """Return what the hub reads of a card."""
    name, _ = split_revision(config.model.path)
    values = flatten(config.model_dump())
    sources = [
        (values[key] or "").partition(":")[0]
        for key in keys_with("path")
        if key.startswith("data.")
    ]
    # The weights may also read images or sound, of which a run knows nothing.
    task = "text-generation" if opened_by == _AUTO_CLASS else None
    return ModelCardData(
        library_name=library,
        tags=["lezo_ds", "lezo"],
        base_model=_hub_name(name),
        datasets=sorted(set(filter(None, map(_hub_name, sources)))) or None,
        pipeline_tag=task,
        **_license(license_of),
    )


def _license(directory: Path | None) -> dict[str, str]:
    """Return what the card of a model says of its license, if it has a card that says so."""
    if directory is None:
        return {}
    try:
        text = (directory / "README.md").read_text(encoding="utf-8")
        _, header, _ = text.split("---\n", 2)
        values = dict(load_yaml(header))
    except DAMAGE:
        return {}
    return {key: str(values[key]) for key in _LICENSE if key in values}


def _hub_name(name: str) -> str | None:
    """Return OWNER/NAME if it can be on the hub. A data set's name may be followed by a config."""
    if Path(name).exists() or name.startswith("."):
        return None
    found = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/[\w.-]+$|$)", name)
    return found and found[0]


def _scores(run: RecordedRun) -> str:
    """Return the rows of the table of scores."""
    rows = []
    for record in evaluations_of(run.records):
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        rows.append(f"| {plain(record.split)} | {record.step} | {plain(scores)} |")
    return "\n".join(rows)


def _vllm_rank(rank: int) -> int:
    """Return the smallest value of vLLM's --max-lora-rank that fits an adapter."""
    return next((size for size in _VLLM_RANKS if size >= rank), rank)


def plain(value: Any) -> str:
    """Return a value as one line of text in which nothing acts as Markdown or HTML."""
    return re.sub(r"[^\w .,:;/+()=%@-]", "?", str(value))
