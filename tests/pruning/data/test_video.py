"""Videos of both kinds: which frames are read, and what becomes of files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import av
import numpy as np
import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.video import decode, find_video, open_video
from tests.pruning.data.tree import HEIGHT, WIDTH, image_bytes, numbers_of, picture, write_frames, write_video

FRAMES = 30


@pytest.fixture(scope="module", params=[".avi", "mjpeg", ".mp4", ".mkv", ".png", ".jpg"])
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    if request.param in (".png", ".jpg"):
        return write_frames(folder / "frames", FRAMES, suffix=request.param)
    if request.param == "mjpeg":
        return write_video(folder / "video.avi", FRAMES, codec="mjpeg")
    return write_video(folder / f"a:b{request.param}", FRAMES)


def test_frames_are_counted_and_read_in_any_order(video: Path) -> None:
    opened = open_video(video)
    assert opened.frames == FRAMES
    asked = [29, 3, 3, 0, 17]
    read = opened.read(asked)
    assert (read.shape, read.dtype) == ((5, HEIGHT, WIDTH, 3), np.uint8)
    assert numbers_of(read) == asked
    assert numbers_of(open_video(video).read(np.array([28]))) == [28]


def test_all_frames_are_decoded_in_order(video: Path) -> None:
    whole = decode(video)
    assert numbers_of(whole) == list(range(FRAMES))
    np.testing.assert_array_equal(whole, decode(video, threads=2))
    np.testing.assert_array_equal(whole[[4, 9]], open_video(video).read([4, 9]))


def test_colours_are_right(video: Path) -> None:
    # Lossy coding moves them a little; a swapped channel or another range would move them by more.
    found, expected = decode(video)[0, :8, :8].reshape(-1, 3).mean(0), picture(0)[0, 0]
    assert np.abs(found - expected).max() < 6


def test_the_shorter_side_gets_the_size(video: Path) -> None:
    assert decode(video, size=24).shape == (FRAMES, 24, 32, 3)
    assert decode(video, size=96).shape == (FRAMES, 96, 128, 3)


@pytest.mark.parametrize("indices", [[], [-1], [FRAMES], [0.5], [[1]], [True]])
def test_other_frames_cannot_be_read(video: Path, indices: list[int]) -> None:
    with pytest.raises(InputError, match=r"must be|was asked for"):
        open_video(video).read(indices)


def test_a_file_that_ends_before_its_count_is_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.avi", 5)
    with pytest.raises(FileFormatError, match=r"video\.avi ends after 5 frames and 9 had been counted"):
        open_video(path, frames=9).read([7])
    folder = write_frames(tmp_path / "frames", 3)
    assert open_video(folder, frames=3).frames == 3
    with pytest.raises(FileFormatError, match="frames ends after 3 frames and 4 had been counted"):
        open_video(folder, frames=4)


def test_a_video_is_found_in_every_layout(tmp_path: Path) -> None:
    name = "A/v_A_g01_c01"
    assert find_video(tmp_path, name) is None
    flat_folder = tmp_path / "v_A_g01_c01"
    for path, is_folder in (
        (flat_folder, True),
        (tmp_path / "v_A_g01_c01.mp4", False),
        (tmp_path / "A" / "v_A_g01_c01", True),
        (tmp_path / "A" / "v_A_g01_c01.mp4", False),
        (tmp_path / "A" / "v_A_g01_c01.avi", False),
    ):
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if is_folder else path.touch()
        assert find_video(tmp_path, name) == path


def test_nothing_is_no_video(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no video at .*absent\.avi"):
        open_video(tmp_path / "absent.avi")


@pytest.mark.parametrize("content", [b"", b"no video\n" * 99, b"RIFF\xff\x00\x00\x00AVI LIST"])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "video.avi").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"video\.avi"):
        decode(tmp_path / "video.avi")
    with pytest.raises(FileFormatError, match=r"video\.avi"):
        open_video(tmp_path / "video.avi").read([0])


def test_sound_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "sound.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        assert isinstance(stream, av.AudioStream)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(FileFormatError, match=r"sound\.avi has no video in it"):
        decode(path)


def test_a_video_of_no_frames_is_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.avi", 0)
    with pytest.raises(FileFormatError, match=r"video\.avi has a video of no frames"):
        decode(path)


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
@pytest.mark.parametrize("suffix", [".avi", ".mp4"])
def test_a_truncated_file_is_named(tmp_path: Path, codec: str, suffix: str) -> None:
    # The MP4 has its index in front, so that it opens.
    options = {"movflags": "faststart"} if suffix == ".mp4" else None
    path = write_video(tmp_path / f"video{suffix}", FRAMES, codec=codec, options=options)
    whole = path.stat().st_size
    for part in (0.9, 0.7, 0.5):
        os.truncate(path, int(whole * part))
        with pytest.raises(FileFormatError, match=rf"video\{suffix}"):
            decode(path)
        with pytest.raises(FileFormatError, match=rf"video\{suffix}"):
            _ = open_video(path).frames


def test_a_file_cut_between_two_frames_is_truncated(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.avi", FRAMES, codec="mjpeg")
    content = path.read_bytes()
    at = -1
    for _ in range(12):
        at = content.index(b"00dc", at + 1)
    os.truncate(path, at)
    with pytest.raises(FileFormatError, match=rf"video\.avi was truncated: \d+ frames decode of {FRAMES}"):
        decode(path)


def test_damaged_images_are_named(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "frames", 3)
    (folder / "notes.txt").write_text("not a frame")
    assert open_video(folder).frames == 3
    (folder / "frame_2.png").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(FileFormatError, match=r"frame_2\.png does not decode"):
            _ = open_video(folder).frames
        (folder / "frame_2.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    assert numbers_of(open_video(folder).read([2, 0])) == [2, 0]


def test_images_of_two_sizes_are_no_video(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "frames", 2)
    (folder / "frame_2.png").write_bytes(image_bytes(np.zeros((8, 8, 3), np.uint8), ".png"))
    with pytest.raises(FileFormatError, match=r"frame_2\.png is 8 × 8 pixels"):
        decode(folder)


def test_an_empty_folder_is_no_video(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="folder without frames"):
        open_video(tmp_path)


@pytest.mark.parametrize(("size", "threads"), [(0, 1), (None, 0)])
def test_arguments_out_of_range_are_refused(tmp_path: Path, size: int | None, threads: int) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        decode(write_video(tmp_path / "video.avi", 2), size=size, threads=threads)
