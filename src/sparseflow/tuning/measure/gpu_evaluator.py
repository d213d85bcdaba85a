"""Measurement of schedules of GPU kernels: build, check the result, time in turns with a reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sparseflow.core import timing
from sparseflow.core.kernel_compilation import compile_kernels
from sparseflow.errors import InputError
from sparseflow.tuning.codegen.gpu_program import GpuLibraryProgram, GpuProgram
from sparseflow.tuning.codegen.program import compute_storage_limit
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Dtype -> largest difference from scipy in float64, relative to the largest result."""

_ROUNDS = 7
_THOROUGH_ROUNDS = 41

_CALLS = 10
"""Calls in one sample, which follow each other without a launch from Python."""


class GpuEvaluator:
    """Measures schedules of one problem on a GPU.

    A sample is the replay of a CUDA graph of some calls, so that the time of launches from Python does not
    count. Between samples the other kernels run; within a sample, caches have the data of the call before.

    Args:
        problem: SpMM or SDDMM.
        device: The GPU.
        dtype: Dtype of the inputs.
        seed: Random seed of the inputs.
    """

    def __init__(
        self, problem: SparseProblem, device: torch.device, dtype: torch.dtype, *, seed: int = 0
    ) -> None:
        self.problem, self.device, self.dtype = problem, device, dtype
        self.inputs = tuple(torch.from_numpy(x).to(device, dtype) for x in problem.generate_inputs(seed))
        arrays = tuple(x.cpu().to(torch.float64).numpy() for x in self.inputs)
        self._expected = torch.from_numpy(problem.compute_reference(arrays)).to(device)
        self._scale = float(self._expected.abs().max()) if self._expected.numel() else 1.0
        self._limit_bytes = compute_storage_limit(problem)
        self._reference: Callable[[], object] | None = None
        self._programs: dict[Schedule, GpuProgram] = {}

    def set_reference(self, program: GpuProgram | GpuLibraryProgram) -> None:
        """Set the program that the ratios of trials are relative to."""
        self._reference = self._capture(program)

    def build(self, schedule: Schedule) -> GpuProgram:
        """Store the matrix in the format of a schedule.

        Raises:
            InputError: The format needs too much memory.
        """
        return GpuProgram(self.problem, schedule, self.device, max_bytes=self._limit_bytes)

    def prepare(self, schedules: Sequence[Schedule]) -> None:
        """Store the matrix in the format of each schedule, and compile the kernels in several processes."""
        self._programs = {}
        for schedule in schedules:
            with suppress(InputError):  # `measure` reports the error
                self._programs[schedule] = self.build(schedule)
        if self.device.type == "cuda":
            programs = self._programs.values()
            compile_kernels(lambda: [program.request_compilation(*self.inputs) for program in programs])

    def measure(self, schedule: Schedule) -> Trial:
        """Measure one schedule; its errors are part of the trial.

        Raises:
            InputError: There is no reference.
        """
        if self._reference is None:
            raise InputError("the evaluator has no reference; call `set_reference` first")
        seconds: dict[str, float] = {}
        start_s = time.perf_counter()
        try:
            program = self._programs.pop(schedule, None) or self.build(schedule)
            seconds["build"] = time.perf_counter() - start_s
            error = self.check(program)  # compiles
            seconds["compile"] = time.perf_counter() - start_s - seconds["build"]
        except (InputError, RuntimeError) as problem:
            return Trial(schedule=schedule, error=str(problem).splitlines()[0], seconds=seconds)
        if error is not None:
            return Trial(schedule=schedule, error=error, seconds=seconds)
        start_s = time.perf_counter()
        candidate = self._capture(program)
        comparison = timing.compare(
            {"candidate": candidate, "reference": self._reference},
            baseline="reference",
            rounds=_ROUNDS,
            warmup=1,
            device=self.device,
        )
        times, reference = (comparison.samples(name).times_ms for name in ("candidate", "reference"))
        seconds["measure"] = time.perf_counter() - start_s
        return Trial(
            schedule=schedule,
            latency_ms=min(times) / _CALLS,
            ratio=statistics.median(a / b for a, b in zip(times, reference, strict=True)),
            seconds=seconds,
        )

    def compare(self, programs: Mapping[str, GpuProgram | GpuLibraryProgram]) -> dict[str, list[float]]:
        """Measure programs in turns; return the time of a call in each round, milliseconds."""
        calls = {name: self._capture(program) for name, program in programs.items()}
        comparison = timing.compare(
            calls, baseline=next(iter(calls)), rounds=_THOROUGH_ROUNDS, warmup=2, device=self.device
        )
        return {name: [ms / _CALLS for ms in comparison.samples(name).times_ms] for name in calls}

    def check(self, program: GpuProgram | GpuLibraryProgram) -> str | None:
        """Compare the result with scipy's in float64; return an error message or None."""
        result = program.run(*self.inputs).to(torch.float64)
        difference = float((result - self._expected).abs().max()) if result.numel() else 0.0
        # Not `>`, because NaN is an error, too.
        if not difference <= TOLERANCE[self.dtype] * max(self._scale, 1e-30):
            return f"the result differs from scipy's by {difference:.3g}; the largest is {self._scale:.3g}"
        return None

    def _capture(self, program: GpuProgram | GpuLibraryProgram) -> Callable[[], object]:
        """Return a call that runs a program some times, as a CUDA graph on a GPU."""

        def run() -> Tensor:
            for _ in range(_CALLS - 1):
                program.run(*self.inputs)
            return program.run(*self.inputs)

        if self.device.type != "cuda":
            return run
        program.run(*self.inputs)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        # A graph does not hold the tensors that it reads: `run` does.
        graph.run = run  # type: ignore[attr-defined]
        return graph.replay
