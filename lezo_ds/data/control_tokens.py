"""The text of control tokens in records: it stays text.

A ticket may quote <|im_end|>. If this text became the token that ends a turn, the model would read
the rest of the ticket as another turn. So what a record holds is marked before it is filled in. The
marks are two characters of transformers, and its tokenizers read what is between them as text:

    record          The page shows <|im_end|> to me.
    marked          The page shows [<|im_end|>] to me.
    prompt          <|im_start|>user The page shows [<|im_end|>] to me.<|im_end|>

What a chat template or data.prompt writes itself has no marks, and becomes tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedTokenizerBase

from lezo_ds.tasks.base import Example, Message, Task, with_fields
from lezo_ds.tasks.conversations import ASSISTANT
from lezo_ds.tasks.template import field_value

# Older tokenizers do not know marks. With them, control tokens in records become tokens, and a
# run warns about it.
TOKENIZERS_READ_MARKS = Version(transformers.__version__) >= Version("5.23")
if TOKENIZERS_READ_MARKS:
    from transformers.utils.chat_template_utils import mark_control_tokens

    _BEGIN_MARK, _END_MARK = mark_control_tokens("|", re.compile(r"\|")).split("|")


def has_marks(text: str) -> bool:
    """Return whether a text has marked control tokens."""
    return TOKENIZERS_READ_MARKS and _BEGIN_MARK in text


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer, as texts that records may hold.

    Attributes:
        backend: the tokenizer.
        in_chat: whether tokens that are not special count, too, if the chat template writes them.
    """

    backend: PreTrainedTokenizerBase
    in_chat: bool

    def mark(self, text: str) -> str:
        """Return a text in which each control token that can be read as text is marked."""
        return str(_marked(text, self._kept_as_text(self._found_in(text))))

    def mark_example(self, task: Task, example: Example) -> tuple[Example, set[str]]:
        """Return an example with the marked texts of its record, and the control tokens in them.

        Its label and its references, which are compared with other texts, have no marks.
        """
        found = set()
        for name in task.texts_read:
            with suppress(KeyError, TypeError):  # a conversation may have no system prompt
                found |= self._found_in(field_value(example.record, name))
        return (self._built(task, example, found) if found else example), found

    def become_tokens(self, found: Iterable[str]) -> list[str]:
        """Return which of some control tokens the tokenizer cannot read as text."""
        return sorted(set(found) - self._kept_as_text(found))

    def _built(self, task: Task, example: Example, found: Collection[str]) -> Example:
        """Return the example of the record in which control tokens are marked."""
        marked = _marked(dict(example.record), self._kept_as_text(found))
        built = task.reworded(with_fields(example.record, marked))
        return replace(
            example,
            prompt=built.prompt,
            candidates=built.candidates,
            messages=tuple(map(self._with_own_tokens, built.messages)),
        )

    def _with_own_tokens(self, turn: Message) -> Message:
        """Return a turn in which the assistant itself writes tokens such as <think>."""
        if turn.role != ASSISTANT:
            return turn
        special = self._found_in(turn.content) & self._special
        content = _marked(turn.content, self._kept_as_text(special))
        return turn._replace(content=content)

    def _found_in(self, value: Any) -> set[str]:
        """Return the control tokens in a text, or in those of lists and dicts of any depth."""
        if isinstance(value, str):
            return set(self._pattern.findall(value))
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        return set().union(*map(self._found_in, inner))

    def _kept_as_text(self, tokens: Iterable[str]) -> set[str]:
        """Return the tokens whose text the tokenizer does not turn into the token again."""
        kept: set[str] = set()
        if not TOKENIZERS_READ_MARKS:
            return kept
        for token in tokens:
            marked = _marked(token, [token])
            with suppress(ValueError):
                self.backend(marked, add_special_tokens=False, sanitize_control_tokens=True)
                kept.add(token)
        return kept

    @cached_property
    def _special(self) -> set[str]:
        """The special tokens of the tokenizer."""
        added = self.backend.added_tokens_decoder.values()
        return {token.content for token in added if token.special}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """What matches one control token."""
        template = str(self.backend.chat_template) if self.in_chat else ""
        added = [token.content for token in self.backend.added_tokens_decoder.values()]
        # Some tokenizers have added tokens of white space, which templates write as text.
        written = {text for text in added if text in template and not text.isspace()}
        return _any_of(self._special | written)


def _marked(value: Any, tokens: Iterable[str]) -> Any:
    """Return a text, or lists and dicts with texts, in which some control tokens are marked."""
    return mark_control_tokens(value, _any_of(tokens)) if TOKENIZERS_READ_MARKS else value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return what matches any of some texts, the longest one first."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
