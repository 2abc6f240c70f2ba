"""The recipes that lezo-ds init writes."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmark import answer_speeds
from own_data import write_chat_model, write_tickets

from lezo_ds.cli import run_command
from lezo_ds.config import load_config
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.tools import init
from lezo_ds.tools.init import describe_task, num_steps

REWARD = """
from lezo_ds import reward

@reward
def brevity(answers, records):
    return [1 / (1 + len(answer.split())) for answer in answers]
"""
TEXTS = [f"ticket number {number} says" for number in range(40)]
CLASSES = ["bug", "billing"] * 20


def records(**columns):
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def test_init_takes_the_only_columns_of_texts_and_labels():
    title, task = describe_task(records(id=list(range(40)), body=TEXTS, topic=CLASSES))
    assert title == "Classification of body by topic"
    assert task == {
        "prompt": "{body}\nTopic:",
        "label_field": "topic",
        "labels": ["billing", "bug"],
    }
    answers = [f"the answer is {number}" for number in range(60)]
    questions = records(question=[f"what is {number}" for number in range(60)], answer=answers)
    _, task = describe_task(questions, text="question", answer="answer", in_chat=True)
    assert task == {
        "prompt": "{question}\nAnswer:",
        "completion": "{answer}",
        "chat_template": True,
    }
    intents = [f"intent {number % 80}" for number in range(400)]
    _, task = describe_task(
        records(text=[f"say {number}" for number in range(400)], intent=intents)
    )
    assert task["label_field"] == "intent" and len(task["labels"]) == 80
    turns = [[{"from": "human", "value": "hi"}]] * 40
    assert describe_task(records(turns=turns, source=CLASSES))[1] == {"messages": "turns"}


def test_init_knows_the_usual_columns_of_questions_and_answers_and_keeps_their_input():
    texts = [f"text {number}" for number in range(40)]
    inputs = ["", "more"] * 20
    alpaca = records(instruction=texts, input=inputs, output=texts)
    _, task = describe_task(alpaca, in_chat=True)
    assert task == {
        "prompt": "{instruction}\n\n{input}\nOutput:",
        "completion": "{output}",
        "chat_template": True,
    }
    _, task = describe_task(alpaca, reward="judge:brevity", in_chat=True)
    assert task == {"prompt": "{instruction}\n\n{input}", "chat_template": True}
    without = records(instruction=texts, input=[""] * 40, output=texts)
    assert describe_task(without)[1]["prompt"] == "{instruction}\nOutput:"
    _, task = describe_task(records(prompt=texts, completion=texts, n=CLASSES))
    assert task == {"prompt": "{prompt}", "completion": "{completion}"}


TURNS = [[{"role": "user", "content": "hi"}]] * 40


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS},
            {},
            "one of two answers, and no objective learns from pairs; fix: .* --answer chosen",
        ),
        ({"chosen": TURNS, "rejected": TURNS}, {}, "from pairs; fix: .* remove this column"),
        (
            {"a": TEXTS, "b": TEXTS, "c": CLASSES},
            {},
            "several columns hold texts: a, b; fix: give --text",
        ),
        (
            {"a": TEXTS, "b": CLASSES, "c": CLASSES},
            {},
            "few different values: b, c; fix: give --label",
        ),
        (
            {"a": TEXTS, "b": CLASSES},
            {"label": "c"},
            "--label c is not a column; fix: use one of a, b",
        ),
        (
            {"a": TEXTS, "b": TEXTS},
            {"label": "b"},
            "40 different labels in 40 records; fix: .* --answer b",
        ),
        ({"a": TEXTS[:3], "b": CLASSES[:3]}, {}, "3 records are too few .*; fix: add records"),
    ],
)
def test_init_asks_for_the_columns_that_are_not_clear(columns, options, message):
    with pytest.raises(UserError, match=message):
        describe_task(records(**columns), **options)


def described_labels(labels, **options):
    texts = [f"ticket number {number} says" for number in range(len(labels))]
    return describe_task(records(body=texts, topic=labels), label="topic", **options)[1]["labels"]


def test_labels_that_differ_in_case_are_one_and_near_ones_are_named_with_counts(caplog):
    labels = 30 * ["bug"] + 3 * ["Bug"] + 27 * ["Rechnung"] + 2 * ["Rechnng"]
    assert described_labels(labels) == {
        "Bug": "bug",
        "Rechnng": "Rechnng",
        "Rechnung": "Rechnung",
        "bug": "bug",
    }
    assert caplog.messages == [
        "3 records with the label Bug count as bug",
        "the label Rechnng (2 records) is almost Rechnung (27 records); to count it as that, add "
        "--label-map 'Rechnng=Rechnung'",
    ]
    caplog.clear()
    mapped = described_labels(labels, label_map={"Rechnng": "rechnung", "bug": "a fault"})
    assert mapped["Rechnng"] == mapped["Rechnung"] == "Rechnung"
    assert (mapped["Bug"], mapped["bug"]) == ("Bug", "a fault")
    assert not any("almost" in message for message in caplog.messages)
    with pytest.raises(UserError, match="topic has no label Rechnug; fix: did you mean Rechn"):
        described_labels(labels, label_map={"Rechnug": "Rechnung"})
    with pytest.raises(UserError, match=r"topic has no two labels, only .'bug'.; fix: add records"):
        described_labels(40 * ["bug"])


def test_init_writes_a_recipe_that_a_run_can_start_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "model")
    write_tickets(tmp_path / "tickets.csv")

    def recipe(*words):
        monkeypatch.setattr(sys, "argv", ["init", *words])
        run_command("init")

    for method, kept in (
        ("fzoo", ("fzoo", "fixed", True, 15)),
        ("mezo", ("spsa", "uniform", False, 1)),
    ):
        recipe("model", "tickets.csv", "--out", f"{method}.yaml", "--method", method)
        config = load_config(tmp_path / f"{method}.yaml")
        zo, train = config.zo, config.train
        assert (zo.estimator, zo.layer_policy, zo.only_blocks, zo.directions) == kept
        assert (config.data.label_field, config.data.chat_template) == ("topic", True)
        assert (config.run_dir, train.steps) == ("runs/tickets", 100 if method == "fzoo" else 1000)
        assert "180 train, 60 dev, 60 test" in capsys.readouterr().out
    recipe("model", "tickets.csv", "--out", "new/folder/r.yaml")
    assert load_config(tmp_path / "new/folder/r.yaml").data.label_field == "topic"
    again, swapped = "model tickets.csv --out mezo.yaml", "tickets.csv model"
    for words, message in ((again, "exists"), (swapped, "init model tic")):
        with pytest.raises(UserError, match=message):
            recipe(*words.split())
    rows = ['"the\ntopic","a\ntext"', *map(",".join, zip(CLASSES, TEXTS, strict=True))]
    (tmp_path / "my: table #2.csv").write_text("\n".join(rows))
    recipe("model", "my: table #2.csv", "--out", "odd.yaml")
    assert load_config(tmp_path / "odd.yaml").run_dir == "runs/my: table #2"
    (tmp_path / "bare.csv").write_text("\n".join(rows[1:]))
    with pytest.raises(UserError, match="bug is also a value in its column; fix: add a first row"):
        recipe("model", "bare.csv", "--out", "bare.yaml")
    (tmp_path / "cases.csv").write_text("\n".join([*rows, "Bug,x", "buug,y"]))
    cases = ["model", "cases.csv", "--out", "cases.yaml", "--label", "the\ntopic"]
    recipe(*cases, "--label-map", "buug=bug")
    labels = load_config(tmp_path / "cases.yaml").data.labels
    assert labels == {"Bug": "bug", "billing": "billing", "bug": "bug", "buug": "bug"}
    (tmp_path / "excel.csv").write_text("\n".join([*rows, "bug,Grüße"]), encoding="cp1252")
    with pytest.raises(UserError, match="--encoding cp1252"):
        recipe("model", "excel.csv", "--out", "excel.yaml")
    recipe("model", "excel.csv", "--out", "excel.yaml", "--encoding", "cp1252")
    assert load_config(tmp_path / "excel.yaml").data.encoding == "cp1252"
    (tmp_path / "judge_of_init.py").write_text(REWARD)
    recipe(
        "model",
        "tickets.csv",
        "--reward",
        "judge_of_init:brevity",
        "--text",
        "text",
        "--out",
        "own.yaml",
    )
    text = (tmp_path / "own.yaml").read_text()
    assert "  stop: []  # [] is the end of" in text and "  max_new_tokens: 128\n" in text
    small = ["generation.max_new_tokens=3", "data.max_length=128", "zo.directions=8"]
    config = load_config(tmp_path / "own.yaml", small)
    assert (config.data.prompt, config.train.objective) == ("{text}", "judge_of_init:brevity")
    speeds = answer_speeds(config, rounds=1)
    assert "384 tokens, 8 probes" in speeds and all(name in speeds for name in ("generate", "ours"))
    assert [num_steps(records) for records in (30, 1667, 100_000)] == [100, 310, 1000]


def init_tickets(monkeypatch, directory, classes, *words):
    """Write a recipe for a table of 40 tickets of these classes, and return its text."""
    monkeypatch.chdir(directory)
    if not (directory / "model").exists():
        write_chat_model(directory / "model")
    rows = [f"{text},{classes[number % 2]}" for number, text in enumerate(TEXTS)]
    (directory / "own.csv").write_text("\n".join(["text,topic", *rows]))
    monkeypatch.setattr(sys, "argv", ["init", "model", "own.csv", *words])
    run_command("init")
    return (directory / "recipe.yaml").read_text()


def test_init_scores_labels_by_the_first_token_that_no_other_has_if_it_begins_a_word(
    tmp_path, monkeypatch
):
    """The tokens of this model are bytes."""
    for classes, labels in (
        (("defekt", "lob"), {"defekt": "d", "lob": "l"}),
        (("Abt. defekt", "Abt. lob"), {"Abt. defekt": "d", "Abt. lob": "l"}),
        (("bug", "billing"), ["billing", "bug"]),
        (("a", "b"), ["a", "b"]),
        (("ärger", "lob"), ["lob", "ärger"]),
    ):
        (tmp_path / "recipe.yaml").unlink(missing_ok=True)
        text = init_tickets(monkeypatch, tmp_path, classes)
        config = load_config(tmp_path / "recipe.yaml")
        assert config.data.labels == labels
        assert ("by a token of each" in text) == isinstance(labels, dict)
        lengths = load_task_data(config).train.encoded[0].option_lengths
        if isinstance(labels, dict):
            assert lengths == (1, 1)


def test_init_scores_no_text_that_is_one_token_after_a_space_only(tmp_path, monkeypatch):
    """ " lo" is one token. The prompt ends with a line break, after which "lo" is two of them."""
    file = write_chat_model(tmp_path / "model") / "tokenizer.json"
    changed = json.loads(file.read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["\u0120lo"] = vocabulary.pop("\u00ff")
    changed["pre_tokenizer"]["pretokenizers"][1]["pattern"] = {"Regex": "\u0120lo|."}
    file.write_text(json.dumps(changed))
    init_tickets(monkeypatch, tmp_path, ("Abt. lob", "Abt. defekt"))
    config = load_config(tmp_path / "recipe.yaml")
    assert config.data.labels == {"Abt. defekt": "d", "Abt. lob": "l"}
    assert load_task_data(config).train.encoded[0].option_lengths == (1, 1)


def test_init_makes_a_step_smaller_that_would_take_long_and_names_what_would_be_faster(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(init, "LONG_STEP", 1e-9)
    monkeypatch.setattr("lezo_ds.tools.dry_run.LONG_STEP", 1e-9)
    text = init_tickets(monkeypatch, tmp_path, ("bug", "billing"))
    config = load_config(tmp_path / "recipe.yaml")
    assert (config.train.batch_size, config.zo.directions, config.zo.probes_per_pass) == (4, 7, 4)
    ways = "labels of one token each (a map in data.labels), train.batch_size=2 "
    assert "# A step takes about 0 s here; with 16 examples" in text
    captured = capsys.readouterr()
    assert f"faster        {ways}" in captured.out and "measuring" in captured.err
    monkeypatch.setattr(init, "LONG_STEP", 10.0)
    sizes = [init._affordable(config, seconds) for seconds in (9, 20, 40, 80, 800)]
    steps = [(*size, seconds) for size, seconds in sizes]
    assert steps == [(16, 15, 9), (8, 15, 10), (4, 15, 10), (4, 7, 10), (4, 7, 100)]


def test_init_that_is_stopped_leaves_no_recipe(tmp_path, monkeypatch):
    def stop(*_):
        assert (tmp_path / "recipe.yaml").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(init, "plan_time", stop)
        with pytest.raises(KeyboardInterrupt):
            init_tickets(stopping, tmp_path, ("bug", "billing"))
    assert not (tmp_path / "recipe.yaml").exists()
    assert init_tickets(monkeypatch, tmp_path, ("bug", "billing"))


@pytest.mark.parametrize(
    ("capability", "gigabytes", "dtype", "partition_size"),
    [((7, 5), 16, "fp16", 1), ((9, 0), 2, "bf16", None)],
    ids=["T4", "small GPUs that multiply bf16"],
)
def test_init_knows_what_eight_gpus_multiply_and_whether_one_holds_the_model(
    capability, gigabytes, dtype, partition_size, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "model")
    write_tickets(tmp_path / "tickets.csv")
    monkeypatch.setattr(init.distributed, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(init, "dry_run", lambda config, num_gpus: f"a plan for {num_gpus} GPUs")
    memory = SimpleNamespace(total_memory=gigabytes << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # it counts emulation
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(sys, "argv", ["init", "model", "tickets.csv"])
    run_command("init")
    config = load_config(tmp_path / "recipe.yaml")
    assert (config.model.dtype, config.deepspeed) == (dtype, f"zero3_{dtype}")
    assert config.partition_size == partition_size
