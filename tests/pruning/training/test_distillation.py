"""Distillation: the loss, its weight, and teachers that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("sklearn")

from sparseflow.cli.root import run
from sparseflow.core.training.history import read_history
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.saved_model import save_model
from sparseflow.pruning.config import DistillationConfig
from sparseflow.pruning.training.distillation import Distillation
from sparseflow.pruning.training.train import train
from tests.pruning.small import quick


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    path = tmp_path / "teacher: dense.safetensors"
    torch.manual_seed(1)
    save_model(quick(mode="dense").build_model(num_classes=8, num_channels=1), path)
    return path


def test_loss_is_the_divergence_from_the_teacher(teacher: Path) -> None:
    student = quick().build_model(num_classes=8, num_channels=1).eval()
    config = DistillationConfig(teacher=teacher, temperature=3.0)
    distillation = Distillation(config, student, torch.device("cpu"))
    clips = torch.randn(5, 4, 1, 16, 16)
    logits = student(clips)
    p = functional.softmax(distillation.teacher(clips) / 3.0, 1)
    expected = 9.0 * (p * (p.log() - functional.log_softmax(logits / 3.0, 1))).sum(1).mean()
    torch.testing.assert_close(distillation.compute_loss(clips, logits), expected)
    assert distillation.compute_loss(clips, distillation.teacher(clips)).abs() < 1e-6
    distillation.compute_loss(clips, logits).backward()
    assert all(parameter.grad is None for parameter in distillation.teacher.parameters())


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_training_mixes_both_losses(teacher: Path, tmp_path: Path, weight: float) -> None:
    config = quick(distill={"teacher": str(teacher), "weight": weight}, ast={"keep": {}})
    train(config, tmp_path / "student")
    row = next(iter(read_history(tmp_path / "student")))
    mixed = (1.0 - weight) * row["task"] + weight * row["distillation"]
    assert row["loss"] == pytest.approx(mixed + row["L_AST"], rel=1e-5)


def test_teacher_must_fit(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student = quick(model={"num_frames": 2}).build_model(num_classes=8, num_channels=1)
    with pytest.raises(InputError, match="clip_shape"):
        Distillation(DistillationConfig(teacher=teacher), student, torch.device("cpu"))
    out = ["--config", "moving_digits", "--out", str(tmp_path / "run")]
    assert run(["pruning", "train", *out, "--distill", str(teacher)]) == 2
    assert "the teacher" in capsys.readouterr().err
    assert run(["pruning", "train", *out, "--distill", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
