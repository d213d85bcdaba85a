"""UCF-101 on a tree of real videos: which clips there are, which frames they show, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.cache import build_cache
from sparseflow.pruning.data.sampling import MEAN, STD
from sparseflow.pruning.data.splits import read_split
from sparseflow.pruning.data.ucf101 import UCF101, video_average
from tests.pruning.data.tree import Tree, name_of, numbers_of, write_frames

SIZE = 42
"""Of 48 lines 42 are the middle: test clips are cut from frames that are not resized."""


def open_set(tree: Tree, **changed: Any) -> UCF101:
    arguments = {"lists": tree.lists, "videos": tree.videos, "split": 1, "train": False, "size": SIZE}
    return UCF101(**{**arguments, **changed})


def shown(item: dict[str, Any]) -> list[int]:
    """The numbers of the frames of a test clip."""
    pixels = (item["clip"] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)) * 255
    return numbers_of(pixels.permute(0, 2, 3, 1).round().clamp(0, 255).byte().numpy())


def clips_of(frames: int) -> int:
    """Windows of 8 every 4 and of 16 every 8."""
    return max(0, (frames - 8) // 4) + 1 + max(0, (frames - 16) // 8) + 1


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_every_window_of_every_listed_video_is_a_clip(tree: Tree, split: int, train: bool) -> None:
    found = open_set(tree, split=split, train=train)
    listed = read_split(tree.lists, split)
    assert found.entries == (listed.train if train else listed.test)
    assert found.classes == listed.classes
    expected = [clips_of(tree.frames[entry.video]) for entry in found.entries]
    videos = [found.clip(index).video for index in range(len(found))]
    assert [videos.count(video) for video in range(len(expected))] == expected
    assert len(found) == sum(expected) and found.skipped == {}


def test_a_clip_shows_the_frames_of_its_window(tree: Tree) -> None:
    found = open_set(tree)
    # By hand: Archery's g01_c01 has 15 frames, its g02_c01 has 22; g01_c02 (18) stands between them.
    assert [entry.video for entry in found.entries[:3]] == [
        name_of(0, 1, 1),
        name_of(0, 1, 2),
        name_of(0, 2, 1),
    ]
    assert [tree.frames[entry.video] for entry in found.entries[:3]] == [15, 18, 22]
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
        item = found[index]
        assert shown(item) == numbers == found.indices(index).tolist()
        assert (item["label"], item["video"]) == (0, int(index >= 3))
        assert item["clip"].shape == (8, 3, SIZE, SIZE) and item["clip"].dtype == torch.float32


def test_a_short_video_repeats_its_last_frame(tree: Tree) -> None:
    found = open_set(tree, train=True)
    short = next(
        index for index in range(len(found)) if tree.frames[found.entries[found.clip(index).video].video] < 8
    )
    frames = tree.frames[found.entries[found.clip(short).video].video]
    plain = open_set(tree, train=True, augment=False)
    assert shown(plain[short]) == [min(place, frames - 1) for place in range(8)]
    assert found.indices(short).tolist() == plain.indices(short).tolist()


def test_training_shifts_windows_and_crops(tree: Tree) -> None:
    found, plain = open_set(tree, train=True), open_set(tree, train=True, augment=False)
    starts = {epoch: [] for epoch in range(4)}
    for epoch, some in starts.items():
        found.set_epoch(epoch)
        some.extend(int(found.indices(index)[0]) for index in range(len(found)))
    assert len({tuple(some) for some in starts.values()}) == len(starts)
    for some in starts.values():
        for index, start in enumerate(some):
            clip = plain.clip(index)
            frames = tree.frames[plain.entries[clip.video].video]
            assert abs(start - clip.start) <= clip.clip_len // 4
            assert 0 <= start <= max(0, frames - clip.clip_len)


def test_epochs_and_seeds_change_what_is_drawn_and_nothing_else_does(tree: Tree) -> None:
    first, again = (open_set(tree, train=True, seed=3) for _ in range(2))
    assert torch.equal(first[5]["clip"], again[5]["clip"])
    again.set_epoch(1)
    assert not torch.equal(first[5]["clip"], again[5]["clip"])
    again.set_epoch(0)
    assert torch.equal(first[5]["clip"], again[5]["clip"])
    assert not torch.equal(first[5]["clip"], open_set(tree, train=True, seed=4)[5]["clip"])
    test, other = open_set(tree), open_set(tree, seed=4)
    other.set_epoch(7)
    assert torch.equal(test[5]["clip"], other[5]["clip"])


def test_workers_change_nothing_and_see_the_epoch(tree: Tree, tmp_path: Path) -> None:
    found = open_set(tree, train=True, counts=tmp_path / "counts.json")
    plain = open_set(tree, train=True, counts=tmp_path / "counts.json")
    loader = DataLoader(found, batch_size=8, num_workers=2, persistent_workers=True)
    for epoch in (0, 5):
        found.set_epoch(epoch)
        plain.set_epoch(epoch)
        for ours, theirs in zip(DataLoader(plain, batch_size=8), loader, strict=True):
            for key in ("clip", "label", "video"):
                assert torch.equal(ours[key], theirs[key])


def test_a_cache_gives_the_same_items(tree: Tree, tmp_path: Path) -> None:
    videos = [(name, tree.videos / f"{name}.avi") for name in tree.frames]
    build_cache(videos, tmp_path, size=None)
    for train in (True, False):
        direct, cached = open_set(tree, train=train), open_set(tree, train=train, videos=None, cache=tmp_path)
        assert len(direct) == len(cached)
        for index in range(0, len(direct), 9):
            assert torch.equal(direct[index]["clip"], cached[index]["clip"])
    missing = tmp_path / f"{read_split(tree.lists, 1).test[0].video}.npy"
    missing.unlink()
    with pytest.raises(FileFormatError, match=missing.name):
        open_set(tree, videos=None, cache=tmp_path)[0]


def test_a_cache_that_lacks_videos_is_raised_or_left_out(own_tree: Tree, tmp_path: Path) -> None:
    test = [entry.video for entry in read_split(own_tree.lists, 1).test]
    (own_tree.videos / f"{test[1]}.avi").write_bytes(b"no video")
    videos = [(name, own_tree.videos / f"{name}.avi") for name in test[:-1]]
    folder = tmp_path / "cache"
    build_cache(videos, folder, size=None, on_error="skip")
    with pytest.raises(InputError, match=f"2 of {len(test)} listed videos cannot be read"):
        open_set(own_tree, cache=folder)
    found = open_set(own_tree, cache=folder, on_error="skip")
    assert set(found.skipped) == {test[1], test[-1]}
    assert "does not decode" in found.skipped[test[1]] and "not in" in found.skipped[test[-1]]


def test_missing_videos_are_counted_and_named(own_tree: Tree) -> None:
    test = [entry.video for entry in read_split(own_tree.lists, 1).test]
    for name in test[:4]:
        (own_tree.videos / f"{name}.avi").unlink()
    with pytest.raises(
        InputError, match=rf"4 of {len(test)} listed videos .*{test[0]} \(not in .*{test[2]}.*…"
    ):
        open_set(own_tree)
    found = open_set(own_tree, on_error="skip")
    assert set(found.skipped) == set(test[:4])
    assert [entry.video for entry in found.entries] == test[4:]
    assert found[0]["video"] == 0 and found[0]["label"] == found.entries[0].label


def test_a_video_that_does_not_decode_is_raised_or_left_out(own_tree: Tree, tmp_path: Path) -> None:
    broken = read_split(own_tree.lists, 1).test[1].video
    path = own_tree.videos / f"{broken}.avi"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(FileFormatError, match=path.name):
        open_set(own_tree)
    found = open_set(own_tree, on_error="skip", counts=tmp_path / "counts.json")
    assert list(found.skipped) == [broken] and path.name in found.skipped[broken]
    # One that breaks later is an error whatever was asked for.
    later = own_tree.videos / f"{found.entries[0].video}.avi"
    later.write_bytes(b"no video")
    with pytest.raises(FileFormatError, match=later.name):
        found[0]


def test_folders_of_frames_are_videos(own_tree: Tree) -> None:
    name = read_split(own_tree.lists, 1).test[0].video
    (own_tree.videos / f"{name}.avi").unlink()
    write_frames(own_tree.videos / name, 12)
    assert shown(open_set(own_tree)[1]) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_when_nothing_is_left_it_says_so(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"all \d+ videos of the list were left out"):
        open_set(tree, videos=tmp_path, on_error="skip")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"videos": None}, "name the folder of `videos`, or a `cache`"),
        ({"split": 4}, "`split`"),
        ({"num_frames": 0}, "`num_frames`"),
        ({"size": 0}, "`size`"),
        ({"seed": -1}, "`seed`"),
        ({"clip_lens": ()}, "`clip_lens`"),
        ({"stride_ratio": 2.0}, "`stride_ratio`"),
        ({"on_error": "ignore"}, "`on_error`"),
    ],
)
def test_wrong_arguments_are_refused(tree: Tree, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_set(tree, **changed)


def test_places_and_epochs_out_of_range_are_refused(tree: Tree) -> None:
    found = open_set(tree)
    for index in (-1, len(found)):
        with pytest.raises(IndexError, match="there is no clip"):
            found[index]
    with pytest.raises(InputError, match="`epoch`"):
        found.set_epoch(-1)


def test_a_video_is_the_mean_of_its_clips() -> None:
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    video = torch.tensor([9, 2, 9, 2, 2, 5, 9])
    scores, videos = video_average(logits, video)
    assert videos.tolist() == [2, 5, 9]
    for score, number in zip(scores, videos, strict=True):
        torch.testing.assert_close(score, logits[video == number].softmax(1).mean(0))
    torch.testing.assert_close(scores.sum(1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("logits", "video"),
    [
        (torch.zeros(3), torch.zeros(3).long()),
        (torch.zeros(3, 2), torch.zeros(2).long()),
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2).long(), torch.zeros(3).long()),
    ],
)
def test_scores_of_another_shape_are_refused(logits: torch.Tensor, video: torch.Tensor) -> None:
    with pytest.raises(InputError, match="must be floats"):
        video_average(logits, video)
