"""What a trained model is worth: accuracy of every plan and of answers without looking, and at what work."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.grid_vqa.config import KINDS, VqaModelConfig
from sparseflow.adaptive.grid_vqa.dataset import CHUNK, VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import importance, outcomes
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.grid_vqa.question_generator import QuestionBatch, draw
from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace
from sparseflow.adaptive.questions.task import PlanOutcomes
from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError

_Key = tuple[int, ...]
_Answer = tuple[int, ...]
_COUNTED = 50_000
_SEED = 0xB11D


@dataclass(frozen=True, kw_only=True)
class BlindBaseline:
    """How often answers are right without looking.

    Attributes:
        accuracy: Over all samples.
        by_kind: For each kind of question that there is.
        chance: What a guess at random among a question's answers gives, over all samples.
    """

    accuracy: float
    by_kind: dict[str, float]
    chance: float


def blindly(data: VqaDataset, *, split: Split = "test", count: int, counted: int = _COUNTED) -> BlindBaseline:
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
    return BlindBaseline(
        accuracy=float(hits.mean()),
        by_kind={kind: float(hits[of == at].mean()) for at, kind in enumerate(KINDS) if (of == at).any()},
        chance=float(np.mean([guess[kind] for kind in kinds])),
    )


def _rows(questions: QuestionBatch) -> list[tuple[_Key, _Answer]]:
    """What is asked and what is right, for each."""
    keys = np.concatenate([questions.kinds[:, None], questions.slots], axis=1).tolist()
    ends = zip(questions.text.tolist(), questions.prompts.tolist(), questions.lengths.tolist(), strict=True)
    return [(tuple(key), tuple(row[first:last])) for key, (row, first, last) in zip(keys, ends, strict=True)]


REPORT = "report.json"


def report_of(model: Any, data: VqaDataset, *, progress: Progress | None = None) -> dict[str, Any]:
    """Judge a model on test samples: the full plan on all of them, and on the first ones every plan of the
    space that blocks' importance one by one gives.

    Args:
        model: The model, on the device of `data`.
        data: Where samples come from; its settings say how many.
        progress: Called with (what was done, fraction done).
    """
    settings = data.settings
    geometry = ModelGeometry(depth=settings.model.depth, top_k=settings.model.top_k)
    lost = importance(model, data, count=settings.train.judge_samples)
    space = PlanSpace.from_importance(geometry, lost)
    full = outcomes(model, data, [geometry.full_plan()], count=settings.test_samples)
    some = min(settings.plan_samples, settings.test_samples)
    judged = outcomes(model, data, space, count=some, progress=progress)
    text_tokens = round(float(next(data.questions("val", CHUNK)).prompts.mean()))
    rows = _plans(judged, settings.model, text_tokens)
    return {
        "samples": settings.test_samples,
        "plan_samples": some,
        "names": list(data.world.asked),
        "accuracy": float(full.correct.mean()),
        "by_kind": full.accuracy_by_kind(0, KINDS),
        "blind": asdict(blindly(data, count=settings.test_samples)),
        "importance": list(lost),
        "text_tokens": text_tokens,
        "pareto_plans": sum(row["pareto"] for row in rows),
        "plans": rows,
    }


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Put a report into a training's folder."""
    write_atomic(folder / REPORT, json.dumps(report, indent=1) + "\n")


def read_report(folder: Path | str) -> dict[str, Any] | None:
    """The report of a training's folder; None where there is none yet.

    Raises:
        FileFormatError: It is damaged.
    """
    path = Path(folder) / REPORT
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise FileFormatError(f"{path} is no report that can be read: {error}; remove it") from error
    if not isinstance(found, dict) or "accuracy" not in found:
        raise FileFormatError(f"{path} is no report of a training; remove it")
    return found


def work_of(settings: VqaModelConfig, plan: Plan, text_tokens: int) -> int:
    """Multiply-adds of reading a prompt with its image: products of vision, attention and chosen experts.

    Args:
        settings: Sizes of the model.
        plan: How much of it runs.
        text_tokens: Of the prompt, beside the image's.
    """
    assert plan.tier is not None
    crops, tokens = CROPS[plan.tier], settings.crop_tokens
    wide = settings.vision_width
    layer = wide * (4 * wide + 2 * round(wide * settings.vision_mlp)) + 2 * tokens * wide
    patch = 3 * settings.patch_px**2 * wide
    project = wide * settings.width + settings.width**2
    vision = crops * tokens * (patch + settings.vision_depth * layer + project)
    length = 1 + crops * tokens + text_tokens
    attention = 4 * settings.width**2 + length * settings.width
    expert = 3 * settings.width * settings.expert_width
    blocks = 0
    for block in plan.blocks:
        top_k = settings.top_k if block < plan.insertion_position else plan.top_k
        blocks += length * (attention + settings.experts * settings.width + top_k * expert)
    return vision + blocks


def pareto(costs: Sequence[float], scores: Sequence[float]) -> list[bool]:
    """Which points no other one beats: none is both cheaper and as good, or as cheap and better."""
    order = sorted(range(len(costs)), key=lambda at: (costs[at], -scores[at]))
    found, best = [False] * len(costs), float("-inf")
    for at in order:
        if scores[at] > best:
            found[at], best = True, scores[at]
    return found


def _plans(judged: PlanOutcomes, settings: VqaModelConfig, text_tokens: int) -> list[dict[str, Any]]:
    scores = judged.correct.mean(0).tolist()
    work = [work_of(settings, plan, text_tokens) for plan in judged.plans]
    return [
        {"plan": plan.id, "accuracy": score, "multiply_adds": cost, "pareto": best}
        for plan, score, cost, best in zip(judged.plans, scores, work, pareto(work, scores), strict=True)
    ]
