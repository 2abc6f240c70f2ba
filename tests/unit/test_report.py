"""Tables, comparisons and pages of runs, and sweeps, from the files that runs leave."""

import json
import sys
from argparse import Namespace
from dataclasses import asdict

import pandas as pd
import pytest
import sweep
from assets import REPOSITORY, write_records
from commands import run as run_program

from lezo_ds.config import dump_yaml, load_config
from lezo_ds.errors import DivergenceError, LezoError, UserError
from lezo_ds.runs.results import RunResults, method_name
from lezo_ds.tools import report
from lezo_ds.tools.report import comparison, name_runs, read_runs, score_table

RECIPE = REPOSITORY / "launch" / "recipes" / "demo-lezo.yaml"


@pytest.fixture
def finish(tmp_path):
    """A function that writes what a finished run leaves, and returns its directory."""

    def write(name, *words, answers=(), test=0.9, journal=None, **changes):
        directory = tmp_path / name
        config = load_config(RECIPE, [*words, f"run_dir={directory}"])
        results = {"task": config.data.task, "protocol": config.data.protocol, "seed": config.seed}
        results |= {"method": method_name(config), "peft": config.peft.kind, "metric": "accuracy"}
        results |= {"zero_shot": 0.5, "test": test, "majority_class": 0.6, "best_dev_loss": 0.5}
        results |= {"finished": True, "steps": 200, "best_step": 100, "early_stop_step": None}
        results |= {"seconds": 60.0, "peak_memory_bytes": 10**9, "world_size": 1}
        results |= {"skipped_steps": 0, "model_fingerprint": "f", "weights_digest": "d"}
        results = RunResults(**(results | changes))
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(dump_yaml(config.model_dump()))
        (directory / "results.json").write_text(json.dumps(asdict(results)))
        scores = {f"dev_{results.metric}": 0.9, "dev_loss": 0.5}
        lines = [{"step": step, "seconds": step, **scores} for step in (0, 100, 200)]
        metrics = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "metrics.jsonl").write_text(metrics + '{"step": 2')  # cut by a crash
        rows = [
            {"index": index, "prompt": prompt, "right": ["good"], "predicted": predicted}
            | {"score": float(predicted == "good")}
            for index, (prompt, predicted) in enumerate(answers)
        ]
        write_records(directory / "predictions" / "step-00000100.jsonl", rows)
        return directory

    return write


def named(*directories):
    return name_runs(read_runs(directories))


def texts(*directories):
    return list(named(*directories)["name"])


def test_a_row_is_the_mean_over_seeds_and_is_named_by_what_differs(finish):
    runs = [finish("a", "seed=0", test=0.8), finish("b", "seed=1", test=0.9)]
    table = score_table(named(*runs, finish("c", "zo.learning_rate=7e-5", test=0.4)))
    assert list(table.index) == ["LeZO, learning_rate=3e-05", "LeZO, learning_rate=7e-05"]
    assert list(table["test"]) == pytest.approx([85, 40])
    assert table["deviation"].iloc[0] == pytest.approx(7.071, abs=1e-3)
    assert "macro F1" not in table
    weights = [f"train.objective={{rewards:short: {weight}}}" for weight in (1, 2)]
    runs = [finish(f"d{seed}", weights[seed], f"seed={seed}") for seed in (0, 1)]
    assert texts(*runs) == ["LeZO, rewards:short=1.0", "LeZO, rewards:short=2.0"]


def test_a_run_is_named_by_its_method(finish):
    untrained = finish("a", method="zero-shot")
    killed = finish("b", "peft.kind=lora")
    (killed / "results.json").unlink()
    assert texts(untrained, killed) == ["zero-shot", "LeZO with LoRA, not finished, at step 200"]


def test_runs_of_other_starts_other_test_data_or_equal_seeds_are_not_averaged(finish):
    answers = [("a", "good"), ("b", "bad")]
    runs = [
        finish("a", "seed=0", answers=answers),
        finish("b", "seed=1", answers=answers),
        finish("c", "seed=2", answers=[("a", "good"), ("c", "bad")]),
        finish("d", "seed=1", answers=answers),
        finish("e", "seed=3", "train.eval_batch_size=2", answers=answers),
    ]
    first, second, third, fourth, fifth = texts(*runs)
    assert first == second == fifth == "LeZO"
    assert third.startswith("LeZO, other test data (")
    assert fourth == f"LeZO, the same seeds again in {runs[3]}"
    other = finish("f", "seed=4", model_fingerprint="g")
    assert texts(runs[0], other) == ["LeZO, model_fingerprint=f", "LeZO, model_fingerprint=g"]
    lora = "peft.kind=lora"
    adapters = [finish(name, f"seed={name}", lora, f"peft.path=/{name}") for name in "12"]
    assert texts(*adapters) == ["LeZO with LoRA, path=/1", "LeZO with LoRA, path=/2"]


def test_a_stopped_or_killed_run_shows_its_last_evaluation(finish):
    stopped = finish("a", finished=False, test=None, best_step=None, steps=150)
    killed = finish("b", "seed=1")
    (killed / "results.json").unlink()
    runs = named(stopped, killed)
    assert list(runs["task"]) == ["sst2", "sst2"]  # so both are in one table
    table = score_table(runs)
    assert list(table.index) == [f"LeZO, not finished, at step {step}" for step in (150, 200)]
    assert list(table["validation"]) == [90, 90] and "test" not in table


def test_two_runs_are_compared_on_the_same_test_examples(finish):
    first = finish("a", answers=[(str(n), "good" if n < 4 else "bad") for n in range(12)])
    second = finish("b", "seed=1", answers=[(str(n), "good" if n else "bad") for n in range(12)])
    text = comparison(named(first, second))
    # Of twelve differences, eight are 1 and one is -1: 7 / 12, deviation 0.669.
    assert f"{second} is +58.33 ± 19.30 (standard error) ahead of {first}" in text
    other = finish("c", "seed=2", answers=[("x", "good")] * 12)
    assert "other test examples" in comparison(named(first, other))
    assert comparison(named(first, first)) == ""


def test_a_table_numbers_and_a_page_are_written(finish, tmp_path, capsys, monkeypatch):
    answers = [("It was <i>", "good" if n < 9 else "<bad>") for n in range(20)]
    run = finish("a", answers=answers, macro_f1=2 / 3)
    arguments = Namespace(runs=[str(run)], html=None, json=False)
    report.main(arguments)
    out = capsys.readouterr().out
    assert "sst2, SmolLM2-135M-Instruct, accuracy" in out and "macro F1" in out
    assert "\n1: LeZO\n" in out and max(map(len, out.splitlines())) <= 100  # names are below
    arguments.json = True
    report.main(arguments)
    numbers = json.loads(capsys.readouterr().out)["scores"]
    assert numbers["sst2, SmolLM2-135M-Instruct, accuracy"]["LeZO"]["test"] == pytest.approx(90)
    line = {"split": "dev", "prompt": "Say <i>", "ended": True}
    lines = [{"step": n, "answer": f"<b>{n}", "reward": 0.5, **line} for n in (0, 1, 2)]
    write_records(run / "samples.jsonl", lines)
    arguments.html = tmp_path / "page.html"
    report.main(arguments)
    text = arguments.html.read_text()
    assert "10 of 11 wrong answers" in text and text.count("<td>&lt;bad&gt;</td>") == 10
    assert "&lt;b&gt;0" in text and "&lt;b&gt;2" in text and "&lt;b&gt;1" not in text
    assert text.count("<svg") == 2 and "Validation score" in text
    assert not any(loads in text for loads in ('src="', "<script", "<link", "<?xml", "<i>"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"fix: pip install 'lezo_ds\[report\]'"):
        report.main(arguments)


def test_a_directory_that_is_no_run_or_damaged_is_named_and_alone_refused(finish, tmp_path, caplog):
    (tmp_path / "none").mkdir()
    run, *damaged = finish("a[1]"), finish("b", "seed=1"), finish("c", "seed=2")
    (damaged[0] / "metrics.jsonl").write_text('{"step": [1], "seconds": 1, "dev_loss": 1}\n')
    (damaged[1] / "journal.jsonl").write_text("no header\n")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "journal.jsonl").touch()
    others = [tmp_path / "none", tmp_path / "loop", *damaged]
    assert list(read_runs([run, *others])["directory"]) == [str(run)]
    assert "not a run" in caplog.text and all(str(each) in caplog.text for each in others)
    assert "loop: a loop of your own" in caplog.text
    with pytest.raises(UserError, match="none of these directories holds a run"):
        read_runs([tmp_path / "none", tmp_path / "other"])


def arguments_of_sweep(tmp_path, *grid, overrides=(), tune=None):
    own = {"grid": grid, "overrides": list(overrides), "tune": tune}
    return Namespace(config=str(RECIPE), out=tmp_path / "sweep", **own)


def test_a_grid_is_every_combination_and_keys_with_a_comma_change_together(tmp_path):
    grid = ["zo.learning_rate=1e-6,7e-7", "seed,data.seed=0,1"]
    runs = list(sweep.plan(arguments_of_sweep(tmp_path, *grid, overrides=["train.steps=9"])))
    found = [(run.config.zo.learning_rate, run.config.data.seed) for run in runs]
    assert found == [(rate, seed) for rate in (1e-6, 7e-7) for seed in (0, 1)]
    assert {(run.config.train.steps, run.config.train.keep_snapshots) for run in runs} == {(9, 0)}
    assert runs[1].directory.name == "zo.learning_rate=1e-06,seed=1"
    with pytest.raises(UserError, match="is taken or too long"):
        list(sweep.plan(arguments_of_sweep(tmp_path, "zo.learning_rate=1e-6,0.000001")))
    with pytest.raises(UserError, match="run_dir is set twice, by --out"):
        list(sweep.plan(arguments_of_sweep(tmp_path, overrides=["run_dir=x"])))
    with pytest.raises(UserError, match=r"--tune zo.estimator is not a key .* number; fix: name"):
        list(sweep.plan(arguments_of_sweep(tmp_path, tune="zo.estimator")))
    own = {"tune": "zo.learning_rate", "overrides": ["zo.learning_rate=1.5e-5"]}
    rates = [run.config.zo.learning_rate for run in sweep.plan(arguments_of_sweep(tmp_path, **own))]
    assert rates == [1.5e-6, 4.5e-6, 1.5e-5, 4.5e-5, 1.5e-4]


def test_a_sweep_shows_why_runs_fail_and_ends_if_the_first_is_refused(
    finish, tmp_path, monkeypatch
):
    runs = list(sweep.plan(arguments_of_sweep(tmp_path, "seed=0,1,2")))
    for launcher in (["nowhere", "-n"], []):
        with pytest.raises(UserError, match=f"--launcher '{' '.join(launcher)}' is not a program"):
            sweep.launch(runs[0], launcher)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/seed=0.log cannot be written"):
        sweep.launch(runs[0]._replace(directory=tmp_path / "file" / "seed=0"), ["python"])
    codes = iter([UserError.exit_code, 7, 7, 7, DivergenceError.exit_code])
    started = []

    def launch(run, launcher):
        started.append(run.directory.name)
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        run.directory.with_name(f"{run.directory.name}.log").write_text("x\nerror: no data\n")
        return next(codes)

    monkeypatch.setattr(sweep, "launch", launch)
    with pytest.raises(LezoError, match=r"1 of 3 runs failed: seed=0 \(exit code 2\): error: no d"):
        sweep.do(runs, ["python"], may_diverge=False)
    assert started == ["seed=0"]
    assert not runs[0].is_done()
    finish("sweep/seed=0", "train.keep_snapshots=0")
    assert runs[0].is_done()  # and with other settings it is not
    (longer,) = sweep.plan(arguments_of_sweep(tmp_path, "seed=0", overrides=["train.steps=3000"]))
    assert longer.directory == runs[0].directory and not longer.is_done()
    with pytest.raises(LezoError, match="2 of 3 runs failed"):
        sweep.do(runs, ["python"], may_diverge=False)
    assert started == ["seed=0", "seed=1", "seed=2"]
    with pytest.raises(LezoError, match="1 of 3 runs failed: seed=1"):
        sweep.do(runs, ["python"], may_diverge=True)
    text = sweep.table(runs, tmp_path / "sweep")
    assert "lowest validation loss: LeZO" in text
    assert list(pd.read_csv(tmp_path / "sweep" / "results.csv")["test"]) == [0.9]
    finish("sweep/seed=1", "model.path=other")
    assert "sst2, other, accuracy" in sweep.table(runs, tmp_path / "sweep")
    (rewarded,) = sweep.plan(arguments_of_sweep(tmp_path, "train.objective={rewards:short: 1}"))
    finish(f"sweep/{rewarded.directory.name}")
    sweep.table([rewarded], tmp_path / "sweep")
    (objective,) = pd.read_csv(tmp_path / "sweep" / "results.csv")["train.objective"]
    assert objective == "{'rewards:short': 1.0}"


@pytest.mark.distributed
def test_a_sweep_names_its_runs_and_refuses_an_index_that_it_lacks(tmp_path):
    command = [sys.executable, REPOSITORY / "launch" / "sweep.py", "--config", RECIPE]
    command += ["--out", tmp_path, "train.steps=9", "--grid", "zo.sparsity=0", "--grid", "seed=0,1"]
    listed = run_program([*command, "--list"])
    assert listed.code == 0 and f"1  open  {tmp_path}/zo.sparsity=0.0,seed=1" in listed.out
    for words, message in ((["--index", "2"], "fix: give 0 to 1"), (["seed=2"], "fix: remove one")):
        refused = run_program([*command, *words])
        assert refused.code == 2 and message in refused.err
