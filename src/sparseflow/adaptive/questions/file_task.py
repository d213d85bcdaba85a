"""A file of questions as the task of a study, and as what scores a model without some of its blocks."""

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
from sparseflow.adaptive.questions.file import Question, read
from sparseflow.adaptive.questions.runner import PreparedQuestion, QuestionRunner, batches, first_of_each
from sparseflow.adaptive.questions.task import (
    PlanOutcomes,
    Progress,
    SampleCounts,
    SampleRange,
    Split,
    SplitRanges,
)
from sparseflow.errors import InputError

LEAST = 8
"""Questions of each part, at least. That is enough to run, and far too few to tell plans apart."""

_MOST_KINDS = 64
_OTHER = "other"
"""The kind of questions that have none, where others have."""


class QuestionTask:
    """Questions of a file to a model; a `StudyTask`.

    Args:
        asker: Who is asked.
        questions: What.
        name: The file's.

    Raises:
        InputError: There are too many kinds.
    """

    chunk = 64
    told = (
        "Right is an answer whose text greedy decoding gives, but for blanks and case. What was learnt from, "
        "matched on and judged by are different questions of the file."
    )

    def __init__(self, asker: QuestionRunner, questions: Sequence[Question], name: str) -> None:
        self._asker, self._file = asker, name
        kinds = sorted({each.kind or _OTHER for each in questions})
        if len(kinds) > _MOST_KINDS:
            raise InputError(f"{name} has {len(kinds)} kinds of questions; name at most {_MOST_KINDS}")
        self.kinds: tuple[str, ...] = tuple(kinds) if len(kinds) > 1 else ()
        self.splits: Mapping[Split, tuple[Question, ...]] = {
            split: tuple(each for each in questions if each.split == split)
            for split in ("train", "val", "test")
        }

    @classmethod
    def open(
        cls,
        folder: Path,
        file: Path,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        most_tokens: int | None = None,
    ) -> QuestionTask:
        """Questions of a file to the model of a folder.

        Args:
            folder: As of `open_folder`, as the others.
            file: As of `read`.
            device: Where to compute.
            dtype: Of the weights.
            most_tokens: Of a prompt and its answer together, where they are served: no more than the model's
                context, which is the default.

        Raises:
            InputError: There is no such folder or file, or the tokenizer has no chat template.
            FileFormatError: One of them holds something else.
            ModelError: The model's architecture has no adapter.
        """
        questions = read(file)
        there = open_folder(folder, device=device, dtype=dtype)
        return cls(QuestionRunner(there, most_tokens), questions, file.name)

    @property
    def model(self) -> Any:
        """As `StudyTask`."""
        return self._asker.model

    @property
    def name(self) -> str:
        """As `StudyTask`."""
        return f"questions of {self._file}"

    def identity(self) -> Mapping[str, Any]:
        """As `StudyTask`."""
        digest = hashlib.sha256()
        for split, questions in self.splits.items():
            for each in questions:
                digest.update(f"{split} {each.digest}\n".encode())
        first = first_of_each(chain(*self.splits.values()), lambda each: bool(each.images))
        ready = [self._asker.ready(each) for each in first]
        return {"questions": digest.hexdigest(), **self._asker.identity(ready)}

    def parts(self, counts: SampleCounts, progress: Progress | None = None) -> SplitRanges:
        """As `StudyTask`: as many as are wanted, or as there are.

        Each is tried as a prompt, so that no error waits for hours.
        """
        wanted: dict[Split, int] = {"train": counts.train, "val": counts.validation, "test": counts.test}
        for split in wanted:
            self._check_enough(len(self.splits[split]), f"`{split}`")
        found: dict[Split, SampleRange] = {}
        for split, count in wanted.items():
            some = self.splits[split][:count]
            for number, question in enumerate(some, start=1):
                self._asker.ready(question)
                if progress is not None:
                    progress(f"{number} of {len(some)} {split} questions can be asked", 0.0)
            found[split] = SampleRange(split=split, count=len(some))
        images = any(each.images for split, count in wanted.items() for each in self.splits[split][:count])
        return SplitRanges(train=found["train"], validation=found["val"], test=found["test"], images=images)

    def outcomes(
        self, space: PlanSpace, *, split: Split, first: int, count: int, progress: Progress | None = None
    ) -> PlanOutcomes:
        """As `StudyTask`."""
        questions = self.splits[split][first : first + count]
        if len(questions) < count or count < 1:
            raise InputError(
                f"`{split}` has {len(self.splits[split])} questions; {count} after the first {first} are not "
                "there"
            )
        ready = [self._asker.ready(each) for each in questions]
        answers, place = (
            _PlanScores(ready, space, self._asker),
            {kind: at for at, kind in enumerate(self.kinds)},
        )
        for done, of, what in answers.fill():
            if progress is not None:
                progress(f"{what} on {split} questions from {first + 1} on", done / of)
        return PlanOutcomes(
            plans=space.plans, correct=answers.correct, language=answers.language, tokens=answers.tokens,
            kinds=torch.tensor([place.get(each.kind or _OTHER, 0) for each in questions]),
            text_tokens=torch.tensor([each.prompt.text_tokens for each in ready]),
            new_tokens=torch.tensor([each.new_tokens for each in ready]),
            vision_tokens=torch.tensor([each.prompt.vision_tokens for each in ready]),
        )  # fmt: skip

    def scorer(self, count: int) -> QuestionScorer:
        """What scores sets of blocks by the first questions that are not of the test.

        Args:
            count: How many of them, at most.

        Raises:
            InputError: There are too few, or one cannot be asked.
        """
        found = [*self.splits["train"], *self.splits["val"]][:count]
        self._check_enough(len(found), "`train` and `val` together")
        return QuestionScorer(self._asker, found)

    def _check_enough(self, count: int, what: str) -> None:
        if count < LEAST:
            there = Counter({split: len(each) for split, each in self.splits.items()})
            told = ", ".join(f"{number} of `{split}`" for split, number in there.items())
            raise InputError(
                f"{self._file}: {count} questions for {what} are too few, {LEAST} are the least (there are "
                f"{told}); add some, or say in each line's `split` what it serves for"
            )


class _PlanScores:
    """What becomes of some questions under all plans.

    A plan of a tier that leaves no room for a question has no right answer to it, and latency tokens there
    are those of the highest tier that does. Without image all tiers are alike.

    Attributes:
        correct: As in `Judged`, as the next two; there once `fill` has run.
        language: Language features.
        tokens: Latency tokens.
    """

    def __init__(self, ready: Sequence[PreparedQuestion], space: PlanSpace, asker: QuestionRunner) -> None:
        self._ready, self._asker, self._tiers = ready, asker, space.tiers
        self._runs: dict[Tier | None, dict[Plan, list[int]]] = {tier: {} for tier in (None, *space.tiers)}
        for at, plan in enumerate(space.plans):
            for run in {plan, replace(plan, tier=None)}:
                self._runs[run.tier].setdefault(run, []).append(at)
        width = asker.model.get_input_embeddings().embedding_dim
        self.correct = torch.zeros(len(ready), len(space))
        self.language = torch.zeros(len(ready), width)
        self.tokens = torch.zeros(len(ready), len(space.tiers), len(space.geometry.positions), width)

    def fill(self) -> Iterator[tuple[int, int, str]]:
        """Ask; after each run yields how many are done, of how many, and what ran."""
        work: list[tuple[Tier | None, list[int]]] = [
            (tier, places) for tier in self._runs for places in batches(self._ready, tier)
        ]
        of, done = sum(len(self._runs[tier]) for tier, _ in work), 0
        for tier, places in work:
            rows, at = [self._ready[place] for place in places], torch.tensor(places)
            if tier == rows[0].tiers[0]:
                self.language[at] = self._asker.language(rows)
            # Of what has no room at higher tiers, these stay there.
            first = 0 if tier is None else self._tiers.index(tier)
            self.tokens[at, first:] = self._asker.latency_tokens(rows, tier)[:, None]
            for plan, columns in self._runs[tier].items():
                right = torch.tensor(self._asker.right(rows, plan), dtype=torch.float32)
                self.correct[at[:, None], torch.tensor(columns)] = right[:, None]
                done += 1
                yield done, of, plan.id


class QuestionScorer:
    """Questions that are held ready, to score any number of sets of blocks.

    Args:
        asker: Who is asked.
        questions: What; their images stay in memory, as the model takes them.

    Attributes:
        digest: Of the questions, and of what else scores depend on beside the weights.
    """

    def __init__(self, asker: QuestionRunner, questions: Sequence[Question]) -> None:
        self._asker, self._ready = asker, [asker.ready(each) for each in questions]
        # The highest tier that leaves room for all of them.
        seen = [each.tiers for each in self._ready if each.prompt.vision_tokens]
        tiers: set[Tier | None] = {None, min(seen, key=len)[-1]} if seen else {None}
        self._batches: list[tuple[Tier | None, list[int]]] = [
            (tier, places) for tier in tiers for places in batches(self._ready, tier)
        ]
        told = {"dtype": str(asker.model.dtype), **asker.identity(self._ready)}
        text = json.dumps([told, *(each.digest for each in questions)], sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, blocks: tuple[int, ...]) -> np.ndarray:
        """Which answers are right with some blocks alone, at the highest tier: [questions] float64."""
        found, top_k = np.zeros(len(self._ready)), self._asker.adapter.geometry.top_k
        for tier, places in self._batches:
            plan = Plan(tier=tier, insertion_position=1, top_k=top_k, blocks=blocks)
            found[places] = self._asker.right([self._ready[at] for at in places], plan)
        return found
