"""Describe the devices of this machine and select the one to use."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import get_version
from sparseflow.core.telemetry import nvml
from sparseflow.errors import DeviceError

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "triton", "numba", "numpy", "spikingjelly")
"""Distributions whose version can change the speed of a backend."""

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
"""Instruction sets that backends select kernels by, in the spelling of Linux."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Hardware and software facts of one device.

    Attributes:
        kind: `"cpu"` or `"cuda"`.
        name: Model name.
        index: CUDA index; None for a CPU.
        memory_bytes: Installed memory.
        driver: Driver version; None for a CPU or without NVML.
        compute_capability: Such as `"9.0"`; None for a CPU.
        cores: Streaming multiprocessors of a GPU, or CPUs that this process may use.
        threads: Threads of torch on a CPU; None for a GPU.
        flags: Instruction sets among `CPU_FLAGS`, sorted; empty for a GPU.
        versions: Version of each installed library.
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

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**asdict(self), "flags": list(self.flags), "versions": dict(self.versions)}

    def key(self) -> str:
        """Return a short file-name-safe key under which measurements of this device are valid.

        The key does not contain the CUDA index: equal GPUs of one host share measurements.
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
    """Describe the CPU under which a measured time is valid: name, usable CPUs, instruction sets."""
    return f"{_read_cpu_name()}, {len(list_usable_cpus())} CPUs, {' '.join(_read_cpu_flags())}"


def describe_device(device: str | torch.device = "cpu") -> DeviceInfo:
    """Collect the facts of one device.

    Raises:
        DeviceError: The device does not exist, or is neither a CPU nor a CUDA device.
    """
    import torch

    target = torch.device(device)
    if target.type == "cpu":
        return DeviceInfo(
            kind="cpu",
            name=_read_cpu_name(),
            index=None,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            driver=None,
            compute_capability=None,
            cores=len(list_usable_cpus()),
            threads=torch.get_num_threads(),
            flags=_read_cpu_flags(),
            versions=_collect_versions(),
        )
    if target.type != "cuda":
        raise DeviceError(f"`device` (={str(device)!r}) must be a CPU or a CUDA device")
    target = select_device(target.index)
    if target.type != "cuda":
        raise DeviceError(f"`device` (={str(device)!r}) does not exist: torch sees no CUDA device")
    properties = torch.cuda.get_device_properties(target)
    versions = _collect_versions()
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
    """Return the index of the visible GPU with the most free memory.

    Raises:
        DeviceError: torch sees no GPU.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError("torch sees no CUDA device; run on the CPU, or check the driver")
    return max(range(count), key=lambda index: torch.cuda.mem_get_info(index)[0])


def select_device(gpu: int | None) -> torch.device:
    """Select GPU `gpu`; for None, the GPU with the most free memory, or the CPU if there is no GPU.

    Raises:
        DeviceError: torch does not see GPU `gpu`.
    """
    import torch

    count = torch.cuda.device_count()
    if gpu is None:
        return torch.device("cuda", select_gpu()) if count else torch.device("cpu")
    if not 0 <= gpu < count:
        visible = "none" if count == 0 else f"0 to {count - 1}"
        raise DeviceError(f"GPU {gpu} does not exist; torch sees {visible}")
    return torch.device("cuda", gpu)


def list_usable_cpus() -> set[int]:
    """List the CPUs that this process may use, which a container or taskset may restrict."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def read_cpu_clock_mhz() -> dict[str, float]:
    """Read the current CPU clock, averaged over all cores, as `{"core": MHz}`; empty if unreadable."""
    try:
        # Not through `_read_cpuinfo`, whose cached text holds an old clock.
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    clocks = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", text, re.MULTILINE)]
    return {"core": sum(clocks) / len(clocks)} if clocks else {}


def _collect_versions() -> dict[str, str]:
    return {name: version for name in LIBRARIES if (version := get_version(name)) is not None}


def _read_cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read_cpuinfo(), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _read_cpu_flags() -> tuple[str, ...]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read_cpuinfo(), re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    return tuple(sorted(flags.intersection(CPU_FLAGS)))


@lru_cache(maxsize=1)
def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
