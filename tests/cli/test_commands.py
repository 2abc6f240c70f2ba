"""Each command by each of its names, and the commands that need no ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from assets import REPOSITORY
from commands import assert_one_error, environment, run

COMMANDS = ("train", "evaluate", "export", "sweep", "report", "init", "benchmark")
WITHOUT_TORCH = """
import sys
from lezo_ds.cli import main
try:
    main()
finally:
    assert not {"torch", "deepspeed", "transformers"} & sys.modules.keys()
"""


def python(*words):
    return [sys.executable, *map(str, words)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_script_in_launch_is_the_command_and_help_needs_no_torch(command):
    by_script = run(python(REPOSITORY / "launch" / f"{command}.py", "--help"))
    by_name = run(python("-c", WITHOUT_TORCH, command, "--help"))
    assert (by_script.code, by_name.code) == (0, 0), by_name.err
    assert by_script.out == by_name.out
    assert f"lezo-ds {command}" in by_name.out


def test_the_commands_are_those_of_launch_and_a_typo_is_told():
    scripts = {path.stem for path in (REPOSITORY / "launch").glob("*.py")}
    assert scripts - {"demo"} == set(COMMANDS)
    listed = run(python("-m", "lezo_ds", "--help")).out
    assert all(command in listed for command in COMMANDS)
    assert_one_error(run(python("-m", "lezo_ds", "trian")), 2, "trian", "train")
    assert_one_error(run(python("-c", WITHOUT_TORCH, "train", "--sparsity", "0.5")), 2, "--sparsity")


def test_a_reader_that_ends_early_is_no_error():
    command = f"{sys.executable} -m lezo_ds train --help | head -1"
    shell = ["bash", "-o", "pipefail", "-c", command]
    finished = subprocess.run(shell, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert "Traceback" not in finished.stderr
