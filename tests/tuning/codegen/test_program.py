"""Programs: kernel arguments and extraction of results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.program import ALIGNMENT, KernelProgram, allocate_aligned, build_program
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

CSR = "0 1 A 2 i k A 2 i 0 k 1 0 3 i k j i j None 0 2 16"
BLOCKS = "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 0 4 i0 k i1 j i0 j None 0 2 2"
DENSE = "0 1 A 2 i k A 2 i 0 k 0 0 3 i k j i j None 0 2 16"
SPMV = "0 1 A 2 i j A 2 i 0 j 1 0 2 i j None None None 0 1 1"
SDDMM = "0 2 A 2 j i D 2 j i A 2 j 0 i 1 D 2 j 0 i 1 0 3 j i k j k None 0 2 16"
SDDMM_BLOCKS = (
    "1 i 2 i0 9 i1 4 2 A 3 i0 j i1 D 3 i0 j i1 A 3 i0 0 j 1 i1 0 D 3 i0 0 j 1 i1 0 "
    "0 4 i0 j i1 k i0 k None 0 2 2"
)


def samples(rows: int, cols: int, density: float = 0.3, dtype: type = np.float32, seed: int = 0) -> CooMatrix:
    generator = np.random.default_rng(seed)
    return as_coo(
        generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < density), dtype=dtype
    )


def program_of(name: str, line: str, matrix: CooMatrix, n_cols: int | None = None) -> KernelProgram:
    return build_program(
        SparseProblem(operator=get_operator(name), matrix=matrix, n_cols=n_cols), Schedule.parse(line)
    )


def test_program_dense_output_arguments() -> None:
    program = program_of("spmm", CSR, samples(10, 12), 7)
    inputs = program.problem.generate_inputs()
    sizes, pos, crd, values, b = program.bind_inputs(inputs)
    assert sizes.tolist() == [10, 12, 16]
    assert pos.shape == (11,) and crd.shape == values.shape == (program.problem.matrix.nnz,)
    assert b is inputs[0]
    assert program.output_shape == (10, 7)


def test_program_sparse_output_arguments() -> None:
    program = program_of("sddmm", SDDMM_BLOCKS, samples(10, 12), 7)
    *_, x, y, count = program.bind_inputs(program.problem.generate_inputs())
    assert x.shape == (10, 7) and y.shape == (12, 7)
    assert count.dtype == np.int64 and count.tolist() == [len(program.packed.values)]
    assert program.output_shape == program.packed.values.shape
    assert len(program.packed.values) > program.problem.matrix.nnz, "blocks have zeros"


@pytest.mark.parametrize(("name", "n_cols"), [("spmm", 32), ("spmv", None), ("sddmm", 32)])
def test_source_of_presets_does_not_depend_on_shape(name: str, n_cols: int | None) -> None:
    sources: dict[str, set[str]] = {}
    for shape in ((300, 420), (603, 301)):
        problem = SparseProblem(operator=get_operator(name), matrix=samples(*shape, 0.05), n_cols=n_cols)
        presets = build_presets(problem.operator, problem.extents, threads=2)
        for preset, schedule in presets.items():
            sources.setdefault(preset, set()).add(build_program(problem, schedule).source)
    assert {len(texts) for texts in sources.values()} == {1}


def test_ranges_have_equal_numbers_of_elements() -> None:
    rows = np.repeat(np.arange(1000), np.where(np.arange(1000) < 10, 990, 10))
    matrix = CooMatrix(
        rows=rows, cols=np.arange(len(rows)) % 990, values=np.ones(len(rows)), shape=(1000, 990)
    )
    program = program_of("spmm", CSR.replace("2 16", "4 0"), matrix, 7)
    assert program.leading_arrays[1] is program.ranges
    assert program.ranges[[0, -1]].tolist() == [0, 1000]
    shares = np.add.reduceat(np.bincount(rows), program.ranges[:-1])
    assert shares.max() < 1.1 * shares.mean()


def test_program_result_drops_padding() -> None:
    program = program_of("spmm", BLOCKS, samples(10, 12), 7)
    assert program.output_shape == (12, 7)
    output = np.arange(12 * 7, dtype=np.float32).reshape(12, 7)
    assert np.array_equal(program.extract_result(output), output[:10])


@pytest.mark.parametrize("line", [SDDMM, SDDMM_BLOCKS])
def test_program_result_keeps_element_order(line: str) -> None:
    program = program_of("sddmm", line, samples(10, 12), 7)
    assert np.array_equal(program.extract_result(program.packed.values), program.problem.matrix.values)


def test_program_spmv_result_is_vector() -> None:
    program = program_of("spmv", SPMV, samples(10, 12))
    assert program.output_shape == (10,)
    assert program.extract_result(np.zeros(10, np.float32)).shape == (10,)


@pytest.mark.parametrize("name", ["spmm", "spmv", "sddmm"])
def test_program_empty_matrix(name: str) -> None:
    line = {"spmm": CSR, "spmv": SPMV, "sddmm": SDDMM}[name]
    program = program_of(name, line, samples(5, 6, 0.0), None if name == "spmv" else 3)
    output = np.zeros(program.output_shape, np.float32)
    assert (
        program.extract_result(output).shape
        == program.problem.compute_reference(program.problem.generate_inputs()).shape
    )


def test_program_invalid_schedule_raises() -> None:
    for line in (CSR.replace("3 i k j", "3 k i j"), SPMV):
        with pytest.raises(InputError):
            program_of("spmm", line, samples(5, 6), 3)


def test_program_storage_limit_raises() -> None:
    problem = SparseProblem(operator=get_operator("spmm"), matrix=samples(100, 100, 0.01), n_cols=4)
    schedule = Schedule.parse(DENSE)
    needed = 100 * 100 * 4
    assert build_program(problem, schedule, max_bytes=needed).packed.nbytes == needed
    with pytest.raises(InputError):
        build_program(problem, schedule, max_bytes=needed - 1)


def test_program_equivalent_schedules_share_source() -> None:
    sources = {
        program_of("spmm", line, samples(10, 12, seed=seed), 7).source
        for seed in range(2)
        for line in (BLOCKS, BLOCKS.replace("i0 9", "i0 1000"))
    }
    assert len(sources) == 1
    assert program_of("spmm", BLOCKS, samples(13, 12), 7).source in sources


def test_program_keeps_schedule() -> None:
    schedule = Schedule.parse(BLOCKS.replace("i0 9", "i0 1000"))
    problem = SparseProblem(operator=get_operator("spmm"), matrix=samples(10, 12), n_cols=7)
    assert build_program(problem, schedule).schedule == schedule


def test_program_compile_uses_cache(tmp_path: Path) -> None:
    program = program_of("spmv", SPMV, samples(10, 12))
    library = program.compile(cache_dir=tmp_path)
    assert library.parent == tmp_path and library.is_file()
    assert program.compile(cache_dir=tmp_path) == library


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (0, 4), (1000, 3)])
def test_allocate_aligned_is_aligned(shape: tuple[int, ...], dtype: type) -> None:
    for _ in range(5):
        array = allocate_aligned(shape, np.dtype(dtype))
        assert array.shape == shape and array.dtype == dtype
        assert array.flags.c_contiguous and array.flags.writeable
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
