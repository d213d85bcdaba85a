"""What a model is asked, and what its plans make of it: between a study and where questions are from.

A study wants a `StudyTask`: Grid-VQA is one (`grid_vqa/task.py`), a file of a user's own questions another
(`questions/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[str, float], None]
"""Called with (what was done, fraction done)."""

Split = Literal["train", "val", "test"]
"""A part of a task's questions that shares none with the others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOutcomes:
    """What plans make of samples; everything on the CPU.

    Attributes:
        plans: Those that were tried.
        correct: [samples, plans] float32, 0 or 1.
        kinds: Index into the task's kinds, [samples] int64.
        language: Language features, [samples, d] float32.
        tokens: Latency tokens: the last prompt token's hidden state as it leaves the block before each
            insertion position, by tier: [samples, tiers, positions, d] float32. Without tiers there is one.
        text_tokens: Of the prompt, those that are not of images, [samples] int64.
        new_tokens: Of the right answer, its end included, [samples] int64. A wrong answer may be longer or
            shorter.
        vision_tokens: Of all images of the prompt, at the highest tier, [samples] int64; None where every
            sample has one image like that of a profile, or the model takes none.
    """

    plans: tuple[Plan, ...]
    correct: Tensor
    kinds: Tensor
    language: Tensor
    tokens: Tensor
    text_tokens: Tensor
    new_tokens: Tensor
    vision_tokens: Tensor | None = None

    def by_kind(self, plan: int, kinds: Sequence[str]) -> dict[str, float]:
        """A plan's accuracy for each kind of question that there is.

        Args:
            plan: Its place in `plans`.
            kinds: The task's.
        """
        there = {kind: self.kinds == at for at, kind in enumerate(kinds)}
        return {
            kind: float(self.correct[mine, plan].mean()) for kind, mine in there.items() if bool(mine.any())
        }


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """How many samples there are to learn from, to validate with, and to be judged on.

    Raises:
        InputError: One is below 1.
    """

    train: int = 2048
    validation: int = 1024
    test: int = 2048

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if type(count) is not int or count < 1:
                raise InputError(f"`{name}` (={count!r}) must be a whole number of samples, at least 1")


@dataclass(frozen=True, kw_only=True)
class SampleRange:
    """Samples of a split that follow each other.

    Attributes:
        split: Which.
        first: How many come before them.
        count: How many they are.
    """

    split: Split
    first: int = 0
    count: int


@dataclass(frozen=True, kw_only=True)
class SplitRanges:
    """Which samples controllers learn from, which margins are chosen by, and which judge."""

    train: SampleRange
    validation: SampleRange
    test: SampleRange
    images: bool = True
    """Whether one of them may have an image."""

    def counts(self) -> dict[Split, int]:
        """How many first samples of each split are needed."""
        found: dict[Split, int] = {}
        for each in (self.train, self.validation, self.test):
            found[each.split] = max(found.get(each.split, 0), each.first + each.count)
        return found


class StudyTask(Protocol):
    """Questions to one model, with their right answers.

    Attributes:
        model: Who is asked.
        name: What is asked, as a worth of plans names it.
        kinds: Of questions; `Judged.kinds` counts in them.
        chunk: Samples that are asked together, and kept in one file.
        told: What a right answer is and how parts differ, in sentences for a page.
    """

    @property
    def model(self) -> Any: ...

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Sequence[str]: ...

    @property
    def chunk(self) -> int: ...

    @property
    def told(self) -> str: ...

    def identity(self) -> Mapping[str, Any]:
        """What answers depend on beside weights, number format and plans, as JSON keeps it."""
        ...

    def parts(self, counts: SampleCounts, progress: Progress | None = None) -> SplitRanges:
        """Which samples serve for what.

        Args:
            counts: How many are wanted of each.
            progress: Told while it takes long.

        Raises:
            InputError: There are too few.
        """
        ...

    def outcomes(
        self, space: PlanSpace, *, split: Split, first: int, count: int, progress: Progress | None = None
    ) -> PlanOutcomes:
        """Try all plans on some samples of a split.

        Args:
            space: The plans.
            split: Which.
            first: How many samples to leave out before: a multiple of `chunk`.
            count: How many to try.
            progress: Told of what happens within.

        Raises:
            InputError: The model cannot run a plan, or there are no such samples.
        """
        ...
