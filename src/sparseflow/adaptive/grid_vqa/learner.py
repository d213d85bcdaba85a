"""The steps of a training: a model, its optimizer, what a step does, and how often the model answers right.

First the vision tower learns alone to name what lies in cells. Then everything learns to answer, in stages of
rising tiers: every step runs the whole model at the stage's tier, which learns from the answers, and some
drawn plans of that tier or a lower one, which learn from the answers and from the whole model's logits (the
sandwich rule of Yu & Huang, "Universally slimmable networks", ICCV 2019): now and then one of the least
plans, else one wholly by chance. The vision tower rests in stages below the highest tier: from coarse crops
alone it would forget what it knows of fine ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sparseflow.adaptive.grid_vqa.auxiliary_heads import (
    GroundingHead,
    NamingHead,
    draw_crops,
    naming_loss,
    right,
)
from sparseflow.adaptive.grid_vqa.config import VqaConfig, VqaStageConfig
from sparseflow.adaptive.grid_vqa.dataset import NamingBatch, VqaBatch, VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import accuracy
from sparseflow.adaptive.grid_vqa.model import build
from sparseflow.adaptive.grid_vqa.question_generator import SMALL
from sparseflow.adaptive.grid_vqa.stack import ModelStack, steps_of
from sparseflow.adaptive.plan.space import TIERS, ModelGeometry, Plan, Tier
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import RunError

_PLANS = 3
"""Tells the generator of plans from those of data."""
_LEAST = 0.3
"""Share of drawn plans that are least ones."""


class VqaLearner:
    """A model, its optimizer and how far they are.

    Args:
        settings: Task, model, and how to train.
        data: What is learnt from.
        mine: This process among all that train.

    Attributes:
        model: What is being trained.
        average: A running average of it, which is judged and kept.
    """

    def __init__(self, settings: VqaConfig, data: VqaDataset, mine: DistributedContext) -> None:
        self.settings, self.data, self._mine = settings, data, mine
        told = settings.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(told.seed)
            model = build(settings, data.vocabulary)
            crop_side = settings.model.crop_px // settings.model.patch_px
            naming = NamingHead(settings.model.vision_width, data.labels, settings.scene.grid, crop_side)
            grounding = GroundingHead(
                settings.model.width, data.vocabulary.ids(data.bank.names).tolist(),
                [data.bank.names.index(name) for name in data.world.asked],
                data.vocabulary.ids(SMALL).tolist(), grid=settings.scene.grid,
                crop_side=crop_side,
            )  # fmt: skip
        self.model, self.naming = model.to(mine.device), naming.to(mine.device)
        self.grounding = grounding.to(mine.device)
        self.average = copy.deepcopy(self.model)
        self.stack = ModelStack(self.model, compiled=told.compile and bool(mine.cuda_devices))
        self.geometry = ModelGeometry(depth=settings.model.depth, top_k=settings.model.top_k)
        self.full = self.geometry.full_plan()
        self.steps, self.step = told.vision_steps + told.steps, 0
        inner: Any = self.model.model
        self._vision = [*inner.vision_tower.parameters(), *self.naming.parameters()]
        known = set(map(id, self._vision))
        self._text = [each for each in self.model.parameters() if id(each) not in known]
        self._text += self.grounding.parameters()
        groups = [
            {"params": part, "weight_decay": decay, "part": name}
            for name, params in (("vision", self._vision), ("text", self._text))
            for part, decay in _by_decay(params, told.weight_decay)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=told.rate, fused=mine.device.type == "cuda")
        self._ahead: tuple[int, VqaBatch | NamingBatch] | None = None

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "naming": self.naming.state_dict(),
            "grounding": self.grounding.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.naming.load_state_dict(state["naming"])
        self.grounding.load_state_dict(state["grounding"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def advance(self) -> dict[str, float]:
        """One step.

        Returns:
            The step's numbers.

        Raises:
            RunError: The loss or the gradient is no longer finite; nothing of the step is kept.
        """
        told = self.settings.train
        random = np.random.default_rng([told.seed, _PLANS, self.step])
        torch.manual_seed(int(random.integers(2**62)))  # for what is dropped
        batch = self._batch(self.step)
        for each in (*self._vision, *self._text):
            each.grad = None
        self.model.train()
        if isinstance(batch, NamingBatch):
            found = self._name(batch, draw_crops(told.vision_crops, random))
        else:
            stage = self.stage(self.step)
            plans = self._plans(stage, random)
            found = self._answer(batch, stage.tier, plans, sees=self._sees(self.step))
        learning = [
            *(self._vision if self._sees(self.step) else ()),
            *(() if isinstance(batch, NamingBatch) else self._text),
        ]
        self._mine.average_gradients(learning)
        found["gradient"] = nn.utils.clip_grad_norm_(learning, told.clip)
        found["loss"] = self._mine.all_reduce_mean(found["loss"])
        # The CPU draws the next batch while a GPU computes; only then is it waited for.
        if self.step + 1 < self.steps:
            self._ahead = (self.step + 1, self._draw(self.step + 1))
        values = torch.stack([each.detach().float() for each in found.values()]).tolist()
        numbers = dict(zip(found, values, strict=True)) | self._set_rates()
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["gradient"])):
            raise RunError(
                f"the training failed in step {self.step + 1}: its loss is {numbers['loss']} and the norm of "
                f"its gradient {numbers['gradient']}. The checkpoint before is kept; lower "
                f"`{'vision_rate' if isinstance(batch, NamingBatch) else 'rate'}`"
            )
        self.optimizer.step()
        self.step += 1
        decay = min(told.ema, self.step / (self.step + 10.0))
        with torch.no_grad():
            # All weights in a few kernels; how many steps there were does not matter to it.
            follow = get_ema_multi_avg_fn(decay)
            follow(list(self.average.parameters()), list(self.model.parameters()), self.step)
        return numbers

    def judge(self) -> dict[str, float]:
        """How often validation samples are answered right, by the full plan and by the least of each tier."""
        plans = [self.full, *(self._least(tier) for tier in TIERS)]
        with self._amp():
            found = accuracy(
                self.average, self.data, plans, split="val", count=self.settings.train.judge_samples
            )  # fmt: skip
        names = ("full", *(f"least_{tier}" for tier in TIERS))
        return dict(zip(names, found.mean(0).tolist(), strict=True))

    def _amp(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self._mine.device.type, torch.bfloat16, enabled=self.settings.train.amp == "bf16"
        )  # fmt: skip

    def _batch(self, step: int) -> VqaBatch | NamingBatch:
        if self._ahead is None or self._ahead[0] != step:
            return self._draw(step)
        return self._ahead[1]

    def _draw(self, step: int) -> VqaBatch | NamingBatch:
        if step < self.settings.train.vision_steps:
            return self.data.named(step, self._mine.rank)
        stage = self.stage(step)
        return self.data.train(step, self._mine.rank, tier=stage.tier, batch_size=stage.batch_size)

    def stage(self, step: int) -> VqaStageConfig:
        """The stage of a step of the second part."""
        told = self.settings.train
        done = (step - told.vision_steps + 0.5) / told.steps * sum(each.share for each in told.stages)
        ends = accumulate(each.share for each in told.stages)
        return next(
            (each for each, end in zip(told.stages, ends, strict=True) if done < end), told.stages[-1]
        )

    def _sees(self, step: int) -> bool:
        """Whether the vision tower learns in a step."""
        told = self.settings.train
        return step < told.vision_steps or (told.vision_scale > 0.0 and self.stage(step).tier == TIERS[-1])

    def _name(self, batch: NamingBatch, crops: list[int]) -> dict[str, Tensor]:
        """Gradients of naming cells of some crops."""
        # By slices: a list of places would have to be sent to the device, and waited for.
        looked = torch.stack([batch.crops[:, crop] for crop in crops], dim=1)
        with self._amp():
            logits, there = self.naming(self.stack.see(looked), crops)
        loss = naming_loss(logits, there, batch.cells, batch.blends, batch.shares)
        loss.backward()
        rights = right(logits.detach(), there, batch.cells, self.data.labels - 1)
        return {"loss": loss, "naming": loss} | {
            f"named_{tier}": each for tier, each in zip(TIERS, rights, strict=True)
        }

    def _answer(
        self, batch: VqaBatch, tier: Tier, plans: Sequence[Plan], *, sees: bool
    ) -> dict[str, Tensor]:  # fmt: skip
        """Gradients of answering, by the whole model at a tier and drawn plans; `sees`: of the tower, too."""
        told, stack = self.settings.train, self.stack
        where = batch.answered
        # Found once and first: it is waited for, and nothing else should be.
        at = where.flatten().nonzero()[:, 0]
        wanted = batch.text[:, 1:].flatten()[at]
        with self._amp(), torch.set_grad_enabled(sees):
            seen = stack.see(batch.crops)
            named, there = self.naming(seen)
            naming = naming_loss(named, there, batch.cells)
        with self._amp():
            vision = stack.project(seen)
        # Plans go backward one by one, to hold one plan's activations at a time; what they share waits.
        shared = vision.detach().requires_grad_()
        balance: list[Tensor] = []
        with self._amp():
            quizzed = self.grounding.quizzed(batch.text)
            hidden, rotary = stack.begin(shared, quizzed, tier)
            steps = steps_of(self.full, stack.top_k)
            hidden = stack.run(steps[: told.ground_blocks], hidden, rotary, balance)
            grounds = self.grounding(hidden, quizzed, batch.prompts, batch.cells)
            hidden, *rotary = (each[:, : -self.grounding.quiz] for each in (hidden, *rotary))
            hidden = stack.run(steps[told.ground_blocks :], hidden, (rotary[0], rotary[1]), balance)
            logits = stack.logits(hidden, batch.text.shape[1])[:, :-1]
        teacher = logits.flatten(0, 1)[at].float()
        task = functional.cross_entropy(teacher, wanted)
        spread, ground = torch.stack(balance).mean(), grounds.sum()
        (task + told.balance_weight * spread + told.ground_weight * ground).backward()
        teacher = teacher.detach()
        drawn = task.new_zeros(())
        for plan in plans:
            with self._amp():
                student = stack.answers(plan, shared, batch.text).flatten(0, 1)[at]
            student = student.float().log_softmax(-1)
            apart = functional.kl_div(
                student, teacher.log_softmax(-1), reduction="batchmean", log_target=True
            )
            loss = told.distill * apart + (1.0 - told.distill) * functional.nll_loss(student, wanted)
            loss.backward()
            drawn = drawn + loss.detach() / len(plans)
        if sees:
            torch.autograd.backward([vision, told.name_weight * naming], [shared.grad, None])
        else:
            vision.backward(shared.grad)
        wrong = (logits.detach().argmax(-1) != batch.text[:, 1:]) & where
        extra = told.balance_weight * spread + told.name_weight * naming + told.ground_weight * ground
        return {
            "loss": task + drawn * len(plans) + extra,
            "full": task, "drawn": drawn, "naming": naming, "balance": spread,
            "place": grounds[0], "content": grounds[1], "lies": grounds[2],
            "right": (~wrong.any(1)).float().mean(),
        }  # fmt: skip

    def _plans(self, stage: VqaStageConfig, random: np.random.Generator) -> list[Plan]:
        """The drawn plans of a step; the same in all processes, so that none waits for another."""
        tiers, found = TIERS[: TIERS.index(stage.tier) + 1], []
        for _ in range(stage.drawn_plans):
            tier = tiers[int(random.integers(len(tiers)))]
            least = random.random() < _LEAST
            found.append(self._least(tier, random) if least else draw_plan(self.geometry, tier, random))
        return found

    def _least(self, tier: Tier, random: np.random.Generator | None = None) -> Plan:
        """A plan with the fewest blocks and experts; the last blocks are skipped, or some by chance."""
        position = self.geometry.positions[0]
        total = self.geometry.block_counts(position)[0]
        after = np.arange(position, self.geometry.depth)
        kept = after[: total - position] if random is None else random.permutation(after)[: total - position]
        return Plan(
            tier=tier, insertion_position=position, top_k=self.geometry.top_ks[0],
            blocks=(*range(position), *sorted(kept.tolist())),
        )  # fmt: skip

    def _set_rates(self) -> dict[str, float]:
        """Give each group its rate of this step."""
        told = self.settings.train
        if self.step < told.vision_steps:
            share = _share(self.step / told.vision_steps, told.warm_up, told.cool_down)
            rates = {"vision": told.vision_rate * share, "text": 0.0}
        else:
            share = _share((self.step - told.vision_steps) / told.steps, told.warm_up, told.cool_down)
            scale = told.vision_scale if self._sees(self.step) else 0.0
            rates = {"vision": told.rate * scale * share, "text": told.rate * share}
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["part"]]
        return {f"rate_{name}": rate for name, rate in rates.items()}


def draw_plan(geometry: ModelGeometry, tier: Tier, random: np.random.Generator) -> Plan:
    """A plan of a tier by chance: each knob's values are as likely, and of blocks any set of the size."""
    position = int(random.choice(geometry.positions))
    total = int(random.choice(geometry.block_counts(position)))
    after = random.permutation(np.arange(position, geometry.depth))[: total - position]
    return Plan(
        tier=tier, insertion_position=position,
        top_k=int(random.choice(geometry.top_ks)), blocks=(*range(position), *sorted(after.tolist())),
    )  # fmt: skip


def _share(done: float, warm_up: float, cool_down: float) -> float:
    """Of the highest rate, after a share of the steps: it rises, stays, and falls to 0."""
    if done < warm_up:
        return done / warm_up * 0.99 + 0.01
    return min(1.0, (1.0 - done) / max(1e-9, cool_down))


def _by_decay(params: Iterable[nn.Parameter], decay: float) -> list[tuple[list[nn.Parameter], float]]:
    """Matrices, which decay, and the rest, which does not."""
    every = list(params)
    return [
        ([each for each in every if each.ndim > 1], decay),
        ([each for each in every if each.ndim <= 1], 0.0),
    ]
