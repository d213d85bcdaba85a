"""Screening of matrices: memory limits of the child process, resuming, and the list for training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse as sp
import torch

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.model import screening
from sparseflow.tuning.model.dataset import BatchSampling, is_out_of_memory, load_dataset
from sparseflow.tuning.model.screening import read_excluded, screen_matrices
from sparseflow.tuning.model.training import TrainConfig
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, change, on_disk

# Every element is a cell, so a large matrix needs much memory.
CONFIG = TrainConfig(
    net=change(SMALL, pattern={"channels": 32, "width": 8, "max_cells": 2**22}),
    sampling=BatchSampling(schedules=4, matrices=1, tasks=1),
)


def test_screen_lists_matrices_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "matrices"
    folder.mkdir()
    for name, size in (("m0", 60), ("m1", 200_000), ("m2", 80)):
        sp.save_npz(folder / f"{name}.npz", sp.random_array((size, size), density=4 / size, rng=0))
    (folder / "m3.mtx").write_text("no matrix")
    options: dict[str, Any] = {"memory_bytes": 300 << 20}
    result = screen_matrices([folder], CONFIG, tmp_path / "out", **options)
    assert [row.fits for row in result.rows] == [True, False, True, False]
    large, unreadable = result.rows[1], result.rows[3]
    assert large.elements == 800_000 and "memory" in str(large.error)
    assert unreadable.elements is None and "m3.mtx" in str(unreadable.error)
    assert read_excluded(result.excluded) == ("m1", "m3")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "_StepProcess", _NoProcess)
        assert screen_matrices([folder], CONFIG, tmp_path / "out", **options) == result
        with pytest.raises(InputError, match="config"):
            screen_matrices([folder], change(CONFIG, seed=1), tmp_path / "out", **options)

    labels = on_disk(tmp_path / "labels", matrices=3)
    data, _ = load_dataset([labels], exclude=read_excluded(result.excluded))
    assert {group.task.matrix for group in data.groups} == {"m0", "m2"}


class _NoProcess(screening._StepProcess):
    """Fails if a matrix is screened again."""

    def screen(self, name: str, file: Path) -> screening.ScreeningRow:
        raise AssertionError(f"{name} was screened before")


def test_screen_continues_after_the_death_of_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        sp.save_npz(tmp_path / f"{name}.npz", sp.eye_array(9))
    monkeypatch.setattr(screening, "_load_pattern", _die_or_load)
    first, second = screen_matrices([tmp_path], CONFIG, tmp_path / "out").rows
    assert not first.fits and first.error == "the process was killed"
    assert second.fits and second.elements == 9


def _die_or_load(file: Path) -> tuple[int | None, str | None]:
    if file.stem == "first":
        os.kill(os.getpid(), signal.SIGKILL)
    return screening._load_pattern(file)


def test_invalid_screening_raises(tmp_path: Path) -> None:
    sp.save_npz(tmp_path / "m.npz", sp.eye_array(9))
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"net\.pattern"):
        screen_matrices([tmp_path], change(CONFIG, net=NO_PATTERN), out)
    with pytest.raises(InputError, match="rename"):
        screen_matrices([tmp_path, tmp_path / "m.npz"], CONFIG, out)
    with pytest.raises(InputError, match="memory_bytes"):
        screen_matrices([tmp_path], CONFIG, out, memory_bytes=0)
    with pytest.raises(InputError, match="not found"):
        read_excluded(tmp_path / "none.txt")
    with pytest.raises(FileFormatError, match="list of names"):
        read_excluded(tmp_path / "m.npz")


def test_out_of_memory_errors_are_recognized() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60)
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
