"""Models on disk: which directories hold one, and which of them are refused."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import accelerate
import torch
from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import CHAT_TEMPLATE_DIR, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from lezo_ds.config.paths import split_revision
from lezo_ds.errors import HubError, UserError, did_you_mean, first_line
from lezo_ds.forward.blocks import BlockLayout, find_blocks, freeze_other_inputs
from lezo_ds.forward.rope import rotate_each_row
from lezo_ds.noise import Region
from lezo_ds.sharding.files import (
    QUANTIZATION_KEYS,
    NameLists,
    WeightFiles,
    fp8_block,
    has_weights,
    sections_of,
    weight_files,
)
from lezo_ds.sharding.parameters import own_name

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_USE_A_DECODER = "set model.path to a decoder, such as OPT, Llama, Qwen, Mistral or GPT-2"
_ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "cpmant", "paligemma", "xlnet"}
"""Families of encoders, which are decoders if their config says so."""
_MOST_LAYERS = 2000
"""Most layers of a model. The largest ones have some hundred; building a million takes hours."""
_MOST_NAMED = 3
"""Most tensors that are named, of those that are not read."""
_COMPARED_AT_ONCE = 1 << 24
"""Most elements of each of two weights that are in memory while they are compared."""
_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "README.md"]
"""What transformers reads of a model and its tokenizer; a folder has further chat templates. The
card names the license, for the card of an export."""
_NOT_READ = ["*/*.safetensors", "consolidated*.safetensors"]
"""Copies of the weights in the formats of other libraries, which transformers does not read."""
_HEADER_BYTES_OF_TENSOR = 512
"""Most bytes of a tensor in the header of a file: a name of about 100 letters, shape and place."""
_OF_ANOTHER_MODEL = re.compile(
    r"(score|classifier|classification_head|qa_outputs|reward_head|regression_head)\."
    r"|.*\.lora_[AB]\."
)
"""Names of tensors without which a checkpoint is another model: other heads than that of a language
model, and adapters that are not merged."""
_ABOUT_VALUES = re.compile(r"(?P<weight>.+)[._](\w*scale\w*|\w*zero\w*|absmax|quant\w*)")
"""Names of tensors that say what the values of a weight mean, which is then quantized."""
_FURTHER_LAYERS = re.compile(r"n(um)?_\w*(nextn|mtp)|mtp_num")
"""Keys that count layers for the prediction of several tokens, which transformers does not have."""
_NOT_EXPORTED = {
    *("auto_map", "custom_pipelines", "dtype", "torch_dtype", "transformers_weights"),
    *QUANTIZATION_KEYS,
}
"""Keys of a config.json about other files of its directory, or the numbers in them."""


def resolve_model(model: str) -> Path:
    """Return the local directory of a model: `model` itself, or the hub's copy.

    Args:
        model: a directory, or the id of a model on the hub, which is downloaded if needed.
            ID@REVISION is a branch, tag or commit of it.

    Raises:
        HubError: the hub cannot be reached, and the model is not in the local cache.
        UserError: the hub has no such model, or the directory has no config.json, no weights,
            or a link to a file elsewhere.
    """
    directory = Path(model)
    if directory.is_file():
        raise _no_model(model, directory)
    if not directory.is_dir():
        directory = _download(model)
    # If there is an adapter too, transformers loads the weights of the adapter's base model.
    is_adapter = (directory / "adapter_config.json").is_file()
    if is_adapter or not (directory / "config.json").is_file():
        raise _no_model(model, directory)
    if not has_weights(directory):
        raise _no_weights(model, directory)
    weights = [directory / name for name in weight_files(directory)[0]]
    for file in (*directory.iterdir(), *directory.glob(f"{CHAT_TEMPLATE_DIR}/*"), *weights):
        _assert_own_file(file, directory)
    return directory


def _no_weights(model: str, directory: Path) -> UserError:
    """Return that a directory has no weights under the names that transformers reads."""
    others = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    found = ", ".join(sorted(path.name for path in others)[:_MOST_NAMED]) or "no other weights"
    return UserError(
        f"model.path {model} has no weights in {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}, and no index "
        f"of several files; it has {found}",
        fix="in a copy of the model of your own, give a file of all weights one of these names, or "
        "use another copy",
    )


def _assert_own_file(file: Path, directory: Path) -> None:
    """Raise UserError for a link to a file outside the model's directory, or a pipe.

    A model may come from anyone. Its texts are copied to each snapshot and export, so a link to a
    private file would be published, and reading a pipe would never end. In the hub's cache,
    `models--NAME/snapshots/REVISION` has links to `models--NAME/blobs`.
    """
    target = Path(os.path.realpath(file))  # Path.resolve would raise if links go round
    folder = target.parent
    is_in_cache = folder.name == "blobs" and folder.parent.name.startswith("models--")
    root = Path(os.path.realpath(directory))
    problem = ""
    if not is_in_cache and not target.is_relative_to(root):
        problem = f"is a link to {target}, out of the model's directory"
    elif file.exists() and not file.is_file() and not file.is_dir():
        problem = "is no regular file"
    if problem:
        raise UserError(f"{file} {problem}", fix="remove it, or put a copy of a file in its place")


def _no_model(model: str, path: Path) -> UserError:
    """Return what a path is that does not hold a model, and what to name instead."""
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        return UserError(
            f"model.path {model} has GGUF weights, which are for inference only",
            fix="set model.path to the model that it was made from, with safetensors",
        )
    if (path / "adapter_config.json").is_file():
        return UserError(
            f"model.path {model} holds an adapter, not a base model",
            fix="merge it once with peft: AutoPeftModelForCausalLM.from_pretrained, "
            "merge_and_unload, save_pretrained; or set peft.kind=lora, peft.path to the adapter, "
            "and model.path to its base model; or, if it is merged, remove adapter_config.json",
        )
    if (path / "prefix_config.json").is_file():
        return UserError(
            f"model.path {model} holds a prefix, not a base model",
            fix="set model.path to the base model; predict, evaluate and chat take the prefix as "
            "--model",
        )
    return UserError(
        f"model.path {model} has no config.json",
        fix="set model.path to the directory that holds config.json and the weights",
    )


def _download(model: str) -> Path:
    problem = hub_problem()
    try:
        name, revision = split_revision(model)
        fetch = functools.partial(
            snapshot_download, name, revision=revision, local_files_only=bool(problem)
        )
        directory = Path(fetch(allow_patterns=_HUB_PATTERNS, ignore_patterns=_NOT_READ))
        # The weights of an older model, or files in folders that an index names.
        names = weight_files(directory)[0] if has_weights(directory) else [WEIGHTS_NAME]
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            fetch(allow_patterns=missing)
        return directory
    except UserError:
        raise
    except Exception as error:  # the client raises many types: offline, not found, bad name
        fix = "check the name, or download the model first and set model.path to its directory"
        parent = Path(model).parent
        near = fix
        if parent.is_dir():
            near = did_you_mean(Path(model).name, [path.name for path in parent.iterdir()], fix)
        # The hub also has names with one slash, or none.
        is_path = near != fix or ("/" in model and parent.is_dir())
        is_final = isinstance(error, HFValidationError | RepositoryNotFoundError) or is_path
        kind = UserError if is_final else HubError
        raise kind(
            f"model.path {model} is neither a directory nor a model that can be downloaded from "
            f"the hub: {problem or first_line(error)}",
            fix=near,
        ) from error


@functools.cache
def hub_problem() -> str:
    """Return why the hub does not answer within 2 s, or "". Its own clients try for minutes.

    The environment variable HF_HUB_ETAG_TIMEOUT sets another number of seconds.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "2"))
    try:
        # In a thread, because a slow name server does not respect the timeout.
        head = get_session().head
        ThreadPoolExecutor(1).submit(head, constants.ENDPOINT, timeout=seconds).result(seconds)
    except Exception as error:  # of the network, a proxy or certificates
        return (
            f"{constants.ENDPOINT} does not answer within {seconds:g} s (HF_HUB_ETAG_TIMEOUT=10 "
            f"waits longer): {first_line(error)}"
        )
    return ""


def load_model_config(directory: Path) -> Any:
    """Return the transformers config of a model, as that of weights that are not quantized.

    Raises:
        UserError: transformers does not know the model, its weights are quantized in another way
            than by blocks in FP8, it has too many layers, or its config names code on the hub. Code
            that comes with a model is never run.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # of many types, for a config.json that is damaged
        raise UserError(
            f"{directory / 'config.json'} is not the configuration of a model in transformers: "
            f"{first_line(error)}",
            fix="update transformers, or use another model (remote code is never run)",
        ) from error
    is_quantized = fp8_block(directory) is not None
    parts = [getattr(config, name) for name in config.sub_configs]
    # A part that a model does not have, such as an audio encoder, is None.
    for section in filter(None, (config, *parts)):
        if is_quantized:  # the weights are dequantized where they are read
            vars(section).pop("quantization_config", None)
        num_layers = getattr(section, "num_hidden_layers", 0)
        if isinstance(num_layers, int) and num_layers > _MOST_LAYERS:
            raise UserError(
                f"{directory / 'config.json'} asks for {num_layers:.4g} layers; "
                f"the limit is {_MOST_LAYERS}",
                fix="download the model again, or use another one",
            )
        if not section.return_dict:
            raise UserError(
                f"return_dict={section.return_dict} in {directory / 'config.json'}: the model "
                "would return tuples, whose parts have no names",
                fix="remove return_dict",
            )
        for name, value in vars(section).items():
            # torch refuses such a number in a forward pass, even where nothing is dropped.
            is_share = name.endswith(("dropout", "pdrop")) and isinstance(value, int | float)
            if is_share and not 0 <= value <= 1:
                raise UserError(
                    f"{name}={value} in {directory / 'config.json'} is not from 0 to 1",
                    fix="download the model again, or correct it",
                )
        attention = getattr(section, "_attn_implementation", None)
        # Transformers 5 would load an implementation whose name has a slash from the hub.
        if attention is not None and "/" in str(attention):
            raise UserError(
                f"the config of {directory} names code on the hub, which is never run: {attention}",
                fix="remove attn_implementation from config.json",
            )
    return config


def stored_dtype(directory: Path) -> str:
    """Return the dtype in the config of a model, as a key of `DTYPES`; fp32 for any other one."""
    config = load_model_config(directory)
    stored = config.dtype or config.get_text_config(decoder=True).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


def num_positions(config: Any) -> int | None:
    """Return the most tokens of a text that a model reads, or None if its config has no limit.

    Scaled rotary positions go further than the `max_position_embeddings` of the model before it was
    scaled, which most configs keep.
    """
    decoder = config.get_text_config(decoder=True)
    limit: int | None = getattr(decoder, "max_position_embeddings", None)
    rope = getattr(decoder, "rope_parameters", None) or {}
    if limit is not None and rope.get("rope_type") in ("yarn", "dynamic", "linear"):
        original = rope.get("original_max_position_embeddings", limit)
        limit = max(limit, int(original * (rope.get("factor") or 1)))
    return limit


def auto_class(config: Any) -> Any:
    """Return the class of transformers that opens a language model: one of text, or of more."""
    is_of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_of_text else AutoModelForMultimodalLM


def build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a causal language model on the meta device, where only its buffers take memory.

    Parameters that text cannot reach, such as those of a vision tower, do not require gradients.

    Raises:
        UserError: the config is damaged, or that of an encoder.
    """
    unset_hf_deepspeed_config()  # that of a Trainer before: transformers would shard the model
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            own_config = copy.deepcopy(config)  # the model keeps it and changes it
            model = auto_class(config).from_config(own_config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # of many types, for a config.json that is damaged
        fix = f"correct config.json, or {_USE_A_DECODER}"
        if isinstance(error, ImportError):  # of FlashAttention, which a config may ask for
            fix = "install that package, or remove attn_implementation from config.json"
        raise UserError(
            f"{type(config).__name__} is not the configuration of a causal language model: "
            f"{first_line(error)}",
            fix=fix,
        ) from error
    is_decoder = getattr(model.config, "is_decoder", False)
    text = model.config.get_text_config(decoder=True)
    has_encoder = (
        getattr(model.config, "is_encoder_decoder", False)
        or getattr(text, "is_causal", True) is False
        or getattr(text, "use_bidirectional_attention", None) is True
    )
    if has_encoder or (model.config.model_type in _ENCODERS and not is_decoder):
        raise UserError(
            f"{type(model).__name__} has an encoder, or reads texts in both directions: its tokens "
            "attend to later ones",
            fix=_USE_A_DECODER,
        )
    model.tie_weights()
    precise = "|".join(model._get_dtype_plan(dtype)).replace("*", ".*")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if precise and tensor.is_floating_point() and re.search(precise, name):
            tensor.data = tensor.data.float()
    freeze_other_inputs(model)
    rotate_each_row(model)
    for section in (model.config, text):
        section.use_cache = False
        section.output_router_logits = False  # a balancing loss of tokens, which nothing reads
    return model.eval()  # type: ignore[no-any-return]


def build_model(directory: Path, dtype: torch.dtype) -> nn.Module:
    """Build the model of a directory on the meta device, with the tied weights that it has.

    As in transformers, weights that config.json ties stay apart if the checkpoint has both of them,
    with unlike values.
    """
    config = load_model_config(directory)
    model = build_on_meta(config, dtype)
    if _ties_unlike_weights(model, directory, dtype):
        config.tie_word_embeddings = False
        config.get_text_config(decoder=True).tie_word_embeddings = False
        model = build_on_meta(config, dtype)
    return model


def _ties_unlike_weights(model: Any, directory: Path, dtype: torch.dtype) -> bool:
    """Return whether a checkpoint has two weights, unlike in a dtype, that its config ties.

    A directory without weights, whose memory is planned, has what its config says.
    """
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not pairs or not has_weights(directory):
        return False
    files = open_weights(model, directory)
    for target, source in pairs.items():
        one = files.stored_as(target)
        other = files.stored_as(source)
        if one is None or other is None or one == other:
            continue
        size = model.get_parameter(source).numel()
        for start in range(0, size, _COMPARED_AT_ONCE):
            region = Region.run(start, min(_COMPARED_AT_ONCE, size - start))
            parts = [files.read(tensors, region) for tensors in (one, other)]
            if not torch.equal(parts[0].to(dtype), parts[1].to(dtype)):
                return True
    return False


def saved_config(model: Any, directory: Path) -> dict[str, Any]:
    """Return the config.json of the weights of a model that was built from a directory.

    It is the directory's own, unless transformers took the text model out of a larger one: then it
    is the text model's. The class that it names is the model's.
    """
    config = load_model_config(directory)
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    if type(config) is not type(model.config):
        config = config.get_text_config(decoder=True)
        values = json.loads(config.to_json_string())
    ties = getattr(model.config, "tie_word_embeddings", None)
    if ties != getattr(config, "tie_word_embeddings", None):
        values["tie_word_embeddings"] = ties
    for section in sections_of(values):
        for key in _NOT_EXPORTED.intersection(section):
            del section[key]
        for key in filter(_FURTHER_LAYERS.match, section):
            section[key] = 0  # `check_files` has named them
    return values | {"architectures": [type(model).__name__]}


def build_checked(directory: Path, dtype: str) -> tuple[nn.Module, BlockLayout]:
    """Build the model of a directory on the meta device and check its files.

    Only weights that may be tied are read. `dtype` is a key of `DTYPES`.
    """
    model = build_model(directory, DTYPES[dtype])
    layout = find_blocks(model)
    check_files(model, directory)
    return model, layout


def check_files(model: nn.Module, directory: Path) -> None:
    """Check that a directory holds all weights of a model and what else, and read its buffers.

    A model may have buffers besides its parameters, such as what corrects the scores of a router.
    They are small, so each rank has all of them. They are not trained, and an export has them.

    Raises:
        UserError: a weight is missing, or the checkpoint is that of another kind of model.
    """
    names = parameter_names(model)
    files = open_weights(model, directory)
    if not files.tensors:
        raise UserError(
            f"the weights of {directory} are no tensors with names: a training checkpoint has them "
            "one level down, such as under state_dict",
            fix=f"load it with torch, and save that level alone as {WEIGHTS_NAME}",
        )
    _name_unread(model, files, chain.from_iterable(names.values()))
    files.find(names, {name: tuple(model.get_parameter(name).shape) for name in names})
    buffers = dict(persistent_buffers(model))
    stored: NameLists = {name: (name,) for name in buffers if files.stored_as(name) is not None}
    shapes = {name: tuple(buffers[name].shape) for name in stored}
    for name, tensors in files.find(stored, shapes, are_weights=False).items():
        buffer = buffers[name]
        buffer.copy_(files.read(tensors, Region.run(0, buffer.numel())).view_as(buffer))


def _name_unread(model: nn.Module, files: WeightFiles, parameters: Iterable[str]) -> None:
    """Log the tensors of a checkpoint that a model does not have, as transformers' UNEXPECTED.

    Buffers that a model computes, which older checkpoints store, are none of them.

    Raises:
        UserError: without these tensors, the checkpoint is another model.
    """
    buffers = (own_name(name) for name, _ in model.named_buffers())
    unread = [
        name
        for name in files.unread(chain(parameters, buffers))
        if not name.endswith("rotary_emb.inv_freq")
    ]
    read = files.tensors.keys() - set(unread)
    for name in unread:
        if _OF_ANOTHER_MODEL.match(name):
            raise UserError(
                f"{files.directory} is not a language model alone: it has {name}, as a classifier, "
                "a reward model or an adapter that is not merged does",
                fix="set model.path to the language model that it was made from, or merge the "
                "adapter with peft",
            )
        about = _ABOUT_VALUES.fullmatch(name)
        if about and about["weight"] in read:
            raise UserError(
                f"the weights of {files.directory} are quantized: {name} says what the values of "
                f"{about['weight']} mean, and config.json does not say how",
                fix="set model.path to the checkpoint before it was quantized",
            )
    if unread:
        logger.warning(
            "%d of %d tensors in %s are not read, so they are neither trained nor exported: the "
            "model of its config.json does not have %s%s",
            len(unread),
            len(files.tensors),
            files.directory,
            ", ".join(unread[:_MOST_NAMED]),
            ", ..." if unread[_MOST_NAMED:] else "",
        )


def open_weights(model: nn.Module, directory: Path) -> WeightFiles:
    """Open the weights of a model that transformers can load, under their names in the model."""
    # A checkpoint may have each expert of a parameter, and its scales, as a tensor of its own.
    shapes = [getattr(each, "ds_shape", each.shape) for each in model.parameters()]
    num_tensors = sum(4 * shape[0] if len(shape) > 2 else 2 for shape in shapes)
    return WeightFiles(
        directory,
        prefix=getattr(model, "base_model_prefix", ""),
        conversions=get_model_conversion_mapping(model),
        most_header_bytes=(1 << 20) + num_tensors * _HEADER_BYTES_OF_TENSOR,
    )


def parameter_names(model: nn.Module) -> NameLists:
    """Return all own names of each parameter, by its first name. Tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    return {aliases[0]: tuple(aliases) for aliases in names.values()}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of what a model stores besides its parameters (see `check_files`)."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield own_name(name), buffer
