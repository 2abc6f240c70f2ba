"""What all commands share: help, errors, exit codes and speed, through real processes."""

from __future__ import annotations

import json
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from assets import REPOSITORY
from commands import assert_one_error, assert_refused, environment, free_port, python, run, run_well

from lezo_ds import __version__, command_line, commands
from lezo_ds.commands import COMMANDS
from lezo_ds.config import describe
from lezo_ds.errors import launched_rank

SCRIPT = """
import sys
from lezo_ds import command_line, errors
def main():
    print("worked")
    {body}
command_line.run_main(main)
"""
RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def run_body(body, **variables):
    command = [sys.executable, "-c", SCRIPT.replace("{body}", body)]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=120)


def light(command, *arguments):
    """Return a command that fails with another exit code than 0 or 2 if it imports torch."""
    no_torch = "import sys; sys.modules['torch'] = None; sys.modules['deepspeed'] = None; "
    path = str(REPOSITORY / "launch" / f"{command}.py")
    script = f"sys.argv = {[path, *arguments]!r}; import runpy; runpy.run_path({path!r}, run_name='__main__')"
    return [sys.executable, "-c", no_torch + script]


def program(*arguments):
    """Return `python -m lezo_ds` with arguments; it fails as `light` does."""
    no_torch = "import sys; sys.modules['torch'] = None; sys.modules['deepspeed'] = None; "
    script = (
        f"sys.argv[1:] = {list(arguments)!r}; import runpy; runpy.run_module('lezo_ds', run_name='__main__')"
    )
    return [sys.executable, "-c", no_torch + script]


def test_help_shows_every_key_with_its_type_default_and_meaning():
    shown = run_well(python("--help")).out
    assert describe() in shown
    assert "\nzo.sparsity: a number 0 to 1 or null; default null\n    Share of the" in shown
    for option in ("--config", "--dry-run", "--print-config", "--list-recipes", "key=value"):
        assert option in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(command):
    assert f"usage: lezo-ds {command} " in run_well(light(command, "--help")).out


def test_every_command_is_a_module_and_a_script():
    modules = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    scripts = {path.stem for path in (REPOSITORY / "launch").glob("*.py")}
    assert modules == scripts == set(COMMANDS)


def test_the_program_lists_its_commands_without_torch():
    shown = run_well(program("--help")).out
    for command, summary in COMMANDS.items():
        assert f"  {command:10} {summary}\n" in shown
    assert run_well(program("--version")).out == f"lezo_ds {__version__}\n"


@pytest.mark.parametrize("added", [[], ["--local_rank=1"]], ids=["alone", "by DeepSpeed's launcher"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_program_gives_a_command_its_arguments(command, added):
    assert f"usage: lezo-ds {command} " in run_well(program(*added, command, "--help")).out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "a command is missing; got: no command"),
        (["trian", "--config", "x"], "did you mean train?"),
        (["train", "--config", "opt-13b-sst2-lezo", "zo.sparsty=1"], "did you mean zo.sparsity?"),
        (["--vrsion"], "did you mean --version?"),
        (["--path", "launch/nothing.yaml"], "there is no such shipped file; got: launch/nothing.yaml"),
    ],
)
def test_a_typo_in_the_command_line_of_the_program_is_refused_without_torch(arguments, expected):
    assert_refused(program(*arguments), expected)


def test_the_program_tells_where_a_shipped_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished = run_well(program("--path", "launch/slurm/one_node.sbatch"))
    assert Path(finished.out.rstrip()) == REPOSITORY / "launch/slurm/one_node.sbatch"


def test_deepspeeds_launcher_starts_ranks_by_the_name_of_the_package(recipe, tmp_path):
    starter = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    starter += ["--master_port", str(free_port()), "--module", "lezo_ds", "train"]
    run_well([*starter, "--config", recipe, f"run_dir={tmp_path / 'run'}", "train.steps=2"])
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["world_size"] == 2
    assert facts["command"][:4] == ["python", "train.py", "--config", "recipe.yaml"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["train", "--config", "opt-13b-sst2-lezo", "zo.sparsty=1"], "did you mean zo.sparsity?"),
        (["train", "--config", "opt-13b-sst2-lezo", "--dryrun"], "did you mean --dry-run?"),
        (["evaluate", "--run", "runs/x", "data.tsk=sst2"], "did you mean data.task?"),
        (["evaluate", "--run", "runs/x", "--config", "a.yaml"], "--config goes with --model"),
        (["evaluate", "--run", "runs/x", "--split", "tst"], "invalid choice: 'tst'"),
        (["export", "--run", "runs/x"], "--out"),
        (["export", "--run", "runs/x", "--out", "y", "data.num_dev=x"], "expected: a whole number"),
        (["demo", "seed=-1"], "0 to 18446744073709551615"),
        (["demo", "--seed", "-1"], "0 to 18446744073709551615"),
        (["train", "--config", "opt-13b-sst2-lezo", "--zo.sparsty", "1"], "did you mean zo.sparsity?"),
        (["train", "--config", "opt-13b-sst2-lezo", "--learning_rate=1"], "did you mean --zo.learning_rate?"),
        (["train", "--config", "opt-13b-sst2-lezo", "--train.step=1"], "did you mean train.steps?"),
        (["train", "--config", "opt-13b-sst2-lezo", "--sed", "1"], "did you mean --seed?"),
        (["train", "--config", "opt-13b-sst2-lezo", "--seed"], "give its value, as in --seed VALUE"),
        (["train", "--seed", "--config", "opt-13b-sst2-lezo"], "give its value, as in --seed VALUE"),
        (["evaluate", "--run", "runs/x", "--data.tsk", "sst2"], "did you mean data.task?"),
        (["export", "--run", "runs/x", "--out", "y", "--data.num_dev", "x"], "expected: a whole number"),
        (["plan", "--config", "opt-13b-sst2-lezo", "--gpus", "1", "--gpu", "h100", "--seed=x"], "got: 'x'"),
        (["pack", "--run", "x", "--out", "y", "--seed", "1"], "unrecognized arguments: --seed 1"),
        (["sweep", "--config", "opt-13b-sst2-lezo", "--out", "x", "--grid", "sed=0"], "did you mean seed?"),
    ],
)
def test_a_typo_is_refused_without_torch(command, expected):
    assert_refused(light(*command), expected)


@pytest.mark.parametrize(
    "words",
    [
        ["zo.learning_rate=1e-7", "train.score_before=false", "seed=3", "data.max_length=100"],
        ["--zo.learning_rate=1e-7", "--train.score_before=false", "--seed=3", "--data.max_length=100"],
        ["--zo.learning_rate", "1e-7", "--train.score_before", "False", "--seed", "3", "data.max_length=100"],
    ],
    ids=["key=value", "--key=value", "--key value"],
)
def test_the_keys_of_a_recipe_are_options_too(words):
    shown = run_well(
        light("train", *words[:2], "--config", "opt-13b-sst2-lezo", *words[2:], "--print-config")
    )
    values = yaml.safe_load(shown.out)
    assert (values["seed"], values["train"]["score_before"], values["data"]["max_length"]) == (3, False, 100)
    assert values["zo"]["learning_rate"] == 1e-7
    assert "# Changed:  zo.learning_rate=1e-7, " in shown.out


def test_a_list_of_texts_is_a_value_of_the_command_line(tmp_path):
    words = ["data.prompt='{text} It is'", "data.label_field=label", "--data.train", "x.csv"]
    words += ["--data.labels", "[good, '-1']", "--config", "demo"]
    shown = run_well(light("train", *words, "data.path=null", "data.task=custom", "--print-config")).out
    assert yaml.safe_load(shown)["data"]["labels"] == ["good", "-1"]
    mapped = [*words, "--data.labels={good: ' good', bad: ' bad'}"]
    shown = run_well(light("train", *mapped, "data.path=null", "data.task=custom", "--print-config")).out
    assert yaml.safe_load(shown)["data"]["labels"] == {"good": " good", "bad": " bad"}


def test_options_expand_paths_themselves_where_a_shell_does_not(tmp_path):
    for words in (["pack", "--run=$NO_SUCH/x", "--out=y"], ["evaluate", "--model=$NO_SUCH/x"]):
        assert_refused(light(*words), "not set; got: $NO_SUCH/x")
    packed = run(python("--run=$HOME/nothing", "--out=y", program="pack.py"), HOME=str(tmp_path))
    assert_one_error(packed, 2, f"{tmp_path}/nothing")
    shown = run_well(light("train", "--config", "opt-13b-sst2-lezo", "--print-config", "run_dir=~/runs/x"))
    assert yaml.safe_load(shown.out)["run_dir"] == str(Path("~/runs/x").expanduser())


def test_keys_after_the_grid_of_a_sweep_do_not_belong_to_it(recipe, tmp_path):
    words = ["--config", str(recipe), "--out", str(tmp_path), "--grid", "zo.sparsity=0.5,0.75", "seed=0,1"]
    listed = run_well(python(*words, "--train.steps", "3", "--list", "--method=lezo", program="sweep.py")).out
    assert listed.count("  new  ") == 4
    assert "zo.sparsity=0.75,seed=1" in listed
    assert "steps=3" not in listed.partition("zo.sparsity  ")[0]


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


@pytest.mark.parametrize("redirection", ["| true", "2>&1 | true", ">&-"])
def test_an_output_that_nobody_reads_ends_nothing(redirection, recipe, tmp_path):
    """A shell's `true` is gone long before the first line."""
    given = python("--config", recipe, f"run_dir={tmp_path / 'run'}", "train.steps=2")
    script = f"{shlex.join(map(str, given))} {redirection}; exit ${{PIPESTATUS[0]}}"
    finished = run(["bash", "-c", script])
    assert finished.code == 0, finished.err[-5000:]
    assert "Traceback" not in finished.err
    assert json.loads((tmp_path / "run" / "results.json").read_text())["finished"]


def test_a_low_limit_of_open_files_is_refused():
    script = f"ulimit -n 24; {shlex.join(python('--list-recipes'))}"
    assert_refused(
        ["bash", "-c", script], "the limit of open files is too low; got: 24; expected: at least 64"
    )


@pytest.mark.parametrize("name", RANK_NAMES)
def test_only_rank_zero_speaks_of_what_is_no_error(name, monkeypatch):
    for other in RANK_NAMES:
        monkeypatch.delenv(other, raising=False)
    assert launched_rank() == 0
    monkeypatch.setenv(name, "3")
    assert launched_rank() == 3


def test_another_rank_than_the_first_still_tells_of_an_error_that_it_alone_met():
    finished = run_body("raise errors.UserError('bad')", RANK="1")
    assert finished.returncode == 2
    assert finished.stderr.endswith("error: bad\n")


def test_the_argument_that_the_deepspeed_launcher_adds_is_accepted():
    parser = command_line.parser("train", "A command.")
    assert parser.parse_args(["--local_rank=3"]).local_rank == 3
