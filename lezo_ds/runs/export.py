"""Write the model of a run as a Hugging Face directory, or a run as one small file.

    RUN/ --export_run-----------------------> MODEL/   weights, tokenizer, config.json, README.md,
      |                                         ^      lezo_manifest.json
      +--write_journal--> FILE --export_run-----+      FILE is the journal, without paths of this
                                                       machine; it needs the base model

The header of an exported journal also has `config.digests`, digests of the weights after some
steps, so that whoever replays it knows that the weights are those of the run. Such a file may come
from anyone. Reading it runs no code, imports no module and opens no path that it names. All its
lines are checked before any is kept.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import CHAT_TEMPLATE_FILE

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import auto_class, load_model_config, resolve_model
from lezo_ds.config import ZEROTH_ORDER, RunConfig, num_directions, trained_part
from lezo_ds.config.paths import DATA_KEYS, split_revision
from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.errors import JournalError, LezoError, UserError
from lezo_ds.files import DAMAGE, failures_named, write_atomically
from lezo_ds.journal import (
    EvaluationRecord,
    JournalRecord,
    encode_journal,
    scan_journal,
)
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.opening import recipe_of, restore
from lezo_ds.runs.records import (
    RecordedRun,
    RunRecords,
    assert_same_model_config,
    config_of,
    evaluations_of,
    is_worse_than_base,
    read_run,
    refuse_code,
)
from lezo_ds.runs.screen import WORSE

MAX_JOURNAL_BYTES = 1 << 30
"""Most bytes of an exported journal that is read. 100,000 steps of 480 directions fit."""
_MAX_LINE_BYTES = 1 << 24  # a line has 20 bytes for each direction of its step

_ANY_MACHINE = (
    "deepspeed=null",
    "partition_size=null",
    "tensor_parallel=null",
    "train.report_to=null",
)
"""Overrides of a run from a file, which need not be sharded here as where it was written."""

logger = logging.getLogger(__name__)


def export_run(
    path: Path,
    step: str,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    merge: bool = False,
) -> int:
    """Write a run's model as a Hugging Face directory. A collective.

    Args:
        path: the directory of the run, or a file from `write_journal`, which needs an override of
            model.path.
        step: "best", "last" or a number of updates.
        target: the directory to write, which is missing or empty.
        overrides: `key=value` changes of the run's configuration that may differ when it is
            resumed, such as the path of a base model that moved.
        merge: write the whole model, with the products of the run's LoRA adapter added to its
            weights and rounded to their dtype. No peft is needed to load it.

    Returns:
        The number of updates that the weights have seen.

    Raises:
        UserError: the run or the step is not there, or `target` is not empty.
        JournalError: an exported journal is damaged, or was cut short before the step.
        LezoError: the weights are not those that the run had, or cannot be written.
    """
    distributed.init_distributed()

    def read() -> tuple[RecordedRun, int]:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            problem = f"{target} exists and is not an empty directory"
            raise UserError(problem, fix="set another --out")
        if path.is_file():
            run = read_file(path, overrides)
            _assert_has_step(run, step)
        else:
            run = read_run(path, overrides)
        kind = run.config.peft.kind
        if merge and kind != "lora":
            raise UserError(
                f"--merge adds a LoRA adapter to its base model, and {path} has peft.kind={kind}",
                fix="remove --merge",
            )
        return run, run.find_step(step)

    run, number = distributed.on_rank_zero(read)
    engine = restore(run, number)
    digest = engine.weights.digest()
    expected = run.digests.get(number)
    if expected not in (None, digest):
        raise LezoError(
            f"the weights of step {number} have the digest {digest}, "
            f"but those of the run had {expected}; "
            "fix: use the same package version and settings as the run"
        )
    if distributed.rank() == 0:
        comparison = "the same as in the run"
        if expected is None:
            comparison = "no digest in the run to compare with"
        weights = "weights before the merge" if merge else "weights"
        logger.info("digest of the %s: %s (%s)", weights, digest, comparison)
        if is_worse_than_base(evaluations_of(run.records)):
            logger.warning("%s", WORSE)
    engine.write_model(
        target,
        texts=_chat_template(run.config),
        card=partial(
            model_card,
            run,
            number,
            merged=merge,
            opened_by=auto_class(engine.module.config).__name__,
        ),
        merge=merge,
        recipe=recipe_of(run.config.reading),
    )
    return number


def _chat_template(config: RunConfig) -> dict[str, str]:
    """Return the chat template with the run's values as defaults, by its name; or nothing."""
    options = config.data.chat_template_kwargs
    if not options:
        return {}
    tokenizer = load_tokenizer(str(resolve_model(config.model.path)), None, options)
    defaults = ""
    for name, value in sorted(options.items()):
        literal = json.dumps(value, ensure_ascii=False)  # Jinja writes true and texts as JSON does
        defaults += (
            f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
        )
    return {CHAT_TEMPLATE_FILE: defaults + tokenizer.backend.get_chat_template()}


def _assert_has_step(run: RecordedRun, step: str) -> None:
    """Refuse a step of an exported journal that was cut short, unless it is before the cut.

    "best" and "last" may be other steps than in the whole journal.
    """
    file = run.directory.path
    problem = ""
    if not file.read_bytes().endswith(b"\n"):
        problem = "its last line is not complete"
    last = max(run.digests, default=0)
    if last > run.num_steps:
        problem = f"its header has the digest of step {last}"
    if not problem:
        return
    problem = f"{file} was cut short: it ends after {run.num_steps} steps, and {problem}"
    if not step.isdecimal() or int(step) > run.num_steps:
        raise JournalError(f"{problem}; fix: copy it again, or set --step to 0 to {run.num_steps}")
    logger.warning("%s", problem)


def write_journal(path: Path, file: Path) -> int:
    """Write a zeroth-order run, finished or not, as one file, and return its size in bytes.

    Raises:
        UserError: `path` is not a run, or a base model and a journal do not give its weights.
        LezoError: the file cannot be written.
    """
    run = read_run(path)
    if not _is_replayable(run.config):
        kind = f"method={run.config.method} with peft.kind={run.config.peft.kind}"
        raise UserError(
            f"run {path} cannot be replayed from a base model and a journal: {kind}",
            fix="share the directory that lezo-ds export --out writes",
        )
    # The reader has neither the paths of this machine nor its number of ranks.
    config = {
        **run.header.config,
        "deepspeed": None,
        "partition_size": None,
        "tensor_parallel": None,
        "elastic": {"lighthouse": None},
        "digests": {str(step): digest for step, digest in run.digests.items()},
    }
    for key in ("model.path", "peft.path", *DATA_KEYS):
        section, name = key.split(".")
        config[section] = {**config[section], name: _public_name(config[section][name])}
    content = encode_journal(replace(run.header, config=config), run.records)
    with failures_named(file):
        write_atomically(file, content)
    return len(content)


def _is_replayable(config: RunConfig) -> bool:
    """Return whether a base model and a journal give the weights of a run."""
    # A prefix starts from a forward pass, which another machine does not repeat bit for bit.
    return config.method in ZEROTH_ORDER and config.peft.kind != "prefix"


def _public_name(path: str | None) -> str | None:
    """Return a name on the hub as it is, and the last part of a path."""
    if path is None:
        return None
    if Path(path).exists() or path.startswith(("/", "~", ".")):
        return Path(path).name
    return path


def read_file(file: Path, overrides: Sequence[str]) -> RecordedRun:
    """Read a file that `write_journal` wrote, or that anybody else did.

    Args:
        file: an exported journal.
        overrides: `key=value` changes of its configuration. One of them sets model.path.

    Raises:
        UserError: the file is not an exported journal, or not one of a run of that model.
        JournalError: a line is damaged.
    """
    try:
        if file.stat().st_size > MAX_JOURNAL_BYTES:
            raise ValueError(f"it has more than {MAX_JOURNAL_BYTES} bytes")
        lines = scan_journal(file, _MAX_LINE_BYTES)
        header, _ = next(lines)
        # Of the header, only the types of its members have been checked.
        digests = {}
        for step, digest in header.config.get("digests", {}).items():
            digests[int(step)] = str(digest)
        base = _plain(header.config["model"]["path"])
        config = config_of(header, file, (*_ANY_MACHINE, *overrides))
        if not any(override.startswith("model.path=") for override in overrides):
            raise UserError(
                f"{file} needs the base model of its run, {base}", fix="add model.path=DIR"
            )
        assert_same_model_config(header, config.model.path)
    except DAMAGE as error:
        raise UserError(
            f"{file} is not an exported journal: {type(error).__name__}: {error}",
            fix="copy it again in binary mode, "
            "or write it again: lezo-ds export --run DIR --journal FILE",
        ) from error
    text_config = load_model_config(resolve_model(config.model.path)).get_text_config()
    fits = _is_replayable(config)
    if config.peft.kind == "lora" and config.peft.lora_rank > text_config.hidden_size:
        fits = False  # such a rank could ask for any amount of memory
    num_groups = text_config.num_hidden_layers
    refuse_code({"zo.law": config.zo.law}, overrides)
    if trained_part(config.zo) == "all" and config.peft.kind == "none":
        num_groups += 2  # two are outside the blocks
    for record, _ in lines:  # one in memory at a time
        fits = fits and _fits(record, num_groups, num_directions(config))
    if not fits:
        raise UserError(
            f"{file} is not of a run of {config.model.path}",
            fix="set model.path to its base model",
        )
    recorded = RunRecords.of_journal(file)
    directory = RunDirectory(file)
    return RecordedRun(
        **vars(recorded), directory=directory, config=config, digests=digests, overrides=overrides
    )


def _fits(record: JournalRecord, num_groups: int, num_directions: int) -> bool:
    """Return whether a record can be of a run of this number of groups and directions."""
    if isinstance(record, EvaluationRecord):
        return True
    dropped = list(record.dropped_layers)
    if dropped != sorted(set(dropped)) or any(group >= num_groups for group in dropped):
        return False
    if len(record.projected_grads) > num_directions:
        return False
    return len(record.layer_weights) in (0, num_groups)


_CARD = """\
---
library_name: {library}
tags: [lezo_ds, {method}]{base_model}
---

# {base}, fine-tuned on {task}

lezo_ds trained {trained} of {base} with {optimizer}.
These are the weights after {step} of {num_steps} steps.{remarks}

| split | step | score |
| --- | --- | --- |
{scores}

To load it: `{load}`

To label or answer the records of a file: `lezo-ds predict --model DIR new.csv --out answers.csv`

To check the weights: `sha256sum *.safetensors | sha256sum` prints

    {weights_sha256}
"""
_EXAMPLE = """
To score labels with transformers alone, as `lezo-ds predict` does:

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

directory = "."
# data.prompt in lezo_manifest.json, with the fields of a record filled in.
prompt = "My parcel is late. This ticket is about"
# The texts of data.labels, or of data.choices filled in.
labels = ["billing", "shipping"]

tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory).eval()
{before_labels}

def token_ids(text):
    return first + tokenizer(text.strip(" "), add_special_tokens=False).input_ids


scores = []
for label in labels:
    ids = torch.tensor(token_ids(prompt + label))
    with torch.inference_mode():
        logits = model(ids[None, :-1]).logits[0].float()
    losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    # The first token has no loss. Of the others, those of the label count.
    num_prompt_tokens = len(token_ids(prompt))
    scores.append(-losses[num_prompt_tokens - 1 :].mean())

probabilities = torch.stack(scores).softmax(dim=0).tolist()
```
"""
_PLAIN = """
first = {bos}  # every text begins with it
if not prompt[-1:].isspace():
    labels = [label if label[:1].isspace() else " " + label for label in labels]
"""
_CHAT = """
# The prompt is the turn of a user, and what the template writes up to the assistant's answer.
system_prompt = None  # data.system_prompt in lezo_manifest.json
turns = [{"role": "user", "content": prompt}]
if system_prompt is not None:
    turns.insert(0, {"role": "system", "content": system_prompt})
answer = "31415926535897932"  # found again in what the template writes
turns.append({"role": "assistant", "content": answer})
prompt = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)[0]
first = []  # the template writes all tokens
labels = [label.strip() for label in labels]
"""
_TALK = """
To talk to it: `lezo-ds chat --model DIR`. With transformers (of an adapter, its base model is
loaded, too):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
# data.system_prompt in lezo_manifest.json, if it is not null, is a first turn of the role system.
turns = [{"role": "user", "content": "Who are you?"}]
inputs = tokenizer.apply_chat_template(
    turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
tokens = model.generate(**inputs, max_new_tokens=256, do_sample=False)
answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(answer)
```

With vLLM: `vllm serve DIR`, or of a LoRA adapter
`vllm serve BASE --enable-lora --lora-modules tuned=DIR`, and in another terminal `vllm chat`.
"""
_TRAINED = {"none": "all weights", "lora": "low-rank adapters", "prefix": "a prefix in each block"}
_LIBRARIES = {"none": "transformers", "lora": "peft", "prefix": "lezo_ds"}
_AUTO_CLASS = "AutoModelForCausalLM"
_LOAD_BASE = 'AutoModelForCausalLM.from_pretrained("{base}")'
_LOAD = {
    "none": 'AutoModelForCausalLM.from_pretrained("DIR")',
    "lora": f'PeftModel.from_pretrained({_LOAD_BASE}, "DIR")',
    "prefix": f'model = {_LOAD_BASE}; lezo_ds.forward.adapters.load_prefix(model, Path("DIR"))',
}


def model_card(
    run: RecordedRun,
    step: int,
    weights_sha256: str,
    *,
    merged: bool = False,
    opened_by: str = _AUTO_CLASS,
) -> str:
    """Return the README.md of an exported model.

    No string of a run acts as Markdown or HTML in it, since a journal may come from anyone.

    Args:
        run: the run.
        step: number of updates that the weights have seen.
        weights_sha256: what `sha256sum *.safetensors | sha256sum` prints in the model's directory.
        merged: whether the adapter of the run is part of the weights.
        opened_by: the name of the class of transformers that opens the model.
    """
    config = run.config
    name, revision = split_revision(config.model.path)
    base = _plain(_public_name(name))
    base_model = ""
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base):  # OWNER/NAME on the hub
        base_model = f"\nbase_model: {base}"
    loaded = base
    if revision is not None:
        loaded += f'", revision="{_plain(revision)}'
    rows = []
    for record in evaluations_of(run.records):
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        rows.append(f"| {_plain(record.split)} | {record.step} | {_plain(scores)} |")
    kind = "none" if merged else config.peft.kind
    trained = _TRAINED[config.peft.kind]
    if merged:
        trained += ", which are added to the weights here,"
    remarks = ""
    if config.model.bits:
        remarks += f" They were trained on a base in {config.model.bits} bits."
    if is_worse_than_base(evaluations_of(run.records)):
        remarks += f" {WORSE}."
    card = _CARD.format(
        library=_LIBRARIES[kind],
        method=config.method,
        base_model=base_model,
        base=base,
        task=_plain(config.data.task),
        trained=trained,
        optimizer="AdamW" if config.method == "adamw" else "LeZO, by forward passes only",
        step=step,
        num_steps=run.num_steps,
        remarks=remarks,
        scores="\n".join(rows),
        load=_LOAD[kind].format(base=loaded),
        weights_sha256=weights_sha256,
    )
    has_candidates = config.data.labels is not None or config.data.choices is not None
    if kind == "none" and has_candidates:
        tokenizer = load_tokenizer(str(resolve_model(config.model.path)))
        before_labels = _PLAIN.format(bos=list(tokenizer.begin_ids))
        if config.data.chat_template:
            before_labels = _CHAT
        card += _EXAMPLE.format(before_labels=before_labels)
    elif config.data.messages or config.data.chat_template:
        card += _TALK
    options = config.data.chat_template_kwargs.items()
    arguments = "".join(f"{name}={value!r}, " for name, value in options)
    return card.replace(_AUTO_CLASS, opened_by).replace("turns, ", f"turns, {arguments}")


def _plain(value: Any) -> str:
    """Return a value as one line of text in which nothing acts as Markdown or HTML."""
    return re.sub(r"[^\w .,:;/+()=%@-]", "?", str(value))
