"""Records that cannot be used: they are refused together, or left out with a count (data.skip_unusable)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from lezo_ds.errors import UserError, cut

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_MAX_SHOWN = 3


class Unusable:
    """Collects what is wrong with single records, so that one of them does not hide the others."""

    def __init__(self, *, skip: bool = False) -> None:
        self._skip = skip
        self._found: list[str] = []

    def usable(self, items: Iterable[T], use: Callable[[T], U]) -> list[tuple[T, U]]:
        """Return the items for which `use` raises no UserError, each with its result.

        Raises:
            UserError: there is none.
        """
        used, num_before = [], len(self._found)
        for item in items:
            try:
                used.append((item, use(item)))
            except UserError as error:
                self._found.append(str(error))
        if not used and len(self._found) > num_before:
            raise UserError(self._listed())
        return used

    def settle(self) -> None:
        """Refuse the records that were found unusable, in one line, or print how many are left out."""
        if self._found and not self._skip:
            hint = "leave out such records: data.skip_unusable=true (init: --skip-unusable)"
            raise UserError(f"{self._listed()}, or {hint}")
        if self._found:
            logger.warning("left out: %s", self._listed().rpartition("; fix: ")[0])
        self._found = []

    def _listed(self) -> str:
        count, fix = len(self._found), self._found[0].partition("; fix: ")[2]
        different = list(dict.fromkeys(cut(text.partition("; fix: ")[0], 300) for text in self._found))
        listed = different[:_MAX_SHOWN] + [f"and {count - _MAX_SHOWN} more"] * (len(different) > _MAX_SHOWN)
        return f"{count} record{'s' * (count > 1)} cannot be used: {'; '.join(listed)}; fix: {fix}"
