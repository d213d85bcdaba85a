"""AST2.0-lite v2 score: importance of tokens from divergences over time, space and regions.

Notation: x is [B, T, N, C], T frames of N = h * w patches; p = softmax over C, one distribution per token.
The features of a sample are scaled to a standard deviation of 1/4 before, so that the score does not depend
on their unit, and p depends on them almost linearly.

The divergence of a group of tokens is the entropy of their mean p minus the mean of their entropies (the
Jensen-Shannon divergence); it is 0 if all tokens of the group have the same p.

- Time: level L has overlapping windows of ceil(T / L) frames. A window has the divergence of its frames, for
  each patch. A frame gets the mean of its windows: [B, T, N].
- Space: level L divides the grid into L x L cells. A cell has the divergence of its patches, for each frame,
  and all its patches get it: [B, T, N].
- Regions: each patch belongs to the nearest of R seeds spread over the grid (Voronoi). A region gets the mean
  time map of its patches, frame by frame: [B, T, N].

A divergence d becomes d / (d + mean d of the sample), so that few large divergences do not hide the others.
Level L has the weight L in the mean of the levels, because short windows and small cells locate an object
best. The score is a weighted sum of the three maps.

`measure="entropy"` is the formula of AST2.0: the entropy of the mean p without the subtraction, features
that are not scaled, maps scaled to [0, 1] by minimum and maximum, and levels of equal weight. That entropy is
highest for patches of low contrast: it selects fewer tokens of moving objects than random selection does
(`benchmarks/pruning/recall.py`). It exists for models that were trained with it.

Means exclude tokens that an earlier stage dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.core.checks import check_at_least, check_non_negative, check_one_of, check_positive
from sparseflow.errors import InputError
from sparseflow.pruning.selectors.entropy.reference import compute_entropies

Measure = Literal["divergence", "entropy"]
MEASURES = ("divergence", "entropy")

_LOGIT_STD = 0.25
"""Standard deviation of scaled features over channels."""

_TINY_VARIANCE = 1e-24
"""Variance of features that are constant."""

_ROUNDING = 1e-5
"""Divergences that are far below are rounding errors of entropies, nats."""


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Parameters of the AST score.

    Attributes:
        time: Weight of the time map.
        space: Weight of the space map.
        region: Weight of the region map.
        levels: Levels of windows and cells.
        overlap: Fraction of a window shared with the next one, from 0 to below 1.
        regions: Number of seeds on the patch grid.
        temperature: Temperature of the softmax over channels; above 1, p depends less on large features.
        measure: `"divergence"`, or `"entropy"` for models that were trained with it.

    Raises:
        InputError: A value is out of range.
    """

    time: float = 1.0
    space: float = 0.6
    region: float = 0.4
    levels: tuple[int, ...] = (1, 2, 4)
    overlap: float = 0.5
    regions: int = 16
    temperature: float = 1.0
    measure: Measure = "divergence"

    def __post_init__(self) -> None:
        check_non_negative(time=self.time, space=self.space, region=self.region, overlap=self.overlap)
        check_positive(temperature=self.temperature)
        check_at_least(1, regions=self.regions)
        if not self.time + self.space + self.region > 0.0:
            raise InputError(
                f"one of `time` (={self.time}), `space` (={self.space}) and `region` (={self.region}) must "
                "be above 0"
            )
        if (
            not isinstance(self.levels, tuple)
            or not self.levels
            or any(type(level) is not int or level < 1 for level in self.levels)
        ):
            raise InputError(f"`levels` (={self.levels}) must be integers of at least 1")
        if self.overlap >= 1.0:
            raise InputError(f"`overlap` (={self.overlap}) must be below 1")
        check_one_of(MEASURES, measure=self.measure)


class EntropyScore(nn.Module):
    """Importance score of each token of a video.

    Args:
        num_frames: T.
        grid: Rows and columns of patches; their product is N.
        config: Parameters of the score.
    """

    def __init__(self, num_frames: int, grid: tuple[int, int], config: ScoreConfig) -> None:
        super().__init__()
        _load_kernels()
        self.config = config
        self.num_frames, self.num_patches = num_frames, grid[0] * grid[1]
        uses_time = config.time > 0.0 or config.region > 0.0
        windows = [
            _make_window_matrix(num_frames, level, config.overlap) for level in config.levels if uses_time
        ]
        cells = [_make_cell_matrix(grid, level) for level in config.levels if config.space > 0.0]
        self._windows_per_level = [len(level) for level in windows]
        self._cells_per_level = [len(level) for level in cells]
        buffers = {
            "windows": torch.cat([torch.zeros(0, num_frames), *windows]),
            "cells": torch.cat([torch.zeros(0, self.num_patches), *cells]),
            "regions": functional.one_hot(assign_voronoi_regions(grid, config.regions)).T.float(),
        }
        buffers["cell_patches"] = buffers["cells"].nonzero()[:, 1].int()
        buffers["cell_starts"] = functional.pad(buffers["cells"].sum(1).cumsum(0), (1, 0)).int()
        for name, value in buffers.items():
            # Zeros and ones are exact in every dtype that the model is cast to.
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor, retained: Tensor | None = None) -> Tensor:
        """Score every token; higher is more important.

        Args:
            x: Features of a floating dtype, [B, T, N, C].
            retained: Tokens that are still present, bool, [B, T, N]; all by default. The scores of other
                tokens are undefined.

        Returns:
            [B, T, N], float32, or float64 for float64 features.
        """
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            window_entropy, cell_entropy = self._compute_entropies(x, retained)
            weight = None if retained is None else retained.to(window_entropy.dtype)
            score = torch.zeros_like(x[..., 0], dtype=window_entropy.dtype)
            if self._windows_per_level:
                members = self.get_buffer("windows").to(score.dtype).split(self._windows_per_level)
                # A frame gets the mean of its windows.
                time_map = self._average_levels(
                    [
                        (member.T / member.sum(0)[:, None]) @ entropy
                        for member, entropy in zip(
                            members, window_entropy.split(self._windows_per_level, 1), strict=True
                        )
                    ],
                    weight,
                )
                score = score + config.time * time_map
                if config.region > 0.0:
                    score = score + config.region * self._average_regions(time_map, weight)
            if self._cells_per_level:
                members = self.get_buffer("cells").to(score.dtype).split(self._cells_per_level)
                entropies = cell_entropy.split(self._cells_per_level, 2)
                space_map = self._average_levels(
                    [entropy @ member for member, entropy in zip(members, entropies, strict=True)], weight
                )
                score = score + config.space * space_map
            return score

    def _compute_entropies(self, x: Tensor, retained: Tensor | None) -> tuple[Tensor, Tensor]:
        """Entropies of all windows [B, W, N] and of all cells [B, T, K]."""
        divergence = self.config.measure == "divergence"
        scale = self._compute_scale(x, retained)
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        if _KERNELS is not None and x.is_cuda and not needs_grad and _KERNELS.supports_input(x):
            return _KERNELS.compute_entropies(
                x, self.get_buffer("windows").float(), self.get_buffer("cell_starts"),
                self.get_buffer("cell_patches"), retained, scale.float(), divergence,
            )  # fmt: skip
        return compute_entropies(
            x if x.dtype == torch.float64 else x.float(),
            self.get_buffer("windows"), self.get_buffer("cells"), retained,
            scale=scale, divergence=divergence,
        )  # fmt: skip

    def _compute_scale(self, x: Tensor, retained: Tensor | None) -> Tensor:
        """Factor of the features of each sample, [B]."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if self.config.measure == "entropy":
            return x.new_full((len(x),), 1.0 / self.config.temperature, dtype=dtype)
        variance = x.to(dtype).var(-1, unbiased=False)
        weight = torch.ones_like(variance) if retained is None else retained.to(dtype)
        mean = (variance * weight).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1.0)
        return _LOGIT_STD / self.config.temperature * mean.clamp_min(_TINY_VARIANCE).rsqrt()

    def _average_regions(self, time_map: Tensor, retained: Tensor | None) -> Tensor:
        """Mean of the time map over the region of each patch, frame by frame, [B, T, N]."""
        member = self.get_buffer("regions").to(time_map.dtype)
        weight = torch.ones_like(time_map) if retained is None else retained
        mean = ((time_map * weight) @ member.T) / (weight @ member.T).clamp_min(1.0)
        return self._scale(mean @ member, retained)

    def _average_levels(self, maps: list[Tensor], retained: Tensor | None) -> Tensor:
        levels = self.config.levels if self.config.measure == "divergence" else [1] * len(maps)
        scaled = [level * self._scale(values, retained) for level, values in zip(levels, maps, strict=True)]
        return torch.stack(scaled).sum(0) / sum(levels)

    def _scale(self, values: Tensor, retained: Tensor | None) -> Tensor:
        if self.config.measure == "divergence":
            return _saturate(values, retained)
        return _scale_to_unit(values, retained)


_KERNELS: Any = None
"""Module of the Triton kernels; loaded with the first score if there are a GPU and Triton."""


def _load_kernels() -> None:
    global _KERNELS
    if _KERNELS is None and torch.cuda.is_available() and find_spec("triton") is not None:
        from sparseflow.pruning.selectors.entropy import triton

        _KERNELS = triton


def list_windows(num_frames: int, level: int, overlap: float) -> tuple[tuple[int, int], ...]:
    """First frame and length of each window of a level; the last window ends with the last frame."""
    length = -(-num_frames // level)
    step = max(1, round(length * (1.0 - overlap)))
    starts = list(range(0, num_frames - length + 1, step))
    if starts[-1] != num_frames - length:
        starts.append(num_frames - length)
    return tuple((start, length) for start in starts)


def assign_voronoi_regions(grid: tuple[int, int], num_regions: int) -> Tensor:
    """Region of each patch, int64, [N]; at most one region per patch.

    The first seed is the patch next to the center; each further seed is the patch farthest from all seeds.
    """
    rows, cols = grid
    points = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"), dim=-1
    ).reshape(-1, 2).double()  # fmt: skip
    center = torch.tensor([(rows - 1) / 2, (cols - 1) / 2], dtype=torch.float64)
    seed = int(((points - center) ** 2).sum(-1).argmin())
    distances = ((points - points[seed]) ** 2).sum(-1)[:, None]
    while distances.shape[1] < min(num_regions, rows * cols):
        seed = int(distances.amin(1).argmax())
        distances = torch.cat([distances, ((points - points[seed]) ** 2).sum(-1)[:, None]], 1)
    return distances.argmin(1)


def _saturate(values: Tensor, retained: Tensor | None) -> Tensor:
    """Divide each value by its sum with the mean of its sample; values that are only rounding become 0."""
    values = values.clamp_min(0.0)
    weight = torch.ones_like(values) if retained is None else retained
    mean = (values * weight).sum((1, 2), True) / weight.sum((1, 2), True).clamp_min(1.0)
    return values / (values + mean + _ROUNDING)


def _scale_to_unit(values: Tensor, retained: Tensor | None) -> Tensor:
    """Scale each sample to [0, 1]; a sample that is constant up to rounding becomes 0."""
    flat = values.flatten(1)
    if retained is None:
        low, high = flat.amin(1), flat.amax(1)
    else:
        dropped = retained.flatten(1) == 0.0
        low = flat.masked_fill(dropped, float("inf")).amin(1)
        high = flat.masked_fill(dropped, float("-inf")).amax(1)
    low, high = low[:, None, None], high[:, None, None]
    return (values - low) / (high - low).clamp_min(1e-4)


def _make_window_matrix(num_frames: int, level: int, overlap: float) -> Tensor:
    """Membership of frames in windows, [W, T]."""
    windows = list_windows(num_frames, level, overlap)
    matrix = torch.zeros(len(windows), num_frames)
    for index, (start, length) in enumerate(windows):
        matrix[index, start : start + length] = 1.0
    return matrix


def _make_cell_matrix(grid: tuple[int, int], level: int) -> Tensor:
    """Membership of patches in cells, [K, N]; no cell is empty."""
    rows, cols = (torch.arange(size) * min(level, size) // size for size in grid)
    cell = (rows[:, None] * min(level, grid[1]) + cols).reshape(-1)
    return functional.one_hot(cell).T.float()
