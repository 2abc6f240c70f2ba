"""The model card (README.md) of an exported model: what it is, how it was made, and how to make it again.

A run from a pack is not trusted. Its strings appear in the text without Markdown or HTML, in the command with
shell quotes, and otherwise inside code fences that they cannot close.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from lezo_ds.config import RunConfig, config_to_dict, flatten
from lezo_ds.config.paths import DATA_KEYS, PATH_KEYS
from lezo_ds.runs.restore import RecordedRun
from lezo_ds.shipped import deepspeed_command
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.custom import CUSTOM

_METHODS = {"lezo": "LeZO", "mezo": "MeZO", "adamw": "AdamW"}
_TRAINED = {"none": "all weights", "lora": "low-rank adapters (LoRA)", "prefix": "a prefix in each block"}
_LIBRARIES = {"none": "transformers", "lora": "peft", "prefix": None}
_PAPERS = {
    "lezo": "layer-wise sparse zeroth-order optimization "
    "([Wang et al. 2024](https://arxiv.org/abs/2410.09823)), forward passes only",
    "mezo": "zeroth-order optimization ([Malladi et al. 2023](https://arxiv.org/abs/2305.17333)), "
    "forward passes only",
    "adamw": "backpropagation",
}
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ plain(base) }} tuned on {{ task }} with {{ method }}

This model was tuned by lezo_ds with {{ paper }}. It trained {{ trained }}.
These are the weights after {{ step }} of {{ num_steps }} steps{{ " (lowest validation loss)" if is_best }}.

## Scores

| split | step | loss |{% for name in metrics %} {{ plain(name) }} |{% endfor %}
| --- | --- | --- |{% for name in metrics %} --- |{% endfor %}
{% for e in evaluations -%}
| {{ plain(e.split) }} | {{ e.step }} | {{ score(e.loss) }} |\
{% for name in metrics %} {{ score(e.metrics.get(name)) }} |{% endfor %}
{% endfor %}
Step 0 is the base model. The test examples are a sample of the task's validation set (protocol \
{{ protocol }}). A score close to the majority class means that the model has learned nothing.

## Identity

| | |
| --- | --- |
{% for name, value in identity.items() -%}
| {{ name }} | {{ plain(value) }} |
{% endfor %}
lezo_ds computes the hashes from the weights in memory. They do not depend on sharding.

## How to make it again

Save this as `recipe.yaml`. Together with the base model and the data it determines the run.

{{ fenced(recipe, "yaml") }}

{{ fenced(command, "bash") }}

## Made with

| | |
| --- | --- |
{% for name, value in environment.items() -%}
| {{ plain(name) }} | {{ plain(value) }} |
{% endfor %}"""


def model_card(run: RecordedRun, step: int, digest: str) -> str:
    """Return the card as Markdown with the hub's metadata first.

    Args:
        run: the run that made the weights.
        step: number of updates that the weights have seen.
        digest: digest of the weights, as in the manifest next to the card.
    """
    config, task = run.config, TASKS.get(run.config.data.task.lower())  # None if it is not known here
    environment = _read_environment(run.directory.path / "environment.json")
    has_dev = any(evaluation.split == "dev" for evaluation in run.evaluations)
    metrics = list(dict.fromkeys(name for e in run.evaluations for name in e.metrics))
    values: dict[str, Any] = {
        "base": _base_name(config),
        "task": _plain("a task of its own" if config.data.task == CUSTOM else config.data.task.upper()),
        "method": _METHODS[config.method],
        "paper": _PAPERS[config.method],
        "trained": _TRAINED[config.peft.kind],
        "step": step,
        "num_steps": run.num_steps,
        "is_best": has_dev and run.find_step("best") == step,
        "metrics": metrics,
        "evaluations": run.evaluations,
        "protocol": config.data.protocol,
        "identity": {
            "base model": _base_name(config),
            "base weights": run.header.model_fingerprint,
            "tuned weights": digest,
            "noise": f"version {run.header.noise_version}",
        },
        "recipe": _recipe(config),
        "command": _command(config, environment),
        "environment": _environment(environment),
        "plain": _plain,
        "score": _score,
        "fenced": _fenced,
    }
    metadata = ModelCardData(
        base_model=_hub_id(config),  # the hub refuses a card that names another model than one of its own
        library_name=_LIBRARIES[config.peft.kind],
        pipeline_tag="text-generation",
        datasets=[task.hub_id] if task and task.hub_id and not _data_paths(config) else None,
        metrics=[_plain(name) for name in metrics if name != "majority_class"] or None,
        tags=["lezo_ds", config.method],
    )
    return str(ModelCard.from_template(metadata, template_str=_TEMPLATE, **values)) + "\n"


def _read_environment(file: Path) -> dict[str, Any]:
    """Return the content of environment.json; nothing if it is damaged, since it only informs."""
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _hub_id(config: RunConfig) -> str | None:
    """Return the base model's hub id, if it is not a directory."""
    path = config.model.path
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) and not Path(path).exists()
    return path if is_hub_id else None


def _base_name(config: RunConfig) -> str:
    """Return the base model's hub id, or the name of its directory without the rest of the path."""
    return _hub_id(config) or Path(config.model.path).name


def _recipe(config: RunConfig) -> str:
    """Return the configuration as YAML, without the keys that hold paths on the run's machine."""
    values = config_to_dict(config)
    for key in PATH_KEYS:
        section, _, name = key.rpartition(".")
        del (values[section] if section else values)[name]
    return yaml.safe_dump(values, sort_keys=False).rstrip()


def _command(config: RunConfig, environment: dict[str, Any]) -> str:
    words = deepspeed_command(environment.get("world_size", 1))
    words += ["--config", "recipe.yaml", "run_dir=runs/again", f"model.path={_base_name(config)}"]
    words += [f"{key}={Path(path).name}" for key, path in _data_paths(config).items()]
    return shlex.join(words)


def _data_paths(config: RunConfig) -> dict[str, str]:
    """Return the keys that say where the data is, with their values."""
    values = flatten(config_to_dict(config))
    return {key: values[key] for key in DATA_KEYS if values[key] is not None}


def _environment(environment: dict[str, Any]) -> dict[str, Any]:
    hardware, versions = _section(environment, "hardware"), _section(environment, "versions")
    return {
        "ranks": environment.get("world_size"),
        "device": hardware.get("gpu") or f"{hardware.get('device')} ({hardware.get('cpu') or 'unknown'})",
        "platform": environment.get("platform"),
        **versions,
    }


def _section(environment: dict[str, Any], name: str) -> dict[str, Any]:
    section = environment.get(name)
    return section if isinstance(section, dict) else {}


def _plain(value: object) -> str:
    """Return a value as one line of text in which nothing acts as Markdown or HTML."""
    return re.sub(r"[^\w .,:;/+()=%@-]", "?", str(value))


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _fenced(text: str, language: str) -> str:
    """Return a code block with a fence that is longer than any sequence of backticks inside."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
