"""Answers from the question alone: what a model gains by looking is what it has above this.

The most frequent answer to each question, whatever its wording, counted over training questions: no model
that sees questions only can do better, but for the luck of the draw.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from sparseflow.adaptive.grid_vqa.dataset import Data
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.grid_vqa.questions import Questions, draw
from sparseflow.adaptive.grid_vqa.settings import KINDS

_Key = tuple[int, ...]
_Answer = tuple[int, ...]
_COUNTED = 50_000
_SEED = 0xB11D


@dataclass(frozen=True, kw_only=True)
class Blindly:
    """How often answers are right without looking.

    Attributes:
        accuracy: Over all samples.
        by_kind: For each kind of question that there is.
        chance: What a guess at random among a question's answers gives, over all samples.
    """

    accuracy: float
    by_kind: dict[str, float]
    chance: float


def blindly(data: Data, *, split: Split = "test", count: int, counted: int = _COUNTED) -> Blindly:
    """Answer the first samples of a split without looking.

    Args:
        data: Where questions come from.
        split: What to answer.
        count: How many.
        counted: Training questions whose answers are counted, drawn with the kinds' shares of the test.
    """
    answers: defaultdict[_Key, Counter[_Answer]] = defaultdict(Counter)
    learnt = draw(
        data.world,
        data.settings.test_shares,
        counted,
        np.random.default_rng([_SEED, data.settings.train.seed]),
    )
    for key, answer in _rows(learnt):
        answers[key][answer] += 1
    likeliest = {key: each.most_common(1)[0][0] for key, each in answers.items()}
    right: list[bool] = []
    kinds: list[int] = []
    for questions in data.questions(split, count):
        for key, answer in _rows(questions):
            right.append(likeliest.get(key) == answer)
            kinds.append(key[0])
    hits, of = np.array(right), np.array(kinds)
    guess = [0.0 if (ways := data.world.answers(kind)) is None else 1.0 / ways for kind in KINDS]
    return Blindly(
        accuracy=float(hits.mean()),
        by_kind={kind: float(hits[of == at].mean()) for at, kind in enumerate(KINDS) if (of == at).any()},
        chance=float(np.mean([guess[kind] for kind in kinds])),
    )


def _rows(questions: Questions) -> list[tuple[_Key, _Answer]]:
    """What is asked and what is right, for each."""
    keys = np.concatenate([questions.kinds[:, None], questions.slots], axis=1).tolist()
    ends = zip(questions.text.tolist(), questions.prompts.tolist(), questions.lengths.tolist(), strict=True)
    return [(tuple(key), tuple(row[first:last])) for key, (row, first, last) in zip(keys, ends, strict=True)]
