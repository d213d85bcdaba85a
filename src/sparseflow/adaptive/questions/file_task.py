"""A file of questions as the task of a study and as the score function of block importance."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.prompts.model_folder import open_folder
from sparseflow.adaptive.questions.file import Question, read_questions
from sparseflow.adaptive.questions.runner import (
    PreparedQuestion,
    QuestionRunner,
    first_with_and_without_image,
    group_into_batches,
)
from sparseflow.adaptive.questions.task import PlanOutcomes, SampleCounts, SampleRange, Split, SplitRanges
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError

MIN_QUESTIONS = 8
"""Minimum questions of each part: enough to run, but far too few to distinguish plans."""

_MAX_KINDS = 64
_OTHER_KIND = "other"
"""Kind of questions without one, if others have one."""


class QuestionTask:
    """Questions of a file to a model. Implements `StudyTask`.

    Args:
        runner: Answers the questions.
        questions: Questions.
        file_name: Name of the file.

    Raises:
        InputError: There are too many kinds.
    """

    chunk_size = 64
    description = (
        "An answer is correct if greedy decoding gives its text, except for whitespace and case. Training, "
        "validation and test use different questions of the file."
    )

    def __init__(self, runner: QuestionRunner, questions: Sequence[Question], file_name: str) -> None:
        self._runner, self._file_name = runner, file_name
        kinds = sorted({question.kind or _OTHER_KIND for question in questions})
        if len(kinds) > _MAX_KINDS:
            raise InputError(f"{file_name} has {len(kinds)} kinds of questions; use at most {_MAX_KINDS}")
        self.kinds: tuple[str, ...] = tuple(kinds) if len(kinds) > 1 else ()
        self.splits: Mapping[Split, tuple[Question, ...]] = {
            split: tuple(question for question in questions if question.split == split)
            for split in ("train", "val", "test")
        }

    @classmethod
    def open(
        cls,
        model_dir: Path,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        max_total_tokens: int | None = None,
    ) -> QuestionTask:
        """Open a model and a file of questions.

        Args:
            model_dir: Directory of the model.
            path: File of questions.
            device: Device.
            dtype: Number format of the weights; by default that of the directory.
            max_total_tokens: Maximum tokens of a prompt and its answer; by default the model's context.

        Raises:
            InputError: The directory or file does not exist, or the tokenizer has no chat template.
            FileFormatError: One of them is damaged.
            ModelError: The model's architecture has no adapter.
        """
        questions = read_questions(path)
        folder = open_folder(model_dir, device=device, dtype=dtype)
        return cls(QuestionRunner(folder, max_total_tokens), questions, path.name)

    @property
    def model(self) -> Any:
        return self._runner.model

    @property
    def name(self) -> str:
        return f"questions of {self._file_name}"

    def identity(self) -> Mapping[str, Any]:
        digest = hashlib.sha256()
        for split, questions in self.splits.items():
            for question in questions:
                digest.update(f"{split} {question.digest}\n".encode())
        examples = first_with_and_without_image(
            chain(*self.splits.values()), lambda question: bool(question.images)
        )
        prepared = [self._runner.prepare(question) for question in examples]
        return {"questions": digest.hexdigest(), **self._runner.identity(prepared)}

    def select_samples(self, counts: SampleCounts, progress: Progress | None = None) -> SplitRanges:
        """Select the samples of each part: as many as requested or as exist.

        Each is prepared as a prompt, so that no error is found after hours.
        """
        requested: dict[Split, int] = {"train": counts.train, "val": counts.validation, "test": counts.test}
        for split in requested:
            self._check_count(len(self.splits[split]), f"`{split}`")
        selected: dict[Split, tuple[Question, ...]] = {
            split: self.splits[split][:count] for split, count in requested.items()
        }
        for split, questions in selected.items():
            for number, question in enumerate(questions, start=1):
                self._runner.prepare(question)
                if progress is not None:
                    progress(f"{number} of {len(questions)} {split} questions checked", 0.0)
        ranges: dict[Split, SampleRange] = {
            split: SampleRange(split=split, count=len(questions)) for split, questions in selected.items()
        }
        images = any(question.images for questions in selected.values() for question in questions)
        return SplitRanges(
            train=ranges["train"], validation=ranges["val"], test=ranges["test"], images=images
        )

    def evaluate_plans(
        self, space: PlanSpace, *, split: Split, first: int, count: int, progress: Progress | None = None
    ) -> PlanOutcomes:
        questions = self.splits[split][first : first + count]
        if len(questions) < count or count < 1:
            raise InputError(
                f"`{split}` has {len(self.splits[split])} questions; {count} from index {first} do not exist"
            )
        prepared = [self._runner.prepare(question) for question in questions]
        evaluation = _PlanEvaluation(prepared, space, self._runner)
        for num_done, total, plan_id in evaluation.run():
            if progress is not None:
                progress(f"{plan_id} on {split} questions from {first + 1}", num_done / total)
        kind_index = {kind: index for index, kind in enumerate(self.kinds)}
        return PlanOutcomes(
            plans=space.plans, correct=evaluation.correct, language=evaluation.language,
            tokens=evaluation.tokens,
            kinds=torch.tensor([kind_index.get(q.kind or _OTHER_KIND, 0) for q in questions]),
            text_tokens=torch.tensor([question.prompt.text_tokens for question in prepared]),
            new_tokens=torch.tensor([question.new_tokens for question in prepared]),
            vision_tokens=torch.tensor([question.prompt.vision_tokens for question in prepared]),
        )  # fmt: skip

    def make_scorer(self, max_samples: int) -> QuestionScorer:
        """Make the score function of block importance, from the first questions outside the test.

        Args:
            max_samples: Maximum number of questions.

        Raises:
            InputError: There are too few questions, or one is invalid.
        """
        questions = [*self.splits["train"], *self.splits["val"]][:max_samples]
        self._check_count(len(questions), "`train` and `val` together")
        return QuestionScorer(self._runner, questions)

    def _check_count(self, count: int, part: str) -> None:
        if count < MIN_QUESTIONS:
            counts = Counter({split: len(questions) for split, questions in self.splits.items()})
            summary = ", ".join(f"{number} of `{split}`" for split, number in counts.items())
            raise InputError(
                f"{self._file_name}: {count} questions for {part} are too few, expected at least "
                f"{MIN_QUESTIONS} (the file has {summary}); add questions, or set `split` of each line"
            )


class _PlanEvaluation:
    """Outcomes of some questions under all plans, filled in by `run`.

    If a question does not fit at a tier, plans of that tier answer it incorrectly, and their latency tokens
    are those of the highest tier at which it fits. Without images all tiers are equal.

    Attributes:
        correct: As in `PlanOutcomes`.
        language: As in `PlanOutcomes`.
        tokens: As in `PlanOutcomes`.
    """

    def __init__(
        self, questions: Sequence[PreparedQuestion], space: PlanSpace, runner: QuestionRunner
    ) -> None:
        self._questions, self._runner, self._tiers = questions, runner, space.tiers
        self._columns: dict[Tier | None, dict[Plan, list[int]]] = {tier: {} for tier in (None, *space.tiers)}
        for column, plan in enumerate(space.plans):
            for executed in {plan, replace(plan, tier=None)}:
                self._columns[executed.tier].setdefault(executed, []).append(column)
        width = runner.model.get_input_embeddings().embedding_dim
        self.correct = torch.zeros(len(questions), len(space))
        self.language = torch.zeros(len(questions), width)
        self.tokens = torch.zeros(len(questions), len(space.tiers), len(space.geometry.positions), width)

    def run(self) -> Iterator[tuple[int, int, str]]:
        """Run all plans; yields the number of finished runs, of all runs, and the plan after each run."""
        batches: list[tuple[Tier | None, list[int]]] = [
            (tier, indices) for tier in self._columns for indices in group_into_batches(self._questions, tier)
        ]
        total, num_done = sum(len(self._columns[tier]) for tier, _ in batches), 0
        for tier, indices in batches:
            batch, rows = [self._questions[index] for index in indices], torch.tensor(indices)
            if tier == batch[0].tiers[0]:
                self.language[rows] = self._runner.compute_language(batch)
            # Higher tiers overwrite these later, unless the questions do not fit there.
            first_tier = 0 if tier is None else self._tiers.index(tier)
            self.tokens[rows, first_tier:] = self._runner.compute_latency_tokens(batch, tier)[:, None]
            for plan, columns in self._columns[tier].items():
                correct = torch.tensor(self._runner.check_answers(batch, plan), dtype=torch.float32)
                self.correct[rows[:, None], torch.tensor(columns)] = correct[:, None]
                num_done += 1
                yield num_done, total, plan.id


class QuestionScorer:
    """Score function of block importance on prepared questions.

    Args:
        runner: Answers the questions.
        questions: Questions; their prepared images are kept in memory.

    Attributes:
        digest: Digest of the questions and of everything else that scores depend on besides the weights.
    """

    def __init__(self, runner: QuestionRunner, questions: Sequence[Question]) -> None:
        self._runner, self._questions = runner, [runner.prepare(question) for question in questions]
        # The highest tier at which all of them fit.
        fitting = [question.tiers for question in self._questions if question.prompt.vision_tokens]
        tiers: set[Tier | None] = {None, min(fitting, key=len)[-1]} if fitting else {None}
        self._batches: list[tuple[Tier | None, list[int]]] = [
            (tier, indices) for tier in tiers for indices in group_into_batches(self._questions, tier)
        ]
        config = {"dtype": str(runner.model.dtype), **runner.identity(self._questions)}
        text = json.dumps([config, *(question.digest for question in questions)], sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, blocks: tuple[int, ...]) -> np.ndarray:
        """Whether each answer is correct with these blocks only, at the highest tier: [questions] float64."""
        correct, top_k = np.zeros(len(self._questions)), self._runner.adapter.geometry.top_k
        for tier, indices in self._batches:
            plan = Plan(tier=tier, insertion_position=1, top_k=top_k, blocks=blocks)
            batch = [self._questions[index] for index in indices]
            correct[indices] = self._runner.check_answers(batch, plan)
        return correct
