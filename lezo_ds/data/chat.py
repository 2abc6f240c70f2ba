"""Conversations as token ids, written by the tokenizer's own chat template.

Training needs to know which tokens are the assistant's turns. A template may mark them itself,
between {% generation %} and {% endgeneration %}; transformers then returns a mask. For any other
template, this module finds a turn between two prefixes of the whole text, both written by the
template:

    the whole text          <s>user Where? </s> <s>assistant Rome. </s> <s>user Sure? </s> ...
    turns before it,        <s>user Where? </s> <s>assistant
      opened for an answer
    turns up to its end     <s>user Where? </s> <s>assistant Rome. </s>
    the turn                                                 Rome. </s>

A template may change earlier turns if more follow, as those that drop earlier thoughts do, and the
prefixes then differ. Each turn to learn then ends a sequence of its own, with the turns before it
as the model reads them when it answers. The turn's characters become tokens by the tokenizer's map
from tokens to characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import _compile_jinja_template

from lezo_ds.data.control_tokens import has_marks
from lezo_ds.data.encoding import (
    PromptTokenizer,
    num_alike,
)
from lezo_ds.errors import UserError, one_line
from lezo_ds.forward.batch import Thought
from lezo_ds.tasks.base import EncodedExample, Example, Message, TokenIds, Turns
from lezo_ds.tasks.conversations import (
    ASSISTANT,
    OTHER_FIELDS,
    SYSTEM,
    SYSTEM_FIELDS,
    THOUGHT_KEYS,
    TOOLS,
    USER,
    find_tools,
    with_system,
)

Span = tuple[int, int]
"""(start, stop) of a turn of the assistant, in characters or tokens."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers (5.23) looks for it

_END_OF_THOUGHT = "</think>"
"""What ends a thought where the template drops thoughts, as DeepSeek's does."""

_NO_EXAMPLE = Example("", (), None)
_QUESTION = Message(USER, "A question")
_ANSWER = "31415926535897932"  # digits, which no filter of a template changes
_THOUGHT = "27182818284590452"
"""Turns by which the words around an answer and its thought are found."""


def ask_in_chat(tokenizer: PromptTokenizer, example: Example, system_prompt: str | None) -> Example:
    """Return an example whose candidates are answers in a conversation.

    The prompt is the text that the template writes before an answer to the user. It may have more
    than the words that open the turn, such as an empty thought.
    """
    turns = with_system((Message(USER, example.prompt),), system_prompt)
    before = _Template(tokenizer, example).before_answer(turns)
    candidates = tuple(_as_written(tokenizer, text.strip()) for text in example.candidates)
    return replace(example, prompt=before, candidates=candidates, is_written=True)


def lead_of_answers(tokenizer: PromptTokenizer, system_prompt: str | None) -> str | None:
    """Return what is between the words that ask for an answer and an answer in `ask_in_chat`.

    It is None if an answer follows what the template writes before one that is there.
    """
    turns = with_system((_QUESTION,), system_prompt)
    template = _Template(tokenizer)
    before = template.before_answer(turns)
    if before == template.around_answer(turns)[0]:
        return None
    return before.removeprefix(template.write(turns, opened=True))


@lru_cache(maxsize=10_000)  # a template writes a label alike after all questions
def _as_written(tokenizer: PromptTokenizer, answer: str) -> str:
    """Return an answer as the chat template writes it.

    Raises:
        UserError: the template changes what is around it.
    """
    template = _Template(tokenizer)
    before, after = template.around_answer((_QUESTION,))
    written = template.write((_QUESTION, Message(ASSISTANT, answer)))
    if not (written.startswith(before) and written.endswith(after)):
        raise UserError(
            f"the chat template of {tokenizer.backend.name_or_path} changes the answer {answer!r}",
            fix="give the label another text, or remove data.chat_template",
        )
    return written[len(before) : len(written) - len(after)]


def encode_question(tokenizer: PromptTokenizer, example: Example) -> TokenIds:
    """Return the token ids of a conversation for the model to continue by an answer.

    A last turn that is the right answer is left out. Any other last turn of the assistant is the
    start of the answer.

    Raises:
        UserError: the template cannot write the conversation, or leaves out a turn.
    """
    template = _Template(tokenizer, example)
    template.check_all_written()
    *before, last = example.messages
    if last.is_trained:
        question = template.write(before, opened=True)
    elif last.role == ASSISTANT:
        question = template.write_started()
    else:
        question = template.write(example.messages, opened=True)
    (ids,) = tokenizer.encode_written([question])
    return ids


def not_written(tokenizer: PromptTokenizer, example: Example, read: Collection[str]) -> set[str]:
    """Return what the record of an example has of a conversation, and the model does not read.

    Args:
        tokenizer: the model's tokenizer; with a chat template, if the example has messages.
        example: an example with a record.
        read: the fields that the task reads.
    """
    record = example.record
    turns = example.messages
    systems = [turn.content for turn in turns if turn.role == SYSTEM]
    unread = {
        name
        for name in (*SYSTEM_FIELDS, *OTHER_FIELDS)
        if record.get(name) and name not in read and record[name] not in systems
    }
    if not turns:
        if find_tools(record) and TOOLS not in read and not example.is_written:
            unread.add(TOOLS)
        return unread
    template = _Template(tokenizer, example)
    if systems:
        changed = [
            turn._replace(content=f"{turn.content}~") if turn.role == SYSTEM else turn
            for turn in turns
        ]
        if template.ignores(messages=changed):
            unread.add(SYSTEM)
    if find_tools(record) and template.ignores(record={}):
        unread.add(TOOLS)
    written = str(tokenizer.backend.chat_template)
    for key in {key for turn in turns for key in turn.others} - {"tool_calls"}:
        without_key = [_without(turn, key) for turn in turns]
        if key not in written or template.ignores(messages=without_key):
            unread.add(key)
    return unread


class TurnEnd(NamedTuple):
    """What the chat template writes after an answer: a special token, or a text, or neither."""

    ids: TokenIds = ()
    stops: tuple[str, ...] = ()


def end_of_turn(tokenizer: PromptTokenizer) -> TurnEnd:
    """Return what the chat template writes after an answer, up to the first special token.

    It may be another token than the EOS of the tokenizer, as in models of the Llama 3 family, or
    a text such as <|im_end|> where the tokenizer has no such token.
    """
    _, after = _Template(tokenizer).around_answer((_QUESTION,))
    ids = tokenizer.backend.encode(after.strip(), add_special_tokens=False)
    known = tokenizer.backend.added_tokens_decoder
    text = list(takewhile(lambda token: token not in known or not known[token].special, ids))
    if not text:
        return TurnEnd(ids=tuple(ids[:1]))
    return TurnEnd(stops=(tokenizer.decode(text).strip(),))


@cache
def _next_turn_end(tokenizer: PromptTokenizer) -> str:
    """Return the token that ends answers and begins the next turn, if nothing else ends them.

    GLM's templates write nothing after an answer. Its models write <|user|> themselves, which
    their generation_config.json has among the tokens that end answers.
    """
    template = _Template(tokenizer)
    _, after = template.around_answer((_QUESTION,))
    followed = template.write((_QUESTION, Message(ASSISTANT, _ANSWER), _QUESTION))
    _, _, next_turn = followed.rpartition(_ANSWER)
    first = tokenizer.backend.encode(next_turn, add_special_tokens=False)[:1]
    if after.strip() or not set(first) & set(tokenizer.end_ids):
        return ""
    return str(tokenizer.backend.convert_ids_to_tokens(first[0]))


@cache
def _greedy_tokens(tokenizer: PromptTokenizer) -> set[int]:
    """Return the tokens that take the white space after them, as Phi-3's <|assistant|>.

    Of an answer that begins with white space, such a token is no part.
    """
    added = tokenizer.backend.added_tokens_decoder
    return {token for token, kind in added.items() if kind.rstrip}


@cache
def find_thought(tokenizer: PromptTokenizer) -> Thought | None:
    """Return the marks of what a model thinks before it answers, as the chat template has them."""
    template = _Template(tokenizer)
    opened = template.write((_QUESTION,), opened=True)
    before, _ = template.around_answer((_QUESTION,))
    thoughts = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}  # either name
    with_thought, _ = template.around_answer((_QUESTION,), thoughts)
    head, thought, closing = with_thought.rpartition(_THOUGHT)
    if thought:
        closing = closing.strip()
        lead = before.removeprefix(opened).strip()
        if lead and closing.endswith(lead):  # an answer without a thought begins so, too
            closing = lead
        opening = head[num_alike(head, opened) :].strip() or closing.replace("/", "", 1)
    elif _END_OF_THOUGHT in str(tokenizer.backend.chat_template):
        closing = _END_OF_THOUGHT
        opening = closing.replace("/", "", 1)
    else:
        return None
    return Thought(opening, closing, is_open=opened.rstrip().endswith(opening))


def encode_conversation(
    tokenizer: PromptTokenizer,
    example: Example,
    max_length: int,
    *,
    keep_end: bool = False,
) -> EncodedExample:
    """Tokenize a conversation up to the end of its last turn of the assistant.

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        example: an example with messages.
        max_length: tokens of the longest sequence.
        keep_end: cut a sequence that is too long on the left, instead of at its end.

    Raises:
        UserError: the template cannot write the conversation, or leaves out a turn; or no turn of
            the assistant is within `max_length` tokens.
    """
    template = _Template(tokenizer, example)
    marks_turns = _MARKED.search(str(tokenizer.backend.chat_template))
    # Transformers has no mask for a text with marked control tokens.
    if marks_turns and not has_marks(template.conversation):
        ids, spans = template.marked_turns()
    else:
        ids, spans = template.measured_turns()
    template.check_all_written()
    end = max((stop for _, stop in spans), default=0)
    ids = ids[:end]
    num_cut = max(len(ids) - max_length, 0)
    if num_cut and keep_end:
        ids = list(tokenizer.cut_left(ids, max_length))
        # A token of the question is left after those that begin every sequence. An answer that
        # begins before it is not learned.
        first = tokenizer.num_begin_ids(ids) + 1
        moved = [(start - num_cut, stop - num_cut) for start, stop in spans]
        spans = [(start, stop) for start, stop in moved if start >= first]
    # The first token of a sequence has no logits that predict it.
    within = [(max(start, 1), min(stop, max_length)) for start, stop in spans]
    learned = [(start, stop) for start, stop in within if start < stop]
    if not learned:
        raise UserError(
            f"{example.where} leaves no turn of the assistant in data.max_length={max_length}",
            fix="raise data.max_length, or correct what the chat template marks",
        )
    _, end = learned[-1]
    num_learned = sum(stop - start for start, stop in learned)
    sequence = tuple(ids[:end])
    return EncodedExample(
        (sequence,), (num_learned,), example.label, truncated=num_cut > 0, spans=tuple(learned)
    )


class TurnsChangedError(UserError):
    """The chat template writes the first turns of a conversation in another way if more follow."""


def turns_apart(example: Example) -> list[Example]:
    """Return one example for each turn to learn, which ends with it: what the model reads then.

    The turns before it are context.
    """
    parts = []
    context: Turns = ()
    for turn in example.messages:
        if turn.is_trained:
            asked = context[-1].content if context else ""
            answer = (turn.content,)
            parts.append(
                replace(
                    example,
                    prompt=asked,
                    candidates=answer,
                    references=answer,
                    messages=(*context, turn),
                )
            )
        context = (*context, turn._replace(weight=0))
    return parts


@dataclass(frozen=True)
class _Template:
    """The chat template of a tokenizer, as it writes turns, by default those of one example."""

    tokenizer: PromptTokenizer
    example: Example = _NO_EXAMPLE

    @cached_property
    def conversation(self) -> str:
        """The text of all turns of the example.

        The last answer follows what the model reads when it is asked for it, even if the template
        writes other words before an answer that is there. A prompt that opens a thought is followed
        by that of the last turn, or an empty one: this is what the model writes when it answers.
        """
        *asked, last = self.example.messages
        written = self.write(self.example.messages)
        if last.role != ASSISTANT or not asked:
            return written
        opened = self.write(asked, opened=True)
        before, _ = self.around_answer(asked)
        if written.startswith(opened) or not written.startswith(before):
            return written
        thought = find_thought(self.tokenizer)
        if thought is None or not thought.is_open:
            return self.before_answer(asked) + written[len(before) :]
        thoughts, _, _ = last.content.rpartition(thought.closing)
        for key in THOUGHT_KEYS:
            thoughts = last.others.get(key) or thoughts
        text = thoughts.strip().removeprefix(thought.opening).strip()
        answer = written[len(before) :].lstrip("\n")
        return f"{opened}{text}\n{thought.closing}\n\n{answer}"

    def write(self, turns: Sequence[Message], *, opened: bool = False) -> str:
        """Return the text of turns; if `opened`, with the words that begin the assistant's turn."""
        return str(self._apply(turns, tokenize=False, add_generation_prompt=opened))

    def write_started(self) -> str:
        """Return the text of the example up to the last word of its last turn."""
        return str(self._apply(self.example.messages, tokenize=False, continue_final_message=True))

    def around_answer(
        self, turns: Sequence[Message], others: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, str]:
        """Return the texts that the template writes before and after an answer to `turns`.

        `others` are further keys of the answer's turn.
        """
        written = self.write((*turns, Message(ASSISTANT, _ANSWER, 1, others)))
        before, answer, after = written.rpartition(_ANSWER)
        if not answer:
            raise UserError(
                f"the chat template omits the answer to {self.example.where}",
                fix="correct the template, or use a model that was trained for conversations",
            )
        return before, after

    def before_answer(self, turns: Sequence[Message]) -> str:
        """Return what the model reads before an answer to `turns` that opens no thought.

        It may be more than the words that ask for an answer, such as an empty thought, or other
        words than those before an answer that is there: Mistral's templates write the system prompt
        only where none is, and Gemma 4's an empty thought.
        """
        opened = self.write(turns, opened=True)
        before, _ = self.around_answer(turns)
        thought = find_thought(self.tokenizer)
        if before.startswith(opened) or (thought is not None and thought.is_open):
            return before
        opened_alone = self.write((_QUESTION,), opened=True)
        before_alone, _ = self.around_answer((_QUESTION,))
        lead = before_alone[len(opened_alone) :] if before_alone.startswith(opened_alone) else ""
        return opened + lead

    def marked_turns(self) -> tuple[list[int], list[Span]]:
        """Return the token ids, and the spans (in tokens) of the trained turns that are marked."""
        written = self._apply(
            self.example.messages, return_dict=True, return_assistant_tokens_mask=True
        )
        # The mask [0, 1, 1, 0, 1] has the runs (1, 3) and (4, 5).
        marks = "".join(map(str, written["assistant_masks"]))
        spans = [run.span() for run in re.finditer("1+", marks)]
        turns = [turn for turn in self.example.messages if turn.role == ASSISTANT]
        if all(turn.is_trained for turn in turns):
            return written["input_ids"], spans
        # Spans and turns must correspond, or there is no telling which spans are context.
        if len(spans) != len(turns):
            raise UserError(
                f"the chat template marks {len(spans)} of {len(turns)} turns "
                f"in {self.example.where}",
                fix="remove the turns of weight 0, or correct the template",
            )
        trained = [span for span, turn in zip(spans, turns, strict=True) if turn.is_trained]
        return written["input_ids"], trained

    def measured_turns(self) -> tuple[list[int], list[Span]]:
        """Return the token ids, and the spans of the trained turns by their prefixes, in tokens."""
        ending = _next_turn_end(self.tokenizer)
        conversation = self.conversation + ending
        ids, bounds = self._tokens(conversation)
        greedy = _greedy_tokens(self.tokenizer)
        spans: list[Span] = []
        for number, turn in enumerate(self.example.messages):
            if not turn.is_trained:
                continue
            start = self._prefix_length(conversation, number, opened=True)
            stop = self._prefix_length(conversation, number + 1)
            if conversation.startswith(ending, stop):
                stop += len(ending)
            written = conversation[start:stop]
            # The model does not learn the white space before the next turn, unless nothing else
            # ends its turn: then the content is the last that stands before it.
            content = turn.content.rstrip()
            if not content or not written.rstrip().endswith(content):
                stop = start + len(written.rstrip())
            if not bounds:
                # The first token may begin before the turn, as a space that ends what asks for it.
                first = num_alike(self._tokens(conversation[:start])[0], ids)
                last = len(self._tokens(conversation[:stop])[0])
                inside: Sequence[int] = range(first, last)
            else:
                inside = [
                    token
                    for token, (begin, end) in enumerate(bounds)
                    if begin < stop and start < end
                    if begin >= start or ids[token] not in greedy
                ]
            if not inside:
                raise UserError(
                    f"the chat template omits turn {number + 1} of {self.example.where}",
                    fix="correct the record: some templates drop what stands between "
                    "<think> and </think>",
                )
            spans.append((inside[0], inside[-1] + 1))
        return ids, spans

    def _tokens(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the token ids of a text, and the characters of each token.

        These are [] if the text has marks, or if the tokenizer is one of Python, without a map.
        """
        if has_marks(text) or not self.tokenizer.backend.is_fast:
            (ids,) = self.tokenizer.encode_written([text])
            return list(ids), []
        encoded = self.tokenizer.backend(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], encoded["offset_mapping"]

    def check_all_written(self) -> None:
        """Refuse a turn that is left out without an error, as many templates do with unknown roles.

        Such a turn is changed. If the template ignores the change, it omits the turn.
        """
        turns = self.example.messages
        for number, turn in enumerate(turns):
            if "tool_calls" in turn.others:
                changed = _without(turn, "tool_calls")
                fix = "remove its calls, or write them as text"
            elif turn.role not in (SYSTEM, USER, ASSISTANT):
                changed = turn._replace(content=f"{turn.content}~")
                fix = f"use another role than {turn.role}"
            else:
                continue
            if self.ignores(messages=(*turns[:number], changed, *turns[number + 1 :])):
                raise UserError(
                    f"the chat template does not write turn {number + 1} of {self.example.where}",
                    fix=fix,
                )

    def ignores(self, **changed: Any) -> bool:
        """Return whether the template writes the example with other attributes as it writes it."""
        other = _Template(self.tokenizer, replace(self.example, **changed))
        with suppress(UserError):  # the template needs what was changed
            return other.conversation == self.conversation
        return False

    def _prefix_length(self, conversation: str, num_turns: int, *, opened: bool = False) -> int:
        """Return the length of the first turns as they are written, which begin `conversation`."""
        where = self.example.where
        if num_turns == len(self.example.messages):
            return len(conversation)
        if num_turns == 0:
            raise UserError(
                f"the assistant speaks first in {where}, so its start is unknown",
                fix="set data.system_prompt, or mark the assistant's turns in the template with "
                "{% generation %}",
            )
        prefix = self.write(self.example.messages[:num_turns], opened=opened)
        if not conversation.startswith(prefix):
            raise TurnsChangedError(
                f"the chat template changes the first turns of {where} if more turns follow",
                fix="correct the template",
            )
        return len(prefix)

    def _apply(self, turns: Sequence[Message], **options: bool) -> Any:
        """Return what apply_chat_template of the tokenizer returns for turns."""
        backend = self.tokenizer.backend
        if not backend.chat_template:
            raise UserError(
                f"the tokenizer of {backend.name_or_path} has no chat template",
                fix="use a model that was trained for conversations, "
                "or add its template as chat_template.jinja",
            )
        messages = [_as_dict(turn) for turn in turns]
        if _takes_parts_only(self.tokenizer):
            for turn in messages:
                turn["content"] = _as_parts(turn["content"])
        tools = find_tools(self.example.record)
        try:
            template = _compile_jinja_template(backend.get_chat_template(tools=tools))
            # Transformers (5.23) has no argument for the day that a template writes.
            template.environment.globals["strftime_now"] = self.tokenizer.today.strftime
            return backend.apply_chat_template(
                messages, tools, **dict(self.tokenizer.template_options), **options
            )
        except Exception as error:  # a template raises errors of its own and of Jinja
            reason = one_line(f"{type(error).__name__}: {error}")
            raise UserError(
                f"the chat template of {backend.name_or_path} cannot write "
                f"{self.example.where}: {reason}",
                fix="correct or remove the record, or remove data.system_prompt",
            ) from error


def _without(turn: Message, key: str) -> Message:
    """Return a turn without one of its other keys."""
    return turn._replace(others={name: turn.others[name] for name in turn.others if name != key})


@cache
def _takes_parts_only(tokenizer: PromptTokenizer) -> bool:
    """Return whether the chat template omits contents that are no lists of parts.

    Those of models for images do.
    """
    for content in (_ANSWER, _as_parts(_ANSWER)):
        with suppress(Exception):  # a template raises errors of its own and of Jinja
            turns = [{"role": USER, "content": content}]
            options = dict(tokenizer.template_options)
            written = tokenizer.backend.apply_chat_template(turns, tokenize=False, **options)
            if _ANSWER in written:
                return content is not _ANSWER
    return False


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a turn as templates read it.

    OpenAI's files have the arguments of a call as a string of JSON, and templates want an object.
    """
    turn = message.as_dict()
    for call in turn.get("tool_calls", ()):
        with suppress(KeyError, TypeError, ValueError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turn
