"""Data by settings: orders, epochs of their own, and the control without motion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.pruning.data.datasets import batches, data_of
from sparseflow.pruning.evaluation.accuracy import evaluate
from tests.pruning.small import quick


def test_every_epoch_has_clips_of_its_own() -> None:
    data = data_of(quick())
    orders = [data.order(epoch, seed=0) for epoch in range(2)]
    assert sorted(orders[0]) == list(range(48)) and sorted(orders[1]) == list(range(48, 96))
    assert (data.channels, len(data.classes), data.epoch_clips) == (1, 8, 48)
    assert not np.array_equal(orders[0], data.order(0, seed=1))
    assert np.array_equal(orders[0], data.order(0, seed=0))


def test_the_control_shows_one_frame() -> None:
    still, moving = (data_of(quick(data={"frozen": frozen})).test[3] for frozen in (True, False))
    assert torch.equal(still["clip"], still["clip"][:1].expand_as(still["clip"]))
    assert torch.equal(still["clip"][0], moving["clip"][0]) and still["label"] == moving["label"]


def test_batches_come_in_order() -> None:
    data = data_of(quick())
    found = list(batches(data.test, np.arange(20), 8, workers=0, device=torch.device("cpu")))
    assert [len(batch["label"]) for batch in found] == [8, 8, 4]
    assert torch.cat([batch["video"] for batch in found]).tolist() == list(range(20))


def test_accuracy_is_that_of_the_logits() -> None:
    settings = quick(mode="dense", model={"drop_rate": 0.0})
    torch.manual_seed(0)
    model, data = settings.make(8, 1).eval(), data_of(settings)
    found = evaluate(model, data.test, batch_size=7)
    items = [data.test[at] for at in range(20)]
    with torch.no_grad():
        logits = model(torch.stack([item["clip"] for item in items]))
    labels = torch.tensor([item["label"] for item in items])
    right = logits.argmax(1) == labels
    assert found.clip_top1 == found.video_top1 == pytest.approx(float(right.float().mean()))
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert found.right.tolist() == right.tolist()
