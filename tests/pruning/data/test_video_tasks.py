"""Tasks of unlabeled videos: frames of each class, crops, seeds and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("av")

from sparseflow.errors import InputError
from sparseflow.pruning.config import PruningConfig, parse_config
from sparseflow.pruning.data.datasets import count_classes, load_batches, load_video_dataset
from sparseflow.pruning.data.sampling import MEAN, STD
from sparseflow.pruning.data.shots import Shot
from sparseflow.pruning.data.video_tasks import VIDEO_TASKS, Task, VideoTaskClips
from tests.pruning.data.tree import write_video
from tests.pruning.small import QUICK

HEIGHT, WIDTH, SIZE = 9, 14, 8


def make_shot(first: int, num_frames: int) -> Shot:
    """Frames whose three channels are the row, the column and the number from `first`."""
    channels = np.meshgrid(
        np.arange(first, first + num_frames), np.arange(HEIGHT), np.arange(WIDTH), indexing="ij"
    )
    frames = np.stack([channels[1], channels[2], channels[0]], 1).astype(np.uint8)
    return Shot(path=Path("a.mp4"), frames=torch.from_numpy(frames))


def make(task: Any, **changed: Any) -> VideoTaskClips:
    settings = {"shots": [make_shot(0, 60)], "num_clips": 200, "train": False, "num_frames": 6, "size": SIZE}
    return VIDEO_TASKS[task](**settings | changed)


def decode(clips: torch.Tensor) -> np.ndarray:
    """Rows, columns and numbers of normalized clips, int64, [n, T, 3, SIZE, SIZE]."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (255 * (clips * std + mean)).round().long().numpy()


def numbers_of(clips: torch.Tensor) -> np.ndarray:
    """Numbers of the frames, [n, T]."""
    return decode(clips)[:, :, 2, 0, 0]


@pytest.mark.parametrize("stride", [1, 2])
def test_frames_follow_label(stride: int) -> None:
    steps = stride * np.arange(6)
    expected: dict[Task, list[np.ndarray]] = {
        "direction": [steps, steps[::-1]],
        "speed": [steps, 2 * steps, 4 * steps],
        "order": [
            stride * np.array(order)
            for order in (
                [0, 1, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3], [2, 3, 0, 1, 4, 5],
                [2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3], [4, 5, 2, 3, 0, 1],
            )
        ],
    }  # fmt: skip
    for task, frames in expected.items():
        batch = make(task, stride=stride).make_batch(range(200))
        numbers = numbers_of(batch["clip"])
        relative = numbers - numbers.min(1, keepdims=True)
        assert np.array_equal(relative, np.stack(frames)[batch["label"]]), task
        assert set(batch["label"].tolist()) == set(range(len(VIDEO_TASKS[task].classes)))


def test_center_of_clip_is_independent_of_speed() -> None:
    for num_frames in (5, 6):
        offsets = VIDEO_TASKS["speed"].list_offsets(num_frames, 2)
        assert np.ptp(offsets[:, [0, -1]].sum(1)) <= 1
        assert (
            offsets.min() == 0
            and offsets.max() == VIDEO_TASKS["speed"].count_window_frames(num_frames, 2) - 1
        )


def test_clips_stay_in_shots_and_reach_their_ends() -> None:
    clips = make("direction", shots=[make_shot(10, 6), make_shot(100, 20)], num_clips=500)
    numbers = numbers_of(clips.make_batch(range(500))["clip"])
    first = numbers.min(1)
    assert set(first.tolist()) == {10, *range(100, 115)}
    assert np.array_equal(numbers.max(1), first + 5)


def test_test_clips_are_centered_and_training_clips_random() -> None:
    rows, columns = np.arange(SIZE)[:, None], np.arange(3, 3 + SIZE)
    pixels = decode(make("order").make_batch(range(8))["clip"])
    assert (pixels[:, :, 0] == rows).all() and (pixels[:, :, 1] == columns).all()
    pixels = decode(make("order", train=True).make_batch(range(200))["clip"])
    assert (pixels[:, :, :2] == pixels[:, :1, :2]).all()  # all frames of a clip are cropped alike
    corners = {tuple(clip[:2, 0, 0].tolist()) for clip in pixels[:, 0]}
    last = WIDTH - SIZE
    assert corners == {
        (row, column + flip * (SIZE - 1)) for row in (0, 1) for column in range(last + 1) for flip in (0, 1)
    }


def test_clips_depend_on_seed_split_and_index_only() -> None:
    clips = make("speed", train=True)
    batch = clips.make_batch([7, 3])
    assert torch.equal(clips[3]["clip"], batch["clip"][1]) and clips[3]["video"] == 3
    assert torch.equal(make("speed", train=True, num_clips=4)[3]["clip"], batch["clip"][1])
    assert not torch.equal(make("speed", train=True, seed=1)[3]["clip"], batch["clip"][1])
    with pytest.raises(IndexError, match="clip 200"):
        clips.make_batch([200])


def test_subtracted_mean_leaves_changes() -> None:
    clip, changes = (make("order", subtract_mean=subtract)[0]["clip"] for subtract in (False, True))
    assert (changes[:, :2].abs() < 1e-5).all() and changes[
        :, 2
    ].std() > 0  # the rows and columns do not change
    torch.testing.assert_close(changes, clip - clip.mean(0))


def configure(data: dict[str, Any], **model: Any) -> PruningConfig:
    model = {**QUICK["model"], "num_frames": 3, "tubelet_size": 1, **model}
    settings = {"kind": "video_tasks", "train_clips": 16, "test_clips": 12, **data}
    return parse_config(QUICK | {"model": model, "data": settings})


def test_configuration_is_loaded(tmp_path: Path) -> None:
    for name, num_frames in (("a", 12), ("b", 10), ("c", 14)):
        write_video(tmp_path / f"{name}.avi", num_frames)
    config = configure({"task": "speed", "videos": str(tmp_path), "test": str(tmp_path / "b.avi")})
    data = load_video_dataset(config)
    assert isinstance(data.train, VideoTaskClips) and isinstance(data.test, VideoTaskClips)
    assert [shot.path.name for shot in data.train.shots] == ["a.avi", "c.avi"]
    assert [shot.path.name for shot in data.test.shots] == ["b.avi"]
    assert (len(data.train), len(data.test), data.epoch_clips) == (32, 12, 16)
    assert (data.classes, data.num_channels) == (("1x", "2x", "4x"), 3)
    assert count_classes(config.data) == (3, 3)
    loaded = list(load_batches(data.test, np.arange(12), 8, workers=1, device=torch.device("cpu")))
    assert [batch["clip"].shape for batch in loaded] == [(8, 3, 3, 16, 16), (4, 3, 3, 16, 16)]
    assert torch.equal(loaded[0]["clip"][5], data.test[5]["clip"])


def test_unusable_configurations_raise(tmp_path: Path) -> None:
    path = str(write_video(tmp_path / "a.avi", 8))
    for settings, message in (
        ({"task": "speed", "videos": path}, r"has 8 frames, and a clip needs 9"),
        ({"task": "direction", "videos": path, "stride": 4}, r"has 8 frames, and a clip needs 9"),
        ({"task": "direction", "videos": path}, "leaves none for the test"),
        ({"task": "direction", "videos": path, "test": str(tmp_path)}, "also in `test`"),
        ({"task": "direction", "videos": path, "test": [str(tmp_path / "b")]}, "does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            load_video_dataset(configure(settings))
    with pytest.raises(InputError, match=r"`num_frames` \(=8\) must be divisible by 3"):
        load_video_dataset(configure({"task": "order", "videos": path}, num_frames=8))
