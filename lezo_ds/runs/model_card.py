"""The README.md of an exported model: what it is, how it was made and how to make it again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.config import RunConfig, flatten
from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.restore import RecordedRun
from lezo_ds.tasks import get_task

_METHODS = {"lezo": "LeZO", "mezo": "MeZO", "adamw": "AdamW"}
_TUNED = {"none": "all weights", "lora": "low-rank adapters (LoRA)", "prefix": "a prefix in each block"}
_PAPERS = {
    "lezo": "layer-wise sparse zeroth-order optimization "
    "([Wang et al. 2024](https://arxiv.org/abs/2410.09823)), forward passes only",
    "mezo": "zeroth-order optimization ([Malladi et al. 2023](https://arxiv.org/abs/2305.17333)), "
    "forward passes only",
    "adamw": "backpropagation",
}
_PLACES = ("run_dir", "model.path", "data.path", "deepspeed")
"""Keys of a recipe that say where things lie on the machine of the run."""


def model_card(run: RecordedRun, step: int, digest: str) -> str:
    """Return the card as Markdown with the hub's metadata at its head.

    Args:
        run: whose weights they are.
        step: number of updates they have seen.
        digest: of the weights, as the manifest beside them has it.
    """
    environment = json.loads((run.directory.path / "environment.json").read_text())
    config = run.config
    title = f"{_base_name(config)} tuned on {get_task(config.data.task).name.upper()}"
    chosen = " (lowest validation loss)" if _is_best(run, step) else ""
    lines = [
        *("---", yaml.safe_dump(_metadata(config), sort_keys=False).rstrip(), "---", ""),
        *(f"# {title} with {_METHODS[config.method]}", ""),
        f"Tuned with {_PAPERS[config.method]}, by lezo_ds. What was tuned: {_TUNED[config.peft.kind]}.",
        f"These are the weights after {step} of {run.num_steps} steps{chosen}.",
        *("", "## Scores", "", *_scores(run.evaluations), ""),
        "Step 0 is the base model. The test examples are a sample of the task's validation set "
        f"(protocol {config.data.protocol}); a score near the majority class's has learned nothing.",
        *("", "## Identity", ""),
        *_table(
            ("", ""),
            [
                ("base model", f"`{_base_name(config)}`"),
                ("base weights", f"`{run.header.model_fingerprint}`"),
                ("tuned weights", f"`{digest}`"),
                ("noise", f"version {run.header.noise_version}"),
            ],
        ),
        *("", "The hashes are lezo_ds' own, of weights as they are in memory, however sharded."),
        *("", "## To make it again", "", *_recipe(run, environment)),
        *("", "## Made with", "", *_environment(environment)),
    ]
    return "\n".join(lines) + "\n"


def _base_name(config: RunConfig) -> str:
    """Return the base model's hub id, or the name of its directory: not where that lies."""
    path = config.model.path
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) and not Path(path).exists()
    return path if is_hub_id else Path(path).name


def _metadata(config: RunConfig) -> dict[str, Any]:
    task = get_task(config.data.task)
    libraries = {"none": "transformers", "lora": "peft"}
    library = libraries.get(config.peft.kind)
    return {
        "base_model": _base_name(config),
        **({"library_name": library} if library else {}),
        "pipeline_tag": "text-generation",
        **({"datasets": [task.hub_id]} if config.data.path is None else {}),
        "metrics": [task.metric],
        "tags": ["lezo_ds", config.method],
    }


def _is_best(run: RecordedRun, step: int) -> bool:
    return any(e.split == "dev" for e in run.evaluations) and run.find_step("best") == step


def _scores(evaluations: Sequence[EvaluationRecord]) -> list[str]:
    names = list(dict.fromkeys(name for record in evaluations for name in record.metrics))
    rows = [
        (record.split, record.step, _number(record.loss), *(_number(record.metrics.get(n)) for n in names))
        for record in evaluations
    ]
    return _table(("split", "step", "loss", *(name.replace("_", " ") for name in names)), rows)


def _recipe(run: RecordedRun, environment: Mapping[str, Any]) -> list[str]:
    values = yaml.safe_load((run.directory.path / "config.yaml").read_text())
    flat = {key: value for key, value in flatten(values).items() if key not in _PLACES}
    kept: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (kept.setdefault(section, {}) if section else kept)[name] = value
    places = f"run_dir=runs/again model.path={shlex.quote(_base_name(run.config))}"
    if run.config.data.path is not None:
        places += f" data.path={shlex.quote(Path(run.config.data.path).name)}"
    ranks = environment["world_size"]
    return [
        "With this as `recipe.yaml`, everything that decides the run:",
        *("", "```yaml", yaml.safe_dump(kept, sort_keys=False).rstrip(), "```", ""),
        *("```bash", f"deepspeed --num_gpus {ranks} launch/train.py --config recipe.yaml {places}", "```"),
    ]


def _environment(environment: Mapping[str, Any]) -> list[str]:
    hardware = environment["hardware"]
    facts = {
        "ranks": environment["world_size"],
        "device": hardware["gpu"] or f"{hardware['device']} ({hardware['cpu'] or 'unknown'})",
        "platform": environment["platform"],
        **environment["versions"],
    }
    return _table(("", ""), facts.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(titles)} |",
        "|" + " --- |" * len(titles),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
