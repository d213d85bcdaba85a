"""L_hw: what the hardware costs as a loss, with gradients to chip slots, gates and positions.

    L_hw = lambda_T latency / latency_0 + lambda_E energy / energy_0 + lambda_mem overflow
           + lambda_area area / area_0 + lambda_chip chips / slots + lambda_layout L_layout

The zeros are the first plan's figures, frozen, so that the lambdas are pure numbers. Decisions that are
discrete (which slot a layer is on, what is split) are taken from a plan and change between steps, never in
one. What a layer costs on a slot is the expectation over what the slot may hold; a slot that may be empty
would have to send its layers elsewhere, which is taken to cost `EMPTY_COST` times what they cost on the
slowest chip. A part of a layer costs its share of the layer: how many units gates leave changes from step to
step. The latency of a pipeline is a smooth maximum over slots, so that all of them get gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.design.config import Lambdas
from sparseflow.codesign.design.decision import Reference
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.partition.objective import Mode
from sparseflow.codesign.workload.splits import Split
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError, RunError

EMPTY_COST = 2.0
"""Latency and energy of a layer on an empty slot, over those on the slowest and the hungriest chip."""

SMOOTHNESS = 0.05
"""Of the maximum over slots, as a share of the largest."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a plan says of layers, as far as the loss needs it.

    Attributes:
        homes: Slot of each layer.
        splits: Layer -> its split, whose first slot is its home.
        mode: Whether latency is a pipeline's period or one batch's way.
    """

    homes: tuple[int, ...]
    splits: Mapping[int, Split]
    mode: Mode = "balanced"


def compute_hw_loss(
    layers: Sequence[LayerNode],
    slots: ChipSlotConfig,
    placement: Placement,
    network: Network,
    proxy: LayerHwProxy,
    lambdas: Lambdas,
    reference: Reference,
    *,
    generator: torch.Generator | None = None,
    layout: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its terms.

    Args:
        layers: Of the model; their `flops` and `bytes` may be tensors with gradients to gates.
        slots: What the slots may hold.
        placement: Which slot each layer is on, and what is split.
        network: Between slots.
        proxy: What a layer costs on a chip.
        lambdas: Weights.
        reference: What terms are relative to.
        generator: What slots are drawn from; without one there is no noise.
        layout: L_layout of what slots hold; 0 by default.

    Returns:
        L_hw, and its terms before they are weighed, `latency_ms` and `energy_mj` of a batch, `mem_over`,
        `area_mm2`, `chips` and `layout`: float64 scalars.

    Raises:
        InputError: Placement, slots and network are of other sizes.
        RunError: The loss is not finite; says which term.
    """
    if len(placement.homes) != len(layers) or slots.slots != network.slots:
        raise InputError(
            f"the placement is of {len(placement.homes)} layers and there are {len(layers)}; there are "
            f"{slots.slots} slots and the network joins {network.slots}: there must be as many"
        )
    used = {*placement.homes, *(slot for split in placement.splits.values() for slot in split.slots)}
    wrong = sorted(slot for slot in used if not 0 <= slot < slots.slots)
    if wrong:
        raise InputError(f"the placement uses slots {wrong}; there are slots 0 to {slots.slots - 1}")
    alpha, _ = slots(generator)
    alpha = alpha.double()
    table = proxy.predict_grid(layers, slots.chips)  # each [L, T]
    latency = _expected(table["lat_ms"], alpha)  # [L, S]
    energy = _expected(table["lat_ms"] * table["power_w"], alpha)
    held = table["mem_mb"].amax(1)  # [L]
    homes, splits = placement.homes, placement.splits
    busy = [torch.zeros((), dtype=torch.float64) for _ in range(slots.slots)]
    compute = list(busy)
    memory = list(busy)
    total_energy = serial = torch.zeros((), dtype=torch.float64)

    def send(source: int, target: int, size: int) -> float:
        nonlocal total_energy
        total_energy = total_energy + network.energy_mj(source, target, size)
        return network.time_ms(source, target, size)

    for at, layer in enumerate(layers):
        home = homes[at]
        if at:
            came = send(homes[at - 1], home, layer.traffic_in_bytes)
            busy[home] = busy[home] + came
            serial = serial + came
        if at not in splits:
            shares, places, ways = [1.0], (home,), [(0.0, 0.0)]
        else:
            split = splits[at]
            whole = sum(split.sizes)
            shares, places = [size / whole for size in split.sizes], split.slots
            ways = [(0.0, 0.0)]
            for slot, size in zip(places[1:], split.sizes[1:], strict=True):
                back = layer.split_out_bytes
                if layer.split_joins:
                    back = back * size // whole
                ways.append((send(home, slot, layer.split_in_bytes), send(slot, home, back)))
        took = []
        for share, slot, (there, back) in zip(shares, places, ways, strict=True):
            took.append(there + share * latency[at, slot] + back)
            total_energy = total_energy + share * energy[at, slot]
            compute[slot] = compute[slot] + share * latency[at, slot]
            memory[slot] = memory[slot] + share * held[at]
            if slot != home:
                busy[slot] = busy[slot] + there + share * latency[at, slot]
        elapsed = torch.stack(took).amax()
        busy[home] = busy[home] + elapsed
        serial = serial + elapsed
    every = torch.stack(busy)
    total = serial if placement.mode == "serial" else _smooth_max(every)
    idle = alpha[:, :-1] @ torch.tensor([chip.idle_w for chip in slots.chips], dtype=torch.float64)
    total_energy = total_energy + (torch.relu(total - torch.stack(compute)) * idle).sum()
    limits = torch.tensor([1e3 * chip.mem_gb for chip in slots.chips], dtype=torch.float64)
    # What an empty slot would hold is elsewhere, and paid for in latency.
    over = (alpha[:, :-1] * torch.relu(torch.stack(memory)[:, None] / limits - 1.0).square()).sum()
    terms = {
        "latency_ms": total,
        "energy_mj": total_energy,
        "mem_over": over,
        "area_mm2": slots.area_loss(alpha),
        "chips": slots.count_loss(alpha),
        "layout": torch.zeros((), dtype=torch.float64) if layout is None else layout.double().cpu(),
    }
    weights = {
        "latency_ms": lambdas.lambda_T / reference.latency_ms,
        "energy_mj": lambdas.lambda_E / reference.energy_mj,
        "mem_over": lambdas.lambda_mem,
        "area_mm2": lambdas.lambda_area / reference.area_mm2,
        "chips": lambdas.lambda_chip / slots.slots,
        "layout": lambdas.lambda_layout,
    }
    loss = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
    _check(loss, terms)
    return loss, terms


def _expected(costs: Tensor, alpha: Tensor) -> Tensor:
    """[L, T] costs on types and alpha [S, T + 1] -> expected costs [L, S]."""
    away = EMPTY_COST * costs.amax(1, keepdim=True)
    return torch.cat([costs, away], 1) @ alpha.T


def _smooth_max(values: Tensor) -> Tensor:
    """scale * log sum exp(v / scale), with scale = SMOOTHNESS max v: no value that falls makes it larger."""
    scale = (SMOOTHNESS * values.detach().amax()).clamp_min(1e-12)
    return scale * torch.logsumexp(values / scale, 0)


def _check(loss: Tensor, terms: Mapping[str, Tensor]) -> None:
    if not bool(torch.isfinite(loss)):
        told = ", ".join(f"{name} = {float(term.detach()):g}" for name, term in terms.items())
        raise RunError(f"the hardware loss is not finite: {told}; look at the proxy and the chip library")
