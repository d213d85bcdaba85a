"""Configuration of the architecture, of AST2.0-lite v2 and of the baseline token selectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sparseflow.core.checks import (
    check_at_least,
    check_between,
    check_non_negative,
    check_one_of,
    check_positive,
)
from sparseflow.errors import InputError
from sparseflow.pruning.selectors.ast import ScoreConfig
from sparseflow.pruning.selectors.change import CHANGE_MEASURES

SELECTORS = ("ast", "random", "uniform", "tome", "attention", "vid_tldr", *CHANGE_MEASURES, "dynamic_vit")
"""Token selectors: AST score; random tokens; evenly spaced tokens; ToMe (arXiv 2210.09461), which merges
similar tokens; the attention that tokens receive, as in EViT (arXiv 2202.07800); the sharpness of the
attention of tokens, as in vid-TLDR (arXiv 2403.13347); the change since the previous frame, of which EVS
(arXiv 2510.14624) is one; and a learned score, as in DynamicViT (arXiv 2106.02034)."""

ATTENTION_SELECTORS = ("tome", "attention", "vid_tldr")
"""Selectors that read the attention heads of the stage's block, so that no head may be pruned."""

SOFT_SELECTORS = ("ast", "dynamic_vit")
"""Selectors with soft masks in training."""

GATED_GRAINS = ("head", "channel", "block")

_MAX_MLP_RATIO = 64
"""Larger ratios are taken for a typing error."""

_MAX_BLOCK_DIGITS = 4

_MAX_SIZE, _MAX_TOKENS, _MAX_PARAMETERS = 2**31, 2**20, 10**11
"""Larger models are taken for a typing error; building one would exhaust the memory."""


@dataclass(frozen=True, kw_only=True)
class VideoViTConfig:
    """Architecture of a VideoViT; see `VideoViT` for the fields.

    Raises:
        InputError: A value is out of range, or sizes are not divisible.
    """

    img_size: int
    num_frames: int
    num_classes: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    patch_size: int
    in_chans: int = 3
    drop_rate: float = 0.0
    attn_drop: float = 0.0
    drop_path_rate: float = 0.0
    tubelet_size: int = 1
    pool: str = "mean"
    position: str = "factored"
    norm_eps: float = 1e-6
    final_norm_eps: float | None = None

    def __post_init__(self) -> None:
        sizes = {
            "img_size": self.img_size, "num_frames": self.num_frames, "num_classes": self.num_classes,
            "embed_dim": self.embed_dim, "depth": self.depth, "num_heads": self.num_heads,
            "patch_size": self.patch_size, "in_chans": self.in_chans, "tubelet_size": self.tubelet_size,
        }  # fmt: skip
        check_at_least(1, **sizes)
        check_between(1, _MAX_SIZE, **sizes)
        for name, divisor_name in (
            ("img_size", "patch_size"), ("num_frames", "tubelet_size"), ("embed_dim", "num_heads"),
        ):  # fmt: skip
            size, divisor = getattr(self, name), getattr(self, divisor_name)
            if size % divisor:
                raise InputError(f"`{name}` (={size}) must be divisible by `{divisor_name}` (={divisor})")
        check_positive(mlp_ratio=self.mlp_ratio, norm_eps=self.norm_eps)
        if self.final_norm_eps is not None:
            check_positive(final_norm_eps=self.final_norm_eps)
        for name in ("drop_rate", "attn_drop", "drop_path_rate"):
            value = getattr(self, name)
            check_non_negative(**{name: value})
            if value >= 1.0:
                raise InputError(f"`{name}` (={value!r}) must be below 1")
        if self.mlp_ratio > _MAX_MLP_RATIO or self.mlp_channels < 1:
            raise InputError(
                f"`mlp_ratio` (={self.mlp_ratio!r}) must give at least one hidden channel and be at most "
                f"{_MAX_MLP_RATIO}"
            )
        if self.num_tokens > _MAX_TOKENS or self.num_parameters > _MAX_PARAMETERS:
            raise InputError(
                f"the model has {self.num_tokens:.3g} tokens and {self.num_parameters:.3g} parameters; "
                f"expected at most {_MAX_TOKENS:.3g} and {_MAX_PARAMETERS:.3g}"
            )
        check_one_of(("mean", "cls"), pool=self.pool)
        check_one_of(("factored", "joint"), position=self.position)

    @property
    def clip_shape(self) -> tuple[int, int, int, int]:
        """Frames, channels, height and width of a clip."""
        return self.num_frames, self.in_chans, self.img_size, self.img_size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens in time, rows and columns."""
        side = self.img_size // self.patch_size
        return self.num_frames // self.tubelet_size, side, side

    @property
    def num_tokens(self) -> int:
        """T * N."""
        t, h, w = self.grid
        return t * h * w

    @property
    def num_parameters(self) -> int:
        """Parameters of the weight matrices and of separate positions."""
        patch_values = self.in_chans * self.tubelet_size * self.patch_size**2
        block = 4 * self.embed_dim**2 + 2 * self.embed_dim * self.mlp_channels
        outside = patch_values + self.num_tokens + self.num_classes
        return self.depth * block + self.embed_dim * outside

    @property
    def mlp_channels(self) -> int:
        """Hidden channels of an MLP."""
        return round(self.embed_dim * self.mlp_ratio)

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


@dataclass(frozen=True, kw_only=True)
class ASTConfig:
    """Configuration of AST2.0-lite v2.

    Attributes:
        stages: Block -> share of all T * N tokens that its input has; shares must not rise with the block.
        selector: One of `SELECTORS`.
        score: Parameters of the `"ast"` score.
        softness: Width of the soft mask of a stage in training, sigmoid((score - threshold) / softness), in
            units of the score. 0 drops tokens in training, too.
        merge: Whether the mean of the tokens that a stage drops becomes one more token.
        keep: Grain -> target share of open gates, for `"head"`, `"channel"` (of MLPs) and `"block"`; other
            grains have no gates.
        strength: Weight of the terms of `L_AST`.
        gate_init: Initial value of gates, above `threshold`.
        threshold: Hard gates below it are closed.

    Raises:
        InputError: A value is out of range.
    """

    stages: Mapping[int, float] = field(default_factory=lambda: {3: 0.6})
    selector: str = "ast"
    score: ScoreConfig = field(default_factory=ScoreConfig)
    softness: float = 0.15
    merge: bool = False
    keep: Mapping[str, float] = field(default_factory=dict)
    strength: float = 1.0
    gate_init: float = 0.9
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_one_of(SELECTORS, selector=self.selector)
        check_non_negative(softness=self.softness, strength=self.strength)
        check_positive(gate_init=self.gate_init, threshold=self.threshold)
        if type(self.merge) is not bool:
            raise InputError(f"`merge` (={self.merge!r}) must be true or false")
        if not self.threshold < self.gate_init < 1.0:
            raise InputError(
                f"`gate_init` (={self.gate_init}) must be above `threshold` (={self.threshold}) and below 1"
            )
        if self.selector == "dynamic_vit" and self.softness == 0.0:
            raise InputError(
                "`softness` (=0) must be above 0 for the selector dynamic_vit, which learns by soft masks"
            )
        self._check_stages()
        self._check_keep()

    def _check_stages(self) -> None:
        for block in self.stages:
            if type(block) is not int or block < 0:
                raise InputError(f"`stages` contains the block {block!r}; blocks are numbered from 0")
        previous_share = 1.0
        for block, share in sorted(self.stages.items()):
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not is_number or not 0.0 < share <= previous_share:
                raise InputError(
                    f"`stages` has the share {share!r} at block {block}; it must be above 0 and at most "
                    f"{previous_share}, the share before it"
                )
            previous_share = share

    def _check_keep(self) -> None:
        if self.selector in ATTENTION_SELECTORS and {"head", "block"} & set(self.keep):
            raise InputError(
                f"`selector` (={self.selector!r}) reads the attention heads of its block; remove head and "
                f"block from `keep` (={dict(self.keep)})"
            )
        unknown = sorted(str(grain) for grain in self.keep if grain not in GATED_GRAINS)
        if unknown:
            raise InputError(
                f"`keep` has unknown grains: {', '.join(unknown)}; expected {', '.join(GATED_GRAINS)}"
            )
        for grain, share in self.keep.items():
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
                raise InputError(f"`keep` of {grain} (={share!r}) must be above 0 and at most 1")

    def scale_stages(self, share: float) -> ASTConfig:
        """Raise the shares of the stages, of which the last is below 1, to a power that makes it `share`."""
        power = math.log(share) / math.log(self.stages[max(self.stages)])
        return replace(self, stages={block: value**power for block, value in self.stages.items()})

    def check_depth(self, depth: int) -> None:
        """Raise InputError if a stage is at a block beyond the depth of a model."""
        if any(block >= depth for block in self.stages):
            raise InputError(
                f"`stages` contains block {max(self.stages)}; the last of {depth} blocks is {depth - 1}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self) | {"stages": {str(block): share for block, share in self.stages.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ASTConfig:
        """Parse the result of `to_dict` or a part of it; missing settings get their defaults.

        Raises:
            InputError: A setting is unknown or invalid.
        """
        arguments = _check_names(data, "ast", cls)
        if "stages" in arguments:
            stages = _check_mapping(arguments["stages"], "stages")
            arguments["stages"] = {_parse_block(block): share for block, share in stages.items()}
        if "keep" in arguments:
            _check_mapping(arguments["keep"], "keep")
        if "score" in arguments:
            score = _check_names(arguments["score"], "score", ScoreConfig)
            if isinstance(score.get("levels"), list):
                score["levels"] = tuple(score["levels"])
            arguments["score"] = ScoreConfig(**score)
        return cls(**arguments)


def _check_mapping(value: Any, name: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"`{name}` (={value!r:.60}) must be a mapping")
    return value


def _check_names(value: Any, name: str, config_type: type) -> dict[str, Any]:
    """Check that all keys are fields of a configuration, and copy them."""
    known = [item.name for item in fields(config_type)]
    unknown = [key for key in _check_mapping(value, name) if key not in known]
    if unknown:
        raise InputError(f"`{name}` has the unknown setting {unknown[0]!r:.60}; known: {', '.join(known)}")
    return dict(value)


def _parse_block(block: Any) -> Any:
    """Convert the text that JSON has for a block; other types are checked with the stages."""
    if not isinstance(block, str):
        return block
    if not (block.isdecimal() and len(block) <= _MAX_BLOCK_DIGITS):
        raise InputError(
            f"`stages` contains the block {block!r:.60}; expected a number and a share such as {{3: 0.6}}, "
            "with a space after the colon"
        )
    return int(block)
