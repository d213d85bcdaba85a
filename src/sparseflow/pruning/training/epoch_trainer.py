"""A training of a VideoViT as a task that others drive: see `core.training.epoch_trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.layers import LayerNode
from sparseflow.core.training.distributed import init_distributed
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.layered_model import Steps, differentiable_layers
from sparseflow.pruning.compaction.saved_model import save
from sparseflow.pruning.config import Settings
from sparseflow.pruning.data.datasets import Data, data_of
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.task import Training


class VideoTask:
    """Trains a VideoViT epoch by epoch; a context manager, since it keeps torch's generator for itself.

    Args:
        settings: Model, data and how to train.
        device: Where to compute.
        data: Data to use in place of what the settings name.

    Raises:
        InputError: A setting cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        device: torch.device | str = "cpu",
        data: Data | None = None,
    ) -> None:
        self.epochs = settings.train.epochs
        self._open = ExitStack()
        mine = self._open.enter_context(init_distributed(device))
        self._open.enter_context(torch.random.fork_rng(devices=mine.cuda_devices))
        self._run = Training(settings, data_of(settings) if data is None else data, None, mine)

    def __enter__(self) -> VideoTask:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def model(self) -> VideoViT:
        """The model that is being trained."""
        return self._run.model

    def train_epoch(
        self,
        extra_loss: Callable[[], Tensor] | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> Mapping[str, float]:
        """Train for one epoch more; means over its steps."""
        run, rows = self._run, []
        epoch = run.step // run.epoch_steps
        for batch in run.clips(epoch):
            numbers = run.advance(batch, None if extra_loss is None else lambda _: extra_loss())
            rows.append(numbers)
            if progress is not None:
                progress(f"epoch {epoch + 1} of {self.epochs}, loss {numbers['loss']:.4f}",
                         len(rows) / run.epoch_steps)  # fmt: skip
        names = rows[-1] if rows else {}
        return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}

    def evaluate_accuracy(self) -> float:
        """Share of test videos that are right."""
        return self._run.judge().video_top1

    def differentiable_layers(self, batch: int) -> Sequence[LayerNode]:
        """Layers, whose figures follow the gates."""
        return differentiable_layers(self.model, batch)

    def export_model(self) -> Steps:
        """The compact model."""
        return Steps(compact(self.model))

    def save(self, path: Path) -> None:
        """Write the compact model; `saved.load` reads it."""
        save(compact(self.model), path)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._run.load_state_dict(state)
