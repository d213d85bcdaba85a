"""Model, optimizer, steps and validation of a Grid-VQA training.

The vision tower is trained alone first, to name the contents of cells. Then all parameters learn to answer,
in stages of ascending tiers. Every step runs the full model at the stage's tier, trained on the answers, and
sampled plans of that tier or a lower one, trained on the answers and on the full model's logits: the sandwich
rule of Yu & Huang, "Universally slimmable networks", ICCV 2019, with one of the smallest plans in a fraction
of the steps and a random plan otherwise. The vision tower is frozen in stages below the highest tier, because
coarse crops alone would degrade its features of fine ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
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
    naming_accuracy,
    naming_loss,
    sample_crops,
)
from sparseflow.adaptive.grid_vqa.config import VqaConfig, VqaStageConfig
from sparseflow.adaptive.grid_vqa.dataset import NamingBatch, VqaBatch, VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import check_answers
from sparseflow.adaptive.grid_vqa.model import build_vqa_model
from sparseflow.adaptive.grid_vqa.question_generator import SMALL
from sparseflow.adaptive.grid_vqa.stack import ModelStack, get_block_steps
from sparseflow.adaptive.plan.space import TIERS, ModelGeometry, Plan, Tier
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.optimizer import check_finite, lr_factor, split_weight_decay

_PLANS_SEED = 3
"""Separates the generator of plans from those of the data."""
_SMALLEST_FRACTION = 0.3
"""Fraction of sampled plans that are smallest plans."""


class VqaLearner:
    """Trains a model step by step.

    Args:
        config: Task, model and training settings.
        data: Training and validation data.
        context: Processes that train together.

    Attributes:
        model: Model in training.
        average: Exponential moving average of the model, which is evaluated and saved.
        step: Completed steps.
        num_steps: Steps of the full training.
    """

    def __init__(self, config: VqaConfig, data: VqaDataset, context: DistributedContext) -> None:
        self.config, self.data, self._context = config, data, context
        train = config.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(train.seed)
            model = build_vqa_model(config, data.vocabulary)
            crop_side = config.model.crop_px // config.model.patch_px
            naming = NamingHead(config.model.vision_width, data.num_labels, config.scene.grid, crop_side)
            grounding = GroundingHead(
                config.model.width, data.vocabulary.ids(data.bank.names).tolist(),
                [data.bank.names.index(name) for name in data.domain.question_names],
                data.vocabulary.ids(SMALL).tolist(), grid=config.scene.grid,
                crop_side=crop_side,
            )  # fmt: skip
        self.model, self.naming = model.to(context.device), naming.to(context.device)
        self.grounding = grounding.to(context.device)
        self.average = copy.deepcopy(self.model)
        self.stack = ModelStack(self.model, compiled=train.compile and bool(context.cuda_devices))
        self.geometry = ModelGeometry(depth=config.model.depth, top_k=config.model.top_k)
        self.full = self.geometry.full_plan()
        self.num_steps, self.step = train.vision_steps + train.steps, 0
        inner: Any = self.model.model
        self._vision = [*inner.vision_tower.parameters(), *self.naming.parameters()]
        known = set(map(id, self._vision))
        self._text = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
        self._text += self.grounding.parameters()
        groups = [
            group | {"part": name}
            for name, parameters in (("vision", self._vision), ("text", self._text))
            for group in split_weight_decay(parameters, train.weight_decay)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=train.rate, fused=context.device.type == "cuda")
        self._prefetched: tuple[int, VqaBatch | NamingBatch] | None = None
        self._start_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Wall-clock time of the training, including validation and earlier processes."""
        return time.perf_counter() - self._start_s

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {
            "step": self.step,
            "seconds": self.elapsed_s,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "naming": self.naming.state_dict(),
            "grounding": self.grounding.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._start_s -= state["seconds"]
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.naming.load_state_dict(state["naming"])
        self.grounding.load_state_dict(state["grounding"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def train_step(self) -> dict[str, float]:
        """Run one step.

        Returns:
            Losses, rates and gradient norm of the step.

        Raises:
            RunError: The loss or the gradient is not finite; the weights are unchanged.
        """
        train = self.config.train
        generator = np.random.default_rng([train.seed, _PLANS_SEED, self.step])
        torch.manual_seed(int(generator.integers(2**62)))  # seeds dropout
        batch = self._get_batch(self.step)
        for parameter in (*self._vision, *self._text):
            parameter.grad = None
        self.model.train()
        if isinstance(batch, NamingBatch):
            losses = self._train_naming(batch, sample_crops(train.vision_crops, generator))
        else:
            stage = self.get_stage(self.step)
            plans = self._sample_plans(stage, generator)
            losses = self._train_answers(
                batch, stage.tier, plans, train_vision=self._trains_vision(self.step)
            )
        trained = [
            *(self._vision if self._trains_vision(self.step) else ()),
            *(() if isinstance(batch, NamingBatch) else self._text),
        ]
        self._context.average_gradients(trained)
        losses["gradient"] = nn.utils.clip_grad_norm_(trained, train.clip)
        losses["loss"] = self._context.all_reduce_mean(losses["loss"])
        # The CPU samples the next batch while a GPU computes; the next line synchronizes.
        if self.step + 1 < self.num_steps:
            self._prefetched = (self.step + 1, self._make_batch(self.step + 1))
        values = torch.stack([loss.detach().float() for loss in losses.values()]).tolist()
        metrics = dict(zip(losses, values, strict=True)) | self._set_rates()
        check_finite(
            {"loss": metrics["loss"], "gradient": metrics["gradient"]},
            step=self.step + 1,
            hint=f"lower `{'vision_rate' if isinstance(batch, NamingBatch) else 'rate'}`",
        )
        self.optimizer.step()
        self.step += 1
        decay = min(train.ema, self.step / (self.step + 10.0))
        with torch.no_grad():
            # Updates all weights in a few kernels; the step count does not change the result.
            update_average = get_ema_multi_avg_fn(decay)
            update_average(list(self.average.parameters()), list(self.model.parameters()), self.step)
        return metrics

    def evaluate(self) -> dict[str, float] | None:
        """Validation accuracy of the full plan and of the smallest plan of each tier; None in the first
        part."""
        if self.step <= self.config.train.vision_steps:
            return None
        plans = [self.full, *(self._smallest_plan(tier) for tier in TIERS)]
        with self._autocast():
            correct = check_answers(
                self.average, self.data, plans, split="val", count=self.config.train.eval_samples
            )  # fmt: skip
        names = ("full", *(f"smallest_{tier}" for tier in TIERS))
        return dict(zip(names, correct.mean(0).tolist(), strict=True))

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Progress message of a step."""
        if "full" in metrics:
            return f"step {self.step} of {self.num_steps}, {metrics['accuracy']:.1%} correct"
        return f"step {self.step} of {self.num_steps}, {metrics['named_high']:.1%} of cells named correctly"

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self._context.device.type, torch.bfloat16, enabled=self.config.train.amp == "bf16"
        )  # fmt: skip

    def _get_batch(self, step: int) -> VqaBatch | NamingBatch:
        if self._prefetched is None or self._prefetched[0] != step:
            return self._make_batch(step)
        return self._prefetched[1]

    def _make_batch(self, step: int) -> VqaBatch | NamingBatch:
        if step < self.config.train.vision_steps:
            return self.data.make_naming_batch(step, self._context.rank)
        stage = self.get_stage(step)
        return self.data.make_train_batch(
            step, self._context.rank, tier=stage.tier, batch_size=stage.batch_size
        )

    def get_stage(self, step: int) -> VqaStageConfig:
        """Stage of a step of the second part."""
        train = self.config.train
        position = (
            (step - train.vision_steps + 0.5) / train.steps * sum(stage.share for stage in train.stages)
        )
        ends = accumulate(stage.share for stage in train.stages)
        return next(
            (stage for stage, end in zip(train.stages, ends, strict=True) if position < end), train.stages[-1]
        )

    def _trains_vision(self, step: int) -> bool:
        """Whether a step trains the vision tower."""
        train = self.config.train
        return step < train.vision_steps or (
            train.vision_scale > 0.0 and self.get_stage(step).tier == TIERS[-1]
        )

    def _train_naming(self, batch: NamingBatch, crops: list[int]) -> dict[str, Tensor]:
        """Compute gradients of naming the cells of some crops."""
        # Slices, because an index list would be copied to the device synchronously.
        pixels = torch.stack([batch.crops[:, crop] for crop in crops], dim=1)
        with self._autocast():
            logits, visible = self.naming(self.stack.encode_crops(pixels), crops)
        loss = naming_loss(logits, visible, batch.cells, batch.blended_cells, batch.fractions)
        loss.backward()
        accuracies = naming_accuracy(logits.detach(), visible, batch.cells, self.data.num_labels - 1)
        return {"loss": loss, "naming": loss} | {
            f"named_{tier}": value for tier, value in zip(TIERS, accuracies, strict=True)
        }

    def _train_answers(
        self, batch: VqaBatch, tier: Tier, plans: Sequence[Plan], *, train_vision: bool
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compute gradients of answering, by the full model at a tier and by sampled plans."""
        train, stack = self.config.train, self.stack
        mask = batch.answer_mask
        # Computed once and first, because it synchronizes with the device.
        rows = mask.flatten().nonzero()[:, 0]
        targets = batch.text[:, 1:].flatten()[rows]
        with self._autocast(), torch.set_grad_enabled(train_vision):
            features = stack.encode_crops(batch.crops)
            names, visible = self.naming(features)
            name_loss = naming_loss(names, visible, batch.cells)
        with self._autocast():
            vision = stack.project(features)
        # The backward passes of plans run one by one, so that only one plan's activations are in memory.
        # Their gradients with respect to the vision tokens accumulate in `shared`.
        shared = vision.detach().requires_grad_()
        balance: list[Tensor] = []
        with self._autocast():
            quiz_text = self.grounding.append_quiz(batch.text)
            hidden, rotary = stack.embed(shared, quiz_text, tier)
            steps = get_block_steps(self.full, stack.top_k)
            hidden = stack.run_blocks(steps[: train.ground_blocks], hidden, rotary, balance)
            grounding_losses = self.grounding(hidden, quiz_text, batch.prompts, batch.cells)
            hidden, *rotary = (value[:, : -self.grounding.num_quiz_tokens] for value in (hidden, *rotary))
            hidden = stack.run_blocks(steps[train.ground_blocks :], hidden, (rotary[0], rotary[1]), balance)
            logits = stack.logits(hidden, batch.text.shape[1])[:, :-1]
        teacher = logits.flatten(0, 1)[rows].float()
        answer_loss = functional.cross_entropy(teacher, targets)
        balance_loss, grounding_loss = torch.stack(balance).mean(), grounding_losses.sum()
        (answer_loss + train.balance_weight * balance_loss + train.ground_weight * grounding_loss).backward()
        teacher = teacher.detach()
        plan_loss = answer_loss.new_zeros(())
        for plan in plans:
            with self._autocast():
                student = stack.forward_plan(plan, shared, batch.text).flatten(0, 1)[rows]
            loss = self._distillation_loss(student.float().log_softmax(-1), teacher, targets)
            loss.backward()
            plan_loss = plan_loss + loss.detach() / len(plans)
        if train_vision:
            torch.autograd.backward([vision, train.name_weight * name_loss], [shared.grad, None])
        else:
            vision.backward(shared.grad)
        wrong = (logits.detach().argmax(-1) != batch.text[:, 1:]) & mask
        auxiliary_loss = (
            train.balance_weight * balance_loss
            + train.name_weight * name_loss
            + train.ground_weight * grounding_loss
        )
        return {
            "loss": answer_loss + plan_loss * len(plans) + auxiliary_loss,
            "full": answer_loss, "plans": plan_loss, "naming": name_loss, "balance": balance_loss,
            "cells": grounding_losses[0], "contents": grounding_losses[1], "locations": grounding_losses[2],
            "accuracy": (~wrong.any(1)).float().mean(),
        }  # fmt: skip

    def _distillation_loss(self, log_probs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Loss of a plan on the full model's logits and on the answers."""
        weight = self.config.train.distill
        divergence = functional.kl_div(
            log_probs, teacher.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return weight * divergence + (1.0 - weight) * functional.nll_loss(log_probs, targets)

    def _sample_plans(self, stage: VqaStageConfig, generator: np.random.Generator) -> list[Plan]:
        """Sample the plans of a step; they are the same in all processes, which balances their work."""
        tiers, plans = TIERS[: TIERS.index(stage.tier) + 1], []
        for _ in range(stage.drawn_plans):
            tier = tiers[int(generator.integers(len(tiers)))]
            use_smallest = generator.random() < _SMALLEST_FRACTION
            if use_smallest:
                plans.append(self._smallest_plan(tier, generator))
            else:
                plans.append(sample_plan(self.geometry, tier, generator))
        return plans

    def _smallest_plan(self, tier: Tier, generator: np.random.Generator | None = None) -> Plan:
        """Plan with the fewest blocks and experts; skips the last blocks, or random ones with a generator."""
        position = self.geometry.positions[0]
        total = self.geometry.block_counts(position)[0]
        later = np.arange(position, self.geometry.depth)
        blocks = (later if generator is None else generator.permutation(later))[: total - position]
        return Plan(
            tier=tier, insertion_position=position, top_k=self.geometry.top_ks[0],
            blocks=(*range(position), *sorted(blocks.tolist())),
        )  # fmt: skip

    def _set_rates(self) -> dict[str, float]:
        """Set the learning rates of this step and return them."""
        train = self.config.train
        if self.step < train.vision_steps:
            factor = lr_factor(self.step, train.vision_steps, warmup=train.warm_up, cooldown=train.cool_down)
            rates = {"vision": train.vision_rate * factor, "text": 0.0}
        else:
            factor = lr_factor(
                self.step - train.vision_steps, train.steps, warmup=train.warm_up, cooldown=train.cool_down
            )
            scale = train.vision_scale if self._trains_vision(self.step) else 0.0
            rates = {"vision": train.rate * scale * factor, "text": train.rate * factor}
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["part"]]
        return {f"rate_{name}": rate for name, rate in rates.items()}


def sample_plan(geometry: ModelGeometry, tier: Tier, generator: np.random.Generator) -> Plan:
    """Sample a plan of a tier: uniform in each setting, and in the sets of blocks of the size."""
    position = int(generator.choice(geometry.positions))
    total = int(generator.choice(geometry.block_counts(position)))
    after = generator.permutation(np.arange(position, geometry.depth))[: total - position]
    return Plan(
        tier=tier, insertion_position=position,
        top_k=int(generator.choice(geometry.top_ks)), blocks=(*range(position), *sorted(after.tolist())),
    )  # fmt: skip
