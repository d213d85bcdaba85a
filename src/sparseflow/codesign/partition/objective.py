"""What a plan costs: the one evaluation that the planner, the trainer, the report and a replay share.

Notation: L layers in a chain, S slots. A layer runs on the slot of its segment, its home. One that is split
into G parts sends its input from home to each other part, which sends back what it computed; parts run at the
same time, and home waits for all of them:

    elapsed = max(home's part, max over others of (there + part + back))

- `serial_ms`, what one batch alone takes: the sum of elapsed times and of transfers between layers.
- `busy_ms[s]`, what a slot is taken up with for each batch: its layers, the transfers that come in, and
  what it waits for as a home. `period_ms` is the largest: with many batches in flight a pipeline gives one
  result each period.
- `compute_ms[s]`, what a slot computes for each batch: its layers and parts, and nothing that it waits for.
- `energy_mj`: power times time for each layer, transfers, and the idle power of slots while they do not
  compute, over the period (over `serial_ms` in serial mode).
- `imbalance_ms`: the largest busy time less the mean over slots that are used.

    objective = w_latency * total_latency_ms + w_comm * comm_ms + w_balance * imbalance_ms
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.mapping.objective import MODES, Mode
from sparseflow.codesign.workload.splits import Split
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

ROUNDING_MB = 1e-9
"""A thousandth of a byte: what each MB figure of a sum may be off by."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """What every layer costs on every slot.

    Attributes:
        layers: The L layers.
        latency_ms: float64 [L, S]; infinite on a slot that is empty.
        power_w: float64 [L, S], while it runs.
        memory_mb: float64 [L], MB of 1e6 bytes.
        limit_mb: float64 [S]; 0 for an empty slot.
        idle_w: float64 [S].
        network: Between slots.

    Raises:
        InputError: Shapes differ, or a cost is NaN or negative; says which layer and slot.
    """

    layers: tuple[LayerNode, ...]
    latency_ms: np.ndarray
    power_w: np.ndarray
    memory_mb: np.ndarray
    limit_mb: np.ndarray
    idle_w: np.ndarray
    network: Network

    def __post_init__(self) -> None:
        count, slots = len(self.layers), self.network.slots
        for name, shape in (
            ("latency_ms", (count, slots)), ("power_w", (count, slots)), ("memory_mb", (count,)),
            ("limit_mb", (slots,)), ("idle_w", (slots,)),
        ):  # fmt: skip
            value = getattr(self, name)
            if value.shape != shape:
                raise InputError(f"`{name}` has the shape {value.shape}; expected {shape}")
            wrong = np.argwhere(np.isnan(value) | (value < 0.0))
            if len(wrong):
                at = tuple(int(place) for place in wrong[0])
                of_slots = name in ("limit_mb", "idle_w")
                where = f"slot {at[0]}" if of_slots else f"layer {self.layers[at[0]].name}"
                where += f", slot {at[1]}" if len(at) == 2 else ""
                raise InputError(f"`{name}` is {value[at]} for {where}; costs must be at least 0")

    @property
    def slots(self) -> int:
        return self.network.slots


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """What the parts of one split cost, each on its own slot.

    Attributes:
        latency_ms: Of each part.
        power_w: Of each part, while it runs.
        memory_mb: Of each part.

    Raises:
        InputError: There are not as many of each, or one is NaN or negative; says which.
    """

    latency_ms: tuple[float, ...]
    power_w: tuple[float, ...]
    memory_mb: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if len(values) != len(self.latency_ms):
                raise InputError(
                    f"`{name}` is of {len(values)} parts, `latency_ms` of {len(self.latency_ms)}"
                )
            for part, value in enumerate(values):
                if not value >= 0.0:
                    raise InputError(f"`{name}` is {value} for part {part}; costs must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What counts in the objective, and whether latency is a pipeline's period or one batch's way.

    Attributes:
        mode: `"balanced"` for the period, `"serial"` for one batch's way.
        w_latency: Of `total_latency_ms`.
        w_comm: Of `comm_ms`.
        w_balance: Of `imbalance_ms`.

    Raises:
        InputError: The mode is unknown, or a weight negative or not finite.
    """

    mode: Mode = "balanced"
    w_latency: float = 1.0
    w_comm: float = 0.1
    w_balance: float = 0.1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"`mode` (={self.mode!r}) must be one of: {', '.join(MODES)}")
        for name in ("w_latency", "w_comm", "w_balance"):
            if not 0.0 <= getattr(self, name) < np.inf:
                raise InputError(f"`{name}` (={getattr(self, name)}) must be finite and not negative")


@dataclass(frozen=True, kw_only=True)
class HwStats:
    """What a plan costs for each batch; see the module's notation.

    Attributes:
        objective: Weighted sum of what counts, ms.
        total_latency_ms: `period_ms` in the mode `"balanced"`, `serial_ms` in the mode `"serial"`.
        serial_ms: One batch alone.
        period_ms: From one result to the next with many batches in flight.
        comm_ms: Sum over all transfers, those at the same time as others included.
        comm_bytes: Sent from slot to slot.
        energy_mj: Of layers, transfers and waiting, mJ.
        comm_energy_mj: Of transfers alone, part of `energy_mj`.
        imbalance_ms: The largest of `busy_ms` less their mean over slots that are used.
        busy_ms: Of each slot.
        compute_ms: Of each slot; at most `busy_ms`.
        memory_mb: On each slot, MB (1e6 bytes).
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


def feasible(costs: Costs, homes: Sequence[int], splits: Mapping[int, tuple[Split, PartCosts]]) -> bool:
    """Whether layers and parts can run where they are, what they send can get there, and memory fits."""
    at = np.asarray(homes)
    runs = np.isfinite(costs.latency_ms)
    joined = np.isfinite(costs.network.fixed_ms) & np.isfinite(costs.network.ms_per_byte)
    if not (runs[range(len(at)), at].all() and joined[at[:-1], at[1:]].all()):
        return False
    for layer, (split, parts) in splits.items():
        home, *others = split.slots
        if not (runs[layer, others].all() and np.isfinite(parts.latency_ms).all()):
            return False
        if not (joined[home, others].all() and joined[others, home].all()):
            return False
    # Each layer's memory may be off by as much as the mapping allows for.
    room = costs.limit_mb + (len(at) + 1) * ROUNDING_MB
    return bool((memory(costs, homes, splits) <= room).all())


def memory(costs: Costs, homes: Sequence[int], splits: Mapping[int, tuple[Split, PartCosts]]) -> np.ndarray:
    """MB that each slot holds, float64 [S]: the sum over its layers and parts."""
    found = np.zeros(costs.slots)
    for layer, slot in enumerate(homes):
        if layer not in splits:
            found[slot] += costs.memory_mb[layer]
            continue
        split, parts = splits[layer]
        for each, size in zip(split.slots, parts.memory_mb, strict=True):
            found[each] += size
    return found


def evaluate(
    costs: Costs,
    homes: Sequence[int],
    splits: Mapping[int, tuple[Split, PartCosts]],
    weights: Weights,
) -> HwStats:
    """What a plan costs.

    Args:
        costs: Of layers on slots.
        homes: Slot of each layer.
        splits: Layer -> its split, whose first slot is its home, and what its parts cost.
        weights: What counts.

    Raises:
        InputError: A layer has no slot, or a split does not begin at home.
    """
    if len(homes) != len(costs.layers):
        raise InputError(f"`homes` has {len(homes)} slots; there are {len(costs.layers)} layers")
    network = costs.network
    busy, compute = np.zeros(costs.slots), np.zeros(costs.slots)
    serial = comm_ms = energy = comm_energy = 0.0
    comm_bytes = 0

    def send(source: int, target: int, size: int) -> float:
        nonlocal comm_ms, comm_bytes, comm_energy
        if source == target:
            return 0.0
        took = network.time_ms(source, target, size)
        comm_ms += took
        comm_bytes += size
        comm_energy += network.energy_mj(source, target, size)
        return took

    for at, layer in enumerate(costs.layers):
        home = homes[at]
        if at:
            came = send(homes[at - 1], home, layer.traffic_in_bytes)
            serial += came
            busy[home] += came
        if at not in splits:
            took = float(costs.latency_ms[at, home])
            busy[home] += took
            compute[home] += took
            energy += took * float(costs.power_w[at, home])
            serial += took
            continue
        split, parts = splits[at]
        if split.slots[0] != home:
            raise InputError(f"the split of {layer.name} begins at slot {split.slots[0]}; its home is {home}")
        elapsed = parts.latency_ms[0]
        compute[home] += elapsed
        energy += parts.latency_ms[0] * parts.power_w[0]
        for number in range(1, len(split.slots)):
            slot, took = split.slots[number], parts.latency_ms[number]
            back_bytes = layer.split_out_bytes
            if layer.split_joins:
                back_bytes = back_bytes * split.sizes[number] // layer.units
            there = send(home, slot, layer.split_in_bytes)
            back = send(slot, home, back_bytes)
            busy[slot] += there + took
            compute[slot] += took
            energy += took * parts.power_w[number]
            elapsed = max(elapsed, there + took + back)
        busy[home] += elapsed
        serial += elapsed
    used = np.unique([*homes, *(slot for split, _ in splits.values() for slot in split.slots)])
    period = float(busy.max())
    total = period if weights.mode == "balanced" else serial
    there = costs.limit_mb > 0.0
    energy += float((np.maximum(total - compute, 0.0) * costs.idle_w)[there].sum())
    imbalance = period - float(busy[used].mean())
    return HwStats(
        objective=weights.w_latency * total + weights.w_comm * comm_ms + weights.w_balance * imbalance,
        total_latency_ms=total, serial_ms=serial, period_ms=period, comm_ms=comm_ms, comm_bytes=comm_bytes,
        energy_mj=energy + comm_energy, comm_energy_mj=comm_energy, imbalance_ms=imbalance,
        busy_ms=tuple(busy.tolist()), compute_ms=tuple(compute.tolist()),
        memory_mb=tuple(memory(costs, homes, splits).tolist()),
    )  # fmt: skip
