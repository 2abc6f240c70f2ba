from __future__ import annotations

import errno
import fcntl
import json
import os

import pytest
import torch
import yaml

from lezo_ds.errors import UserError
from lezo_ds.runs.run_directory import LIBRARIES, RunDirectory, environment, library_versions


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "deep" / "run")
    made.create()
    return made


def metrics(directory):
    return [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_its_place_or_above_it_is_a_users_error(below, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match=r"file.* cannot be written to; got: .*; expected: .*; fix: "):
        RunDirectory(file / below).create()
    assert file.read_text() == "mine"


def test_a_locked_directory_is_refused_until_it_is_released(directory):
    other = RunDirectory(directory.path)
    with directory.locked():
        message = (
            rf"is in use; got: .* besides process {os.getpid()} on .*; expected: one process .*; fix: wait"
        )
        with pytest.raises(UserError, match=message), other.locked():
            pass
    assert list(directory.path.iterdir()) == []
    with other.locked():
        (lock,) = directory.path.iterdir()
    lock.write_text("left by a process that was killed")
    with other.locked():
        pass


def test_a_file_system_without_locks_is_named(directory, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with directory.locked(), RunDirectory(directory.path).locked():
        pass
    assert all("is on a file system without locks (No locks available)" in text for text in caplog.messages)
    assert len(caplog.messages) == 2


def test_facts_are_the_config_as_yaml_and_the_environment_as_json(directory):
    directory.write_facts({"seed": 3, "zo": {"learning_rate": 1e-6, "sparsity": None}}, 2, "cpu")
    config = yaml.safe_load((directory.path / "config.yaml").read_text())
    assert config == {"seed": 3, "zo": {"learning_rate": 1e-6, "sparsity": None}}
    facts = json.loads((directory.path / "environment.json").read_text())
    assert facts == environment(2, "cpu")
    assert facts["world_size"] == 2
    assert facts["hardware"]["device"] == "cpu"
    assert facts["threads"] == torch.get_num_threads()


def test_versions_name_every_library_a_number_depends_on():
    versions = library_versions()
    assert versions.keys() == {"python", "lezo_ds", *LIBRARIES}
    assert versions["torch"] == torch.__version__


def test_metrics_of_steps_that_will_be_done_again_are_dropped(directory):
    for step in range(5):
        directory.log_metrics({"step": step, "loss": 0.1, "seconds": 1.5 * step})
    assert directory.cut_metrics(3) == 4.5
    assert [entry["step"] for entry in metrics(directory)] == [0, 1, 2, 3]


def test_a_metrics_line_that_a_crash_cut_short_is_dropped(directory):
    directory.log_metrics({"step": 1, "seconds": 2.0})
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "sec')
    assert directory.cut_metrics(2) == 2.0
    directory.log_metrics({"step": 2, "seconds": 3.0})
    assert [entry["step"] for entry in metrics(directory)] == [1, 2]


def test_a_run_without_metrics_has_trained_no_seconds(directory):
    assert directory.cut_metrics(0) == 0.0
    assert metrics(directory) == []
