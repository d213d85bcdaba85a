"""Atomic writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparseflow.core import files


def test_text_and_bytes_are_written(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "a", "naïve\n")
    files.write_atomic(tmp_path / "a", b"\x00\x01")
    assert (tmp_path / "a").read_bytes() == b"\x00\x01"
    assert os.listdir(tmp_path) == ["a"]


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    files.write_atomic(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_atomic(tmp_path / "a", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.write_atomic(tmp_path / "no" / "a", "x")
