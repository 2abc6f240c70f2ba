"""Write the model of a run as a Hugging Face directory, or a run as one small file.

The file is the journal, without paths of this machine, and with digests of the weights. Reading one runs no
code, imports no module and opens no path that it names. All lines are checked before any is kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import lt
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import ZEROTH_ORDER, RunConfig
from lezo_ds.config.paths import DATA_KEYS
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import DAMAGE, failures_named, write_atomically
from lezo_ds.journal import (
    EvaluationRecord,
    JournalRecord,
    encode_journal,
    read_journal,
    scan_journal,
)
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.records import (
    RecordedRun,
    assert_same_model_config,
    config_of,
    evaluations_of,
    is_worse_than_base,
    owner_of,
    read_run,
    steps_of,
)
from lezo_ds.runs.scoring import recipe_of
from lezo_ds.runs.screen import WORSE
from lezo_ds.runs.trainer import restore

MAX_JOURNAL_BYTES = 64 << 20  # 20,000 steps take about 8 MB
_MAX_LINE_BYTES = 1 << 18
# A run from a file need not be sharded here as it was on the machine that wrote it.
_ANY_MACHINE = (
    "deepspeed=null",
    "partition_size=null",
    "tensor_parallel=null",
    "train.report_to=null",
)

logger = logging.getLogger(__name__)


def export_run(
    path: Path, step: str, target: Path, overrides: Sequence[str] = (), *, low_bits: bool = False
) -> int:
    """Write a run's model as a Hugging Face directory and return the number of its updates. A collective.

    `path` is the directory of the run, or a file from `write_journal`, which needs an override of model.path.
    `step` is "best", "last" or a number of updates. With `low_bits`, training on from the directory starts
    from exactly these weights, not from their 16 high bits; it is twice as large.
    """
    distributed.init_distributed()

    def read() -> tuple[RecordedRun, int]:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(
                f"{target} exists and is not an empty directory", fix="set another --out"
            )
        run = read_file(path, overrides) if path.is_file() else read_run(path, overrides)
        return run, run.find_step(step)

    run, number = distributed.on_rank_zero(read)
    engine = restore(run, number)
    digest, expected = engine.weights.digest(), run.digests.get(number)
    if expected not in (None, digest):
        raise LezoError(
            f"the weights of step {number} have the digest {digest}, but those of the run had {expected}; "
            "fix: use the same package version and settings as the run"
        )
    if distributed.rank() == 0:
        known = (
            "no digest in the run to compare with" if expected is None else "the same as in the run"
        )
        logger.info("digest of the weights: %s (%s)", digest, known)
        if is_worse_than_base(evaluations_of(run.records)):
            logger.warning("%s", WORSE)
    card = distributed.on_rank_zero(lambda: model_card(run, number, digest))
    engine.write_model(target, card=card, low_bits=low_bits, recipe=recipe_of(run.config))
    return number


def write_journal(path: Path, file: Path) -> int:
    """Write a zeroth-order run, finished or not, as one file, and return its size in bytes."""
    run = read_run(path)
    if not _is_replayable(run.config):
        kind = f"method={run.config.method} with peft.kind={run.config.peft.kind}"
        text = f"run {path} cannot be replayed from a base model and a journal: {kind}"
        raise UserError(text, fix="share the directory that lezo-ds export --out writes")
    here = dict.fromkeys(("deepspeed", "partition_size", "tensor_parallel"))
    config = {**run.header.config, **here, "elastic": {"lighthouse": None}}
    for key in ("model.path", *DATA_KEYS):
        section, _, name = key.partition(".")
        config[section] = {**config[section], name: _public_name(config[section][name])}
    config["digests"] = {str(step): digest for step, digest in run.digests.items()}
    content = encode_journal(replace(run.header, config=config), run.records)
    with failures_named(file):
        write_atomically(file, content)
    return len(content)


def _is_replayable(config: RunConfig) -> bool:
    return config.method in ZEROTH_ORDER and config.peft.kind != "prefix"


def _public_name(path: str | None) -> str | None:
    """Return a name on the hub as it is, and the last part of a path."""
    is_path = path is not None and (Path(path).exists() or path.startswith(("/", "~", ".")))
    return Path(path).name if path is not None and is_path else path


def read_file(file: Path, overrides: Sequence[str]) -> RecordedRun:
    """Read a file that `write_journal` wrote, or that anybody else did."""
    try:
        if file.stat().st_size > MAX_JOURNAL_BYTES:
            raise ValueError(f"it has more than {MAX_JOURNAL_BYTES} bytes")
        lines = scan_journal(file, _MAX_LINE_BYTES)
        header, _ = next(lines)
        digests = {
            int(step): str(digest) for step, digest in header.config.get("digests", {}).items()
        }
        base = _plain(header.config["model"]["path"])
        config = config_of(header, file, (*_ANY_MACHINE, *overrides))
        if not any(override.startswith("model.path=") for override in overrides):
            raise UserError(
                f"{file} needs the base model of its run, {base}", fix="add model.path=DIR"
            )
        assert_same_model_config(header, config.model.path)
    except DAMAGE as error:
        fix = "copy it again in binary mode, or write it again: lezo-ds export --run DIR --journal FILE"
        text = f"{file} is not an exported journal: {type(error).__name__}: {error}"
        raise UserError(text, fix=fix) from error
    text_config = load_model_config(resolve_model(config.model.path)).get_text_config()
    num_layers, directions = text_config.num_hidden_layers, config.zo.directions
    is_too_wide = config.peft.kind == "lora" and config.peft.lora_rank > text_config.hidden_size
    is_possible = _is_replayable(config) and not is_too_wide
    if not is_possible or not all(_fits(record, num_layers, directions) for record, _ in lines):
        fix = "set model.path to its base model"
        raise UserError(f"{file} is not of a run of {config.model.path}", fix=fix)
    header, records, step_checksums = read_journal(file)
    return RecordedRun(
        directory=RunDirectory(file),
        header=header,
        config=config,
        records=records,
        num_steps=len(steps_of(records)),
        digests=digests,
        owner=owner_of(header, step_checksums),
    )


def _fits(record: JournalRecord, num_layers: int, directions: int) -> bool:
    if isinstance(record, EvaluationRecord):
        return True
    dropped = (-1, *record.dropped_layers, num_layers + 2)  # two groups are outside the blocks
    fits = len(record.projected_grads) <= directions and all(map(lt, dropped, dropped[1:]))
    return fits and len(record.layer_weights) in (0, num_layers, num_layers + 2)


_CARD = """\
---
library_name: {library}
tags: [lezo_ds, {method}]{base_model}
---

# {base}, fine-tuned on {task}

lezo_ds trained {trained} of {base} with {optimizer}.
These are the weights after {step} of {num_steps} steps. Their digest is {digest}, that of the base weights
{fingerprint}.{verdict}

| split | step | score |
| --- | --- | --- |
{scores}

To load it: `{load}`
"""
_SCORING = """
To score the labels of a record as `lezo-ds predict` does:

```python
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DIR, record = ".", {"FIELD": "value"}
recipe = json.load(open(f"{DIR}/lezo_manifest.json"))["recipe"]
prompt, labels, scores = recipe["data.prompt"].format(**record), recipe["data.labels"], []
tokenizer, model = AutoTokenizer.from_pretrained(DIR), AutoModelForCausalLM.from_pretrained(DIR).eval()
is_opt, bos = model.config.model_type == "opt", [tokenizer.bos_token_id]
first = [0] if is_opt else bos if tokenizer("").input_ids[:1] == bos else []
CHAT
for label in labels:
    text = prompt + " " * (not prompt[-1:].isspace()) + (labels[label] if isinstance(labels, dict) else label)
    asked, ids = (first + tokenizer(t.strip(" "), add_special_tokens=False).input_ids for t in (prompt, text))
    logits = model(torch.tensor([ids[:-1]])).logits[0, len(asked) - 1 :].float().log_softmax(-1)
    scores.append(logits[range(len(logits)), ids[len(asked) :]].mean())
probabilities = dict(zip(labels, torch.stack(scores).softmax(0).tolist()))
```
"""
_CHAT = """\
system = [{"role": "system", "content": text} for text in [recipe["data.system_prompt"]] if text]
turns = [*system, {"role": "user", "content": prompt}]
prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
prompt = prompt.removeprefix(tokenizer.bos_token if first else "")
"""
_TRAINED = {"none": "all weights", "lora": "low-rank adapters", "prefix": "a prefix in each block"}


def model_card(run: RecordedRun, step: int, digest: str) -> str:
    """Return the README.md of an exported model. No string of a run acts as Markdown or HTML in it."""
    config, kind = run.config, run.config.peft.kind
    base = _plain(_public_name(config.model.path))
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base)
    load = f"AutoModelForCausalLM.from_pretrained({'DIR' if kind == 'none' else repr(base)})"
    rows = []
    for record in evaluations_of(run.records):
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        rows.append(f"| {_plain(record.split)} | {record.step} | {_plain(scores)} |")
    has_labels = kind == "none" and config.data.labels is not None and config.data.choices is None
    card = _CARD.format(
        library="peft" if kind == "lora" else "transformers",
        method=config.method,
        optimizer="AdamW" if config.method == "adamw" else "LeZO, by forward passes only",
        base_model=f"\nbase_model: {base}" if is_hub_id else "",
        base=base,
        task=_plain(config.data.task),
        trained=_TRAINED[kind],
        step=step,
        num_steps=run.num_steps,
        verdict=f" {WORSE}." if is_worse_than_base(evaluations_of(run.records)) else "",
        digest=digest,
        fingerprint=_plain(run.header.model_fingerprint),
        scores="\n".join(rows),
        load=load if kind == "none" else f"PeftModel.from_pretrained({load}, DIR)",
    )
    return card + (
        _SCORING.replace("CHAT\n", _CHAT * config.data.chat_template) if has_labels else ""
    )


def _plain(value: Any) -> str:
    """Return a value as one line of text in which nothing acts as Markdown or HTML."""
    return re.sub(r"[^\w .,:;/+()=%@-]", "?", str(value))
