"""Accuracy of plans and of guesses without the image, and the inputs of controllers.

An answer is correct if greedy decoding gives it word for word, including its end. That is the case exactly
if every token of the correct answer is the most likely one, given the tokens before it. One forward pass
therefore evaluates a plan, independent of the length of answers. Plans that start with the same blocks and
experts share them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.language_features import mean_text_embedding
from sparseflow.adaptive.grid_vqa.config import KINDS, Kind
from sparseflow.adaptive.grid_vqa.dataset import VqaBatch, VqaDataset
from sparseflow.adaptive.grid_vqa.question_generator import QuestionBatch, sample_questions
from sparseflow.adaptive.grid_vqa.stack import BlockStep, ModelStack, Rotary, get_block_steps
from sparseflow.adaptive.plan.space import TIERS, Plan, PlanSpace, Tier
from sparseflow.adaptive.questions.task import PlanOutcomes, Split
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError

BATCH = 128


def evaluate_plans(
    model: Any,
    data: VqaDataset,
    space: PlanSpace | Sequence[Plan],
    *,
    split: Split = "test",
    count: int,
    first: int = 0,
    batch_size: int = BATCH,
    progress: Progress | None = None,
) -> PlanOutcomes:
    """Evaluate plans on consecutive samples of a split.

    Args:
        model: Model, on the device of `data`.
        data: Samples.
        space: Plans.
        split: Split.
        count: Number of samples.
        first: Index of the first sample, a multiple of `dataset.CHUNK`.
        batch_size: Batch size.
        progress: Called with (message, fraction done).

    Raises:
        InputError: There are no plans or samples, `first` is not a multiple of `CHUNK`, or a plan has no
            tier.
        PlanError: The model cannot run a plan.
    """
    plans = space.plans if isinstance(space, PlanSpace) else tuple(space)
    if not plans or count < 1:
        raise InputError(
            f"expected at least one plan and one sample, got {len(plans)} plans and {count} samples"
        )
    adapter, stack, parts, num_done = get_adapter(model), ModelStack(model), [], 0
    for plan in plans:
        adapter.geometry.check(plan)
        if plan.tier is None:
            raise InputError(f"{plan.id} has no tier, but every question has an image")
    with _evaluation_mode(model):
        for batch in data.iterate_batches(split, count, first=first, batch_size=batch_size):
            num_done += len(batch)
            vision = stack.project(stack.encode_crops(batch.crops))
            correct = _check_batch(stack, batch, vision, plans)
            tokens = torch.stack([_compute_latency_tokens(stack, batch, vision, tier) for tier in TIERS], 1)
            words = torch.nn.functional.pad(batch.text, (1, 0), value=data.vocabulary.bos)
            text_tokens = torch.arange(words.shape[1], device=words.device) <= batch.prompts[:, None]
            language = mean_text_embedding(adapter, words, text_tokens)
            lengths = (text_tokens.sum(1), batch.lengths - batch.prompts)
            parts.append([value.cpu() for value in (correct, batch.kinds, language, tokens, *lengths)])
            if progress is not None:
                progress(f"evaluated {num_done} of {count} samples", num_done / count)
    correct, kinds, language, tokens, text_tokens, new_tokens = (
        torch.cat(value) for value in zip(*parts, strict=True)
    )
    return PlanOutcomes(
        plans=plans, correct=correct.float(), kinds=kinds, language=language, tokens=tokens.float(),
        text_tokens=text_tokens, new_tokens=new_tokens,
    )  # fmt: skip


class VqaScorer:
    """Samples with precomputed vision tokens, to evaluate any number of plans on.

    Args:
        model: Model, on the device of `data`; its weights must not change.
        data: Samples.
        split: Split.
        count: Number of samples, from the first; their vision tokens are kept in memory.
        batch_size: Batch size.
    """

    def __init__(
        self, model: Any, data: VqaDataset, *, split: Split, count: int, batch_size: int = BATCH
    ) -> None:  # fmt: skip
        self._model, self._stack = model, ModelStack(model)
        with _evaluation_mode(model):
            self._batches = [
                (
                    replace(batch, crops=batch.crops[:, :0]),
                    self._stack.project(self._stack.encode_crops(batch.crops)),
                )
                for batch in data.iterate_batches(split, count, batch_size=batch_size)
            ]

    def __call__(self, plans: Sequence[Plan]) -> Tensor:
        """Whether each answer is correct: [samples, plans] float32, on the CPU."""
        with _evaluation_mode(self._model):
            parts = [_check_batch(self._stack, batch, vision, plans) for batch, vision in self._batches]
        return torch.cat(parts).float().cpu()


def check_answers(
    model: Any, data: VqaDataset, plans: Sequence[Plan], *, split: Split, count: int, batch_size: int = BATCH
) -> Tensor:  # fmt: skip
    """Whether each answer of the first samples of a split is correct: [samples, plans] float32, on the
    CPU."""
    return VqaScorer(model, data, split=split, count=count, batch_size=batch_size)(plans)


def measure_block_drops(
    model: Any, data: VqaDataset, *, split: Split = "val", count: int
) -> tuple[float, ...]:
    """Loss of accuracy without each block, at the highest tier; 1 for block 0, which always runs."""
    geometry = get_adapter(model).geometry
    blocks = range(geometry.depth)
    full = replace(geometry.full_plan(), insertion_position=1)
    without = [
        replace(full, blocks=tuple(block for block in blocks if block != removed)) for removed in blocks[1:]
    ]
    scores = check_answers(model, data, [geometry.full_plan(), *without], split=split, count=count).mean(0)
    return (1.0, *(float(scores[0] - score) for score in scores[1:]))


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Disable gradients and dropout; the mode of the model is restored."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def _check_batch(stack: ModelStack, batch: VqaBatch, vision: Tensor, plans: Sequence[Plan]) -> Tensor:
    """Whether each answer is correct: [B, plans] bool."""
    correct = torch.zeros(len(batch), len(plans), dtype=torch.bool, device=vision.device)
    for tier in TIERS:
        paths = [
            (get_block_steps(plan, stack.top_k), index)
            for index, plan in enumerate(plans)
            if plan.tier == tier
        ]
        if paths:
            hidden, rotary = stack.embed(vision, batch.text, tier)
            _run_paths(stack, batch, paths, 0, hidden, rotary, correct)
    return correct


def _run_paths(
    stack: ModelStack,
    batch: VqaBatch,
    paths: list[tuple[tuple[BlockStep, ...], int]],
    depth: int,
    hidden: Tensor,
    rotary: Rotary,
    correct: Tensor,
) -> None:
    """Run plans that share their first `depth` steps; each distinct next step runs once."""
    by_step: dict[BlockStep, list[tuple[tuple[BlockStep, ...], int]]] = {}
    ended = [index for steps, index in paths if len(steps) == depth]
    for steps, index in paths:
        if len(steps) > depth:
            by_step.setdefault(steps[depth], []).append((steps, index))
    if ended:
        logits = stack.logits(hidden, batch.text.shape[1])[:, :-1]
        wrong = (logits.argmax(-1) != batch.text[:, 1:]) & batch.answer_mask
        correct[:, ended] = ~wrong.any(1, keepdim=True)
    for step, next_paths in by_step.items():
        _run_paths(
            stack, batch, next_paths, depth + 1, stack.run_block(step, hidden, rotary), rotary, correct
        )


def _compute_latency_tokens(stack: ModelStack, batch: VqaBatch, vision: Tensor, tier: Tier) -> Tensor:
    """Hidden state of the last prompt token before each insertion position: [B, positions, d]."""
    hidden, rotary = stack.embed(vision, batch.text, tier)
    last = hidden.shape[1] - batch.text.shape[1] + batch.prompts - 1
    tokens = []
    for block in range(min(5, stack.depth - 1)):
        hidden = stack.run_block((block, stack.top_k), hidden, rotary)
        tokens.append(hidden[torch.arange(len(hidden), device=hidden.device), last])
    return torch.stack(tokens, dim=1)


_NUM_COUNTED = 50_000
_BLIND_SEED = 0xB11D


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
    data: VqaDataset, *, split: Split = "test", count: int, counted: int = _NUM_COUNTED
) -> BlindBaseline:
    """Answer the first samples of a split by the most frequent training answer of the same question.

    Args:
        data: Questions.
        split: Split.
        count: Number of samples.
        counted: Training questions whose answers are counted, with the frequencies of kinds of the test.
    """
    answers: defaultdict[tuple[int, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
    generator = np.random.default_rng([_BLIND_SEED, data.config.train.seed])
    train_questions = sample_questions(data.domain, data.config.test_shares, counted, generator)
    for key, answer in _list_keys_and_answers(train_questions):
        answers[key][answer] += 1
    likeliest = {key: counter.most_common(1)[0][0] for key, counter in answers.items()}
    correct: dict[Kind, list[bool]] = {kind: [] for kind in KINDS}
    for questions in data.iterate_questions(split, count):
        for key, answer in _list_keys_and_answers(questions):
            correct[KINDS[key[0]]].append(likeliest.get(key) == answer)
    num_answers: dict[Kind, int | None] = {kind: data.domain.count_answers(kind) for kind in KINDS}
    return BlindBaseline(
        accuracy=sum(map(sum, correct.values())) / count,
        by_kind={kind: fmean(hits) for kind, hits in correct.items() if hits},
        chance=sum(len(correct[kind]) / number for kind, number in num_answers.items() if number) / count,
    )


def _list_keys_and_answers(questions: QuestionBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Kind and slots, and the answer, of each question."""
    keys = np.concatenate([questions.kinds[:, None], questions.slots], axis=1).tolist()
    ends = zip(questions.text.tolist(), questions.prompts.tolist(), questions.lengths.tolist(), strict=True)
    return [(tuple(key), tuple(row[first:last])) for key, (row, first, last) in zip(keys, ends, strict=True)]
