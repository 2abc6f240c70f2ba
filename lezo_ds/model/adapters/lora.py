"""Low-rank adapters of linear modules, W x + (alpha / r) B A x (Hu et al. 2021), through the peft library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lezo_ds.config import PeftConfig
from lezo_ds.errors import UserError
from lezo_ds.model.blocks import BlockLayout
from lezo_ds.noise import gaussian
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.keys import adapter_key

_PEFT_PREFIX = "base_model.model."  # of every name in peft's files
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class LoraAdapter:
    """See `Adapter`. B starts at 0, so that the model starts as it is; A as peft starts it.

    Args:
        config: rank, scale and the names of the modules that get an adapter.
    """

    weights_file = "adapter_model.safetensors"

    def __init__(self, config: PeftConfig) -> None:
        self._targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()]
        self._lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=self._targets,
            task_type="CAUSAL_LM",
            inference_mode=False,
        )

    def attach(self, model: nn.Module, layout: BlockLayout) -> None:
        """See `Adapter.attach`."""
        matched = matching_modules(model, self._targets)
        # Conv1D, GPT-2's linear module, holds its weight transposed.
        self._lora.fan_in_fan_out = any(isinstance(module, Conv1D) for module in matched)
        before = {id(parameter): parameter for parameter in model.parameters()}
        dtype = next(iter(before.values())).dtype
        inject_adapter_in_model(self._lora, model, low_cpu_mem_usage=True)
        for parameter in model.parameters():
            if id(parameter) in before:
                parameter.requires_grad_(False)
            else:
                parameter.data = parameter.data.to(dtype)  # peft makes them float32, ZeRO wants one dtype

    def own_name(self, module_name: str) -> str:
        """See `Adapter.own_name`."""
        name = module_name.replace(".base_layer.", ".")
        return name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")

    def stored_name(self, own_name: str) -> str:
        """See `Adapter.stored_name`."""
        return _PEFT_PREFIX + own_name

    def unstored_name(self, stored_name: str) -> str:
        """See `Adapter.unstored_name`."""
        return stored_name.removeprefix(_PEFT_PREFIX)

    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """See `Adapter.fill`."""
        key = adapter_key(seed)
        for parameter in weights.adapter_parameters:
            if parameter.name.endswith(_UP):
                weights.fill(parameter, torch.zeros(parameter.count))
                continue
            assert parameter.name.endswith(_DOWN), f"unknown LoRA parameter {parameter.name}"
            bound = parameter.shape[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5)
            where = (parameter.named.parameter_id, parameter.start, parameter.count)
            weights.fill(parameter, uniform(key, *where) * bound)

    def write_config(self, directory: Path, base_model: str) -> None:
        """See `Adapter.write_config`."""
        self._lora.base_model_name_or_path = base_model
        self._lora.save_pretrained(str(directory))


def matching_modules(model: nn.Module, targets: Sequence[str]) -> list[nn.Module]:
    """Return the linear modules named by `targets`: a whole name, or the end of one.

    Raises:
        UserError: a target matches nothing, or a module that is not linear.
    """
    modules = dict(model.named_modules())
    linear = sorted({n.rsplit(".", 1)[-1] for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D)})
    matched = []
    for target in targets or [""]:
        found = [m for n, m in modules.items() if target and (n == target or n.endswith("." + target))]
        if not found or not all(isinstance(module, nn.Linear | Conv1D) for module in found):
            raise UserError(
                f"peft.lora_targets names no linear modules of {type(model).__name__}",
                got=repr(target),
                expected=f"some of {', '.join(linear)}",
                fix=f"set peft.lora_targets={linear[0]}, or several with commas between them"
                if linear
                else "use another model",
            )
        matched += found
    return matched


def uniform(key: int, parameter_id: int, start: int, count: int) -> Tensor:
    """Return uniform numbers in [-1, 1) for elements [start, start + count): float32 [count].

    A pure function of (key, parameter, element), exact in float32: the top 24 bits of one Philox word an
    element (Salmon et al. 2011).
    """
    blocks = torch.arange(start // 4, -(-(start + count) // 4))
    words = torch.stack(gaussian.words_of_blocks(key, parameter_id, blocks, gaussian.NORMAL_STREAM), 1)
    wanted = words.reshape(-1)[start % 4 : start % 4 + count]
    return (wanted >> 8).to(torch.float32) * 2.0**-23 - 1
