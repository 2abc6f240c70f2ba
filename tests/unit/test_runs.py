"""Parts of a run: its header, its directory, and where it stops."""

import datetime
import errno
import fcntl
import json
import os
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from own_data import own_config, write_byte_model, write_tickets

from lezo_ds import __version__, registry
from lezo_ds.config import config_from_dict, keys_with, may_differ_on_resume
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, Header, encode_journal
from lezo_ds.runs import records
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.evaluations import best_evaluation, is_worse_than_base, stopping_step
from lezo_ds.runs.export import read_file
from lezo_ds.runs.records import assert_same_run
from lezo_ds.runs.screen import progress_bar, unclocked

VALUES = {"run_dir": "runs/x", "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"}}
VALUES |= {"zo": {"learning_rate": 1e-6, "sparsity": 0.75}, "train": {"steps": 100}}


def config(*overrides):
    return config_from_dict(VALUES, "the test", overrides)


def header(*overrides):
    values = config(*overrides).model_dump(exclude={"run_dir"})
    values["model_config"] = {"rope": {"theta": 1e4}}
    values["data_fingerprints"] = {"train": "a", "dev": "b"}
    facts = {"noise_version": 1, "model_fingerprint": "a1b2", "parameter_table_hash": "c3d4"}
    facts |= {"libraries": {"lezo_ds": __version__}, "arithmetic": {"processor": "H100"}}
    return Header(config=values, **facts)


MAY_DIFFER = keys_with("may_differ_on_resume")
RECORDED = header()


def inputs(**changes):
    return replace(RECORDED, config={**RECORDED.config, **changes})


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (replace(RECORDED, noise_version=3), "noise_version differs .*: it is 3, and was 1"),
        (replace(RECORDED, model_fingerprint="ff"), "model_fingerprint differs .* was 'a1b2'"),
        (replace(RECORDED, parameter_table_hash="ee"), "parameters differs .* was 'c3d4'"),
        (inputs(model_config={"rope": {"theta": 1e6}}), "config.rope.theta differs .* was 10000.0"),
        (inputs(data_fingerprints={"train": "a"}), "data_fingerprints.dev differs .* was 'b'"),
        (header("train.batch_size=32"), "train.batch_size differs .*: it is 32, and was 16"),
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
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    started = config(f"model.path={tmp_path}", "train.objective={judge_of_runs:judge: 1}")
    monkeypatch.setattr(registry, "FOLDERS", [str(tmp_path / "one")])
    headers = []
    for folder in ("one", "two", "one"):  # each has a module of its own
        registry.FOLDERS[:] = [str(tmp_path / folder)]
        found = registry.Registry("reward", "train.objective").find("judge_of_runs:judge")
        assert found() == folder
        headers.append(records.make_header(started, None, "a1b2", "c3d4"))
    assert headers[0] == headers[2]
    with pytest.raises(UserError, match=r"code.judge_of_runs:judge differs .* fix: restore"):
        assert_same_run(headers[0], headers[1], MAY_DIFFER)


def test_other_tokens_that_end_an_answer_are_another_input(tmp_path):
    model = write_byte_model(tmp_path / "model")
    tickets = write_tickets(tmp_path / "tickets.csv", 20)
    own = own_config(model, tickets, prompt="{text}", completion="{topic}")
    headers = []
    for end in (2, 5):
        (model / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
        headers.append(records.make_header(own, load_task_data(own), "a1b2", "c3d4"))
    with pytest.raises(UserError, match=r"end_ids differs .* it is \[2, 5\], and was \[2\]"):
        assert_same_run(*headers, MAY_DIFFER)


FIXED = ["zo.noise_rank=1", "zo.estimator_options.size=2", "peft.lora_alpha=99"]
FIXED += ["model.dtype=fp32", "seed=1", "data.max_length=9"]


@pytest.mark.parametrize("override", FIXED)
def test_what_a_resumption_refuses_changes_no_recorded_run(override, tmp_path):
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"{key} of run .* cannot be .*; fix: remove {key}=..."):
        records.config_of(RECORDED, tmp_path, ["model.path=m", override])


def test_other_keys_change_a_recorded_run(tmp_path):
    same = ["zo.noise_rank=0", "peft.lora_alpha=16", "model.path=m", "partition_size=1"]
    changed = records.config_of(RECORDED, tmp_path, same)
    assert (changed.model.path, changed.partition_size) == ("m", 1)
    asked = records.config_of(RECORDED, tmp_path, ["data.max_length=9"], ["data.max_length"])
    assert asked.data.max_length == 9
    chat = header("data.messages=turns", "data.chat_template_kwargs.thinks=true")
    option = ["data.chat_template_kwargs.thinks=false"]
    asked = records.config_of(chat, tmp_path, option, ["data.chat_template_kwargs"])
    assert asked.data.chat_template_kwargs == {"thinks": False}
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
    libraries = {"lezo_ds": __version__, "torch": "3"}
    ours = replace(ours, libraries=libraries, arithmetic={"processor": "H200"})
    assert_same_run(RECORDED, ours, MAY_DIFFER)
    assert caplog.messages == [
        "processor was 'H100' when the journal was started and is 'H200' now",
        "torch was 'absent' when the journal was started and is '3' now",
    ]


def test_the_number_of_steps_may_differ_unless_the_learning_rate_depends_on_it():
    assert_same_run(RECORDED, header("train.steps=300"), may_differ_on_resume(config()))
    linear = "zo.lr_schedule=linear"
    may_differ = may_differ_on_resume(config(linear))
    for more, fix in (((), ""), (["train.epochs=2"], " and train.epochs=null")):
        with pytest.raises(UserError, match=rf"; fix: set train.steps=100{fix}, on which"):
            assert_same_run(header(linear), header(linear, "train.steps=300", *more), may_differ)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_neither_a_file_nor_a_link_in_place_of_a_directory_or_its_lock_is_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(file)
    for path in (file, file / "run", tmp_path / "run"):
        with pytest.raises(UserError, match="cannot be written"), RunDirectory(path).locked():
            pass
    assert file.read_text() == "mine"


def test_a_file_system_without_locks_is_named_and_has_no_replicas(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = RunDirectory(tmp_path)
    with run.locked(), ExitStack() as stack:
        assert "is on a file system without locks (No locks available)" in caplog.text
        with pytest.raises(UserError, match=r"without locks .*, which replicas need"):
            run.lock(stack, is_replica=True)


def test_replicas_take_the_first_free_number(tmp_path):
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as first, ExitStack() as second:
        assert run.lock(first, is_replica=True).path == tmp_path / "run"
        assert run.lock(second, is_replica=True).path == tmp_path / "run" / "replicas" / "1"
        with pytest.raises(UserError, match="is in use"):
            run.lock(second, is_replica=False)
        first.close()
        assert run.lock(second, is_replica=True).number == 0


def test_lines_of_what_will_be_done_again_and_torn_or_damaged_ones_are_dropped(tmp_path):
    directory = RunDirectory(tmp_path)
    sample = {"prompt": "p", "answer": "a"}
    for step in range(5):
        directory.log_metrics({"step": step, "loss": 0.1, "seconds": 1.5 * step})
    for step in (0, 3):
        directory.log_metrics({"step": step, "dev_loss": 0.1, "seconds": 1.5 * step})
        directory.log_samples(step, "dev", [sample])
    damaged = [b"[1]", b'{"stop": 2}', b'{"step": "2", "seconds": 1}', b"\xff\xfe", b"[" * 9000]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join([*damaged, b'{"step": 2, "sec']))
    with directory.samples.open("a") as file:
        file.write('{"step": 3, "spl')
    assert directory.cut_logs(3, [("dev", 0), ("test", 3)]) == 4.5
    directory.log_samples(3, "dev", [sample])
    directory.log_metrics({"step": 4, "seconds": 9.0})
    metrics = lines_of(tmp_path / "metrics.jsonl")
    kept = [(entry["step"], "dev_loss" in entry) for entry in metrics]
    assert kept == [*((step, False) for step in range(4)), (0, True), (4, False)]
    assert [entry["step"] for entry in lines_of(directory.samples)] == [0, 3]


def evaluations(*losses, split="dev"):
    scores = {"accuracy": 0.5}
    return [EvaluationRecord(10 * n, split, loss, scores) for n, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "patience", "step"),
    [
        ([], 1, None),
        ([3.0, 2.0, 1.0], 1, None),
        ([3.0, 3.0], 1, 20),
        ([3.0, 4.0, 2.0, 2.5, 2.4], 2, 50),
        ([3.0, 4.0, 4.0, 2.0, 1.0], 2, 30),  # what comes later changes nothing
        ([None, None, 3.0], 2, 20),
        ([None, 3.0, None, 2.0], 2, None),
        ([3.0, 3.0, 3.0], None, None),
    ],
)
def test_patience_counts_evaluations_that_are_no_better(losses, patience, step):
    assert stopping_step(evaluations(*losses), patience) == step
    of_test = evaluations(9.0, 9.0, split="test")
    assert stopping_step([*evaluations(*losses), *of_test], patience) == step


def test_the_rate_of_steps_has_no_time_of_evaluations():
    bar = progress_bar(9, is_shown=True)
    unclocked(bar, lambda: time.sleep(0.5))
    assert bar.format_dict["elapsed"] < 0.2


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
    # As of a run that never scored the base model.
    assert not is_worse_than_base(evaluations(2.0))
    assert stopping_step([base, *evaluations(2.0, 3.0)], 1) == 20
