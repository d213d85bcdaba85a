"""Measurement of schedules: results and errors of trials."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning import TuneResult, TuningSession
from sparseflow.tuning.codegen import program
from sparseflow.tuning.codegen.c_source import SYMBOL
from sparseflow.tuning.measure.evaluator import BATCH_SIZE, ScheduleEvaluator, Trial
from sparseflow.tuning.measure.runner import KernelTiming, MeasurementSession
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

CSR = Schedule.parse("0 1 A 2 i k A 2 i 0 k 1 0 3 i k j None j None 0 1 1")
CHUNKED = Schedule.parse("0 1 A 2 i k A 2 i 0 k 1 0 3 i k j None j None 0 1 2")
DENSE = Schedule.parse("0 1 A 2 i k A 2 i 0 k 0 0 3 i k j None j None 0 1 1")
SPMV = Schedule.parse("0 1 A 2 i j A 2 i 0 j 1 0 2 i j None None None 0 1 1")


def problem_of(name: str = "spmm", density: float = 0.3, dtype: type = np.float32) -> SparseProblem:
    generator = np.random.default_rng(0)
    full = generator.standard_normal((19, 23)) * (generator.random((19, 23)) < density)
    operator = OPERATORS[name]
    return SparseProblem(
        operator=operator,
        matrix=as_coo(full, dtype=dtype),
        n_cols=10 if operator.dense_axes else None,
    )


@pytest.fixture
def evaluator(cache: Path) -> Iterator[ScheduleEvaluator]:
    with ScheduleEvaluator(problem_of(), CSR, cache_dir=cache) as opened:
        yield opened


Body = Callable[[str], None]


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch) -> Body:
    """Return a function that replaces the body of all further kernels."""

    def give(statements: str) -> None:
        source = (
            "#include <stdlib.h>\n"
            f"void {SYMBOL}(const void *const *in, void *const *out) {{ {statements} }}\n"
        )
        monkeypatch.setattr(program, "generate_source", lambda *args, **kwargs: source)

    return give


def failed(trial: Trial) -> str:
    assert trial.latency_ms == trial.ratio == math.inf
    assert trial.to_dict()["latency_ms"] is None and trial.to_dict()["ratio"] is None
    assert trial.error
    return trial.error


@pytest.mark.parametrize("density", [0.3, 0.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATORS)
def test_measure_presets_succeed(name: str, dtype: type, density: float, cache: Path) -> None:
    problem = problem_of(name, density, dtype)
    known = build_presets(problem.operator, problem.extents, 1)
    with ScheduleEvaluator(problem, known["csr"], cache_dir=cache) as opened:
        for schedule in known.values():
            trial = opened.measure(schedule)
            assert trial.error is None and trial.schedule == schedule
            assert 0.0 < trial.latency_ms < math.inf and 0.0 < trial.ratio < math.inf
            assert set(trial.seconds) == {"build", "compile", "measure"}
            assert all(part >= 0.0 for part in trial.seconds.values())


def test_trial_to_dict_round_trip(evaluator: ScheduleEvaluator) -> None:
    trial = evaluator.measure(CSR, thorough=True)
    row = json.loads(json.dumps(trial.to_dict(), allow_nan=False))
    assert Trial(**{**row, "schedule": Schedule.parse(row["schedule"])}) == trial


def test_trial_failure_to_dict_round_trip() -> None:
    row = json.loads(json.dumps(Trial(schedule=CSR, error="it broke").to_dict(), allow_nan=False))
    assert row["error"] == "it broke" and row["latency_ms"] is None and row["ratio"] is None


def test_measure_outside_with_block_raises(cache: Path) -> None:
    item = ScheduleEvaluator(problem_of(), CSR, cache_dir=cache)
    with pytest.raises(InputError, match="`with`"):
        item.measure(CSR)
    with item:
        assert item.measure(CSR).error is None
    with pytest.raises(InputError, match="`with`"):
        item.measure(CSR)


def test_measure_invalid_schedule_fails(evaluator: ScheduleEvaluator) -> None:
    assert "cannot run as spmm" in failed(evaluator.measure(SPMV))


def test_measure_storage_limit_fails(
    evaluator: ScheduleEvaluator, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluator.measure(DENSE).error is None, "small matrices may be dense"
    monkeypatch.setattr("sparseflow.tuning.codegen.program._MAX_STORAGE_RATIO", 0)
    monkeypatch.setattr("sparseflow.tuning.codegen.program._MIN_STORAGE_BYTES", 19 * 23 * 4 - 1)
    with ScheduleEvaluator(problem_of(), CSR, cache_dir=cache) as opened:
        assert opened.measure(CSR).error is None
        trial = opened.measure(DENSE)
    assert "MiB" in failed(trial)
    assert "compile" not in trial.seconds


def test_measure_wrong_result_fails(evaluator: ScheduleEvaluator, body: Body) -> None:
    body("float *c = out[0]; for (int i = 0; i < 190; i++) c[i] = 1.0f;")
    assert "the result differs from the library's by" in failed(evaluator.measure(CHUNKED))


def test_measure_slightly_wrong_result_fails(evaluator: ScheduleEvaluator, body: Body) -> None:
    expected = problem_of().compute_reference(evaluator.inputs)
    values = ", ".join(f"{value:.9e}f" for value in expected.ravel())
    copy = f"static const float c[] = {{{values}}};"
    largest = float(np.abs(expected).max())
    for off, right in ((3e-4, False), (3e-5, True)):
        body(f"{copy} float *o = out[0]; for (int i = 0; i < 190; i++) o[i] = c[i]; o[7] += {off * largest};")
        trial = evaluator.measure(CHUNKED)
        assert (trial.error is None) == right, trial.error


def test_measure_unwritten_result_fails(evaluator: ScheduleEvaluator, body: Body) -> None:
    body("float *c = out[0]; for (int i = 0; i < 189; i++) c[i] = 0.0f;")
    assert "differs from the library's by nan" in failed(evaluator.measure(CHUNKED))


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("*(volatile int *)16 = 1;", "SIGSEGV"),
        ("abort();", "SIGABRT"),
        ("((float *)in[0])[0] = 1.0f;", "SIGSEGV"),
        ("exit(3);", "status 3"),
        ("this is no C", "failed with exit status"),
    ],
)
def test_measure_crash_fails_and_continues(
    statements: str, message: str, evaluator: ScheduleEvaluator, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    body(statements)
    assert message in failed(evaluator.measure(CHUNKED))
    monkeypatch.undo()
    assert evaluator.measure(CHUNKED).error is None


def test_enter_uncompilable_reference_raises(cache: Path, body: Body) -> None:
    body("this is no C")
    with (
        pytest.raises(RunError),
        ScheduleEvaluator(problem_of(), CSR, cache_dir=cache),
    ):
        pass


def test_enter_invalid_reference_raises(cache: Path) -> None:
    with (
        pytest.raises(InputError),
        ScheduleEvaluator(problem_of(), SPMV, cache_dir=cache),
    ):
        pass


def test_enter_without_compiler_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with (
        pytest.raises(DeviceError),
        ScheduleEvaluator(problem_of(), CSR, cache_dir=tmp_path),
    ):
        pass


def test_inputs_depend_on_seed(cache: Path) -> None:
    samples = [
        ScheduleEvaluator(problem_of(), CSR, seed=seed, cache_dir=cache).inputs[0] for seed in (0, 0, 1)
    ]
    assert np.array_equal(samples[0], samples[1]) and not np.array_equal(samples[0], samples[2])


def test_exit_propagates_error(cache: Path) -> None:
    with pytest.raises(KeyError), ScheduleEvaluator(problem_of(), CSR, cache_dir=cache):
        raise KeyError("mine")


def test_measure_disturbed_compares_fastest_samples(
    evaluator: ScheduleEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is slow in most samples, so the median ratio would be too good."""
    expected = problem_of().compute_reference(evaluator.inputs).astype(np.float32)
    timings = [
        KernelTiming(
            latency_ms=candidate, reference_ms=reference, output=expected, contended=True, drifted=False,
            error=None,
        )
        for candidate, reference in (((2.0, 2.0, 9.0), (9.0, 9.0, 4.0)), ((3.0, 4.0), (1.0, 8.0)))
    ]  # fmt: skip
    monkeypatch.setattr(MeasurementSession, "measure", lambda self, job, **options: timings.pop(0))
    trial = evaluator.measure(CSR)
    assert trial.disturbed and trial.ratio == 0.5
    confirmed = evaluator.confirm(trial)
    assert confirmed.ratio == 2.0 and confirmed.times == 2, "the fastest samples of both count"


class FakeCluster:
    """Replacement of a cluster that runs the last batch first."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.options: dict[str, Any] = {}

    def __call__(
        self, function: Callable[[Any], Any], items: Sequence[Any], **options: Any
    ) -> Iterator[tuple[int, Any]]:
        self.options = options
        for position in reversed(range(len(items))):
            sent = pickle.loads(pickle.dumps((function, items[position])))
            self.batch_sizes.append(len(sent[1].schedules))
            yield position, pickle.loads(pickle.dumps(sent[0](sent[1])))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    result = FakeCluster()
    monkeypatch.setattr("sparseflow.tuning.measure.evaluator.map_unordered", result)
    return result


def tune_on_cluster(**options: Any) -> TuneResult:
    matrix = np.eye(9, dtype=np.float32)
    return TuningSession(
        "spmv", matrix, threads=1, method="random", cluster="10.0.0.1:6379", budget_s=math.inf, **options
    ).run()


def test_cluster_measures_proposals(cluster: FakeCluster) -> None:
    tuned = tune_on_cluster(max_trials=BATCH_SIZE + 3, num_machines=2)
    assert cluster.batch_sizes == [3, BATCH_SIZE], "there is a batch for each machine"
    assert cluster.options == {"cluster": "10.0.0.1:6379", "cpus_per_task": 1.0}
    proposals = [trial.schedule for trial in tuned.trials]
    assert len(proposals) == len(set(proposals)) == len(tuned.baselines) - 1 + BATCH_SIZE + 3
    assert all(trial.error is None for trial in tuned.trials)


def test_cluster_other_processor_raises(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = iter(["ours", "another"])
    monkeypatch.setattr("sparseflow.tuning.measure.evaluator.describe_cpu", lambda: next(messages))
    with pytest.raises(DeviceError):
        tune_on_cluster(max_trials=2, num_machines=1)
