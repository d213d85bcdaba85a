"""Training AutoSparse Net: from pools of labels, by one process or several, going on after a stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.config import apply_overrides, read_config_file
from sparseflow.core.progress import Progress
from sparseflow.core.training import checkpoint
from sparseflow.core.training.distributed import DistributedContext, init_distributed
from sparseflow.core.training.history import History
from sparseflow.errors import InputError, RunError
from sparseflow.tuning.model.dataset import Batch, Dataset, Room, Sampling
from sparseflow.tuning.model.net.losses import LOSSES, Loss, expected_pick, ranking_loss
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig, Tokens
from sparseflow.tuning.model.net.pretrained import network, save
from sparseflow.tuning.model.ranking import Judged, by_net, judge, summary

NET = "net.safetensors"

_VALIDATION = 512
"""Schedules of each held-out task that are looked at while training; at the end it is all of them."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a network is trained.

    Attributes:
        net: What it is made of.
        init: Network whose weights training starts from, a file or `"shipped"`; random weights by default.
        loss: `"margin"`, `"rank"` or `"lambda"`.
        pick: Weight of the `expected_pick`'s label, which is subtracted from the loss.
        sampling: What a step looks at.
        steps: How many; a step is one update of the weights.
        rate: Highest learning rate; it rises over the first steps and falls as a cosine.
        warm_up: Share of the steps in which it rises.
        weight_decay: AdamW's.
        clip: Largest norm of the gradient.
        seed: What first weights and batches are drawn from.
        checkpoint_every: Steps from one checkpoint to the next.
        validate_every: Steps from one look at what is held out to the next.

    Raises:
        InputError: A value is out of range.
    """

    net: NetConfig = field(default_factory=NetConfig)
    init: str | None = None
    loss: Loss = "rank"
    pick: float = 1.0
    sampling: Sampling = field(default_factory=Sampling)
    steps: int = 2000
    rate: float = 3e-3
    warm_up: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    validate_every: int = 500

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"`loss` (={self.loss!r}) must be one of: {', '.join(LOSSES)}")
        for name, least in (("steps", 1), ("seed", 0), ("checkpoint_every", 1), ("validate_every", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"`{name}` (={value!r}) must be a whole number of at least {least}")
        if not (
            self.rate > 0.0
            and self.clip > 0.0
            and self.weight_decay >= 0.0
            and self.pick >= 0.0
            and 0.0 <= self.warm_up <= 1.0
        ):
            raise InputError(
                f"`rate` (={self.rate}) and `clip` (={self.clip}) must be above 0, `weight_decay` "
                f"(={self.weight_decay}) and `pick` (={self.pick}) at least 0, and `warm_up` "
                f"(={self.warm_up}) from 0 to 1"
            )

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` reads them back."""
        return asdict(self) | {"net": self.net.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """A configuration from what `to_dict` wrote, or parts of it; the rest has its defaults.

        Raises:
            InputError: A setting is unknown, or its value cannot be used.
        """
        try:
            given = dict(data)
            if "net" in given:
                given["net"] = NetConfig.from_dict(given["net"])
            if "sampling" in given:
                given["sampling"] = Sampling(**given["sampling"])
            return cls(**given)
        except TypeError as error:
            raise InputError(f"no configuration of a training: {error}") from error

    @classmethod
    def read(cls, config: str | None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
        """Read a configuration file and apply overrides.

        Args:
            config: YAML file, or a name in `list_configs("sparseflow.tuning")`; None for the defaults.
            overrides: Dotted name -> value, such as `{"net.pattern.kind": "hdc"}`.

        Raises:
            InputError: There is no such file, or a setting is unknown or out of range.
            FileFormatError: The file is not YAML.
            MissingExtraError: PyYAML is missing.
        """
        settings: dict[str, Any] = {}
        if config is not None:
            settings = read_config_file(config, package="sparseflow.tuning", extra="tuning")
        init = (overrides or {}).get("init", settings.get("init"))
        net = NetConfig() if init is None else network(init).config
        settings["net"] = net.to_dict() | settings.get("net", {})
        return cls.from_dict(apply_overrides(settings, overrides or {}))

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, the first being 0."""
        rising = max(1, round(self.warm_up * self.steps))
        if step < rising:
            return self.rate * (step + 1) / rising
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What a training gave.

    Attributes:
        net: The network.
        judged: The held-out tasks with all of their schedules; none where nothing was held out, and in
            processes but the first.
        limits: Digest -> cells at most, of patterns that did not fit into memory; 0 where one was set aside.
    """

    net: AutoSparseNet
    judged: tuple[Judged, ...]
    limits: Mapping[str, int]


def train(
    config: TrainConfig,
    data: Dataset,
    folder: Path | str,
    *,
    held_out: Dataset | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Trained:
    """Train a network, or go on where an earlier call in the same folder was stopped.

    The folder then holds `net.safetensors`, `losses.jsonl` (see `History`) and a checkpoint. Going on gives
    the weights that an unbroken run would have given: the very same on a CPU, and on a GPU but for the order
    in which it adds. Processes that torchrun started share the folder, and each draws batches of its own.

    Args:
        config: How.
        data: What is learnt from.
        folder: Made when absent.
        held_out: What is looked at, and not learnt from.
        device: Where to compute; `"cuda"` with torchrun is each process' own GPU.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: The folder holds another training, or is a file; or the initial network is not
            there, or is not made like the one to be trained.
        FileFormatError: The checkpoint, the history or the initial network is damaged.
        RunError: The loss is no longer finite, a step does not fit into memory even without patterns, or
            another process trains in the folder.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; name a folder")
    root.mkdir(parents=True, exist_ok=True)
    with init_distributed(device) as mine, torch.random.fork_rng(devices=mine.cuda_devices):
        run = _Training(config, data, held_out, mine)
        of = config.to_dict() | {
            "tasks": len(data.groups),
            "labels": data.schedules,
            "processes": mine.world_size,
        }
        history = History(root) if mine.rank == 0 else None
        try:
            state = checkpoint.load(root, of)
            mine.check_equal("the step that they stand at", -1 if state is None else state["step"])
            if state is not None:
                run.restore(state)
            while run.step < config.steps:
                numbers = run.advance()
                if history is not None:
                    history.log(run.step, "train", numbers)
                last = run.step == config.steps
                looks = held_out is not None and (last or run.step % config.validate_every == 0)
                if looks and history is not None:
                    history.log(run.step, "held_out", run.validate())
                if last or run.step % config.checkpoint_every == 0:
                    run.agree()
                    if history is not None:
                        history.sync()
                        checkpoint.save(root, run.state() | {"fingerprint": of})
                if progress is not None:
                    progress(f"step {run.step}, loss {numbers['loss']:.4f}", run.step / config.steps)
            judged: tuple[Judged, ...] = ()
            if history is not None:
                save(run.net, root / NET)
                judged = run.judge()
            mine.barrier()
        finally:
            if history is not None:
                history.close()
    return Trained(net=run.net, judged=judged, limits=run.room.limits)


class _Training:
    """A network, its optimizer and how far they are."""

    def __init__(
        self, config: TrainConfig, data: Dataset, held_out: Dataset | None, mine: DistributedContext
    ) -> None:
        self.config, self.data, self._held_out, self._mine = config, data, held_out, mine
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.net = AutoSparseNet(config.net)
        if config.init is not None:
            self.net.load_state_dict(_begun(config).state_dict())
        self.net.to(mine.device)
        decayed = [each for each in self.net.parameters() if each.ndim > 1]
        others = [each for each in self.net.parameters() if each.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.rate,
        )
        self.room, self._room_held_out = (
            Room(each, 1 if config.net.pattern is None else config.net.pattern.most_cells)
            for each in (data, held_out or data)
        )
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "limits": self.room.limits,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.room.take(state["limits"])
        self.step = state["step"]

    def agree(self) -> None:
        """What did not fit in one process is made smaller in all."""
        most = 1 << 62
        found = self._mine.all_reduce_min(
            [self.room.limits.get(digest, most) for digest in self.data.patterns]
        )
        self.room.take(
            {digest: limit for digest, limit in zip(self.data.patterns, found, strict=True) if limit < most}
        )

    def advance(self) -> dict[str, float]:
        """One step; its numbers."""
        # Drawn from the step's own number: nothing has to be remembered to go on.
        random = np.random.default_rng([self.config.seed, self.step, self._mine.rank])
        batch = self.data.batch(self.config.sampling, random)
        torch.manual_seed(int(random.integers(2**62)))  # for what is dropped
        rate = self.config.rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._mine.all_reduce_mean(self._gradients(batch))
        self._mine.average_gradients(self.net.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
        self.step += 1
        numbers = {"loss": float(loss), "rate": rate, "gradient": float(norm)}
        if not all(map(math.isfinite, numbers.values())):
            raise RunError(
                f"the training failed in step {self.step}: loss {numbers['loss']}, gradient "
                f"{numbers['gradient']}; lower `rate` (={self.config.rate})"
            )
        self.optimizer.step()
        return numbers

    def validate(self) -> dict[str, float]:
        """Loss and ranking of what is held out, on a fixed part of each task's schedules."""
        assert self._held_out is not None
        parts = []
        for at, group in enumerate(self._held_out.groups):
            random = np.random.default_rng([self.config.seed, at])
            parts.append(group.part(random.permutation(len(group))[:_VALIDATION]))
        score = by_net(self.net, self._held_out, self._room_held_out)
        loss = 0.0
        for part in parts:
            arrays = [torch.from_numpy(array)[None] for array in (score(part), part.labels, part.weights)]
            loss += float(self._of(*arrays)) / len(parts)
        told = summary(judge(parts, score))
        return {"loss": loss} | {name: one["mean"] for name, one in told.items() if isinstance(one, dict)}

    def judge(self) -> tuple[Judged, ...]:
        """What is held out, all of it."""
        if self._held_out is None:
            return ()
        return judge(self._held_out.groups, by_net(self.net, self._held_out, self._room_held_out))

    def _gradients(self, batch: Batch) -> Tensor:
        """The loss of a batch, its gradients in the parameters; patterns are made smaller until they fit."""
        while True:
            try:
                return self._attempt(batch)
            except torch.OutOfMemoryError as error:
                if self.config.net.pattern is None or not self.room.shrink(batch.patterns):
                    raise RunError(
                        f"a step of {self.config.sampling.most} schedules does not fit into memory, even "
                        "without patterns; lower `schedules` or `matrices`"
                    ) from error
            # Outside of `except`: there, the error still holds on to what did not fit.
            if self._mine.device.type == "cuda":
                torch.cuda.empty_cache()

    def _attempt(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        device, net = self._mine.device, self.net
        groups, schedules, length = batch.ids.shape
        patterns = which = None
        if net.config.pattern is not None:
            cells = [self.room.cells(digest) for digest in batch.patterns]
            fit = np.array([one is not None for one in cells], bool)
            # The last place is that of -1: not known, and nor are those that were set aside.
            places = np.append(np.where(fit, np.cumsum(fit) - 1, -1), -1)
            which = torch.from_numpy(places[batch.which]).to(device)
            patterns = net.embed_patterns([one for one in cells if one is not None])
        there = np.flatnonzero(batch.weights.ravel() > 0)
        tokens = Tokens.of(
            batch.ids.reshape(-1, length)[there],
            self.data.encoder.table,
            task=there // schedules,
            device=device,
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            context = net.context(torch.from_numpy(batch.statistics).to(device), patterns, which)
            found = net(tokens, context)
        scores = found.new_zeros(groups * schedules).index_copy(0, torch.from_numpy(there).to(device), found)
        labels, weights = (torch.from_numpy(array).to(device) for array in (batch.labels, batch.weights))
        return self._of(scores.view(groups, schedules), labels, weights)

    def _of(self, scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """The loss of scores, (g, s)."""
        loss = ranking_loss(self.config.loss, scores, labels, weights)
        if self.config.pick:
            loss = loss - self.config.pick * expected_pick(scores, labels, weights)
        return loss


def _begun(config: TrainConfig) -> AutoSparseNet:
    """The network that a training begins with; only dropout may differ, which has no weights."""
    assert config.init is not None
    found = network(config.init)
    if replace(found.config, dropout=config.net.dropout) != config.net:
        raise InputError(
            f"`init` (={config.init!r}) is a network with {found.config.to_dict()}; `net` must have the "
            f"same settings, and has {config.net.to_dict()}"
        )
    return found
