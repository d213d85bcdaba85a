"""What hardware is here, and which of it to use. What it can do at best is measured in `ceilings.py`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparseflow.core.extras import get_version
from sparseflow.core.telemetry import nvml
from sparseflow.errors import DeviceError

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "triton", "numba", "numpy", "spikingjelly")
"""Distributions whose version can change how fast a backend is."""

CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)
"""Instruction sets that a backend may choose by (names as Linux writes them)."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device, as found.

    Attributes:
        kind: `"cpu"` or `"cuda"`.
        name: Model name.
        index: CUDA index, None for a CPU.
        memory_bytes: Installed memory.
        driver: Driver's version, None for a CPU or where NVML is absent.
        compute_capability: Such as `"9.0"`, None for a CPU.
        cores: Streaming multiprocessors of a GPU, or the CPUs that this process may run on.
        threads: What torch computes with on a CPU; None for a GPU.
        flags: Instruction sets among `CPU_FLAGS`, sorted; empty for a GPU.
        versions: Library -> version, of those that are installed.
    """

    kind: str
    name: str
    index: int | None
    memory_bytes: int
    driver: str | None
    compute_capability: str | None
    cores: int
    threads: int | None
    flags: tuple[str, ...]
    versions: Mapping[str, str]

    def key(self) -> str:
        """A short name that stays the same as long as measurements taken here stay valid.

        It does not hold the CUDA index: two equal GPUs of one host share what was measured.
        """
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        facts = repr(
            (
                self.kind,
                self.name,
                self.driver,
                self.compute_capability,
                self.cores,
                self.threads,
                self.flags,
                sorted(self.versions.items()),
            )
        )
        digest = hashlib.sha256(facts.encode()).hexdigest()[:10]
        return f"{self.kind}-{slug[:40]}-{digest}"


def describe_cpu() -> str:
    """What a time on a CPU holds for: name, our share of its CPUs, instruction sets; without torch."""
    return f"{_cpu_name()}, {_usable_cpus()} CPUs, {' '.join(_cpu_flags())}"


def describe_device(device: str | torch.device = "cpu") -> DeviceInfo:
    """Facts about one device.

    Raises:
        DeviceError: The device is not there, or is neither a CPU nor a CUDA device.
    """
    import torch

    target = torch.device(device)
    if target.type == "cpu":
        return DeviceInfo(
            kind="cpu",
            name=_cpu_name(),
            index=None,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            driver=None,
            compute_capability=None,
            cores=_usable_cpus(),
            threads=torch.get_num_threads(),
            flags=_cpu_flags(),
            versions=_versions(),
        )
    if target.type != "cuda":
        raise DeviceError(f"`device` (={str(device)!r}) must be a CPU or a CUDA device")
    target = select_device(target.index if target.index is not None else None)
    if target.type != "cuda":
        raise DeviceError("a CUDA device was asked for and torch sees none here")
    properties = torch.cuda.get_device_properties(target)
    versions = dict(_versions())
    cudnn = torch.backends.cudnn.version()
    if cudnn is not None:
        versions["cudnn"] = str(cudnn)
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return DeviceInfo(
        kind="cuda",
        name=properties.name,
        index=target.index,
        memory_bytes=properties.total_memory,
        driver=nvml.read_driver_version(),
        compute_capability=f"{properties.major}.{properties.minor}",
        cores=properties.multi_processor_count,
        threads=None,
        flags=(),
        versions=versions,
    )


def select_gpu() -> int:
    """Index of the visible GPU with the most free memory.

    Raises:
        DeviceError: torch sees no GPU here.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError("no CUDA device is visible to torch here; run on the CPU, or check the driver")
    return max(range(count), key=lambda index: torch.cuda.mem_get_info(index)[0])


def select_device(gpu: int | None) -> torch.device:
    """The device to work on: GPU `gpu`, or, for None, the emptiest GPU, or the CPU where there is no GPU.

    Raises:
        DeviceError: A GPU was named that torch does not see.
    """
    import torch

    count = torch.cuda.device_count()
    if gpu is None:
        return torch.device("cuda", select_gpu()) if count else torch.device("cpu")
    if not 0 <= gpu < count:
        seen = "none" if count == 0 else f"0 to {count - 1}"
        raise DeviceError(f"GPU {gpu} was asked for; torch sees {seen} here")
    return torch.device("cuda", gpu)


def read_cpu_clock_mhz() -> dict[str, float]:
    """The CPU's clock right now, averaged over its cores, as `{"core": MHz}`; empty if unreadable."""
    try:
        # Not the cached text: the clock is what changes in it.
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    found = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", text, re.MULTILINE)]
    return {"core": sum(found) / len(found)} if found else {}


def _versions() -> dict[str, str]:
    return {name: found for name in LIBRARIES if (found := get_version(name)) is not None}


def _usable_cpus() -> int:
    # A container or taskset may leave this process fewer CPUs than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cpu_flags() -> tuple[str, ...]:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    here = set(found.group(1).split()) if found else set()
    return tuple(sorted(here.intersection(CPU_FLAGS)))


@lru_cache(maxsize=1)
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
