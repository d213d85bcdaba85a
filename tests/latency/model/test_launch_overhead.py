"""Host time of kernels: measured, learned and default."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("xgboost")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.launch_overhead import MIN_MS, LaunchOverheadModel
from tests.latency.records import from_record, to_record
from tests.latency.synthetic import make_kernel, make_matmul

PRODUCT_MS, SUM_MS, VIEW_MS = 0.02, 0.005, 0.003


def make_sum(rows: int, columns: int) -> KernelSpec:
    return make_kernel("Add", [(rows, columns)] * 2, (rows, columns))


def make_view(rows: int, columns: int) -> KernelSpec:
    return make_kernel("Reshape", [(rows, columns), (1,)], (rows * columns,))


SIZES = [(4 * n, 8 * m) for n in range(1, 6) for m in range(1, 4)]
PRODUCTS = [make_matmul(rows, columns, 16) for rows, columns in SIZES]
SUMS = [make_sum(*size) for size in SIZES]
VIEWS = [make_view(*size) for size in SIZES[:4]]
TAKEN = {
    kernel.id: ms * (1.0 + 0.001 * position)
    for kernels, ms in ((PRODUCTS, PRODUCT_MS), (SUMS, SUM_MS), (VIEWS, VIEW_MS))
    for position, kernel in enumerate(kernels)
}
SEEN = [*PRODUCTS, *SUMS, *VIEWS]
UNSEEN = [make_matmul(7, 9, 16), make_sum(6, 11), make_view(6, 11)]
UNKNOWN = [make_kernel("Erf", [(4, 4)], (4, 4)), make_kernel("Softmax", [(64, 512)], (64, 512))]


@pytest.fixture(scope="module")
def issue() -> LaunchOverheadModel:
    return LaunchOverheadModel.fit(SEEN, [TAKEN[kernel.id] for kernel in SEEN])


def test_predict_measured_kernels(issue: LaunchOverheadModel) -> None:
    assert issue.predict(SEEN) == TAKEN
    assert issue.measured_ms == TAKEN
    assert issue.predict([]) == {}
    # Duplicates in the request give one entry.
    assert issue.predict([SEEN[0], SEEN[0]]) == {SEEN[0].id: TAKEN[SEEN[0].id]}


def test_predict_kernels_of_known_operator(issue: LaunchOverheadModel) -> None:
    overheads_ms = issue.predict(UNSEEN)
    assert list(overheads_ms) == [kernel.id for kernel in UNSEEN]
    for kernel, ms in zip(UNSEEN, (PRODUCT_MS, SUM_MS, VIEW_MS), strict=True):
        assert overheads_ms[kernel.id] == pytest.approx(ms, rel=0.05)


def test_predict_unknown_operator_is_default(issue: LaunchOverheadModel) -> None:
    overheads_ms = issue.predict(UNKNOWN)
    assert overheads_ms == {kernel.id: issue.default_ms for kernel in UNKNOWN}
    # The median over operators, independent of their number of kernels.
    assert issue.default_ms == statistics.median(TAKEN[kernel.id] for kernel in SUMS)


def test_predict_independent_of_batch(issue: LaunchOverheadModel) -> None:
    mixed = [UNKNOWN[0], SEEN[3], UNSEEN[1], UNSEEN[0], SEEN[-1], UNKNOWN[1]]
    combined = issue.predict(mixed)
    assert combined == {kernel.id: issue.predict([kernel])[kernel.id] for kernel in mixed}


def test_predict_unseen_size() -> None:
    # Host time grows with the number of inputs.
    sizes = [(rows, 8 * depth) for rows in range(1, 25) for depth in range(1, 9)]
    kernels = [make_matmul(rows, depth, 8) for rows, depth in sizes]

    def rule(kernel: KernelSpec) -> float:
        return 0.002 + 1e-6 * kernel.bytes_moved

    trained, held_out = kernels[::2], kernels[1::2]
    overheads_ms = LaunchOverheadModel.fit(trained, [rule(kernel) for kernel in trained]).predict(held_out)
    errors = [abs(overheads_ms[kernel.id] / rule(kernel) - 1.0) for kernel in held_out]
    assert statistics.fmean(errors) < 0.05


@settings(max_examples=15)
@given(
    times=st.lists(st.floats(-0.1, 10.0), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_predict_within_measured_range(times: list[float], seed: int) -> None:
    fitted = LaunchOverheadModel.fit(SEEN[:4], times, seed=seed)
    overheads_ms = fitted.predict([*SEEN, *UNSEEN, *UNKNOWN])
    assert overheads_ms.keys() == {kernel.id for kernel in (*SEEN, *UNSEEN, *UNKNOWN)}
    max_ms = max(*times, MIN_MS)
    assert all(MIN_MS * 0.999 <= ms <= max_ms * 1.001 for ms in overheads_ms.values())
    assert [overheads_ms[kernel.id] for kernel in SEEN[:4]] == [max(ms, MIN_MS) for ms in times]


def test_fit_deterministic() -> None:
    arguments = (SEEN, [TAKEN[kernel.id] for kernel in SEEN])
    model, same = (LaunchOverheadModel.fit(*arguments, seed=3) for _ in range(2))
    assert to_record(model) == to_record(same)


@pytest.mark.parametrize(
    ("kernels", "times", "value"),
    [
        ([], [], "0 .* 0 "),
        (SEEN[:2], [0.1], "2 .* 1 "),
        ([], [0.1], "0 .* 1 "),
    ],
)
def test_fit_without_data_raises(kernels: list[KernelSpec], times: list[float], value: str) -> None:
    with pytest.raises(InputError, match=value):
        LaunchOverheadModel.fit(kernels, times)


def test_fit_single_kernel() -> None:
    model = LaunchOverheadModel.fit([SEEN[0]], [0.25])
    assert model.default_ms == 0.25 and model.predict([UNKNOWN[0]]) == {UNKNOWN[0].id: 0.25}
    assert model.predict([UNSEEN[0]])[UNSEEN[0].id] == pytest.approx(0.25)


def test_launch_overhead_round_trip(issue: LaunchOverheadModel) -> None:
    record = to_record(issue)
    back = from_record(LaunchOverheadModel, record)
    assert back.predict([*SEEN, *UNSEEN, *UNKNOWN]) == issue.predict([*SEEN, *UNSEEN, *UNKNOWN])
    assert to_record(back) == to_record(issue)
    assert (back.measured_ms, back.default_ms) == (issue.measured_ms, issue.default_ms)


@pytest.mark.parametrize("name", ["measured_ms", "regressor", "default_ms"])
@pytest.mark.parametrize("wrong", [None, "text", [], [1.0], math.nan, -1.0, 0.0, math.inf])
def test_launch_overhead_invalid_value_raises(issue: LaunchOverheadModel, name: str, wrong: Any) -> None:
    with pytest.raises(ValueError):
        from_record(LaunchOverheadModel, to_record(issue) | {name: wrong})


@pytest.mark.parametrize("name", ["measured_ms", "regressor", "default_ms"])
def test_launch_overhead_incomplete_record_raises(issue: LaunchOverheadModel, name: str) -> None:
    full_record = to_record(issue)
    with pytest.raises(ValueError):
        from_record(LaunchOverheadModel, {key: value for key, value in full_record.items() if key != name})
    for part in full_record["regressor"]:
        less = {key: value for key, value in full_record["regressor"].items() if key != part}
        with pytest.raises(ValueError):
            from_record(LaunchOverheadModel, full_record | {"regressor": less})


@pytest.mark.parametrize("wrong", [0.0, -0.1, math.nan, math.inf, None, "long", [0.1]])
def test_launch_overhead_invalid_time_raises(issue: LaunchOverheadModel, wrong: Any) -> None:
    known = {**issue.measured_ms, SEEN[0].id: wrong}
    with pytest.raises(ValueError):
        from_record(LaunchOverheadModel, to_record(issue) | {"measured_ms": known})


@pytest.mark.parametrize("record", [None, [], "text", {}, 3.0])
def test_launch_overhead_foreign_record_raises(record: Any) -> None:
    with pytest.raises(ValueError):
        from_record(LaunchOverheadModel, record)
