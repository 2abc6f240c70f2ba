"""The forward passes of a step: which probes of a micro-batch run at once, and on which rank."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from lezo_ds.errors import UserError


class KeyedProbe(NamedTuple):
    """The weights theta + scale * z(key), with a key for each group of a pass's examples.

    Attributes:
        keys: of the directions of the groups, unsigned 64-bit (`keys.direction_key`), in the order
            of the examples. One key stands for all examples.
        scale: mu, -mu, or 0 for theta itself; rounded to fp32.
    """

    keys: tuple[int, ...]
    scale: float

    @property
    def key(self) -> int:
        """The key of the one direction that all examples share."""
        if len(self.keys) != 1:
            raise ValueError("a perturbed copy of a weight serves all examples, not a group")
        return self.keys[0]


class Pass(NamedTuple):
    """One forward pass: one micro-batch, copied once for each of its consecutive probes.

    Attributes:
        micro_batch: index among the micro-batches of the step.
        first_probe: index of its first probe among those of the step.
        probes: with the keys of the micro-batch's groups.
        counts: whether this rank contributes the losses. It does not if another rank runs the
            same pass and has them: this rank then only takes part in the gathers of weights.
    """

    micro_batch: int
    first_probe: int
    probes: tuple[KeyedProbe, ...]
    counts: bool = True


class Groups(NamedTuple):
    """Groups of the examples of a step. Each group has random directions of its own.

    Micro-batches have parts of equally many groups:

        micro-batch           0         1              8 examples each
        2 groups of 8      [  0  ]   [  1  ]
        4 groups of 4      [0] [1]   [2] [3]
        1 group of 16      [  0        0   ]

    Attributes:
        number: of groups.
        per_micro_batch: number of groups that a micro-batch has a part of.
        num_micro_batches: of the step.
    """

    number: int
    per_micro_batch: int
    num_micro_batches: int

    @classmethod
    def of(cls, num_micro_batches: int, num_examples: int | None, size: int | None) -> Groups:
        """Return the groups of `size` examples each, or one group of all examples (None).

        Args:
            num_micro_batches: of a step.
            num_examples: of a step; None if its micro-batches have unequally many.
            size: divides the examples of a step, and it divides those of a micro-batch or they it.

        Raises:
            UserError: `size` does not.
        """
        if size is None:
            return cls(1, 1, num_micro_batches)
        if num_examples is None or not can_group(size, num_examples, num_micro_batches):
            shown = "unequally many" if num_examples is None else num_examples
            raise UserError(
                f"zo.examples_per_direction={size} does not divide {num_micro_batches} "
                f"micro-batches of {shown} examples together into whole groups",
                fix="set examples_per_direction=1, and lay out micro-batches of equal size",
            )
        number = num_examples // size
        return cls(number, max(1, number // num_micro_batches), num_micro_batches)

    def of_micro_batch(self, index: int) -> list[int]:
        """Return the groups that a micro-batch has parts of, in the order of its examples."""
        first = index * self.per_micro_batch
        num_parts = self.num_micro_batches * self.per_micro_batch
        return [
            group_of(part, num_parts, self.number)
            for part in range(first, first + self.per_micro_batch)
        ]


_Index = TypeVar("_Index")  # int, or a tensor of them


def group_of(index: _Index, count: int, num_groups: int) -> _Index:
    """Return the group of one of `count` things that equal groups share in order.

    >>> [group_of(example, 6, num_groups=3) for example in range(6)]
    [0, 0, 1, 1, 2, 2]
    """
    scaled: Any = index
    return scaled * num_groups // count  # type: ignore[no-any-return]


def can_group(size: int, num_examples: int, num_micro_batches: int) -> bool:
    """Return whether the examples of a step are whole groups of `size`.

    A group is a part of one micro-batch, or it is several whole ones.

    >>> can_group(4, 16, num_micro_batches=2), can_group(3, 12, num_micro_batches=2)
    (True, True)
    >>> can_group(3, 4, num_micro_batches=1), can_group(6, 12, num_micro_batches=3)
    (False, False)
    """
    micro_batch_size, left_over = divmod(num_examples, num_micro_batches)
    if micro_batch_size == 0 or left_over > 0:
        return False
    fits = micro_batch_size % size == 0 or size % micro_batch_size == 0
    return fits and num_examples % size == 0
