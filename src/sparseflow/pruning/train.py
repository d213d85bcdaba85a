"""Training a VideoViT dense, with AST2.0-lite v2, or within a budget of latency; by one process or several.

A training has a folder: `losses.jsonl` (and TensorBoard's files), a checkpoint every so many steps and at the
end of each epoch, `model.safetensors`, and `report.html`, which is there after the first epoch. The same
call goes on where one was stopped, and gives the very weights that an unbroken one would have given (on a
CPU; on a GPU but for the order in which it adds): what a step draws depends on the seed and the step's number
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.training import checkpoint
from sparseflow.core.training.distributed import init_distributed
from sparseflow.core.training.history import History
from sparseflow.errors import InputError
from sparseflow.pruning.datasets import Data, data_of
from sparseflow.pruning.evaluate import Accuracy
from sparseflow.pruning.latency import LatencyModel
from sparseflow.pruning.page import PAGE, write_page
from sparseflow.pruning.saved import save
from sparseflow.pruning.settings import Settings
from sparseflow.pruning.training import Training
from sparseflow.pruning.video_vit import VideoViT

Progress = Callable[[str, float], None]

MODEL = "model.safetensors"
SETTINGS = "settings.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What a training gave.

    Attributes:
        model: The model.
        accuracy: On the test side; None in processes but the first.
        stats: `ast_stats` of the last step.
    """

    model: VideoViT
    accuracy: Accuracy | None
    stats: Mapping[str, float]


def train(
    settings: Settings,
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    data: Data | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train a model, or go on where an earlier call in the same folder was stopped.

    Args:
        settings: Model, data and how to train.
        folder: Made when absent.
        device: Where to compute; `"cuda"` with torchrun is each process' own GPU.
        data: Data to use in place of what the settings name.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: A setting cannot be used, or the folder holds another training, or is a file.
        FileFormatError: The checkpoint, the history or the data is damaged.
        RunError: The loss is no longer finite (the last checkpoint is kept), or another process trains in
            the folder.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; name a folder")
    root.mkdir(parents=True, exist_ok=True)
    cost = None if settings.latency is None else LatencyModel.load(settings.latency.model)
    if data is None:
        told = (
            None if progress is None else lambda done, of: progress(f"counting frames, {done} of {of}", 0.0)
        )
        data = data_of(settings, progress=told)
    with init_distributed(device) as mine, torch.random.fork_rng(devices=mine.cuda_devices):
        run = Training(settings, data, cost, mine)
        asked = settings.model_dump(mode="json", exclude={"train": {"workers", "checkpoint_every"}})
        of = asked | {"clips": data.epoch_clips, "processes": mine.world_size}
        history = History(root) if mine.rank == 0 else None
        circumstances = collect_environment(str(mine.device), seed=settings.train.seed)
        accuracy: Accuracy | None = None
        try:
            state = checkpoint.load(root, of)
            mine.check_equal("the step that they stand at", -1 if state is None else state["step"])
            if state is not None:
                run.restore(state)
                del state
            if history is not None:
                write_atomic(root / SETTINGS, json.dumps(settings.model_dump(mode="json"), indent=1) + "\n")
            for epoch in range(run.step // run.epoch_steps, settings.train.epochs):
                for batch in run.clips(epoch):
                    numbers = run.advance(batch)
                    if history is not None:
                        history.log(run.step, "train", numbers)
                        due = run.step % settings.train.checkpoint_every == 0
                        if due and run.step % run.epoch_steps:
                            history.sync()
                            checkpoint.save(root, run.state() | {"fingerprint": of})
                    if progress is not None and mine.rank == 0:
                        what = f"epoch {epoch + 1} of {settings.train.epochs}, loss {numbers['loss']:.4f}"
                        progress(what, run.step / run.steps)
                if history is not None:
                    accuracy = run.judge()
                    history.log(run.step, "test", accuracy.to_dict() | run.stats())
                    history.sync()
                    write_page(root, circumstances)
                    # Not before: a training that is stopped meanwhile judges this epoch again.
                    checkpoint.save(root, run.state() | {"fingerprint": of})
            if history is not None:
                accuracy = accuracy or run.judge()
                save(run.model, root / MODEL)
                if not (root / PAGE).is_file():
                    write_page(root, circumstances)
            mine.barrier()
        finally:
            if history is not None:
                history.close()
    return Trained(model=run.model.eval(), accuracy=accuracy, stats=run.stats())
