"""Conversations in records: turns, as OpenAI, ShareGPT and TRL write them, and what goes with them.

{"messages": [{"role": "user", "content": "Hello"}, ...], "tools": [...]}
{"conversations": [{"from": "human", "value": "Hello"}, ...], "system": "Be brief."}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import ArrowRecord, Message, Record, Turns
from lezo_ds.tasks.template import field_value, shown

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
TOOL = "tool"

_CALL = "function_call"
"""OpenAI's earlier key of a call."""
_CALL_ROLES = (_CALL, "tool_call")
"""Roles of a turn whose text is a call, in ShareGPT's files and in those of ms-swift."""
_ROLES = {
    **{role: role for role in (SYSTEM, USER, ASSISTANT, TOOL)},
    **dict.fromkeys(("human", "prompter"), USER),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bing", "bard", "bot", "ai", "model", *_CALL_ROLES), ASSISTANT
    ),
    **dict.fromkeys(("observation", "function", "tool_response"), TOOL),
}
"""Roles by their names, in lower case, in ShareGPT's files and in OpenAI's earlier ones."""

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn with what the assistant thought before it."""
_WEIGHT_KEYS = ("weight", "train", "training", "loss")
"""Keys of a turn that say whether the model learns it."""
_READ_KEYS = {"role", "from", "content", "value", "tool_calls", _CALL, *_WEIGHT_KEYS}
"""Keys of a turn that are read here. Others go to the chat template as they are."""

SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields next to a conversation with the text of its system turn."""
TOOLS = "tools"
"""The field next to a conversation with the definitions of tools."""
OTHER_FIELDS = ("history", "instruction", "input", "functions")
"""Fields of other layouts that belong to a conversation."""
OF_CONVERSATIONS = {*SYSTEM_FIELDS, TOOLS, *OTHER_FIELDS}
"""All fields that belong to a conversation, besides that of its turns."""


def are_objects(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    """Return whether a field holds a list of objects, such as turns, and not texts."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def are_turns(value: object) -> bool:
    """Return whether a field holds a conversation, with OpenAI's names of keys or ShareGPT's."""
    return are_objects(value) and not {"role", "from"}.isdisjoint(value[0])


def read_messages(record: Record, field: str) -> Turns:
    """Return the turns of a conversation, of which there is at least one.

    Args:
        record: the record.
        field: the name of the field with the turns.

    Raises:
        UserError: it is not a list of turns.
    """
    value = _as_stored(record, field_value(record, field))
    if not isinstance(value, list) or not value:
        raise UserError(
            f"field {field} is {shown(value)}, "
            'not a list such as [{"role": "user", "content": "Hello"}]',
            fix="write the list itself, not as text, in a .jsonl, .json or .parquet file, "
            "and name its field in data.messages",
        )
    turns: list[Message] = []
    for number, each in enumerate(value, start=1):
        turn = _read_turn(f"turn {number} of field {field}", each)
        *earlier, last = turns or [turn]
        calls = last.others.get("tool_calls", []) + turn.others.get("tool_calls", [])
        is_call = (each.get("role") or each.get("from")) in _CALL_ROLES and not turn.content
        if turns and is_call and (last.role, last.weight) == (turn.role, turn.weight):
            # Calls at once, or after a text, are one turn.
            turns = [*earlier, last._replace(others={**last.others, "tool_calls": calls})]
        else:
            turns.append(turn)
    return tuple(turns)


def read_system(record: Record) -> str | None:
    """Return the system prompt in a field next to a conversation, if there is one."""
    for name in SYSTEM_FIELDS:
        value = record.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return None


def find_tools(record: Record) -> list[Any] | None:
    """Return the definitions of tools in a record: a list of objects, or JSON of one."""
    tools = _from_json(_as_stored(record, record.get(TOOLS)))
    return list(tools) if are_objects(tools) else None


def _from_json(value: Any) -> Any:
    """Return what a text of JSON holds: Arrow cannot store objects of many kinds. Or the value."""
    with suppress(TypeError, ValueError):
        return json.loads(value)
    return value


def check_tools(record: Record) -> None:
    """Refuse a field of tools that has something else."""
    tools = record.get(TOOLS)
    if tools not in (None, "", [], "[]") and find_tools(record) is None:
        raise UserError(
            f"field {TOOLS} is {shown(tools)}, not a list of definitions of tools",
            fix="write a list of objects, or JSON of one, or rename the field",
        )


def _as_stored(record: Record, value: Any) -> Any:
    """Return the value of a field without the nulls that Arrow has filled in."""
    return _without_nulls(value) if isinstance(record, ArrowRecord) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _read_turn(where: str, turn: object) -> Message:
    """Return a turn {role, content}, as in OpenAI's files, or {from, value}, as in ShareGPT's."""
    keys = turn if isinstance(turn, Mapping) else {}
    name = keys.get("role") or keys.get("from")
    if not isinstance(name, str):
        raise UserError(
            f"{where} is {shown(turn)}, without a role",
            fix="rename its keys to role and content, or to from and value",
        )
    role = _ROLES.get(name.lower(), name)
    texts = [keys[key] for key in ("content", "value") if keys.get(key) is not None]
    content = _text(where, (*texts, None)[0])
    calls = _calls(keys.get("tool_calls") or keys.get(_CALL))
    if name in _CALL_ROLES and not calls:
        calls = _calls(content)
        content = "" if calls else content
    if content is None and (calls or role == TOOL):
        content = ""  # a call needs no text, and a tool may return nothing
    if not isinstance(content, str):
        raise UserError(
            f"the content of {where} is {shown(content)}, not text",
            fix="write a text under its key content, or remove the record",
        )
    weights = [keys[key] for key in _WEIGHT_KEYS if keys.get(key) is not None]
    weight = (*weights, 1)[0]
    if weight not in (0, 1):
        raise UserError(
            f"the weight of {where} is {shown(weight)}, not 0 or 1", fix="correct the record"
        )
    others = {key: keys[key] for key in keys if keys[key] and key not in _READ_KEYS}
    if calls:
        others["tool_calls"] = calls
    message = Message(role, content, int(weight), others)
    if message.is_trained and not content.strip() and not calls:
        raise UserError(
            f"{where} is the assistant's and is empty",
            fix="fill it in, give it weight 0, or remove the record",
        )
    return message


def _calls(value: object) -> list[Any]:
    """Return calls of tools: a list of them, or one, or JSON of either; [] of anything else."""
    calls = _from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not are_objects(calls):
        return []
    return [
        each if "function" in each else {"type": "function", "function": each} for each in calls
    ]


def _text(where: str, content: Any) -> Any:
    """Return the text of a content that is a list of parts. Another content stays as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise UserError(
                f"{where} has a part that is not text: {shown(kind or part)}",
                fix="use a model and records of text alone: this trainer reads no images or sounds",
            )
        texts.append(text)
    return "".join(texts)


def with_system(messages: Turns, system_prompt: str | None) -> Turns:
    """Return a conversation with a system prompt before it, unless it begins with its own."""
    if system_prompt is None or messages[0].role in (SYSTEM, "developer"):
        return messages
    return (Message(SYSTEM, system_prompt), *messages)
