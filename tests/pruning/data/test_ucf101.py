"""Clips of UCF-101 on a generated tree of videos: windows, frames and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.cache import build_cache
from sparseflow.pruning.data.clips import VideoClips
from sparseflow.pruning.data.sampling import MEAN, STD
from sparseflow.pruning.data.splits import read_split
from tests.pruning.data.tree import Tree, name_of, numbers_of, write_frames

SIZE = 42
"""Center crops of 42 of 48 lines are not resized."""


def open_set(tree: Tree, **changed: Any) -> VideoClips:
    split = read_split(tree.lists, changed.pop("split", 1))
    arguments = {"videos_dir": tree.videos, "train": False, "size": SIZE}
    return VideoClips(split=split, **{**arguments, **changed})


def read_frame_numbers(item: dict[str, Any]) -> list[int]:
    """Numbers of the frames of a test clip."""
    pixels = (item["clip"] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)) * 255
    return numbers_of(pixels.permute(0, 2, 3, 1).round().clamp(0, 255).byte().numpy())


def frame_indices(dataset: VideoClips, index: int) -> list[int]:
    """Frames of an item in the current epoch."""
    return dataset._select_frames(dataset.get_window(index), dataset._make_generator(index)).tolist()


def clips_of(frames: int) -> int:
    """Number of windows of 8 frames with stride 4 and of 16 frames with stride 8."""
    return max(0, (frames - 8) // 4) + 1 + max(0, (frames - 16) // 8) + 1


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_clips_cover_all_windows(tree: Tree, split: int, train: bool) -> None:
    dataset = open_set(tree, split=split, train=train)
    listed = read_split(tree.lists, split)
    assert dataset.entries == (listed.train if train else listed.test)
    assert dataset.classes == listed.classes
    expected = [clips_of(tree.frames[entry.video]) for entry in dataset.entries]
    videos = [dataset.get_window(index).video for index in range(len(dataset))]
    assert [videos.count(video) for video in range(len(expected))] == expected
    assert len(dataset) == sum(expected) and dataset.skipped == {}


def test_clip_has_frames_of_its_window(tree: Tree) -> None:
    dataset = open_set(tree)
    # Archery's g01_c01 has 15 frames, g01_c02 18 and g02_c01 22.
    assert [entry.video for entry in dataset.entries[:3]] == [
        name_of(0, 1, 1),
        name_of(0, 1, 2),
        name_of(0, 2, 1),
    ]
    assert [tree.frames[entry.video] for entry in dataset.entries[:3]] == [15, 18, 22]
    expected = [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [4, 5, 6, 7, 8, 9, 10, 11],
        [0, 2, 4, 6, 8, 10, 12, 14],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [4, 5, 6, 7, 8, 9, 10, 11],
        [8, 9, 10, 11, 12, 13, 14, 15],
        [0, 2, 4, 6, 8, 10, 12, 15],
    ]
    for index, numbers in enumerate(expected):
        item = dataset[index]
        assert read_frame_numbers(item) == numbers == frame_indices(dataset, index)
        assert (item["label"], item["video"]) == (0, int(index >= 3))
        assert item["clip"].shape == (8, 3, SIZE, SIZE) and item["clip"].dtype == torch.float32


def test_a_short_video_repeats_its_last_frame(tree: Tree) -> None:
    dataset = open_set(tree, train=True)
    short = next(
        index
        for index in range(len(dataset))
        if tree.frames[dataset.entries[dataset.get_window(index).video].video] < 8
    )
    frames = tree.frames[dataset.entries[dataset.get_window(short).video].video]
    plain = open_set(tree, train=True)
    plain.augment = False
    assert read_frame_numbers(plain[short]) == [min(frame, frames - 1) for frame in range(8)]
    assert frame_indices(dataset, short) == frame_indices(plain, short)


def test_training_shifts_windows_and_crops(tree: Tree) -> None:
    dataset, plain = open_set(tree, train=True), open_set(tree, train=True)
    plain.augment = False
    starts = {epoch: [] for epoch in range(4)}
    for epoch, epoch_starts in starts.items():
        dataset.set_epoch(epoch)
        epoch_starts.extend(frame_indices(dataset, index)[0] for index in range(len(dataset)))
    assert len({tuple(epoch_starts) for epoch_starts in starts.values()}) == len(starts)
    for epoch_starts in starts.values():
        for index, start in enumerate(epoch_starts):
            clip = plain.get_window(index)
            frames = tree.frames[plain.entries[clip.video].video]
            assert abs(start - clip.start) <= clip.clip_len // 4
            assert 0 <= start <= max(0, frames - clip.clip_len)


def test_epoch_and_seed_change_augmentation_only(tree: Tree) -> None:
    first, repeated = (open_set(tree, train=True, seed=3) for _ in range(2))
    assert torch.equal(first[5]["clip"], repeated[5]["clip"])
    repeated.set_epoch(1)
    assert not torch.equal(first[5]["clip"], repeated[5]["clip"])
    repeated.set_epoch(0)
    assert torch.equal(first[5]["clip"], repeated[5]["clip"])
    assert not torch.equal(first[5]["clip"], open_set(tree, train=True, seed=4)[5]["clip"])
    test, other = open_set(tree), open_set(tree, seed=4)
    other.set_epoch(7)
    assert torch.equal(test[5]["clip"], other[5]["clip"])


def test_workers_do_not_change_clips(tree: Tree, tmp_path: Path) -> None:
    dataset = open_set(tree, train=True, counts_path=tmp_path / "counts.json")
    plain = open_set(tree, train=True, counts_path=tmp_path / "counts.json")
    loader = DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=True)
    for epoch in (0, 5):
        dataset.set_epoch(epoch)
        plain.set_epoch(epoch)
        for item, expected_item in zip(DataLoader(plain, batch_size=8), loader, strict=True):
            for key in ("clip", "label", "video"):
                assert torch.equal(item[key], expected_item[key])


def test_cache_gives_equal_items(tree: Tree, tmp_path: Path) -> None:
    videos = [(name, tree.videos / f"{name}.avi") for name in tree.frames]
    build_cache(videos, tmp_path, size=None)
    for train in (True, False):
        direct, cached = (
            open_set(tree, train=train),
            open_set(tree, train=train, videos_dir=None, cache_dir=tmp_path),
        )
        assert len(direct) == len(cached)
        for index in range(0, len(direct), 9):
            assert torch.equal(direct[index]["clip"], cached[index]["clip"])
    missing = tmp_path / f"{read_split(tree.lists, 1).test[0].video}.npy"
    missing.unlink()
    with pytest.raises(FileFormatError, match=missing.name):
        open_set(tree, videos_dir=None, cache_dir=tmp_path)[0]


def test_videos_missing_in_cache_raise_or_are_skipped(own_tree: Tree, tmp_path: Path) -> None:
    test = [entry.video for entry in read_split(own_tree.lists, 1).test]
    (own_tree.videos / f"{test[1]}.avi").write_bytes(b"no video")
    videos = [(name, own_tree.videos / f"{name}.avi") for name in test[:-1]]
    folder = tmp_path / "cache"
    build_cache(videos, folder, size=None, on_error="skip")
    with pytest.raises(InputError, match=f"2 of {len(test)} listed videos"):
        open_set(own_tree, cache_dir=folder)
    dataset = open_set(own_tree, cache_dir=folder, on_error="skip")
    assert set(dataset.skipped) == {test[1], test[-1]}
    assert "does not decode" in dataset.skipped[test[1]] and "not in" in dataset.skipped[test[-1]]


def test_missing_videos_are_listed(own_tree: Tree) -> None:
    test = [entry.video for entry in read_split(own_tree.lists, 1).test]
    for name in test[:4]:
        (own_tree.videos / f"{name}.avi").unlink()
    with pytest.raises(
        InputError, match=rf"4 of {len(test)} listed videos .*{test[0]} \(not in .*{test[2]}.*…"
    ):
        open_set(own_tree)
    dataset = open_set(own_tree, on_error="skip")
    assert set(dataset.skipped) == set(test[:4])
    assert [entry.video for entry in dataset.entries] == test[4:]
    assert dataset[0]["video"] == 0 and dataset[0]["label"] == dataset.entries[0].label


def test_undecodable_video_raises_or_is_skipped(own_tree: Tree, tmp_path: Path) -> None:
    broken = read_split(own_tree.lists, 1).test[1].video
    path = own_tree.videos / f"{broken}.avi"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(FileFormatError, match=path.name):
        open_set(own_tree)
    dataset = open_set(own_tree, on_error="skip", counts_path=tmp_path / "counts.json")
    assert list(dataset.skipped) == [broken] and path.name in dataset.skipped[broken]
    # A video that is damaged later is always an error.
    later = own_tree.videos / f"{dataset.entries[0].video}.avi"
    later.write_bytes(b"no video")
    with pytest.raises(FileFormatError, match=later.name):
        dataset[0]


def test_directories_of_frames_are_videos(own_tree: Tree) -> None:
    name = read_split(own_tree.lists, 1).test[0].video
    (own_tree.videos / f"{name}.avi").unlink()
    write_frames(own_tree.videos / name, 12)
    assert read_frame_numbers(open_set(own_tree)[1]) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_all_videos_skipped_raises(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"all \d+ "):
        open_set(tree, videos_dir=tmp_path, on_error="skip")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"videos_dir": None}, "`videos_dir`.*`cache_dir`"),
        ({"num_frames": 0}, "`num_frames`"),
        ({"size": 0}, "`size`"),
        ({"seed": -1}, "`seed`"),
        ({"clip_lens": ()}, "`clip_lens`"),
        ({"stride_ratio": 2.0}, "`stride_ratio`"),
        ({"on_error": "ignore"}, "`on_error`"),
    ],
)
def test_invalid_arguments_raise(tree: Tree, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_set(tree, **changed)


def test_index_and_epoch_out_of_range_raise(tree: Tree) -> None:
    dataset = open_set(tree)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match="clip"):
            dataset[index]
    with pytest.raises(InputError, match="`epoch`"):
        dataset.set_epoch(-1)
