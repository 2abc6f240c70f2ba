"""Conversations as token ids, written by the tokenizer's own chat template.

A template may mark the assistant's turns itself, between {% generation %} and {% endgeneration %}. Otherwise
we let it write the turns before each turn of the assistant, with the words that begin such a turn, and the
turns up to its end. The whole text must begin with both, and the turn lies between their ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from lezo_ds.data.encoding import (
    EncodedExample,
    PromptTokenizer,
    cut_left,
    num_kept_on_left,
    prompt_room,
    warn_of_cuts,
)
from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example, Message

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""Where a turn of the assistant starts and stops, in characters or tokens."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


def encode_conversation(
    tokenizer: PromptTokenizer, example: Example, max_length: int, *, keep_end: bool = False
) -> EncodedExample | None:
    """Tokenize a conversation up to the end of its last turn of the assistant.

    Args:
        tokenizer: the model's. Its chat template writes all special tokens, BOS included.
        example: its `messages` are used.
        max_length: maximum number of tokens.
        keep_end: whether a longer conversation loses its first tokens, after the BOS, instead of its last.

    Returns:
        The sequence and the spans of its turns. None if no token of the assistant is within `max_length`, or
        no token before its turn, with `keep_end`.

    Raises:
        UserError: the tokenizer has no chat template, or the template cannot write this conversation or does
            not show where the turns of the assistant are.
    """
    template = _template(tokenizer.backend)
    if _MARKED.search(template):
        ids, spans = _marked_turns(tokenizer.backend, example)
    else:
        ids, spans = _measured_turns(tokenizer.backend, example)
    ids = ids[: spans[-1][1]]
    truncated = len(ids) > max_length
    if truncated and keep_end:
        num_kept, num_cut = num_kept_on_left(tokenizer, ids), len(ids) - max_length
        ids = list(cut_left(tokenizer, ids, max_length))
        spans = [(start - num_cut, stop - num_cut) for start, stop in spans]
        if spans[0][0] <= num_kept:
            return None
    # The first token of a sequence has no logits that predict it.
    spans = [(max(start, 1), min(stop, max_length)) for start, stop in spans]
    spans = [(start, stop) for start, stop in spans if start < stop]
    if not spans:
        return None
    num_targets = sum(stop - start for start, stop in spans)
    return EncodedExample(
        sequences=(tuple(ids[: spans[-1][1]]),),
        option_lengths=(num_targets,),
        label=example.label,
        truncated=truncated,
        spans=tuple(spans),
    )


def encode_conversations(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int
) -> tuple[tuple[Example, ...], tuple[EncodedExample, ...]]:
    """Encode conversations (see `encode_conversation`), and leave out those whose answers are all cut off.

    One warning says how many were cut, and one how many are left out.

    Returns:
        The examples that are left, and their tokens.

    Raises:
        UserError: as `encode_conversation`, or none is left.
    """
    pairs = [(example, encode_conversation(tokenizer, example, max_length)) for example in examples]
    found = [(example, encoded) for example, encoded in pairs if encoded is not None]
    if not found:
        raise UserError(
            "no conversation has a token of the assistant within data.max_length",
            got=f"data.max_length={max_length}",
            expected="room for what is said before the assistant's turn, and for its first token",
            fix="raise data.max_length",
        )
    warn_of_cuts(sum(encoded.truncated for _, encoded in found), len(pairs), max_length, "at their end")
    if len(found) < len(pairs):
        first = next(example for example, encoded in pairs if encoded is None)
        text = (
            "%d of %d conversations have no token of the assistant within max_length %d tokens and are left"
        )
        warn = f"{text} out, such as %s"
        logger.warning(warn, len(pairs) - len(found), len(pairs), max_length, first.where)
    return tuple(example for example, _ in found), tuple(encoded for _, encoded in found)


def encode_answers(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int
) -> tuple[EncodedExample, ...]:
    """Encode conversations of one question and its answer. Longer ones are cut on the left.

    Raises:
        UserError: as `encode_conversation`, or an answer leaves no room for a token before it.
    """
    encoded = []
    for example in examples:
        found = encode_conversation(tokenizer, example, max_length, keep_end=True)
        if found is None:
            raise UserError(
                f"the answer of {example.where} leaves no token before it",
                got=f"more than {max_length} tokens",
                expected="room for the answer and for a token of the prompt",
                fix=f"raise data.max_length={max_length}, or shorten the answer",
            )
        encoded.append(found)
    warn_of_cuts(sum(found.truncated for found in encoded), len(encoded), max_length)
    return tuple(encoded)


def encode_questions(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int, max_new_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each conversation up to the place where the assistant's last turn begins.

    The arguments and errors are those of `encode_prompts`, and of `encode_conversation`.
    """
    room = prompt_room(max_length, max_new_tokens)
    prompts = []
    for example in examples:
        num_asked = len(example.messages) - (example.messages[-1].role == "assistant")
        text = _render(tokenizer.backend, example, example.messages[:num_asked], opened=True)
        prompts.append(tokenizer.backend(text, add_special_tokens=False, verbose=False)["input_ids"])
    warn_of_cuts(sum(len(ids) > room for ids in prompts), len(prompts), room)
    return tuple(cut_left(tokenizer, ids, room) for ids in prompts)


def _template(backend: PreTrainedTokenizerBase) -> str:
    try:
        template: str = backend.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"the tokenizer of {backend.name_or_path} has no chat template",
            got=str(error).partition(". ")[0],
            expected="a default template in tokenizer_config.json or chat_template.jinja",
            fix="use a model that was trained for conversations, or add its template as chat_template.jinja",
        ) from error
    return template


def _marked_turns(backend: PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[Span]]:
    """Return the token ids of a conversation, and the spans that its template marks, in tokens."""
    _check_offsets(backend)
    try:
        written = backend.apply_chat_template(
            _plain(example.messages), return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:  # a template raises errors of its own and of Jinja
        raise _cannot_write(backend, example, error) from error
    ids, mask = written["input_ids"], written["assistant_masks"]
    spans: list[Span] = []
    for is_ours, places in groupby(range(len(ids)), key=mask.__getitem__):
        if is_ours:
            run = list(places)
            spans.append((run[0], run[-1] + 1))
    if not spans:
        raise UserError(
            f"the chat template of {backend.name_or_path} marks no token of {example.where}",
            got="no {% generation %} around a turn of the assistant",
            expected="the assistant's content between {% generation %} and {% endgeneration %}",
            fix="correct the template",
        )
    return ids, spans


def _measured_turns(backend: PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[Span]]:
    """Return the token ids of a conversation, and the spans of the assistant's turns, in tokens."""
    _check_offsets(backend)
    text = _render(backend, example, example.messages)
    turns = []
    for number, turn in enumerate(example.messages):
        if turn.role == "assistant":
            start = _prefix(backend, example, text, number, opened=True)
            stop = _prefix(backend, example, text, number + 1)
            turns.append((start, start + len(_said(text[start:stop], turn.content))))
    encoded = backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    spans = []
    for start, stop in turns:
        inside = [place for place, (begin, end) in enumerate(offsets) if begin < stop and start < end]
        if not inside:
            raise UserError(
                f"the chat template of {backend.name_or_path} leaves a turn of the assistant out of "
                f"{example.where}",
                got=f"no token between the characters {start} and {stop}",
                expected="every turn of the assistant in the text",
                fix="correct the record: some templates drop what stands between <think> and </think>",
            )
        spans.append((inside[0], inside[-1] + 1))
    return encoded["input_ids"], spans


def _prefix(
    backend: PreTrainedTokenizerBase, example: Example, text: str, num_turns: int, *, opened: bool = False
) -> int:
    """Return the length of the first turns, in characters, once they are checked to begin the whole text."""
    if num_turns == 0:
        raise UserError(
            f"the assistant speaks first in {example.where}",
            got="nothing before its turn that shows where the turn begins",
            expected="a turn of the system or of a user before it",
            fix="set data.system_prompt, or mark the assistant's turns in the template with {% generation %}",
        )
    before = _render(backend, example, example.messages[:num_turns], opened=opened)
    if not text.startswith(before):
        raise UserError(
            f"the chat template of {backend.name_or_path} writes the first turns of {example.where} in "
            "another way if more turns follow",
            got=f"another text for the first {num_turns} of {len(example.messages)} turns",
            expected="turns that stay as they are, so that the assistant's can be found",
            fix="mark the assistant's turns in the template with {% generation %}, or give each record only "
            "one turn of the assistant",
        )
    return len(before)


def _said(turn: str, content: str) -> str:
    r"""Return what the model writes in its turn: without the white space before the next turn.

    White space stays if nothing else ends the turn.

    >>> _said("Hello<|im_end|>\n", "Hello"), _said("Hello\n", "Hello")
    ('Hello<|im_end|>', 'Hello\n')
    """
    stripped = turn.rstrip()
    return turn if stripped.endswith(content.rstrip()) else stripped


def _render(
    backend: PreTrainedTokenizerBase, example: Example, messages: Sequence[Message], *, opened: bool = False
) -> str:
    """Return the text of some turns; if `opened`, with the words that begin the assistant's turn."""
    _template(backend)
    try:
        text: str = backend.apply_chat_template(
            _plain(messages), tokenize=False, add_generation_prompt=opened
        )
    except Exception as error:  # a template raises errors of its own and of Jinja
        raise _cannot_write(backend, example, error) from error
    return text


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [message._asdict() for message in messages]


def _cannot_write(backend: PreTrainedTokenizerBase, example: Example, error: Exception) -> UserError:
    roles = ", ".join(message.role for message in example.messages[:8])
    return UserError(
        f"the chat template of {backend.name_or_path} cannot write {example.where}",
        got=" ".join(f"{type(error).__name__}: {error}; turns of {roles}".split()),
        expected="turns that the template accepts: often user and assistant in turn, for some models without "
        "a system prompt",
        fix="correct or remove the record, or remove data.system_prompt",
    )


def _check_offsets(backend: PreTrainedTokenizerBase) -> None:
    if not backend.is_fast:
        raise UserError(
            f"the tokenizer of {backend.name_or_path} does not tell which characters a token stands for",
            got=type(backend).__name__,
            expected="a tokenizer of the library tokenizers, with a file tokenizer.json",
            fix="save it with a fast tokenizer, or use data.prompt without data.chat_template",
        )
