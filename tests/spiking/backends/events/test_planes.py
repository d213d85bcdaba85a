"""The sets of time steps that events share."""

from __future__ import annotations

import numpy as np
import pytest

from sparseflow.spiking.backends.events.kernels.planes import MAX_SHARED, build_plane_table, list_planes


@pytest.mark.parametrize("channels", [16, 256])
@pytest.mark.parametrize("time_steps", [1, 2, 3, 4, 5, 8, 11])
def test_planes_partition_every_pattern(time_steps: int, channels: int) -> None:
    """Every pattern of spikes over time is the sum of its planes, none counted twice."""
    count = min(1 << time_steps, 2048)
    spikes = (np.arange(count)[None] >> np.arange(time_steps)[:, None]) & 1
    total = np.zeros_like(spikes)
    for plane in list_planes(time_steps, channels):
        total[list(plane.steps)] += plane.extract(spikes)
    assert (total == spikes).all()


def test_four_steps() -> None:
    wide = [p.steps for p in list_planes(4, 64)]
    assert wide == [(0, 1, 2, 3), (0, 2), (0,), (1, 3), (1,), (2,), (3,)]
    assert [p.steps for p in list_planes(4, 63)] == [s for s in wide if len(s) != 2]


@pytest.mark.parametrize("channels", [16, 256])
@pytest.mark.parametrize("time_steps", [1, 3, 4, 10, 16])
def test_iteration_in_order_finds_every_initial_sum(time_steps: int, channels: int) -> None:
    """Walking the table as the kernel does gives each step the sum of the planes that hold it."""
    planes, table = list_planes(time_steps, channels), build_plane_table(time_steps, channels)
    sums: dict[int, frozenset[int]] = {}
    completed = []
    for number, (plane, row) in enumerate(zip(planes, table.tolist(), strict=True)):
        above, position, lo, hi, spacing = row[:5]
        assert tuple(range(lo, hi, spacing)) == plane.steps
        total = (frozenset() if above < 0 else sums[above]) | {number}
        if position >= 0:
            assert position < MAX_SHARED
            sums[position] = total
        else:
            assert total == {n for n, p in enumerate(planes) if lo in p.steps}
            completed.append(lo)
    assert completed == list(range(time_steps))
