"""Turns of conversations, as OpenAI and ShareGPT write them, with their tools.

{"messages": [{"role": "user", "content": "Hello"}, ...], "tools": [...]}
{"conversations": [{"from": "human", "value": "Hello"}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lezo_ds.data.examples import ASSISTANT, Turn
from lezo_ds.data.template import Record, shown
from lezo_ds.errors import UserError

_ROLES = {"human": "user", "gpt": ASSISTANT, "observation": "tool"}
"""Roles of ShareGPT's files. Any other role is for the chat template to know."""
_LEARNED = ("weight", "train")
"""Keys of a turn of the assistant that say by 0 or false that it is context, and not learned."""


def read_turns(field: str, value: object) -> tuple[tuple[Turn, ...], list[int]]:
    """Return the turns of a conversation, and the indices of those that are learned.

    Turns have the keys of OpenAI's files, role and content, or of ShareGPT's, from and value. Keys
    that are null are left out, as TRL does: Arrow fills them in.

    Raises:
        UserError: the value is not a list of turns, or a turn has no text.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"column `{field}` is {shown(value)}, not a list of turns such as "
            '[{"role": "user", "content": "Hello"}]',
            fix="store lists in .jsonl or .parquet, not as text, and name the column in "
            "data.messages",
        )
    turns = []
    learned = []
    for number, each in enumerate(value):
        turn, is_learned = _read_turn(f"turn {number + 1} in column `{field}`", each)
        turns.append(turn)
        if is_learned:
            learned.append(number)
    return tuple(turns), learned


def _read_turn(where: str, value: object) -> tuple[Turn, bool]:
    """Return a turn, and whether the model learns it."""
    keys: dict[str, Any] = without_nulls(value) if isinstance(value, Mapping) else {}
    role = keys.pop("role", None) or keys.pop("from", None)
    if not isinstance(role, str):
        raise UserError(
            f"{where} is {shown(value)}, without a role",
            fix="rename its keys to role and content, or to from and value",
        )
    # A turn that calls tools may say nothing else.
    default = "" if "tool_calls" in keys else None
    content = keys.pop("content", keys.pop("value", default))
    if isinstance(content, list):
        content = "".join(_part_text(where, part) for part in content)
    if not isinstance(content, str):
        raise UserError(
            f"the content of {where} is {shown(content)}, not a text", fix="correct the record"
        )
    role = _ROLES.get(role, role)
    weights = [keys.pop(key) for key in _LEARNED if key in keys]
    if any(weight not in (0, 1) for weight in weights):
        raise UserError(f"the weight of {where} is not 0 or 1", fix="correct the record")
    for call in keys.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(function, dict) or not function.get("name"):
            raise UserError(
                f"a call in {where} is {shown(call)}, not an object with the name of a function",
                fix="correct the record; store lists of objects in .jsonl or .parquet, not as text",
            )
        # OpenAI's files have the arguments as JSON text, and templates want an object.
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments)
            except ValueError as error:
                raise UserError(
                    f"a call in {where} has arguments that are not JSON: {shown(arguments)}",
                    fix="correct the record",
                ) from error
    is_learned = role == ASSISTANT and all(weights)
    if is_learned and not content.strip() and not keys.get("tool_calls"):
        raise UserError(
            f"{where} is the assistant's and is empty",
            fix="fill it in, give it weight 0, or remove the record",
        )
    return {"role": role, "content": content, **keys}, is_learned


def _part_text(where: str, part: Any) -> str:
    """Return the text of a part of a content. UserError: it is an image or a sound."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise UserError(
            f"{where} has a part that is not text: {shown(part)}",
            fix="use a model and records of text alone: no images or sounds are read",
        )
    return text


def find_tools(record: Record) -> list[Any] | None:
    """Return the definitions of tools in the field `tools`: a list of objects, or JSON of one.

    Raises:
        UserError: it is neither, or the record has further variables of its own for the template.
    """
    if record.get("chat_template_kwargs"):
        raise UserError(
            "column `chat_template_kwargs` is not read",
            fix="remove it, and set data.chat_template_kwargs, which all records share",
        )
    tools = record.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"column `tools` is {shown(tools)}, not a list of definitions of tools",
            fix="write a list of objects, or JSON of one, or rename the column",
        )
    return [without_nulls(tool) for tool in tools]


def without_nulls(value: Any) -> Any:
    """Return lists and dicts of any depth without the keys that are null."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, Mapping):
        given = {key: item for key, item in value.items() if item is not None}
        return {key: without_nulls(item) for key, item in given.items()}
    return value
