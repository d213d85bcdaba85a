"""A training task without data, with two gates over a chain of layers, for tests of joint training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.design.config import CodesignConfig
from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.joint.trace import TRACE_FILE
from sparseflow.codesign.joint.trainer import DesignResult, JointTrainer, Mode
from sparseflow.codesign.layout import Wafer, WaferLayout
from sparseflow.codesign.workload.layers import slice_layer
from sparseflow.core.config import validate_config
from sparseflow.core.layers import LayerNode
from tests.codesign.nodes import made_layers

QUICK: dict[str, Any] = {
    "task": {},
    "hardware": {
        "chips": ["npu-s", "npu-m", "memory-m"],
        "slots": 3,
        "initial_chip": "npu-m",
        "batch_size": 8,
    },
    "mapping": {"strategy": "dp"},
    "partition": {"segments": 4, "min_split_gain_ratio": 0.0, "max_split_layers": 1},
    "wafer": {"radius_mm": 60.0, "restarts": 1, "refine_steps": 0},
    "schedule": {"warmup_epochs": 2, "ramp_epochs": 0, "max_weight": 0.5, "epsilon": 0.02, "good_epochs": 2},
    "joint": {"alpha_steps": 3, "plan_every": 2},
}
"""Three slots; the hardware loss starts in the third epoch."""

PAYS: dict[str, Any] = {"hardware": {"link": "ucie"}}
"""Links that are fast enough for splits to pay off."""

GATED = (2, 3)
"""Indices of the gated layers: the first MLP and the second attention."""


def parse_config(content: Any, source: str = "the config") -> CodesignConfig:
    return validate_config(CodesignConfig, content, source)


def quick(**changes: Any) -> CodesignConfig:
    """Config `QUICK` with some fields replaced, such as `joint={"alpha_steps": 0}`."""
    return parse_config({name: part | changes.get(name, {}) for name, part in (QUICK | {"loss": {}}).items()})


def chain(blocks: int = 2, *, seed: int = 0, **overrides: Any) -> list[LayerNode]:
    """Layers whose computation, memory access and transfers take similar times on the shipped chips."""
    sizes: dict[str, Any] = {"batch": 8, "tokens": 128, "head_dim": 128}
    return made_layers(blocks, seed=seed, **sizes | overrides)


def hardware(**changes: Any) -> Hardware:
    return Hardware(quick(**changes))


class Listed:
    """A model that describes layers and cannot run."""

    def __init__(self, layers: Sequence[LayerNode]) -> None:
        self._layers = tuple(layers)

    def describe_layers(self, batch_size: int) -> tuple[LayerNode, ...]:
        return self._layers

    def unit_importance(self, layer: int) -> Tensor:
        return torch.arange(self._layers[layer].units).float().sin()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"a list of layers has no `{name}`")


class Toy:
    """A task that opens two gates, which the hardware loss closes; accuracy is the mean of the open gates.

    Args:
        epochs: Number of epochs.
        accuracies: Accuracy of each epoch; by default that of the gates.
        gone_from: Epoch after which the exported model lacks its last block; none by default.
        grows_at: Epoch after which the exported model no longer fits on one chip; none by default.
        seed: Random seed of the layers.
    """

    def __init__(
        self,
        epochs: int = 5,
        *,
        accuracies: Sequence[float] = (),
        gone_from: int | None = None,
        grows_at: int | None = None,
        seed: int = 0,
    ) -> None:
        self.epochs, self._accuracies = epochs, accuracies
        self._gone_from, self._grows_at = gone_from, grows_at
        self._layers = chain(seed=seed)
        self.gates = torch.nn.Parameter(torch.full((2,), 3.0))
        self._optimizer = torch.optim.Adam([self.gates], lr=0.8)
        self.completed = 0
        self.pulled: list[bool] = []
        self.pulls: list[float] = []

    def __enter__(self) -> Toy:
        return self

    def __exit__(self, *_: object) -> None: ...

    def train_epoch(
        self, extra_loss: Callable[[], Tensor] | None, progress: Callable[[str, float], None] | None = None
    ) -> Mapping[str, float]:
        loss = torch.zeros(())
        for step in range(3):
            self._optimizer.zero_grad()
            loss = 0.05 * (self.gates - 3.0).square().sum()
            if extra_loss is not None:
                more = extra_loss()
                self.pulls.append(float(more.detach()))
                loss = loss + more.to(loss)
            loss.backward()
            self._optimizer.step()
            if progress is not None:
                progress(f"epoch {self.completed + 1}", (step + 1) / 3)
        self.completed += 1
        self.pulled.append(extra_loss is not None)
        return {"loss": float(loss.detach())}

    def evaluate_accuracy(self) -> float:
        if self._accuracies:
            return self._accuracies[self.completed - 1]
        return float(torch.sigmoid(self.gates.detach()).mean())

    def save(self, path: Path) -> None:
        path.write_bytes(b"")

    def differentiable_layers(self, batch_size: int) -> list[LayerNode]:
        result, open_ = list(self._layers), torch.sigmoid(self.gates)
        for gate_value, index in enumerate(GATED):
            share = 0.1 + 0.9 * open_[gate_value]
            result[index] = replace(
                result[index],
                flops=result[index].flops * share,
                bytes=result[index].bytes * (0.5 + 0.5 * share),
            )
        return result

    def export_model(self) -> Any:
        rows = list(self._layers)
        for gate_value, index in enumerate(GATED):
            units = rows[index].units
            if units > 1:
                saved = max(1, round(units * float(torch.sigmoid(self.gates[gate_value].detach()))))
                rows[index] = slice_layer(rows[index], saved)
        if self._gone_from is not None and self.completed > self._gone_from:
            rows = [*rows[:3], replace(rows[-1], traffic_in_bytes=rows[2].traffic_out_bytes)]
        if self._grows_at is not None and self.completed > self._grows_at:
            rows = [
                replace(row, memory_bytes=100 * row.memory_bytes, weight_bytes=100 * row.memory_bytes)
                for row in rows
            ]
        return Listed([replace(layer, id=index) for index, layer in enumerate(rows)])

    def state_dict(self) -> dict[str, Any]:
        return {
            "gates": self.gates.detach().clone(), "optimizer": self._optimizer.state_dict(),
            "done": self.completed, "pulled": list(self.pulled), "pulls": list(self.pulls),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.gates.copy_(state["gates"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.completed, self.pulled, self.pulls = state["done"], list(state["pulled"]), list(state["pulls"])


class Sized(Toy):
    """A toy with layers of given memory, all of it for weights.

    Args:
        sizes_mb: Memory of each layer, MB, before the first epoch and after each epoch.
        largest_mb: Memory of each layer with open gates, MB.
        accuracies: Accuracy of each epoch; by default constant.
    """

    def __init__(self, sizes_mb: Sequence[int], largest_mb: int, *, accuracies: Sequence[float] = ()) -> None:
        super().__init__(len(sizes_mb) - 1, accuracies=accuracies or [0.5] * len(sizes_mb))
        self._sizes_mb, self._largest_mb = sizes_mb, largest_mb

    def differentiable_layers(self, batch_size: int) -> list[LayerNode]:
        return [
            replace(item, memory_bytes=self._largest_mb * 10**6, weight_bytes=self._largest_mb * 10**6)
            for item in super().differentiable_layers(batch_size)
        ]

    def export_model(self) -> Any:
        size, layers = self._sizes_mb[self.completed] * 10**6, super().export_model().describe_layers(8)
        return Listed([replace(layer, memory_bytes=size, weight_bytes=size) for layer in layers])


def wrong_with(hw: Hardware, decision: HardwareDecision) -> tuple[str, ...]:
    """Violations of a decision's positions."""
    wafer = hw.config.wafer
    present = torch.tensor([float(name is not None) for name in decision.chips])
    sizes = [(1.0, 1.0) if chip is None else chip.size_mm for chip in hw.get_chips(decision)]
    layout = WaferLayout(
        Wafer(radius_mm=wafer.radius_mm, margin_mm=wafer.margin_mm), np.array(sizes), sigma_mm=wafer.sigma_mm,
        positions_mm=decision.positions_mm,
    )  # fmt: skip
    return layout.find_violations(present=present)


def trained(
    folder: Path, task: Toy | None = None, *, mode: Mode = "joint", progress: Any = None, **changes: Any
) -> tuple[Toy, list[DesignResult]]:
    task = task or Toy()
    settings = quick(**changes)
    outputs = JointTrainer(task, hardware(**changes), settings, folder, mode=mode).run(progress)
    return task, outputs


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The header of a trace and its rows."""
    rows = [json.loads(line) for line in (folder / TRACE_FILE).read_bytes().splitlines()]
    del rows[0]["environment"]
    return rows


@contextmanager
def make_toy(settings: Mapping[str, Any], seed: int, device: str) -> Any:
    """Task factory for `compare_designs`."""
    yield Toy(settings.get("epochs", 3), seed=seed)
