"""The quadratic assignment problem (Koopmans & Beckmann 1957), its QAPLIB files and a lower bound.

Notation: flow F [n, n], distance D [n, n], permutation p: item i is at place p[i]. The cost is

    sum over i, j of F[i, j] * D[p[i], p[j]]

F and D may be asymmetric with arbitrary diagonals. Both may be stacks [K, n, n]; the cost is then summed over
the stack, which weights several objectives. Integers are computed exactly in int64, everything else in
float64.

If there are more places than items, `pad_flow` adds dummy items without flow: moving an item to an empty
place is a swap with a dummy.

The lower bound is that of Gilmore (1962) and Lawler (1963): item i at place q costs at least the product of
its ascending flows and the descending distances from q. The optimal linear assignment by these costs is a
lower bound for all permutations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

_MAX_INT64 = 2**63 - 1

_MAX_COST = 2**62
"""Maximum magnitude of integer costs: twice as much still fits into int64."""

_MAX_FLOAT_COST = 1e300
"""Maximum magnitude of float64 costs."""

EXACT = 2.0**53
"""Integers up to this magnitude are exact in float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QapInstance:
    """A QAPLIB instance (Burkard, Karisch & Rendl, J. Global Optimization 1997).

    Attributes:
        name: File name without suffix.
        flow: Flow between items, [n, n], int64 or float64.
        distance: Distance between places, [n, n], of the same dtype.
        optimum: Optimal cost; None if not proven.
        best_known: Lowest known cost; None if the file does not state it.
        bound: Lower bound of the cost; None if the file does not state it.
    """

    name: str
    flow: np.ndarray
    distance: np.ndarray
    optimum: int | None = None
    best_known: int | None = None
    bound: int | None = None

    @property
    def n(self) -> int:
        """Number of items and of places."""
        return len(self.flow)


def stack_matrices(flow: Any, distance: Any) -> tuple[np.ndarray, np.ndarray]:
    """Validate flow and distance and convert them to stacks of one dtype.

    Args:
        flow: [n, n] or [K, n, n], array-like.
        distance: Array-like of the same shape.

    Returns:
        F and D, [K, n, n], both int64 or both float64.

    Raises:
        InputError: The matrices are not square, differ in shape, contain non-finite values, or are too large
            for 64-bit costs.
    """
    f, d = _to_stack("flow", flow), _to_stack("distance", distance)
    if f.shape != d.shape:
        flow_shape, distance_shape = (f.shape[1:], d.shape[1:]) if len(f) == len(d) else (f.shape, d.shape)
        raise InputError(
            f"flow has shape {flow_shape} and distance {distance_shape}; expected equal shapes; pad the flow "
            "with `pad_flow` if there are more places than items"
        )
    if f.dtype != d.dtype:
        f, d = f.astype(np.float64), d.astype(np.float64)
    if bound_magnitude(f, d) > (_MAX_COST if f.dtype == np.int64 else _MAX_FLOAT_COST):
        raise InputError(
            f"costs of up to {bound_magnitude(f, d):.1e} exceed 64 bits; divide flow or distance "
            "by a common factor"
        )
    return f, d


def bound_magnitude(flow: np.ndarray, distance: np.ndarray) -> float:
    """Compute an upper bound of the magnitude of the cost, for stacks [K, n, n]."""
    # Converted first, because the smallest int64 has no absolute value in int64.
    flows, distances = np.abs(flow.astype(np.float64)), np.abs(distance.astype(np.float64))
    with np.errstate(over="ignore"):
        return float(flows.sum((1, 2)) @ distances.max((1, 2)))


def compute_cost(flow: Any, distance: Any, permutation: Any) -> int | float:
    """Compute the cost of a permutation; an exact int for integer matrices.

    Args:
        flow: [n, n] or [K, n, n].
        distance: Of the same shape.
        permutation: Place of each item, [n].

    Raises:
        InputError: See `stack_matrices`; or the permutation is invalid.
    """
    f, d = stack_matrices(flow, distance)
    p = check_permutation(permutation, f.shape[1])
    return (f * d[:, p[:, None], p[None, :]]).sum().item()


def check_permutation(permutation: Any, n: int) -> np.ndarray:
    """Convert a permutation to int64 [n].

    Raises:
        InputError: It is not a permutation of 0 … n-1.
    """
    array = np.asarray(permutation)
    if (
        array.shape != (n,)
        or array.dtype.kind not in "iu"
        or not np.array_equal(np.sort(array), np.arange(n))
    ):
        raise InputError(
            f"expected a permutation of 0 … {n - 1}; got shape {array.shape}, "
            f"{array.dtype}, {np.array2string(array.ravel(), threshold=20, edgeitems=8)}"
        )
    return array.astype(np.int64)


def pad_flow(flow: Any, n: int) -> np.ndarray:
    """Pad the flow with dummy items that have no flow.

    Args:
        flow: [m, m] or [K, m, m], m <= n.
        n: Number of places.

    Raises:
        InputError: There are fewer places than items.
    """
    f = np.asarray(flow)
    if f.ndim < 2 or f.shape[-1] > n:
        raise InputError(
            f"flow of shape {f.shape} cannot be padded to {n} places; there must be at least as many places"
        )
    extra = n - f.shape[-1]
    return np.pad(f, [(0, 0)] * (f.ndim - 2) + [(0, extra), (0, extra)])


def read_qaplib(path: Path | str) -> QapInstance:
    """Read a QAPLIB file: a line `n`, or `n optimum best_known`, and two matrices of n² numbers.

    The first matrix is the flow, the second the distance; lines may break anywhere. A negative optimum means
    that none is proven and its magnitude is a lower bound.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is invalid; the message contains the line.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist")
    try:
        text = file.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{file} is not a QAPLIB file: byte {error.start} is not ASCII") from error
    lines = [(number, line.split()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    header_line = lines[0] if lines else (1, [])
    n, optimum, best_known = _parse_header(*header_line, file)
    flow, distance = _parse_matrices(lines[1:], n, file, last_line=lines[-1][0])
    stack_matrices(flow, distance)
    if optimum is not None and best_known is not None and best_known < abs(optimum):
        raise FileFormatError(
            f"{file}, line {header_line[0]}: the best known cost {best_known} is below the optimum or bound "
            f"{abs(optimum)}"
        )
    is_proven = optimum is not None and optimum >= 0
    return QapInstance(
        name=file.stem,
        flow=flow,
        distance=distance,
        optimum=optimum if is_proven else None,
        best_known=best_known,
        bound=None if optimum is None else abs(optimum),
    )


def _parse_header(number: int, words: list[str], file: Path) -> tuple[int, int | None, int | None]:
    """Parse the first line of a QAPLIB file: n, and the optimum and the best known cost if present."""
    try:
        header = [int(word) for word in words]
    except ValueError:
        header = []
    if len(header) not in (1, 3) or header[0] < 1 or max(map(abs, header)) > _MAX_INT64:
        raise FileFormatError(
            f"{file}, line {number}: expected `n` or `n optimum best_known` (64-bit integers, n at least 1); "
            f"got {' '.join(words)[:60]!r}"
        )
    return (header[0], header[1], header[2]) if len(header) == 3 else (header[0], None, None)


def _parse_matrices(
    lines: list[tuple[int, list[str]]], n: int, file: Path, *, last_line: int
) -> tuple[np.ndarray, np.ndarray]:
    """Parse numbered lines of a QAPLIB file into its two matrices; lines may break anywhere."""
    numbers: list[int | float] = []
    for number, words in lines:
        numbers += (_parse_number(word, f"{file}, line {number}") for word in words)
        if len(numbers) > 2 * n * n:
            raise FileFormatError(
                f"{file}, line {number}: too many numbers; two matrices of {n} × {n} have {2 * n * n}"
            )
    if len(numbers) < 2 * n * n:
        matrix, index = divmod(len(numbers), n * n)
        raise FileFormatError(
            f"{file} ends in row {index // n + 1} of matrix {matrix + 1}, line {last_line}: got "
            f"{len(numbers)} numbers; two matrices of {n} × {n} have {2 * n * n}"
        )
    is_integral = all(isinstance(value, int) for value in numbers)
    first, second = np.array(numbers, dtype=np.int64 if is_integral else np.float64).reshape(2, n, n)
    return first, second


def _parse_number(word: str, context: str) -> int | float:
    try:
        value = int(word) if word.lstrip("+-").isdecimal() else float(word)
    except ValueError:
        raise FileFormatError(f"{context}: {word[:40]!r} is not a number") from None
    if not abs(value) <= _MAX_INT64:
        raise FileFormatError(f"{context}: {word[:40]!r} is not finite or exceeds 64 bits")
    return value


def _to_stack(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iufb":
        raise InputError(f"{name} has dtype {array.dtype}; expected integers or real numbers")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or array.shape[1] != array.shape[2] or 0 in array.shape:
        raise InputError(
            f"{name} has shape {np.asarray(values).shape}; expected a square matrix [n, n] or a stack "
            "[K, n, n]"
        )
    if array.dtype.kind == "u" and array.size and int(array.max()) > _MAX_INT64:
        raise InputError(f"{name} contains {int(array.max())}, which exceeds int64")
    array = np.ascontiguousarray(array, np.float64 if array.dtype.kind == "f" else np.int64)
    if not np.isfinite(array).all():
        index = [int(axis[0]) for axis in np.nonzero(~np.isfinite(array))]
        raise InputError(
            f"{name} contains {array[tuple(index)]} in row {index[1]}, column {index[2]}; values must "
            "be finite"
        )
    return array


def gilmore_lawler_bound(flow: Any, distance: Any) -> int | float:
    """Compute the Gilmore-Lawler lower bound of the cost; an int for integer matrices.

    Args:
        flow: [n, n] or [K, n, n].
        distance: Of the same shape.

    Raises:
        InputError: See `stack_matrices`.
        MissingExtraError: SciPy is missing.
    """
    f, d = stack_matrices(flow, distance)
    bound = _bound_stack(f, d)
    # With symmetric distances, the flows of both directions can be added, which gives a tighter bound.
    if (d == d.transpose(0, 2, 1)).all() and not (f == f.transpose(0, 2, 1)).all():
        doubled = _bound_stack(f + f.transpose(0, 2, 1), d)
        bound = max(bound, -(-doubled // 2) if isinstance(doubled, int) else doubled / 2)
    return bound


def _bound_stack(f: np.ndarray, d: np.ndarray) -> int | float:
    """Compute the Gilmore-Lawler bound of validated stacks."""
    optimize = require("scipy.optimize", "codesign")
    n = f.shape[1]
    # Integers are computed in float64 if that is exact, because NumPy multiplies integer matrices about a
    # hundred times slower.
    is_exact = f.dtype == np.int64 and bound_magnitude(f, d) < EXACT
    dtype = np.float64 if is_exact else f.dtype
    min_costs = np.zeros((n, n), dtype)
    off_diagonal = ~np.eye(n, dtype=bool)
    for flow, distance in zip(f, d, strict=True):
        ascending = np.sort(flow[off_diagonal].reshape(n, n - 1), axis=1).astype(dtype)
        descending = np.sort(distance[off_diagonal].reshape(n, n - 1), axis=1)[:, ::-1].astype(dtype)
        min_costs += ascending @ descending.T + np.outer(np.diag(flow), np.diag(distance))
    rows, columns = optimize.linear_sum_assignment(min_costs)
    total = min_costs[rows, columns].sum().astype(f.dtype).item()
    if isinstance(total, int) and (max_cost := int(np.abs(min_costs).max())) > EXACT:
        # SciPy rounds costs to float64, so its assignment may not be optimal. The error of each of the n
        # costs is below max_cost / 2^50, so the total remains a lower bound.
        total -= n * (max_cost >> 50)
    return total
