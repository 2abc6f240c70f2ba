"""Conversations as token ids, written by the tokenizer's own chat template.

A template may mark the assistant's turns itself, between {% generation %} and {% endgeneration %}. Otherwise
it writes the turns before each turn of the assistant, with the words that begin such a turn, and the turns up
to its end. The whole text must begin with both, and the turn lies between their ends.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from lezo_ds.data.encoding import EncodedExample, PromptTokenizer, cut_left, cut_prompts
from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example, Message
from lezo_ds.tasks.custom import ASSISTANT, SYSTEM, USER, with_system

Span = tuple[int, int]  # where a turn of the assistant starts and stops, in characters or tokens
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


def ask_in_chat(tokenizer: PromptTokenizer, example: Example, system_prompt: str | None) -> Example:
    """Return an example with candidates whose prompt is a user's turn, up to where the assistant answers."""

    def write(question: str) -> str:
        turns = with_system((Message(USER, question),), system_prompt)
        text = _render(tokenizer.backend, example, turns, opened=True)
        return (
            text
            if tokenizer.bos_id is None
            else text.removeprefix(str(tokenizer.backend.bos_token))
        )

    prompt = write(example.prompt)
    space = "" if prompt[-1:].isspace() else " "
    candidates = tuple(space + text.strip() for text in example.candidates)
    return replace(example, prompt=prompt, candidates=candidates)


def encode_questions(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int, max_new_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each conversation up to its last turn of the assistant, as `encode_prompts`."""
    prompts = []
    for example in examples:
        num_asked = len(example.messages) - (example.messages[-1].role == ASSISTANT)
        text = _render(tokenizer.backend, example, example.messages[:num_asked], opened=True)
        prompts.append(
            tokenizer.backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        )
    return cut_prompts(tokenizer, prompts, max_length, max_new_tokens)


def encode_conversation(
    tokenizer: PromptTokenizer, example: Example, max_length: int, *, keep_end: bool = False
) -> EncodedExample:
    """Tokenize a conversation up to the end of its last turn of the assistant.

    One that is too long loses its last tokens or, with `keep_end`, its first ones after the BOS.
    """
    backend = tokenizer.backend
    if not backend.is_fast:
        fix = "save it with a fast tokenizer (tokenizer.json), or do not use its chat template"
        raise UserError(
            f"the tokenizer of {backend.name_or_path} does not map tokens to text", fix=fix
        )
    turns = _marked_turns if _MARKED.search(str(backend.chat_template)) else _measured_turns
    ids, spans = turns(backend, example)
    _check_written(backend, example)
    ids = ids[: max((stop for _, stop in spans), default=0)]
    num_cut = max(len(ids) - max_length, 0)
    if num_cut and keep_end:
        first = 1 + int(tokenizer.bos_id in ids[:1])  # a token of the question is left
        ids = list(cut_left(tokenizer, ids, max_length))
        spans = [
            (start - num_cut, stop - num_cut) for start, stop in spans if start - num_cut >= first
        ]
    # The first token of a sequence has no logits that predict it.
    spans = [(max(start, 1), min(stop, max_length)) for start, stop in spans]
    spans = [(start, stop) for start, stop in spans if start < stop]
    if not spans:
        what = f"{example.where} leaves no turn of the assistant in data.max_length={max_length}"
        raise UserError(what, fix="raise data.max_length, or correct what the chat template marks")
    return EncodedExample(
        sequences=(tuple(ids[: spans[-1][1]]),),
        option_lengths=(sum(stop - start for start, stop in spans),),
        label=example.label,
        truncated=num_cut > 0,
        spans=tuple(spans),
    )


def _marked_turns(
    backend: PreTrainedTokenizerBase, example: Example
) -> tuple[list[int], list[Span]]:
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    written = _apply(backend, example, example.messages, **options)
    ids, mask = written["input_ids"], written["assistant_masks"]
    runs = [
        list(run) for is_marked, run in groupby(range(len(ids)), key=mask.__getitem__) if is_marked
    ]
    spans = [(run[0], run[-1] + 1) for run in runs]
    is_trained = [turn.is_trained for turn in example.messages if turn.role == ASSISTANT]
    if len(spans) != len(is_trained) and not all(is_trained):
        what = f"the chat template marks {len(spans)} of {len(is_trained)} turns in {example.where}"
        raise UserError(what, fix="remove the turns of weight 0, or correct the template")
    return ids, spans if all(is_trained) else [*compress(spans, is_trained)]


def _measured_turns(
    backend: PreTrainedTokenizerBase, example: Example
) -> tuple[list[int], list[Span]]:
    text = _render(backend, example, example.messages)
    encoded = backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = []
    for number, turn in enumerate(example.messages):
        if not turn.is_trained:
            continue
        start = _prefix_length(backend, example, text, number, opened=True)
        written = text[start : _prefix_length(backend, example, text, number + 1)]
        # The model does not write the white space before the next turn, unless nothing else ends its turn.
        ends_itself = not turn.content.strip() or not written.rstrip().endswith(
            turn.content.rstrip()
        )
        stop = start + len(written.rstrip() if ends_itself else written)
        offsets = enumerate(encoded["offset_mapping"])
        inside = [place for place, (begin, end) in offsets if begin < stop and start < end]
        if not inside:
            fix = "correct the record: some templates drop what stands between <think> and </think>"
            raise UserError(
                f"the chat template omits turn {number + 1} of {example.where}", fix=fix
            )
        spans.append((inside[0], inside[-1] + 1))
    return encoded["input_ids"], spans


def _check_written(backend: PreTrainedTokenizerBase, example: Example) -> None:
    """Refuse a turn that the template leaves out without an error, as many do with an unknown role."""
    turns, written = example.messages, ""
    text = _render(backend, example, turns)
    for number, turn in enumerate(turns):
        calls = "tool_calls" in turn.others
        if calls or turn.role not in (SYSTEM, USER, ASSISTANT):
            other = turn._replace(others={}) if calls else turn._replace(content=f"{turn.content}~")
            with suppress(UserError):  # the template needs what is changed
                written = _render(backend, example, (*turns[:number], other, *turns[number + 1 :]))
        if written == text:
            what = f"the chat template does not write turn {number + 1} of {example.where}"
            raise UserError(what, fix=f"remove its calls, or use another role than {turn.role}")


def _prefix_length(
    backend: PreTrainedTokenizerBase,
    example: Example,
    text: str,
    num_turns: int,
    *,
    opened: bool = False,
) -> int:
    if num_turns == 0:
        fix = "set data.system_prompt, or mark the assistant's turns in the template with {% generation %}"
        raise UserError(
            f"the assistant speaks first in {example.where}, so its start is unknown", fix=fix
        )
    before = _render(backend, example, example.messages[:num_turns], opened=opened)
    if not text.startswith(before):
        what = f"the chat template changes the first turns of {example.where} if more turns follow"
        fix = (
            "mark the assistant's turns in the template with {% generation %}, or split the record"
        )
        raise UserError(what, fix=fix)
    return len(before)


def _render(
    backend: PreTrainedTokenizerBase,
    example: Example,
    turns: Sequence[Message],
    *,
    opened: bool = False,
) -> str:
    """Return the text of turns; if `opened`, with the words that begin the assistant's turn."""
    return str(_apply(backend, example, turns, tokenize=False, add_generation_prompt=opened))


def _apply(
    backend: PreTrainedTokenizerBase, example: Example, turns: Sequence[Message], **options: bool
) -> Any:
    if not backend.chat_template:
        fix = "use a model that was trained for conversations, or add its template as chat_template.jinja"
        raise UserError(f"the tokenizer of {backend.name_or_path} has no chat template", fix=fix)
    messages = [_as_dict(turn) for turn in turns]
    tools = example.record.get("tools")
    try:
        return backend.apply_chat_template(
            messages, tools if isinstance(tools, list) else None, **options
        )
    except Exception as error:  # a template raises errors of its own and of Jinja
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        roles = ", ".join(message["role"] for message in messages[:8])
        what = f"the chat template of {backend.name_or_path} cannot write {example.where} ({roles}): {shown}"
        raise UserError(
            what, fix="correct or remove the record, or remove data.system_prompt"
        ) from error


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a turn as templates read it. OpenAI's files have the arguments of a call as a string of JSON."""
    turn = {"role": message.role, "content": message.content, **copy.deepcopy(dict(message.others))}
    for call in turn.get("tool_calls", ()):
        with suppress(KeyError, TypeError, ValueError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turn
