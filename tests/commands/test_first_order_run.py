"""Runs of method adamw by the commands: killed, stopped, resumed, exported and scored like any other."""

from __future__ import annotations

import json
import os
import signal

import pytest
from assets import REPOSITORY
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from run_ends import digest_after, results_of

from lezo_ds.model.snapshots import read_manifest, snapshot_steps

pytestmark = pytest.mark.distributed

STEPS = 9
KEYS = [
    *("method=adamw", "adamw.learning_rate=1e-3", f"train.steps={STEPS}"),
    *("train.eval_every=3", "train.keep_snapshots=1"),
]
OBJECTIVE = """
import os, signal
from lezo_ds.data.objectives import candidate_scores

trained = False

def loss(logits, batch):
    global trained
    if logits.requires_grad:
        trained = True
    elif trained and "STOPS_IN_EVALUATION" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    return -candidate_scores(logits, batch).log_softmax(dim=1)[:, 0]
"""


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """A run on two ranks to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_forked_well(arguments(recipe, run_dir), num_ranks=2)
    return run_dir


def arguments(recipe, run_dir):
    return ["--config", recipe, f"run_dir={run_dir}", *KEYS]


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_results_the_best_weights_and_a_checkpoint(undisturbed):
    results = results_of(undisturbed)
    assert (results["method"], results["finished"], results["steps"]) == ("adamw", True, STEPS)
    assert results["world_size"] == 2
    assert results["peak_memory_bytes"] > 2**20
    steps = [line for line in metrics_of(undisturbed) if "learning_rate" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    rates = [line["learning_rate"] for line in steps]
    assert rates == pytest.approx([1e-3 * (STEPS - step) / STEPS for step in range(STEPS)], rel=1e-9)
    assert set(snapshot_steps(undisturbed / "snapshots")) == {results["best_step"], STEPS}
    assert not (undisturbed / "journal.jsonl").exists()


def test_the_same_command_on_a_finished_run_changes_nothing(recipe, undisturbed):
    before, metrics = results_of(undisturbed), metrics_of(undisturbed)
    run_forked_well(arguments(recipe, undisturbed), num_ranks=2)
    after = results_of(undisturbed)
    for name in before.keys() - {"seconds", "peak_memory_bytes"}:
        assert after[name] == before[name], name
    assert metrics_of(undisturbed) == metrics


def test_a_run_stopped_then_killed_ends_as_if_nothing_had_happened(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    command = arguments(recipe, run_dir)

    def stop(ranks):
        wait_until(lambda: steps_logged(run_dir) >= 1, ranks[0])
        os.kill(ranks[0].pid, signal.SIGTERM)

    run_forked_well(command, num_ranks=2, meanwhile=stop)
    stopped = json.loads((run_dir / "training_state.json").read_text())["step"]
    assert not results_of(run_dir)["finished"]
    assert 1 <= stopped == results_of(run_dir)["steps"] < STEPS

    def kill(ranks):
        wait_until(lambda: steps_logged(run_dir) > stopped, ranks[0])
        for rank in ranks:
            rank.kill()

    assert run_forked(command, num_ranks=2, meanwhile=kill).code == -signal.SIGKILL
    run_forked_well(command, num_ranks=2)
    ended, expected = results_of(run_dir), results_of(undisturbed)
    kept = ("zero_shot", "test", "best_step", "best_dev_loss", "steps", "finished", "weights_digest")
    assert {name: ended[name] for name in kept} == {name: expected[name] for name in kept}
    assert digest_after(run_dir, STEPS) == digest_after(undisturbed, STEPS)


def test_a_stop_in_an_evaluation_loses_no_step_before_it(recipe, tmp_path):
    (tmp_path / "own.py").write_text(OBJECTIVE)
    path = f"{REPOSITORY}{os.pathsep}{tmp_path}"
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    keys = ["train.objective=own:loss", "train.snapshot_every=0"]
    run_forked_well([*arguments(recipe, undisturbed), *keys], PYTHONPATH=path)
    command = [*arguments(recipe, stopped), *keys]
    run_forked_well(command, PYTHONPATH=path, STOPS_IN_EVALUATION="")
    assert (results_of(stopped)["finished"], results_of(stopped)["steps"]) == (False, 3)
    assert json.loads((stopped / "training_state.json").read_text())["step"] == 3
    assert "dev_loss" not in (stopped / "metrics.jsonl").read_text()
    run_forked_well(command, PYTHONPATH=path)
    steps = [line["step"] for line in metrics_of(stopped) if "learning_rate" in line]
    assert steps == list(range(1, STEPS + 1))
    kept = ("test", "best_step", "best_dev_loss", "finished", "weights_digest")
    ended, expected = results_of(stopped), results_of(undisturbed)
    assert {name: ended[name] for name in kept} == {name: expected[name] for name in kept}


def steps_logged(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"learning_rate"') if path.exists() else 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=0", "sharded among another number of ranks; got: 1 ranks; expected: 2"),
        ("train.steps=24", "config train.steps differs"),
        ("adamw.learning_rate=0.1", "config adamw.learning_rate differs"),
        ("method=lezo", "holds a run of another method"),
    ],
    ids=["ranks", "steps", "learning rate", "method"],
)
def test_a_run_is_not_resumed_as_another(override, message, recipe, undisturbed):
    before = (undisturbed / "training_state.json").read_bytes()
    assert_one_error(run_forked([*arguments(recipe, undisturbed), override]), 2, message)
    assert (undisturbed / "training_state.json").read_bytes() == before


def test_the_best_step_is_exported_and_scores_as_the_results_say(undisturbed, recipe, tmp_path):
    results = results_of(undisturbed)
    exported = ["--run", undisturbed, "--step", "best", "--out", tmp_path / "model"]
    run_forked_well(exported, program="export.py")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    of_run = json.loads(run_forked_well(["--run", undisturbed, "--json"], program="evaluate.py").out)
    assert (of_run["step"], of_run["score"]) == (results["best_step"], results["test"])
    data = [f"data.path={recipe.parent / 'data'}", "data.num_train=30", "data.num_dev=11", "data.num_test=13"]
    of_model = json.loads(
        run_forked_well(["--model", tmp_path / "model", *data, "--json"], program="evaluate.py").out
    )
    assert of_model["score"] == of_run["score"]
    assert of_model["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
