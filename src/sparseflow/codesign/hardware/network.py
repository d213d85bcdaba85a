"""Transfer time and energy between slots.

A message of `b` bytes from slot s to slot t takes `fixed_ms[s, t] + b * ms_per_byte[s, t]`. It takes the
route with the lowest time for a message of `typical_bytes`; every slot on the route receives the full message
before it forwards it (store and forward). Messages do not compete for links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.hardware.chips import LinkType
from sparseflow.core.checks import check_non_negative
from sparseflow.core.extras import require
from sparseflow.errors import InputError

BITS_PER_BYTE = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Transfer costs between S slots; diagonals are 0.

    Attributes:
        fixed_ms: Time of a message of any size, ms, float64 [S, S].
        ms_per_byte: Additional time per byte, ms, float64 [S, S].
        mj_per_byte: Energy per byte, mJ, float64 [S, S].
    """

    fixed_ms: np.ndarray
    ms_per_byte: np.ndarray
    mj_per_byte: np.ndarray

    @property
    def num_slots(self) -> int:
        return len(self.fixed_ms)

    def time_ms(self, source: int, target: int, size_bytes: float) -> float:
        """Time of one message, ms; 0 within a slot."""
        if source == target:
            return 0.0
        return float(self.fixed_ms[source, target] + size_bytes * self.ms_per_byte[source, target])

    def energy_mj(self, source: int, target: int, size_bytes: float) -> float:
        """Energy of one message, mJ."""
        return float(size_bytes * self.mj_per_byte[source, target])

    @classmethod
    def all_to_all(cls, link: LinkType, distances_mm: np.ndarray) -> Network:
        """Build a network with a separate link between every two slots.

        Args:
            link: Type of every link.
            distances_mm: Distances between slots, mm, [S, S].

        Raises:
            InputError: Distances are not a square matrix of finite numbers of at least 0.
        """
        distances = np.asarray(distances_mm, dtype=np.float64)
        if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
            raise InputError(f"`distances_mm` has the shape {distances.shape}; expected [S, S]")
        if not np.isfinite(distances).all() or (distances < 0.0).any():
            raise InputError("`distances_mm` must be finite and at least 0")
        off_diagonal = 1.0 - np.eye(len(distances))
        return cls(
            fixed_ms=off_diagonal * (link.latency_us + link.latency_us_per_mm * distances) / 1e3,
            ms_per_byte=off_diagonal * (1e3 / link.bandwidth),
            mj_per_byte=off_diagonal
            * (BITS_PER_BYTE * 1e-9)
            * (link.pj_per_bit + link.pj_per_bit_mm * distances),
        )

    @classmethod
    def from_links(
        cls,
        num_slots: int,
        links: Sequence[tuple[int, int, LinkType]],
        distances_mm: np.ndarray | None = None,
        *,
        typical_bytes: float = 1e6,
    ) -> Network:
        """Build a network from links between some pairs of slots, usable in both directions.

        Args:
            num_slots: Number of slots, S.
            links: Tuples (slot, slot, link type).
            distances_mm: Distances between slots, mm, [S, S]; 0 by default.
            typical_bytes: Message size for which routes are chosen.

        Raises:
            InputError: A link refers to a missing slot, a slot is unreachable, `distances_mm` has another
                shape, or `typical_bytes` is negative or not finite.
            MissingExtraError: SciPy is missing.
        """
        sparse, graph = require("scipy.sparse", "codesign"), require("scipy.sparse.csgraph", "codesign")
        distances = (
            np.zeros((num_slots, num_slots)) if distances_mm is None else np.asarray(distances_mm, np.float64)
        )
        if distances.shape != (num_slots, num_slots):
            raise InputError(
                f"`distances_mm` has the shape {distances.shape}; expected {(num_slots, num_slots)}"
            )
        check_non_negative(typical_bytes=typical_bytes)

        def message_ms(cost: np.ndarray) -> float:
            return float(cost[0] + typical_bytes * cost[1])

        # (source, target) -> fixed_ms, ms_per_byte and mj_per_byte of the best direct link.
        direct: dict[tuple[int, int], np.ndarray] = {}
        for a, b, link in links:
            if not (0 <= a < num_slots and 0 <= b < num_slots) or a == b:
                raise InputError(f"a link connects slots {a} and {b}; expected slots 0 to {num_slots - 1}")
            network = cls.all_to_all(link, distances)
            costs = np.stack([network.fixed_ms, network.ms_per_byte, network.mj_per_byte])
            for pair in ((a, b), (b, a)):
                direct[pair] = min(direct.get(pair, costs[:, *pair]), costs[:, *pair], key=message_ms)
        pairs = sorted(direct)
        # Sparse, because a dense matrix treats tiny values as missing links.
        weights = sparse.csr_matrix(
            (
                [max(message_ms(direct[pair]), np.finfo(float).tiny) for pair in pairs],
                ([s for s, _ in pairs], [t for _, t in pairs]),
            ),
            shape=(num_slots, num_slots),
        )
        path_ms, predecessors = graph.shortest_path(weights, directed=True, return_predecessors=True)
        unreachable = [slot for slot in range(num_slots) if not np.isfinite(path_ms[0, slot])]
        if unreachable:
            raise InputError(
                f"slots {', '.join(map(str, unreachable))} are unreachable from slot 0; add links or remove "
                "them"
            )
        totals = np.zeros((3, num_slots, num_slots))
        for s in range(num_slots):
            for t in range(num_slots):
                node = t
                while node != s:
                    previous = int(predecessors[s, node])
                    totals[:, s, t] += direct[previous, node]
                    node = previous
        return cls(fixed_ms=totals[0], ms_per_byte=totals[1], mj_per_byte=totals[2])
