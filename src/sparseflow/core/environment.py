"""The circumstances of a measurement: device, versions, revision, clocks, load, seed and timer."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparseflow
from sparseflow.core.device import DeviceInfo, describe_device, read_cpu_clock_mhz
from sparseflow.core.telemetry import nvml

if TYPE_CHECKING:
    import torch


def collect_environment(device: str | torch.device = "cpu", *, seed: int | None = None) -> dict[str, Any]:
    """What a result must carry to be worth something later; plain JSON types throughout.

    What cannot be read is None (or left out of `clocks_mhz`), never a made-up value.

    Args:
        device: Where the work runs. The host is described too when it is a GPU.
        seed: What randomness was drawn from, None where there was none.
    """
    info = describe_device(device)
    host = info if info.kind == "cpu" else describe_device("cpu")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _plain(info),
        "device_key": info.key(),
        "host": {
            "name": host.name,
            "cores": host.cores,
            "threads": host.threads,
            "memory_bytes": host.memory_bytes,
        },
        "clocks_mhz": read_cpu_clock_mhz() if info.kind == "cpu" else nvml.read_clocks_mhz(device),
        "load_average": list(os.getloadavg()),
        "timer": "perf_counter" if info.kind == "cpu" else "cuda_event",
        "seed": seed,
        "sparseflow": sparseflow.__version__,
        "git": get_git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def get_git_revision(file: Path | None = None) -> str | None:
    """Short hash of the checkout that `file` is tracked in, `+` behind it when files differ from it.

    None without git, or when `file` is not tracked: a package installed into some other project's checkout
    must not claim that project's revision.

    Args:
        file: A file of the checkout; this module when None.
    """
    file = Path(__file__) if file is None else file
    if _git(file, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    revision = _git(file, "rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    return revision + ("+" if _git(file, "status", "--porcelain", "--untracked-files=no") else "")


def _git(file: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(file.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _plain(info: DeviceInfo) -> dict[str, Any]:
    return {**asdict(info), "flags": list(info.flags), "versions": dict(info.versions)}
