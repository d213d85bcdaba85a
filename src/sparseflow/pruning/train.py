"""Training a VideoViT dense, with AST2.0-lite v2, or within a budget of latency; by one process or several.

A training has a folder: `losses.jsonl` (and TensorBoard's files), a checkpoint every so many steps and at the
end of each epoch, `model.safetensors`, and `report.html`, which is there after the first epoch. The same
call goes on where one was stopped, and gives the very weights that an unbroken one would have given (on a
CPU; on a GPU but for the order in which it adds): what a step draws depends on the seed and the step's number
alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from sparseflow.core.environment import environment
from sparseflow.core.files import write_atomic
from sparseflow.core.training import checkpoint
from sparseflow.core.training.history import History
from sparseflow.core.training.ranks import Ranks, ranks
from sparseflow.errors import InputError, RunError
from sparseflow.pruning.datasets import Batch, Data, batches, data_of
from sparseflow.pruning.evaluate import Accuracy, evaluate
from sparseflow.pruning.latency import LatencyModel, over_budget
from sparseflow.pruning.page import PAGE, write_page
from sparseflow.pruning.saved import save
from sparseflow.pruning.settings import Settings
from sparseflow.pruning.video_vit import VideoViT

Progress = Callable[[str, float], None]

MODEL = "model.safetensors"
SETTINGS = "settings.json"

_AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    with ranks(device) as mine, torch.random.fork_rng(devices=mine.cuda):
        run = _Training(settings, data, cost, mine)
        asked = settings.model_dump(mode="json", exclude={"train": {"workers", "checkpoint_every"}})
        of = asked | {"clips": data.epoch_clips, "processes": mine.size}
        history = History(root) if mine.rank == 0 else None
        circumstances = environment(str(mine.device), seed=settings.train.seed)
        accuracy: Accuracy | None = None
        try:
            state = checkpoint.read(root, of)
            mine.check_alike("the step that they stand at", -1 if state is None else state["step"])
            if state is not None:
                run.restore(state)
                del state
            if history is not None:
                write_atomic(root / SETTINGS, json.dumps(settings.model_dump(mode="json"), indent=1) + "\n")
            for epoch in range(run.step // run.epoch_steps, settings.train.epochs):
                for batch in run.clips(epoch):
                    numbers = run.advance(batch)
                    if history is not None:
                        history.write(run.step, "train", numbers)
                        due = run.step % settings.train.checkpoint_every == 0
                        if due and run.step % run.epoch_steps:
                            history.sync()
                            checkpoint.write(root, run.state() | {"of": of})
                    if progress is not None and mine.rank == 0:
                        what = f"epoch {epoch + 1} of {settings.train.epochs}, loss {numbers['loss']:.4f}"
                        progress(what, run.step / run.steps)
                if history is not None:
                    accuracy = run.judge()
                    history.write(run.step, "test", accuracy.to_dict() | run.stats())
                    history.sync()
                    write_page(root, circumstances)
                    # Not before: a training that is stopped meanwhile judges this epoch again.
                    checkpoint.write(root, run.state() | {"of": of})
            if history is not None:
                accuracy = accuracy or run.judge()
                save(run.model, root / MODEL)
                if not (root / PAGE).is_file():
                    write_page(root, circumstances)
            mine.wait()
        finally:
            if history is not None:
                history.close()
    return Trained(model=run.model.eval(), accuracy=accuracy, stats=run.stats())


class _Training:
    """A model, its optimizer and how far they are."""

    def __init__(self, settings: Settings, data: Data, cost: LatencyModel | None, mine: Ranks) -> None:
        self.settings, self.data, self._cost, self._mine = settings, data, cost, mine
        told = settings.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(told.seed)
            self.model = settings.make(len(data.classes), data.channels)
        self.model.to(mine.device)
        if cost is not None:
            cost.predict(self.model)  # which refuses another kind of model
        whole = told.batch_size * mine.size
        self.epoch_steps = data.epoch_clips // whole
        if self.epoch_steps < 1:
            raise InputError(f"an epoch has {data.epoch_clips} clips, fewer than a step's {whole}")
        self.steps, self.step = self.epoch_steps * told.epochs, 0
        gates = [] if self.model.gates is None else list(self.model.gates.parameters())
        weights = [each for name, each in self.model.named_parameters() if not name.startswith("gates.")]
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [each for each in weights if each.ndim > 1],
                    "weight_decay": told.weight_decay,
                    "scale": 1.0,
                },
                {"params": [each for each in weights if each.ndim <= 1], "weight_decay": 0.0, "scale": 1.0},
                {"params": gates, "weight_decay": 0.0, "scale": told.gate_rate},
            ],
            lr=told.rate,
        )
        self._amp = _AMP[told.amp]
        self._scaler = torch.amp.GradScaler(mine.device.type, enabled=told.amp == "fp16")
        self._stats: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "stats": self._stats,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._stats = dict(state["stats"])
        self.step = state["step"]

    def clips(self, epoch: int) -> Any:
        """What is left of an epoch, a batch of this process at a time."""
        told = self.settings.train
        self.data.set_epoch(epoch)
        places = self.data.order(epoch, told.seed)[: self.epoch_steps * told.batch_size * self._mine.size]
        mine = places.reshape(self.epoch_steps, self._mine.size, told.batch_size)[:, self._mine.rank]
        left = mine[self.step - epoch * self.epoch_steps :]
        return batches(
            self.data.train, left.reshape(-1), told.batch_size, workers=told.workers, device=self._mine.device
        )

    def advance(self, batch: Batch) -> dict[str, float]:
        """One step; its numbers."""
        told, device = self.settings.train, self._mine.device
        random = np.random.default_rng([told.seed, self.step, self._mine.rank])
        torch.manual_seed(int(random.integers(2**62)))  # for what is dropped
        share = self.step / self.steps
        rate = _rate(told.rate, share, told.warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        model = self.model.train()
        if self.model.ast is not None and told.softness_end is not None and self.model.ast.softness > 0.0:
            model.softness = (1.0 - share) * self.model.ast.softness + share * told.softness_end
        self.optimizer.zero_grad()
        with torch.autocast(device.type, self._amp, enabled=self._amp is not None):
            logits, info = model(batch["clip"], return_intermediate=True)
        task = functional.cross_entropy(
            logits.float(), batch["label"], label_smoothing=told.label_smoothing
        )  # fmt: skip
        loss, over = task + info["ast_stats"]["L_AST"], None
        if self._cost is not None and self.settings.latency is not None:
            over = over_budget(self._cost, model, self.settings.latency.budget)
            loss = loss + self.settings.latency.weight * over
        self._scaler.scale(loss).backward()
        # Averaged first: where one process' gradients overflowed, all of them leave the step out.
        self._mine.average(self.model.parameters())
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), told.clip)
        right = (logits.argmax(1) == batch["label"]).float().mean()
        stats = {name: each.detach() for name, each in info["ast_stats"].items()}
        found = {
            "loss": self._mine.mean(loss),
            "task": task.detach(),
            "right": right,
            "gradient": norm,
            **stats,
        }
        if over is not None:
            found["over_budget"] = over.detach()
        # All at once: a GPU is waited for only here.
        values = torch.stack([each.to(device, torch.float32) for each in found.values()]).tolist()
        numbers = dict(zip(found, values, strict=True)) | {"rate": rate}
        if not math.isfinite(numbers["loss"]):
            raise self._failed(f"its loss is {numbers['loss']}")
        if not math.isfinite(numbers["gradient"]):
            if not self._scaler.is_enabled():
                raise self._failed(f"the norm of its gradient is {numbers['gradient']}")
            del numbers["gradient"]  # half precision overflowed, and the scaler leaves this step out
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.step += 1
        self._stats = {name: numbers[name] for name in stats}
        return numbers

    def _failed(self, why: str) -> RunError:
        return RunError(
            f"the training failed in step {self.step + 1}: {why}. The checkpoint before is kept; lower "
            f"`rate` (={self.settings.train.rate})"
        )

    def stats(self) -> dict[str, float]:
        """`ast_stats` of the last step."""
        return dict(self._stats)

    def judge(self) -> Accuracy:
        """The test side, all of it."""
        told = self.settings.train
        found = evaluate(
            self.model, self.data.test, batch_size=told.batch_size, workers=told.workers,
            device=self._mine.device, amp=self._amp,
        )  # fmt: skip
        if not math.isfinite(found.loss):
            raise self._failed(f"the loss of test clips is {found.loss}")
        return found


def _rate(highest: float, share: float, warm_up: float) -> float:
    """The learning rate after a share of all steps."""
    if share < warm_up:
        return highest * (share / warm_up * 0.99 + 0.01)
    return highest * 0.5 * (1.0 + math.cos(math.pi * (share - warm_up) / max(1e-9, 1.0 - warm_up)))
