"""Measures the latency, memory and power of layers, synthetic or of a model.

Latency is the median of timing samples; each sample runs enough calls for the timer's resolution, back to
back as in a model. On a GPU, mode "graph" replays the calls as one CUDA graph, which excludes launch
overhead; mode "eager" launches each kernel. Weights and inputs are the same in each call and may stay in
caches. float32 is computed without TF32.

Points are written as they are measured, and existing points are not measured again, so an interrupted run
resumes with the same call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.device import DeviceSpec, measure_device, measure_power_w
from sparseflow.codesign.hardware.proxy.points import LayerPoint, LayerPointFile, Mode, read_points
from sparseflow.codesign.hardware.proxy.synthetic_layers import LayerGrid, TensorPool
from sparseflow.codesign.workload.layers import to_float
from sparseflow.core.checks import check_at_least, check_non_negative, check_one_of, check_positive
from sparseflow.core.device import describe_device
from sparseflow.core.environment import collect_environment
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.core.progress import Progress
from sparseflow.core.timing import measure
from sparseflow.errors import InputError, RunError

__all__ = ["ProfileConfig", "measure_device", "profile_grid", "profile_model", "read_device"]

_CHUNK_MS = 20.0
"""Duration of the work between two readings of the energy counter."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Settings of the measurement.

    Attributes:
        mode: `"eager"`, or `"graph"` on a GPU.
        repeats: Latency samples per layer.
        warmup: Calls before the first sample.
        sample_ms: Minimum duration of a sample, ms.
        max_calls: Maximum number of calls per sample.
        power_every: Measure power of one in this many layers, chosen at random; 0 for none.
        power_s: Duration of a power measurement, s; energy counters update every 20 to 100 ms.

    Raises:
        InputError: A value is out of range.
    """

    mode: Mode = "eager"
    repeats: int = 9
    warmup: int = 3
    sample_ms: float = 0.5
    max_calls: int = 64
    power_every: int = 0
    power_s: float = 0.5

    def __post_init__(self) -> None:
        check_one_of(get_args(Mode), mode=self.mode)
        check_at_least(1, repeats=self.repeats, warmup=self.warmup, max_calls=self.max_calls)
        check_at_least(0, power_every=self.power_every)
        check_positive(power_s=self.power_s)
        check_non_negative(sample_ms=self.sample_ms)


def read_device(path: Path | str, device: torch.device | str = "cpu") -> DeviceSpec | None:
    """Return the specification of the local device that a file of points contains; None if it contains
    none.

    Measured ceilings vary between runs, and all points of a file need the same specification: use this
    instead of `measure_device` to continue a file.

    Raises:
        DeviceError: The device does not exist.
        FileFormatError: The file is invalid.
    """
    return read_points(path, missing_ok=True).devices.get(describe_device(device).name)


def profile_grid(
    path: Path | str,
    spec: DeviceSpec,
    *,
    num_points: int = 600,
    device: torch.device | str = "cpu",
    grid: LayerGrid | None = None,
    config: ProfileConfig | None = None,
    budget_s: float = math.inf,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[LayerPoint]:
    """Measure synthetic layers.

    Args:
        path: File of points; extended if it exists.
        spec: Specification of the device; see `measure_device`.
        num_points: Number of layer configurations.
        device: Device to measure on.
        grid: Distribution of configurations; by default all layer types in float32, small ones on a CPU.
        config: Settings of the measurement.
        budget_s: Start no further measurement after this time, s.
        seed: Random seed of configurations and values.
        progress: Progress callback.

    Returns:
        All existing points of these configurations.

    Raises:
        InputError: `"graph"` on a CPU, or the file contains another device of the same name.
        DeviceError: The device does not exist.
        RunError: A layer could not be measured, or another process writes the file.
    """
    config, on_cpu = config or ProfileConfig(), torch.device(device).type == "cpu"
    grid = grid or (LayerGrid.small() if on_cpu else LayerGrid())
    deadline = time.monotonic() + budget_s
    pool, points = TensorPool(device, seed), []
    with _open_session(path, spec, config, device, seed) as session:
        configs = grid.sample(num_points, seed)
        for index, layer_config in enumerate(configs):
            node = layer_config.to_node()
            point = session.find(node)
            if point is None and time.monotonic() < deadline:
                module, x = pool.make_layer(layer_config)
                point = session.measure(
                    node, lambda m=module, x=x: m(x), power=_measures_power(config, index, seed)
                )
            if point is not None:
                points.append(point)
            if progress is not None:
                progress(f"layer {index + 1} of {len(configs)}", (index + 1) / len(configs))
    return points


def profile_model(
    path: Path | str,
    model: LayeredModel,
    samples: Tensor,
    spec: DeviceSpec,
    *,
    device: torch.device | str = "cpu",
    config: ProfileConfig | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[LayerPoint]:
    """Measure each layer of a model on the output of the previous layer.

    Args:
        path: File of points; extended if it exists.
        model: The model, in evaluation mode, on the device.
        samples: A batch, on the device.
        spec: Specification of the device; see `measure_device`.
        device: Device to measure on.
        config: Settings of the measurement.
        seed: Seed to record.
        progress: Progress callback.

    Returns:
        One point per layer, in order.

    Raises:
        InputError: `"graph"` on a CPU, or the file contains another device of the same name.
        DeviceError: The device does not exist.
        RunError: A layer could not be measured, or another process writes the file.
    """
    config, points = config or ProfileConfig(), []
    layers = model.describe_layers(len(samples))
    with _open_session(path, spec, config, device, seed) as session:
        state = model.initial_state(samples)
        for index, layer in enumerate(layers):
            node = replace(layer, flops=to_float(layer.flops), bytes=to_float(layer.bytes))
            point = session.find(node)
            if point is None:
                point = session.measure(
                    node,
                    lambda layer_index=index, state=state: model.run_layer(layer_index, dict(state)),
                    power=_measures_power(config, index, seed),
                )
            points.append(point)
            state = model.run_layer(index, dict(state))
            if progress is not None:
                progress(f"layer {index + 1} of {len(layers)}", (index + 1) / len(layers))
    return points


class _ProfileSession:
    """An open file and the settings shared by all points of one call."""

    def __init__(
        self,
        file: LayerPointFile,
        spec: DeviceSpec,
        config: ProfileConfig,
        device: torch.device,
        environment: str,
    ) -> None:
        self._file, self._spec, self._config = file, spec, config
        self._device, self._environment = device, environment
        self._existing = {point.key: point for point in file.points}
        self._stream = torch.cuda.Stream(device) if config.mode == "graph" else None

    def find(self, node: LayerNode) -> LayerPoint | None:
        """Return the existing point of a layer, if there is one."""
        return self._existing.get(self._make_point(node, lat_ms=1.0, mem_mb=1.0).key)

    def measure(self, node: LayerNode, work: Callable[[], object], *, power: bool) -> LayerPoint:
        """Measure a layer and append the point."""
        try:
            point = self._measure_layer(node, work, power)
        except RuntimeError as error:  # from torch: out of memory, kernel failure, or graph capture
            first = str(error).partition("\n")[0]
            raise RunError(f"{node.name} could not be measured on {self._device}: {first}") from error
        self._file.add(point)
        return point

    def _measure_layer(self, node: LayerNode, work: Callable[[], object], power: bool) -> LayerPoint:
        config, device = self._config, self._device
        for _ in range(config.warmup):
            work()
        memory_mb = self._measure_memory_mb(node, work)
        call_ms = measure(work, warmup=0, repeats=2, device=device).min_ms
        calls = min(max(math.ceil(config.sample_ms / call_ms), 1), config.max_calls)
        if config.mode == "graph":
            replay = self._capture_graph(work, calls)
            timing = measure(replay, warmup=1, repeats=config.repeats, device=device)
            samples = [sample_ms / calls for sample_ms in timing.times_ms]
        else:
            replay = work
            timing = measure(work, warmup=0, repeats=config.repeats, device=device, calls_per_sample=calls)
            samples = list(timing.times_ms)
        # Rounded to nanoseconds, below the resolution of timers, to keep the file small.
        samples = [max(round(time_ms, 6), 1e-6) for time_ms in samples]
        median = statistics.median(samples)
        return self._make_point(
            node,
            lat_ms=median,
            samples_ms=tuple(samples),
            mem_mb=node.memory_bytes / 1e6 if memory_mb is None else memory_mb,
            mem_provenance="analytic" if memory_mb is None else "measured",
            power_w=self._measure_power_w(replay, median * (calls if config.mode == "graph" else 1))
            if power
            else None,
        )

    def _measure_memory_mb(self, node: LayerNode, work: Callable[[], object]) -> float | None:
        """Weights, input and the peak of additional allocations, MB; None on a CPU."""
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        base_bytes = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        activation_bytes = torch.cuda.max_memory_allocated(self._device) - base_bytes
        return (node.weight_bytes + node.traffic_in_bytes + activation_bytes) / 1e6

    def _capture_graph(self, work: Callable[[], object], calls: int) -> Callable[[], object]:
        """Capture consecutive calls as one CUDA graph."""
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Libraries allocate per-stream resources at the first call, which must not be captured.
            work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                work()
        return graph.replay

    def _measure_power_w(self, work: Callable[[], object], call_ms: float) -> float | None:
        calls = max(1, round(_CHUNK_MS / call_ms))

        def chunk() -> None:
            for _ in range(calls):
                work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return measure_power_w(chunk, self._device, self._config.power_s)

    def _make_point(self, node: LayerNode, **values: Any) -> LayerPoint:
        return LayerPoint(
            layer=node, device=self._spec, mode=self._config.mode, environment=self._environment, **values
        )


@contextmanager
def _open_session(
    path: Path | str, spec: DeviceSpec, config: ProfileConfig, device: torch.device | str, seed: int
) -> Iterator[_ProfileSession]:
    """Open a session without TF32 and gradients."""
    target = torch.device(device)
    if config.mode == "graph" and target.type != "cuda":
        raise InputError(
            f"`mode` (='graph') requires a CUDA device, but `device` is {str(device)!r}; use 'eager'"
        )
    describe_device(target)  # raises DeviceError if it does not exist
    if target.type == "cuda" and target.index is None:
        # The layers are on the current GPU; `describe_device` may select another one.
        target = torch.device("cuda", torch.cuda.current_device())
    precision = torch.get_float32_matmul_precision()
    with LayerPointFile(path) as file, torch.no_grad():
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.cuda.device(target) if target.type == "cuda" else nullcontext():
                environment = file.add_environment(collect_environment(target, seed=seed))
                yield _ProfileSession(file, spec, config, target, environment)
        finally:
            torch.set_float32_matmul_precision(precision)


def _measures_power(config: ProfileConfig, index: int, seed: int) -> bool:
    """Whether power is measured for the layer at this index; the same in resumed runs."""
    return (
        config.power_every > 0 and int(np.random.default_rng((seed, index)).integers(config.power_every)) == 0
    )
