"""Patterns drawn at random that resemble those of real matrices, to collect labels on.

===================  ==================================================================================
kind                 elements
===================  ==================================================================================
``uniform``          anywhere
``banded``           within a distance of the diagonal, a share of the band
``power_rows``       in rows whose lengths follow a power law, in columns anywhere
``power_both``       in rows and columns that both follow a power law, as in graphs of links
``blocks``           in dense blocks, aligned to a grid or not, anywhere or near the diagonal
``stencil``          a point of a grid in two or three dimensions, and its nearest
``diagonals``        on a few whole diagonals
``arrow``            in the first or last rows and columns, and on a band
``mesh``             between near points that are scattered over a square, numbered by place or at random
``small_world``      between neighbours on a ring, some of them moved anywhere
``constant_rows``    as many in each row, in columns anywhere
``pruned``           of a layer's weights, single ones pruned, in some rows more than in others
``vector_pruned``    of a layer's weights, pruned in vectors of 4, 8 or 16 rows
===================  ==================================================================================

A kind is given how many rows and elements are wanted, and draws the rest itself. Both come out so or a little
less, or about so where the kind leaves no choice, as with whole diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import Pattern

Kind = Callable[[np.random.Generator, int, int], Pattern]
"""Draws a pattern of about so many rows and elements."""

ROWS = (256, 65536)
"""Least and most rows by default."""

NNZ = (4096, 1_000_000)
"""Least and most elements by default."""

_FULLEST = 0.5
"""Largest share of a matrix that is drawn; beyond it nothing would be sparse."""

_ROUNDS = 8
"""Draws to replace elements that fell on others, after which there are a few less."""


def draw(
    rng: np.random.Generator,
    *,
    rows: tuple[int, int] = ROWS,
    nnz: tuple[int, int] = NNZ,
    kind: str | None = None,
) -> tuple[str, Pattern]:
    """Draw a pattern.

    Args:
        rng: What all of it is drawn from.
        rows: Least and most rows, drawn evenly over the orders of magnitude; two elements a row or more where
            the ranges let it be so.
        nnz: Least and most elements, likewise; fewer where the matrix would be more than half full.
        kind: One of `KINDS`; by default any.

    Returns:
        Its name, which begins with the kind and ends in a part of its digest, and the pattern.

    Raises:
        InputError: There is no such kind, or a range is empty or begins below 1.
    """
    for name, (low, high) in (("rows", rows), ("nnz", nnz)):
        if not 1 <= low <= high:
            raise InputError(f"`{name}` (={(low, high)}) must be the least and the most, from 1 on")
    if kind is None:
        kind = tuple(KINDS)[rng.integers(len(KINDS))]
    elif kind not in KINDS:
        raise InputError(f"the kind {kind!r} is not known; choose one of: {', '.join(KINDS)}")
    elements = _between(rng, *nnz)
    pattern = KINDS[kind](rng, _between(rng, rows[0], max(rows[0], min(rows[1], elements // 2))), elements)
    height, width = pattern.shape
    return f"{kind}-{height}x{width}-{pattern.nnz}-{pattern.digest()[:6]}", pattern


def _uniform(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    width = _width(rng, height)
    return _distinct(rng, height, width, nnz, lambda n: (_any(rng, height, n), _any(rng, width, n)))


def _banded(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    filled = rng.uniform(0.4, 0.95)
    rows, cols = _band(height, nnz / filled)
    return _thinned(rng, rows, cols, (height, height), nnz)


def _power_rows(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    width = _width(rng, height)
    rows = _power(rng, height)
    return _distinct(rng, height, width, nnz, lambda n: (rows(n), _any(rng, width, n)))


def _power_both(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    rows, cols = _power(rng, height), _power(rng, height)
    return _distinct(rng, height, height, nnz, lambda n: (rows(n), cols(n)))


def _blocks(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    width = _width(rng, height)
    tall, wide = (int(2 ** rng.integers(1, 6)) for _ in range(2))
    if rng.random() < 0.5:
        wide = tall
    filled = 1.0 if rng.random() < 0.5 else rng.uniform(0.5, 1.0)
    count = math.ceil(nnz / (tall * wide * filled))
    aligned, spread = rng.random() < 0.7, rng.uniform(0.01, 0.2)
    high, far = (-(-height // tall), -(-width // wide)) if aligned else (height, width)
    if rng.random() < 0.5:
        places = _distinct(rng, high, far, count, lambda n: (_any(rng, high, n), _any(rng, far, n)))
    else:
        places = _distinct(rng, high, far, count, lambda n: _near_diagonal(rng, high, far, spread, n))
    down, across = (tall, wide) if aligned else (1, 1)
    corners = (places.rows * down)[:, None, None], (places.cols * across)[:, None, None]
    rows, cols = np.broadcast_arrays(corners[0] + np.arange(tall)[:, None], corners[1] + np.arange(wide))
    return _thinned(rng, rows, cols, (height, width), nnz)


def _stencil(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    axes = int(rng.integers(2, 4))
    sides = [max(1, int(height ** (1 / axes) * rng.uniform(0.7, 1.4))) for _ in range(axes - 1)]
    sides = [max(1, height // math.prod(sides)), *sides]
    count = math.prod(sides)
    points = np.stack(np.unravel_index(np.arange(count), sides))
    wanted = max(1, min(round(nnz / count), int(_FULLEST * count)))
    reach = math.ceil(0.7 * wanted ** (1 / axes)) + 1
    steps = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * axes, indexing="ij")).reshape(axes, -1)
    nearest = steps[:, np.argsort((steps**2).sum(0), kind="stable")[:wanted]]
    rows, cols = [], []
    limits = np.array(sides)[:, None]
    for step in nearest.T:
        other = points + step[:, None]
        inside = ((other >= 0) & (other < limits)).all(0)
        rows.append(np.flatnonzero(inside))
        cols.append(np.ravel_multi_index(tuple(other[:, inside]), sides))
    return Pattern.of(np.concatenate(rows), np.concatenate(cols), (count, count))


def _diagonals(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    reach = max(1, int(height * (1.0 if rng.random() < 0.5 else rng.uniform(0.01, 0.3))) - 1)
    # A diagonal far out is short: on average this much of it is there.
    there = 1.0 - 0.5 * reach / height
    count = max(1, min(round(nnz / (height * there)), int(_FULLEST * height)))
    places = np.arange(height)
    offsets = rng.permutation(np.arange(-reach, reach + 1))[: count - 1]
    rows = np.broadcast_to(places, (len(offsets) + 1, height))
    return _inside(rows, rows + np.append(offsets, 0)[:, None], (height, height))


def _arrow(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    head = rng.uniform(0.3, 0.8) * nnz
    thick = np.arange(max(1, min(round(0.5 * head / height), height // 4)))[:, None]
    along, across = np.broadcast_arrays(np.arange(height), thick)
    band_rows, band_cols = _band(height, nnz - head)
    rows = np.concatenate([along.ravel(), across.ravel(), band_rows])
    cols = np.concatenate([across.ravel(), along.ravel(), band_cols])
    if rng.random() < 0.5:
        rows, cols = height - 1 - rows, height - 1 - cols
    return _thinned(rng, rows, cols, (height, height), nnz)


def _mesh(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    side = math.isqrt(height)
    count = side * side
    radius = math.sqrt(min(nnz / count, _FULLEST * count) / math.pi)
    scatter = rng.uniform(0.2, 1.0)
    y, x = np.divmod(np.arange(count), side)
    place = np.stack([y, x]) + rng.uniform(-0.5 * scatter, 0.5 * scatter, (2, count))
    reach = min(math.ceil(radius + scatter), side - 1)
    rows, cols = [], []
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            here = np.flatnonzero((y + down >= 0) & (y + down < side) & (x + right >= 0) & (x + right < side))
            there = here + down * side + right
            near = ((place[:, here] - place[:, there]) ** 2).sum(0) <= radius * radius
            rows.append(here[near])
            cols.append(there[near])
    number = np.arange(count)
    order = rng.integers(3)
    if order == 1:
        number[np.argsort(_morton(y) << 1 | _morton(x))] = np.arange(count)
    elif order == 2:
        number = rng.permutation(count)
    return Pattern.of(number[np.concatenate(rows)], number[np.concatenate(cols)], (count, count))


def _small_world(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    reach = max(1, min(math.ceil(0.5 * nnz / height), height // 4))
    steps = np.concatenate([np.arange(-reach, 0), np.arange(1, reach + 1)])
    rows = np.broadcast_to(np.arange(height), (len(steps), height))
    cols = (rows + steps[:, None]) % height
    moved = rng.random(cols.shape) < 10 ** rng.uniform(-3.0, -0.3)
    cols[moved] = rng.integers(height, size=int(moved.sum()))
    return _thinned(rng, rows, cols, (height, height), nnz)


def _constant_rows(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    width = _width(rng, height)
    count = max(1, min(round(nnz / height), int(_FULLEST * width)))
    # Ascending numbers, made to differ by adding 0, 1, 2, … to them.
    cols = np.sort(rng.integers(width - count + 1, size=(height, count)), axis=1) + np.arange(count)
    return Pattern.of(np.repeat(np.arange(height), count), cols.ravel(), (height, width))


def _pruned(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    width = _layer_width(rng, height)
    rows = _weighted(rng, rng.lognormal(0.0, rng.uniform(0.0, 0.8), height))
    cols = _weighted(rng, rng.lognormal(0.0, rng.uniform(0.0, 0.4), width))
    return _distinct(rng, height, width, nnz, lambda n: (rows(n), cols(n)))


def _vector_pruned(rng: np.random.Generator, height: int, nnz: int) -> Pattern:
    tall = int(rng.choice([4, 8, 16]))
    groups = max(1, height // tall)
    width = _layer_width(rng, height)
    vectors = _distinct(
        rng,
        groups,
        width,
        math.ceil(nnz / tall),
        lambda n: (_any(rng, groups, n), _any(rng, width, n)),
    )
    rows = vectors.rows[:, None] * tall + np.arange(tall)
    return Pattern.of(rows.ravel(), np.repeat(vectors.cols, tall), (groups * tall, width))


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "uniform": _uniform,
        "banded": _banded,
        "power_rows": _power_rows,
        "power_both": _power_both,
        "blocks": _blocks,
        "stencil": _stencil,
        "diagonals": _diagonals,
        "arrow": _arrow,
        "mesh": _mesh,
        "small_world": _small_world,
        "constant_rows": _constant_rows,
        "pruned": _pruned,
        "vector_pruned": _vector_pruned,
    }
)
"""Name -> what draws it. No name holds a digit, so that each is a family; see `families`."""


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))))))


def _width(rng: np.random.Generator, height: int) -> int:
    """Columns: mostly as many as rows, else up to four times as many or as few."""
    if rng.random() < 0.6:
        return height
    return _not_huge(height, round(height * 2.0 ** rng.uniform(-2.0, 2.0)))


def _layer_width(rng: np.random.Generator, height: int) -> int:
    return _not_huge(height, int(height * rng.choice([0.25, 0.5, 1.0, 2.0, 4.0])))


def _not_huge(height: int, width: int) -> int:
    """Columns, within reason: dense operands have as many rows."""
    return max(2, min(width, max(height, ROWS[1])))


def _any(rng: np.random.Generator, extent: int, count: int) -> np.ndarray:
    return rng.integers(extent, size=count)


def _weighted(rng: np.random.Generator, weights: np.ndarray) -> Callable[[int], np.ndarray]:
    """Draws so many places, each as often as its weight says."""
    bounds = np.cumsum(weights)
    last = len(weights) - 1
    return lambda n: np.minimum(np.searchsorted(bounds, rng.random(n) * bounds[-1], side="right"), last)


def _power(rng: np.random.Generator, extent: int) -> Callable[[int], np.ndarray]:
    """Draws places by a power law of their ranks, which are in order now and then and mostly shuffled."""
    weights = np.arange(1, extent + 1) ** -rng.uniform(0.4, 1.2)
    return _weighted(rng, weights if rng.random() < 0.3 else rng.permutation(weights))


def _near_diagonal(
    rng: np.random.Generator, height: int, width: int, spread: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    rows = rng.integers(height, size=count)
    cols = (rows + 0.5) / height * width + rng.normal(0.0, spread * width, count)
    return rows, np.clip(cols.astype(np.int64), 0, width - 1)


def _band(extent: int, count: float) -> tuple[np.ndarray, np.ndarray]:
    """About so many elements nearest to the diagonal, whole diagonals."""
    reach = min(math.ceil(0.5 * (count / extent - 1.0)), extent // 2) if count > extent else 0
    rows = np.broadcast_to(np.arange(extent), (2 * reach + 1, extent))
    cols = rows + np.arange(-reach, reach + 1)[:, None]
    there = (cols >= 0) & (cols < extent)
    return rows[there], cols[there]


def _morton(values: np.ndarray) -> np.ndarray:
    """The bits of each value, a zero in front of each."""
    spread = np.zeros_like(values)
    for bit in range(int(values.max(initial=0)).bit_length()):
        spread |= (values >> bit & 1) << 2 * bit
    return spread


def _most(height: int, width: int, nnz: int) -> int:
    return max(1, min(nnz, int(_FULLEST * height * width)))


def _inside(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> Pattern:
    there = (rows >= 0) & (rows < shape[0]) & (cols >= 0) & (cols < shape[1])
    return Pattern.of(rows[there], cols[there], shape)


def _thinned(
    rng: np.random.Generator, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int], nnz: int
) -> Pattern:
    """So many of the elements that lie inside; all where there are not more."""
    found = _inside(rows, cols, shape)
    most = _most(*shape, nnz)
    if found.nnz <= most:
        return found
    kept = rng.choice(found.nnz, most, replace=False)
    return Pattern.of(found.rows[kept], found.cols[kept], shape)


def _distinct(
    rng: np.random.Generator,
    height: int,
    width: int,
    nnz: int,
    some: Callable[[int], tuple[np.ndarray, np.ndarray]],
) -> Pattern:
    """So many elements as `some` draws them, those that fall on others replaced."""
    most = _most(height, width, nnz)
    keys = np.empty(0, np.int64)
    for _ in range(_ROUNDS):
        if len(keys) >= most:
            break
        rows, cols = some(most + most // 8 - len(keys))
        keys = np.union1d(keys, rows * width + cols)
    return _thinned(rng, keys // width, keys % width, (height, width), nnz)
