"""The kernels of entropies against the reference in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of entropies need triton")

from sparseflow.pruning.selectors.ast import Score, ScoreConfig
from sparseflow.pruning.selectors.entropy.reference import entropies as reference
from sparseflow.pruning.selectors.entropy.triton import MOST, entropies, fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-6, torch.bfloat16: 5e-6}
"""Largest error in nats: features are widened to float32 first, whatever they come in."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def check(
    x: Tensor,
    windows: Tensor,
    cells: Tensor,
    there: Tensor | None = None,
    *,
    temperature: float = 1.0,
    divergence: bool = False,
) -> None:
    starts = torch.cat([torch.zeros(1), cells.sum(1).cumsum(0)]).int()
    found = entropies(
        x, windows.to(DEVICE), starts.to(DEVICE), cells.nonzero()[:, 1].int().to(DEVICE), there,
        temperature, divergence,
    )  # fmt: skip
    expected = reference(
        x.double(), windows.double().to(DEVICE), cells.double().to(DEVICE), there,
        temperature=temperature, divergence=divergence,
    )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=TOLERANCE[x.dtype])


def features(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(shape, generator=g)).to(dtype).to(DEVICE)


def parts(t: int, grid: tuple[int, int], levels: tuple[int, ...] = (1, 2, 4)) -> tuple[Tensor, Tensor]:
    score = Score(t, grid, ScoreConfig(levels=levels))
    return score.get_buffer("windows"), score.get_buffer("cells")


SHAPES = [(1, 1, (1, 1), 1), (2, 3, (1, 3), 5), (1, 4, (2, 2), 16), (1, 3, (1, 5), 33)]
"""B, T, rows and columns of patches, C. The interpreter takes milliseconds a part: they are small."""


@pytest.mark.parametrize(
    ("shape", "dtype", "divergence"),
    [(shape, torch.float32, True) for shape in SHAPES] + [(SHAPES[1], dtype, False) for dtype in TOLERANCE],
)
def test_matches_float64(
    shape: tuple[int, int, tuple[int, int], int], dtype: torch.dtype, divergence: bool
) -> None:
    b, t, grid, c = shape
    n = grid[0] * grid[1]
    x = features((b, t, n, c), dtype)
    g = torch.Generator().manual_seed(1)
    there = (torch.rand((b, t, n), generator=g) < 0.4).to(DEVICE)
    check(x, *parts(t, grid, (1, 2)), there, divergence=divergence)
    if dtype == torch.float32 and shape == SHAPES[1]:
        check(x, *parts(t, grid, (1, 2)), divergence=divergence)


def test_any_strides() -> None:
    windows, cells = parts(3, (2, 2), (2,))
    # Behind a class token, as they stand in a model.
    x = features((2, 1 + 3 * 4, 8))[:, 1:].unflatten(1, (3, 4))
    assert not x.is_contiguous()
    # A mask with strides of its own.
    there = (torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)) < 0.5).to(DEVICE)
    check(x, windows, cells, there.transpose(1, 2), divergence=True)
    # Patches before frames.
    check(features((1, 4, 3, 8)).transpose(1, 2), windows, cells)
    # One sample for all.
    check(features((1, 3, 4, 8)).expand(2, -1, -1, -1), windows, cells)


@pytest.mark.parametrize("divergence", [False, True])
def test_parts_without_a_token_are_zero(divergence: bool) -> None:
    windows, cells = parts(3, (2, 2), (2,))
    x, there = features((2, 3, 4, 6)), torch.ones(2, 3, 4, dtype=torch.bool, device=DEVICE)
    there[0] = False
    there[1, :, 2] = False
    there[1, 2] = False
    none, nowhere = torch.zeros(1, 3), torch.zeros(1, 4)
    cells = torch.cat([nowhere, cells[:1], nowhere, cells[1:], nowhere])
    check(x, torch.cat([windows, none]), cells, there, divergence=divergence)


def test_no_windows_no_cells_no_samples() -> None:
    windows, cells = parts(3, (1, 2), (2,))
    x = features((1, 3, 2, 6))
    check(x, windows[:0], cells)
    check(x, windows, cells[:0])
    check(x[:0], windows, cells)


def test_cells_may_be_any_patches() -> None:
    g = torch.Generator().manual_seed(0)
    windows = (torch.rand(3, 3, generator=g) < 0.5).float()
    check(features((1, 3, 11, 6)), windows, (torch.rand(3, 11, generator=g) < 0.5).float())


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
def test_temperature(temperature: float) -> None:
    check(features((1, 3, 2, 8)), *parts(3, (1, 2), (2,)), temperature=temperature)


@pytest.mark.parametrize("divergence", [False, True])
def test_features_far_from_zero_and_alike(divergence: bool) -> None:
    windows, cells = parts(3, (1, 2), (2,))
    for offset in (-1e4, 1e4):
        check(features((1, 3, 2, 8)).round() + offset, windows, cells, divergence=divergence)
    check(torch.zeros(1, 3, 2, 8, device=DEVICE), windows, cells, divergence=divergence)
    one_hot = torch.zeros(1, 3, 2, 8, device=DEVICE)
    one_hot[..., 3] = 1e3
    check(one_hot, windows, cells, divergence=divergence)


def test_what_fits() -> None:
    def empty(t: int, c: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(1, dtype=dtype).expand(1, t, 3, c)

    fitting = torch.zeros(1, 16, 3, 2048)
    assert MOST == 16 * 2048 and fits(fitting)
    assert fits(fitting.half()) and fits(fitting.bfloat16()) and not fits(fitting.double())
    assert not fits(torch.zeros(1, 16, 3, 2049)) and not fits(torch.zeros(1, 17, 3, 2048))
    assert not fits(fitting.transpose(2, 3)) and not fits(empty(4, 8))


def test_the_operator_is_well_made() -> None:
    windows, cells = parts(2, (1, 2), (2,))
    starts = torch.cat([torch.zeros(1), cells.sum(1).cumsum(0)]).int().to(DEVICE)
    there = torch.ones(1, 2, 2, dtype=torch.bool, device=DEVICE)
    for mask in (None, there):
        given: tuple[Any, ...] = (
            features((1, 2, 2, 8)), windows.to(DEVICE), starts, cells.nonzero()[:, 1].int().to(DEVICE), mask,
            1.0, False,
        )  # fmt: skip
        torch.library.opcheck(
            torch.ops.sparseflow.entropies.default, given, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sizes_of_a_real_model(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    there = (torch.rand(2, 8, 196, generator=g) < 0.5).to(DEVICE)
    for divergence in (False, True):
        for mask in (None, there):
            check(features((2, 8, 196, 768), dtype), *parts(8, (14, 14)), mask, divergence=divergence)
