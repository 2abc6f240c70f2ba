"""What lezo-ds train prints and leaves behind, and what it does in a directory that holds its
run already."""

from __future__ import annotations

import json

import pytest
import yaml
from assets import NUM_BLOCKS, REPOSITORY, recipe_values, shared_asset
from commands import run_forked_well
from run_ends import digest_after, end, records_of, results_of

from lezo_ds.config import load_yaml
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

STEPS = 8
MAIN = REPOSITORY / "lezo_ds" / "__main__.py"


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A finished run on two ranks, and what it printed."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    keys = ["--config", recipe, f"run_dir={run_dir}", "zo.perturbation_scale=2e-3"]
    return run_dir, run_forked_well(["train", *keys], program=MAIN, num_ranks=2)


def test_a_run_leaves_a_directory_that_says_what_it_was(trained):
    run_dir, _ = trained
    names = {"config.yaml", "journal.jsonl", "metrics.jsonl", "results.json"}
    assert {path.name for path in run_dir.iterdir()} == names | {
        "predictions",
        "snapshots",
        ".lock",
    }
    assert {path.name for path in (run_dir / "snapshots").iterdir()} == {
        "step-00000004",
        "step-00000008",
    }
    (run_dir.parent / "probe").touch()  # for the umask
    files = [path for path in run_dir.parent.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1
    assert {path.suffix for path in files} <= {"", ".json", ".jsonl", ".yaml", ".safetensors"}
    config = load_yaml((run_dir / "config.yaml").read_text())
    assert (config["zo"]["perturbation_scale"], config["zo"]["sparsity"]) == (2e-3, 0.5)
    assert results_of(run_dir)["world_size"] == 2
    header = read_journal(run_dir / "journal.jsonl").header
    assert {"torch", "deepspeed", "transformers"} <= header.libraries.keys()


def test_the_journal_holds_every_step_and_evaluation_and_the_metrics_repeat_it(trained):
    run_dir, _ = trained
    steps, evaluations = records_of(run_dir, StepRecord), records_of(run_dir, EvaluationRecord)
    assert [record.step for record in steps] == list(range(STEPS))
    best = results_of(run_dir)["best_step"]
    at = [(0, "test"), (0, "dev"), (4, "dev"), (8, "dev"), (best, "test")]
    assert [(r.step, r.split) for r in evaluations] == at
    assert {len(record.dropped_layers) for record in steps} == {NUM_BLOCKS // 2}
    assert len({record.dropped_layers for record in steps}) > 1
    assert {record.perturbation_scale for record in steps} == {2e-3}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses == {record.step + 1: record.loss for record in steps}


def test_the_results_are_printed_once_and_agree_with_the_journal(trained):
    run_dir, finished = trained
    results = results_of(run_dir)
    assert finished.out.count("\nTest accuracy: ") == 1
    assert finished.out.endswith(f"\nRun directory: {run_dir}\n")
    first, *dev, last = records_of(run_dir, EvaluationRecord)
    best = min(dev, key=lambda record: record.loss)
    assert results["finished"]
    assert (results["task"], results["metric"]) == ("sst2", "accuracy")
    assert (results["zero_shot"], results["test"]) == (
        first.metrics["accuracy"],
        last.metrics["accuracy"],
    )
    assert 0.5 <= results["majority_class"] < 1
    assert (results["best_step"], results["best_dev_loss"]) == (best.step, best.loss)
    assert results["macro_f1"] == last.metrics["macro_f1"]
    by_label = results["by_label"]
    assert by_label.keys() == {"0", "1"}  # as the records hold them
    num_right = sum(row["examples"] * row["recall"] for row in by_label.values())
    assert num_right / sum(row["examples"] for row in by_label.values()) == pytest.approx(
        results["test"]
    )
    assert f"macro F1 {results['macro_f1']:.3f}" in finished.out
    assert (results["steps"], results["skipped_steps"], results["world_size"]) == (STEPS, 0, 2)
    for step, score in ((0, results["zero_shot"]), (results["best_step"], results["test"])):
        lines = (run_dir / "predictions" / f"step-{step:08}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        are_right = [row["predicted"] in row["right"] for row in rows]
        assert [row["score"] for row in rows] == are_right
        assert sum(are_right) / len(rows) == pytest.approx(score)
    assert results["weights_digest"] == digest_after(run_dir, best.step)


def test_the_same_command_changes_nothing_and_more_steps_go_on_as_if_asked_for_at_once(
    trained, recipe
):
    run_dir, _ = trained

    def contents():
        changing = ("results.json", ".lock")
        files = [
            path for path in run_dir.rglob("*") if path.is_file() and path.name not in changing
        ]
        return {path: path.read_bytes() for path in files}, end(run_dir)

    arguments = ["--config", recipe, "zo.perturbation_scale=2e-3"]
    before = contents()
    run_forked_well([*arguments, f"run_dir={run_dir}"])
    assert contents() == before
    at_once = run_dir.with_name("at_once")
    for directory, every in ((run_dir, 6), (at_once, 4)):  # each evaluates after step 12
        run_forked_well(
            [*arguments, f"run_dir={directory}", "train.steps=12", f"train.eval_every={every}"]
        )
    assert records_of(run_dir, StepRecord) == records_of(at_once, StepRecord)
    assert (end(run_dir).results, end(run_dir).weights) == (
        end(at_once).results,
        end(at_once).weights,
    )


@pytest.mark.thorough
def test_real_sst2_and_a_pretrained_model_run_on_two_ranks(tmp_path):
    values = recipe_values(shared_asset("models/opt-mini"), shared_asset("data/sst2"))
    values["data"] |= {"num_train": 100, "num_dev": 20, "num_test": 60}
    values["zo"] |= {"learning_rate": 1e-5, "sparsity": 0.75}
    values["train"] |= {"steps": 4, "eval_every": 2, "eval_batch_size": 16}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    run_forked_well(
        ["--config", tmp_path / "recipe.yaml", f"run_dir={tmp_path / 'run'}"], num_ranks=2
    )
    results = results_of(tmp_path / "run")
    assert results["zero_shot"] > results["majority_class"]
    assert abs(results["test"] - results["zero_shot"]) < 0.2
