"""Moving digits: motion follows the label, frames are uninformative, splits are disjoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sparseflow.errors import InputError
from sparseflow.pruning.data.moving_digits import CLASSES, MovingDigits, split_digits

MOVES = {
    "right": (0, 1), "up-right": (-1, 1), "up": (-1, 0), "up-left": (-1, -1),
    "left": (0, -1), "down-left": (1, -1), "down": (1, 0), "down-right": (1, 1),
}  # fmt: skip


def make(**changed: Any) -> MovingDigits:
    return MovingDigits(**{"num_clips": 64, "train": True, **changed})


def draw(digits: MovingDigits, indices: range, label: int) -> torch.Tensor:
    """Clips with another direction and all else equal, [n, T, size, size]."""
    parameters, generators = digits._sample_parameters(indices)
    labels = np.full_like(parameters.labels, label)
    return torch.from_numpy(digits._draw_clips(replace(parameters, labels=labels), generators))


@pytest.mark.parametrize("label", range(len(CLASSES)))
@pytest.mark.parametrize("speed", [1, 2, 5])
def test_digit_moves_in_label_direction(label: int, speed: int) -> None:
    bare = make(noise=0.0, clutter=0, speed=speed)
    down, right = MOVES[CLASSES[label]]
    clips = draw(bare, range(16), label)
    for frame in range(bare.num_frames):
        shift = (speed * frame * down, speed * frame * right)
        assert torch.equal(clips[:, frame], clips[:, 0].roll(shift, (1, 2)))
    digits = make(noise=0.0, speed=speed)
    still = torch.from_numpy(digits._draw_clutter(digits._sample_parameters(range(4))[0]))
    # Clutter is sampled after the digit, so that the digit is the same without it.
    assert torch.equal(draw(digits, range(4), label), torch.maximum(clips[:4], still[:, None]))


def test_single_frame_is_independent_of_label() -> None:
    digits = make(noise=0.1)
    first = [draw(digits, range(32), label)[:, 0] for label in range(len(CLASSES))]
    for other in first[1:]:
        assert torch.equal(first[0], other)


def test_digit_position_is_uniform_in_every_frame() -> None:
    digits = make(num_clips=4096, size=16, speed=1, num_frames=4)
    parameters, _ = digits._sample_parameters(range(4096))
    for frame in (0, 3):
        rows, cols = (
            part[:, frame].reshape(4096, -1)[:, 0] for part in digits._index_digit_pixels(parameters)[2:]
        )
        cells = np.bincount(rows * 16 + cols, minlength=256)
        # Chi-squared of 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert ((cells - 16.0) ** 2 / 16).sum() < 255 + 5 * 22.6


def test_labels_are_balanced_and_independent_of_digits() -> None:
    parameters, _ = make(num_clips=8000)._sample_parameters(range(8000))
    table = np.zeros((len(CLASSES), 2))
    np.add.at(table, (parameters.labels, parameters.digits % 2), 1)
    assert ((table - 500) ** 2 / 500).sum() < 15 + 5 * 30**0.5


def test_train_and_test_digits_are_disjoint() -> None:
    train, test = split_digits(train=True), split_digits(train=False)
    assert (len(train), len(test)) == (1438, 359)
    assert sorted([*train, *test]) == list(range(1797))
    for seed in (0, 1):
        np.testing.assert_array_equal(make(seed=seed).source_digits, train)
        np.testing.assert_array_equal(make(seed=seed, train=False).source_digits, test)


def test_items_depend_on_seed_split_and_index_only() -> None:
    digits = make()
    batch = digits.make_batch([5, 3, 60])
    for number, index in enumerate([5, 3, 60]):
        item = make(num_clips=1000)[index]
        assert torch.equal(item["clip"], batch["clip"][number])
        assert (item["label"], item["video"]) == (int(batch["label"][number]), index)
    for other in (make(seed=1), make(train=False)):
        assert not torch.equal(other[5]["clip"], batch["clip"][0])
    assert not torch.equal(batch["clip"][0], batch["clip"][1])


def test_shapes_and_values() -> None:
    item = make(num_frames=5, size=24, noise=0.0)[0]
    assert item["clip"].shape == (5, 1, 24, 24) and item["clip"].dtype == torch.float32
    assert float(item["clip"].min()) == 0.0 and 0.5 < float(item["clip"].max()) <= 1.0
    noisy, quiet = make(noise=0.1).make_batch(range(9))["clip"], make(noise=0.0).make_batch(range(9))["clip"]
    assert abs(float((noisy - quiet).std()) - 0.1) < 0.002 and abs(float((noisy - quiet).mean())) < 0.002


def test_data_loader_equals_make_batch() -> None:
    digits = make()
    expected = digits.make_batch(range(64))
    for workers in (0, 2):
        loaded = list(DataLoader(digits, batch_size=16, num_workers=workers))
        for key in ("clip", "label", "video"):
            assert torch.equal(torch.cat([batch[key] for batch in loaded]), expected[key])


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_clips": 0}, "num_clips"),
        ({"num_frames": 1}, "num_frames"),
        ({"size": 15}, "size"),
        ({"speed": 0}, "speed"),
        ({"speed": 16}, "speed"),
        ({"clutter": -1}, "clutter"),
        ({"noise": -0.1}, "noise"),
        ({"noise": float("nan")}, "noise"),
        ({"seed": -1}, "seed"),
    ],
)
def test_invalid_arguments_raise(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"`{name}`"):
        make(**changed)


def test_invalid_indices_raise() -> None:
    for index in (-1, 64):
        with pytest.raises(IndexError, match="clip"):
            make()[index]
