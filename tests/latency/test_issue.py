"""What the host takes for a kernel: as measured, learned, or what is usual."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("xgboost")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.issue import LEAST_MS, Issue
from sparseflow.latency.kernels import Kernel
from tests.latency.synthetic import make_kernel, make_matmul

PRODUCT_MS, SUM_MS, VIEW_MS = 0.02, 0.005, 0.003


def make_sum(rows: int, columns: int) -> Kernel:
    return make_kernel("Add", [(rows, columns)] * 2, (rows, columns))


def make_view(rows: int, columns: int) -> Kernel:
    return make_kernel("Reshape", [(rows, columns), (1,)], (rows * columns,))


SIZES = [(4 * n, 8 * m) for n in range(1, 6) for m in range(1, 4)]
PRODUCTS = [make_matmul(rows, columns, 16) for rows, columns in SIZES]
SUMS = [make_sum(*size) for size in SIZES]
VIEWS = [make_view(*size) for size in SIZES[:4]]
TAKEN = {
    kernel.id: ms * (1.0 + 0.001 * place)
    for kernels, ms in ((PRODUCTS, PRODUCT_MS), (SUMS, SUM_MS), (VIEWS, VIEW_MS))
    for place, kernel in enumerate(kernels)
}
SEEN = [*PRODUCTS, *SUMS, *VIEWS]
UNSEEN = [make_matmul(7, 9, 16), make_sum(6, 11), make_view(6, 11)]
UNKNOWN = [make_kernel("Erf", [(4, 4)], (4, 4)), make_kernel("Softmax", [(64, 512)], (64, 512))]


@pytest.fixture(scope="module")
def issue() -> Issue:
    return Issue.fit(SEEN, [TAKEN[kernel.id] for kernel in SEEN])


def test_kernels_that_were_measured_take_what_they_took(issue: Issue) -> None:
    assert issue.ms(SEEN) == TAKEN
    assert issue.known_ms == TAKEN
    assert issue.ms([]) == {}
    # Asked for twice, told once.
    assert issue.ms([SEEN[0], SEEN[0]]) == {SEEN[0].id: TAKEN[SEEN[0].id]}


def test_other_kernels_of_an_operator_take_what_it_does_views_too(issue: Issue) -> None:
    found = issue.ms(UNSEEN)
    assert list(found) == [kernel.id for kernel in UNSEEN]
    for kernel, ms in zip(UNSEEN, (PRODUCT_MS, SUM_MS, VIEW_MS), strict=True):
        assert found[kernel.id] == pytest.approx(ms, rel=0.05)


def test_operators_that_were_not_measured_take_what_is_usual(issue: Issue) -> None:
    found = issue.ms(UNKNOWN)
    assert found == {kernel.id: issue.usual_ms for kernel in UNKNOWN}
    # The middle operator, however many kernels the others have.
    assert issue.usual_ms == statistics.median(TAKEN[kernel.id] for kernel in SUMS)


def test_kernels_of_all_kinds_are_told_together_as_each_by_itself(issue: Issue) -> None:
    mixed = [UNKNOWN[0], SEEN[3], UNSEEN[1], UNSEEN[0], SEEN[-1], UNKNOWN[1]]
    together = issue.ms(mixed)
    assert together == {kernel.id: issue.ms([kernel])[kernel.id] for kernel in mixed}


def test_a_kernel_of_another_size_is_learned_from_sizes() -> None:
    # The host takes longer for what has more to read.
    sizes = [(rows, 8 * depth) for rows in range(1, 25) for depth in range(1, 9)]
    kernels = [make_matmul(rows, depth, 8) for rows, depth in sizes]

    def rule(kernel: Kernel) -> float:
        return 0.002 + 1e-6 * kernel.bytes_moved

    seen, held = kernels[::2], kernels[1::2]
    found = Issue.fit(seen, [rule(kernel) for kernel in seen]).ms(held)
    errors = [abs(found[kernel.id] / rule(kernel) - 1.0) for kernel in held]
    assert statistics.fmean(errors) < 0.05


@settings(deadline=None, max_examples=15)
@given(
    times=st.lists(st.floats(-0.1, 10.0), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_no_call_takes_nothing_or_more_than_was_ever_seen(times: list[float], seed: int) -> None:
    fitted = Issue.fit(SEEN[:4], times, seed=seed)
    found = fitted.ms([*SEEN, *UNSEEN, *UNKNOWN])
    assert found.keys() == {kernel.id for kernel in (*SEEN, *UNSEEN, *UNKNOWN)}
    most = max(*times, LEAST_MS)
    assert all(LEAST_MS * 0.999 <= ms <= most * 1.001 for ms in found.values())
    assert [found[kernel.id] for kernel in SEEN[:4]] == [max(ms, LEAST_MS) for ms in times]


def test_the_same_kernels_and_seed_make_the_same() -> None:
    given = (SEEN, [TAKEN[kernel.id] for kernel in SEEN])
    one, same = (Issue.fit(*given, seed=3) for _ in range(2))
    assert one.to_dict() == same.to_dict()


@pytest.mark.parametrize(
    ("kernels", "times", "says"),
    [
        ([], [], "0 kernels and 0 times of the host: both are needed"),
        (SEEN[:2], [0.1], "2 kernels and 1 times of the host"),
        ([], [0.1], "0 kernels and 1 times of the host"),
    ],
)
def test_nothing_to_learn_from_is_refused(kernels: list[Kernel], times: list[float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Issue.fit(kernels, times)


def test_one_kernel_is_enough() -> None:
    one = Issue.fit([SEEN[0]], [0.25])
    assert one.usual_ms == 0.25 and one.ms([UNKNOWN[0]]) == {UNKNOWN[0].id: 0.25}
    assert one.ms([UNSEEN[0]])[UNSEEN[0].id] == pytest.approx(0.25)


def test_a_record_is_read_back_and_tells_the_same(issue: Issue) -> None:
    record = json.loads(json.dumps(issue.to_dict(), allow_nan=False))
    back = Issue.from_dict(record)
    assert back.ms([*SEEN, *UNSEEN, *UNKNOWN]) == issue.ms([*SEEN, *UNSEEN, *UNKNOWN])
    assert back.to_dict() == issue.to_dict()
    assert (back.known_ms, back.usual_ms) == (issue.known_ms, issue.usual_ms)


@pytest.mark.parametrize("name", ["known_ms", "model", "usual_ms"])
@pytest.mark.parametrize("wrong", [None, "text", [], [1.0], math.nan, -1.0, 0.0, math.inf])
def test_a_record_with_a_wrong_value_is_refused(issue: Issue, name: str, wrong: Any) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        Issue.from_dict(issue.to_dict() | {name: wrong})


@pytest.mark.parametrize("name", ["known_ms", "model", "usual_ms"])
def test_a_record_that_lacks_a_part_is_refused(issue: Issue, name: str) -> None:
    whole = issue.to_dict()
    with pytest.raises(FileFormatError, match="cannot be read"):
        Issue.from_dict({key: value for key, value in whole.items() if key != name})
    for part in whole["model"]:
        less = {key: value for key, value in whole["model"].items() if key != part}
        with pytest.raises(FileFormatError, match="cannot be read"):
            Issue.from_dict(whole | {"model": less})


@pytest.mark.parametrize("wrong", [0.0, -0.1, math.nan, math.inf, None, "long", [0.1]])
def test_a_time_of_a_record_that_is_none_is_refused(issue: Issue, wrong: Any) -> None:
    known = {**issue.known_ms, SEEN[0].id: wrong}
    with pytest.raises(FileFormatError, match="what the host takes for kernels cannot be read"):
        Issue.from_dict(issue.to_dict() | {"known_ms": known})


@pytest.mark.parametrize("record", [None, [], "text", {}, 3.0])
def test_what_is_no_record_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="what the host takes for kernels cannot be read"):
        Issue.from_dict(record)
