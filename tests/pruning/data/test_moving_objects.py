"""Moving objects: the object moves in the label's direction, over backgrounds that move with the camera."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.errors import InputError
from sparseflow.pruning.config import read_config
from sparseflow.pruning.data import moving_objects
from sparseflow.pruning.data.datasets import count_classes, load_video_dataset
from sparseflow.pruning.data.moving_digits import DIRECTIONS
from sparseflow.pruning.data.moving_objects import CLASSES, MovingObjects


def make(**changed: Any) -> MovingObjects:
    return MovingObjects(**{"num_clips": 64, "train": True, "noise": 0.0, "distractors": 0, **changed})


def test_object_moves_in_label_direction() -> None:
    objects = make(speed=3)
    batch = objects.make_batch(range(64))
    steps = batch["corner"].diff(dim=1)
    expected = torch.from_numpy(3 * DIRECTIONS)[batch["label"] % 8][:, None]
    assert torch.equal((steps - expected) % objects.size, torch.zeros_like(steps))


def test_pixels_change_only_where_the_object_is() -> None:
    objects = make(object_size=12)
    batch = objects.make_batch(range(8))
    is_object = objects.find_object_tokens(batch["corner"], 1).view(8, 8, 64, 64)
    clips = batch["clip"][:, :, 0]
    changed = clips[:, 1:] != clips[:, :-1]
    assert changed.any((2, 3)).all()
    assert not (changed & ~(is_object[:, 1:] | is_object[:, :-1])).any()


def test_object_tokens_cover_the_object() -> None:
    objects = make(size=64, object_size=12)
    corners = torch.tensor([[[0, 0], [4, 60]]])
    tokens = objects.find_object_tokens(corners, 8).view(2, 8, 8)
    first, second = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
    first[:2, :2] = True  # the last patch is covered by 4 x 4 of 8 x 8 pixels
    second[:2, 0] = second[:2, 7] = True
    assert torch.equal(tokens[0], first) and torch.equal(tokens[1], second)
    assert torch.equal(objects.find_object_tokens(corners, 8, 2)[0, 0], tokens.any(0).flatten())


@pytest.mark.parametrize("background", moving_objects.BACKGROUNDS)
def test_camera_moves_the_background(background: moving_objects.Background) -> None:
    still, pan, zoom = (
        make(background=background, camera=camera, camera_speed=1.5).make_batch(range(16))["clip"]
        for camera in ("still", "pan", "zoom")
    )
    changed = [(clips[:, 1:] != clips[:, :-1]).float().mean() for clips in (still, pan, zoom)]
    assert changed[0] < 0.2 and min(changed[1:]) > 0.8


def test_training_and_test_clips_share_no_digit_and_no_background() -> None:
    train, test = (moving_objects._load_digits(12, is_train) for is_train in (True, False))
    for digit, images in train.items():
        pairs = np.abs(images[:, None] - test[digit][None]).max((2, 3))
        assert pairs.min() > 0.0
    textures = [moving_objects._load_textures(24, is_train, "cpu") for is_train in (True, False)]
    assert (textures[0] - textures[1]).abs().mean((1, 2)).min() > 0.05
    widths = [
        sum(photo.shape[1] for photo in moving_objects._load_photos(is_train, "cpu"))
        for is_train in (True, False)
    ]
    assert sum(widths) == 2 * 640


def test_clips_depend_on_seed_split_and_index_only() -> None:
    objects = make(camera="mixed", distractors=2, noise=0.1)
    batch = objects.make_batch([5, 9, 5])
    assert torch.equal(batch["clip"][0], batch["clip"][2])
    assert torch.equal(batch["clip"][1], objects[9]["clip"]) and batch["label"][1] == objects[9]["label"]
    fewer = make(camera="mixed", distractors=2, noise=0.1, num_clips=10)
    assert torch.equal(fewer[9]["clip"], batch["clip"][1])
    for other in (make(camera="mixed", distractors=2, noise=0.1, seed=1), make(camera="mixed", train=False)):
        assert not torch.equal(other[5]["clip"], batch["clip"][0])
    assert set(make(num_clips=400).make_batch(range(400))["label"].tolist()) == set(range(len(CLASSES)))


def test_invalid_arguments_are_named() -> None:
    for name, value in (
        ("camera", "shake"), ("background", "none"), ("object_size", 4), ("speed", 32), ("camera_speed", 5.0),
        ("distractors", -1), ("noise", -0.1), ("num_frames", 1),
    ):  # fmt: skip
        with pytest.raises(InputError, match=name):
            make(**{name: value})
    with pytest.raises(IndexError, match="clip 64 does not exist"):
        make()[64]


def test_shipped_configuration_reads_moving_objects() -> None:
    changes = {"data.train_clips": 4, "data.test_clips": 2, "data.camera": "zoom", "train.epochs": 2}
    config = read_config("moving_objects", changes)
    data = load_video_dataset(config)
    assert (len(data.train), len(data.test)) == (8, 2)  # pyright: ignore[reportArgumentType]
    assert count_classes(config.data) == (len(data.classes), data.num_channels) == (32, 1)
    assert data.train[0]["clip"].shape == config.build_model(32, 1).config.clip_shape
