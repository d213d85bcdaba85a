"""Tuning of one problem on a GPU."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sparseflow.core.kernel_compilation import MAX_PROCESSES
from sparseflow.core.progress import Progress
from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning.codegen.cusparse import list_algorithms
from sparseflow.tuning.codegen.gpu_kernel import GpuKernel, find_gpu
from sparseflow.tuning.codegen.gpu_program import GpuLibraryProgram, GpuProgram
from sparseflow.tuning.codegen.program import compute_storage_limit
from sparseflow.tuning.measure.evaluator import Trial, sum_phases
from sparseflow.tuning.measure.gpu_evaluator import TOLERANCE, GpuEvaluator
from sparseflow.tuning.model.cost_model import BoostedTrees
from sparseflow.tuning.model.gpu_features import GpuScheduleFeatures
from sparseflow.tuning.schedule.gpu import GpuScheduleSpace, build_gpu_presets
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.deadline import Deadline
from sparseflow.tuning.search.evolutionary import EvolutionarySearch
from sparseflow.tuning.search.guided import GuidedSearch
from sparseflow.tuning.search.rerank import LIBRARY
from sparseflow.tuning.search.session import TuneResult

_NUM_FINALISTS = 6
_MIN_BATCH = 4
"""Minimum number of schedules that are compiled at once; more on more CPUs."""

_MAX_REPEATS = 50
"""Consecutive proposals that were measured before, after which a search ends."""

_MIN_GAIN = 0.02
"""Minimum gain over cuSPARSE, because the best of many measurements is biased."""


def tune_on_gpu(
    operator: str,
    matrix: Any,
    device: str | torch.device = "cuda",
    *,
    n_cols: int | None = None,
    dtype: torch.dtype = torch.float32,
    budget_s: float = 60.0,
    max_trials: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneResult:
    """Search for the fastest kernel of SpMM or SDDMM for one matrix on a GPU.

    Triton kernels of hand-written schedules are measured first, then those that boosted trees rank
    highest, and the fastest are measured again with cuSPARSE, which is the result if it is the fastest.

    Args:
        operator: `"spmm"` or `"sddmm"`.
        matrix: Matrix; see `as_coo`. A tensor may be on the GPU.
        device: The GPU, or the CPU if Triton interprets its kernels (TRITON_INTERPRET=1).
        n_cols: Columns of the dense operands.
        dtype: Dtype of the dense operands: float32, float16, bfloat16 or float64.
        budget_s: Time budget, seconds. With 0, the kernel with the best initial score is built.
        max_trials: Maximum number of schedules to measure besides the hand-written ones.
        seed: Random seed.
        progress: Progress callback.

    Raises:
        InputError: The operator has no GPU kernels, or an argument is wrong.
        DeviceError: There is no GPU.
        MissingExtraError: Triton is missing.
    """
    deadline = Deadline(budget_s)
    device = find_gpu(device)
    if dtype not in TOLERANCE:
        raise InputError(f"`dtype` (={dtype}) must be one of: {', '.join(map(str, TOLERANCE))}")
    values = np.float64 if dtype == torch.float64 else np.float32
    problem = SparseProblem(
        operator=get_operator(operator), matrix=as_coo(matrix, dtype=values), n_cols=n_cols
    )
    if not problem.operator.dense_axes:
        raise InputError("spmv has no GPU kernels; tune spmm with `n_cols=1`, or use the CPU")
    features = GpuScheduleFeatures(problem)
    presets = build_gpu_presets(problem.operator, problem.extents)
    if budget_s == 0:
        schedules = list(presets.values())
        schedule = schedules[int(np.argmax(features.score(schedules)))]
        program = GpuProgram(problem, schedule, device, max_bytes=compute_storage_limit(problem))
        kernel = GpuKernel(program, dtype)
        kernel.origin = "selected by counts of steps, not measured"
        return TuneResult(
            kernel=kernel, trials=(), baselines={}, best_ratio=None, seconds={"other": deadline.elapsed_s}
        )
    evaluator = GpuEvaluator(problem, device, dtype, seed=seed)
    reference = next(iter(presets.values()))
    evaluator.set_reference(evaluator.build(reference))
    space = GpuScheduleSpace(problem.operator, problem.extents)
    batch_size = max(_MIN_BATCH, min(len(os.sched_getaffinity(0)), MAX_PROCESSES))
    strategy = GuidedSearch(
        EvolutionarySearch(space, np.random.default_rng(seed)),
        BoostedTrees(features, prior=features.score),
        batch_size=batch_size,
    )
    trials: dict[Schedule, Trial] = {}

    def measure(schedule: Schedule) -> None:
        trials[schedule] = evaluator.measure(schedule)
        strategy.observe(trials[schedule])
        if progress is not None:
            best_ms = min(trial.latency_ms for trial in trials.values())
            message = f"{len(trials)} schedules, best {best_ms:.4f} ms"
            progress(message, min(deadline.elapsed_s / budget_s, 1.0))

    limit = len(presets) + (math.inf if max_trials is None else max_trials)
    batch = list(presets.values())
    compile_s = 0.0
    while batch:
        start_s = deadline.elapsed_s
        evaluator.prepare(batch)
        compile_s += deadline.elapsed_s - start_s
        for schedule in batch:
            if schedule in presets.values() or deadline.remaining_s > 0.1 * budget_s:
                measure(schedule)
        batch = []
        if deadline.remaining_s > 0.1 * budget_s:
            batch = _propose(strategy, trials, int(min(batch_size, limit - len(trials))))
    return _select(problem, evaluator, trials, presets, deadline, compile_s)


def read_dtype(matrix: Any, dtype: Any = None) -> torch.dtype:
    """Return the dtype of the dense operands: a given one, or that of the matrix if GPU kernels take it.

    Raises:
        InputError: `dtype` is no dtype.
    """
    if dtype is None:
        matrix_dtype = getattr(matrix, "dtype", None)
        if isinstance(matrix_dtype, torch.dtype):
            return matrix_dtype if matrix_dtype in TOLERANCE else torch.float32
        return torch.float64 if matrix_dtype == np.float64 else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return getattr(torch, np.dtype(dtype).name)
    except (TypeError, AttributeError):
        raise InputError(f"`dtype` (={dtype!r}) must be a floating-point dtype of torch or numpy") from None


def _propose(strategy: GuidedSearch, trials: Mapping[Schedule, Trial], count: int) -> list[Schedule]:
    """Propose schedules that were not measured, fewer than `count` if the space has no more."""
    batch: dict[Schedule, None] = {}
    num_repeats = 0
    while len(batch) < count and num_repeats < _MAX_REPEATS:
        schedule = strategy.propose()
        num_repeats = num_repeats + 1 if schedule in trials or schedule in batch else 0
        if schedule not in trials:
            batch[schedule] = None
    return list(batch)


def _select(
    problem: SparseProblem,
    evaluator: GpuEvaluator,
    trials: dict[Schedule, Trial],
    presets: dict[str, Schedule],
    deadline: Deadline,
    compile_s: float,
) -> TuneResult:
    """Measure the best schedules, the hand-written ones and cuSPARSE again, and select the fastest."""
    ranked = sorted((trial for trial in trials.values() if trial.error is None), key=lambda item: item.ratio)
    names = {schedule: name for name, schedule in presets.items()}
    programs: dict[str, GpuProgram | GpuLibraryProgram] = {}
    for index, trial in enumerate(ranked):
        if index < _NUM_FINALISTS or trial.schedule in names:
            programs[names.get(trial.schedule, str(index))] = evaluator.build(trial.schedule)
    libraries, messages = _list_library_programs(problem, evaluator)
    programs |= libraries
    start_s = deadline.elapsed_s
    samples_ms = evaluator.compare(programs)
    times_ms = {name: statistics.median(samples) for name, samples in samples_ms.items()}
    rerank_s = deadline.elapsed_s - start_s
    best = min(times_ms, key=lambda name: times_ms[name] * (1.0 - _MIN_GAIN if name in libraries else 1.0))
    reference_ms = times_ms[next(iter(presets))]
    baselines = {name: time_ms / reference_ms for name, time_ms in times_ms.items() if not name.isdigit()}
    kernel = GpuKernel(programs[best], evaluator.dtype)
    kernel.speedup = min(baselines.values()) / (times_ms[best] / reference_ms)
    seconds = sum_phases(trials.values()) | {"rerank": rerank_s}
    seconds["compile"] = seconds.get("compile", 0.0) + compile_s
    seconds["other"] = deadline.elapsed_s - sum(seconds.values())
    saved_ms = min((times_ms[name] for name in libraries), default=math.inf) - times_ms[best]
    return TuneResult(
        kernel=kernel,
        trials=tuple(trials.values()),
        baselines=baselines,
        best_ratio=times_ms[best] / reference_ms,
        seconds=seconds,
        warnings=messages,
        samples_ms={"kernel": samples_ms[best]} | {name: samples_ms[name] for name in baselines},
        break_even=math.ceil(1e3 * sum(seconds.values()) / saved_ms) if 0 < saved_ms < math.inf else None,
    )


def _list_library_programs(
    problem: SparseProblem, evaluator: GpuEvaluator
) -> tuple[dict[str, GpuLibraryProgram], tuple[str, ...]]:
    """List the algorithms of cuSPARSE that run and are right, and a sentence if there is none."""
    names = list_algorithms(problem.operator.name, evaluator.dtype)
    algorithms = {LIBRARY: None} | {f"cusparse_{name}": name for name in names}
    programs: dict[str, GpuLibraryProgram] = {}
    problems: list[str] = []
    for name, algorithm in algorithms.items():
        try:
            program = GpuLibraryProgram(problem, evaluator.device, algorithm)
            error = evaluator.check(program)
            if error is None:
                evaluator.compare({name: program})
                programs[name] = program
                continue
        # An algorithm lacks the dtype, or a CUDA graph cannot capture it, or cuSPARSE is missing.
        except (RuntimeError, RunError, DeviceError) as failure:
            error = str(failure).splitlines()[0]
        problems.append(f"{name}: {error}")
    return programs, () if programs else (f"cuSPARSE is no candidate: {'; '.join(problems)}",)
