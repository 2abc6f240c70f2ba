"""LoRA (Hu et al. 2021) by the peft library: a linear module computes W x + (alpha / r) B A x."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lezo_ds.errors import UserError
from lezo_ds.forward.blocks import BlockLayout
from lezo_ds.noise.philox import NORMAL_STREAM, words_at
from lezo_ds.sharding.tensor_parallel import split_pair
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.keys import adapter_key


class LoraAdapter:
    """LoRA, which trains A [r, inputs] and B [outputs, r] of each target module.

    B starts at 0, so that the output of the model does not change. A starts as in peft.

    Args:
        rank: r.
        alpha: the adapter's product is multiplied by alpha / r.
        targets: names of linear modules with commas between them, such as "q_proj,v_proj".
    """

    weights_file = "adapter_model.safetensors"
    config_file = "adapter_config.json"
    stored_prefix = "base_model.model."  # peft puts it before every name in its files

    def __init__(self, rank: int, alpha: float, targets: str) -> None:
        self._targets = [name.strip() for name in targets.split(",") if name.strip()]
        self._lora = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=self._targets, task_type="CAUSAL_LM"
        )

    def attach(self, model: nn.Module, layout: BlockLayout) -> None:
        """Freeze a model that is not sharded yet, and add the parameters, which have no values."""
        matched = matching_modules(model, self._targets)
        # GPT-2's linear module is Conv1D, which stores its weight transposed.
        self._lora.fan_in_fan_out = any(isinstance(module, Conv1D) for module in matched)
        before = set(model.parameters())
        dtype = next(model.parameters()).dtype
        inject_adapter_in_model(self._lora, model, low_cpu_mem_usage=True)
        for parameter in model.parameters():
            if parameter in before:
                parameter.requires_grad_(False)
            else:
                # peft makes float32. ZeRO needs one dtype.
                parameter.data = parameter.data.to(dtype)

    def hide(self, model: nn.Module) -> Callable[[], None]:
        """Take the adapter off its modules while these are split.

        Returns:
            The function that puts it back on the modules that are in their places then.
        """
        wrappers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper.base_layer)

        def restore() -> None:
            for name, wrapper in wrappers.items():
                wrapper.base_layer = model.get_submodule(name)
                model.set_submodule(name, wrapper)
                first, second = split_pair(
                    wrapper.base_layer, wrapper.lora_A["default"], wrapper.lora_B["default"]
                )
                wrapper.lora_A["default"] = first
                wrapper.lora_B["default"] = second

        return restore

    def own_name(self, module_name: str) -> str:
        """Return a parameter's own name, given its name in the module tree."""
        # peft puts a module around the model's own, which it calls base_layer, and calls the
        # adapter default.
        return module_name.replace(".base_layer.", ".").replace(".default.", ".")

    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """Set the initial values, which depend only on the seed."""
        key = adapter_key(seed)
        for shard in weights.adapter_shards:
            if shard.name.endswith(".lora_B.weight"):
                weights.fill(shard, torch.zeros(shard.count))
                continue
            elements = shard.region.elements(0, shard.count, torch.device("cpu"))
            values = uniform(key, shard.named.parameter_id, elements)
            bound = shard.shape[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5)
            weights.fill(shard, values * bound)

    def merged(self, weights: ShardedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value [*shape] of each weight of the model with the adapter added to it.

        That is W + (alpha / r) B A, computed in float32 and rounded once to the dtype of W. Each
        value is gathered when it is asked for: all ranks must take all of them.
        """
        factors = {shard.name: shard for shard in weights.adapter_shards}
        scale = self._lora.lora_alpha / self._lora.r
        for shard in weights.base_shards:
            value = shard.gather()
            module = shard.name.removesuffix("weight")
            if f"{module}lora_A.weight" in factors:
                first = factors[f"{module}lora_A.weight"].gather()  # [r, inputs]
                second = factors[f"{module}lora_B.weight"].gather()  # [outputs, r]
                product = scale * (second.float() @ first.float())
                if self._lora.fan_in_fan_out:
                    product = product.t()
                value = (value.float() + product).to(value.dtype)
            yield shard.name, value

    def write_config(self, directory: Path, base_model: str) -> None:
        """Write adapter_config.json, with which peft loads the adapter."""
        self._lora.base_model_name_or_path = base_model
        self._lora.save_pretrained(str(directory))

    @staticmethod
    def keys(config: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
        """Return the section `peft` of a run that wrote a config, with a lora_A of this shape."""
        return {
            "kind": "lora",
            "lora_rank": shape[0],
            "lora_alpha": config["lora_alpha"],
            "lora_targets": ",".join(config["target_modules"]),
        }


def matching_modules(model: nn.Module, targets: Sequence[str]) -> list[nn.Module]:
    """Return the linear modules whose whole name, or the end of it, is one of `targets`.

    Raises:
        UserError: a target names no module, or one that is not linear.
    """
    modules = dict(model.named_modules())
    matched: list[nn.Module] = []
    for target in targets or [""]:
        of_target = [
            module
            for name, module in modules.items()
            if target and (name == target or name.endswith("." + target))
        ]
        if not of_target or not all(map(_is_linear, of_target)):
            linear = {name.rpartition(".")[2] for name, m in modules.items() if _is_linear(m)}
            raise UserError(
                f"peft.lora_targets: {target!r} names no linear modules of {type(model).__name__}",
                fix=f"use some of {', '.join(sorted(linear))}, with commas between them",
            )
        matched += of_target
    return matched


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def uniform(key: int, parameter_id: int, elements: Tensor) -> Tensor:
    """Return uniform numbers in [-1, 1) for elements: float32 of their shape.

    They are a pure function of (key, parameter_id, element). Each is made from the top 24 bits of
    one Philox word (Salmon et al. 2011), which float32 holds exactly.
    """
    words = words_at(key, parameter_id, elements, NORMAL_STREAM)
    return (words >> 8).to(torch.float32) * 2.0**-23 - 1
