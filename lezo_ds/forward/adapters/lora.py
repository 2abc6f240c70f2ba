"""LoRA (Hu et al. 2021) by the peft library: a linear module computes W x + (alpha / r) B A x."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lezo_ds.config.paths import split_revision
from lezo_ds.errors import UserError
from lezo_ds.forward.blocks import BlockLayout, modules_of_text
from lezo_ds.noise.philox import NORMAL_STREAM, words_at
from lezo_ds.sharding.tensor_parallel import is_linear, split_pair
from lezo_ds.sharding.weights import ShardedWeights, WeightChanges
from lezo_ds.zo.keys import adapter_key

ALL_LINEAR = "all-linear"
"""Stands for the names of all linear modules but the head, as in peft."""

_ANY_VALUE = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "lora_alpha", "lora_dropout", "peft_version", "r"),
    *("revision", "target_modules", "task_type"),
}
"""Settings of peft that a plain LoRA may have. Others change the product or the base model."""
MERGE_ONCE = (
    "merge it once with peft: AutoPeftModelForCausalLM.from_pretrained, merge_and_unload, "
    "save_pretrained; then set model.path to that"
)
"""How to use an adapter of peft that is not a plain LoRA adapter."""
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_UNSET = ("null", "false", '""', "[]", "{}")
"""What adapter_config.json holds for a setting that is not used. 0 is the first layer."""
_SAME_BASE = ("gaussian", "orthogonal", "eva")
"""Values of init_lora_weights with which peft leaves the weights of the base model as they are."""


class LoraAdapter:
    """LoRA, which trains A [r, inputs] and B [outputs, r] of each target module.

    B starts at 0, so that the output of the model does not change. A starts as in peft.

    Args:
        rank: r.
        alpha: the adapter's product is multiplied by alpha / r.
        targets: names of linear modules with commas between them, such as "q_proj,v_proj", or
            "all-linear", which are all but the head, as in peft.
    """

    weights_file = "adapter_model.safetensors"
    config_file = "adapter_config.json"
    stored_prefix = "base_model.model."  # peft puts it before every name in its files

    def __init__(self, rank: int, alpha: float, targets: str) -> None:
        from peft import LoraConfig  # takes half a second; only LoRA needs it

        self._targets = [name.strip() for name in targets.split(",") if name.strip()]
        self._lora = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=self._targets, task_type="CAUSAL_LM"
        )
        self._transposed: set[str] = set()  # names of modules that store their weight transposed

    def attach(self, model: Any, layout: BlockLayout) -> None:
        """Freeze a model that is not sharded yet, and add the parameters, which have no values."""
        if self._targets == [ALL_LINEAR]:
            self._targets = _linear_names(model, but=model.get_output_embeddings())
            self._lora.target_modules = set(self._targets)
        from peft import inject_adapter_in_model

        matched = matching_modules(model, self._targets)
        # GPT-2's linear module is Conv1D, which stores its weight transposed.
        self._transposed = {name for name, each in matched.items() if isinstance(each, Conv1D)}
        self._lora.fan_in_fan_out = bool(self._transposed)
        # Without this, peft would also adapt modules of these names that no text runs through.
        self._lora.exclude_modules = [
            name
            for name, _ in model.named_modules()
            if _is_one_of(name, self._targets) and name not in matched
        ] or None
        model.requires_grad_(False)
        dtype = next(model.parameters()).dtype
        try:
            inject_adapter_in_model(self._lora, model, low_cpu_mem_usage=True)
        except ValueError as error:  # such as the out_proj of Mamba, whose kernels skip its forward
            raise UserError(
                f"peft.lora_targets={','.join(self._targets)} is not possible: {error}",
                fix="use other linear modules",
            ) from error
        # peft takes some names, such as down_proj, for those of experts that share a parameter.
        if self._lora.target_parameters:
            raise UserError(
                f"peft.lora_targets={','.join(self._targets)} would adapt the experts of "
                f"{type(model).__name__}, which are not linear modules",
                fix="use linear modules of attention only",
            )
        for parameter in model.parameters():
            if parameter.requires_grad:
                # peft makes float32. ZeRO needs one dtype.
                parameter.data = parameter.data.to(dtype)

    def hide(self, model: nn.Module) -> Callable[[], None]:
        """Take the adapter off its modules while these are split.

        Returns:
            The function that puts it back on the modules that are in their places then.
        """
        from peft.tuners.lora import LoraLayer

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

    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """Set the initial values, which depend only on the seed."""
        key = adapter_key(seed)
        for shard in weights.adapter_shards:
            if shard.name.endswith(".lora_B.weight"):
                weights.fill(shard, torch.zeros(shard.count))
                continue
            indices = shard.elements.region.indices(0, shard.count, torch.device("cpu"))
            values = uniform(key, shard.elements.parameter_id, indices)
            bound = shard.shape[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5)
            weights.fill(shard, values * bound)

    def merges(self, weights: ShardedWeights) -> WeightChanges:
        """Return what adds the adapter to each weight that it adapts, by the name of the weight.

        That is W + (alpha / r) B A, computed in float32 and rounded once to the dtype of W. Only
        the names of a tied weight whose modules are adapted are among these. Each call gathers the
        factors A and B: all ranks must make all calls, in one order.
        """
        factors = {shard.name: shard for shard in weights.adapter_shards}
        names = [
            name
            for shard in weights.base_shards
            for name in weights.aliases[shard.name]
            if _factor_names(name)[0] in factors
        ]
        assert 2 * len(names) == len(factors), "each factor belongs to one weight"
        scale: float = self._lora.lora_alpha / self._lora.r

        def merge(name: str, value: Tensor) -> Tensor:
            first, second = (factors[each].gather() for each in _factor_names(name))
            product = scale * (second.float() @ first.float())
            if name.removesuffix(".weight") in self._transposed:
                product = product.t()
            return (value.float() + product).to(value.dtype)

        return {name: partial(merge, name) for name in names}

    def write_config(self, directory: Path, base_model: str) -> None:
        """Write adapter_config.json, with which peft loads the adapter."""
        name, revision = split_revision(base_model)
        self._lora.base_model_name_or_path = name
        self._lora.revision = revision
        self._lora.save_pretrained(str(directory))

    @staticmethod
    def keys(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return the section `peft` of a run that wrote a config, and tensors of these shapes.

        Raises:
            UserError: the adapter is a variant of LoRA.
        """
        from peft import LoraConfig

        plain = LoraConfig().to_dict()
        problems = [
            f"{key}={value}"
            for key, value in config.items()
            if key not in _ANY_VALUE
            and json.dumps(value) not in _UNSET
            and value not in (plain.get(key), *_SAME_BASE)
        ]
        problems += [name for name in shapes if not name.endswith(_FACTORS)]
        if problems:
            raise UserError(
                f"an adapter with {problems[0]} is not a plain LoRA adapter",
                fix=MERGE_ONCE,
            )
        targets = config["target_modules"]
        if isinstance(targets, str):  # a pattern, which matched the modules that have factors
            targets = sorted({name.split(".")[-3] for name in shapes})
        return {
            "kind": "lora",
            "lora_rank": shapes[min(shapes)][0],
            "lora_alpha": config["lora_alpha"],
            "lora_targets": ",".join(targets),
        }


def matching_modules(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Return the linear modules whose whole name, or the end of it, is one of `targets`, by name.

    Modules that text cannot reach are left out.

    Raises:
        UserError: a target names no module, or one that is not linear.
    """
    modules = modules_of_text(model)
    matched: dict[str, nn.Module] = {}
    for target in targets or [""]:
        of_target = {
            name: module
            for name, module in modules.items()
            if target and _is_one_of(name, [target])
        }
        if not of_target or not all(map(is_linear, of_target.values())):
            raise UserError(
                f"peft.lora_targets: {type(model).__name__} has no linear module {target!r}",
                fix=f"use some of {', '.join(_linear_names(model))}, with commas between them",
            )
        matched |= of_target
    return matched


def _linear_names(model: nn.Module, but: nn.Module | None = None) -> list[str]:
    """Return the last parts of the names of all linear modules but one, in order."""
    modules = modules_of_text(model).items()
    return sorted({name.rpartition(".")[2] for name, m in modules if is_linear(m) and m is not but})


def _is_one_of(name: str, targets: Sequence[str]) -> bool:
    """Return whether a module's name, or the end of it, is one of `targets`, as in peft."""
    return any(name == target or name.endswith("." + target) for target in targets)


def _factor_names(weight_name: str) -> tuple[str, str]:
    """Return the own names of the factors A and B of a weight."""
    module = weight_name.removesuffix("weight")
    return f"{module}lora_A.weight", f"{module}lora_B.weight"


def uniform(key: int, parameter_id: int, elements: Tensor) -> Tensor:
    """Return uniform numbers in [-1, 1) for elements: float32 of their shape.

    They are a pure function of (key, parameter_id, element). Each is made from the top 24 bits of
    one Philox word (Salmon et al. 2011), which float32 holds exactly.
    """
    words = words_at(key, parameter_id, elements, NORMAL_STREAM)
    return (words >> 8).to(torch.float32) * 2.0**-23 - 1
