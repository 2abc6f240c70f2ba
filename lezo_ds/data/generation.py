"""Generated answers: greedy, at most 50 tokens, up to a newline or EOS (Malladi et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from lezo_ds import distributed
from lezo_ds.data.encoding import PromptTokenizer
from lezo_ds.model.batch import GenerationSettings, MicroBatch

MAX_NEW_TOKENS = 50


def prompt_batch(prompts: Sequence[tuple[int, ...]], settings: GenerationSettings) -> MicroBatch:
    """Lay out prompts for the model to continue.

    Args:
        prompts: token ids of R prompts, at least 1 token each.
        settings: how to continue them.

    Returns:
        A batch of weight R. Its rows are padded on the left, so that all prompts end in the same column.
        The attention mask is 0 on the padding. Models also derive the tokens' positions from it.
    """
    width = max(map(len, prompts))
    inputs = {
        "input_ids": [[settings.pad_id] * (width - len(ids)) + list(ids) for ids in prompts],
        "attention_mask": [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts],
    }
    tensors = {name: torch.tensor(rows) for name, rows in inputs.items()}
    return MicroBatch(tensors, len(prompts), generation=settings)


def runner(batch: MicroBatch, engine: Any) -> Callable[..., Any]:  # noqa: ANN401
    """Return the function that runs a batch, given the batch's inputs as keyword arguments.

    Args:
        batch: if it has `generation`, the function generates tokens; otherwise it is a forward pass.
        engine: DeepSpeed's engine, whose module is a model of transformers.
    """
    if batch.generation is None:
        return engine  # type: ignore[no-any-return]
    return partial(write_tokens, engine.module, batch.generation)


def write_tokens(model: Any, settings: GenerationSettings, **inputs: Tensor) -> Tensor:  # noqa: ANN401
    """Continue prompts greedily. A collective: every rank runs until the rows of all ranks have ended.

    Args:
        model: a causal language model of transformers. Its own generation settings are replaced.
        settings: the maximum length, and the tokens that end a row.
        inputs: the inputs of a `prompt_batch`.

    Returns:
        int64 [rows, at most max_new_tokens], the new tokens, with padding after the end of each row.
    """
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
    # A forward pass gathers ZeRO-3 shards from all ranks, so no rank may stop earlier than the others.
    tokens: Tensor = model.generate(**inputs, synced_gpus=distributed.world_size() > 1)
    return tokens[:, inputs["input_ids"].shape[1] :]


def read_answers(tokens: Tensor, settings: GenerationSettings, tokenizer: PromptTokenizer) -> list[str]:
    """Return the answers in new tokens [rows, n]: their text up to the first stop id or newline, stripped."""
    return [tokenizer.decode_answer(_up_to_stop(ids, settings.stop_ids)) for ids in tokens.tolist()]


def _up_to_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """Return the ids up to and including the first stop id.

    >>> _up_to_stop([5, 2, 1, 1], stop_ids=[2]), _up_to_stop([5, 6], stop_ids=[2])
    ([5, 2], [5, 6])
    """
    before = list(takewhile(lambda token: token not in stop_ids, ids))
    return list(ids[: len(before) + 1])  # the stop id stays, since one token may hold text and a newline
