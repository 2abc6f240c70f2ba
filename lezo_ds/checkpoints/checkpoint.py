"""Models on disk: which directories hold one, and which of them are refused."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import torch
from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lezo_ds.errors import HubError, UserError
from lezo_ds.files import DAMAGE
from lezo_ds.forward.blocks import BlockLayout, find_blocks
from lezo_ds.sharding.files import WeightFiles, has_safetensors

_HUB_SECONDS = 2.0
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def resolve_model(model: str) -> Path:
    """Return the local directory of a model: `model` itself, or the hub's copy, downloaded if needed.

    HubError is raised if the hub cannot be reached, and the model is not in the local cache.
    """
    directory = Path(model)
    if not directory.is_dir():
        problem = hub_problem()
        try:
            patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
            directory = Path(
                snapshot_download(model, allow_patterns=patterns, local_files_only=bool(problem))
            )
        except (
            Exception
        ) as error:  # the hub client raises many types: offline, not found, bad name, network
            is_final = isinstance(error, HFValidationError | RepositoryNotFoundError)
            raise (UserError if is_final else HubError)(
                f"model.path {model} is neither a directory nor a model that can be downloaded from the hub: "
                f"{problem or _first_line(error)}",
                fix="check the name, or download the model first and set model.path to its directory",
            ) from error
    try:
        has_config = isinstance(json.loads((directory / "config.json").read_bytes()), dict)
    except DAMAGE:
        has_config = False
    if not has_config:
        fix = "set model.path to the directory that holds config.json and the weights"
        raise UserError(f"model.path {model} has no config.json, or a damaged one", fix=fix)
    if not has_safetensors(directory):
        fix = "convert .bin files once with transformers: from_pretrained, then save_pretrained"
        raise UserError(f"model.path {model} has no weights as safetensors", fix=fix)
    return directory


@functools.cache
def hub_problem() -> str:
    """Return why the hub does not answer within 2 s, or "". Its own clients try for minutes."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", _HUB_SECONDS))
    try:  # in a thread: a name server may take longer
        answer = ThreadPoolExecutor(1).submit(
            get_session().head, constants.ENDPOINT, timeout=seconds
        )
        answer.result(seconds)
    except Exception as error:  # of the network, a proxy or certificates
        waits = f"{seconds:g} s (HF_HUB_ETAG_TIMEOUT=10 waits longer)"
        return f"{constants.ENDPOINT} does not answer within {waits}: {_first_line(error)}"
    return ""


def load_model_config(directory: Path) -> Any:
    """Return the transformers config of a model without quantized weights or code of its own."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(
            f"the config of {directory} is not that of a model that transformers knows: {_first_line(error)}",
            fix="update transformers, or use another model (remote code is never run)",
        ) from error
    if quantization := getattr(config, "quantization_config", None):
        raise UserError(
            f"the weights of {directory} are quantized: {dict(quantization).get('quant_method')}",
            fix="set model.path to the checkpoint before it was quantized",
        )
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        attention = getattr(part, "_attn_implementation", None)
        if attention is not None and "/" in str(
            attention
        ):  # transformers 5 would load it from the hub
            raise UserError(
                f"the config of {directory} names code on the hub, which is never run: {attention}",
                fix="remove attn_implementation from config.json",
            )
    return config


def build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a causal language model on the meta device, where only its buffers take memory."""
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            own_config = copy.deepcopy(config)  # the model keeps it and changes it
            model = AutoModelForCausalLM.from_config(
                own_config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # of many types, for a config.json that is damaged
        name = type(config).__name__
        raise _not_causal(
            f"{name} is not that of a causal language model: {_first_line(error)}"
        ) from error
    is_decoder = getattr(model.config, "is_decoder", False)
    if model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        raise _not_causal(
            f"{type(model).__name__} is an encoder: its tokens see those that follow them"
        )
    model.tie_weights()
    model.config.use_cache = False
    return model.eval()  # type: ignore[no-any-return]


def _not_causal(what: str) -> UserError:
    return UserError(
        what, fix="set model.path to a decoder, such as OPT, Llama, Qwen, Mistral or GPT-2"
    )


def build_checked(directory: Path, dtype: str) -> tuple[nn.Module, BlockLayout]:
    """Build the model of a directory on the meta device and check its files. Its weights are not read."""
    model = build_on_meta(load_model_config(directory), DTYPES[dtype])
    layout = find_blocks(model)
    refuse_separate_experts(model, layout)
    check_files(model, directory)
    return model, layout


def refuse_separate_experts(model: nn.Module, layout: BlockLayout) -> None:
    """Refuse a block with a list of experts that run only if a token chooses them.

    Ranks whose tokens chose different modules would wait forever for each other's weights. Transformers 5
    keeps the experts of a block in one module that always runs.
    """
    for name, module in model.get_submodule(layout.path).named_modules():
        if name.rpartition(".")[2] == "experts" and isinstance(
            module, nn.ModuleList | nn.ModuleDict
        ):
            raise UserError(
                f"each expert of {type(model).__name__} is a module of its own: {layout.path}.{name}",
                fix="update transformers, or use another model, such as Mixtral",
            )


def check_files(model: nn.Module, directory: Path) -> None:
    """Check that a directory holds the weights of a model, and nothing that the model needs besides them."""
    names, state = parameter_names(model), model.state_dict()
    files = open_weights(model, directory)
    files.find(names, {name: tuple(state[name].shape) for name in names})
    for name in state.keys() - {alias for aliases in names.values() for alias in aliases}:
        if name in files and not torch.equal(
            files.read([name]).to(state[name]), state[name].flatten()
        ):
            raise UserError(
                f"{directory} holds values of {name}, which are neither loaded nor saved: it is no parameter",
                fix="use a model whose parameters are all that it learned",
            )


def open_weights(model: nn.Module, directory: Path) -> WeightFiles:
    """Open the weights of a model that transformers can load, under their names in the model."""
    prefix = getattr(model, "base_model_prefix", "")
    return WeightFiles(directory, prefix=prefix, conversions=get_model_conversion_mapping(model))


def parameter_names(
    model: nn.Module, own_name: Callable[[str], str] = str
) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by its first name. Tied parameters have several.

    `own_name` maps a name in the module tree to the parameter's own (`Adapter.own_name`).
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    return {aliases[0]: tuple(aliases) for aliases in names.values()}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
