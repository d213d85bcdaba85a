"""Training a VideoViT dense, with AST2.0-lite v2, or within a budget of latency; by one process or several.

A training has a folder: `losses.jsonl` (and TensorBoard's files), a checkpoint every so many steps and at the
end of each epoch, `model.safetensors`, and `report.html`, which is there after the first epoch. The same
call goes on where one was stopped, and gives the very weights that an unbroken one would have given (on a
CPU; on a GPU but for the order in which it adds): what a step draws depends on the seed and the step's number
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sparseflow.core.environment import collect_environment
from sparseflow.core.progress import Progress
from sparseflow.core.training.loop import fit
from sparseflow.pruning.config import Settings
from sparseflow.pruning.data.datasets import Data, data_of
from sparseflow.pruning.evaluation.accuracy import Accuracy
from sparseflow.pruning.evaluation.latency_model import LatencyModel
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.page import write_page
from sparseflow.pruning.training.task import MODEL as MODEL
from sparseflow.pruning.training.task import Training


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What a training gave.

    Attributes:
        model: The model.
        accuracy: On the test side; None in processes but the first.
        stats: `ast_stats` of the last step.
    """

    model: VideoViT
    accuracy: Accuracy | None
    stats: Mapping[str, float]


def train(
    settings: Settings,
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    data: Data | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train a model, or go on where an earlier call in the same folder was stopped.

    Args:
        settings: Model, data and how to train.
        folder: Made when absent.
        device: Where to compute; `"cuda"` with torchrun is each process' own GPU.
        data: Data to use in place of what the settings name.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: A setting cannot be used, or the folder holds another training, or is a file.
        FileFormatError: The checkpoint, the history or the data is damaged.
        RunError: The loss is no longer finite (the last checkpoint is kept), or another process trains in
            the folder.
    """
    cost = None if settings.latency is None else LatencyModel.load(settings.latency.model)
    if data is None:
        counting = (
            None if progress is None else lambda n, total: progress(f"counting frames, {n} of {total}", 0.0)
        )
        data = data_of(settings, progress=counting)
    environment = collect_environment(str(device), seed=settings.train.seed)

    def update_page(root: Path) -> None:
        write_page(root, environment)

    run = fit(
        lambda context: Training(settings, data, cost, context, environment), folder, device=device,
        checkpoint_every=settings.train.checkpoint_every, eval_kind="test",
        settings=settings.model_dump(mode="json"),
        write_page=update_page, progress=progress,
    )  # fmt: skip
    return Trained(model=run.model.eval(), accuracy=run.accuracy, stats=run.stats())
