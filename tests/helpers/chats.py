"""Conversations, and a tiny model of bytes whose tokenizer has a chat template."""

from __future__ import annotations

import json

from own_data import write_byte_model

_OPENING = "{{ '<s>' + turn['role'] + '\n' }}"
_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"

PLAIN = (
    "{% for turn in messages %}"
    + _OPENING
    + "{{ turn['content'] + '</s>\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
"""A template as that of SmolLM2: each turn stays the same, whatever follows it."""

MARKED = (
    "{% for turn in messages %}"
    + _OPENING
    + "{% if turn['role'] == 'assistant' %}{% generation %}{{ turn['content'] + '</s>' }}{% endgeneration %}"
    + "{% else %}{{ turn['content'] + '</s>' }}{% endif %}{{ '\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
"""The same texts, from a template that marks what the assistant writes."""

THINKING = (
    "{% for turn in messages %}"
    + _OPENING
    + "{% if turn['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    + "{{ turn['content'].split('</think>')[-1] + '</s>\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
"""A template as that of Qwen3: only the last turn has thoughts, so a turn changes when others follow it."""

WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
)
"""A template as that of Gemma."""

COLORS = ("red", "green", "blue", "white")


def write_chat_model(directory, template=PLAIN):
    """Write a random OPT of 2 blocks x 16 whose tokens are bytes, with a chat template if one is given."""
    write_byte_model(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def conversation(number):
    """Return a conversation of four turns, the last of which names a color."""
    first = [("user", f"Box {number}?"), ("assistant", "Yes.")]
    turns = [*first, ("user", "Its color?"), ("assistant", COLORS[number % len(COLORS)])]
    return [{"role": role, "content": content} for role, content in turns]


def write_conversations(path, num_records=40):
    rows = [{"id": number, "turns": conversation(number)} for number in range(num_records)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
