"""Results of compiled schedules against scipy, for every kind of lowering."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.codegen.program import KernelProgram, build_program
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
"""Relative to the largest result."""


def samples(rows: int, cols: int, density: float, dtype: type = np.float32, seed: int = 0) -> CooMatrix:
    generator = np.random.default_rng(seed)
    return as_coo(
        generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < density), dtype=dtype
    )


def program_of(name: str, line: str, matrix: CooMatrix, n_cols: int | None) -> KernelProgram:
    problem = SparseProblem(operator=get_operator(name), matrix=matrix, n_cols=n_cols)
    return build_program(problem, Schedule.parse(line))


def check(program: KernelProgram, cache: Path) -> None:
    inputs = program.problem.generate_inputs()
    result = CompiledKernel(program, cache_dir=cache).compute(*inputs)
    expected = program.problem.compute_reference(inputs)
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max(initial=0.0) <= TOLERANCE[program.problem.dtype] * scale


SPMM = {
    "csr": "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 32 4 i k j0 j1 i j1 None 0 2 16",
    "columns undivided": "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j i j None 0 2 16",
    "nothing but loops": "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j None None None 0 1 1",
    "sums in registers": "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 16 4 i j0 k j1 i j1 None 0 2 16",
    "sums in an array": "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j i None None 0 2 16",
    "products to memory": "0 1 A 2 k i A 2 k 0 i 1 0 3 k i j None j None 0 1 1",
    "columns in parallel": "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 16 4 j0 i k j1 j0 j1 None 0 2 1",
    "blocks of rows": (
        "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 1 j 2 j0 2 j1 16 5 i0 j0 k i1 j1 i0 j1 "
        "None 0 2 2"
    ),
    "blocks both ways": (
        "2 i 2 i0 9 i1 4 k 2 k0 8 k1 8 1 A 4 i0 k0 i1 k1 A 4 i0 0 k0 1 i1 0 k1 0 1 j 2 j0 2 j1 16 "
        "6 i0 j0 k0 i1 k1 j1 i0 j1 k1 4 2 2"
    ),
    "blocks by column": (
        "2 i 2 i0 9 i1 4 k 2 k0 8 k1 8 1 A 4 k0 i0 k1 i1 A 4 i0 1 i1 1 k0 1 k1 1 1 j 2 j0 2 j1 16 "
        "6 k0 i0 j0 k1 i1 j1 i0 j1 None 0 2 2"
    ),
    "coordinates": "0 1 A 2 i k A 2 i 2 k 3 1 j 2 j0 2 j1 16 4 i k j0 j1 None j1 j0 2 1 1",
    "coordinates of parts": (
        "2 i 2 i0 9 i1 4 k 2 k0 8 k1 8 1 A 4 i0 k0 i1 k1 A 4 i0 2 k0 3 i1 4 k1 3 1 j 2 j0 2 j1 16 "
        "6 i0 k0 i1 k1 j0 j1 j0 j1 None 0 2 1"
    ),
    "lists of rows": "0 1 A 2 i k A 2 i 1 k 1 1 j 2 j0 2 j1 16 4 i k j0 j1 i j1 None 0 2 4",
    "all dense": "0 1 A 2 i k A 2 i 0 k 0 1 j 2 j0 2 j1 16 4 i j0 k j1 i j1 k 8 2 4",
    "rows innermost": "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 0 4 i0 j k i1 i0 i1 None 0 2 2",
    "sums innermost": "1 k 2 k0 8 k1 8 1 A 3 i k0 k1 A 3 i 0 k0 1 k1 0 0 4 i k0 j k1 i k1 None 0 2 2",
    "compressed innermost": "0 1 A 2 i k A 2 i 0 k 1 0 3 i j k i k None 0 2 2",
    "rows compressed innermost": "0 1 A 2 k i A 2 k 0 i 1 0 3 j k i j i None 0 2 2",
    "duplicates above blocks": (
        "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 2 k 1 i1 0 1 j 2 j0 2 j1 16 5 i0 k i1 j0 j1 j0 j1 None 0 2 1"
    ),
    "padding": (
        "2 i 2 i0 1 i1 64 k 2 k0 1 k1 64 1 A 4 i0 k0 i1 k1 A 4 i0 0 k0 0 i1 0 k1 0 1 j 2 j0 1 j1 64 "
        "6 i0 k0 i1 k1 j0 j1 i0 j1 None 0 2 1"
    ),
    "diagonals": (
        "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 5 i1 0 1 j 2 j0 2 j1 16 5 i0 j0 k i1 j1 i0 j1 None 0 2 2"
    ),
    "balanced blocks": (
        "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 1 j 2 j0 2 j1 16 5 i0 j0 k i1 j1 i0 j1 None 0 3 0"
    ),
    "few columns": "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 64 j1 2 4 i j0 k j1 i j1 None 0 2 16",
}  # fmt: skip

SPMV = {
    "csr": "0 1 A 2 i j A 2 i 0 j 1 0 2 i j i j None 0 2 16",
    "plain": "0 1 A 2 i j A 2 i 0 j 1 0 2 i j None None None 0 1 1",
    "unrolled": "0 1 A 2 i j A 2 i 0 j 1 0 2 i j i None j 8 2 16",
    "by column": "0 1 A 2 j i A 2 j 0 i 1 0 2 j i None i None 0 1 1",
    "coordinates": "0 1 A 2 i j A 2 i 2 j 3 0 2 i j None None None 0 1 1",
    "blocks of rows": "1 i 2 i0 9 i1 4 1 A 3 i0 j i1 A 3 i0 0 j 1 i1 0 0 3 i0 j i1 i0 i1 None 0 2 2",
    "blocks of columns": "1 j 2 j0 9 j1 8 1 A 3 i j0 j1 A 3 i 0 j0 1 j1 0 0 3 i j0 j1 i j1 None 0 2 2",
    "blocks": (
        "2 i 2 i0 9 i1 4 j 2 j0 9 j1 16 1 A 4 i0 j0 i1 j1 A 4 i0 1 i1 0 j0 1 j1 0 0 4 i0 j0 i1 j1 "
        "i0 j1 i1 4 2 2"
    ),
    "parts of columns": (
        "2 i 2 i0 9 i1 8 j 2 j0 9 j1 16 1 A 4 j0 i0 i1 j1 A 4 i0 1 i1 1 j0 0 j1 1 0 4 j0 i0 i1 j1 "
        "i0 None None 0 2 2"
    ),
    "all dense": "0 1 A 2 i j A 2 i 0 j 0 0 2 i j i j None 0 2 4",
    "rows side by side": "1 i 2 i0 3 i1 16 1 A 3 i0 i1 j A 3 i0 0 i1 0 j 1 0 3 i0 i1 j i0 i1 j 2 2 1",
    "many rows side by side": (
        "1 i 2 i0 1 i1 32 1 A 3 i0 i1 j A 3 i0 1 i1 0 j 2 0 3 i0 i1 j i0 i1 None 0 2 1"
    ),
    "three pairs of rows": "1 i 2 i0 7 i1 6 1 A 3 i0 i1 j A 3 i0 0 i1 0 j 1 0 3 i0 i1 j None i1 None 0 1 1",
    "diagonals": "1 i 2 i0 3 i1 16 1 A 3 i0 j i1 A 3 i0 0 j 5 i1 0 0 3 i0 j i1 i0 i1 None 0 2 1",
    "diagonals in loops": "1 i 2 i0 9 i1 4 1 A 3 i0 j i1 A 3 i0 0 j 5 i1 0 0 3 i0 j i1 i0 None j 2 2 1",
    "long diagonals": "1 i 2 i0 1 i1 1024 1 A 3 i0 j i1 A 3 i0 0 j 5 i1 0 0 3 i0 j i1 None i1 None 0 1 1",
    "balanced": "0 1 A 2 i j A 2 i 0 j 1 0 2 i j i j None 0 3 0",
    "rows side by side in blocks": (
        "2 i 2 i0 9 i1 8 j 2 j0 9 j1 16 1 A 4 i0 j0 i1 j1 A 4 i0 0 j0 1 i1 0 j1 1 0 4 i0 j0 i1 j1 "
        "i0 i1 None 0 2 2"
    ),
    "rows side by side by column": (
        "2 i 2 i0 9 i1 8 j 2 j0 9 j1 16 1 A 4 j0 i0 i1 j1 A 4 j0 0 i0 1 i1 0 j1 1 0 4 j0 i0 i1 j1 "
        "None i1 j1 2 1 1"
    ),
}  # fmt: skip

SDDMM = {
    "csr": "0 2 A 2 i j D 2 i j A 2 i 0 j 1 D 2 i 0 j 1 1 k 2 k0 2 k1 32 4 i j k0 k1 i k1 None 0 2 16",
    "undivided": "0 2 A 2 i j D 2 i j A 2 i 0 j 1 D 2 i 0 j 1 0 3 i j k i k None 0 2 16",
    "plain": "0 2 A 2 i j D 2 i j A 2 i 0 j 1 D 2 i 0 j 1 0 3 i j k None None None 0 1 1",
    "sums outside": (
        "0 2 A 2 i j D 2 i j A 2 i 0 j 1 D 2 i 0 j 1 1 k 2 k0 2 k1 32 4 k0 i j k1 i k1 None 0 2 "
        "16"
    ),
    "balanced": "0 2 A 2 i j D 2 i j A 2 i 0 j 1 D 2 i 0 j 1 0 3 i j k i k None 0 2 0",
    "elements innermost": "0 2 A 2 i j D 2 i j A 2 i 0 j 1 D 2 i 0 j 1 0 3 k i j i j None 0 2 16",
    "coordinates in parallel": (
        "0 2 A 2 i j D 2 i j A 2 i 2 j 3 D 2 i 2 j 3 1 k 2 k0 2 k1 16 4 i j k0 k1 i k1 None 0 2 "
        "16"
    ),
    "blocks": (
        "2 i 2 i0 9 i1 4 j 2 j0 9 j1 4 2 A 4 i0 j0 i1 j1 D 4 i0 j0 i1 j1 A 4 i0 0 j0 1 i1 0 j1 0 D "
        "4 i0 0 j0 1 i1 0 j1 0 "
        "1 k 2 k0 2 k1 16 6 i0 j0 i1 j1 k0 k1 i0 k1 None 0 2 2"
    ),
}  # fmt: skip

SHAPES = [(33, 61, 0.2), (1, 1, 1.0), (64, 64, 0.05), (7, 130, 0.5), (5, 5, 0.0)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", SPMM)
def test_generate_spmm_matches_reference(case: str, dtype: type, cache: Path) -> None:
    for rows, cols, density in SHAPES:
        check(program_of("spmm", SPMM[case], samples(rows, cols, density, dtype), 40), cache)


@pytest.mark.parametrize("n_cols", [1, 2, 16, 31, 64, 100, 600])
@pytest.mark.parametrize(
    "case", ["csr", "sums in registers", "blocks of rows", "columns undivided", "sums innermost"]
)
def test_generate_spmm_any_width_matches_reference(case: str, n_cols: int, cache: Path) -> None:
    check(program_of("spmm", SPMM[case], samples(33, 61, 0.2), n_cols), cache)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", SPMV)
def test_generate_spmv_matches_reference(case: str, dtype: type, cache: Path) -> None:
    for rows, cols, density in SHAPES:
        check(program_of("spmv", SPMV[case], samples(rows, cols, density, dtype), None), cache)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", SDDMM)
def test_generate_sddmm_matches_reference(case: str, dtype: type, cache: Path) -> None:
    for rows, cols, density in SHAPES:
        check(program_of("sddmm", SDDMM[case], samples(rows, cols, density, dtype), 50), cache)


@pytest.mark.parametrize("n_cols", [1, 16, 33, 1000])
def test_generate_sddmm_any_width_matches_reference(n_cols: int, cache: Path) -> None:
    for case in ("csr", "undivided"):
        check(program_of("sddmm", SDDMM[case], samples(33, 61, 0.2), n_cols), cache)


def test_generate_wide_positions_matches_reference(cache: Path) -> None:
    from dataclasses import replace

    from sparseflow.tuning.codegen.c_source import generate_source

    program = program_of("spmm", SPMM["csr"], samples(33, 61, 0.2), 40)
    levels = tuple(
        replace(level, pos=None if level.pos is None else level.pos.astype(np.int64))
        for level in program.packed.levels
    )
    wide = replace(
        program,
        source=generate_source(program.nest, wide=True),
        packed=replace(program.packed, levels=levels),
    )
    assert "int64_t *restrict const pos1" in wide.source
    check(wide, cache)
