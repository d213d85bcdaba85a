"""Packing of matrices in level formats."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.formats import (
    LevelSpec,
    PackedMatrix,
    pack,
    select_index_dtype,
)
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.parser import LevelMode

D, C, CN, S = LevelMode.DENSE, LevelMode.COMPRESSED, LevelMode.COMPRESSED_NONUNIQUE, LevelMode.SINGLETON
SMALL = np.array([[0, 5, 0, 0], [1, 0, 0, 2], [0, 0, 0, 0]], np.float32)


def build_level_specs(
    order: Sequence[tuple[str, LevelMode]], parts: Mapping[str, tuple[int, int, int]], *, lanes: int = 1
) -> tuple[LevelSpec, ...]:
    """Create levels from (sub axis, mode) and sub axis -> (dimension, weight, extent)."""
    levels = [
        LevelSpec(axis=axis, dim=parts[axis][0], weight=parts[axis][1], extent=parts[axis][2], mode=mode)
        for axis, mode in order
    ]
    return (*levels[:-1], replace(levels[-1], lanes=lanes))


def csr_specs(modes: tuple[LevelMode, LevelMode], shape: tuple[int, int]) -> tuple[LevelSpec, ...]:
    parts = {"i": (0, 1, shape[0]), "k": (1, 1, shape[1])}
    return build_level_specs([("i", modes[0]), ("k", modes[1])], parts)


def unpacked(packed: PackedMatrix, shape: tuple[int, int]) -> CooMatrix:
    """Rebuild the matrix level by level, without padding zeros."""
    position = np.arange(len(packed.values))
    coordinate = [np.zeros(len(position), np.int64), np.zeros(len(position), np.int64)]
    for level in reversed(packed.levels):
        spec = level.spec
        if level.crd is None:
            part, position = position % spec.extent, position // spec.extent
        else:
            part = level.crd[position].astype(np.int64)
            if level.pos is not None:
                step, lane = np.divmod(position, spec.lanes)
                position = (np.searchsorted(level.pos, step, side="right") - 1) * spec.lanes + lane
        coordinate[spec.dim] += spec.weight * part
    real = np.zeros(len(packed.values), bool)
    real[packed.element_positions] = True
    return CooMatrix(
        rows=coordinate[0][real], cols=coordinate[1][real], values=packed.values[real], shape=shape
    )


def same(a: CooMatrix, b: CooMatrix) -> bool:
    a, b = as_coo(a), as_coo(b)
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("rows", "cols", "values"))


def test_pack_csr() -> None:
    packed = pack(as_coo(SMALL), csr_specs((D, C), (3, 4)))
    row, column = packed.levels
    assert row.pos is None and row.crd is None and row.positions == 3
    assert column.pos is not None and column.pos.tolist() == [0, 1, 3, 3]
    assert column.crd is not None and column.crd.tolist() == [1, 0, 3]
    assert packed.values.tolist() == [5, 1, 2]


def test_pack_coo() -> None:
    packed = pack(as_coo(SMALL), csr_specs((CN, S), (3, 4)))
    row, column = packed.levels
    assert row.pos is not None and row.pos.tolist() == [0, 3]
    assert row.crd is not None and row.crd.tolist() == [0, 1, 1]
    assert column.pos is None
    assert column.crd is not None and column.crd.tolist() == [1, 0, 3]


def test_pack_dense_levels_hold_zeros() -> None:
    packed = pack(as_coo(SMALL), csr_specs((D, D), (3, 4)))
    assert packed.values.tolist() == SMALL.ravel().tolist()
    assert len(packed.arrays) == 1


def test_pack_blocks_hold_zeros() -> None:
    parts = {"i0": (0, 2, 2), "i1": (0, 1, 2), "k": (1, 1, 4)}
    packed = pack(as_coo(SMALL), build_level_specs([("i0", D), ("k", C), ("i1", D)], parts))
    assert packed.levels[1].crd is not None and packed.levels[1].crd.tolist() == [0, 1, 3]
    assert packed.values.tolist() == [0, 1, 5, 0, 0, 2]
    assert packed.element_positions.tolist() == [2, 1, 5]  # (0, 1), (1, 0) and (1, 3), in that order


def test_pack_lanes_are_interleaved() -> None:
    matrix = as_coo(np.array([[1, 2, 3], [0, 0, 0], [0, 4, 0], [5, 0, 6]], np.float32))
    parts = {"i0": (0, 2, 2), "i1": (0, 1, 2), "k": (1, 1, 3)}
    packed = pack(matrix, build_level_specs([("i0", D), ("i1", D), ("k", C)], parts, lanes=2))
    last = packed.levels[-1]
    assert last.pos is not None and last.crd is not None
    assert last.pos.tolist() == [0, 3, 5], "steps of two lanes"
    assert last.crd.tolist() == [0, 0, 1, 0, 2, 0, 1, 0, 1, 2], "padded with the last coordinates"
    assert packed.values.tolist() == [1, 0, 2, 0, 3, 0, 4, 5, 0, 6]
    assert packed.element_positions.tolist() == [0, 2, 4, 6, 7, 9]


def test_pack_empty_matrix() -> None:
    packed = pack(as_coo(np.zeros((3, 4), np.float32)), csr_specs((C, C), (3, 4)))
    assert packed.values.size == 0
    assert all(level.pos is not None and level.pos.tolist() in ([0, 0], [0]) for level in packed.levels)


def test_pack_singleton_below_dense_raises() -> None:
    with pytest.raises(InputError):
        pack(as_coo(SMALL), csr_specs((D, S), (3, 4)))


def test_pack_storage_limit_raises() -> None:
    huge = CooMatrix(
        rows=np.array([0]), cols=np.array([0]), values=np.ones(1, np.float32), shape=(10**6, 10**6)
    )
    with pytest.raises(InputError):
        pack(huge, csr_specs((D, D), huge.shape))


@pytest.mark.parametrize(
    ("extent", "kind"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)]
)
def test_coordinate_dtype_is_smallest(extent: int, kind: type) -> None:
    spec = LevelSpec(axis="k", dim=1, weight=1, extent=extent, mode=LevelMode.COMPRESSED)
    assert spec.coordinate_dtype is kind


def test_index_dtype_is_wide_for_many_elements() -> None:
    assert select_index_dtype(2**31 - 1) is np.int32
    assert select_index_dtype(2**31) is np.int64


ORDERS = [
    order
    for order in itertools.permutations(["i0", "i1", "k0", "k1"])
    if order.index("i0") < order.index("i1")
]


@settings(max_examples=60)
@given(
    order=st.sampled_from(ORDERS),
    modes=st.lists(st.sampled_from([D, C, CN]), min_size=4, max_size=4),
    inner=st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4, 5])),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    wide=st.booleans(),
)
def test_pack_round_trip(
    order: tuple[str, ...],
    modes: list[LevelMode],
    inner: tuple[int, int],
    shape: tuple[int, int],
    density: float,
    seed: int,
    wide: bool,
) -> None:
    generator = np.random.default_rng(seed)
    values = generator.uniform(1, 2, shape) * (generator.random(shape) < density)
    matrix = as_coo(values)
    parts = {
        "i0": (0, inner[0], -(-shape[0] // inner[0])),
        "i1": (0, 1, inner[0]),
        "k0": (1, inner[1], -(-shape[1] // inner[1])),
        "k1": (1, 1, inner[1]),
    }
    # Below a non-unique level a compressed level may be a singleton.
    arguments = [
        S if mode is C and before is CN else mode for before, mode in zip([None, *modes], modes, strict=False)
    ]
    side_by_side = wide and arguments[2:] == [D, C]
    specs = build_level_specs(
        list(zip(order, arguments, strict=True)), parts, lanes=parts[order[2]][2] if side_by_side else 1
    )
    packed = pack(matrix, specs)
    assert same(unpacked(packed, shape), matrix)
    assert np.array_equal(packed.values[packed.element_positions], matrix.values)
    assert np.count_nonzero(packed.values) == matrix.nnz
