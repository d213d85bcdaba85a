"""Environment of a measurement: device, versions, revision, clocks, load, seed and timer."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparseflow
from sparseflow.core.device import describe_device, read_cpu_clock_mhz
from sparseflow.core.telemetry import nvml

if TYPE_CHECKING:
    import torch


def collect_environment(device: str | torch.device = "cpu", *, seed: int | None = None) -> dict[str, Any]:
    """Collect the environment of a measurement, as JSON types.

    Values that cannot be read are None, or missing from `clocks_mhz`.

    Args:
        device: Device that is measured. For a GPU the host is described, too.
        seed: Random seed; None if nothing is random.
    """
    info = describe_device(device)
    host = info if info.kind == "cpu" else describe_device("cpu")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": info.to_dict(),
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
    """Return the short git hash of the checkout that tracks `file`, with `+` appended if files are modified.

    None without git or if `file` is not tracked: a package installed inside another project's checkout must
    not report that project's revision.

    Args:
        file: A file of the checkout; None for this module, whose revision an installed wheel contains.
    """
    if file is None:
        built = Path(__file__).parents[1] / "REVISION"
        if built.is_file():
            return built.read_text("utf-8").strip()
        file = Path(__file__)
    if _run_git(file, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    revision = _run_git(file, "rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    return revision + ("+" if _run_git(file, "status", "--porcelain", "--untracked-files=no") else "")


def _run_git(file: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(file.parent), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
