"""Accuracy on clips and on videos, by the compact model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.data.datasets import batches
from sparseflow.pruning.data.ucf101 import video_average
from sparseflow.pruning.model.video_vit import VideoViT


@dataclass(frozen=True, kw_only=True, eq=False)
class Accuracy:
    """What a model got right.

    Attributes:
        clip_top1: Share of clips.
        video_top1: Share of videos, by the mean of their clips' probabilities.
        video_top5: Share of videos whose class is among the five most probable.
        loss: Mean cross-entropy of clips.
        right: A video -> whether its class was the most probable, bool, (videos,), ascending.
    """

    clip_top1: float
    video_top1: float
    video_top5: float
    loss: float
    right: np.ndarray

    def to_dict(self) -> dict[str, float]:
        """The shares and the loss."""
        return {name: getattr(self, name) for name in ("clip_top1", "video_top1", "video_top5", "loss")}


def evaluate(
    model: VideoViT,
    clips: Dataset[dict[str, Any]],
    *,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device | str = "cpu",
    amp: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Accuracy:
    """Judge a model; what it prunes is gone meanwhile, as it will be in use.

    Args:
        model: Left as it is.
        clips: Items `{"clip", "label", "video"}`.
        batch_size: Clips of a call.
        workers: Processes that load clips.
        device: Where to compute.
        amp: Dtype of autocast; None for none.
        progress: Called with (clips judged, clips).
    """
    device = torch.device(device)
    ready = compact(model).to(device)
    count = len(clips)  # pyright: ignore[reportArgumentType]
    found: dict[str, list[torch.Tensor]] = {"logits": [], "label": [], "video": []}
    done = 0
    with torch.inference_mode():
        for batch in batches(clips, np.arange(count), batch_size, workers=workers, device=device):
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = ready(batch["clip"])
            found["logits"].append(logits.float().cpu())
            for name in ("label", "video"):
                found[name].append(batch[name].cpu())
            done += len(batch["label"])
            if progress is not None:
                progress(done, count)
    logits, labels, videos = (torch.cat(found[name]) for name in ("logits", "label", "video"))
    scores, names = video_average(logits, videos)
    first = torch.zeros(int(names.max()) + 1, dtype=torch.int64).scatter(0, videos, labels)
    wanted = first[names]
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == wanted[:, None]
    return Accuracy(
        clip_top1=float((logits.argmax(1) == labels).float().mean()),
        video_top1=float(best[:, 0].float().mean()),
        video_top5=float(best.any(1).float().mean()),
        loss=float(torch.nn.functional.cross_entropy(logits, labels)),
        right=best[:, 0].numpy(),
    )
