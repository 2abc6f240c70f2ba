"""Talk to a model, for lezo-ds chat.

The tokenizer's chat template writes the whole conversation anew for each answer. Rank 0 reads the
lines of the user and prints the answers; all ranks run the model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import TextStreamer

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import RunConfig
from lezo_ds.data.chat import encode_question, end_of_turn, find_thought
from lezo_ds.data.control_tokens import ControlTokens
from lezo_ds.data.encoding import (
    PromptTokenizer,
    cut_prompts,
    load_tokenizer,
    prompt_room,
    refuse_unknown,
)
from lezo_ds.data.generation import (
    after_thought,
    generation_settings,
    prompt_batch,
    read_answers,
)
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import Prompts, Thought
from lezo_ds.runs.opening import Opened
from lezo_ds.tasks.base import Example, Message, TokenIds
from lezo_ds.tasks.conversations import ASSISTANT, USER, with_system
from lezo_ds.zo.keys import sample_key

logger = logging.getLogger(__name__)

CHAT_KEYS = (
    "data.max_length=4096",
    "generation.stop=[]",
    "generation.max_new_tokens=512",
    "generation.temperature=0",
    "generation.top_p=null",
)
"""How answers are written unless the command line says otherwise, whatever the model's task was."""


def chat(opened: Opened) -> None:
    """Answer the lines of the input, until one is empty or there are no more. A collective.

    Args:
        opened: the model. Of the keys by which it reads, `generation`, `data.system_prompt` and
            `data.max_length` count.

    Raises:
        UserError: the model has no chat template.
    """
    config = opened.fitted()
    data = config.data
    tokenizer = load_tokenizer(
        str(resolve_model(config.model.path)), data.date, data.chat_template_kwargs
    )
    settings = generation_settings(tokenizer, config.generation, *end_of_turn(tokenizer))
    settings = replace(settings, thought=find_thought(tokenizer))
    prompt_room(data.max_length, settings.max_new_tokens)  # before weights are loaded
    control_tokens = ControlTokens(tokenizer.backend, in_chat=True)
    engine = opened.load_engine()
    logger.info("Write a line to the model. An empty line or Ctrl-D ends the chat.")
    turns: list[Message] = []
    for line in iter(lambda: distributed.on_rank_zero(_read_line), ""):
        turns.append(Message(USER, control_tokens.mark(line)))
        ids = _encode_last_turns(config, tokenizer, turns)
        refuse_unknown(tokenizer, [ids], engine.module.config)
        if distributed.rank() == 0:
            settings = replace(settings, streamer=_AnswerStreamer(tokenizer, settings.thought))
        batch = prompt_batch([ids], settings)
        if config.generation.temperature > 0:
            key = sample_key(config.seed, len(turns), 0, 0)
            prompts = Prompts(settings, sample_keys=torch.tensor([key]))
            batch = replace(batch, prompts=prompts)
        (answer,) = read_answers(engine.forward(batch), settings, tokenizer)
        turns.append(Message(ASSISTANT, control_tokens.mark(answer)))


class _AnswerStreamer:
    """A streamer of transformers that prints an answer word by word, after its thought.

    If the model writes thoughts, an answer without one is known and printed only at its end.
    """

    def __init__(self, tokenizer: PromptTokenizer, thought: Thought | None) -> None:
        self._printer = TextStreamer(tokenizer.backend, skip_prompt=True, skip_special_tokens=True)
        self._tokenizer = tokenizer
        self._thought = thought
        self._has_prompt = False
        self._held: list[int] = []
        self._is_answering = False

    def put(self, value: torch.Tensor) -> None:
        """Take the tokens of the prompt, and then each new token."""
        if self._thought is None or self._is_answering or not self._has_prompt:
            self._has_prompt = True
            self._printer.put(value)
            return
        self._held += value.tolist()
        written = self._tokenizer.backend.decode(self._held)
        self._is_answering = self._thought.closing in written

    def end(self) -> None:
        """Print what is left of an answer."""
        if self._thought is not None and not self._is_answering:
            ids = after_thought(self._held, self._thought, self._tokenizer)
            self._printer.on_finalized_text(self._tokenizer.decode(ids))
        self._printer.end()


def _read_line() -> str:
    """Return the next line of the user, or "" at the end of the input."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
        line.encode()  # fails on bytes that are not UTF-8, which Python reads as lone surrogates
    except (EOFError, KeyboardInterrupt):
        return ""
    except UnicodeError as error:
        raise UserError(
            "a line of the input is not UTF-8", fix="convert it: iconv -f ENCODING -t UTF-8"
        ) from error
    return line


def _encode_last_turns(
    config: RunConfig, tokenizer: PromptTokenizer, turns: Sequence[Message]
) -> TokenIds:
    """Return the token ids of the last turns that fit, after the system prompt.

    The line of the user is cut on the left if it does not fit alone.
    """
    max_length = config.data.max_length
    max_new_tokens = config.generation.max_new_tokens
    for first in range(0, len(turns), 2):
        messages = with_system(tuple(turns[first:]), config.data.system_prompt)
        ids = encode_question(tokenizer, Example("", (), None, 0, messages=messages))
        if len(ids) <= max_length - max_new_tokens:
            break
    if first > 0:
        logger.warning("The first %d turns do not fit any more and are left out.", first)
    (fitting,) = cut_prompts(tokenizer, [ids], max_length, max_new_tokens)
    return fitting
