"""Qwen3-VL-MoE: a tier is the resolution of images.

An image is there as flat patches: those of a merged token together, each of them [channels, frames, height,
width]. They are put together to an image again, which is resized and cut anew: to sides of about 0.5, 0.71
and 1 times those of the highest tier, so to a quarter, a half and all of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.adapters.decoders import DecoderAdapter
from sparseflow.adaptive.adapters.placeholders import (
    PlaceholderSpans,
    Span,
    check_presence,
    ids_of,
    shortened,
)
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALES: MappingProxyType[Tier, float] = MappingProxyType({"low": 0.5, "medium": 0.5**0.5, "high": 1.0})
"""Sides of an image at each tier, of those at the highest."""

Grid = tuple[int, int]
"""Patches of an image: rows and columns."""

_MADE: WeakKeyDictionary[nn.Module, dict[Tier, set[int]]] = WeakKeyDictionary()
"""Model -> tier -> tokens of images that were reduced to it: inputs alone do not tell their tier."""


class Qwen3VLMoeAdapter(DecoderAdapter):
    """Adapter of `Qwen3VLMoeForConditionalGeneration`.

    Inputs do not tell their tier, so it is remembered how many tokens reduced images had: prefills of lower
    tiers must be of inputs from `at_tier`.

    Args:
        model: The model.
    """

    tiers = TIERS

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._runs = PlaceholderSpans()
        self._made = _MADE.setdefault(model, {tier: set() for tier in TIERS})

    @property
    def state(self) -> Sequence[tuple[nn.Module, str]]:
        """How far the positions of a request's text lie behind its tokens."""
        return ((getattr(self.model, "model", self.model), "rope_deltas"),)

    def positions(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """As in `Adapter`; the axes are time, height and width."""
        if inputs.get("mm_token_type_ids") is None:
            found, after = super().positions(inputs)
            return found.expand(3, -1, -1), after
        inner: Any = self.state[0][0]
        names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
        found, deltas = inner.get_rope_index(
            inputs["input_ids"], **{name: inputs.get(name) for name in names}
        )
        return found, super().positions(inputs)[1] + deltas[:, 0]

    def vision_tokens(self, inputs: Inputs) -> int:
        """How many tokens of an input are of images, in all rows."""
        return sum(length for _, _, length in self._images(inputs))

    def at_tier(self, inputs: Inputs, tier: Tier | None) -> dict[str, Any]:
        """Inputs with images of fewer pixels.

        Args:
            inputs: `input_ids` [batch, tokens], `pixel_values` [patches, values] and `image_grid_thw`
                [images, 3], as the model's processor makes them; whatever has an entry for each token is
                shortened.
            tier: The tier to reduce them to; None where there is no image.

        Returns:
            New inputs; those given stay as they are.

        Raises:
            PlanError: There are no images, or videos, or images are not where the prompt says; or rows would
                come to differ in length.
        """
        check_presence(inputs, self._images(inputs), tier)
        if tier is None:
            return dict(inputs)
        grids, merge = self._grids(inputs, tier), self._vision.spatial_merge_size
        smaller = [scaled(grid, SCALES[tier], merge) for grid in grids]
        counts = [rows * columns // merge**2 for rows, columns in smaller]
        found = shortened(inputs, self._images(inputs), counts)
        self._made[tier].update(counts)
        pixels: Tensor = inputs["pixel_values"]
        parts = pixels.split([rows * columns for rows, columns in grids])
        resized = [
            part if grid == to else self._cut(_resized(self._image(part, grid), self._size(to)), to)
            for part, grid, to in zip(parts, grids, smaller, strict=True)
        ]
        found["pixel_values"] = torch.cat(resized)
        found["image_grid_thw"] = torch.tensor(
            [(1, *grid) for grid in smaller],
            dtype=inputs["image_grid_thw"].dtype,
            device=inputs["image_grid_thw"].device,
        )
        return found

    def check_tier(self, inputs: Inputs, tier: Tier | None) -> None:
        """That images of a call were reduced to a tier.

        Raises:
            PlanError: One was not, or there are images without a tier or a tier without images.
        """
        images = self._images(inputs)
        check_presence(inputs, images, tier)
        if tier is None:
            return
        other = next((length for _, _, length in images if length not in self._made[tier]), None)
        if other is not None and tier != TIERS[-1]:
            raise PlanError(
                f"an image of {other} tokens was not reduced to tier {tier!r}: give the inputs of tier "
                f"{TIERS[-1]!r} to the adapter's `at_tier` first"
            )

    @property
    def _vision(self) -> Any:
        config: Any = self.model.config
        return config.vision_config

    def _images(self, inputs: Inputs) -> list[Span]:
        config: Any = self.model.config
        return self._runs.of(ids_of(inputs), config.image_token_id)

    def _grids(self, inputs: Inputs, tier: Tier) -> list[Grid]:
        """Rows and columns of patches of each image, which are as the prompt says."""
        images, pixels, grid = self._images(inputs), inputs.get("pixel_values"), inputs.get("image_grid_thw")
        if inputs.get("pixel_values_videos") is not None or inputs.get("video_grid_thw") is not None:
            raise PlanError(f"videos have no tiers, as {tier!r}; give images alone")
        if pixels is None or grid is None:
            raise PlanError("images are reduced from `pixel_values` and `image_grid_thw`; give both")
        sizes = [tuple(size) for size in grid.tolist()]
        merge = self._vision.spatial_merge_size
        wanted = [time * rows * columns // merge**2 for time, rows, columns in sizes]
        if [length for _, _, length in images] != wanted or len(pixels) != sum(wanted) * merge**2:
            raise PlanError(
                f"`image_grid_thw` {sizes} asks for {wanted} placeholders and {sum(wanted) * merge**2} "
                f"patches; there are {[length for _, _, length in images]} and {len(pixels)}"
            )
        if any(time != 1 or rows % merge or columns % merge for time, rows, columns in sizes):
            raise PlanError(
                f"`image_grid_thw` {sizes} must be of single images, with sides of multiples of {merge} "
                "patches"
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
        """Frames -> patches, as `_image` takes them."""
        vision = self._vision
        merge, side = vision.spatial_merge_size, vision.patch_size
        cut = frames.view(
            vision.temporal_patch_size, vision.in_channels,
            grid[0] // merge, merge, side, grid[1] // merge, merge, side,
        )  # fmt: skip
        return cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(grid[0] * grid[1], -1)


def scaled(grid: Grid, scale: float, merge: int) -> Grid:
    """A grid of smaller sides, each of whole merged tokens and at least one."""

    def side(patches: int) -> int:
        return max(1, int(patches // merge * scale + 0.5)) * merge

    return side(grid[0]), side(grid[1])


def _resized(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames at another size, within the values that they had: bicubic weights overshoot at edges."""
    wide = frames if frames.dtype == torch.float64 else frames.float()
    found = functional.interpolate(wide, size=size, mode="bicubic", antialias=True)
    of_channel = (0, 2, 3)
    low, high = wide.amin(of_channel, keepdim=True), wide.amax(of_channel, keepdim=True)
    return found.clamp(low, high).to(frames.dtype)
