"""A chat on the command line: with a base model, a run and its exports; what it prints and when."""

import io
import shutil
import sys

import pytest
import yaml
from assets import write_reader, write_records
from commands import assert_refused, lezo, train
from own_data import PLAIN, own_values
from ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from lezo_ds.runs.chat import CHAT_KEYS, chat
from lezo_ds.runs.opening import open_model

pytestmark = pytest.mark.distributed
LINES = ["the plot is dull", "  the cast was great  ", "the film feels fresh"]
MOST_TOKENS = 9
SHORT = f"generation.max_new_tokens={MOST_TOKENS}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A base model of words with a chat template, and a run of LoRA on conversations."""
    directory = tmp_path_factory.mktemp("chat")
    recipe = directory / "recipe.yaml"
    write_reader(directory / "base", family="llama")
    (directory / "base" / "chat_template.jinja").write_text(PLAIN)
    turns = [{"role": "user", "content": LINES[0]}, {"role": "assistant", "content": "It is weak"}]
    write_records(directory / "turns.jsonl", [{"turns": turns}] * 40)
    data = {"train": "turns.jsonl", "messages": "turns", "max_length": 64}
    values = own_values(directory / "base", **data)
    values["peft"] = {"kind": "lora", "lora_rank": 2, "lora_targets": "q_proj,v_proj"}
    values["zo"]["learning_rate"] = 0.5
    recipe.write_text(yaml.safe_dump(values))
    train(recipe, directory / "run", "train.steps=4")
    return directory


def talk(words, lines=LINES, num_ranks=1):
    """Give lines to the input of a chat; return the lines that it prints, and its messages."""
    text = "".join(line + "\n" for line in lines).encode()
    finished = lezo("chat", *words, SHORT, num_ranks=num_ranks, input_bytes=text)
    return finished.out.splitlines(), finished.err


def answers_by_transformers(directory, lines=LINES, system_prompt=None):
    """Return the greedy answer to each line after all turns before it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    turns = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    answers = []
    for line in lines:
        turns.append({"role": "user", "content": line.strip()})
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        ids = tokenizer.apply_chat_template(turns, **options)
        tokens = model.generate(**ids, max_new_tokens=MOST_TOKENS, do_sample=False)
        new = tokens[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
        turns.append({"role": "assistant", "content": answers[-1].strip()})
    return answers


def test_each_answer_follows_all_turns_before_it_until_an_empty_line(root):
    command = ["--model", root / "base"]
    answers, messages = talk(command, [*LINES, "", "the end"])
    plain = answers_by_transformers(root / "base")
    assert answers == plain
    assert "Ctrl-D" in messages
    prompted, _ = talk([*command, "data.system_prompt=the score is moving"], LINES[:1])
    expected = answers_by_transformers(root / "base", LINES[:1], "the score is moving")
    assert prompted == expected != plain[:1]
    first, second = (talk([*command, "generation.temperature=2", "seed=3"])[0] for _ in range(2))
    assert first == second != plain


def test_a_run_and_its_exports_answer_alike_on_any_number_of_ranks(root):
    run, adapter = ["--run", root / "run", "--step", "last"], ["--model", root / "adapter"]
    answers, _ = talk(run)
    assert len(answers) == len(LINES)
    assert answers != answers_by_transformers(root / "base")
    lezo("export", *run, "--out", root / "adapter")
    assert talk(adapter)[0] == answers
    assert talk(run, num_ranks=2)[0] == answers
    expected = ("peft.lora_alpha of", "cannot be 99", "remove peft.lora_alpha")
    assert_refused("chat", [*adapter, "peft.lora_alpha=99"], *expected)


class Screen(io.StringIO):
    """Keeps each piece as it is written."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return len(text)


def pieces_of_an_answer(directory):
    sys.stdin = io.StringIO(LINES[0] + "\n")
    sys.stdout = Screen()
    chat(open_model(str(directory), (*CHAT_KEYS, SHORT)))
    return sys.stdout.pieces


def test_an_answer_is_printed_word_by_word(root):
    ((*pieces, end),) = run_ranks(pieces_of_an_answer, 1, root / "base")
    answer, *_ = answers_by_transformers(root / "base")
    assert ("".join(pieces) + end).split() == answer.split()
    printed = [piece for piece in pieces if piece.strip()]
    assert len(printed) >= len(answer.split()) - 1


def test_turns_that_do_not_fit_are_left_out_with_a_warning(root):
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    lengths = []
    for line in LINES:
        turns = [{"role": "user", "content": line.strip()}]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        lengths.append(len(asked["input_ids"]))
    room = f"data.max_length={max(lengths) + MOST_TOKENS}"
    answers, messages = talk(["--model", root / "base", room])
    assert answers == [answers_by_transformers(root / "base", [line])[0] for line in LINES]
    assert "The first 2 turns do not fit any more" in messages
    assert "The first 4 turns do not fit any more" in messages


def test_an_input_or_model_that_cannot_be_answered_is_one_line(root, tmp_path):
    shutil.copytree(root / "base", tmp_path / "lacking")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lacking")
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = PLAIN.replace("assistant", "<new>")
    tokenizer.save_pretrained(tmp_path / "lacking")
    for model, key, given, message in (
        (root / "base", SHORT, b"the \377 plot\n", "not UTF-8"),
        (root / "base", "data.max_length=9", b"", "fix: add generation.max_new_tokens=4"),
        (write_reader(tmp_path / "plain"), SHORT, b"", "chat template"),
        (tmp_path / "lacking", SHORT, b"the plot\n", "the tokenizer writes '<new>'"),
    ):
        assert_refused("chat", ["--model", model, key], message, input_bytes=given)
    assert lezo("chat", "--model", root / "base", SHORT, input_bytes=None).out == ""
