"""Datasets of configurations: order, epochs and the control without motion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.pruning.config import parse_config
from sparseflow.pruning.data.clips import VideoClips
from sparseflow.pruning.data.datasets import count_classes, load_batches, load_video_dataset
from tests.pruning.data.tree import CLASSES, Tree
from tests.pruning.small import QUICK, quick


def test_every_epoch_has_new_clips() -> None:
    data = load_video_dataset(quick())
    orders = [data.shuffle_epoch(epoch, seed=0) for epoch in range(2)]
    assert sorted(orders[0]) == list(range(48)) and sorted(orders[1]) == list(range(48, 96))
    assert (data.num_channels, len(data.classes), data.epoch_clips) == (1, 8, 48)
    assert not np.array_equal(orders[0], data.shuffle_epoch(0, seed=1))
    assert np.array_equal(orders[0], data.shuffle_epoch(0, seed=0))


def test_frozen_clips_repeat_first_frame() -> None:
    still, moving = (load_video_dataset(quick(data={"frozen": frozen})).test[3] for frozen in (True, False))
    assert torch.equal(still["clip"], still["clip"][:1].expand_as(still["clip"]))
    assert torch.equal(still["clip"][0], moving["clip"][0]) and still["label"] == moving["label"]


def test_load_batches_keeps_order() -> None:
    data = load_video_dataset(quick())
    loaded = list(load_batches(data.test, np.arange(20), 8, workers=0, device=torch.device("cpu")))
    assert [len(batch["label"]) for batch in loaded] == [8, 8, 4]
    assert torch.cat([batch["video"] for batch in loaded]).tolist() == list(range(20))


def test_video_folder_is_loaded(tree: Tree) -> None:
    data = {"kind": "video_folder", "train": str(tree.videos), "test_fraction": 0.5, "clip_lens": [8]}
    config = parse_config(QUICK | {"data": data})
    loaded = load_video_dataset(config)
    assert loaded.classes == CLASSES and count_classes(config.data) == (3, 3)
    size = config.model.img_size
    for clips in (loaded.train, loaded.test):
        assert isinstance(clips, VideoClips) and {entry.label for entry in clips.entries} == {0, 1, 2}
        assert clips[0]["clip"].shape == (config.model.num_frames, 3, size, size)
    loaded.set_epoch(1)
