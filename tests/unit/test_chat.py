"""Conversations as a chat template writes them, and which of their tokens are learned."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from datetime import datetime

import pytest
import torch
from lezo_ds.data.encoding import PromptTokenizer, cut_prompts, encode_example, load_tokenizer
from lezo_ds.tasks.base import Example, Message
from own_data import MARKED, PLAIN, SWITCHED, THINKING, WITHOUT_SYSTEM, write_chat_model
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from lezo_ds.config.schema import GenerationConfig
from lezo_ds.data.batches import teacher_forcing_batch
from lezo_ds.data.chat import (
    TurnEnd,
    TurnsChangedError,
    ask_in_chat,
    encode_conversation,
    encode_question,
    end_of_turn,
    find_thought,
    lead_of_answers,
    turns_apart,
)
from lezo_ds.data.generation import generation_settings, read_answers
from lezo_ds.data.objectives import count_right_tokens, teacher_forcing_loss
from lezo_ds.data.packing import pack
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, Thought

OPENING = PLAIN.replace("<s>assistant\n'", "<s>assistant\n<think>\n'")
# The system prompt is part of the last turn, and left out if that is an answer.
MISTRAL = (
    "{% set system = messages[0].content if messages[0].role == 'system' %}"
    "{% for turn in messages if turn.role != 'system' %}{{ '<s>' + turn.role + '\n' }}"
    "{% if system and loop.last and turn.role == 'user' %}{{ system + '\n\n' }}{% endif %}"
    "{{ turn.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
# A prompt ends with an empty thought, which no answer has that is there.
GEMMA = PLAIN.replace("assistant\n' }}{% endif %}", "assistant\n[thought][end]' }}{% endif %}")

TURNS = (
    Message("system", "Be brief."),
    Message("user", "Où?"),
    Message("assistant", "Là-bas, señor."),
    Message("user", "Sure?"),
    Message("assistant", " Yes \n"),
)
WRITTEN = ["Là-bas, señor.</s>", " Yes \n</s>"]
CALL = {"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
CALLED = (
    Message("user", "Cold?"),
    Message("assistant", "", 1, CALL),
    Message("tool", "-3"),
    TURNS[2],
)
TEMPLATES = {
    "calling": PLAIN.replace(
        "turn['content']", "turn['content'] + (turn.tool_calls | default('') | string)"
    ),
    "silent": PLAIN.replace(
        "{% for turn in messages %}", "{% for turn in messages if turn.role != 'tool' %}"
    ),
    "plain": PLAIN,
    "marked": MARKED,
    "thinking": THINKING,
    "switched": SWITCHED,
    "strict": WITHOUT_SYSTEM,
    "none": None,
    "dropping": PLAIN.replace(
        "turn['content'] + '</s>\n'", "turn['content'].split('</think>')[-1]"
    ),
    "endless": PLAIN.replace("</s>", ""),
    "at once": PLAIN.replace("'\n' }}", "':' }}").replace("assistant\n", "assistant:"),
    "after a space": PLAIN.replace("'\n' }}", "': ' }}").replace("assistant\n", "assistant:"),
    "trimming": PLAIN.replace("turn['content']", "turn['content'] | trim | upper"),
    "opening a thought": OPENING,
    "without BOS": PLAIN.replace("<s>", "["),
    "deepseek": OPENING.replace("turn['content'] +", "turn['content'].split('</think>')[-1] +"),
    "reasoning": PLAIN.replace(
        "turn['content'] +",
        "('<think>\n' + turn.reasoning_content + '\n</think>\n\n'"
        " if turn.reasoning_content else '') + turn['content'] +",
    ),
    "channels": PLAIN.replace(
        "'\n' }}{{ turn['content']",
        "('' if turn.role == 'user' else ('[analysis]' + turn.thinking + '</s><s>assistant'"
        " if turn.thinking else '') + '[final]') }}{{ turn['content']",
    ).replace("<s>assistant\n' }}{% endif %}", "<s>assistant' }}{% endif %}"),
    "dated": "{{ strftime_now('%d %b %Y') }}" + PLAIN,
    "omitting": PLAIN.replace("{% for turn in messages %}", "{% for turn in messages[:1] %}"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directory of a model for each template."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_chat_model(root / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def tokenizers(models):
    return {name: load_tokenizer(str(directory)) for name, directory in models.items()}


def example_of(*turns):
    place = "record 3 (t.jsonl line 3)"
    last = turns[-1].content
    return Example("", (last,), 0, index=2, references=(last,), messages=tuple(turns), place=place)


def encode(tokenizer, turns=TURNS, max_length=256, **settings):
    return encode_conversation(tokenizer, example_of(*turns), max_length, **settings)


def texts_of(tokenizer, encoded):
    """Return the text of each span."""
    return [tokenizer.backend.decode(encoded.sequences[0][slice(*span)]) for span in encoded.spans]


@pytest.mark.parametrize("name", ["plain", "marked"])
def test_all_turns_of_the_assistant_and_the_tokens_that_end_them_are_learned(name, tokenizers):
    tokenizer = tokenizers[name]
    encoded = encode(tokenizer)
    assert texts_of(tokenizer, encoded) == WRITTEN
    assert encoded.targets(0) == [place for span in encoded.spans for place in range(*span)]
    assert encoded == encode(tokenizers["plain"])


@pytest.mark.parametrize(
    ("name", "written"),
    [("endless", "Là-bas, señor.\n"), ("thinking", f"<think>\n\n</think>\n\n{WRITTEN[0]}")],
)
def test_what_a_template_writes_into_the_turn_and_white_space_that_alone_ends_it_are_learned(
    name, written, tokenizers
):
    assert texts_of(tokenizers[name], encode(tokenizers[name], TURNS[1:3])) == [written]


@pytest.mark.parametrize(
    ("name", "turns", "message"),
    [
        (
            "none",
            TURNS,
            "none has no chat template; fix: use a model that was trained for conversations",
        ),
        (
            "strict",
            TURNS,
            r"strict cannot write record 3 \(t.jsonl line 3\): TemplateError: no system",
        ),
        ("plain", TURNS[2:], r"the assistant speaks first in record 3 \(t.jsonl line 3\)"),
        ("dropping", (TURNS[1], Message("assistant", "Hm.</think>")), "omits turn 2 of record 3"),
        (
            "silent",
            (TURNS[1], CALLED[2], TURNS[2]),
            "does not write turn 2 of record 3 .* than tool",
        ),
        ("plain", CALLED, "does not write turn 2 of record 3 .* fix: remove its calls"),
    ],
)
def test_a_conversation_that_the_template_cannot_write_is_refused(name, turns, message, tokenizers):
    with pytest.raises(UserError, match=message) as error:
        encode(tokenizers[name], turns)
    assert "\n" not in str(error.value)


def test_a_question_with_a_turn_that_the_template_does_not_write_is_refused(tokenizers):
    asked = (CALLED[0], CALLED[1]._replace(weight=0), CALLED[2])
    example = replace(example_of(*asked), candidates=(), label=None)
    with pytest.raises(UserError, match=r"does not write turn 2 of record 3 .* remove its calls"):
        encode_question(tokenizers["plain"], example)
    assert encode_question(tokenizers["calling"], example)


@pytest.mark.parametrize("name", ["plain", "marked"])
def test_a_turn_of_weight_0_is_context_and_calls_and_other_roles_are_written(name, tokenizers):
    turns = (*TURNS[:2], TURNS[2]._replace(weight=0), *TURNS[3:])
    assert texts_of(tokenizers[name], encode(tokenizers[name], turns)) == WRITTEN[1:]
    assert encode(tokenizers[name], turns).sequences == encode(tokenizers[name]).sequences
    call, answer = texts_of(tokenizers["calling"], encode(tokenizers["calling"], CALLED))
    assert "'city': 'Oslo'" in call and answer == WRITTEN[0]


def test_turns_are_learned_with_a_tokenizer_that_has_no_map_to_characters():
    tokenizer = PromptTokenizer(ByT5Tokenizer(chat_template=PLAIN), (), 0, (1,))
    assert not tokenizer.backend.is_fast
    # ByT5's decoder strips white space next to </s>.
    assert texts_of(tokenizer, encode(tokenizer)) == [WRITTEN[0], " Yes</s>"]


def test_a_token_that_takes_the_white_space_after_it_is_not_learned(tokenizers):
    template = PLAIN.replace("turn['content']", "'[a]' + turn['content']")
    template = template.replace("assistant\n'", "assistant\n[a]'")
    tokenizer = with_template(tokenizers["plain"], template)
    tokenizer.backend.add_tokens([AddedToken("[a]", rstrip=True)])
    assert texts_of(tokenizer, encode(tokenizer)) == [WRITTEN[0], "Yes \n</s>"]


def with_template(tokenizer, template):
    backend = copy.deepcopy(tokenizer.backend)
    backend.chat_template = template
    return replace(tokenizer, backend=backend)


def test_candidates_follow_a_question_in_the_template(tokenizers):
    asked = Example("Où?", (" là", " ici"), 0, 0)
    written = ask_in_chat(tokenizers["plain"], asked, "Be brief.")
    assert written.prompt == "<s>system\nBe brief.</s>\n<s>user\nOù?</s>\n<s>assistant\n"
    assert written.candidates == ("là", "ici")


@pytest.mark.parametrize(
    "name", sorted({*TEMPLATES} - {"none", "strict", "omitting", "opening a thought"})
)
def test_the_tokens_of_a_label_are_those_that_the_template_writes(name, tokenizers):
    tokenizer = tokenizers[name]
    labels = (" là", "ici ")
    encoded = encode_example(
        tokenizer, ask_in_chat(tokenizer, Example("Où?", labels, 0, 0), None), 256
    )
    for label, ids, length in zip(labels, encoded.sequences, encoded.option_lengths, strict=True):
        turns = [
            {"role": "user", "content": "Où?"},
            {"role": "assistant", "content": label.strip()},
        ]
        written = tokenizer.backend.apply_chat_template(turns, return_dict=False)
        assert list(ids) == written[: len(ids)]
        answer = tokenizer.backend.decode(ids[len(ids) - length :])
        expected = label.strip().upper() if name == "trimming" else label.strip()
        assert answer == (f" {expected}" if name == "after a space" else expected)


def test_a_template_without_the_answer_is_refused(tokenizers):
    with pytest.raises(UserError, match="omits the answer to record 3"):
        ask_in_chat(tokenizers["omitting"], Example("Où?", ("là", "ici"), 0, 2), None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", None),
        ("opening a thought", None),
        ("thinking", Thought("<think>", "</think>")),
        ("deepseek", Thought("<think>", "</think>", is_open=True)),
        ("reasoning", Thought("<think>", "</think>")),
        ("channels", Thought("[analysis]", "[final]")),
    ],
)
def test_the_marks_of_thoughts_are_those_of_the_template(name, expected, tokenizers):
    assert find_thought(tokenizers[name]) == expected


@pytest.mark.parametrize(
    ("name", "written", "answer"),
    [
        ("thinking", "<think>\n\n</think>\n\nLà", "Là"),
        ("thinking", "<think>\nHm, </s>", ""),
        ("thinking", "Là", "Là"),
        ("thinking", "<think>a</think>b</think>c", "b</think>c"),
        ("deepseek", "Hm.\n</think>\n\nLà", "Là"),
        ("deepseek", "Hm.", ""),
        ("channels", "[analysis]Hm</s><s>assistant[final]Là", "Là"),
        ("channels", "[final]Là", "Là"),
        ("channels", "[analysis]Hm", ""),
        ("plain", "<think>Hm</think>Là", "<think>Hm</think>Là"),
    ],
)
def test_a_thought_is_no_part_of_an_answer(name, written, answer, tokenizers):
    tokenizer = tokenizers[name]
    (ids,) = tokenizer.encode_written([written])
    settings = GenerationSettings(99, (), 0, stops=(), thought=find_thought(tokenizer))
    tokens = torch.tensor([ids])
    assert read_answers(tokens, settings, tokenizer) == [answer]
    whole = read_answers(tokens, settings, tokenizer, as_written=True)
    assert whole == [tokenizer.decode(ids)]


@pytest.mark.parametrize(
    ("answer", "learned"),
    [
        (Message("assistant", "Là"), "\n</think>\n\nLà</s>"),
        (Message("assistant", "<think>\nHm.\n</think>\n\nLà"), "Hm.\n</think>\n\nLà</s>"),
        (Message("assistant", "Là", 1, {"reasoning": "Hm."}), "Hm.\n</think>\n\nLà</s>"),
    ],
)
def test_an_answer_follows_its_thought_where_prompts_open_one(answer, learned, tokenizers):
    tokenizer = tokenizers["deepseek"]
    example = example_of(*TURNS[:2], answer)
    encoded = encode_conversation(tokenizer, example, 256)
    assert [text.replace(" ", "") for text in texts_of(tokenizer, encoded)] == [learned]
    # The rest is what the model reads when it answers.
    ((start, _),) = encoded.spans
    assert encoded.sequences[0][:start] == encode_question(tokenizer, example)


def test_turns_are_learned_apart_where_prompts_open_a_thought(tokenizers):
    tokenizer = tokenizers["deepseek"]
    with pytest.raises(TurnsChangedError, match="changes the first turns of record 3"):
        encode(tokenizer)
    parts = [encode_conversation(tokenizer, part, 256) for part in turns_apart(example_of(*TURNS))]
    texts = [text for part in parts for text in texts_of(tokenizer, part)]
    assert texts == [f"\n</think>\n\n{text}" for text in WRITTEN]


@pytest.mark.parametrize("template", [MISTRAL, GEMMA, OPENING], ids=["mistral", "gemma", "open"])
def test_an_answer_follows_what_the_model_reads_when_it_is_asked(template, tokenizers):
    tokenizer = with_template(tokenizers["plain"], template)
    with pytest.raises(TurnsChangedError):
        encode(tokenizer)
    for part, learned in zip(turns_apart(example_of(*TURNS)), WRITTEN, strict=True):
        encoded = encode_conversation(tokenizer, part, 256)
        assert texts_of(tokenizer, encoded) == [learned]
        ((start, _),) = encoded.spans
        assert encoded.sequences[0][:start] == encode_question(tokenizer, part)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où?"}]
    prompt = tokenizer.backend.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    labels = ask_in_chat(tokenizer, Example("Où?", ("là", "ici"), 0, 0), "Be brief.")
    assert (labels.prompt, labels.candidates) == (prompt, ("là", "ici"))
    assert lead_of_answers(tokenizer, "Be brief.") == ""
    assert lead_of_answers(tokenizers["plain"], "Be brief.") is None


def test_contents_are_lists_of_parts_where_a_template_reads_no_others(tokenizers):
    content = "{% for part in turn['content'] if part.type == 'text' %}{{ part.text }}{% endfor %}"
    of_parts = PLAIN.replace("{{ turn['content'] + '", content + "{{ '")
    tokenizer = with_template(tokenizers["plain"], of_parts)
    for part in (example_of(*TURNS), example_of(*TURNS[:3])):
        expected = encode_conversation(tokenizers["plain"], part, 256)
        assert encode_conversation(tokenizer, part, 256) == expected


def test_a_template_writes_the_day_of_the_run(models, tokenizers):
    dated = load_tokenizer(str(models["dated"]), "2024-02-29")
    asked = example_of(*TURNS)
    question = dated.backend.decode(encode_question(dated, asked))
    assert question.startswith("29 Feb 2024<s>system")
    today = datetime.now().strftime("%d %b %Y")  # of another tokenizer with the same template
    own = tokenizers["dated"]
    assert own.backend.decode(encode_question(own, asked)).startswith(today)


def test_a_long_conversation_is_cut_at_its_end(tokenizers):
    tokenizer, whole = tokenizers["plain"], encode(tokenizers["plain"])
    first, second = whole.spans
    cut = encode(tokenizer, max_length=second[0] + 2)
    assert cut.sequences[0] == whole.sequences[0][: second[0] + 2]
    assert cut.spans == (first, (second[0], second[0] + 2))
    assert cut.truncated
    assert encode(tokenizer, max_length=second[0]).spans == (first,)
    assert encode(tokenizer, max_length=second[0]).sequences[0] == whole.sequences[0][: first[1]]
    with pytest.raises(UserError, match="leaves no turn of the assistant in"):
        encode(tokenizer, max_length=first[0])
    assert not encode(tokenizer, max_length=second[1]).truncated


def test_a_long_question_is_cut_on_the_left_and_keeps_its_answer(tokenizers):
    tokenizer = tokenizers["plain"]
    whole = encode(tokenizer, TURNS[1:3])
    length = len(whole.sequences[0])
    cut = encode(tokenizer, TURNS[1:3], length - 5, keep_end=True)
    kept = len(tokenizer.begin_ids)
    assert cut.truncated
    assert cut.sequences[0] == whole.sequences[0][:kept] + whole.sequences[0][kept + 5 :]
    assert texts_of(tokenizer, cut) == texts_of(tokenizer, whole) == WRITTEN[:1]


def test_the_start_of_an_answer_is_continued(tokenizers):
    tokenizer = tokenizers["plain"]
    turns = (Message("user", "Où?"), Message("assistant", "Let me think.\n<think>", 0))
    asked = [{"role": turn.role, "content": turn.content} for turn in turns]
    expected = tokenizer.backend.apply_chat_template(
        asked, tokenize=False, continue_final_message=True
    )
    assert expected.endswith("assistant\nLet me think.\n<think>")
    (ids,) = tokenizer.encode_written([expected])
    assert encode_question(tokenizer, Example("", (), None, 0, messages=turns)) == ids


def test_a_question_ends_where_the_assistant_begins(tokenizers):
    tokenizer, example = tokenizers["plain"], example_of(*TURNS)
    whole = encode_question(tokenizer, example)
    encoded = encode(tokenizer)
    assert whole == encoded.sequences[0][: encoded.spans[-1][0]]
    (cut,) = cut_prompts(tokenizer, [whole], max_length=60, max_new_tokens=50)
    assert (
        tokenizer.backend.decode(cut) == "<s>ssistant\n"
    )  # 10 tokens, the first of which is the BOS


def test_the_end_of_a_turn_is_the_token_that_the_template_writes_after_an_answer(tmp_path):
    template = PLAIN.replace("turn['content'] + '</s>", "turn['content'] + '<end_of_turn>")
    directory = write_chat_model(tmp_path / "model", template)
    backend = AutoTokenizer.from_pretrained(directory)
    backend.add_tokens(["<end_of_turn>"], special_tokens=True)
    backend.save_pretrained(directory)
    tokenizer = load_tokenizer(str(directory))
    end = tokenizer.backend.convert_tokens_to_ids("<end_of_turn>")
    assert end_of_turn(tokenizer) == TurnEnd(ids=(end,))
    assert end not in tokenizer.end_ids


@pytest.mark.parametrize(("name", "ends"), [("plain", True), ("marked", True), ("endless", False)])
def test_a_template_may_end_a_turn_with_the_eos_or_with_no_token(name, ends, tokenizers):
    expected = tokenizers[name].end_ids if ends else ()
    assert end_of_turn(tokenizers[name]) == TurnEnd(ids=expected)


def test_the_token_that_begins_the_next_turn_is_learned_if_it_alone_ends_answers(tmp_path):
    template = (
        "{% for turn in messages %}{{ '<|' + turn.role + '|>\n' + turn.content }}{% endfor %}"
    )
    opening = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    directory = write_chat_model(tmp_path / "glm", template + opening)
    backend = AutoTokenizer.from_pretrained(directory)
    backend.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    backend.save_pretrained(directory)
    user = backend.convert_tokens_to_ids("<|user|>")
    config = json.loads((directory / "config.json").read_text())
    vocabulary = {"vocab_size": len(backend)}
    (directory / "config.json").write_text(json.dumps(config | vocabulary))
    learned = []
    for ends in ([backend.eos_token_id, user], backend.eos_token_id):
        settings = json.dumps({"eos_token_id": ends})
        (directory / "generation_config.json").write_text(settings)
        tokenizer = load_tokenizer(str(directory))
        learned.append(texts_of(tokenizer, encode(tokenizer, TURNS[1:])))
    assert learned[0] == ["Là-bas, señor.<|user|>", " Yes \n<|user|>"]
    assert learned[1] == ["Là-bas, señor.", " Yes \n"]


@pytest.mark.parametrize("is_token", [False, True])
def test_an_answer_ends_at_the_text_that_the_template_writes_after_it(is_token, tokenizers):
    tokenizer = with_template(tokenizers["plain"], PLAIN.replace("</s>", "<|im_end|>"))
    if is_token:
        tokenizer.backend.add_tokens(["<|im_end|>"])
    end = end_of_turn(tokenizer)
    assert end == TurnEnd(stops=("<|im_end|>",))
    settings = generation_settings(tokenizer, GenerationConfig(stop=[]), *end)
    (ids,) = tokenizer.encode_written(["Là<|im_end|>\nuser"])
    assert read_answers(torch.tensor([ids]), settings, tokenizer) == ["Là"]


def test_the_template_of_a_processor_is_that_of_its_tokenizer(models, tmp_path):
    directory = shutil.copytree(models["none"], tmp_path / "model")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert load_tokenizer(str(directory)).backend.chat_template == PLAIN


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_is_that_of_transformers_with_the_other_tokens_masked(packed, models, tokenizers):
    tokenizer = tokenizers["plain"]
    conversations = [TURNS, TURNS[1:3], (*TURNS[:2], Message("assistant", "No"))]
    encoded = [encode(tokenizer, turns) for turns in conversations]
    model = AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32).eval()
    expected, right = [], []
    for conversation in encoded:
        ids = torch.tensor([conversation.sequences[0]])
        labels = torch.full_like(ids, -100)
        labels[0, conversation.targets(0)] = ids[0, conversation.targets(0)]
        with torch.no_grad():
            found = model(input_ids=ids, labels=labels)
        expected.append(float(found.loss) * len(conversation.targets(0)))
        places = torch.tensor(conversation.targets(0))
        right.append(int((found.logits[0, places - 1].argmax(dim=1) == ids[0, places]).sum()))
    batch = teacher_forcing_batch(encoded, tokenizer.pad_id)
    assert batch.weight == sum(len(conversation.targets(0)) for conversation in encoded)
    laid_out = pack(batch) if packed else batch
    with torch.no_grad():
        logits = model(**laid_out.inputs).logits
    read = logits[laid_out.selection.rows, laid_out.selection.positions]
    assert teacher_forcing_loss(read, laid_out).tolist() == pytest.approx(expected, rel=1e-5)
    assert count_right_tokens(read, laid_out).tolist() == right


def test_each_turn_is_the_end_of_a_sequence_of_its_own_if_the_template_changes_earlier_ones(
    tokenizers,
):
    tokenizer = tokenizers["thinking"]
    example = example_of(*TURNS)
    with pytest.raises(TurnsChangedError, match="changes the first turns of record 3"):
        encode(tokenizer)
    written = [encode_conversation(tokenizer, part, 256) for part in turns_apart(example)]
    turns = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    for encoded, num_turns, answer in zip(written, (3, 5), WRITTEN, strict=True):
        text = tokenizer.backend.apply_chat_template(turns[:num_turns], tokenize=False)
        assert tokenizer.backend.decode(encoded.sequences[0]) == text.removesuffix("\n")
        assert texts_of(tokenizer, encoded) == [f"<think>\n\n</think>\n\n{answer}"]


def test_values_that_a_template_reads_are_given_to_it_wherever_it_writes(models):
    directory = str(models["switched"])
    tokenizer = load_tokenizer(directory, None, {"enable_thinking": False})
    example = example_of(*TURNS[1:3])
    opened = tokenizer.backend.decode(encode_question(tokenizer, example))
    turns = [{"role": turn.role, "content": turn.content} for turn in example.messages]
    assert opened == tokenizer.backend.apply_chat_template(
        turns[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert opened.endswith("<think>\n\n</think>\n\n")
    # What the prompt has is not learned.
    assert texts_of(tokenizer, encode(tokenizer, TURNS[1:3])) == WRITTEN[:1]
    with pytest.raises(UserError, match="does not read enable_thoughts"):
        load_tokenizer(directory, None, {"enable_thoughts": True})
