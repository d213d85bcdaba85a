"""Training of a Grid-VQA model under random plans, from initialization to a transformers directory.

A training owns a directory: `losses.jsonl` and TensorBoard files, checkpoints, `model/` and `report.json`.
See `core.training.loop` for the exact resume.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.grid_vqa.config import KINDS, VqaConfig, VqaModelConfig
from sparseflow.adaptive.grid_vqa.dataset import CHUNK, VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import evaluate_plans, measure_blind_baseline, measure_block_drops
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.learner import VqaLearner
from sparseflow.adaptive.grid_vqa.model import load_vqa_model, save_vqa_model
from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace
from sparseflow.adaptive.questions.task import PlanOutcomes
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import read_json, write_json
from sparseflow.core.metrics import pareto_front
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.loop import fit
from sparseflow.errors import FileFormatError

MODEL_DIR, REPORT_FILE = "model", "report.json"

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
        write_json(out_dir / REPORT_FILE, self.report, indent=1)


def make_report(model: Any, data: VqaDataset, *, progress: Progress | None = None) -> dict[str, Any]:
    """Evaluate a model on test samples: the full plan on all of them, all plans on the first ones.

    Args:
        model: Model, on the device of `data`.
        data: Samples; their numbers are those of its config.
        progress: Called with (message, fraction done).
    """
    config = data.config
    geometry = ModelGeometry(depth=config.model.depth, top_k=config.model.top_k)
    block_drops = measure_block_drops(model, data, count=config.train.eval_samples)
    space = PlanSpace.from_importance(geometry, block_drops)
    full = evaluate_plans(model, data, [geometry.full_plan()], count=config.test_samples)
    plan_samples = min(config.plan_samples, config.test_samples)
    plan_outcomes = evaluate_plans(model, data, space, count=plan_samples, progress=progress)
    text_tokens = round(float(next(data.iterate_questions("val", CHUNK)).prompts.mean()))
    rows = _make_plan_rows(plan_outcomes, config.model, text_tokens)
    return {
        "samples": config.test_samples,
        "plan_samples": plan_samples,
        "names": list(data.domain.question_names),
        "accuracy": float(full.correct.mean()),
        "by_kind": full.accuracy_by_kind(0, KINDS),
        "blind": asdict(measure_blind_baseline(data, count=config.test_samples)),
        "importance": list(block_drops),
        "text_tokens": text_tokens,
        "pareto_plans": sum(row["pareto"] for row in rows),
        "plans": rows,
    }


def load_report(out_dir: Path | str) -> dict[str, Any] | None:
    """Read the report of a training's directory; None if there is none yet.

    Raises:
        FileFormatError: It is damaged.
    """
    path = Path(out_dir) / REPORT_FILE
    if not path.is_file():
        return None
    report = read_json(path)
    if not isinstance(report, dict) or "accuracy" not in report:
        raise FileFormatError(f"{path} is not a report of a training; remove it")
    return report


def count_multiply_adds(config: VqaModelConfig, plan: Plan, text_tokens: int) -> int:
    """Multiply-adds of a prefill with an image: vision tower, attention and selected experts.

    Args:
        config: Sizes of the model.
        plan: Plan with a tier.
        text_tokens: Prompt tokens that do not belong to the image.
    """
    assert plan.tier is not None
    crops, tokens = CROPS[plan.tier], config.crop_tokens
    wide = config.vision_width
    layer = wide * (4 * wide + 2 * round(wide * config.vision_mlp)) + 2 * tokens * wide
    patch = 3 * config.patch_px**2 * wide
    project = wide * config.width + config.width**2
    vision = crops * tokens * (patch + config.vision_depth * layer + project)
    length = 1 + crops * tokens + text_tokens
    attention = 4 * config.width**2 + length * config.width
    expert = 3 * config.width * config.expert_width
    blocks = 0
    for block in plan.blocks:
        top_k = config.top_k if block < plan.insertion_position else plan.top_k
        blocks += length * (attention + config.experts * config.width + top_k * expert)
    return vision + blocks


def _make_plan_rows(outcomes: PlanOutcomes, config: VqaModelConfig, text_tokens: int) -> list[dict[str, Any]]:
    accuracy = outcomes.correct.mean(0).tolist()
    cost = [count_multiply_adds(config, plan, text_tokens) for plan in outcomes.plans]
    front = set(pareto_front(list(zip(cost, accuracy, strict=True)), maximize=(False, True)))
    return [
        {
            "plan": plan.id, "accuracy": accuracy[index], "multiply_adds": cost[index],
            "pareto": index in front,
        }
        for index, plan in enumerate(outcomes.plans)
    ]  # fmt: skip
