"""JointTrainer: trains model and hardware together (Version C), and its baselines.

An epoch of joint training updates weights and gates with

    L_task + lambda_AST L_AST + lambda_hw L_hw

(the task provides the first two terms), then the slot logits alpha with L_hw alone. Then chips are decoded
from alpha, segments mapped, chips placed and, every few epochs, layers split; each discrete change is kept
only if the objective decreases. The accuracy guard controls lambda_hw.

The initial chips must have memory for the model with all gates open, so that every state of the training fits
on them. If the model outgrows chips selected later, training returns to the initial ones.

A two-stage run trains the model without L_hw first and then runs the same number of hardware rounds. Two
further baselines use its model: `mapping-only` keeps the initial chips and positions, `layout-only` the
initial chips and mapping.

The output directory contains `trace.jsonl` (a row per epoch, round and final design), a checkpoint, and
finally `plan.json`. The same call resumes a stopped run; another config, chip library or proxy is refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.design.config import CodesignConfig
from sparseflow.codesign.design.decision import CostReference, DecisionCost, HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import save_plan
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.joint.accuracy_guard import AccuracyGuard
from sparseflow.codesign.joint.hw_loss import LayerAssignment, compute_hw_loss
from sparseflow.codesign.joint.trace import TRACE_FILE, TraceRow, open_trace
from sparseflow.codesign.workload.layers import to_float
from sparseflow.core.checks import check_one_of
from sparseflow.core.journal import Journal
from sparseflow.core.layers import LayerNode
from sparseflow.core.progress import Progress
from sparseflow.core.training import checkpoint
from sparseflow.core.training.epoch_trainer import EpochTrainer
from sparseflow.errors import InputError, RunError

log = logging.getLogger(__name__)

Mode = Literal["joint", "two-stage"]
MODES: tuple[Mode, ...] = ("joint", "two-stage")
MODEL_FILE = "model.safetensors"
"""File of the trained model in the output directory."""

BASELINES = ("two-stage", "mapping-only", "layout-only")
"""Designs of a two-stage run."""


@dataclass(frozen=True, kw_only=True)
class DesignResult:
    """Result of a run.

    Attributes:
        mode: Joint training or a baseline.
        accuracy: Accuracy of the model, from 0 to 1.
        decision: The hardware decision.
        cost: Its cost for the final model.
        violations: Number of epochs in which the guard was frozen.
    """

    mode: str
    accuracy: float
    decision: HardwareDecision
    cost: DecisionCost
    violations: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        derived = {"decision": self.decision.to_dict(), "energy_delay": self.cost.energy_delay}
        return asdict(self) | derived


class JointTrainer:
    """Trains a task together with the hardware.

    Args:
        task: The task.
        hardware: Available hardware.
        config: Config of the run.
        out_dir: Output directory; created if absent.
        mode: Joint training or the two-stage baseline.

    Raises:
        InputError: The mode is unknown, or `hardware` has another config.
    """

    def __init__(
        self,
        task: EpochTrainer,
        hardware: Hardware,
        config: CodesignConfig,
        out_dir: Path | str,
        *,
        mode: Mode = "joint",
    ) -> None:
        check_one_of(MODES, mode=mode)
        if config != hardware.config:
            raise InputError("`config` differs from the config of `hardware`")
        self.task, self.hardware, self.config, self.mode = task, hardware, config, mode
        self.out_dir = Path(out_dir)
        self.slots = ChipSlotConfig(
            hardware.chips,
            hardware.num_slots,
            tau=config.joint.tau[0],
            initial_chip=hardware.initial_chip.name,
        )
        self.guard = AccuracyGuard(config.schedule)
        self._optimizer = torch.optim.Adam(self.slots.parameters(), lr=config.joint.alpha_rate)
        self._initial_decision: HardwareDecision | None = None
        self._decision: HardwareDecision | None = None
        self._epoch = self._rounds = self._steps = self._draws = self._violations = 0
        self._accuracy = 0.0

    def run(self, progress: Progress | None = None) -> list[DesignResult]:
        """Train to the end, resuming an earlier call with the same output directory.

        Args:
            progress: Progress callback.

        Returns:
            The design; a two-stage run adds those of the other baselines.

        Raises:
            InputError: The directory contains another run, or the model does not fit on the initial chips.
            FileFormatError: Checkpoint or trace is damaged.
            RunError: A loss is not finite, or the model exceeds its size with open gates.
        """
        self.out_dir.mkdir(parents=True, exist_ok=True)
        fingerprint = {
            "settings": self.config.model_dump(mode="json"), "mode": self.mode,
            "library": self.hardware.library.model_dump(mode="json"), "proxy": self.hardware.proxy.digest,
        }  # fmt: skip
        state = checkpoint.load(self.out_dir, fingerprint)
        if state is None:
            self._start()
        else:
            self._load_state(state)
        with open_trace(
            self.out_dir / TRACE_FILE, self.hardware, mode=self.mode, seed=self.config.joint.seed,
            num_rows=None if state is None else state["rows"],
        ) as trace:  # fmt: skip
            while self._epoch < self.task.epochs:
                self._run_epoch(trace, progress)
                checkpoint.save(self.out_dir, self._state(trace) | {"fingerprint": fingerprint})
            # The two-stage baseline runs the hardware rounds of joint training, one per epoch after warmup,
            # after the last epoch.
            num_rounds = max(0, self.task.epochs - self.config.schedule.warmup_epochs + 1)
            num_rounds = num_rounds if self.mode == "two-stage" else 0
            while self._rounds < num_rounds:
                # Same temperatures as in the rounds of joint training.
                self._set_temperature(
                    (self.task.epochs - num_rounds + self._rounds) / max(1, self.task.epochs - 1)
                )
                self._rounds += 1
                self._update_alpha()
                self._decide(use_fine_split=self._rounds % self.config.joint.plan_every == 0)
                self._write_row(trace, "round")
                checkpoint.save(self.out_dir, self._state(trace) | {"fingerprint": fingerprint})
                if progress is not None:
                    progress(f"hardware round {self._rounds} of {num_rounds}", self._rounds / num_rounds)
            return self._finalize(trace, progress)

    def _start(self) -> None:
        layers = self.task.export_model().describe_layers(self.hardware.batch_size)
        self._initial_decision = self._decision = self.hardware.initial_decision(layers)
        try:
            self.hardware.make_plan(
                self._describe_training_layers(), self._initial_decision, use_fine_split=False
            )
        except InputError as error:
            raise InputError(
                f"the model with all gates open does not fit on the initial chips: {error}"
            ) from error

    def _run_epoch(self, trace: Journal[TraceRow], progress: Progress | None) -> None:
        weight = self.guard.weight if self.mode == "joint" else 0.0
        epochs = self.task.epochs

        def report(message: str, fraction: float) -> None:
            if progress is not None:
                progress(message, (self._epoch + fraction) / epochs)

        self._set_temperature(self._epoch / max(1, epochs - 1))
        extra = (lambda: self._weighted_hw_loss(weight)) if weight > 0.0 else None
        numbers = self.task.train_epoch(extra, report)
        self._accuracy = self.task.evaluate_accuracy()
        was_frozen = self.guard.frozen
        self.guard.update(self._accuracy)
        self._epoch += 1
        if self.guard.frozen and self.mode == "joint":
            self._violations += 1
        if self.guard.frozen != was_frozen and self.mode == "joint":
            log.warning(
                "epoch %d: accuracy %.4f, reference %.4f: hardware loss %s", self._epoch, self._accuracy,
                self.guard.reference, "disabled" if self.guard.frozen else "enabled",
            )  # fmt: skip
        if self.mode == "joint" and self.guard.allows_decisions:
            self._rounds += 1
            self._update_alpha()
            self._decide(use_fine_split=self._epoch % self.config.joint.plan_every == 0)
        self._write_row(trace, "epoch", numbers=dict(numbers), weight=weight)

    def _set_temperature(self, share: float) -> None:
        first, last = self.config.joint.tau
        self.slots.tau = first * (last / first) ** share

    def _weighted_hw_loss(self, weight: float) -> Tensor:
        """lambda_hw L_hw of the current model; 0 in steps that skip it."""
        self._steps += 1
        if self._steps % self.config.joint.hw_every:
            return torch.zeros(())
        loss, _ = self._hw_loss(self.task.differentiable_layers(self.hardware.batch_size))
        return weight * loss

    def _hw_loss(self, layers: Any, layout: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._decision is not None
        self._draws += 1
        random = np.random.default_rng([self.config.joint.seed, self._draws])
        generator = torch.Generator().manual_seed(int(random.integers(2**31)))
        assignment = LayerAssignment(
            assignment=self._decision.assign_layers(layers), splits=self._decision.select_splits(layers),
            mode=self.config.mapping.mode,
        )  # fmt: skip
        return compute_hw_loss(
            layers, self.slots, assignment, self.hardware.build_network(self._decision.positions_mm),
            self.hardware.proxy, self.hardware.lambdas, self.hardware.required_reference, generator=generator,
            layout=layout,
        )  # fmt: skip

    def _update_alpha(self) -> None:
        """Optimize the slot logits with model and decision fixed."""
        layers = self._describe_training_layers()
        for _ in range(self.config.joint.alpha_steps):
            assert self._decision is not None
            self._optimizer.zero_grad()
            alpha, _ = self.slots()
            layout = self.hardware.layout_loss(layers, self._decision, 1.0 - alpha[:, -1])
            loss, _ = self._hw_loss(layers, layout)
            loss.backward()
            self._optimizer.step()

    def _decide(self, *, use_fine_split: bool) -> None:
        """Decode chips from alpha and update mapping, splits and positions where that lowers the
        objective.
        """
        hardware, model = self.hardware, self.task.export_model()
        layers, unit_orders = model.describe_layers(hardware.batch_size), hardware.make_unit_orders(model)
        previous = self._fit_decision(layers)
        chips = tuple(None if chip is None else chip.name for chip in self.slots.decode())
        options: Any = {
            "use_fine_split": use_fine_split and self.config.joint.use_fine_split, "unit_orders": unit_orders
        }  # fmt: skip
        current = hardware.select_better(layers, previous, hardware.remap(layers, previous, **options))
        candidate = hardware.replace_chips(layers, current, chips, **options)
        current = hardware.select_better(layers, current, candidate)
        current = hardware.select_better(layers, current, hardware.optimize_placement(layers, current))
        self._decision = current
        chip_counts = Counter(chip for chip in current.chips if chip is not None)
        split = [layers[index].name for index in current.select_splits(layers)]
        log.info(
            "round %d, epoch %d: objective %.6g -> %.6g; %s; %s",
            self._rounds,
            self._epoch,
            hardware.evaluate_cost(layers, previous).objective,
            hardware.evaluate_cost(layers, current).objective,
            ", ".join(f"{count} {name}" for name, count in sorted(chip_counts.items())),
            f"split: {', '.join(split)}" if split else "rewrite_plan is None",
        )

    def _fit_decision(self, layers: Sequence[LayerNode]) -> HardwareDecision:
        """Adapt the decision to the current layers; fall back to the initial chips if they do not fit."""
        hardware = self.hardware
        assert self._initial_decision is not None and self._decision is not None
        try:
            return hardware.fit_to_layers(layers, self._decision)
        except InputError as error:
            log.warning(
                "epoch %d: the model no longer fits on its chips; using the initial chips: %s",
                self._epoch,
                error,
            )
        return self._fit_initial(layers)

    def _fit_initial(self, layers: Sequence[LayerNode]) -> HardwareDecision:
        """Adapt the initial decision to the current layers."""
        assert self._initial_decision is not None
        try:
            return self.hardware.fit_to_layers(layers, self._initial_decision)
        except InputError as error:
            raise RunError(
                f"after epoch {self._epoch} the model exceeds its size with open gates and does not "
                f"fit on the initial chips: {error}"
            ) from error

    def _describe_training_layers(self) -> list[LayerNode]:
        """Layers with the current FLOPs of the gates and the memory of open gates, as plain numbers."""
        return [
            replace(layer, flops=to_float(layer.flops), bytes=to_float(layer.bytes))
            for layer in self.task.differentiable_layers(self.hardware.batch_size)
        ]

    def _finalize(self, trace: Journal[TraceRow], progress: Progress | None) -> list[DesignResult]:
        hardware, model = self.hardware, self.task.export_model()
        layers = model.describe_layers(hardware.batch_size)
        if progress is not None:
            progress("refining the hardware", 1.0)
        options: Any = {
            "use_fine_split": self.config.joint.use_fine_split,
            "unit_orders": hardware.make_unit_orders(model),
        }
        refined = hardware.refine(layers, self._fit_decision(layers), **options)
        refined, extra = hardware.finalize(layers, refined, **options)
        decisions = {self.mode: refined}
        if self.mode == "two-stage":
            first = self._fit_initial(layers)
            candidates = {
                "mapping-only": hardware.remap(layers, first, **options),
                "layout-only": hardware.optimize_placement(layers, first),
            }
            decisions |= {
                mode: hardware.select_better(layers, first, candidate)
                for mode, candidate in candidates.items()
            }
        results = []
        for mode, decision in decisions.items():
            self._decision = decision
            cost = self._write_row(trace, "end", mode=mode)
            results.append(
                DesignResult(
                    mode=mode, accuracy=self._accuracy, decision=decision, cost=cost,
                    violations=self._violations,
                )
            )  # fmt: skip
        designs = [result.to_dict() for result in results]
        save_plan(self.out_dir, hardware, layers, results[0].decision, extra=extra | {"designs": designs})
        self.task.save(self.out_dir / MODEL_FILE)
        return results

    def _write_row(
        self,
        trace: Journal[TraceRow],
        kind: Literal["epoch", "round", "end"],
        *,
        numbers: Mapping[str, float] | None = None,
        weight: float = 0.0,
        mode: str | None = None,
    ) -> DecisionCost:
        layers = self.task.export_model().describe_layers(self.hardware.batch_size)
        self._decision = self._fit_decision(layers)
        cost = self.hardware.evaluate_cost(layers, self._decision)
        with torch.no_grad():
            alpha, _ = self.slots()
        trace.append(
            TraceRow(
                kind=kind, mode=mode or self.mode, epoch=self._epoch, round=self._rounds,
                accuracy=self._accuracy, lambda_hw=weight, frozen=self.guard.frozen,
                reference_accuracy=self.guard.reference, numbers=dict(numbers or {}), alpha=alpha.tolist(),
                probabilities=self.slots.probabilities.tolist(), layers=list(layers),
                decision=self._decision, cost=cost,
            )
        )  # fmt: skip
        return cost

    def _state(self, trace: Journal[TraceRow]) -> dict[str, Any]:
        assert self._initial_decision is not None and self._decision is not None
        return {
            "rows": len(trace), "task": self.task.state_dict(), "slots": self.slots.state_dict(),
            "optimizer": self._optimizer.state_dict(), "guard": self.guard.state_dict(),
            "first": self._initial_decision.to_dict(), "decision": self._decision.to_dict(),
            "reference": asdict(self.hardware.required_reference),
            "counts": [self._epoch, self._rounds, self._steps, self._draws, self._violations],
            "accuracy": self._accuracy, "tau": self.slots.tau,
        }  # fmt: skip

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.task.load_state_dict(state["task"])
        self.slots.load_state_dict(state["slots"])
        self.slots.tau = state["tau"]
        self._optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        self._initial_decision = HardwareDecision.from_dict(state["first"])
        self._decision = HardwareDecision.from_dict(state["decision"])
        self.hardware.reference = CostReference(**state["reference"])
        self._epoch, self._rounds, self._steps, self._draws, self._violations = state["counts"]
        self._accuracy = state["accuracy"]
