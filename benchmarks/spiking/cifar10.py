"""CIFAR-10 from a ``.tar.gz`` of images in one folder a class: ``<split>/<class>/<number>.jpg``.

Images are decoded with Pillow straight from the archive's members; nothing is unpacked to disk and nothing
is ever unpickled.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from sparseflow.errors import FileFormatError, MissingExtraError

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_MAX_MEMBER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Images:
    """Labelled images.

    Attributes:
        images: ``uint8 [N, 3, 32, 32]``, RGB.
        labels: ``int64 [N]``, an index into :data:`CLASSES`.
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load_archive(path: str | Path, *, limit: int | None = None) -> Images:
    """Decode every image of an archive, in the order of class, then file name.

    Args:
        path: The ``.tar.gz`` file.
        limit: Keep at most this many images, spread evenly over the classes (for smoke tests).

    Raises:
        FileFormatError: The file is missing, is no such archive, or holds something that is no 32x32 image
            of one of the ten classes.
        MissingExtraError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pillow", "spiking") from error

    path = Path(path)
    per_class = None if limit is None else -(-limit // len(CLASSES))
    splits: list[tuple[int, str, np.ndarray]] = []
    positions = [0] * len(CLASSES)
    try:
        # "r:gz", not "r|gz": a truncated stream then fails instead of looking like a short archive.
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                label = _label(path, member)
                if per_class is not None and positions[label] >= per_class:
                    continue
                stream = archive.extractfile(member)
                assert stream is not None
                splits.append((label, member.name, _decode(path, member.name, stream.read())))
                positions[label] += 1
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file; expected a CIFAR-10 .tar.gz archive") from error
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FileFormatError(f"{path}: not a readable .tar.gz archive ({error})") from error
    if not splits:
        raise FileFormatError(f"{path}: holds no image; expected <split>/<class>/<number>.jpg")
    splits.sort(key=lambda item: item[:2])
    return Images(
        images=np.stack([pixels for _, _, pixels in splits]),
        labels=np.array([label for label, _, _ in splits], dtype=np.int64),
    )


def _label(path: Path, member: tarfile.TarInfo) -> int:
    parts = PurePosixPath(member.name).parts
    if len(parts) < 2 or parts[-2] not in CLASSES:
        raise FileFormatError(
            f"{path}: member {member.name!r} is in no class folder; expected <split>/<class>/<number>.jpg "
            f"with a class of {', '.join(CLASSES)}"
        )
    if member.size > _MAX_MEMBER_BYTES:
        raise FileFormatError(f"{path}: member {member.name!r} is {member.size} bytes, too much for 32x32")
    return CLASSES.index(parts[-2])


def _decode(path: Path, name: str, data: bytes) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.size != (32, 32):
                raise FileFormatError(f"{path}: {name!r} is {image.size[0]}x{image.size[1]}, expected 32x32")
            pixels = np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise FileFormatError(f"{path}: {name!r} is not a JPEG or PNG image ({error})") from error
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
