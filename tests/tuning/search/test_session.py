"""Tuning from beginning to end: what is measured, what is written down, what comes out."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from sparseflow.core import journal
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning import explore, tune
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel, load
from sparseflow.tuning.measure.evaluator import Evaluator, Trial
from sparseflow.tuning.measure.trial_log import FILE
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import presets
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search import guided, rerank
from sparseflow.tuning.search.registry import STRATEGIES
from sparseflow.tuning.search.rerank import LIBRARY
from sparseflow.tuning.search.session import Tuned

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}


def drawn(rows: int = 19, cols: int = 23, density: float = 0.3, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < density)


def hand_written(name: str = "spmm", threads: int = 1) -> dict[str, Schedule]:
    """Of `drawn()` with 8 columns, as they are logged."""
    operator = OPERATORS[name]
    extents = dict(zip(operator.axes, (19, 23, 8), strict=False))
    known = presets(operator, extents, threads)
    return {name: schedule.canonical(operator, extents) for name, schedule in known.items()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(cache: Path) -> dict[str, Any]:
    return {"n_cols": 8, "threads": 1, "dtype": np.float32, "cache": cache, "budget_s": 3600.0}


REFERENCE_MS = 1e-6
"""Made up, and too quick for scipy to win."""


class Made:
    """Measurements that are made up: quick, and the same again."""

    def __init__(self) -> None:
        self.quick: list[Schedule] = []
        self.thorough: list[Schedule] = []
        self.ratio: dict[Schedule, float] = {}
        self.lucky: dict[Schedule, float] = {}  # so many times, beside a reference that is slowed down
        self.luck = 1
        self.alone = 1.0
        self.library = 100.0
        self.fails: set[Schedule] = set()
        self.fails_later: set[Schedule] = set()

    def __call__(self, schedule: Schedule, *, thorough: bool = False) -> Trial:
        (self.thorough if thorough else self.quick).append(schedule)
        if schedule in self.fails or (thorough and schedule in self.fails_later):
            return Trial(schedule=schedule, error="made to fail", seconds={"build": 1e-9})
        ratio = self.ratio.get(schedule, 1.0 + sum(map(ord, str(schedule))) % 61 / 10)
        latency_ms = REFERENCE_MS * ratio
        if not thorough and self.quick.count(schedule) <= self.luck:
            ratio = self.lucky.get(schedule, ratio)
        return Trial(schedule=schedule, latency_ms=latency_ms, ratio=ratio, seconds={"build": 2e-9})

    @property
    def tried(self) -> list[Schedule]:
        """The schedules that were measured, however often."""
        return list(dict.fromkeys(self.quick))


@pytest.fixture(autouse=True)
def few_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guided searches rank fewer schedules; how good what they find is, their own tests ask."""
    defaults = guided.Guided.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "proposals", 32)
    monkeypatch.setattr(guided, "_PARENTS", 8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    monkeypatch.setattr(Evaluator, "measure", lambda self, *args, **kwargs: found(*args, **kwargs))

    def call_times(kernels: Sequence[Kernel], inputs: tuple[np.ndarray, ...]) -> list[float]:
        return [1.0, *([found.alone] if len(kernels) > 2 else []), found.library]

    monkeypatch.setattr(rerank, "call_times", call_times)
    return found


def check(tuned: Tuned) -> None:
    """The kernel is right, and by its own record as fast as what it was compared to."""
    kernel = tuned.kernel
    inputs = kernel.problem.draw(3)
    wanted = kernel.problem.reference(inputs)
    limit = TOLERANCE[kernel.problem.dtype] * np.abs(wanted).max(initial=1e-30)
    assert np.abs(kernel.compute(*inputs) - wanted).max(initial=0.0) <= limit
    assert kernel.speedup is not None and kernel.speedup >= 1.0
    assert tuned.best <= min(tuned.baselines.values())
    assert math.isclose(kernel.speedup, min(tuned.baselines.values()) / tuned.best)
    assert (kernel.schedule is None) == isinstance(kernel, LibraryKernel)


# For real ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_a_few_trials(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if name == "spmv":
        del options["n_cols"]
    tuned = explore(name, drawn(), trials=2, **options)
    check(tuned)
    known = hand_written(name)
    assert set(tuned.baselines) == {*known, LIBRARY}
    assert [trial.schedule for trial in tuned.trials[: len(known)]] == list(known.values())
    assert len(tuned.trials) == len(known) + 2
    assert all(trial.error is None for trial in tuned.trials[: len(known)])
    assert set(tuned.seconds) == {"propose", "build", "compile", "measure", "rest"}
    assert all(seconds >= 0.0 for seconds in tuned.seconds.values())
    tuned.kernel.save(tmp_path / "kernel")
    again = load(tmp_path / "kernel", cache=options["cache"])
    inputs = tuned.kernel.problem.draw()
    assert np.array_equal(again.compute(*inputs), tuned.kernel.compute(*inputs))


@pytest.mark.parametrize(
    ("rows", "cols", "density"), [(1, 50, 0.5), (50, 1, 0.5), (1, 1, 1.0), (9, 8, 0.0)], ids=str
)
def test_matrices_at_the_edge(rows: int, cols: int, density: float, options: dict[str, Any]) -> None:
    for name in OPERATORS:
        check(
            explore(
                name,
                drawn(rows, cols, density),
                trials=0,
                **{**options, "n_cols": None if name == "spmv" else 1},
            )
        )


def test_two_threads_and_float64(options: dict[str, Any]) -> None:
    tuned = explore("spmm", drawn(), trials=1, **{**options, "threads": 2, "dtype": None})
    assert tuned.kernel.problem.dtype == np.float64
    check(tuned)


@pytest.mark.parametrize("kind", ["scipy", "torch", "Coo", "integers"])
def test_matrices_of_any_kind(kind: str, options: dict[str, Any], made: Made) -> None:
    full = np.rint(drawn()).astype(np.int64) if kind == "integers" else drawn()
    given = {
        "scipy": scipy.sparse.csc_array,
        "torch": lambda array: torch.from_numpy(array).to_sparse_coo(),
        "Coo": as_coo,
        "integers": scipy.sparse.coo_matrix,
    }[kind](full)
    kernel = tune("spmm", given, trials=0, **options)
    b = np.ones((23, 8), np.float32)
    assert np.allclose(kernel(b), full @ b, atol=1e-4)


# What is measured -------------------------------------------------------------------------------------------


def test_no_trials(options: dict[str, Any], made: Made) -> None:
    tuned = explore("spmm", drawn(), trials=0, **options)
    known = list(hand_written().values())
    assert made.tried == known == [trial.schedule for trial in tuned.trials]
    assert made.thorough == known
    assert tuned.kernel.schedule in known


@pytest.mark.parametrize("method", STRATEGIES)
def test_nothing_is_measured_twice(method: str, options: dict[str, Any], made: Made) -> None:
    tuned = explore("spmm", drawn(), trials=24, method=method, **options)
    assert len(made.tried) == len(tuned.trials) == len(hand_written()) + 24
    assert len(made.thorough) == len(set(made.thorough)) <= len(hand_written()) + 6


@pytest.mark.parametrize("method", STRATEGIES)
def test_depends_on_the_seed_only(method: str, options: dict[str, Any], made: Made) -> None:
    asked = []
    for seed in (0, 0, 1):
        made.quick.clear()
        explore("spmm", drawn(), trials=10, method=method, seed=seed, **options)
        asked.append(tuple(made.quick))
    assert asked[0] == asked[1] != asked[2]


def test_a_space_is_exhausted(options: dict[str, Any], made: Made) -> None:
    tuned = explore("spmv", np.ones((1, 1)), method="random", **{**options, "n_cols": None})
    assert 3 < len(tuned.trials) < 10_000


def test_time_is_up(options: dict[str, Any], made: Made) -> None:
    tuned = explore("spmm", drawn(), **{**options, "budget_s": 1e-9})
    assert [trial.schedule for trial in tuned.trials] == list(hand_written().values()), "these always are"


def test_the_fastest_wins(options: dict[str, Any], made: Made) -> None:
    found = explore("spmm", drawn(), trials=20, method="random", **options).trials
    known = hand_written()
    winner = found[-3].schedule
    assert winner not in known.values()
    made.ratio = {winner: 0.01, **dict.fromkeys(known.values(), 0.02)}
    tuned = explore("spmm", drawn(), trials=20, method="random", **options)
    assert isinstance(tuned.kernel, CompiledKernel) and tuned.kernel.schedule == winner
    assert tuned.best == 0.01 and tuned.kernel.speedup == 2.0
    check(tuned)


def test_luck_is_not_believed(options: dict[str, Any], made: Made) -> None:
    """Something slowed the reference down beside some schedules: they look better than they are, once."""
    found = explore("spmm", drawn(), trials=20, method="random", **options).trials
    others = [trial.schedule for trial in found if trial.schedule not in hand_written().values()]
    made.ratio = (
        {others[0]: 0.3} | dict.fromkeys(others[1:], 2.0) | dict.fromkeys(hand_written().values(), 1.0)
    )
    made.lucky = dict.fromkeys(others[5:], 0.1)
    made.quick.clear()
    tuned = explore("spmm", drawn(), trials=20, method="random", **options)
    assert tuned.kernel.schedule == others[0] and tuned.best == 0.3
    told = {trial.schedule: trial for trial in tuned.trials}
    assert all(told[each].ratio == 2.0 and told[each].times == 2 for each in others[5:])
    assert all(told[each].times == 1 for each in others[1:5])


def test_what_ran_quickest_is_in_the_end(options: dict[str, Any], made: Made) -> None:
    """Whatever else has better ratios by lasting luck."""
    found = explore("spmm", drawn(), trials=20, method="random", **options).trials
    others = [trial.schedule for trial in found if trial.schedule not in hand_written().values()]
    made.ratio = (
        {others[0]: 0.9} | dict.fromkeys(others[1:], 2.0) | dict.fromkeys(hand_written().values(), 1.0)
    )
    made.lucky, made.luck = dict.fromkeys(others[5:], 0.1), 2
    made.quick.clear()
    made.thorough.clear()
    tuned = explore("spmm", drawn(), trials=20, method="random", **options)
    assert len(made.thorough) == len(hand_written()) + 6
    assert tuned.kernel.schedule == others[0] and tuned.best == 0.9


def test_a_library_may_win(options: dict[str, Any], made: Made) -> None:
    made.ratio = dict.fromkeys(hand_written().values(), 0.5)
    made.library = 2e-3
    tuned = explore("spmm", drawn(), trials=1, **options)
    assert isinstance(tuned.kernel, LibraryKernel) and tuned.kernel.speedup == 1.0
    assert tuned.best == tuned.baselines[LIBRARY] == min(tuned.baselines.values())
    assert math.isclose(tuned.best, 1e-3)
    check(tuned)


def test_one_thread_may_win_where_calls_are_short(options: dict[str, Any], made: Made) -> None:
    """Waking up a second thread takes longer than it saves; only a call from here tells."""
    made.ratio = {
        **dict.fromkeys(hand_written(threads=1).values(), 0.2),
        **dict.fromkeys(hand_written(threads=2).values(), 0.1),
    }
    for alone, threads in ((0.5, 1), (1.5, 2)):
        made.alone = alone
        tuned = explore("spmm", drawn(), trials=0, **{**options, "threads": 2})
        assert tuned.kernel.schedule is not None and tuned.kernel.schedule.threads == threads
        assert tuned.best == 0.1 * min(alone, 1.0)


def test_failures_are_told_and_never_win(options: dict[str, Any], made: Made) -> None:
    asked = [trial.schedule for trial in explore("spmm", drawn(), trials=10, **options).trials]
    known = hand_written()
    made.fails = {known["csr"], *asked[4:]}
    made.ratio = dict.fromkeys(known.values(), 0.5)
    tuned = explore("spmm", drawn(), trials=10, **options)
    assert {trial.schedule for trial in tuned.trials if trial.error} >= {known["csr"]}
    assert tuned.baselines["csr"] == math.inf
    assert tuned.kernel.schedule not in made.fails
    check(tuned)


def test_what_fails_in_the_end_does_not_win(options: dict[str, Any], made: Made) -> None:
    known = hand_written()
    made.ratio = {known["tiled_csr"]: 0.1}
    made.fails_later = {known["tiled_csr"]}
    tuned = explore("spmm", drawn(), trials=0, **options)
    assert tuned.baselines["tiled_csr"] == math.inf
    assert tuned.kernel.schedule != known["tiled_csr"]


def test_parts_of_the_time_are_added_up(options: dict[str, Any], made: Made) -> None:
    tuned = explore("spmm", drawn(), trials=5, **options)
    assert math.isclose(tuned.seconds["build"], 2e-9 * sum(trial.times for trial in tuned.trials))


@pytest.mark.parametrize("trials", [7, None])
def test_progress(trials: int | None, options: dict[str, Any], made: Made) -> None:
    told: list[tuple[str, float]] = []
    limits: dict[str, Any] = {"trials": trials, "budget_s": 600.0 if trials else 0.3}
    tuned = explore("spmm", drawn(), progress=lambda *args: told.append(args), **{**options, **limits})
    *told, last = told
    assert last == ("measuring the best again", 1.0)
    assert len(told) == len(tuned.trials)
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[0] > 0.0 and fractions[-1] <= 1.0
    assert trials is None or fractions[-1] == 1.0
    assert told[0][0].startswith("1 schedules, best ") and told[-1][0].startswith(f"{len(told)} schedules")


# What is written down ---------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_every_trial_is_written(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    made.fails = {hand_written()["csr"]}
    folder = tmp_path / "new" / "folder"
    tuned = explore("spmm", drawn(), trials=5, folder=folder, **options)
    head, *rows = rows_of(folder)
    assert head["operator"] == "spmm" and head["extents"] == {"i": 19, "k": 23, "j": 8}
    assert head["dtype"] == "float32" and head["threads"] >= 1 and len(head["pattern"]) == 64
    assert rows == [trial.to_dict() for trial in tuned.trials]


def test_trials_are_written_as_they_come(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    lines: list[int] = []
    explore(
        "spmm", drawn(), trials=5, folder=str(tmp_path),
        progress=lambda *_: lines.append(len(rows_of(tmp_path))), **options,
    )  # fmt: skip
    assert lines == [*range(2, len(lines) + 1), len(lines)]


@pytest.mark.parametrize("method", STRATEGIES)
def test_it_goes_on(method: str, options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    made.fails = {hand_written()["csr"]}
    first = explore("spmm", drawn(), trials=10, folder=tmp_path, method=method, **options)
    made.quick.clear()
    second = explore("spmm", drawn(), trials=15, folder=tmp_path, method=method, **options)
    assert second.trials[: len(first.trials)] == first.trials
    assert len(made.tried) == 5 and len(second.trials) == len(first.trials) + 5
    made.quick.clear()
    third = explore("spmm", drawn(), trials=15, folder=tmp_path, method=method, **options)
    assert made.quick == [] and third.trials == second.trials
    assert third.kernel.schedule == second.kernel.schedule


def test_baselines_that_are_missing_are_measured(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    explore("spmm", drawn(), trials=3, folder=tmp_path, **options)
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text("".join([lines[0], *lines[2:]]))
    made.quick.clear()
    explore("spmm", drawn(), trials=0, folder=tmp_path, **options)
    assert made.quick == [Schedule.parse(json.loads(lines[1])["schedule"])]


def test_a_torn_last_line_is_measured_again(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    first = explore("spmm", drawn(), trials=5, folder=tmp_path, **options)
    whole = (tmp_path / FILE).read_bytes()
    for cut in (1, 20):
        (tmp_path / FILE).write_bytes(whole[:-cut])
        made.quick.clear()
        second = explore("spmm", drawn(), trials=5, folder=tmp_path, **options)
        assert second.trials[:-1] == first.trials[:-1]
        assert len(made.tried) == 1
        assert all("schedule" in row for row in rows_of(tmp_path)[1:])


def test_a_torn_first_line_is_written_again(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"probl')
    tuned = explore("spmm", drawn(), trials=0, folder=tmp_path, **options)
    assert len(rows_of(tmp_path)) == 1 + len(tuned.trials)


@pytest.mark.parametrize(
    "line",
    [
        '{"sched',
        "{}",
        "[]",
        "null",
        "",
        '{"schedule": "0 1", "latency_ms": 1.0, "ratio": 1.0, "error": null}',
        '{"schedule": "0 1", "latency_ms": null, "ratio": null, "error": "no"}',
    ],
)
def test_a_damaged_line_is_told(line: str, options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    explore("spmm", drawn(), trials=1, folder=tmp_path, **options)
    lines = (tmp_path / FILE).read_text().splitlines()
    damaged = "\n".join([*lines[:2], line, *lines[2:]]) + "\n"
    (tmp_path / FILE).write_text(damaged)
    for _ in range(2):  # neither mended nor made worse, and nobody locked out
        with pytest.raises(FileFormatError, match=f"{FILE}.* remove the line"):
            explore("spmm", drawn(), trials=1, folder=tmp_path, **options)
        assert (tmp_path / FILE).read_text() == damaged


@pytest.mark.parametrize(
    "other",
    [
        {"operator": "sddmm"},
        {"n_cols": 9},
        {"dtype": np.float64},
        {"matrix": drawn(seed=1)},
        {"matrix": drawn(19, 24)},
    ],
    ids=["operator", "columns", "type", "pattern", "shape"],
)
def test_another_problem_is_refused(
    other: dict[str, Any], options: dict[str, Any], made: Made, tmp_path: Path
) -> None:
    explore("spmm", drawn(), trials=0, folder=tmp_path, **options)
    before = (tmp_path / FILE).read_bytes()
    given = {"operator": "spmm", "matrix": drawn(), "trials": 0, **options, **other}
    with pytest.raises(InputError, match=r"holds the trials of something else .* name another folder"):
        explore(folder=tmp_path, **given)
    assert (tmp_path / FILE).read_bytes() == before


def test_other_values_are_the_same_problem(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    explore("spmm", drawn(), trials=1, folder=tmp_path, **options)
    made.quick.clear()
    tuned = explore("spmm", 2.0 * drawn(), trials=1, folder=tmp_path, **options)
    assert made.quick == []
    check(tuned)


def test_a_folder_is_for_one_at_a_time(
    options: dict[str, Any], made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_PATIENCE_S", 0.0)

    def intrude(*_: object) -> None:
        with pytest.raises(RunError, match="written by another process"):
            explore("spmm", drawn(), trials=0, folder=tmp_path, **options)

    explore("spmm", drawn(), trials=0, folder=tmp_path, progress=intrude, **options)
    explore("spmm", drawn(), trials=0, folder=tmp_path, **options)


def test_stopped_in_the_middle(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    def stop(_: str, fraction: float) -> None:
        if fraction > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore("spmm", drawn(), trials=7, folder=tmp_path, progress=stop, **options)
    written = rows_of(tmp_path)
    made.quick.clear()
    tuned = explore("spmm", drawn(), trials=7, folder=tmp_path, **options)
    assert rows_of(tmp_path)[: len(written)] == written
    assert len(made.tried) == len(tuned.trials) - (len(written) - 1) > 0


_KILLED = """
import sys
from collections.abc import Sequence
from pathlib import Path
import numpy as np
from sparseflow.tuning import explore

folder, cache, *numbers = sys.argv[1:]
generator = np.random.default_rng(0)
matrix = generator.standard_normal((19, 23)) * (generator.random((19, 23)) < 0.3)
explore(
    "spmm", matrix, n_cols=8, threads=1, dtype=np.float32, cache=Path(cache), folder=folder,
    budget_s=600.0, progress=lambda *told: print(told, flush=True),
)
"""


def test_killed_in_the_middle(options: dict[str, Any], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(options["cache"])],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            told = [process.stdout.readline() for _ in range(5)]
        finally:
            process.send_signal(signal.SIGKILL)
    assert all(told), "it came so far"
    before = (tmp_path / FILE).read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    written = [json.loads(line) for line in whole.splitlines()][1:]
    assert len(written) >= len(told)
    more = len(written) - len(hand_written()) + 1
    tuned = explore("spmm", drawn(), trials=more, folder=tmp_path, **options)
    assert [trial.to_dict() for trial in tuned.trials[: len(written)]] == written
    assert len(tuned.trials) == len(written) + 1
    assert (tmp_path / FILE).read_bytes().startswith(whole)
    check(tuned)


# What cannot be done ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_no_compiler(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if name == "spmv":
        del options["n_cols"]
    with pytest.warns(RuntimeWarning, match="no C compiler was found .*; scipy computes instead"):
        tuned = explore(name, drawn(), folder=tmp_path / "folder", **options)
    assert isinstance(tuned.kernel, LibraryKernel)
    assert tuned.kernel.speedup is None and tuned.trials == ()
    inputs = tuned.kernel.problem.draw()
    wanted = tuned.kernel.problem.reference(inputs)
    assert np.abs(tuned.kernel.compute(*inputs) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_a_compiler_that_is_named_and_missing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(RuntimeWarning, match="/nowhere/cc"):
        kernel = tune("spmm", drawn(), **options)
    assert isinstance(kernel, LibraryKernel)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"operator": "spgemm"}, "no operator is called 'spgemm'; choose one of: spmm, spmv, sddmm"),
        ({"operator": "spmv"}, "takes a vector"),
        ({"n_cols": None}, "spmm needs `n_cols`"),
        ({"n_cols": 0}, "spmm needs `n_cols`"),
        ({"budget_s": 0}, "`budget_s` .=0. must be above 0"),
        ({"budget_s": -1.0}, "`budget_s` .=-1.0. must be above 0"),
        ({"trials": -1}, "`trials` .=-1. nor .*negative"),
        ({"threads": 0}, "`threads` .=0. must be at least 1"),
        ({"threads": -2}, "`threads` .=-2. must be at least 1"),
        ({"method": "guess"}, "the method 'guess' is not known"),
        ({"dtype": np.float16}, "must be float32 or float64"),
        ({"matrix": np.zeros((0, 4))}, "nothing to compute with"),
        ({"matrix": np.full((2, 2), np.nan)}, "holds nan"),
        ({"matrix": np.ones(3)}, "two axes"),
        ({"matrix": "A"}, "a matrix of scipy.sparse"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(
    changed: dict[str, Any], message: str, options: dict[str, Any], made: Made, tmp_path: Path
) -> None:
    given = {"operator": "spmm", "matrix": drawn(), **options, **changed}
    for function in (explore, tune):
        with pytest.raises(InputError, match=message):
            function(folder=tmp_path / "folder", **given)
    assert not made.quick and not (tmp_path / "folder").exists()


def test_arguments_that_are_unknown(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="bugdet_s"):
        tune("spmm", drawn(), bugdet_s=3, **options)


def test_no_compiler_does_not_excuse_bad_arguments(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(InputError, match="not known"):
        tune("spmm", drawn(), method="guess", **options)


def test_a_kernel_for_another_machine_is_refused(
    options: dict[str, Any], made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune("spmm", drawn(), trials=0, **options).save(tmp_path / "kernel")
    monkeypatch.setattr("sparseflow.tuning.codegen.kernel.describe_cpu", lambda: "another")
    with pytest.raises(DeviceError, match="any_cpu=True"):
        load(tmp_path / "kernel", cache=options["cache"])
