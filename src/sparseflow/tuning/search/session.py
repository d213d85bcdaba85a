"""Tuning of one problem: baselines, a search, and a final measurement of the best schedules."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from sparseflow.tuning.measure.evaluator import (
    BATCH_SIZE,
    ScheduleEvaluator,
    Trial,
    measure_on_cluster,
    sum_phases,
)
from sparseflow.tuning.model.block_counts import BlockCounts
from sparseflow.tuning.model.cost_model import CountModel
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import REFERENCE_PRESETS, build_matrix_presets, build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.rules import BALANCED
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.deadline import Deadline
from sparseflow.tuning.search.methods import (
    DEFAULT_METHOD,
    GUIDED_PREFIX,
    METHODS,
    Prior,
    create_strategy,
    load_default_prior,
)
from sparseflow.tuning.search.rerank import CALL_OVERHEAD_MS, estimate_rerank_s, rerank_schedules
from sparseflow.tuning.search.winners import WinnerCache

_LOGGER = logging.getLogger(__name__)

TRIALS_FILE = "trials.jsonl"
"""Trial log in the output directory."""

_NEGLIGIBLE_MS = CALL_OVERHEAD_MS / 3
"""Latency below which a search with a budget ends: even a kernel that takes no time would shorten a call by a
quarter at most.
"""

_RERANK_SHARE = 0.25
"""Largest share of the budget that a search reserves for the final measurement, unless its minimum takes
longer. The baselines only leave the time of the minimum.
"""

_NEGLIGIBLE_RERANK_S = 0.1
"""Time of the final measurement of kernels with a negligible latency, seconds."""

_NUM_RECENT = 4
"""Measurements and proposals that the time of the next one is estimated from."""

_DISTURBED_FACTOR = 3.0
"""Assumed slowdown of the start of the cost model on busy CPUs."""

_MODEL_SHARE = 0.3
"""Largest share of the search time that the start of the cost model may take."""

_DISTURBED_TOLERANCE = 1.1
"""A disturbed trial is confirmed if its ratio is at most this many times the best."""

_TINY_PRODUCTS = 4096
"""Number of products below which threads are not used by default: starting them takes longer."""

_MAX_STORED_IN_BLOCKS, _MIN_STORED_WITHOUT_BLOCKS = 1.5, 3.0
"""Stored values of blocks of 4x1 for each element. Of the presets of SpMM with 64 columns, blocks were the
fastest for all of 44 matrices with less than the first, and CSR for all with more than the second."""

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
        baselines: Baseline name -> time over the reference's in the final measurement, or in the search if
            that was too short; scipy is `"library"`. Those that the budget did not allow are missing.
        best_ratio: Time of the kernel over the reference's in the final measurement; None if nothing was
            measured.
        similar: Schedules that were fastest on similar matrices, and were measured first.
        seconds: Phase ("propose", "build", "compile", "measure", "rerank", "other") -> duration of this run,
            seconds.
        warnings: Why the ratios are unreliable or baselines are missing, as sentences; they are also logged.
        samples_ms: Baseline name or `"kernel"` -> time of a call in each round of the final measurement,
            milliseconds; on a GPU only.
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
    similar: tuple[Schedule, ...] = ()
    samples_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)

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
            "similar": [str(schedule) for schedule in self.similar],
        }


class TuningSession:
    """Search for the fastest schedule of an operator on one matrix.

    The time budget starts with the creation. The reference is always measured. The fastest schedules of
    similar matrices follow, then the other hand-written schedules as baselines, the search, and the final
    measurement, as far as the budget allows: every step is preceded by an estimate of its time, and the time
    of the final measurement is reserved. A budget that is too short for all baselines is spent on those that
    the cost model ranks highest.

    A search ends early if it only repeats its proposals, or if the fastest schedule takes less than a
    microsecond: a call from Python takes longer, so no search could pay. The latter only if the budget is
    finite.

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: scipy.sparse matrix, sparse torch tensor or another type that `as_coo` accepts.
        n_cols: Columns of the dense operands; None for SpMV.
        budget_s: Time budget, seconds; exceeded only by work that no budget avoids, such as measuring the
            reference. With 0, nothing is measured: the fill of blocks or the cost model selects one of the
            hand-written schedules.
        max_trials: Maximum number of schedules to measure besides the baselines.
        method: Search method, one of `METHODS`.
        prior: Initial scores of a guided method, such as `pretrained.load_prior(path)`; by default the
            shipped network. Boosted trees learn corrections to it during the search. A budget that is too
            short to load them is spent with scores from counts of steps and bytes.
        threads: Number of threads; by default all CPUs that this process may use, or one for less than 4096
            products.
        dtype: float32 or float64; by default the dtype of the matrix.
        seed: Random seed of the search and the dense inputs.
        out_dir: Directory of the trial log; an existing log is resumed.
        cache_dir: Directory of compiled code; see `compile_source`.
        cluster: Address of a Ray cluster that measures the proposals, `"auto"` for the cluster of this
            machine. Baselines and the final measurement run on this machine.
        num_machines: Machines of the cluster to use at the same time.
        warm_start: Whether to start from the fastest schedules of similar matrices, and to store the result
            for later sessions, in `cache_dir`.
        progress: Progress callback.

    Raises:
        InputError: An argument is out of range, `method` takes no `prior`, or the matrix is unsupported.
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
        warm_start: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self._trial_limit = math.inf if max_trials is None else max_trials
        if not (budget_s >= 0 and self._trial_limit >= 0):
            raise InputError(f"`budget_s` (={budget_s}) and `max_trials` (={max_trials}) must be at least 0")
        self._deadline = Deadline(budget_s)
        check_at_least(0, seed=seed)
        check_at_least(1, num_machines=num_machines)
        if threads is not None:
            check_threads(threads)
        if out_dir is not None:
            check_output(out_dir, directory=True)
        check_one_of(METHODS, method=method)
        if prior is not None and not method.startswith(GUIDED_PREFIX):
            raise InputError(f"method {method!r} takes no `prior`; use {GUIDED_PREFIX}{method}")
        self._method = method
        self.problem = SparseProblem(
            operator=get_operator(operator), matrix=as_coo(matrix, dtype=dtype), n_cols=n_cols
        )
        num_products = self.problem.matrix.nnz * (self.problem.n_cols or 1)
        default_threads = 1 if num_products < _TINY_PRODUCTS else len(os.sched_getaffinity(0))
        self._threads = default_threads if threads is None else threads
        self._is_small = num_products < _SMALL_PRODUCTS
        self._budget_s, self._prior, self._seed = budget_s, prior, seed
        self._out_dir, self._cache_dir = out_dir, cache_dir
        self._cluster, self._num_machines = cluster, num_machines
        self._winners = WinnerCache(cache_dir) if warm_start else None
        self._progress = progress
        self._trials: dict[Schedule, Trial] = {}
        self._new_trials: list[Trial] = []
        self._strategy: Strategy | None = None
        self._propose_s = 0.0
        self._recent_propose_s: list[float] = [0.0]

    def run(self) -> TuneResult:
        """Run the search. Without a C compiler the result is the library's kernel, with a warning.

        Raises:
            InputError: `out_dir` has the trials of another problem.
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
        baselines = self._build_baselines()
        if self._budget_s == 0:
            return self._select_unmeasured(baselines)
        reference = self._reference = baselines[REFERENCE_PRESETS[problem.operator.name]]
        self._baselines = baselines
        self._trial_limit += len(baselines)
        evaluator = ScheduleEvaluator(problem, reference, seed=self._seed, cache_dir=self._cache_dir)
        start_s = self._deadline.elapsed_s
        with self._open_log() as log, evaluator:
            self._setup_s = self._deadline.elapsed_s - start_s
            self._log, self._evaluator = log, evaluator
            self._trials |= {} if log is None else {trial.schedule: trial for trial in log.rows}
            self._num_resumed = len(self._trials)
            similar = self._measure_baselines()
            self._measure_balanced()
            self._search()
            if self._is_negligible():
                self._deadline.shorten(_NEGLIGIBLE_RERANK_S)
            if self._progress is not None:
                self._progress("measuring the best schedules again", 1.0)
            start_s = self._deadline.elapsed_s
            final = rerank_schedules(
                problem,
                evaluator,
                self._trials,
                baselines,
                reference,
                deadline=self._deadline,
                cache_dir=self._cache_dir,
            )
            rerank_s = self._deadline.elapsed_s - start_s
        if self._winners is not None and final.kernel.schedule is not None:
            self._winners.add(problem, self._threads, final.kernel.schedule)
        messages = (*final.warnings, *self._find_missing_baselines())
        for message in messages:
            _LOGGER.warning(message)
        seconds = self._sum_phases(rerank_s)
        saved_ms = final.library_ms - final.kernel_ms
        return TuneResult(
            kernel=final.kernel,
            trials=tuple(self._trials.values()),
            baselines=final.baselines,
            best_ratio=final.best_ratio,
            seconds=seconds,
            warnings=messages,
            break_even=math.ceil(1e3 * sum(seconds.values()) / saved_ms) if saved_ms > 0 else None,
            similar=tuple(similar),
        )

    def _select_unmeasured(self, baselines: Mapping[str, Schedule]) -> TuneResult:
        """Compile a hand-written schedule without measuring any."""
        problem, limit = self.problem, compute_storage_limit(self.problem)
        name = None if self._prior is not None or self._is_small else self._select_by_fill()
        if name is None:
            origin, schedules = "selected by the cost model, not measured", self._rank_by_model(baselines)
        else:
            origin, schedules = "selected by the fill of blocks, not measured", [baselines[name]]
        for schedule in schedules:
            try:
                program = build_program(problem, schedule, max_bytes=limit)
            except InputError:  # its blocks hold too many zeros of this matrix
                continue
            kernel = CompiledKernel(program, cache_dir=self._cache_dir)
            kernel.origin = origin
            seconds = {"other": self._deadline.elapsed_s}
            return TuneResult(kernel=kernel, trials=(), baselines={}, best_ratio=None, seconds=seconds)
        raise RunError("no hand-written schedule can store this matrix; tune with a budget above 0")

    def _select_by_fill(self) -> str | None:
        """Select the preset of SpMM if blocks of 4 rows are nearly full or nearly empty; otherwise None.

        The network needs several times as long to embed a pattern as it takes to count its blocks.
        """
        problem = self.problem
        if problem.operator.name != "spmm" or problem.matrix.nnz == 0:
            return None
        stored = 4 * BlockCounts(problem.matrix).count(4, 1) / problem.matrix.nnz
        if stored <= _MAX_STORED_IN_BLOCKS:
            return "bcsr4x1"
        return "tiled_csr" if stored >= _MIN_STORED_WITHOUT_BLOCKS else None

    def _rank_by_model(self, baselines: Mapping[str, Schedule]) -> list[Schedule]:
        """Rank the hand-written schedules by the cost model, the best first."""
        schedules = [
            *baselines.values(),
            *(self._use_one_thread(baselines).values() if self._is_small else ()),
        ]
        # Models have not seen these formats, which are faster than others for the matrices that have them.
        special = [schedule for schedule in schedules if schedule.has_diagonals or schedule.is_symmetric]
        schedules = list(dict.fromkeys(special or schedules))
        scores = (self._prior or load_default_prior())(self.problem, self._threads)(schedules)
        return [schedules[int(index)] for index in np.argsort(-scores, kind="stable")]

    def _build_baselines(self) -> dict[str, Schedule]:
        operator, extents, threads = self.problem.operator, self.problem.extents, self._threads
        presets = build_presets(operator, extents, threads) | build_matrix_presets(self.problem, threads)
        return {name: schedule.canonicalize(operator, extents) for name, schedule in presets.items()}

    def _use_one_thread(self, schedules: Mapping[str, Schedule]) -> dict[str, Schedule]:
        operator, extents = self.problem.operator, self.problem.extents
        return {
            name: replace(schedule, threads=1).canonicalize(operator, extents)
            for name, schedule in schedules.items()
        }

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

    def _start_strategy(self) -> Strategy:
        """Create the strategy and replay the trials, also those of an earlier run."""
        start_s = time.monotonic()
        search_s = self._deadline.remaining_s - self._estimate_rerank_s(max_share=_RERANK_SHARE)
        is_disturbed = self._trials[self._reference].disturbed
        strategy = create_strategy(
            self._method,
            self.problem,
            self._threads,
            # A resumed search gets another random stream, so that it does not repeat its proposals.
            np.random.default_rng([self._seed, self._num_resumed]),
            prior=self._prior,
            max_start_s=_MODEL_SHARE * search_s / (_DISTURBED_FACTOR if is_disturbed else 1.0),
            build_s=max(trial.seconds.get("build", 0.0) for trial in self._trials.values()),
        )
        for trial in self._trials.values():
            strategy.observe(trial)
        self._propose_s += time.monotonic() - start_s
        return strategy

    def _measure_baselines(self) -> list[Schedule]:
        """Measure the reference, then the schedules of similar matrices and the other baselines.

        Returns the schedules of similar matrices.
        """
        single: dict[str, Schedule] = {}
        if self._threads > 1 and self._is_small:
            single = self._use_one_thread(self._baselines)
        if self._reference not in self._trials:
            self._record(self._measure(self._reference))
        for name, schedule in single.items():
            # Waking threads takes longer than small products, which only calls in this process show.
            is_new = self._baselines[name] == self._reference and schedule not in self._trials
            if is_new and (self._is_negligible() or self._fits(self._estimate_trial_s())):
                self._record(self._measure(schedule))
        similar = [] if self._winners is None else self._find_similar(self._winners)
        self._measure_new(similar)
        baselines = [*self._baselines.values(), *single.values()]
        baselines = [schedule for schedule in dict.fromkeys(baselines) if schedule not in self._trials]
        trial_s = self._estimate_trial_s()
        if self._fits(2 * trial_s) and not self._fits(len(baselines) * trial_s):
            scores = CountModel(ScheduleFeatures(self.problem, self._threads)).score(baselines)
            baselines = [baselines[int(index)] for index in np.argsort(-scores, kind="stable")]
        self._measure_new(baselines)
        return [schedule for schedule in similar if schedule in self._trials]

    def _measure_balanced(self) -> None:
        """Measure the fastest schedule so far with ranges of rows that have equal numbers of elements.

        They replace chunks that threads take one after the other, which is faster for most matrices.
        """
        completed = [trial for trial in self._trials.values() if trial.error is None]
        if not completed or len(self._trials) >= self._trial_limit:
            return
        operator, extents = self.problem.operator, self.problem.extents
        best = min(completed, key=lambda trial: trial.ratio).schedule
        if best.threads == 1 or best.chunk == BALANCED:
            return
        balanced = replace(best, chunk=BALANCED)
        if not balanced.find_violations(operator, extents):
            self._measure_new([balanced.canonicalize(operator, extents)])

    def _find_similar(self, winners: WinnerCache) -> list[Schedule]:
        """Find the fastest schedules of similar matrices, as many as the limit of trials allows."""
        if self._is_negligible():
            return []
        baselines = self._baselines.values()
        num_others = sum(schedule not in baselines for schedule in self._trials)
        num_allowed = self._trial_limit - len(baselines) - num_others
        similar = winners.find(self.problem, self._threads)
        return [schedule for index, schedule in enumerate(similar) if index < num_allowed]

    def _measure_new(self, schedules: Sequence[Schedule]) -> None:
        """Measure the schedules that have no trial, as far as the budget allows and pays."""
        for schedule in schedules:
            is_known = schedule in self._trials
            if not is_known and not self._is_negligible() and self._fits(self._estimate_trial_s()):
                self._record(self._measure(schedule))

    def _search(self) -> None:
        batch_size = 1 if self._cluster is None else BATCH_SIZE * self._num_machines
        while len(self._trials) < self._trial_limit and not self._is_negligible():
            cost_s = max(self._recent_propose_s) + self._estimate_trial_s() * batch_size / self._num_machines
            if not self._fits(cost_s, max_share=_RERANK_SHARE):
                break
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

    def _is_negligible(self) -> bool:
        """Return whether a call takes much longer than the fastest schedule, so that no search pays."""
        best_ms = min(trial.latency_ms for trial in self._trials.values())
        return math.isfinite(self._budget_s) and best_ms < _NEGLIGIBLE_MS

    def _fits(self, cost_s: float, *, max_share: float = 0.0) -> bool:
        """Return whether there is time for work and the final measurement."""
        if math.isinf(self._budget_s):
            return True
        return self._deadline.allows(cost_s + self._estimate_rerank_s(max_share=max_share))

    def _estimate_rerank_s(self, *, max_share: float = 0.0) -> float:
        max_s = max_share * self._budget_s if max_share else 0.0  # an infinite budget times 0 is NaN
        return estimate_rerank_s(
            self._trials,
            self._baselines.values(),
            self._reference,
            library_s=self._evaluator.library_s,
            max_s=max_s,
        )

    def _estimate_trial_s(self) -> float:
        """Estimate the time of the next trial by the slowest of the recent ones, seconds."""
        recent = [trial for trial in self._new_trials if trial.schedule != self._reference][-_NUM_RECENT:]
        if not recent:  # the reference is built and compiled before its trial
            return sum(self._trials[self._reference].seconds.values()) + self._setup_s
        return max(sum(trial.seconds.values()) for trial in recent)

    def _find_missing_baselines(self) -> Iterator[str]:
        """Yield a sentence if the budget was too short for all baselines."""
        missing = [name for name, schedule in self._baselines.items() if schedule not in self._trials]
        if missing and not self._is_negligible():
            yield (
                f"`budget_s` (={self._budget_s:g}) is too short to measure {', '.join(missing)}; the speedup "
                "is over the other baselines"
            )

    def _propose(self, count: float) -> list[Schedule]:
        """Propose up to `count` new schedules; fewer if the strategy only repeats itself."""
        if self._strategy is None:
            self._strategy = self._start_strategy()
        start_s = time.monotonic()
        schedules: dict[Schedule, None] = {}
        num_repeats = 0
        while len(schedules) < count and num_repeats < _MAX_REPEATS:
            schedule = self._strategy.propose().canonicalize(self.problem.operator, self.problem.extents)
            is_known = schedule in self._trials
            num_repeats = num_repeats + 1 if is_known or schedule in schedules else 0
            if not is_known:
                schedules[schedule] = None
        duration_s = time.monotonic() - start_s
        self._propose_s += duration_s
        self._recent_propose_s = [*self._recent_propose_s[1 - _NUM_RECENT :], duration_s]
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
        if self._strategy is not None:
            start_s = time.monotonic()
            self._strategy.observe(trial)
            self._propose_s += time.monotonic() - start_s
        if self._progress is not None:
            count, limit = len(self._trials), self._trial_limit
            best_ms = min(trial.latency_ms for trial in self._trials.values())
            fraction = max(self._deadline.elapsed_s / self._budget_s, count / limit if limit else 0.0)
            self._progress(f"{count} schedules, best {best_ms:.3f} ms", min(fraction, 1.0))

    def _sum_phases(self, rerank_s: float) -> dict[str, float]:
        seconds = {"propose": self._propose_s} | sum_phases(self._new_trials) | {"rerank": rerank_s}
        seconds["other"] = self._deadline.elapsed_s - sum(seconds.values())
        return seconds
