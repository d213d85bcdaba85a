"""What keeps a device busy while plans are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sparseflow.core.load import Stressor

Background = Callable[[float], AbstractContextManager[object]]
"""A level between 0 and 1 -> what keeps the device so busy while it is entered."""


def background(device: torch.device | str) -> Background:
    """Products of matrices by other processes, on all CPUs that this one may use, or on the GPU.

    Level 0 is no process at all. Otherwise the level is reached while nothing else runs, and then held.
    """
    target = torch.device(device)
    kind = "cpu-fma" if target.type == "cpu" else "gpu-matmul"

    @contextmanager
    def busy(level: float) -> Iterator[None]:
        with Stressor(kind, level, device=str(target)) as stressor:
            stressor.wait_until_steady()
            with stressor.hold_duty():
                yield

    return lambda level: nullcontext() if level == 0.0 else busy(level)
