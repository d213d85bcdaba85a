"""Largest or smallest product of every row: SpMM whose sums are replaced by a maximum or a minimum.

The C code reads CSR, because padding zeros of other formats would be candidates. It does not depend on the
matrix or on the number of columns.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparseflow.tuning.codegen.compile import compile_source

Extremum = Literal["max", "min"]

_SYMBOL = "sparseflow_extrema"

_VECTOR_BYTES = 64

_BODY = """
#define LANES (64 / (long)sizeof(real))
typedef real vreal __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));
typedef lane vlane __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));

static inline __attribute__((always_inline)) void reduce_columns(
    const real *val, const int32_t *crd, const real *B, long begin, long end, long cols, int vectors,
    real *res, lane *arg)
{
    vreal best[4] = {{0}};
    vlane element[4] = {{0}};
    for (int v = 0; v < vectors; v++) {
        if (begin < end)
            best[v] = val[begin] * *(const vreal *)(B + crd[begin] * cols + v * LANES);
        else
            element[v] -= 1;
    }
    for (long p = begin + 1; p < end; p++) {
        for (int v = 0; v < vectors; v++) {
            const vreal product = val[p] * *(const vreal *)(B + crd[p] * cols + v * LANES);
            const vlane better = (product BETTER best[v]) | (product != product);
            best[v] = (vreal)((better & (vlane)product) | (~better & (vlane)best[v]));
            element[v] = (better & (lane)(p - begin)) | (~better & element[v]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        *(vreal *)(res + v * LANES) = best[v];
        *(vlane *)(arg + v * LANES) = element[v];
    }
}

void sparseflow_extrema(
    const int64_t *pos, const int32_t *crd, const real *val, const real *B, real *res, lane *arg, long rows,
    long cols, long threads)
{
#pragma omp parallel for schedule(dynamic, 64) num_threads(threads)
    for (long i = 0; i < rows; i++) {
        real *const row = res + i * cols;
        lane *const elements = arg + i * cols;
        long j = 0;
        for (; j + 4 * LANES <= cols; j += 4 * LANES)
            reduce_columns(val, crd, B + j, pos[i], pos[i + 1], cols, 4, row + j, elements + j);
        for (; j < cols; j += LANES) {
            j = j + LANES <= cols ? j : cols - LANES; /* the last vector overlaps the one before */
            reduce_columns(val, crd, B + j, pos[i], pos[i + 1], cols, 1, row + j, elements + j);
        }
    }
}
"""


def find_extrema(
    indptr: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
    dense: np.ndarray,
    reduce: Extremum,
    *,
    threads: int = 1,
    cache_dir: Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the largest or smallest `values[p] * dense[indices[p], j]` over the elements p of every row.

    Args:
        indptr: First element of every row, shape [rows + 1].
        indices: Column of every element, shape [elements].
        values: Values of the elements, shape [elements], float32 or float64.
        dense: Shape [columns, n], contiguous, with the dtype of the values.
        reduce: `"max"` or `"min"`.
        threads: Number of threads.
        cache_dir: Directory of compiled code; see `compile_source`.

    Returns:
        The products, shape [rows, n], 0 in rows without elements, and the number within its row of the first
        element with each of them, -1 in rows without elements. A NaN is both the largest and the smallest
        number.

    Raises:
        DeviceError: There is no C compiler.
        RunError: The compilation fails.
    """
    function, num_cols = _load_function(reduce, dense.dtype.name, cache_dir), dense.shape[1]
    lanes = _VECTOR_BYTES // dense.dtype.itemsize
    if num_cols < lanes:
        dense = np.pad(dense, ((0, 0), (0, lanes - num_cols)))
    shape = (len(indptr) - 1, dense.shape[1])
    result, elements = np.empty(shape, dense.dtype), np.empty(shape, f"i{dense.dtype.itemsize}")
    inputs = (indptr.astype(np.int64), np.ascontiguousarray(indices, np.int32), values, dense)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (*inputs, result, elements))
    function(*pointers, *map(ctypes.c_long, (*shape, threads)))
    return np.ascontiguousarray(result[:, :num_cols]), np.ascontiguousarray(elements[:, :num_cols])


@lru_cache(maxsize=16)
def _load_function(reduce: Extremum, dtype: str, cache_dir: Path | None) -> Any:
    real, lane = ("float", "int32_t") if dtype == "float32" else ("double", "int64_t")
    lines = (
        "#include <stdint.h>",
        f"typedef {real} real;",
        f"typedef {lane} lane;",
        f"#define BETTER {'>' if reduce == 'max' else '<'}",
    )
    library = ctypes.CDLL(str(compile_source("\n".join(lines) + _BODY, cache_dir=cache_dir)))
    function = getattr(library, _SYMBOL)
    function.restype = None
    return function
