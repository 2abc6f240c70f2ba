"""Conversations as token ids, written by the tokenizer's own chat template, in TRL's manner.

A template may mark the assistant's turns itself, between {% generation %} and {% endgeneration %}.
Transformers then returns a mask, and a conversation is one sequence:

    ids     <s>user Where? </s> <s>assistant Rome. </s> <s>user Sure? </s> <s>assistant Yes. </s>
    mask      0    0       0      0   0       1     1     0   0      0      0   0        1    1

With any other template, each turn to learn ends a sequence of its own. Its prompt is what the model
reads when it is asked for the turn, and the whole text must begin with it:

    prompt  <s>user Where? </s> <s>assistant            add_generation_prompt=True
    whole   <s>user Where? </s> <s>assistant Rome. </s>
    mask      0    0       0      0   0       1     1
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import _REASONING_FIELDS, _compile_jinja_template

from lezo_ds.config import RunConfig
from lezo_ds.data.encode import (
    PromptTokenizer,
    common_start,
    encode_candidates,
    has_marks,
    without_marks,
)
from lezo_ds.data.examples import ASSISTANT, EncodedExample, Example, TokenIds, Turn
from lezo_ds.data.template import Record
from lezo_ds.data.turns import find_tools
from lezo_ds.errors import UserError, one_line

logger = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers (5.23) looks for it
_QUESTION: Turn = {"role": "user", "content": "A question"}
_ANSWER = "31415926535897932"  # digits, which no filter of a template changes
"""Turns by which the words around an answer are found."""
BEGIN_OF_THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"
"""What ends a thought. The answer is what follows the last one."""
_ANY_LENGTH = 1 << 30


def write(
    tokenizer: PromptTokenizer,
    turns: Sequence[Turn],
    record: Record | None = None,
    *,
    opened: bool = False,
) -> str:
    """Return the text of turns; if `opened`, with the words that ask for the assistant's turn.

    Raises:
        UserError: there is no template, it refuses the turns, or it leaves out the text of a turn.
    """
    text = str(_apply(tokenizer, turns, record, tokenize=False, add_generation_prompt=opened))
    plain = without_marks(text)
    for number, turn in enumerate(turns, start=1):
        thought, _, content = without_marks(turn["content"]).rpartition(END_OF_THOUGHT)
        functions = [call.get("function", call) for call in turn.get("tool_calls", ())]
        # What a tool returns may be written as JSON.
        in_json = json.dumps(content.strip(), ensure_ascii=False)[1:-1]
        is_written = content.strip() in plain or in_json in plain
        if turn is turns[-1]:  # many templates drop the thoughts of earlier turns
            is_written &= thought.rpartition(BEGIN_OF_THOUGHT)[2].strip() in plain
        if not is_written or not all(each.get("name", "") in plain for each in functions):
            raise UserError(
                f"the chat template of {tokenizer.backend.name_or_path} does not write turn "
                f"{number}, of {turn['role']}",
                fix="use a role that the template knows, write the turn as text, or use a template "
                "that keeps the thought of the last turn",
            )
    return text


def _apply(
    tokenizer: PromptTokenizer, turns: Sequence[Turn], record: Record | None, **options: bool
) -> Any:
    """Return what apply_chat_template of the tokenizer returns for turns."""
    backend = tokenizer.backend
    tools = tokenizer.marked(find_tools(record or {}))
    source = _source(tokenizer, tools)
    for key in {key for turn in turns for key in turn}:
        # Transformers (5.23) gives templates each of these by the first two names.
        names = _REASONING_FIELDS[:2] if key in _REASONING_FIELDS else [key]
        if not any(name in source for name in names):
            _warn_unwritten(key)
    try:
        # Transformers (5.23) has no argument for the day that a template writes.
        template = _compile_jinja_template(source)
        template.environment.globals["strftime_now"] = tokenizer.today.strftime
        messages = [_with_own_tokens(tokenizer, turn) for turn in turns]
        return backend.apply_chat_template(
            messages, tools, **dict(tokenizer.template_options), **options
        )
    except Exception as error:  # a template raises errors of its own and of Jinja
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(
            f"the chat template of {backend.name_or_path} refuses the conversation: {reason}",
            fix="correct the record, or set or remove data.system_prompt",
        ) from error


@cache  # once a key, not once a record
def _warn_unwritten(key: str) -> None:
    logger.warning("the chat template does not write the key `%s` of turns", key)


def _source(tokenizer: PromptTokenizer, tools: list[Any] | None) -> str:
    """Return the chat template that writes turns, with tools or without.

    Raises:
        UserError: there is no template, or it does not write tools.
    """
    backend = tokenizer.backend
    try:
        source = str(backend.get_chat_template(tools=tools))
    except ValueError as error:  # there is none, or several without a default
        raise UserError(
            f"the tokenizer of {backend.name_or_path} has no chat template",
            fix="use a model that was trained for conversations, or add its template as "
            "chat_template.jinja, or write texts instead of turns",
        ) from error
    if tools and "tools" not in source:
        raise UserError(
            f"the chat template of {backend.name_or_path} does not write tools",
            fix="use another model, or rename the column `tools`",
        )
    return source


def _with_own_tokens(tokenizer: PromptTokenizer, turn: Turn) -> Turn:
    """Return a turn in which the assistant itself writes tokens such as <think>."""
    if "tool_calls" in turn:
        turn = {**turn, "tool_calls": tokenizer.marked(turn["tool_calls"])}
    if turn["role"] != ASSISTANT or not has_marks(turn["content"]):
        return turn
    content = turn["content"]
    for token in tokenizer.backend.added_tokens_decoder.values():
        if not token.special or token.content in (BEGIN_OF_THOUGHT, END_OF_THOUGHT):
            content = content.replace(tokenizer.marked(token.content), token.content)
    return {**turn, "content": content}


def encode_turns(
    tokenizer: PromptTokenizer, config: RunConfig, example: Example
) -> list[EncodedExample]:
    """Return the sequences of a conversation, with masks of the turns to learn.

    Raises:
        UserError: the template cannot write the conversation, or its text does not begin with what
            the model reads before a turn; or a sequence is longer than data.max_length.
    """
    turns = example.messages
    of_assistant = [number for number, turn in enumerate(turns) if turn["role"] == ASSISTANT]
    template = _source(tokenizer, find_tools(example.record))
    marks_turns = _GENERATION.search(template) and list(example.learned) == of_assistant
    # Transformers (5.23) has no mask for marked control tokens. TRL's manner then serves.
    if marks_turns and not has_marks(write(tokenizer, turns, example.record)):
        written = _apply(
            tokenizer,
            turns,
            example.record,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = tuple(map(bool, written["assistant_masks"]))
        return [_checked(config, tuple(written["input_ids"]), mask)]
    sequences = []
    for number in example.learned:
        if number == 0:
            raise UserError(
                "the first turn is the assistant's, with no turn before it",
                fix="put a turn of the user before it, or give it weight 0",
            )
        asked = write(tokenizer, turns[:number], example.record, opened=True)
        whole = write(tokenizer, turns[: number + 1], example.record)
        if not whole.startswith(asked):
            raise UserError(
                f"the chat template of {tokenizer.backend.name_or_path} does not begin turn "
                f"{number + 1} with the prompt that it writes for an answer",
                fix="mark the assistant's turns in the template with {% generation %}, set "
                "data.chat_template_kwargs, or remove the text of control tokens from the record",
            )
        ids, first = _split_at(tokenizer, whole, asked)
        mask = (False,) * first + (True,) * (len(ids) - first)
        sequences.append(_checked(config, ids, mask))
    return sequences


def _split_at(tokenizer: PromptTokenizer, whole: str, asked: str) -> tuple[TokenIds, int]:
    """Return the token ids of a text, and the index of the first that ends after its start `asked`.

    The first token of an answer may begin before it, as a space that ends what asks for it.
    """
    if has_marks(whole) or not tokenizer.backend.is_fast:  # without a map to characters
        prompt_ids, ids = tokenizer.encode_written([asked, whole])
        return ids, len(common_start([prompt_ids, ids]))
    encoded = tokenizer.backend(
        whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    spans = encoded["offset_mapping"]
    before = takewhile(lambda span: span[1] <= len(asked), spans)
    return tuple(encoded["input_ids"]), len(list(before))


def _checked(config: RunConfig, ids: TokenIds, mask: tuple[bool, ...]) -> EncodedExample:
    """Return a sequence of a conversation. UserError: it is too long, or nothing is learned."""
    _refuse_long(len(ids), config.data.max_length)
    # The first token of a sequence has no logits that predict it.
    mask = (False, *mask[1:])
    if not any(mask):
        raise UserError(
            "the chat template does not mark any token of the assistant", fix="correct the template"
        )
    return EncodedExample((ids,), (mask,), 0)


def encode_question(tokenizer: PromptTokenizer, config: RunConfig, example: Example) -> TokenIds:
    """Return the token ids of a conversation for the model to continue by its last learned turn.

    Raises:
        UserError: the template cannot write the conversation, or it is too long.
    """
    text = write(tokenizer, example.asked, example.record, opened=True)
    (ids,) = tokenizer.encode_written([text])
    _refuse_long(len(ids), config.data.max_length - config.generation.max_new_tokens)
    return ids


def _refuse_long(num_tokens: int, most: int) -> None:
    if num_tokens > most:
        raise UserError(
            f"the conversation has {num_tokens} tokens; at most {most} fit",
            fix="raise data.max_length, or lower generation.max_new_tokens if the model answers",
        )


def encode_choices(
    tokenizer: PromptTokenizer, config: RunConfig, example: Example
) -> EncodedExample:
    """Return the candidates of an example as answers in a conversation.

    Raises:
        UserError: the template changes a candidate, or the words around it; or it is too long.
    """
    turns: list[Turn] = [{"role": "user", "content": example.prompt}]
    if config.data.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": config.data.system_prompt})
    name = tokenizer.backend.name_or_path
    before, after = _around_answer(tokenizer, turns)
    if not before.startswith(write(tokenizer, turns, opened=True)):
        raise UserError(
            f"the chat template of {name} does not begin a conversation with the "
            "prompt that it writes for an answer",
            fix="set data.chat_template_kwargs, or remove data.chat_template",
        )
    candidates = []
    for text in example.candidates:
        answer = text.strip()
        written = write(tokenizer, [*turns, {"role": ASSISTANT, "content": answer}])
        if not (written.startswith(before) and written.endswith(after)):
            raise UserError(
                f"the chat template of {name} changes the answer {answer!r}",
                fix="give the label another text, or remove data.chat_template",
            )
        candidates.append(written[len(before) : len(written) - len(after)])
    in_chat = replace(example, prompt=before, candidates=tuple(candidates))
    plain = replace(tokenizer, begin_ids=())  # the template writes what begins a text
    encoded = encode_candidates(plain, in_chat, _ANY_LENGTH)
    _refuse_long(encoded.num_tokens, config.data.max_length)
    return encoded


def _around_answer(tokenizer: PromptTokenizer, turns: Sequence[Turn]) -> tuple[str, str]:
    """Return the texts that the template writes before and after an answer to turns."""
    written = write(tokenizer, [*turns, {"role": ASSISTANT, "content": _ANSWER}])
    before, _, after = written.rpartition(_ANSWER)
    return before, after


class TurnEnd(NamedTuple):
    """What the chat template writes after an answer: a special token, or a text, or neither.

    Attributes:
        ids: the token.
        stops: the text.
        mark: the token after which an answer begins: that of the end of a thought, or of a channel.
    """

    ids: TokenIds = ()
    stops: tuple[str, ...] = ()
    mark: str = END_OF_THOUGHT


def end_of_turn(tokenizer: PromptTokenizer) -> TurnEnd:
    """Return what the chat template writes after an answer, up to the first special token.

    It may be another token than the EOS of the tokenizer, as in models of the Llama 3 family, or
    a text such as <|im_end|> where the tokenizer has no such token.
    """
    turns = [_QUESTION]
    try:
        before, after = _around_answer(tokenizer, turns)
    except UserError:  # some templates require a system turn
        turns.insert(0, {"role": "system", "content": "Be brief."})
        before, after = _around_answer(tokenizer, turns)
    asked = write(tokenizer, turns, opened=True)
    added_before = before[len(asked) :] if before.startswith(asked) else ""
    mark = [END_OF_THOUGHT, *tokenizer.control_tokens.findall(added_before)][-1]
    ids = tokenizer.backend.encode(after.strip(), add_special_tokens=False)
    added = tokenizer.backend.added_tokens_decoder.items()
    special = {number for number, token in added if token.special}
    text = list(takewhile(lambda token: token not in special, ids))
    if not text:
        return TurnEnd(tuple(ids[:1]), mark=mark)
    return TurnEnd(stops=(tokenizer.decode(text).strip(),), mark=mark)


def without_thought(ids: Sequence[int], tokenizer: PromptTokenizer, mark: str) -> Sequence[int]:
    """Return the tokens of an answer after the last token `mark`, or all of them."""
    end = tokenizer.backend.convert_tokens_to_ids(mark)
    if end == tokenizer.backend.unk_token_id:  # there is no such token; GPT-2's is its EOS, too
        return ids
    places = [place for place, token in enumerate(ids, start=1) if token == end]
    return ids[max(places, default=0) :]
