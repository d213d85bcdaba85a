"""Moments of a call: CUDA events on a GPU, so that nothing waits between them; else the host's clock."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """Named moments on one device.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """This is the moment of that name."""
        if self._device.type != "cuda":
            self._marks[name] = time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks[name] = event

    def wait(self) -> None:
        """Until the device has done all."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def between_ms(self, first: str, last: str) -> float:
        """Milliseconds from one moment to another; on a GPU it must have been waited for."""
        if self._device.type != "cuda":
            return (self._marks[last] - self._marks[first]) * 1e3
        return float(self._marks[first].elapsed_time(self._marks[last]))
