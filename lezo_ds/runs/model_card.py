"""The README.md of an exported model, in the form of the hub's model cards.

Its header has what the hub reads (license, base model, data sets); its text says how the model was
trained, its scores, and how to load, serve and share it. A journal may come from anyone, so no
string of a run acts as Markdown, HTML or YAML in a card.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import RunConfig, config_to_dict, flatten, load_yaml
from lezo_ds.config.paths import DATA_KEYS, public_name, split_revision
from lezo_ds.data.chat import end_of_turn, lead_of_answers
from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.files import DAMAGE
from lezo_ds.runs.records import RecordedRun, evaluations_of, is_worse_than_base
from lezo_ds.runs.screen import WORSE

_LICENSE = ("license", "license_name", "license_link")
_CARD = """\
---
{header}
---

# {base}, fine-tuned on {task}

lezo_ds trained {trained} of {base} with {optimizer}.
These are the weights after {step} of {num_steps} steps.{remarks}

| split | step | score |
| --- | --- | --- |
{scores}

To load it: `{load}`
{serve}
To share it: `hf upload OWNER/NAME DIR`

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
{prompt}
first = []  # the template writes all tokens
labels = [label.strip() for label in labels]
"""
_WRITTEN = """\
answer = "31415926535897932"  # found again in what the template writes
turns.append({"role": "assistant", "content": answer})
prompt = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)[0]"""
_ASKED = """\
prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)"""
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
ends = {ends}  # the base model may not know that these tokens end a turn
tokens = model.generate(**inputs, max_new_tokens=256, do_sample=False, eos_token_id=ends)
answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(answer)
```
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


_SERVE = {
    "none": "\nTo serve it with vLLM: `vllm serve DIR`\n",
    "lora": "\nTo serve it with vLLM: "
    "`vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned=DIR`\n",
    "prefix": "",
}
_FEW_BITS = (
    "They were trained and scored on a base in {bits} bits. On the base in 16 bits, scores differ: "
    "in one measurement, an adapter trained on 4 bits had an accuracy of 65.6 % there, and of "
    "68.4 % on the unquantized base."
)
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
    kind = "none" if merged else config.peft.kind
    name, revision = split_revision(config.model.path)
    base = plain(public_name(name))
    loaded = base
    if revision is not None:
        loaded += f'", revision="{plain(revision)}'
    trained = _TRAINED[config.peft.kind]
    if merged:
        trained += ", which are added to the weights here,"
    card = _CARD.format(
        header=_header(config, _LIBRARIES[kind], opened_by, license_of).to_yaml(),
        base=base,
        task=plain(config.data.task),
        trained=trained,
        optimizer="AdamW" if config.method == "adamw" else "LeZO, by forward passes only",
        step=step,
        num_steps=run.num_steps,
        remarks=_remarks(run),
        scores=_scores(run),
        load=_LOAD[kind].format(base=loaded),
        serve=_SERVE[kind].format(base=base, rank=_vllm_rank(config.peft.lora_rank)),
        weights_sha256=weights_sha256,
    )
    has_candidates = config.data.labels is not None or config.data.choices is not None
    options = config.data.chat_template_kwargs
    tokenizer = load_tokenizer(str(resolve_model(config.model.path)), None, options)
    if kind == "none" and has_candidates:
        before_labels = _PLAIN.format(bos=list(tokenizer.begin_ids))
        if config.data.chat_template:
            lead = lead_of_answers(tokenizer, config.data.system_prompt)
            prompt = _WRITTEN if lead is None else f"{_ASKED} + {lead!r}"
            before_labels = _CHAT.replace("{prompt}", prompt)
        card += _EXAMPLE.format(before_labels=before_labels)
    elif config.data.in_chat:
        ends = {*tokenizer.end_ids, *end_of_turn(tokenizer).ids}
        card += _TALK.replace("{ends}", str(sorted(ends)))
    arguments = "".join(f"{name}={value!r}, " for name, value in options.items())
    return card.replace(_AUTO_CLASS, opened_by).replace("turns, ", f"turns, {arguments}")


def _header(
    config: RunConfig, library: str, opened_by: str, license_of: Path | None
) -> ModelCardData:
    """Return what the hub reads of a card."""
    name, _ = split_revision(config.model.path)
    values = flatten(config_to_dict(config))
    sources = [(values[key] or "").partition(":")[0] for key in DATA_KEYS]
    # The weights may also read images or sound, of which a run knows nothing.
    task = "text-generation" if opened_by == _AUTO_CLASS else None
    return ModelCardData(
        library_name=library,
        tags=["lezo_ds", config.method],
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


def _remarks(run: RecordedRun) -> str:
    remarks = ""
    if run.config.model.bits:
        remarks += f" {_FEW_BITS.format(bits=run.config.model.bits)}"
    if is_worse_than_base(evaluations_of(run.records)):
        remarks += f" {WORSE}."
    return remarks


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
