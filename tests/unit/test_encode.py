"""Examples as token ids: BOS, cuts, the tokens of a candidate, and tokenizers as published."""

import json

import pytest
import transformers
from assets import change_json
from own_data import SWITCHED, write_chat_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, OPTConfig, PreTrainedTokenizerFast

from lezo_ds.checkpoints.tokenizer_check import warn_of_other_tokens
from lezo_ds.data.encode import encode_candidates, encode_prompt, load_tokenizer, prompt_room
from lezo_ds.data.examples import Example
from lezo_ds.errors import UserError

# A word takes the space before it, as in GPT-2; a newline stands alone.
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "a", " joy", " It", " was", " terrible", " great"]
WORDS += ["\n", "Yes", "No", " ", " so", " the", " cup", " fell", "-", " Paris", " is", " big"]


def save_tokenizer(directory, config, words=WORDS, bos=None, eos="</s>"):
    """Save a model's configuration and a tokenizer of whole words that begins texts with `bos`."""
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\n| |-"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, words.index(bos))]
        )
    named = {"bos_token": bos, "eos_token": eos, "pad_token": "<pad>"}
    special = {name: token for name, token in named.items() if token in words}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    fast.save_pretrained(directory)
    config.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def opt(tmp_path):
    return load_tokenizer(save_tokenizer(tmp_path, OPTConfig(), bos="<s>"))


@pytest.mark.parametrize(
    ("prompt", "candidates", "sequences", "lengths"),
    [
        ("a joy It was", (" terrible", " great"), ((0, 4, 5, 6, 7, 8), (0, 4, 5, 6, 7, 9)), (1, 1)),
        ("  a joy\n", ("Yes", "No"), ((0, 4, 5, 10, 11), (0, 4, 5, 10, 12)), (1, 1)),
        # The space between prompt and candidate belongs to the candidate.
        ("a cup so ", ("the cup was great",), ((0, 4, 16, 14, 15, 16, 7, 9),), (4,)),
    ],
)
def test_an_opt_input_is_bos_prompt_and_candidate(opt, prompt, candidates, sequences, lengths):
    encoded = encode_candidates(opt, Example(prompt, candidates, 0), 2048)
    assert (encoded.sequences, encoded.option_lengths) == (sequences, lengths)
    assert (encoded.label, encoded.truncated) == (0, False)


def test_what_is_too_long_is_cut_on_the_left_after_the_bos(opt):
    long = Example("a joy It was", (" terrible", " great\n"), 1)
    encoded, short = (encode_candidates(opt, e, 4) for e in (long, Example("a", (" great",), 0)))
    assert encoded.sequences == ((0, 6, 7, 8), (0, 7, 9, 10))
    assert encoded.option_lengths == (1, 2)
    assert (encoded.truncated, short.truncated) == (True, False)
    assert not encode_candidates(opt, long, 7).truncated


@pytest.mark.parametrize(
    ("candidate", "max_length", "message"),
    [
        ("  ", 2048, "the answer '  ' adds no tokens"),
        (" great\n", 2, r"leaves no room for a prompt; fix: raise data.max_length=2"),
    ],
)
def test_a_candidate_without_tokens_or_context_is_refused(opt, candidate, max_length, message):
    with pytest.raises(UserError, match=message):
        encode_candidates(opt, Example("a joy", (" great", candidate), 0), max_length)


def test_a_prompt_leaves_room_for_what_will_be_generated(opt):
    ids = encode_prompt(opt, Example("  a joy It was ", (" Paris\n",), 0))
    assert opt.cut_left(ids, prompt_room(8, 3)) == ids == (0, 4, 5, 6, 7)
    assert opt.cut_left(ids, prompt_room(8, 6)) == (0, 7)
    with pytest.raises(UserError, match=r"leaves no room .* 7 new tokens; .* at least 9"):
        prompt_room(8, 7)


def test_answers_end_at_eos_and_at_every_token_with_a_newline(tmp_path):
    path = save_tokenizer(tmp_path, OPTConfig(), words=[*WORDS, "\n\n", ".\n"], bos="<s>")
    assert load_tokenizer(path).stop_ids("\n") == (2, 10, len(WORDS), len(WORDS) + 1)
    path = save_tokenizer(tmp_path, OPTConfig(eos_token_id=None), bos="<s>", eos=None)
    with pytest.raises(UserError, match=r"no end-of-sequence token.*; fix: set eos_token"):
        load_tokenizer(path).stop_ids("\n")


@pytest.mark.parametrize(("listed", "expected"), [([5, 8], (2, 5, 8)), (6, (2, 6)), (None, (2,))])
def test_answers_end_at_every_end_token_of_the_model_as_in_generate(tmp_path, listed, expected):
    config = LlamaConfig(vocab_size=len(WORDS), eos_token_id=None)
    path = save_tokenizer(tmp_path, config, bos="<s>")
    transformers.GenerationConfig(eos_token_id=listed).save_pretrained(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_ids == expected
    assert tokenizer.stop_ids(()) == expected
    assert tokenizer.end_text == "</s>"
    (tmp_path / "generation_config.json").unlink()  # then that of config.json counts
    path = save_tokenizer(tmp_path, LlamaConfig(vocab_size=len(WORDS), eos_token_id=7), eos=None)
    assert (load_tokenizer(path).end_ids, load_tokenizer(path).end_text) == ((7,), " was")


@pytest.mark.parametrize(
    ("single", "begin"), [("a - $A", (4, 18)), ("a a $A </s>", (4, 4)), ("$A </s>", ()), ("$A", ())]
)
def test_a_text_begins_with_all_tokens_that_the_tokenizer_puts_before_it(tmp_path, single, begin):
    path = save_tokenizer(tmp_path, LlamaConfig(vocab_size=len(WORDS)))
    fast = AutoTokenizer.from_pretrained(path)
    ids = [(word, WORDS.index(word)) for word in ("a", "-", "</s>")]
    added = processors.TemplateProcessing(single=single, special_tokens=ids)
    fast.backend_tokenizer.post_processor = added
    fast.save_pretrained(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.begin_ids == begin
    (prompt,) = tokenizer.encode([" It was"])
    by_transformers = tuple(AutoTokenizer.from_pretrained(path)(" It was").input_ids)
    assert by_transformers[: len(prompt)] == prompt
    assert by_transformers[len(prompt) :] in ((), (2,))  # an answer would follow the EOS
    encoded = encode_candidates(tokenizer, Example("so the cup fell - It was", (" great",), 0), 5)
    (sequence,) = encoded.sequences
    assert (len(sequence), encoded.truncated) == (5, True)
    assert sequence[: len(begin)] == begin
    assert sequence[-2:] == (7, 9)


def test_opts_published_tokenizer_is_given_the_bos_opt_was_trained_on(tmp_path):
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "\u0120", "\u0120b"]  # \u0120 is " "
    ids = {token: place for place, token in enumerate(vocabulary)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n\u0120 b\n", encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"}
    settings |= {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    OPTConfig().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.backend("a b")["input_ids"] == [2, 4, 7]
    assert tokenizer.encode(["a b"]) == [(0, 4, 7)]
    assert (tokenizer.pad_id, tokenizer.end_ids) == (1, (2,))


def test_other_models_get_the_bos_their_tokenizer_adds_and_tokens_they_have(tmp_path):
    """Galactica is an OPT whose tokenizer begins a text with no token."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, OPTConfig(), eos=None))
    assert tokenizer.encode(["a joy"]) == [(4, 5)]
    assert (tokenizer.end_ids, tokenizer.end_text) == ((2,), "</s>")
    path = save_tokenizer(tmp_path, LlamaConfig(), words=[*WORDS, "<BOS>"], bos="<BOS>")
    assert load_tokenizer(path).encode(["a joy"]) == [(len(WORDS), 4, 5)]
    config = transformers.GPT2Config(vocab_size=len(WORDS) - 2)
    path = save_tokenizer(tmp_path, config, words=[*WORDS[2:], "<pad>", "<end>"], eos="<end>")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.begin_ids, tokenizer.pad_id, tokenizer.end_ids) == ((), 0, ())
    encoded = encode_candidates(tokenizer, Example("a joy It was", (" great",), 0), 3)
    assert encoded.sequences == ((4, 5, 7),)


def test_values_that_a_template_does_not_read_are_refused(tmp_path):
    model = str(write_chat_model(tmp_path / "model", SWITCHED))
    options = {"enable_thinking": False}
    assert dict(load_tokenizer(model, template_options=options).template_options) == options
    with pytest.raises(UserError, match="does not read thinking; fix: correct the name"):
        load_tokenizer(model, template_options={"thinking": True})


def test_a_tokenizer_of_mistral_alone_or_without_its_files_is_refused(tmp_path):
    model = save_tokenizer(tmp_path / "m", LlamaConfig(vocab_size=len(WORDS)), bos="<s>")
    (tmp_path / "m" / "tekken.json").write_text("{}")
    assert load_tokenizer(model).begin_ids == (0,)
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"as tekken\.json, .* add the tokenizer\.json"):
        load_tokenizer(model)
    OPTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it has no vocabulary; fix: save the tokenizer's files"):
        load_tokenizer(str(tmp_path))


def listed(directory, kind, normalizer=None):
    """Return the tokenizer of a tokenizer.json that lists letters, opened as one of a class."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *letters])}
    alone = Tokenizer(models.BPE(vocabulary, []))
    alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone.decoder = decoders.ByteLevel()
    if normalizer is not None:
        alone.normalizer = normalizer
    begin = [("<s>", 0)]
    alone.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    saved = PreTrainedTokenizerFast(tokenizer_object=alone, bos_token="<s>", eos_token="</s>")
    saved.save_pretrained(directory)
    change_json(directory / "tokenizer_config.json", tokenizer_class=kind)
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    ("kind", "normalizer", "warning"),
    [
        ("PreTrainedTokenizerFast", normalizers.Lowercase(), ""),
        ("GPT2Tokenizer", None, ""),
        ("GPT2Tokenizer", normalizers.Lowercase(), "reads 'Hello World!' as ['H', 'e',"),
        ("GPTNeoXTokenizer", None, "and tokenizer.json as ['<s>', 'H',"),
    ],
)
def test_a_class_that_changes_tokenizer_json_is_named(kind, normalizer, warning, tmp_path, caplog):
    warn_of_other_tokens(tmp_path, listed(tmp_path, kind, normalizer))
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)
