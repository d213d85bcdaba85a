"""Shots: cuts, decoding once, the split into training and test, and errors of videos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("av")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.shots import Shot, find_cuts, list_videos, read_shots, split_shots
from tests.pruning.data.tree import write_video


def pan(num_frames: int, seed: int, *, step: int = 2) -> torch.Tensor:
    """A camera that pans over random blocks, uint8, [num_frames, 3, 32, 40]."""
    blocks = np.random.default_rng(seed).integers(0, 256, (3, 4, 40), dtype=np.uint8)
    scene = torch.from_numpy(blocks.repeat(8, 1).repeat(8, 2))
    return torch.stack([scene[:, :, step * frame : step * frame + 40] for frame in range(num_frames)])


def shot(name: str, num_frames: int = 10) -> Shot:
    return Shot(path=Path(name), frames=torch.zeros(num_frames, 3, 1, 1, dtype=torch.uint8))


def test_cuts_are_found_between_moving_scenes() -> None:
    assert find_cuts(torch.cat([pan(20, 0), pan(15, 1), pan(12, 2)])) == [20, 35]
    assert find_cuts(torch.cat([pan(1, 0), pan(1, 1)])) == [1]


@pytest.mark.parametrize("step", [0, 1, 4, 8])
def test_motion_is_no_cut(step: int) -> None:
    assert find_cuts(pan(30, 0, step=step)) == []


def test_noise_is_no_cut() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 3, 32, 40), dtype=np.uint8)
    assert find_cuts(torch.from_numpy(noise)) == []


def test_videos_of_directory_are_listed(tmp_path: Path) -> None:
    for name in ("b.MP4", "deep/er/a.avi", ".hidden/c.mp4", "._b.mp4", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"video")
    files = [tmp_path / "b.MP4", tmp_path / "deep" / "er" / "a.avi"]
    assert list_videos([tmp_path]) == list_videos([*files, tmp_path / "deep"]) == files
    with pytest.raises(InputError, match=r"absent\.mp4 does not exist"):
        list_videos([tmp_path / "absent.mp4"])
    with pytest.raises(InputError, match="hidden has no videos"):
        (tmp_path / ".hidden" / "c.mp4").rename(tmp_path / "hidden.mp4")
        list_videos([tmp_path / ".hidden"])


def test_video_is_decoded_once(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.avi", 12)
    (first,), (second,) = (read_shots([path], size=24, min_frames=8) for _ in range(2))
    assert first.frames.shape == (12, 3, 24, 32) and first.frames.dtype == torch.uint8
    assert first.frames.data_ptr() == second.frames.data_ptr()
    write_video(path, 14)
    assert len(read_shots([path], size=24, min_frames=8)[0].frames) == 14


def test_short_and_damaged_videos_raise_or_are_skipped(tmp_path: Path) -> None:
    long, short = write_video(tmp_path / "long.avi", 20), write_video(tmp_path / "short.avi", 9)
    damaged = tmp_path / "damaged.avi"
    damaged.write_bytes(long.read_bytes()[:3000])
    with pytest.raises(InputError, match=r"short\.avi has 9 frames, and a clip needs 10"):
        read_shots([long, short], size=24, min_frames=10)
    with pytest.raises(FileFormatError, match=r"damaged\.avi"):
        read_shots([long, damaged], size=24, min_frames=10)
    shots = read_shots([short, long, damaged], size=24, min_frames=10, on_error="skip")
    assert [shot.path for shot in shots] == [long]
    with pytest.raises(InputError, match=r"all 2 videos were skipped: .*short\.avi"):
        read_shots([short, damaged], size=24, min_frames=10, on_error="skip")


def test_split_separates_videos() -> None:
    shots = [shot(name) for name in "aabbbcdde"]
    splits = [split_shots(shots, 0.4, seed) for seed in (0, 0, 1, 2)]
    for train, test in splits:
        names = [{str(shot.path) for shot in part} for part in (train, test)]
        assert (len(names[0]), len(names[1])) == (3, 2) and not names[0] & names[1]
        assert len(train) + len(test) == len(shots)
    assert splits[0] == splits[1] and splits[0] != splits[2]
    assert len(split_shots(shots[:3], 0.01, 0)[1]) >= 1 and len(split_shots(shots[:3], 0.99, 0)[0]) >= 1


def test_split_of_one_video_separates_its_shots() -> None:
    shots = [shot("a") for _ in range(4)]
    train, test = split_shots(shots, 0.25, 0)
    assert (len(train), len(test)) == (3, 1) and test[0] not in train
    with pytest.raises(InputError, match="a has one shot"):
        split_shots(shots[:1], 0.25, 0)
