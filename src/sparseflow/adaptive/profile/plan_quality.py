"""Quality of plans: mean accuracy of each plan on a task, and the Pareto front of latency and quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import Field, field_serializer, model_validator

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.core.artifact import Artifact, DictField
from sparseflow.core.metrics import pareto_front
from sparseflow.errors import InputError


class PlanQuality(Artifact):
    """Mean accuracy of plans.

    Attributes:
        model_id: `compute_weights_id` of the model.
        space: Plans.
        accuracy: Accuracy of each plan, 0 to 1; six digits are stored.
        samples: Number of answers per plan.
        task: Name of the task.
    """

    FORMAT: ClassVar[str] = "sparseflow.adaptive.plan-quality"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "measure it with `sparseflow adaptive eval`"

    model_id: str
    space: Annotated[PlanSpace, DictField()]
    accuracy: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]
    samples: Annotated[int, Field(ge=1)]
    task: str

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if len(self.accuracy) != len(self.space):
            raise ValueError(
                f"expected one accuracy per plan, got {len(self.accuracy)} for {len(self.space)}"
            )
        return self

    @field_serializer("accuracy")
    def _round_accuracy(self, accuracy: tuple[float, ...]) -> list[float]:
        return [round(value, 6) for value in accuracy]

    def check(self, model_id: str, space: PlanSpace) -> None:
        """Check that the quality is of this model and these plans.

        Raises:
            InputError: It is of another model or of other plans.
        """
        if self.model_id != model_id:
            raise InputError(
                f"the plan quality is of another model (id {self.model_id}, current: {model_id}): evaluate "
                "this one with `sparseflow adaptive eval`"
            )
        if self.space != space:
            raise InputError(
                "the plan quality is of other plans than the profile; evaluate the plans of the profile"
            )


_Plan = TypeVar("_Plan")


def select_pareto_plans(
    plans: Sequence[_Plan], latency_ms: Sequence[float], quality: Sequence[float], max_plans: int = 16
) -> list[_Plan]:
    """Select the plans that no other plan dominates in latency and quality, fastest first.

    Args:
        plans: Plans, or values that represent them.
        latency_ms: Latency of each plan.
        quality: Quality of each plan.
        max_plans: Maximum number of plans; beyond it both ends stay, and of the others those with the most
            even ratios of latency.

    Raises:
        InputError: The lengths differ or are 0, a latency is not finite and positive, or `max_plans` < 2.
    """
    if not len(plans) == len(latency_ms) == len(quality) or not plans:
        raise InputError(
            f"expected equally many plans, latencies and qualities, at least one; got {len(plans)}, "
            f"{len(latency_ms)} and {len(quality)}"
        )
    if max_plans < 2 or not all(math.isfinite(value) and value > 0 for value in latency_ms):
        raise InputError(
            f"`latency_ms` must be finite and above 0, and `max_plans` (={max_plans}) at least 2"
        )
    points = list(zip(latency_ms, quality, strict=True))
    front = pareto_front(points, maximize=(False, True))
    while len(front) > max_plans:
        # Remove the plan whose removal leaves the smallest gap.
        gaps = [
            latency_ms[after] / latency_ms[before] for before, after in zip(front, front[2:], strict=False)
        ]
        del front[1 + gaps.index(min(gaps))]
    return [plans[index] for index in front]
