"""The quadratic assignment problem: who goes where, when pairs cost their flow times their distance.

Notation: F is the flow [n, n], D the distance [n, n], p a permutation: i stands at place p[i]. The cost is

    sum over i, j of F[i, j] * D[p[i], p[j]]                          (Koopmans & Beckmann 1957)

F and D may be asymmetric and their diagonals may hold anything. Both may also be stacks [K, n, n] of as many
matrices; the cost is then the sum over the stack, which is how several objectives are weighed together.
Integers are computed exactly in int64, everything else in float64.

Where there are more places than things, `padded` adds things that exchange nothing with anybody: moving one
to an empty place is then swapping it with such a dummy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

_LARGEST = 2**63 - 1

_MOST = 2**62
"""Costs up to here may be doubled."""

_MOST_FLOAT = 1e300

EXACT = 2.0**53
"""Integers up to here are exact in float64, and so are their sums."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """A problem as QAPLIB writes it (Burkard, Karisch & Rendl, J. Global Optimization 1997).

    Attributes:
        name: The file's, without its suffix.
        flow: [n, n], int64 or float64.
        distance: [n, n], likewise.
        optimum: Cost of the best permutation; None where that is not proven.
        best_known: Least cost that anybody found; None where the file does not say.
        bound: What the cost is at least; None where the file does not say.
    """

    name: str
    flow: np.ndarray
    distance: np.ndarray
    optimum: int | None = None
    best_known: int | None = None
    bound: int | None = None

    @property
    def n(self) -> int:
        return len(self.flow)


def stacked(flow: Any, distance: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as checked stacks of one dtype.

    Args:
        flow: [n, n] or [K, n, n], anything that numpy reads.
        distance: Likewise, of the same shape.

    Returns:
        F and D, [K, n, n], both int64 or both float64.

    Raises:
        InputError: They are not square or not alike, hold something that is not a finite number, or hold
            numbers so large that costs do not fit 64 bits.
    """
    f, d = _matrix("flow", flow), _matrix("distance", distance)
    if f.shape != d.shape:
        raise InputError(
            f"the flow has the shape {f.shape[-2:] if len(f) == len(d) else f.shape} and the distance "
            f"{d.shape[-2:] if len(f) == len(d) else d.shape}; they must be alike: pad the flow with "
            "`padded` where there are more places than things"
        )
    if f.dtype != d.dtype:
        f, d = f.astype(np.float64), d.astype(np.float64)
    if largest(f, d) > (_MOST if f.dtype == np.int64 else _MOST_FLOAT):
        raise InputError(
            f"costs of up to {largest(f, d):.1e} are too large for 64 bits; divide the flow or the distance "
            "by a common factor"
        )
    return f, d


def largest(flow: np.ndarray, distance: np.ndarray) -> float:
    """Upper bound of the cost's magnitude, for stacks [K, n, n]."""
    # The least int64 has no magnitude in int64.
    flows, distances = np.abs(flow.astype(np.float64)), np.abs(distance.astype(np.float64))
    with np.errstate(over="ignore"):
        return float(flows.sum((1, 2)) @ distances.max((1, 2)))


def cost(flow: Any, distance: Any, permutation: Any) -> int | float:
    """What a permutation costs; an int for integer matrices, exactly.

    Args:
        flow: [n, n] or [K, n, n].
        distance: Likewise.
        permutation: Place of each, [n].

    Raises:
        InputError: The matrices cannot be used (see `stacked`), or it is not a permutation of 0 … n-1.
    """
    f, d = stacked(flow, distance)
    p = checked_permutation(permutation, f.shape[1])
    return (f * d[:, p[:, None], p[None, :]]).sum().item()


def checked_permutation(permutation: Any, n: int) -> np.ndarray:
    """The permutation as int64 [n].

    Raises:
        InputError: It is not a permutation of 0 … n-1.
    """
    found = np.asarray(permutation)
    if (
        found.shape != (n,)
        or found.dtype.kind not in "iu"
        or not np.array_equal(np.sort(found), np.arange(n))
    ):
        raise InputError(
            f"a permutation of 0 … {n - 1} is needed, each once; given: shape {found.shape}, "
            f"{found.dtype}, {np.array2string(found.ravel(), threshold=20, edgeitems=8)}"
        )
    return found.astype(np.int64)


def padded(flow: Any, n: int) -> np.ndarray:
    """The flow among n of which the last exchange nothing.

    Args:
        flow: [m, m] or [K, m, m], m <= n.
        n: Number of places.

    Raises:
        InputError: There are fewer places than things.
    """
    f = np.asarray(flow)
    if f.ndim < 2 or f.shape[-1] > n:
        raise InputError(f"a flow of shape {f.shape} cannot be padded to {n} places; give at least as many")
    extra = n - f.shape[-1]
    return np.pad(f, [(0, 0)] * (f.ndim - 2) + [(0, extra), (0, extra)])


def read_qaplib(path: Path | str) -> Instance:
    """Read a QAPLIB file: a line `n`, or `n optimum best_known`, and two matrices of n² numbers.

    The first matrix is the flow, the second the distance; a line may break anywhere. A negative optimum says
    that none is proven and that the cost is at least its magnitude.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is no QAPLIB file; the message says what is wrong and in which line.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    try:
        text = file.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{file} is not a QAPLIB file: byte {error.start} is no ASCII") from error
    lines = [(number, line.split()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise FileFormatError(f"{file} is empty; a QAPLIB file begins with `n` or `n optimum best_known`")
    number, head = lines[0]
    try:
        header = [int(word) for word in head]
    except ValueError:
        header = []
    if len(header) not in (1, 3) or header[0] < 1:
        raise FileFormatError(
            f"{file}, line {number}: expected `n` or `n optimum best_known` in whole numbers, n at least 1; "
            f"found {' '.join(head)[:60]!r}"
        )
    n = header[0]
    numbers: list[int | float] = []
    for number, words in lines[1:]:
        for word in words:
            numbers.append(_number(word, f"{file}, line {number}"))
        if len(numbers) > 2 * n * n:
            raise FileFormatError(
                f"{file}, line {number}: two matrices of {n} × {n} are {2 * n * n} numbers, and there are "
                "more"
            )
    if len(numbers) < 2 * n * n:
        which, row = divmod(len(numbers), n * n)
        raise FileFormatError(
            f"{file} ends in row {row // n + 1} of matrix {which + 1}, line {lines[-1][0]}: it holds "
            f"{len(numbers)} numbers, and two matrices of {n} × {n} are {2 * n * n}"
        )
    whole = all(isinstance(value, int) for value in numbers)
    both = np.array(numbers, dtype=np.int64 if whole else np.float64).reshape(2, n, n)
    stacked(both[0], both[1])
    optimum, best = (header[1], header[2]) if len(header) == 3 else (None, None)
    if optimum is not None and best is not None and best < abs(optimum):
        raise FileFormatError(
            f"{file}, line {lines[0][0]}: the best known cost {best} is below the optimum or bound "
            f"{abs(optimum)}"
        )
    proven = optimum is not None and optimum >= 0
    return Instance(
        name=file.stem,
        flow=both[0],
        distance=both[1],
        optimum=optimum if proven else None,
        best_known=best,
        bound=None if optimum is None else abs(optimum),
    )


def _number(word: str, where: str) -> int | float:
    try:
        value: int | float = int(word)
    except ValueError:
        try:
            value = float(word)
        except ValueError:
            raise FileFormatError(f"{where}: {word[:40]!r} is not a number") from None
        if not np.isfinite(value):
            raise FileFormatError(f"{where}: {word[:40]!r} is not finite") from None
    if abs(value) > _LARGEST:
        raise FileFormatError(f"{where}: {word[:40]!r} does not fit 64 bits")
    return value


def _matrix(name: str, values: Any) -> np.ndarray:
    found = np.asarray(values)
    if found.dtype.kind not in "iufb":
        raise InputError(f"the {name} holds {found.dtype}; give integers or real numbers")
    if found.ndim == 2:
        found = found[None]
    if found.ndim != 3 or found.shape[1] != found.shape[2] or 0 in found.shape:
        raise InputError(
            f"the {name} has the shape {np.asarray(values).shape}; a square matrix [n, n] or a stack "
            "[K, n, n] of them is needed"
        )
    if found.dtype.kind == "u" and found.size and int(found.max()) > _LARGEST:
        raise InputError(f"the {name} holds {int(found.max())}, which does not fit int64")
    found = np.ascontiguousarray(found, np.float64 if found.dtype.kind == "f" else np.int64)
    if not np.isfinite(found).all():
        place = [int(axis[0]) for axis in np.nonzero(~np.isfinite(found))]
        raise InputError(
            f"the {name} holds {found[tuple(place)]} in row {place[1]}, column {place[2]}; every number must "
            "be finite"
        )
    return found


def lower_bound(flow: Any, distance: Any) -> int | float:
    """What the cost is at least; an int for integer matrices.

    Args:
        flow: [n, n] or [K, n, n].
        distance: Likewise.

    Raises:
        InputError: The matrices cannot be used; see `qap.stacked`.
        MissingExtraError: scipy is not installed.
    """
    f, d = stacked(flow, distance)
    found = _bound(f, d)
    # A sum over pairs in both directions bounds more tightly where flows go one way and distances do not.
    if (d == d.transpose(0, 2, 1)).all() and not (f == f.transpose(0, 2, 1)).all():
        both = _bound(f + f.transpose(0, 2, 1), d)
        found = max(found, -(-both // 2) if isinstance(both, int) else both / 2)
    return found


def _bound(f: np.ndarray, d: np.ndarray) -> int | float:
    """The bound of a checked problem."""
    optimize = require("scipy.optimize", "codesign")
    n = f.shape[1]
    # Where it is exact: numpy multiplies matrices of integers a hundred times more slowly.
    exact = f.dtype == np.int64 and largest(f, d) < EXACT
    working = np.float64 if exact else f.dtype
    least = np.zeros((n, n), working)
    others = ~np.eye(n, dtype=bool)
    for one, other in zip(f, d, strict=True):
        ascending = np.sort(one[others].reshape(n, n - 1), axis=1).astype(working)
        descending = np.sort(other[others].reshape(n, n - 1), axis=1)[:, ::-1].astype(working)
        least += ascending @ descending.T + np.outer(np.diag(one), np.diag(other))
    rows, columns = optimize.linear_sum_assignment(least)
    found = least[rows, columns].sum().astype(f.dtype).item()
    if isinstance(found, int) and (most := int(np.abs(least).max())) > 2**53:
        # scipy assigns in float64, and huge integers lose their last digits there.
        found -= n * (most >> 50)
    return found
