"""What NVML tells about an NVIDIA GPU. Absent NVML, package or counter gives None or nothing, never 0."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def read_driver_version() -> str | None:
    """Version of the NVIDIA driver, or None where NVML is absent."""
    if not _available():
        return None
    import pynvml

    found = pynvml.nvmlSystemGetDriverVersion()
    return found.decode() if isinstance(found, bytes) else str(found)


def read_energy_j(device: str | torch.device) -> float | None:
    """Joules that the GPU has used since its driver was loaded; take it twice and subtract.

    None where nothing counts them: on a CPU, without `nvidia-ml-py`, without the driver's library, or on a
    GPU that has no such counter. The counter moves about every 20 to 100 ms, so measure for seconds.
    """
    gpu = get_handle(device)
    if gpu is None:
        return None
    import pynvml

    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
    except pynvml.NVMLError:
        return None


def read_clocks_mhz(device: str | torch.device) -> dict[str, float]:
    """The GPU's clocks right now, by what they drive (`core`, `memory`); only those that can be read."""
    gpu = get_handle(device)
    if gpu is None:
        return {}
    import pynvml

    clocks: dict[str, float] = {}
    for name, which in (("core", pynvml.NVML_CLOCK_SM), ("memory", pynvml.NVML_CLOCK_MEM)):
        try:
            clocks[name] = float(pynvml.nvmlDeviceGetClockInfo(gpu, which))
        except pynvml.NVMLError:
            continue
    return clocks


def get_handle(device: str | torch.device) -> Any | None:
    """NVML's handle of a GPU, or None for a CPU, where NVML is absent, or where it does not know that GPU."""
    import torch

    target = torch.device(device)
    if target.type != "cuda" or not _available():
        return None
    import pynvml

    # By UUID, since CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's.
    uuid = str(torch.cuda.get_device_properties(target).uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


@lru_cache(maxsize=1)
def _available() -> bool:
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True
