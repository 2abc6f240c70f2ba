"""A model's checkpoint: which tensors are its weights, and which checkpoints cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from lezo_ds.errors import UserError
from lezo_ds.forward.blocks import BlockLayout, find_blocks
from lezo_ds.sharding.checkpoint_files import (
    DTYPES,
    WeightFiles,
    build_on_meta,
    has_safetensors,
    load_model_config,
)


def build_checked(directory: Path, dtype: str) -> tuple[nn.Module, BlockLayout]:
    """Build the model of a directory on the meta device, and check its files, without reading its weights.

    Args:
        directory: local directory of the model. Files of type .bin are not opened.
        dtype: of the weights: "fp32", "bf16" or "fp16".

    Raises:
        UserError: the model has no transformer blocks, or its experts are modules of their own, or the files
            do not hold its weights.
    """
    model = build_on_meta(load_model_config(directory), DTYPES[dtype])
    layout = find_blocks(model)
    refuse_separate_experts(model, layout)
    if has_safetensors(directory):
        check_files(model, directory)
    return model, layout


def refuse_separate_experts(model: nn.Module, layout: BlockLayout) -> None:
    """Check that no block has a list of experts that run only if a token chooses them.

    Ranks gather the weights of a module when it runs. If their tokens chose different modules, they would
    wait for each other forever. Transformers 5 keeps the experts of a block in one module that always runs.

    Raises:
        UserError: a block has such a list.
    """
    for name, module in model.get_submodule(layout.path).named_modules():
        if name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise UserError(
                f"each expert of {type(model).__name__} is a module of its own",
                got=f"{layout.path}.{name} with {len(module)} modules",
                expected="one module with the experts of a block, as in Mixtral in transformers 5",
                fix="update transformers, or use another model",
            )


def check_files(model: nn.Module, directory: Path) -> None:
    """Check that files hold the weights of a model, and nothing that the model needs besides them.

    Args:
        model: on the meta device, with real buffers.
        directory: holds the files.

    Raises:
        UserError: the weights are quantized, missing or in a form that cannot be read, or the files hold a
            buffer of the model with other values.
    """
    names = parameter_names(model)
    parameters = {alias for aliases in names.values() for alias in aliases}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    files = open_weights(model, directory)
    try:
        files.refuse_quantized(names, buffers)
        files.find(names)
        for name, buffer in buffers.items():
            if name in files and not torch.equal(files.read(name).to(buffer), buffer):
                raise UserError(
                    f"the checkpoint holds values for {name}, which is not a parameter of the model",
                    got="other values than those of a new model",
                    expected="a model whose parameters are all that it learned",
                    fix="use another model, since values outside the parameters are neither loaded nor saved",
                )
    finally:
        files.close()


def open_weights(model: nn.Module, directory: Path) -> WeightFiles:
    """Open the weights of a model that transformers can load, under their names in the model."""
    return WeightFiles(
        directory,
        prefix=getattr(model, "base_model_prefix", ""),
        conversions=get_model_conversion_mapping(model),
    )


def parameter_names(model: nn.Module, own_name: Callable[[str], str] = str) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by its first name. Tied parameters have several.

    Args:
        model: any model.
        own_name: maps a name in the module tree to the parameter's own (`Adapter.own_name`).
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    return {found[0]: tuple(found) for found in names.values()}
