"""What layers take here: made-up ones over a grid of configurations, and those of a model on its real state.

Latency is the median of samples of `core.timing`, each of as many calls as make it long enough for the
timer: layers follow each other, as they do in a model. On a GPU, mode `"graph"` replays the calls as one
CUDA graph, so that launches do not count; `"eager"` launches each kernel, and small layers take what launches
take. Weights and input of a layer are the same in each call, and lie in a cache where they fit into one.
Float32 is true float32.

Points go to a file as they come in, and what is there is not measured again: after a kill, the same call
goes on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.device import DeviceSpec, device_here, mean_power_w
from sparseflow.codesign.hardware.proxy.points import MODES, Point, PointFile, read_points
from sparseflow.codesign.hardware.proxy.synthetic_layers import Grid, Pool
from sparseflow.codesign.workload.layers import number
from sparseflow.core.device import describe_device
from sparseflow.core.environment import collect_environment
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.core.timing import measure
from sparseflow.errors import InputError, RunError

__all__ = ["Measuring", "device_held", "device_here", "profile_grid", "profile_model"]

Progress = Callable[[int, int], None]

_CHUNK_MS = 20.0
"""Work that is queued between two looks at the energy counter."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How layers are measured.

    Attributes:
        mode: `"eager"`, or `"graph"` on a GPU.
        repeats: Samples of each.
        warmup: Calls before the first.
        sample_ms: What a sample should take at least.
        most_calls: Calls of a sample at most.
        power_every: Power is measured of one in so many layers, drawn at random; 0 for none.
        power_s: Seconds that a layer runs for it: the counter moves every 20 to 100 ms.

    Raises:
        InputError: A value is out of range.
    """

    mode: str = "eager"
    repeats: int = 9
    warmup: int = 3
    sample_ms: float = 0.5
    most_calls: int = 64
    power_every: int = 0
    power_s: float = 0.5

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"`mode` (={self.mode!r}) must be one of: {', '.join(MODES)}")
        for name in ("repeats", "warmup", "most_calls"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` (={getattr(self, name)}) must be at least 1")
        if self.power_every < 0 or not self.power_s > 0.0 or not self.sample_ms >= 0.0:
            raise InputError(
                f"`power_every` (={self.power_every}) and `sample_ms` (={self.sample_ms}) must not be "
                f"negative, `power_s` (={self.power_s}) must be above 0"
            )


def device_held(path: Path | str, device: torch.device | str = "cpu") -> DeviceSpec | None:
    """What a file's points say of the device at hand, None where it holds none of it.

    Points of one file are of one device, and ceilings differ a little whenever they are measured: whoever
    goes on with a file takes this in place of `device_here`.

    Raises:
        DeviceError: The device is not there.
        FileFormatError: The file holds something else.
    """
    return read_points(path, missing_ok=True).devices.get(describe_device(device).name)


def profile_grid(
    path: Path | str,
    spec: DeviceSpec,
    *,
    points: int = 600,
    device: torch.device | str = "cpu",
    grid: Grid | None = None,
    how: Measuring | None = None,
    budget_s: float = math.inf,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Point]:
    """Measure made-up layers.

    Args:
        path: File of points; made, or gone on with.
        spec: What the points say of the device; see `device_here`.
        points: How many configurations.
        device: Where to measure.
        grid: What configurations are drawn from; by default all types in float32, small on a CPU.
        how: How to measure.
        budget_s: Begin no further one after so many seconds.
        seed: What configurations and values are drawn from.
        progress: Called with (configurations done, configurations).

    Returns:
        The points of these configurations that there are.

    Raises:
        InputError: `"graph"` on a CPU, or the file holds another device of that name.
        DeviceError: The device is not there.
        RunError: A layer could not be measured, or another process writes the file.
    """
    how, on_cpu = how or Measuring(), torch.device(device).type == "cpu"
    grid = grid or (Grid.small() if on_cpu else Grid())
    end = time.monotonic() + budget_s
    pool, found = Pool(device, seed), []
    with _open(path, spec, how, device, seed) as session:
        configs = grid.draw(points, seed)
        for at, config in enumerate(configs):
            node = config.node()
            point = session.held(node)
            if point is None and time.monotonic() < end:
                module, x = pool.layer(config)
                point = session.measure(node, lambda m=module, x=x: m(x), power=_chosen(how, at, seed))
            if point is not None:
                found.append(point)
            if progress is not None:
                progress(at + 1, len(configs))
    return found


def profile_model(
    path: Path | str,
    model: LayeredModel,
    samples: Tensor,
    spec: DeviceSpec,
    *,
    device: torch.device | str = "cpu",
    how: Measuring | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Point]:
    """Measure each layer of a model on the state that the layers before it leave.

    Args:
        path: File of points; made, or gone on with.
        model: In evaluation mode, on the device.
        samples: A batch, on the device.
        spec: What the points say of the device; see `device_here`.
        device: Where to measure.
        how: How to measure.
        seed: What was drawn from, for the record.
        progress: Called with (layers done, layers).

    Returns:
        A point for each layer, in order.

    Raises:
        InputError: `"graph"` on a CPU, or the file holds another device of that name.
        DeviceError: The device is not there.
        RunError: A layer could not be measured, or another process writes the file.
    """
    how, found = how or Measuring(), []
    layers = model.describe_layers(len(samples))
    with _open(path, spec, how, device, seed) as session:
        state = model.initial_state(samples)
        for at, layer in enumerate(layers):
            node = replace(layer, flops=number(layer.flops), bytes=number(layer.bytes))
            point = session.held(node)
            if point is None:
                point = session.measure(
                    node,
                    lambda at=at, state=state: model.run_layer(at, dict(state)),
                    power=_chosen(how, at, seed),
                )
            found.append(point)
            state = model.run_layer(at, dict(state))
            if progress is not None:
                progress(at + 1, len(layers))
    return found


class _Session:
    """An open file, and what every point of one call shares."""

    def __init__(
        self, file: PointFile, spec: DeviceSpec, how: Measuring, device: torch.device, environment: str
    ) -> None:
        self._file, self._spec, self._how = file, spec, how
        self._device, self._environment = device, environment
        self._there = {point.key: point for point in file.points}
        self._stream = torch.cuda.Stream(device) if how.mode == "graph" else None

    def held(self, node: LayerNode) -> Point | None:
        """The point of a layer, if it was measured before."""
        return self._there.get(self._point(node, lat_ms=1.0, mem_mb=1.0).key)

    def measure(self, node: LayerNode, work: Callable[[], object], *, power: bool) -> Point:
        """Measure a layer, and add it to the file."""
        try:
            point = self._measured(node, work, power)
        except RuntimeError as error:  # of torch: memory, a kernel, or what a graph cannot hold
            first = str(error).partition("\n")[0]
            raise RunError(f"{node.name} could not be measured on {self._device}: {first}") from error
        self._file.add(point)
        return point

    def _measured(self, node: LayerNode, work: Callable[[], object], power: bool) -> Point:
        how, device = self._how, self._device
        for _ in range(how.warmup):
            work()
        memory_mb = self._memory_mb(node, work)
        one_ms = measure(work, warmup=0, repeats=2, device=device).min_ms
        calls = min(max(math.ceil(how.sample_ms / one_ms), 1), how.most_calls)
        if how.mode == "graph":
            replay = self._graphed(work, calls)
            taken = measure(replay, warmup=1, repeats=how.repeats, device=device)
            samples = [each / calls for each in taken.times_ms]
        else:
            replay = work
            taken = measure(work, warmup=0, repeats=how.repeats, device=device, calls_per_sample=calls)
            samples = list(taken.times_ms)
        # Nanoseconds, which is finer than any timer; shorter numbers keep the file small.
        samples = [max(round(each, 6), 1e-6) for each in samples]
        median = statistics.median(samples)
        return self._point(
            node,
            lat_ms=median,
            samples_ms=tuple(samples),
            mem_mb=node.memory_bytes / 1e6 if memory_mb is None else memory_mb,
            mem_provenance="analytic" if memory_mb is None else "measured",
            power_w=self._power_w(replay, median * (calls if how.mode == "graph" else 1)) if power else None,
        )

    def _memory_mb(self, node: LayerNode, work: Callable[[], object]) -> float | None:
        """Weights, input, and the most that is allocated on top; None where nobody counts."""
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        on_top = torch.cuda.max_memory_allocated(self._device) - before
        return (node.weight_bytes + node.traffic_in_bytes + on_top) / 1e6

    def _graphed(self, work: Callable[[], object], calls: int) -> Callable[[], object]:
        """A replay of so many calls, one after the other."""
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Libraries make what they need for a stream at its first call, which must not be captured.
            work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                work()
        return graph.replay

    def _power_w(self, work: Callable[[], object], each_ms: float) -> float | None:
        calls = max(1, round(_CHUNK_MS / each_ms))

        def chunk() -> None:
            for _ in range(calls):
                work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return mean_power_w(chunk, self._device, self._how.power_s)

    def _point(self, node: LayerNode, **found: Any) -> Point:
        return Point(
            layer=node, device=self._spec, mode=self._how.mode, environment=self._environment, **found
        )


@contextmanager
def _open(
    path: Path | str, spec: DeviceSpec, how: Measuring, device: torch.device | str, seed: int
) -> Iterator[_Session]:
    """A session, with true float32 and without gradients."""
    target = torch.device(device)
    if how.mode == "graph" and target.type != "cuda":
        raise InputError(
            f"`mode` (='graph') needs a CUDA device, and `device` is {str(device)!r}: use 'eager'"
        )
    describe_device(target)  # which refuses a device that is not there
    if target.type == "cuda" and target.index is None:
        # Where the layers are: the emptiest GPU, which is what `describe` takes, may be another.
        target = torch.device("cuda", torch.cuda.current_device())
    precision = torch.get_float32_matmul_precision()
    with PointFile(path) as file, torch.no_grad():
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.cuda.device(target) if target.type == "cuda" else nullcontext():
                here = file.add_environment(collect_environment(target, seed=seed))
                yield _Session(file, spec, how, target, here)
        finally:
            torch.set_float32_matmul_precision(precision)


def _chosen(how: Measuring, at: int, seed: int) -> bool:
    """Whether power is measured, too; the same after a kill."""
    return how.power_every > 0 and int(np.random.default_rng((seed, at)).integers(how.power_every)) == 0
