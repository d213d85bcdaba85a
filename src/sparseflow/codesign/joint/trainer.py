"""JointTrainer: model and hardware trained together (Version-C), and the baselines that it is held against.

An epoch of joint training: the model's weights and gates take their steps with

    L_task + lambda_AST L_AST + lambda_hw L_hw

(the task adds the first two); then the slots' logits alpha take theirs on L_hw alone; then chips are read
off alpha, segments are mapped, chips are placed, and, every few epochs, layers may be split. Each discrete
step is kept only if the objective falls. The guard (`guard.py`) decides whether the hardware counts at all.

The first chips must hold the model with all of its gates open, so that whatever training makes of it runs on
them: when gates open again, and it outgrows chips that were chosen since, the first ones are taken back.

A two-stage run trains the model first, without L_hw; the hardware then gets as many rounds as it would have
had. On the model that it trained stand two more baselines: `mapping-only` keeps the first chips and places
and decides mapping and splits; `layout-only` keeps the first chips and mapping and decides places.

A run has a folder: `trace.jsonl`, a row for each epoch (and each round, and each design at the end), a
checkpoint, and at the end `plan.json`. The same call goes on where one was stopped; with other settings, or
another chip library or proxy behind them, it is refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.design.config import Settings
from sparseflow.codesign.design.decision import Decision, Priced
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import hardware_record, save_plan
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.joint.accuracy_guard import AccuracyGuard
from sparseflow.codesign.joint.hw_loss import Placement, compute_hw_loss
from sparseflow.codesign.joint.trace import TRACE, Trace
from sparseflow.codesign.partition.planner import log as planner_log
from sparseflow.codesign.workload.layers import layer_records, number
from sparseflow.core.environment import collect_environment
from sparseflow.core.layers import LayerNode
from sparseflow.core.training import checkpoint
from sparseflow.core.training.epoch_trainer import EpochTrainer
from sparseflow.errors import InputError, RunError

log = logging.getLogger(__name__)

Mode = Literal["joint", "two-stage"]
MODES: tuple[Mode, ...] = ("joint", "two-stage")
MODEL = "model.safetensors"
"""What the task saves of itself in a run's folder."""

BASELINES = ("two-stage", "mapping-only", "layout-only")
"""Designs of a two-stage run, itself first."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Designed:
    """What a run gave.

    Attributes:
        mode: How it was found.
        accuracy: Of the model, from 0 to 1.
        decision: Of the hardware.
        priced: What that costs, for the finished model.
        violations: Epochs that the guard spent frozen.
    """

    mode: str
    accuracy: float
    decision: Decision
    priced: Priced
    violations: int


class JointTrainer:
    """Trains a task together with the hardware.

    Args:
        task: The model in training.
        hardware: What there is to build from.
        settings: How.
        folder: Of the run; made when absent.
        mode: Joint, or a baseline.

    Raises:
        InputError: An unknown mode, or the hardware was made with other settings.
    """

    def __init__(
        self,
        task: EpochTrainer,
        hardware: Hardware,
        settings: Settings,
        folder: Path | str,
        *,
        mode: Mode = "joint",
    ) -> None:
        if mode not in MODES:
            raise InputError(f"`mode` (={mode!r}) must be one of: {', '.join(MODES)}")
        if settings != hardware.settings:
            raise InputError("`settings` are not those that `hardware` was made with")
        self.task, self.hardware, self.settings, self.mode = task, hardware, settings, mode
        self.folder = Path(folder)
        self.slots = ChipSlotConfig(
            hardware.chips, hardware.slots, tau=settings.joint.tau[0], first=hardware.first.name
        )
        self.guard = AccuracyGuard(settings.guard_schedule())
        self._optimizer = torch.optim.Adam(self.slots.parameters(), lr=settings.joint.alpha_rate)
        self._first: Decision | None = None
        self._decision: Decision | None = None
        self._epoch = self._rounds = self._steps = self._draws = self._violations = 0
        self._accuracy = 0.0

    def run(self, progress: Progress | None = None) -> list[Designed]:
        """Train to the end, or go on where an earlier call in the same folder was stopped.

        Args:
            progress: Called with (what was done, fraction done).

        Returns:
            The design; a two-stage run adds those of the other two baselines.

        Raises:
            InputError: The folder holds another run, or one by another chip library or proxy; or the first
                chips do not hold the model (says by how much).
            FileFormatError: Its checkpoint or trace is damaged.
            RunError: A loss is not finite, or the model grew beyond what it said it could be.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        of = {
            "settings": self.settings.model_dump(mode="json"), "mode": self.mode,
            "library": self.hardware.library.model_dump(mode="json"), "proxy": self.hardware.proxy.digest,
        }  # fmt: skip
        state = checkpoint.load(self.folder, of)
        with Trace(self.folder / TRACE, rows=0 if state is None else state["rows"]) as trace:
            if state is None:
                self._begin(trace)
            else:
                self._restore(state)
            while self._epoch < self.task.epochs:
                self._one_epoch(trace, progress)
                checkpoint.save(self.folder, self._state(trace) | {"fingerprint": of})
            # What joint training does after every epoch, the two-stage baseline does after the last.
            rounds = self._rounds_in_all() if self.mode == "two-stage" else 0
            while self._rounds < rounds:
                # As warm in each round as joint training is in its own.
                self._anneal((self.task.epochs - rounds + self._rounds) / max(1, self.task.epochs - 1))
                self._rounds += 1
                self._alpha_round()
                self._decide(fine=self._rounds % self.settings.joint.plan_every == 0)
                self._record(trace, "round")
                checkpoint.save(self.folder, self._state(trace) | {"fingerprint": of})
                if progress is not None:
                    progress(f"hardware round {self._rounds} of {rounds}", self._rounds / rounds)
            return self._end(trace, progress)

    def _begin(self, trace: Trace) -> None:
        layers = self.task.export_model().describe_layers(self.hardware.batch)
        self._first = self._decision = self.hardware.begin(layers)
        try:
            self.hardware.planned(self._in_training(), self._first, fine=False)
        except InputError as error:
            raise InputError(
                f"the first chips hold the model as it is, but not with all of its gates open: {error}"
            ) from error
        trace.write(
            {
                "kind": "begin", "mode": self.mode, **hardware_record(self.hardware, self.folder),
                "environment": collect_environment("cpu", seed=self.settings.joint.seed),
            }
        )  # fmt: skip

    def _one_epoch(self, trace: Trace, progress: Progress | None) -> None:
        weight = self.guard.weight if self.mode == "joint" else 0.0
        epochs = self.task.epochs

        def tell(what: str, fraction: float) -> None:
            if progress is not None:
                progress(what, (self._epoch + fraction) / epochs)

        self._anneal(self._epoch / max(1, epochs - 1))
        extra = (lambda: self._pull(weight)) if weight > 0.0 else None
        numbers = self.task.train_epoch(extra, tell)
        self._accuracy = self.task.evaluate_accuracy()
        before = self.guard.frozen
        self.guard.update(self._accuracy)
        self._epoch += 1
        if self.guard.frozen and self.mode == "joint":
            self._violations += 1
        if self.guard.frozen != before and self.mode == "joint":
            log.warning(
                "epoch %d: accuracy %.4f, reference %.4f: the hardware %s", self._epoch, self._accuracy,
                self.guard.reference, "lets go" if self.guard.frozen else "counts again",
            )  # fmt: skip
        if self.mode == "joint" and self.guard.may_decide:
            self._rounds += 1
            self._alpha_round()
            self._decide(fine=self._epoch % self.settings.joint.plan_every == 0)
        self._record(trace, "epoch", numbers=dict(numbers), weight=weight)

    def _rounds_in_all(self) -> int:
        """Rounds that a joint run has: one after each epoch from where the guard first lets it decide."""
        return max(0, self.task.epochs - self.settings.guard_schedule().settle + 1)

    def _anneal(self, share: float) -> None:
        first, last = self.settings.joint.tau
        self.slots.tau = first * (last / first) ** share

    def _pull(self, weight: float) -> Tensor:
        """lambda_hw L_hw of the model as it is; 0 in steps that leave it out."""
        self._steps += 1
        if self._steps % self.settings.joint.hw_every:
            return torch.zeros(())
        loss, _ = self._hw_loss(self.task.differentiable_layers(self.hardware.batch))
        return weight * loss

    def _hw_loss(self, layers: Any, layout: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._decision is not None
        self._draws += 1
        random = np.random.default_rng([self.settings.joint.seed, self._draws])
        generator = torch.Generator().manual_seed(int(random.integers(2**31)))
        placement = Placement(
            homes=self._decision.homes(layers), splits=self._decision.splits(layers),
            mode=self.settings.mapping.mode,
        )  # fmt: skip
        return compute_hw_loss(
            layers, self.slots, placement, self.hardware.network(self._decision.positions_mm),
            self.hardware.proxy, self.hardware.lambdas, self.hardware.zeros, generator=generator,
            layout=layout,
        )  # fmt: skip

    def _alpha_round(self) -> None:
        """Steps of the slots' logits, the model and all that is discrete held still."""
        layers = self._in_training()
        for _ in range(self.settings.joint.alpha_steps):
            assert self._decision is not None
            self._optimizer.zero_grad()
            alpha, _ = self.slots()
            layout = self.hardware.layout_loss(layers, self._decision, 1.0 - alpha[:, -1])
            loss, _ = self._hw_loss(layers, layout)
            loss.backward()
            self._optimizer.step()

    def _decide(self, *, fine: bool) -> None:
        """Chips off alpha, then mapping, splits and places; each kept only if the objective falls."""
        hardware, model = self.hardware, self.task.export_model()
        layers, orders = model.describe_layers(hardware.batch), hardware.orders(model)
        before = self._fitted(layers)
        chips = tuple(None if chip is None else chip.name for chip in self.slots.decode())
        fine = fine and self.settings.joint.use_fine_split
        with _as_details():
            now = hardware.better(layers, before, hardware.remap(layers, before, fine=fine, orders=orders))
            tried = hardware.with_chips(layers, now, chips, fine=fine, orders=orders)
            now = hardware.better(layers, now, tried)
            now = self._decision = hardware.better(layers, now, hardware.replaced(layers, now))
        held = Counter(chip for chip in now.chips if chip is not None)
        split = [layers[at].name for at in now.splits(layers)]
        log.info(
            "round %d, epoch %d: objective %.6g -> %.6g; %s; %s", self._rounds, self._epoch,
            hardware.price(layers, before).objective, hardware.price(layers, now).objective,
            ", ".join(f"{count} {name}" for name, count in sorted(held.items())),
            f"split: {', '.join(split)}" if split else "rewrite_plan is None",
        )  # fmt: skip

    def _fitted(self, layers: Sequence[LayerNode]) -> Decision:
        """The decision for layers as they are now; on the first chips where it holds them no longer."""
        hardware = self.hardware
        assert self._first is not None and self._decision is not None
        try:
            return hardware.fitted(layers, self._decision)
        except InputError as error:
            log.warning(
                "epoch %d: the model has outgrown its chips, back to the first: %s", self._epoch, error
            )
        return self._on_first(layers)

    def _on_first(self, layers: Sequence[LayerNode]) -> Decision:
        """The first decision for layers as they are now."""
        assert self._first is not None
        try:
            return self.hardware.fitted(layers, self._first)
        except InputError as error:
            raise RunError(
                f"after epoch {self._epoch} the model is larger than with all of its gates open, and the "
                f"first chips do not hold it: {error}"
            ) from error

    def _in_training(self) -> list[LayerNode]:
        """Layers with the operations that gates leave now, and the memory of open ones; in plain numbers."""
        return [
            replace(layer, flops=number(layer.flops), bytes=number(layer.bytes))
            for layer in self.task.differentiable_layers(self.hardware.batch)
        ]

    def _end(self, trace: Trace, progress: Progress | None) -> list[Designed]:
        hardware, model = self.hardware, self.task.export_model()
        layers = model.describe_layers(hardware.batch)
        if progress is not None:
            progress("deciding the hardware", 1.0)
        orders, fine = hardware.orders(model), self.settings.joint.use_fine_split
        with _as_details():
            polished = hardware.polish(layers, self._fitted(layers), fine=fine, orders=orders)
        polished, extra = hardware.concluded(layers, polished, fine=fine, orders=orders)
        ends = {self.mode: polished}
        if self.mode == "two-stage":
            first = self._on_first(layers)
            with _as_details():
                mapped = hardware.remap(layers, first, fine=fine, orders=orders)
            ends["mapping-only"] = hardware.better(layers, first, mapped)
            ends["layout-only"] = hardware.better(layers, first, hardware.replaced(layers, first))
        found = []
        for mode, decision in ends.items():
            self._decision = decision
            priced = self._record(trace, "end", mode=mode)
            found.append(
                Designed(
                    mode=mode, accuracy=self._accuracy, decision=decision, priced=priced,
                    violations=self._violations,
                )
            )  # fmt: skip
        designs = [
            asdict(each) | {"decision": each.decision.to_dict(), "energy_delay": each.priced.energy_delay}
            for each in found
        ]
        save_plan(self.folder, hardware, layers, found[0].decision, extra=extra | {"designs": designs})
        self.task.save(self.folder / MODEL)
        return found

    def _record(
        self,
        trace: Trace,
        kind: str,
        *,
        numbers: Mapping[str, float] | None = None,
        weight: float = 0.0,
        mode: str | None = None,
    ) -> Priced:
        layers = self.task.export_model().describe_layers(self.hardware.batch)
        self._decision = self._fitted(layers)
        priced = self.hardware.price(layers, self._decision)
        with torch.no_grad():
            alpha, _ = self.slots()
        trace.write(
            {
                "kind": kind, "mode": mode or self.mode, "epoch": self._epoch, "round": self._rounds,
                "accuracy": self._accuracy, "lambda_hw": weight, "guard": self.guard.state(),
                "numbers": dict(numbers or {}),
                "alpha": alpha.tolist(), "probabilities": self.slots.probabilities.tolist(),
                "layers": layer_records(layers),
                "decision": self._decision.to_dict(), "priced": asdict(priced),
            }
        )  # fmt: skip
        return priced

    def _state(self, trace: Trace) -> dict[str, Any]:
        assert self._first is not None and self._decision is not None
        return {
            "rows": trace.rows, "task": self.task.state_dict(), "slots": self.slots.state_dict(),
            "optimizer": self._optimizer.state_dict(), "guard": self.guard.state(),
            "first": self._first.to_dict(), "decision": self._decision.to_dict(),
            "reference": asdict(self.hardware.zeros),
            "counts": [self._epoch, self._rounds, self._steps, self._draws, self._violations],
            "accuracy": self._accuracy, "tau": self.slots.tau,
        }  # fmt: skip

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.task.load_state_dict(state["task"])
        self.slots.load_state_dict(state["slots"])
        self.slots.tau = state["tau"]
        self._optimizer.load_state_dict(state["optimizer"])
        self.guard.restore(state["guard"])
        self._first = Decision.from_dict(state["first"])
        self._decision = Decision.from_dict(state["decision"])
        self.hardware.fix_reference(state["reference"])
        self._epoch, self._rounds, self._steps, self._draws, self._violations = state["counts"]
        self._accuracy = state["accuracy"]


class _Detail(logging.Filter):
    """Makes messages details."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


@contextmanager
def _as_details() -> Iterator[None]:
    """Meanwhile what the planner tells of splits is for the debug log: there is a plan or two each epoch."""
    detail = _Detail()
    planner_log.addFilter(detail)
    try:
        yield
    finally:
        planner_log.removeFilter(detail)
