"""Baselines of `against.py`: sparse libraries, and CSR kernels with sums in registers.

A compiled baseline is a function `(problem, inputs, threads) -> form -> job`. The runner times its forms and
the tuned kernel in one process, where all use GNU OpenMP. A library is loaded from a path at run time;
`shims/` has its calls. A Python baseline is a function `(problem, threads) -> form -> callable`. Both it and
the tuned kernel are called from Python.
"""

from __future__ import annotations

import hashlib
import subprocess
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired_times import Inputs, LibraryJob

from sparseflow.errors import RunError
from sparseflow.tuning.codegen.compile import OPTIMIZE_FLAGS, CompileCache, compile_source
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import make_job
from sparseflow.tuning.measure.runner import KernelJob
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem

MakeJobs = Callable[[SparseProblem, Inputs, int], Mapping[str, KernelJob]]
"""(problem, inputs, threads) -> form of the baseline -> job."""

SHIMS = Path(__file__).parent / "shims"

REGISTERS = {"spmm": ("tiled_csr", "csr"), "spmv": ("csr", "csr_gathered")}
"""Operator -> presets of CSR."""

BLOCKS = (2, 3, 4, 8, 16)
"""Rows and columns of a block in BSR."""

MIN_FILL = 0.4
"""Smallest share of nonzeros in the blocks of BSR; with more zeros CSR is faster."""


def register_jobs(problem: SparseProblem, inputs: Inputs, threads: int) -> dict[str, KernelJob]:
    """Create jobs of the hand-written CSR schedules."""
    presets = build_presets(problem.operator, problem.extents, threads)
    return {
        name: make_job(build_program(problem, presets[name]), inputs)
        for name in REGISTERS[problem.operator.name]
    }


def list_blocks(problem: SparseProblem) -> list[int]:
    """List the sizes of blocks that have few zeros."""
    pattern = problem.matrix.pattern
    rows, cols = pattern.rows.astype(np.int64), pattern.cols
    return [
        block
        for block in BLOCKS
        if pattern.nnz
        >= MIN_FILL * block**2 * len(np.unique(rows // block * pattern.shape[1] + cols // block))
    ]


def mkl_jobs(problem: SparseProblem, inputs: Inputs, threads: int, *, library: Path) -> dict[str, LibraryJob]:
    """Create jobs of Intel MKL: CSR, and BSR if its blocks have few zeros."""
    shim = _compile_shim("mkl", problem.dtype, library)
    return {
        f"bsr{block}" if block > 1 else "csr": make_library_job(
            shim, problem, inputs, threads, form=block, block=block
        )
        for block in (1, *list_blocks(problem))
    }


def graphblas_jobs(
    problem: SparseProblem, inputs: Inputs, threads: int, *, library: Path
) -> dict[str, LibraryJob]:
    """Create jobs of SuiteSparse:GraphBLAS: a product that is added to zeros, and one that is assigned."""
    shim = _compile_shim("graphblas", problem.dtype, library)
    return {
        name: make_library_job(shim, problem, inputs, threads, form=form)
        for form, name in enumerate(("added", "assigned"))
    }


def librsb_jobs(
    problem: SparseProblem, inputs: Inputs, threads: int, *, library: Path
) -> dict[str, LibraryJob]:
    """Create a job of librsb, which tunes the blocks of the matrix."""
    shim = _compile_shim("librsb", problem.dtype, library)
    return {"tuned": make_library_job(shim, problem, inputs, threads)}


def eigen_jobs(
    problem: SparseProblem, inputs: Inputs, threads: int, *, include: Path
) -> dict[str, LibraryJob]:
    """Create a job of Eigen, which is compiled from its headers."""
    return {"csr": make_library_job(_compile_eigen(problem.dtype, include), problem, inputs, threads)}


def scipy_calls(problem: SparseProblem, threads: int) -> dict[str, Callable[..., Any]]:
    """Create functions of scipy, which has one thread: CSR, and BSR if its blocks have few zeros."""
    if threads > 1:
        return {}
    return {form: matrix.__matmul__ for form, matrix in _list_matrices(problem).items()}


def torch_calls(problem: SparseProblem, threads: int) -> dict[str, Callable[..., Any]]:
    """Create functions of torch: products of its MKL, and for matrices a sum of torch's own."""
    torch.set_num_threads(threads)
    calls: dict[str, Callable[..., Any]] = {}
    for form, sparse in _list_matrices(problem).items():
        create = torch.sparse_csr_tensor if form == "csr" else torch.sparse_bsr_tensor
        with warnings.catch_warnings(action="ignore"):
            matrix = create(*map(torch.from_numpy, _list_arrays(sparse)), size=sparse.shape)
        calls[form] = lambda dense, matrix=matrix: matrix @ torch.from_numpy(dense)
        if form == "csr" and problem.n_cols is not None:
            calls["sum"] = lambda dense, csr=matrix: torch.sparse.mm(csr, torch.from_numpy(dense), "sum")
    return calls


COMPILED: Mapping[str, Callable[[Path], MakeJobs]] = {
    "mkl": lambda path: partial(mkl_jobs, library=path),
    "graphblas": lambda path: partial(graphblas_jobs, library=path),
    "librsb": lambda path: partial(librsb_jobs, library=path),
    "eigen": lambda path: partial(eigen_jobs, include=path),
}
"""Name -> function that makes a baseline of the path of a library or of headers."""

CALLED = {"scipy": scipy_calls, "torch": torch_calls}
"""Name -> Python baseline."""

TITLES = {
    "mkl": "Intel MKL",
    "graphblas": "SuiteSparse:GraphBLAS",
    "librsb": "librsb",
    "eigen": "Eigen",
    "scipy": "scipy",
    "torch": "torch",
    "registers": "CSR with sums in registers",
}
"""Name of a baseline -> title."""


def make_library_job(
    shim: Path, problem: SparseProblem, inputs: Inputs, threads: int, *, form: int = 0, block: int = 1
) -> LibraryJob:
    """Create a job of a shim; with `block` above 1 its matrix is BSR, with padded extents."""
    sparse: Any = problem.matrix.to_scipy()
    height, width = (-(-extent // block) * block for extent in sparse.shape)
    sparse.resize((height, width))
    sparse.sort_indices()
    if block > 1:
        sparse = sparse.tobsr((block, block))
    (dense,) = inputs
    padded = np.zeros((width, *dense.shape[1:]), dense.dtype)
    padded[: len(dense)] = dense
    sizes = np.array([height, width, sparse.nnz, problem.n_cols or 0, threads, form], np.int64)
    return LibraryJob(
        library=shim,
        inputs=(sizes, *_list_arrays(sparse), padded),
        output_shape=(height + 1, *dense.shape[1:]),
        output_dtype=problem.dtype,
    )


def _list_matrices(problem: SparseProblem) -> dict[str, Any]:
    """List CSR, and BSR with blocks that have few zeros and divide the extents."""
    csr: Any = problem.matrix.to_scipy()
    csr.sort_indices()
    return {"csr": csr} | {
        f"bsr{block}": csr.tobsr((block, block))
        for block in list_blocks(problem)
        if not any(extent % block for extent in csr.shape)
    }


def _list_arrays(sparse: Any) -> tuple[np.ndarray, ...]:
    """List the row offsets, columns and values of CSR or BSR."""
    return sparse.indptr.astype(np.int32), sparse.indices.astype(np.int32), sparse.data


def read_shim(file: str, dtype: np.dtype) -> str:
    """Return the source of a shim for a dtype, with `shim.h`."""
    double = dtype == np.float64
    head = f"#define REAL {'double' if double else 'float'}\n#define DOUBLE {int(double)}\n"
    return head + "".join((SHIMS / name).read_text(encoding="utf-8") for name in ("shim.h", file))


def _compile_shim(name: str, dtype: np.dtype, library: Path) -> Path:
    """Compile `shims/<name>.c`."""
    return compile_source(f'#define LIBRARY "{library.resolve()}"\n' + read_shim(f"{name}.c", dtype))


def _compile_eigen(dtype: np.dtype, include: Path) -> Path:
    """Compile `shims/eigen.cpp` with the optimization flags of kernels."""
    source = read_shim("eigen.cpp", dtype)
    flags = [*OPTIMIZE_FLAGS, "-DNDEBUG", "-fopenmp", "-shared", "-fPIC", f"-I{include.resolve()}"]
    cache = CompileCache()
    key = hashlib.sha256("\n".join((source, *flags)).encode()).hexdigest()[:40]
    if (cached := cache.get(key)) is not None:
        return cached
    with cache.open_build_dir() as folder:
        built = folder / "built.so"
        command = ["g++", *flags, "-x", "c++", "-", "-o", str(built)]
        result = subprocess.run(command, input=source, text=True, capture_output=True)
        if result.returncode != 0:
            raise RunError(f"Eigen does not compile with {include}: {result.stderr[-2000:]}")
        return cache.put(key, built)
