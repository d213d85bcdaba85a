"""Tests of `codesign.layout.qap.problem`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.codesign.layout.qap.problem import compute_cost, pad_flow, read_qaplib
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.layout.qap.problems import KINDS, plain_cost, random_problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_compute_cost_is_sum_of_products(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 6, floats=floats)
    p = np.random.default_rng(1).permutation(6)
    cost = compute_cost(flow, distance, p)
    assert isinstance(cost, float if floats else int)
    assert cost == pytest.approx(plain_cost(flow, distance, p), rel=1e-12)


def test_compute_cost_of_integers_is_exact() -> None:
    # One more than 2^53: in float64 the last digit would be lost.
    flow, distance = np.array([[2**53 + 1, 1], [0, 0]]), np.array([[1, 2], [3, 4]])
    assert compute_cost(flow, distance, [0, 1]) == 2**53 + 3
    assert compute_cost(flow.tolist(), distance.astype(np.uint8), [0, 1]) == 2**53 + 3


@pytest.mark.parametrize(
    ("flow", "distance", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), r"flow has shape \(2, 3\)"),
        (
            np.ones((2, 2)),
            np.ones((3, 3)),
            r"flow has shape \(2, 2\) and distance \(3, 3\).*`pad_flow`",
        ),
        (np.ones((2, 2, 2)), np.ones((2, 2)), r"flow has shape \(2, 2, 2\) and distance \(1, 2, 2\)"),
        (np.ones((0, 0)), np.ones((0, 0)), r"shape \(0, 0\)"),
        ([["a"]], [[1]], r"flow .*<U1"),
        ([[1.0]], [[np.nan]], r"distance contains nan in row 0, column 0"),
        ([[np.inf, 0], [0, 0]], np.ones((2, 2)), r"flow contains inf"),
        (np.full((9, 9), 2**60), np.full((9, 9), 4), r"exceed 64 bits"),
        ([[2**64 - 1]], [[1]], r"exceeds int64"),
    ],
)
def test_invalid_matrices_are_refused(flow: Any, distance: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compute_cost(flow, distance, range(len(flow)))


@pytest.mark.parametrize("permutation", [[0, 0], [0, 2], [0], [0.0, 1.0], [[0, 1]], [-1, 0]])
def test_invalid_permutation_is_refused(permutation: Any) -> None:
    with pytest.raises(InputError, match="0"):
        compute_cost(np.eye(2), np.eye(2), permutation)


def test_pad_flow_adds_free_items() -> None:
    flow, distance = random_problem("asymmetric", 3)[0], random_problem("asymmetric", 5)[1]
    full = pad_flow(flow, 5)
    assert full.shape == (5, 5)
    costs = {compute_cost(full, distance, [2, 0, 3, *remaining]) for remaining in ([1, 4], [4, 1])}
    assert costs == {plain_cost(flow, distance[np.ix_([2, 0, 3], [2, 0, 3])], np.arange(3))}
    assert pad_flow(np.stack([flow, flow]), 4).shape == (2, 4, 4)
    with pytest.raises(InputError, match="2"):
        pad_flow(flow, 2)


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "tiny2.qap"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_read_qaplib_with_any_line_breaks(tmp_path: Path) -> None:
    instance = read_qaplib(written(tmp_path, "2 14 20\n\n0 1\n2 3\n\n4 5\n6 7\n"))
    assert (instance.name, instance.n, instance.optimum, instance.best_known, instance.bound) == (
        "tiny2",
        2,
        14,
        20,
        14,
    )
    assert instance.flow.dtype == np.int64
    assert (instance.flow.tolist(), instance.distance.tolist()) == ([[0, 1], [2, 3]], [[4, 5], [6, 7]])
    same = read_qaplib(written(tmp_path, "\r\n 2\r\n0 1 2 3 4\r\n5\r\n\r\n6 7"))
    assert (
        same.flow.tolist() == instance.flow.tolist() and same.distance.tolist() == instance.distance.tolist()
    )
    assert (same.optimum, same.best_known, same.bound) == (None, None, None)


def test_read_qaplib_negative_optimum_is_bound(tmp_path: Path) -> None:
    instance = read_qaplib(written(tmp_path, "1 -14 20\n0\n0\n"))
    assert (instance.optimum, instance.best_known, instance.bound) == (None, 20, 14)


def test_read_qaplib_fractions(tmp_path: Path) -> None:
    instance = read_qaplib(written(tmp_path, "1\n0.5\n1e3\n"))
    assert instance.flow.dtype == instance.distance.dtype == np.float64
    assert (instance.flow.item(), instance.distance.item()) == (0.5, 1000.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: expected"),
        ("\n\n", r"line 1: expected"),
        ("two\n", r"line 1: expected `n` or `n optimum best_known`.*'two'"),
        ("\n2 5\n", r"line 2: expected `n`.*'2 5'"),
        ("0\n", r"line 1: expected"),
        ("-3 1 1\n", r"line 1: expected"),
        ("2.5\n", r"line 1: expected"),
        ("9" * 4000 + "\n1", r"line 1: expected .*64-bit integers"),
        ("2 1 1\n1 2 3 x\n", r"line 2: 'x' is not a number"),
        ("2 1 1\n1 2\n3 nan\n", r"line 3: 'nan' is not finite"),
        ("1\n1e400 1", r"line 2: '1e400' is not finite"),
        ("1\n1\n99999999999999999999", r"line 3: '9+' is not finite or exceeds 64 bits"),
        ("2\n0 1\n2 3\n4 5 6\n", r"ends in row 2 of matrix 2, line 4: got 7 numbers; .* 8"),
        ("2\n0 1\n2\n", r"ends in row 2 of matrix 1, line 3"),
        ("3\n", r"ends in row 1 of matrix 1, line 1: got 0 numbers"),
        ("1\n0\n0\n0\n", r"line 4: .*1 × 1 have 2"),
        ("1 5 4\n0\n0\n", r"line 1: the best known cost 4 is below the optimum or bound 5"),
        (b"1\n\xff\n", r"byte 2"),
    ],
)
def test_read_qaplib_damaged_file_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_qaplib(written(tmp_path, text))


def test_read_qaplib_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r".*none\.qap"):
        read_qaplib(tmp_path / "none.qap")


@settings(deadline=None, max_examples=37)
@given(
    text=st.one_of(
        st.binary(max_size=60),
        st.text("0123456789 .-e\n", max_size=60).map(str.encode),
        st.lists(st.integers(-9, 99), max_size=12).map(lambda v: " ".join(map(str, v)).encode()),
    )
)
def test_read_qaplib_any_text_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    file = written(tmp_path_factory.mktemp("fuzz"), text)
    try:
        instance = read_qaplib(file)
    except InputError:
        return
    assert instance.flow.shape == instance.distance.shape == (instance.n, instance.n)
    assert np.isfinite(instance.flow).all() and np.isfinite(instance.distance).all()
