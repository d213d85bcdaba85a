"""Training of a VideoViT driven one epoch at a time; see `core.training.epoch_trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.layers import LayerNode
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import init_distributed
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT, make_differentiable_layers
from sparseflow.pruning.compaction.saved_model import save_model
from sparseflow.pruning.config import PruningConfig
from sparseflow.pruning.data.datasets import VideoDataset, load_video_dataset
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.task import VideoTrainingTask


class VideoEpochTrainer:
    """An `EpochTrainer` of a VideoViT; a context manager that restores torch's random state.

    Args:
        config: Model, dataset and training.
        device: Device.
        data: Dataset that replaces that of the configuration.

    Raises:
        InputError: A setting is invalid.
    """

    def __init__(
        self,
        config: PruningConfig,
        *,
        device: torch.device | str = "cpu",
        data: VideoDataset | None = None,
    ) -> None:
        self.epochs = config.train.epochs
        self._stack = ExitStack()
        context = self._stack.enter_context(init_distributed(device))
        self._stack.enter_context(torch.random.fork_rng(devices=context.cuda_devices))
        data = load_video_dataset(config) if data is None else data
        self._task = VideoTrainingTask(config, data, None, context)

    def __enter__(self) -> VideoEpochTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def model(self) -> VideoViT:
        """Model in training."""
        return self._task.model

    def train_epoch(
        self, extra_loss: Callable[[], Tensor] | None = None, progress: Progress | None = None
    ) -> Mapping[str, float]:
        """Train for one more epoch and return the means of the metrics over its steps."""
        task, rows = self._task, []
        epoch = task.step // task.epoch_steps
        for batch in task.load_epoch(epoch):
            metrics = task.train_batch(batch, None if extra_loss is None else lambda _: extra_loss())
            rows.append(metrics)
            if progress is not None:
                message = f"epoch {epoch + 1} of {self.epochs}, loss {metrics['loss']:.4f}"
                progress(message, len(rows) / task.epoch_steps)
        names = rows[-1] if rows else {}
        return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}

    def evaluate_accuracy(self) -> float:
        """Top-1 accuracy over test videos."""
        return self._task.evaluate_test_set().video_top1

    def differentiable_layers(self, batch_size: int) -> Sequence[LayerNode]:
        """Layers with FLOPs and bytes that are differentiable in the gates."""
        return make_differentiable_layers(self.model, batch_size)

    def export_model(self) -> LayeredVideoViT:
        """Compact copy of the model."""
        return LayeredVideoViT(compact(self.model))

    def save(self, path: Path) -> None:
        """Write the compact model for `load_model`."""
        save_model(compact(self.model), path)

    def state_dict(self) -> dict[str, Any]:
        """Training state."""
        return self._task.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._task.load_state_dict(state)
