"""Lowering of small schedules: location of sums, vectorization and zeroing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.loop_nest import LoopNest, lower
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.tuning.random_schedules import generators, spaces


def nest(name: str, line: str, *sizes: int, dtype: type = np.float32) -> LoopNest:
    item = get_operator(name)
    return lower(Schedule.parse(line), item, dict(zip(item.axes, sizes, strict=True)), dtype)


def spmm(line: str, rows: int = 33, cols: int = 61, width: int = 100, dtype: type = np.float32) -> LoopNest:
    return nest("spmm", line, rows, cols, width, dtype=dtype)


def spmv(line: str, rows: int = 33, cols: int = 72, dtype: type = np.float32) -> LoopNest:
    return nest("spmv", line, rows, cols, dtype=dtype)


def sddmm(modes: str, tail: str, rows: int = 33, cols: int = 61, width: int = 100) -> LoopNest:
    both = f"2 A 2 i j D 2 i j A 2 {modes} D 2 {modes}"
    return nest("sddmm", f"0 {both} {tail}", rows, cols, width)


CSR = "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 32 4 i k j0 j1 i j1 None 0 2 16"
WHOLE = "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j i j None 0 2 16"
PLAIN = "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j None None None 0 1 1"
TILED = "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 32 4 i j0 k j1 i j1 None 0 2 16"
BLOCKS = "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 1 j 2 j0 2 j1 16 5 i0 j0 k i1 j1 i0 j1 None 0 2 2"


def test_lower_csr() -> None:
    result = spmm(CSR)
    assert [loop.sub_axis for loop in result.loops] == ["i", "k", "j0", "j1"]
    assert [loop.axis for loop in result.loops] == ["i", "k", "j", "j"]
    assert [loop.weight for loop in result.loops] == [1, 1, 32, 1]
    assert [loop.extent for loop in result.loops] == [33, 61, 4, 32], "the outermost loop covers the axis"
    assert [loop.level for loop in result.loops] == [0, 1, None, None]
    assert [loop.mode for loop in result.loops] == [LevelMode.DENSE, LevelMode.COMPRESSED, None, None]
    assert [loop.output for loop in result.loops] == [True, False, True, True]
    assert [loop.parallel for loop in result.loops] == [True, False, False, False]
    assert [loop.fixed for loop in result.loops] == [True, False, True, True]
    assert (result.threads, result.chunk) == (2, 16)


def test_lower_three_parts() -> None:
    line = (
        "1 i 3 i0 5 i1 4 i2 2 1 A 4 i0 i1 i2 k A 4 i0 0 i1 0 i2 0 k 1 1 j 3 j0 5 j1 2 j2 10 "
        "7 i0 i1 i2 k j0 j1 j2 i0 j2 None 0 2 1"
    )
    result = spmm(line, rows=33, width=100)
    parts = {loop.sub_axis: (loop.weight, loop.extent) for loop in result.loops}
    assert parts == {
        "i0": (8, 5), "i1": (2, 4), "i2": (1, 2), "k": (1, 61), "j0": (20, 5), "j1": (10, 2), "j2": (1, 10),
    }  # fmt: skip
    assert result.padded_extent("i") == 40 and result.padded_extent("j") == 100
    assert result.tail("j") == 0
    assert [(level.axis, level.dim, level.weight) for level in result.levels] == [
        ("i0", 0, 8), ("i1", 0, 2), ("i2", 0, 1), ("k", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "width", "region", "in_array"),
    [
        (CSR, 100, 1, False),  # 4 x 2 vectors
        (CSR, 512, 1, False),  # 32 vectors, the limit
        (CSR, 513, 1, True),
        (CSR, 4096, 1, True),  # 16 KiB, the limit
        (CSR, 4097, None, False),
        (WHOLE, 512, 1, False),
        (WHOLE, 513, 1, True),
        (WHOLE, 4096, 1, True),
        (WHOLE, 4097, None, False),
        (TILED, 100_000, 2, False),  # one tile at a time, for any width
        (PLAIN, 16, 1, False),
        (PLAIN, 17, 1, True),
        (BLOCKS, 100_000, 2, False),
    ],
)
def test_lower_selects_region(line: str, width: int, region: int | None, in_array: bool) -> None:
    result = spmm(line, width=width)
    assert (result.region, result.in_array) == (region, in_array)
    assert result.writes_once == (region is not None)
    assert result.needs_zeroing == (region is None)


def test_lower_wider_dtype_has_smaller_region() -> None:
    assert not spmm(CSR, width=256, dtype=np.float64).in_array
    assert spmm(CSR, width=257, dtype=np.float64).in_array
    assert spmm(CSR).lanes == 16 and spmm(CSR, dtype=np.float64).lanes == 8


def test_lower_region_is_inside_parallel_loop() -> None:
    line = "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 16 4 j0 i k j1 {} j1 None 0 2 1"
    assert [spmm(line.format(loop)).region for loop in ("j0", "i")] == [2, 2]


def test_lower_region_can_hold_row_block() -> None:
    result = spmm("1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 0 4 i0 j k i1 i0 i1 None 0 2 2")
    # Rows are not adjacent in the output, so the loop only gets a pragma and sums in an array.
    assert (result.region, result.in_array, result.vector) == (2, True, "hint")


def test_lower_unordered_rows_have_no_region() -> None:
    result = spmm("0 1 A 2 k i A 2 k 0 i 1 0 3 k i j None j None 0 1 1")
    assert (result.region, result.writes_once, result.needs_zeroing) == (None, False, True)


@pytest.mark.parametrize(
    ("modes", "once", "zeroed"),
    [
        ("i 0 k 1", True, False),
        ("i 1 k 1", True, True),  # rows without elements are not visited
        ("i 2 k 3", False, True),  # a row is visited for each of its elements
        ("i 2 k 1", False, True),
        ("i 0 k 0", True, False),
    ],
)
def test_lower_detects_single_writes(modes: str, once: bool, zeroed: bool) -> None:
    result = spmm(f"0 1 A 2 i k A 2 {modes} 1 j 2 j0 2 j1 16 4 i k j0 j1 None j1 None 0 1 1")
    assert (result.writes_once, result.needs_zeroing) == (once, zeroed)
    assert result.region == 1


def test_lower_split_sums_are_written_repeatedly() -> None:
    line = "1 k 2 k0 8 k1 8 1 A 3 k0 i k1 A 3 k0 0 i 0 k1 1 0 4 k0 i k1 j None j None 0 1 1"
    result = spmm(line, width=8)
    assert result.region is not None and result.region > 0
    assert not result.writes_once and result.needs_zeroing


@pytest.mark.parametrize(
    ("line", "vector"),
    [
        ("0 1 A 2 i j A 2 i 0 j 1 0 2 i j i j None 0 2 16", "hint"),  # compressed
        ("0 1 A 2 i j A 2 i 0 j 0 0 2 i j i j None 0 2 16", "sum"),
        ("0 1 A 2 i j A 2 i 0 j 1 0 2 i j i None j 4 2 16", None),
        ("1 j 2 j0 9 j1 8 1 A 3 i j0 j1 A 3 i 0 j0 1 j1 0 0 3 i j0 j1 i j1 None 0 2 2", "sum"),
        ("1 i 2 i0 9 i1 4 1 A 3 i0 j i1 A 3 i0 0 j 1 i1 0 0 3 i0 j i1 i0 i1 None 0 2 2", "results"),
        ("0 1 A 2 j i A 2 j 0 i 0 0 2 j i None i None 0 1 1", "results"),
        ("0 1 A 2 j i A 2 j 0 i 1 0 2 j i None i None 0 1 1", "hint"),
    ],
)
def test_lower_spmv_vectors(line: str, vector: str | None) -> None:
    assert spmv(line).vector == vector


def test_lower_blocks_beyond_input_are_not_vectorized() -> None:
    line = "1 j 2 j0 9 j1 8 1 A 3 i j0 j1 A 3 i 0 j0 1 j1 0 0 3 i j0 j1 i j1 None 0 2 2"
    assert spmv(line, cols=72).vector == "sum"
    assert spmv(line, cols=71).vector == "hint"


def test_lower_blocks_beyond_output_are_vectorized() -> None:
    line = "1 i 2 i0 9 i1 4 1 A 3 i0 j i1 A 3 i0 0 j 1 i1 0 0 3 i0 j i1 i0 i1 None 0 2 2"
    result = spmv(line, rows=33)
    assert result.vector == "results" and result.padded == {"i"} and result.output_shape == (36,)


@pytest.mark.parametrize(
    ("loops", "vector"),
    [("i k j i j", "results"), ("i j k i k", "hint"), ("i k j None None", None)],
)
def test_lower_spmm_vectors(loops: str, vector: str | None) -> None:
    assert spmm(f"0 1 A 2 i k A 2 i 0 k 1 0 3 {loops} None 0 2 16").vector == vector


def test_lower_single_column_is_not_vectorized() -> None:
    assert spmm(WHOLE, width=1).vector == "hint"
    assert spmm(WHOLE, width=2).vector == "results"


@pytest.mark.parametrize(
    ("modes", "tail", "region", "vector", "once"),
    [
        ("i 0 j 1", "1 k 2 k0 2 k1 32 4 i j k0 k1 i k1 None 0 2 16", 2, "sum", True),
        ("i 0 j 1", "0 3 i j k None None None 0 1 1", 2, None, True),
        ("i 2 j 3", "0 3 i j k i k None 0 2 16", 2, "sum", True),  # every element has its own position
        ("i 0 j 1", "1 k 2 k0 2 k1 32 4 k0 i j k1 i k1 None 0 2 16", 3, "sum", False),
        ("i 0 j 1", "0 3 k i j i j None 0 2 16", None, "hint", False),
        ("i 0 j 0", "0 3 k i j i j None 0 2 16", None, "hint", False),
    ],
)
def test_lower_sddmm(modes: str, tail: str, region: int | None, vector: str | None, once: bool) -> None:
    result = sddmm(modes, tail)
    assert (result.region, result.vector, result.writes_once) == (region, vector, once)
    assert result.needs_zeroing == (not once)
    assert result.output_shape is None


@pytest.mark.parametrize(
    ("rows", "modes", "padded", "shape"),
    [
        (33, "i0 0 k 1 i1 0", {"i"}, (36, 100)),
        (36, "i0 0 k 1 i1 0", set(), (36, 100)),
        (33, "i0 1 k 1 i1 1", set(), (36, 100)),  # stores no padding; the output is padded
        (33, "i0 0 k 1 i1 1", {"i"}, (36, 100)),
        (33, "i0 1 k 1 i1 0", {"i"}, (36, 100)),
    ],
)
def test_lower_padding(rows: int, modes: str, padded: set[str], shape: tuple[int, int]) -> None:
    line = f"1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 {modes} 0 4 i0 k i1 j i0 j None 0 2 2"
    result = spmm(line, rows=rows)
    assert result.padded == padded
    assert result.output_shape == shape


@pytest.mark.parametrize(("width", "tail"), [(1, 1), (31, 31), (32, 0), (33, 1), (64, 0), (100, 4)])
def test_lower_tails(width: int, tail: int) -> None:
    assert spmm(CSR, width=width).tail("j") == tail
    assert spmm(WHOLE, width=width).tail("j") == 0


def test_lower_unroll_is_limited() -> None:
    line = "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j i j k {} 2 16"
    copies = [spmm(line.format(factor)).loops[1].unroll for factor in (1, 2, 16, 17, 10**6)]
    assert copies == [1, 2, 16, 16, 16]
    assert {loop.unroll for loop in spmm(line.format(8)).loops} == {1, 8}


def test_lower_equivalent_schedules_are_equal() -> None:
    nests = [
        spmm(CSR.replace("j0 2", f"j0 {nominal}").replace("i 0 k 1 1", f"{modes} 1"))
        for nominal in (1, 4, 10**6)
        for modes in ("i 0 k 1", "k 1 i 0")
    ]
    assert all(item == nests[0] for item in nests)


def test_lower_one_thread_is_not_parallel() -> None:
    result = spmm(CSR.replace("0 2 16", "0 1 16"))
    assert not any(loop.parallel for loop in result.loops)
    assert result.region == 1


def test_lower_invalid_schedule_raises() -> None:
    with pytest.raises(InputError):
        spmm("0 1 A 2 i k A 2 i 0 k 1 0 3 k i j None None None 0 1 1")
    with pytest.raises(InputError):
        lower(Schedule.parse(CSR), get_operator("spmm"), {"i": 3, "k": 3}, np.float32)
    with pytest.raises(InputError):
        spmm(CSR, width=0)


@settings(max_examples=80)
@given(spaces(), generators)
def test_lower_invariants_hold(space: ScheduleSpace, generator: np.random.Generator) -> None:
    for _ in range(5):
        schedule = space.sample(generator)
        result = lower(schedule, space.operator, space.shape, np.float64)
        assert tuple(loop.sub_axis for loop in result.loops) == schedule.lreorder
        for axis, extent in space.shape.items():
            parts = [loop for loop in result.loops if loop.axis == axis]
            assert result.padded_extent(axis) == math.prod(part.extent for part in parts) >= extent
            outermost = max(parts, key=lambda part: part.weight)
            assert (outermost.extent - 1) * outermost.weight < extent, "no step is empty"
            assert result.tail(axis) < math.prod(part.extent for part in parts if part.weight == 1)
        assert result.vector is None or schedule.vectorize is not None
        assert result.needs_zeroing or result.writes_once, "results that are added to are zeroed"
        if result.region is None:
            assert not result.writes_once and not result.in_array and result.vector != "sum"
            continue
        outside, inside = result.loops[: result.region], result.loops[result.region :]
        assert not any(loop.parallel for loop in inside)
        if result.vector == "lanes":
            rows, strategy = inside
            lanes = result.levels[-1].lanes
            assert rows.output and rows.mode is LevelMode.DENSE and not strategy.output and not strategy.fixed
            assert 1 < lanes <= result.lanes and rows.extent % lanes == 0
            continue
        assert all(loop.fixed for loop in inside if loop.output), "the number of results of a region is fixed"
        assert not inside[0].output
        if result.writes_once:
            assert all(loop.output for loop in outside)
        if result.writes_once and not result.needs_zeroing:
            assert space.operator.sparse_output or all(loop.fixed for loop in result.loops if loop.output)
