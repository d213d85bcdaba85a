"""Training of a VideoViT step by step, for `core.training.loop.fit`, or epoch by epoch, for an outer loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.core.layers import LayerNode
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import DistributedContext, init_distributed
from sparseflow.core.training.optimizer import check_finite, lr_factor, set_learning_rate, split_weight_decay
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT, make_differentiable_layers
from sparseflow.pruning.compaction.saved_model import save_model
from sparseflow.pruning.config import PruningConfig
from sparseflow.pruning.data.datasets import Batch, VideoDataset, load_batches, load_video_dataset
from sparseflow.pruning.evaluation.accuracy import VideoAccuracy, evaluate_accuracy
from sparseflow.pruning.evaluation.latency_model import VideoViTLatencyModel, compute_budget_loss
from sparseflow.pruning.training.distillation import Distillation

MODEL_FILE = "model.safetensors"
AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class VideoTrainingTask:
    """A `core.training.loop.TrainingTask` of a VideoViT.

    Args:
        config: Model and training.
        data: Training and test clips.
        latency_model: Latency model of the budget loss; None trains without a budget.
        context: Distributed context.

    Attributes:
        model: Model in training.
        stats: `ast_stats` of the last step.
        accuracy: Result of the last evaluation.

    Raises:
        InputError: An epoch has fewer clips than a step, `latency_model` is of another architecture, or the
            teacher does not fit.
        FileFormatError: The teacher's file is damaged.
    """

    def __init__(
        self,
        config: PruningConfig,
        data: VideoDataset,
        latency_model: VideoViTLatencyModel | None,
        context: DistributedContext,
    ) -> None:
        self.config, self.data, self._context = config, data, context
        self._latency_model = latency_model
        train = config.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(train.seed)
            self.model = config.build_model(len(data.classes), data.num_channels)
        self.model.to(context.device)
        self._distillation = (
            None if config.distill is None else Distillation(config.distill, self.model, context.device)
        )
        if latency_model is not None:
            latency_model.predict(self.model)  # refuses another architecture
        step_clips = train.batch_size * context.world_size
        self.epoch_steps = data.epoch_clips // step_clips
        if self.epoch_steps < 1:
            raise InputError(f"an epoch has {data.epoch_clips} clips, fewer than a step's {step_clips}")
        self.num_steps, self.step, self.eval_every = self.epoch_steps * train.epochs, 0, self.epoch_steps
        self.fingerprint = config.model_dump(mode="json", exclude={"train": {"workers", "checkpoint_every"}})
        self.fingerprint |= {"clips": data.epoch_clips, "processes": context.world_size}
        self.accuracy: VideoAccuracy | None = None
        self._batches: Iterator[Batch] = iter(())
        gates = [] if self.model.gates is None else list(self.model.gates.parameters())
        weights = [
            parameter
            for name, parameter in self.model.named_parameters()
            if not name.startswith("pruner.gates.")
        ]
        groups = split_weight_decay(weights, train.weight_decay)
        groups.append({"params": gates, "weight_decay": 0.0, "lr_scale": train.gate_rate})
        self.optimizer = torch.optim.AdamW(groups, lr=train.rate, fused=context.device.type == "cuda")
        self._amp = AMP_DTYPES[train.amp]
        self._scaler = torch.amp.GradScaler(context.device.type, enabled=train.amp == "fp16")
        self.stats: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Training state."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "stats": self.stats,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.stats = dict(state["stats"])
        self.step, self._batches = state["step"], iter(())

    def _load_epoch(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch on this process."""
        train, context, epoch = self.config.train, self._context, self.step // self.epoch_steps
        self.data.set_epoch(epoch)
        num_clips = self.epoch_steps * train.batch_size * context.world_size
        order = self.data.shuffle_epoch(epoch, train.seed)[:num_clips]
        local = order.reshape(self.epoch_steps, context.world_size, train.batch_size)[:, context.rank]
        remaining = local[self.step - epoch * self.epoch_steps :]
        return load_batches(
            self.data.train, remaining.reshape(-1), train.batch_size, workers=train.workers,
            device=context.device,
        )  # fmt: skip

    def train_step(self, extra_loss: Callable[[], Tensor] | None = None) -> dict[str, float]:
        """Run one training step.

        Args:
            extra_loss: Additional term of the loss.

        Returns:
            Metrics of the step.

        Raises:
            RunError: The loss or the gradient is not finite.
        """
        if self.step % self.epoch_steps == 0 or (batch := next(self._batches, None)) is None:
            self._batches = self._load_epoch()
            batch = next(self._batches)
        train, context = self.config.train, self._context
        generator = np.random.default_rng([train.seed, self.step, context.rank])
        torch.manual_seed(int(generator.integers(2**62)))  # for dropout
        rate = train.rate * lr_factor(self.step, self.num_steps, warmup=train.warm_up)
        set_learning_rate(self.optimizer, rate)
        self._update_masks()
        self.optimizer.zero_grad()
        loss, metrics, stats = self._compute_loss(batch, extra_loss)
        self._scaler.scale(loss).backward()
        # Averaged before unscaling: if the gradients of one process overflow, all processes skip the step.
        context.average_gradients(self.model.parameters())
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
        metrics = {"loss": context.all_reduce_mean(loss), **metrics, "gradient": norm, **stats}
        # One transfer of all metrics, the only synchronization with the GPU.
        values = torch.stack([value.to(context.device, torch.float32) for value in metrics.values()]).tolist()
        numbers = dict(zip(metrics, values, strict=True)) | {"rate": rate}
        hint = f"lower `rate` (={train.rate})"
        check_finite({"loss": numbers["loss"]}, step=self.step + 1, hint=hint)
        if self._scaler.is_enabled() and not math.isfinite(numbers["gradient"]):
            del numbers["gradient"]  # float16 overflowed; the scaler skips this step
        else:
            check_finite({"gradient": numbers["gradient"]}, step=self.step + 1, hint=hint)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.step += 1
        self.stats = {name: numbers[name] for name in stats}
        return numbers

    def _update_masks(self) -> None:
        """Set softness and hardness of the masks for the current step; enter training mode."""
        train, model = self.config.train, self.model.train()
        progress = self.step / self.num_steps
        if model.ast is not None and train.softness_end is not None and model.ast.softness > 0.0:
            model.softness = (1.0 - progress) * model.ast.softness + progress * train.softness_end
        model.hard_gates = train.hard_from is not None and progress >= train.hard_from

    def _compute_loss(
        self, batch: Batch, extra_loss: Callable[[], Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Total loss, metrics, and `ast_stats`."""
        device_type = self._context.device.type
        with torch.autocast(device_type, self._amp, enabled=self._amp is not None):
            logits, info = self.model(batch["clip"], return_intermediate=True)
            distillation = self._distillation
            teacher_loss = None if distillation is None else distillation.compute_loss(batch["clip"], logits)
        task_loss = functional.cross_entropy(
            logits.float(), batch["label"], label_smoothing=self.config.train.label_smoothing
        )
        accuracy = (logits.argmax(1) == batch["label"]).float().mean()
        metrics = {"task": task_loss.detach(), "accuracy": accuracy}
        if distillation is not None and teacher_loss is not None:
            metrics["distillation"] = teacher_loss.detach()
            task_loss = torch.lerp(task_loss, teacher_loss, distillation.config.weight)
        loss = task_loss + info["ast_stats"]["L_AST"]
        latency = self.config.latency
        if self._latency_model is not None and latency is not None:
            budget_loss = compute_budget_loss(self._latency_model, self.model, latency.budget)
            loss = loss + latency.weight * budget_loss
            metrics["over_budget"] = budget_loss.detach()
        if extra_loss is not None:
            extra = extra_loss()
            loss = loss + extra.to(loss)
            metrics["extra"] = extra.detach()
        return loss, metrics, {name: value.detach() for name, value in info["ast_stats"].items()}

    def evaluate_test_set(self) -> VideoAccuracy:
        """Evaluate all test clips.

        Raises:
            RunError: The loss is not finite.
        """
        train = self.config.train
        accuracy = evaluate_accuracy(
            self.model, self.data.test, batch_size=train.batch_size, workers=train.workers,
            device=self._context.device, amp=self._amp,
        )  # fmt: skip
        check_finite({"test loss": accuracy.loss}, step=self.step, hint=f"lower `rate` (={train.rate})")
        return accuracy

    def evaluate(self) -> dict[str, float]:
        self.accuracy = self.evaluate_test_set()
        return self.accuracy.to_dict() | self.stats

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        epoch = -(-self.step // self.epoch_steps)
        return f"epoch {epoch} of {self.config.train.epochs}, loss {metrics['loss']:.4f}"

    def finish(self, out_dir: Path) -> None:
        self.accuracy = self.accuracy or self.evaluate_test_set()
        save_model(self.model, out_dir / MODEL_FILE)


class VideoEpochTrainer(VideoTrainingTask):
    """A `core.training.epoch_trainer.EpochTrainer`; a context manager that restores torch's random state.

    Args:
        config: Model, dataset and training.
        device: Device.

    Raises:
        InputError: A setting is invalid.
    """

    def __init__(self, config: PruningConfig, *, device: torch.device | str = "cpu") -> None:
        self.epochs = config.train.epochs
        with ExitStack() as stack:
            context = stack.enter_context(init_distributed(device))
            stack.enter_context(torch.random.fork_rng(devices=context.cuda_devices))
            super().__init__(config, load_video_dataset(config), None, context)
            self._stack = stack.pop_all()

    def __enter__(self) -> VideoEpochTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train_epoch(
        self, extra_loss: Callable[[], Tensor] | None = None, progress: Progress | None = None
    ) -> Mapping[str, float]:
        """Train for one more epoch and return the means of the metrics over its steps."""
        rows: list[dict[str, float]] = []
        while not rows or self.step % self.epoch_steps:
            rows.append(self.train_step(extra_loss))
            if progress is not None:
                progress(self.format_metrics(rows[-1]), len(rows) / self.epoch_steps)
        return {name: float(np.mean([row[name] for row in rows if name in row])) for name in rows[-1]}

    def evaluate_accuracy(self) -> float:
        """Top-1 accuracy over test videos."""
        return self.evaluate_test_set().video_top1

    def differentiable_layers(self, batch_size: int) -> Sequence[LayerNode]:
        """Layers with FLOPs and bytes that are differentiable in the gates."""
        return make_differentiable_layers(self.model, batch_size)

    def export_model(self) -> LayeredVideoViT:
        """Compact copy of the model."""
        return LayeredVideoViT(compact(self.model))

    def save(self, path: Path) -> None:
        """Write the compact model for `load_model`."""
        save_model(compact(self.model), path)
