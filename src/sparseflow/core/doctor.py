"""What of SparseFlow can work on this machine, and what to do about what cannot."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import util
from typing import Any

import sparseflow
from sparseflow.core.device import DeviceInfo, describe_device
from sparseflow.core.extras import EXTRAS, get_version


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at.

    Attributes:
        name: What was looked at.
        ok: Whether it can be used here.
        detail: What was found.
        fix: What to do; empty when `ok`, or when nothing can be done on this machine.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything looked at: the devices, then the extras, then what can compute."""

    devices: tuple[DeviceInfo, ...]
    extras: tuple[Check, ...]
    backends: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return {
            "sparseflow": sparseflow.__version__,
            "python": platform.python_version(),
            "devices": [
                {
                    **asdict(info),
                    "flags": list(info.flags),
                    "versions": dict(info.versions),
                    "key": info.key(),
                }
                for info in self.devices
            ],
            "extras": [asdict(check) for check in self.extras],
            "backends": [asdict(check) for check in self.backends],
        }


def diagnose() -> Diagnosis:
    """Look at this machine. Nothing is measured and nothing is changed."""
    import torch

    gpus = tuple(describe_device(f"cuda:{index}") for index in range(torch.cuda.device_count()))
    return Diagnosis(
        devices=(describe_device("cpu"), *gpus),
        extras=tuple(_extra(name) for name in EXTRAS),
        backends=(_dense(), _numba(), _triton(len(gpus))),
    )


def _extra(name: str) -> Check:
    packages = EXTRAS[name]
    found = {package: get_version(package) for package, _ in packages}
    missing = [package for package, number in found.items() if number is None]
    here = ", ".join(f"{package} {number}" for package, number in found.items() if number is not None)
    if not missing:
        return Check(name=name, ok=True, detail=here)
    absent = "missing: " + ", ".join(missing)
    return Check(
        name=name,
        ok=False,
        detail=f"{here}; {absent}" if here else absent,
        fix=f"pip install 'sparseflow[{name}]'",
    )


def _dense() -> Check:
    import torch

    return Check(
        name="dense (torch)", ok=True, detail=f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def _numba() -> Check:
    found = get_version("numba")
    if found is None or util.find_spec("numba") is None:
        return Check(
            name="event-driven on a CPU (Numba)",
            ok=False,
            detail="numba is not installed",
            fix="pip install 'sparseflow[spiking]'",
        )
    return Check(name="event-driven on a CPU (Numba)", ok=True, detail=f"numba {found}")


def _triton(gpus: int) -> Check:
    name = "fused kernels on a GPU (Triton)"
    found = get_version("triton")
    if gpus == 0:
        detail = "torch sees no CUDA device"
        if found is not None:
            detail += f"; triton {found} is here, for its interpreter in tests only"
        return Check(name=name, ok=False, detail=detail)
    if found is None:
        return Check(
            name=name,
            ok=False,
            detail="there is a GPU, and triton is not installed",
            fix="install the CUDA build of torch, which brings the triton that fits it",
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Check(
            name=name,
            ok=False,
            detail=f"triton {found}, but TRITON_INTERPRET=1 sends its kernels to the CPU",
            fix="unset TRITON_INTERPRET",
        )
    return Check(name=name, ok=True, detail=f"triton {found} on {gpus} GPU{'s' if gpus > 1 else ''}")
