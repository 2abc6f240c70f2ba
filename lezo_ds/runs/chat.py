"""Talk to a model, for lezo-ds chat.

The tokenizer's chat template writes the whole conversation anew for each answer. Rank 0 reads the
lines of the user and prints the answers, word by word; all ranks run the model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import TextStreamer

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, num_positions, resolve_model
from lezo_ds.config import RunConfig
from lezo_ds.data.chat import encode_question
from lezo_ds.data.encode import PromptTokenizer, load_tokenizer, prompt_room, refuse_unknown
from lezo_ds.data.examples import ASSISTANT, Example, TokenIds, Turn
from lezo_ds.data.generation import generation_settings, prompt_batch, read_answers
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import Prompts
from lezo_ds.runs.opening import Opened
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
        UserError: the model has no chat template, or a line is too long.
    """
    config = opened.config
    directory = resolve_model(config.model.path)
    most = num_positions(load_model_config(directory)) or config.data.max_length
    config = config.with_section("data", max_length=min(config.data.max_length, most))
    data = config.data
    tokenizer = load_tokenizer(str(directory), data.date, data.chat_template_kwargs)
    settings = generation_settings(tokenizer, config.generation, in_chat=True)
    prompt_room(data.max_length, settings.max_new_tokens)  # before weights are loaded
    engine = opened.load_engine()
    logger.info("Write a line to the model. An empty line or Ctrl-D ends the chat.")
    turns: list[Turn] = []
    for line in iter(lambda: distributed.on_rank_zero(_read_line), ""):
        turns.append(_turn(tokenizer, "user", line))
        ids = _encode_last_turns(config, tokenizer, turns)
        refuse_unknown(tokenizer, max(ids), engine.module.config)
        if distributed.rank() == 0:
            streamer = TextStreamer(tokenizer.backend, skip_prompt=True, skip_special_tokens=True)
            settings = replace(settings, streamer=streamer)
        batch = prompt_batch([ids], settings)
        if config.generation.temperature > 0:
            key = sample_key(config.seed, len(turns), 0, 0)
            prompts = Prompts(settings, sample_keys=torch.tensor([key]))
            batch = replace(batch, prompts=prompts)
        (answer,) = read_answers(engine.forward(batch), settings, tokenizer)
        turns.append(_turn(tokenizer, ASSISTANT, answer))


def _turn(tokenizer: PromptTokenizer, role: str, text: str) -> Turn:
    """Return a turn. The text of a control token in it stays text."""
    return {"role": role, "content": tokenizer.marked(text)}


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
    config: RunConfig, tokenizer: PromptTokenizer, turns: Sequence[Turn]
) -> TokenIds:
    """Return the token ids of the last turns that fit, after the system prompt.

    Raises:
        UserError: the last turn does not fit alone.
    """
    system: list[Turn] = []
    if config.data.system_prompt is not None:
        system = [{"role": "system", "content": config.data.system_prompt}]
    for first in range(0, len(turns), 2):
        example = Example("", (), None, messages=(*system, *turns[first:]))
        try:
            ids = encode_question(tokenizer, config, example)
        except UserError:
            if first + 1 == len(turns):
                raise
            continue
        if first > 0:
            logger.warning("The first %d turns do not fit any more and are left out.", first)
        return ids
    raise AssertionError("a conversation has a turn")
