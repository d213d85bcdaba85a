"""A small tree of .avi files in UCF-101's layout; each frame encodes its number.

Three classes of six groups; groups 1 and 2 are the test of split 1, 3 and 4 of split 2, 5 and 6 of split 3.
The center of a frame has its number as eight black or white blocks, one per bit, which survive lossy coding,
resizing and center crops. The color around it identifies the video.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from sparseflow.pruning.data.video import iterate_frames

CLASSES = ("Archery", "HandstandPushups", "YoYo")
GROUPS = range(1, 7)
HEIGHT, WIDTH = 48, 64

BLOCK = 8
"""Side of the block of a bit, pixels; the bits are in two rows of four."""

TOP, LEFT = HEIGHT // 2 - BLOCK, WIDTH // 2 - 2 * BLOCK


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Paths and content of a tree.

    Attributes:
        videos: Directory of videos.
        lists: Directory of lists.
        frames: Name of a video -> number of frames, in the order of the lists.
    """

    videos: Path
    lists: Path
    frames: dict[str, int]


def name_of(label: int, group: int, clip: int) -> str:
    """Name of a video; one class has two spellings, as in the official data."""
    folder = CLASSES[label]
    return f"{folder}/v_{folder.replace('stand', 'Stand')}_g{group:02}_c{clip:02}"


def make_tree(root: Path) -> Tree:
    """Write videos of 5 to 34 frames, two clips in odd groups and one in even groups, and all lists."""
    frames: dict[str, int] = {}
    for label in range(len(CLASSES)):
        for group in GROUPS:
            for clip in range(1, 2 + group % 2):
                name = name_of(label, group, clip)
                frames[name] = 5 + (11 * label + 7 * group + 3 * clip) % 30
                write_video(root / "videos" / f"{name}.avi", frames[name], tint=len(frames))
    write_lists(root / "lists", list(frames))
    return Tree(videos=root / "videos", lists=root / "lists", frames=frames)


def write_lists(folder: Path, names: list[str]) -> None:
    """Write all seven files, with the line ends of the official ones."""
    folder.mkdir(parents=True)
    (folder / "classInd.txt").write_bytes(
        "".join(f"{label} {name}\r\n" for label, name in enumerate(CLASSES, start=1)).encode()
    )
    for split in (1, 2, 3):
        train, test = "", ""
        for name in names:
            if group_of(name) in (2 * split - 1, 2 * split):
                test += f"{name}.avi\r\n"
            else:
                train += f"{name}.avi {CLASSES.index(name.partition('/')[0]) + 1}\r\n"
        (folder / f"trainlist{split:02}.txt").write_bytes(train.encode())
        (folder / f"testlist{split:02}.txt").write_bytes(test.encode())


def group_of(name: str) -> int:
    return int(name[-6:-4])


def picture(number: int, tint: int = 0) -> np.ndarray:
    """A frame before encoding; uint8, shape (HEIGHT, WIDTH, 3)."""
    frame = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    frame[:] = (40 + 5 * tint, 200 - 5 * tint, 120)
    bits = (number >> np.arange(8)) & 1
    blocks = np.where(bits.reshape(2, 4), 255, 0).repeat(BLOCK, 0).repeat(BLOCK, 1)
    frame[TOP : TOP + 2 * BLOCK, LEFT : LEFT + 4 * BLOCK] = blocks[..., None]
    return frame


def numbers_of(frames: np.ndarray) -> list[int]:
    """Numbers of full or center-cropped frames, uint8, shape (n, height, width, 3)."""
    top, remaining = frames.shape[1] // 2 - BLOCK, frames.shape[2] // 2 - 2 * BLOCK
    bright = frames[:, top : top + 2 * BLOCK, remaining : remaining + 4 * BLOCK].mean(-1)
    blocks = bright.reshape(-1, 2, BLOCK, 4, BLOCK).mean((2, 4)).reshape(-1, 8)
    assert np.all((blocks < 70) | (blocks > 185)), "the blocks did not survive"
    return ((blocks > 128) << np.arange(8)).sum(1).tolist()


def write_video(
    path: Path,
    frames: int,
    *,
    tint: int = 0,
    codec: str = "mpeg4",
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
) -> Path:
    """Write a video file with frames numbered from 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=25, options=codec_options)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 1_000_000
        if codec == "mpeg4":
            # Frames then leave the decoder later than their packets go in.
            stream.codec_context.max_b_frames = 2
        container.start_encoding()
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number, tint), format="rgb24")))
        container.mux(stream.encode())
    return path


def decode(path: Path, *, size: int | None = None, threads: int = 1) -> np.ndarray:
    """Decode all frames of a video; uint8, shape (frames, height, width, 3)."""
    return np.stack(list(iterate_frames(path, size=size, threads=threads)))


def write_frames(folder: Path, frames: int, *, suffix: str = ".png") -> Path:
    """Write a directory of images with names numbered from 1, without leading zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(frames):
        (folder / f"frame_{number + 1}{suffix}").write_bytes(image_bytes(picture(number), suffix))
    return folder


def image_bytes(pixels: np.ndarray, suffix: str) -> bytes:
    """Encode pixels, uint8 of shape (height, width, 3), as an image file."""
    codec, form = ("png", "rgb24") if suffix == ".png" else ("mjpeg", "yuvj444p")
    encoder = av.CodecContext.create(codec, "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.height, encoder.width = pixels.shape[:2]
    encoder.pix_fmt, encoder.time_base = form, Fraction(1, 25)
    image = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=form)
    return b"".join(map(bytes, [*encoder.encode(image), *encoder.encode()]))
