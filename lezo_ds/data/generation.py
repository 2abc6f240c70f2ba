"""Generated answers: greedy or drawn, up to a maximum length, a text that ends them, or EOS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from lezo_ds import distributed
from lezo_ds.data.encoding import NEWLINE, PromptTokenizer
from lezo_ds.forward.batch import GenerationSettings, MicroBatch, Sampling

SAMPLE_KEYS = "sample_keys"
"""The input of a batch that holds the key of each row's random numbers, int64 [rows], if they are drawn."""
COMMON_IDS = "common_ids"
"""The input of a batch that holds the tokens with which all its prompts begin, int64 [probes, n]."""


def generation_settings(
    tokenizer: PromptTokenizer, max_new_tokens: int, stops: Sequence[str] = (NEWLINE,)
) -> GenerationSettings:
    # One ASCII character is always part of one token. A longer text may spread over several.
    spread = tuple(stop for stop in stops if len(stop) > 1 or not stop.isascii())

    def has_ended(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(ids)
        return any(stop in text for stop in spread)

    stop_ids = tokenizer.stop_ids(stops)
    ends = has_ended if spread else None
    return GenerationSettings(max_new_tokens, stop_ids, tokenizer.pad_id, tuple(stops), ends)


def prompt_batch(
    prompts: Sequence[tuple[int, ...]], settings: GenerationSettings, num_common: int = 0
) -> MicroBatch:
    """Lay out prompts, which all begin with the same `num_common` tokens, padded on the left."""
    width = max(map(len, prompts))
    inputs = {
        "input_ids": [[settings.pad_id] * (width - len(ids)) + list(ids) for ids in prompts],
        "attention_mask": [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts],
    }
    inputs |= {COMMON_IDS: [list(prompts[0][:num_common])]} if num_common else {}
    tensors = {name: torch.tensor(rows) for name, rows in inputs.items()}
    return MicroBatch(tensors, len(prompts), generation=settings)


def runner(batch: MicroBatch, engine: Any) -> Callable[..., Any]:
    """Return the function that runs the inputs of a batch: generation, or DeepSpeed's forward pass."""
    if batch.generation is None:
        return engine  # type: ignore[no-any-return]
    return partial(write_tokens, engine.module, batch.generation)


def write_tokens(
    model: Any,
    settings: GenerationSettings,
    *,
    sample_keys: Tensor | None = None,
    common_ids: Tensor | None = None,
    **inputs: Any,
) -> Tensor:
    """Return new tokens, int64 [rows, at most max_new_tokens], with padding after the end of each row.

    A collective: all ranks run until all their rows have ended.
    """
    width = inputs["input_ids"].shape[1]
    # We replace the model's generation_config instead of passing ours to generate(): transformers fills
    # every option that an argument leaves open (penalties, sampling) from the model's own configuration.
    model.generation_config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(settings.stop_ids),
        pad_token_id=settings.pad_id,
        do_sample=False,
        num_beams=1,
        use_cache=True,
    )
    cache = DynamicCache(config=model.config)
    # Elsewhere, distances may count the padding: in sliding windows, or in biases of attention.
    rotates = getattr(model.config.get_text_config(), "rope_parameters", None) is not None
    if common_ids is not None and rotates and {*map(type, cache.layers)} == {DynamicLayer}:
        _read_common(model, cache, common_ids, inputs)
    ends = StoppingCriteriaList()
    if (
        has_ended := settings.has_ended
    ) is not None:  # transformers' stop strings also look at the prompt

        def rows_ended(ids: Tensor, *_: object, **__: object) -> Tensor:
            return torch.tensor(
                [has_ended(new) for new in ids[:, width:].tolist()], device=ids.device
            )

        ends.append(rows_ended)
    tokens: Tensor = model.generate(
        **inputs,
        # A forward pass gathers ZeRO-3 shards from all ranks, so no rank may stop earlier than the others.
        synced_gpus=distributed.world_size() > 1,
        logits_processor=_processors(settings.sampling, sample_keys, width),
        stopping_criteria=ends,
    )
    return tokens[:, width:]


@torch.no_grad()
def _read_common(
    model: Any, cache: DynamicCache, common_ids: Tensor, inputs: dict[str, Any]
) -> None:
    """Run once what all prompts begin with, and let the inputs go on from it: their padding is behind it."""
    (copies, length), (rows, width) = common_ids.shape, inputs["input_ids"].shape
    model(input_ids=common_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(rows // copies)
    columns = torch.arange(width, device=common_ids.device)
    begins = width + length - inputs["attention_mask"].sum(dim=1, keepdim=True)
    inputs["attention_mask"] = ((columns < length) | (columns >= begins)).long()
    common = common_ids.repeat_interleave(rows // copies, dim=0)
    inputs["input_ids"] = torch.cat([common, inputs["input_ids"][:, length:]], dim=1)
    inputs["past_key_values"] = cache


def _processors(sampling: Sampling | None, keys: Tensor | None, width: int) -> LogitsProcessorList:
    """Return what changes the logits, so that the largest is the token to write.

    With Gumbel noise, the index of the largest sum is a sample of the softmax. Probes share the noise, so
    that their losses differ less by chance (Maddison et al. 2014, "A* sampling").
    """
    if sampling is None:
        return LogitsProcessorList()
    assert keys is not None, "a batch whose answers are drawn has keys"
    numbers: list[int] = keys.tolist()

    def add_noise(input_ids: Tensor, scores: Tensor) -> Tensor:
        position, count = input_ids.shape[1] - width, scores.shape[1]
        drawn = {key: uniforms(key, position, count) for key in set(numbers)}
        uniform = torch.from_numpy(np.stack([drawn[key] for key in numbers])).to(scores.device)
        return scores - torch.log(-torch.log(uniform))

    top_p = [] if sampling.top_p is None else [TopPLogitsWarper(sampling.top_p)]
    return LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature), *top_p, add_noise])


def uniforms(key: int, position: int, count: int) -> np.ndarray:
    """Return float32 [count], multiples of 2**-23 plus 2**-24, for a token of the answer of a key."""
    # NumPy guarantees the raw words of Philox4x64 across versions (see lezo_ds/data/batches.py).
    words = np.random.Philox(key=key + (position << 64)).random_raw(-(-count // 2))
    halves = words.astype("<u8").view("<u4")[:count]
    return ((halves >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def read_answers(
    tokens: Tensor, settings: GenerationSettings, tokenizer: PromptTokenizer
) -> list[str]:
    """Return the answers in new tokens [rows, n]: their text up to the first stop, stripped."""
    answers = []
    for ids in tokens.tolist():
        before = list(takewhile(lambda token: token not in settings.stop_ids, ids))
        text = tokenizer.decode(ids[: len(before) + 1])  # one token may hold text and a newline
        stops = [place for stop in settings.stops if (place := text.find(stop)) >= 0]
        answers.append(text[: min(stops, default=len(text))].strip())
    return answers
