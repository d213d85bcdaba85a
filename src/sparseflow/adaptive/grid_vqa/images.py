"""Small real images by name, digits and pictures of archives, split so that none is in two parts.

Archives are `.tar` files, compressed or not. They hold images as `…/<class>/<name>.png` (or `.jpg`), or
CIFAR-10 as its authors' "binary version" does: `data_batch_1.bin` to `5`, `test_batch.bin` and
`batches.meta.txt`. Nothing is unpacked to disk and nothing is unpickled; the authors' "Python version", which
is made of pickles, is refused.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import get_args

import numpy as np

from sparseflow.adaptive.questions.task import Split
from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

SIDE = 32
"""Pixels of an image, each way; images of other sizes are resized."""

SPLITS: tuple[Split, ...] = get_args(Split)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_VAL, _TEST = 0.1, 0.2
"""Shares of each name's images; where an archive says which images are for tests, `_VAL` is of the others."""
_MEMBER_BYTES = 64 << 20
"""More than any member of such an archive has."""
_RECORD = 1 + 3 * SIDE * SIDE


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageBank:
    """Images and their names.

    Attributes:
        images: [n, 3, 32, 32] uint8.
        labels: Index into `names` of each, [n] int64.
        names: One word each, lower case.
        splits: Split -> places in `images` by name: `splits["train"][label]` is [any] int64.
        flips: Of each name, whether its images may be mirrored; letters and digits may not.
    """

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    splits: dict[Split, tuple[np.ndarray, ...]]
    flips: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """Images of one source; `test` says which are its authors' test images, None where they do not say."""

    images: np.ndarray
    names: list[str]
    test: np.ndarray | None
    flips: bool


def bank_of(*, digits: bool, archives: Sequence[Path] = (), seed: int = 0) -> ImageBank:
    """Read images and split them.

    Args:
        digits: Whether scikit-learn's digits are among them.
        archives: Files of pictures. Several are one source: CIFAR-10's two halves go together.
        seed: Of the split.

    Raises:
        InputError: An archive is missing, holds pickles, or a name has too few images to split.
        FileFormatError: An archive is damaged or holds something else.
        MissingExtraError: scikit-learn or Pillow is missing.
    """
    sources = [_digits()] if digits else []
    if archives:
        sources.append(pictures(archives))
    if not sources:
        raise InputError("there are no images: ask for digits, or give an archive")
    found: list[np.ndarray] = []
    labels: list[int] = []
    names: list[str] = []
    flips: list[bool] = []
    places: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
    random, at, seen = np.random.default_rng([seed, 0x6D1D]), 0, set[bytes]()
    for source in sources:
        for name in sorted(set(source.names)):
            if name in names:
                raise InputError(f"two sources have images of {name!r}; leave one out")
            mine = np.array([index for index, each in enumerate(source.names) if each == name])
            # The same image twice could come into two splits.
            mine = np.array([index for index in mine if _new(source.images[index], seen)], np.int64)
            tests = np.zeros(len(mine), bool) if source.test is None else source.test[mine]
            parts = _split(len(mine), tests, random)
            if min(map(len, parts)) == 0:
                raise InputError(
                    f"there are {len(mine)} images of {name!r}, too few to train, validate and test"
                )
            for split, part in zip(SPLITS, parts, strict=True):
                places[split].append(part + at)
            found.append(source.images[mine])
            labels += [len(names)] * len(mine)
            names.append(name)
            flips.append(source.flips)
            at += len(mine)
    return ImageBank(
        images=np.concatenate(found), labels=np.array(labels, np.int64), names=tuple(names),
        splits={split: tuple(each) for split, each in places.items()}, flips=tuple(flips),
    )  # fmt: skip


def pictures(archives: Sequence[Path]) -> _Source:
    """Pictures of some archives; see the module.

    Raises:
        InputError: An archive is missing or holds pickles.
        FileFormatError: One is damaged or holds no images.
        MissingExtraError: Pillow is missing.
    """
    images: list[np.ndarray] = []
    names: list[str] = []
    tests: list[bool | None] = []
    for archive in archives:
        before = len(images)
        for image, name, test in _members(Path(archive)):
            images.append(image)
            names.append(name)
            tests.append(test)
        if len(images) == before:
            raise FileFormatError(
                f"{archive} holds no images; expected …/<class>/<name>.png or .jpg, or CIFAR-10's binary "
                "version"
            )
    told = None if any(test is None for test in tests) else np.array(tests, bool)
    # Half of the data alone has no test images, or only such.
    if told is not None and (told.all() or not told.any()):
        told = None
    return _Source(images=np.stack(images), names=names, test=told, flips=True)


def _digits() -> _Source:
    datasets = require("sklearn.datasets", "adaptive")
    loaded = datasets.load_digits()
    # 0 is paper, 16 is ink; each pixel becomes 4 × 4, smoothed.
    ink = np.repeat(np.repeat(loaded.images / 16.0, 4, axis=1), 4, axis=2)
    padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)), mode="edge")
    smooth = (
        sum(padded[:, 1 + y : 1 + y + SIDE, 1 + x : 1 + x + SIDE] for y in (-1, 0, 1) for x in (-1, 0, 1)) / 9
    )
    images = np.repeat(np.rint(255 * smooth).astype(np.uint8)[:, None], 3, axis=1)
    return _Source(images=images, names=[DIGITS[label] for label in loaded.target], test=None, flips=False)


def _new(image: np.ndarray, seen: set[bytes]) -> bool:
    digest = hashlib.sha256(image.tobytes()).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def _split(count: int, tests: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Places of the images to train, to validate and to test with."""
    order = random.permutation(count)
    if tests.any():
        test, rest = order[tests[order]], order[~tests[order]]
    else:
        test, rest = np.split(order, [round(_TEST * count)])
    val, train = np.split(rest, [round(_VAL * len(rest))])
    return [np.sort(part) for part in (train, val, test)]


def _members(path: Path) -> Iterator[tuple[np.ndarray, str, bool | None]]:
    """Images of an archive: [3, 32, 32] uint8, the name, and whether it is for tests, where that is told."""
    if not path.is_file():
        raise InputError(f"there is no archive {path}")
    try:
        with tarfile.open(path) as archive:
            files = [member for member in archive if member.isfile()]
            too_long = next((each.name for each in files if each.size > _MEMBER_BYTES), None)
            if too_long is not None:
                raise FileFormatError(f"{path}: {too_long} is too large to be of a set of small images")
            if any(PurePosixPath(each.name).name in ("data_batch_1", "batches.meta") for each in files):
                raise InputError(
                    f"{path} is made of pickles, which could run code; use CIFAR-10's binary version "
                    "(cifar-10-binary.tar.gz) or an archive of folders of images"
                )
            if any(each.name.endswith("_batch.bin") or "data_batch_" in each.name for each in files):
                yield from _binary(path, archive, files)
            else:
                yield from _folders(path, archive, files)
            # A compressed file that was torn shows it only at its end.
            rest = archive.fileobj
            while rest is not None and rest.read(1 << 20):
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FileFormatError(f"{path} is not a tar archive that can be read: {error}") from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    assert opened is not None
    return opened.read()


def _binary(
    path: Path, archive: tarfile.TarFile, files: Iterable[tarfile.TarInfo]
) -> Iterator[tuple[np.ndarray, str, bool | None]]:
    batches: list[tuple[str, bytes]] = []
    names: list[str] = []
    for member in files:
        base = PurePosixPath(member.name).name
        if base == "batches.meta.txt":
            names = _content(archive, member).decode("utf-8", "replace").lower().split()
        elif base.endswith(".bin"):
            batches.append((base, _content(archive, member)))
    for base, content in batches:
        rows = np.frombuffer(content, np.uint8)
        if len(rows) % _RECORD or len(rows) == 0:
            raise FileFormatError(
                f"{path}: {base} must be of records of {_RECORD} bytes, and has {len(rows)}"
            )
        rows = rows.reshape(-1, _RECORD)
        if rows[:, 0].max() >= len(names):
            raise FileFormatError(
                f"{path}: {base} has label {rows[:, 0].max()}, and batches.meta.txt {len(names)} names"
            )
        for row in rows:
            yield row[1:].reshape(3, SIDE, SIDE), names[row[0]], base.startswith("test")


def _folders(
    path: Path, archive: tarfile.TarFile, files: Iterable[tarfile.TarInfo]
) -> Iterator[tuple[np.ndarray, str, bool | None]]:
    picture = require("PIL.Image", "adaptive")
    for member in files:
        parts = PurePosixPath(member.name).parts
        if len(parts) < 2 or not parts[-1].lower().endswith((".png", ".jpg", ".jpeg")):
            continue
        name = parts[-2].lower()
        if not name.isalpha() or not name.isascii():
            raise FileFormatError(f"{path}: a class must be named by one word, not {parts[-2]!r}")
        try:
            with picture.open(io.BytesIO(_content(archive, member)), formats=("PNG", "JPEG")) as opened:
                image = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, picture.DecompressionBombError) as error:
            raise FileFormatError(
                f"{path}: {member.name} is not an image that can be read: {error}"
            ) from error
        if image.size != (SIDE, SIDE):
            image = image.resize((SIDE, SIDE), picture.Resampling.BOX)
        test = {"train": False, "test": True}.get(parts[-3].lower()) if len(parts) > 2 else None
        yield np.asarray(image).transpose(2, 0, 1), name, test
