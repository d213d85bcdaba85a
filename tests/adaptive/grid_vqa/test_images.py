"""Banks of images: what archives hold is found, what is damaged is refused, and no image is in two splits."""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sklearn")
pytest.importorskip("PIL")

from PIL import Image

from sparseflow.adaptive.grid_vqa.images import DIGITS, SPLITS, ImageBank, load_image_bank, read_archives
from sparseflow.errors import FileFormatError, InputError


def archive(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as created:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            created.addfile(info, io.BytesIO(content))
    return path


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def noise(count: int, side: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def assert_split(bank: ImageBank) -> None:
    """Every place is in one split, under its own name, and no two splits have an image in common."""
    all_items = np.concatenate([np.concatenate(bank.splits[split]) for split in SPLITS])
    assert sorted(all_items.tolist()) == list(range(len(bank.images)))
    for split in SPLITS:
        for label, positions in enumerate(bank.splits[split]):
            assert len(positions) and (bank.labels[positions] == label).all()
    pixels = {
        split: {bank.images[index].tobytes() for index in np.concatenate(bank.splits[split])}
        for split in SPLITS
    }
    assert not pixels["train"] & pixels["test"] and not pixels["train"] & pixels["val"]
    assert not pixels["val"] & pixels["test"]


def test_load_image_bank_of_digits() -> None:
    bank = load_image_bank(digits=True)
    assert bank.images.shape == (1797, 3, 32, 32) and bank.images.dtype == np.uint8
    assert bank.names == tuple(sorted(DIGITS)) and not any(bank.flips)
    assert_split(bank)
    counts = [sum(map(len, bank.splits[split])) / 1797 for split in SPLITS]
    assert counts == pytest.approx([0.72, 0.08, 0.2], abs=0.005)
    second, other = load_image_bank(digits=True), load_image_bank(digits=True, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(second.splits["test"], bank.splits["test"], strict=True))
    assert not all(
        np.array_equal(a, b) for a, b in zip(other.splits["test"], bank.splits["test"], strict=True)
    )


def test_read_archives_keeps_official_test_images(tmp_path: Path) -> None:
    train, test = noise(20), noise(6, seed=1)
    first = archive(
        tmp_path / "train.tar.gz",
        {f"train/{'Cat' if index % 2 else 'dog'}/{index}.png": png(x) for index, x in enumerate(train)},
    )
    two = archive(
        tmp_path / "test.tar",
        {f"test/{'Cat' if index % 2 else 'dog'}/{index}.png": png(x) for index, x in enumerate(test)},
        "w",
    )
    bank = load_image_bank(digits=False, archives=[first, two])
    assert bank.names == ("cat", "dog") and all(bank.flips)
    assert_split(bank)
    assert {bank.images[index].tobytes() for index in np.concatenate(bank.splits["test"])} == {
        x.transpose(2, 0, 1).tobytes() for x in test
    }
    # One half alone has no test images of its own, so some are taken.
    assert_split(load_image_bank(digits=True, archives=[first]))


def test_load_image_bank_removes_duplicates(tmp_path: Path) -> None:
    files = {f"cat/{index}.png": png(x) for index, x in enumerate(np.concatenate([noise(12), noise(12)]))}
    bank = load_image_bank(digits=False, archives=[archive(tmp_path / "cats.tar", files, "w")])
    assert len(bank.images) == 12
    assert_split(bank)


def test_read_archives_converts_sizes_and_modes(tmp_path: Path) -> None:
    grey = np.full((40, 20), 7, np.uint8)
    bank = read_archives(
        [archive(tmp_path / "a.tar", {"cat/a.png": png(grey), "cat/readme.txt": b"no", "b.png": b"no"}, "w")]
    )
    assert bank.images.shape == (1, 3, 32, 32) and (bank.images == 7).all()


def test_read_archives_of_binary_cifar(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3072), np.uint8)
    labels = np.arange(40, dtype=np.uint8)[:, None] % 2
    rows = np.concatenate([labels, pixels], axis=1)
    files = {
        "cifar/data_batch_1.bin": rows[:30].tobytes(), "cifar/test_batch.bin": rows[30:].tobytes(),
        "cifar/batches.meta.txt": b"airplane\nTruck\n\n", "cifar/readme.html": b"",
    }  # fmt: skip
    bank = load_image_bank(digits=False, archives=[archive(tmp_path / "c.tar.gz", files)])
    assert bank.names == ("airplane", "truck")
    assert_split(bank)
    tests = {bank.images[index].tobytes() for index in np.concatenate(bank.splits["test"])}
    assert tests == {item.tobytes() for item in pixels[30:]}
    with pytest.raises(FileFormatError, match="records of 3073 bytes"):
        read_archives([archive(tmp_path / "d.tar", files | {"cifar/data_batch_1.bin": b"torn"}, "w")])
    with pytest.raises(FileFormatError, match=r"label 1.*1 names"):
        read_archives([archive(tmp_path / "e.tar", files | {"cifar/batches.meta.txt": b"airplane"}, "w")])


class Trap:
    sprung = False

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (setattr, (Trap, "sprung", True))  # type: ignore[return-value]


def test_read_archives_with_pickles_raises(tmp_path: Path) -> None:
    path = archive(tmp_path / "p.tar.gz", {"cifar-10-batches-py/data_batch_1": pickle.dumps(Trap())})
    with pytest.raises(InputError, match="pickles"):
        read_archives([path])
    assert not Trap.sprung


def test_read_archives_of_invalid_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.tar"):
        load_image_bank(digits=False, archives=[tmp_path / "none.tar"])
    with pytest.raises(InputError, match="there are no images"):
        load_image_bank(digits=False)
    with pytest.raises(FileFormatError, match="contains no images"):
        read_archives([archive(tmp_path / "empty.tar", {"readme": b""}, "w")])
    with pytest.raises(FileFormatError, match=r"cat/a\.png"):
        read_archives([archive(tmp_path / "broken.tar", {"cat/a.png": png(noise(1)[0])[:100]}, "w")])
    with pytest.raises(FileFormatError, match="'big cat'"):
        read_archives([archive(tmp_path / "words.tar", {"big cat/a.png": png(noise(1)[0])}, "w")])
    with pytest.raises(InputError, match="2 images of 'cat'"):
        files = {f"cat/{index}.png": png(x) for index, x in enumerate(noise(2))}
        load_image_bank(digits=False, archives=[archive(tmp_path / "few.tar", files, "w")])
    with pytest.raises(InputError, match="two sources have images of 'one'"):
        files = {f"one/{index}.png": png(x) for index, x in enumerate(noise(20))}
        load_image_bank(digits=True, archives=[archive(tmp_path / "twice.tar", files, "w")])
    full = archive(
        tmp_path / "whole.tar.gz", {f"cat/{index}.png": png(x) for index, x in enumerate(noise(9))}
    ).read_bytes()
    for length in (0, 10, len(full) // 2, len(full) - 9):
        (tmp_path / "torn.tar.gz").write_bytes(full[:length])
        with pytest.raises(FileFormatError, match="tar archive"):
            read_archives([tmp_path / "torn.tar.gz"])


def test_read_archives_of_a_bomb_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(lzma.compress(bytes(20 << 20)))  # 3 kB
    with pytest.raises(FileFormatError, match="expands"):
        read_archives([path])


@given(content=st.binary(max_size=600))
def test_read_archives_of_any_bytes_reads_or_raises(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.tar"
    path.write_bytes(content)
    with pytest.raises((FileFormatError, InputError)):
        read_archives([path])
