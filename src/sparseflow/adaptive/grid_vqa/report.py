"""Evaluation report of a trained model: accuracy and cost of every plan, and the blind baseline."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.grid_vqa.config import KINDS, VqaModelConfig
from sparseflow.adaptive.grid_vqa.dataset import CHUNK, VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import evaluate_plans, measure_block_drops
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.grid_vqa.question_generator import QuestionBatch, sample_questions
from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace
from sparseflow.adaptive.questions.task import PlanOutcomes
from sparseflow.core.files import read_json, write_json
from sparseflow.core.metrics import pareto_front
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError

_Key = tuple[int, ...]
_Answer = tuple[int, ...]
_COUNTED = 50_000
_SEED = 0xB11D


@dataclass(frozen=True, kw_only=True)
class BlindBaseline:
    """Accuracy without the image.

    Attributes:
        accuracy: Accuracy on all samples.
        by_kind: Accuracy on each kind of question.
        chance: Expected accuracy of a random guess among the answers of each question.
    """

    accuracy: float
    by_kind: dict[str, float]
    chance: float


def measure_blind_baseline(
    data: VqaDataset, *, split: Split = "test", count: int, counted: int = _COUNTED
) -> BlindBaseline:
    """Answer the first samples of a split by the most frequent training answer of the same question.

    Args:
        data: Questions.
        split: Split.
        count: Number of samples.
        counted: Training questions whose answers are counted, with the frequencies of kinds of the test.
    """
    answers: defaultdict[_Key, Counter[_Answer]] = defaultdict(Counter)
    train_questions = sample_questions(
        data.domain,
        data.config.test_shares,
        counted,
        np.random.default_rng([_SEED, data.config.train.seed]),
    )
    for key, answer in _list_keys_and_answers(train_questions):
        answers[key][answer] += 1
    likeliest = {key: counter.most_common(1)[0][0] for key, counter in answers.items()}
    correct: list[bool] = []
    kinds: list[int] = []
    for questions in data.iterate_questions(split, count):
        for key, answer in _list_keys_and_answers(questions):
            correct.append(likeliest.get(key) == answer)
            kinds.append(key[0])
    hits, kind_array = np.array(correct), np.array(kinds)
    guess = [
        0.0 if (num_answers := data.domain.count_answers(kind)) is None else 1.0 / num_answers
        for kind in KINDS
    ]
    return BlindBaseline(
        accuracy=float(hits.mean()),
        by_kind={
            kind: float(hits[kind_array == index].mean())
            for index, kind in enumerate(KINDS)
            if (kind_array == index).any()
        },
        chance=float(np.mean([guess[kind] for kind in kinds])),
    )


def _list_keys_and_answers(questions: QuestionBatch) -> list[tuple[_Key, _Answer]]:
    """Kind and slots, and the answer, of each question."""
    keys = np.concatenate([questions.kinds[:, None], questions.slots], axis=1).tolist()
    ends = zip(questions.text.tolist(), questions.prompts.tolist(), questions.lengths.tolist(), strict=True)
    return [(tuple(key), tuple(row[first:last])) for key, (row, first, last) in zip(keys, ends, strict=True)]


REPORT_FILE = "report.json"


def make_report(model: Any, data: VqaDataset, *, progress: Progress | None = None) -> dict[str, Any]:
    """Evaluate a model on test samples: the full plan on all of them, all plans on the first ones.

    Args:
        model: Model, on the device of `data`.
        data: Samples; their numbers are those of its config.
        progress: Called with (message, fraction done).
    """
    config = data.config
    geometry = ModelGeometry(depth=config.model.depth, top_k=config.model.top_k)
    block_drops = measure_block_drops(model, data, count=config.train.eval_samples)
    space = PlanSpace.from_importance(geometry, block_drops)
    full = evaluate_plans(model, data, [geometry.full_plan()], count=config.test_samples)
    plan_samples = min(config.plan_samples, config.test_samples)
    plan_outcomes = evaluate_plans(model, data, space, count=plan_samples, progress=progress)
    text_tokens = round(float(next(data.iterate_questions("val", CHUNK)).prompts.mean()))
    rows = _make_plan_rows(plan_outcomes, config.model, text_tokens)
    return {
        "samples": config.test_samples,
        "plan_samples": plan_samples,
        "names": list(data.domain.question_names),
        "accuracy": float(full.correct.mean()),
        "by_kind": full.accuracy_by_kind(0, KINDS),
        "blind": asdict(measure_blind_baseline(data, count=config.test_samples)),
        "importance": list(block_drops),
        "text_tokens": text_tokens,
        "pareto_plans": sum(row["pareto"] for row in rows),
        "plans": rows,
    }


def save_report(out_dir: Path, report: dict[str, Any]) -> None:
    """Write `report.json` into a training's directory."""
    write_json(out_dir / REPORT_FILE, report, indent=1)


def load_report(out_dir: Path | str) -> dict[str, Any] | None:
    """Read the report of a training's directory; None if there is none yet.

    Raises:
        FileFormatError: It is damaged.
    """
    path = Path(out_dir) / REPORT_FILE
    if not path.is_file():
        return None
    report = read_json(path)
    if not isinstance(report, dict) or "accuracy" not in report:
        raise FileFormatError(f"{path} is not a report of a training; remove it")
    return report


def count_multiply_adds(config: VqaModelConfig, plan: Plan, text_tokens: int) -> int:
    """Multiply-adds of a prefill with an image: vision tower, attention and selected experts.

    Args:
        config: Sizes of the model.
        plan: Plan with a tier.
        text_tokens: Prompt tokens that do not belong to the image.
    """
    assert plan.tier is not None
    crops, tokens = CROPS[plan.tier], config.crop_tokens
    wide = config.vision_width
    layer = wide * (4 * wide + 2 * round(wide * config.vision_mlp)) + 2 * tokens * wide
    patch = 3 * config.patch_px**2 * wide
    project = wide * config.width + config.width**2
    vision = crops * tokens * (patch + config.vision_depth * layer + project)
    length = 1 + crops * tokens + text_tokens
    attention = 4 * config.width**2 + length * config.width
    expert = 3 * config.width * config.expert_width
    blocks = 0
    for block in plan.blocks:
        top_k = config.top_k if block < plan.insertion_position else plan.top_k
        blocks += length * (attention + config.experts * config.width + top_k * expert)
    return vision + blocks


def _make_plan_rows(outcomes: PlanOutcomes, config: VqaModelConfig, text_tokens: int) -> list[dict[str, Any]]:
    accuracy = outcomes.correct.mean(0).tolist()
    cost = [count_multiply_adds(config, plan, text_tokens) for plan in outcomes.plans]
    front = set(pareto_front(list(zip(cost, accuracy, strict=True)), maximize=(False, True)))
    return [
        {
            "plan": plan.id, "accuracy": accuracy[index], "multiply_adds": cost[index],
            "pareto": index in front,
        }
        for index, plan in enumerate(outcomes.plans)
    ]  # fmt: skip
