"""What all commands share: help, errors and exit codes, through real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commands import environment, python, run_well

from lezo_ds import command_line
from lezo_ds.config import RunConfig, describe

SCRIPT = """
import sys
from lezo_ds import command_line, errors
def main():
    print("worked")
    {body}
command_line.run(main)
"""


def run_body(body, **variables):
    command = [sys.executable, "-c", SCRIPT.replace("{body}", body)]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=120)


def test_help_shows_every_key_with_its_type_default_and_meaning():
    shown = run_well(python("--help")).out
    assert describe() in shown
    names = [
        f"{section}.{field}" if section else field
        for section, fields in _fields(RunConfig).items()
        for field in fields
    ]
    assert len(names) > 25
    for name in names:
        assert f"\n{name}: " in shown
    assert "zo.sparsity: a number 0 to 1 or null; default null" in shown
    for option in ("--config", "--dry-run", "key=value"):
        assert option in shown


def _fields(config):
    """Return the names of all fields by section, read from the classes themselves."""
    from typing import get_type_hints

    found = {"": []}
    for name, hint in get_type_hints(config).items():
        if hasattr(hint, "__dataclass_fields__"):
            found[name] = list(hint.__dataclass_fields__)
        else:
            found[""].append(name)
    return found


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("pass", 0, ""),
        ("raise errors.UserError('bad', got='x\\ny', fix='none')", 2, "error: bad; got: x y; fix: none\n"),
        ("raise errors.JournalError('torn')", 3, "error: torn\n"),
        ("raise errors.DivergenceError('far')", 4, "error: far\n"),
        ("raise errors.LezoError('odd')", 1, "error: odd\n"),
    ],
    ids=["well", "user", "journal", "divergence", "other"],
)
def test_each_kind_of_end_has_its_exit_code_and_at_most_one_line(body, code, line):
    finished = run_body(body)
    assert finished.returncode == code
    assert finished.stdout == "worked\n"
    assert finished.stderr.endswith(line)
    assert finished.stderr.count("error: ") == bool(line)
    assert "Traceback" not in finished.stderr


def test_a_bug_of_ours_shows_its_traceback():
    finished = run_body("raise ValueError('our own')")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_only_rank_zero_speaks_of_what_is_no_error(name, monkeypatch):
    for other in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(other, raising=False)
    assert command_line._rank() == 0
    monkeypatch.setenv(name, "3")
    assert command_line._rank() == 3


def test_another_rank_than_the_first_still_tells_of_an_error_that_it_alone_met():
    finished = run_body("raise errors.UserError('bad')", RANK="1")
    assert finished.returncode == 2
    assert finished.stderr.endswith("error: bad\n")


def test_the_argument_that_the_deepspeed_launcher_adds_is_accepted():
    parser = command_line.parser("A command.")
    assert parser.parse_args(["--local_rank=3"]).local_rank == 3
