"""Training a Grid-VQA model under random plans, from nothing to a folder that transformers reads.

A training has a folder: `losses.jsonl` (and TensorBoard's files), a checkpoint every so many steps, `model/`,
and `report.json`. The same call goes on where one was stopped, and gives the very weights that an unbroken
one would have given (on a CPU; on a GPU but for the order in which it adds): what a step draws depends on the
seed and the step's number alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.learner import VqaLearner
from sparseflow.adaptive.grid_vqa.model import load, save
from sparseflow.adaptive.grid_vqa.report import read_report, report_of, write_report
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.training import checkpoint
from sparseflow.core.training.distributed import init_distributed
from sparseflow.core.training.history import History
from sparseflow.errors import InputError

Progress = Callable[[str, float], None]

MODEL = "model"
SETTINGS = "settings.json"

_TRAINED = 0.95
"""Share of the progress that training takes; the rest is judging."""


@dataclass(frozen=True, kw_only=True)
class VqaTrainResult:
    """What a training gave.

    Attributes:
        folder: Of the model: `model.load`, `from_pretrained` and servers read it.
        report: What `report.json` holds; None in processes but the first.
    """

    folder: Path
    report: dict[str, Any] | None


def train(
    settings: VqaConfig,
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    bank: ImageBank | None = None,
    progress: Progress | None = None,
) -> VqaTrainResult:
    """Train a model and judge it, or go on where an earlier call in the same folder was stopped.

    Args:
        settings: Task, model and how to train.
        folder: Made when absent.
        device: Where to compute; `"cuda"` with torchrun is each process' own GPU.
        bank: Images in place of those that the settings name.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: A setting cannot be used, or the folder holds another training, or is a file.
        FileFormatError: The checkpoint, the history, the report or an archive of images is damaged.
        RunError: The loss is no longer finite (the last checkpoint is kept), or another process trains in the
            folder.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; name a folder")
    root.mkdir(parents=True, exist_ok=True)
    told = settings.train
    with init_distributed(device) as mine, torch.random.fork_rng(devices=mine.cuda_devices):
        data = VqaDataset(settings, mine.device, bank=bank)
        run = VqaLearner(settings, data, mine)
        asked = settings.model_dump(
            mode="json",
            exclude={
                "images": {"archives"}, "test_shares": True, "test_samples": True, "plan_samples": True,
                "train": {"checkpoint_every", "judge_every", "judge_samples"},
            },
        )  # fmt: skip
        of = asked | {
            "names": list(data.bank.names),
            "count": len(data.bank.images),
            "processes": mine.world_size,
        }
        history = History(root) if mine.rank == 0 else None
        report: dict[str, Any] | None = None
        try:
            state = checkpoint.load(root, of)
            mine.check_equal("the step that they stand at", -1 if state is None else state["step"])
            # Wall clock of the steps that are kept; judging now and then is among them.
            began = time.perf_counter()
            if state is not None:
                run.restore(state)
                began -= state.get("seconds", 0.0)
                del state
            if history is not None:
                write_atomic(root / SETTINGS, json.dumps(settings.model_dump(mode="json"), indent=1) + "\n")
            seconds = time.perf_counter() - began
            while run.step < run.steps:
                numbers = run.advance()
                last = run.step == run.steps
                if history is not None:
                    history.log(run.step, "train", numbers)
                    if (last or run.step % told.judge_every == 0) and run.step > told.vision_steps:
                        history.log(run.step, "val", run.judge())
                    if last or run.step % told.checkpoint_every == 0:
                        history.sync()
                        seconds = time.perf_counter() - began
                        checkpoint.save(root, run.state() | {"fingerprint": of, "seconds": seconds})
                if progress is not None and mine.rank == 0:
                    progress(_said(run, numbers), _TRAINED * run.step / run.steps)
            if history is not None:
                report = read_report(root)
                if report is None or report.get("asked") != _asked(settings):
                    save(run.average, settings, data.vocabulary, root / MODEL)
                    report = _judged(root, data, mine.device, seconds, progress)
            mine.barrier()
        finally:
            if history is not None:
                history.close()
    return VqaTrainResult(folder=root / MODEL, report=report)


def _judged(
    root: Path, data: VqaDataset, device: torch.device, seconds: float, progress: Progress | None
) -> dict[str, Any]:
    """Judge what lies in the folder, as it will be used: in half precision on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, _, _ = load(root / MODEL, device=device, dtype=dtype)
    told = (
        None if progress is None else lambda what, share: progress(what, _TRAINED + (1.0 - _TRAINED) * share)
    )
    report = report_of(model, data, progress=told)
    report |= {"asked": _asked(data.settings), "train_seconds": round(seconds, 1)}
    report["environment"] = collect_environment(device, seed=data.settings.train.seed)
    write_report(root, report)
    return report


def _asked(settings: VqaConfig) -> dict[str, Any]:
    """What a report depends on beside the training."""
    return settings.model_dump(mode="json", include={"test_shares", "test_samples", "plan_samples"})


def _said(run: VqaLearner, numbers: dict[str, float]) -> str:
    if "full" in numbers:
        return f"step {run.step} of {run.steps}, {numbers['right']:.1%} right"
    return f"step {run.step} of {run.steps}, {numbers['named_high']:.1%} of cells named right"
