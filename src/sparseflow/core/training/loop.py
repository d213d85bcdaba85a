"""Training loop with checkpoints, exact resume, history and evaluation, on one or several processes.

A training owns a directory: `checkpoint.pt`, `losses.jsonl` (see `history`), TensorBoard files, optionally
`settings.json`, and the task's results at the end. Running it again in the same directory continues from
the last checkpoint. The resumed run gives the same weights as an uninterrupted one if every step draws its
randomness from the seed and the step number only: bitwise on a CPU, up to the summation order on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress
from sparseflow.core.training import checkpoint
from sparseflow.core.training.distributed import DistributedContext, init_distributed
from sparseflow.core.training.history import History
from sparseflow.errors import InputError

SETTINGS_FILE = "settings.json"


class TrainingTask(Protocol):
    """Model, data and optimizer of one training.

    Attributes:
        num_steps: Steps of the full training.
        step: Completed steps; restored by `load_state_dict`.
        eval_every: Steps between calls of `evaluate`, which is also called after the last step; None never
            evaluates.
        fingerprint: Everything that the weights depend on, in JSON's types, with the number of processes if
            it matters. A checkpoint with another fingerprint is refused.
    """

    step: int

    @property
    def num_steps(self) -> int: ...

    @property
    def eval_every(self) -> int | None: ...

    @property
    def fingerprint(self) -> Mapping[str, Any]: ...

    def train_step(self) -> Mapping[str, float]:
        """Run one step on every rank, increment `step`, and return its metrics."""
        ...

    def evaluate(self) -> Mapping[str, float] | None:
        """Return metrics on held-out data, or None if there is nothing to record. Called on rank 0 only."""
        ...

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Return a short progress message for the metrics of a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings, lists and dicts. Called on every rank, so it may communicate."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        ...

    def finish(self, out_dir: Path) -> None:
        """Write the trained model and the final results. Called on rank 0 after the last step."""
        ...


TaskT = TypeVar("TaskT", bound=TrainingTask)


def fit(
    make_task: Callable[[DistributedContext], TaskT],
    out_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    checkpoint_every: int,
    eval_kind: str = "held_out",
    eval_before: bool = False,
    settings: Mapping[str, Any] | None = None,
    write_page: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> TaskT:
    """Train a task to its last step, or continue an interrupted training of the same directory.

    Args:
        make_task: Builds the task on this process. PyTorch's random state is restored after `fit`.
        out_dir: Output directory; created if absent. The processes of torchrun share it.
        device: Device to train on; `"cuda"` under torchrun is the GPU of the local rank.
        checkpoint_every: Steps between checkpoints. There is also one after each evaluation and after the
            last step.
        eval_kind: Name of the evaluation rows in the history, such as `"test"`.
        eval_before: Whether to evaluate before the first step, too.
        settings: Content of `settings.json`; None writes no such file.
        write_page: Called on rank 0 with `out_dir` after each evaluation.
        progress: Called on rank 0 after each step.

    Returns:
        The trained task.

    Raises:
        InputError: `out_dir` is a file or holds a training with another fingerprint.
        FileFormatError: The checkpoint or the history is damaged.
        RunError: The loss is not finite (the last checkpoint is kept), or another process trains in
            `out_dir`.
    """
    root = Path(out_dir)
    if root.exists() and not root.is_dir():
        raise InputError(f"`out_dir` (={root}) is a file; name a directory")
    root.mkdir(parents=True, exist_ok=True)
    with init_distributed(device) as context, torch.random.fork_rng(devices=context.cuda_devices):
        task = make_task(context)
        fingerprint = dict(task.fingerprint)
        history = History(root) if context.rank == 0 else None

        def evaluate() -> None:
            """Evaluate the task on rank 0, and record the metrics."""
            if history is None:
                return
            metrics = task.evaluate()
            if metrics is None:
                return
            history.log(task.step, eval_kind, metrics)
            history.sync()
            if write_page is not None:
                write_page(root)

        try:
            state = checkpoint.load(root, fingerprint)
            context.check_equal("the step of their checkpoint", -1 if state is None else state["step"])
            if history is not None and settings is not None:
                write_atomic(root / SETTINGS_FILE, json.dumps(dict(settings), indent=1) + "\n")
            if state is not None:
                task.load_state_dict(state["task"])
                del state  # Checkpoints are large.
            elif eval_before:
                evaluate()
            while task.step < task.num_steps:
                metrics = task.train_step()
                is_last = task.step == task.num_steps
                if history is not None:
                    history.log(task.step, "train", metrics)
                eval_due = task.eval_every is not None and (is_last or task.step % task.eval_every == 0)
                if eval_due:
                    evaluate()
                if is_last or eval_due or task.step % checkpoint_every == 0:
                    state = {"fingerprint": fingerprint, "step": task.step, "task": task.state_dict()}
                    if history is not None:
                        history.sync()
                        checkpoint.save(root, state)
                    del state
                if progress is not None and context.rank == 0:
                    progress(task.format_metrics(metrics), task.step / task.num_steps)
            if history is not None:
                task.finish(root)
            context.barrier()
        finally:
            if history is not None:
                history.close()
    return task
