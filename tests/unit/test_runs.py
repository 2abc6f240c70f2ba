"""Parts of a run that need no model: its header, its directory, its training state, and what it
shows."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
from contextlib import ExitStack
from dataclasses import asdict, replace

import psutil
import pytest

from lezo_ds import __version__, registry
from lezo_ds.config import config_from_dict, keys_with, may_differ_on_resume
from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, Header, encode_journal
from lezo_ds.runs import records
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.evaluations import best_evaluation, is_worse_than_base, stopping_step
from lezo_ds.runs.export import read_file
from lezo_ds.runs.records import assert_same_run
from lezo_ds.runs.results import RunResults, method_name
from lezo_ds.runs.screen import run_summary
from lezo_ds.runs.signals import launchers

VALUES = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100},
}


def config(*overrides):
    return config_from_dict(VALUES, "the test", overrides)


def header(*overrides):
    values = {
        key: value for key, value in config(*overrides).model_dump().items() if key != "run_dir"
    }
    inputs = {
        "model_config": {"rope": {"theta": 1e4}},
        "data_fingerprints": {"train": "a", "dev": "b"},
    }
    return Header(
        noise_version=1,
        model_fingerprint="a1b2",
        parameter_table_hash="c3d4",
        config=values | inputs,
        libraries={"lezo_ds": __version__},
        arithmetic={"processor": "H100"},
    )


MAY_DIFFER = keys_with("may_differ_on_resume")
RECORDED = header()


def inputs(**changes):
    return replace(RECORDED, config={**RECORDED.config, **changes})


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (replace(RECORDED, noise_version=3), "noise_version differs .*: it is 3, and was 1"),
        (
            replace(RECORDED, model_fingerprint="ff"),
            "model_fingerprint differs .*: it is 'ff', and was 'a1b2'",
        ),
        (
            replace(RECORDED, parameter_table_hash="ee"),
            "parameters differs .*: it is 'ee', and was 'c3d4'",
        ),
        (
            inputs(model_config={"rope": {"theta": 1e6}}),
            "model_config.rope.theta differs .* was 10000.0",
        ),
        (inputs(data_fingerprints={"train": "a"}), "data_fingerprints.dev differs .* was 'b'"),
        (header("train.batch_size=32"), "train.batch_size differs .*: it is 32, and was 16"),
        (header("seed=3"), "seed differs from the journal's: it is 3, and was 0"),
    ],
)
def test_the_first_input_that_differs_is_refused_with_both_values(ours, message):
    with pytest.raises(UserError, match=f"{message}.*; fix: "):
        assert_same_run(RECORDED, ours, MAY_DIFFER)


def test_a_run_of_another_release_is_refused_with_both_versions(tmp_path):
    directory = RunDirectory(tmp_path)
    older = replace(RECORDED, libraries={"lezo_ds": "0.6.3"})
    directory.journal.write_bytes(encode_journal(older, []))
    message = f"was written by lezo_ds 0.6.3, and this is {__version__}; fix: pip install"
    for read in (lambda: records.read_run(tmp_path), lambda: read_file(directory.journal, [])):
        with pytest.raises(UserError, match=message):
            read()


def test_code_that_has_changed_is_another_input(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "judge_of_runs.py").write_text(f"def judge(): return '{name}'\n")
    values = config().model_dump()
    values["train"]["objective"] = {"judge_of_runs:judge": 1.0}
    monkeypatch.setattr(registry, "FOLDERS", [str(tmp_path / "one")])
    codes = []
    for folder in ("one", "two", "one"):  # each has a module of its own
        registry.FOLDERS[:] = [str(tmp_path / folder)]
        found = registry.Registry("reward", "train.objective").find("judge_of_runs:judge")
        assert found() == folder
        codes.append(records.code_of(values))
    assert codes[0] == codes[2] != codes[1]
    recorded, ours = (inputs(code=code) for code in codes[:2])
    with pytest.raises(UserError, match=r"code.judge_of_runs:judge differs .* fix: restore"):
        assert_same_run(recorded, ours, MAY_DIFFER)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ((), "LeZO"),
        (("zo.sparsity=0", "peft.kind=lora"), "MeZO with LoRA"),
        (
            (
                "zo.estimator=evolution-strategies",
                "zo.directions=4",
                "zo.noise_rank=1",
                "zo.layer_policy=fixed",
                "zo.sparsity=0.5",
            ),
            "evolution strategies on rank-1 directions of the last 50% of the blocks",
        ),
    ],
)
def test_the_name_of_a_method_follows_from_the_keys(keys, name):
    assert method_name(config(*keys)) == name


def test_what_a_resumption_refuses_changes_no_recorded_run(tmp_path):
    refused = (
        "zo.noise_rank=1",
        "zo.noise_distribution=rademacher",
        "zo.weight_decay=0.1",
        "zo.only_blocks=true",
        "zo.estimator_options.size=2",
        "peft.lora_alpha=99",
        "model.dtype=fp32",
        "seed=1",
        "data.max_length=9",
    )
    for override in refused:
        key = override.partition("=")[0]
        with pytest.raises(UserError, match=f"{key} of run .* cannot be .*; fix: remove {key}=..."):
            records.config_of(RECORDED, tmp_path, ["model.path=m", override])
    same = ["zo.noise_rank=0", "peft.lora_alpha=16", "model.path=m", "partition_size=1"]
    changed = records.config_of(RECORDED, tmp_path, same)
    assert (changed.model.path, changed.partition_size) == ("m", 1)
    asked = records.config_of(RECORDED, tmp_path, ["data.max_length=9"], ["data.max_length"])
    assert asked.data.max_length == 9
    # The module of a schedule is not imported.
    own = replace(RECORDED, config=header("zo.lr_schedule=linear").config)
    own.config["zo"]["lr_schedule"] = "absent:Schedule"
    assert records.config_of(own, tmp_path, ["train.steps=7"]).train.steps == 7


def test_a_chat_that_is_resumed_keeps_the_day_on_which_it_started(tmp_path):
    words = ("data.train=t.csv", "data.messages=turns", f"run_dir={tmp_path}")
    started = config(*words)
    today = datetime.date.today().isoformat()
    assert records.with_start_date(started).data.date == today
    recorded = header(*words, "data.date=2024-02-29")
    (tmp_path / "journal.jsonl").write_bytes(encode_journal(recorded, []))
    assert records.with_start_date(started).data.date == "2024-02-29"
    chosen = config(*words, "data.date=2020-01-01")
    assert records.with_start_date(chosen) == chosen
    assert records.with_start_date(config(f"run_dir={tmp_path}")).data.date is None


def test_some_keys_may_differ_and_libraries_and_processors_may_with_a_warning(caplog):
    changes = [f"train.{name}" for name in ("steps=300", "eval_every=7", "keep_snapshots=9")]
    ours = header(*changes, "partition_size=2", "model.path=elsewhere")
    assert_same_run(RECORDED, ours, MAY_DIFFER)
    assert caplog.messages == []
    ours = replace(
        ours, libraries={"lezo_ds": __version__, "torch": "3"}, arithmetic={"processor": "H200"}
    )
    assert_same_run(RECORDED, ours, MAY_DIFFER)
    assert caplog.messages == [
        "processor was 'H100' when the journal was started and is 'H200' now",
        "torch was 'absent' when the journal was started and is '3' now",
    ]


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_the_number_of_steps_may_differ_unless_the_learning_rate_depends_on_it(schedule):
    key = f"zo.lr_schedule={schedule}"
    longer, may_differ = header(key, "train.steps=300"), may_differ_on_resume(config(key))
    if schedule == "constant":
        assert_same_run(header(key), longer, may_differ)
    else:
        with pytest.raises(UserError, match=r"train\.steps differs"):
            assert_same_run(header(key), longer, may_differ)


# The directory.


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "deep" / "run"
    with RunDirectory(path).locked():
        yield RunDirectory(path)


def metrics(directory):
    return [
        json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_path_that_cannot_be_written_and_a_file_system_without_locks_are_named(
    tmp_path, monkeypatch, caplog
):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "run"):
        with (
            pytest.raises(UserError, match=r"file.* cannot be written: .*; fix: "),
            RunDirectory(path).locked(),
        ):
            pass
    assert file.read_text() == "mine"

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunDirectory(tmp_path).locked():
        assert "is on a file system without locks (No locks available)" in caplog.text


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    private = tmp_path / "private"
    private.write_text("private")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(private)
    with (
        pytest.raises(UserError, match="run cannot be written"),
        RunDirectory(tmp_path / "run").locked(),
    ):
        pass
    assert private.read_text() == "private"


def test_replicas_take_the_first_free_number_and_none_where_no_lock_tells_which_is_free(
    tmp_path, monkeypatch
):
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as first, ExitStack() as second:
        assert run.lock(first, is_replica=True).path == tmp_path / "run"
        assert run.lock(second, is_replica=True).path == tmp_path / "run" / "replicas" / "1"
        with pytest.raises(UserError, match="is in use"):
            run.lock(second, is_replica=False)
        first.close()
        assert run.lock(second, is_replica=True).number == 0

    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ExitStack() as stack:
        message = r"run is on a file system without locks .*, which replicas need; fix: "
        with pytest.raises(UserError, match=message):
            run.lock(stack, is_replica=True)
        assert run.lock(stack, is_replica=False).path == tmp_path / "run"


def test_metrics_of_steps_that_will_be_done_again_and_torn_or_damaged_lines_are_dropped(directory):
    assert directory.cut_logs(0, []) == 0.0
    for step in range(5):
        directory.log_metrics({"step": step, "loss": 0.1, "seconds": 1.5 * step})
    damaged = b'[1]\n{"stop": 2}\n{"step": "2", "seconds": 1}\n\xff\xfe\n' + b"[" * 9000 + b"\n"
    with (directory.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "sec')
    assert directory.cut_logs(5, []) == 6.0
    damaged += b'{"step": 2, "seconds": 1' + b"0" * 400 + b"}\n"
    with (directory.path / "metrics.jsonl").open("ab") as file:
        file.write(damaged + b'{"step": 3, "seconds": 4.5}\n')
    assert directory.cut_logs(3, []) == 4.5
    directory.log_metrics({"step": 4, "seconds": 9.0})
    assert [entry["step"] for entry in metrics(directory)] == [0, 1, 2, 3, 3, 4]


def test_an_evaluation_that_will_be_done_again_leaves_no_lines_and_a_torn_one_swallows_none(
    directory,
):
    sample = {"prompt": "p", "answer": "a"}
    for step in (0, 5):
        directory.log_metrics({"step": step, "dev_loss": 0.1, "seconds": step})
        directory.log_samples(step, "dev", [sample])
    directory.log_metrics({"step": 5, "loss": 0.1, "seconds": 6})
    with directory.samples.open("a") as file:
        file.write('{"step": 5, "spl')
    assert directory.cut_logs(5, [("dev", 0), ("test", 5)]) == 6.0
    directory.log_samples(5, "dev", [sample])
    assert [("dev_loss" in entry, entry["step"]) for entry in metrics(directory)] == [
        (True, 0),
        (False, 5),
    ]
    samples = [json.loads(line) for line in directory.samples.read_text().splitlines()]
    assert [entry["step"] for entry in samples] == [0, 5]


DAMAGED = (
    "[]",
    "[" * 9000,
    '{"finished": true}',
    '{"steps": []}',
    '{"finished": 1, "test": "x"}',
    "\udcff",
)
DAMAGED += (f'{{"finished": true, "test": {10**400}}}',)
RESULTS = RunResults(
    task="sst2",
    method="lezo",
    peft="none",
    metric="accuracy",
    protocol="mezo",
    finished=True,
    zero_shot=0.5,
    test=0.75,
    majority_class=None,
    best_step=4,
    best_dev_loss=0.1 + 0.2,
    trained_dev_loss=0.5,
    worse_than_base=False,
    steps=8,
    early_stop_step=None,
    seed=0,
    seconds=1.5,
    peak_memory_bytes=1 << 40,
    skipped_steps=0,
    model_fingerprint="f",
    weights_digest="d",
    world_size=2,
)
VALUES_OF_RESULTS = asdict(RESULTS)
DAMAGED += tuple(
    json.dumps(VALUES_OF_RESULTS | change)
    for change in (
        {"steps": True},
        {"finished": 1},
        {"best_step": "4"},
        {"weights_digest": ["d"]},
        {"test": None},
        {"test": 10**400},
    )
)
DAMAGED += (json.dumps({name: VALUES_OF_RESULTS[name] for name in ("finished", "test", "steps")}),)


def test_results_are_read_as_they_were_written(directory):
    assert RunResults.read(directory.results) is None
    directory.write_json(directory.results, VALUES_OF_RESULTS)
    assert RunResults.read(directory.results) == RESULTS
    assert list(json.loads(directory.results.read_text())) == list(VALUES_OF_RESULTS)
    assert RESULTS.step_of_weights == 4
    assert replace(RESULTS, finished=False).step_of_weights == 8
    other_versions = VALUES_OF_RESULTS | {"younger": 1, "seconds": 2}
    del other_versions["trained_dev_loss"], other_versions["worse_than_base"]
    directory.results.write_text(json.dumps(other_versions))
    assert RunResults.read(directory.results) == replace(
        RESULTS, trained_dev_loss=None, seconds=2.0
    )


def test_the_summary_of_a_run_is_short():
    assert run_summary("runs/x", RESULTS).splitlines() == [
        "Finished: 8 steps in 0:00:02.",
        "Test accuracy: 0.5 before, 0.75 after.",
        "Best step: 4 (validation loss 0.3).",
        "Run directory: runs/x",
    ]
    assert "0.75 after (majority class 0.600)." in run_summary(
        "runs/x", replace(RESULTS, majority_class=0.6)
    )
    stopped = replace(RESULTS, finished=False, test=None)
    assert run_summary("runs/x", stopped).startswith("Stopped after step 8 (0:00:02).")


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_results_are_not_read(directory, text):
    directory.results.write_bytes(text.encode(errors="surrogateescape"))
    assert RunResults.read(directory.results) is None


# Launchers.


def test_processes_of_others_that_are_hidden_are_no_launchers(monkeypatch):
    """As on a machine whose /proc is mounted with hidepid."""

    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    for hidden in ("cmdline", "ppid"):
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, hidden, refuse)
            assert launchers() == []


# Early stopping.


def evaluations(*losses, split="dev"):
    return [
        EvaluationRecord(step=10 * (i + 1), split=split, loss=loss, metrics={"accuracy": 0.5})
        for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "patience", "step"),
    [
        ([], 1, None),
        ([3.0, 2.0, 1.0], 1, None),
        ([3.0, 3.0], 1, 20),
        ([3.0, 4.0, 2.0, 2.5, 2.4], 2, 50),
        ([3.0, 4.0, 2.0, 2.5, 2.4], 3, None),
        ([3.0, 4.0, 4.0, 2.0, 1.0], 2, 30),  # what comes later changes nothing
        ([None, None, 3.0], 2, 20),
        ([None, 3.0, None, 2.0], 2, None),
        ([3.0, 3.0, 3.0], None, None),
    ],
)
def test_patience_counts_evaluations_in_a_row_that_are_not_better_than_the_best(
    losses, patience, step
):
    assert stopping_step(evaluations(*losses), patience) == step
    tested = [
        *evaluations(5.0, split="test"),
        *evaluations(*losses),
        *evaluations(9.0, 9.0, split="test"),
    ]
    assert stopping_step(tested, patience) == step


def test_the_best_step_is_the_first_with_the_lowest_validation_loss():
    assert best_evaluation(evaluations(None, 2.0, 1.0, 1.0, 3.0)).step == 30
    assert best_evaluation(evaluations(None, None)).step == 10
    assert best_evaluation(evaluations(1.0, split="test")) is None


def test_the_base_model_can_be_the_best_and_costs_no_patience():
    base = EvaluationRecord(step=0, split="dev", loss=1.0, metrics={"accuracy": 0.5})
    for losses, is_worse in (((1.0, None, 2.0), True), ((2.0, 0.9), False), ((), False)):
        recorded = [base, *evaluations(*losses)]
        assert is_worse_than_base(recorded) == is_worse
        assert (best_evaluation(recorded) is base) == (is_worse or not losses)
    assert not is_worse_than_base(evaluations(2.0))  # of a run that never scored the base model
    assert stopping_step([base, *evaluations(2.0, 3.0)], 1) == 20
