"""Runs that are killed in a file operation, or that a disk refuses, end as if nothing happened."""

import shutil
import signal

import pytest
from assets import read_lines
from commands import assert_one_error, run_words, train
from faults import Fault, check_interrupted, run_faulty
from run_ends import end, num_steps, records_of

from lezo_ds.checkpoints.snapshots import MANIFEST, read_manifest, snapshot_path, snapshot_steps
from lezo_ds.zo.records import StepRecord

STEPS = 12
LENGTH = [f"train.steps={STEPS}", "train.eval_every=4"]
LENGTH += ["train.snapshot_every=3", "train.keep_snapshots=2"]
JOURNAL = "journal.jsonl"
TEMPORARY = r"snapshots/\.step-\d+\.tmp/"
SNAPSHOT = r"snapshots/step-\d+"


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """A run to which nothing happens: (its directory, its end, the operations on its directory)."""
    directory = tmp_path_factory.mktemp("undisturbed")
    log = directory / "operations"
    finished = run_faulty(arguments(recipe, directory / "run"), log=log)
    assert finished.code == 0, finished.err[-5000:]
    return directory / "run", end(directory / "run"), log.read_text().splitlines()


@pytest.fixture(scope="module")
def halted(recipe, undisturbed, tmp_path_factory):
    """A run killed within the line of its eleventh step, with snapshots of steps 6 and 9."""
    run_dir = tmp_path_factory.mktemp("halted") / "run"
    killed(recipe, run_dir, undisturbed, Fault("write", JOURNAL, 15, "within"))
    assert num_steps(run_dir) == 10
    assert snapshot_steps(run_dir / "snapshots") == [6, 9]
    return run_dir


def arguments(recipe, run_dir):
    return run_words(recipe, run_dir, *LENGTH)


def killed(recipe, run_dir, undisturbed, fault):
    finished = run_faulty(arguments(recipe, run_dir), fault)
    assert finished.code == -signal.SIGKILL, finished.err[-5000:]
    check_interrupted(run_dir, undisturbed[1])


def finish(recipe, run_dir):
    train(recipe, run_dir, *LENGTH)
    return end(run_dir)


KILLS = (
    Fault("replace", JOURNAL),  # before the header has its name
    Fault("write", JOURNAL, 2),  # before an evaluation's line
    Fault("write", JOURNAL, 4, "within"),  # within the line of a step
    Fault("fsync", JOURNAL, 3),  # between a step's line and its sync
    Fault("save", TEMPORARY + ".*", 1, "within"),  # within a snapshot's weights
    Fault("fsync", TEMPORARY + "tokenizer.json", 1, "within"),
    Fault("replace", TEMPORARY + MANIFEST),
    Fault("replace", SNAPSHOT),  # before a snapshot has its name
    Fault("replace", SNAPSHOT, 1, "after"),
    Fault("unlink", SNAPSHOT + "/.*", 3),  # while an old snapshot is removed
    Fault("replace", "results.json"),
)
"""In the order in which they can strike one run that goes on after each."""


@pytest.mark.thorough
def test_a_run_killed_in_any_file_operation_ends_as_if_never_killed(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    for fault in KILLS:
        killed(recipe, run_dir, undisturbed, fault)
    assert finish(recipe, run_dir) == undisturbed[1]
    assert not list((run_dir / "snapshots").glob(".*"))
    assert reported_evaluations(run_dir) == reported_evaluations(undisturbed[0])


def reported_evaluations(run_dir):
    """Return the steps and losses of the evaluations in metrics.jsonl."""
    entries = read_lines(run_dir / "metrics.jsonl")
    losses = [(each["step"], each.get("dev_loss"), each.get("test_loss")) for each in entries]
    return [(step, *both) for step, *both in losses if both != [None, None]]


def test_only_the_line_of_the_last_step_is_ever_not_synced(undisturbed):
    run_dir, _, operations = undisturbed
    records = iter(records_of(run_dir))
    num_written, num_synced, num_applied = 0, 0, 0
    relied_on = ("replace snapshots/step-", "replace predictions/", "replace results.json")
    for operation in operations[operations.index("write journal.jsonl") :]:
        if operation == "write journal.jsonl":
            # Also that of an evaluation, which the next steps rely on.
            assert num_synced == num_written
            num_written += isinstance(next(records), StepRecord)
        elif operation == "synced journal.jsonl":
            num_synced = num_written
        elif operation == "apply ":
            num_applied += 1
            assert num_written >= min(num_applied, STEPS)
            assert num_synced >= min(num_applied, STEPS) - 1
        elif operation.startswith(relied_on):
            assert num_synced == num_written
    assert num_applied == STEPS


def test_a_snapshot_gets_its_name_when_all_of_it_is_synced(undisturbed):
    run_dir, _, operations = undisturbed
    for step in snapshot_steps(run_dir / "snapshots"):
        directory = snapshot_path(run_dir / "snapshots", step)
        temporary, target = f"snapshots/.{directory.name}.tmp", f"snapshots/{directory.name}"
        named = operations.index(f"replace {target}")
        manifest = operations.index(f"replace {temporary}/{MANIFEST}")
        for file in read_manifest(directory)["files"]:
            assert operations.index(f"fsync {temporary}/{file}") < manifest
        assert operations.index(f"fsync {temporary}/.{MANIFEST}.tmp") < manifest
        assert f"fsync {temporary}" in operations[manifest:named]
        assert operations[named + 1] == "fsync snapshots"
    made = operations.index("mkdir snapshots")
    assert "fsync ." in operations[made : operations.index("replace snapshots/step-00000003")]


def flip(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 4
    path.write_bytes(data)


def test_a_run_resumes_past_damaged_files(recipe, undisturbed, halted, tmp_path):
    run_dir = shutil.copytree(halted, tmp_path / "run")
    path = run_dir / "journal.jsonl"
    data = path.read_bytes()
    assert not data.endswith(b"\n")  # torn by the kill
    path.write_bytes(data[: data.rindex(b"\n") - 5])  # and the line before, too
    flip(snapshot_path(run_dir / "snapshots", 9) / "model-00001.safetensors")
    (snapshot_path(run_dir / "snapshots", 6) / MANIFEST).unlink()
    temporary = run_dir / "snapshots" / ".step-00000001.tmp"
    shutil.copytree(snapshot_path(run_dir / "snapshots", 6), temporary)
    assert finish(recipe, run_dir) == undisturbed[1]
    assert not list((run_dir / "snapshots").glob(".*"))


LINE = Fault("write", JOURNAL, 4, "within", "ENOSPC")
REFUSALS = (
    (Fault("fsync", ".config.yaml.tmp", effect="ENOSPC"), 1, "config.yaml"),
    (LINE, 3, JOURNAL),
    (Fault("save", effect="ENOSPC"), 1, "step-00000003"),
    (Fault("fsync", JOURNAL, 2, effect="EIO", lasts=True), 3, "error; last good step: "),
    (Fault("write", JOURNAL, 3, effect="EROFS", lasts=True), 3, "Read-only"),
    (Fault("replace", "results.json", effect="EROFS"), 1, "results.json"),
)
"""In the order in which they can strike one run that goes on after each."""


def test_a_disk_that_refuses_ends_a_run_with_one_line_and_it_resumes(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    for fault, code, fragment in REFUSALS:
        assert_one_error(run_faulty(arguments(recipe, run_dir), fault), code, fragment)
        check_interrupted(run_dir, undisturbed[1])
    assert finish(recipe, run_dir) == undisturbed[1]


def test_a_disk_that_refuses_ends_all_ranks(recipe, undisturbed, tmp_path):
    finished = run_faulty(arguments(recipe, tmp_path / "run"), LINE, num_ranks=2, grace=60)
    assert finished.code == 3
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert any(JOURNAL in line for line in errors)
    check_interrupted(tmp_path / "run", undisturbed[1])


def test_a_run_that_diverges_ends_with_an_exit_code_of_its_own(recipe, tmp_path):
    run_dir = tmp_path / "run"
    finished = run_faulty([*arguments(recipe, run_dir), "zo.learning_rate=1e30"], num_ranks=2)
    assert_one_error(finished, 4, "10 steps in a row")
    assert [record.applied for record in records_of(run_dir, StepRecord)] == [True] + [False] * 10
