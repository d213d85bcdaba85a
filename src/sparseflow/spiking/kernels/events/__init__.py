"""Spiking convolutions on a CPU, driven by events: work is done for spikes, not for zeros.

`encode` turns spikes into `Events`, `prepare_group` makes a fused group (`spec.GroupSpec`) that maps events
to events, and `decode` or `sum_over_space` lead back to dense tensors. Importing this package needs numba
(extra `spiking`); the first run on a machine compiles the kernels, later processes load them from Numba's
disk cache.
"""

from __future__ import annotations

from sparseflow.spiking.kernels.events.codec import decode, encode, max_pool, sum_over_space
from sparseflow.spiking.kernels.events.format import Events
from sparseflow.spiking.kernels.events.group import PreparedGroup, prepare_conv, prepare_group

__all__ = [
    "Events",
    "PreparedGroup",
    "decode",
    "encode",
    "max_pool",
    "prepare_conv",
    "prepare_group",
    "sum_over_space",
]
