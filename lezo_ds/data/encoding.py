"""Encoding of examples as token ids, with MeZO's rules for truncation and counting (Malladi et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import is_sentencepiece_available

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example

logger = logging.getLogger(__name__)

NEWLINE = "\n"


@dataclass(frozen=True)
class PromptTokenizer:
    """A tokenizer of transformers; its own special tokens are never added."""

    backend: PreTrainedTokenizerBase
    bos_id: int | None
    """First token of every sequence; None for models without one."""
    pad_id: int
    """Fills rows on the right, where causal attention never looks; any id of the vocabulary."""
    eos_id: int | None = None

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, BOS first."""
        bos = () if self.bos_id is None else (self.bos_id,)
        # verbose=False silences a warning about long texts: we truncate them, with a warning of our own.
        encoded = self.backend(list(texts), add_special_tokens=False, verbose=False)
        return [(*bos, *ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as the model generated it, without special tokens."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.backend.decode(list(ids), **options))

    def stop_ids(self, stops: Sequence[str] = (NEWLINE,)) -> tuple[int, ...]:
        """Return the ids that end an answer, sorted: EOS, and every token with one of `stops` in its text."""
        if self.eos_id is None:
            fix = "set eos_token in the model's tokenizer_config.json"
            raise UserError(
                "the tokenizer has no end-of-sequence token, which ends answers", fix=fix
            )
        texts = (
            [self.backend.decode([token]) for token in range(len(self.backend))] if stops else []
        )
        ids = {token for token, text in enumerate(texts) if any(stop in text for stop in stops)}
        if not ids and NEWLINE in stops:
            fix = "choose another model, or set generation.stop"
            raise UserError(
                "the tokenizer has no token with a newline, which ends answers", fix=fix
            )
        return tuple(sorted(ids | {self.eos_id}))


@dataclass(frozen=True)
class EncodedExample:
    """The candidates of one example as token sequences."""

    sequences: tuple[tuple[int, ...], ...]
    """BOS, prompt and candidate for each candidate; empty if the record has no right answer."""
    option_lengths: tuple[int, ...]
    """Number of tokens of each sequence that belong to its candidate: those at its end, or in `spans`."""
    label: int | None
    truncated: bool
    spans: tuple[tuple[int, int], ...] = ()
    """The pairs (start, stop) of the assistant's turns in the only sequence of a conversation."""

    def targets(self, candidate: int) -> list[int]:
        """Return the positions in a candidate's sequence of the tokens that belong to it, in order."""
        if self.spans:
            return [position for span in self.spans for position in range(*span)]
        length = len(self.sequences[candidate])
        return list(range(length - self.option_lengths[candidate], length))

    @property
    def num_tokens(self) -> int:
        """Length of the longest sequence; 0 without sequences."""
        return max(map(len, self.sequences), default=0)

    @property
    def gold(self) -> int:
        assert self.label is not None
        return self.label

    def num_gold_tokens(self) -> int:
        return self.option_lengths[self.gold]


def load_tokenizer(path: str) -> PromptTokenizer:
    """Load the tokenizer of a model's directory or hub id, without running code that comes with the model."""
    try:
        backend = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=False)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many unrelated types here
        shown = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "correct model.path, or save config.json and the tokenizer's files there"
        if (Path(path) / "tokenizer.model").is_file() and not is_sentencepiece_available():
            fix = "pip install sentencepiece protobuf"  # transformers asks for another package
        raise UserError(f"cannot load the tokenizer of {path}: {shown}", fix=fix) from error
    vocabulary_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary_size is None:
        raise UserError(
            f"{path} is not a language model: {type(config).__name__}", fix="correct model.path"
        )
    # Tokens that were added to a tokenizer may be missing from the model's embedding.
    vocabulary = range(vocabulary_size)
    return PromptTokenizer(
        backend=backend,
        bos_id=_bos_id(path, backend, config.model_type),
        pad_id=backend.pad_token_id if backend.pad_token_id in vocabulary else 0,
        eos_id=backend.eos_token_id if backend.eos_token_id in vocabulary else None,
    )


def _bos_id(path: str, backend: PreTrainedTokenizerBase, model_type: str) -> int | None:
    if model_type != "opt":
        adds_bos = backend("")["input_ids"][:1] == [backend.bos_token_id]
        return backend.bos_token_id if adds_bos else None
    # OPT was trained on inputs that begin with <s> (id 0), but its published tokenizer begins them with
    # </s> (id 2). Like MeZO, we use the token of the training.
    token = backend.convert_ids_to_tokens(0)
    if token != "<s>":
        fix = "use the tokenizer that the model was trained with"
        raise UserError(
            f"the tokenizer of the OPT model {path} has {token!r} at id 0, not <s>", fix=fix
        )
    return 0


def encode_example(tokenizer: PromptTokenizer, example: Example, max_length: int) -> EncodedExample:
    """Tokenize every candidate of one example after its prompt.

    Spaces (not newlines) at both ends of a text are stripped first. Sequences longer than `max_length` are
    cut on the left, after the BOS.
    """
    texts = [(example.prompt + candidate).strip(" ") for candidate in example.candidates]
    prompt_ids, *full = tokenizer.encode([example.prompt.strip(" "), *texts])
    # MeZO counts by difference, too, without demonstrations. Tokens may merge across the boundary, so the
    # tokens of the candidate alone would be another number.
    option_lengths = tuple(len(ids) - len(prompt_ids) for ids in full)
    if example.demonstrations:
        full = tokenizer.encode([example.demonstrations + text for text in texts])
    sequences = tuple(cut_left(tokenizer, ids, max_length) for ids in full)
    for candidate, ids, length in zip(example.candidates, sequences, option_lengths, strict=True):
        if length < 1:
            fix = "fill in or remove the record (records without an answer do not count in its number)"
            raise UserError(
                f"the candidate {candidate!r} of {example.where} adds no token", fix=fix
            )
        if length >= len(ids):
            fix = (
                f"raise data.max_length={max_length}"
                if len(ids) == max_length
                else "give it a prompt"
            )
            raise UserError(f"a candidate of {example.where} leaves no token before it", fix=fix)
    return EncodedExample(
        sequences, option_lengths, example.label, truncated=sequences != tuple(full)
    )


def encode_prompts(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int, max_new_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each prompt for the model to continue by up to `max_new_tokens`.

    A prompt that does not fit in `max_length` with them is cut on the left, after the BOS.
    """
    prompts = [tokenizer.encode([e.demonstrations + e.prompt.strip(" ")])[0] for e in examples]
    return cut_prompts(tokenizer, prompts, max_length, max_new_tokens)


def cut_prompts(
    tokenizer: PromptTokenizer,
    prompts: Sequence[Sequence[int]],
    max_length: int,
    max_new_tokens: int,
) -> tuple[tuple[int, ...], ...]:
    room = prompt_room(max_length, max_new_tokens)
    warn_of_cuts(sum(len(ids) > room for ids in prompts), len(prompts), room)
    return tuple(cut_left(tokenizer, ids, room) for ids in prompts)


def prompt_room(max_length: int, max_new_tokens: int) -> int:
    """Return the maximum length of a prompt, in tokens, if `max_new_tokens` follow it."""
    if max_length - max_new_tokens < 2:
        what = f"data.max_length={max_length} leaves no room for a prompt before {max_new_tokens} new tokens"
        raise UserError(what, fix=f"set data.max_length to at least {max_new_tokens + 2}")
    return max_length - max_new_tokens


def warn_of_cuts(
    num_cut: int, num_examples: int, max_length: int, where: str = "on the left"
) -> None:
    if num_cut:
        text = "%d of %d examples are longer than max_length %d tokens and were cut %s"
        logger.warning(text, num_cut, num_examples, max_length, where)


def cut_left(tokenizer: PromptTokenizer, ids: Sequence[int], max_length: int) -> tuple[int, ...]:
    """Return token ids without the first ones that are too many. A BOS stays."""
    num_over = max(len(ids) - max_length, 0)
    num_kept = int(tokenizer.bos_id in ids[:1])
    return (*ids[:num_kept], *ids[num_kept + num_over :])
