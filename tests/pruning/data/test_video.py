"""Decoding of video files and directories of frames, and errors of other files."""

from __future__ import annotations

import os
from pathlib import Path

import av
import numpy as np
import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.video import find_video, open_video
from tests.pruning.data.tree import (
    HEIGHT,
    WIDTH,
    decode,
    image_bytes,
    numbers_of,
    picture,
    write_frames,
    write_video,
)

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
    indices = [29, 3, 3, 0, 17]
    read = opened.read(indices)
    assert (read.shape, read.dtype) == ((5, HEIGHT, WIDTH, 3), np.uint8)
    assert numbers_of(read) == indices
    assert numbers_of(open_video(video).read(np.array([28]))) == [28]


def test_all_frames_are_decoded_in_order(video: Path) -> None:
    frames = decode(video)
    assert numbers_of(frames) == list(range(FRAMES))
    np.testing.assert_array_equal(frames, decode(video, threads=2))
    np.testing.assert_array_equal(frames[[4, 9]], open_video(video).read([4, 9]))


def test_colors_are_rgb(video: Path) -> None:
    # Lossy coding changes colors a little; a swapped channel or another range would change them more.
    color, expected = decode(video)[0, :8, :8].reshape(-1, 3).mean(0), picture(0)[0, 0]
    assert np.abs(color - expected).max() < 6


def test_the_shorter_side_gets_the_size(video: Path) -> None:
    assert decode(video, size=24).shape == (FRAMES, 24, 32, 3)
    assert decode(video, size=96).shape == (FRAMES, 96, 128, 3)


@pytest.mark.parametrize("indices", [[], [-1], [FRAMES], [0.5], [[1]], [True]])
def test_frames_out_of_range_raise(video: Path, indices: list[int]) -> None:
    with pytest.raises(InputError, match=r"indices|frame"):
        open_video(video).read(indices)


def test_wrong_frame_count_raises(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.avi", 5)
    with pytest.raises(FileFormatError, match=r"video\.avi has 5 frames, but 9"):
        open_video(path, frames=9).read([7])
    folder = write_frames(tmp_path / "frames", 3)
    assert open_video(folder, frames=3).frames == 3
    with pytest.raises(FileFormatError, match="3 frames, but 4"):
        open_video(folder, frames=4)


def test_find_video_supports_all_layouts(tmp_path: Path) -> None:
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


def test_missing_path_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.avi"):
        open_video(tmp_path / "absent.avi")


@pytest.mark.parametrize("content", [b"", b"no video\n" * 99, b"RIFF\xff\x00\x00\x00AVI LIST"])
def test_non_video_file_raises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "video.avi").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"video\.avi"):
        decode(tmp_path / "video.avi")
    with pytest.raises(FileFormatError, match=r"video\.avi"):
        open_video(tmp_path / "video.avi").read([0])


def test_audio_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "sound.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        assert isinstance(stream, av.AudioStream)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(FileFormatError, match=r"sound\.avi"):
        decode(path)


def test_video_without_frames_raises(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.avi", 0)
    with pytest.raises(FileFormatError, match=r"video\.avi"):
        decode(path)


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
@pytest.mark.parametrize("suffix", [".avi", ".mp4"])
def test_truncated_file_raises(tmp_path: Path, codec: str, suffix: str) -> None:
    # The MP4 has its index at the beginning, so that it opens.
    options = {"movflags": "faststart"} if suffix == ".mp4" else None
    path = write_video(tmp_path / f"video{suffix}", FRAMES, codec=codec, options=options)
    frames = path.stat().st_size
    for part in (0.9, 0.7, 0.5):
        os.truncate(path, int(frames * part))
        with pytest.raises(FileFormatError, match=rf"video\{suffix}"):
            decode(path)
        with pytest.raises(FileFormatError, match=rf"video\{suffix}"):
            _ = open_video(path).frames


def test_file_truncated_between_frames_raises(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.avi", FRAMES, codec="mjpeg")
    content = path.read_bytes()
    index = -1
    for _ in range(12):
        index = content.index(b"00dc", index + 1)
    os.truncate(path, index)
    with pytest.raises(FileFormatError, match=rf"video\.avi .*\d+ of {FRAMES} frames"):
        decode(path)


def test_damaged_images_raise(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "frames", 3)
    (folder / "notes.txt").write_text("not a frame")
    assert open_video(folder).frames == 3
    (folder / "frame_2.png").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(FileFormatError, match=r"frame_2\.png does not decode"):
            _ = open_video(folder).frames
        (folder / "frame_2.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    assert numbers_of(open_video(folder).read([2, 0])) == [2, 0]


def test_images_of_different_sizes_raise(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "frames", 2)
    (folder / "frame_2.png").write_bytes(image_bytes(np.zeros((8, 8, 3), np.uint8), ".png"))
    with pytest.raises(FileFormatError, match=r"frame_2\.png has 8 x 8 pixels"):
        decode(folder)


def test_empty_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=str(tmp_path)):
        open_video(tmp_path)
