"""Checkpoint files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from sparseflow.core.training import checkpoint
from sparseflow.errors import FileFormatError, InputError

FINGERPRINT = {"steps": 3, "net": {"width": 8}}


def test_load_returns_what_save_wrote(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, FINGERPRINT) is None
    state = {"fingerprint": FINGERPRINT, "step": 2, "net": {"a": torch.arange(3.0)}, "limits": {"x": 1}}
    checkpoint.save(tmp_path, state)
    loaded = checkpoint.load(tmp_path, FINGERPRINT)
    assert loaded is not None and loaded["step"] == 2 and loaded["limits"] == {"x": 1}
    torch.testing.assert_close(loaded["net"], state["net"])
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.CHECKPOINT_FILE]


def test_load_with_another_fingerprint_names_the_differences(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"fingerprint": FINGERPRINT, "step": 2})
    with pytest.raises(InputError, match=r"net\.width, seed"):
        checkpoint.load(tmp_path, FINGERPRINT | {"net": {"width": 16}, "seed": 1})


class Hostile:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", pickle.dumps({"fingerprint": FINGERPRINT}), pickle.dumps(Hostile())]
)
def test_load_of_another_format_raises_and_executes_nothing(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / checkpoint.CHECKPOINT_FILE
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=str(path)):
        checkpoint.load(tmp_path, FINGERPRINT)
    assert capsys.readouterr().out == ""


def test_load_of_a_truncated_file_raises(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"fingerprint": FINGERPRINT, "net": torch.zeros(100)})
    path = tmp_path / checkpoint.CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(FileFormatError, match=str(path)):
        checkpoint.load(tmp_path, FINGERPRINT)


def test_load_of_a_zip_archive_of_several_disks_raises(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"fingerprint": FINGERPRINT})
    path = tmp_path / checkpoint.CHECKPOINT_FILE
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x06\x07") + 16] = 2  # number of disks in the locator of ZIP64
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="disks"):
        checkpoint.load(tmp_path, FINGERPRINT)


@pytest.mark.parametrize("content", [[1, 2], {"fingerprint": 1}, {"fingerprint": {"steps": torch.zeros(2)}}])
def test_load_of_other_content_raises(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / checkpoint.CHECKPOINT_FILE)
    with pytest.raises(FileFormatError):
        checkpoint.load(tmp_path, FINGERPRINT)
