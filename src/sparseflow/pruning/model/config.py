"""What is pruned, and how: AST2.0-lite v2's settings, and those of its rivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from sparseflow.errors import InputError
from sparseflow.pruning.selectors.ast import ScoreConfig

SELECTORS = ("ast", "random", "uniform", "tome", "attention")
"""Who says which tokens stay: entropies; chance; every so many; ToMe (arXiv 2210.09461), which merges the
most alike; the attention that tokens receive, as in EViT (arXiv 2202.07800)."""

BY_HEADS = ("tome", "attention")
"""Of these, those that look at the heads of a stage's block, so that none of them can be cut."""

GRAINS = ("token", "head", "channel", "block")


@dataclass(frozen=True, kw_only=True)
class ASTConfig:
    """AST2.0-lite v2.

    Attributes:
        stages: Block -> share of all T * N tokens that are left when it begins; shares fall with the blocks.
        selector: One of `SELECTORS`.
        score: What entropies make up the score of `"ast"`.
        softness: Width of the soft mask that stands for a stage in training, sigmoid((score - threshold) /
            softness), in units of the score. 0 drops tokens in training, too.
        merge: Whether the mean of what a stage drops goes on as one more token.
        keep: Grain -> share that `L_AST` drives towards, of `"head"`, `"channel"` (of perceptrons) and
            `"block"`; what is not named has no gates.
        strength: Weight of `L_AST`'s parts.
        gate_init: Value of gates at first, above `threshold`.
        threshold: Gates below it are closed where gates are hard.

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
        if self.selector not in SELECTORS:
            raise InputError(f"`selector` (={self.selector!r}) must be one of: {', '.join(SELECTORS)}")
        for name in ("softness", "strength", "gate_init", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise InputError(f"`{name}` (={value!r}) must be a finite number")
        if type(self.merge) is not bool:
            raise InputError(f"`merge` (={self.merge!r}) must be true or false")
        before = 1.0
        for block in self.stages:
            if type(block) is not int or block < 0:
                raise InputError(f"`stages` names the block {block!r}; blocks are numbered from 0")
        for block, share in sorted(self.stages.items()):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= before:
                raise InputError(
                    f"`stages` leaves a share of {share!r} at block {block}; it must be above 0 and at most "
                    f"{before}, what is left before it"
                )
            before = share
        if self.selector in BY_HEADS and {"head", "block"} & set(self.keep):
            raise InputError(
                f"`selector` {self.selector!r} looks at the heads of a stage's block: `keep` must not "
                "name head or block"
            )
        unknown = sorted(set(self.keep) - set(GRAINS[1:]))
        if unknown:
            raise InputError(f"`keep` names {', '.join(unknown)}; it may name: {', '.join(GRAINS[1:])}")
        for grain, share in self.keep.items():
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
                raise InputError(f"`keep` of {grain} (={share!r}) must be above 0 and at most 1")
        if not 0.0 < self.threshold < self.gate_init < 1.0:
            raise InputError(
                f"`threshold` (={self.threshold}) and `gate_init` (={self.gate_init}) must be between 0 and "
                "1, the first below the second"
            )
        if self.softness < 0.0 or self.strength < 0.0:
            raise InputError(
                f"`softness` (={self.softness}) and `strength` (={self.strength}) must not be negative"
            )

    def check(self, depth: int) -> None:
        """Raise InputError where a stage stands at a block that a model of this depth lacks."""
        if any(block >= depth for block in self.stages):
            raise InputError(f"`stages` names block {max(self.stages)}; the last of {depth} is {depth - 1}")

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` reads them back."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "stages": {str(block): share for block, share in self.stages.items()},
            "score": asdict(self.score) | {"levels": list(self.score.levels)},
            "keep": dict(self.keep),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ASTConfig:
        """What `to_dict` gave, or a part of it: the rest has its defaults.

        Raises:
            InputError: A setting is unknown, or its value cannot be used.
        """
        try:
            given = dict(data)
            if "stages" in given:
                given["stages"] = {
                    int(block) if isinstance(block, str) else block: share
                    for block, share in given["stages"].items()
                }
            if "score" in given:
                score = dict(given["score"])
                if "levels" in score:
                    score["levels"] = tuple(score["levels"])
                given["score"] = ScoreConfig(**score)
            if "keep" in given:
                given["keep"] = dict(given["keep"])
            return cls(**given)
        except InputError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"`ast_cfg` cannot be used: {error}") from error


_PLAIN = ("selector", "softness", "merge", "strength", "gate_init", "threshold")
