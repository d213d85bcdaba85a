"""Peak rates of a device as onnxruntime reaches them: arithmetic, memory and the launch of a kernel.

Three models of one node are timed: a large matrix product, a large sum and a sum of one element. On a CPU
with one thread the time is that of `measure.idle`, which other work does not change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from sparseflow.core.files import write_atomic
from sparseflow.errors import InputError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.model_builder import ModelBuilder
from sparseflow.latency.measure.idle import compute_idle_ms
from sparseflow.latency.measure.runner import Runner

if TYPE_CHECKING:
    import onnx

_SIDES: Mapping[str, int] = {"cpu": 1024, "cuda": 8192}
"""Device type -> rows and columns of the multiplied matrices."""

_SUM_ELEMENTS: Mapping[str, int] = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Device type -> elements of each summand, of 4 bytes; larger than a share of the last-level cache."""

_SECONDS_PER_MODEL = 1.0


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak rates of a device.

    Attributes:
        flops_per_s: Floating-point operations per second of a large matrix product in float32; a multiply-add
            counts as two.
        bytes_per_s: Bytes read and written per second by a large sum.
        launch_ms: Latency of a kernel without work.
    """

    flops_per_s: PositiveFloat
    bytes_per_s: PositiveFloat
    launch_ms: PositiveFloat

    def format(self) -> str:
        """Return the peaks as text."""
        return (
            f"{self.flops_per_s / 1e9:.3g} GFLOP/s, {self.bytes_per_s / 1e9:.3g} GB/s, "
            f"{1e3 * self.launch_ms:.3g} µs per launch"
        )


def parse_peaks(text: str) -> Peaks:
    """Parse peaks such as `flops=1e11,bytes=2e10,launch_us=4`.

    Raises:
        InputError: A name is unknown, missing or duplicated, or a value is not a positive number.
    """
    form = f"`--peaks {text}` must be flops=NUMBER,bytes=NUMBER,launch_us=NUMBER, each above 0"
    values: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = entry.partition("=")
        try:
            value = float(number)
        except ValueError as error:
            raise InputError(f"{form}, such as flops=1e11,bytes=2e10,launch_us=4") from error
        if name.strip() not in ("flops", "bytes", "launch_us") or name in values or not 0.0 < value < 1e30:
            raise InputError(f"{form}, such as flops=1e11,bytes=2e10,launch_us=4")
        values[name.strip()] = value
    if len(values) < 3:
        raise InputError(f"{form}; got only {', '.join(values)}")
    return Peaks(
        flops_per_s=values["flops"], bytes_per_s=values["bytes"], launch_ms=values["launch_us"] / 1e3
    )


def measure_peaks(provider: str = "cpu", *, threads: int | None = 1, gpu: int = 0) -> Peaks:
    """Measure the peaks of this machine in about three seconds.

    Args:
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        threads: Threads within an operator; None leaves the choice to onnxruntime.
        gpu: Index of the GPU.

    Raises:
        DeviceError: The provider is not available.
        RunError: onnxruntime failed, for example for lack of memory.
    """
    kind = session.get_device_type(provider)
    side, elements = _SIDES[kind], _SUM_ELEMENTS[kind]
    with tempfile.TemporaryDirectory(prefix="sparseflow-peaks-") as name:
        folder = Path(name)

        def measure_ms(op: str, *shapes: tuple[int, ...]) -> float:
            path = folder / "model.onnx"
            write_atomic(path, _make_model(op, shapes).SerializeToString())
            runner = Runner(path, provider, threads=threads, gpu=gpu)
            return measure_idle_ms(runner, _SECONDS_PER_MODEL)

        return Peaks(
            flops_per_s=2e3 * side**3 / measure_ms("MatMul", (side, side), (side, side)),
            bytes_per_s=12e3 * elements / measure_ms("Add", (elements,), (elements,)),
            launch_ms=measure_ms("Add", (1,), (1,)),
        )


def measure_idle_ms(runner: Runner, seconds: float) -> float:
    """Measure the latency of a model without the time in which other work had the CPU, milliseconds.

    Args:
        runner: The model.
        seconds: Time to measure; a model that takes longer runs at least three times.
    """
    runner.warm_up(2)
    run_s = min(runner.warm_up(1) for _ in range(3)) / 1e3
    calls = max(1, round(seconds / (200 * max(run_s, 1e-6))))
    timing = runner.measure(warmup=0, loops=3, min_time_s=seconds, calls_per_sample=calls)
    return compute_idle_ms(timing.to_columns())


def _make_model(op: str, shapes: tuple[tuple[int, ...], ...]) -> onnx.ModelProto:
    builder = ModelBuilder()
    return builder.build(builder.add_node(op, *[builder.add_input(shape) for shape in shapes]))
