"""Conversations: lists of turns with a role and a content, as instruction data holds them."""

from __future__ import annotations

from collections.abc import Mapping

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Message

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)


def read_messages(field: str, value: object) -> tuple[Message, ...]:
    """Return the turns in a field of a record.

    Args:
        field: name of the field, as messages call it.
        value: its value, which should be a list of {"role": ..., "content": ...}. Other keys of a turn are
            not read.

    Raises:
        UserError: it is something else, a role is unknown, the system's turn is not the first, or a turn of
            the assistant is empty or calls a tool.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"field {field} is not a list of turns",
            got=_shown(value),
            expected='a list such as [{"role": "user", "content": "Hello"}, ...]',
            fix="use a .jsonl, .json or .parquet file, and name the field with the list in data.messages",
        )
    return tuple(_read_turn(field, number, turn) for number, turn in enumerate(value, start=1))


def _read_turn(field: str, number: int, turn: object) -> Message:
    where = f"turn {number} of field {field}"
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise UserError(
            f"{where} has no role and content",
            got=f"the keys {', '.join(map(str, turn))}" if isinstance(turn, Mapping) else _shown(turn),
            expected='{"role": "user", "content": "Hello"}',
            fix="rename the keys (from and value, for instance)",
        )
    role, content = turn["role"], turn["content"]
    if role not in ROLES or (role == SYSTEM and number > 1):
        raise UserError(
            f"{where} has a role that it cannot have",
            got=_shown(role),
            expected=f"{USER} or {ASSISTANT}, or {SYSTEM} in the first turn",
            fix="correct the role, or remove the record",
        )
    if not isinstance(content, str) or (role == ASSISTANT and turn.get("tool_calls")):
        raise UserError(
            f"the content of {where} is not plain text",
            got="a call of a tool" if isinstance(content, str) else _shown(content),
            expected="text",
            fix="write the content as text, or remove the record",
        )
    if role == ASSISTANT and not content.strip():
        raise UserError(
            f"{where} is empty, and the assistant says it",
            got=repr(content),
            expected="text that the model shall learn to write",
            fix="fill in the turn, or remove the record",
        )
    return Message(role, content)


def with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """Return a conversation that begins with a system prompt, unless it has one of its own.

    >>> with_system((Message("user", "Hi"),), "Be brief.")[0]
    Message(role='system', content='Be brief.')
    """
    if system_prompt is None or messages[0].role == SYSTEM:
        return messages
    return (Message(SYSTEM, system_prompt), *messages)


def _shown(value: object) -> str:
    return cut("null" if value is None else repr(value), 80)
