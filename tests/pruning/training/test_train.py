"""Training: learning, resume and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError, RunError
from sparseflow.pruning.compaction.saved_model import load_model
from sparseflow.pruning.data.datasets import load_video_dataset
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.page import PAGE_FILE, plot_kept_tokens
from sparseflow.pruning.training.task import MODEL_FILE
from sparseflow.pruning.training.train import train
from tests.pruning.small import quick

ROOT = Path(__file__).parents[3]


def assert_same(model: VideoViT, other: VideoViT) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=0.0, atol=0.0)


def test_train_writes_history_page_and_model(tmp_path: Path) -> None:
    updates: list[tuple[str, float]] = []
    trained = train(quick(), tmp_path, progress=lambda *model: updates.append(model))
    rows = list(read_history(tmp_path))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 13))
    assert [row["step"] for row in rows if row["kind"] == "test"] == [6, 12]
    assert {"loss", "task", "accuracy", "rate", "L_AST", "sparsity_token"} < set(rows[0])
    assert [share for _, share in updates] == pytest.approx([index / 12 for index in range(1, 13)])
    assert trained.accuracy is not None and len(trained.accuracy.correct) == 20
    assert rows[-1]["video_top1"] == trained.accuracy.video_top1
    assert_same(load_model(tmp_path / MODEL_FILE), trained.model)
    assert json.loads((tmp_path / "settings.json").read_text()) == quick().model_dump(mode="json")
    page = (tmp_path / PAGE_FILE).read_text()
    assert "Training loss" in page and "Sparsity" in page
    assert "Tokens of test clips" in page and page.count("data:image/png;base64,") == 3 * 2
    assert "clip 1: 50%; clip 2: 50%; clip 3: 50%" in page


def test_plot_kept_tokens_of_dense_model_is_none() -> None:
    model = quick(mode="dense").build_model(num_classes=8, num_channels=1).eval()
    assert plot_kept_tokens(model, torch.zeros(1, 4, 1, 16, 16)) is None


@pytest.mark.usefixtures("no_page")
def test_loss_decreases(tmp_path: Path) -> None:
    # The same 16 clips in every epoch.
    settings = quick(
        mode="dense", model={"drop_rate": 0.0},
        train={"epochs": 20, "batch_size": 16, "rate": 1e-2, "checkpoint_every": 1000},
    )  # fmt: skip
    clips = load_video_dataset(quick(data={"train_clips": 16}, train={"epochs": 1}))
    train(settings, tmp_path, data=replace(clips, new_clips_per_epoch=False, epoch_clips=16))
    losses = [row["loss"] for row in read_history(tmp_path) if row["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.usefixtures("no_page")
def test_finished_training_is_reused_and_others_are_refused(tmp_path: Path) -> None:
    first = train(quick(), tmp_path)
    resumed = train(quick(), tmp_path, progress=lambda *_: pytest.fail("it trained"))
    assert_same(resumed.model, first.model)
    assert resumed.accuracy is not None and first.accuracy is not None
    assert resumed.accuracy.to_dict() == first.accuracy.to_dict() and resumed.stats == first.stats
    with pytest.raises(InputError, match=r"train\.rate"):
        train(quick(train={"rate": 0.1}), tmp_path)
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"torn")
    with pytest.raises(FileFormatError, match="remove it"):
        train(quick(), tmp_path)
    with pytest.raises(InputError, match="is a file"):
        train(quick(), tmp_path / MODEL_FILE)


KILLED = """
import os, signal, sys
from sparseflow.pruning.training.train import train
from tests.pruning.small import quick

def progress(what, share):
    if share > 9.5 / 12:
        os.kill(os.getpid(), signal.SIGKILL)

train(quick(), sys.argv[1], progress=progress)
"""


@pytest.mark.usefixtures("no_page")
def test_sigkill_in_mid_epoch_resumes_bitwise(tmp_path: Path) -> None:
    unbroken = train(quick(), tmp_path / "unbroken")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    steps: list[float] = []
    # It was killed in step 10; the last checkpoint is of step 8, in the middle of the second epoch.
    resumed = train(quick(), tmp_path / "killed", progress=lambda _, share: steps.append(round(12 * share)))
    assert steps == [9, 10, 11, 12]
    assert_same(resumed.model, unbroken.model)
    assert list(read_history(tmp_path / "killed")) == list(read_history(tmp_path / "unbroken"))
    assert_same(load_model(tmp_path / "killed" / MODEL_FILE), load_model(tmp_path / "unbroken" / MODEL_FILE))


@pytest.mark.usefixtures("no_page")
def test_workers_and_global_generator_do_not_change_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = train(quick(train={"epochs": 1}), tmp_path / "one")
    number = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(number, torch.rand(1)), "the global generator was used"
    two = train(quick(train={"epochs": 1, "workers": 1}), tmp_path / "two")
    assert_same(model.model, two.model)
    other = train(quick(train={"epochs": 1, "seed": 1}), tmp_path / "other")
    assert not torch.equal(other.model.head.weight, model.model.head.weight)


@pytest.mark.usefixtures("no_page")
def test_infinite_loss_stops_and_keeps_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = VideoViT.forward
    calls = []

    def broken(self: VideoViT, x: torch.Tensor, return_intermediate: bool = False, **options: Any) -> Any:
        output = forward(self, x, return_intermediate, **options)
        calls.append(1)
        if len(calls) == 6 and isinstance(output, tuple):
            return output[0] * float("nan"), output[1]
        return output

    with monkeypatch.context() as patch, pytest.raises(RunError, match="step 6: loss is nan"):
        patch.setattr(VideoViT, "forward", broken)
        train(quick(), tmp_path)
    steps: list[float] = []
    train(quick(), tmp_path, progress=lambda _, share: steps.append(round(12 * share)))
    assert steps[0] == 5, "the checkpoint of step 4 was kept"


@pytest.mark.usefixtures("no_page")
def test_infinite_gradient_stops_before_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def broken(parameters: Any, max_norm: float) -> torch.Tensor:
        calls.append(1)
        return torch.tensor(float("inf")) if len(calls) == 6 else clip(parameters, max_norm)

    settings = quick(train={"checkpoint_every": 1})
    with monkeypatch.context() as patch, pytest.raises(RunError, match="step 6: gradient is inf"):
        patch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
        train(settings, tmp_path)
    steps: list[float] = []
    train(settings, tmp_path, progress=lambda _, share: steps.append(round(12 * share)))
    assert steps[0] == 6


def test_missing_page_is_written_by_next_call(tmp_path: Path) -> None:
    settings = quick(train={"epochs": 1})
    train(settings, tmp_path)
    (tmp_path / PAGE_FILE).unlink()
    train(settings, tmp_path)
    assert (tmp_path / PAGE_FILE).is_file()


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_gives_finite_weights(amp: str, tmp_path: Path) -> None:
    trained = train(quick(train={"epochs": 1, "amp": amp}), tmp_path)
    assert all(bool(parameter.isfinite().all()) for parameter in trained.model.parameters())


def test_too_few_clips_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="64"):
        train(quick(train={"batch_size": 64}), tmp_path)


@pytest.mark.usefixtures("no_page")
def test_stronger_sparsity_loss_closes_at_least_as_many(tmp_path: Path) -> None:
    closed = []
    for strength in (0.0, 1.0, 10.0):
        settings = quick(
            ast={"strength": strength, "gate_init": 0.6, "keep": {"channel": 0.25}, "stages": {"1": 0.5}},
            train={"epochs": 3, "gate_rate": 100.0},
        )
        closed.append(train(settings, tmp_path / str(strength)).stats["sparsity_ch"])
    assert closed == sorted(closed)
    assert closed[0] < 0.25 and closed[-1] == pytest.approx(0.75, abs=0.05)
