"""Tuning sessions: measurements, trial logs and results."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from sparseflow.core import journal
from sparseflow.errors import DeviceError, FileFormatError, InputError, OutputError, RunError
from sparseflow.tuning import TuneResult, TuningSession, tune
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel, load
from sparseflow.tuning.measure.evaluator import ScheduleEvaluator, Trial
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.matrix_files import read_matrix
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.rules import BALANCED
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search import deadline, guided, rerank
from sparseflow.tuning.search.methods import METHODS
from sparseflow.tuning.search.rerank import LIBRARY
from sparseflow.tuning.search.session import TRIALS_FILE
from tests.tuning.random_schedules import SPMV_LINE

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}


def search(*args: Any, **options: Any) -> TuneResult:
    return TuningSession(*args, **options).run()


def samples(rows: int = 19, cols: int = 23, density: float = 0.3, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < density)


def hand_written(name: str = "spmm", threads: int = 1) -> dict[str, Schedule]:
    """Presets of `samples()` with 8 columns, in canonical form."""
    operator = OPERATORS[name]
    extents = dict(zip(operator.axes, (19, 23, 8), strict=False))
    known = build_presets(operator, extents, threads)
    return {name: schedule.canonicalize(operator, extents) for name, schedule in known.items()}


@pytest.fixture
def options(cache: Path) -> dict[str, Any]:
    return {
        "n_cols": 8, "threads": 1, "dtype": np.float32, "cache_dir": cache, "budget_s": math.inf,
        "warm_start": False,
    }  # fmt: skip


REFERENCE_MS = 0.1
"""Latency of made-up measurements; scipy is slower."""


class Made:
    """Deterministic made-up measurements."""

    def __init__(self) -> None:
        self.quick: list[Schedule] = []
        self.thorough: list[Schedule] = []
        self.ratio: dict[Schedule, float] = {}
        self.lucky: dict[Schedule, float] = {}  # factor of the ratio next to a slowed-down reference
        self.luck = 1
        self.single_thread = 1.0
        self.library = 100.0
        self.fails: set[Schedule] = set()
        self.fails_later: set[Schedule] = set()
        self.disturbed: set[Schedule] = set()
        self.final_ratios: dict[Schedule, list[float]] = {}  # of the first final measurements
        self.disturbed_finals: set[Schedule] = set()  # those of `final_ratios` are disturbed
        self.unit_ms = REFERENCE_MS
        self.duration_s = 0.0
        self.clock_s = 0.0

    def __call__(self, schedule: Schedule, *, thorough: bool = False) -> Trial:
        (self.thorough if thorough else self.quick).append(schedule)
        self.clock_s += self.duration_s
        if thorough and self.final_ratios.get(schedule):
            return Trial(
                schedule=schedule,
                latency_ms=self.unit_ms,
                ratio=self.final_ratios[schedule].pop(0),
                disturbed=schedule in self.disturbed_finals,
            )
        if schedule in self.fails or (thorough and schedule in self.fails_later):
            return Trial(schedule=schedule, error="made to fail", seconds={"build": 1e-9})
        ratio = self.ratio.get(schedule, 1.0 + sum(map(ord, str(schedule))) % 61 / 10)
        latency_ms = self.unit_ms * ratio
        if not thorough and self.quick.count(schedule) <= self.luck:
            ratio = self.lucky.get(schedule, ratio)
        return Trial(
            schedule=schedule,
            latency_ms=latency_ms,
            ratio=ratio,
            disturbed=schedule in self.disturbed,
            seconds={"build": 2e-9, **({"measure": self.duration_s} if self.duration_s else {})},
        )

    @property
    def attempted(self) -> list[Schedule]:
        """Distinct schedules that were measured."""
        return list(dict.fromkeys(self.quick))


@pytest.fixture(autouse=True)
def few_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let guided searches rank fewer schedules."""
    defaults = guided.GuidedSearch.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "num_proposals", 32)
    monkeypatch.setattr(guided, "_NUM_PARENTS", 8)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> Made:
    result = Made()
    monkeypatch.setattr(ScheduleEvaluator, "measure", lambda self, *args, **kwargs: result(*args, **kwargs))

    def call_times(kernels: Sequence[Kernel], *args: Any, **kwargs: Any) -> tuple[list[float], bool]:
        return [1.0, *([result.single_thread] if len(kernels) > 2 else []), result.library], False

    monkeypatch.setattr(rerank, "measure_call_times", call_times)
    return result


def check(tuned: TuneResult) -> None:
    """Check the result of the kernel and the recorded speedup."""
    kernel = tuned.kernel
    inputs = kernel.problem.generate_inputs(3)
    expected = kernel.problem.compute_reference(inputs)
    limit = TOLERANCE[kernel.problem.dtype] * np.abs(expected).max(initial=1e-30)
    assert np.abs(kernel.compute(*inputs) - expected).max(initial=0.0) <= limit
    assert kernel.speedup is not None and kernel.speedup >= 1.0
    assert tuned.best_ratio is not None and tuned.best_ratio <= min(tuned.baselines.values())
    assert math.isclose(kernel.speedup, min(tuned.baselines.values()) / tuned.best_ratio)
    assert (kernel.schedule is None) == isinstance(kernel, LibraryKernel)


# Real measurements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_session_few_trials(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if name == "spmv":
        del options["n_cols"]
    tuned = search(name, samples(), max_trials=2, **options)
    check(tuned)
    known = hand_written(name)
    assert set(tuned.baselines) == {*known, LIBRARY}
    assert {trial.schedule for trial in tuned.trials[: len(known)]} == set(known.values())
    assert len(tuned.trials) == len(known) + 2
    assert all(trial.error is None for trial in tuned.trials[: len(known)])
    assert set(tuned.seconds) == {"propose", "build", "compile", "measure", "rerank", "other"}
    assert all(seconds >= 0.0 for seconds in tuned.seconds.values())
    tuned.kernel.save(tmp_path / "kernel")
    kernel = load(tmp_path / "kernel", cache_dir=options["cache_dir"])
    inputs = tuned.kernel.problem.generate_inputs()
    assert np.array_equal(kernel.compute(*inputs), tuned.kernel.compute(*inputs))


@pytest.mark.parametrize(
    ("rows", "cols", "density"), [(1, 50, 0.5), (50, 1, 0.5), (1, 1, 1.0), (9, 8, 0.0)], ids=str
)
def test_session_extreme_shapes(rows: int, cols: int, density: float, options: dict[str, Any]) -> None:
    for name in OPERATORS:
        check(
            search(
                name,
                samples(rows, cols, density),
                max_trials=0,
                **{**options, "n_cols": None if name == "spmv" else 1},
            )
        )


def test_session_two_threads_and_float64(options: dict[str, Any]) -> None:
    tuned = search("spmm", samples(), max_trials=1, **{**options, "threads": 2, "dtype": None})
    assert tuned.kernel.problem.dtype == np.float64
    check(tuned)


@pytest.mark.parametrize("kind", ["scipy", "torch", "Coo", "integers"])
def test_session_any_matrix_type(kind: str, options: dict[str, Any], created: Made) -> None:
    full = np.rint(samples()).astype(np.int64) if kind == "integers" else samples()
    arguments = {
        "scipy": scipy.sparse.csc_array,
        "torch": lambda array: torch.from_numpy(array).to_sparse_coo(),
        "Coo": as_coo,
        "integers": scipy.sparse.coo_matrix,
    }[kind](full)
    kernel = tune("spmm", arguments, max_trials=0, **options)
    b = np.ones((23, 8), np.float32)
    assert np.allclose(kernel(b), full @ b, atol=1e-4)


@pytest.mark.parametrize(
    ("ratio", "disturbed", "words"),
    [
        (1.0, False, []),
        (0.92, False, []),
        (0.35, False, ["0.35 times"]),
        (4.7, False, ["4.70 times"]),
        (1.0, True, ["1 of 3 final"]),
        (1.2, True, ["1 of 3 final", "1.20 times"]),
    ],
)
def test_session_warns_of_unreliable_ratios(
    ratio: float,
    disturbed: bool,
    words: list[str],
    options: dict[str, Any],
    created: Made,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference = hand_written()["tiled_csr"]
    created.ratio[reference] = ratio
    created.disturbed |= {reference} if disturbed else set()
    logger = logging.getLogger("sparseflow")
    logger.addHandler(caplog.handler)  # the command line switches off its propagation
    try:
        tuned = search("spmm", samples(), max_trials=0, **options)
    finally:
        logger.removeHandler(caplog.handler)
    assert len(tuned.warnings) == len(words)
    for warning, word in zip(tuned.warnings, words, strict=True):
        assert word in warning and warning in caplog.messages
    assert tuned.to_dict()["warnings"] == list(tuned.warnings)


def test_session_pattern_result_holds_ones(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate pattern symmetric\n3 3 3\n1 1\n2 1\n3 2\n")
    tuned = search("spmm", read_matrix(path), max_trials=0, **{**options, "dtype": None})
    tuned.kernel.save(tmp_path / "kernel")
    for kernel in (tuned.kernel, load(tmp_path / "kernel", cache_dir=options["cache_dir"])):
        result = kernel(np.eye(3, 8, dtype=np.float32))
        assert result[:, :3].tolist() == [[1, 1, 0], [1, 0, 1], [0, 1, 0]]


def test_session_too_many_threads_raises(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="100000"):
        search("spmm", samples(), **{**options, "threads": 100_000})


def test_session_operands_beyond_memory_raise(options: dict[str, Any]) -> None:
    matrix = scipy.sparse.coo_array((np.ones(1), ([0], [0])), shape=(2**31 - 1, 2**31 - 1))
    with pytest.raises(InputError, match="GiB"):
        search("spmm", matrix, **{**options, "n_cols": 10_000})


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/run"])
def test_session_output_is_tested_before_the_search(
    name: str, options: dict[str, Any], created: Made, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=name):
        search("spmm", samples(), out_dir=tmp_path / name, **options)
    assert not created.quick


# Choice of measurements -------------------------------------------------------------------------------------


def test_session_no_trials(options: dict[str, Any], created: Made) -> None:
    tuned = search("spmm", samples(), max_trials=0, **options)
    known = hand_written()
    assert created.attempted == [trial.schedule for trial in tuned.trials]
    assert created.attempted[0] == known["tiled_csr"], "the reference is first"
    assert set(created.attempted) == set(created.thorough) == set(known.values())
    assert tuned.kernel.schedule in known.values()


@pytest.mark.parametrize("method", METHODS)
def test_session_measures_each_schedule_once(method: str, options: dict[str, Any], created: Made) -> None:
    tuned = search("spmm", samples(), max_trials=12, method=method, **options)
    assert len(created.attempted) == len(tuned.trials) == len(hand_written()) + 12
    assert len(set(created.thorough)) <= len(hand_written()) + 6


@pytest.mark.parametrize("method", ["random", "guided-evolutionary"])
def test_session_depends_on_seed_only(method: str, options: dict[str, Any], created: Made) -> None:
    proposals = []
    for seed in (0, 0, 1):
        created.quick.clear()
        search("spmm", samples(), max_trials=10, method=method, seed=seed, **options)
        proposals.append(tuple(created.quick))
    assert proposals[0] == proposals[1] != proposals[2]


def test_session_ends_when_space_is_exhausted(options: dict[str, Any], created: Made) -> None:
    tuned = search("spmv", np.ones((1, 1)), method="random", **{**options, "n_cols": None})
    assert 3 < len(tuned.trials) < 10_000


def test_session_ends_with_budget(options: dict[str, Any], created: Made) -> None:
    tuned = search("spmm", samples(), **{**options, "budget_s": 1e-9})
    assert created.attempted == [hand_written()["tiled_csr"]], "the reference is always measured"
    assert not created.thorough and set(tuned.baselines) == {"tiled_csr", LIBRARY}
    assert "csr, bcsr4x1" in tuned.warnings[-1]
    check(tuned)


def test_session_fastest_wins(options: dict[str, Any], created: Made) -> None:
    result = search("spmm", samples(), max_trials=20, method="random", **options).trials
    known = hand_written()
    winner = result[-3].schedule
    assert winner not in known.values()
    created.ratio = {winner: 0.01, **dict.fromkeys(known.values(), 0.02)}
    tuned = search("spmm", samples(), max_trials=20, method="random", **options)
    assert isinstance(tuned.kernel, CompiledKernel) and tuned.kernel.schedule == winner
    assert tuned.best_ratio == 0.01 and tuned.kernel.speedup == 2.0
    check(tuned)


def test_session_confirms_lucky_trials(options: dict[str, Any], created: Made) -> None:
    """A slowed-down reference makes some schedules look better once."""
    result = search("spmm", samples(), max_trials=20, method="random", **options).trials
    other_items = [trial.schedule for trial in result if trial.schedule not in hand_written().values()]
    created.ratio = (
        {other_items[0]: 0.3}
        | dict.fromkeys(other_items[1:], 2.0)
        | dict.fromkeys(hand_written().values(), 1.0)
    )
    created.lucky = dict.fromkeys(other_items[5:], 0.1)
    created.quick.clear()
    tuned = search("spmm", samples(), max_trials=20, method="random", **options)
    assert tuned.kernel.schedule == other_items[0] and tuned.best_ratio == 0.3
    messages = {trial.schedule: trial for trial in tuned.trials}
    assert all(messages[other].ratio == 2.0 and messages[other].times == 2 for other in other_items[5:])
    assert all(messages[other].times == 1 for other in other_items[1:5])


def test_session_reranks_by_latency(options: dict[str, Any], created: Made) -> None:
    """Other schedules have better ratios in every measurement."""
    result = search("spmm", samples(), max_trials=20, method="random", **options).trials
    other_items = [trial.schedule for trial in result if trial.schedule not in hand_written().values()]
    created.ratio = (
        {other_items[0]: 0.9}
        | dict.fromkeys(other_items[1:], 2.0)
        | dict.fromkeys(hand_written().values(), 1.0)
    )
    created.lucky, created.luck = dict.fromkeys(other_items[5:], 0.1), 2
    created.quick.clear()
    created.thorough.clear()
    tuned = search("spmm", samples(), max_trials=20, method="random", **options)
    assert len(created.thorough) == len(hand_written()) + 6
    assert tuned.kernel.schedule == other_items[0] and tuned.best_ratio == 0.9


def test_session_disturbed_measurement_never_wins(options: dict[str, Any], created: Made) -> None:
    """A disturbed final measurement is repeated, and does not count if the repetition is undisturbed."""
    known = hand_written()
    created.ratio = {known["tiled_csr"]: 1.0, known["csr"]: 2.0, known["bcsr4x1"]: 3.0}
    created.final_ratios = {known["csr"]: [0.1]}
    created.disturbed_finals = {known["csr"]}
    tuned = search("spmm", samples(), max_trials=0, **options)
    assert created.thorough.count(known["csr"]) == 2
    assert tuned.kernel.schedule == known["tiled_csr"] and tuned.baselines["csr"] == 2.0
    assert not tuned.warnings


def test_session_repeats_final_measurement_if_reference_is_off(
    options: dict[str, Any], created: Made
) -> None:
    known = hand_written()
    created.ratio = {known["tiled_csr"]: 1.0, known["csr"]: 0.9, known["bcsr4x1"]: 3.0}
    created.final_ratios = {known["tiled_csr"]: [5.0], known["csr"]: [4.0]}
    tuned = search("spmm", samples(), max_trials=0, **options)
    assert created.thorough.count(known["tiled_csr"]) == created.thorough.count(known["csr"]) == 2
    assert tuned.baselines["tiled_csr"] == 1.0 and tuned.best_ratio == 0.9 and not tuned.warnings


@pytest.mark.parametrize("budget_s", [3.0, 6.0, 10.0, 40.0])
def test_session_estimates_time_and_keeps_budget(
    budget_s: float, options: dict[str, Any], created: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every measurement takes a second of a clock that otherwise stands still."""
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: created.clock_s))
    created.duration_s = 1.0
    created.ratio = dict.fromkeys(hand_written().values(), 1.0)
    tuned = search("spmm", samples(), method="random", **{**options, "budget_s": budget_s})
    assert created.clock_s <= budget_s
    assert created.quick[0] == hand_written()["tiled_csr"]
    missing = set(hand_written()) - set(tuned.baselines)
    assert bool(missing) == (budget_s == 3.0) == bool(tuned.warnings)
    assert all(name in tuned.warnings[-1] for name in missing)
    assert (len(tuned.trials) > len(hand_written())) == (budget_s >= 10.0)


def test_session_negligible_latency_ends_search(options: dict[str, Any], created: Made) -> None:
    created.unit_ms = 1e-7
    created.ratio = {hand_written(threads=2)["tiled_csr"]: 1.0}
    tuned = search("spmm", samples(), **{**options, "budget_s": 60.0, "threads": 2})
    references = [hand_written(threads=threads)["tiled_csr"] for threads in (2, 1)]
    assert created.attempted == references and not tuned.warnings
    assert set(tuned.baselines) == {"tiled_csr", LIBRARY}
    tuned = search("spmm", samples(), max_trials=3, **options)  # the budget of the options is infinite
    assert len(tuned.trials) == len(hand_written()) + 3, "an unlimited budget is spent"


def test_session_tiny_matrix(options: dict[str, Any]) -> None:
    tuned = search("spmv", scipy.sparse.eye(3), **{**options, "n_cols": None, "budget_s": 60.0})
    check(tuned)
    assert len(tuned.trials) == 1


def test_session_starts_from_similar_matrix(options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    warm: dict[str, Any] = {**options, "warm_start": True, "cache_dir": tmp_path, "method": "random"}
    winner = search("spmm", samples(), max_trials=9, **options | {"method": "random"}).trials[-1].schedule
    created.ratio = {winner: 0.01} | dict.fromkeys(hand_written().values(), 1.0)
    first = search("spmm", samples(), max_trials=9, **warm)
    assert first.kernel.schedule == winner and not first.similar
    created.quick.clear()
    second = search("spmm", samples(20, 24, seed=5), max_trials=1, **warm)
    (similar,) = second.similar
    assert [trial.schedule for trial in second.trials][1] == similar, "it follows the reference"
    assert len(second.trials) == len(hand_written()) + 1
    assert second.to_dict()["similar"] == [str(similar)]
    for changed in ({"warm_start": False}, {"max_trials": 0}, {"n_cols": 64}, {"dtype": np.float64}):
        assert not search("spmm", samples(), **{"max_trials": 1, **warm, **changed}).similar


def test_session_library_can_win(options: dict[str, Any], created: Made) -> None:
    created.ratio = dict.fromkeys(hand_written().values(), 0.5)
    created.library = 2e-3
    tuned = search("spmm", samples(), max_trials=1, **options)
    assert isinstance(tuned.kernel, LibraryKernel) and tuned.kernel.speedup == 1.0
    assert tuned.best_ratio == tuned.baselines[LIBRARY] == min(tuned.baselines.values())
    assert tuned.best_ratio == pytest.approx(1e-3) and tuned.break_even is None
    check(tuned)


@pytest.mark.parametrize("name", ["spmm", "spmv", "sddmm"])
def test_session_without_budget_measures_nothing(name: str, options: dict[str, Any], created: Made) -> None:
    n_cols = None if name == "spmv" else 8
    tuned = search(name, samples(), **{**options, "budget_s": 0, "n_cols": n_cols})
    assert not created.quick and not created.thorough and not tuned.trials
    assert tuned.kernel.schedule in hand_written(name).values()
    assert tuned.kernel.speedup is None and tuned.best_ratio is None and tuned.break_even is None
    assert tuned.kernel.explain().endswith(f"not measured; schedule {tuned.kernel.schedule}")
    inputs = tuned.kernel.problem.generate_inputs()
    expected = tuned.kernel.problem.compute_reference(inputs)
    assert np.abs(tuned.kernel.compute(*inputs) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "preset"), [("blocks", "bcsr4x1"), ("scattered", "tiled_csr")])
def test_session_without_budget_selects_by_fill(
    kind: str, preset: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = {
        "blocks": scipy.sparse.kron(scipy.sparse.eye(2000), np.ones((4, 4))),
        "scattered": scipy.sparse.random_array((9000, 9000), density=4e-4, rng=0),
    }[kind]
    monkeypatch.setattr("sparseflow.tuning.search.session.load_default_prior", None)  # needs no network
    tuned = search("spmm", matrix, **options | {"n_cols": 64, "budget_s": 0, "threads": 2})
    expected = build_presets(OPERATORS["spmm"], tuned.kernel.problem.extents, threads=2)[preset]
    schedule = tuned.kernel.schedule
    assert schedule == expected.canonicalize(OPERATORS["spmm"], tuned.kernel.problem.extents)
    assert tuned.kernel.origin == "selected by the fill of blocks, not measured"


def test_session_states_when_the_kernel_pays(options: dict[str, Any], created: Made) -> None:
    created.library = 10.0
    tuned = search("spmm", samples(), max_trials=1, **options)
    assert tuned.break_even == math.ceil(1e3 * sum(tuned.seconds.values()) / 9.0)  # it takes 1 of 10 ms
    assert tuned.to_dict()["break_even"] == tuned.break_even


def test_session_one_thread_can_win_short_calls(options: dict[str, Any], created: Made) -> None:
    """Waking a second thread takes longer than it saves, which only calls in this process show."""
    created.ratio = {
        **dict.fromkeys(hand_written(threads=1).values(), 0.2),
        **dict.fromkeys(hand_written(threads=2).values(), 0.1),
    }
    for single, threads in ((0.5, 1), (1.5, 2)):
        created.single_thread = single
        tuned = search("spmm", samples(), max_trials=0, **{**options, "threads": 2})
        assert tuned.kernel.schedule is not None and tuned.kernel.schedule.threads == threads
        assert tuned.best_ratio == 0.1 * min(single, 1.0)


def test_session_failures_never_win(options: dict[str, Any], created: Made) -> None:
    proposals = [trial.schedule for trial in search("spmm", samples(), max_trials=10, **options).trials]
    known = hand_written()
    created.fails = {known["csr"], *proposals[4:]}
    created.ratio = dict.fromkeys(known.values(), 0.5)
    tuned = search("spmm", samples(), max_trials=10, **options)
    assert {trial.schedule for trial in tuned.trials if trial.error} >= {known["csr"]}
    assert tuned.baselines["csr"] == math.inf
    assert tuned.kernel.schedule not in created.fails
    check(tuned)


def test_session_failure_in_rerank_does_not_win(options: dict[str, Any], created: Made) -> None:
    known = hand_written()
    created.ratio = {known["tiled_csr"]: 0.1}
    created.fails_later = {known["tiled_csr"]}
    tuned = search("spmm", samples(), max_trials=0, **options)
    assert tuned.baselines["tiled_csr"] == math.inf
    assert tuned.kernel.schedule != known["tiled_csr"]


def test_session_sums_phase_times(options: dict[str, Any], created: Made) -> None:
    tuned = search("spmm", samples(), max_trials=5, **options)
    assert math.isclose(tuned.seconds["build"], 2e-9 * sum(trial.times for trial in tuned.trials))


@pytest.mark.parametrize("trials", [7, None])
def test_session_reports_progress(trials: int | None, options: dict[str, Any], created: Made) -> None:
    messages: list[tuple[str, float]] = []
    limits: dict[str, Any] = {"max_trials": trials, "budget_s": 600.0 if trials else 0.3}
    tuned = search("spmm", samples(), progress=lambda *args: messages.append(args), **{**options, **limits})
    *messages, last = messages
    assert last == ("measuring the best schedules again", 1.0)
    assert len(messages) == len(tuned.trials)
    fractions = [fraction for _, fraction in messages]
    assert fractions == sorted(fractions) and fractions[0] > 0.0 and fractions[-1] <= 1.0
    assert trials is None or fractions[-1] == 1.0
    assert messages[0][0].startswith("1 schedules, best ") and messages[-1][0].startswith(
        f"{len(messages)} schedules"
    )


# Trial log --------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / TRIALS_FILE).read_text().splitlines()]


def test_session_logs_every_trial(options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    created.fails = {hand_written()["csr"]}
    folder = tmp_path / "new" / "folder"
    tuned = search("spmm", samples(), max_trials=5, out_dir=folder, **options)
    head, *rows = rows_of(folder)
    assert head["operator"] == "spmm" and head["extents"] == {"i": 19, "k": 23, "j": 8}
    assert head["dtype"] == "float32" and head["threads"] >= 1 and len(head["pattern"]) == 64
    assert rows == [trial.to_dict() for trial in tuned.trials]


def test_session_logs_trials_immediately(options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    lines: list[int] = []
    search(
        "spmm", samples(), max_trials=5, out_dir=str(tmp_path),
        progress=lambda *_: lines.append(len(rows_of(tmp_path))), **options,
    )  # fmt: skip
    assert lines == [*range(2, len(lines) + 1), len(lines)]


@pytest.mark.parametrize("method", ["annealing", "guided-qlearning"])
def test_session_resumes(method: str, options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    created.fails = {hand_written()["csr"]}
    first = search("spmm", samples(), max_trials=10, out_dir=tmp_path, method=method, **options)
    created.quick.clear()
    second = search("spmm", samples(), max_trials=15, out_dir=tmp_path, method=method, **options)
    assert second.trials[: len(first.trials)] == first.trials
    assert len(created.attempted) == 5 and len(second.trials) == len(first.trials) + 5
    created.quick.clear()
    third = search("spmm", samples(), max_trials=15, out_dir=tmp_path, method=method, **options)
    assert created.quick == [] and third.trials == second.trials
    assert third.kernel.schedule == second.kernel.schedule


def test_session_resume_measures_missing_baselines(
    options: dict[str, Any], created: Made, tmp_path: Path
) -> None:
    search("spmm", samples(), max_trials=3, out_dir=tmp_path, **options)
    lines = (tmp_path / TRIALS_FILE).read_text().splitlines(keepends=True)
    (tmp_path / TRIALS_FILE).write_text("".join([lines[0], *lines[2:]]))
    created.quick.clear()
    search("spmm", samples(), max_trials=0, out_dir=tmp_path, **options)
    assert created.quick == [Schedule.parse(json.loads(lines[1])["schedule"])]


def test_session_resume_repeats_torn_trial(options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    first = search("spmm", samples(), max_trials=5, out_dir=tmp_path, **options)
    full = (tmp_path / TRIALS_FILE).read_bytes()
    for cut in (1, 20):
        (tmp_path / TRIALS_FILE).write_bytes(full[:-cut])
        created.quick.clear()
        second = search("spmm", samples(), max_trials=5, out_dir=tmp_path, **options)
        assert second.trials[:-1] == first.trials[:-1]
        assert len(created.attempted) == 1
        assert all("schedule" in row for row in rows_of(tmp_path)[1:])


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"schedule": "0 1", "error": "no"}',
        f'{{"schedule": "{SPMV_LINE}", "error": "no"}}',
    ],
)
def test_session_damaged_log_raises(
    line: str, options: dict[str, Any], created: Made, tmp_path: Path
) -> None:
    search("spmm", samples(), max_trials=1, out_dir=tmp_path, **options)
    lines = (tmp_path / TRIALS_FILE).read_text().splitlines()
    damaged = "\n".join([*lines[:2], line, *lines[2:]]) + "\n"
    (tmp_path / TRIALS_FILE).write_text(damaged)
    for _ in range(2):  # the log is unchanged and not locked
        with pytest.raises(FileFormatError, match=f"{TRIALS_FILE}.* remove the line"):
            search("spmm", samples(), max_trials=1, out_dir=tmp_path, **options)
        assert (tmp_path / TRIALS_FILE).read_text() == damaged


@pytest.mark.parametrize(
    "other",
    [
        {"operator": "sddmm"},
        {"n_cols": 9},
        {"dtype": np.float64},
        {"matrix": samples(seed=1)},
        {"matrix": samples(19, 24)},
    ],
    ids=["operator", "columns", "type", "pattern", "shape"],
)
def test_session_other_problem_raises(
    other: dict[str, Any], options: dict[str, Any], created: Made, tmp_path: Path
) -> None:
    search("spmm", samples(), max_trials=0, out_dir=tmp_path, **options)
    before = (tmp_path / TRIALS_FILE).read_bytes()
    arguments = {"operator": "spmm", "matrix": samples(), "max_trials": 0, **options, **other}
    with pytest.raises(InputError):
        search(out_dir=tmp_path, **arguments)
    assert (tmp_path / TRIALS_FILE).read_bytes() == before


def test_session_other_values_resume(options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    search("spmm", samples(), max_trials=1, out_dir=tmp_path, **options)
    created.quick.clear()
    tuned = search("spmm", 2.0 * samples(), max_trials=1, out_dir=tmp_path, **options)
    assert created.quick == []
    check(tuned)


def test_session_locked_dir_raises(
    options: dict[str, Any], created: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_LOCK_TIMEOUT_S", 0.0)

    def intrude(*_: object) -> None:
        with pytest.raises(RunError):
            search("spmm", samples(), max_trials=0, out_dir=tmp_path, **options)

    search("spmm", samples(), max_trials=0, out_dir=tmp_path, progress=intrude, **options)
    search("spmm", samples(), max_trials=0, out_dir=tmp_path, **options)


def test_session_interrupted_resumes(options: dict[str, Any], created: Made, tmp_path: Path) -> None:
    def stop(_: str, fraction: float) -> None:
        if fraction > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search("spmm", samples(), max_trials=7, out_dir=tmp_path, progress=stop, **options)
    written = rows_of(tmp_path)
    created.quick.clear()
    tuned = search("spmm", samples(), max_trials=7, out_dir=tmp_path, **options)
    assert rows_of(tmp_path)[: len(written)] == written
    assert len(created.attempted) == len(tuned.trials) - (len(written) - 1) > 0


_KILLED = """
import sys
from collections.abc import Sequence
from pathlib import Path
import numpy as np
from sparseflow.tuning import TuningSession

folder, cache, *numbers = sys.argv[1:]
generator = np.random.default_rng(0)
matrix = generator.standard_normal((19, 23)) * (generator.random((19, 23)) < 0.3)
TuningSession(
    "spmm", matrix, n_cols=8, threads=1, dtype=np.float32, cache_dir=Path(cache), out_dir=folder,
    budget_s=float("inf"), progress=lambda *message: print(message, flush=True),
).run()
"""


def test_session_killed_resumes(options: dict[str, Any], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(options["cache_dir"])],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            messages = [process.stdout.readline() for _ in range(5)]
        finally:
            process.send_signal(signal.SIGKILL)
    assert all(messages), "the process ended early"
    before = (tmp_path / TRIALS_FILE).read_bytes()
    full = before[: before.rfind(b"\n") + 1]
    written = [json.loads(line) for line in full.splitlines()][1:]
    assert len(written) >= len(messages)
    more = len(written) - len(hand_written()) + 1
    tuned = search("spmm", samples(), max_trials=more, out_dir=tmp_path, **options)
    assert [trial.to_dict() for trial in tuned.trials[: len(written)]] == written
    assert len(tuned.trials) == len(written) + 1
    assert (tmp_path / TRIALS_FILE).read_bytes().startswith(full)
    check(tuned)


# Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_session_without_compiler_warns(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if name == "spmv":
        del options["n_cols"]
    with pytest.warns(RuntimeWarning):
        tuned = search(name, samples(), out_dir=tmp_path / "folder", **options)
    assert isinstance(tuned.kernel, LibraryKernel)
    assert tuned.kernel.speedup is None and tuned.trials == ()
    inputs = tuned.kernel.problem.generate_inputs()
    expected = tuned.kernel.problem.compute_reference(inputs)
    assert np.abs(tuned.kernel.compute(*inputs) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_session_missing_cc_warns(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(RuntimeWarning):
        kernel = tune("spmm", samples(), **options)
    assert isinstance(kernel, LibraryKernel)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"operator": "spgemm"}, "'spgemm'"),
        ({"operator": "spmv"}, ""),
        ({"n_cols": None}, "`n_cols`"),
        ({"n_cols": 0}, "`n_cols`"),
        ({"budget_s": -1.0}, "`budget_s`"),
        ({"max_trials": -1}, "`max_trials`"),
        ({"threads": 0}, "`threads`"),
        ({"threads": -2}, "`threads`"),
        ({"method": "guess"}, "'guess'"),
        ({"dtype": np.float16}, "float32"),
        ({"matrix": np.zeros((0, 4))}, ""),
        ({"matrix": np.full((2, 2), np.nan)}, ""),
        ({"matrix": np.ones(3)}, ""),
        ({"matrix": "A"}, ""),
    ],
    ids=str,
)
def test_session_invalid_arguments_raise(
    changed: dict[str, Any], message: str, options: dict[str, Any], created: Made, tmp_path: Path
) -> None:
    arguments = {"operator": "spmm", "matrix": samples(), **options, **changed}
    for function in (search, tune):
        with pytest.raises(InputError, match=message or None):
            function(out_dir=tmp_path / "folder", **arguments)
    assert not created.quick and not (tmp_path / "folder").exists()


def test_tune_unknown_argument_raises(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        tune("spmm", samples(), **{"bugdet_s": 3}, **options)


def test_session_invalid_arguments_raise_without_compiler(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(InputError):
        tune("spmm", samples(), method="guess", **options)


def test_load_other_cpu_raises(
    options: dict[str, Any], created: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune("spmm", samples(), max_trials=0, **options).save(tmp_path / "kernel")
    monkeypatch.setattr("sparseflow.tuning.codegen.kernel.describe_cpu", lambda: "another")
    with pytest.raises(DeviceError):
        load(tmp_path / "kernel", cache_dir=options["cache_dir"])


def test_fastest_preset_is_measured_with_balanced_ranges(options: dict[str, Any]) -> None:
    matrix = samples(600, 600)  # large enough for two threads
    tuned = search("spmm", matrix, max_trials=1, **{**options, "threads": 2, "n_cols": 32})
    *presets, last = [trial.schedule for trial in tuned.trials]
    assert last in [replace(preset, chunk=BALANCED) for preset in presets]
