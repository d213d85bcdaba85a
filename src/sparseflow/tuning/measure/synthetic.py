"""Random sparsity patterns that resemble those of real matrices.

===================  ==================================================================================
kind                 elements
===================  ==================================================================================
``uniform``          anywhere
``banded``           within a distance of the diagonal, a fraction of the band
``power_rows``       row lengths with a power law, any columns
``power_both``       rows and columns with power laws, as in link graphs
``blocks``           dense blocks, aligned to a grid or not, anywhere or near the diagonal
``stencil``          a point of a 2-D or 3-D grid and its nearest neighbors
``diagonals``        a few full diagonals
``arrow``            first or last rows and columns, and a band
``mesh``             close points that are scattered over a square, numbered by position or at random
``small_world``      neighbors on a ring, some of them rewired
``constant_rows``    equally many in each row, any columns
``pruned``           weights of a layer with unstructured pruning, uneven over rows
``vector_pruned``    weights of a layer, pruned in vectors of 4, 8 or 16 rows
===================  ==================================================================================

A kind takes the number of rows and of elements and samples the other parameters. Both numbers are met or
slightly undershot, or met approximately if the kind does not allow more, such as for full diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from sparseflow.core.checks import check_one_of
from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import SparsityPattern

PatternSampler = Callable[[np.random.Generator, int, int], SparsityPattern]
"""(generator, rows, elements) -> a pattern of about this size."""

ROWS = (256, 65536)
"""Default range of rows."""

NNZ = (4096, 1_000_000)
"""Default range of elements."""

_MAX_DENSITY = 0.5
"""Largest density of a pattern."""

_MAX_ROUNDS = 8
"""Rounds of resampling duplicate elements."""


def sample_pattern(
    rng: np.random.Generator,
    *,
    rows: tuple[int, int] = ROWS,
    nnz: tuple[int, int] = NNZ,
    kind: str | None = None,
) -> tuple[str, SparsityPattern]:
    """Sample a pattern.

    Args:
        rng: Random generator.
        rows: Minimum and maximum number of rows, sampled log-uniformly; at least two elements per row if the
            ranges allow it.
        nnz: Minimum and maximum number of elements, sampled log-uniformly; fewer if the density would exceed
            0.5.
        kind: One of `PATTERN_KINDS`; by default any.

    Returns:
        The name, which starts with the kind and ends with a part of the digest, and the pattern.

    Raises:
        InputError: The kind is unknown, or a range is empty or starts below 1.
    """
    for name, (low, high) in (("rows", rows), ("nnz", nnz)):
        if not 1 <= low <= high:
            raise InputError(f"`{name}` (={(low, high)}) must be a range (minimum, maximum) from 1")
    if kind is None:
        kind = tuple(PATTERN_KINDS)[rng.integers(len(PATTERN_KINDS))]
    check_one_of(PATTERN_KINDS, kind=kind)
    elements = _sample_log_uniform(rng, *nnz)
    pattern = PATTERN_KINDS[kind](
        rng, _sample_log_uniform(rng, rows[0], max(rows[0], min(rows[1], elements // 2))), elements
    )
    height, width = pattern.shape
    return f"{kind}-{height}x{width}-{pattern.nnz}-{pattern.digest()[:6]}", pattern


def _sample_uniform(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    return _sample_uniform_pairs(rng, height, _sample_width(rng, height), nnz)


def _sample_banded(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    filled = rng.uniform(0.4, 0.95)
    rows, cols = _list_band(height, nnz / filled)
    return _subsample(rng, rows, cols, (height, height), nnz)


def _sample_power_rows(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    width = _sample_width(rng, height)
    rows = _make_power_sampler(rng, height)
    return _sample_distinct(rng, height, width, nnz, lambda n: (rows(n), rng.integers(width, size=n)))


def _sample_power_both(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    rows, cols = _make_power_sampler(rng, height), _make_power_sampler(rng, height)
    return _sample_distinct(rng, height, height, nnz, lambda n: (rows(n), cols(n)))


def _sample_blocks(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    width = _sample_width(rng, height)
    tall, wide = (int(2 ** rng.integers(1, 6)) for _ in range(2))
    if rng.random() < 0.5:
        wide = tall
    filled = 1.0 if rng.random() < 0.5 else rng.uniform(0.5, 1.0)
    count = math.ceil(nnz / (tall * wide * filled))
    aligned, spread = rng.random() < 0.7, rng.uniform(0.01, 0.2)
    grid_rows, grid_cols = (-(-height // tall), -(-width // wide)) if aligned else (height, width)
    if rng.random() < 0.5:
        corners_pattern = _sample_uniform_pairs(rng, grid_rows, grid_cols, count)
    else:
        corners_pattern = _sample_distinct(
            rng, grid_rows, grid_cols, count, _make_diagonal_sampler(rng, grid_rows, grid_cols, spread)
        )
    down, across = (tall, wide) if aligned else (1, 1)
    corners = (corners_pattern.rows * down)[:, None, None], (corners_pattern.cols * across)[:, None, None]
    rows, cols = np.broadcast_arrays(corners[0] + np.arange(tall)[:, None], corners[1] + np.arange(wide))
    return _subsample(rng, rows, cols, (height, width), nnz)


def _sample_stencil(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    axes = int(rng.integers(2, 4))
    sides = [max(1, int(height ** (1 / axes) * rng.uniform(0.7, 1.4))) for _ in range(axes - 1)]
    sides = [max(1, height // math.prod(sides)), *sides]
    count = math.prod(sides)
    points = np.stack(np.unravel_index(np.arange(count), sides))
    num_neighbors = max(1, min(round(nnz / count), int(_MAX_DENSITY * count)))
    radius = math.ceil(0.7 * num_neighbors ** (1 / axes)) + 1
    steps = np.stack(np.meshgrid(*[np.arange(-radius, radius + 1)] * axes, indexing="ij")).reshape(axes, -1)
    nearest = steps[:, np.argsort((steps**2).sum(0), kind="stable")[:num_neighbors]]
    rows, cols = [], []
    limits = np.array(sides)[:, None]
    for step in nearest.T:
        other = points + step[:, None]
        inside = ((other >= 0) & (other < limits)).all(0)
        rows.append(np.flatnonzero(inside))
        cols.append(np.ravel_multi_index(tuple(other[:, inside]), sides))
    return SparsityPattern.from_coords(np.concatenate(rows), np.concatenate(cols), (count, count))


def _sample_diagonals(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    reach = max(1, int(height * (1.0 if rng.random() < 0.5 else rng.uniform(0.01, 0.3))) - 1)
    # Diagonals far from the center are short; this is the mean relative length.
    mean_fill = 1.0 - 0.5 * reach / height
    count = max(1, min(round(nnz / (height * mean_fill)), int(_MAX_DENSITY * height)))
    diagonal = np.arange(height)
    offsets = rng.permutation(np.arange(-reach, reach + 1))[: count - 1]
    rows = np.broadcast_to(diagonal, (len(offsets) + 1, height))
    return _clip_to_shape(rows, rows + np.append(offsets, 0)[:, None], (height, height))


def _sample_arrow(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    head = rng.uniform(0.3, 0.8) * nnz
    thick = np.arange(max(1, min(round(0.5 * head / height), height // 4)))[:, None]
    along_axis, across = np.broadcast_arrays(np.arange(height), thick)
    band_rows, band_cols = _list_band(height, nnz - head)
    rows = np.concatenate([along_axis.ravel(), across.ravel(), band_rows])
    cols = np.concatenate([across.ravel(), along_axis.ravel(), band_cols])
    if rng.random() < 0.5:
        rows, cols = height - 1 - rows, height - 1 - cols
    return _subsample(rng, rows, cols, (height, height), nnz)


def _sample_mesh(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    side = math.isqrt(height)
    count = side * side
    radius = math.sqrt(min(nnz / count, _MAX_DENSITY * count) / math.pi)
    scatter = rng.uniform(0.2, 1.0)
    y, x = np.divmod(np.arange(count), side)
    coordinates = np.stack([y, x]) + rng.uniform(-0.5 * scatter, 0.5 * scatter, (2, count))
    reach = min(math.ceil(radius + scatter), side - 1)
    rows, cols = [], []
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            sources = np.flatnonzero(
                (y + down >= 0) & (y + down < side) & (x + right >= 0) & (x + right < side)
            )
            targets = sources + down * side + right
            distance = np.linalg.norm(coordinates[:, sources] - coordinates[:, targets], axis=0)
            within_radius = distance <= radius
            rows.append(sources[within_radius])
            cols.append(targets[within_radius])
    node_index = np.arange(count)
    order = rng.integers(3)
    if order == 1:
        node_index[np.argsort(_spread_bits(y) << 1 | _spread_bits(x))] = np.arange(count)
    elif order == 2:
        node_index = rng.permutation(count)
    return SparsityPattern.from_coords(
        node_index[np.concatenate(rows)], node_index[np.concatenate(cols)], (count, count)
    )


def _sample_small_world(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    reach = max(1, min(math.ceil(0.5 * nnz / height), height // 4))
    steps = np.concatenate([np.arange(-reach, 0), np.arange(1, reach + 1)])
    rows = np.broadcast_to(np.arange(height), (len(steps), height))
    cols = (rows + steps[:, None]) % height
    moved = rng.random(cols.shape) < 10 ** rng.uniform(-3.0, -0.3)
    cols[moved] = rng.integers(height, size=int(moved.sum()))
    return _subsample(rng, rows, cols, (height, height), nnz)


def _sample_constant_rows(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    width = _sample_width(rng, height)
    count = max(1, min(round(nnz / height), int(_MAX_DENSITY * width)))
    # Adding 0, 1, 2, … to ascending numbers makes them distinct.
    cols = np.sort(rng.integers(width - count + 1, size=(height, count)), axis=1) + np.arange(count)
    return SparsityPattern.from_coords(np.repeat(np.arange(height), count), cols.ravel(), (height, width))


def _sample_pruned(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    width = _sample_layer_width(rng, height)
    rows = _make_weighted_sampler(rng, rng.lognormal(0.0, rng.uniform(0.0, 0.8), height))
    cols = _make_weighted_sampler(rng, rng.lognormal(0.0, rng.uniform(0.0, 0.4), width))
    return _sample_distinct(rng, height, width, nnz, lambda n: (rows(n), cols(n)))


def _sample_vector_pruned(rng: np.random.Generator, height: int, nnz: int) -> SparsityPattern:
    tall = int(rng.choice([4, 8, 16]))
    groups = max(1, height // tall)
    width = _sample_layer_width(rng, height)
    vectors = _sample_uniform_pairs(rng, groups, width, math.ceil(nnz / tall))
    rows = vectors.rows[:, None] * tall + np.arange(tall)
    return SparsityPattern.from_coords(rows.ravel(), np.repeat(vectors.cols, tall), (groups * tall, width))


PATTERN_KINDS: Mapping[str, PatternSampler] = {
    "uniform": _sample_uniform,
    "banded": _sample_banded,
    "power_rows": _sample_power_rows,
    "power_both": _sample_power_both,
    "blocks": _sample_blocks,
    "stencil": _sample_stencil,
    "diagonals": _sample_diagonals,
    "arrow": _sample_arrow,
    "mesh": _sample_mesh,
    "small_world": _sample_small_world,
    "constant_rows": _sample_constant_rows,
    "pruned": _sample_pruned,
    "vector_pruned": _sample_vector_pruned,
}
"""Kind -> sampler. Names have no digits, so that each kind is a family; see `families`."""


def _sample_log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))))))


def _sample_width(rng: np.random.Generator, height: int) -> int:
    """Sample the number of columns: mostly equal to the rows, else within a factor of four."""
    if rng.random() < 0.6:
        return height
    return _limit_width(height, round(height * 2.0 ** rng.uniform(-2.0, 2.0)))


def _sample_layer_width(rng: np.random.Generator, height: int) -> int:
    return _limit_width(height, int(height * rng.choice([0.25, 0.5, 1.0, 2.0, 4.0])))


def _limit_width(height: int, width: int) -> int:
    """Limit the number of columns, because dense operands have as many rows."""
    return max(2, min(width, max(height, ROWS[1])))


def _make_weighted_sampler(rng: np.random.Generator, weights: np.ndarray) -> Callable[[int], np.ndarray]:
    """Create a sampler of indices by weight."""
    bounds = np.cumsum(weights)
    last = len(weights) - 1
    return lambda n: np.minimum(np.searchsorted(bounds, rng.random(n) * bounds[-1], side="right"), last)


def _make_power_sampler(rng: np.random.Generator, extent: int) -> Callable[[int], np.ndarray]:
    """Create a sampler of indices by a power law of their ranks, mostly in random order."""
    weights = np.arange(1, extent + 1) ** -rng.uniform(0.4, 1.2)
    return _make_weighted_sampler(rng, weights if rng.random() < 0.3 else rng.permutation(weights))


def _make_diagonal_sampler(
    rng: np.random.Generator, height: int, width: int, spread: float
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Create a sampler of coordinates near the diagonal."""

    def sample(count: int) -> tuple[np.ndarray, np.ndarray]:
        rows = rng.integers(height, size=count)
        cols = (rows + 0.5) / height * width + rng.normal(0.0, spread * width, count)
        return rows, np.clip(cols.astype(np.int64), 0, width - 1)

    return sample


def _list_band(extent: int, count: float) -> tuple[np.ndarray, np.ndarray]:
    """List about `count` elements closest to the diagonal, as full diagonals."""
    reach = min(math.ceil(0.5 * (count / extent - 1.0)), extent // 2) if count > extent else 0
    rows = np.broadcast_to(np.arange(extent), (2 * reach + 1, extent))
    cols = rows + np.arange(-reach, reach + 1)[:, None]
    valid = (cols >= 0) & (cols < extent)
    return rows[valid], cols[valid]


def _spread_bits(values: np.ndarray) -> np.ndarray:
    """Insert a zero before each bit of the values."""
    spread = np.zeros_like(values)
    for bit in range(int(values.max(initial=0)).bit_length()):
        spread |= (values >> bit & 1) << 2 * bit
    return spread


def _limit_elements(height: int, width: int, nnz: int) -> int:
    return max(1, min(nnz, int(_MAX_DENSITY * height * width)))


def _clip_to_shape(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> SparsityPattern:
    valid = (rows >= 0) & (rows < shape[0]) & (cols >= 0) & (cols < shape[1])
    return SparsityPattern.from_coords(rows[valid], cols[valid], shape)


def _subsample(
    rng: np.random.Generator, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int], nnz: int
) -> SparsityPattern:
    """Keep at most `nnz` of the elements within the shape."""
    pattern = _clip_to_shape(rows, cols, shape)
    max_elements = _limit_elements(*shape, nnz)
    if pattern.nnz <= max_elements:
        return pattern
    selected = rng.choice(pattern.nnz, max_elements, replace=False)
    return SparsityPattern.from_coords(pattern.rows[selected], pattern.cols[selected], shape)


def _sample_uniform_pairs(rng: np.random.Generator, height: int, width: int, nnz: int) -> SparsityPattern:
    return _sample_distinct(
        rng, height, width, nnz, lambda n: (rng.integers(height, size=n), rng.integers(width, size=n))
    )


def _sample_distinct(
    rng: np.random.Generator,
    height: int,
    width: int,
    nnz: int,
    sample: Callable[[int], tuple[np.ndarray, np.ndarray]],
) -> SparsityPattern:
    """Sample `nnz` distinct elements and resample duplicates."""
    max_elements = _limit_elements(height, width, nnz)
    keys = np.empty(0, np.int64)
    for _ in range(_MAX_ROUNDS):
        if len(keys) >= max_elements:
            break
        rows, cols = sample(max_elements + max_elements // 8 - len(keys))
        keys = np.union1d(keys, rows * width + cols)
    return _subsample(rng, keys // width, keys % width, (height, width), nnz)
