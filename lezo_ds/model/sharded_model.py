"""A model whose weights are shared among the ranks, from disk and back; none ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lezo_ds import distributed
from lezo_ds.config import PeftConfig
from lezo_ds.model.adapters import Adapter, make_adapter
from lezo_ds.model.blocks import BlockLayout, find_blocks, gathering_limits, largest_module
from lezo_ds.model.snapshots import LOW_BITS_DIRECTORY, write_snapshot
from lezo_ds.noise import NoiseMode, UpdatePrecision
from lezo_ds.sharding import zero3
from lezo_ds.sharding.checkpoint_files import (
    DTYPES,
    WeightFiles,
    build_on_meta,
    checkpoint_renaming,
    load_model_config,
    resolve_model,
    with_safetensors,
)
from lezo_ds.sharding.parameters import NamedParameter, parameter_ids, table_hash
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.sharding.zero3 import ShardedParameter


@dataclass(frozen=True)
class BaseModel:
    """Where a model came from.

    Attributes:
        name: hub id or directory, as it was asked for.
        directory: the Hugging Face directory of the base weights.
        fingerprint: digest of the base weights as loaded, 32 hex digits; the same with any adapter.
        table_hash: hash of all parameter names and shapes, an adapter's too.
    """

    name: str
    directory: Path
    fingerprint: str
    table_hash: str


@dataclass(frozen=True)
class ShardedModel:
    """A model after loading.

    Attributes:
        module: the model, its parameters sharded.
        weights: this rank's shards.
        layout: where the transformer blocks are.
        base: where the weights came from.
        ds_config: what DeepSpeed's engine is to be started with.
        adapter: what is trained in the place of the model's own weights, if anything is.
    """

    module: nn.Module
    weights: ShardedWeights
    layout: BlockLayout
    base: BaseModel
    ds_config: Mapping[str, Any]
    adapter: Adapter | None

    def write(self, target: Path, step: int, card: str = "") -> None:
        """Write the model, or its adapter, to the directory `target`. A collective.

        Args:
            target: as a snapshot (see lezo_ds.model.snapshots); a model can be opened with `from_pretrained`.
            step: how many updates the weights have seen.
            card: its README.md; "" for the base model's.
        """
        facts = {"step": step, "digest": self.weights.digest(), "base": self.base.fingerprint}
        write_snapshot(self.weights, target, self.base.directory, facts, self.adapter, self.base.name, card)

    def load_snapshot(self, directory: Path) -> None:
        """Bring the weights to those that `write` wrote, bit for bit. A collective."""
        if self.adapter is None:
            load_weights(self.weights, self.module, directory)
            return
        adapter = self.adapter
        files = WeightFiles(directory, rename=adapter.unstored_name, single=adapter.weights_file)
        _load(self.weights, self.weights.adapter_parameters, files, directory)

    def load_initial(self) -> None:
        """Bring the weights back to those before the first update, bit for bit. A collective."""
        if self.adapter is None:
            load_weights(self.weights, self.module, self.base.directory)
        else:
            self.weights.restore_initial()


def load_sharded_model(
    model: str,
    ds_config: Mapping[str, Any],
    dtype: str,
    precision: UpdatePrecision,
    seed: int = 0,
    peft: PeftConfig | None = None,
    partition_size: int | None = None,
    noise: NoiseMode = "exact",
) -> ShardedModel:
    """Build a model, shard it, and fill the shards; each rank reads only its own slices. A collective.

    Args:
        model: hub id, or directory with config.json and safetensors (or .bin, converted once).
        ds_config: DeepSpeed config as a dict, from `lezo_ds.ds_config.load_ds_config`.
        dtype: of the weights: "fp32", "bf16" or "fp16".
        precision: how updates will be stored.
        seed: of the run; the initial values of an adapter follow from it.
        peft: the adapter to train; None to train all weights.
        partition_size: number of ranks that share the weights; every so many ranks hold a replica. None: all.
        noise: of the updates.

    Raises:
        UserError: no such model, no transformer blocks, weights or an adapter that do not fit.
    """
    directory = _resolve_on_all_nodes(model)
    module = build_on_meta(load_model_config(directory), DTYPES[dtype])
    layout = find_blocks(module)
    adapter = make_adapter(peft)
    if adapter is not None:
        adapter.attach(module, layout)
    own_name = str if adapter is None else adapter.own_name
    aliases = _aliases(module, own_name)
    ids = parameter_ids(aliases)
    ds_config = _with_gathering_limits(ds_config, module, layout)
    zero3.shard_model(module, ds_config, partition_size)
    named = {
        parameter: NamedParameter(name, ids[name], layout.block_of(name))
        for name, parameter in ((own_name(name), parameter) for name, parameter in module.named_parameters())
    }
    parameters = zero3.sharded_parameters(module, named)
    weights = ShardedWeights(parameters, aliases, precision, adapter is not None, noise)
    load_weights(weights, module, directory)
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    base = BaseModel(model, directory, weights.digest(weights.base_parameters), table_hash(shapes))
    if adapter is not None:
        adapter.fill(weights, module, seed)
        zero3.finish_updates()
        weights.keep_initial()
    return ShardedModel(module, weights, layout, base, ds_config, adapter)


def load_weights(weights: ShardedWeights, model: nn.Module, directory: Path) -> None:
    """Fill the model's own shards from its directory, with its low bits if it is a snapshot that has them."""
    files = WeightFiles(directory, getattr(model, "base_model_prefix", ""), checkpoint_renaming(model))
    _load(weights, weights.base_parameters, files, directory)


def _load(
    weights: ShardedWeights, parameters: Sequence[ShardedParameter], files: WeightFiles, directory: Path
) -> None:
    low_bits = directory / LOW_BITS_DIRECTORY
    low_files = WeightFiles(low_bits) if low_bits.is_dir() else None
    try:
        weights.load(parameters, files, low_files)
    finally:
        files.close()
        if low_files is not None:
            low_files.close()


def _resolve_on_all_nodes(model: str) -> Path:
    # One rank a node downloads and converts; the others then find it in the cache.
    if distributed.local_rank() == 0:
        with_safetensors(resolve_model(model))
    distributed.barrier()
    return resolve_model(model)


def _aliases(module: nn.Module, own_name: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Return every name of each parameter, by its first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    return {found[0]: tuple(found) for found in names.values()}


def _with_gathering_limits(
    ds_config: Mapping[str, Any], module: nn.Module, layout: BlockLayout
) -> dict[str, Any]:
    """Return the config with limits on what is gathered that fit the model, where it has none of its own.

    A tied embedding stays gathered until the head reads it: one gather a step, not two. Only weights used
    twice in one forward pass are kept by that setting; all others go after their module.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    limits = gathering_limits(largest_module(module, layout))
    reuse = {"stage3_max_reuse_distance": 2 * numel}
    return {**ds_config, "zero_optimization": {**limits, **ds_config["zero_optimization"], **reuse}}
