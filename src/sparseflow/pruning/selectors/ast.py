"""AST2.0-lite v2's score: which tokens of a video say much, from entropies in time, in space and in regions.

Notation: x is [B, T, N, C], T frames of N = h*w patches; p = softmax of x over C, a distribution a token.

- Time. Level L has windows of ceil(T / L) frames that overlap; a window's entropy is that of the mean of its
  p, one for each patch. A frame gets the mean of the windows that it is in: [B, T, N].
- Space. Level L cuts the grid into L x L cells; a cell's entropy is that of the mean of its p, one for each
  frame, and all of its patches get it: [B, T, N].
- Regions. Every patch belongs to the nearest of R seeds, which are spread over the grid (Voronoi); a region
  gets the mean time entropy inside it, frame by frame: [B, T, N].

Every map is scaled to [0, 1] within its sample, levels are averaged, and the score is a weighted sum. Windows
are mapped back to their frames and cells to their patches, so that the score is one of (t, n) jointly.

With `measure="divergence"` the mean entropy of the members is taken off that of their mean: what is left is
the Jensen-Shannon divergence, 0 where a window holds the same thing throughout.

Tokens that an earlier stage dropped are masked: means leave them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.errors import InputError
from sparseflow.pruning.selectors.entropy.reference import entropies

Measure = Literal["entropy", "divergence"]


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """What the score is made of.

    Attributes:
        time: Weight of time entropy.
        space: Weight of space entropy.
        region: Weight of the regions' importance.
        levels: Levels of windows and cells.
        overlap: Share of a window that it has in common with the next, from 0 to below 1.
        regions: Seeds on the patch grid.
        temperature: Of the softmax over channels.
        measure: `"entropy"`, or `"divergence"`.

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
    measure: Measure = "entropy"

    def __post_init__(self) -> None:
        for name in ("time", "space", "region", "overlap", "temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise InputError(f"`{name}` (={value!r}) must be a finite number")
        weights = (self.time, self.space, self.region)
        if min(weights) < 0.0 or not sum(weights) > 0.0:
            raise InputError(
                f"`time` (={self.time}), `space` (={self.space}) and `region` (={self.region}) must be 0 or "
                "above, and one of them above 0"
            )
        if (
            not isinstance(self.levels, tuple)
            or not self.levels
            or any(type(level) is not int or level < 1 for level in self.levels)
        ):
            raise InputError(f"`levels` (={self.levels}) must be whole numbers of 1 and above")
        if not 0.0 <= self.overlap < 1.0:
            raise InputError(f"`overlap` (={self.overlap}) must be from 0 to below 1")
        if type(self.regions) is not int or self.regions < 1 or not self.temperature > 0.0:
            raise InputError(
                f"`regions` (={self.regions}) must be a whole number of at least 1, and `temperature` "
                f"(={self.temperature}) above 0"
            )
        if self.measure not in ("entropy", "divergence"):
            raise InputError(f"`measure` (={self.measure!r}) must be entropy or divergence")


class Score(nn.Module):
    """How much each token of a video says.

    Args:
        frames: T.
        grid: Rows and columns of patches; their product is N.
        config: What the score is made of.
    """

    def __init__(self, frames: int, grid: tuple[int, int], config: ScoreConfig) -> None:
        super().__init__()
        _find_kernels()
        self.config = config
        self.frames, self.patches = frames, grid[0] * grid[1]
        in_time = config.time > 0.0 or config.region > 0.0
        parts = [_windows_matrix(frames, level, config.overlap) for level in config.levels if in_time]
        cells = [_cells_matrix(grid, level) for level in config.levels if config.space > 0.0]
        self._windows, self._cells = [len(part) for part in parts], [len(part) for part in cells]
        whole = {
            "windows": torch.cat([torch.zeros(0, frames), *parts]),
            "cells": torch.cat([torch.zeros(0, self.patches), *cells]),
            "regions": functional.one_hot(voronoi(grid, config.regions)).T.float(),
        }
        places = whole["cells"].nonzero()
        whole["cell_patches"] = places[:, 1].int()
        whole["cell_starts"] = functional.pad(whole["cells"].sum(1).cumsum(0), (1, 0)).int()
        for name, value in whole.items():
            # Those of 0 and 1 are exact in whatever dtype the model is cast to.
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        """The score of every token; higher is more.

        Args:
            x: Features, [B, T, N, C], of a floating dtype.
            there: bool, [B, T, N]: tokens that are left; by default all. Scores of others mean nothing.

        Returns:
            float32 (float64 for such features), [B, T, N].
        """
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            of_windows, of_cells = self._entropies(x, there)
            weight = None if there is None else there.to(of_windows.dtype)
            found = torch.zeros_like(x[..., 0], dtype=of_windows.dtype)
            if self._windows:
                members = self.get_buffer("windows").to(found.dtype).split(self._windows)
                # A frame gets the mean of its windows.
                in_time = _levels(
                    [
                        (member.T / member.sum(0)[:, None]) @ part
                        for member, part in zip(members, of_windows.split(self._windows, 1), strict=True)
                    ],
                    weight,
                )
                found = found + config.time * in_time
                if config.region > 0.0:
                    found = found + config.region * self._region(in_time, weight)
            if self._cells:
                members = self.get_buffer("cells").to(found.dtype).split(self._cells)
                parts = of_cells.split(self._cells, 2)
                in_space = _levels(
                    [part @ member for member, part in zip(members, parts, strict=True)], weight
                )
                found = found + config.space * in_space
            return found

    def _entropies(self, x: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of all windows [B, W, N] and of all cells [B, T, K]."""
        config, divergence = self.config, self.config.measure == "divergence"
        learns = x.requires_grad and torch.is_grad_enabled()
        if _FUSED is not None and x.is_cuda and not learns and _FUSED.fits(x):
            return _FUSED.entropies(
                x, self.get_buffer("windows").float(), self.get_buffer("cell_starts"),
                self.get_buffer("cell_patches"), there, config.temperature, divergence,
            )  # fmt: skip
        return entropies(
            x if x.dtype == torch.float64 else x.float(),
            self.get_buffer("windows"), self.get_buffer("cells"), there,
            temperature=config.temperature, divergence=divergence,
        )  # fmt: skip

    def _region(self, in_time: Tensor, there: Tensor | None) -> Tensor:
        """[B, T, N]: mean of the time map over each patch's region, frame by frame."""
        member = self.get_buffer("regions").to(in_time.dtype)
        weight = torch.ones_like(in_time) if there is None else there
        mean = ((in_time * weight) @ member.T) / (weight @ member.T).clamp_min(1.0)
        return _scaled(mean @ member, there)


_FUSED: Any = None
"""The kernels for a GPU, where there are one and Triton; looked for when a score is made."""


def _find_kernels() -> None:
    global _FUSED
    if _FUSED is None and torch.cuda.is_available() and find_spec("triton") is not None:
        from sparseflow.pruning.selectors.entropy import triton

        _FUSED = triton


def windows(frames: int, level: int, overlap: float) -> tuple[tuple[int, int], ...]:
    """First frame and length of a level's windows; the last one ends with the last frame."""
    length = -(-frames // level)
    step = max(1, round(length * (1.0 - overlap)))
    starts = list(range(0, frames - length + 1, step))
    if starts[-1] != frames - length:
        starts.append(frames - length)
    return tuple((start, length) for start in starts)


def voronoi(grid: tuple[int, int], regions: int) -> Tensor:
    """The region of every patch, int64, [N]; no more regions than patches.

    Seeds are the patch next to the middle, then always the patch farthest from all seeds so far.
    """
    rows, cols = grid
    at = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"), dim=-1
    ).reshape(-1, 2).double()  # fmt: skip
    middle = torch.tensor([(rows - 1) / 2, (cols - 1) / 2], dtype=torch.float64)
    seed = int(((at - middle) ** 2).sum(-1).argmin())
    distances = ((at - at[seed]) ** 2).sum(-1)[:, None]
    while distances.shape[1] < min(regions, rows * cols):
        seed = int(distances.amin(1).argmax())
        distances = torch.cat([distances, ((at - at[seed]) ** 2).sum(-1)[:, None]], 1)
    return distances.argmin(1)


def _levels(maps: list[Tensor], there: Tensor | None) -> Tensor:
    """The mean of the levels' maps, each scaled."""
    return torch.stack([_scaled(each, there) for each in maps]).mean(0)


def _scaled(values: Tensor, there: Tensor | None) -> Tensor:
    """To [0, 1] within each sample; 0 where all of a sample are alike, but for rounding."""
    flat = values.flatten(1)
    if there is None:
        low, high = flat.amin(1), flat.amax(1)
    else:
        gone = there.flatten(1) == 0.0
        low = flat.masked_fill(gone, float("inf")).amin(1)
        high = flat.masked_fill(gone, float("-inf")).amax(1)
    low, high = low[:, None, None], high[:, None, None]
    return (values - low) / (high - low).clamp_min(1e-4)


def _windows_matrix(frames: int, level: int, overlap: float) -> Tensor:
    """[W, T]: 1 where a frame is in a window."""
    parts = windows(frames, level, overlap)
    found = torch.zeros(len(parts), frames)
    for at, (start, length) in enumerate(parts):
        found[at, start : start + length] = 1.0
    return found


def _cells_matrix(grid: tuple[int, int], level: int) -> Tensor:
    """[cells, N]: 1 where a patch is in a cell; no cell is empty."""
    rows, cols = (torch.arange(size) * min(level, size) // size for size in grid)
    cell = (rows[:, None] * min(level, grid[1]) + cols).reshape(-1)
    return functional.one_hot(cell).T.float()
