"""Reading from keyframes: equal to decoding from the start, for containers and codecs with their oddities.

Public reports of other libraries name most of these files: dmlc/decord 54, 91 and 365 (wrong frames after
seeking), meta-pytorch/torchcodec 179, 673, 1209, 1339 and 1502 (open groups, no times, late starts, several
keyframes, hidden keyframes), PyAV 349 and 1987 (a palette is lost), pytorch/vision 1884 (times out of order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from sparseflow.pruning.data.decoding.file_range import find_file_range
from sparseflow.pruning.data.decoding.video_file import VideoFile
from tests.pruning.data.tree import HEIGHT, WIDTH, decode, numbers_of, picture

FRAMES = 40

X265 = "log-level=none:pools=1:frame-threads=1"


@pytest.fixture(autouse=True)
def keyframes_are_used_for_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.pruning.data.decoding.video_file._MIN_SKIPPED_FRAMES", 1)


def encode(
    path: Path,
    codec: str,
    options: dict[str, str],
    *,
    times: Sequence[int] = range(FRAMES),
    container_options: dict[str, str] | None = None,
    pix_fmt: str = "yuv420p",
    scale: int = 1,
) -> Path:
    """Write numbered frames with the given times, in units of 1/25 s."""
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV has no encoder {codec}")
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH // scale, HEIGHT // scale, pix_fmt
        stream.codec_context.time_base = Fraction(1, 25)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame = frame.reformat(stream.width, stream.height, pix_fmt)
            frame.pts, frame.time_base = time, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def change_packets(source: Path, target: Path, change: Callable[[int, av.Packet], bool | None]) -> Path:
    """Copy the packets of a file; `change` modifies one and returns False to drop it."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(packet for packet in old.demux(video=0) if packet.size):
            packet.stream = stream
            if change(number, packet) is not False:
                new.mux(packet)
    return target


def read_from_keyframes(path: Path, frames: int, indices: Sequence[int]) -> list[np.ndarray] | None:
    content = find_file_range(path)
    assert content is not None
    return VideoFile(path, content, frames)._read_from_keyframes(list(indices))


def count_equal_reads(path: Path) -> int:
    """Compare single frames and clips to decoding from the start; return how many reads used keyframes."""
    expected = decode(path)
    frames = len(expected)
    clips = [[number] for number in range(1, frames)]
    clips += [list(range(start, start + 5)) for start in range(1, frames - 5, 7)]
    clips += [list(range(2, frames, 9)), [1, frames - 1]]
    num_read = 0
    for indices in clips:
        images = read_from_keyframes(path, frames, indices)
        if images is not None:
            np.testing.assert_array_equal(np.stack(images), expected[indices])
            num_read += 1
    return num_read * 100 // len(clips)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("h264.mp4", "libx264", {"g": "12", "bf": "8", "refs": "5"}),
        ("h264.mkv", "libx264", {"x264-params": "keyint=12:open-gop=1:bframes=3"}),
        ("h264.ts", "libx264", {"x264-params": "keyint=12:open-gop=1:bframes=3"}),
        ("h264.flv", "libx264", {"g": "12"}),
        ("hevc.mp4", "libx265", {"x265-params": f"{X265}:keyint=12:open-gop=1"}),
        ("hevc_short_groups.mp4", "libx265", {"x265-params": f"{X265}:keyint=2:open-gop=1"}),
        ("vp8.webm", "libvpx", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
        ("vp9.webm", "libvpx-vp9", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
        ("mpeg2.mpg", "mpeg2video", {"g": "12", "bf": "2"}),
        ("mpeg4.avi", "mpeg4", {"g": "12", "bf": "2"}),
        ("mjpeg.avi", "mjpeg", {}),
    ],
)
def test_frames_equal_those_decoded_from_the_start(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    assert count_equal_reads(encode(tmp_path / name, codec, options, pix_fmt=pix_fmt)) == 100


@pytest.mark.parametrize(
    "times",
    [
        [number + number // 5 * 3 for number in range(FRAMES)],  # a variable rate
        range(-10, FRAMES - 10),
        range(90_000, 90_000 + FRAMES),
    ],
)
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_times_may_be_uneven_negative_and_late(tmp_path: Path, times: Sequence[int], suffix: str) -> None:
    # An MP4 file with negative times has an edit list that hides frames.
    path = encode(tmp_path / f"video{suffix}", "libx264", {"g": "12"}, times=times)
    assert count_equal_reads(path) == 100


def test_fragments_are_read(tmp_path: Path) -> None:
    options = {"movflags": "frag_keyframe+empty_moov"}
    path = encode(tmp_path / "video.mp4", "libx264", {"g": "12"}, container_options=options)
    assert count_equal_reads(path) == 100


def test_hidden_keyframe_starts_decoding(tmp_path: Path) -> None:
    source = encode(tmp_path / "source.mp4", "libx264", {"g": "20", "bf": "2"})

    def shift(_number: int, packet: av.Packet) -> None:
        assert packet.pts is not None and packet.dts is not None
        packet.pts -= 28 * 512
        packet.dts -= 28 * 512

    path = change_packets(source, tmp_path / "cut.mp4", shift)
    assert numbers_of(decode(path)[:3]) == [28, 29, 30]
    assert count_equal_reads(path) == 100


def test_decoding_falls_back_where_keyframes_are_wrong(tmp_path: Path) -> None:
    source = encode(tmp_path / "source.mp4", "mpeg4", {"g": "40", "bf": "0"})

    def set_keyframe(number: int, packet: av.Packet) -> None:
        packet.is_keyframe = number % 10 == 0

    path = change_packets(source, tmp_path / "marked.mp4", set_keyframe)
    with av.open(str(path)) as container:
        assert sum(packet.is_keyframe for packet in container.demux(video=0)) > 1
    assert count_equal_reads(path) < 50  # frames of the first group


def test_decoding_falls_back_for_gradual_refresh(tmp_path: Path) -> None:
    options = {"x264-params": "keyint=20:intra-refresh=1:bframes=0"}
    assert count_equal_reads(encode(tmp_path / "video.mp4", "libx264", options)) < 50


def test_decoding_falls_back_without_times(tmp_path: Path) -> None:
    assert count_equal_reads(encode(tmp_path / "video.h264", "libx264", {"g": "12"})) == 0


def test_decoding_falls_back_for_times_out_of_order(tmp_path: Path) -> None:
    source = encode(tmp_path / "source.ts", "mpeg2video", {"g": "12"})
    path = tmp_path / "joined.ts"
    path.write_bytes(2 * source.read_bytes())  # the second half has the times of the first
    assert len(decode(path)) == 2 * FRAMES
    assert count_equal_reads(path) == 0


def test_decoding_falls_back_for_a_palette(tmp_path: Path) -> None:
    path = tmp_path / "video.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "pal8"
        palette = np.random.default_rng(0).integers(256, size=(256, 4), dtype=np.uint8)
        for number in range(6):
            image: Any = (picture(number)[..., 0], palette)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="pal8")))
        container.mux(stream.encode())
    assert count_equal_reads(path) == 0


def test_another_count_falls_back(tmp_path: Path) -> None:
    path = encode(tmp_path / "video.mp4", "libx264", {"g": "12"})
    assert read_from_keyframes(path, FRAMES + 1, [30]) is None


def test_size_of_the_first_frame_is_kept(tmp_path: Path) -> None:
    large = encode(tmp_path / "large.ts", "libx264", {"g": "12"})
    small = encode(tmp_path / "small.ts", "libx264", {"g": "12"}, times=range(100, 130), scale=2)
    path = tmp_path / "joined.ts"
    with av.open(str(large)) as first, av.open(str(small)) as second, av.open(str(path), "w") as joined:
        stream = joined.add_stream_from_template(first.streams.video[0])
        for packet in (*first.demux(video=0), *second.demux(video=0)):
            if packet.size:
                packet.stream = stream
                joined.mux(packet)
    assert decode(path).shape == (FRAMES + 30, HEIGHT, WIDTH, 3)
    assert 0 < count_equal_reads(path) < 100
