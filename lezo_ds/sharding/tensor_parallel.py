"""Tensor parallelism: shards that stay where they are, while activations travel.

DeepSpeed's AutoTP splits the linear layers of the blocks. Each rank multiplies by its own part:

    LinearLayer (q, k, v, fc1)                   LinearAllreduce (out_proj, fc2)
    rank r has some of the output features       rank r has some of the input features
    no message                                   one all-reduce sums the products of all ranks

This file also splits the rows of the input embedding and of the output head, if both are plain:
the vocabulary. Each rank has all of the rest, such as norms and positions.

docs/deepspeed.md lists the facts about DeepSpeed that this relies on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import (
    GatherFromTensorParallelRegion,
    LinearAllreduce,
    LinearLayer,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from deepspeed.utils import groups
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lezo_ds.distributed import device, lost_rank, out_of_memory
from lezo_ds.errors import UserError, cut, one_line
from lezo_ds.sharding.parameters import own_name
from lezo_ds.sharding.quantization import GROUP, full_shape, quantization_of
from lezo_ds.sharding.shards import Split
from lezo_ds.sharding.surgery import put_parameters, start_engine

EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding)
LOOKUP_FORWARDS = (nn.Embedding.forward, VocabParallelEmbedding.forward)
"""Forward passes that read rows of a table and do nothing else."""

USE_ZERO3 = "remove tensor_parallel, which shards the weights by ZeRO-3 instead"


def shard_model(
    model: nn.Module, blocks_path: str, ds_config: Mapping[str, Any], restore: Callable[[], None]
) -> tuple[Any, dict[nn.Parameter, Split]]:
    """Split a model in place. A collective.

    Args:
        model: a causal language model on the meta device.
        blocks_path: name of the list of its transformer blocks.
        ds_config: with `tensor_parallel.autotp_size`, the number of ranks that split each weight.
        restore: puts back what was hidden from DeepSpeed, such as an adapter. It is called when
            the weights are split, before they have memory, and may still change their shapes.

    Returns:
        DeepSpeed's engine, which runs the model, and how each parameter is split. The parameters
        are on this rank's device, and their values are undefined until they are loaded.

    Raises:
        UserError: AutoTP cannot split this model over so many ranks, changes what it computes, or
            splits a group of quantized elements. The same on all ranks.
    """
    section = ds_config["tensor_parallel"]
    config: Any = model.config
    decoder = config.get_text_config()
    _refuse_uneven_heads(decoder, section["autotp_size"])
    # AutoTP splits such models without a word, and other logits come out.
    is_sparse = any(getattr(decoder, "activation_sparsity_pattern", None) or ())
    has_norms_of_heads = decoder.model_type == "stablelm" and decoder.qk_layernorm
    if is_sparse or has_norms_of_heads:
        raise UserError(
            f"{type(model).__name__} would compute something else after AutoTP has split it: it "
            "has a norm for each head, or activations that depend on all features of a layer",
            fix=USE_ZERO3,
        )
    inside = set(model.get_submodule(blocks_path).modules())
    outside = {
        name: module
        for name, module in model.named_modules()
        if module._parameters and module not in inside
    }
    shapes = {parameter: parameter.shape for parameter in model.parameters()}
    for parameter in model.parameters():
        # AutoTP would sum the gradients of Qwen3's norms, and frozen ones have none.
        parameter._ds_grad_allreduce_registered = True  # type: ignore[attr-defined]
    splits: dict[nn.Parameter, Split] = {}

    def materialize(*_: object, **__: object) -> nn.Module:
        _put_back(model, outside, shapes)
        restore()
        _split_vocabulary(model)
        splits.update(_give_memory(model))
        return model

    # DeepSpeed would split the vocabulary of models with a tied head only.
    only_blocks = {**ds_config, "tensor_parallel": {**section, "vocab_parallel_lm_head": False}}
    # DeepSpeed moves a model to its device when it has split it, and calls nothing in between.
    model.to = materialize  # type: ignore[method-assign]
    try:
        engine = start_engine(model, only_blocks)
    except (AssertionError, ValueError, NotImplementedError) as error:  # how AutoTP refuses a model
        reason = cut(one_line(error), 200)
        raise UserError(
            f"AutoTP does not support {type(model).__name__}: {reason}", fix=USE_ZERO3
        ) from error
    finally:
        del model.to
        groups.mpu = None  # or later engines of this process would take their groups from this one
    # It broadcasts the first batch to compare it. The ranks compare their batches at every step.
    engine.first_dataloader_check.remove()
    check_that_it_runs(model)
    return engine, splits


@torch.no_grad()
def check_that_it_runs(model: nn.Module) -> None:
    """Run two tokens, because AutoTP splits some models whose number of heads it does not change.

    Falcon and Bloom keep that number in an attribute that AutoTP does not change.

    Raises:
        UserError: it does not run. A lack of memory, a lost rank or an error of the GPU has another
            cause, and passes through.
    """
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device()))
    except RuntimeError as error:
        if lost_rank(error) or out_of_memory(error) or "CUDA error" in str(error):
            raise
        reason = cut(str(error), 100)
        raise UserError(
            f"{type(model).__name__} does not run after AutoTP has split it: {reason}",
            fix=USE_ZERO3,
        ) from error


def _refuse_uneven_heads(config: Any, size: int) -> None:
    num_heads = getattr(config, "num_attention_heads", 0)  # Mamba has none
    num_shared = getattr(config, "num_key_value_heads", None) or num_heads
    most = math.gcd(num_heads, num_shared)
    if most == 0 or most % size:
        raise UserError(
            f"tensor_parallel={size} cannot split {num_heads} heads and {num_shared} of keys and "
            "values evenly",
            fix=f"use a divisor of {most}, or {USE_ZERO3}" if most > 1 else USE_ZERO3,
        )


def _put_back(
    model: nn.Module,
    outside: Mapping[str, nn.Module],
    shapes: Mapping[nn.Parameter, torch.Size],
) -> None:
    """Undo what AutoTP did to modules outside the blocks, of which it splits a different set each.

    It replaces such a module, cuts the data of its parameters, and notes on them how.
    """
    for name, module in outside.items():
        model.set_submodule(name, module)
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.new_empty(shapes[parameter])
                vars(parameter).pop(DS_AUTOTP_UC_META, None)


def _give_memory(model: nn.Module) -> dict[nn.Parameter, Split]:
    """Put each parameter and buffer on this rank's device; return how the parameters are split."""
    group = groups.get_tensor_model_parallel_group()
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    splits = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty_like(parameter, device=device())
        replacement = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        replacements[parameter] = replacement
        splits[replacement] = _split_of(name, parameter, group)
    put_parameters(model, replacements)
    return splits


def _split_of(name: str, parameter: nn.Parameter, group: Any) -> Split:
    """Return how a parameter is split, from the description that DeepSpeed attaches to it."""
    description = getattr(parameter, DS_AUTOTP_UC_META, None)
    if description is None or description["conversion"].get("replicated"):
        return Split(full_shape(parameter), [], group)
    stored_map = description["conversion"].get("affine_map")
    if stored_map:
        affine_map = ParamAffineMap.from_dict(stored_map)
        pieces = [piece for of_rank in affine_map.pieces_by_rank.values() for piece in of_rank]
        if len(pieces) == len(affine_map.pieces_by_rank):
            _refuse_split_groups(own_name(name), parameter, pieces)
            return Split(affine_map.logical_shape, pieces, group)
    raise UserError(f"AutoTP splits {name} into parts that are not rectangles", fix=USE_ZERO3)


def _refuse_split_groups(name: str, parameter: nn.Parameter, pieces: list[AffinePiece]) -> None:
    """Refuse pieces of a quantized matrix that are not whole groups, on all ranks if on one."""
    quantization = quantization_of(parameter)
    widths = [piece.shape[-1] for piece in pieces if piece.shape[-1] % GROUP]
    if quantization is not None and widths:
        raise UserError(
            f"tensor parallelism gives {name} rows of {widths[0]} elements, and "
            f"model.bits={quantization.bits} needs a multiple of {GROUP}",
            fix="set tensor_parallel=1, or model.bits=null",
        )


def vocabulary_modules(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the embedding and the output head of a model if their vocabulary can be split."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    if head.bias is not None or type(embedding).forward is not nn.Embedding.forward:
        return None
    return embedding, head


def _split_vocabulary(model: nn.Module) -> None:
    """Split the rows of the embedding and of the head, which may be one tied parameter."""
    modules = vocabulary_modules(model)
    if modules is None:
        return
    embedding, head = modules
    names = {module: name for name, module in model.named_modules()}
    group = groups.get_tensor_model_parallel_group()
    is_tied = embedding.weight is head.weight
    split_head = VocabParallelLinear(head, group, name="lm_head")
    model.set_submodule(names[head], split_head)
    split_embedding = VocabParallelEmbedding(embedding, group, split_head if is_tied else None)
    model.set_submodule(names[embedding], split_embedding)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies its input by one matrix, and may add a bias.

    Other classes derived from nn.Linear, such as the routers of experts, compute something else.
    """
    # A model's module imports a second's worth of others, which a refused command does not need.
    from transformers.models.falcon.modeling_falcon import FalconLinear

    return type(module).forward in (
        nn.Linear.forward,
        Conv1D.forward,
        FalconLinear.forward,
        LinearLayer.forward,
        LinearAllreduce.forward,
    )


def look_up(module: nn.Module, rows: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Return some rows of a table: [*rows.shape, width].

    If the vocabulary is split, each rank reads the rows that it has, and zeros for the others. One
    all-reduce joins them exactly.

    Args:
        module: an embedding or an output head.
        rows: int64, indexes of entries of the vocabulary.
        read: function (int64 indexes of rows on this rank) -> rows.
    """
    if not isinstance(module, VocabParallelEmbedding | VocabParallelLinear):
        return read(rows)
    is_elsewhere = (rows < module.vocab_start_index) | (rows >= module.vocab_end_index)
    values = read((rows - module.vocab_start_index).masked_fill(is_elsewhere, 0))
    values.masked_fill_(is_elsewhere[..., None], 0)
    comm.all_reduce(values, group=module.mp_group)
    return values


def whole_logits(head: nn.Module, logits: Tensor) -> Tensor:
    """Return the logits of the full vocabulary: [..., vocabulary].

    A split head has computed those of this rank's entries only. The other ranks send theirs.
    """
    if not isinstance(head, VocabParallelLinear):
        return logits
    return GatherFromTensorParallelRegion.apply(  # type: ignore[no-any-return]
        head.mp_group, logits, head._partition_sizes
    )


def add_before_sum(
    module: nn.Module,
    own_forward: Callable[[Tensor], Tensor],
    inputs: Tensor,
    add: Callable[[Tensor], None],
) -> Tensor:
    """Run a linear module, and add something to its output in place.

    If the product of a rank is a term of a sum over ranks, `add` changes the term.
    """
    if not isinstance(module, LinearAllreduce):
        alone = own_forward(inputs)
        add(alone)
        return alone
    own: Mapping[str, Any] = module._parameters
    output: Tensor = inputs @ own["weight"].t()
    add(output)
    comm.all_reduce(output, group=module.mp_group)
    if own.get("bias") is not None:
        output += own["bias"]
    return output


def split_pair(base: nn.Module, first: nn.Linear, second: nn.Linear) -> tuple[nn.Module, nn.Module]:
    """Split the two matrices of a low-rank adapter as the linear layer that they belong to.

    The adapter adds second(first(x)). Of these, only the one that has a dimension in common with
    the layer's split dimension is split: `first` has its inputs, `second` its outputs.
    """
    if isinstance(base, LinearAllreduce):
        first = LinearAllreduce(first, base.mp_group, name=base.name, tp_meta=base.tp_meta)
    elif isinstance(base, LinearLayer):
        second = LinearLayer(second, base.mp_group, name=base.name, tp_meta=base.tp_meta)
    return first, second
