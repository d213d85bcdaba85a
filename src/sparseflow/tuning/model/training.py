"""Training of AutoSparse Net on label sets, on one or several processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from sparseflow.core.config import StrictModel, apply_overrides, read_config_file, validate_config
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.history import read_history, smooth_curve
from sparseflow.core.training.loop import fit
from sparseflow.core.training.optimizer import check_finite, lr_factor, set_learning_rate, split_weight_decay
from sparseflow.errors import InputError, RunError
from sparseflow.tuning.model.dataset import (
    BatchSampling,
    CellLimits,
    RankingDataset,
    TrainingBatch,
    is_out_of_memory,
)
from sparseflow.tuning.model.net.losses import LossKind, expected_pick, ranking_loss
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig, TokenBatch
from sparseflow.tuning.model.net.pretrained import resolve_network, save_network
from sparseflow.tuning.model.ranking import (
    RankingScore,
    evaluate_ranking,
    make_network_scorer,
    summarize_scores,
)
from sparseflow.tuning.model.training_log import (
    RECORD_FILE,
    TrainingRecord,
    describe_data,
    describe_network,
)

NETWORK_FILE = "net.safetensors"

_MAX_VALIDATION_SCHEDULES = 512
"""Schedules of each held-out task in evaluations during training; the final evaluation uses all."""


class TrainConfig(StrictModel):
    """Configuration of a training.

    Attributes:
        net: Network configuration.
        init: Network whose weights training starts from, a file or `"shipped"`; random weights by default.
        loss: `"margin"`, `"rank"` or `"lambda"`.
        pick_weight: Weight of the expected label of a pick (`losses.expected_pick`), which is subtracted from
            the loss.
        sampling: Composition of a batch.
        steps: Number of updates of the weights.
        learning_rate: Peak learning rate; linear warm-up, then a cosine decay.
        warmup_fraction: Fraction of the steps with rising learning rate.
        weight_decay: Weight decay of AdamW.
        max_grad_norm: Maximum norm of the gradient.
        seed: Random seed of initial weights and batches.
        checkpoint_every: Steps between checkpoints.
        validate_every: Steps between evaluations on held-out data.
    """

    net: NetConfig = NetConfig()
    init: str | None = None
    loss: LossKind = "rank"
    pick_weight: float = Field(default=1.0, ge=0.0)
    sampling: BatchSampling = BatchSampling()
    steps: int = Field(default=2000, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0.0)
    warmup_fraction: float = Field(default=0.05, ge=0.0, le=1.0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    seed: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=100, ge=1)
    validate_every: int = Field(default=500, ge=1)

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
        content: dict[str, Any] = {}
        if config is not None:
            content = read_config_file(config, package="sparseflow.tuning", extra="tuning")
        init = (overrides or {}).get("init", content.get("init"))
        # Another type is refused below, with the other settings.
        net = resolve_network(init).config if isinstance(init, str) else NetConfig()
        if isinstance(content.setdefault("net", {}), dict):
            content["net"] = net.model_dump() | content["net"]
        return validate_config(cls, apply_overrides(content, overrides or {}), config or "the configuration")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainResult:
    """Result of a training.

    Attributes:
        net: The trained network.
        scores: Scores on all schedules of the held-out tasks; empty without held-out tasks and on ranks
            other than 0.
        limits: Pattern digest -> maximum number of cells, for patterns that did not fit into memory; 0 for
            patterns that were ignored.
    """

    net: AutoSparseNet
    scores: tuple[RankingScore, ...]
    limits: Mapping[str, int]


def train(
    config: TrainConfig,
    data: RankingDataset,
    out_dir: Path | str,
    *,
    held_out: RankingDataset | None = None,
    device: torch.device | str = "cpu",
    name: str | None = None,
    remarks: str = "",
    progress: Progress | None = None,
) -> TrainResult:
    """Train a network, or resume an interrupted training of the same directory.

    The directory gets `net.safetensors`, `losses.jsonl` (see `core.training.history`), a checkpoint, and
    `training.json`, the record of the training for the log (see `training_log`). A
    resumed training gives the same weights as an uninterrupted one: bitwise on a CPU, up to the summation
    order on a GPU. Processes of torchrun share the directory and sample different batches.

    Args:
        config: Configuration.
        data: Training data.
        out_dir: Output directory; an existing training is resumed.
        held_out: Data for evaluation only.
        device: Device; `"cuda"` under torchrun is the GPU of the local rank.
        name: Name of the model in the log; by default the name of the directory.
        remarks: Remarks in the log.
        progress: Progress callback.

    Raises:
        InputError: The directory has another training or is a file, or the initial network does not exist or
            has another configuration.
        FileFormatError: The checkpoint, the history or the initial network is damaged.
        RunError: The loss is not finite, a step does not fit into memory even without patterns, or another
            process trains in the directory.
    """
    trainer = fit(
        lambda context: _Trainer(
            config, data, held_out, context, name=name or Path(out_dir).resolve().name, remarks=remarks
        ),
        out_dir,
        device=device,
        checkpoint_every=config.checkpoint_every,
        progress=progress,
    )
    return TrainResult(net=trainer.net, scores=trainer.scores, limits=trainer.limits.limits)


class _Trainer:
    """Network, optimizer and data of one training; implements `core.training.loop.TrainingTask`."""

    def __init__(
        self,
        config: TrainConfig,
        data: RankingDataset,
        held_out: RankingDataset | None,
        context: DistributedContext,
        *,
        name: str,
        remarks: str,
    ) -> None:
        self.config, self.data, self._held_out, self._context = config, data, held_out, context
        self._name, self._remarks = name, remarks
        self.num_steps = config.steps
        self.eval_every = None if held_out is None else config.validate_every
        self.fingerprint = config.model_dump(mode="json") | {
            "tasks": len(data.groups),
            "labels": data.num_schedules,
            "processes": context.world_size,
        }
        self.step = 0
        self.scores: tuple[RankingScore, ...] = ()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.net = AutoSparseNet(config.net)
        if config.init is not None:
            self.net.load_state_dict(_load_initial_network(config).state_dict())
        self.net.to(context.device)
        parameters = split_weight_decay(self.net.parameters(), config.weight_decay)
        self.optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate)
        self.limits, self._held_out_limits = (
            CellLimits(dataset, 1 if config.net.pattern is None else config.net.pattern.max_cells)
            for dataset in (data, held_out or data)
        )

    def state_dict(self) -> dict[str, Any]:
        self._sync_limits()
        return {
            "step": self.step,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "limits": self.limits.limits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.limits.restore(state["limits"])
        self.step = state["step"]

    def finish(self, out_dir: Path) -> None:
        save_network(self.net, out_dir / NETWORK_FILE)
        if self._held_out is not None:
            scorer = make_network_scorer(self.net, self._held_out, self._held_out_limits)
            self.scores = evaluate_ranking(self._held_out.groups, scorer)
        # A repeated call of a finished training keeps its record.
        if not (out_dir / RECORD_FILE).exists():
            self._make_record(out_dir).save(out_dir / RECORD_FILE)

    def _make_record(self, out_dir: Path) -> TrainingRecord:
        config, rows = self.config, list(read_history(out_dir))
        losses = {
            kind: smooth_curve((row for row in rows if row.get("kind") == kind), "loss")[1]
            for kind in ("train", "held_out")
        }
        scores = summarize_scores(self.scores) if self.scores else None
        num_limited = len(self.limits.limits)
        remarks = [
            self._remarks,
            "" if config.init is None else f"starts from {config.init}",
            f"{num_limited} patterns did not fit into memory" if num_limited else "",
        ]
        return TrainingRecord(
            date=datetime.now().astimezone().replace(microsecond=0),
            model=self._name,
            structure=f"{describe_network(config.net)}; {config.loss} loss, {config.sampling.mode}",
            dataset=describe_data(self.data, self._held_out),
            steps=self.step,
            train_loss=losses["train"][-1],
            validation_loss=losses["held_out"][-1] if losses["held_out"] else None,
            top1=None if scores is None else scores["top1"]["mean"],
            top5=None if scores is None else scores["top5"]["mean"],
            remarks="; ".join(filter(None, remarks)),
        )

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        return f"step {self.step}, loss {metrics['loss']:.4f}"

    def _sync_limits(self) -> None:
        """Apply the lowest cell limit of any rank on all ranks."""
        no_limit = 1 << 62
        limits = self._context.all_reduce_min(
            [self.limits.limits.get(digest, no_limit) for digest in self.data.patterns]
        )
        self.limits.restore(
            {
                digest: limit
                for digest, limit in zip(self.data.patterns, limits, strict=True)
                if limit < no_limit
            }
        )

    def train_step(self) -> dict[str, float]:
        # The random state depends on the step only, so that a resumed training samples the same batches.
        rng = np.random.default_rng([self.config.seed, self.step, self._context.rank])
        batch = self.data.batch(self.config.sampling, rng)
        torch.manual_seed(int(rng.integers(2**62)))  # for dropout
        config = self.config
        rate = config.learning_rate * lr_factor(self.step, config.steps, warmup=config.warmup_fraction)
        set_learning_rate(self.optimizer, rate)
        loss = self._context.all_reduce_mean(self._compute_gradients(batch))
        self._context.average_gradients(self.net.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config.max_grad_norm)
        self.step += 1
        metrics = {"loss": float(loss), "rate": rate, "gradient": float(norm)}
        check_finite(metrics, step=self.step, hint=f"lower `learning_rate` (={self.config.learning_rate})")
        self.optimizer.step()
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Compute the loss and the ranking scores on a fixed sample of each held-out task."""
        assert self._held_out is not None
        parts = []
        for index, group in enumerate(self._held_out.groups):
            rng = np.random.default_rng([self.config.seed, index])
            parts.append(group.select_rows(rng.permutation(len(group))[:_MAX_VALIDATION_SCHEDULES]))
        score = make_network_scorer(self.net, self._held_out, self._held_out_limits)
        loss = 0.0
        for part in parts:
            arrays = [torch.from_numpy(array)[None] for array in (score(part), part.labels, part.weights)]
            loss += float(self._score_loss(*arrays)) / len(parts)
        summary = summarize_scores(evaluate_ranking(parts, score))
        return {"loss": loss} | {
            name: metric["mean"] for name, metric in summary.items() if isinstance(metric, dict)
        }

    def _compute_gradients(self, batch: TrainingBatch) -> Tensor:
        """Compute loss and gradients of a batch, and coarsen patterns until the batch fits into memory."""
        while True:
            try:
                return self._try_backward(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.config.net.pattern is None or not self.limits.shrink(batch.patterns):
                    raise RunError(
                        f"a batch of {self.config.sampling.max_schedules} schedules does not fit into memory "
                        "even without patterns; lower `schedules` or `matrices`"
                    ) from error
            # Outside of `except`, because the error keeps references to tensors that did not fit.
            if self._context.device.type == "cuda":
                torch.cuda.empty_cache()

    def _try_backward(self, batch: TrainingBatch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._compute_loss(batch)
        loss.backward()
        return loss.detach()

    def _compute_loss(self, batch: TrainingBatch) -> Tensor:
        device, net = self._context.device, self.net
        groups, schedules, length = batch.ids.shape
        patterns = pattern_index = None
        if net.config.pattern is not None:
            cells = [self.limits.get_cells(digest) for digest in batch.patterns]
            fit = np.array([cell is not None for cell in cells], bool)
            # Index -1 selects the last entry: unknown and ignored patterns.
            positions = np.append(np.where(fit, np.cumsum(fit) - 1, -1), -1)
            pattern_index = torch.from_numpy(positions[batch.pattern_index]).to(device)
            patterns = net.embed_patterns([cell for cell in cells if cell is not None])
        present = np.flatnonzero(batch.weights.ravel() > 0)
        tokens = TokenBatch.from_ids(
            batch.ids.reshape(-1, length)[present],
            self.data.encoder.table,
            task=present // schedules,
            device=device,
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            context = net.build_context(
                torch.from_numpy(batch.statistics).to(device), patterns, pattern_index
            )
            present_scores = net(tokens, context)
        scores = present_scores.new_zeros(groups * schedules).index_copy(
            0, torch.from_numpy(present).to(device), present_scores
        )
        labels, weights = (torch.from_numpy(array).to(device) for array in (batch.labels, batch.weights))
        return self._score_loss(scores.view(groups, schedules), labels, weights)

    def _score_loss(self, scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Compute the loss of scores, shape [g, s]."""
        loss = ranking_loss(self.config.loss, scores, labels, weights)
        if self.config.pick_weight:
            loss = loss - self.config.pick_weight * expected_pick(scores, labels, weights)
        return loss


def _load_initial_network(config: TrainConfig) -> AutoSparseNet:
    """Load the initial network; only its dropout may differ from the configuration."""
    assert config.init is not None
    initial = resolve_network(config.init)
    if initial.config.model_copy(update={"dropout": config.net.dropout}) != config.net:
        raise InputError(
            f"`init` (={config.init!r}) is a network with {initial.config}; `net` must have the same "
            f"settings, got {config.net}"
        )
    return initial
