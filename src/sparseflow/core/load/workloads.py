"""What a stressor's process does while it works, and how it counts what it got.

=============  =======================================================  ====================================
kind           one step                                                 got
=============  =======================================================  ====================================
`cpu-fma`      a float32 matrix product that stays in the L2 cache      CPU time of the process
`cpu-stream`   a copy of 1 MiB, walking through more than the caches    CPU time of the process
`gpu-matmul`   an fp16 matrix product, 4096 x 4096                      time between CUDA events
`gpu-copy`     a copy of 256 MiB within the GPU's memory                time between CUDA events
=============  =======================================================  ====================================

CUDA events also count the time in which the GPU served somebody else in between. While the duty is held,
which is when others are expected, a GPU's steps count as what they took before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sparseflow.errors import DeviceError

MIB = 1 << 20
STREAM_SLICE_BYTES = MIB
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MATMUL_SIDE = 4096
COPY_BYTES = 256 * MIB
CHUNK_S = 0.002
"""Work that is handed to a GPU at a time: what a stressor overshoots its duty by at most."""

IN_FLIGHT = 2
"""Chunks queued on a GPU: one runs while the next is launched. No more, since no queue can be recalled."""


class Workload(Protocol):
    """Keeps a device busy. `held` tells it that others use the device too."""

    held: bool

    def burn(self, until_s: float) -> None:
        """Work until `time.monotonic()` reaches `until_s`."""
        ...

    def got_s(self) -> float:
        """Seconds of its device that it has used since it was made."""
        ...


class CpuWorkload:
    """Keeps one CPU busy.

    Args:
        kind: `"cpu-fma"` or `"cpu-stream"`.
    """

    def __init__(self, kind: str) -> None:
        self.held = False
        self._step = _fma() if kind == "cpu-fma" else _stream()
        self._step()

    def burn(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            self._step()

    def got_s(self) -> float:
        return time.process_time()


class GpuWorkload:
    """Keeps one GPU busy.

    Args:
        kind: `"gpu-matmul"` or `"gpu-copy"`.
        device: As torch names it.

    Raises:
        DeviceError: torch sees no such GPU, or its memory is full.
    """

    def __init__(self, kind: str, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(f"`{kind}` loads a GPU, and torch {torch.__version__} sees none here")
        self.held = False
        self._event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True, blocking=True)
        self._got_s = 0.0
        try:
            torch.cuda.set_device(device)
            self._step = _matmul(device) if kind == "gpu-matmul" else _copy(device)
            for _ in range(10):
                self._step()
            torch.cuda.synchronize(device)
            self._step_s = self._timed(20)
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"{device} cannot be loaded: {str(error).splitlines()[0]}") from error

    def burn(self, until_s: float) -> None:
        chunk = max(1, round(CHUNK_S / self._step_s))
        queued: deque[tuple[Any, Any]] = deque()
        while time.monotonic() < until_s:
            queued.append(self._launch(chunk))
            if len(queued) >= IN_FLIGHT:
                self._finish(*queued.popleft(), chunk)
        while queued:
            self._finish(*queued.popleft(), chunk)

    def got_s(self) -> float:
        return self._got_s

    def _launch(self, steps: int) -> tuple[Any, Any]:
        first, last = self._event(), self._event()
        first.record()
        for _ in range(steps):
            self._step()
        last.record()
        return first, last

    def _finish(self, first: Any, last: Any, steps: int) -> None:
        last.synchronize()
        if self.held:
            self._got_s += steps * self._step_s
            return
        took_s = first.elapsed_time(last) / 1e3
        self._got_s += took_s
        self._step_s += 0.1 * (took_s / steps - self._step_s)

    def _timed(self, steps: int) -> float:
        first, last = self._launch(steps)
        last.synchronize()
        return max(first.elapsed_time(last) / 1e3 / steps, 1e-6)


def read_cache_bytes(level: int, *, caches: Path = CACHES) -> int | None:
    """Size of the data cache of a level (1, 2, 3), or None where the kernel does not tell."""
    for index in sorted(caches.glob("index*")):
        try:
            if (index / "level").read_text().strip() != str(level):
                continue
            if (index / "type").read_text().strip() == "Instruction":
                continue
            text = (index / "size").read_text().strip()
            return int(text[:-1]) * {"K": 1 << 10, "M": MIB}[text[-1]]
        except (OSError, KeyError, ValueError, IndexError):
            continue
    return None


def _fma() -> Callable[[], object]:
    import numpy as np

    # Three matrices that fill half of the cache, so that the arithmetic and not the memory is kept busy.
    fitting = int(((read_cache_bytes(2) or MIB) / 2 / (3 * 4)) ** 0.5) // 16 * 16
    side = min(max(fitting, 64), 256)
    generator = np.random.default_rng(0)
    a = generator.random((side, side), dtype=np.float32)
    b, out = a.T.copy(), np.zeros_like(a)
    return lambda: np.matmul(a, b, out=out)


def _stream() -> Callable[[], object]:
    import numpy as np

    # Twice the last cache in each buffer, or what was copied would be met again in it.
    last = max(read_cache_bytes(3) or 0, read_cache_bytes(2) or 0, 16 * MIB)
    slices = min(2 * last, 256 * MIB) // STREAM_SLICE_BYTES
    source = np.ones((slices, STREAM_SLICE_BYTES // 8))
    target = np.zeros_like(source)
    place = 0

    def step() -> None:
        nonlocal place
        np.copyto(target[place], source[place])
        place = (place + 1) % slices

    return step


def _matmul(device: str) -> Callable[[], object]:
    import torch

    a = torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=device, dtype=torch.float16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy(device: str) -> Callable[[], object]:
    import torch

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
