"""Training of the controllers by GRPO, in one or several processes, with checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.joint import JointTrainer
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.loop import fit
from sparseflow.errors import InputError

CONTROLLERS = "controllers.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class ControllerTrainResult:
    """Result of a training.

    Attributes:
        controllers: The best controllers on the held-out requests.
        step: Step at which they were saved; 0 is before the first. -1 in processes other than the first.
        validation: Their accuracy, attainment, latency_ms and score; empty if `step` is -1.
    """

    controllers: Controllers
    step: int
    validation: dict[str, float]


def train(
    config: GrpoConfig,
    outcomes: OutcomeTable,
    out_dir: Path | str,
    *,
    held_out: OutcomeTable,
    model_id: str,
    costs_ms: Tensor | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ControllerTrainResult:
    """Train controllers, or resume an earlier run in the same directory.

    The directory contains `controllers.safetensors` (the best so far) and the files of `core.training.loop`;
    rows of kind `"held_out"` are validations, including one before the first step. Processes started by
    torchrun share the directory and the prompts of each step; their number only changes the order of sums.

    Args:
        config: Settings.
        outcomes: Outcomes of the training requests.
        out_dir: Output directory; created if missing.
        held_out: Requests by which the best weights are selected; with the same plans.
        model_id: Id of the model, as `profile.compute_weights_id` computes it; stored with the controllers.
        costs_ms: Latency bound of each plan, [plans]: plans above a budget are never chosen. Without them the
            reward alone teaches which plans fit. Bounds at a high quantile guarantee budgets; with widely
            scattered latencies, a lower quantile leaves more plans to choose from, and the price of
            violations limits their fraction.
        device: Device of the controllers; `"cuda"` under torchrun is each process's own GPU.
        progress: Called with (message, fraction completed).

    Raises:
        InputError: The tables differ in their plans, a setting does not fit them, or the directory contains
            another run or is a file.
        FileFormatError: The checkpoint or the history is damaged.
        RunError: A loss or gradient is not finite (the last checkpoint is kept), or another process trains in
            the directory.
    """
    if held_out.space != outcomes.space or held_out.width != outcomes.width:
        raise InputError("`held_out` has another model or other plans than `outcomes`")
    path = Path(out_dir) / CONTROLLERS
    training = fit(
        lambda context: _ControllerTraining(
            config, outcomes, costs_ms, model_id, context, held_out=held_out, path=path
        ),
        out_dir, device=device, checkpoint_every=config.checkpoint_every, eval_before=True, progress=progress,
    )  # fmt: skip
    return ControllerTrainResult(
        controllers=Controllers.load(path, model_id=model_id, device=training.controllers.device),
        step=training.best_step,
        validation=training.best_metrics,
    )


class _ControllerTraining(JointTrainer):
    """The trainer, with validation and the best weights so far. Implements `TrainingTask`.

    Args:
        held_out: Requests of the validation.
        path: File of the best weights, which the first process writes.

    Attributes:
        best_step: Step of the best weights; -1 in processes other than the first.
        best_metrics: Their metrics.
    """

    def __init__(
        self,
        config: GrpoConfig,
        outcomes: OutcomeTable,
        costs_ms: Tensor | None,
        model_id: str,
        context: DistributedContext,
        *,
        held_out: OutcomeTable,
        path: Path,
    ) -> None:
        super().__init__(config, outcomes, costs_ms, model_id, context)
        self._held_out, self._path = held_out, path
        self.num_steps, self.eval_every = config.total_steps, config.validate_every
        self.fingerprint = config.model_dump(mode="json", exclude={"checkpoint_every"}) | {
            "train": outcomes.identity(), "held_out": held_out.identity(), "model_id": model_id,
            "masked": costs_ms is not None,
        }  # fmt: skip
        self.best_step = -1
        self.best_metrics: dict[str, float] = {}
        self._best_weights: dict[str, Tensor] = {}

    def evaluate(self) -> dict[str, float]:
        metrics = self.validate(self._held_out)
        # Ties select the later weights.
        if not self.best_metrics or metrics["score"] >= self.best_metrics["score"]:
            self.best_step, self.best_metrics = self.step, metrics
            weights = self.controllers.state_dict()
            self._best_weights = {name: weight.detach().clone() for name, weight in weights.items()}
            self._save_best()
        return metrics

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        if "imitation" in metrics:
            return f"step {self.step}, imitation {metrics['imitation']:.4f}"
        return f"step {self.step}, accuracy {metrics['accuracy']:.1%}, in time {metrics['attainment']:.1%}"

    def state_dict(self) -> dict[str, Any]:
        best = {"step": self.best_step, "metrics": self.best_metrics, "weights": self._best_weights}
        return super().state_dict() | {"best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._context.rank == 0:
            best = state["best"]
            self.best_step, self.best_metrics = best["step"], best["metrics"]
            self._best_weights = best["weights"]
            # The file may be newer than the checkpoint.
            self._save_best()

    def finish(self, out_dir: Path) -> None:
        """Do nothing: the best controllers are saved by `evaluate`."""

    def _save_best(self) -> None:
        controllers = copy.deepcopy(self.controllers)
        controllers.load_state_dict(self._best_weights)
        controllers.save(self._path)
