"""NVML readings of an NVIDIA GPU.

Without NVML, its Python package or a counter, the result is None or empty, never 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def read_driver_version() -> str | None:
    """Read the version of the NVIDIA driver; None without NVML."""
    pynvml = _load()
    if pynvml is None:
        return None
    version = pynvml.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)


def read_energy_j(device: str | torch.device) -> float | None:
    """Read the energy in joules that the GPU has used since its driver was loaded.

    The difference of two readings gives the energy of an interval. The counter advances every 20 to 100 ms,
    so measure for seconds.

    Returns:
        The energy, or None on a CPU, without `nvidia-ml-py` or the driver library, or if the GPU has no such
        counter.
    """
    pynvml, gpu = _load(), get_handle(device)
    if pynvml is None or gpu is None:
        return None
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
    except pynvml.NVMLError:
        return None


def read_clocks_mhz(device: str | torch.device) -> dict[str, float]:
    """Read the current clocks of the GPU by domain (`core`, `memory`); unreadable clocks are left out."""
    pynvml, gpu = _load(), get_handle(device)
    if pynvml is None or gpu is None:
        return {}
    clocks: dict[str, float] = {}
    for name, domain in (("core", pynvml.NVML_CLOCK_SM), ("memory", pynvml.NVML_CLOCK_MEM)):
        try:
            clocks[name] = float(pynvml.nvmlDeviceGetClockInfo(gpu, domain))
        except pynvml.NVMLError:
            continue
    return clocks


def get_handle(device: str | torch.device) -> Any | None:
    """Return the NVML handle of a GPU; None for a CPU, without NVML, or if NVML does not know the GPU."""
    import torch

    target = torch.device(device)
    pynvml = _load() if target.type == "cuda" else None
    if pynvml is None:
        return None
    # By UUID, because CUDA_VISIBLE_DEVICES renumbers the devices of torch but not those of NVML.
    uuid = str(torch.cuda.get_device_properties(target).uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


@lru_cache(maxsize=1)
def _load() -> Any | None:
    """Import and initialize NVML; None if that fails."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
