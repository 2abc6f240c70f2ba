"""Conversations: what a chat template makes of them, which tokens are learned, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from chats import MARKED, PLAIN, THINKING, WITHOUT_SYSTEM, write_chat_model
from lezo_ds.data.records import load_own_splits
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from lezo_ds.config import config_from_dict, find_task
from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.chat import encode_answers, encode_conversation, encode_conversations, encode_questions
from lezo_ds.data.encoding import load_tokenizer
from lezo_ds.data.objectives import count_right_tokens, teacher_forcing_loss
from lezo_ds.data.packing import pack
from lezo_ds.data.task_data import EncodedSplit
from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example, Message

TURNS = (
    Message("system", "Be brief."),
    Message("user", "Où?"),
    Message("assistant", "Là-bas, señor."),
    Message("user", "Sure?"),
    Message("assistant", " Yes \n"),
)
WRITTEN = ["Là-bas, señor.</s>", " Yes \n</s>"]
TEMPLATES = {"plain": PLAIN, "marked": MARKED, "thinking": THINKING, "strict": WITHOUT_SYSTEM, "none": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directory of a model for each template."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_chat_model(root / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def tokenizers(models):
    return {name: load_tokenizer(str(directory)) for name, directory in models.items()}


def example_of(*turns):
    place = " (t.jsonl line 3)"
    last = turns[-1].content
    return Example("", (last,), 0, index=2, references=(last,), messages=tuple(turns), place=place)


def encode(tokenizer, turns=TURNS, max_length=256, **settings):
    return encode_conversation(tokenizer, example_of(*turns), max_length, **settings)


def texts_of(tokenizer, encoded):
    """Return the text of each span."""
    return [tokenizer.backend.decode(encoded.sequences[0][slice(*span)]) for span in encoded.spans]


# Which tokens are the assistant's.


@pytest.mark.parametrize("name", ["plain", "marked"])
def test_all_turns_of_the_assistant_and_the_tokens_that_end_them_are_learned(name, tokenizers):
    tokenizer = tokenizers[name]
    encoded = encode(tokenizer)
    assert texts_of(tokenizer, encoded) == WRITTEN
    assert encoded.option_lengths == (sum(stop - start for start, stop in encoded.spans),)
    assert encoded.targets(0) == [place for span in encoded.spans for place in range(*span)]
    whole = tokenizer.backend.decode(encoded.sequences[0])
    assert whole.startswith("<s>system\nBe brief.</s>\n<s>user\n")
    assert whole.endswith(WRITTEN[-1])
    assert not encoded.truncated


def test_both_kinds_of_template_give_the_same_tokens(tokenizers):
    assert encode(tokenizers["plain"]) == encode(tokenizers["marked"])


def test_white_space_after_a_turn_is_learned_if_nothing_else_ends_the_turn(tmp_path):
    template = PLAIN.replace("</s>", "")
    tokenizer = load_tokenizer(str(write_chat_model(tmp_path, template)))
    assert texts_of(tokenizer, encode(tokenizer, TURNS[1:3])) == ["Là-bas, señor.\n"]


def test_what_a_template_writes_into_the_turn_itself_is_learned(tokenizers):
    tokenizer = tokenizers["thinking"]
    encoded = encode(tokenizer, TURNS[:3])
    assert texts_of(tokenizer, encoded) == [f"<think>\n\n</think>\n\n{WRITTEN[0]}"]


def test_a_template_that_changes_earlier_turns_is_refused(tokenizers):
    message = (
        r"writes the first turns of record 3 \(t.jsonl line 3\) in another way if more turns follow; "
        r"got: .* first 3 of 5 turns.* fix: mark the assistant's turns in the template"
    )
    with pytest.raises(UserError, match=message):
        encode(tokenizers["thinking"])


@pytest.mark.parametrize(
    ("name", "turns", "message"),
    [
        ("none", TURNS, "none has no chat template; .* fix: use a model that was trained for conversations"),
        (
            "strict",
            TURNS,
            r"strict cannot write record 3 \(t.jsonl line 3\); got: TemplateError: no system; ",
        ),
        ("plain", TURNS[2:], r"the assistant speaks first in record 3 \(t.jsonl line 3\)"),
    ],
)
def test_a_conversation_that_the_template_cannot_write_is_refused(name, turns, message, tokenizers):
    with pytest.raises(UserError, match=message) as error:
        encode(tokenizers[name], turns)
    assert "\n" not in str(error.value)


def test_a_turn_that_the_template_drops_is_refused(tmp_path):
    template = PLAIN.replace("turn['content'] + '</s>\n'", "turn['content'].split('</think>')[-1]")
    tokenizer = load_tokenizer(str(write_chat_model(tmp_path, template)))
    with pytest.raises(UserError, match="leaves a turn of the assistant out of record 3"):
        encode(tokenizer, (TURNS[1], Message("assistant", "Hm.</think>")))


def test_a_template_that_marks_nothing_is_refused(tmp_path):
    template = MARKED.replace("turn['role'] == 'assistant'", "turn['role'] == 'model'")
    tokenizer = load_tokenizer(str(write_chat_model(tmp_path, template)))
    with pytest.raises(UserError, match="marks no token of record 3"):
        encode(tokenizer)


def test_a_tokenizer_without_offsets_is_refused(tokenizers):
    slow = replace(tokenizers["plain"], backend=ByT5Tokenizer(chat_template=PLAIN))
    with pytest.raises(UserError, match=r"does not tell which characters .* got: ByT5Tokenizer"):
        encode(slow)


# Lengths.


def test_a_long_conversation_is_cut_at_its_end(tokenizers):
    tokenizer, whole = tokenizers["plain"], encode(tokenizers["plain"])
    first, second = whole.spans
    cut = encode(tokenizer, max_length=second[0] + 2)
    assert cut.sequences[0] == whole.sequences[0][: second[0] + 2]
    assert cut.spans == (first, (second[0], second[0] + 2))
    assert cut.truncated
    assert encode(tokenizer, max_length=second[0]).spans == (first,)
    assert encode(tokenizer, max_length=second[0]).sequences[0] == whole.sequences[0][: first[1]]
    assert encode(tokenizer, max_length=first[0]) is None
    assert not encode(tokenizer, max_length=second[1]).truncated


def test_conversations_without_a_token_to_learn_are_left_out_with_a_warning(tokenizers, caplog):
    long = example_of(Message("user", "x" * 100), Message("assistant", "y"))
    short = example_of(Message("user", "x"), Message("assistant", "y"))
    examples, encoded = encode_conversations(tokenizers["plain"], [long, short], 60)
    assert examples == (short,)
    assert len(encoded) == 1
    assert (
        "1 of 2 conversations have no token of the assistant within max_length 60 tokens and are left out, "
        "such as record 3 (t.jsonl line 3)" in caplog.text
    )
    with pytest.raises(UserError, match=r"no conversation has a token .* got: data.max_length=60"):
        encode_conversations(tokenizers["plain"], [long], 60)


def test_a_long_question_is_cut_on_the_left_and_keeps_its_answer(tokenizers, caplog):
    tokenizer, example = tokenizers["plain"], example_of(*TURNS[1:3])
    (whole,) = encode_answers(tokenizer, [example], 256)
    length = len(whole.sequences[0])
    (cut,) = encode_answers(tokenizer, [example], length - 5)
    assert "1 of 1 examples are longer" in caplog.text
    kept = int(tokenizer.bos_id is not None)
    assert cut.sequences[0] == whole.sequences[0][:kept] + whole.sequences[0][kept + 5 :]
    assert texts_of(tokenizer, cut) == texts_of(tokenizer, whole) == WRITTEN[:1]
    with pytest.raises(UserError, match=r"the answer of record 3 .* leaves no token before it"):
        encode_answers(tokenizer, [example], whole.option_lengths[0])


def test_a_question_ends_where_the_assistant_begins(tokenizers):
    tokenizer, example = tokenizers["plain"], example_of(*TURNS)
    (whole,) = encode_questions(tokenizer, [example], max_length=256, max_new_tokens=50)
    encoded = encode(tokenizer)
    assert whole == encoded.sequences[0][: encoded.spans[-1][0]]
    (cut,) = encode_questions(tokenizer, [example], max_length=60, max_new_tokens=50)
    assert tokenizer.backend.decode(cut) == "<s>ssistant\n"  # 10 tokens, the first of which is the BOS


# What the spans are for.


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_is_that_of_transformers_with_the_other_tokens_masked(packed, models, tokenizers):
    tokenizer = tokenizers["plain"]
    conversations = [TURNS, TURNS[1:3], (*TURNS[:2], Message("assistant", "No"))]
    encoded = [encode(tokenizer, turns) for turns in conversations]
    model = AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32).eval()
    expected, right = [], []
    for one in encoded:
        ids = torch.tensor([one.sequences[0]])
        labels = torch.full_like(ids, -100)
        labels[0, one.targets(0)] = ids[0, one.targets(0)]
        with torch.no_grad():
            found = model(input_ids=ids, labels=labels)
        expected.append(float(found.loss) * len(one.targets(0)))
        places = torch.tensor(one.targets(0))
        right.append(int((found.logits[0, places - 1].argmax(dim=1) == ids[0, places]).sum()))
    batch = teacher_forcing_batch(encoded, tokenizer.pad_id)
    assert batch.weight == sum(len(one.targets(0)) for one in encoded)
    laid_out = pack(batch) if packed else batch
    with torch.no_grad():
        logits = model(**laid_out.inputs).logits
    read = logits[laid_out.selection.rows, laid_out.selection.positions]
    assert teacher_forcing_loss(read, laid_out).tolist() == pytest.approx(expected, rel=1e-5)
    assert count_right_tokens(read, laid_out).tolist() == right


def test_the_only_candidate_of_a_conversation_reads_the_same_tokens(tokenizers):
    encoded = [encode(tokenizers["plain"])]
    forced, compared = (lay_out(encoded, 1) for lay_out in (teacher_forcing_batch, candidate_batch))
    assert torch.equal(forced.labels["target_ids"], compared.labels["target_ids"])
    assert torch.equal(forced.selection.positions, compared.selection.positions)


def test_a_fingerprint_tells_where_the_turns_are(tokenizers):
    encoded = encode(tokenizers["plain"])
    (start, stop), *others = encoded.spans
    moved = replace(encoded, spans=((start + 1, stop + 1), *others))
    examples = (example_of(*TURNS),)
    assert EncodedSplit(examples, (encoded,)).fingerprint() != EncodedSplit(examples, (moved,)).fingerprint()


# Recipes and records.

CHAT = {"train": "t.jsonl", "messages": "turns"}
ANSWER = {"train": "t.jsonl", "prompt": "{q}", "completion": "{a}", "chat_template": True}
LABELS = {"label_field": "a", "labels": ["x", "y"]}


def task_of(data, **values):
    base = {"run_dir": "run", "method": "zero_shot", "model": {"path": "model", "dtype": "fp32"}}
    return find_task(config_from_dict({**base, **values, "data": data}, "recipe.yaml").data)


def plain(turns):
    return [turn._asdict() for turn in turns]


def test_a_conversation_ends_with_the_last_turn_of_the_assistant():
    task = task_of(CHAT)
    example = task.build_example({"turns": [*plain(TURNS), {"role": "user", "content": "Bye"}]}, 4)
    assert (task.kind, task.metric) == ("chat", "token_accuracy")
    assert example.messages == TURNS
    assert (example.prompt, example.references, example.label) == ("Sure?", (" Yes \n",), 0)
    assert task.build_example({"turns": plain(TURNS[:2])}, 4).label is None


def test_a_system_prompt_comes_first_unless_the_record_has_its_own():
    task = task_of(CHAT | {"system_prompt": "Be kind."})
    assert task.build_example({"turns": plain(TURNS)}, 0).messages == TURNS
    with_ours = task.build_example({"turns": plain(TURNS[1:])}, 0).messages
    assert with_ours == (Message("system", "Be kind."), *TURNS[1:])


def test_a_prompt_and_its_completion_are_a_conversation_of_two_turns():
    task = task_of(ANSWER | {"system_prompt": "Be kind."})
    example = task.build_example({"q": "Where?", "a": ["Rome", "Roma"]}, 0)
    assert [turn.role for turn in example.messages] == ["system", "user", "assistant"]
    assert example.messages[-1].content == "Rome"
    assert (example.references, example.label) == (("Rome", "Roma"), 0)
    assert (task.kind, task.metric) == ("generation", "f1")
    assert task.build_example({"q": "Where?", "a": ""}, 0).label is None


def test_a_prompt_that_only_a_reward_judges_is_a_question_in_the_template(tokenizers):
    data = ANSWER | {"completion": None, "system_prompt": "Be kind."}
    task = task_of(data, train={"objective": "module:reward"})
    example = task.build_example({"q": "Where?"}, 0)
    assert (task.kind, task.metric, task.has_answers) == ("generation", "reward", False)
    assert [turn.role for turn in example.messages] == ["system", "user"]
    (asked,) = encode_questions(tokenizers["plain"], [example], max_length=256, max_new_tokens=50)
    assert tokenizers["plain"].backend.decode(asked) == (
        "<s>system\nBe kind.</s>\n<s>user\nWhere?</s>\n<s>assistant\n"
    )


@pytest.mark.parametrize(
    ("data", "values", "message"),
    [
        (CHAT | {"prompt": "{q}"}, {}, "data.messages does not go together with data.prompt"),
        (CHAT | {"completion": "{a}"}, {}, "does not go together with data.completion"),
        (CHAT | {"task": "sst2"}, {}, "data.messages cannot change data.task=sst2"),
        ({"messages": "turns"}, {}, "data.train"),
        (CHAT | {"metric": "f1"}, {}, "data.metric=f1 does not fit a task of the kind chat"),
        (CHAT, {"method": "icl"}, "shows no examples in a chat template"),
        (ANSWER | {"completion": None, **LABELS}, {}, "data.chat_template needs data.completion"),
        (ANSWER | {"chat_template": False, "system_prompt": "x"}, {}, "data.system_prompt needs a chat temp"),
        ({"task": "custom", "train": "t.jsonl"}, {}, "needs data.prompt or data.messages"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(data, values, message):
    with pytest.raises(UserError, match=message):
        task_of(data, **values)


GOOD = {"role": "user", "content": "Hello"}
ANSWERED = {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("[]", "field turns is not a list of turns; got: '\\[\\]'"),
        ([], "field turns is not a list of turns; got: \\[\\]"),
        (None, "field turns is not a list of turns; got: null"),
        ([{"from": "human", "value": "Hi"}], "turn 1 of field turns has no role .*: the keys from, value; "),
        ([GOOD, "Hi"], "turn 2 of field turns has no role and content; got: 'Hi'"),
        ([GOOD, {"role": "tool", "content": "3"}], "turn 2 .* has a role that it cannot have; got: 'tool'"),
        ([GOOD, {"role": "system", "content": "3"}], "turn 2 .* role that it cannot have; got: 'system'"),
        ([{"role": ["user"], "content": "3"}], "turn 1 .* role that it cannot have"),
        ([{"role": "user", "content": [{"text": "x"}]}], "the content of turn 1 .* is not plain text"),
        ([GOOD, {**ANSWERED, "tool_calls": [{}]}], "turn 2 .* not plain text; got: a call of a tool"),
        ([GOOD, {**ANSWERED, "content": " \n"}], "turn 2 of field turns is empty, and the assistant says it"),
        ([GOOD, {**ANSWERED, "content": "\ud800"}], "surrogate"),
    ],
)
def test_a_bad_conversation_is_one_line_with_file_and_line(turns, message, tmp_path):
    rows = [{"turns": [GOOD, ANSWERED]}, {"turns": turns}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=message) as error:
        load_own_splits(task_of(CHAT | {"train": str(path)}), str(path))
    assert "record 2 of the train split of custom" in str(error.value)
    assert f"({path} line 2)" in str(error.value)
    assert "\n" not in str(error.value)


def test_records_without_a_turn_of_the_assistant_are_left_out(tmp_path, caplog):
    rows = [{"turns": [GOOD, ANSWERED]}] * 5 + [{"turns": [GOOD]}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits, _ = load_own_splits(task_of(CHAT | {"train": str(path)}), str(path))
    assert "1 of 6 records of the train split of custom have no right answer" in caplog.text
    assert len(splits.train) == 3
    assert {f"{example.place}" for example in splits.train} <= {f" ({path} line {n})" for n in range(1, 6)}
