"""launch/train.py, started in each way: what a run leaves behind, and what happens if it is run again."""

from __future__ import annotations

import json
import shlex
import stat

import pytest
import yaml
from assets import NUM_BLOCKS, recipe_values, shared_asset
from commands import assert_one_error, deepspeed, mpirun, python, run_forked, run_forked_well, run_well
from run_ends import digest_after, end, records_of, results_of

from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.zo.records import StepRecord

STEPS = 8


@pytest.fixture(scope="module")
def by_deepspeed(recipe, tmp_path_factory):
    """A run on two ranks, and what it printed."""
    run_dir = tmp_path_factory.mktemp("by_deepspeed") / "run"
    keys = [f"run_dir={run_dir}", "--zo.perturbation_scale", "2e-3"]
    finished = run_well(deepspeed(2, "--config", recipe, *keys, "--json"))
    return run_dir, finished


@pytest.fixture(scope="module")
def by_python(recipe, tmp_path_factory):
    """The same run on one rank."""
    run_dir = tmp_path_factory.mktemp("by_python") / "run"
    run_well(python("--config", recipe, f"run_dir={run_dir}", "zo.perturbation_scale=2e-3"))
    return run_dir


def files_of(run_dir):
    return sorted(path for path in run_dir.rglob("*") if path.is_file())


@pytest.mark.distributed
def test_the_answers_to_the_test_examples_give_the_scores_before_and_after(by_deepspeed):
    run_dir, _ = by_deepspeed
    results = results_of(run_dir)
    for step, score in ((0, results["zero_shot"]), (results["best_step"], results["test"])):
        lines = (run_dir / "predictions" / f"step-{step:08}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert sorted(rows[0]) == ["index", "predicted", "prompt", "right"]
        assert {row["predicted"] for row in rows} <= {"terrible", "great"}
        assert all(row["prompt"].endswith(" It was") for row in rows)
        assert sum(row["predicted"] in row["right"] for row in rows) / len(rows) == pytest.approx(score)


@pytest.mark.distributed
def test_deepspeed_on_two_ranks_leaves_a_whole_run_directory(by_deepspeed):
    run_dir, _ = by_deepspeed
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml",
        "environment.json",
        "journal.jsonl",
        "metrics.jsonl",
        "predictions",
        "results.json",
        "snapshots",
    ]
    assert sorted(path.name for path in (run_dir / "snapshots").iterdir()) == [
        "step-00000004",
        "step-00000008",
    ]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["zo"]["perturbation_scale"] == 2e-3
    assert config["zo"]["sparsity"] == 0.5
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["hardware"]["device"] == "cpu"
    assert {"torch", "deepspeed", "transformers"} <= environment["versions"].keys()
    assert "zo.perturbation_scale=2e-3" in environment["command"]


@pytest.mark.distributed
def test_the_journal_holds_every_step_and_evaluation_in_order(by_deepspeed):
    run_dir, _ = by_deepspeed
    records = records_of(run_dir)
    assert [r.step for r in records if isinstance(r, StepRecord)] == list(range(STEPS))
    found = [(r.step, r.split) for r in records if isinstance(r, EvaluationRecord)]
    assert found == [(0, "test"), (4, "dev"), (8, "dev"), (results_of(run_dir)["best_step"], "test")]
    for record in records_of(run_dir, StepRecord):
        assert len(set(record.dropped_layers)) == NUM_BLOCKS // 2
        assert record.applied
        assert record.perturbation_scale == 2e-3
    assert len({record.dropped_layers for record in records_of(run_dir, StepRecord)}) > 1


@pytest.mark.distributed
def test_the_metrics_repeat_the_journal_with_the_seconds(by_deepspeed):
    run_dir, _ = by_deepspeed
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses == {record.step + 1: record.loss for record in records_of(run_dir, StepRecord)}
    assert sum("dev_loss" in line for line in lines) == 2
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


@pytest.mark.distributed
def test_the_results_are_printed_once_and_agree_with_the_journal(by_deepspeed):
    run_dir, finished = by_deepspeed
    results = results_of(run_dir)
    assert finished.out.count('"weights_digest"') == 1
    printed, _ = json.JSONDecoder().raw_decode(finished.out[finished.out.index("{\n") :])
    assert printed == {"run_dir": str(run_dir), **results}
    first, *dev, last = records_of(run_dir, EvaluationRecord)
    best = min(dev, key=lambda record: record.loss)
    assert results["finished"]
    assert (results["task"], results["metric"]) == ("sst2", "accuracy")
    assert results["zero_shot"] == first.metrics["accuracy"]
    assert results["test"] == last.metrics["accuracy"]
    assert 0.5 <= results["majority_class"] < 1
    assert (results["best_step"], results["best_dev_loss"]) == (best.step, best.loss)
    assert (results["steps"], results["skipped_steps"], results["world_size"]) == (STEPS, 0, 2)
    assert results["seconds"] > 0
    assert results["weights_digest"] == digest_after(run_dir, best.step)


@pytest.mark.distributed
def test_python_deepspeed_and_mpirun_make_the_same_run(recipe, by_python, by_deepspeed, tmp_path):
    by_mpirun = tmp_path / "run"
    run_well(mpirun(2, "--config", recipe, f"run_dir={by_mpirun}", "zo.perturbation_scale=2e-3"))
    assert results_of(by_mpirun)["world_size"] == 2
    header, records = read_journal(by_python / "journal.jsonl")
    for run_dir in (by_deepspeed[0], by_mpirun):
        other, other_records = read_journal(run_dir / "journal.jsonl")
        assert (other.config, other.model_fingerprint) == (header.config, header.model_fingerprint)
        assert other_records == records
        assert digest_after(run_dir, 4) == digest_after(by_python, 4)
        assert end(run_dir) == end(by_python)


def test_the_same_command_on_a_finished_run_changes_nothing(recipe, by_python):
    def state():
        files = [by_python / "journal.jsonl", by_python / "metrics.jsonl", by_python / "config.yaml"]
        files += [path for path in (by_python / "snapshots").rglob("*") if path.is_file()]
        contents = {path: path.read_bytes() for path in files}
        measured = ("seconds", "peak_memory_bytes")
        return contents, {name: v for name, v in results_of(by_python).items() if name not in measured}

    before = state()
    trained = results_of(by_python) | {"peak_memory_bytes": 10**15}  # more than this process takes
    (by_python / "results.json").write_text(json.dumps(trained))
    run_forked_well(["--config", recipe, f"run_dir={by_python}", "zo.perturbation_scale=2e-3"])
    assert state() == before
    assert results_of(by_python)["peak_memory_bytes"] == 10**15


@pytest.mark.distributed
def test_more_steps_continue_a_finished_run_as_if_they_had_been_asked_for_at_once(recipe, tmp_path):
    at_once, in_two = tmp_path / "at_once", tmp_path / "in_two"
    run_forked_well(["--config", recipe, f"run_dir={at_once}", "train.steps=12"])
    run_forked_well(["--config", recipe, f"run_dir={in_two}", "train.steps=8"])
    run_forked_well(["--config", recipe, f"run_dir={in_two}", "train.steps=12"], num_ranks=2)
    assert records_of(in_two, StepRecord) == records_of(at_once, StepRecord)
    dev = [[r for r in records_of(d, EvaluationRecord) if r.split == "dev"] for d in (in_two, at_once)]
    assert dev[0] == dev[1]
    assert end(in_two).weights == end(at_once).weights
    assert end(in_two).results == end(at_once).results


def test_fewer_steps_than_a_run_has_are_refused_and_change_nothing(recipe, by_python):
    before = {path: path.read_bytes() for path in files_of(by_python)}
    keys = [f"run_dir={by_python}", "zo.perturbation_scale=2e-3", "train.steps=6"]
    finished = run_forked(["--config", recipe, *keys])
    assert_one_error(
        finished, 2, "already has more steps than train.steps; got: train.steps=6; expected: at least 8"
    )
    assert "loading" not in finished.err
    assert {path: path.read_bytes() for path in files_of(by_python)} == before


def test_every_file_of_a_run_obeys_the_umask(recipe, tmp_path):
    run_dir = tmp_path / "run"
    command = shlex.join(map(str, python("--config", recipe, f"run_dir={run_dir}", "model.dtype=bf16")))
    run_well(["bash", "-c", f"umask 027; {command} train.steps=1"])
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 2
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {
        path.name: 0o640 for path in files
    }


@pytest.mark.distributed
def test_real_sst2_and_a_pretrained_model_run_on_two_ranks(tmp_path):
    values = recipe_values(shared_asset("models/opt-mini"), shared_asset("data/sst2"))
    values["data"] |= {"num_train": 100, "num_dev": 20, "num_test": 60}
    values["zo"] |= {"learning_rate": 1e-5, "sparsity": 0.75}
    values["train"] |= {"steps": 4, "eval_every": 2, "eval_batch_size": 16}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    run_forked_well(["--config", path, f"run_dir={tmp_path / 'run'}"], num_ranks=2)
    results = results_of(tmp_path / "run")
    assert results["finished"]
    assert (results["steps"], results["skipped_steps"]) == (4, 0)
    assert results["zero_shot"] > results["majority_class"]
    assert abs(results["test"] - results["zero_shot"]) < 0.2
