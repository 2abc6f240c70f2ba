"""Parameter-efficient fine-tuning: adapters by the value of peft.kind. All other parameters freeze.

A parameter of an adapter has three names:

    in the module tree   ...q_proj.lora_A.default.weight   an adapter may wrap modules
    its own name         ...q_proj.lora_A.weight           noise, journal and messages use it
    in a snapshot        base_model.model. + its own name  `stored_prefix`, as peft's files have it
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lezo_ds.config import PeftConfig
from lezo_ds.errors import UserError
from lezo_ds.files import DAMAGE, assert_regular
from lezo_ds.forward.adapters.lora import ALL_LINEAR, MERGE_ONCE, LoraAdapter
from lezo_ds.forward.adapters.prefix import PrefixAdapter, load_prefix
from lezo_ds.sharding.files import OTHER_CHECKPOINT, WeightFiles

__all__ = [
    "MERGE_ONCE",
    "Adapter",
    "LoraAdapter",
    "PrefixAdapter",
    "adapter_files",
    "load_prefix",
    "make_adapter",
    "read_adapter",
    "start_of",
]

Adapter = LoraAdapter | PrefixAdapter
"""Both have `attach`, `fill` and `write_config`, which run in this order."""


def make_adapter(config: PeftConfig) -> Adapter | None:
    """Return the adapter of a configuration, or None if all weights are trained.

    Raises:
        UserError: it cannot start from the one in `config.path`.
    """
    if config.kind == "none":
        return None
    start_of(config)
    if config.kind == "lora":
        return LoraAdapter(config.lora_rank, config.lora_alpha, config.lora_targets)
    return PrefixAdapter(config.prefix_length)


def adapter_files(adapter: Adapter, directory: Path, fix: str = OTHER_CHECKPOINT) -> WeightFiles:
    """Open the weights of an adapter in a snapshot, an export, or a directory of peft.

    `fix` is what helps if a parameter is missing.
    """
    prefix = adapter.stored_prefix.removesuffix(".")
    return WeightFiles(directory, prefix=prefix, single=adapter.weights_file, fix=fix)


def start_of(config: PeftConfig) -> str | None:
    """Return the hash of the adapter that a run starts from: 32 hex digits, or None.

    Raises:
        UserError: the directory does not hold a peft adapter, or one of another shape.
    """
    if config.path is None:
        return None
    directory = Path(config.path)
    found = read_adapter(directory).get("peft")
    if found is None:
        raise UserError(
            f"peft.path {directory} does not hold a peft adapter", fix="name a directory with one"
        )
    names = set(found["lora_targets"].split(","))
    if config.lora_targets == ALL_LINEAR or set(config.lora_targets.split(",")) == names:
        found.pop("lora_targets")
    for key, value in found.items():
        if value != getattr(config, key):
            raise UserError(
                f"the adapter in {directory} has {key}={value}, not {getattr(config, key)}",
                fix=f"set peft.{key}={value}",
            )
    content = (directory / LoraAdapter.weights_file).read_bytes()
    return hashlib.sha256(content).hexdigest()[:32]


def read_adapter(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the sections `model` and `peft` of the run that exported an adapter.

    They are {} if the directory has no adapter. The type of the weights is that of the adapter's.

    Raises:
        UserError: a file of the adapter is missing or damaged.
    """
    kind: type[Adapter] = LoraAdapter
    if not (directory / kind.config_file).is_file():
        kind = PrefixAdapter
    file = directory / kind.config_file
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        assert_regular(directory / kind.weights_file)
        with safe_open(directory / kind.weights_file, "pt") as tensors:
            names = sorted(tensors.keys())
            # What has to be allocated follows from the file, whatever its neighbor says. Of all
            # tensors, the first one by its name is a lora_A or the keys of a prefix.
            shapes = {name: tensors.get_slice(name).get_shape() for name in names}
            dtype = _DTYPES[tensors.get_slice(names[0]).get_dtype()]
        path = config["base_model_name_or_path"]
        if config.get("revision"):
            path += f"@{config['revision']}"
        model = {"path": path, "dtype": dtype}
        return {"model": model, "peft": kind.keys(config, shapes)}
    except (*DAMAGE, SafetensorError) as error:
        raise UserError(
            f"{directory} does not hold an adapter: {type(error).__name__}: {error}",
            fix="export the run again; if it has adapter_model.bin, load and save it with peft",
        ) from error


_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""Values of model.dtype by the names of types in safetensors."""
