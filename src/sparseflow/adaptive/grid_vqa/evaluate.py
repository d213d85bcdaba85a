"""How often plans answer right, and what controllers learn from.

An answer is right if greedy decoding gives it word for word, its end included. Greedy decoding does so
exactly where, with the right answer put in, every token is the likeliest one after those before it; so one
forward judges a plan, however long answers are. Plans that begin with the same blocks and experts share
these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.language_features import mean_text_embedding
from sparseflow.adaptive.grid_vqa.dataset import VqaBatch, VqaDataset
from sparseflow.adaptive.grid_vqa.stack import ModelStack, Rotary, Step, steps_of
from sparseflow.adaptive.plan.space import TIERS, Plan, PlanSpace, Tier
from sparseflow.adaptive.questions.task import PlanOutcomes, Split
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError

BATCH = 128


def outcomes(
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
    """Try plans on the first samples of a split, or on some that follow.

    Args:
        model: The model, on the device of `data`.
        data: Where samples come from.
        space: The plans.
        split: Of images.
        count: How many samples.
        first: How many to leave out before: a multiple of `dataset.CHUNK`.
        batch_size: Samples at once.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: There are no plans or samples, `first` is no such multiple, or a plan has no tier.
        PlanError: The model cannot run a plan.
    """
    plans = space.plans if isinstance(space, PlanSpace) else tuple(space)
    if not plans or count < 1:
        raise InputError(f"there is nothing to judge: {len(plans)} plans and {count} samples")
    adapter, stack, parts, done = get_adapter(model), ModelStack(model), [], 0
    for plan in plans:
        adapter.geometry.check(plan)
        if plan.tier is None:
            raise InputError(f"{plan.id} has no tier, and every question here has an image")
    with _judging(model):
        for batch in data.judged(split, count, first=first, size=batch_size):
            done += len(batch)
            vision = stack.project(stack.see(batch.crops))
            correct = _correct(stack, batch, vision, plans)
            tokens = torch.stack([_latency_tokens(stack, batch, vision, tier) for tier in TIERS], 1)
            words = torch.nn.functional.pad(batch.text, (1, 0), value=data.vocabulary.bos)
            asked = torch.arange(words.shape[1], device=words.device) <= batch.prompts[:, None]
            language = mean_text_embedding(adapter, words, asked)
            lengths = (asked.sum(1), batch.lengths - batch.prompts)
            parts.append([each.cpu() for each in (correct, batch.kinds, language, tokens, *lengths)])
            if progress is not None:
                progress(f"judged {done} of {count} samples", done / count)
    correct, kinds, language, tokens, asked, answered = (torch.cat(each) for each in zip(*parts, strict=True))
    return PlanOutcomes(
        plans=plans, correct=correct.float(), kinds=kinds, language=language, tokens=tokens.float(),
        text_tokens=asked, new_tokens=answered,
    )  # fmt: skip


class VqaScorer:
    """Samples that a model has looked at once, to judge any number of plans on, a few at a time.

    Args:
        model: The model, on the device of `data`; it must not change meanwhile.
        data: Where samples come from.
        split: Of images.
        count: How many samples, the first ones; what the decoder takes of their images stays in memory.
        batch_size: Samples at once.
    """

    def __init__(
        self, model: Any, data: VqaDataset, *, split: Split, count: int, batch_size: int = BATCH
    ) -> None:  # fmt: skip
        self._model, self._stack = model, ModelStack(model)
        with _judging(model):
            self._seen = [
                (replace(batch, crops=batch.crops[:, :0]), self._stack.project(self._stack.see(batch.crops)))
                for batch in data.judged(split, count, size=batch_size)
            ]

    def __call__(self, plans: Sequence[Plan]) -> Tensor:
        """Which answers are right: [samples, plans] float32, on the CPU."""
        with _judging(self._model):
            parts = [_correct(self._stack, batch, vision, plans) for batch, vision in self._seen]
        return torch.cat(parts).float().cpu()


def accuracy(
    model: Any, data: VqaDataset, plans: Sequence[Plan], *, split: Split, count: int, batch_size: int = BATCH
) -> Tensor:  # fmt: skip
    """Which answers of the first samples of a split are right: [samples, plans] float32, on the CPU."""
    return VqaScorer(model, data, split=split, count=count, batch_size=batch_size)(plans)


def importance(model: Any, data: VqaDataset, *, split: Split = "val", count: int) -> tuple[float, ...]:
    """How much accuracy is lost without each block, at the highest tier; 1 for block 0, which always runs."""
    geometry = get_adapter(model).geometry
    every = range(geometry.depth)
    without = [
        Plan(
            tier="high",
            insertion_position=1,
            top_k=geometry.top_k,
            blocks=tuple(b for b in every if b != gone),
        )
        for gone in every[1:]
    ]
    found = accuracy(model, data, [geometry.full_plan(), *without], split=split, count=count).mean(0)
    return (1.0, *(float(found[0] - each) for each in found[1:]))


@contextmanager
def _judging(model: torch.nn.Module) -> Iterator[None]:
    """No gradients and nothing dropped; the model is as before afterwards."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def _correct(stack: ModelStack, batch: VqaBatch, vision: Tensor, plans: Sequence[Plan]) -> Tensor:
    """[B, plans] bool."""
    found = torch.zeros(len(batch), len(plans), dtype=torch.bool, device=vision.device)
    for tier in TIERS:
        ways = [(steps_of(plan, stack.top_k), at) for at, plan in enumerate(plans) if plan.tier == tier]
        if ways:
            hidden, rotary = stack.begin(vision, batch.text, tier)
            _descend(stack, batch, ways, 0, hidden, rotary, found)
    return found


def _descend(
    stack: ModelStack, batch: VqaBatch, ways: list[tuple[tuple[Step, ...], int]], deep: int, hidden: Tensor,
    rotary: Rotary, found: Tensor,
) -> None:  # fmt: skip
    """Go on with plans that were alike so far; each differing next step is run once."""
    following: dict[Step, list[tuple[tuple[Step, ...], int]]] = {}
    ended = [at for steps, at in ways if len(steps) == deep]
    for steps, at in ways:
        if len(steps) > deep:
            following.setdefault(steps[deep], []).append((steps, at))
    if ended:
        logits = stack.logits(hidden, batch.text.shape[1])[:, :-1]
        wrong = (logits.argmax(-1) != batch.text[:, 1:]) & batch.answered
        found[:, ended] = ~wrong.any(1, keepdim=True)
    for step, mine in following.items():
        _descend(stack, batch, mine, deep + 1, stack.block(step, hidden, rotary), rotary, found)


def _latency_tokens(stack: ModelStack, batch: VqaBatch, vision: Tensor, tier: Tier) -> Tensor:
    """[B, positions, d]."""
    hidden, rotary = stack.begin(vision, batch.text, tier)
    last = hidden.shape[1] - batch.text.shape[1] + batch.prompts - 1
    found = []
    for block in range(min(5, stack.depth - 1)):
        hidden = stack.block((block, stack.top_k), hidden, rotary)
        found.append(hidden[torch.arange(len(hidden), device=hidden.device), last])
    return torch.stack(found, dim=1)
