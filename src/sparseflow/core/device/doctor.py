"""Check which parts of SparseFlow work on this machine and how to fix the others."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import sparseflow
from sparseflow.core.device.info import DeviceInfo, describe_device
from sparseflow.core.extras import EXTRAS, get_install_command, get_version


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        name: Checked part.
        ok: Whether it works on this machine.
        detail: Versions or the missing part.
        fix: Command or step that fixes it; empty if `ok`, or if this machine cannot run it.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Devices of this machine, and the checks of all extras and backends."""

    devices: tuple[DeviceInfo, ...]
    extras: tuple[Check, ...]
    backends: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON types."""
        return {
            "sparseflow": sparseflow.__version__,
            "python": platform.python_version(),
            "devices": [{**info.to_dict(), "key": info.key()} for info in self.devices],
            "extras": [asdict(check) for check in self.extras],
            "backends": [asdict(check) for check in self.backends],
        }


def diagnose() -> Diagnosis:
    """Run all checks. Nothing is measured or changed."""
    gpus = tuple(describe_device(f"cuda:{index}") for index in range(torch.cuda.device_count()))
    return Diagnosis(
        devices=(describe_device("cpu"), *gpus),
        extras=tuple(_check_extra(name) for name in EXTRAS),
        backends=(
            Check(
                name="dense (torch)",
                ok=True,
                detail=f"torch {torch.__version__}, {torch.get_num_threads()} threads",
            ),
            _check_numba(),
            _check_triton(len(gpus)),
        ),
    )


def _check_extra(name: str) -> Check:
    versions = {package: get_version(package) for package in EXTRAS[name]}
    missing = [package for package, version in versions.items() if version is None]
    parts = [f"{package} {version}" for package, version in versions.items() if version is not None]
    if not missing:
        return Check(name=name, ok=True, detail=", ".join(parts))
    detail = "; ".join(filter(None, (", ".join(parts), f"missing: {', '.join(missing)}")))
    return Check(name=name, ok=False, detail=detail, fix=get_install_command(name, missing))


def _check_numba() -> Check:
    name = "event-driven on a CPU (Numba)"
    version = get_version("numba")
    if version is None:
        fix = "pip install 'sparseflow[spiking]'"
        return Check(name=name, ok=False, detail="numba is not installed", fix=fix)
    return Check(name=name, ok=True, detail=f"numba {version}")


def _check_triton(gpus: int) -> Check:
    name = "fused kernels on a GPU (Triton)"
    version = get_version("triton")
    if gpus == 0:
        detail = "torch sees no CUDA device"
        if version is not None:
            detail += f"; triton {version} is installed, but only its interpreter works without a GPU"
        return Check(name=name, ok=False, detail=detail)
    if version is None:
        return Check(
            name=name,
            ok=False,
            detail="triton is not installed",
            fix="install the CUDA build of torch, which includes the matching triton",
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Check(
            name=name,
            ok=False,
            detail=f"triton {version}, but TRITON_INTERPRET=1 runs its kernels on the CPU",
            fix="unset TRITON_INTERPRET",
        )
    return Check(name=name, ok=True, detail=f"triton {version} on {gpus} GPU{'s' if gpus > 1 else ''}")
