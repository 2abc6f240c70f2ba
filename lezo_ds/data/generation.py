"""Generated answers: greedy or drawn, up to a maximum length, a text that ends them, or EOS.

Prompts are padded on the left, so that the new tokens of all rows begin in the same column. Models
whose answers would depend on padding continue the prompts of each length by themselves. A row that
has ended is filled with padding until the last row has:

    input_ids   [rows, width]      new tokens [rows, <= max_new_tokens]
    pad pad <s>  a   b             x   y  </s> pad pad
    <s>  c   d   e   f             z   z   z   z   x          attention_mask is 0 at the first pads

In a pass at k probes the rows are there k times, [rows at probe 0; rows at probe 1; ...], and each
copy is continued by the weights of its probe.

If all prompts begin with the same tokens (instructions, demonstrations), and the
model's positions allow it, these run once for each probe (prompt_reading.py).

Drawn tokens need no random state. The noise of a row is a function of the row's key (`Prompts`)
and of the position of the token, so a drawn answer depends on nothing else in its batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from lezo_ds import distributed
from lezo_ds.config import GenerationConfig
from lezo_ds.data.chat import TurnEnd, end_of_turn, without_thought
from lezo_ds.data.encode import NEWLINE, PromptTokenizer
from lezo_ds.data.examples import TokenIds
from lezo_ds.data.prompt_reading import can_read_apart, read_prompts
from lezo_ds.forward.answer_cache import (
    answer_cache,
    cache_name,
    keeps_states_apart,
    takes_padding,
)
from lezo_ds.forward.batch import GenerationSettings, MicroBatch, Prompts, Tensors
from lezo_ds.forward.rope import may_outgrow

_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_BLANK_LINES = re.compile(r"^(?:[^\S\n]*\n)+")
_SINGLE_SPACE = re.compile(r"^ (?!\s)")


def generation_settings(
    tokenizer: PromptTokenizer,
    config: GenerationConfig,
    *,
    in_chat: bool,
) -> GenerationSettings:
    """Return how answers are written, which end at EOS, at a text of the recipe, or with a turn.

    Args:
        tokenizer: of the model.
        config: the section generation of the recipe. Without a stop, an answer ends at the first
            newline, or in a chat at the end of its turn.
        in_chat: whether answers are turns of a chat, whose end ends them.
    """
    end = end_of_turn(tokenizer) if in_chat else TurnEnd()
    stops = tuple(config.stop or ())
    if config.stop is None and not in_chat:
        stops = (NEWLINE,)
    stops += end.stops
    # A stop has at most one token for each of its bytes.
    num_last = max((len(stop.encode()) for stop in stops), default=0)

    def has_ended(ids: Sequence[int]) -> bool:
        written = tokenizer.decode(ids[-num_last:])
        # Tokens of single bytes may be cut within a character, which can hide a stop. Bytes may
        # also be a stop by themselves, and part of no character where more of them are decoded.
        if _HALF_CHARACTER in written or any(stop in written for stop in stops):
            written = tokenizer.decode(ids)
        return any(stop in written for stop in stops)

    # One ASCII character is always part of one token. Any other stop may spread over several.
    may_spread = any(len(stop) > 1 or not stop.isascii() for stop in stops)
    return GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        stop_ids=tuple(sorted({*tokenizer.stop_ids(stops), *end.ids})),
        pad_id=tokenizer.pad_id,
        stops=stops,
        mark=end.mark,
        has_ended=has_ended if may_spread else None,
        temperature=config.temperature,
        top_p=config.top_p,
    )


def prompt_batch(
    prompts: Sequence[TokenIds],
    settings: GenerationSettings,
    num_common: int = 0,
) -> MicroBatch:
    """Lay out prompts to be continued, padded on the left (see the module's docstring).

    Args:
        prompts: token ids.
        settings: how they are continued.
        num_common: number of tokens with which all prompts begin. Each prompt has at least one
            more.

    Returns:
        A batch whose weight is the number of prompts, with the inputs "input_ids" and
        "attention_mask", int64 [prompts, width].
    """
    rows = [torch.tensor(ids, dtype=torch.int64) for ids in prompts]
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    inputs = {
        "input_ids": pad_left(rows, padding_value=settings.pad_id),
        "attention_mask": pad_left(list(map(torch.ones_like, rows))),
    }
    common_ids = torch.tensor([prompts[0][:num_common]]) if num_common else None
    return MicroBatch(inputs, len(prompts), prompts=Prompts(settings, common_ids=common_ids))


def generate(model: Any, batch: MicroBatch, **repeated: Tensor) -> Tensor:
    """Continue the prompts of a batch.

    If a forward pass of the model exchanges messages with other ranks, this is a collective, and
    all ranks run until all their rows have ended.

    Args:
        model: a causal language model of transformers. Its generation_config is replaced.
        batch: a `prompt_batch`. If its answers are drawn, it has keys.
        repeated: the inputs of the batch, if they are there several times, once for each probe.

    Returns:
        New tokens, int64 [rows, at most max_new_tokens], with padding after the end of each row.
    """
    assert batch.prompts is not None, "a batch of prompts has settings of generation"
    inputs: dict[str, Tensor] = {**batch.inputs, **repeated}
    num_copies = len(inputs["input_ids"]) // len(batch.inputs["input_ids"])
    prompts = batch.prompts.repeated(num_copies)
    if takes_padding(model):
        return _continue(model, prompts, inputs)
    return _continue_by_length(model, replace(prompts, common_ids=None), inputs)


def _continue_by_length(model: Any, prompts: Prompts, inputs: Tensors) -> Tensor:
    """Continue the prompts of each length by themselves, without padding; see `generate`."""
    lengths = inputs["attention_mask"].sum(dim=1)
    width = inputs["attention_mask"].shape[1]
    distinct = sorted(set(lengths.tolist()))
    num_rounds = len(distinct)
    if runs_in_step(model):
        num_rounds = max(distributed.gather_objects(num_rounds))
    settings = prompts.settings
    tokens = lengths.new_full((len(lengths), settings.max_new_tokens), settings.pad_id)
    longest = 0
    for index in range(num_rounds):
        # A rank with fewer lengths than others repeats its last one.
        length = distinct[min(index, len(distinct) - 1)]
        rows = (lengths == length).nonzero().squeeze(1)
        first = width - length
        of_length = {name: value[rows, first:] for name, value in inputs.items()}
        keys = prompts.sample_keys
        own = replace(prompts, sample_keys=None if keys is None else keys[rows.cpu()])
        written = _continue(model, own, of_length)
        longest = max(longest, written.shape[1])
        tokens[rows, : written.shape[1]] = written
    return tokens[:, :longest]


def _continue(model: Any, prompts: Prompts, tensors: Tensors) -> Tensor:
    """Continue prompts, which are padded to the same length; see `generate`."""
    inputs: dict[str, Any] = dict(tensors)
    settings = prompts.settings
    width = inputs["input_ids"].shape[1]
    outgrows = may_outgrow(model, inputs["attention_mask"], settings.max_new_tokens)
    has_cache = not (outgrows or keeps_states_apart(model))
    # The model's generation_config is replaced, because transformers (5.23) fills every option that
    # an argument of generate() leaves open (penalties, sampling) from the model's own.
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(settings.stop_ids),
        pad_token_id=settings.pad_id,
        do_sample=False,
        num_beams=1,
        use_cache=has_cache,
    )
    cache = answer_cache(model, settings.max_new_tokens) if has_cache else None
    if prompts.common_ids is not None:
        reads_apart = cache is not None and can_read_apart(model, width)
        if runs_in_step(model):  # the prompts of another rank may be too long for it
            reads_apart = all(distributed.gather_objects(reads_apart))
        if reads_apart:
            common_ids = prompts.common_ids.to(inputs["input_ids"].device)
            inputs = read_prompts(model, common_ids, cache=cache, **inputs)
    if cache is not None:
        inputs[cache_name(model)] = cache
    criteria = StoppingCriteriaList()
    has_ended = settings.has_ended
    if has_ended is not None:

        def rows_ended(ids: Tensor, *_: object, **__: object) -> Tensor:
            ended = [has_ended(new) for new in ids[:, width:].tolist()]
            return torch.tensor(ended, device=ids.device)

        # The stop strings of transformers would also be found in the prompt.
        criteria.append(rows_ended)
    tokens: Tensor = model.generate(
        **inputs,
        synced_gpus=runs_in_step(model),
        logits_processor=_logits_processors(prompts, width),
        stopping_criteria=criteria,
        streamer=settings.streamer,
    )
    return tokens[:, width:]


def runs_in_step(model: Any) -> bool:
    """Return whether a forward pass exchanges messages, so that no rank may stop before the others.

    The attributes are DeepSpeed's (docs/deepspeed.md): a parameter that ZeRO-3 shards has the
    number of ranks that share it, and a layer of AutoTP the number of ranks that split it.
    """
    for parameter in model.parameters():
        if getattr(parameter, "ds_zero_partition_world_size", 1) > 1:
            return True
    return any(getattr(module, "tp_world_size", 1) > 1 for module in model.modules())


def _logits_processors(prompts: Prompts, width: int) -> LogitsProcessorList:
    """Return what changes logits [rows, vocabulary], so that the largest is the token to write.

    Tokens are drawn if rows have keys: Gumbel noise is added to the logits, and the index of the
    largest sum is a sample of the softmax (Maddison et al. 2014, "A* sampling"). Probes share the
    keys and so the noise, so that their losses differ less by chance.
    """
    processors = LogitsProcessorList()
    if prompts.sample_keys is None:
        return processors
    unique_keys, rows = torch.unique(prompts.sample_keys, return_inverse=True)

    def add_noise(input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - width
        # The words of the whole vocabulary take 0.15 ms a key, and a jump to one word 2
        # microseconds. So drawing only the tokens that top_p leaves would seldom be faster.
        size = scores.shape[1]
        drawn = [uniforms(key, position, size) for key in unique_keys.tolist()]
        uniform = torch.from_numpy(np.stack(drawn)).to(scores.device)
        noise = torch.log(-torch.log(uniform))  # minus Gumbel noise, [keys, vocabulary]
        return scores - noise[rows.to(scores.device)]

    processors.append(TemperatureLogitsWarper(prompts.settings.temperature))
    if prompts.settings.top_p is not None:
        processors.append(TopPLogitsWarper(prompts.settings.top_p))
    processors.append(add_noise)
    return processors


def uniforms(key: int, position: int, count: int) -> np.ndarray:
    """Return random numbers between 0 and 1 for one token of an answer, float32 [count].

    They are multiples of 2**-23 plus 2**-24, so that their logarithms are finite.

    Args:
        key: key of the answer.
        position: number of the token in the answer, from 0.
        count: size of the vocabulary.
    """
    # NumPy guarantees the raw words of Philox4x64 across versions (see lezo_ds/data/batches.py).
    num_words = -(-count // 2)
    words = np.random.Philox(key=key + (position << 64)).random_raw(num_words)
    halves = words.astype("<u8").view("<u4")[:count]
    integers = (halves >> 9).astype(np.float32)  # below 2**23
    return (integers + np.float32(0.5)) * np.float32(2.0**-23)


def ended_answers(
    tokens: Tensor, settings: GenerationSettings, tokenizer: PromptTokenizer
) -> list[bool]:
    """Return whether each answer in new tokens [rows, n] ended before it had the most tokens."""
    ended = []
    for ids in tokens.tolist():
        has_stop_id = any(token in settings.stop_ids for token in ids)
        written = "" if has_stop_id else tokenizer.decode(ids)
        ended.append(has_stop_id or any(stop in written for stop in settings.stops))
    return ended


def read_answers(
    tokens: Tensor,
    settings: GenerationSettings,
    tokenizer: PromptTokenizer,
    *,
    as_written: bool = False,
) -> list[str]:
    """Return the answers in new tokens [rows, n]: their text up to the first stop.

    Unless `as_written`, answers are `tidy`, and lack what the model thinks before it answers.
    """
    answers = []
    for new_tokens in tokens.tolist():
        # The stop token itself counts, because it may hold text before a newline.
        ids = up_to_stop(new_tokens, settings)
        if not as_written:
            ids = without_thought(ids, tokenizer, settings.mark)
        written = tokenizer.decode(ids)
        if not as_written:  # the mark of its end may be several tokens
            _, _, written = written.rpartition(settings.mark)
        found = [written.find(stop) for stop in settings.stops if stop in written]
        answer = written[: min(found, default=None)]
        answers.append(answer if as_written else tidy(answer))
    return answers


def tidy(answer: str) -> str:
    """Return an answer without white space after it, or blank lines or a single space before it.

    The first line of code keeps its indentation.
    """
    return _SINGLE_SPACE.sub("", _BLANK_LINES.sub("", answer.rstrip()))


def up_to_stop(tokens: Sequence[int], settings: GenerationSettings) -> Sequence[int]:
    """Return the new tokens of an answer with the first that ends it. What follows is padding."""
    for place, token in enumerate(tokens, start=1):
        if token in settings.stop_ids:
            return tokens[:place]
    return tokens
