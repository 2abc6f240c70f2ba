"""Encoding of examples as token ids, with MeZO's rules for truncation and counting.

The rules are those of the code of Malladi et al. 2023. An example becomes one sequence for each of
its candidates, and the tokens at the end of the sequence belong to the candidate:

    <s>  [demonstrations]  prompt .......... candidate ....
                                             |<- option length ->|

A sequence that is too long loses tokens on the left, after <s>. A prompt whose continuation the
model writes leaves room for it. Conversations have their own encoding (lezo_ds/data/chat.py).

Some tokenizers begin a text with several tokens, such as [gMASK]<sop>, and all of them are kept. A
token that a tokenizer appends to a text (EOS, SEP) is not: the answer continues the text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    is_sentencepiece_available,
)

from lezo_ds.checkpoints.tokenizer_check import warn_of_other_tokens
from lezo_ds.data.control_tokens import has_marks
from lezo_ds.errors import UserError, first_line
from lezo_ds.tasks.base import EncodedExample, Example, TokenIds

logger = logging.getLogger(__name__)

NEWLINE = "\n"
_TRUTHS = {"true", "false", "yes", "no", "on", "off"}
"""Words for true and false, which are texts in YAML or in quotes."""


@dataclass(frozen=True)
class PromptTokenizer:
    """A tokenizer of transformers; its own special tokens are never added.

    Attributes:
        backend: the tokenizer of transformers.
        begin_ids: the first tokens of every sequence, such as a BOS; () for models without one.
        pad_id: fills rows on the right, where causal attention never looks, or on the left behind
            an attention mask. Any id of the vocabulary will do.
        end_ids: each of them ends an answer; () if neither the tokenizer nor the model has one.
        today: the day that chat templates write.
        template_options: names and values that the chat template reads.
    """

    backend: PreTrainedTokenizerBase
    begin_ids: TokenIds
    pad_id: int
    end_ids: TokenIds = ()
    today: datetime = field(default_factory=datetime.now)
    template_options: tuple[tuple[str, Any], ...] = ()

    @property
    def end_text(self) -> str:
        """The text of the token that the model learns to end its answers with."""
        if self.backend.eos_token_id in self.end_ids:
            return str(self.backend.eos_token)
        return str(self.backend.convert_ids_to_tokens(self.end_ids[0]))

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text, after `begin_ids`."""
        return [(*self.begin_ids, *ids) for ids in self.encode_written(texts)]

    def encode_written(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of texts that have all tokens, as those of a chat template.

        Marked control tokens become text (lezo_ds/data/control_tokens.py).
        """
        options = {}
        if any(map(has_marks, texts)):
            options["sanitize_control_tokens"] = True
        # verbose=False silences a warning about long texts: they are cut, with a warning of our
        # own.
        encoded = self.backend(list(texts), add_special_tokens=False, verbose=False, **options)
        return list(map(tuple, encoded["input_ids"]))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as the model generated it, without special tokens.

        The ids are decoded after a word, because some decoders strip a space that begins a text.
        """
        word_ids, word = self._word
        return self._decode_whole([*word_ids, *ids]).removeprefix(word)

    @cached_property
    def _word(self) -> tuple[list[int], str]:
        """The token ids of a word, and the text that they are decoded to."""
        ids = self.backend.encode("a", add_special_tokens=False)
        return ids, self._decode_whole(ids)

    def _decode_whole(self, ids: Sequence[int]) -> str:
        decoded = self.backend.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def num_begin_ids(self, ids: Sequence[int]) -> int:
        """Return with how many of `begin_ids` some ids begin: all, or 0."""
        number = len(self.begin_ids)
        return number if tuple(ids[:number]) == self.begin_ids else 0

    def cut_left(self, ids: Sequence[int], max_length: int) -> TokenIds:
        """Return the last `max_length` ids. Those that begin every sequence stay among them."""
        num_over = max(len(ids) - max_length, 0)
        num_kept = self.num_begin_ids(ids)
        return (*ids[:num_kept], *ids[num_kept + num_over :])

    def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Return the ids that end an answer: `end_ids`, and all tokens whose text has a stop.

        Raises:
            UserError: there are no `end_ids`.
        """
        if not self.end_ids:
            raise UserError(
                "the tokenizer has no end-of-sequence token, which ends answers",
                fix="set eos_token in the model's tokenizer_config.json",
            )
        ids = set(self.end_ids)
        if stops:
            for token in range(len(self.backend)):
                decoded = self.backend.decode([token])
                if any(stop in decoded for stop in stops):
                    ids.add(token)
        return tuple(sorted(ids))


def load_tokenizer(
    path: str, date: str | None = None, template_options: Mapping[str, Any] | None = None
) -> PromptTokenizer:
    """Load the tokenizer of a model without running code that comes with the model.

    Args:
        path: the model's directory, or its id on the hub.
        date: the day that chat templates write, such as 2026-01-31; None is today.
        template_options: what the chat template reads besides turns, such as enable_thinking.

    Raises:
        UserError: the tokenizer cannot be loaded, or does not fit the model.
    """
    directory = Path(path)
    if (directory / "tekken.json").is_file() and not (directory / FULL_TOKENIZER_FILE).is_file():
        raise UserError(
            f"{path} has its tokenizer as tekken.json, which transformers reads without the tokens "
            "that begin and end texts",
            fix="add the tokenizer.json and tokenizer_config.json of another copy of the model",
        )
    try:
        # Transformers would take the tokenizer of mistral-common, if it is installed.
        backend = AutoTokenizer.from_pretrained(
            path, use_fast=True, trust_remote_code=False, mistral_format=False
        )
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        # Tokens that were added to a tokenizer may be missing from the model's embedding.
        vocabulary = range(config.get_text_config().vocab_size)
        written = backend("a", return_special_tokens_mask=True)
        ends = generation_ends(directory, config)
        of_processor = directory / LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
        if backend.chat_template is None and of_processor.is_file():  # older models for images
            backend.chat_template = json.loads(of_processor.read_text())["chat_template"]
    except Exception as error:  # transformers raises many unrelated types here
        fix = "correct model.path, or save config.json and the tokenizer's files there"
        if (directory / "tokenizer.model").is_file() and not is_sentencepiece_available():
            fix = "pip install sentencepiece protobuf"  # transformers asks for another package
        raise UserError(
            f"cannot load the tokenizer of {path}: {first_line(error)}", fix=fix
        ) from error
    warn_of_other_tokens(directory, backend)
    options = template_options or {}
    template = str(backend.chat_template)
    for name, value in options.items():
        is_truth = isinstance(value, str) and value.lower() in _TRUTHS
        if is_truth and not re.search(rf"""(["']){value}\1""", template):
            raise UserError(
                f"data.chat_template_kwargs.{name}={value} is a text, which the template takes for "
                "true",
                fix="write true or false, without quotes",
            )
        if not re.search(rf"\b{re.escape(name)}\b", template, re.ASCII):
            raise UserError(
                f"the chat template of {path} does not read {name}",
                fix=f"correct the name, or remove data.chat_template_kwargs.{name}",
            )
    num_first = len(list(takewhile(bool, written["special_tokens_mask"])))
    begin_ids = tuple(written["input_ids"][:num_first])
    if config.model_type == "opt" and backend.bos_token:
        # OPT was trained on inputs that begin with <s> (id 0), but its published tokenizer begins
        # them with </s> (id 2). Like MeZO, we use the token of the training. Galactica has the
        # config of an OPT, and a tokenizer without such a token.
        begin_ids = (0,)
    known_ends = {backend.eos_token_id, *ends}
    return PromptTokenizer(
        backend,
        begin_ids,
        pad_id=backend.pad_token_id if backend.pad_token_id in vocabulary else 0,
        end_ids=tuple(sorted(token for token in known_ends if token in vocabulary)),
        today=datetime.now() if date is None else datetime.fromisoformat(date),
        template_options=tuple(sorted(options.items())),
    )


def generation_ends(directory: Path, config: Any) -> list[int]:
    """Return the tokens by which `generate` of a model in a directory ends answers."""
    if (directory / GENERATION_CONFIG_NAME).is_file():
        settings = GenerationConfig.from_pretrained(directory)
    else:
        settings = GenerationConfig.from_model_config(config)
    ends = settings.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return [token for token in listed if token is not None]


def encode_example(tokenizer: PromptTokenizer, example: Example, max_length: int) -> EncodedExample:
    """Tokenize every candidate of one example after its prompt.

    Spaces (not newlines) at both ends of a text are stripped first.

    Args:
        tokenizer: the model's tokenizer.
        example: an example with a prompt.
        max_length: tokens of the longest sequence. Longer ones are cut on the left, after the
            tokens that begin every sequence.

    Raises:
        UserError: a candidate adds no token to the prompt, or leaves none before it.
    """
    inputs = [(example.prompt + candidate).strip(" ") for candidate in example.candidates]
    encode = tokenizer.encode_written if example.is_written else tokenizer.encode
    prompt_ids, *full = encode([example.prompt.strip(" "), *inputs])
    # MeZO counts by difference, too, and without demonstrations. Tokens may merge across the
    # boundary, so the tokens of the candidate alone would be another number.
    option_lengths = tuple(len(ids) - len(prompt_ids) for ids in full)
    if example.demonstrations:
        full = tokenizer.encode([example.demonstrations + each for each in inputs])
    sequences = tuple(tokenizer.cut_left(ids, max_length) for ids in full)
    for candidate, ids, length in zip(example.candidates, sequences, option_lengths, strict=True):
        if length < 1:
            raise UserError(
                f"the candidate {candidate!r} of {example.where} adds no token",
                fix="fill in or remove the record "
                "(records without an answer do not count in its number)",
            )
        if length >= len(ids):
            raise UserError(
                f"a candidate of {example.where} leaves no token before it",
                fix=f"raise data.max_length={max_length}, or give it a longer prompt",
            )
    truncated = sequences != tuple(full)
    return EncodedExample(sequences, option_lengths, example.label, truncated)


def encode_prompt(tokenizer: PromptTokenizer, example: Example) -> TokenIds:
    """Return the token ids of an example's prompt for the model to continue."""
    encode = tokenizer.encode_written if example.is_written else tokenizer.encode
    (ids,) = encode([example.demonstrations + example.prompt.strip(" ")])
    return ids


def cut_prompts(
    tokenizer: PromptTokenizer,
    prompts: Sequence[TokenIds],
    max_length: int,
    max_new_tokens: int,
) -> tuple[TokenIds, ...]:
    """Cut prompts on the left, so that `max_new_tokens` fit in `max_length`, too."""
    room = prompt_room(max_length, max_new_tokens)
    warn_of_cuts([len(ids) > room for ids in prompts], room)
    return tuple(tokenizer.cut_left(ids, room) for ids in prompts)


def prompt_room(max_length: int, max_new_tokens: int) -> int:
    """Return the maximum length of a prompt, in tokens, if `max_new_tokens` follow it.

    Raises:
        UserError: no prompt fits.
    """
    room = max_length - max_new_tokens
    if room < 2:
        raise UserError(
            f"data.max_length={max_length} leaves no room for a prompt "
            f"before {max_new_tokens} new tokens",
            fix=f"set data.max_length to at least {max_new_tokens + 2}, "
            "or lower generation.max_new_tokens",
        )
    return room


def refuse_unknown(tokenizer: PromptTokenizer, sequences: Sequence[TokenIds], config: Any) -> None:
    """Refuse token ids beyond the vocabulary of a model, which has this config of transformers."""
    largest = max(max(ids) for ids in sequences)
    size = config.get_text_config().vocab_size
    if largest >= size:
        token = tokenizer.backend.convert_ids_to_tokens(largest)
        raise UserError(
            f"the tokenizer writes {token!r}, id {largest}, and the model has {size}",
            fix="use the tokenizer of the model, or resize its embedding",
        )


def warn_of_cuts(were_cut: Sequence[bool], max_length: int, where: str = "on the left") -> None:
    """Log a warning if examples were cut, which says where."""
    if any(were_cut):
        message = "%d of %d examples are longer than max_length %d tokens and were cut %s"
        logger.warning(message, sum(were_cut), len(were_cut), max_length, where)


def num_alike(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the number of equal tokens or characters with which two sequences begin."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
