"""Tuning of one problem: baselines, a search, and a final measurement of the best schedules."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.core.device import describe_cpu
from sparseflow.core.files import check_output
from sparseflow.core.journal import Journal
from sparseflow.core.progress import Progress
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.codegen.compile import find_compiler
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel
from sparseflow.tuning.codegen.program import build_program, check_threads, compute_storage_limit
from sparseflow.tuning.measure.evaluator import BATCH_SIZE, ScheduleEvaluator, Trial, measure_on_cluster
from sparseflow.tuning.model.cost_model import BoostedTrees, ScheduleScorer
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import REFERENCE_PRESETS, build_diagonal_presets, build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from sparseflow.tuning.search.annealing import SimulatedAnnealing
from sparseflow.tuning.search.base import RandomSearch, Strategy
from sparseflow.tuning.search.evolutionary import EvolutionarySearch
from sparseflow.tuning.search.guided import GuidedSearch
from sparseflow.tuning.search.qlearning import QLearningSearch
from sparseflow.tuning.search.rerank import rerank_schedules

Prior = Callable[[SparseProblem, int], ScheduleScorer]
"""(problem, threads) -> scorer of its schedules before anything is measured."""

STRATEGIES: Mapping[str, type[Strategy]] = {
    "random": RandomSearch,
    "evolutionary": EvolutionarySearch,
    "annealing": SimulatedAnnealing,
    "qlearning": QLearningSearch,
}
"""Name -> search method without a cost model."""

GUIDED_PREFIX = "guided-"
"""Prefix of the name of a method that is guided by a cost model."""

METHODS = (*STRATEGIES, *(GUIDED_PREFIX + name for name in STRATEGIES))
"""Names of all search methods."""

_LOGGER = logging.getLogger(__name__)

DEFAULT_METHOD = "guided-evolutionary"

TRIALS_FILE = "trials.jsonl"
"""Trial log in the output directory."""

_RERANK_SHARE = 0.15
"""Share of the budget that is reserved for the final measurement."""

_DISTURBED_TOLERANCE = 1.1
"""A disturbed trial is confirmed if its ratio is at most this many times the best."""

_SMALL_PRODUCTS = 2_000_000
"""Number of products below which one thread may be faster than several."""

_MAX_REPEATS = 50
"""Consecutive proposals that were measured before, after which a search ends."""


class TrialHeader(Artifact):
    """Header of a trial log: the settings that latencies depend on."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.trials"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "choose another directory"

    operator: str
    extents: dict[str, int]
    threads: int
    cpu: str
    dtype: str
    pattern: str


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """Result of a tuning session.

    Attributes:
        kernel: Fastest kernel.
        trials: All measurements in order, baselines first, without the final measurement.
        baselines: Baseline name -> time over the reference's in the final measurement; scipy is `"library"`.
        best_ratio: Time of the kernel over the reference's in the final measurement; None if nothing was
            measured.
        seconds: Phase ("propose", "build", "compile", "measure", "rerank", "other") -> duration of this run,
            seconds.
        warnings: Why the ratios are unreliable, as sentences; they are also logged.
        break_even: Calls after which the kernel has saved the seconds of this run against scipy; None if it
            is not faster.
    """

    kernel: Kernel
    trials: tuple[Trial, ...]
    baselines: Mapping[str, float]
    best_ratio: float | None
    seconds: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    break_even: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        schedule = self.kernel.schedule
        return {
            "schedule": None if schedule is None else str(schedule),
            "speedup": self.kernel.speedup,
            "best": self.best_ratio,
            "baselines": dict(self.baselines),
            "trials": [trial.to_dict() for trial in self.trials],
            "seconds": dict(self.seconds),
            "break_even": self.break_even,
            "warnings": list(self.warnings),
        }


class TuningSession:
    """Search for the fastest schedule of an operator on one matrix.

    Hand-written schedules are always measured as baselines. The time budget starts with the creation.

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: scipy.sparse matrix, sparse torch tensor or another type that `as_coo` accepts.
        n_cols: Columns of the dense operands; None for SpMV.
        budget_s: Approximate time budget, seconds. With 0, nothing is measured: the cost model selects one of
            the hand-written schedules.
        max_trials: Maximum number of schedules to measure besides the baselines.
        method: Search method, one of `METHODS`.
        prior: Initial scores of a guided method, such as `pretrained.load_prior(path)`; by default the
            shipped network. Boosted trees learn corrections to it during the search.
        threads: Number of threads; by default all CPUs that this process may use.
        dtype: float32 or float64; by default the dtype of the matrix.
        seed: Random seed of the search and the dense inputs.
        out_dir: Directory of the trial log; an existing log is resumed.
        cache_dir: Directory of compiled code; see `compile_source`.
        cluster: Address of a Ray cluster that measures the proposals, `"auto"` for the cluster of this
            machine. Baselines and the final measurement run on this machine.
        num_machines: Machines of the cluster to use at the same time.
        progress: Progress callback.

    Raises:
        InputError: An argument is out of range or the matrix is unsupported.
        OutputError: `out_dir` cannot be written.
    """

    def __init__(
        self,
        operator: str,
        matrix: Any,
        *,
        n_cols: int | None = None,
        budget_s: float = 60.0,
        max_trials: int | None = None,
        method: str = DEFAULT_METHOD,
        prior: Prior | None = None,
        threads: int | None = None,
        dtype: np.dtype | type | None = None,
        seed: int = 0,
        out_dir: Path | str | None = None,
        cache_dir: Path | None = None,
        cluster: str | None = None,
        num_machines: int = 1,
        progress: Progress | None = None,
    ) -> None:
        self._start_s = time.monotonic()
        self._threads = len(os.sched_getaffinity(0)) if threads is None else threads
        self._trial_limit = math.inf if max_trials is None else max_trials
        if not (budget_s >= 0 and self._trial_limit >= 0):
            raise InputError(f"`budget_s` (={budget_s}) and `max_trials` (={max_trials}) must be at least 0")
        check_at_least(0, seed=seed)
        check_at_least(1, num_machines=num_machines)
        check_threads(self._threads)
        if out_dir is not None:
            check_output(out_dir, directory=True)
        check_one_of(METHODS, method=method)
        self._method = method
        self.problem = SparseProblem(
            operator=get_operator(operator), matrix=as_coo(matrix, dtype=dtype), n_cols=n_cols
        )
        self._budget_s, self._prior, self._seed = budget_s, prior, seed
        self._out_dir, self._cache_dir = out_dir, cache_dir
        self._cluster, self._num_machines = cluster, num_machines
        self._progress = progress
        self._trials: dict[Schedule, Trial] = {}
        self._new_trials: list[Trial] = []
        self._propose_s = 0.0

    def run(self) -> TuneResult:
        """Run the search. Without a C compiler the result is the library's kernel, with a warning.

        Raises:
            InputError: `out_dir` has the trials of another problem, or `method` takes no `prior`.
            RunError: The reference schedule fails, or another process writes to `out_dir`.
            DeviceError: No cluster is at the address, or its machines have other processors.
            FileFormatError: The trial log is damaged.
        """
        problem = self.problem
        try:
            find_compiler()
        except DeviceError as error:
            warnings.warn(f"{error}; using the scipy kernel", RuntimeWarning, stacklevel=2)
            return TuneResult(
                kernel=LibraryKernel(problem), trials=(), baselines={}, best_ratio=None, seconds={}
            )
        baselines = self._build_baselines(self._threads)
        if self._budget_s == 0:
            return self._select_by_model([*baselines.values(), *self._build_baselines(1).values()])
        self._reference = baselines[REFERENCE_PRESETS[problem.operator.name]]
        self._trial_limit += len(baselines)
        evaluator = ScheduleEvaluator(problem, self._reference, seed=self._seed, cache_dir=self._cache_dir)
        with self._open_log() as log, evaluator:
            self._log, self._evaluator = log, evaluator
            self._strategy = self._resume([] if log is None else log.rows)
            self._measure_baselines(baselines)
            self._search()
            if self._progress is not None:
                self._progress("measuring the best schedules again", 1.0)
            rerank_start_s = time.monotonic()
            final = rerank_schedules(
                problem, evaluator, self._trials, baselines, self._reference, cache_dir=self._cache_dir
            )
            rerank_s = time.monotonic() - rerank_start_s
        for warning in final.warnings:
            _LOGGER.warning(warning)
        seconds = self._sum_phases(rerank_s)
        saved_ms = final.library_ms - final.kernel_ms
        return TuneResult(
            kernel=final.kernel,
            trials=tuple(self._trials.values()),
            baselines=final.baselines,
            best_ratio=final.best_ratio,
            seconds=seconds,
            warnings=final.warnings,
            break_even=math.ceil(1e3 * sum(seconds.values()) / saved_ms) if saved_ms > 0 else None,
        )

    def _select_by_model(self, schedules: Sequence[Schedule]) -> TuneResult:
        """Compile the schedule that the cost model scores highest."""
        problem = self.problem
        # Models have not seen diagonals, which are faster than other formats if they are full.
        diagonals = [schedule for schedule in schedules if schedule.has_diagonals]
        schedules = list(dict.fromkeys(diagonals or schedules))
        scores = self._make_prior()(problem, self._threads)(schedules)
        limit = compute_storage_limit(problem)
        for index in np.argsort(-scores, kind="stable"):
            try:
                program = build_program(problem, schedules[int(index)], max_bytes=limit)
            except InputError:  # its blocks hold too many zeros of this matrix
                continue
            kernel = CompiledKernel(program, cache_dir=self._cache_dir)
            kernel.origin = "selected by the cost model, not measured"
            seconds = {"other": time.monotonic() - self._start_s}
            return TuneResult(kernel=kernel, trials=(), baselines={}, best_ratio=None, seconds=seconds)
        raise RunError("no hand-written schedule can store this matrix; tune with a budget above 0")

    def _make_prior(self) -> Prior:
        if self._prior is not None:
            return self._prior
        from sparseflow.tuning.model.net.pretrained import make_shipped_prior

        return make_shipped_prior

    def _build_baselines(self, threads: int) -> dict[str, Schedule]:
        operator, extents = self.problem.operator, self.problem.extents
        presets = build_presets(operator, extents, threads) | build_diagonal_presets(self.problem, threads)
        return {name: schedule.canonicalize(operator, extents) for name, schedule in presets.items()}

    @contextmanager
    def _open_log(self) -> Iterator[Journal[Trial] | None]:
        """Open the trial log; None without an output directory."""
        if self._out_dir is None:
            yield None
            return
        problem, root = self.problem, Path(self._out_dir)
        header = TrialHeader(
            operator=problem.operator.name,
            extents=dict(problem.extents),
            threads=self._threads,
            cpu=describe_cpu(),
            dtype=str(problem.dtype),
            pattern=problem.matrix.digest(values=False),
        )
        root.mkdir(parents=True, exist_ok=True)
        with Journal(root / TRIALS_FILE, Trial, header=header) as log:
            for index, trial in enumerate(log.rows):
                try:
                    trial.schedule.validate(problem.operator, problem.extents)
                except InputError as error:
                    raise FileFormatError(f"{log.locate(index)}: {error}; remove the line") from error
            yield log

    def _resume(self, trials: Sequence[Trial]) -> Strategy:
        """Create the strategy and replay the trials of an earlier run."""
        # A resumed search gets another random stream, so that it does not repeat its proposals.
        strategy = self._create_strategy(np.random.default_rng([self._seed, len(trials)]))
        for trial in trials:
            self._trials[trial.schedule] = trial
            strategy.observe(trial)
        return strategy

    def _create_strategy(self, rng: np.random.Generator) -> Strategy:
        problem, threads, prior = self.problem, self._threads, self._prior
        space = ScheduleSpace(problem.operator, problem.extents, threads=sorted({1, threads}))
        strategy = STRATEGIES[self._method.removeprefix(GUIDED_PREFIX)](space, rng)
        if not self._method.startswith(GUIDED_PREFIX):
            if prior is not None:
                raise InputError(
                    f"method {self._method!r} takes no `prior`; use {GUIDED_PREFIX}{self._method}"
                )
            return strategy
        features = ScheduleFeatures(problem, threads)
        return GuidedSearch(strategy, BoostedTrees(features, prior=self._make_prior()(problem, threads)))

    def _measure_baselines(self, baselines: Mapping[str, Schedule]) -> None:
        schedules = list(baselines.values())
        if self._threads > 1 and self.problem.matrix.nnz * (self.problem.n_cols or 1) < _SMALL_PRODUCTS:
            schedules += self._build_baselines(1).values()
        for schedule in [schedule for schedule in schedules if schedule not in self._trials]:
            self._record(self._measure(schedule))

    def _search(self) -> None:
        deadline = self._start_s + self._budget_s * (1.0 - _RERANK_SHARE)
        batch_size = 1 if self._cluster is None else BATCH_SIZE * self._num_machines
        while time.monotonic() < deadline and len(self._trials) < self._trial_limit:
            schedules = self._propose(min(batch_size, self._trial_limit - len(self._trials)))
            if not schedules:
                break
            if self._cluster is None:
                self._record(self._measure(schedules[0]))
                continue
            for trial in measure_on_cluster(
                self._cluster,
                self.problem,
                self._reference,
                schedules,
                seed=self._seed,
                threads=self._threads,
            ):
                self._record(trial)

    def _propose(self, count: float) -> list[Schedule]:
        """Propose up to `count` new schedules; fewer if the strategy only repeats itself."""
        start_s = time.monotonic()
        schedules: dict[Schedule, None] = {}
        num_repeats = 0
        while len(schedules) < count and num_repeats < _MAX_REPEATS:
            schedule = self._strategy.propose().canonicalize(self.problem.operator, self.problem.extents)
            is_known = schedule in self._trials
            num_repeats = num_repeats + 1 if is_known or schedule in schedules else 0
            if not is_known:
                schedules[schedule] = None
        self._propose_s += time.monotonic() - start_s
        return list(schedules)

    def _measure(self, schedule: Schedule) -> Trial:
        """Measure a schedule, and confirm the measurement if it is the best so far."""
        trial = self._evaluator.measure(schedule)
        best = min((trial.ratio for trial in self._trials.values()), default=math.inf)
        is_best = trial.ratio < best * (_DISTURBED_TOLERANCE if trial.disturbed else 1.0)
        return self._evaluator.confirm(trial) if is_best and math.isfinite(best) else trial

    def _record(self, trial: Trial) -> None:
        """Log a trial and pass it to the strategy."""
        if trial.error is not None and trial.schedule == self._reference:
            raise RunError(f"the reference schedule {self._reference} fails: {trial.error}")
        if self._log is not None:
            self._log.append(trial)
        self._trials[trial.schedule] = trial
        self._new_trials.append(trial)
        start_s = time.monotonic()
        self._strategy.observe(trial)
        self._propose_s += time.monotonic() - start_s
        if self._progress is not None:
            count, limit = len(self._trials), self._trial_limit
            best_ms = min(trial.latency_ms for trial in self._trials.values())
            fraction = max(
                (time.monotonic() - self._start_s) / self._budget_s, count / limit if limit else 0.0
            )
            self._progress(f"{count} schedules, best {best_ms:.3f} ms", min(fraction, 1.0))

    def _sum_phases(self, rerank_s: float) -> dict[str, float]:
        seconds: dict[str, float] = {"propose": self._propose_s}
        for trial in self._new_trials:
            for phase, elapsed_s in trial.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + elapsed_s
        seconds["rerank"] = rerank_s
        seconds["other"] = time.monotonic() - self._start_s - sum(seconds.values())
        return seconds
