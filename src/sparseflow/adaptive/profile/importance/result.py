"""Importance of a model's blocks, and the plan space that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import model_validator
from torch import nn

from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.adaptive.profile.identity import compute_weights_id
from sparseflow.core.artifact import Artifact, DictField
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class AccuracyDrop:
    """Loss of score without some blocks.

    Attributes:
        blocks: Removed blocks, ascending.
        drop: Mean over samples of (score of the full model - score without the blocks).
        low: Lower end of its 95 % bootstrap interval over samples.
        high: Upper end.

    Raises:
        InputError: The blocks do not ascend, or block 0 is one of them.
    """

    blocks: tuple[int, ...]
    drop: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if list(self.blocks) != sorted(set(self.blocks)) or 0 in self.blocks:
            raise InputError(f"`blocks` (={list(self.blocks)}) must ascend and be at least 1")


@dataclass(frozen=True, kw_only=True)
class SkippedBlocks:
    """Best blocks to skip for an insertion position and a number of blocks.

    Attributes:
        position: Insertion position; all skipped blocks come after it.
        drop: Loss without them. The same samples selected the blocks, so it is biased low.
    """

    position: int
    drop: AccuracyDrop


class BlockImportance(Artifact):
    """Loss of score without single blocks and without sets of blocks.

    Attributes:
        geometry: Geometry of the model.
        model_id: `compute_weights_id` of the model; empty if unknown.
        samples: Number of samples.
        full_score: Mean score of the full model.
        single_drops: Loss without each block except block 0, in order.
        skips: Blocks to skip for each insertion position and number of blocks.
        evaluations: Number of evaluated sets of blocks.
    """

    FORMAT: ClassVar[str] = "sparseflow.adaptive.block-importance"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "measure it with `sparseflow adaptive importance`"

    geometry: Annotated[ModelGeometry, DictField()]
    model_id: str = ""
    samples: int
    full_score: float
    single_drops: tuple[AccuracyDrop, ...]
    skips: tuple[SkippedBlocks, ...]
    evaluations: int

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        depth = self.geometry.depth
        if [drop.blocks for drop in self.single_drops] != [(block,) for block in range(1, depth)]:
            raise ValueError(f"`single_drops` must contain the blocks 1 to {depth - 1} in order")
        for skip in self.skips:
            if any(not skip.position <= block < depth for block in skip.drop.blocks):
                raise ValueError(
                    f"blocks {skip.drop.blocks} cannot be skipped at position {skip.position} of {depth}"
                )
        self.make_space()
        return self

    def make_space(self) -> PlanSpace:
        """Make the plan space in which these blocks are skipped.

        Raises:
            InputError: A position and number of blocks is missing.
        """
        depth = self.geometry.depth
        sets = {}
        for skip in self.skips:
            blocks = tuple(block for block in range(depth) if block not in skip.drop.blocks)
            sets[skip.position, len(blocks)] = blocks
        return PlanSpace(geometry=self.geometry, sets=sets)


def load_plan_space(model: nn.Module, geometry: ModelGeometry, path: Path | None) -> PlanSpace:
    """Plan space of a model: from its block importance, or by a heuristic if there is no file.

    Raises:
        InputError: The file does not exist or is of another model.
        FileFormatError: The file is foreign, damaged, or of another version.
    """
    if path is None:
        return PlanSpace.from_importance(geometry)
    importance = BlockImportance.load(path)
    if importance.model_id and importance.model_id != (model_id := compute_weights_id(model)):
        raise InputError(
            f"{path} is of another model (id {importance.model_id}, current: {model_id}): measure this one "
            "with `sparseflow adaptive importance`"
        )
    return importance.make_space()
