"""What lezo-ds train prints and leaves behind, and what it does in the directory of its own run."""

import pytest
from assets import NUM_BLOCKS, REPOSITORY, read_lines
from commands import run_forked_well, run_words, train
from run_ends import digest_after, end, records_of, results_of

from lezo_ds.checkpoints.snapshots import snapshot_steps
from lezo_ds.config import load_yaml
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.zo.records import StepRecord

pytestmark = pytest.mark.distributed

STEPS = 8
SCALE = "zo.perturbation_scale=2e-3"
CHANGING = ("results.json", ".lock")
MAIN = REPOSITORY / "lezo_ds" / "__main__.py"


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A finished run on two ranks, and what it printed."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    words = ["train", *run_words(recipe, run_dir, SCALE)]
    return run_dir, run_forked_well(words, program=MAIN, num_ranks=2)


def test_a_run_leaves_a_directory_that_says_what_it_was(trained):
    run_dir, _ = trained
    names = {"config.yaml", "journal.jsonl", "metrics.jsonl", "results.json"}
    names |= {"predictions", "snapshots", ".lock"}
    assert {path.name for path in run_dir.iterdir()} == names
    assert snapshot_steps(run_dir / "snapshots") == [4, 8]
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
    lines = read_lines(run_dir / "metrics.jsonl")
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
    assert results["zero_shot"] == first.metrics["accuracy"]
    assert results["test"] == last.metrics["accuracy"]
    assert 0.5 <= results["majority_class"] < 1
    assert (results["best_step"], results["best_dev_loss"]) == (best.step, best.loss)
    assert results["macro_f1"] == last.metrics["macro_f1"]
    by_label = results["by_label"]
    assert by_label.keys() == {"0", "1"}  # as the records hold them
    num_right = sum(row["examples"] * row["recall"] for row in by_label.values())
    num_examples = sum(row["examples"] for row in by_label.values())
    assert num_right / num_examples == pytest.approx(results["test"])
    assert f"macro F1 {results['macro_f1']:.3f}" in finished.out
    assert (results["steps"], results["skipped_steps"], results["world_size"]) == (STEPS, 0, 2)
    for step, score in ((0, results["zero_shot"]), (results["best_step"], results["test"])):
        rows = read_lines(run_dir / "predictions" / f"step-{step:08}.jsonl")
        are_right = [row["predicted"] in row["right"] for row in rows]
        assert [row["score"] for row in rows] == are_right
        assert sum(are_right) / len(rows) == pytest.approx(score)
    assert results["weights_digest"] == digest_after(run_dir, best.step)


def test_the_same_command_changes_nothing_and_more_steps_go_on(trained, recipe):
    run_dir, _ = trained

    def contents():
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if path.name not in CHANGING}

    before = contents(), end(run_dir)
    train(recipe, run_dir, SCALE)
    assert (contents(), end(run_dir)) == before
    at_once = run_dir.with_name("at_once")
    for directory, every in ((run_dir, 6), (at_once, 4)):  # each evaluates after step 12
        train(recipe, directory, SCALE, "train.steps=12", f"train.eval_every={every}")
    assert records_of(run_dir, StepRecord) == records_of(at_once, StepRecord)
    longer, other = end(run_dir), end(at_once)
    assert (longer.results, longer.weights) == (other.results, other.weights)
