"""Training of a Grid-VQA model under random plans, from initialization to a transformers directory.

A training owns a directory: `losses.jsonl` and TensorBoard files, checkpoints, `model/` and `report.json`.
See `core.training.loop` for the exact resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.learner import VqaLearner
from sparseflow.adaptive.grid_vqa.model import load_vqa_model, save_vqa_model
from sparseflow.adaptive.grid_vqa.report import load_report, make_report, save_report
from sparseflow.core.environment import collect_environment
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.loop import SETTINGS_FILE, fit

__all__ = ["MODEL_DIR", "SETTINGS_FILE", "VqaTrainResult", "train"]

MODEL_DIR = "model"

_TRAINING_DONE = 0.95
"""Fraction of the progress after which the model is evaluated."""


@dataclass(frozen=True, kw_only=True)
class VqaTrainResult:
    """Result of `train`.

    Attributes:
        folder: Directory of the model, for `load_vqa_model`, transformers and servers.
        report: Content of `report.json`; None except on rank 0.
    """

    folder: Path
    report: dict[str, Any] | None


def train(
    config: VqaConfig,
    out_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    bank: ImageBank | None = None,
    progress: Progress | None = None,
) -> VqaTrainResult:
    """Train and evaluate a model, or resume an earlier call with the same directory.

    Args:
        config: Task, model and training settings.
        out_dir: Output directory; created if it does not exist.
        device: Device; `"cuda"` with torchrun is one GPU per process.
        bank: Images that replace those of the config.
        progress: Called with (message, fraction done).

    Raises:
        InputError: A setting is invalid, or the directory holds another training or is a file.
        FileFormatError: The checkpoint, history, report or an image archive is damaged.
        RunError: The loss is not finite (the last checkpoint is kept), or another process trains in the
            directory.
    """
    task = fit(
        lambda context: _VqaTraining(config, context, bank, progress),
        out_dir,
        device=device,
        checkpoint_every=config.train.checkpoint_every,
        eval_kind="val",
        settings=config.model_dump(mode="json"),
        progress=subrange(progress, 0.0, _TRAINING_DONE),
    )
    return VqaTrainResult(folder=Path(out_dir) / MODEL_DIR, report=task.report)


class _VqaTraining(VqaLearner):
    """The learner, with the evaluation of the saved model at the end. Implements `TrainingTask`.

    Attributes:
        report: Content of `report.json`; None before `finish`.
    """

    def __init__(
        self,
        config: VqaConfig,
        context: DistributedContext,
        bank: ImageBank | None,
        progress: Progress | None,
    ) -> None:
        super().__init__(config, VqaDataset(config, context.device, bank=bank), context)
        self.report: dict[str, Any] | None = None
        self._progress = progress

    @property
    def eval_every(self) -> int:
        return self.config.train.eval_every

    @property
    def fingerprint(self) -> dict[str, Any]:
        record = self.config.model_dump(
            mode="json",
            exclude={
                "images": {"archives"}, "test_shares": True, "test_samples": True, "plan_samples": True,
                "train": {"checkpoint_every", "eval_every", "eval_samples"},
            },
        )  # fmt: skip
        return record | {
            "names": list(self.data.bank.names),
            "count": len(self.data.bank.images),
            "processes": self._context.world_size,
        }

    def finish(self, out_dir: Path) -> None:
        evaluation = self.config.model_dump(
            mode="json", include={"test_shares", "test_samples", "plan_samples"}
        )
        self.report = load_report(out_dir)
        if self.report is not None and self.report.get("evaluation") == evaluation:
            return
        save_vqa_model(self.average, self.config, self.data.vocabulary, out_dir / MODEL_DIR)
        # The saved model is evaluated as it will be used: in half precision on a GPU.
        device = self._context.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model, _, _ = load_vqa_model(out_dir / MODEL_DIR, device=device, dtype=dtype)
        self.report = make_report(model, self.data, progress=subrange(self._progress, _TRAINING_DONE, 1.0))
        self.report |= {
            "evaluation": evaluation,
            "train_seconds": round(self.elapsed_s, 1),
            "environment": collect_environment(device, seed=self.config.train.seed),
        }
        save_report(out_dir, self.report)
