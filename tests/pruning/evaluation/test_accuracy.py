"""Accuracy over clips and videos."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.pruning.data.datasets import load_video_dataset
from sparseflow.pruning.evaluation.accuracy import _average_by_video, evaluate_accuracy
from tests.pruning.small import quick


def test_accuracy_matches_logits() -> None:
    settings = quick(mode="dense", model={"drop_rate": 0.0})
    torch.manual_seed(0)
    model, data = settings.build_model(8, 1).eval(), load_video_dataset(settings)
    loaded = evaluate_accuracy(model, data.test, batch_size=7)
    items = [data.test[index] for index in range(20)]
    with torch.no_grad():
        logits = model(torch.stack([item["clip"] for item in items]))
    labels = torch.tensor([item["label"] for item in items])
    right = logits.argmax(1) == labels
    assert loaded.clip_top1 == loaded.video_top1 == pytest.approx(float(right.float().mean()))
    assert loaded.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert loaded.correct.tolist() == right.tolist()


def test_average_by_video_averages_clips() -> None:
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    video = torch.tensor([9, 2, 9, 2, 2, 5, 9])
    scores, videos = _average_by_video(logits, video)
    assert videos.tolist() == [2, 5, 9]
    for score, number in zip(scores, videos, strict=True):
        torch.testing.assert_close(score, logits[video == number].softmax(1).mean(0))
    torch.testing.assert_close(scores.sum(1), torch.ones(3, dtype=torch.float64))
