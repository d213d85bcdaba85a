"""Training of the controllers by GRPO, in one or several processes, with checkpoints."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import Costs, Environment
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.joint import JointTrainer
from sparseflow.core.progress import Progress
from sparseflow.core.training import checkpoint
from sparseflow.core.training.distributed import init_distributed
from sparseflow.core.training.history import History
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
    environment: Environment,
    folder: Path | str,
    *,
    held_out: Environment,
    model_id: str,
    costs: Costs | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ControllerTrainResult:
    """Train controllers, or resume an earlier run in the same folder.

    The folder contains `controllers.safetensors` (the best so far), `losses.jsonl` (see `History`) with rows
    of kind `"train"` per step and `"held_out"` per validation, including one before the first step, and a
    checkpoint. A resumed run gives the same weights as an uninterrupted one, bitwise on a CPU and up to the
    order of sums on a GPU. Processes started by torchrun share the folder and the prompts of each step; their
    number only changes the order of sums.

    Args:
        config: Settings.
        environment: Training requests.
        folder: Output folder; created if missing.
        held_out: Requests by which the best weights are selected; with the same plans.
        model_id: Id of the model, as `profile.weights_id` computes it; stored with the controllers.
        costs: Latency bounds: plans above a budget are never chosen. Without them the reward alone teaches
            which plans fit. Bounds at a high quantile guarantee budgets; with widely scattered latencies, a
            lower quantile leaves more plans to choose from, and the price of violations limits their
            fraction.
        device: Device of the controllers; `"cuda"` under torchrun is each process's own GPU.
        progress: Called with (message, fraction completed).

    Raises:
        InputError: The environments differ in their plans, a setting does not fit them, or the folder
            contains another run or is a file.
        FileFormatError: The checkpoint or the history is damaged.
        RunError: A loss or gradient is not finite (the last checkpoint is kept), or another process trains in
            the folder.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; choose a folder")
    if held_out.space != environment.space or held_out.width != environment.width:
        raise InputError("`held_out` has another model or other plans than `environment`")
    root.mkdir(parents=True, exist_ok=True)
    with init_distributed(device) as context:
        run = JointTrainer(config, environment, costs, model_id, context)
        settings = {name: value for name, value in asdict(config).items() if name != "checkpoint_every"}
        data = {"environment": environment.identity(), "held_out": held_out.identity()}
        fingerprint = settings | data | {"model_id": model_id, "masked": costs is not None}
        best = _BestCheckpoint(root / CONTROLLERS if context.rank == 0 else None)
        history = History(root) if context.rank == 0 else None
        try:
            state = checkpoint.load(root, fingerprint)
            context.check_equal("the step that they stand at", -1 if state is None else state["step"])
            if state is not None:
                run.restore(state["run"])
                best.restore(state["best"], run)
            elif history is not None:
                best.evaluate(run, history, held_out)
            while run.step < config.total_steps:
                numbers = run.train_step()
                last = run.step == config.total_steps
                if history is not None:
                    history.log(run.step, "train", numbers)
                    if last or run.step % config.validate_every == 0:
                        best.evaluate(run, history, held_out)
                    if last or run.step % config.checkpoint_every == 0:
                        history.sync()
                        checkpoint_state = {
                            "step": run.step,
                            "run": run.state(),
                            "best": best.state(),
                            "fingerprint": fingerprint,
                        }
                        checkpoint.save(root, checkpoint_state)
                if progress is not None and context.rank == 0:
                    progress(_format_progress(run.step, numbers), run.step / config.total_steps)
            context.barrier()
            controllers = Controllers.load(root / CONTROLLERS, model_id=model_id, device=context.device)
        finally:
            if history is not None:
                history.close()
    return ControllerTrainResult(controllers=controllers, step=best.step, validation=best.numbers)


class _BestCheckpoint:
    """The best weights so far, in a file that the first process writes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.step = -1
        self.numbers: dict[str, float] = {}
        self._weights: dict[str, torch.Tensor] = {}

    def evaluate(self, run: JointTrainer, history: History, held_out: Environment) -> None:
        numbers = run.validate(held_out)
        history.log(run.step, "held_out", numbers)
        # Ties select the later weights.
        if not self.numbers or numbers["score"] >= self.numbers["score"]:
            self.step, self.numbers = run.step, numbers
            self._weights = {
                name: weight.detach().clone() for name, weight in run.controllers.state_dict().items()
            }
            self._write(run)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "numbers": self.numbers, "weights": self._weights}

    def restore(self, state: dict[str, Any], run: JointTrainer) -> None:
        self.step, self.numbers, self._weights = state["step"], state["numbers"], state["weights"]
        # The file may be newer than the checkpoint.
        self._write(run)

    def _write(self, run: JointTrainer) -> None:
        if self._path is not None:
            controllers = copy.deepcopy(run.controllers)
            controllers.load_state_dict(self._weights)
            controllers.save(self._path)


def _format_progress(step: int, numbers: dict[str, float]) -> str:
    if "imitation" in numbers:
        return f"step {step}, imitation {numbers['imitation']:.4f}"
    return f"step {step}, accuracy {numbers['accuracy']:.1%}, in time {numbers['attainment']:.1%}"
