from __future__ import annotations

import subprocess
import sys

import pytest
from commands import environment

from lezo_ds.runs.signals import LauncherWatch

RANK = """
import sys
from lezo_ds.runs.signals import LauncherWatch
watch = LauncherWatch()
print(watch.is_gone(), flush=True)
sys.stdin.readline()
print(watch.is_gone(), flush=True)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}])"


@pytest.mark.parametrize("name", ["deepspeed", "a_shell"])
def test_the_end_of_deepspeeds_launcher_is_noticed_and_that_of_others_is_not(name, tmp_path):
    (tmp_path / name).write_text(PARENT)
    command = [sys.executable, tmp_path / name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
        assert process.stdout.readline() == "False\n"
        process.kill()
        process.wait()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{name == 'deepspeed'}\n"


def test_a_process_without_a_launcher_misses_none():
    assert not LauncherWatch().is_gone()
