"""Cost of a plan: the evaluation shared by planner, trainer, report and replay.

Notation: a chain of L layers, S slots. A layer runs on the slot of its segment, its home. A layer split into
G parts sends its input from home to each other part, which returns its output; parts run concurrently, and
home waits for all of them:

    elapsed = max(home's part, max over others of (send + part + return))

- `serial_ms`, latency of one batch alone: sum of elapsed times and of transfers between layers.
- `busy_ms[s]`, occupancy of a slot per batch: its layers, incoming transfers, and waiting for parts as a
  home. `period_ms` is the largest; a full pipeline completes one batch per period.
- `compute_ms[s]`, compute time of a slot per batch: its layers and parts.
- `energy_mj`: power times time of all layers, transfers, and idle power of slots while they do not compute,
  over the period (over `serial_ms` in serial mode).
- `imbalance_ms`: the largest busy time minus the mean over used slots.
- `memory_mb[s]`: the weights of all layers and parts on a slot, and the largest activations of one of them,
  because a slot runs them one after the other.

    objective = w_latency * total_latency_ms + w_comm * comm_ms + w_balance * imbalance_ms
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.mapping.objective import MODES, Mode
from sparseflow.codesign.mapping.problem import BYTES_PER_MB
from sparseflow.codesign.workload.layers import check_chain, compute_part_weight_bytes
from sparseflow.codesign.workload.splits import LayerSplit, compute_return_bytes
from sparseflow.core.checks import check_non_negative, check_one_of
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

ROUNDING_MB = 1e-9
"""Rounding error of an MB value in a sum: a thousandth of a byte."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCosts:
    """Cost of every layer on every slot.

    Attributes:
        layers: The L layers.
        latency_ms: ms, float64 [L, S]; infinite on an empty slot.
        power_w: Power while the layer runs, W, float64 [L, S].
        memory_mb: Memory of each layer alone, weights and activations, MB (1e6 bytes), float64 [L].
        limit_mb: Memory of each slot, MB, float64 [S]; 0 for an empty slot.
        idle_w: Idle power, W, float64 [S].
        network: Network between the slots.

    Raises:
        InputError: Shapes differ, a cost is NaN or negative, or the layers are no chain; see `check_chain`.
    """

    layers: tuple[LayerNode, ...]
    latency_ms: np.ndarray
    power_w: np.ndarray
    memory_mb: np.ndarray
    limit_mb: np.ndarray
    idle_w: np.ndarray
    network: Network

    def __post_init__(self) -> None:
        check_chain(self.layers)
        count, slots = len(self.layers), self.network.num_slots
        for name, shape in (
            ("latency_ms", (count, slots)), ("power_w", (count, slots)), ("memory_mb", (count,)),
            ("limit_mb", (slots,)), ("idle_w", (slots,)),
        ):  # fmt: skip
            value = getattr(self, name)
            if value.shape != shape:
                raise InputError(f"`{name}` has shape {value.shape}; expected {shape}")
            if not (value >= 0.0).all():
                index = tuple(np.argwhere(~(value >= 0.0))[0].tolist())
                raise InputError(f"`{name}`{list(index)} is {value[index]}; costs must be at least 0")

    @property
    def num_slots(self) -> int:
        return self.network.num_slots

    @cached_property
    def weight_mb(self) -> np.ndarray:
        """Memory of the weights of each layer, MB, float64 [L]."""
        return np.array([layer.weight_bytes for layer in self.layers]) / BYTES_PER_MB

    @cached_property
    def activation_mb(self) -> np.ndarray:
        """Memory that each layer needs besides its weights while it runs, MB, float64 [L]."""
        return np.maximum(self.memory_mb - self.weight_mb, 0.0)


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Cost of the parts of a split layer, each on its own slot.

    Attributes:
        latency_ms: Latency of each part, ms.
        power_w: Power of each part while it runs, W.
        memory_mb: Memory of each part alone, weights and activations, MB.

    Raises:
        InputError: Lengths differ, or a cost is NaN or negative.
    """

    latency_ms: tuple[float, ...]
    power_w: tuple[float, ...]
    memory_mb: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if len(values) != len(self.latency_ms):
                raise InputError(f"`{name}` has {len(values)} parts, `latency_ms` has {len(self.latency_ms)}")
            for part, value in enumerate(values):
                if not value >= 0.0:
                    raise InputError(f"`{name}` is {value} for part {part}; costs must be at least 0")


@dataclass(frozen=True, kw_only=True)
class ObjectiveWeights:
    """Weights of the objective, and the definition of latency.

    Attributes:
        mode: `"balanced"` for the pipeline period, `"serial"` for the latency of one batch.
        w_latency: Weight of `total_latency_ms`.
        w_comm: Weight of `comm_ms`.
        w_balance: Weight of `imbalance_ms`.

    Raises:
        InputError: The mode is unknown, or a weight is negative or not finite.
    """

    mode: Mode = "balanced"
    w_latency: float = 1.0
    w_comm: float = 0.1
    w_balance: float = 0.1

    def __post_init__(self) -> None:
        check_one_of(MODES, mode=self.mode)
        check_non_negative(w_latency=self.w_latency, w_comm=self.w_comm, w_balance=self.w_balance)


@dataclass(frozen=True, kw_only=True)
class HwStats:
    """Cost of a plan per batch; see the module for definitions.

    Attributes:
        objective: Weighted sum, ms.
        total_latency_ms: `period_ms` in mode `"balanced"`, `serial_ms` in mode `"serial"`.
        serial_ms: Latency of one batch alone, ms.
        period_ms: Period of the full pipeline, ms.
        comm_ms: Sum of all transfer times, including concurrent ones, ms.
        comm_bytes: Bytes moved between slots.
        energy_mj: Energy of layers, transfers and idling, mJ.
        comm_energy_mj: Energy of transfers, part of `energy_mj`, mJ.
        imbalance_ms: Largest `busy_ms` minus the mean over used slots, ms.
        busy_ms: Occupancy of each slot, ms.
        compute_ms: Compute time of each slot, at most `busy_ms`, ms.
        memory_mb: Peak memory on each slot, MB (1e6 bytes).
    """

    objective: float
    total_latency_ms: float
    serial_ms: float
    period_ms: float
    comm_ms: float
    comm_bytes: int
    energy_mj: float
    comm_energy_mj: float
    imbalance_ms: float
    busy_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    memory_mb: tuple[float, ...]

    @property
    def energy_delay(self) -> float:
        """Energy-delay product, mJ ms."""
        return self.energy_mj * self.total_latency_ms


def is_feasible(
    costs: LayerCosts, assignment: Sequence[int], splits: Mapping[int, tuple[LayerSplit, PartCosts]]
) -> bool:
    """Whether layers and parts can run on their slots, slots are connected, and memory suffices."""
    layer_slots = np.asarray(assignment)
    runs = np.isfinite(costs.latency_ms)
    connected = np.isfinite(costs.network.fixed_ms) & np.isfinite(costs.network.ms_per_byte)
    if not (
        runs[range(len(layer_slots)), layer_slots].all()
        and connected[layer_slots[:-1], layer_slots[1:]].all()
    ):
        return False
    for layer, (split, parts) in splits.items():
        home, *other_slots = split.slots
        if not (runs[layer, other_slots].all() and np.isfinite(parts.latency_ms).all()):
            return False
        if not (connected[home, other_slots].all() and connected[other_slots, home].all()):
            return False
    # Same rounding tolerance per layer as in the mapping.
    capacity_mb = costs.limit_mb + (len(layer_slots) + 1) * ROUNDING_MB
    return bool((compute_memory_mb(costs, assignment, splits) <= capacity_mb).all())


def compute_memory_mb(
    costs: LayerCosts, assignment: Sequence[int], splits: Mapping[int, tuple[LayerSplit, PartCosts]]
) -> np.ndarray:
    """Peak memory on each slot, MB, float64 [S]; see the module."""
    weights_mb, peak_mb = np.zeros(costs.num_slots), np.zeros(costs.num_slots)

    def add(slot: int, weight_mb: float, activation_mb: float) -> None:
        weights_mb[slot] += weight_mb
        peak_mb[slot] = max(peak_mb[slot], activation_mb)

    layer_weights_mb, activation_mb = costs.weight_mb, costs.activation_mb
    for index, slot in enumerate(assignment):
        if index not in splits:
            add(slot, layer_weights_mb[index], activation_mb[index])
            continue
        (split, parts), layer = splits[index], costs.layers[index]
        for part_slot, size, memory_mb in zip(split.slots, split.sizes, parts.memory_mb, strict=True):
            part_mb = compute_part_weight_bytes(layer, size) / BYTES_PER_MB
            add(part_slot, part_mb, max(memory_mb - part_mb, 0.0))
    return weights_mb + peak_mb


def evaluate_plan(
    costs: LayerCosts,
    assignment: Sequence[int],
    splits: Mapping[int, tuple[LayerSplit, PartCosts]],
    weights: ObjectiveWeights,
) -> HwStats:
    """Compute the cost of a plan.

    Args:
        costs: Cost of each layer on each slot.
        assignment: Slot of each layer.
        splits: Layer -> its split, whose first slot is the layer's slot, and the cost of the parts.
        weights: Weights of the objective.

    Raises:
        InputError: There is not one slot per layer, or a split does not start at the layer's slot.
    """
    if len(assignment) != len(costs.layers):
        raise InputError(f"`assignment` has {len(assignment)} slots for {len(costs.layers)} layers")
    network = costs.network
    busy, compute = np.zeros(costs.num_slots), np.zeros(costs.num_slots)
    serial = comm_ms = energy = comm_energy = 0.0
    comm_bytes = 0

    def send(source: int, target: int, size: int) -> float:
        nonlocal comm_ms, comm_bytes, comm_energy
        if source == target:
            return 0.0
        time_ms = network.time_ms(source, target, size)
        comm_ms += time_ms
        comm_bytes += size
        comm_energy += network.energy_mj(source, target, size)
        return time_ms

    for index, layer in enumerate(costs.layers):
        home = assignment[index]
        if index:
            receive_ms = send(assignment[index - 1], home, layer.traffic_in_bytes)
            serial += receive_ms
            busy[home] += receive_ms
        if index not in splits:
            latency_ms = float(costs.latency_ms[index, home])
            busy[home] += latency_ms
            compute[home] += latency_ms
            energy += latency_ms * float(costs.power_w[index, home])
            serial += latency_ms
            continue
        split, parts = splits[index]
        if split.slots[0] != home:
            raise InputError(
                f"the split of {layer.name} starts at slot {split.slots[0]}, but the layer is on slot {home}"
            )
        elapsed = parts.latency_ms[0]
        compute[home] += elapsed
        energy += parts.latency_ms[0] * parts.power_w[0]
        for part in range(1, len(split.slots)):
            slot, latency_ms = split.slots[part], parts.latency_ms[part]
            send_ms = send(home, slot, layer.split_in_bytes)
            return_ms = send(slot, home, compute_return_bytes(layer, split.sizes[part], layer.units))
            busy[slot] += send_ms + latency_ms
            compute[slot] += latency_ms
            energy += latency_ms * parts.power_w[part]
            elapsed = max(elapsed, send_ms + latency_ms + return_ms)
        busy[home] += elapsed
        serial += elapsed
    used = np.unique([*assignment, *(slot for split, _ in splits.values() for slot in split.slots)])
    period = float(busy.max())
    total = period if weights.mode == "balanced" else serial
    occupied = costs.limit_mb > 0.0
    energy += float((np.maximum(total - compute, 0.0) * costs.idle_w)[occupied].sum())
    imbalance = period - float(busy[used].mean())
    return HwStats(
        objective=weights.w_latency * total + weights.w_comm * comm_ms + weights.w_balance * imbalance,
        total_latency_ms=total, serial_ms=serial, period_ms=period, comm_ms=comm_ms, comm_bytes=comm_bytes,
        energy_mj=energy + comm_energy, comm_energy_mj=comm_energy, imbalance_ms=imbalance,
        busy_ms=tuple(busy.tolist()), compute_ms=tuple(compute.tolist()),
        memory_mb=tuple(compute_memory_mb(costs, assignment, splits).tolist()),
    )  # fmt: skip
