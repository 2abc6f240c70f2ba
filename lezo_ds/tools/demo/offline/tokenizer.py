"""A word-level tokenizer with OPT's special token ids, for words that are separated by single spaces."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
"""Special tokens in the order of their ids, 0 to 3, as in Meta's OPT tokenizer. Inputs start with `<s>`."""

MODEL_MAX_LENGTH = 128
"""Tokens of the longest input, `<s>` included."""


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that gives each word one token, from id 4 on, in the order of `words`.

    It splits at white space only and keeps the case of letters. An unknown word becomes `<unk>`. Encoding
    adds `<s>` at the front; decoding joins the words with single spaces.
    """
    vocabulary = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *words))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
