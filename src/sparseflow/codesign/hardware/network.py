"""What it takes to move bytes between slots: milliseconds and millijoules, over real distances.

A message of `b` bytes from slot s to slot t takes `fixed_ms[s, t] + b * ms_per_byte[s, t]`. It goes over the
way that takes a message of `typical_bytes` the least time, received whole at every slot between (store and
forward). Links are not shared out among messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.hardware.chips import Link
from sparseflow.core.extras import require
from sparseflow.errors import InputError

BITS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Costs between S slots; diagonals are 0.

    Attributes:
        fixed_ms: float64 [S, S], however little is sent.
        ms_per_byte: float64 [S, S].
        mj_per_byte: float64 [S, S].
    """

    fixed_ms: np.ndarray
    ms_per_byte: np.ndarray
    mj_per_byte: np.ndarray

    @property
    def slots(self) -> int:
        return len(self.fixed_ms)

    def time_ms(self, source: int, target: int, size_bytes: float) -> float:
        """One message; 0 from a slot to itself."""
        if source == target:
            return 0.0
        return float(self.fixed_ms[source, target] + size_bytes * self.ms_per_byte[source, target])

    def energy_mj(self, source: int, target: int, size_bytes: float) -> float:
        """Millijoules of one message."""
        return float(size_bytes * self.mj_per_byte[source, target])

    @classmethod
    def all_to_all(cls, link: Link, distances_mm: np.ndarray) -> Network:
        """A link of its own between every two slots.

        Args:
            link: Of every pair.
            distances_mm: [S, S]; 0 everywhere where places do not matter.

        Raises:
            InputError: Distances are not square, negative or not finite.
        """
        distances = np.asarray(distances_mm, dtype=np.float64)
        if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
            raise InputError(f"`distances_mm` has the shape {distances.shape}; expected [S, S]")
        if not np.isfinite(distances).all() or (distances < 0.0).any():
            raise InputError("`distances_mm` must be finite and not negative")
        other = 1.0 - np.eye(len(distances))
        return cls(
            fixed_ms=other * (link.latency_us + link.latency_us_per_mm * distances) / 1e3,
            ms_per_byte=other * (1e3 / link.bandwidth),
            mj_per_byte=other * (BITS * 1e-9) * (link.pj_per_bit + link.pj_per_bit_mm * distances),
        )

    @classmethod
    def of_links(
        cls,
        slots: int,
        links: Sequence[tuple[int, int, Link]],
        distances_mm: np.ndarray | None = None,
        *,
        typical_bytes: float = 1e6,
    ) -> Network:
        """Links between some pairs, both ways each.

        Args:
            slots: S.
            links: (slot, slot, link).
            distances_mm: [S, S]; 0 by default.
            typical_bytes: What ways are chosen by.

        Raises:
            InputError: A link names a slot that is not there, some slots cannot be reached (says which),
                distances are of another number of slots, or `typical_bytes` is negative or not finite.
            MissingExtraError: SciPy is missing.
        """
        sparse, graph = require("scipy.sparse", "codesign"), require("scipy.sparse.csgraph", "codesign")
        distances = np.zeros((slots, slots)) if distances_mm is None else np.asarray(distances_mm, np.float64)
        if distances.shape != (slots, slots):
            raise InputError(f"`distances_mm` has the shape {distances.shape}; expected {(slots, slots)}")
        if not 0.0 <= typical_bytes < math.inf:
            raise InputError(f"`typical_bytes` (={typical_bytes}) must be finite and not negative")
        direct = {}
        for a, b, link in links:
            if not (0 <= a < slots and 0 <= b < slots) or a == b:
                raise InputError(f"a link joins slots {a} and {b}; there are slots 0 to {slots - 1}")
            whole = cls.all_to_all(link, distances)
            for s, t in ((a, b), (b, a)):
                told = whole.fixed_ms[s, t], whole.ms_per_byte[s, t], whole.mj_per_byte[s, t]
                if (s, t) not in direct or _time(told, typical_bytes) < _time(direct[s, t], typical_bytes):
                    direct[s, t] = told
        pairs = sorted(direct)
        # As a sparse matrix: a dense one takes what is next to nothing for no link.
        weights = sparse.csr_matrix(
            (
                [max(_time(direct[pair], typical_bytes), np.finfo(float).tiny) for pair in pairs],
                ([s for s, _ in pairs], [t for _, t in pairs]),
            ),
            shape=(slots, slots),
        )
        reach, before = graph.shortest_path(weights, directed=True, return_predecessors=True)
        cut = [slot for slot in range(slots) if not np.isfinite(reach[0, slot])]
        if cut:
            raise InputError(
                f"no links lead from slot 0 to slots {', '.join(map(str, cut))}: add one, or leave them out"
            )
        found = np.zeros((3, slots, slots))
        for s in range(slots):
            for t in range(slots):
                at = t
                while at != s:
                    last = int(before[s, at])
                    found[:, s, t] += direct[last, at]
                    at = last
        return cls(fixed_ms=found[0], ms_per_byte=found[1], mj_per_byte=found[2])


def _time(told: tuple[float, float, float], size_bytes: float) -> float:
    return told[0] + size_bytes * told[1]
