"""How many cells of each pattern fit into memory, found out while training.

A pattern that does not fit is coarsened to half as many cells; one that does not even fit with few is set
aside, and its tasks are learnt from as if it was not known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from sparseflow.tuning.net.coarsen import Cells
from sparseflow.tuning.net.dataset import Dataset

_LEAST = 2**8
"""Cells that are too few to tell much."""

_LOG = logging.getLogger(__name__)


class Room:
    """The cells of a data set's patterns, as many as fit.

    Args:
        data: Where patterns are from.
        most: Cells of a pattern at first.

    Attributes:
        limits: Digest -> cells at most, 0 where the pattern is set aside; of those that had to shrink.
    """

    def __init__(self, data: Dataset, most: int) -> None:
        self._data = data
        self._most = most
        self.limits: dict[str, int] = {}

    def cells(self, digest: str) -> Cells | None:
        """A pattern's cells; None where it is set aside."""
        limit = self.limits.get(digest, self._most)
        return self._data.cells(digest, limit) if limit else None

    def shrink(self, digests: Iterable[str]) -> bool:
        """Make room by halving the largest of these patterns; says whether there was one."""
        sizes = {digest: len(found.coords) for digest in digests if (found := self.cells(digest)) is not None}
        if not sizes:
            return False
        largest = max(sizes, key=sizes.__getitem__)
        half = sizes[largest] // 2
        self.limits[largest] = half if half >= _LEAST else 0
        _LOG.warning(
            "the pattern of %s does not fit into memory with %d cells; %s",
            self._data.names(largest),
            sizes[largest],
            f"it is coarsened to {half}" if half >= _LEAST else "it is set aside, as if it was not known",
        )
        return True

    def take(self, limits: Mapping[str, int]) -> None:
        """Go on with limits that were found before."""
        self.limits = dict(limits)
