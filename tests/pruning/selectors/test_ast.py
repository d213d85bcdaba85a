"""The score against a second one, written with loops from what the module says; windows; regions; limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.pruning.selectors.ast import Score, ScoreConfig, voronoi, windows

Grid = tuple[int, int]


def features(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    return 2.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """A mask that leaves about half, but never nothing of a sample."""
    there = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    there[:, 0, 0] = True
    return there


# What the module says, once more, one number at a time.


def entropy(p: list[float]) -> float:
    return -sum(each * math.log(each + 1e-12) for each in p)


def softmax(x: list[float], temperature: float) -> list[float]:
    top = max(x)
    e = [math.exp((each - top) / temperature) for each in x]
    return [each / sum(e) for each in e]


def part(members: list[list[float]], measure: str) -> float:
    """The entropy, or the divergence, of a window or a cell that has these distributions."""
    mean = [sum(column) / len(members) for column in zip(*members, strict=True)]
    found = entropy(mean)
    return found - (sum(map(entropy, members)) / len(members) if measure == "divergence" else 0.0)


Map = dict[tuple[int, int], float]
"""Frame and patch -> value, of those that are there."""


def scaled(values: Map) -> Map:
    low, high = min(values.values()), max(values.values())
    return {at: (value - low) / max(high - low, 1e-4) for at, value in values.items()}


def mean_of(maps: list[Map]) -> Map:
    return {at: sum(each[at] for each in maps) / len(maps) for at in maps[0]}


def naive(x: Tensor, there: Tensor, grid: Grid, config: ScoreConfig) -> Map:
    """The score of one sample, x [T, N, C] and there [T, N]."""
    frames, patches = x.shape[:2]
    left = [(t, n) for t in range(frames) for n in range(patches) if there[t, n]]
    p = {(t, n): softmax(x[t, n].tolist(), config.temperature) for t, n in left}
    found = dict.fromkeys(left, 0.0)
    in_time = []
    for level in config.levels:
        length = math.ceil(frames / level)
        step = max(1, round(length * (1 - config.overlap)))
        starts = sorted({*range(0, frames - length, step), frames - length})
        values = {}
        for t, n in left:
            of = [
                part([p[s, n] for s in range(start, start + length) if (s, n) in p], config.measure)
                for start in starts
                if start <= t < start + length
            ]
            values[t, n] = sum(of) / len(of)
        in_time.append(scaled(values))
    in_time = mean_of(in_time)
    in_space = []
    for level in config.levels:
        high, wide = min(level, grid[0]), min(level, grid[1])
        cell = [(n // grid[1] * high // grid[0], n % grid[1] * wide // grid[1]) for n in range(patches)]
        values = {
            (t, n): part(
                [p[t, m] for m in range(patches) if cell[m] == cell[n] and (t, m) in p], config.measure
            )
            for t, n in left
        }
        in_space.append(scaled(values))
    in_space = mean_of(in_space)
    region = naive_voronoi(grid, config.regions)
    regions = {}
    for t, n in left:
        of = [in_time[t, m] for m in range(patches) if region[m] == region[n] and (t, m) in in_time]
        regions[t, n] = sum(of) / len(of)
    regions = scaled(regions)
    for at in left:
        found[at] = config.time * in_time[at] + config.space * in_space[at] + config.region * regions[at]
    return found


def naive_voronoi(grid: Grid, regions: int) -> list[int]:
    at = [(row, col) for row in range(grid[0]) for col in range(grid[1])]

    def apart(a: tuple[float, float], b: tuple[float, float]) -> float:
        return (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2

    middle = (grid[0] - 1) / 2, (grid[1] - 1) / 2
    seeds = [min(at, key=lambda each: apart(each, middle))]
    while len(seeds) < min(regions, len(at)):
        seeds.append(max(at, key=lambda each: min(apart(each, seed) for seed in seeds)))
    return [min(range(len(seeds)), key=lambda s: apart(each, seeds[s])) for each in at]


CASES: list[tuple[int, Grid, dict[str, Any]]] = [
    (8, (4, 4), {}),
    (5, (3, 4), {}),
    (5, (3, 4), {"measure": "divergence"}),
    (4, (2, 5), {"overlap": 0.0, "measure": "divergence"}),
    (4, (3, 3), {"overlap": 0.75}),
    (4, (3, 3), {"temperature": 0.3}),
    (6, (3, 3), {"time": 1.0, "space": 0.0, "region": 0.0}),
    (6, (3, 3), {"time": 0.0, "space": 1.0, "region": 0.0}),
    (6, (3, 3), {"time": 0.0, "space": 0.0, "region": 2.0, "regions": 3}),
    (6, (3, 3), {"regions": 1}),
    (3, (2, 3), {"regions": 100, "levels": (5,)}),
    (3, (2, 3), {"levels": (7, 2), "measure": "divergence"}),
    (1, (1, 4), {}),
    (4, (1, 1), {}),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("frames", "grid", "settings"), CASES)
def test_it_is_what_the_description_says(
    frames: int, grid: Grid, settings: dict[str, Any], masked: bool
) -> None:
    config, patches = ScoreConfig(**settings), grid[0] * grid[1]
    x = features((2, frames, patches, 5), seed=frames)
    there = some((2, frames, patches)) if masked else None
    found = Score(frames, grid, config)(x, there)
    assert found.shape == x.shape[:3] and found.dtype == torch.float64
    for at in range(2):
        left = torch.ones(frames, patches, dtype=torch.bool) if there is None else there[at]
        expected = naive(x[at], left, grid, config)
        for place, value in expected.items():
            assert found[at][place].item() == pytest.approx(value, abs=1e-9), place


def test_windows_by_hand() -> None:
    assert windows(8, 1, 0.5) == ((0, 8),)
    assert windows(8, 2, 0.5) == ((0, 4), (2, 4), (4, 4))
    assert windows(8, 4, 0.5) == tuple((start, 2) for start in range(7))
    # 5 / 2 is 3 frames, and half of them goes on 2.
    assert windows(5, 2, 0.5) == ((0, 3), (2, 3))
    assert windows(5, 4, 0.5) == ((0, 2), (1, 2), (2, 2), (3, 2))
    assert windows(8, 2, 0.0) == ((0, 4), (4, 4))
    # The last ends with the last frame, and so overlaps where nothing else does.
    assert windows(5, 2, 0.0) == ((0, 3), (2, 3))
    assert windows(7, 3, 0.0) == ((0, 3), (3, 3), (4, 3))
    assert windows(3, 9, 0.5) == ((0, 1), (1, 1), (2, 1))
    assert windows(1, 1, 0.9) == ((0, 1),)


@given(frames=st.integers(1, 40), level=st.integers(1, 50), overlap=st.floats(0.0, 0.99))
def test_windows_cover_all_frames_to_the_last(frames: int, level: int, overlap: float) -> None:
    found = windows(frames, level, overlap)
    assert {t for start, length in found for t in range(start, start + length)} == set(range(frames))
    assert {length for _, length in found} == {math.ceil(frames / level)}
    starts = [start for start, _ in found]
    assert starts == sorted(set(starts)) and starts[0] == 0
    assert sum(found[-1]) == frames


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), regions=st.integers(1, 20))
def test_regions_are_voronois(rows: int, cols: int, regions: int) -> None:
    found = voronoi((rows, cols), regions)
    assert found.dtype == torch.int64 and found.shape == (rows * cols,)
    assert found.tolist() == naive_voronoi((rows, cols), regions)
    assert found.unique().tolist() == list(range(min(regions, rows * cols)))
    assert torch.equal(found, voronoi((rows, cols), regions))


def test_four_regions_of_a_square_are_alike_in_size() -> None:
    sizes = voronoi((14, 14), 16).bincount()
    assert sizes.amin() > 196 / 16 / 3 and sizes.amax() < 196 / 16 * 3


def test_a_score_is_of_frame_and_patch_together() -> None:
    found = Score(8, (4, 4), ScoreConfig())(features((1, 8, 16, 6)))[0]
    alone = found.mean(0)[None, :] + found.mean(1)[:, None] - found.mean()
    assert (found - alone).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("measure", ["entropy", "divergence"])
def test_range_and_dtype(measure: Any, dtype: torch.dtype) -> None:
    config = ScoreConfig(time=1.0, space=0.5, region=0.25, measure=measure)
    x = features((3, 4, 9, 8)).to(dtype)
    found = Score(4, (3, 3), config).to(dtype)(x)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.amin() >= 0.0 and found.amax() <= 1.75
    exact = Score(4, (3, 3), config)(x.double())
    # The buffers are exact in every dtype, and what is computed is in float32 at least.
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("only", ["time", "space", "region"])
def test_a_single_map_is_scaled_to_one(only: str) -> None:
    weights: dict[str, Any] = {"time": 0.0, "space": 0.0, "region": 0.0} | {only: 1.0}
    found = Score(4, (3, 3), ScoreConfig(levels=(2,), **weights))(features((3, 4, 9, 8))).flatten(1)
    torch.testing.assert_close(found.amin(1), torch.zeros(3, dtype=torch.float64), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(found.amax(1), torch.ones(3, dtype=torch.float64), rtol=0.0, atol=1e-12)


def test_frames_that_are_all_the_same_do_not_diverge() -> None:
    still = features((2, 1, 9, 8)).expand(-1, 6, -1, -1)
    of_time = ScoreConfig(time=1.0, space=0.0, region=0.0, measure="divergence")
    assert Score(6, (3, 3), of_time)(still).abs().max() < 1e-6
    # Their entropies do differ, but only from patch to patch.
    found = Score(6, (3, 3), ScoreConfig(time=1.0, space=0.0, region=0.0))(still)
    torch.testing.assert_close(found, found[:, :1].expand(-1, 6, -1))
    assert found.amax() == 1.0


@pytest.mark.parametrize("channels", [16, 768])
@pytest.mark.parametrize("frames", [6, 8])
def test_frames_that_are_all_the_same_diverge_by_rounding_in_float32(channels: int, frames: int) -> None:
    still = features((2, 1, 16, channels)).float().expand(-1, frames, -1, -1)
    of_time = ScoreConfig(time=1.0, space=0.0, region=0.0, measure="divergence")
    found = Score(frames, (4, 4), of_time)(still)
    # Entropies near log(768) are rounded to 5e-7, and ranges below 1e-4 are not scaled up to 1.
    assert found.amin() >= 0.0 and found.amax() < 0.02


def test_a_sample_does_not_see_the_others() -> None:
    x, there = features((3, 4, 9, 8)), some((3, 4, 9))
    score = Score(4, (3, 3), ScoreConfig())
    for at in range(3):
        torch.testing.assert_close(score(x, there)[at], score(x[at : at + 1], there[at : at + 1])[0])


@pytest.mark.parametrize("measure", ["entropy", "divergence"])
@pytest.mark.parametrize("filled", [0.0, 1e4, -1e30])
def test_what_is_gone_does_not_matter(measure: Any, filled: float) -> None:
    x, there = features((2, 4, 9, 8)), some((2, 4, 9))
    score = Score(4, (3, 3), ScoreConfig(measure=measure))
    other = torch.where(there[..., None], x, filled * features(tuple(x.shape), seed=1))
    torch.testing.assert_close(score(x, there)[there], score(other, there)[there])


def test_a_mask_of_all_is_no_mask_and_one_token_alone_is_finite() -> None:
    x = features((2, 4, 9, 8))
    score = Score(4, (3, 3), ScoreConfig())
    torch.testing.assert_close(score(x, torch.ones(2, 4, 9, dtype=torch.bool)), score(x))
    alone = torch.zeros(2, 4, 9, dtype=torch.bool)
    alone[:, 2, 5] = True
    assert score(x, alone)[alone].isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("measure", ["entropy", "divergence"])
def test_gradients(measure: Any, masked: bool) -> None:
    score = Score(3, (2, 2), ScoreConfig(levels=(1, 2), regions=2, measure=measure))
    there = some((1, 3, 4), seed=3) if masked else None
    x = features((1, 3, 4, 3)).requires_grad_()

    def left(x: Tensor) -> Tensor:
        found = score(x, there)
        return found if there is None else found[there]

    assert torch.autograd.gradcheck(left, (x,))
    if there is not None:
        (gradient,) = torch.autograd.grad(left(x).square().sum(), x)
        assert not gradient[~there].any()


def test_autocast_leaves_it_alone() -> None:
    x, score = features((1, 4, 9, 8)).float(), Score(4, (3, 3), ScoreConfig())
    plain = score(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(score(x), plain, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": -1.0}, "`time` \\(=-1.0\\)"),
        ({"time": 0.0, "space": 0.0, "region": 0.0}, "one of them above 0"),
        ({"space": math.nan}, "`space` \\(=nan\\)"),
        ({"levels": ()}, "`levels` \\(=\\(\\)\\)"),
        ({"levels": (1, 0)}, "whole numbers of 1 and above"),
        ({"levels": (1.0,)}, "whole numbers"),
        ({"levels": (True,)}, "whole numbers"),
        ({"levels": [1, 2]}, "whole numbers"),
        ({"overlap": 1.0}, "`overlap` \\(=1.0\\) must be from 0 to below 1"),
        ({"overlap": -0.1}, "`overlap`"),
        ({"overlap": math.nan}, "`overlap`"),
        ({"regions": 0}, "`regions` \\(=0\\)"),
        ({"regions": 2.5}, "`regions` \\(=2.5\\) must be a whole number"),
        ({"regions": True}, "`regions` \\(=True\\)"),
        ({"time": math.inf}, "`time` \\(=inf\\) must be a finite number"),
        ({"time": True}, "`time` \\(=True\\)"),
        ({"temperature": math.inf}, "`temperature` \\(=inf\\)"),
        ({"temperature": "1"}, "`temperature` \\(='1'\\) must be a finite number"),
        ({"temperature": 0.0}, "`temperature` \\(=0.0\\)"),
        ({"measure": "variance"}, "'variance'.* must be entropy or divergence"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScoreConfig(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("measure", ["entropy", "divergence"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_takes_the_kernels_but_for_gradients(
    measure: Any, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.pruning.selectors import ast as module

    score = Score(8, (4, 4), ScoreConfig(measure=measure)).cuda()
    assert module._FUSED is not None
    asked: list[torch.dtype] = []
    fused = module._FUSED.entropies

    class Watched:
        fits = staticmethod(module._FUSED.fits)

        @staticmethod
        def entropies(x: Tensor, *others: Any) -> Any:
            asked.append(x.dtype)
            return fused(x, *others)

    monkeypatch.setattr(module, "_FUSED", Watched)
    x = features((2, 8, 16, 40)).cuda()
    there = some((2, 8, 16)).cuda() if masked else None
    left = torch.ones(2, 8, 16, dtype=torch.bool, device="cuda") if there is None else there
    exact = score(x, there)
    assert not asked  # float64 is for the reference.
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = x.to(dtype)
        found = score(given, there)
        assert asked.pop() == dtype and not asked
        torch.testing.assert_close(
            found[left].double(), score(given.double(), there)[left], rtol=0.0, atol=1e-4
        )
    learns = x.float().requires_grad_()
    found = score(learns, there)
    assert not asked and found.requires_grad
    torch.testing.assert_close(found[left].double(), exact[left], rtol=0.0, atol=1e-4)
    with torch.no_grad():
        score(learns, there)
    assert asked
