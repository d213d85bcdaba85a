"""A Grid-VQA task, its model and its training in one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.core.config import apply_overrides, describe_validation_error, list_configs, read_config_file
from sparseflow.errors import InputError

_PACKAGE = "sparseflow.adaptive.grid_vqa"

Kind = Literal["at", "count", "where", "left", "small", "list"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What is asked: which item is at a place, how many, in which column one is, whether left of another, which
small one, or a list of all."""


class _ConfigModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class VqaImageConfig(_ConfigModel):
    """Where images come from."""

    digits: bool = True
    """scikit-learn's 1797 handwritten digits, which need no file."""
    archives: tuple[Path, ...] = ()
    """Pictures by class, as `images.pictures` reads them: CIFAR-10 as folders or in its binary version."""
    asked: tuple[str, ...] | None = None
    """Names that questions are about; all by default. The vision tower learns the others too."""
    seed: int = Field(default=0, ge=0)
    """Of the split of images into those to train, to validate and to test with."""


class VqaSceneConfig(_ConfigModel):
    """How a canvas looks."""

    grid: int = Field(default=3, ge=2, le=3)
    """Rows, and columns."""
    cell_px: int = Field(default=32, ge=12)
    """Side of a cell; the canvas' is `grid` times that."""
    item: tuple[float, float] = (0.8, 1.0)
    """Least and largest side of an item, over a cell's."""
    small: tuple[float, float] = (0.3, 0.4)
    """The same of a small item."""

    @property
    def cells(self) -> int:
        return self.grid**2

    @property
    def canvas_px(self) -> int:
        return self.grid * self.cell_px


class VqaModelConfig(_ConfigModel):
    """Sizes of the model. `top_k` of `experts` experts answer for each token."""

    crop_px: int = Field(default=32, ge=4)
    patch_px: int = Field(default=8, ge=1)
    vision_width: int = Field(default=192, ge=8)
    vision_depth: int = Field(default=9, ge=1)
    vision_heads: int = Field(default=6, ge=1)
    vision_mlp: float = Field(default=4.0, gt=0.0)
    vision_drop: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of attention that is dropped in training."""
    width: int = Field(default=160, ge=8)
    depth: int = Field(default=16, ge=2)
    heads: int = Field(default=4, ge=1)
    experts: int = Field(default=16, ge=1)
    expert_width: int = Field(default=48, ge=1)
    top_k: int = Field(default=8, ge=1)

    @property
    def crop_tokens(self) -> int:
        return (self.crop_px // self.patch_px) ** 2


class VqaStageConfig(_ConfigModel):
    """A stretch of the second part of a training."""

    share: float = Field(gt=0.0)
    """Of the part's steps, over the sum of all shares."""
    tier: Tier
    """Highest that plans run at; crops beyond it are not even made, so early stages are cheap."""
    drawn_plans: int = Field(default=1, ge=0)
    """Plans that run in a step beside the whole model."""
    batch_size: int | None = Field(default=None, ge=1)
    """Of each process; by default that of the training."""


class VqaTrainConfig(_ConfigModel):
    """How a model is trained: first the vision tower alone, to name what lies in cells, then everything."""

    vision_steps: int = Field(default=8000, ge=0)
    steps: int = Field(default=7500, ge=1)
    """After those."""
    batch_size: int = Field(default=256, ge=1)
    """Of each process."""
    vision_crops: tuple[int, int, int] = (1, 4, 9)
    """Crops of each level that are looked at in one of its steps, drawn anew each time."""
    vision_weights: dict[str, float] = {}
    """How often the vision tower is shown each name while it learns alone, 1 unless it is here."""
    vision_small: float = Field(default=0.4, ge=0.0, le=0.9)
    """Share of cells with a small item while it does."""
    vision_rate: float = Field(default=1e-3, gt=0.0)
    rate: float = Field(default=1e-3, gt=0.0)
    vision_scale: float = Field(default=0.3, ge=0.0)
    """The vision tower's rate in stages at the highest tier, over `rate`; it rests in those before."""
    warm_up: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of each part in which rates rise."""
    cool_down: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of each part, its last, in which they fall to 0."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient."""
    stages: tuple[VqaStageConfig, ...] = (
        VqaStageConfig(share=0.4, tier="low", drawn_plans=0),
        VqaStageConfig(share=0.35, tier="medium"),
        VqaStageConfig(share=0.25, tier="high"),
    )
    """From few vision tokens to many: what is learnt of few need not be learnt again."""
    distill: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of a drawn plan's loss that compares it with the full plan instead of with the answer."""
    name_weight: float = Field(default=0.3, ge=0.0)
    """Of the loss of naming cells, in the second part."""
    ground_weight: float = Field(default=0.5, ge=0.0)
    """Of the loss that tells the decoder's first blocks what lies where; see `grounding`."""
    ground_blocks: int = Field(default=2, ge=1)
    """Blocks after which that loss looks."""
    balance_weight: float = Field(default=0.01, ge=0.0)
    """Of the loss that spreads tokens over experts."""
    augment: float = Field(default=1.0, ge=0.0)
    """How strongly training images are changed; 0 leaves them."""
    mix: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of items that are blends of two images, while the vision tower learns alone."""
    shares: dict[Kind, float] = {
        "at": 0.25, "count": 0.15, "where": 0.15, "left": 0.15, "small": 0.2, "list": 0.1,
    }  # fmt: skip
    """Of kinds of questions in training; those of a test are in `test_shares`."""
    ema: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the average of weights that is judged and kept."""
    amp: Literal["off", "bf16"] = "off"
    compile: bool = False
    """Whether torch.compile fuses what layers do, on a GPU: a minute at first, then quicker steps."""
    seed: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=500, ge=1)
    judge_every: int = Field(default=1000, ge=1)
    judge_samples: int = Field(default=512, ge=1)


class VqaConfig(_ConfigModel):
    """All of it."""

    images: VqaImageConfig = Field(default_factory=VqaImageConfig)
    scene: VqaSceneConfig = Field(default_factory=VqaSceneConfig)
    model: VqaModelConfig = Field(default_factory=VqaModelConfig)
    train: VqaTrainConfig = Field(default_factory=VqaTrainConfig)
    test_shares: dict[Kind, float] = {
        "at": 0.25, "count": 0.2, "where": 0.1, "left": 0.15, "small": 0.2, "list": 0.1,
    }  # fmt: skip
    """Of kinds of questions, wherever a model is judged."""
    test_samples: int = Field(default=2000, ge=1)
    """Questions that the full plan is judged on, and answers without looking."""
    plan_samples: int = Field(default=500, ge=1)
    """The first of these: all plans are judged on them."""


def shipped() -> list[str]:
    """Names of the configurations that come with SparseFlow."""
    return list_configs(_PACKAGE)


def read_settings(source: Path | str, changes: Mapping[str, Any] | None = None) -> VqaConfig:
    """Read a configuration.

    Args:
        source: A YAML file, or the name of a configuration that comes with SparseFlow.
        changes: `"train.steps"` -> a value that goes before the file's.

    Raises:
        InputError: There is no such file, or a setting is unknown or of no use.
        FileFormatError: The file is not YAML, or holds something else.
        MissingExtraError: PyYAML is missing.
    """
    content = read_config_file(source, package=_PACKAGE, extra="adaptive")
    return settings_of(apply_overrides(content, changes or {}), str(source))


def settings_of(content: Mapping[str, Any], source: str = "the settings") -> VqaConfig:
    """Settings from what a file holds.

    Raises:
        InputError: A setting is unknown or of no use.
    """
    try:
        found = VqaConfig.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{source} cannot be used: {describe_validation_error(error)}") from error
    scene, model = found.scene, found.model
    for name, (least, most) in (("scene.item", scene.item), ("scene.small", scene.small)):
        if not 0.0 < least <= most <= 1.0:
            raise InputError(f"`{name}` (={least}, {most}) must be two shares of a cell, the lesser first")
    if model.crop_px % model.patch_px:
        raise InputError(f"`crop_px` (={model.crop_px}) must be divisible by `patch_px` (={model.patch_px})")
    for width, heads in (("vision_width", "vision_heads"), ("width", "heads")):
        if getattr(model, width) % getattr(model, heads):
            raise InputError(
                f"`{width}` (={getattr(model, width)}) must be divisible by `{heads}` "
                f"(={getattr(model, heads)})"
            )
    if model.width // model.heads % 2:
        raise InputError(
            f"a head of the decoder has {model.width // model.heads} numbers, and rotary positions need an "
            "even count: change `width` or `heads`"
        )
    if model.top_k > model.experts:
        raise InputError(f"`top_k` (={model.top_k}) must not be more than `experts` (={model.experts})")
    told = found.train
    tiers = [TIERS.index(stage.tier) for stage in told.stages]
    if not tiers or tiers != sorted(tiers) or tiers[-1] != len(TIERS) - 1:
        given = ", ".join(stage.tier for stage in told.stages) or "none"
        raise InputError(
            f"`train.stages` (={given}) must go from lower tiers to higher ones and end with high"
        )
    if told.warm_up + told.cool_down > 1.0:
        raise InputError(
            f"`warm_up` (={told.warm_up}) and `cool_down` (={told.cool_down}) must be at most 1 together"
        )
    if not all(1 <= count <= most for count, most in zip(told.vision_crops, (1, 4, 9), strict=True)):
        raise InputError(
            f"`train.vision_crops` (={told.vision_crops}) must be at least 1, 1, 1 and at most 1, 4, 9"
        )
    if not all(weight >= 0.0 for weight in told.vision_weights.values()):
        raise InputError(f"`train.vision_weights` (={told.vision_weights}) must be at least 0")
    if told.ground_blocks > model.depth:
        raise InputError(
            f"`ground_blocks` (={told.ground_blocks}) must not be more than `depth` (={model.depth})"
        )
    if not found.images.digits and not found.images.archives:
        raise InputError("there are no images: set `images.digits`, or name an archive in `images.archives`")
    for name, shares in (("train.shares", found.train.shares), ("test_shares", found.test_shares)):
        if min(shares.values(), default=0.0) < 0.0 or sum(shares.values()) <= 0.0:
            raise InputError(f"`{name}` (={shares}) must be shares of at least 0, not all of them 0")
    return found
