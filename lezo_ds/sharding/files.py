"""Weights on disk, read in slices; and which stored tensors hold which parameter.

A file of safetensors, or a `pytorch_model.bin` of torch, is mapped into memory: a slice costs its
own size, whatever the size of the file. Of the second kind, only tensors are unpickled (torch's
`weights_only`), and no code of the file runs.

Transformers 5 keeps the experts of a block in one parameter, while published checkpoints keep a
tensor for each expert. The conversion mapping of transformers says which tensors make a parameter:

    parameter experts.gate_up_proj [experts, 2 * inner, width]
    = tensors experts.0.w1, experts.0.w3, experts.1.w1, ... one after the other, each flattened

In a checkpoint in block FP8, a matrix [rows, columns] has a scale for each of its blocks. A slice
is read as float32, times the scales of its blocks:

    X.weight            float8_e4m3fn [rows, columns]
    X.weight_scale_inv  [ceil(rows / block rows), ceil(columns / block columns)]
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from lezo_ds.errors import UserError, first_line
from lezo_ds.files import DAMAGE, assert_regular
from lezo_ds.noise import Region

OTHER_CHECKPOINT = "use a checkpoint that belongs to the config.json"
_MOST_MAPPED = 1 << 27
"""Number of bytes after which a file of torch is mapped anew."""
_SCALES = "_scale_inv"
"""What the name of the scales of a matrix adds to the name of the matrix."""
_MOST_HEADER_BYTES = 1 << 24
"""Most bytes of the list of tensors in a file of safetensors, if no model says what it needs."""
_FLOATING = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
"""Types of the weights that are read as they are, as safetensors, or torch, names them."""

QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""Names under which a config.json says that the weights are quantized; the last one is MLX's."""

NameLists = dict[str, tuple[str, ...]]
"""By a parameter's name, all its names, or the tensors that it consists of."""


class _StoredTensor(NamedTuple):
    """Where a tensor is stored, its shape, and its dtype as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The weights of a model directory, in the files that transformers reads.

    Args:
        directory: of the model.
        prefix: of the base model, for example "model". A checkpoint of the bare decoder lacks it.
        conversions: the mapping of transformers, from tensors of other names (`stored_parameters`).
        single: the name of the only file to read, instead of a model's.
        fix: what helps if a parameter is missing.
        most_header_bytes: of a file's list of tensors. Reading 66 MB of it takes a minute.

    Attributes:
        directory: of the model.
        tensors: all that are stored, by name. An index says which file has a tensor.

    Raises:
        UserError: a file is missing or damaged.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefix: str = "",
        conversions: Sequence[WeightTransform] = (),
        single: str | None = None,
        fix: str = OTHER_CHECKPOINT,
        most_header_bytes: int = _MOST_HEADER_BYTES,
    ) -> None:
        self.directory = directory
        self._most_header_bytes = most_header_bytes
        self._fix = fix
        self._prefix = prefix
        self._mapped_file: Path | None = None
        self._mapped: dict[str, Tensor] = {}
        self._num_read = 0  # bytes of mapped tensors
        self._block = fp8_block(directory) or (1, 1)
        self.tensors: dict[str, _StoredTensor] = {}
        file_names, index = ([single], {}) if single else weight_files(directory)
        for file_name in file_names:
            for name, tensor in self._list(directory / file_name).items():
                if index.get(name, file_name) == file_name:
                    self.tensors[name] = tensor
        scales = {name + _SCALES for name in self.tensors}
        self._stored = stored_parameters(self.tensors.keys() - scales, conversions)

    def stored_as(self, name: str) -> tuple[str, ...] | None:
        """Return the tensors that a parameter of this name consists of, or None if it is absent."""
        # The name as it is, with the prefix of the base model, and without it.
        bare = name.removeprefix(f"{self._prefix}.")
        for spelling in (name, f"{self._prefix}.{name}", bare):
            if spelling in self._stored:
                for tensor in self._stored[spelling]:
                    self._assert_scaled(tensor)
                return self._stored[spelling]
        return None

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the tensors, in order, of which no parameter or buffer of these names consists."""
        read = {tensor for name in names for tensor in self.stored_as(name) or ()}
        scales = {name + _SCALES for name in read}
        unread = self.tensors.keys() - read - scales
        return sorted(unread, key=dot_natural_key)

    def as_stored(self, aliases: Sequence[str], value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a parameter as the tensors of these files that it consists of, by their names.

        As transformers does, this adds the prefix that a checkpoint of the bare decoder lacks.

        Args:
            aliases: its names. One that no file has is written under the first of them.
            value: of the shape of the parameter.
        """
        name = next(filter(self.stored_as, aliases), aliases[0])
        tensors = self.stored_as(name) or (name,)
        prefix = f"{self._prefix}."
        if name in self._stored or tensors == (name,) or not name.startswith(prefix):
            prefix = ""
        if len(tensors) == 1:
            yield prefix + tensors[0], value
            return
        shapes = [self.tensors[tensor].shape for tensor in tensors]
        parts = torch.split(value.reshape(-1), list(map(math.prod, shapes)))
        for tensor, shape, part in zip(tensors, shapes, parts, strict=True):
            yield prefix + tensor, part.view(shape)

    def find(
        self,
        names: NameLists,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        are_weights: bool = True,
    ) -> NameLists:
        """Return the tensors whose flattened values, one after the other, are each parameter.

        Args:
            names: all names of each parameter, by its first name. Tied parameters have several.
            shapes: of each parameter, by its first name.
            are_weights: whether they are weights, which are floating-point numbers.

        Raises:
            UserError: a parameter is missing, has another shape, or is no floating-point number.
        """
        found: NameLists = {}
        for name, aliases in names.items():
            for alias in aliases:
                stored_as = self.stored_as(alias)
                if stored_as is not None:
                    found.setdefault(name, stored_as)
        missing = sorted(names.keys() - found.keys())
        if missing:
            examples = ", ".join(sorted(self.tensors)[:3]) or "no tensor with a name"
            raise UserError(
                f"{self.directory} lacks {len(missing)} of the model's {len(names)} parameters, "
                f"such as {missing[0]}; it has {examples}, ...",
                fix=self._fix,
            )
        for name, tensors in found.items():
            if not tensors:
                raise UserError(
                    f"{self.directory} stores parameter {name} in a form that cannot be read in "
                    "slices",
                    fix="load it with transformers and save it with save_original_format=False",
                )
            for tensor in tensors:
                dtype = self.tensors[tensor].dtype
                # FP8 has been checked before.
                if are_weights and dtype not in _FLOATING and tensor + _SCALES not in self.tensors:
                    raise UserError(
                        f"{tensor} in {self.directory} is {dtype}, and a weight is a "
                        "floating-point number",
                        fix="set model.path to the checkpoint before it was quantized or converted",
                    )
            stored = [self.tensors[tensor].shape for tensor in tensors]
            shape = shapes[name]
            fits = stored == [shape]
            if len(stored) > 1:
                fits = sum(map(math.prod, stored)) == math.prod(shape)
            if not fits:
                raise UserError(
                    f"{tensors[0]} in {self.directory} has shape {stored[0]}, and the model needs "
                    f"{shape}",
                    fix=OTHER_CHECKPOINT,
                )
        return found

    def _assert_scaled(self, tensor: str) -> None:
        """Refuse FP8 without a scale for each block, and scales of anything else."""
        _, shape, dtype = self.tensors[tensor]
        scales = self.tensors.get(tensor + _SCALES)
        expected = None
        is_fp8 = dtype.startswith(("F8", "float8"))  # as safetensors, or torch, names it
        if is_fp8:
            sides = zip(shape, self._block, strict=False)
            expected = tuple(math.ceil(size / side) for size, side in sides)
        found = scales and scales.shape
        is_read = dtype == "F8_E4M3" and scales and scales.dtype in ("F32", "BF16")
        if found != expected or (is_fp8 and not is_read):
            raise UserError(
                f"{tensor} in {self.directory} is {dtype} {shape} with scales {found}; FP8 that is "
                "read is F8_E4M3, with a scale in F32 or BF16 for each weight_block_size",
                fix="set model.path to the checkpoint before it was quantized",
            )

    def read(self, tensors: Sequence[str], region: Region) -> Tensor:
        """Read elements of a parameter from its tensors, in their stored dtype, or FP8 as float32.

        Args:
            tensors: of the parameter, as `find` returned them.
            region: which elements of the parameter.

        Returns:
            [region.size], on the CPU.
        """
        if region.num_rows > 1:
            (tensor,) = tensors  # only one tensor has rows of its parameter's width
            row, column = divmod(region.start, region.stride)
            rows = slice(row, row + region.num_rows)
            columns = slice(column, column + region.width)
            return self._part(tensor, (rows, columns), row, column).reshape(-1)
        slices: list[Tensor] = []
        begin = 0  # of the tensor, counted in the parameter
        for tensor in tensors:
            end = begin + math.prod(self.tensors[tensor].shape)
            first = max(region.start, begin)
            last = min(region.start + region.size, end)
            if first < last:
                slices.append(self._read_slice(tensor, first - begin, last - begin))
            begin = end
        if len(slices) == 1:
            return slices[0]  # without a copy
        return torch.cat(slices) if slices else torch.empty(0)

    def _read_slice(self, tensor: str, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of a flattened tensor. Only whole rows can be read."""
        shape = self.tensors[tensor].shape
        width = math.prod(shape[1:])
        first_row = start // width
        of_rows = slice(first_row, math.ceil(stop / width)) if shape else ...
        rows = self._part(tensor, of_rows, first_row, 0)
        before = first_row * width
        return rows.reshape(-1)[start - before : stop - before]

    def _part(self, tensor: str, index: Any, row: int, column: int) -> Tensor:
        """Return a rectangle of a tensor, from a row and a column on, times its scales if any.

        UserError: a value is not finite.
        """
        values = self._stored_part(tensor, index)
        if tensor + _SCALES in self.tensors:
            values = self._scaled(tensor, values, row, column)
        # A sum is ten times as fast, and may overflow.
        if not (values.sum().isfinite() or values.isfinite().all()):
            raise UserError(
                f"{tensor} in {self.directory} has a value that is not finite",
                fix="download the model again, or use another checkpoint or step",
            )
        return values

    def _scaled(self, tensor: str, values: Tensor, row: int, column: int) -> Tensor:
        """Return a rectangle of a tensor in FP8, from a row and a column on, times its scales."""
        height, width = self._block
        first, offset = divmod(row, height)
        of_rows = slice(first, math.ceil((row + len(values)) / height))
        scales = self._stored_part(tensor + _SCALES, of_rows).float()
        columns = torch.arange(column, column + values.shape[1]) // width
        values = values.float()
        for index, scale in enumerate(scales):
            start = index * height - offset
            values[max(start, 0) : start + height] *= scale[columns]
        return values

    def _list(self, file: Path) -> dict[str, _StoredTensor]:
        """Return the tensors in a file, by name."""
        with _read_errors_named(file):
            if file.suffix != ".safetensors":
                stored = {}
                for name, tensor in self._mapped_tensors(file).items():
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    stored[name] = _StoredTensor(file, tuple(tensor.shape), dtype)
                return stored
            with file.open("rb") as opened:
                num_bytes = int.from_bytes(opened.read(8), "little")
            if num_bytes > self._most_header_bytes:
                raise SafetensorError(
                    f"its list of tensors has {num_bytes} bytes, and this model's has at most "
                    f"{self._most_header_bytes}"
                )
            # NumPy's way maps a file that is larger than the memory of this machine, too.
            with safe_open(file, framework="numpy") as handle:
                stored = {}
                for name in handle.keys():  # noqa: SIM118
                    view = handle.get_slice(name)
                    shape = tuple(view.get_shape())
                    stored[name] = _StoredTensor(file, shape, view.get_dtype())
                return stored

    def _stored_part(self, tensor: str, index: Any) -> Tensor:
        """Read a stored tensor at an index: a slice, or one for each of two dimensions."""
        file = self.tensors[tensor].file
        with _read_errors_named(file):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as handle:
                    part: Tensor = handle.get_slice(tensor)[index]
                return part
            part = self._mapped_tensors(file)[tensor][index]
        self._num_read += part.nbytes
        return part

    def _mapped_tensors(self, file: Path) -> dict[str, Tensor]:
        """Return the tensors in a file of `torch.save`.

        Pages that were read count as this process's memory until the file is mapped anew, which
        takes a while: torch reads the list of all tensors.
        """
        if file != self._mapped_file or self._num_read > _MOST_MAPPED:
            self._mapped = _map_tensors(file)
            self._mapped_file = file
            self._num_read = 0
        return self._mapped


def fp8_block(directory: Path) -> tuple[int, int] | None:
    """Return the rows and columns of a block of weights in FP8, or None if none are quantized.

    Raises:
        UserError: the weights are quantized in another way.
    """
    sections = sections_of(_config_of(directory))
    found = (section.get(key) for section in sections for key in QUANTIZATION_KEYS)
    match next(filter(None, found), None):
        case None:
            return None
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if (
            min(rows, columns) > 0
        ):
            return rows, columns
        case {"quant_method": str(method)}:
            pass
        case method:  # MLX's says no method
            pass
    fix = "set model.path to the checkpoint before it was quantized, or to one in block FP8"
    if method == "mxfp4":  # gpt-oss, which was never published in another form
        fix = (
            "dequantize it once with transformers: AutoModelForCausalLM.from_pretrained(DIR, "
            "quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16), "
            "save_pretrained(NEW_DIR, save_original_format=False)"
        )
    raise UserError(
        f"the weights of {directory} are quantized: {method}, and only FP8 with a "
        "weight_block_size is read",
        fix=fix,
    )


def sections_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a configuration and the parts of it that are some, such as its text_config."""
    return [config, *(value for value in config.values() if isinstance(value, dict))]


def _config_of(directory: Path) -> dict[str, Any]:
    """Return config.json, or {} if it is damaged, which `load_model_config` refuses."""
    with suppress(*DAMAGE):
        return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    return {}


def has_weights(directory: Path) -> bool:
    """Return whether a directory has the weights of a model, or their index."""
    return _first_file(directory).is_file()


def _first_file(directory: Path) -> Path:
    """Return the file that transformers opens first: weights, or the index of several files.

    It is the file named in config.json, or the first that is there of the safetensors, their
    index, pytorch_model.bin and its index.
    """
    named = _config_of(directory).get("transformers_weights")
    if named is not None:
        file = directory / str(named)
        if file.name != named or not file.is_file():
            raise UserError(
                f"transformers_weights={named!r} in {directory / 'config.json'} is not a file",
                fix="download the model again, or correct the name",
            )
        return file
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    files: list[Path] = [directory / name for name in names]
    return next((file for file in files if file.is_file()), files[0])


def weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return the files of the weights that transformers reads, and which of them has a tensor.

    Returns:
        The paths in the directory, which may be in folders of it; and that of each tensor that an
        index names.

    Raises:
        UserError: the index is damaged, or names a file that is outside the directory.
    """
    first = _first_file(directory)
    if first.suffix != ".json":
        return [first.name], {}
    try:
        index = dict(json.loads(first.read_text(encoding="utf-8"))["weight_map"])
        files = sorted(set(index.values()))
        for file in map(PurePosixPath, files):
            if file.is_absolute() or ".." in file.parts:
                raise ValueError("it names a file of another directory")
    except DAMAGE as error:
        raise UserError(
            f"{first} cannot be read: {error!r}", fix="download the model again"
        ) from error
    return files, index


@contextmanager
def _read_errors_named(file: Path) -> Iterator[None]:
    """Turn what goes wrong with a file of weights into a UserError."""
    try:
        assert_regular(file)
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} cannot be read: {error}",
            fix="download the model again, or correct the file's permissions",
        ) from error
    except RuntimeError as error:
        raise UserError(
            f"{file} cannot be mapped into memory: {first_line(error)}",
            fix="run `sysctl vm.overcommit_memory=1`, or save the model in smaller files: "
            "save_pretrained(max_shard_size='5GB')",
        ) from error


def _map_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of `torch.save`, mapped into memory."""
    try:
        values = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            is_stored = tensor.layout is torch.strided and tensor.device.type == "cpu"
            if not isinstance(name, str) or not is_stored:
                raise ValueError(f"{name!r} is a tensor of {tensor.layout} on {tensor.device}")
        return tensors
    except OSError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        raise UserError(
            f"{file} cannot be read in slices without running its code: {first_line(error)}",
            fix="download the model again, or convert it once with transformers: "
            "from_pretrained, then save_pretrained",
        ) from error


def stored_parameters(
    names: Iterable[str], conversions: Sequence[WeightTransform] = ()
) -> NameLists:
    """Map names of parameters to the tensors whose flattened values, in order, they consist of.

    A tensor also stands for a parameter of its own name. That comes first if both exist.

    Args:
        names: of all stored tensors.
        conversions: rules of transformers. A renaming maps one tensor to one parameter. A converter
            maps tensors of several name patterns to one.

    Returns:
        The tensors of each parameter; none if transformers would change or reorder values.
    """
    names = sorted(names, key=dot_natural_key)  # expert 10 comes after expert 9
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
    stored: NameLists = {}
    converted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            stored[target] = (name,)
        else:
            converted[target][pattern].append(name)
    for target, by_pattern in converted.items():
        rule = next(rule for rule in converters if by_pattern.keys() <= set(rule.source_patterns))
        # One list for each pattern, with the tensors of all experts in order.
        lists = [by_pattern.get(pattern, []) for pattern in rule.source_patterns]
        stored[target] = ()
        if _keeps_order(rule) and len(set(map(len, lists))) == 1:
            stored[target] = tuple(chain.from_iterable(zip(*lists, strict=True)))
    return stored | {name: (name,) for name in names}


def _keeps_order(rule: WeightConverter) -> bool:
    """Return whether a rule stacks experts after joining the rows of each.

    No value then changes its place among the flattened values.
    """
    match rule.operations, rule.source_patterns, rule.target_patterns:
        case [MergeModulelist(dim=0)], [_], [_]:
            return True
        case [MergeModulelist(dim=0), Concatenate(dim=1)], _, [_]:
            return True
    return False
