"""Differentiable hardware loss L_hw, with gradients to chip slots, gates and positions.

    L_hw = lambda_T latency / latency_0 + lambda_E energy / energy_0 + lambda_mem overflow
           + lambda_area area / area_0 + lambda_chip chips / slots + lambda_layout L_layout

The reference values are those of the initial plan, so that the lambdas are dimensionless. Discrete decisions
(slot of each layer, splits) are taken from a plan and are constant within a step. The cost of a layer on a
slot is the expected cost over the chip types of the slot; an empty slot costs `EMPTY_COST` times as much as
the slowest chip, because its layers would run elsewhere. A part of a layer costs its share of the layer,
whatever number of units gates leave. The period of a pipeline is a smooth maximum over slots, so that all
slots get gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.design.config import Lambdas
from sparseflow.codesign.design.decision import CostReference
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.mapping.objective import Mode
from sparseflow.codesign.mapping.problem import BYTES_PER_MB
from sparseflow.codesign.workload.splits import LayerSplit, compute_return_bytes
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError, RunError

EMPTY_COST = 2.0
"""Latency and energy of a layer on an empty slot, relative to the slowest and most power-hungry chip."""

SMOOTHNESS = 0.05
"""Smoothing scale of the maximum over slots, relative to the largest value."""


@dataclass(frozen=True, kw_only=True)
class LayerAssignment:
    """Discrete decisions that the loss depends on.

    Attributes:
        assignment: Slot of each layer.
        splits: Layer -> its split, whose first slot is the layer's slot.
        mode: `"balanced"` for the pipeline period, `"serial"` for the latency of one batch.
    """

    assignment: tuple[int, ...]
    splits: Mapping[int, LayerSplit]
    mode: Mode = "balanced"


def compute_hw_loss(
    layers: Sequence[LayerNode],
    slots: ChipSlotConfig,
    assignment: LayerAssignment,
    network: Network,
    proxy: LayerHwProxy,
    lambdas: Lambdas,
    reference: CostReference,
    *,
    generator: torch.Generator | None = None,
    layout: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the hardware loss and its terms.

    Args:
        layers: Layers of the model; `flops` and `bytes` may be tensors with gradients to gates.
        slots: Chip types of the slots.
        assignment: Slot of each layer, and splits.
        network: Network between the slots.
        proxy: Predicts the cost of layers on chips.
        lambdas: Weights of the terms.
        reference: Reference values of the terms.
        generator: Random generator of the slot samples; without it there is no noise.
        layout: L_layout; 0 by default.

    Returns:
        L_hw and its unweighted terms: `latency_ms` and `energy_mj` of a batch, `mem_over`, `area_mm2`,
        `chips` and `layout`; float64 scalars.

    Raises:
        InputError: The numbers of layers or slots differ.
        RunError: The loss is not finite.
    """
    _check_sizes(layers, slots, assignment, network)
    alpha, _ = slots(generator)
    alpha = alpha.double()
    table = proxy.predict_grid(layers, slots.chips)  # each [L, T]
    latency = _expected_cost(table["lat_ms"], alpha)  # [L, S]
    energy = _expected_cost(table["lat_ms"] * table["power_w"], alpha)
    weights_mb = torch.tensor([layer.weight_bytes for layer in layers], dtype=torch.float64) / BYTES_PER_MB
    activations_mb = (table["mem_mb"].amax(1) - weights_mb).clamp_min(0.0)  # [L]
    totals = _PipelineTotals(slots.num_slots, network)
    for index, (layer, slot) in enumerate(zip(layers, assignment.assignment, strict=True)):
        if index:
            totals.add_transfer(assignment.assignment[index - 1], slot, layer.traffic_in_bytes)
        parts = totals.send_to_parts(layer, slot, assignment.splits.get(index))
        totals.add_layer(slot, parts, latency[index], energy[index])
        totals.add_memory(parts, weights_mb[index], activations_mb[index])
    terms = _compute_terms(slots, alpha, totals, assignment.mode, layout)
    weights = {
        "latency_ms": lambdas.lambda_T / reference.latency_ms,
        "energy_mj": lambdas.lambda_E / reference.energy_mj,
        "mem_over": lambdas.lambda_mem,
        "area_mm2": lambdas.lambda_area / reference.area_mm2,
        "chips": lambdas.lambda_chip / slots.num_slots,
        "layout": lambdas.lambda_layout,
    }
    loss = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
    if not bool(torch.isfinite(loss)):
        values = ", ".join(f"{name} = {float(term.detach()):g}" for name, term in terms.items())
        raise RunError(f"the hardware loss is not finite: {values}; check the proxy and the chip library")
    return loss, terms


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a layer, its fraction of the units, and the times to send its input and output, ms."""

    slot: int
    fraction: float = 1.0
    send_ms: float = 0.0
    return_ms: float = 0.0


class _PipelineTotals:
    """Differentiable time and memory of each slot, and latency and energy of a batch."""

    def __init__(self, num_slots: int, network: Network) -> None:
        self._network = network
        self.busy_ms = [torch.zeros((), dtype=torch.float64) for _ in range(num_slots)]
        self.compute_ms, self.weights_mb, self.peak_mb = (list(self.busy_ms) for _ in range(3))
        self.serial_ms = self.energy_mj = torch.zeros((), dtype=torch.float64)

    def add_transfer(self, source: int, target: int, size_bytes: int) -> None:
        """Add the transfer of a state; the receiver waits for it."""
        time_ms = self._send(source, target, size_bytes)
        self.busy_ms[target] = self.busy_ms[target] + time_ms
        self.serial_ms = self.serial_ms + time_ms

    def send_to_parts(self, layer: LayerNode, home: int, split: LayerSplit | None) -> list[_Part]:
        """Add the energy of all transfers to and from parts, and return the parts."""
        if split is None:
            return [_Part(slot=home)]
        units = sum(split.sizes)
        parts = [_Part(slot=split.slots[0], fraction=split.sizes[0] / units)]
        for slot, size in zip(split.slots[1:], split.sizes[1:], strict=True):
            send_ms = self._send(home, slot, layer.split_in_bytes)
            return_ms = self._send(slot, home, compute_return_bytes(layer, size, units))
            parts.append(_Part(slot=slot, fraction=size / units, send_ms=send_ms, return_ms=return_ms))
        return parts

    def add_layer(self, home: int, parts: Sequence[_Part], latency: Tensor, energy: Tensor) -> None:
        """Add time and energy of the parts of a layer.

        Args:
            home: Slot of the layer, which waits for all parts.
            parts: The parts.
            latency: Latency of the full layer on each slot, ms, [S].
            energy: Energy of the full layer on each slot, mJ, [S].
        """
        elapsed = []
        for part in parts:
            slot, fraction = part.slot, part.fraction
            elapsed.append(part.send_ms + fraction * latency[slot] + part.return_ms)
            self.energy_mj = self.energy_mj + fraction * energy[slot]
            self.compute_ms[slot] = self.compute_ms[slot] + fraction * latency[slot]
            if slot != home:
                self.busy_ms[slot] = self.busy_ms[slot] + part.send_ms + fraction * latency[slot]
        layer_ms = torch.stack(elapsed).amax()
        self.busy_ms[home] = self.busy_ms[home] + layer_ms
        self.serial_ms = self.serial_ms + layer_ms

    def add_memory(self, parts: Sequence[_Part], weights_mb: Tensor, activations_mb: Tensor) -> None:
        """Add the weights of the parts of a layer, and raise the peak of activations to theirs, MB."""
        for part in parts:
            slot, fraction = part.slot, part.fraction
            self.weights_mb[slot] = self.weights_mb[slot] + fraction * weights_mb
            self.peak_mb[slot] = torch.maximum(self.peak_mb[slot], fraction * activations_mb)

    def _send(self, source: int, target: int, size_bytes: int) -> float:
        self.energy_mj = self.energy_mj + self._network.energy_mj(source, target, size_bytes)
        return self._network.time_ms(source, target, size_bytes)


def _compute_terms(
    slots: ChipSlotConfig, alpha: Tensor, totals: _PipelineTotals, mode: Mode, layout: Tensor | None
) -> dict[str, Tensor]:
    latency = totals.serial_ms if mode == "serial" else _smooth_max(torch.stack(totals.busy_ms))
    idle_w = alpha[:, :-1] @ torch.tensor([chip.idle_w for chip in slots.chips], dtype=torch.float64)
    idle_ms = torch.relu(latency - torch.stack(totals.compute_ms))
    limits = torch.tensor([1e3 * chip.mem_gb for chip in slots.chips], dtype=torch.float64)
    # Layers on an empty slot need no memory there: they are penalized through their latency.
    memory_mb = torch.stack(totals.weights_mb) + torch.stack(totals.peak_mb)
    excess = torch.relu(memory_mb[:, None] / limits - 1.0)
    return {
        "latency_ms": latency,
        "energy_mj": totals.energy_mj + (idle_ms * idle_w).sum(),
        "mem_over": (alpha[:, :-1] * excess.square()).sum(),
        "area_mm2": slots.area_loss(alpha),
        "chips": slots.count_loss(alpha),
        "layout": torch.zeros((), dtype=torch.float64) if layout is None else layout.double().cpu(),
    }


def _expected_cost(costs: Tensor, alpha: Tensor) -> Tensor:
    """Expected costs [L, S] of costs per type [L, T] and alpha [S, T + 1]."""
    empty = EMPTY_COST * costs.amax(1, keepdim=True)
    return torch.cat([costs, empty], 1) @ alpha.T


def _smooth_max(values: Tensor) -> Tensor:
    """scale * log sum exp(v / scale) with scale = SMOOTHNESS max v; monotone in every value."""
    scale = (SMOOTHNESS * values.detach().amax()).clamp_min(1e-12)
    return scale * torch.logsumexp(values / scale, 0)


def _check_sizes(
    layers: Sequence[LayerNode], slots: ChipSlotConfig, assignment: LayerAssignment, network: Network
) -> None:
    if len(assignment.assignment) != len(layers) or slots.num_slots != network.num_slots:
        raise InputError(
            f"`assignment` has {len(assignment.assignment)} layers for {len(layers)} layers, and `network` "
            f"has {network.num_slots} slots for {slots.num_slots} slots; the numbers must be equal"
        )
    split_slots = (slot for split in assignment.splits.values() for slot in split.slots)
    invalid = sorted(
        slot for slot in {*assignment.assignment, *split_slots} if not 0 <= slot < slots.num_slots
    )
    if invalid:
        raise InputError(f"`assignment` uses slots {invalid}; expected 0 to {slots.num_slots - 1}")
