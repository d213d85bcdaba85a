"""How good each plan of a model is, as mean accuracy on a task; and the few plans that are worth keeping."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

_FORMAT = "sparseflow-adaptive-worth-1"


@dataclass(frozen=True, kw_only=True)
class PlanQuality:
    """Mean accuracy of plans.

    Attributes:
        model_id: Of the model, as `profile.weights_id` gives it.
        space: The plans.
        accuracy: Of each of them, 0 to 1.
        samples: How many answers each is the mean of.
        task: What was asked.
    """

    model_id: str
    space: PlanSpace
    accuracy: tuple[float, ...]
    samples: int
    task: str

    def __post_init__(self) -> None:
        if len(self.accuracy) != len(self.space):
            raise InputError(
                f"{len(self.accuracy)} accuracies for {len(self.space)} plans; give one for each"
            )
        if not all(0.0 <= each <= 1.0 for each in self.accuracy):
            raise InputError("`accuracy` must hold shares from 0 to 1")

    def check(self, model_id: str, space: PlanSpace) -> None:
        """That it is of this model and these plans.

        Raises:
            InputError: It is not.
        """
        if self.model_id != model_id:
            raise InputError(
                f"this is the worth of plans of another model (id {self.model_id}; yours is {model_id}): "
                "judge yours with `sparseflow adaptive eval`"
            )
        if self.space != space:
            raise InputError(
                "this is the worth of other plans than the profile's; judge those of the profile"
            )

    def save(self, path: Path | str) -> None:
        """Write it as JSON, in place of what is there.

        Raises:
            OSError: The file cannot be written.
        """
        told = {
            "format": _FORMAT, "model_id": self.model_id, "task": self.task, "samples": self.samples,
            "space": self.space.to_dict(), "accuracy": [round(each, 6) for each in self.accuracy],
        }  # fmt: skip
        write_atomic(Path(path), json.dumps(told) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> PlanQuality:
        """Read what `save` wrote.

        Raises:
            InputError: There is no such file.
            FileFormatError: It holds something else.
        """
        try:
            told: Any = json.loads(Path(path).read_text("utf-8"))
            if told["format"] != _FORMAT:
                raise ValueError(f"its format is {told['format']!r}")
            return cls(
                model_id=str(told["model_id"]), space=PlanSpace.from_dict(told["space"]),
                accuracy=tuple(float(each) for each in told["accuracy"]), samples=int(told["samples"]),
                task=str(told["task"]),
            )  # fmt: skip
        except FileNotFoundError as error:
            raise InputError(f"{path} is not there; `sparseflow adaptive eval` writes it") from error
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise FileFormatError(f"{path} does not hold the worth of plans: {error}") from error


_Item = TypeVar("_Item")


def pareto(
    plans: Sequence[_Item], ms: Sequence[float], worth: Sequence[float], most: int = 16
) -> list[_Item]:
    """Plans that no other one beats in time and worth, the quickest first.

    Args:
        plans: All of them, or what stands for each.
        ms: What each takes.
        worth: How good each is.
        most: Where there are more, so many are kept: the ends, and of the others those that keep the steps in
            time, as ratios, even.

    Raises:
        InputError: Lengths differ, a time is not finite, or fewer than two may be kept.
    """
    if not len(plans) == len(ms) == len(worth) or not plans:
        raise InputError(
            f"{len(plans)} plans, {len(ms)} times and {len(worth)} worths must be equally many, and some"
        )
    if most < 2 or not all(math.isfinite(each) and each > 0 for each in ms):
        raise InputError("`ms` must be finite and above 0, and `most` at least 2")
    front: list[int] = []
    for at in sorted(range(len(plans)), key=lambda at: (ms[at], -worth[at])):
        if not front or worth[at] > worth[front[-1]]:
            front.append(at)
    while len(front) > most:
        # The one whose absence leaves the smallest gap.
        gaps = [ms[front[at + 1]] / ms[front[at - 1]] for at in range(1, len(front) - 1)]
        front.pop(1 + gaps.index(min(gaps)))
    return [plans[at] for at in front]
