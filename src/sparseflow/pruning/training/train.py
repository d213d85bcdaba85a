"""Training of a VideoViT: dense, with AST2.0-lite v2, or for a latency budget; on one or several processes.

The output directory has `settings.json`, `losses.jsonl`, TensorBoard files, a checkpoint at regular steps and
after each epoch, `report.html` after the first epoch, and `model.safetensors`. The same call resumes an
interrupted training with the same weights as an uninterrupted one: bitwise on a CPU, up to the summation
order on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sparseflow.core.environment import collect_environment
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.training.loop import fit
from sparseflow.pruning.config import PruningConfig
from sparseflow.pruning.data.datasets import VideoDataset, load_video_dataset
from sparseflow.pruning.evaluation.accuracy import VideoAccuracy
from sparseflow.pruning.evaluation.latency_model import VideoViTLatencyModel
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.page import write_training_page
from sparseflow.pruning.training.task import VideoTrainingTask


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoTrainResult:
    """Result of a training.

    Attributes:
        model: Trained model, in evaluation mode.
        accuracy: Accuracy on the test clips; None on processes other than the first.
        stats: `ast_stats` of the last step.
    """

    model: VideoViT
    accuracy: VideoAccuracy | None
    stats: Mapping[str, float]


def train(
    config: PruningConfig,
    out_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    data: VideoDataset | None = None,
    progress: Progress | None = None,
) -> VideoTrainResult:
    """Train a model, or resume a training.

    Args:
        config: Model, dataset and training.
        out_dir: Output directory, created if absent; an existing training is resumed.
        device: Device; `"cuda"` under torchrun is the GPU of the local rank.
        data: Dataset that replaces that of the configuration.
        progress: Called after each step.

    Raises:
        InputError: A setting is invalid, or the directory has another training or is a file.
        FileFormatError: The checkpoint, the history or the dataset is damaged.
        RunError: The loss is not finite (the last checkpoint is kept), or another process trains in the
            directory.
    """
    latency_model = None if config.latency is None else VideoViTLatencyModel.load(config.latency.model)
    if data is None:
        data = load_video_dataset(config, progress=subrange(progress, 0.0, 0.0))
    environment = collect_environment(str(device), seed=config.train.seed)

    def update_page(root: Path) -> None:
        write_training_page(root, environment)

    task = fit(
        lambda context: VideoTrainingTask(config, data, latency_model, context),
        out_dir,
        device=device,
        checkpoint_every=config.train.checkpoint_every,
        eval_kind="test",
        settings=config.model_dump(mode="json"),
        write_page=update_page,
        progress=progress,
    )
    model = task.model.eval()
    if task.accuracy is not None:
        write_training_page(out_dir, environment, model=model, data=data)
    return VideoTrainResult(model=model, accuracy=task.accuracy, stats=task.stats)
