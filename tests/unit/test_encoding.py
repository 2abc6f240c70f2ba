from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, LlamaConfig, OPTConfig, PreTrainedTokenizerFast
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from lezo_ds.data.encoding import (
    encode_example,
    encode_examples,
    encode_null,
    encode_prompts,
    load_tokenizer,
)
from lezo_ds.data.generation import generation_settings, read_answers
from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example

# A word takes the space before it, as in GPT-2; a newline stands alone.
WORDS = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "a",
    " joy",
    " It",
    " was",
    " terrible",
    " great",
    "\n",
    "Yes",
    "No",
]
WORDS += [" ", " so", " the", " cup", " fell", "-", " Paris", " is", " big"]


def save_tokenizer(directory, config, words=WORDS, bos=None, eos="</s>"):
    """Save a model's configuration and a tokenizer of whole words that begins texts with `bos`."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\n| |-"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, words.index(bos))]
        )
    named = {"bos_token": bos, "eos_token": eos, "pad_token": "<pad>"}
    special = {name: token for name, token in named.items() if token in words}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(
        directory
    )
    config.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def opt(tmp_path):
    return load_tokenizer(save_tokenizer(tmp_path, OPTConfig(), bos="<s>"))


def test_an_opt_input_is_bos_prompt_and_candidate(opt):
    encoded = encode_example(opt, Example("a joy It was", (" terrible", " great"), 1, 0), 2048)
    assert encoded.sequences == ((0, 4, 5, 6, 7, 8), (0, 4, 5, 6, 7, 9))
    assert encoded.option_lengths == (1, 1)
    assert (encoded.label, encoded.truncated) == (1, False)


def test_spaces_are_stripped_and_newlines_kept(opt):
    encoded = encode_example(opt, Example("  a joy\n", ("Yes", "No"), 0, 0), 2048)
    assert encoded.sequences == ((0, 4, 5, 10, 11), (0, 4, 5, 10, 12))


def test_the_space_between_prompt_and_candidate_belongs_to_the_candidate(opt):
    encoded = encode_example(opt, Example("a cup fell so ", ("the cup was great", "Yes"), 0, 0), 2048)
    assert encoded.sequences[0] == (0, 4, 16, 17, 14, 15, 16, 7, 9)
    assert encoded.option_lengths == (4, 1)


def test_an_empty_prompt_leaves_the_bos_as_context(opt):
    encoded = encode_example(opt, Example("", ("Yes", "No"), 0, 0), 2048)
    assert encoded.sequences == ((0, 11), (0, 12))


def test_what_is_too_long_is_cut_on_the_left_behind_the_bos(opt):
    example = Example("a joy It was", (" terrible", " great\n"), 1, 0)
    encoded = encode_example(opt, example, 4)
    assert encoded.sequences == ((0, 6, 7, 8), (0, 7, 9, 10))
    assert encoded.option_lengths == (1, 2)
    assert encoded.truncated
    assert not encode_example(opt, example, 7).truncated


def test_cut_examples_are_counted_in_one_warning(opt, caplog):
    examples = [Example("a joy It was", (" great",), 0, 0), Example("a It was", (" great",), 0, 1)] * 3
    with caplog.at_level(logging.WARNING):
        encoded = encode_examples(opt, examples, 5)
    assert [example.truncated for example in encoded] == [True, False] * 3
    assert [record.message for record in caplog.records] == [
        "3 of 6 examples are longer than max_length 5 tokens and were cut on the left"
    ]


@pytest.mark.parametrize("candidate", ["", "  "])
def test_a_candidate_without_tokens_is_refused(opt, candidate):
    with pytest.raises(UserError, match="candidate of record 4 adds no token"):
        encode_example(opt, Example("a joy", (" great", candidate), 0, 3), 2048)


def test_a_candidate_that_fills_the_whole_length_is_refused(opt):
    with pytest.raises(
        UserError, match=r"leaves no token before it; got: 2 tokens of 2; .*fix: raise data.max_length=2"
    ):
        encode_example(opt, Example("a joy", (" great\n",), 0, 3), 2)


@pytest.mark.parametrize(
    ("null_prompt", "context"), [("", (0,)), (" -", (0, 18)), ("a It was", (0, 4, 6, 7))]
)
def test_a_null_prompt_replaces_the_prompt_and_keeps_the_candidates(opt, null_prompt, context):
    example = Example("a joy It was", (" terrible", " great\n"), 1, 0, null_prompt=null_prompt)
    if not null_prompt:  # then there is no space before a candidate to keep
        example = replace(example, candidates=("Yes", "No\n"))
    encoded = encode_null(opt, example, 2048, with_demonstrations=False)
    first, second = (8, 9) if null_prompt else (11, 12)
    assert encoded.sequences == ((*context, first), (*context, second, 10))
    assert (encoded.option_lengths, encoded.label) == ((1, 2), 1)


def test_a_task_without_a_null_prompt_is_refused(opt):
    with pytest.raises(UserError, match=r"need a task with a null prompt; .* fix: set method=zero_shot"):
        encode_null(opt, Example("a joy", (" Paris\n",), 0, 0), 2048, with_demonstrations=False)


def test_a_prompt_to_continue_is_bos_and_prompt_alone(opt):
    example = Example("  a joy It was ", (" Paris\n",), 0, 0)
    assert encode_prompts(opt, [example], 100, 50) == ((0, 4, 5, 6, 7),)


def test_a_prompt_leaves_room_for_what_will_be_generated(opt):
    example = Example("a joy It was", (" Paris\n",), 0, 0)
    assert encode_prompts(opt, [example], 8, 3) == ((0, 4, 5, 6, 7),)
    assert encode_prompts(opt, [example], 8, 4) == ((0, 5, 6, 7),)
    assert encode_prompts(opt, [example], 8, 6) == ((0, 7),)
    with pytest.raises(
        UserError, match=r"leaves no room for a prompt .* 7 new tokens; got: 8; .* at least 9"
    ):
        encode_prompts(opt, [example], 8, 7)


def test_cut_prompts_are_counted_in_one_warning(opt, caplog):
    examples = [Example("a joy It was", (), None, 0), Example("a It was", (), None, 1)]
    with caplog.at_level(logging.WARNING):
        assert encode_prompts(opt, examples, 54, 50) == ((0, 5, 6, 7), (0, 4, 6, 7))
    assert [record.message for record in caplog.records] == [
        "1 of 2 examples are longer than max_length 4 tokens and were cut on the left"
    ]


def test_answers_end_at_eos_and_at_every_token_with_a_newline(tmp_path):
    words = [*WORDS, "\n\n", ".\n"]
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, OPTConfig(), words=words, bos="<s>"))
    assert tokenizer.stop_ids() == (2, 10, len(WORDS), len(WORDS) + 1)


@pytest.mark.parametrize(
    ("ids", "answer"),
    [
        ((19, 20, 21, 10), "Paris is big"),
        ((19, 20, 21), "Paris is big"),  # as many tokens as were allowed
        ((19, 2), "Paris"),
        ((10,), ""),
        ((), ""),
        ((13, 19, 13, 10), "Paris"),
        ((19, 10, 21), "Paris"),
    ],
)
def test_an_answer_is_the_text_before_the_newline_stripped(opt, ids, answer):
    settings = generation_settings(opt, max_new_tokens=4)
    assert read_answers(torch.tensor([ids]), settings, opt) == [answer]


def test_decoding_gives_back_the_text_without_special_tokens(opt):
    assert opt.decode((0, 4, 5, 10, 19, 2, 1)) == "a joy\n Paris"
    assert opt.decode(opt.encode(["a joy is big\n"])[0]) == "a joy is big\n"


def test_a_tokenizer_without_eos_is_refused_only_where_answers_are_generated(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, OPTConfig(), bos="<s>", eos=None))
    assert tokenizer.eos_id is None
    assert encode_example(tokenizer, Example("a", (" joy",), 0, 0), 8).sequences == ((0, 4, 5),)
    with pytest.raises(UserError, match=r"no end-of-sequence token.*; fix: set eos_token"):
        tokenizer.stop_ids()


def test_a_tokenizer_without_a_newline_is_refused_where_answers_are_generated(tmp_path):
    words = [word for word in WORDS if word != "\n"]
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, OPTConfig(), words=words, bos="<s>"))
    with pytest.raises(UserError, match="no token for a newline"):
        tokenizer.stop_ids()


def test_an_eos_the_model_does_not_have_is_none(tmp_path):
    config = GPT2Config(vocab_size=len(WORDS))
    path = save_tokenizer(tmp_path, config, words=[*WORDS, "<end>"], eos="<end>")
    assert load_tokenizer(path).eos_id is None


def test_opts_published_tokenizer_is_given_the_bos_opt_was_trained_on(tmp_path):
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "\u0120", "\u0120b"]  # \u0120 is a space
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n\u0120 b\n", encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"}
    settings |= {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    OPTConfig().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.backend("a b")["input_ids"] == [2, 4, 7]
    assert tokenizer.encode(["a b"]) == [(0, 4, 7)]
    assert (tokenizer.pad_id, tokenizer.eos_id) == (1, 2)


def test_an_opt_model_with_another_models_tokenizer_is_refused(tmp_path):
    path = save_tokenizer(tmp_path, OPTConfig(), words=["!", *WORDS])
    with pytest.raises(UserError, match="another token at id 0; got: !; expected: <s>"):
        load_tokenizer(path)


def test_another_model_gets_the_bos_its_tokenizer_adds(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, LlamaConfig(), words=[*WORDS, "<BOS>"], bos="<BOS>"))
    assert tokenizer.encode(["a joy"]) == [(len(WORDS), 4, 5)]


def test_a_model_without_bos_gets_none_and_is_cut_on_the_left(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, GPT2Config(), words=WORDS[2:]))
    assert tokenizer.bos_id is None
    encoded = encode_example(tokenizer, Example("a joy It was", (" great",), 0, 0), 3)
    assert encoded.sequences == ((4, 5, 7),)
    with pytest.raises(UserError, match=r"leaves no token before it; .*give it a prompt"):
        encode_example(tokenizer, Example("", ("Yes",), 0, 0), 3)


@pytest.mark.parametrize("words", [["</s>", *WORDS[2:]], [*WORDS[2:], "<pad>"]], ids=["none", "too large"])
def test_a_pad_token_the_model_does_not_have_is_replaced_by_one_it_has(tmp_path, words):
    config = GPT2Config(vocab_size=len(WORDS) - 2)
    assert load_tokenizer(save_tokenizer(tmp_path, config, words=words)).pad_id == 0


def test_a_missing_tokenizer_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="cannot load the tokenizer of"):
        load_tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", ["{}", '{"model'])
def test_a_broken_file_is_a_users_error(tmp_path, name, content):
    path = save_tokenizer(tmp_path, OPTConfig(), bos="<s>")
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="cannot load the tokenizer of"):
        load_tokenizer(path)


def test_a_tokenizer_in_sentencepiece_loads_or_the_missing_package_is_named(tmp_path):
    """Real directories of Llama 2, Gemma and Mistral of this kind have no tokenizer.json."""
    write_sentencepiece(tmp_path)
    if not (is_sentencepiece_available() and is_protobuf_available()):
        message = r"without the package sentencepiece; .* fix: pip install sentencepiece protobuf"
        with pytest.raises(UserError, match=message):
            load_tokenizer(str(tmp_path))
        return
    loads = (
        f"from lezo_ds.data.encoding import load_tokenizer; print(load_tokenizer({str(tmp_path)!r})"
        ".encode(['ab a'])[0])"
    )
    # A process of its own: one process cannot have transformers' and sentencepiece's classes of the format.
    found = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "(1, 5, 4)"


def write_sentencepiece(directory):
    format_of = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new")
    model = format_of.ModelProto()
    model.pieces.add(piece="<unk>", score=0, type=2)
    for special in ("<s>", "</s>"):
        model.pieces.add(piece=special, score=0, type=3)
    for rank, piece in enumerate(("▁", "▁a", "▁ab", "a", "b")):
        model.pieces.add(piece=piece, score=-rank, type=1)
    model.trainer_spec.model_type = 2
    model.normalizer_spec.name = "identity"
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    LlamaConfig(vocab_size=len(model.pieces)).save_pretrained(directory)
