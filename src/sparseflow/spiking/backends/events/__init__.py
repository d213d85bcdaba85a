"""CPU backend: event-driven convolutions that do work for spikes, not for zeros.

`encode` converts spikes to `Events`, `prepare_group` builds a fused group (`GroupSpec`) that maps events to
events, and `decode` and `sum_over_space` convert back to dense tensors. Needs numba (extra `spiking`). The
first run on a machine compiles the kernels; later processes load them from Numba's disk cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.spiking.backends.events.codec import decode, encode, max_pool, sum_over_space
    from sparseflow.spiking.backends.events.format import Events
    from sparseflow.spiking.backends.events.group import EventGroup, prepare_conv, prepare_group

__all__ = [
    "EventGroup",
    "Events",
    "decode",
    "encode",
    "max_pool",
    "prepare_conv",
    "prepare_group",
    "sum_over_space",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "codec": ["decode", "encode", "max_pool", "sum_over_space"],
        "format": ["Events"],
        "group": ["EventGroup", "prepare_conv", "prepare_group"],
    },
)
