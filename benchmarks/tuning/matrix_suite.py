"""Matrices of `against.py` by family: generated ones, the same on every machine, and files.

===============  ==================================================================================
family           matrices
===============  ==================================================================================
``stencil2d``    5 and 9 points
``stencil3d``    7 and 27 points
``fem``          nodes of random triangles and tetrahedra, with one or three unknowns each
``scale_free``   recursive graphs (R-MAT; Chakrabarti et al., SDM 2004) and power laws
``planar``       triangulations, and grids of streets of which some are missing
``banded``       full bands, sparse bands, and diagonals
``block``        block-diagonal matrices, and random blocks
``pruned``       layers with unstructured, vector and balanced pruning
``bipartite``    many rows and few columns or the reverse, with power laws
===============  ==================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.spatial import Delaunay

from sparseflow.tuning.measure.families import infer_family
from sparseflow.tuning.measure.synthetic import sample_pattern
from sparseflow.tuning.schedule.matrices import CooMatrix, SparsityPattern
from sparseflow.tuning.schedule.matrix_files import parse_matrix_name, read_matrix

FILE_FAMILIES = {
    "Trec6_16x16_9": "bipartite",
    "Trefethen_20000": "banded",
    "bcsstk38": "fem",
    "cavity24": "fem",
    "cca": "planar",
    "conf5_0-4x4-18": "block",
    "delaunay_n15": "planar",
    "encoder.layer.10.output.dense.weight": "pruned",
    "encoder.layer.9.output.dense.weight": "pruned",
    "kim1": "stencil2d",
    "mhd4800a": "fem",
    "nemspmm1_16x4_0": "bipartite",
}
"""Name of a file -> family. Other files have the family of `infer_family`."""


@dataclass(frozen=True, kw_only=True)
class SuiteMatrix:
    """A matrix that is made when it is needed.

    Attributes:
        name: Name.
        family: Family.
        make: Function of a dtype.
    """

    name: str
    family: str
    make: Callable[[np.dtype], CooMatrix]


def list_matrices(files: Sequence[Path]) -> list[SuiteMatrix]:
    """List files and generated matrices, the first of each family first, then the second of each."""
    matrices = [_from_file(path) for path in sorted(files)] + [
        SuiteMatrix(name=name, family=family, make=partial(_make_matrix, make_pattern))
        for (family, name), make_pattern in GENERATED.items()
    ]
    families: dict[str, list[SuiteMatrix]] = {}
    for matrix in matrices:
        families.setdefault(matrix.family, []).append(matrix)
    rounds = itertools.zip_longest(*families.values())
    return [matrix for members in rounds for matrix in members if matrix is not None]


def _from_file(path: Path) -> SuiteMatrix:
    name = parse_matrix_name(path)
    family = infer_family(name, FILE_FAMILIES)
    return SuiteMatrix(name=name, family=family, make=lambda dtype: read_matrix(path, dtype=dtype))


def _make_matrix(make_pattern: Callable[[], SparsityPattern], dtype: np.dtype) -> CooMatrix:
    return make_pattern().to_matrix(dtype)


def make_stencil(side: int, axes: int, *, star: bool) -> SparsityPattern:
    """Connect the points of a grid with their neighbors along the axes (star), or also diagonally."""
    count = side**axes
    points = np.stack(np.unravel_index(np.arange(count), (side,) * axes))
    rows, cols = [], []
    for step in itertools.product((-1, 0, 1), repeat=axes):
        if star and np.abs(step).sum() > 1:
            continue
        neighbors = points + np.array(step)[:, None]
        inside = ((neighbors >= 0) & (neighbors < side)).all(0)
        rows.append(np.flatnonzero(inside))
        cols.append(np.ravel_multi_index(tuple(neighbors[:, inside]), (side,) * axes))
    return SparsityPattern.from_coords(np.concatenate(rows), np.concatenate(cols), (count, count))


def make_mesh(nodes: int, axes: int, *, unknowns: int = 1, ordered: bool = True) -> SparsityPattern:
    """Connect the nodes of a Delaunay triangulation of random points.

    Args:
        nodes: Number of points.
        axes: 2 for triangles, 3 for tetrahedra.
        unknowns: Rows of a node; the rows of connected nodes form dense blocks.
        ordered: Number the nodes by reverse Cuthill-McKee instead of at random.
    """
    simplices = Delaunay(np.random.default_rng(0).random((nodes, axes))).simplices
    pairs = [(first, second) for first in range(axes + 1) for second in range(axes + 1)]
    rows, cols = (np.concatenate([simplices[:, pair[side]] for pair in pairs]) for side in range(2))
    if ordered:
        graph = csr_array((np.ones(len(rows), np.int8), (rows, cols)), shape=(nodes, nodes))
        position = np.argsort(reverse_cuthill_mckee(graph, symmetric_mode=True))
        rows, cols = position[rows], position[cols]
    rows, cols = (unknowns * nodes_of_pair.astype(np.int64)[:, None, None] for nodes_of_pair in (rows, cols))
    rows, cols = np.broadcast_arrays(rows + np.arange(unknowns)[:, None], cols + np.arange(unknowns))
    return SparsityPattern.from_coords(rows.ravel(), cols.ravel(), (unknowns * nodes, unknowns * nodes))


def make_rmat(scale: int, degree: int) -> SparsityPattern:
    """Sample edges of a recursive graph of 2^scale nodes with the probabilities of Graph500."""
    rng = np.random.default_rng(0)
    count = degree << scale
    rows = cols = np.zeros(count, np.int64)
    for _ in range(scale):
        quadrant = np.searchsorted(np.cumsum([0.57, 0.19, 0.19]), rng.random(count), side="right")
        rows, cols = 2 * rows + quadrant // 2, 2 * cols + quadrant % 2
    return SparsityPattern.from_coords(rows, cols, (1 << scale, 1 << scale))


def make_streets(side: int) -> SparsityPattern:
    """Connect the points of a square grid with their neighbors along the axes, without 30 % of the edges."""
    rng = np.random.default_rng(0)
    points = np.arange(side * side).reshape(side, side)
    starts = np.concatenate([points[:, :-1].ravel(), points[:-1].ravel()])
    ends = np.concatenate([points[:, 1:].ravel(), points[1:].ravel()])
    present = rng.random(len(starts)) < 0.7
    starts, ends = starts[present], ends[present]
    return SparsityPattern.from_coords(
        np.concatenate([starts, ends]), np.concatenate([ends, starts]), (side * side, side * side)
    )


def make_diagonals(extent: int, offsets: Sequence[int]) -> SparsityPattern:
    """Fill diagonals."""
    rows = np.broadcast_to(np.arange(extent), (len(offsets), extent))
    cols = rows + np.array(offsets)[:, None]
    inside = (cols >= 0) & (cols < extent)
    return SparsityPattern.from_coords(rows[inside], cols[inside], (extent, extent))


def make_blocks(size: int, blocks: int, per_row: int) -> SparsityPattern:
    """Fill `per_row` random blocks in each row of a grid of blocks; 0 fills the diagonal blocks."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(blocks), max(per_row, 1))
    cols = rng.integers(blocks, size=len(rows)) if per_row else rows
    rows, cols = np.broadcast_arrays(
        size * rows[:, None, None] + np.arange(size)[:, None], size * cols[:, None, None] + np.arange(size)
    )
    return SparsityPattern.from_coords(rows.ravel(), cols.ravel(), (size * blocks, size * blocks))


def make_unstructured(height: int, width: int, density: float) -> SparsityPattern:
    """Sample the weights of a layer that remain at random."""
    rows, cols = np.nonzero(np.random.default_rng(0).random((height, width)) < density)
    return SparsityPattern.from_coords(rows, cols, (height, width))


def make_vectors(height: int, width: int, density: float, tall: int) -> SparsityPattern:
    """Sample vectors of `tall` weights of a column."""
    vectors = make_unstructured(height // tall, width, density)
    rows = tall * vectors.rows[:, None] + np.arange(tall)
    return SparsityPattern.from_coords(rows.ravel(), np.repeat(vectors.cols, tall), (height, width))


def make_balanced(height: int, width: int, group: int, present: int) -> SparsityPattern:
    """Sample `present` of each `group` of weights of a row."""
    order = np.random.default_rng(0).random((height, width // group, group)).argsort(-1)
    rows, groups, cols = np.nonzero(order < present)
    return SparsityPattern.from_coords(rows, group * groups + cols, (height, width))


def make_ratings(height: int, width: int, nnz: int) -> SparsityPattern:
    """Connect rows with columns that have a power law (Zipf)."""
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, width + 1)
    cols = rng.choice(width, size=nnz, p=weights / weights.sum())
    return SparsityPattern.from_coords(
        rng.integers(height, size=nnz), rng.permutation(width)[cols], (height, width)
    )


def make_synthetic(kind: str, rows: int, nnz: int) -> SparsityPattern:
    """Sample a pattern of the package."""
    return sample_pattern(np.random.default_rng(0), rows=(rows, rows), nnz=(nnz, nnz), kind=kind)[1]


def transpose(pattern: SparsityPattern) -> SparsityPattern:
    return SparsityPattern.from_coords(pattern.cols, pattern.rows, (pattern.shape[1], pattern.shape[0]))


GENERATED: dict[tuple[str, str], Callable[[], SparsityPattern]] = {
    ("stencil2d", "stencil5-300"): partial(make_stencil, 300, 2, star=True),
    ("stencil2d", "stencil9-256"): partial(make_stencil, 256, 2, star=False),
    ("stencil2d", "stencil5-512"): partial(make_stencil, 512, 2, star=True),
    ("stencil3d", "stencil7-40"): partial(make_stencil, 40, 3, star=True),
    ("stencil3d", "stencil27-32"): partial(make_stencil, 32, 3, star=False),
    ("stencil3d", "stencil7-64"): partial(make_stencil, 64, 3, star=True),
    ("stencil3d", "stencil27-48"): partial(make_stencil, 48, 3, star=False),
    ("fem", "triangles-40000"): partial(make_mesh, 40_000, 2),
    ("fem", "tetrahedra-20000"): partial(make_mesh, 20_000, 3),
    ("fem", "tetrahedra-8000x3"): partial(make_mesh, 8000, 3, unknowns=3),
    ("scale_free", "rmat-14x16"): partial(make_rmat, 14, 16),
    ("scale_free", "rmat-16x8"): partial(make_rmat, 16, 8),
    ("scale_free", "power-rows"): partial(make_synthetic, "power_rows", 32_768, 500_000),
    ("scale_free", "power-both"): partial(make_synthetic, "power_both", 32_768, 500_000),
    ("planar", "streets-256"): partial(make_streets, 256),
    ("planar", "triangulation-random"): partial(make_mesh, 65_536, 2, ordered=False),
    ("planar", "streets-400"): partial(make_streets, 400),
    ("banded", "band-8"): partial(make_diagonals, 50_000, range(-8, 9)),
    ("banded", "band-32"): partial(make_diagonals, 20_000, range(-32, 33)),
    ("banded", "sparse-band"): partial(make_synthetic, "banded", 40_000, 600_000),
    ("banded", "diagonals"): partial(make_diagonals, 60_000, (-3000, -250, -1, 0, 1, 250, 3000)),
    ("block", "diagonal-blocks-16"): partial(make_blocks, 16, 2048, 0),
    ("block", "random-blocks-4"): partial(make_blocks, 4, 8192, 6),
    ("block", "random-blocks-8"): partial(make_blocks, 8, 4096, 4),
    ("block", "diagonal-blocks-64"): partial(make_blocks, 64, 256, 0),
    ("pruned", "unstructured-10"): partial(make_unstructured, 768, 3072, 0.1),
    ("pruned", "unstructured-5"): partial(make_unstructured, 4096, 1024, 0.05),
    ("pruned", "vectors-8"): partial(make_vectors, 1024, 4096, 0.1, 8),
    ("pruned", "balanced-1-of-4"): partial(make_balanced, 1024, 1024, 4, 1),
    ("bipartite", "ratings"): partial(make_ratings, 60_000, 8000, 800_000),
    ("bipartite", "ratings-transposed"): lambda: transpose(make_ratings(60_000, 8000, 800_000)),
    ("bipartite", "wide-uniform"): partial(make_unstructured, 2000, 20_000, 0.01),
}
"""(family, name) -> function that makes the pattern."""
