"""Run directories as a report reads them, written in a moment and with any content."""

from __future__ import annotations

import json

import yaml

from lezo_ds.config import config_from_dict, config_to_dict

RECIPE = {
    "model": {"path": "facebook/opt-13b", "dtype": "fp16"},
    "data": {"task": "sst2", "protocol": "mezo", "num_test": 400},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 30, "batch_size": 16},
}


def write_run(
    path, *overrides, test=0.9, pace=1.0, losses=(0.6, 0.5, 0.4), task=None, metric="accuracy", **results
):
    """Write a run of 30 steps, `pace` seconds apart, validated every 10 steps with the given losses.

    Args:
        path: the directory.
        overrides: key=value changes to RECIPE.
        test: the score, from 0 to 1.
        pace: seconds per step.
        losses: three validation losses; the validation accuracy is 1 minus the loss.
        task: a task's name that replaces the configured one, and need not be registered.
        metric: the name of the score.
        results: further values of results.json.
    """
    path.mkdir(parents=True)
    config = config_to_dict(config_from_dict(RECIPE | {"run_dir": str(path)}, "the test", overrides))
    config["data"]["task"] = task or config["data"]["task"]
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(1, 31):
        lines.append({"step": step, "seconds": pace * step, "loss": 1 / step})
        if step % 10 == 0:
            loss = losses[step // 10 - 1]
            lines.append({"step": step, "seconds": pace * step, "dev_loss": loss, f"dev_{metric}": 1 - loss})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"finished": True, "metric": metric, "test": test, "zero_shot": 0.5, "majority_class": 0.51}
    values |= {"best_dev_loss": min(losses), "best_step": 30, "steps": 30, "world_size": 2}
    (path / "results.json").write_text(json.dumps(values | results))
    return path
