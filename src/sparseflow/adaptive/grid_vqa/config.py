"""Configuration of a Grid-VQA task, its model and its training: one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.core.config import StrictModel, load_config

_PACKAGE = "sparseflow.adaptive.grid_vqa"

Kind = Literal["at", "count", "where", "left", "small", "list"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of questions: the item at a position, a count, the column of an item, whether it is left of another,
which item is small, or a list of all items."""


_NonNegative = Annotated[float, Field(ge=0.0)]
_Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class VqaImageConfig(StrictModel):
    """Images of the items."""

    digits: bool = True
    """Whether to use scikit-learn's 1797 handwritten digits, which need no file."""
    archives: tuple[Path, ...] = ()
    """Archives of images by class (`images.read_archives`): CIFAR-10 as directories or in its binary version.
    """
    question_names: tuple[str, ...] | None = None
    """Names in questions; all by default. The vision tower learns the others, too."""
    seed: int = Field(default=0, ge=0)
    """Seed of the split of images into train, val and test."""


class VqaSceneConfig(StrictModel):
    """Geometry of a canvas."""

    grid: int = Field(default=3, ge=2, le=3)
    """Rows and columns."""
    cell_px: int = Field(default=32, ge=12)
    """Side of a cell; the side of the canvas is `grid` times that."""
    item: tuple[_Fraction, _Fraction] = (0.8, 1.0)
    """Minimum and maximum side of an item, relative to a cell."""
    small: tuple[_Fraction, _Fraction] = (0.3, 0.4)
    """Minimum and maximum side of a small item, relative to a cell."""

    @property
    def cells(self) -> int:
        return self.grid**2


class VqaModelConfig(StrictModel):
    """Sizes of the model; each token is routed to `top_k` of `experts` experts."""

    crop_px: int = Field(default=32, ge=4)
    patch_px: int = Field(default=8, ge=1)
    vision_width: int = Field(default=192, ge=8)
    vision_depth: int = Field(default=9, ge=1)
    vision_heads: int = Field(default=6, ge=1)
    vision_mlp: float = Field(default=4.0, gt=0.0)
    vision_drop: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Attention dropout of the vision tower."""
    width: int = Field(default=160, ge=8)
    depth: int = Field(default=16, ge=2)
    heads: int = Field(default=4, ge=1)
    experts: int = Field(default=16, ge=1)
    expert_width: int = Field(default=48, ge=1)
    top_k: int = Field(default=8, ge=1)

    @property
    def crop_tokens(self) -> int:
        return (self.crop_px // self.patch_px) ** 2


class VqaStageConfig(StrictModel):
    """Stage of the second part of a training."""

    share: float = Field(gt=0.0)
    """Steps of the stage, relative to the sum over all stages."""
    tier: Tier
    """Highest tier of the plans; crops of higher tiers are not rendered, which makes early stages cheap."""
    drawn_plans: int = Field(default=1, ge=0)
    """Plans that run in each step besides the full model."""
    batch_size: int | None = Field(default=None, ge=1)
    """Batch size of each process; by default that of the training."""


class VqaTrainConfig(StrictModel):
    """Training settings: first the vision tower alone learns to name cells, then all parameters learn to
    answer."""

    vision_steps: int = Field(default=8000, ge=0)
    steps: int = Field(default=7500, ge=1)
    """Steps of the second part."""
    batch_size: int = Field(default=256, ge=1)
    """Batch size of each process."""
    vision_crops: tuple[
        Annotated[int, Field(ge=1, le=1)],
        Annotated[int, Field(ge=1, le=4)],
        Annotated[int, Field(ge=1, le=9)],
    ] = (1, 4, 9)
    """Random crops of each level in a step of the first part."""
    vision_weights: dict[str, _NonNegative] = Field(default_factory=dict)
    """Relative frequency of each name in the first part; 1 by default."""
    vision_small: float = Field(default=0.4, ge=0.0, le=0.9)
    """Fraction of cells with a small item in the first part."""
    vision_rate: float = Field(default=1e-3, gt=0.0)
    rate: float = Field(default=1e-3, gt=0.0)
    vision_scale: float = Field(default=0.3, ge=0.0)
    """Rate of the vision tower in stages at the highest tier, relative to `rate`; it is frozen in lower
    stages.
    """
    warm_up: float = Field(default=0.05, ge=0.0, le=1.0)
    """Fraction of each part with rising rates."""
    cool_down: float = Field(default=0.5, ge=0.0, le=1.0)
    """Fraction of each part, at its end, with rates that fall to 0."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Maximum norm of the gradient."""
    stages: tuple[VqaStageConfig, ...] = (
        VqaStageConfig(share=0.4, tier="low", drawn_plans=0),
        VqaStageConfig(share=0.35, tier="medium"),
        VqaStageConfig(share=0.25, tier="high"),
    )
    """Stages with ascending tiers: what is learned with few vision tokens transfers to many."""
    distill: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of the full plan's logits, relative to the answer, in the loss of a sampled plan."""
    name_weight: float = Field(default=0.3, ge=0.0)
    """Weight of the naming loss in the second part."""
    ground_weight: float = Field(default=0.5, ge=0.0)
    """Weight of the grounding loss; see `auxiliary_heads`."""
    ground_blocks: int = Field(default=2, ge=1)
    """Number of blocks before the grounding head."""
    balance_weight: float = Field(default=0.01, ge=0.0)
    """Weight of the load-balancing loss of experts."""
    augment: float = Field(default=1.0, ge=0.0)
    """Strength of the image augmentation; 0 disables it."""
    mix: float = Field(default=0.5, ge=0.0, le=1.0)
    """Fraction of items that blend two images, in the first part."""
    shares: dict[Kind, _NonNegative] = Field(
        default_factory=lambda: {
            "at": 0.25, "count": 0.15, "where": 0.15, "left": 0.15, "small": 0.2, "list": 0.1,
        }
    )  # fmt: skip
    """Frequencies of the kinds of questions in training."""
    ema: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the weight average that is evaluated and saved."""
    amp: Literal["off", "bf16"] = "off"
    compile: bool = False
    """Whether to compile layers with torch.compile on a GPU: takes a minute at the start and makes steps
    faster.
    """
    seed: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=500, ge=1)
    eval_every: int = Field(default=1000, ge=1)
    eval_samples: int = Field(default=512, ge=1)


class VqaConfig(StrictModel):
    """Configuration of a training."""

    images: VqaImageConfig = Field(default_factory=VqaImageConfig)
    scene: VqaSceneConfig = Field(default_factory=VqaSceneConfig)
    model: VqaModelConfig = Field(default_factory=VqaModelConfig)
    train: VqaTrainConfig = Field(default_factory=VqaTrainConfig)
    test_shares: dict[Kind, _NonNegative] = Field(
        default_factory=lambda: {
            "at": 0.25, "count": 0.2, "where": 0.1, "left": 0.15, "small": 0.2, "list": 0.1,
        }
    )  # fmt: skip
    """Frequencies of the kinds of questions in every evaluation."""
    test_samples: int = Field(default=2000, ge=1)
    """Questions on which the full plan and the blind baseline are evaluated."""
    plan_samples: int = Field(default=500, ge=1)
    """Number of these, from the first, on which all plans are evaluated."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        _check_sizes(self.scene, self.model)
        _check_training(self.train, self.model.depth)
        if not self.images.digits and not self.images.archives:
            raise ValueError("there are no images: set `images.digits`, or pass `images.archives`")
        for name, shares in (("train.shares", self.train.shares), ("test_shares", self.test_shares)):
            if not sum(shares.values()):
                raise ValueError(f"`{name}` (={shares}) must not all be 0")
        return self


def load_vqa_config(source: Path | str, overrides: Mapping[str, Any] | None = None) -> VqaConfig:
    """Load a configuration.

    Args:
        source: YAML file, or the name of a shipped configuration.
        overrides: Settings to override, such as `{"train.steps": 3}`.

    Raises:
        InputError: The file does not exist, or a setting is unknown or invalid.
        FileFormatError: The file is not YAML.
        MissingExtraError: PyYAML is missing.
    """
    return load_config(VqaConfig, source, extra="adaptive", package=_PACKAGE, overrides=overrides)


def _check_sizes(scene: VqaSceneConfig, model: VqaModelConfig) -> None:
    for name, (low, high) in (("scene.item", scene.item), ("scene.small", scene.small)):
        if low > high:
            raise ValueError(f"`{name}` (={low}, {high}) must be two ascending fractions of a cell")
    for name, divisor in (("crop_px", "patch_px"), ("vision_width", "vision_heads"), ("width", "heads")):
        if getattr(model, name) % getattr(model, divisor):
            raise ValueError(
                f"`{name}` (={getattr(model, name)}) must be divisible by `{divisor}` "
                f"(={getattr(model, divisor)})"
            )
    if model.width // model.heads % 2:
        raise ValueError(
            f"`width` (={model.width}) / `heads` (={model.heads}) must be even for rotary embeddings"
        )
    if model.top_k > model.experts:
        raise ValueError(f"`top_k` (={model.top_k}) must not exceed `experts` (={model.experts})")


def _check_training(train: VqaTrainConfig, depth: int) -> None:
    tiers = [TIERS.index(stage.tier) for stage in train.stages]
    if not tiers or tiers != sorted(tiers) or tiers[-1] != len(TIERS) - 1:
        names = ", ".join(stage.tier for stage in train.stages) or "none"
        raise ValueError(f"`train.stages` (={names}) must have ascending tiers and end with high")
    if train.warm_up + train.cool_down > 1.0:
        raise ValueError(f"`warm_up` (={train.warm_up}) + `cool_down` (={train.cool_down}) must not exceed 1")
    if train.ground_blocks > depth:
        raise ValueError(f"`ground_blocks` (={train.ground_blocks}) must not exceed `depth` (={depth})")
