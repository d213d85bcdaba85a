"""The steps of a training: a model, its optimizer, what a step does, and how accurate the model is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.optimizer import check_finite, lr_factor, set_learning_rate, split_weight_decay
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.saved_model import save
from sparseflow.pruning.config import Settings
from sparseflow.pruning.data.datasets import Batch, Data, batches
from sparseflow.pruning.evaluation.accuracy import Accuracy, evaluate
from sparseflow.pruning.evaluation.latency_model import LatencyModel, over_budget
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.page import PAGE, write_page

Extra = Callable[[VideoViT], Tensor]

MODEL = "model.safetensors"
_AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Training:
    """A model, its optimizer and how far they are.

    Args:
        settings: Model, and how to train.
        data: What to train on.
        cost: What a budget is kept by, if there is one.
        mine: This process among all that train.

    Raises:
        InputError: An epoch is shorter than a step, or `cost` is of another kind of model.
    """

    def __init__(
        self,
        settings: Settings,
        data: Data,
        cost: LatencyModel | None,
        mine: DistributedContext,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.data, self._cost, self._mine = settings, data, cost, mine
        told = settings.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(told.seed)
            self.model = settings.make(len(data.classes), data.channels)
        self.model.to(mine.device)
        if cost is not None:
            cost.predict(self.model)  # which refuses another kind of model
        whole = told.batch_size * mine.world_size
        self.epoch_steps = data.epoch_clips // whole
        if self.epoch_steps < 1:
            raise InputError(f"an epoch has {data.epoch_clips} clips, fewer than a step's {whole}")
        self.num_steps, self.step, self.eval_every = self.epoch_steps * told.epochs, 0, self.epoch_steps
        self.fingerprint = settings.model_dump(
            mode="json", exclude={"train": {"workers", "checkpoint_every"}}
        )
        self.fingerprint |= {"clips": data.epoch_clips, "processes": mine.world_size}
        self.accuracy: Accuracy | None = None
        self._environment, self._clips = environment, iter(())
        gates = [] if self.model.gates is None else list(self.model.gates.parameters())
        weights = [each for name, each in self.model.named_parameters() if not name.startswith("gates.")]
        groups = split_weight_decay(weights, told.weight_decay)
        groups.append({"params": gates, "weight_decay": 0.0, "lr_scale": told.gate_rate})
        self.optimizer = torch.optim.AdamW(groups, lr=told.rate)
        self._amp = _AMP[told.amp]
        self._scaler = torch.amp.GradScaler(mine.device.type, enabled=told.amp == "fp16")
        self._stats: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "stats": self._stats,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._stats = dict(state["stats"])
        self.step = state["step"]

    def clips(self, epoch: int) -> Iterator[Batch]:
        """What is left of an epoch, a batch of this process at a time."""
        told = self.settings.train
        self.data.set_epoch(epoch)
        places = self.data.order(epoch, told.seed)[
            : self.epoch_steps * told.batch_size * self._mine.world_size
        ]
        mine = places.reshape(self.epoch_steps, self._mine.world_size, told.batch_size)[:, self._mine.rank]
        left = mine[self.step - epoch * self.epoch_steps :]
        return batches(
            self.data.train, left.reshape(-1), told.batch_size, workers=told.workers, device=self._mine.device
        )

    def train_step(self) -> dict[str, float]:
        if self.step % self.epoch_steps == 0 or (batch := next(self._clips, None)) is None:
            self._clips = self.clips(self.step // self.epoch_steps)
            batch = next(self._clips)
        return self.advance(batch)

    def advance(self, batch: Batch, extra: Extra | None = None) -> dict[str, float]:
        """One step.

        Args:
            batch: Clips and labels.
            extra: One more term of the loss, computed from the model.

        Returns:
            The step's numbers.

        Raises:
            RunError: The loss or the gradient is no longer finite.
        """
        told, device = self.settings.train, self._mine.device
        random = np.random.default_rng([told.seed, self.step, self._mine.rank])
        torch.manual_seed(int(random.integers(2**62)))  # for what is dropped
        share = self.step / self.num_steps
        rate = told.rate * lr_factor(self.step, self.num_steps, warmup=told.warm_up)
        set_learning_rate(self.optimizer, rate)
        model = self.model.train()
        if self.model.ast is not None and told.softness_end is not None and self.model.ast.softness > 0.0:
            model.softness = (1.0 - share) * self.model.ast.softness + share * told.softness_end
        model.hard_gates = told.hard_from is not None and share >= told.hard_from
        self.optimizer.zero_grad()
        with torch.autocast(device.type, self._amp, enabled=self._amp is not None):
            logits, info = model(batch["clip"], return_intermediate=True)
        task = functional.cross_entropy(
            logits.float(), batch["label"], label_smoothing=told.label_smoothing
        )  # fmt: skip
        loss, over = task + info["ast_stats"]["L_AST"], None
        if self._cost is not None and self.settings.latency is not None:
            over = over_budget(self._cost, model, self.settings.latency.budget)
            loss = loss + self.settings.latency.weight * over
        more = None if extra is None else extra(model)
        if more is not None:
            loss = loss + more.to(loss)
        self._scaler.scale(loss).backward()
        # Averaged first: where one process' gradients overflowed, all of them leave the step out.
        self._mine.average_gradients(self.model.parameters())
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), told.clip)
        right = (logits.argmax(1) == batch["label"]).float().mean()
        stats = {name: each.detach() for name, each in info["ast_stats"].items()}
        found = {
            "loss": self._mine.all_reduce_mean(loss),
            "task": task.detach(),
            "right": right,
            "gradient": norm,
            **stats,
        }
        if over is not None:
            found["over_budget"] = over.detach()
        if more is not None:
            found["extra"] = more.detach()
        # All at once: a GPU is waited for only here.
        values = torch.stack([each.to(device, torch.float32) for each in found.values()]).tolist()
        numbers = dict(zip(found, values, strict=True)) | {"rate": rate}
        hint = f"lower `rate` (={told.rate})"
        check_finite({"loss": numbers["loss"]}, step=self.step + 1, hint=hint)
        if self._scaler.is_enabled() and not math.isfinite(numbers["gradient"]):
            del numbers["gradient"]  # float16 overflowed, and the scaler skips this step
        else:
            check_finite({"gradient": numbers["gradient"]}, step=self.step + 1, hint=hint)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.step += 1
        self._stats = {name: numbers[name] for name in stats}
        return numbers

    def stats(self) -> dict[str, float]:
        """`ast_stats` of the last step."""
        return dict(self._stats)

    def judge(self) -> Accuracy:
        """The test side, all of it."""
        told = self.settings.train
        found = evaluate(
            self.model, self.data.test, batch_size=told.batch_size, workers=told.workers,
            device=self._mine.device, amp=self._amp,
        )  # fmt: skip
        check_finite({"loss of test clips": found.loss}, step=self.step, hint=f"lower `rate` (={told.rate})")
        return found

    def evaluate(self) -> dict[str, float]:
        self.accuracy = self.judge()
        return self.accuracy.to_dict() | self.stats()

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        epoch = -(-self.step // self.epoch_steps)
        return f"epoch {epoch} of {self.settings.train.epochs}, loss {metrics['loss']:.4f}"

    def finish(self, out_dir: Path) -> None:
        self.accuracy = self.accuracy or self.judge()
        save(self.model, out_dir / MODEL)
        if not (out_dir / PAGE).is_file():
            write_page(out_dir, self._environment)
