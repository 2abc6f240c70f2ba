"""Which stored tensors hold which parameter: names that changed, and experts that were merged.

Transformers 5 keeps the experts of a block in one parameter, and published checkpoints keep a tensor for
each. The rules are transformers' own (its conversion mapping).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True)
class StoredParameter:
    """Where a checkpoint holds a parameter.

    Attributes:
        tensors: names of stored tensors. Their flattened values, one after the other, are the parameter.
        num_stacked: number of groups of tensors of equal shapes. Each group is joined along its first
            dimension, and the groups are stacked. If it is 0, the only tensor is the parameter.
        unknown_conversion: the steps by which transformers would make the parameter from the tensors, if they
            change or reorder values. Such a parameter cannot be read. It is empty for all others.
    """

    tensors: tuple[str, ...]
    num_stacked: int = 0
    unknown_conversion: str = ""


def stored_parameters(
    names: Iterable[str], conversions: Sequence[WeightTransform] = ()
) -> dict[str, StoredParameter]:
    """Map names of parameters to the tensors that hold them.

    Each tensor also stands for a parameter of its own name, which comes first if both exist.

    Args:
        names: of all tensors of a checkpoint.
        conversions: the model's, from transformers' `get_model_conversion_mapping`.
    """
    names = sorted(names, key=dot_natural_key)  # expert 10 comes after expert 9
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
    found: dict[str, StoredParameter] = {}
    converted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            found[target] = StoredParameter((name,))
        else:
            converted[target][pattern].append(name)
    for target, by_pattern in converted.items():
        rule = next(rule for rule in converters if by_pattern.keys() <= set(rule.source_patterns))
        found[target] = _converted(rule, by_pattern)
    return found | {name: StoredParameter((name,)) for name in names}


def _converted(rule: WeightConverter, by_pattern: Mapping[str, Sequence[str]]) -> StoredParameter:
    columns = [by_pattern.get(pattern, []) for pattern in rule.source_patterns]
    tensors = tuple(name for group in zip(*columns, strict=False) for name in group)
    if _keeps_order(rule) and len(tensors) == sum(map(len, columns)):
        return StoredParameter(tensors, num_stacked=len(columns[0]))
    steps = ", ".join(type(step).__name__ for step in rule.operations)
    return StoredParameter(tuple(name for column in columns for name in column), unknown_conversion=steps)


def _keeps_order(rule: WeightConverter) -> bool:
    """Return whether a rule stacks experts after joining the rows of each: no value changes its place."""
    match rule.operations:
        case [MergeModulelist(dim=0)]:
            joins = len(rule.source_patterns) == 1
        case [MergeModulelist(dim=0), Concatenate(dim=1)]:
            joins = True
        case _:
            joins = False
    return joins and len(rule.target_patterns) == 1
