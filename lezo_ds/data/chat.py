"""Conversations as token ids, written by the tokenizer's own chat template.

A template may mark the assistant's turns itself, between {% generation %} and {% endgeneration %}. Otherwise
it writes the turns before each turn of the assistant, with the words that begin such a turn, and the turns up
to its end. The whole text must begin with both, and the turn lies between their ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from lezo_ds.data.encoding import EncodedExample, PromptTokenizer, cut_left, cut_prompts, warn_of_cuts
from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""Where a turn of the assistant starts and stops, in characters or tokens."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


def encode_conversations(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int
) -> tuple[tuple[Example, ...], tuple[EncodedExample, ...]]:
    """Return the conversations with a token of the assistant within `max_length`, and their tokens.

    Longer conversations are cut at their end.
    """
    pairs = [(example, encode_conversation(tokenizer, example, max_length)) for example in examples]
    kept = [(example, encoded) for example, encoded in pairs if encoded is not None]
    if not kept:
        what = f"no conversation has a token of the assistant within data.max_length={max_length}"
        raise UserError(what, fix="raise data.max_length, or correct what the chat template marks")
    warn_of_cuts(sum(encoded.truncated for _, encoded in kept), len(pairs), max_length, "at their end")
    if left_out := [example for example, encoded in pairs if encoded is None]:
        text = "%d of %d conversations have no token of the assistant in max_length %d: %s is left out"
        logger.warning(text, len(left_out), len(pairs), max_length, left_out[0].where)
    return tuple(example for example, _ in kept), tuple(encoded for _, encoded in kept)


def encode_answers(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int
) -> tuple[EncodedExample, ...]:
    """Encode conversations of one question and its answer. Longer ones are cut on the left."""
    encoded = []
    for example in examples:
        answer = encode_conversation(tokenizer, example, max_length, keep_end=True)
        if answer is None:
            what = f"the answer of {example.where} leaves no token before it in data.max_length={max_length}"
            raise UserError(what, fix="raise data.max_length, or shorten the answer")
        encoded.append(answer)
    warn_of_cuts(sum(answer.truncated for answer in encoded), len(encoded), max_length)
    return tuple(encoded)


def encode_questions(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int, max_new_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each conversation up to its last turn of the assistant, as `encode_prompts`."""
    prompts = []
    for example in examples:
        num_asked = len(example.messages) - (example.messages[-1].role == "assistant")
        text = _render(tokenizer.backend, example, num_asked, opened=True)
        prompts.append(tokenizer.backend(text, add_special_tokens=False, verbose=False)["input_ids"])
    return cut_prompts(tokenizer, prompts, max_length, max_new_tokens)


def encode_conversation(
    tokenizer: PromptTokenizer, example: Example, max_length: int, *, keep_end: bool = False
) -> EncodedExample | None:
    """Tokenize a conversation up to the end of its last turn of the assistant.

    With `keep_end`, one that is too long loses its first tokens, after the BOS, instead of its last. None if
    no token of the assistant is left or, with `keep_end`, no token before its turn.
    """
    backend = tokenizer.backend
    if not backend.is_fast:
        fix = "save it with a fast tokenizer (tokenizer.json), or do not use its chat template"
        raise UserError(f"the tokenizer of {backend.name_or_path} does not map tokens to text", fix=fix)
    turns = _marked_turns if _MARKED.search(str(backend.chat_template)) else _measured_turns
    ids, spans = turns(backend, example)
    if not spans:
        return None
    ids = ids[: spans[-1][1]]
    num_cut = max(len(ids) - max_length, 0)
    if num_cut and keep_end:
        num_kept = int(tokenizer.bos_id in ids[:1])
        ids = list(cut_left(tokenizer, ids, max_length))
        spans = [(start - num_cut, stop - num_cut) for start, stop in spans]
        if spans[0][0] <= num_kept:
            return None
    # The first token of a sequence has no logits that predict it.
    spans = [(max(start, 1), min(stop, max_length)) for start, stop in spans]
    spans = [(start, stop) for start, stop in spans if start < stop]
    if not spans:
        return None
    return EncodedExample(
        sequences=(tuple(ids[: spans[-1][1]]),),
        option_lengths=(sum(stop - start for start, stop in spans),),
        label=example.label,
        truncated=num_cut > 0,
        spans=tuple(spans),
    )


def _marked_turns(backend: PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[Span]]:
    written = _apply(
        backend, example, len(example.messages), return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = written["input_ids"], written["assistant_masks"]
    runs = [list(run) for is_marked, run in groupby(range(len(ids)), key=mask.__getitem__) if is_marked]
    return ids, [(run[0], run[-1] + 1) for run in runs]


def _measured_turns(backend: PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[Span]]:
    text = _render(backend, example, len(example.messages))
    encoded = backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = []
    for number, turn in enumerate(example.messages):
        if turn.role != "assistant":
            continue
        start = _prefix_length(backend, example, text, number, opened=True)
        written = text[start : _prefix_length(backend, example, text, number + 1)]
        # The model does not write the white space before the next turn, unless nothing else ends its turn.
        ends_itself = not written.rstrip().endswith(turn.content.rstrip())
        stop = start + len(written.rstrip() if ends_itself else written)
        offsets = enumerate(encoded["offset_mapping"])
        inside = [place for place, (begin, end) in offsets if begin < stop and start < end]
        if not inside:
            fix = "correct the record: some templates drop what stands between <think> and </think>"
            raise UserError(f"the chat template omits turn {number + 1} of {example.where}", fix=fix)
        spans.append((inside[0], inside[-1] + 1))
    return encoded["input_ids"], spans


def _prefix_length(
    backend: PreTrainedTokenizerBase, example: Example, text: str, num_turns: int, *, opened: bool = False
) -> int:
    if num_turns == 0:
        fix = "set data.system_prompt, or mark the assistant's turns in the template with {% generation %}"
        raise UserError(f"the assistant speaks first in {example.where}, so its start is unknown", fix=fix)
    before = _render(backend, example, num_turns, opened=opened)
    if not text.startswith(before):
        what = f"the chat template changes the first turns of {example.where} if more turns follow"
        fix = "mark the assistant's turns in the template with {% generation %}, or split the record"
        raise UserError(what, fix=fix)
    return len(before)


def _render(
    backend: PreTrainedTokenizerBase, example: Example, num_turns: int, *, opened: bool = False
) -> str:
    """Return the text of the first turns; if `opened`, with the words that begin the assistant's turn."""
    return str(_apply(backend, example, num_turns, tokenize=False, add_generation_prompt=opened))


def _apply(backend: PreTrainedTokenizerBase, example: Example, num_turns: int, **options: bool) -> Any:  # noqa: ANN401
    if not backend.chat_template:
        fix = "use a model that was trained for conversations, or add its template as chat_template.jinja"
        raise UserError(f"the tokenizer of {backend.name_or_path} has no chat template", fix=fix)
    messages = [message._asdict() for message in example.messages[:num_turns]]
    try:
        return backend.apply_chat_template(messages, **options)
    except Exception as error:  # a template raises errors of its own and of Jinja
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        roles = ", ".join(message["role"] for message in messages[:8])
        what = f"the chat template of {backend.name_or_path} cannot write {example.where} ({roles}): {shown}"
        raise UserError(what, fix="correct or remove the record, or remove data.system_prompt") from error
