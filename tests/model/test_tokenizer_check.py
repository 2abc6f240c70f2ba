"""Tokenizers that read texts otherwise than their tokenizer.json, and prompts with a second BOS."""

import pytest
from assets import change_json
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lezo_ds.checkpoints.tokenizer_check import refuse_second_begin, warn_of_other_tokens
from lezo_ds.errors import UserError


def load(directory, kind, normalizer=None):
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
def test_a_class_that_changes_what_tokenizer_json_says_is_named(
    kind, normalizer, warning, tmp_path, caplog
):
    warn_of_other_tokens(tmp_path, load(tmp_path, kind, normalizer))
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)


def test_a_prompt_that_begins_with_what_begins_every_text_is_refused(tmp_path):
    tokenizer = load(tmp_path, "PreTrainedTokenizerFast")
    with pytest.raises(UserError, match=r"begins with <s>, .*; fix: remove <s> from data.prompt"):
        refuse_second_begin(tokenizer, "<s>{text} Label:", (0,))
    refuse_second_begin(tokenizer, "{text} Label:", (0,))
    refuse_second_begin(tokenizer, "<s>{text} Label:", ())
