"""Examples as token ids, cut and counted as MeZO does (Malladi et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example

logger = logging.getLogger(__name__)

OPT_BOS_ID = 0
OPT_BOS_TOKEN = "<s>"


@dataclass(frozen=True)
class PromptTokenizer:
    """A transformers tokenizer, and the one token that goes before every text.

    Attributes:
        backend: splits text; its own special tokens are never asked for.
        bos_id: first token of every sequence, None for models that have none.
        pad_id: fills rows on the right, where causal attention never looks; any id of the vocabulary.
    """

    backend: PreTrainedTokenizerBase
    bos_id: int | None
    pad_id: int

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, BOS first."""
        bos = () if self.bos_id is None else (self.bos_id,)
        # verbose: we cut too long texts ourselves, and say so once
        encoded = self.backend(list(texts), add_special_tokens=False, verbose=False)
        return [(*bos, *ids) for ids in encoded["input_ids"]]


@dataclass(frozen=True)
class EncodedExample:
    """The candidates of one example as token sequences.

    Attributes:
        sequences: for each candidate BOS, prompt and candidate, at most max_length tokens.
        option_lengths: for each candidate how many tokens at the end are its own, at least 1.
        label: index of the right candidate; None if unknown.
        truncated: whether a prompt was cut on the left.
    """

    sequences: tuple[tuple[int, ...], ...]
    option_lengths: tuple[int, ...]
    label: int | None
    truncated: bool


def load_tokenizer(path: str) -> PromptTokenizer:
    """Load a model's tokenizer, without running code that comes with the model.

    OPT was trained on inputs that begin with `<s>`, id 0, whereas its published tokenizer begins
    them with `</s>`, id 2; like MeZO, we give it what it was trained on. Other models get a BOS
    if their tokenizer adds one.

    Args:
        path: directory with the model's config.json and tokenizer, or a hub id.

    Raises:
        UserError: no model or tokenizer there, or an OPT model whose id 0 is not `<s>`.
    """
    try:
        backend = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=False)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # missing, broken, offline, unknown: each has a type of its own
        raise UserError(
            f"cannot load the tokenizer of {path}",
            got=f"{type(error).__name__}: {error}".splitlines()[0],
            expected="a directory or hub id with config.json and tokenizer files",
        ) from error
    vocabulary_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary_size is None:
        raise UserError(
            f"the model {path} has no vocabulary",
            got=type(config).__name__,
            expected="a decoder language model",
            fix="set model.path to one",
        )
    # A tokenizer may have had tokens added that the model's embedding does not have.
    vocabulary = range(vocabulary_size)
    pad_id = backend.pad_token_id if backend.pad_token_id in vocabulary else 0
    return PromptTokenizer(backend, _find_bos(path, backend, config.model_type), pad_id)


def _find_bos(path: str, backend: PreTrainedTokenizerBase, model_type: str) -> int | None:
    if model_type != "opt":
        adds_bos = backend("")["input_ids"][:1] == [backend.bos_token_id]
        return backend.bos_token_id if adds_bos else None
    first_token = backend.convert_ids_to_tokens(OPT_BOS_ID)
    if first_token != OPT_BOS_TOKEN:
        raise UserError(
            f"the tokenizer of the OPT model {path} has another token at id {OPT_BOS_ID}",
            got=first_token,
            expected=OPT_BOS_TOKEN,
            fix="use the tokenizer the model was trained with",
        )
    return OPT_BOS_ID


def encode_example(tokenizer: PromptTokenizer, example: Example, max_length: int) -> EncodedExample:
    """Tokenise every candidate of one example behind its prompt.

    Spaces (not newlines) at both ends of a text are stripped first. A candidate's own tokens are
    counted as tokens(prompt + candidate) - tokens(prompt). Sequences longer than `max_length` lose
    tokens on the left; the BOS stays.

    Raises:
        UserError: a candidate has no token of its own, or leaves no room for a token before it.
    """
    prompt = example.prompt.strip(" ")
    texts = [(example.prompt + candidate).strip(" ") for candidate in example.candidates]
    prompt_ids, *full = tokenizer.encode([prompt, *texts])
    option_lengths = tuple(len(ids) - len(prompt_ids) for ids in full)
    sequences = tuple(_cut_left(ids, max_length, tokenizer.bos_id is not None) for ids in full)
    for candidate, ids, length in zip(example.candidates, sequences, option_lengths, strict=True):
        if length < 1:
            raise UserError(f"a candidate of example {example.index} adds no token", got=repr(candidate))
        if length >= len(ids):
            raise UserError(
                f"a candidate of example {example.index} leaves no token before it",
                got=f"{length} tokens of {len(ids)}",
                expected=f"at least one token more than the {length} of the candidate",
                fix=f"raise data.max_length={max_length}" if len(ids) == max_length else "give it a prompt",
            )
    return EncodedExample(sequences, option_lengths, example.label, sequences != tuple(full))


def encode_examples(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int
) -> tuple[EncodedExample, ...]:
    """Encode each example (see `encode_example`); one warning says how many had to be cut."""
    encoded = tuple(encode_example(tokenizer, example, max_length) for example in examples)
    num_truncated = sum(example.truncated for example in encoded)
    if num_truncated:
        logger.warning(
            "%d of %d examples are longer than max_length %d tokens and were cut on the left",
            *(num_truncated, len(encoded), max_length),
        )
    return encoded


def _cut_left(ids: tuple[int, ...], max_length: int, has_bos: bool) -> tuple[int, ...]:
    num_over = len(ids) - max_length
    if num_over <= 0:
        return ids
    return ids[:1] + ids[1 + num_over :] if has_bos else ids[num_over:]
