"""Workloads of a stressor process, and how their device time is measured.

=============  =======================================================  ====================================
kind           one step                                                 device time
=============  =======================================================  ====================================
`cpu-fma`      float32 matrix product within the L2 cache               CPU time of the process
`cpu-stream`   copy of 1 MiB out of buffers larger than the caches      CPU time of the process
`gpu-matmul`   fp16 matrix product, 4096 x 4096                         time between CUDA events
`gpu-copy`     copy of 256 MiB within GPU memory                        time between CUDA events
=============  =======================================================  ====================================

CUDA events also include the time in which the GPU runs the work of other processes. Therefore a GPU step
counts as its earlier time while the duty is held and other work is expected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparseflow.errors import DeviceError

KINDS: Mapping[str, str] = {
    "cpu-fma": "matrix products that stay in the cache, on each CPU",
    "cpu-stream": "copies that exceed the caches, on each CPU",
    "gpu-matmul": "fp16 matrix products of 4096 x 4096",
    "gpu-copy": "copies within the GPU's memory",
}
"""Description of each kind of load."""

DEFAULT_KINDS: Mapping[str, str] = {"cpu": "cpu-fma", "cuda": "gpu-matmul"}
"""Type of a device -> kind of load by default."""

PERIOD_S = 0.1
"""Mean length of a cycle of work and idle time."""

EXIT_NO_DEVICE = 3
"""Exit code of a stressor process whose device does not exist or cannot run the workload."""

MIB = 1 << 20
STREAM_SLICE_BYTES = MIB
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MATMUL_SIDE = 4096
COPY_BYTES = 256 * MIB
CHUNK_S = 0.002
"""GPU time of one launch, which bounds the overshoot of the duty."""

MAX_QUEUED = 2
"""Chunks queued on a GPU: one runs while the next is launched. A queued chunk cannot be cancelled."""


class Workload(Protocol):
    """Work that keeps a device busy.

    Attributes:
        shared: Whether other work is expected on the device.
    """

    shared: bool

    def run_until(self, end_s: float) -> None:
        """Work until `time.monotonic()` reaches `end_s`."""
        ...

    def busy_s(self) -> float:
        """Return the device time that was used since construction."""
        ...


class CpuWorkload:
    """Keeps one CPU busy.

    Args:
        kind: `"cpu-fma"` or `"cpu-stream"`.
    """

    def __init__(self, kind: str) -> None:
        self.shared = False
        self._step = _make_fma() if kind == "cpu-fma" else _make_stream()
        self._step()

    def run_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            self._step()

    def busy_s(self) -> float:
        return time.process_time()


class GpuWorkload:
    """Keeps one GPU busy.

    Args:
        kind: `"gpu-matmul"` or `"gpu-copy"`.
        device: Device name in torch.

    Raises:
        DeviceError: torch does not see the GPU, or its memory is full.
    """

    def __init__(self, kind: str, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(f"`{kind}` needs a GPU, but torch {torch.__version__} sees none")
        self.shared = False
        self._make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True, blocking=True)
        self._busy_s = 0.0
        try:
            # `set_device` needs an index, which "cuda" does not have.
            torch.cuda.set_device(torch.device(device).index or 0)
            self._step = _make_matmul(device) if kind == "gpu-matmul" else _make_copy(device)
            for _ in range(10):
                self._step()
            torch.cuda.synchronize(device)
            self._step_s = self._measure_step_s(20)
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"{device} cannot run `{kind}`: {str(error).splitlines()[0]}") from error

    def run_until(self, end_s: float) -> None:
        steps = max(1, round(CHUNK_S / self._step_s))
        queued: deque[tuple[Any, Any]] = deque()
        while time.monotonic() < end_s:
            queued.append(self._launch(steps))
            if len(queued) >= MAX_QUEUED:
                self._finish(*queued.popleft(), steps)
        while queued:
            self._finish(*queued.popleft(), steps)

    def busy_s(self) -> float:
        return self._busy_s

    def _launch(self, steps: int) -> tuple[Any, Any]:
        start, end = self._make_event(), self._make_event()
        start.record()
        for _ in range(steps):
            self._step()
        end.record()
        return start, end

    def _finish(self, start: Any, end: Any, steps: int) -> None:
        end.synchronize()
        if self.shared:
            self._busy_s += steps * self._step_s
            return
        elapsed_s = start.elapsed_time(end) / 1e3
        self._busy_s += elapsed_s
        self._step_s += 0.1 * (elapsed_s / steps - self._step_s)

    def _measure_step_s(self, steps: int) -> float:
        start, end = self._launch(steps)
        end.synchronize()
        return max(start.elapsed_time(end) / 1e3 / steps, 1e-6)


def read_cache_bytes(level: int, *, caches: Path = CACHES) -> int | None:
    """Read the size of the data cache of a level (1, 2, 3); None if the kernel does not report it."""
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


def _make_fma() -> Callable[[], object]:
    # Three matrices fill half of the cache, so that arithmetic and not memory is the bottleneck.
    max_side = int(((read_cache_bytes(2) or MIB) / 2 / (3 * 4)) ** 0.5) // 16 * 16
    side = min(max(max_side, 64), 256)
    generator = np.random.default_rng(0)
    a = generator.random((side, side), dtype=np.float32)
    b, out = a.T.copy(), np.zeros_like(a)
    return lambda: np.matmul(a, b, out=out)


def _make_stream() -> Callable[[], object]:
    # Each buffer is twice the last-level cache, so that no copied slice is still cached.
    cache_bytes = max(read_cache_bytes(3) or 0, read_cache_bytes(2) or 0, 16 * MIB)
    slices = min(2 * cache_bytes, 256 * MIB) // STREAM_SLICE_BYTES
    source = np.ones((slices, STREAM_SLICE_BYTES // 8))
    target = np.zeros_like(source)
    position = 0

    def step() -> None:
        nonlocal position
        np.copyto(target[position], source[position])
        position = (position + 1) % slices

    return step


def _make_matmul(device: str) -> Callable[[], object]:
    import torch

    a = torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=device, dtype=torch.float16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _make_copy(device: str) -> Callable[[], object]:
    import torch

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
