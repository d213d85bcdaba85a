"""Interface between a study and its questions: samples, their splits, and outcomes of plans.

Implementations of `StudyTask` are Grid-VQA (`grid_vqa/task.py`) and a file of questions (`file_task.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.core.checks import check_at_least
from sparseflow.core.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["train", "val", "test"]
"""Disjoint parts of a task's questions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOutcomes:
    """Outcomes of plans on samples, and the inputs of controllers; all tensors are on the CPU.

    Attributes:
        plans: Plans.
        correct: Whether each answer is correct, shape [samples, plans], float32, 0 or 1.
        kinds: Index into the task's kinds of questions, shape [samples], int64.
        language: Mean text embeddings, shape [samples, d], float32.
        tokens: Latency tokens: hidden state of the last prompt token after the block before each insertion
            position, shape [samples, tiers, positions, d], float32; one tier for models without tiers.
        text_tokens: Prompt tokens that do not belong to images, shape [samples], int64.
        new_tokens: Tokens of the correct answer including its end, shape [samples], int64. Wrong answers may
            differ in length.
        vision_tokens: Tokens of all images of the prompt at the highest tier, shape [samples], int64; None if
            every sample has one image of the profile's size, or the model takes no images.
    """

    plans: tuple[Plan, ...]
    correct: Tensor
    kinds: Tensor
    language: Tensor
    tokens: Tensor
    text_tokens: Tensor
    new_tokens: Tensor
    vision_tokens: Tensor | None = None

    def accuracy_by_kind(self, plan: int, kinds: Sequence[str]) -> dict[str, float]:
        """Accuracy of a plan for each kind of question with samples.

        Args:
            plan: Index into `plans`.
            kinds: Kinds of the task.
        """
        masks = {kind: self.kinds == index for index, kind in enumerate(kinds)}
        return {
            kind: float(self.correct[mask, plan].mean()) for kind, mask in masks.items() if bool(mask.any())
        }


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Number of samples of each part of a study.

    Raises:
        InputError: A number is below 1.
    """

    train: int = 2048
    validation: int = 1024
    test: int = 2048

    def __post_init__(self) -> None:
        check_at_least(1, **vars(self))


@dataclass(frozen=True, kw_only=True)
class SampleRange:
    """Consecutive samples of a split.

    Attributes:
        split: Split.
        first: Index of the first sample.
        count: Number of samples.
    """

    split: Split
    first: int = 0
    count: int


@dataclass(frozen=True, kw_only=True)
class SplitRanges:
    """Samples of each part of a study.

    Attributes:
        train: Samples that controllers are trained on.
        validation: Samples that margins are calibrated on.
        test: Samples of the evaluation.
        images: Whether any sample may have an image.
    """

    train: SampleRange
    validation: SampleRange
    test: SampleRange
    images: bool = True

    def counts(self) -> dict[Split, int]:
        """Number of first samples of each split that the parts need."""
        counts: dict[Split, int] = {}
        for samples in (self.train, self.validation, self.test):
            counts[samples.split] = max(counts.get(samples.split, 0), samples.first + samples.count)
        return counts


class StudyTask(Protocol):
    """Questions to one model, with their correct answers.

    Attributes:
        model: Model.
        name: Name of the task.
        kinds: Kinds of questions; `PlanOutcomes.kinds` contains indices into them.
        chunk_size: Samples that are evaluated together and stored in one file.
        description: When an answer is correct and how the parts differ, in sentences.
    """

    @property
    def model(self) -> Any: ...

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Sequence[str]: ...

    @property
    def chunk_size(self) -> int: ...

    @property
    def description(self) -> str: ...

    def identity(self) -> Mapping[str, Any]:
        """Everything that answers depend on besides weights, number format and plans, in JSON types."""
        ...

    def select_samples(self, counts: SampleCounts, progress: Progress | None = None) -> SplitRanges:
        """Select the samples of each part.

        Args:
            counts: Requested number of samples.
            progress: Called with (message, fraction done).

        Raises:
            InputError: There are too few samples.
        """
        ...

    def evaluate_plans(
        self, space: PlanSpace, *, split: Split, first: int, count: int, progress: Progress | None = None
    ) -> PlanOutcomes:
        """Evaluate all plans on samples of a split.

        Args:
            space: Plans.
            split: Split.
            first: Index of the first sample, a multiple of `chunk_size`.
            count: Number of samples.
            progress: Called with (message, fraction done).

        Raises:
            InputError: The model cannot run a plan, or the samples do not exist.
        """
        ...
