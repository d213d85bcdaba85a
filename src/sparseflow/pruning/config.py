"""A training, an evaluation or a comparison in one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparseflow.core.config import apply_overrides, describe_validation_error, list_configs, read_config_file
from sparseflow.errors import InputError
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.video_vit import VideoViT, VideoViTConfig

_PACKAGE = "sparseflow.pruning"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(_Model):
    """Arguments of `VideoViT`, without what is pruned; classes and channels of frames are the data's."""

    img_size: int
    num_frames: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    patch_size: int
    drop_rate: float = 0.0
    attn_drop: float = 0.0
    drop_path_rate: float = 0.0
    tubelet_size: int = 1
    pool: Literal["mean", "cls"] = "mean"
    position: Literal["factored", "joint"] = "factored"


class MovingDigitsSettings(_Model):
    """Clips made on the fly; see `data.moving_digits`."""

    kind: Literal["moving_digits"]
    train_clips: int = Field(default=8192, ge=1)
    """Of an epoch; every epoch has new ones."""
    test_clips: int = Field(default=2048, ge=1)
    speed: int = 2
    clutter: int = 8
    noise: float = 0.05
    frozen: bool = False
    """Show the first frame over and over: a control, of which no model can tell the motion."""


class UCF101Settings(_Model):
    """The real data set; see `data.ucf101`."""

    kind: Literal["ucf101"]
    lists: Path
    split: Literal[1, 2, 3] = 1
    videos: Path | None = None
    cache: Path | None = None
    counts: Path | None = None
    clip_lens: tuple[int, ...] = (8, 16)
    stride_ratio: float = 0.5
    on_error: Literal["raise", "skip"] = "raise"


class LatencySettings(_Model):
    """The loss that keeps a budget; see `latency`."""

    model: Path
    budget: float = Field(gt=0.0, le=1.0)
    """Share of the dense model's latency."""
    weight: float = Field(default=1.0, ge=0.0)


class TrainSettings(_Model):
    """How a model is trained."""

    epochs: int = Field(default=10, ge=1)
    batch_size: int = Field(default=32, ge=1)
    """Of each process."""
    rate: float = Field(default=1e-3, gt=0.0)
    gate_rate: float = Field(default=10.0, gt=0.0)
    """Of gates, over `rate`: an optimizer that scales gradients moves a logit by about its rate a step."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    warm_up: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of all steps in which the rate rises; it then falls as a cosine."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient."""
    softness_end: float | None = Field(default=None, gt=0.0)
    """The soft masks' softness at the end, which it falls to step by step; constant by default."""
    hard_from: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of all steps after which gates are hard in training, too, as they are when the model is judged;
    never by default. Without it a gate may close unnoticed in the end, and accuracy falls where the loss does
    not."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    workers: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps from one checkpoint to the next; there is one at the end of every epoch, too."""
    seed: int = Field(default=0, ge=0)


class Settings(_Model):
    """All of it.

    Attributes:
        mode: `"dense"` prunes nothing; `"ast"` prunes as `ast` says; `"ast+latency"` keeps a budget besides.
    """

    mode: Literal["dense", "ast", "ast+latency"] = "ast"
    model: ModelSettings
    ast: dict[str, Any] = Field(default_factory=dict)
    data: Annotated[MovingDigitsSettings | UCF101Settings, Field(discriminator="kind")]
    train: TrainSettings = Field(default_factory=TrainSettings)
    latency: LatencySettings | None = None

    def make(self, classes: int, channels: int) -> VideoViT:
        """The model, with weights drawn from torch's generator.

        Raises:
            InputError: A setting of the model, or of what is pruned, cannot be used.
        """
        return VideoViT(
            **self.model.model_dump(), num_classes=classes, in_chans=channels,
            use_ast_prune=self.mode != "dense", ast_cfg=ASTConfig.from_dict(self.ast),
        )  # fmt: skip


def shipped() -> list[str]:
    """Names of the configurations that come with SparseFlow."""
    return list_configs(_PACKAGE)


def read_settings(source: Path | str, changes: Mapping[str, Any] | None = None) -> Settings:
    """Read a configuration.

    Args:
        source: A YAML file, or the name of a configuration that comes with SparseFlow.
        changes: `"train.epochs"` -> a value that goes before the file's.

    Raises:
        InputError: There is no such file, or a setting is missing, unknown or of no use.
        FileFormatError: The file is not YAML, or holds something else.
        MissingExtraError: PyYAML is missing.
    """
    content = read_config_file(source, package=_PACKAGE, extra="pruning")
    return settings_of(apply_overrides(content, changes or {}), str(source))


def settings_of(content: Mapping[str, Any], source: str = "the settings") -> Settings:
    """Settings from what a file holds.

    Raises:
        InputError: A setting is missing, unknown or of no use.
    """
    try:
        found = Settings.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{source} cannot be used: {describe_validation_error(error)}") from error
    pruned = ASTConfig.from_dict(found.ast)
    VideoViTConfig(**found.model.model_dump(), num_classes=1)
    if found.mode != "dense":
        pruned.check(found.model.depth)
    end = found.train.softness_end
    if end is not None and end > pruned.softness > 0.0:
        raise InputError(f"`softness_end` (={end}) must not be above `softness` (={pruned.softness})")
    if found.mode == "ast+latency" and not pruned.keep:
        raise InputError(
            "`mode` ast+latency learns gates, and `ast` names none: give `keep`, such as {head: 1.0, "
            "channel: 1.0}"
        )
    if (found.mode == "ast+latency") != (found.latency is not None):
        raise InputError(
            f"`mode` (={found.mode!r}) and `latency` do not fit: with ast+latency there must be settings of "
            "`latency`, and only then"
        )
    return found
