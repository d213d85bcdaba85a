"""Configuration of a training, an evaluation or a comparison in one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sparseflow.core.artifact import DictField
from sparseflow.core.config import StrictModel, apply_overrides, read_config_file, validate_config
from sparseflow.errors import InputError
from sparseflow.pruning.data.moving_objects import Background, Camera
from sparseflow.pruning.data.video_tasks import Task
from sparseflow.pruning.model.config import ASTConfig, VideoViTConfig
from sparseflow.pruning.model.pretrained import load_pretrained
from sparseflow.pruning.model.video_vit import VideoViT

_PACKAGE = "sparseflow.pruning"


class VideoModelConfig(StrictModel):
    """Architecture: arguments of `VideoViT` that neither the dataset nor `ast` determines."""

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
    norm_eps: float = 1e-6
    """Epsilon of the layer norms; usually 1e-12 in a Hugging Face ViT or VideoMAE."""


class MovingDigitsConfig(StrictModel):
    """Synthetic clips; see `data.moving_digits`."""

    kind: Literal["moving_digits"]
    train_clips: int = Field(default=8192, ge=1)
    """Clips per epoch; every epoch has new ones."""
    test_clips: int = Field(default=2048, ge=1)
    speed: int = 2
    clutter: int = 8
    noise: float = 0.05
    frozen: bool = False
    """Repeat the first frame: a control in which the motion cannot be recognized."""


class MovingObjectsConfig(StrictModel):
    """Synthetic clips; see `data.moving_objects`."""

    kind: Literal["moving_objects"]
    train_clips: int = Field(default=8192, ge=1)
    """Clips per epoch; every epoch has new ones."""
    test_clips: int = Field(default=2048, ge=1)
    object_size: int = 12
    speed: int = 3
    background: Background = "texture"
    camera: Camera = "still"
    camera_speed: float = 1.0
    distractors: int = 1
    noise: float = 0.02


class ClipsConfig(StrictModel):
    """Clips of videos; see `data.clips`."""

    split: Literal[1, 2, 3] = 1
    """Split of UCF-101 and HMDB51."""
    videos: Path | None = None
    cache: Path | None = None
    counts: Path | None = None
    clip_lens: tuple[int, ...] = (8, 16)
    stride_ratio: float = 0.5
    on_error: Literal["raise", "skip"] = "raise"


class UCF101Config(ClipsConfig):
    """The UCF-101 dataset; see `data.splits`."""

    kind: Literal["ucf101"]
    lists: Path


class VideoFolderConfig(ClipsConfig):
    """Videos with labels in any common layout; see `data.video_folder`."""

    kind: Literal["video_folder"]
    train: Path
    """Folders of classes, a list or tar files."""
    test: Path | None = None
    """The same for the test; by default a part of `train`."""
    classes: Path | None = None
    """Names of the classes, one in each line."""
    test_fraction: float = Field(default=0.2, gt=0.0, lt=1.0)
    split_seed: int = Field(default=0, ge=0)


class VideoTasksConfig(StrictModel):
    """Clips of unlabeled videos, with a task whose labels follow from the frames; see `data.video_tasks`."""

    kind: Literal["video_tasks"]
    task: Task = "direction"
    videos: Path | tuple[Path, ...]
    """Video files, and directories of them."""
    test: Path | tuple[Path, ...] | None = None
    """The same for the test; by default a part of `videos`."""
    test_fraction: float = Field(default=0.2, gt=0.0, lt=1.0)
    split_seed: int = Field(default=0, ge=0)
    stride: int = Field(default=1, ge=1)
    """Frames of a video from one frame of a clip to the next."""
    subtract_mean: bool = False
    """Subtract from each pixel its mean over the clip, which leaves what changes."""
    train_clips: int = Field(default=8192, ge=1)
    """Clips per epoch; every epoch has new ones."""
    test_clips: int = Field(default=2048, ge=1)
    on_error: Literal["raise", "skip"] = "raise"


DataConfig = MovingDigitsConfig | MovingObjectsConfig | UCF101Config | VideoFolderConfig | VideoTasksConfig


class LatencyLossConfig(StrictModel):
    """Loss for a latency budget; see `evaluation.latency_model`."""

    model: Path
    budget: float = Field(gt=0.0, le=1.0)
    """Fraction of the dense model's latency."""
    weight: float = Field(default=1.0, ge=0.0)


class DistillationConfig(StrictModel):
    """Distillation from a trained model, which usually is dense (arXiv 1503.02531)."""

    teacher: Path
    """Model of a training with the same classes and clips."""
    weight: float = Field(default=0.5, gt=0.0, le=1.0)
    """Weight of the loss to the teacher's class probabilities; the loss to the labels has the rest."""
    temperature: float = Field(default=2.0, gt=0.0)
    """Temperature of the class probabilities."""


class VideoTrainConfig(StrictModel):
    """Training of a model."""

    epochs: int = Field(default=10, ge=1)
    batch_size: int = Field(default=32, ge=1)
    """Clips per step and process."""
    rate: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate."""
    gate_rate: float = Field(default=10.0, gt=0.0)
    """Learning rate of gates divided by `rate`: AdamW moves a logit by about its learning rate each step."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    warm_up: float = Field(default=0.1, ge=0.0, le=1.0)
    """Fraction of the steps with rising learning rate; it then falls along a cosine."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Maximum norm of the gradient."""
    softness_end: float | None = Field(default=None, gt=0.0)
    """Softness of the soft masks at the end of training, reached linearly; constant by default."""
    hard_from: float | None = Field(default=None, ge=0.0, le=1.0)
    """Fraction of the steps after which training uses hard gates, as evaluation does; never by default.
    Otherwise a gate that closes late reduces accuracy without a change of the loss."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    workers: int = Field(default=0, ge=0)
    """Processes that load clips."""
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps between checkpoints; each epoch ends with one, too."""
    seed: int = Field(default=0, ge=0)


class PruningConfig(StrictModel):
    """Configuration of a training, an evaluation or a comparison.

    Attributes:
        mode: `"dense"` does not prune; `"ast"` prunes by `ast`; `"ast+latency"` also optimizes for a latency
            budget.
        model: Architecture.
        ast: Token selector, stages and gates.
        data: Dataset.
        train: Training.
        pretrained: Initial weights: a Hugging Face ViT or VideoMAE, see `load_pretrained`. Random by default.
        latency: Latency budget of `"ast+latency"`.
        distill: Distillation from a trained model; none by default.
    """

    mode: Literal["dense", "ast", "ast+latency"] = "ast"
    model: VideoModelConfig
    ast: Annotated[ASTConfig, DictField()] = Field(default_factory=ASTConfig)
    data: Annotated[DataConfig, Field(discriminator="kind")]
    train: VideoTrainConfig = Field(default_factory=VideoTrainConfig)
    pretrained: Path | None = None
    latency: LatencyLossConfig | None = None
    distill: DistillationConfig | None = None

    def build_model(self, num_classes: int, num_channels: int) -> VideoViT:
        """Build the model; weights that `pretrained` lacks are random, from torch's global generator.

        Raises:
            InputError: A setting of the model or of `ast` is invalid, or `pretrained` does not fit the model.
            FileFormatError: A file of `pretrained` is damaged.
        """
        model = VideoViT(
            **self.model.model_dump(), num_classes=num_classes, in_chans=num_channels,
            use_ast_prune=self.mode != "dense", ast_cfg=self.ast,
        )  # fmt: skip
        if self.pretrained is not None:
            load_pretrained(model, self.pretrained)
        return model


def read_config(source: Path | str, overrides: Mapping[str, Any] | None = None) -> PruningConfig:
    """Read a configuration.

    Args:
        source: A YAML file, or the name of a shipped configuration.
        overrides: Dotted setting, such as `"train.epochs"` -> value that replaces that of the file.

    Raises:
        InputError: The file does not exist, or a setting is missing, unknown or invalid.
        FileFormatError: The file is not valid YAML.
        MissingExtraError: PyYAML is missing.
    """
    content = read_config_file(source, package=_PACKAGE, extra="pruning")
    return parse_config(apply_overrides(content, overrides or {}), str(source))


def parse_config(content: Mapping[str, Any], source: str = "the configuration") -> PruningConfig:
    """Validate a configuration.

    Args:
        content: Nested settings.
        source: Name of the configuration for error messages.

    Raises:
        InputError: A setting is missing, unknown or invalid.
    """
    config = validate_config(PruningConfig, content, source)
    ast = config.ast
    VideoViTConfig(**config.model.model_dump(), num_classes=1)
    if config.mode != "dense":
        ast.check_depth(config.model.depth)
    softness_end = config.train.softness_end
    if softness_end is not None and softness_end > ast.softness > 0.0:
        raise InputError(f"`softness_end` (={softness_end}) must not be above `softness` (={ast.softness})")
    if config.mode == "ast+latency" and not ast.keep:
        raise InputError(
            "`mode` ast+latency trains gates, and `ast` has none; set `keep`, such as {head: 1.0, channel: "
            "1.0}"
        )
    if (config.mode == "ast+latency") != (config.latency is not None):
        raise InputError(
            f"`mode` (={config.mode!r}) and `latency` do not match: ast+latency requires `latency`, and "
            "other modes do not use it"
        )
    return config
