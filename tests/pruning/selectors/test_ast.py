"""AST score against an implementation with loops; windows, regions and limits."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.pruning.selectors.ast import EntropyScore, ScoreConfig, assign_voronoi_regions, list_windows

Grid = tuple[int, int]


def features(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    return 2.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """A mask that keeps about half of the tokens, at least one of each sample."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, 0, 0] = True
    return mask


# The definition of the module with loops over numbers.


def entropy(p: list[float]) -> float:
    return -sum(item * math.log(item + 1e-12) for item in p)


def softmax(x: list[float], temperature: float) -> list[float]:
    top = max(x)
    e = [math.exp((item - top) / temperature) for item in x]
    return [item / sum(e) for item in e]


def group_entropy(members: list[list[float]], measure: str) -> float:
    """Entropy or divergence of a group with these distributions."""
    mean = [sum(column) / len(members) for column in zip(*members, strict=True)]
    return entropy(mean) - (sum(map(entropy, members)) / len(members) if measure == "divergence" else 0.0)


Map = dict[tuple[int, int], float]
"""Frame and patch -> value of present tokens."""


def scaled(values: Map, measure: str) -> Map:
    if measure == "divergence":
        clipped = {index: max(value, 0.0) for index, value in values.items()}
        mean = sum(clipped.values()) / len(clipped)
        return {index: value / (value + mean + 1e-5) for index, value in clipped.items()}
    low, high = min(values.values()), max(values.values())
    return {index: (value - low) / max(high - low, 1e-4) for index, value in values.items()}


def mean_of(maps: list[Map], config: ScoreConfig) -> Map:
    """Mean of the maps of all levels; a divergence has the weight of its level."""
    weights = config.levels if config.measure == "divergence" else [1] * len(maps)
    return {
        index: sum(weight * item[index] for weight, item in zip(weights, maps, strict=True)) / sum(weights)
        for index in maps[0]
    }


def naive_score(x: Tensor, mask: Tensor, grid: Grid, config: ScoreConfig) -> Map:
    """Score of one sample, x [T, N, C] and mask [T, N]."""
    frames, patches = x.shape[:2]
    remaining = [(t, n) for t in range(frames) for n in range(patches) if mask[t, n]]
    temperature = config.temperature
    if config.measure == "divergence":
        variances = [statistics.pvariance(x[t, n].tolist()) for t, n in remaining]
        temperature *= 4.0 * statistics.fmean(variances) ** 0.5
    p = {(t, n): softmax(x[t, n].tolist(), temperature) for t, n in remaining}
    time_maps = []
    for level in config.levels:
        length = math.ceil(frames / level)
        step = max(1, round(length * (1 - config.overlap)))
        starts = sorted({*range(0, frames - length, step), frames - length})
        values = {}
        for t, n in remaining:
            by_cell = [
                group_entropy([p[s, n] for s in range(start, start + length) if (s, n) in p], config.measure)
                for start in starts
                if start <= t < start + length
            ]
            values[t, n] = sum(by_cell) / len(by_cell)
        time_maps.append(scaled(values, config.measure))
    in_time = mean_of(time_maps, config)
    space_maps = []
    for level in config.levels:
        high, wide = min(level, grid[0]), min(level, grid[1])
        cell = [(n // grid[1] * high // grid[0], n % grid[1] * wide // grid[1]) for n in range(patches)]
        values = {
            (t, n): group_entropy(
                [p[t, m] for m in range(patches) if cell[m] == cell[n] and (t, m) in p], config.measure
            )
            for t, n in remaining
        }
        space_maps.append(scaled(values, config.measure))
    in_space = mean_of(space_maps, config)
    region = naive_voronoi(grid, config.regions)
    regions = {}
    for t, n in remaining:
        by_cell = [in_time[t, m] for m in range(patches) if region[m] == region[n] and (t, m) in in_time]
        regions[t, n] = sum(by_cell) / len(by_cell)
    regions = scaled(regions, config.measure)
    return {
        index: config.time * in_time[index] + config.space * in_space[index] + config.region * regions[index]
        for index in remaining
    }


def naive_voronoi(grid: Grid, regions: int) -> list[int]:
    index = [(row, col) for row in range(grid[0]) for col in range(grid[1])]

    def distance(a: tuple[float, float], b: tuple[float, float]) -> float:
        return (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2

    middle = (grid[0] - 1) / 2, (grid[1] - 1) / 2
    seeds = [min(index, key=lambda item: distance(item, middle))]
    while len(seeds) < min(regions, len(index)):
        seeds.append(max(index, key=lambda item: min(distance(item, seed) for seed in seeds)))
    return [min(range(len(seeds)), key=lambda s: distance(item, seeds[s])) for item in index]


CASES: list[tuple[int, Grid, dict[str, Any]]] = [
    (8, (4, 4), {}),
    (5, (3, 4), {}),
    (5, (3, 4), {"measure": "entropy"}),
    (4, (2, 5), {"overlap": 0.0, "measure": "entropy"}),
    (4, (3, 3), {"overlap": 0.75}),
    (4, (3, 3), {"temperature": 0.3}),
    (6, (3, 3), {"time": 1.0, "space": 0.0, "region": 0.0}),
    (6, (3, 3), {"time": 0.0, "space": 1.0, "region": 0.0}),
    (6, (3, 3), {"time": 0.0, "space": 0.0, "region": 2.0, "regions": 3}),
    (6, (3, 3), {"regions": 1}),
    (3, (2, 3), {"regions": 100, "levels": (5,)}),
    (3, (2, 3), {"levels": (7, 2), "measure": "entropy"}),
    (1, (1, 4), {}),
    (4, (1, 1), {}),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("frames", "grid", "settings"), CASES)
def test_score_matches_naive_implementation(
    frames: int, grid: Grid, settings: dict[str, Any], masked: bool
) -> None:
    config, patches = ScoreConfig(**settings), grid[0] * grid[1]
    x = features((2, frames, patches, 5), seed=frames)
    mask = random_mask((2, frames, patches)) if masked else None
    score_map = EntropyScore(frames, grid, config)(x, mask)
    assert score_map.shape == x.shape[:3] and score_map.dtype == torch.float64
    for index in range(2):
        remaining = torch.ones(frames, patches, dtype=torch.bool) if mask is None else mask[index]
        expected = naive_score(x[index], remaining, grid, config)
        for position, value in expected.items():
            assert score_map[index][position].item() == pytest.approx(value, abs=1e-9), position


def test_list_windows_overlaps_and_ends_with_last_frame() -> None:
    assert list_windows(8, 1, 0.5) == ((0, 8),)
    assert list_windows(8, 2, 0.5) == ((0, 4), (2, 4), (4, 4))
    assert list_windows(8, 4, 0.5) == tuple((start, 2) for start in range(7))
    # 5 / 2 gives 3 frames, half of which is a step of 2.
    assert list_windows(5, 2, 0.5) == ((0, 3), (2, 3))
    assert list_windows(5, 4, 0.5) == ((0, 2), (1, 2), (2, 2), (3, 2))
    assert list_windows(8, 2, 0.0) == ((0, 4), (4, 4))
    # The last window ends with the last frame and overlaps although others do not.
    assert list_windows(5, 2, 0.0) == ((0, 3), (2, 3))
    assert list_windows(7, 3, 0.0) == ((0, 3), (3, 3), (4, 3))
    assert list_windows(3, 9, 0.5) == ((0, 1), (1, 1), (2, 1))
    assert list_windows(1, 1, 0.9) == ((0, 1),)


@given(frames=st.integers(1, 40), level=st.integers(1, 50), overlap=st.floats(0.0, 0.99))
def test_windows_cover_all_frames_to_the_last(frames: int, level: int, overlap: float) -> None:
    windows = list_windows(frames, level, overlap)
    assert {t for start, length in windows for t in range(start, start + length)} == set(range(frames))
    assert {length for _, length in windows} == {math.ceil(frames / level)}
    starts = [start for start, _ in windows]
    assert starts == sorted(set(starts)) and starts[0] == 0
    assert sum(windows[-1]) == frames


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), regions=st.integers(1, 20))
def test_regions_match_naive_voronoi(rows: int, cols: int, regions: int) -> None:
    assigned = assign_voronoi_regions((rows, cols), regions)
    assert assigned.dtype == torch.int64 and assigned.shape == (rows * cols,)
    assert assigned.tolist() == naive_voronoi((rows, cols), regions)
    assert assigned.unique().tolist() == list(range(min(regions, rows * cols)))
    assert torch.equal(assigned, assign_voronoi_regions((rows, cols), regions))


def test_four_regions_of_a_square_are_alike_in_size() -> None:
    sizes = assign_voronoi_regions((14, 14), 16).bincount()
    assert sizes.amin() > 196 / 16 / 3 and sizes.amax() < 196 / 16 * 3


def test_score_depends_on_frame_and_patch() -> None:
    score_map = EntropyScore(8, (4, 4), ScoreConfig())(features((1, 8, 16, 6)))[0]
    single = score_map.mean(0)[None, :] + score_map.mean(1)[:, None] - score_map.mean()
    assert (score_map - single).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("measure", ["entropy", "divergence"])
def test_score_is_in_range_and_at_least_float32(measure: Any, dtype: torch.dtype) -> None:
    config = ScoreConfig(time=1.0, space=0.5, region=0.25, measure=measure)
    x = features((3, 4, 9, 8)).to(dtype)
    score_map = EntropyScore(4, (3, 3), config).to(dtype)(x)
    assert score_map.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert score_map.amin() >= 0.0 and score_map.amax() <= 1.75
    exact = EntropyScore(4, (3, 3), config)(x.double())
    # Buffers are exact in every dtype, and the computation is at least in float32.
    torch.testing.assert_close(score_map.double(), exact, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("only", ["time", "space", "region"])
def test_a_single_entropy_map_is_scaled_to_one(only: str) -> None:
    weights: dict[str, Any] = {"time": 0.0, "space": 0.0, "region": 0.0} | {only: 1.0}
    config = ScoreConfig(levels=(2,), measure="entropy", **weights)
    score_map = EntropyScore(4, (3, 3), config)(features((3, 4, 9, 8))).flatten(1)
    torch.testing.assert_close(score_map.amin(1), torch.zeros(3, dtype=torch.float64), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(score_map.amax(1), torch.ones(3, dtype=torch.float64), rtol=0.0, atol=1e-12)


def test_divergences_do_not_depend_on_the_unit_of_features() -> None:
    score, x = EntropyScore(4, (3, 3), ScoreConfig()), features((2, 4, 9, 8))
    torch.testing.assert_close(score(1e3 * x + 5.0), score(x))
    torch.testing.assert_close(score(1e-6 * x), score(x))
    assert not score(torch.ones_like(x)).any()


def test_one_large_divergence_does_not_hide_others() -> None:
    x = features((1, 8, 16, 8)) * 0.01
    x[0, 3, 5] += 0.5 * torch.arange(8.0)  # changes between frames
    x[0, 6, 9] += 50.0 * torch.arange(8.0)  # changes far more
    score_map = EntropyScore(8, (4, 4), ScoreConfig())(x)[0]
    remaining = score_map.clone()
    remaining[2:8, [5, 9]] = 0.0
    assert score_map[3, 5] > 2.0 * remaining.mean() and score_map[6, 9] <= 2.0


def test_constant_frames_have_zero_divergence() -> None:
    still = features((2, 1, 9, 8)).expand(-1, 6, -1, -1)
    of_time = ScoreConfig(time=1.0, space=0.0, region=0.0, measure="divergence")
    assert EntropyScore(6, (3, 3), of_time)(still).abs().max() < 1e-6
    # Entropies differ between patches only.
    of_entropy = ScoreConfig(time=1.0, space=0.0, region=0.0, measure="entropy")
    score_map = EntropyScore(6, (3, 3), of_entropy)(still)
    torch.testing.assert_close(score_map, score_map[:, :1].expand(-1, 6, -1))
    assert score_map.amax() == 1.0


@pytest.mark.parametrize("channels", [16, 768])
@pytest.mark.parametrize("frames", [6, 8])
def test_constant_frames_diverge_by_rounding_only(channels: int, frames: int) -> None:
    still = features((2, 1, 16, channels)).float().expand(-1, frames, -1, -1)
    of_time = ScoreConfig(time=1.0, space=0.0, region=0.0, measure="divergence")
    score_map = EntropyScore(frames, (4, 4), of_time)(still)
    # Entropies near log(768) are rounded to 5e-7, and ranges below 1e-4 are not scaled up to 1.
    assert score_map.amin() >= 0.0 and score_map.amax() < 0.02


def test_default_score_finds_a_moving_object() -> None:
    # Static patches of high contrast; one patch per frame changes. The entropy prefers dull patches.
    x = features((1, 1, 64, 16)).repeat(1, 8, 1, 1)
    changed = torch.arange(8) * 9 % 64
    x[0, torch.arange(8), changed] = features((8, 16), seed=1)
    selected = EntropyScore(8, (8, 8), ScoreConfig())(x)[0].flatten().topk(32).indices
    assert set((torch.arange(8) * 64 + changed).tolist()) <= set(selected.tolist())


def test_score_of_a_sample_is_independent() -> None:
    x, mask = features((3, 4, 9, 8)), random_mask((3, 4, 9))
    score = EntropyScore(4, (3, 3), ScoreConfig())
    for index in range(3):
        torch.testing.assert_close(
            score(x, mask)[index], score(x[index : index + 1], mask[index : index + 1])[0]
        )


@pytest.mark.parametrize("measure", ["entropy", "divergence"])
@pytest.mark.parametrize("filled", [0.0, 1e4, -1e30])
def test_dropped_tokens_do_not_change_score(measure: Any, filled: float) -> None:
    x, mask = features((2, 4, 9, 8)), random_mask((2, 4, 9))
    score = EntropyScore(4, (3, 3), ScoreConfig(measure=measure))
    other = torch.where(mask[..., None], x, filled * features(tuple(x.shape), seed=1))
    torch.testing.assert_close(score(x, mask)[mask], score(other, mask)[mask])


def test_full_and_single_token_masks() -> None:
    x = features((2, 4, 9, 8))
    score = EntropyScore(4, (3, 3), ScoreConfig())
    torch.testing.assert_close(score(x, torch.ones(2, 4, 9, dtype=torch.bool)), score(x))
    single = torch.zeros(2, 4, 9, dtype=torch.bool)
    single[:, 2, 5] = True
    assert score(x, single)[single].isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("measure", ["entropy", "divergence"])
def test_score_passes_gradcheck(measure: Any, masked: bool) -> None:
    score = EntropyScore(3, (2, 2), ScoreConfig(levels=(1, 2), regions=2, measure=measure))
    mask = random_mask((1, 3, 4), seed=3) if masked else None
    x = features((1, 3, 4, 3)).requires_grad_()

    def remaining(x: Tensor) -> Tensor:
        score_map = score(x, mask)
        return score_map if mask is None else score_map[mask]

    assert torch.autograd.gradcheck(remaining, (x,))
    if mask is not None:
        (gradient,) = torch.autograd.grad(remaining(x).square().sum(), x)
        assert not gradient[~mask].any()


def test_autocast_does_not_change_score() -> None:
    x, score = features((1, 4, 9, 8)).float(), EntropyScore(4, (3, 3), ScoreConfig())
    plain = score(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(score(x), plain, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": -1.0}, "`time` \\(=-1.0\\)"),
        ({"time": 0.0, "space": 0.0, "region": 0.0}, "`time`"),
        ({"space": math.nan}, "`space` \\(=nan\\)"),
        ({"levels": ()}, "`levels` \\(=\\(\\)\\)"),
        ({"levels": (1, 0)}, "`levels`"),
        ({"levels": (1.0,)}, "`levels`"),
        ({"levels": (True,)}, "`levels`"),
        ({"levels": [1, 2]}, "`levels`"),
        ({"overlap": 1.0}, "`overlap` \\(=1.0\\)"),
        ({"overlap": -0.1}, "`overlap`"),
        ({"overlap": math.nan}, "`overlap`"),
        ({"regions": 0}, "`regions` \\(=0\\)"),
        ({"regions": 2.5}, "`regions` \\(=2.5\\)"),
        ({"regions": True}, "`regions` \\(=True\\)"),
        ({"time": math.inf}, "`time` \\(=inf\\) must be a finite number"),
        ({"time": True}, "`time` \\(=True\\)"),
        ({"temperature": math.inf}, "`temperature` \\(=inf\\)"),
        ({"temperature": "1"}, "`temperature` \\(='1'\\) must be a finite number"),
        ({"temperature": 0.0}, "`temperature` \\(=0.0\\)"),
        ({"measure": "variance"}, "'variance'"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScoreConfig(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("measure", ["entropy", "divergence"])
@pytest.mark.parametrize("masked", [False, True])
def test_gpu_uses_kernels_without_gradients(
    measure: Any, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.pruning.selectors import ast as module

    score = EntropyScore(8, (4, 4), ScoreConfig(measure=measure)).cuda()
    assert module._KERNELS is not None
    dtypes: list[torch.dtype] = []
    compute_entropies = module._KERNELS.compute_entropies

    class RecordingKernels:
        supports_input = staticmethod(module._KERNELS.supports_input)

        @staticmethod
        def compute_entropies(x: Tensor, *arguments: Any) -> Any:
            dtypes.append(x.dtype)
            return compute_entropies(x, *arguments)

    monkeypatch.setattr(module, "_KERNELS", RecordingKernels)
    x = features((2, 8, 16, 40)).cuda()
    mask = random_mask((2, 8, 16)).cuda() if masked else None
    remaining = torch.ones(2, 8, 16, dtype=torch.bool, device="cuda") if mask is None else mask
    exact = score(x, mask)
    assert not dtypes  # float64 is for the reference.
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        typed_features = x.to(dtype)
        score_map = score(typed_features, mask)
        assert dtypes.pop() == dtype and not dtypes
        torch.testing.assert_close(
            score_map[remaining].double(),
            score(typed_features.double(), mask)[remaining],
            rtol=0.0,
            atol=1e-4,
        )
    learns = x.float().requires_grad_()
    score_map = score(learns, mask)
    assert not dtypes and score_map.requires_grad
    torch.testing.assert_close(score_map[remaining].double(), exact[remaining], rtol=0.0, atol=1e-4)
    with torch.no_grad():
        score(learns, mask)
    assert dtypes
