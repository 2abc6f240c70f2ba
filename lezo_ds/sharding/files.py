"""Weights on disk as safetensors, read in slices; and which stored tensors hold which parameter.

Transformers 5 keeps the experts of a block in one parameter, and published checkpoints keep a tensor for
each. Its own conversion mapping says which.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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

from lezo_ds.errors import UserError
from lezo_ds.files import DAMAGE
from lezo_ds.noise import ALL, Region

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors spells them


class _StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The weights of a model directory: model.safetensors, an index and its files, or the file `single`.

    `prefix` is that of the base model (for example, "model"), which a checkpoint of the bare decoder lacks.
    `conversions` make the model's parameters from tensors of other names (`stored_parameters`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefix: str = "",
        conversions: Sequence[WeightTransform] = (),
        single: str | None = None,
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._tensors: dict[str, _StoredTensor] = {}
        for file in _files_of(directory) if single is None else [directory / single]:
            with _opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118  (not a dict)
                    part = handle.get_slice(name)
                    self._tensors[name] = _StoredTensor(
                        file, tuple(part.get_shape()), part.get_dtype()
                    )
        self._stored = stored_parameters(self._tensors, conversions)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def find(
        self, names: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[str, ...]]:
        """Return the tensors whose flattened values, one after the other, are each parameter.

        `names` are all names of each parameter, by its first name. `shapes` also has the first names.
        """
        found: dict[str, tuple[str, ...]] = {}
        for name, aliases in names.items():
            for alias in aliases:
                for spelling in (
                    alias,
                    f"{self._prefix}.{alias}",
                    alias.removeprefix(f"{self._prefix}."),
                ):
                    if spelling in self._stored:
                        found.setdefault(name, self._stored[spelling])
        if missing := sorted(names.keys() - found.keys()):
            raise UserError(
                f"{self._directory} lacks {len(missing)} of the model's {len(names)} parameters, such as "
                f"{missing[0]}; it has {', '.join(sorted(self._tensors)[:3])}, ...",
                fix="use a checkpoint that belongs to the config.json",
            )
        for name, tensors in found.items():
            self._check(name, tensors, shapes[name])
        return found

    def _check(self, name: str, tensors: Sequence[str], shape: tuple[int, ...]) -> None:
        if not tensors:
            raise UserError(
                f"{self._directory} stores parameter {name} in a form that cannot be read in slices",
                fix="load it with transformers and save it with save_original_format=False",
            )
        for tensor in tensors:
            if self._tensors[tensor].dtype not in _FLOATS:
                raise UserError(
                    f"{tensor} in {self._directory} has type {self._tensors[tensor].dtype}, not floats",
                    fix="set model.path to the checkpoint before it was quantized",
                )
        shapes = [self._tensors[tensor].shape for tensor in tensors]
        is_same = (
            shapes[0] == shape
            if len(shapes) == 1
            else sum(map(math.prod, shapes)) == math.prod(shape)
        )
        if not is_same:
            raise UserError(
                f"{tensors[0]} in {self._directory} has shape {shapes[0]}, and the model needs {shape}",
                fix="use a checkpoint that belongs to the config.json",
            )

    def read(
        self, tensors: Sequence[str], region: Region = ALL, count: int | None = None
    ) -> Tensor:
        """Read `count` elements (None: all) of a region of the joined tensors, in their stored dtype."""
        if region.width and count:
            (tensor,) = tensors  # only one tensor has rows of its parameter's width
            return self._read_rows(tensor, region, count)
        parts, begin = [torch.empty(0)], 0
        stop = math.inf if count is None else region.start + count
        for tensor in tensors:
            end = begin + math.prod(self._tensors[tensor].shape)
            last = int(min(stop, end))
            if region.start < last and begin < last:
                parts.append(
                    self._read_slice(tensor, max(region.start, begin) - begin, last - begin)
                )
            begin = end
        return torch.cat(parts[1:]) if len(parts) > 2 else parts[-1]

    def _read_slice(self, tensor: str, start: int, stop: int) -> Tensor:
        file, shape, _ = self._tensors[tensor]
        row = math.prod(shape[1:])
        first = start // row
        # The file is memory-mapped: pages that were read count as this process's memory until it is closed.
        with _opened(file) as handle:
            view = handle.get_slice(tensor)
            rows: Tensor = view[first : -(-stop // row)] if shape else view[...]
            return rows.reshape(-1)[start - first * row : stop - first * row]

    def _read_rows(self, tensor: str, region: Region, count: int) -> Tensor:
        row, column = divmod(region.start, region.stride)
        with _opened(self._tensors[tensor].file) as handle:
            view = handle.get_slice(tensor)
            rows: Tensor = view[row : row + count // region.width, column : column + region.width]
            return rows.reshape(-1)


def has_safetensors(directory: Path) -> bool:
    return (directory / _SINGLE).is_file() or (directory / _INDEX).is_file()


def _files_of(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(Path(file).name != file for file in files):
            raise ValueError("it names a file of another directory")
    except DAMAGE as error:
        raise UserError(
            f"{index} cannot be read: {error!r}", fix="download the model again"
        ) from error
    return [directory / file for file in files]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        fix = "download the model again, or correct the file's permissions"
        raise UserError(f"{file} cannot be read: {error}", fix=fix) from error
    with handle:
        yield handle


def stored_parameters(
    names: Iterable[str], conversions: Sequence[WeightTransform] = ()
) -> dict[str, tuple[str, ...]]:
    """Map names of parameters to the tensors whose flattened values, one after the other, are the parameter.

    `names` are those of all tensors, each of which also stands for a parameter of its own name. That comes
    first if both exist. The tuple is empty if transformers would change or reorder values.
    """
    names = sorted(names, key=dot_natural_key)  # expert 10 comes after expert 9
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
    stored: dict[str, tuple[str, ...]] = {}
    converted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            stored[target] = (name,)
        else:
            converted[target][pattern].append(name)
    for target, by_pattern in converted.items():
        rule = next(rule for rule in converters if by_pattern.keys() <= set(rule.source_patterns))
        columns = [by_pattern.get(pattern, []) for pattern in rule.source_patterns]
        is_in_order = _keeps_order(rule) and len(set(map(len, columns))) == 1
        groups = zip(*columns, strict=True) if is_in_order else ()
        stored[target] = tuple(name for group in groups for name in group)
    return stored | {name: (name,) for name in names}


def _keeps_order(rule: WeightConverter) -> bool:
    """Return whether a rule stacks experts after joining the rows of each: no value changes its place."""
    match rule.operations, rule.source_patterns, rule.target_patterns:
        case [MergeModulelist(dim=0)], [_], [_]:
            return True
        case [MergeModulelist(dim=0), Concatenate(dim=1)], _, [_]:
            return True
    return False
