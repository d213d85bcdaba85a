"""Exported kernels: they compile without warnings, pass their tests under sanitizers, and match scipy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import InputError, OutputError
from sparseflow.tuning.codegen import export as module
from sparseflow.tuning.codegen.export import export_schedule
from sparseflow.tuning.codegen.kernel import CompiledKernel, LibraryKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

ROWS, COLS, WIDTH = 33, 61, 45
TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}

LINES = {
    "spmm": "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 0 4 i0 k i1 j i0 j None 0 2 2",
    "spmv": "1 i 2 i0 3 i1 16 1 A 3 i0 i1 j A 3 i0 0 i1 0 j 1 0 3 i0 i1 j i0 i1 j 2 2 1",
    "sddmm": "0 2 A 2 j i D 2 j i A 2 j 0 i 1 D 2 j 0 i 1 0 3 j i k j k None 0 2 16",
}
"""Schedules with padded rows, interleaved rows, and elements in another order than the matrix."""

BALANCED = "0 1 A 2 i j A 2 i 0 j 1 0 2 i j i j None 0 2 0"
DIAGONALS = "1 i 2 i0 1 i1 1024 1 A 3 i0 j i1 A 3 i0 0 j 5 i1 0 0 3 i0 j i1 None i1 None 0 1 1"

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fopenmp")


def make_problem(name: str, dtype: type = np.float32) -> SparseProblem:
    generator = np.random.default_rng(1)
    full = generator.standard_normal((ROWS, COLS)) * (generator.random((ROWS, COLS)) < 0.2)
    full[[0, 7, -1]] = 0
    operator = OPERATORS[name]
    return SparseProblem(
        operator=operator, matrix=as_coo(full, dtype=dtype), n_cols=WIDTH if operator.dense_axes else None
    )


def run_command(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def build(command: Sequence[str], folder: Path) -> None:
    result = run_command(command, folder)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"


def get_sanitizing_compiler(name: str, folder: Path) -> str:
    """Return the path of a compiler with OpenMP and sanitizers, or skip the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    if run_command([path, *SANITIZERS, "empty.c", "-o", "empty"], folder).returncode:
        pytest.skip(f"needs OpenMP and the sanitizers of {name}")
    return path


def check_export(problem: SparseProblem, schedule: Schedule, folder: Path, compiler: str) -> None:
    export_schedule(problem, schedule, folder)
    sources = ["sparseflow_kernel.c", "sparseflow_kernel_test.c"]
    build([compiler, "-std=c11", *WARNINGS, *SANITIZERS, *sources, "-o", "run_test", "-lm"], folder)
    result = run_command(["./run_test"], folder)
    assert result.returncode == 0 and result.stdout.startswith("passed"), result.stdout + result.stderr


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(
    ("operator", "line", "dtype"),
    [
        ("spmm", LINES["spmm"], np.float32),
        ("spmv", LINES["spmv"], np.float64),
        ("spmv", BALANCED, np.float32),
        ("spmv", DIAGONALS, np.float64),
        ("sddmm", LINES["sddmm"], np.float32),
    ],
    ids=["spmm", "spmv", "spmv balanced", "spmv diagonals", "sddmm"],
)
def test_export_passes_its_test_under_sanitizers(
    operator: str, line: str, dtype: type, compiler: str, tmp_path: Path
) -> None:
    path = get_sanitizing_compiler(compiler, tmp_path)
    check_export(make_problem(operator, dtype), Schedule.parse(line), tmp_path / "c", path)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_export_of_presets_passes_under_sanitizers(
    operator: str, dtype: type, threads: int, compiler: str, tmp_path: Path
) -> None:
    path = get_sanitizing_compiler(compiler, tmp_path)
    problem = make_problem(operator, dtype)
    for name, preset in build_presets(problem.operator, problem.extents, threads).items():
        check_export(problem, preset, tmp_path / name, path)


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> int:
    pointers = [value.ctypes.data if isinstance(value, np.ndarray) else value for value in arguments]
    return getattr(library, name)(*(ctypes.c_void_p(pointer) for pointer in pointers))


def check_results(library: ctypes.CDLL, name: str, handle: int, problem: SparseProblem, seed: int) -> None:
    """Compare results of an exported kernel with scipy."""
    inputs = problem.generate_inputs(seed)
    expected = problem.compute_reference(inputs)
    result = np.full(expected.shape, np.nan, problem.dtype)
    assert call(library, f"{name}_{problem.operator.name}", handle, *inputs, result) == 0
    assert np.abs(result - expected).max() <= TOLERANCE[problem.dtype] * np.abs(expected).max()


def test_exports_with_two_prefixes_link_into_one_library(tmp_path: Path) -> None:
    problems = {"first": make_problem("spmm", np.float32), "second": make_problem("sddmm", np.float64)}
    for name, problem in problems.items():
        export_schedule(problem, Schedule.parse(LINES[problem.operator.name]), tmp_path / name, prefix=name)
    sources = [f"{name}/{name}_kernel.c" for name in problems]
    library_flags = ["-std=c11", "-O2", "-shared", "-fPIC", "-fopenmp"]
    build(["cc", *library_flags, *WARNINGS, *sources, "-o", "libkernels.so"], tmp_path)
    library = ctypes.CDLL(str(tmp_path / "libkernels.so"))
    for name, problem in problems.items():
        load = getattr(library, f"{name}_load")
        load.restype = ctypes.c_void_p
        assert load(b"missing.bin") is None
        other = "second" if name == "first" else "first"
        assert load(str(tmp_path / other / f"{other}_kernel.bin").encode()) is None
        handle = load(str(tmp_path / name / f"{name}_kernel.bin").encode())
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(partial(check_results, library, name, handle, problem), range(16)))
        values = np.random.default_rng(2).standard_normal(problem.matrix.nnz).astype(problem.dtype)
        call(library, f"{name}_set_values", handle, values)
        changed = replace(problem, matrix=replace(problem.matrix, values=values))
        check_results(library, name, handle, changed, 0)
        call(library, f"{name}_free", handle)


def test_export_is_usable_from_cpp(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs c++")
    export_schedule(make_problem("spmm"), None, tmp_path / "c", prefix="graph")
    build(["cc", "-std=c11", "-c", "graph_kernel.c"], tmp_path / "c")
    command = ["c++", "-std=c++17", *WARNINGS, "-x", "c++", "graph_kernel_test.c", "-x", "none"]
    build([*command, "graph_kernel.o", "-o", "run_test"], tmp_path / "c")
    assert run_command(["./run_test"], tmp_path / "c").returncode == 0


def test_export_test_program_detects_damage(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    export_schedule(make_problem("spmv"), None, folder, prefix="a")
    build(["cc", "-std=c11", "a_kernel.c", "a_kernel_test.c", "-o", "run_test", "-lm"], folder)
    data = (folder / "a_kernel.bin").read_bytes()
    codes = {}
    for position in (0, 9, 17, 25, 33, len(data) - 70):
        damaged = bytearray(data)
        damaged[position] ^= 1
        (folder / "damaged.bin").write_bytes(damaged)
        codes[position] = run_command(["./run_test", "damaged.bin"], folder).returncode
    (folder / "damaged.bin").write_bytes(data[:-64])
    codes["truncated"] = run_command(["./run_test", "damaged.bin"], folder).returncode
    assert set(codes.values()) == {2}, codes
    wrong = np.fromfile(folder / "a_kernel_test.bin")
    wrong[2 * 3] += 0.1
    (folder / "wrong.bin").write_bytes(wrong.tobytes())
    result = run_command(["./run_test", "a_kernel.bin", "wrong.bin"], folder)
    assert result.returncode == 1 and "result 3" in result.stderr
    assert run_command(["./run_test"], folder).returncode == 0


def test_export_builds_and_installs_with_cmake(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    export_schedule(make_problem("spmm"), Schedule.parse(LINES["spmm"]), tmp_path / "c", prefix="graph")
    build(["cmake", "-S", "c", "-B", "build", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'usr'}"], tmp_path)
    build(["cmake", "--build", "build"], tmp_path)
    build(["ctest", "--test-dir", "build", "--no-tests=error"], tmp_path)
    build(["cmake", "--install", "build"], tmp_path)
    installed = {path.name for path in (tmp_path / "usr").rglob("*") if path.is_file()}
    assert installed == {"graph_kernel.h", "graph_kernel.bin", "libgraph_kernel.a"}


def test_export_c_of_kernels(tmp_path: Path, cache: Path) -> None:
    problem = make_problem("spmm")
    kernel = CompiledKernel(build_program(problem, Schedule.parse(LINES["spmm"])), cache_dir=cache)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = kernel.export_c(empty, prefix="graph")
    assert (result.schedule, result.preset) == (kernel.schedule, None)
    assert set(result.files) == {path.name for path in empty.iterdir()} and len(result.files) == 7
    transposed = kernel.T.export_c(tmp_path / "T")
    assert f"_ROWS INT64_C({COLS})" in (transposed.folder / "sparseflow_kernel.h").read_text()
    result = LibraryKernel(problem).export_c(str(tmp_path / "new" / "library"))
    assert result.preset == "tiled_csr" and result.schedule.threads == 1
    assert "`tiled_csr`" in (result.folder / "README.md").read_text()
    assert result.to_dict()["schedule"] == str(result.schedule)


@pytest.mark.parametrize("prefix", ["", "1a", "_a", "a-b", "a b", "é", "a\n"])
def test_export_invalid_prefix_raises(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prefix"):
        export_schedule(make_problem("spmv"), None, tmp_path / "c", prefix=prefix)


def test_export_into_occupied_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(InputError, match="empty"):
            export_schedule(make_problem("spmv"), None, folder)
    with pytest.raises(OutputError):
        export_schedule(make_problem("spmv"), None, tmp_path / "file" / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_export_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module._Exporter, "compute_expected", fail)
    with pytest.raises(OutputError, match="No space"):
        export_schedule(make_problem("spmv"), None, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_export_compares_all_columns_of_a_large_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_EXPECTED", 500)  # every third result, but 3 divides the columns
    problem = make_problem("spmm")
    export_schedule(problem, None, tmp_path / "c")
    assert "#define STEP INT64_C(4)" in (tmp_path / "c" / "sparseflow_kernel_test.c").read_text()
    assert (tmp_path / "c" / "sparseflow_kernel_test.bin").stat().st_size == 2 * 16 * -(-ROWS * WIDTH // 4)
