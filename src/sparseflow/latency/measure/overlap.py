"""Whether a runtime executes kernels of a graph concurrently, from onnxruntime's profile.

The default executor of onnxruntime starts one node after another. On a CPU the previous node has finished by
then; on a GPU kernels are queued in one stream. The parallel executor, or a provider with several streams,
overlaps nodes. This decides whether the latency of a graph is the sum of its kernels or the longest path.
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
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.inputs import open_session, resolve_inputs

SUM, CRITICAL_PATH = "sum", "critical_path"

MAX_ROUNDING_SHARE = 0.02
"""Maximum overlap that is attributed to the profile's rounding to microseconds."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Concurrency of a graph's nodes.

    Attributes:
        nodes: Number of profiled node executions.
        busy_ms: Sum of their durations.
        span_ms: Time in which at least one node ran.
        share: Share of `busy_ms` that ran concurrently with another node.
        mode: `"sum"` if nodes run one after another, otherwise `"critical_path"`.
    """

    nodes: int
    busy_ms: float
    span_ms: float
    share: float
    mode: str

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self)


def measure_overlap(
    path: Path | str,
    provider: str = "cpu",
    *,
    parallel: bool = False,
    threads: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    gpu: int = 0,
    num_runs: int = 5,
    seed: int = 0,
) -> Overlap:
    """Profile a model and determine which nodes ran concurrently.

    Args:
        path: ONNX file.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        parallel: Use onnxruntime's parallel executor with two inter-op threads.
        threads: Threads within an operator; None leaves the choice to onnxruntime.
        shapes: Input -> shape, for inputs with open dimensions.
        inputs: Input -> value, as `inputs.read_value` takes it; the other inputs are random.
        gpu: Index of the GPU.
        num_runs: Profiled runs, after one warm-up run.
        seed: Random seed of the inputs.

    Raises:
        InputError, FileFormatError, ModelError: The file is not a model that can be run.
        DeviceError: The provider is not available.
        RunError: The run failed, or the profile contains no node.
    """
    ort = require("onnxruntime", "latency")
    model = onnx_file.load_model(path)
    model_inputs = resolve_inputs(model, shapes, inputs)
    with tempfile.TemporaryDirectory(prefix="sparseflow-profile-") as folder:
        settings: dict[str, Any] = {
            "enable_profiling": True,
            "profile_file_prefix": str(Path(folder) / "profile"),
        }
        if parallel:
            settings |= {"execution_mode": ort.ExecutionMode.ORT_PARALLEL, "inter_op_num_threads": 2}
        options = session.make_provider_options(provider, gpu)
        runtime_session = open_session(
            model, model_inputs, str(path), provider, "all", threads=threads, settings=settings,
            provider_options=options,
        )  # fmt: skip
        names = [output.name for output in runtime_session.get_outputs()]
        feeds, _ = model_inputs.find_feeds(lambda feeds: session.run(runtime_session, names, feeds), seed)
        for _ in range(num_runs):
            session.run(runtime_session, names, feeds)
        events = json.loads(Path(runtime_session.end_profiling()).read_text(encoding="utf-8"))
    return compute_overlap(_parse_node_intervals(events, num_runs + 1))


def compute_overlap(events: Iterable[tuple[float, float]]) -> Overlap:
    """Compute the overlap of executions given as (start, end) in milliseconds.

    Raises:
        RunError: There are no executions.
    """
    ordered = sorted(events)
    if not ordered:
        raise RunError("the profile contains no executed node")
    busy_ms = sum(end_ms - start_ms for start_ms, end_ms in ordered)
    span_ms, covered_until_ms = 0.0, -1.0
    for start_ms, end_ms in ordered:
        span_ms += max(end_ms - max(start_ms, covered_until_ms), 0.0)
        covered_until_ms = max(covered_until_ms, end_ms)
    share = max(1.0 - span_ms / busy_ms, 0.0) if busy_ms else 0.0
    return Overlap(
        nodes=len(ordered),
        busy_ms=busy_ms,
        span_ms=span_ms,
        share=share,
        mode=SUM if share <= MAX_ROUNDING_SHARE else CRITICAL_PATH,
    )


def _parse_node_intervals(events: Iterable[Mapping[str, Any]], num_runs: int) -> list[tuple[float, float]]:
    """Return the node executions of all runs except the first."""
    intervals = [
        (float(event["ts"]) / 1e3, float(event["ts"] + event["dur"]) / 1e3)
        for event in events
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")
    ]
    intervals.sort()
    return intervals[len(intervals) // num_runs :]
