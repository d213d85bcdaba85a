"""Banks of small real images by name, from scikit-learn's digits and image archives, in disjoint splits.

Archives are `.tar` files, optionally compressed. They contain images as `…/<class>/<name>.png` (or `.jpg`),
or CIFAR-10's binary version: `data_batch_1.bin` to `5`, `test_batch.bin` and `batches.meta.txt`. Nothing is
unpacked to disk and nothing is unpickled; CIFAR-10's Python version, which consists of pickles, is refused.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import numpy as np

from sparseflow.adaptive.questions.task import Split
from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

SIDE = 32
"""Side of an image in pixels; other images are resized."""

SPLITS: tuple[Split, ...] = get_args(Split)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_VAL, _TEST = 0.1, 0.2
"""Shares of each name's images; where an archive says which images are for tests, `_VAL` is of the others."""
_MEMBER_BYTES = 64 << 20
"""Upper bound of the size of a member of such archives."""
_MAX_EXPANSION = 200
"""Limit on the ratio of the content to the size of an archive; images hardly compress."""
_RECORD = 1 + 3 * SIDE * SIDE


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageBank:
    """Images and their names.

    Attributes:
        images: [n, 3, 32, 32] uint8.
        labels: Index into `names` of each image, [n] int64.
        names: One word each, lower case.
        splits: Split -> indices into `images` by name: `splits["train"][label]` is [any] int64.
        flips: Whether images of each name may be mirrored; digits may not.
    """

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    splits: dict[Split, tuple[np.ndarray, ...]]
    flips: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """Images of one source; `test` marks its official test images, and is None if it has none."""

    images: np.ndarray
    names: list[str]
    test: np.ndarray | None
    flips: bool


def load_image_bank(*, digits: bool, archives: Sequence[Path] = (), seed: int = 0) -> ImageBank:
    """Read images and split them.

    Args:
        digits: Whether to include scikit-learn's digits.
        archives: Image archives; several form one source, such as the two halves of CIFAR-10.
        seed: Seed of the split.

    Raises:
        InputError: An archive is missing or contains pickles, or a name has too few images.
        FileFormatError: An archive is damaged or foreign.
        MissingExtraError: scikit-learn or Pillow is missing.
    """
    sources = [_load_digits()] if digits else []
    if archives:
        sources.append(read_archives(archives))
    if not sources:
        raise InputError("there are no images: enable `digits`, or pass an archive")
    images: list[np.ndarray] = []
    labels: list[int] = []
    names: list[str] = []
    flips: list[bool] = []
    indices: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
    generator, offset, digests = np.random.default_rng([seed, 0x6D1D]), 0, set[bytes]()
    for source in sources:
        for name in sorted(set(source.names)):
            if name in names:
                raise InputError(f"two sources have images of {name!r}; remove one")
            rows = np.array([index for index, image_name in enumerate(source.names) if image_name == name])
            # A duplicate image could be in two splits.
            rows = np.array([index for index in rows if _add_digest(source.images[index], digests)], np.int64)
            tests = np.zeros(len(rows), bool) if source.test is None else source.test[rows]
            parts = _split(len(rows), tests, generator)
            if min(map(len, parts)) == 0:
                raise InputError(f"{len(rows)} images of {name!r} are too few for train, val and test")
            for split, part in zip(SPLITS, parts, strict=True):
                indices[split].append(part + offset)
            images.append(source.images[rows])
            labels += [len(names)] * len(rows)
            names.append(name)
            flips.append(source.flips)
            offset += len(rows)
    return ImageBank(
        images=np.concatenate(images), labels=np.array(labels, np.int64), names=tuple(names),
        splits={split: tuple(image_name) for split, image_name in indices.items()}, flips=tuple(flips),
    )  # fmt: skip


def read_archives(archives: Sequence[Path]) -> _Source:
    """Read the images of archives.

    Raises:
        InputError: An archive is missing or contains pickles.
        FileFormatError: An archive is damaged or contains no images.
        MissingExtraError: Pillow is missing.
    """
    images: list[np.ndarray] = []
    names: list[str] = []
    tests: list[bool | None] = []
    for archive in archives:
        num_before = len(images)
        for image, name, test in _read_members(Path(archive)):
            images.append(image)
            names.append(name)
            tests.append(test)
        if len(images) == num_before:
            raise FileFormatError(
                f"{archive} contains no images; expected …/<class>/<name>.png or .jpg, or CIFAR-10's binary "
                "version"
            )
    is_test = None if any(test is None for test in tests) else np.array(tests, bool)
    # One half of CIFAR-10 has no test images, or only test images.
    if is_test is not None and (is_test.all() or not is_test.any()):
        is_test = None
    return _Source(images=np.stack(images), names=names, test=is_test, flips=True)


def _load_digits() -> _Source:
    datasets = require("sklearn.datasets", "adaptive")
    loaded = datasets.load_digits()
    # 0 is background, 16 is ink; each pixel becomes 4 × 4 smoothed pixels.
    ink = np.repeat(np.repeat(loaded.images / 16.0, 4, axis=1), 4, axis=2)
    padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)), mode="edge")
    smooth = (
        sum(padded[:, 1 + y : 1 + y + SIDE, 1 + x : 1 + x + SIDE] for y in (-1, 0, 1) for x in (-1, 0, 1)) / 9
    )
    images = np.repeat(np.rint(255 * smooth).astype(np.uint8)[:, None], 3, axis=1)
    return _Source(images=images, names=[DIGITS[label] for label in loaded.target], test=None, flips=False)


def _add_digest(image: np.ndarray, digests: set[bytes]) -> bool:
    digest = hashlib.sha256(image.tobytes()).digest()
    if digest in digests:
        return False
    digests.add(digest)
    return True


def _split(count: int, tests: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Indices of the train, val and test images."""
    order = generator.permutation(count)
    if tests.any():
        test, remaining = order[tests[order]], order[~tests[order]]
    else:
        test, remaining = np.split(order, [round(_TEST * count)])
    val, train = np.split(remaining, [round(_VAL * len(remaining))])
    return [np.sort(part) for part in (train, val, test)]


def _read_members(path: Path) -> Iterator[tuple[np.ndarray, str, bool | None]]:
    """Yield image, name and whether it is a test image (None if unmarked) of each member."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; pass an image archive")
    try:
        with tarfile.open(path) as archive:
            stream: Any = _BoundedStream(archive.fileobj, path.stat().st_size)
            archive.fileobj = stream
            files = [member for member in archive if member.isfile()]
            too_long = next((file.name for file in files if file.size > _MEMBER_BYTES), None)
            if too_long is not None:
                raise FileFormatError(f"{path}: {too_long} is too large for an archive of small images")
            if any(PurePosixPath(file.name).name in ("data_batch_1", "batches.meta") for file in files):
                raise InputError(
                    f"{path} contains pickles, which could run code; use CIFAR-10's binary version "
                    "(cifar-10-binary.tar.gz) or an archive of image directories"
                )
            if any(file.name.endswith("_batch.bin") or "data_batch_" in file.name for file in files):
                yield from _read_binary(path, archive, files)
            else:
                yield from _read_folders(path, archive, files)
            # A truncated compressed file raises only at its end.
            while stream.read(1 << 20):
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FileFormatError(f"{path} is not a readable tar archive: {error}") from error


class _BoundedStream(io.RawIOBase):
    """The content of an archive of a size; reading far more raises `tarfile.ReadError`."""

    def __init__(self, stream: Any, archive_bytes: int) -> None:
        self._stream, self._max_bytes = stream, _MAX_EXPANSION * archive_bytes + 2**20

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size)
        self.seek(0, io.SEEK_CUR)
        return content

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        # Compressed data is read up to the position, so it is checked first.
        if whence == io.SEEK_SET:
            self._check(position)
        position = self._stream.seek(position, whence)
        self._check(position)
        return position

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _check(self, position: int) -> None:
        if position > self._max_bytes:
            raise tarfile.ReadError(f"it expands to more than {_MAX_EXPANSION} times its size")


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    assert opened is not None
    return opened.read()


def _read_binary(
    path: Path, archive: tarfile.TarFile, files: Iterable[tarfile.TarInfo]
) -> Iterator[tuple[np.ndarray, str, bool | None]]:
    batches: list[tuple[str, bytes]] = []
    names: list[str] = []
    for member in files:
        base = PurePosixPath(member.name).name
        if base == "batches.meta.txt":
            names = _read_member(archive, member).decode("utf-8", "replace").lower().split()
        elif base.endswith(".bin"):
            batches.append((base, _read_member(archive, member)))
    for base, content in batches:
        rows = np.frombuffer(content, np.uint8)
        if len(rows) % _RECORD or len(rows) == 0:
            raise FileFormatError(
                f"{path}: {base} must consist of records of {_RECORD} bytes, got {len(rows)} bytes"
            )
        rows = rows.reshape(-1, _RECORD)
        if rows[:, 0].max() >= len(names):
            raise FileFormatError(
                f"{path}: {base} has label {rows[:, 0].max()}, but batches.meta.txt has {len(names)} names"
            )
        for row in rows:
            yield row[1:].reshape(3, SIDE, SIDE), names[row[0]], base.startswith("test")


def _read_folders(
    path: Path, archive: tarfile.TarFile, files: Iterable[tarfile.TarInfo]
) -> Iterator[tuple[np.ndarray, str, bool | None]]:
    picture = require("PIL.Image", "adaptive")
    for member in files:
        parts = PurePosixPath(member.name).parts
        if len(parts) < 2 or not parts[-1].lower().endswith((".png", ".jpg", ".jpeg")):
            continue
        name = parts[-2].lower()
        if not name.isalpha() or not name.isascii():
            raise FileFormatError(f"{path}: the name of a class must be one word, got {parts[-2]!r}")
        try:
            with picture.open(io.BytesIO(_read_member(archive, member)), formats=("PNG", "JPEG")) as opened:
                image = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, picture.DecompressionBombError) as error:
            raise FileFormatError(f"{path}: {member.name} is not a readable image: {error}") from error
        if image.size != (SIDE, SIDE):
            image = image.resize((SIDE, SIDE), picture.Resampling.BOX)
        test = {"train": False, "test": True}.get(parts[-3].lower()) if len(parts) > 2 else None
        yield np.asarray(image).transpose(2, 0, 1), name, test
