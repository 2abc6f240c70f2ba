"""Examples as token ids, cut and counted as MeZO does (Malladi et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        eos_id: with which a model ends a text, None if the tokenizer has none.
    """

    backend: PreTrainedTokenizerBase
    bos_id: int | None
    pad_id: int
    eos_id: int | None = None

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, BOS first."""
        bos = () if self.bos_id is None else (self.bos_id,)
        # verbose: we cut too long texts ourselves, and say so once
        encoded = self.backend(list(texts), add_special_tokens=False, verbose=False)
        return [(*bos, *ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as the model wrote it, without special tokens."""
        text: str = self.backend.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Return the answer in generated ids: their text up to the first newline, stripped.

        Args:
            ids: what was generated; nothing of what follows the first stop id.
        """
        return self.decode(ids).split("\n", 1)[0].strip()

    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer, sorted: EOS, and every token with a newline in it.

        Decodes the whole vocabulary: ask once.

        Raises:
            UserError: the tokenizer has no EOS, or no token for a newline.
        """
        newlines = {token for token in range(len(self.backend)) if "\n" in self.backend.decode([token])}
        if self.eos_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, with which generated answers end",
                got="none that the model has",
                expected="eos_token",
                fix="set eos_token in the model's tokenizer_config.json",
            )
        if not newlines:
            raise UserError(
                "the tokenizer has no token for a newline, with which generated answers end",
                got=f"{len(self.backend)} tokens without one",
                expected="a token that decodes to a newline",
                fix="choose a model that reads newlines, or a task that generates nothing",
            )
        return tuple(sorted(newlines | {self.eos_id}))


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

    @property
    def num_tokens(self) -> int:
        """Length of the longest sequence."""
        return max(map(len, self.sequences))


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
            fix="correct model.path, or save the tokenizer there",
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
    eos_id = backend.eos_token_id if backend.eos_token_id in vocabulary else None
    return PromptTokenizer(backend, _find_bos(path, backend, config.model_type), pad_id, eos_id)


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
            raise UserError(
                f"a candidate of example {example.index} adds no token",
                got=repr(candidate),
                expected="text behind the prompt",
                fix=f"fill in or leave out record {example.index + 1} of those with an answer",
            )
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
    _warn_of_cuts(sum(example.truncated for example in encoded), len(encoded), max_length)
    return encoded


def encode_null(tokenizer: PromptTokenizer, example: Example, max_length: int) -> EncodedExample | None:
    """Tokenise the candidates of an example behind its null prompt, to calibrate their scores.

    A calibrated score is the summed log-probability of a candidate's tokens behind the prompt, minus
    that behind the null prompt (surface form competition: Holtzman et al. 2021).

    Returns:
        As `encode_example`; None where the task has no null prompt.

    Raises:
        UserError: as `encode_example`; an empty null prompt needs a tokenizer with a BOS.
    """
    if example.null_prompt is None:
        return None
    return encode_example(tokenizer, replace(example, prompt=example.null_prompt), max_length)


def encode_prompt(
    tokenizer: PromptTokenizer, example: Example, max_length: int, max_new_tokens: int
) -> tuple[int, ...]:
    """Return the token ids of a prompt that a model is to continue, BOS first.

    Args:
        tokenizer: of the model.
        example: its prompt is taken, without spaces (not newlines) at both ends.
        max_length: tokens of prompt and continuation together; a longer prompt is cut on the left
            behind its BOS.
        max_new_tokens: how many of these are kept for the continuation.

    Raises:
        UserError: there is no room for a prompt.
    """
    return _cut_prompt(tokenizer, example, _prompt_room(max_length, max_new_tokens))[0]


def encode_prompts(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int, max_new_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Encode each prompt (see `encode_prompt`); one warning says how many had to be cut."""
    room = _prompt_room(max_length, max_new_tokens)
    prompts = [_cut_prompt(tokenizer, example, room) for example in examples]
    _warn_of_cuts(sum(was_cut for _, was_cut in prompts), len(prompts), room)
    return tuple(ids for ids, _ in prompts)


def _prompt_room(max_length: int, max_new_tokens: int) -> int:
    room = max_length - max_new_tokens
    if room < 2:  # BOS and a token of the prompt
        raise UserError(
            f"data.max_length leaves no room for a prompt before {max_new_tokens} new tokens",
            got=max_length,
            expected=f"at least {max_new_tokens + 2}",
            fix="raise data.max_length",
        )
    return room


def _cut_prompt(tokenizer: PromptTokenizer, example: Example, room: int) -> tuple[tuple[int, ...], bool]:
    (ids,) = tokenizer.encode([example.prompt.strip(" ")])
    return _cut_left(ids, room, tokenizer.bos_id is not None), len(ids) > room


def _warn_of_cuts(num_cut: int, num_examples: int, max_length: int) -> None:
    if num_cut:
        logger.warning(
            "%d of %d examples are longer than max_length %d tokens and were cut on the left",
            *(num_cut, num_examples, max_length),
        )


def _cut_left(ids: tuple[int, ...], max_length: int, has_bos: bool) -> tuple[int, ...]:
    num_over = len(ids) - max_length
    if num_over <= 0:
        return ids
    return ids[:1] + ids[1 + num_over :] if has_bos else ids[num_over:]
