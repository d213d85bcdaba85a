"""Adapter for Qwen3-VL-MoE, whose tiers are image resolutions.

An image is stored as flat patches, grouped by merged token, each [channels, frames, height, width]. The
patches are reassembled, resized to 0.5, 0.71 or 1 times the side lengths, and cut again, which gives a
quarter, half or all of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.adapters.placeholders import ImageAdapter, check_presence, shorten_inputs
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALES: MappingProxyType[Tier, float] = MappingProxyType({"low": 0.5, "medium": 0.5**0.5, "high": 1.0})
"""Side length at each tier, relative to the highest."""

Grid = tuple[int, int]
"""Rows and columns of patches of an image."""

_REDUCED_TOKENS: WeakKeyDictionary[nn.Module, dict[Tier, set[int]]] = WeakKeyDictionary()
"""Model -> tier -> token counts of images reduced to it; inputs alone do not determine their tier."""


class Qwen3VLMoeAdapter(ImageAdapter):
    """Adapter of `Qwen3VLMoeForConditionalGeneration`.

    Inputs do not determine their tier, so the adapter remembers the token counts of reduced images: prefills
    of lower tiers must use inputs from `reduce_to_tier`.

    Args:
        model: The model.
    """

    image_token_field = "image_token_id"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._reduced_tokens = _REDUCED_TOKENS.setdefault(model, {tier: set() for tier in TIERS})

    @property
    def state(self) -> Sequence[tuple[nn.Module, str]]:
        """Offset between the tokens and the positions of a request's text."""
        return ((getattr(self.model, "model", self.model), "rope_deltas"),)

    def compute_positions(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Compute the position ids; the axes are time, height and width."""
        if inputs.get("mm_token_type_ids") is None:
            position_ids, after = super().compute_positions(inputs)
            return position_ids.expand(3, -1, -1), after
        inner: Any = self.state[0][0]
        names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
        position_ids, deltas = inner.get_rope_index(
            inputs["input_ids"], **{name: inputs.get(name) for name in names}
        )
        return position_ids, super().compute_positions(inputs)[1] + deltas[:, 0]

    def reduce_to_tier(self, inputs: Inputs, tier: Tier | None) -> dict[str, Any]:
        """Resize images to fewer pixels.

        Args:
            inputs: `input_ids` [batch, tokens], `pixel_values` [patches, values] and `image_grid_thw`
                [images, 3], as the model's processor makes them. Every tensor with one entry per token is
                shortened.
            tier: Target tier; None without images.

        Returns:
            New inputs; the given ones are unchanged.

        Raises:
            PlanError: Images are missing, there are videos, images do not match the placeholders, or rows
                would differ in length.
        """
        images = self.find_images(inputs)
        check_presence(inputs, images, tier)
        if tier is None:
            return dict(inputs)
        grids, merge = self._grids(inputs, tier), self._vision.spatial_merge_size
        smaller = [scale_grid(grid, SCALES[tier], merge) for grid in grids]
        counts = [rows * columns // merge**2 for rows, columns in smaller]
        reduced = shorten_inputs(inputs, images, counts)
        self._reduced_tokens[tier].update(counts)
        pixels: Tensor = inputs["pixel_values"]
        parts = pixels.split([rows * columns for rows, columns in grids])
        resized = [
            part if grid == to else self._cut(_resize(self._image(part, grid), self._size(to)), to)
            for part, grid, to in zip(parts, grids, smaller, strict=True)
        ]
        reduced["pixel_values"] = torch.cat(resized)
        reduced["image_grid_thw"] = torch.tensor(
            [(1, *grid) for grid in smaller],
            dtype=inputs["image_grid_thw"].dtype,
            device=inputs["image_grid_thw"].device,
        )
        return reduced

    def _check_lengths(self, lengths: Sequence[int], tier: Tier) -> None:
        other = next((length for length in lengths if length not in self._reduced_tokens[tier]), None)
        if other is not None and tier != TIERS[-1]:
            raise PlanError(
                f"an image of {other} tokens was not reduced to tier {tier!r}; pass the inputs of "
                f"tier {TIERS[-1]!r} to `reduce_to_tier` first"
            )

    @property
    def _vision(self) -> Any:
        config: Any = self.model.config
        return config.vision_config

    def _grids(self, inputs: Inputs, tier: Tier) -> list[Grid]:
        """Rows and columns of patches of each image, checked against the prompt."""
        pixels, grid = inputs.get("pixel_values"), inputs.get("image_grid_thw")
        if inputs.get("pixel_values_videos") is not None or inputs.get("video_grid_thw") is not None:
            raise PlanError(f"videos have no tier {tier!r}; pass images only")
        if pixels is None or grid is None:
            raise PlanError("`pixel_values` and `image_grid_thw` are both required")
        sizes = [tuple(size) for size in grid.tolist()]
        merge = self._vision.spatial_merge_size
        expected_tokens = [time * rows * columns // merge**2 for time, rows, columns in sizes]
        lengths = [length for _, _, length in self.find_images(inputs)]
        patches = sum(expected_tokens) * merge**2
        if lengths != expected_tokens or len(pixels) != patches:
            raise PlanError(
                f"`image_grid_thw` {sizes} needs {expected_tokens} placeholders and {patches} patches, but "
                f"there are {lengths} and {len(pixels)}"
            )
        if any(time != 1 or rows % merge or columns % merge for time, rows, columns in sizes):
            raise PlanError(
                f"`image_grid_thw` {sizes} must contain single images whose sides are multiples of "
                f"{merge} patches"
            )
        return [(rows, columns) for _, rows, columns in sizes]

    def _size(self, grid: Grid) -> tuple[int, int]:
        return grid[0] * self._vision.patch_size, grid[1] * self._vision.patch_size

    def _image(self, patches: Tensor, grid: Grid) -> Tensor:
        """Patches -> frames, [frames, channels, height, width]."""
        vision = self._vision
        merge, side = vision.spatial_merge_size, vision.patch_size
        cut = patches.view(
            grid[0] // merge, grid[1] // merge, merge, merge,
            vision.in_channels, vision.temporal_patch_size, side, side,
        )  # fmt: skip
        return cut.permute(5, 4, 0, 2, 6, 1, 3, 7).reshape(-1, vision.in_channels, *self._size(grid))

    def _cut(self, frames: Tensor, grid: Grid) -> Tensor:
        """Frames -> patches, the inverse of `_image`."""
        vision = self._vision
        merge, side = vision.spatial_merge_size, vision.patch_size
        cut = frames.view(
            vision.temporal_patch_size, vision.in_channels,
            grid[0] // merge, merge, side, grid[1] // merge, merge, side,
        )  # fmt: skip
        return cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(grid[0] * grid[1], -1)


def scale_grid(grid: Grid, scale: float, merge: int) -> Grid:
    """Scale a grid to whole merged tokens, at least one per side."""

    def side(patches: int) -> int:
        return max(1, int(patches // merge * scale + 0.5)) * merge

    return side(grid[0]), side(grid[1])


def _resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize frames, clamped to their original value range because bicubic weights overshoot at edges."""
    wide = frames if frames.dtype == torch.float64 else frames.float()
    resized = functional.interpolate(wide, size=size, mode="bicubic", antialias=True)
    low, high = wide.amin((0, 2, 3), keepdim=True), wide.amax((0, 2, 3), keepdim=True)
    return resized.clamp(low, high).to(frames.dtype)
