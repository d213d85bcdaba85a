"""Calibration: measure a few small networks and their kernels, and correct a predictor by them.

Measurements are appended to a journal in the cache directory, so that an interrupted calibration resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveFloat

from sparseflow.core.artifact import Artifact
from sparseflow.core.config import StrictModel
from sparseflow.core.files import get_cache_dir
from sparseflow.core.journal import Journal
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.latency.first_answer import get_calibrated_path, make_first_answer
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.extraction import extract, read_kernel
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure.blocks import Block, list_blocks
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.peaks import measure_idle_ms
from sparseflow.latency.measure.runner import Runner
from sparseflow.latency.model.calibration import calibrate_predictor
from sparseflow.latency.model.composition import VIEW_OPS
from sparseflow.latency.model.predictor import Predictor

MIN_BUDGET_S = 5.0
_MIN_TARGET_S, _MAX_TARGET_S = 0.02, 1.0
"""Limits of the time of one measurement."""


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """Outcome of a calibration.

    Attributes:
        path: File of the predictor.
        base: Origin of the predictor that was corrected.
        kernels: Number of measured kernels.
        networks: Number of measured networks.
        error_before: Median relative error on the networks before the calibration.
        error_after: The same after it; each network is predicted without its own measurement.
        seconds: Time of this call.
    """

    path: Path
    base: str
    kernels: int
    networks: int
    error_before: float
    error_after: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**asdict(self), "path": str(self.path)}


class _Target(StrictModel):
    """A network or kernel to measure."""

    name: str
    path: Path
    kernel: KernelSpec | None


class _Row(StrictModel):
    """A measurement of the journal."""

    name: str
    latency_ms: PositiveFloat


class _Header(Artifact):
    """What the measurements of a journal belong to."""

    FORMAT: ClassVar[str] = "sparseflow.latency.calibration"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "delete the file and run `sparseflow latency calibrate` again"

    fingerprint: DeviceFingerprint


def calibrate(
    out: Path | str | None = None,
    *,
    base: Predictor | None = None,
    budget_s: float = 60.0,
    provider: str = "cpu",
    gpu: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Correct a predictor by measurements of small networks and their kernels on this machine.

    Args:
        out: File to write; by default one in the cache directory, which `predict` uses.
        base: Predictor to correct; by default the shipped or transferred one of this machine.
        budget_s: Approximate time of all measurements, seconds; at least `MIN_BUDGET_S`.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        gpu: Index of the GPU.
        seed: Random seed of the order and the inputs.
        progress: Receives a message and the fraction done.

    Raises:
        InputError: `budget_s` is too short, or no predictor is shipped for the device type.
        DeviceError: The device is not available.
        RunError: A network failed, or another process calibrates this device.
    """
    if not MIN_BUDGET_S <= budget_s < math.inf:
        raise InputError(f"`budget_s` (={budget_s}) must be at least {MIN_BUDGET_S:g}")
    start_s = time.monotonic()
    fingerprint = DeviceFingerprint.from_local_device(provider, gpu=gpu)
    report = progress or (lambda message, fraction: None)
    report("preparing", 0.0)
    predictor = base or make_first_answer(fingerprint, gpu=gpu)
    folder = _get_work_dir(fingerprint, seed)
    graphs, targets = _prepare(list_blocks(), folder, provider)
    random.Random(seed).shuffle(targets)
    with Journal(
        folder / "rows.jsonl", _Row, header=_Header(fingerprint=fingerprint), key=lambda row: row.name
    ) as journal:
        missing = [target for target in targets if target.name not in journal]
        deadline_s = start_s + budget_s * (len(missing) / len(targets))
        for index, target in enumerate(missing):
            report(target.name, 1.0 - (len(missing) - index) / len(targets))
            runner = Runner(target.path, provider, threads=fingerprint.threads, gpu=gpu, seed=seed)
            share_s = (deadline_s - time.monotonic()) / (len(missing) - index)
            # Loading and warming up take about a third of the time.
            measure_s = min(max(share_s / 1.5, _MIN_TARGET_S), _MAX_TARGET_S)
            journal.append(_Row(name=target.name, latency_ms=measure_idle_ms(runner, measure_s)))
        measured_ms = {row.name: row.latency_ms for row in journal.rows}
    kernels = [target.kernel for target in targets if target.kernel is not None]
    result = calibrate_predictor(
        predictor,
        kernels,
        [measured_ms[kernel.id] for kernel in kernels],
        list(graphs.values()),
        [measured_ms[name] for name in graphs],
    )
    path = result.predictor.save(out or get_calibrated_path(fingerprint))
    # Deleted last, so that an interruption loses nothing.
    shutil.rmtree(folder, ignore_errors=True)
    report("done", 1.0)
    return CalibrationResult(
        path=path,
        base=predictor.origin,
        kernels=len(kernels),
        networks=len(graphs),
        error_before=statistics.median(abs(ratio - 1.0) for ratio in result.ratios_before),
        error_after=statistics.median(abs(ratio - 1.0) for ratio in result.ratios_after),
        seconds=time.monotonic() - start_s,
    )


def _get_work_dir(fingerprint: DeviceFingerprint, seed: int) -> Path:
    """Return the directory of the unfinished calibration of a device."""
    settings = json.dumps([fingerprint.to_dict(), seed], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
    return get_cache_dir() / "latency" / f"calibration-{digest}"


def _prepare(blocks: Sequence[Block], folder: Path, provider: str) -> tuple[dict[str, Graph], list[_Target]]:
    """Write networks and kernels; return name -> graph, and the networks and distinct kernels to measure."""
    graphs: dict[str, Graph] = {}
    targets: dict[str, _Target] = {}
    for block in blocks:
        path = block.write(folder / "networks")
        graph_dir = folder / "graphs" / block.name
        results = extract(path, graph_dir, provider=provider, check=False)
        graphs[block.name] = Graph.load(graph_dir)
        targets[block.name] = _Target(name=block.name, path=path, kernel=None)
        for result in results:
            if result.path is None:
                continue
            kernel = read_kernel(result.path)
            if kernel.node_op not in VIEW_OPS:
                targets[kernel.id] = _Target(name=kernel.id, path=result.path, kernel=kernel)
    return graphs, list(targets.values())
