"""Models on disk: finds them, builds them on the meta device, and reads slices of their weights."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import socket
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import WeightTransform
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lezo_ds.errors import HubError, UserError
from lezo_ds.files import failures_named, make_directory, sync
from lezo_ds.sharding.stored_parameters import StoredParameter, stored_parameters

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHT_TYPES = ("F64", "F32", "BF16", "F16")  # as safetensors spells them
NOT_QUANTIZED = "set model.path to the checkpoint that this one was made from, before it was quantized"
_SAFE_TORCH = (2, 10)
"""In earlier versions, loading a .bin file can run code despite weights_only=True (CVE-2025-32434 and
CVE-2026-24747)."""


def resolve_model(model: str) -> Path:
    """Return the local directory of a model: `model` itself, or the hub's copy, downloaded if needed.

    Raises:
        UserError: `model` is a directory without a config.json, or a GGUF file or a directory with nothing
            else, or the hub does not have it.
        HubError: the hub cannot be reached, and the model is not in the local cache.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        raise _only_gguf(path)
    if path.is_dir():
        if not (has_safetensors(path) or any(path.glob("pytorch_model*.bin"))):
            for file in sorted(path.glob("*.gguf"))[:1]:
                raise _only_gguf(file)
        if not (path / "config.json").is_file():
            raise UserError(
                f"model.path {model} holds no config.json",
                got=", ".join(sorted(p.name for p in path.iterdir())[:8]) or "an empty directory",
                expected="a Hugging Face model directory",
                fix="set model.path to the directory that holds config.json and the weights",
            )
        return path
    patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
    try:
        found = Path(snapshot_download(model, allow_patterns=patterns))
        if not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(model, allow_patterns=[*patterns, "pytorch_model*.bin"]))
    except Exception as error:  # the hub client raises many types: offline, not found, bad name, network
        final = isinstance(error, HFValidationError | RepositoryNotFoundError)
        raise (UserError if final else HubError)(
            f"model.path {model} is neither a directory nor a model that can be downloaded from the hub",
            got=_first_line(error),
            expected="a directory with config.json and safetensors, or a hub id such as facebook/opt-1.3b",
            fix="check the name, or download the model first and set model.path to its directory",
        ) from error
    return found


def _only_gguf(file: Path) -> UserError:
    return UserError(
        f"{file} is a model in GGUF, which cannot be read in slices",
        got="no safetensors",
        expected="a Hugging Face model directory",
        fix="convert it: AutoModelForCausalLM.from_pretrained(DIR, gguf_file=FILE).save_pretrained(NEW)",
    )


def load_model_config(directory: Path) -> Any:  # noqa: ANN401
    """Return the transformers config of a model directory.

    Raises:
        UserError: the config cannot be read, names code, transformers does not know the model type, or the
            weights are quantized.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(
            f"the config of {directory} cannot be read",
            got=_first_line(error),
            expected="a model type that transformers knows (remote code is never run)",
        ) from error
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "unknown")
        raise UserError(
            f"the weights of {directory} are quantized",
            got=f"quantization_config in config.json, with quant_method {method}",
            expected="weights in fp32, bf16 or fp16",
            fix=NOT_QUANTIZED,
        )
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        attention = getattr(part, "_attn_implementation", None)
        if attention is not None and "/" in str(attention):  # transformers 5 would load it from the hub
            raise UserError(
                f"the config of {directory} names code on the hub",
                got=f"attn_implementation {attention}",
                expected="an implementation that transformers has (remote code is never run)",
                fix="remove attn_implementation from config.json",
            )
    return config


def build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:  # noqa: ANN401
    """Build a causal language model on the meta device. Its parameters take no memory; its buffers are real.

    Raises:
        UserError: the config is not that of a causal language model, but that of an encoder, for example.
    """
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            own_config = copy.deepcopy(config)  # the model keeps it and changes it
            model = AutoModelForCausalLM.from_config(own_config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise UserError(
            f"{type(config).__name__} is not the config of a causal language model",
            got=_first_line(error),
            expected="a decoder, such as OPT, Llama, Qwen, Mistral, GPT-NeoX or GPT-2",
            fix="set model.path to a decoder",
        ) from error
    is_decoder = getattr(model.config, "is_decoder", False)
    if model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        raise UserError(
            f"{type(model).__name__} is an encoder: its tokens see those that follow them",
            got=f"model_type {model.config.model_type}, with is_decoder false",
            expected="a decoder, such as OPT, Llama, Qwen, Mistral, GPT-NeoX or GPT-2",
            fix="set model.path to a decoder",
        )
    model.tie_weights()
    model.config.use_cache = False
    return model.eval()  # type: ignore[no-any-return]


class WeightFiles:
    """The weights of a model directory, which are read in slices.

    Args:
        directory: holds model.safetensors, or an index and its files, or pytorch_model*.bin (converted once).
        prefix: the base-model prefix (for example, "model"), which a checkpoint of the bare decoder lacks.
        conversions: how the model's parameters are made from tensors of other names (`stored_parameters`).
        single: name of the file that holds all tensors, if it is not one of the above.

    Raises:
        UserError: the directory holds no weights, or they cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefix: str = "",
        conversions: Sequence[WeightTransform] = (),
        single: str | None = None,
    ) -> None:
        if single is None:
            self._files = _tensor_files(with_safetensors(directory))
        else:
            self._files = _tensors_of(directory / single)
        self._stored = stored_parameters(self._files, conversions)
        self._prefix = prefix
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}

    def __contains__(self, stored: str) -> bool:
        """Return whether a tensor of this name is stored."""
        return stored in self._files

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._open.close()
        self._handles.clear()

    def find(self, names: Mapping[str, tuple[str, ...]]) -> dict[str, StoredParameter]:
        """Map each parameter to the tensors that are stored for its name or the name of a tied parameter.

        Args:
            names: all names of each parameter, by its first name.

        Raises:
            UserError: a parameter is not stored under any of its names, or in another form.
        """
        found: dict[str, StoredParameter] = {}
        for name, aliases in names.items():
            spellings = [spelling for alias in aliases for spelling in self._spellings(alias)]
            stored = next((self._stored[s] for s in spellings if s in self._stored), None)
            if stored is not None:
                found[name] = stored
        missing = sorted(set(names) - set(found))
        if missing:
            held = ", ".join(sorted(self._files)[:3])
            raise UserError(
                f"the checkpoint lacks {len(missing)} of the model's {len(names)} parameters",
                got=f"no tensor for {', '.join(missing[:3])}; it holds {held}, ...",
                expected="one tensor for each parameter of the config's architecture",
                fix="use a checkpoint that belongs to the config.json",
            )
        for name, stored in found.items():
            if stored.unknown_conversion:
                raise UserError(
                    f"the checkpoint stores parameter {name} in a form that cannot be read in slices",
                    got=f"{stored.tensors[0]}, which transformers converts by {stored.unknown_conversion}",
                    expected="the parameter as it is, or experts that are stacked",
                    fix="load it with transformers and save it with save_original_format=False",
                )
        return found

    def refuse_quantized(self, names: Mapping[str, tuple[str, ...]], others: Collection[str] = ()) -> None:
        """Check, from the names and types of all tensors, that the files hold plain weights.

        A quantized checkpoint holds integers or 8-bit floats, and scales next to them. A tensor of a module
        that the model lacks does not matter (for example, a head for another task).

        Args:
            names: all names of each parameter, by its first name.
            others: names of other tensors that the model has.

        Raises:
            UserError: a tensor has a type that weights do not have, or a module of the model has no such
                tensor.
        """
        known = {s for aliases in names.values() for alias in aliases for s in self._spellings(alias)}
        owners = known | {name.rpartition(".")[0] for name in known}
        used = {t for name, stored in self._stored.items() if name in known for t in stored.tensors}
        for tensor in sorted(self._files.keys() - set(others)):
            kind = self._view(tensor).get_dtype()
            if tensor in used and kind not in _WEIGHT_TYPES:
                raise UserError(
                    f"tensor {tensor} of the checkpoint does not hold plain weights",
                    got=f"type {kind}, as in quantized checkpoints",
                    expected=" or ".join(_WEIGHT_TYPES),
                    fix=NOT_QUANTIZED,
                )
            if tensor not in used and tensor.rpartition(".")[0] in owners:
                raise UserError(
                    f"the checkpoint holds {tensor}, and that module of the model has no such tensor",
                    got=f"type {kind}, shape {self.shape(tensor)}",
                    expected="only the model's weights, without scales or zeros of a quantized checkpoint",
                    fix=NOT_QUANTIZED,
                )

    def _spellings(self, name: str) -> tuple[str, ...]:
        if not self._prefix:
            return (name,)
        return (name, f"{self._prefix}.{name}", name.removeprefix(self._prefix + "."))

    def parameter_shape(self, stored: StoredParameter) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        shapes = [self.shape(tensor) for tensor in stored.tensors]
        if not stored.num_stacked:
            return shapes[0]
        group = shapes[: len(shapes) // stored.num_stacked]
        if shapes != group * stored.num_stacked:
            return (sum(map(math.prod, shapes)),)  # experts of unequal shapes are no parameter of any model
        return stored.num_stacked, sum(shape[0] for shape in group), *group[0][1:]

    def read_parameter(self, stored: StoredParameter, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a flattened parameter, in its stored dtype."""
        parts, begin = [], 0
        for tensor in stored.tensors:
            end = begin + math.prod(self.shape(tensor))
            if begin < stop and start < end:
                parts.append(self.read_range(tensor, max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def shape(self, stored: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return tuple(self._view(stored).get_shape())

    def read(self, stored: str) -> Tensor:
        """Read a stored tensor."""
        return self._view(stored)[...]  # type: ignore[no-any-return]

    def read_range(self, stored: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a flattened stored tensor, in its stored dtype.

        Only the rows that contain them are read from the disk.
        """
        view = self._view(stored)
        shape = view.get_shape()
        if len(shape) == 0:
            return view[...].reshape(-1)[start:stop]  # type: ignore[no-any-return]
        row = 1
        for size in shape[1:]:
            row *= size
        first = start // row
        rows = view[first : -(-stop // row)]
        return rows.reshape(-1)[start - first * row : stop - first * row]  # type: ignore[no-any-return]

    def _view(self, stored: str) -> Any:  # noqa: ANN401
        path = self._files[stored]
        if path not in self._handles:
            self._handles[path] = self._open.enter_context(_open_safetensors(path))
        return self._handles[path].get_slice(stored)


def _tensor_files(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if not index.is_file():
        return _tensors_of(directory / _SINGLE)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        outside = [file for file in weight_map.values() if Path(file).name != file]
        if outside:
            raise ValueError(f"{outside[0]!r} is not the name of a file in the same directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} cannot be read",
            got=_first_line(error),
            expected="a weight_map from tensor names to files in the same directory",
            fix="download the model again",
        ) from error
    return {name: directory / file for name, file in weight_map.items()}


def _tensors_of(file: Path) -> dict[str, Path]:
    with _open_safetensors(file) as handle:
        return dict.fromkeys(handle.keys(), file)


def _open_safetensors(path: Path) -> Any:  # noqa: ANN401
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        # safetensors says of a file without permission that there is none.
        forbidden = path.exists() and not os.access(path, os.R_OK)
        raise UserError(
            f"{path} cannot be read",
            got="no permission to read it" if forbidden else _first_line(error),
            expected="a complete safetensors file",
            fix="correct its permissions" if forbidden else "download the model again",
        ) from error


def has_safetensors(directory: Path) -> bool:
    """Return whether a directory holds weights as safetensors."""
    return (directory / _SINGLE).is_file() or (directory / _INDEX).is_file()


def with_safetensors(directory: Path) -> Path:
    """Return a directory that holds the weights as safetensors. Files of type .bin are converted once.

    Raises:
        UserError: the directory holds no weights, or a .bin file cannot be read.
        LezoError: the converted files cannot be written to the user's cache.
    """
    if has_safetensors(directory):
        return directory
    sources = sorted(directory.glob("pytorch_model*.bin"))
    if not sources:
        raise UserError(
            f"{directory} holds no weights",
            got=", ".join(sorted(p.name for p in directory.iterdir())[:8]),
            expected=f"{_SINGLE}, {_INDEX} with its files, or pytorch_model*.bin",
            fix="download the model again or correct model.path",
        )
    facts = "|".join(f"{p.resolve()}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in sources)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lezo_ds" / "converted"
    target = cache / hashlib.sha256(facts.encode()).hexdigest()[:32]
    if not (target / _INDEX).is_file():
        _convert(sources, target)
    return target


def _convert(sources: list[Path], target: Path) -> None:
    """Write each .bin file as safetensors. The index comes last and shows that the conversion is complete.

    huggingface_hub.save_torch_state_dict needs all tensors at once. This function holds one file at a time.
    """
    logger.warning("converting %d .bin file(s) to safetensors in %s, once", len(sources), target)
    weight_map: dict[str, str] = {}
    for number, source in enumerate(sources):
        tensors = _load_plain_tensors(source)
        file = f"model-{number + 1:05d}.safetensors"
        _publish(target / file, partial(_save, tensors))
        weight_map.update(dict.fromkeys(tensors, file))
    _publish(target / _INDEX, lambda path: path.write_text(json.dumps({"weight_map": weight_map})))


def _publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, sync it and rename it.

    The first ranks of several nodes may share the cache and do this at once. Then the last rename wins.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with failures_named(path):
            make_directory(path.parent)
            write(temporary)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _load_plain_tensors(source: Path) -> dict[str, Tensor]:
    """Load a .bin file of tensors by name. It is memory-mapped if possible, and no code in it is run.

    Returns:
        Contiguous tensors. No two of them share memory, because safetensors cannot store shared memory.

    Raises:
        UserError: the file is broken or holds anything but tensors by name, or this version of torch cannot
            read it safely.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        raise UserError(
            f"{source} is not opened, because code in it could run with this version of torch",
            got=f"torch {torch.__version__}",
            expected="torch 2.10 or later, or a model stored as safetensors",
            fix="update torch or get the model as safetensors",
        )
    try:
        # Files that PyTorch wrote before version 1.6 are not zip archives and cannot be memory-mapped.
        mmap = zipfile.is_zipfile(source)
        tensors = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
            raise TypeError("not a mapping of names to tensors")
    except Exception as error:  # torch raises pickle, runtime, zip and end-of-file errors
        raise UserError(
            f"{source} cannot be read as plain tensors",
            got=_first_line(error),
            expected="a PyTorch file of weights without code",
            fix="get the model as safetensors",
        ) from error
    unshared: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = (
            tensor.clone(memory_format=torch.contiguous_format) if storage in seen else tensor.contiguous()
        )
        seen.add(storage)
    return unshared


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
