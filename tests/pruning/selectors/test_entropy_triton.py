"""Entropy kernels against the float64 reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of entropies need triton")

from sparseflow.pruning.selectors.ast import EntropyScore, ScoreConfig
from sparseflow.pruning.selectors.entropy.reference import compute_entropies as reference
from sparseflow.pruning.selectors.entropy.triton import MAX_TILE_SIZE, compute_entropies, supports_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-6, torch.bfloat16: 5e-6}
"""Largest error in nats; the kernels compute in float32."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def check(
    x: Tensor,
    windows: Tensor,
    cells: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    divergence: bool = False,
) -> None:
    scales = scale * (1.0 + 0.5 * torch.arange(len(x), device=DEVICE))
    starts = torch.cat([torch.zeros(1), cells.sum(1).cumsum(0)]).int()
    entropies = compute_entropies(
        x, windows.to(DEVICE), starts.to(DEVICE), cells.nonzero()[:, 1].int().to(DEVICE), mask,
        scales, divergence,
    )  # fmt: skip
    expected = reference(
        x.double(), windows.double().to(DEVICE), cells.double().to(DEVICE), mask,
        scale=scales.double(), divergence=divergence,
    )  # fmt: skip
    for actual, other in zip(entropies, expected, strict=True):
        assert actual.dtype == torch.float32 and actual.shape == other.shape
        torch.testing.assert_close(actual.double(), other, rtol=0.0, atol=TOLERANCE[x.dtype])


def features(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(shape, generator=g)).to(dtype).to(DEVICE)


def parts(t: int, grid: tuple[int, int], levels: tuple[int, ...] = (1, 2, 4)) -> tuple[Tensor, Tensor]:
    score = EntropyScore(t, grid, ScoreConfig(levels=levels))
    return score.get_buffer("windows"), score.get_buffer("cells")


SHAPES = [(1, 1, (1, 1), 1), (2, 3, (1, 3), 5), (1, 4, (2, 2), 16), (1, 3, (1, 5), 33)]
"""B, T, rows and columns of patches, C; small because the interpreter is slow."""


@pytest.mark.parametrize(
    ("shape", "dtype", "divergence"),
    [(shape, torch.float32, True) for shape in SHAPES] + [(SHAPES[1], dtype, False) for dtype in TOLERANCE],
)
def test_entropies_match_float64_reference(
    shape: tuple[int, int, tuple[int, int], int], dtype: torch.dtype, divergence: bool
) -> None:
    b, t, grid, c = shape
    n = grid[0] * grid[1]
    x = features((b, t, n, c), dtype)
    g = torch.Generator().manual_seed(1)
    mask = (torch.rand((b, t, n), generator=g) < 0.4).to(DEVICE)
    check(x, *parts(t, grid, (1, 2)), mask, divergence=divergence)
    if dtype == torch.float32 and shape == SHAPES[1]:
        check(x, *parts(t, grid, (1, 2)), divergence=divergence)


def test_strided_features_match_reference() -> None:
    windows, cells = parts(3, (2, 2), (2,))
    # After a class token, as in a model.
    x = features((2, 1 + 3 * 4, 8))[:, 1:].unflatten(1, (3, 4))
    assert not x.is_contiguous()
    # A mask with other strides.
    mask = (torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)) < 0.5).to(DEVICE)
    check(x, windows, cells, mask.transpose(1, 2), divergence=True)
    # Patches before frames.
    check(features((1, 4, 3, 8)).transpose(1, 2), windows, cells)
    # One sample, expanded.
    check(features((1, 3, 4, 8)).expand(2, -1, -1, -1), windows, cells)


@pytest.mark.parametrize("divergence", [False, True])
def test_groups_without_tokens_have_zero_entropy(divergence: bool) -> None:
    windows, cells = parts(3, (2, 2), (2,))
    x, mask = features((2, 3, 4, 6)), torch.ones(2, 3, 4, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    mask[1, :, 2] = False
    mask[1, 2] = False
    none, nowhere = torch.zeros(1, 3), torch.zeros(1, 4)
    cells = torch.cat([nowhere, cells[:1], nowhere, cells[1:], nowhere])
    check(x, torch.cat([windows, none]), cells, mask, divergence=divergence)


def test_empty_groups_and_batches_match_reference() -> None:
    windows, cells = parts(3, (1, 2), (2,))
    x = features((1, 3, 2, 6))
    check(x, windows[:0], cells)
    check(x, windows, cells[:0])
    check(x[:0], windows, cells)


def test_arbitrary_cells_match_reference() -> None:
    g = torch.Generator().manual_seed(0)
    windows = (torch.rand(3, 3, generator=g) < 0.5).float()
    check(features((1, 3, 11, 6)), windows, (torch.rand(3, 11, generator=g) < 0.5).float())


@pytest.mark.parametrize("scale", [0.15, 1.0, 10.0])
def test_scales_match_reference(scale: float) -> None:
    check(features((2, 3, 2, 8)), *parts(3, (1, 2), (2,)), scale=scale)


@pytest.mark.parametrize("divergence", [False, True])
def test_extreme_features_match_reference(divergence: bool) -> None:
    windows, cells = parts(3, (1, 2), (2,))
    for offset in (-1e4, 1e4):
        check(features((1, 3, 2, 8)).round() + offset, windows, cells, divergence=divergence)
    check(torch.zeros(1, 3, 2, 8, device=DEVICE), windows, cells, divergence=divergence)
    one_hot = torch.zeros(1, 3, 2, 8, device=DEVICE)
    one_hot[..., 3] = 1e3
    check(one_hot, windows, cells, divergence=divergence)


def test_supports_input_checks_dtype_and_size() -> None:
    def empty(t: int, c: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(1, dtype=dtype).expand(1, t, 3, c)

    fitting = torch.zeros(1, 16, 3, 2048)
    assert MAX_TILE_SIZE == 16 * 2048 and supports_input(fitting)
    assert (
        supports_input(fitting.half())
        and supports_input(fitting.bfloat16())
        and not supports_input(fitting.double())
    )
    assert not supports_input(torch.zeros(1, 16, 3, 2049)) and not supports_input(torch.zeros(1, 17, 3, 2048))
    assert not supports_input(fitting.transpose(2, 3)) and not supports_input(empty(4, 8))


def test_operator_passes_opcheck() -> None:
    windows, cells = parts(2, (1, 2), (2,))
    starts = torch.cat([torch.zeros(1), cells.sum(1).cumsum(0)]).int().to(DEVICE)
    kept_tokens = torch.ones(1, 2, 2, dtype=torch.bool, device=DEVICE)
    for mask in (None, kept_tokens):
        inputs: tuple[Any, ...] = (
            features((1, 2, 2, 8)), windows.to(DEVICE), starts, cells.nonzero()[:, 1].int().to(DEVICE), mask,
            torch.ones(1, device=DEVICE), False,
        )  # fmt: skip
        torch.library.opcheck(
            torch.ops.sparseflow.entropies.default, inputs, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_vit_base_sizes_match_reference(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    kept_tokens = (torch.rand(2, 8, 196, generator=g) < 0.5).to(DEVICE)
    for divergence in (False, True):
        for mask in (None, kept_tokens):
            check(features((2, 8, 196, 768), dtype), *parts(8, (14, 14)), mask, divergence=divergence)
