"""What was found out about a model's blocks, and the plans that follow from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.adaptive.profile.identity import weights_id
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

_FORMAT = "sparseflow-adaptive-importance-1"


@dataclass(frozen=True, kw_only=True)
class AccuracyDrop:
    """What is lost without some blocks.

    Attributes:
        without: The blocks, ascending.
        drop: Mean over samples of (score of the whole model - score without them).
        low: Lower end of its 95 % bootstrap interval over samples.
        high: Upper end.
    """

    without: tuple[int, ...]
    drop: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**vars(self), "without": list(self.without)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> AccuracyDrop:
        """What `to_dict` gave; raises KeyError, TypeError or ValueError where it is something else."""
        figures = {name: float(record[name]) for name in ("drop", "low", "high")}
        without = tuple(record["without"])
        ascending = list(without) == sorted(set(without)) and all(type(block) is int for block in without)
        if not all(map(math.isfinite, figures.values())) or not ascending or 0 in without:
            raise ValueError(f"no drop of accuracy: {dict(record)}")
        return cls(without=without, **figures)


@dataclass(frozen=True, kw_only=True)
class SkippedBlocks:
    """The blocks to skip at an insertion position, of a number to skip.

    Attributes:
        position: All of them lie after it.
        drop: What is lost without them. They were chosen by the same samples, so it is on the low side.
    """

    position: int
    drop: AccuracyDrop


@dataclass(frozen=True, kw_only=True)
class BlockImportance:
    """What a model loses without blocks.

    Attributes:
        geometry: The model's.
        model_id: Of the model, as `profile.weights_id` gives it; empty where it was not told.
        samples: How many scores are from.
        full: Mean score of the whole model.
        singles: Each block but block 0, by itself.
        chosen: For each insertion position and number of blocks, what to skip.
        evaluations: Sets of blocks that were scored.
    """

    geometry: ModelGeometry
    model_id: str = ""
    samples: int
    full: float
    singles: tuple[AccuracyDrop, ...]
    chosen: tuple[SkippedBlocks, ...]
    evaluations: int

    def __post_init__(self) -> None:
        depth = self.geometry.depth
        if [drop.without for drop in self.singles] != [(block,) for block in range(1, depth)]:
            raise InputError(f"`singles` must be of blocks 1 to {depth - 1}, one by one, in this order")
        for each in self.chosen:
            if any(not each.position <= block < depth for block in each.drop.without):
                raise InputError(
                    f"blocks {each.drop.without} cannot be skipped at position {each.position} of {depth} "
                    "blocks"
                )

    def alone(self, without: Sequence[int]) -> float:
        """Sum of what is lost without each by itself, to hold what is lost without all of them against.

        Raises:
            InputError: A block is not there, or block 0, which cannot be skipped.
        """
        unknown = [block for block in without if not 1 <= block < self.geometry.depth]
        if unknown:
            raise InputError(f"blocks {unknown} must be of 1 to {self.geometry.depth - 1}")
        return sum(self.singles[block - 1].drop for block in without)

    def space(self) -> PlanSpace:
        """The plans, with these blocks skipped.

        Raises:
            InputError: A position and number of blocks is missing.
        """
        depth = self.geometry.depth
        sets = {}
        for each in self.chosen:
            kept = tuple(block for block in range(depth) if block not in each.drop.without)
            sets[each.position, len(kept)] = kept
        return PlanSpace(geometry=self.geometry, sets=sets)

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "format": _FORMAT,
            "geometry": self.geometry.to_dict(),
            "model_id": self.model_id,
            "samples": self.samples,
            "full": self.full,
            "singles": [drop.to_dict() for drop in self.singles],
            "chosen": [{"position": each.position, **each.drop.to_dict()} for each in self.chosen],
            "evaluations": self.evaluations,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> BlockImportance:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is something else.
        """
        if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
            raise FileFormatError("this tells no importance of blocks of this version of SparseFlow")
        try:
            found = cls(
                geometry=ModelGeometry.from_dict(record["geometry"]),
                model_id=str(record["model_id"]),
                samples=int(record["samples"]),
                full=float(record["full"]),
                singles=tuple(AccuracyDrop.from_dict(each) for each in record["singles"]),
                chosen=tuple(
                    SkippedBlocks(position=int(each["position"]), drop=AccuracyDrop.from_dict(each))
                    for each in record["chosen"]
                ),
                evaluations=int(record["evaluations"]),
            )
            found.space()
        except FileFormatError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"the importance of blocks cannot be read: {error}") from error
        return found

    def write(self, path: Path | str) -> None:
        """Write it as JSON, in place of what is there.

        Raises:
            OSError: The file cannot be written.
        """
        write_atomic(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> BlockImportance:
        """What `write` wrote.

        Raises:
            InputError: There is no such file.
            FileFormatError: It holds something else.
        """
        file = Path(path)
        if not file.is_file():
            raise InputError(f"there is no file {file}; measure with `sparseflow adaptive importance`")
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FileFormatError(f"{file} is not JSON: {error}") from error
        return cls.from_dict(record)


def space_of(model: nn.Module, geometry: ModelGeometry, file: Path | None) -> PlanSpace:
    """The plans of a model: by what was found about its blocks, or by a guess where there is no file.

    Raises:
        InputError: The file is missing, or of another model.
        FileFormatError: It is damaged.
    """
    if file is None:
        return PlanSpace.of(geometry)
    found = BlockImportance.read(file)
    if found.model_id and found.model_id != (mine := weights_id(model)):
        raise InputError(
            f"{file} is of another model (id {found.model_id}; yours is {mine}): measure yours with "
            "`sparseflow adaptive importance`"
        )
    return found.space()
