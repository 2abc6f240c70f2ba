"""Loads a sharded model. No rank ever holds the whole model.

directory ──build_checked──► module on the meta device ──adapter──► + its parameters
                             │ zero3.shard_model, or tensor_parallel.shard_model
                             ▼
          slices of files ──► shards of this rank (ShardedWeights) ──► digest: the base's identity
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import (
    build_checked,
    open_weights,
    parameter_names,
    persistent_buffers,
    resolve_model,
)
from lezo_ds.config import RunConfig, ZoConfig, trained_part
from lezo_ds.config.deepspeed import tensor_parallel_size
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import (
    MERGE_ONCE,
    Adapter,
    PrefixAdapter,
    adapter_files,
    make_adapter,
)
from lezo_ds.forward.blocks import BlockLayout, freeze_all_but, quantized_matrices
from lezo_ds.sharding import tensor_parallel, zero3
from lezo_ds.sharding.files import WeightFiles
from lezo_ds.sharding.parameters import own_name, parameter_ids, table_hash
from lezo_ds.sharding.quantization import quantization_of, quantize_parameters
from lezo_ds.sharding.quantized_shards import QuantizedFlatShard, QuantizedRectangleShard
from lezo_ds.sharding.shards import FlatShard, RectangleShard, Shard, Split
from lezo_ds.sharding.tensor_parallel import EMBEDDINGS
from lezo_ds.sharding.weights import ShardedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModel:
    """The model on disk that a run starts from.

    Attributes:
        name: hub id or directory, as the user wrote it.
        directory: with config.json and the weights.
        fingerprint: digest of the base weights and stored buffers after loading. An adapter does
            not affect it. Of quantized weights, it is that of the values that modules compute with,
            which depend on the bits, the size of a group, and how codes are chosen.
        table_hash: of all parameter names and shapes, including those of an adapter.
        bits: of the matrices of the blocks, if they are quantized.
    """

    name: str
    directory: Path
    fingerprint: str
    table_hash: str
    bits: int | None = None


@dataclass(frozen=True)
class ShardedModel:
    """A model after loading.

    Attributes:
        module: the transformers model. Its parameters are sharded.
        weights: this rank's shards.
        layout: its transformer blocks.
        base: where it was loaded from.
        files: the weights there.
        ds_config: DeepSpeed's configuration.
        adapter: what a run trains instead of the weights, or None.
        engine: DeepSpeed's engine, which runs the model.
    """

    module: nn.Module
    weights: ShardedWeights
    layout: BlockLayout
    base: BaseModel
    files: WeightFiles
    ds_config: Mapping[str, Any]
    adapter: Adapter | None
    engine: Any

    def load_initial(self) -> None:
        """Set the weights to those before the first update, bit for bit. A collective."""
        if self.adapter is None:
            self.weights.load(self.weights.shards, self.files)
        else:
            self.weights.restore_initial()


def load_sharded_model(
    config: RunConfig, ds_config: Mapping[str, Any], zo: ZoConfig | None
) -> ShardedModel:
    """Build a model, shard it and load the shards. A collective: each rank reads only its slices.

    Args:
        config: of a run, or of a model.
        ds_config: DeepSpeed's JSON, completed.
        zo: of training, of which the trained part of the weights, or of the adapter, and the
            precision of updates count; None if nothing is updated.

    Raises:
        UserError: this machine does not compute in the dtype, or see `lezo_ds.initialize`.
    """
    model = config.model.path
    bits = config.model.bits
    if config.model.dtype == "fp16" and not distributed.supports_fp16():
        raise UserError(
            f"{model} has model.dtype=fp16, and this CPU has no fp16 arithmetic",
            fix="use a GPU, or a new run with model.dtype=bf16, or fp32, which keeps all bits",
        )
    if distributed.local_rank() == 0:
        resolve_model(model)  # downloads it; the other ranks of the node then read the cache
    distributed.barrier()
    directory = resolve_model(model)
    module, layout = build_checked(directory, config.model.dtype)
    base_files = open_weights(module, directory)
    quantized = quantized_matrices(module, layout) if bits else frozenset()
    adapter = make_adapter(config.peft)
    if adapter is not None:
        adapter.attach(module, layout)
    aliases = parameter_names(module)
    freeze_all_but(trained_part(zo) if zo else "all", module, layout)
    splits: dict[nn.Parameter, Split] = {}
    if tensor_parallel_size(ds_config) > 1:
        assert not isinstance(adapter, PrefixAdapter), "a prefix needs ZeRO-3"
        put_back = adapter.hide(module) if adapter else lambda: None

        def restore() -> None:
            put_back()
            if bits:
                quantize_parameters(module, quantized, bits, 1)

        engine, splits = tensor_parallel.shard_model(module, layout.path, ds_config, restore)
    else:
        if bits:
            num_parts = config.partition_size or distributed.world_size()
            quantize_parameters(module, quantized, bits, num_parts)
        zero3.shard_model(module, ds_config, config.partition_size)
        blocks = list(module.get_submodule(layout.path).children())
        engine = zero3.start_forward_engine(module, blocks, ds_config)
    shards = _shards_of(module, layout, parameter_ids(aliases), splits)
    weights = ShardedWeights(
        shards,
        aliases=aliases,
        precision=zo.update_precision if zo else None,
        has_adapter=bool(adapter),
    )
    weights.load(weights.base_shards, base_files)
    buffers = dict(persistent_buffers(module))
    fingerprint = _fingerprint(weights.digest(weights.base_shards), buffers)
    hash_of_names = table_hash({shard.name: shard.shape for shard in shards})
    base = BaseModel(model, directory, fingerprint, hash_of_names, bits)
    if adapter is not None:
        adapter.fill(weights, module, config.seed)
        if config.peft.path is not None:
            files = adapter_files(adapter, Path(config.peft.path), fix=MERGE_ONCE)
            weights.load(weights.adapter_shards, files)
            _warn_of_unread(files, weights.adapter_shards)
        weights.keep_initial()
    return ShardedModel(module, weights, layout, base, base_files, ds_config, adapter, engine)


def _warn_of_unread(files: WeightFiles, shards: Sequence[Shard]) -> None:
    """Log the tensors of an adapter that no shard has, such as those of a vision tower."""
    unread = files.unread(shard.name for shard in shards)
    if unread:
        logger.warning(
            "%s: %d of %d tensors are left out, such as %s: no text runs through their modules",
            files.directory,
            len(unread),
            len(files.tensors),
            unread[0],
        )


def _fingerprint(digest: str, buffers: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a base: the digest of its weights, and of its buffers if any."""
    if not buffers:
        return digest
    content = hashlib.blake2b(digest.encode(), digest_size=16)
    for name, value in sorted(buffers.items()):
        content.update(name.encode())
        content.update(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _shards_of(
    module: nn.Module,
    layout: BlockLayout,
    ids: Mapping[str, int],
    splits: Mapping[nn.Parameter, Split],
) -> list[Shard]:
    """Return this rank's shard of each parameter. Those in `splits` are split over ranks."""
    shards: list[Shard] = []
    embeddings = {m.weight for m in module.modules() if isinstance(m, EMBEDDINGS)}
    for module_name, parameter in module.named_parameters():
        name = own_name(module_name)
        block = layout.block_of(name, is_embedding=parameter in embeddings)
        split = splits.get(parameter)
        is_quantized = quantization_of(parameter) is not None
        if split is None:
            flat = QuantizedFlatShard if is_quantized else FlatShard
            shards.append(flat(parameter, name, block, ids[name]))
        else:
            rectangle = QuantizedRectangleShard if is_quantized else RectangleShard
            shards.append(rectangle(parameter, name, block, ids[name], split))
    return shards
