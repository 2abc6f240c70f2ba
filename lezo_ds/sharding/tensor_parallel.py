"""Tensor parallelism: shards that stay. DeepSpeed's AutoTP splits the linear layers of the blocks over ranks.

Each rank multiplies by its own part of a weight, and only activations travel. The vocabulary of the input
embedding and of the output head is split, too. All ranks have all of the rest, such as norms and positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.checkpoint.affine import ParamAffineMap, contiguous_split_map
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

from lezo_ds.distributed import device
from lezo_ds.errors import UserError, cut
from lezo_ds.noise import Region
from lezo_ds.sharding.parameters import put_parameters
from lezo_ds.sharding.shards import Rectangle, Split

LINEAR_FORWARDS = (LinearLayer.forward, LinearAllreduce.forward)
"""Forward passes that are a matrix product, a sum over ranks if `sums_outputs`, and a bias."""

EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding)
LOOKUP_FORWARDS = (nn.Embedding.forward, VocabParallelEmbedding.forward)
"""Forward passes that read rows of a table and do nothing else."""

_FIX = "remove tensor_parallel, which shards the weights by ZeRO-3 instead"


def shard_model(
    model: nn.Module, blocks_path: str, ds_config: Mapping[str, Any], restore: Callable[[], None]
) -> tuple[Any, dict[nn.Parameter, Split]]:
    """Split a model on the meta device in place; return DeepSpeed's engine, and how parameters are split.

    The values of the parts are undefined until they are loaded. `restore` puts back what was hidden from
    DeepSpeed, and runs before the parts have memory.
    """
    size = int(ds_config["tensor_parallel"]["autotp_size"])
    config: Any = model.config
    _refuse_uneven_heads(config.get_text_config(), size)
    blocks = set(model.get_submodule(blocks_path).modules())
    outside = {name: m for name, m in model.named_modules() if m not in blocks and m._parameters}
    shapes = {parameter: parameter.shape for parameter in model.parameters()}
    splits: dict[nn.Parameter, Split] = {}

    def materialize(*_: object, **__: object) -> nn.Module:
        for name, module in outside.items():
            model.set_submodule(name, module)
            for own in module._parameters.values():
                if own is not None:
                    own.data = torch.empty(shapes[own], dtype=own.dtype, device="meta")
                    vars(own).pop(DS_AUTOTP_UC_META, None)
        restore()
        _split_vocabulary(model)
        splits.update(_materialized(model))
        return model

    whole_head = {**ds_config["tensor_parallel"], "vocab_parallel_lm_head": False}
    # DeepSpeed moves a model to its device after it has split it, and calls nothing in between.
    model.to = materialize  # type: ignore[method-assign]
    try:
        engine, *_ = deepspeed.initialize(
            model=model, config={**ds_config, "tensor_parallel": whole_head}
        )
    except (AssertionError, ValueError, NotImplementedError) as error:  # AutoTP's (0.19.8)
        text = cut(" ".join(str(error).split()), 200)
        raise UserError(
            f"AutoTP does not support {type(model).__name__}: {text}", fix=_FIX
        ) from error
    finally:
        del model.to
        groups.mpu = None  # or later engines of this process would take their groups from this one
    if not any(split.rectangles for split in splits.values()):
        raise UserError(f"AutoTP splits no parameter of {type(model).__name__}", fix=_FIX)
    engine.eval()
    engine.first_dataloader_check.remove()  # the ranks prove that they work on the same batch at every step
    engine.module_forward_pre_hook.remove()  # they start timers that only a training engine reads
    engine.module_forward_post_hook.remove()
    engine.forward = model.__call__
    _try(model)
    return engine, splits


@torch.no_grad()
def _try(model: nn.Module) -> None:
    """Run two tokens: Falcon and Bloom keep the number of heads where AutoTP (0.19.8) does not change it."""
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device()))
    except RuntimeError as error:
        text = (
            f"{type(model).__name__} does not run after AutoTP has split it: {cut(str(error), 100)}"
        )
        raise UserError(text, fix=_FIX) from error


def _refuse_uneven_heads(config: Any, size: int) -> None:
    num_heads, num_shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    num_shared = num_shared or num_heads
    if num_heads % size or num_shared % size:
        what = f"tensor_parallel={size} does not divide {num_heads} heads and {num_shared} of keys and values"
        raise UserError(what, fix=f"use a divisor of {math.gcd(num_heads, num_shared)}, or {_FIX}")


def _materialized(model: nn.Module) -> dict[nn.Parameter, Split]:
    """Give each parameter and buffer memory on this rank's device; return how parameters are split."""
    group, real, splits = groups.get_tensor_model_parallel_group(), {}, {}
    for name, parameter in model.named_parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device())
        real[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        splits[real[parameter]] = _split(name, parameter, group)
    put_parameters(model, real)
    return splits


def _split(name: str, parameter: nn.Parameter, group: Any) -> Split:
    """Return how a parameter is split, from what DeepSpeed (0.19.8) notes of it."""
    facts: Mapping[str, Any] = getattr(
        parameter, DS_AUTOTP_UC_META, {"conversion": {"replicated": True}}
    )
    if facts["conversion"].get("replicated"):
        return Split(tuple(parameter.shape), [], group)
    described = facts["conversion"].get("affine_map")
    whole = ParamAffineMap.from_dict(described) if described else None
    if whole is None or any(len(pieces) != 1 for pieces in whole.pieces_by_rank.values()):
        raise UserError(f"AutoTP splits {name} into parts that are no rectangles", fix=_FIX)
    rectangles = []
    for (piece,) in whole.pieces_by_rank.values():
        width, stride = piece.shape[-1], piece.source_strides[0]
        is_contiguous = len(piece.shape) == 1 or math.prod(piece.shape[1:]) == stride
        rows = (0, 0) if is_contiguous else (width, stride)
        region = Region(piece.source_offset, *rows)
        rectangles.append(Rectangle(region, piece.numel))
    return Split(whole.logical_shape, rectangles, group)


def vocabulary_modules(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the embedding and the output head of a model if their vocabulary can be split, else None."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    is_plain = (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and head.bias is None
    )
    return (
        (embedding, head) if is_plain and type(embedding).forward is nn.Embedding.forward else None
    )


def _split_vocabulary(model: nn.Module) -> None:
    """Split the rows of the embedding and the head. AutoTP (0.19.8) splits embeddings of tied heads only."""
    if modules := vocabulary_modules(model):
        (embedding, head), names = modules, {module: name for name, module in model.named_modules()}
        group = groups.get_tensor_model_parallel_group()
        split_head = VocabParallelLinear(head, group, name="lm_head")
        tied = split_head if embedding.weight is split_head.weight else None
        model.set_submodule(names[head], split_head)
        model.set_submodule(names[embedding], VocabParallelEmbedding(embedding, group, tied))


def look_up(module: nn.Module, rows: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Return some rows of a table: [*rows.shape, width]. `read` takes their indexes on this rank.

    If the vocabulary is split, each rank reads the rows that it has, and one all-reduce joins them exactly.
    """
    if not isinstance(module, VocabParallelEmbedding | VocabParallelLinear):
        return read(rows)
    is_elsewhere = (rows < module.vocab_start_index) | (rows >= module.vocab_end_index)
    values = read((rows - module.vocab_start_index).masked_fill(is_elsewhere, 0))
    values.masked_fill_(is_elsewhere[..., None], 0)
    comm.all_reduce(values, group=module.mp_group)
    return values


def whole_logits(head: nn.Module, logits: Tensor) -> Tensor:
    """Return the logits of the full vocabulary, of which a split head has computed this rank's part."""
    if not isinstance(head, VocabParallelLinear):
        return logits
    full: Tensor = GatherFromTensorParallelRegion.apply(
        head.mp_group, logits, head._partition_sizes
    )
    return full


def sums_outputs(module: nn.Module) -> bool:
    """Return whether the product of a linear layer is a term of a sum over the ranks."""
    return isinstance(module, LinearAllreduce)


def sum_outputs(module: nn.Module, products: Tensor) -> None:
    """Add the products of all ranks, in place. One all-reduce, however many probes they are of."""
    comm.all_reduce(products, group=module.mp_group)


def split_pair(base: nn.Module, first: nn.Linear, second: nn.Linear) -> tuple[nn.Module, nn.Module]:
    """Split the two matrices of a low-rank adapter, B A, as the linear layer that they belong to."""
    options: dict[str, Any] = {"mp_group": getattr(base, "mp_group", None)}
    if isinstance(base, LinearAllreduce):
        return LinearAllreduce(first, name=base.name, tp_meta=base.tp_meta, **options), second
    if isinstance(base, LinearLayer):
        return first, LinearLayer(second, name=base.name, tp_meta=base.tp_meta, **options)
    return first, second


def split_heads(parameter: nn.Parameter) -> None:
    """Split the first dimension of a parameter on the meta device evenly over the tensor-parallel group."""
    size = groups.get_tensor_model_parallel_world_size()
    num_heads = parameter.shape[0] // size
    described = contiguous_split_map(parameter.shape, [num_heads] * size, partition_dim=0)
    setattr(parameter, DS_AUTOTP_UC_META, {"conversion": {"affine_map": described.to_dict()}})
    parameter.data = parameter.data[:num_heads]
