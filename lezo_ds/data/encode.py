"""Encoding of texts as token ids, with MeZO's rules for truncation and counting.

The rules are those of the code of Malladi et al. 2023. An example becomes one sequence for each of
its candidates, and a mask says which tokens of the sequence belong to the candidate:

    <s>  [demonstrations]  prompt .......... candidate ....
     0    0 0 0 0 0 0 0 0  0 0 0 0 0 0 0 0 0  1 1 1 1 1 1 1

A sequence that is too long loses tokens on the left, after <s>. A prompt whose continuation the
model writes leaves room for it. Conversations have their own encoding (chat.py).

Some tokenizers begin a text with several tokens, such as [gMASK]<sop>, and all of them are kept. A
token that a tokenizer appends to a text (EOS, SEP) is not: the answer continues the text.

The text of a control token in a record stays text. A ticket may quote <|im_end|>; if this became
the token that ends a turn, the model would read the rest of the ticket as another turn. So what a
record holds is marked before it is filled in, by two characters of transformers, and its tokenizers
read what is between them as text. What a chat template or data.prompt writes itself has no marks.
"""

from __future__ import annotations

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
    is_sentencepiece_available,
)
from transformers.utils.chat_template_utils import mark_control_tokens

from lezo_ds.checkpoints.tokenizer_check import warn_of_other_tokens
from lezo_ds.data.examples import EncodedExample, Example, TokenIds
from lezo_ds.errors import UserError, first_line

NEWLINE = "\n"
_BEGIN_MARK, _END_MARK = mark_control_tokens("|", re.compile(r"\|")).split("|")


def has_marks(text: str) -> bool:
    """Return whether a text has marked control tokens."""
    return _BEGIN_MARK in text


def without_marks(text: str) -> str:
    """Return a text as a user reads it."""
    return text.replace(_BEGIN_MARK, "").replace(_END_MARK, "")


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

    @cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """Matches the text of a token that a record may hold by chance, or by intent."""
        template = str(self.backend.chat_template)
        # Some tokenizers have added tokens of white space, which templates write as text.
        found = [
            token.content
            for token in self.backend.added_tokens_decoder.values()
            if token.special or (token.content in template and not token.content.isspace())
        ]
        longest_first = sorted(filter(None, found), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def marked(self, value: Any) -> Any:
        """Return a text, or all texts in lists and dicts, with marks around control tokens."""
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        if isinstance(value, Mapping):  # transformers marks no keys
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return mark_control_tokens(value, self.control_tokens)

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text, after `begin_ids`."""
        return [(*self.begin_ids, *ids) for ids in self.encode_written(texts)]

    def encode_written(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of texts that have all tokens, as those of a chat template.

        Marked control tokens become text. UserError: this tokenizer cannot read one as text.
        """
        options = {}
        if any(map(has_marks, texts)):
            options["sanitize_control_tokens"] = True
        try:
            # verbose=False silences a warning about long texts: they are cut, with one of our own.
            encoded = self.backend(list(texts), add_special_tokens=False, verbose=False, **options)
        except ValueError as error:
            if not options:
                raise
            raise UserError(
                f"a record has the text of a control token, and the tokenizer of "
                f"{self.backend.name_or_path} cannot read it as text: {first_line(error)}",
                fix="remove it from the records, or leave them out: data.skip_unusable=true",
            ) from error
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

    def cut_left(self, ids: Sequence[int], max_length: int) -> TokenIds:
        """Return the last `max_length` ids. Those that begin every sequence stay among them."""
        num_over = max(len(ids) - max_length, 0)
        num_kept = len(self.begin_ids)
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
        if len(backend) <= len(backend.all_special_tokens):
            raise ValueError("it has no vocabulary")  # as of a class whose files are not there
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        # Tokens that were added to a tokenizer may be missing from the model's embedding.
        vocabulary = range(config.get_text_config().vocab_size)
        written = backend("a", return_special_tokens_mask=True)
        ends = generation_ends(directory, config)
    except Exception as error:  # transformers raises many unrelated types here
        fix = "save the tokenizer's files there, or correct model.path or generation_config.json"
        if (directory / "tokenizer.model").is_file() and not is_sentencepiece_available():
            fix = "pip install sentencepiece protobuf"  # transformers asks for another package
        raise UserError(
            f"cannot load the tokenizer or generation_config.json of {path}: {first_line(error)}",
            fix=fix,
        ) from error
    warn_of_other_tokens(directory, backend)
    options = template_options or {}
    _refuse_unread(path, backend, options)
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


def _refuse_unread(path: str, backend: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Refuse names that the chat template does not read."""
    templates = backend.chat_template
    if isinstance(templates, dict):  # of those with a name, these two write turns
        templates = [templates.get(name) for name in ("default", "tool_use")]
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", str(templates), re.ASCII):
            raise UserError(
                f"the chat template of {path} does not read {name}",
                fix=f"correct the name, or remove data.chat_template_kwargs.{name}",
            )


def refuse_unknown(tokenizer: PromptTokenizer, largest: int, model_config: Any) -> None:
    """Refuse a token that the model lacks. `largest` is the largest id in its inputs."""
    size = model_config.get_text_config().vocab_size
    if largest >= size:
        token = tokenizer.backend.convert_ids_to_tokens(largest)
        raise UserError(
            f"the tokenizer writes {token!r}, id {largest}, and the model has {size}",
            fix="use the tokenizer of the model, or resize its embedding",
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


def encode_candidates(
    tokenizer: PromptTokenizer, example: Example, max_length: int
) -> EncodedExample:
    """Tokenize every candidate of one example after its prompt.

    Spaces (not newlines) at both ends of a text are stripped first.

    Args:
        tokenizer: the model's tokenizer.
        example: an example with a prompt.
        max_length: tokens of the longest sequence. Longer ones are cut on the left, after the
            tokens that begin every sequence.

    Raises:
        UserError: a candidate adds no tokens to the prompt, or leaves none before it.
    """
    inputs = [(example.prompt + candidate).strip(" ") for candidate in example.candidates]
    prompt_ids, *full = tokenizer.encode([example.prompt.strip(" "), *inputs])
    # MeZO counts by difference, too, and without demonstrations. Tokens may merge across the
    # boundary, so the tokens of the candidate alone would be another number.
    lengths = [len(ids) - len(prompt_ids) for ids in full]
    if example.demonstrations:
        full = tokenizer.encode([example.demonstrations + each for each in inputs])
    sequences = [tokenizer.cut_left(ids, max_length) for ids in full]
    masks = []
    for candidate, ids, length in zip(example.candidates, sequences, lengths, strict=True):
        if length < 1:
            raise UserError(f"the answer {candidate!r} adds no tokens", fix="correct the record")
        if length >= len(ids):
            raise UserError(
                f"the answer {candidate[:40]!r} leaves no room for a prompt",
                fix=f"raise data.max_length={max_length}, or give it a longer prompt",
            )
        num_before = len(ids) - length
        masks.append((False,) * num_before + (True,) * length)
    return EncodedExample(
        tuple(sequences), tuple(masks), example.label, truncated=sequences != list(full)
    )


def encode_prompt(tokenizer: PromptTokenizer, example: Example) -> TokenIds:
    """Return the token ids of an example's prompt for the model to continue."""
    text = example.demonstrations + example.prompt.strip(" ")
    (ids,) = tokenizer.encode([text])
    return ids


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
            fix=f"add generation.max_new_tokens={max_length // 2}, or set data.max_length to at "
            f"least {max_new_tokens + 2}, if the model has as many positions",
        )
    return room


def common_start(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens with which all sequences begin."""
    columns = zip(*sequences, strict=False)
    alike = takewhile(lambda column: len(set(column)) == 1, columns)
    return [column[0] for column in alike]
