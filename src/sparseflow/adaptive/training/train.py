"""Training controllers by joint GRPO: by one process or several, going on after a stop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import Costs, Environment
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.joint import JointTrainer
from sparseflow.core.training import checkpoint
from sparseflow.core.training.distributed import init_distributed
from sparseflow.core.training.history import History
from sparseflow.errors import InputError

Progress = Callable[[str, float], None]

CONTROLLERS = "controllers.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class ControllerTrainResult:
    """What a training gave.

    Attributes:
        controllers: Those that did best on the held-out requests.
        step: After which step that was; 0 is before the first. Only the first process of several knows,
            others have -1.
        validation: Their numbers there: accuracy, attainment, latency_ms and score; empty where the step is
            -1.
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
    """Train controllers, or go on where an earlier call in the same folder was stopped.

    The folder then holds `controllers.safetensors`, the best so far at any time; `losses.jsonl` (see
    `History`), with rows of the kind `"train"` for each step, and `"held_out"` for each look at the held-out
    requests, that of step 0 before anything was learnt; and a checkpoint. Going on gives the weights that an
    unbroken run would have given: the very same on a CPU, and on a GPU but for the order in which it adds.
    Processes that torchrun started share the folder and each step's prompts; their number changes the order
    of sums only.

    Args:
        config: How.
        environment: What is learnt from.
        folder: Made when absent.
        held_out: What the best weights are chosen by; of the same plans.
        model_id: Of the model, as `profile.weights_id` gives it; kept with the controllers.
        costs: What plans are expected to take: those beyond a budget are then never chosen. Without it the
            reward alone teaches which plans fit. Costs by a high quantile keep budgets whatever is learnt;
            where latency scatters much, those by a lower one leave more to be chosen among, and the price of
            violations keeps their share.
        device: Where the controllers compute; `"cuda"` with torchrun is each process' own GPU.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: The environments differ in their plans, a setting does not fit them, or the folder holds
            another training, or is a file.
        FileFormatError: The checkpoint or the history is damaged.
        RunError: A loss or a gradient is no longer finite (the last checkpoint is kept), or another process
            trains in the folder.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; name a folder")
    if held_out.space != environment.space or held_out.width != environment.width:
        raise InputError("`held_out` is of another model or has other plans than `environment`")
    root.mkdir(parents=True, exist_ok=True)
    with init_distributed(device) as mine:
        run = JointTrainer(config, environment, costs, model_id, mine)
        asked = {name: value for name, value in asdict(config).items() if name != "checkpoint_every"}
        seen = {"environment": environment.identity(), "held_out": held_out.identity()}
        of = asked | seen | {"model_id": model_id, "masked": costs is not None}
        best = _BestCheckpoint(root / CONTROLLERS if mine.rank == 0 else None)
        history = History(root) if mine.rank == 0 else None
        try:
            state = checkpoint.load(root, of)
            mine.check_equal("the step that they stand at", -1 if state is None else state["step"])
            if state is not None:
                run.restore(state["run"])
                best.restore(state["best"], run)
            elif history is not None:
                best.look(run, history, held_out)
            while run.step < config.all_steps:
                numbers = run.advance()
                last = run.step == config.all_steps
                if history is not None:
                    history.log(run.step, "train", numbers)
                    if last or run.step % config.validate_every == 0:
                        best.look(run, history, held_out)
                    if last or run.step % config.checkpoint_every == 0:
                        history.sync()
                        kept = {"step": run.step, "run": run.state(), "best": best.state(), "fingerprint": of}
                        checkpoint.save(root, kept)
                if progress is not None and mine.rank == 0:
                    progress(_told(run.step, numbers), run.step / config.all_steps)
            mine.barrier()
            controllers = Controllers.load(root / CONTROLLERS, model_id=model_id, device=mine.device)
        finally:
            if history is not None:
                history.close()
    return ControllerTrainResult(controllers=controllers, step=best.step, validation=best.numbers)


class _BestCheckpoint:
    """The weights that did best so far, in a file that the first process writes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.step = -1
        self.numbers: dict[str, float] = {}
        self._weights: dict[str, torch.Tensor] = {}

    def look(self, run: JointTrainer, history: History, held_out: Environment) -> None:
        numbers = run.validate(held_out)
        history.log(run.step, "held_out", numbers)
        # Of equal ones the later: it has seen more.
        if not self.numbers or numbers["score"] >= self.numbers["score"]:
            self.step, self.numbers = run.step, numbers
            self._weights = {
                name: each.detach().clone() for name, each in run.controllers.state_dict().items()
            }
            self._write(run)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "numbers": self.numbers, "weights": self._weights}

    def restore(self, state: dict[str, Any], run: JointTrainer) -> None:
        self.step, self.numbers, self._weights = state["step"], state["numbers"], state["weights"]
        # The file may be of a step after the checkpoint.
        self._write(run)

    def _write(self, run: JointTrainer) -> None:
        if self._path is not None:
            kept = copy.deepcopy(run.controllers)
            kept.load_state_dict(self._weights)
            kept.save(self._path)


def _told(step: int, numbers: dict[str, float]) -> str:
    if "imitation" in numbers:
        return f"step {step}, imitation {numbers['imitation']:.4f}"
    return f"step {step}, accuracy {numbers['accuracy']:.1%}, in time {numbers['attainment']:.1%}"
