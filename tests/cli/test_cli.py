"""The command line: three ways to start a command, its arguments, and errors of one line."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from assets import REPOSITORY
from commands import PATIENCE_SECONDS, assert_one_error, python, run, run_well, start, wait_until

from lezo_ds import __version__, cli
from lezo_ds.config import config_from_dict, load_config, load_yaml
from lezo_ds.errors import UserError

HELP = """
import sys
from contextlib import suppress
from lezo_ds.cli import COMMANDS, run_command
for name in COMMANDS:
    sys.argv = [name, "--help"]
    with suppress(SystemExit):
        run_command(name)
print(*sorted({"torch", "deepspeed", "transformers", "pandas"} & sys.modules.keys()))
"""


def in_process(monkeypatch, *arguments):
    """Run the program in this process, for what ends before a command does its work."""
    monkeypatch.setattr(sys, "argv", ["lezo-ds", *map(str, arguments)])
    cli._run_program()


def test_every_command_has_a_help_that_needs_no_torch():
    finished = run_well([sys.executable, "-c", HELP])
    assert [name for name in cli.COMMANDS if f"usage: lezo-ds {name} " not in finished.out] == []
    assert finished.out.splitlines()[-1] == ""
    assert "zo: Zeroth-order training." in finished.out


def test_a_script_the_package_and_the_program_are_the_same_and_print_a_recipe(tmp_path):
    program = str(Path(sys.executable).with_name("lezo-ds"))
    words = ["train", "--config", "demo", "zo.sparsity=0.5", "--print-config", "seed=3"]
    found = [run_well([sys.executable, "-m", "lezo_ds", *words]), run_well(python(*words[1:]))]
    if os.path.exists(program):  # noqa: PTH110
        found.append(run_well([program, *words]))
    assert len({finished.out for finished in found}) == 1
    printed = load_yaml(found[0].out)
    assert config_from_dict(printed, "print") == load_config("demo", ["zo.sparsity=0.5", "seed=3"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trian", "trian is not one of init, train, .*; fix: did you mean train?"),
        ("train --config demo --zo.sparsity 0.5", "fix: write zo.sparsity=VALUE, without dashes"),
        ("train --num-train-epochs=3", "num-train-epochs=3; fix: write train.epochs=VALUE,"),
        ("train --config demo --resume", "fix: leave it out: the same command resumes a run"),
        ("report runs --seed 3", "fix: see lezo-ds report --help"),
        ("init m d --reward brevity", "brevity is not MODULE:FUNCTION; fix: .* rewards:brevity"),
        ("train --config demo --dry-rn", "arguments: --dry-rn; fix: did you mean --dry-run?"),
        ("train --config demo --gpus 0", "argument --gpus: 0 is not an integer above 0"),
        ("train --config demo --gpus 4", "only show what a run would do; fix: add --dry-run, or"),
        ("train --config demo --dry-run --gpu-memory nan", "nan is not a number above 0; fix: "),
        ("train --config $UNSET/r.yaml", "names an environment variable that is not set"),
        ("train", "needs a recipe; fix: lezo-ds train --config RECIPE; lezo-ds init MODEL DATA"),
        ("train tickets.yaml", "fix: lezo-ds train --config tickets.yaml"),
        ("evaluate --model {run}", "is a run, not a model; fix: use --run "),
        ("evaluate", "one of the arguments --run --model is required"),
        ("evaluate --run r --config demo", "--config goes with --model"),
        ("evaluate --run r --lm-eval=", "--lm-eval has an empty name; fix: "),
        ("evaluate --run r --limit 3", "--limit is for --lm-eval; fix: set data.num_test=N"),
        ("evaluate --model m --step 3", "--step is for --run: a model has one step"),
        ("evaluate --run r --out o --split dev", "scores of test examples; fix: remove --split"),
        ("export --run r --journal j --merge", "--step, --merge and keys are for --out"),
        ("init m d --label a --reward b:c", "argument --reward: not allowed with argument --label"),
        ("export --run r", "needs two of --run, --journal and --out"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_hint(words, expected, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=expected) as caught:
        in_process(monkeypatch, *words.format(run=tmp_path).split())
    assert "; fix: " in str(caught.value)


def test_arguments_and_keys_may_alternate_and_launchers_add_their_rank(monkeypatch, capsys):
    words = "train --local_rank=0 seed=3 --config demo train.steps=9 --print-config seed=4"
    in_process(monkeypatch, *words.split())
    printed = load_yaml(capsys.readouterr().out)
    assert (printed["seed"], printed["train"]["steps"]) == (4, 9)


@pytest.mark.parametrize(
    "words",
    [
        "export --run absent --journal {file}",
        "init absent absent.csv --out {file}",
        "report absent --html {file}",
    ],
)
def test_a_file_of_one_rank_is_written_by_rank_0_alone(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    in_process(monkeypatch, *words.format(file=tmp_path / "file").split())
    name = words.partition(" ")[0]
    assert capsys.readouterr().err.startswith(f"rank 1 leaves lezo-ds {name}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "run", "data", "keys"),
    [
        ("--run seed=0 new.csv --out o.csv", "seed=0", "new.csv", []),
        ("seed=1 --out seed=3 seed=4 new.csv --run a", "a", "new.csv", ["seed=1", "seed=4"]),
        ("seed=4.csv --run train.steps=9 --out o.csv", "train.steps=9", "seed=4.csv", []),
    ],
)
def test_what_an_option_takes_is_no_key(words, run, data, keys, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "run_predict", seen.append)
    in_process(monkeypatch, "predict", *words.split())
    found = seen[0]
    assert (str(found.run), str(found.data), found.overrides) == (run, data, keys)


def test_the_program_prints_paths_its_version_commands_and_keys(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch, "--path", "launch/slurm/one_node.sbatch")
    script = REPOSITORY / "launch" / "slurm" / "one_node.sbatch"
    assert capsys.readouterr().out.strip() == str(script)
    with pytest.raises(SystemExit):
        in_process(monkeypatch, "--version")
    assert capsys.readouterr().out.strip() == f"lezo_ds {__version__}"
    in_process(monkeypatch)
    printed = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"\n  {name} " not in printed] == []
    in_process(monkeypatch, "train", "--help", "zo")
    printed = capsys.readouterr().out
    assert printed.startswith("zo.learning_rate (default null; number from 0, or null)")
    assert "train.steps (" not in printed


def test_an_error_is_one_line_and_exit_code_2():
    finished = run(python("--config", "demo", "data.prompt=a", "data.task=sst2"))
    assert_one_error(finished, 2, "data.prompt cannot change data.task=sst2")
    assert finished.err.count("\n") == 1


def test_an_interrupt_in_the_first_seconds_is_one_line():
    with start(python("--config", "demo")) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text(), process)  # it imports torch now
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    said = "interrupted; the same command starts again\n"
    assert (process.returncode, out, err) == (130, "", said)


def test_a_reader_that_is_gone_does_not_end_a_command():
    """As in `lezo-ds train --print-config | head -1`."""
    with start(python("--config", "demo", "--print-config", program="train")) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


def test_a_path_that_no_file_can_have_is_refused_in_one_line():
    refused = run(python("--config", "a" * 300))
    assert_one_error(refused, 2, f"{'a' * 100}... cannot be used: File name too long")
    printing = shlex.join(python("--config", "demo", "--print-config", program="train"))
    assert_one_error(run(["bash", "-c", f"{printing} > /dev/full"]), 2, "No space left on device")
