"""Intel MKL as a job for the runner; the package does not need it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.compile import compile_source
from sparseflow.tuning.measure.runner import KernelJob
from sparseflow.tuning.schedule.problem import SparseProblem


def mkl_job(problem: SparseProblem, inputs: tuple[np.ndarray, ...], library: Path, threads: int) -> KernelJob:
    """Create a job of SpMM or SpMV with MKL's inspector-executor interface.

    Args:
        problem: Problem.
        inputs: B or x.
        library: `libmkl_rt.so`, for example of `pip install mkl`.
        threads: Number of threads.
    """
    if problem.operator.sparse_output:
        raise InputError("MKL has no SDDMM")
    csr = problem.matrix.to_scipy()
    letter = "s" if problem.dtype == np.float32 else "d"
    rows, cols = problem.matrix.shape
    defined = {
        "LIBRARY": f'"{library.resolve()}"',
        "REAL": "float" if letter == "s" else "double",
        "CREATE": f'"mkl_sparse_{letter}_create_csr"',
        "MM": f'"mkl_sparse_{letter}_mm"',
        "MV": f'"mkl_sparse_{letter}_mv"',
        "ROWS": rows,
        "COLS": cols,
        "N_COLS": problem.n_cols or 0,
        "THREADS": threads,
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    source = head + (Path(__file__).parent / "mkl.c").read_text(encoding="utf-8")
    return KernelJob(
        library=compile_source(source),
        inputs=(csr.indptr.astype(np.int32), csr.indices.astype(np.int32), csr.data, *inputs),
        output_shape=(rows, *(() if problem.n_cols is None else (problem.n_cols,))),
        output_dtype=problem.dtype,
    )
