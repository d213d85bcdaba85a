"""Whether a runtime runs kernels of a graph at the same time, as its own profile shows.

onnxruntime's executor starts one node after the other; on a CPU a node has then ended, on a GPU its kernels
wait in one stream. Its parallel executor, or a provider with several streams, would overlap them. What adds
up follows from that: the sum of all kernels, or the longest path through the graph.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.extras import require
from sparseflow.errors import RunError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.graph import random_inputs

SUM, CRITICAL_PATH = "sum", "critical_path"

NEGLIGIBLE = 0.02
"""Overlap up to this share is the profile's own rounding to microseconds."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a profile shows.

    Attributes:
        nodes: Executions of nodes that were seen.
        busy_ms: What they took together, milliseconds.
        span_ms: Time in which at least one of them ran, milliseconds.
        share: Part of `busy_ms` that ran while another one did.
        mode: `"sum"` where kernels run one after the other, else `"critical_path"`.
    """

    nodes: int
    busy_ms: float
    span_ms: float
    share: float
    mode: str

    def to_dict(self) -> dict[str, Any]:
        """The finding in JSON's types."""
        return asdict(self)


def analyze(
    path: Path | str,
    provider: str = "cpu",
    *,
    parallel: bool = False,
    threads: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: int = 0,
    runs: int = 5,
    seed: int = 0,
) -> Overlap:
    """Run a model with onnxruntime's profiler and see which nodes ran at the same time.

    Args:
        path: The ONNX file.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        parallel: Use onnxruntime's parallel executor, with a thread for each of two nodes.
        threads: Threads within an operator; None is onnxruntime's own choice.
        shapes: Input -> shape, for inputs that leave extents open.
        gpu: Number of the GPU.
        runs: Runs to look at, after one that is not.
        seed: What inputs are drawn from.

    Raises:
        InputError, FileFormatError, ModelError: The file is no model that can be run.
        DeviceError: The provider is not there.
        RunError: It failed, or the profile shows no node.
    """
    ort = require("onnxruntime", "latency")
    model = onnx_file.load(Path(path))
    onnx_file.fix_inputs(model, dict(shapes or {}))
    feeds = random_inputs(model, seed)
    with tempfile.TemporaryDirectory(prefix="sparseflow-profile-") as folder:
        settings: dict[str, Any] = {
            "enable_profiling": True,
            "profile_file_prefix": str(Path(folder) / "profile"),
        }
        if parallel:
            settings |= {"execution_mode": ort.ExecutionMode.ORT_PARALLEL, "inter_op_num_threads": 2}
        options = session.options_of(provider, gpu)
        opened = session.open_session(
            onnx_file.serialise(model, str(path)), provider, "all", threads=threads, settings=settings,
            provider_options=options,
        )  # fmt: skip
        names = [output.name for output in opened.get_outputs()]
        for _ in range(runs + 1):
            session.run(opened, names, feeds)
        events = json.loads(Path(opened.end_profiling()).read_text(encoding="utf-8"))
    return of_events(_nodes(events, runs + 1))


def of_events(events: Iterable[tuple[float, float]]) -> Overlap:
    """The finding for executions that are given as (begin, end), milliseconds.

    Raises:
        RunError: There are none.
    """
    ordered = sorted(events)
    if not ordered:
        raise RunError("the profile shows no node that ran")
    busy = sum(end - begin for begin, end in ordered)
    span, until = 0.0, -1.0
    for begin, end in ordered:
        span += max(end - max(begin, until), 0.0)
        until = max(until, end)
    share = max(1.0 - span / busy, 0.0) if busy else 0.0
    return Overlap(
        nodes=len(ordered),
        busy_ms=busy,
        span_ms=span,
        share=share,
        mode=SUM if share <= NEGLIGIBLE else CRITICAL_PATH,
    )


def _nodes(events: Iterable[Mapping[str, Any]], runs: int) -> list[tuple[float, float]]:
    """Executions of nodes in all runs but the first."""
    found = [
        (float(event["ts"]) / 1e3, float(event["ts"] + event["dur"]) / 1e3)
        for event in events
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")
    ]
    found.sort()
    return found[len(found) // runs :]
