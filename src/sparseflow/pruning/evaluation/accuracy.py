"""Accuracy of the compact model over clips and over videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sparseflow.core.progress import Progress
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.data.datasets import load_batches
from sparseflow.pruning.model.video_vit import VideoViT


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoAccuracy:
    """Accuracy of a model, fractions from 0 to 1.

    Attributes:
        clip_top1: Top-1 accuracy over clips.
        video_top1: Top-1 accuracy over videos, by the mean probabilities of their clips.
        video_top5: Top-5 accuracy over videos.
        loss: Mean cross-entropy over clips.
        correct: Whether the top-1 prediction of each video is correct, bool, shape (videos,), by video index.
    """

    clip_top1: float
    video_top1: float
    video_top5: float
    loss: float
    correct: np.ndarray

    def to_dict(self) -> dict[str, float]:
        """Accuracies and loss."""
        return {name: getattr(self, name) for name in ("clip_top1", "video_top1", "video_top5", "loss")}


def evaluate_accuracy(
    model: VideoViT,
    clips: Dataset[dict[str, Any]],
    *,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device | str = "cpu",
    amp: torch.dtype | None = None,
    progress: Progress | None = None,
) -> VideoAccuracy:
    """Evaluate the compact version of a model.

    Args:
        model: Model, not modified.
        clips: Items `{"clip", "label", "video"}`.
        batch_size: Clips of a batch.
        workers: Processes that load clips.
        device: Device of the evaluation.
        amp: Dtype of autocast; None disables it.
        progress: Called after each batch.
    """
    device = torch.device(device)
    compacted = compact(model).to(device)
    num_clips = len(clips)  # pyright: ignore[reportArgumentType]
    outputs: dict[str, list[torch.Tensor]] = {"logits": [], "label": [], "video": []}
    num_done = 0
    with torch.inference_mode():
        for batch in load_batches(clips, np.arange(num_clips), batch_size, workers=workers, device=device):
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = compacted(batch["clip"])
            outputs["logits"].append(logits.float().cpu())
            for name in ("label", "video"):
                outputs[name].append(batch[name].cpu())
            num_done += len(batch["label"])
            if progress is not None:
                progress(f"evaluating clips, {num_done} of {num_clips}", num_done / num_clips)
    logits, labels, videos = (torch.cat(outputs[name]) for name in ("logits", "label", "video"))
    scores, indices = _average_by_video(logits, videos)
    video_labels = torch.zeros(int(indices.max()) + 1, dtype=torch.int64).scatter(0, videos, labels)[indices]
    is_correct = scores.topk(min(5, scores.shape[1]), dim=1).indices == video_labels[:, None]
    return VideoAccuracy(
        clip_top1=float((logits.argmax(1) == labels).float().mean()),
        video_top1=float(is_correct[:, 0].float().mean()),
        video_top5=float(is_correct.any(1).float().mean()),
        loss=float(torch.nn.functional.cross_entropy(logits, labels)),
        correct=is_correct[:, 0].numpy(),
    )


def _average_by_video(logits: torch.Tensor, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Average the softmax of the clips of each video.

    Args:
        logits: Logits of clips, shape (n, classes).
        video: Video of each clip, int64, shape (n,), in any order.

    Returns:
        Scores, shape (videos, classes), with rows that sum to 1; and the videos, ascending, shape (videos,).
    """
    videos, index, num_clips = torch.unique(video, return_inverse=True, return_counts=True)
    sums = logits.new_zeros(len(videos), logits.shape[1]).index_add_(0, index, logits.softmax(dim=1))
    return sums / num_clips.unsqueeze(1), videos
