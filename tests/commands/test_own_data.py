"""A user's own data, from the dry run to the exported model, with a recipe and no Python."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from assets import REPOSITORY
from commands import assert_one_error, run_forked, run_forked_well
from own_data import SUBJECTS, VERBALIZERS, own_values, path_with, write_byte_model, write_tickets
from run_ends import results_of
from transformers import AutoModelForCausalLM

NUM_EACH = 60
"""A fifth of the 300 tickets."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a model, 300 tickets and a recipe that describes their task."""
    directory = tmp_path_factory.mktemp("own")
    data = {
        "train": str(write_tickets(directory / "tickets.csv")),
        "prompt": "{text}\nThis ticket is about",
        "label_field": "topic",
        "labels": VERBALIZERS,
    }
    (directory / "recipe.yaml").write_text(
        yaml.safe_dump(own_values(write_byte_model(directory / "model"), **data))
    )
    return directory


@pytest.fixture(scope="module")
def finished(root):
    """A run that stopped after 5 steps and was resumed, with its log."""
    first = train(root, "train.steps=5")
    return root / "run", first.err + train(root).err


def train(root, *more, well=True):
    runner = run_forked_well if well else run_forked
    return runner(["--config", root / "recipe.yaml", f"run_dir={root / 'run'}", *more])


def test_a_dry_run_counts_what_it_drew(root):
    plan = train(root, "--dry-run")
    assert f"custom, protocol clean: {300 - 2 * NUM_EACH} train, {NUM_EACH} dev, {NUM_EACH} test" in plan.out
    for split in ("test", "validation"):
        assert (
            f"data.{split} is not given: {NUM_EACH} of the 300 records of {root / 'tickets.csv'}" in plan.err
        )
    assert not (root / "run").exists()


def test_a_printed_recipe_is_read_back(root, tmp_path):
    text = train(root, "--print-config").out
    (tmp_path / "printed.yaml").write_text(text)
    again = run_forked_well(["--config", tmp_path / "printed.yaml", "--print-config"]).out
    assert yaml.safe_load(again) == yaml.safe_load(text)
    assert yaml.safe_load(text)["data"]["labels"] == VERBALIZERS


def test_it_trains_resumes_and_scores(finished):
    run_dir, _ = finished
    results = results_of(run_dir)
    assert (results["finished"], results["steps"], results["task"]) == (True, 8, "custom")
    assert results["metric"] == "accuracy"
    rows = [json.loads(line) for file in run_dir.glob("predictions/*") for line in file.open()]
    assert {row["predicted"] for row in rows} <= {*VERBALIZERS.values()}
    assert {row["right"][0] for row in rows} == {*VERBALIZERS.values()}


def test_a_changed_file_is_not_resumed(root, finished, tmp_path):
    changed = write_tickets(tmp_path / "tickets.csv", num_rows=301)
    failed = train(root, f"data.train={changed}", well=False)
    assert_one_error(failed, 2, "the fingerprint of the", str(changed), "differs from the journal's")


def test_the_exported_model_scores_as_its_run_did(root, finished):
    run_dir, _ = finished
    of_run = run_forked_well(["--run", run_dir, "--json"], program="evaluate.py").out
    run_forked_well(["--run", run_dir, "--out", root / "exported"], program="export.py")
    arguments = ["--model", root / "exported", "--config", root / "recipe.yaml", "--json"]
    of_model = run_forked_well(arguments, program="evaluate.py").out
    kept = ("score", "loss", "majority_class", "num_examples", "metric", "task")
    assert {name: json.loads(of_model)[name] for name in kept} == {
        name: json.loads(of_run)[name] for name in kept
    }
    assert json.loads(of_run)["score"] == results_of(run_dir)["test"]
    assert AutoModelForCausalLM.from_pretrained(root / "exported").config.num_hidden_layers == 2
    card = (root / "exported" / "README.md").read_text()
    assert "data.train=tickets.csv" in card
    assert str(root) not in card
    recipe = card.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["data"]["labels"] == VERBALIZERS


def test_a_pack_exports_without_the_data(root, finished):
    run_dir, _ = finished
    pack = root / "run.tar.gz"
    run_forked_well(["--run", run_dir, "--out", pack], program="pack.py")
    model = f"model.path={root / 'model'}"
    run_forked_well(["--pack", pack, "--out", root / "unpacked", model], program="export.py")
    assert (root / "unpacked" / "model-00001.safetensors").is_file()


def test_a_report_and_a_plan_know_the_task(root, finished):
    run_dir, _ = finished
    assert "tickets" in run_forked_well([run_dir], program="report.py").out
    arguments = ["--config", root / "recipe.yaml", "--gpus", "1", "--gpu-memory", "8", "run_dir=x"]
    assert "custom" in run_forked_well(arguments, program="plan.py").out


@pytest.mark.parametrize("kind", ["choices", "completion"])
def test_other_kinds_of_task_train_and_score(kind, root, tmp_path):
    answers = {"billing": ["an invoice", "money"], "bug": ["a fault"], "shipping": ["a parcel"]}
    records = [
        {"q": {"text": text}, "options": sorted(SUBJECTS), "right": topic, "answers": answers[topic]}
        for topic, texts in SUBJECTS.items()
        for text in texts
    ] * 4
    (tmp_path / "data.json").write_text(json.dumps(records))
    asked = {"choices": ["{options}"], "label_field": "right"}
    if kind == "completion":
        asked = {"completion": "{answers}", "metric": "exact_match"}
    data = {"train": str(tmp_path / "data.json"), "prompt": "{q.text}\nTopic:", **asked}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(own_values(root / "model", **data)))
    train(tmp_path, "train.steps=2", "train.eval_every=1")
    results = results_of(tmp_path / "run")
    assert results["finished"]
    assert results["metric"] == ("accuracy" if kind == "choices" else "exact_match")


def test_code_that_the_command_names_is_used_and_that_of_a_record_is_not(root, tmp_path):
    """A task and a metric in a module; an evaluation imports them only if its command line names them."""
    marker = tmp_path / "imported"
    (tmp_path / "own_code.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from lezo_ds.tasks.base import Example, Task\n"
        "def build(record, index):\n"
        "    return Example(record['text'], (' a', ' b'), int(record['topic'] == 'bug'), index)\n"
        "TASK = Task('mine', None, None, 'classification', {'text': str, 'topic': str}, build)\n"
        "def half(predicted, examples):\n"
        "    return 0.5\n"
    )
    values = own_values(root / "model", train=str(root / "tickets.csv"), task="own_code:TASK")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    arguments = ["--config", tmp_path / "recipe.yaml", f"run_dir={tmp_path / 'run'}", "train.steps=1"]
    run_forked_well([*arguments, "data.metric=own_code:half"], PYTHONPATH=path_with(tmp_path))
    assert results_of(tmp_path / "run")["test"] == 0.5
    marker.unlink()
    of_run = ["--run", tmp_path / "run", "--step", "last"]
    run_forked_well([*of_run, "--out", tmp_path / "out"], program="export.py", PYTHONPATH=path_with(tmp_path))
    run_forked_well([tmp_path / "run"], program="report.py", PYTHONPATH=path_with(tmp_path))
    refused = run_forked(of_run, program="evaluate.py", PYTHONPATH=path_with(tmp_path))
    assert_one_error(refused, 2, "imported only if you name it", "add data.task=own_code:TASK")
    assert not marker.exists()
    named = [*of_run, "data.task=own_code:TASK", "--json"]
    scored = json.loads(run_forked_well(named, program="evaluate.py", PYTHONPATH=path_with(tmp_path)).out)
    assert (scored["metric"], scored["task"]) == ("accuracy", "mine")


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        (
            "data.label_field=topc",
            ["record 1 of the train split", "tickets.csv line 2", "did you mean topic?"],
        ),
        ("data.labels=billing,bug", ["tickets.csv line", "got: shipping", "expected: one of billing, bug"]),
        ("data.prompt=about", ["data.prompt names no field"]),
        ("data.train=none.csv", ["data.train is not a file", "none.csv, which is not there"]),
        ("data.num_train=1000", ["too few records", "got: 180 records"]),
    ],
)
def test_bad_input_ends_a_dry_run_with_one_line(override, fragments, root):
    assert_one_error(train(root, "--dry-run", override, well=False), 2, *fragments)


@pytest.fixture(scope="module")
def looked_at(root):
    """The recipe that init writes for the tickets, and the commands that it prints, by their headings."""
    out = run_forked_well(
        ["model", "tickets.csv", "--out", "first.yaml"], program="init.py", directory=root
    ).out
    summary, *lines = out.splitlines()
    assert summary == "first.yaml: classification of topic from text"
    return dict(line.split(maxsplit=1) for line in lines)


def run_printed(command, root, *more):
    """Run a command that another has printed, on as many forked ranks as it asks for."""
    launcher, arguments = re.fullmatch(r"(.*--module lezo_ds|lezo-ds) (.*)", command).groups()
    ranks = re.search(r"--num_gpus (\d+)", launcher)
    return run_forked_well(
        [*shlex.split(arguments), *more],
        program=REPOSITORY / "lezo_ds" / "__main__.py",
        num_ranks=int(ranks[1]) if ranks else 1,
        directory=root,
    )


def test_tickets_become_a_model_by_the_commands_that_init_prints(root, looked_at):
    recipe = yaml.safe_load((root / "first.yaml").read_text())
    assert recipe["model"]["path"] == "model"
    assert recipe["data"]["labels"] == sorted(SUBJECTS)
    assert (recipe["data"]["max_length"], recipe["run_dir"]) == (256, "runs/tickets")
    assert list(looked_at) == ["check", "train", "export", "report"]
    plan = run_printed(looked_at["check"], root).out
    assert f"custom, protocol clean: {300 - 2 * NUM_EACH} train, {NUM_EACH} dev, {NUM_EACH} test" in plan
    run_printed(looked_at["train"], root, "train.steps=20", "train.eval_every=10")
    results = results_of(root / "runs" / "tickets")
    assert (results["finished"], results["steps"], results["task"]) == (True, 20, "custom")
    run_printed(looked_at["export"], root)
    assert AutoModelForCausalLM.from_pretrained(root / "runs" / "tickets-model").config.num_hidden_layers == 2
    assert "tickets" in run_printed(looked_at["report"], root).out


def test_the_first_recipe_says_what_it_rests_on(root, looked_at):
    text = (root / "first.yaml").read_text()
    assert f"# Command:  {looked_at['train']}\n" in text
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "topic is the label: 3 different values in 300 records:" in head
    assert "Not used: id." in head
    assert re.search(r"Hardware: (\d ranks?|\d GPUs?) .*GiB for each rank", head)
    assert re.search(r"train: tickets.csv  # 180 records train; 60 for validation and 60 for test", text)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["model", "tickets.csv", "--out", "recipe.yaml"], ["recipe.yaml exists"]),
        (["model", "tickets.csv", "--out", "none/new.yaml"], ["the folder of none/new.yaml does not exist"]),
        (["model", "none.csv"], ["DATA is not a file", "none.csv, which is not there"]),
        (["none", "tickets.csv"], ["model.path", "none"]),
        (
            ["model", "texts.csv"],
            ["got: the fields text", "does not show which field the model shall learn to write"],
        ),
        (
            ["model", "tickets.csv", "--label", "tpoic"],
            ["--label names no field of", "tpoic", "one of id, text"],
        ),
    ],
)
def test_init_refuses_what_it_cannot_use_and_writes_nothing(arguments, fragments, root):
    (root / "texts.csv").write_text("text\n" + "\n".join(f"This is ticket {i}" for i in range(40)))
    before = sorted(root.iterdir())
    failed = run_forked(
        [*arguments, *([] if "--out" in arguments else ["--out", "new.yaml"])],
        program="init.py",
        directory=root,
    )
    assert_one_error(failed, 2, *fragments)
    assert sorted(root.iterdir()) == before
