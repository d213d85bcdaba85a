"""Decoding of video files and directories of frames, and errors of other files."""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from av.error import FFmpegError
from av.filter import Graph

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.decoding.rgb import RgbConverter
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


@pytest.mark.parametrize("name", ["video.AVI", "video.m4v", "video.MPG", "video.mpeg", "video.WMV"])
def test_find_video_ignores_case_and_accepts_suffixes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert find_video(tmp_path, "video") == tmp_path / name
    assert find_video(tmp_path, name) == tmp_path / name


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


def with_display_matrix(source: Path, target: Path, matrix: tuple[float, float, float, float]) -> Path:
    """Copy an MP4 file and replace the display matrix of its track; the original has the identity."""
    content, unit = source.read_bytes(), 1 << 16
    identity = struct.pack(">9i", unit, 0, 0, 0, unit, 0, 0, 0, 1 << 30)
    start = content.index(identity, content.index(b"tkhd"))
    a, b, c, d = (round(value * unit) for value in matrix)
    content_of_matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    target.write_bytes(content[:start] + content_of_matrix + content[start + len(identity) :])
    return target


@pytest.mark.parametrize(
    ("matrix", "turns", "flip"),
    [
        ((0, 1, -1, 0), -1, False),  # Phones write this for upright clips: a quarter turn clockwise.
        ((-1, 0, 0, -1), 2, False),
        ((0, -1, 1, 0), 1, False),
        ((-1, 0, 0, 1), 0, True),
        ((1, 0, 0, -1), 2, True),
        ((0, 1, 1, 0), -1, True),
        ((0, -1, -1, 0), 1, True),
        ((0.001, 0.9999, -0.9999, 0.001), -1, False),
    ],
)
def test_display_matrix_is_applied(
    tmp_path: Path, matrix: tuple[float, float, float, float], turns: int, flip: bool
) -> None:
    source = write_video(tmp_path / "source.mp4", 3)
    stored = decode(source)
    expected = np.rot90(stored, turns, axes=(1, 2))
    expected = expected[:, :, ::-1] if flip else expected
    path = with_display_matrix(source, tmp_path / "rotated.mp4", matrix)
    np.testing.assert_array_equal(decode(path), expected)
    np.testing.assert_array_equal(open_video(path).read([2, 0]), expected[[2, 0]])
    height, width = (32, 24) if turns % 2 else (24, 32)
    assert decode(path, size=24).shape == (3, height, width, 3)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_exif_rotation_is_applied(tmp_path: Path, orientation: int, turns: int) -> None:
    path = write_frames(tmp_path, 1, suffix=".jpg") / "frame_1.jpg"
    stored, content = decode(tmp_path), path.read_bytes()
    entry = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<I", 8) + entry
    path.write_bytes(content[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + content[2:])
    np.testing.assert_array_equal(decode(tmp_path), np.rot90(stored, turns, axes=(1, 2)))


def test_rotation_by_another_angle_raises(tmp_path: Path) -> None:
    source = write_video(tmp_path / "source.mp4", 3)
    path = with_display_matrix(source, tmp_path / "tilted.mp4", (0.9, 0.4, -0.4, 0.9))
    with pytest.raises(FileFormatError, match=r"tilted\.mp4 is rotated by an angle"):
        decode(path)


def with_pixel_aspect(path: Path, aspect: Fraction) -> Path:
    """Write a video whose pixels are not square."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        for number in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("aspect", "width"),
    [
        (Fraction(16, 11), 93),
        (Fraction(8, 9), 56),
        (Fraction(65536, 65535), 64),  # MEncoder writes it for square pixels, see dmlc/decord 124.
    ],
)
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
def test_pixels_become_square_as_by_ffmpeg(tmp_path: Path, aspect: Fraction, width: int, suffix: str) -> None:
    path = with_pixel_aspect(tmp_path / f"video{suffix}", aspect)
    frames = decode(path)
    assert frames.shape == (3, HEIGHT, width, 3)
    with av.open(str(path)) as container:
        for frame, expected in zip(frames, container.decode(video=0), strict=True):
            graph = Graph()
            source = f"{WIDTH}x{HEIGHT}:pix_fmt=yuv420p:time_base=1/25:pixel_aspect={aspect}"
            graph.link_nodes(
                graph.add("buffer", f"video_size={source}"),
                graph.add("scale", "trunc(iw*sar):ih:flags=bilinear:in_chroma_loc=left"),
                graph.add("format", "rgb24"),
                graph.add("buffersink"),
            ).configure()
            graph.push(expected)
            scaled = graph.pull()
            assert isinstance(scaled, av.VideoFrame)
            np.testing.assert_array_equal(frame, scaled.to_ndarray())
    assert decode(path, size=24).shape == (3, 24, round(24 / HEIGHT * WIDTH * aspect), 3)


def test_rotated_pixels_become_square(tmp_path: Path) -> None:
    source = with_pixel_aspect(tmp_path / "source.mp4", Fraction(2))
    path = with_display_matrix(source, tmp_path / "rotated.mp4", (0, 1, -1, 0))
    assert decode(path).shape == (3, 2 * WIDTH, HEIGHT, 3)


def test_absurd_pixel_aspect_raises() -> None:
    source: Any = SimpleNamespace(path=Path("video.mkv"), pixel_aspect=Fraction(50000))
    convert = RgbConverter(source)
    with pytest.raises(FileFormatError, match=r"video\.mkv .*50000 times"):
        convert(av.VideoFrame.from_ndarray(picture(0), format="rgb24"))


def test_interlaced_video_warns_once(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.mpg", 5, codec="mpeg2video", codec_options={"flags": "+ildct+ilme"})
    with pytest.warns(UserWarning, match=r"video\.mpg is interlaced: 5 of 5"):
        assert open_video(path).frames == 5
    open_video(path, frames=5).read([3])


def test_main_video_stream_is_read(tmp_path: Path) -> None:
    # Players skip a cover picture and select the larger of several streams.
    path = tmp_path / "video.mkv"
    with av.open(str(path), "w") as container:
        streams = [container.add_stream("mpeg4", rate=25) for _ in range(2)]
        for scale, stream in zip((2, 1), streams, strict=True):
            assert isinstance(stream, av.VideoStream)
            stream.width, stream.height, stream.pix_fmt = WIDTH // scale, HEIGHT // scale, "yuv420p"
        container.start_encoding()
        for stream in streams:
            assert isinstance(stream, av.VideoStream)
            for number in range(3):
                frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
                container.mux(stream.encode(frame.reformat(stream.width, stream.height)))
            container.mux(stream.encode())
    assert numbers_of(decode(path)) == [0, 1, 2]
    assert numbers_of(open_video(path, frames=3).read([2])) == [2]


def test_joined_transport_streams_are_not_truncated(tmp_path: Path) -> None:
    source = write_video(tmp_path / "source.ts", 10, codec="mpeg2video")
    path = tmp_path / "joined.ts"
    path.write_bytes(2 * source.read_bytes())
    assert numbers_of(decode(path)) == 2 * list(range(10))


def test_frames_without_conversion_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = SimpleNamespace(path=Path("video.mkv"), pixel_aspect=Fraction(1))
    convert = RgbConverter(source)

    def reformat(*_: Any, **__: Any) -> None:
        raise FFmpegError(95, "Operation not supported")

    monkeypatch.setattr(convert, "_reformatter", SimpleNamespace(reformat=reformat))
    with pytest.raises(FileFormatError, match=r"video\.mkv has frames of the format rgb24"):
        convert(av.VideoFrame.from_ndarray(picture(0), format="rgb24"))


def damage(path: Path, start: float, num_bytes: int) -> Path:
    """Replace bytes of a file, from a fraction of its size on."""
    content, first = bytearray(path.read_bytes()), int(path.stat().st_size * start)
    content[first : first + num_bytes] = np.random.default_rng(0).bytes(num_bytes)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("suffix", "codec", "start", "num_bytes", "message"),
    [
        (".mp4", "mpeg4", 0.3, 600, r"does not decode after frame \d+"),
        (".mov", "mjpeg", 0.5, 2000, r"does not decode after frame \d+"),
        (".avi", "mpeg4", 0.75, 800, r"is damaged at frames \d.*: \d+ of 60"),
    ],
)
def test_damaged_middle_is_named(
    tmp_path: Path, suffix: str, codec: str, start: float, num_bytes: int, message: str
) -> None:
    path = damage(write_video(tmp_path / f"video{suffix}", 60, codec=codec), start, num_bytes)
    with pytest.raises(FileFormatError, match=rf"video\{suffix} {message}"):
        decode(path)


def test_concealed_damage_warns(tmp_path: Path) -> None:
    path = damage(write_video(tmp_path / "video.mpg", 60, codec="mpeg2video"), 0.5, 300)
    with pytest.warns(UserWarning, match=r"video\.mpg is damaged at frames \d+"):
        decode(path)


def test_metadata_that_is_not_utf8_is_ignored(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.mp4", 3)
    content = path.read_bytes()
    assert b"VideoHandler" in content
    path.write_bytes(content.replace(b"VideoHandler", b"Video\xff\xfe\xfdndle"))
    assert len(decode(path)) == 3


def test_unknown_codec_raises(tmp_path: Path) -> None:
    path = write_video(tmp_path / "video.mp4", 3)
    path.write_bytes(path.read_bytes().replace(b"mp4v", b"zzzz").replace(b"esds", b"zzzz"))
    with pytest.raises(FileFormatError, match="codec"):
        decode(path)


def test_huge_frames_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_video(tmp_path / "video.mp4", 3), write_frames(tmp_path / "frames", 2)
    monkeypatch.setattr("sparseflow.pruning.data.decoding.checks.DECODER_OPTIONS", {"max_pixels": "1000"})
    for source in (path, folder):
        with pytest.raises(FileFormatError, match=source.name):
            decode(source)


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
