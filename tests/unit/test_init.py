"""What lezo-ds init finds in a table, and the recipes that it writes."""

import copy
import gzip
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from assets import change_json
from own_data import write_chat_model, write_tickets
from tiny_models import FAMILIES
from tiny_runs import write_model
from transformers import AutoTokenizer

from lezo_ds import cli
from lezo_ds.config import load_config
from lezo_ds.errors import UserError
from lezo_ds.tools import init

REWARD = "from lezo_ds import reward\n@reward\ndef brevity(answers, records):\n"
REWARD += "    return [1 / (1 + len(answer.split())) for answer in answers]\n"
TEXTS = [f"ticket number {number} says" for number in range(40)]
CLASSES = ["bug", "billing"] * 20
TURNS = [[{"role": "user", "content": "hi"}]] * 40
ANSWERS = [[{"role": "assistant", "content": "yes"}]] * 40
ALPACA = {"instruction": TEXTS, "input": ["", "more"] * 20, "output": TEXTS}
QUESTIONS = {"question": TEXTS, "choices": [["red", "blue"]] * 40, "answer": [0, 1] * 20}
KTO = {"prompt": TEXTS, "completion": TEXTS, "label": [True, False] * 20}


@pytest.fixture
def write_recipe(tmp_path, monkeypatch, capsys):
    """A function that writes a recipe for columns, and returns it and what is printed."""
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "model")
    monkeypatch.setattr(init, "LONG_STEP", 1e9)  # on a machine with other work, steps are long
    monkeypatch.setattr(cli, "forget_launcher", lambda: None)  # this process is a rank already

    def write(columns, *words, name="own.jsonl"):
        if columns is not None:
            pd.DataFrame(columns).to_json(tmp_path / name, orient="records", lines=True)
        (tmp_path / "recipe.yaml").unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["init", "model", name, *words])
        cli.run_command("init")
        return load_config(tmp_path / "recipe.yaml"), capsys.readouterr().out

    return write


def test_labels_have_counts_a_baseline_examples_and_an_order_of_commands(write_recipe):
    classes = ["bug"] * 120 + ["billing"] * 119 + ["Biling"]
    texts = [f"it is a {label} in {number}" for number, label in enumerate(classes)]
    columns = {"id": range(240), "body": texts, "topic": classes}
    config, out = write_recipe(columns, "--label-map", "Biling=billing")
    assert config.data.prompt == "{body}\nTopic:" and config.data.chat_template
    assert config.data.labels == {"Biling": "billing", "billing": "billing", "bug": "bug"}
    assert '# no key reads the columns ["id"]\n' in Path("recipe.yaml").read_text()
    lines = out.splitlines()
    unread = "column  id: 240 different values, such as 1 (not read)"
    assert "label   bug: 120" in lines and unread in lines
    assert any(line.startswith("label   Biling: 1, below 1 %: --drop-label") for line in lines)
    assert "most frequent label alone: 0.500; a bag of words (scikit-learn, five folds): " in out
    assert "cannot be fitted" in init.baseline(["a", "b", "c"] * 2, ["x", "y"] * 3)
    assert len(re.findall("^reads  '", out, re.MULTILINE)) == 3
    assert len(re.findall(r"^learns  \[.*\] label [01]$", out, re.MULTILINE)) == 3
    assert out.index("fit-head --model model --config recipe.yaml") < out.index("ds train --conf")
    config, _ = write_recipe(columns, "--drop-label", "Biling")
    assert config.data.labels == ["billing", "bug"] and config.data.skip_unusable
    with pytest.raises(UserError, match="topic has no label Bilin; fix: did you mean Biling"):
        write_recipe(columns, "--drop-label", "Bilin")


@pytest.mark.parametrize(
    ("columns", "words", "expected"),
    [
        (ALPACA, [], {"prompt": "{instruction}\n\n{input}\nOutput:", "completion": "{output}"}),
        ({"prompt": TURNS, "completion": ANSWERS}, [], {"completion": "{completion}"}),
        ({"talk": [[*TURNS[0], *ANSWERS[0]]] * 40, "n": CLASSES}, [], {"messages": "talk"}),
        ({"q": TEXTS, "a": TEXTS}, ["--text", "q", "--answer", "a"], {"prompt": "{q}\nA:"}),
        (QUESTIONS, [], {"choices": ["{choices}"], "label_field": "answer"}),
        ({"text": TEXTS, "label": [0, 1] * 20}, [], {"labels": ["0", "1"]}),
    ],
)
def test_a_column_is_taken_if_it_alone_can_be_it(columns, words, expected, write_recipe):
    config, _ = write_recipe(columns, *words)
    assert {key: getattr(config.data, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("columns", "words", "message"),
    [
        ({"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS}, [], "no objective learns from pa"),
        (KTO, [], "column label says which answers are good"),
        ({"prompt": [json.dumps(TURNS[0])] * 40}, [], r"stored as text; fix: .* \.jsonl"),
        ({"text": TEXTS, "images": [["a.png"]] * 40}, [], "images are not read"),
        ({"a": TEXTS, "b": TEXTS, "c": CLASSES}, [], "several columns have texts: a, b; fix: give"),
        ({"a": TEXTS, "b": CLASSES, "c": CLASSES}, [], "few different values: b, c; fix: give --l"),
        ({"a": TEXTS, "b": CLASSES}, ["--label", "c"], "--label c is not a column; fix: "),
        ({"a": TEXTS, "b": TEXTS}, ["--label", "b"], "40 labels in 40 records; fix: .* --answer b"),
        ({"good": TEXTS, "bad": ["bad", "good"] * 20}, [], "bad is also a value in its column"),
    ],
)
def test_what_is_not_clear_or_cannot_be_learned_is_refused(columns, words, message, write_recipe):
    with pytest.raises(UserError, match=message):
        write_recipe(columns, *words)
    assert not Path("recipe.yaml").exists()


def test_the_layout_of_a_table_is_found_and_written_down_if_it_has_records(write_recipe, caplog):
    for content, message in (("", "No columns to parse"), ("text,label\n", "has no records")):
        Path("own.csv").write_text(content)
        with pytest.raises(UserError, match=message):
            write_recipe(None, name="own.csv")
    pairs = zip(TEXTS, CLASSES, strict=True)
    rows = ["text;label", *(f"Größe {text}, ja;{name}" for text, name in pairs)]
    Path("own.csv").write_text("\n".join(rows), encoding="cp1252")
    config, out = write_recipe(None, name="own.csv")
    assert (config.data.separator, config.data.encoding) == (";", "cp1252")
    assert "Größe" in out and "cp1252 is a guess, and --encoding sets another: Größe" in caplog.text
    with pytest.raises(UserError, match="unknown encoding: cp9"):
        write_recipe(None, "--encoding", "cp9", name="own.csv")
    Path("own.csv.gz").write_bytes(gzip.compress(Path("own.csv").read_bytes()))
    words = ["--encoding", "cp1252", "--separator", ";"]
    config, _ = write_recipe(None, *words, name="own.csv.gz")
    assert (config.data.separator, config.data.encoding) == (";", "cp1252")
    commas = "\n".join(rows).replace(", ja;", ",").replace(";", ",")
    Path("own.csv").write_text(commas, encoding="utf-8-sig")
    config, _ = write_recipe(None, name="own.csv")
    assert (config.data.separator, config.data.encoding) == (None, None)


def test_a_reward_has_a_population_and_texts_have_room_for_the_longest_answer(write_recipe):
    Path("judge_of_init.py").write_text(REWARD)
    words = ["--reward", "judge_of_init:brevity", "--text", "text"]
    config, out = write_recipe({"text": TEXTS, "topic": CLASSES}, *words)
    assert config.train.objective == "judge_of_init:brevity" and config.data.prompt == "{text}"
    assert config.zo.examples_per_direction == 2 and "fit-head" not in out
    answers = [f"- one\n- {text}" for text in TEXTS]
    config, _ = write_recipe({"instruction": TEXTS, "output": answers})
    # A token of this model is a byte.
    assert config.generation.max_new_tokens > 50 and config.zo.estimator == "fzoo"


def test_a_step_that_would_take_long_has_fewer_examples(write_recipe, monkeypatch):
    for limit, examples in ((1e9, 16), (6, 8), (1e-9, 4)):
        monkeypatch.setattr(init, "LONG_STEP", limit)
        monkeypatch.setattr(init, "measured_step", lambda *_, **__: 3.0)
        config, _ = write_recipe({"text": TEXTS, "topic": CLASSES})
        assert config.train.batch_size == examples
        assert config.zo.learning_rate == pytest.approx(4e-2 * examples / 16)


def test_a_model_that_refuses_directions_of_low_rank_gets_others(write_recipe, tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = copy.deepcopy(FAMILIES["qwen3_moe"][0])
    config.update({"vocab_size": len(tokenizer)})
    write_model(config, tmp_path / "model")
    config, _ = write_recipe({"text": TEXTS, "topic": CLASSES})
    assert config.zo.estimator == "fzoo"
    assert any("zo.noise_rank perturbs linear layers" in text for text in caplog.messages)
    with pytest.raises(UserError, match="perturbs linear layers only"):
        write_recipe({"text": TEXTS, "topic": CLASSES}, "--method", "evolution-strategies")


def test_a_model_that_refuses_several_probes_gets_one(write_recipe, monkeypatch):
    def measure(config, *_, **__):
        if config.zo.probes_per_pass != 1:
            raise UserError("several probes", fix="set zo.probes_per_pass=1")
        return 1.0

    monkeypatch.setattr(init, "measured_step", measure)
    for method in ("fzoo", "lezo"):
        config, _ = write_recipe({"text": TEXTS, "topic": CLASSES}, "--method", method)
        assert config.zo.probes_per_pass == 1


OPT_30B = {"hidden_size": 7168, "word_embed_proj_dim": 7168, "ffn_dim": 4 * 7168}
OPT_30B |= {"num_hidden_layers": 48, "num_attention_heads": 56, "vocab_size": 50272}


SHARED = [(4, 39.4, ("fp32_master", 4, None)), (4, 22.5, ("stochastic", 4, None))]
SHARED += [(1, gigabytes, ("fp32_master", None, 8)) for gigabytes in (47.5, 22.5)]


@pytest.mark.parametrize(("gpus", "gigabytes", "found"), SHARED)
def test_gpus_share_the_weights(gpus, gigabytes, found, write_recipe, tmp_path, monkeypatch):
    write_tickets(tmp_path / "tickets.csv")
    change_json(tmp_path / "model" / "config.json", **OPT_30B)
    memory = SimpleNamespace(total_memory=int(gigabytes * 2**30))
    monkeypatch.setattr(init.distributed, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: memory)
    config, out = write_recipe(None, "--label", "topic", name="tickets.csv")
    assert config.model.dtype == "fp16"
    assert (config.zo.update_precision, config.tensor_parallel, config.model.bits) == found
    if gigabytes * gpus < 30:  # it does not fit
        assert config.deepspeed.endswith("zero3_cpu_offload")
    elif gpus > 1:
        assert f"deepspeed --num_gpus {gpus} --module lezo_ds train" in out
