"""Video files in tar files, read in place, and errors of other tar files."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.decoding.file_range import find_file_range, list_members
from sparseflow.pruning.data.frame_counts import count_frames
from sparseflow.pruning.data.video import find_video, open_video
from tests.pruning.data.tree import decode, numbers_of, write_video

FRAMES = 20


def pack(path: Path, files: dict[str, Path], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, file in files.items():
            tar.add(file, name)
    return path


@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv"])
def test_members_are_read_in_place(tmp_path: Path, suffix: str) -> None:
    file = write_video(tmp_path / f"video{suffix}", FRAMES)
    other = write_video(tmp_path / "other.avi", 3)
    tar = pack(tmp_path / "a:b.tar", {"./first.avi": other, f"clips/one{suffix}": file})
    member = tar / "clips" / f"one{suffix}"
    np.testing.assert_array_equal(decode(member), decode(file))
    assert numbers_of(open_video(member, frames=FRAMES).read([15, 3])) == [15, 3]
    assert find_video(tmp_path, f"a:b.tar/clips/one{suffix}") == member
    assert count_frames([("first", tar / "first.avi"), ("one", member)]).frames == {"first": 3, "one": FRAMES}
    assert find_video(tmp_path, "a:b.tar/absent.avi") is None
    with pytest.raises(InputError, match=r"absent\.avi"):
        open_video(tar / "absent.avi")


def test_replaced_tar_file_is_listed_again(tmp_path: Path) -> None:
    video = write_video(tmp_path / "video.avi", 3)
    tar = pack(tmp_path / "shard.tar", {"a.avi": video})
    assert list(list_members(tar)) == ["a.avi"]
    pack(tar, {"a.avi": video, "b.avi": video})
    assert list(list_members(tar)) == ["a.avi", "b.avi"]


def test_damaged_tar_files_raise(tmp_path: Path) -> None:
    video = write_video(tmp_path / "video.avi", 9)
    truncated = pack(tmp_path / "truncated.tar", {"a.avi": video})
    os.truncate(truncated, 2048)
    compressed = pack(tmp_path / "compressed.tar", {"a.avi": video}, "w:gz")
    for path, message in (
        (truncated, r"truncated\.tar is truncated in a\.avi"),
        (compressed, "uncompressed"),
    ):
        with pytest.raises(FileFormatError, match=message):
            find_file_range(path / "a.avi")
        with pytest.raises(FileFormatError, match=message):
            count_frames([("a", path / "a.avi")])
        counts = count_frames([("a", path / "a.avi")], on_error="skip")
        assert list(counts.skipped) == ["a"]
