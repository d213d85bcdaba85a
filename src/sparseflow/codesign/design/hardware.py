"""Deciding the hardware for a model as it is now: chips, mapping, splits and places, each priced alike.

Decisions are compared by

    J = lambda_T latency / latency_0 + lambda_E energy / energy_0 + lambda_area area / area_0
        + lambda_chip chips / slots + lambda_layout L_layout

which is L_hw with nothing soft left in it. A new decision is taken only where J falls.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from sparseflow.codesign.design.config import Settings
from sparseflow.codesign.design.decision import Decision, Priced, Reference, begins_of, rewrite_of
from sparseflow.codesign.design.placement import Drawn, Places, Search
from sparseflow.codesign.hardware.chips import ChipLibrary, ChipType
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping import MappingSolver
from sparseflow.codesign.partition.objective import Costs, PartCosts, evaluate, feasible, memory
from sparseflow.codesign.partition.planner import PartitionPlanner, Plan
from sparseflow.codesign.partition.split_search import Orders
from sparseflow.codesign.workload.segments import chain
from sparseflow.codesign.workload.splits import RewritePlan, Split, check, plan_bytes
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.errors import FileFormatError, InputError

log = logging.getLogger(__name__)

_LEAST = 1e-12
"""Relative; an objective that falls by less has not fallen."""


class Hardware:
    """What there is to build from, and what a decision costs.

    Args:
        settings: Library, slots, link, mapping, partition, wafer and lambdas.
        proxy: What a layer costs on a chip; what the settings name by default.
        library: In place of the one that the settings name.

    Attributes:
        chips: Types that slots may hold.
        first: The type that all slots hold at first.
        batch: Samples that run through the pipeline together.
        proxy_given: Whether layers are priced by anything but a plain roofline.
        reference: Figures of the first decision; None before `begin`.

    Raises:
        InputError: A name is not in the library, slots cannot all be reached, or do not fit on the wafer.
        FileFormatError: The library or the proxy cannot be used.
    """

    def __init__(
        self, settings: Settings, proxy: LayerHwProxy | None = None, library: ChipLibrary | None = None
    ) -> None:
        told = settings.hardware
        self.settings, self.batch = settings, told.batch
        self.library = settings.read_library() if library is None else library
        names = told.chips or tuple(chip.name for chip in self.library.chips)
        self.chips: list[ChipType] = [self.library.chip(name) for name in names]
        self.first = max(self.chips, key=lambda chip: chip.mem_gb)
        if told.first is not None:
            self.first = next((chip for chip in self.chips if chip.name == told.first), self.first)
            if self.first.name != told.first:
                raise InputError(f"`first` (={told.first!r}) must be one of `chips`: {', '.join(names)}")
        self.proxy_given = proxy is not None or told.proxy is not None
        if proxy is None:
            proxy = LayerHwProxy.analytic() if told.proxy is None else LayerHwProxy.load(told.proxy)
        self.proxy = proxy
        if proxy.devices and all(proxy.known(chip) == "analytic" for chip in self.chips):
            log.warning(
                "no chip is priced by measurements: the proxy knows %s, and a chip is one of those if name, "
                "`peak_flops` and `peak_bw` are the same; there are %s",
                ", ".join(each.name for each in proxy.devices), ", ".join(names),
            )  # fmt: skip
        self.lambdas = settings.lambdas()
        mapped = settings.mapping
        solver = MappingSolver(
            strategy=mapped.strategy, mode=mapped.mode, time_limit_s=mapped.time_limit_s,
            seed=settings.joint.seed,
        )  # fmt: skip
        self.planner = PartitionPlanner(solver, self.proxy, settings.partition_config())
        self.places = Places(settings.wafer, told.slots, self.chips, seed=settings.joint.seed)
        self.reference: Reference | None = None
        self._link = self.library.link(told.link)
        self._links = [(a, b, self.library.link(name)) for a, b, name in told.links]
        self.network(self.places.grid())  # which tells of links that do not reach every slot

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.settings.hardware.slots

    @property
    def zeros(self) -> Reference:
        """The reference.

        Raises:
            InputError: There is none yet.
        """
        if self.reference is None:
            raise InputError("costs are relative to a first decision: call `begin` or `fix_reference` before")
        return self.reference

    def network(self, positions_mm: Sequence[tuple[float, float]]) -> Network:
        """Between slots whose chips are there."""
        at = np.asarray(positions_mm, dtype=np.float64)
        distances = np.hypot(*(at[:, None] - at[None]).transpose(2, 0, 1))
        if self._links:
            return Network.of_links(self.slots, self._links, distances)
        return Network.all_to_all(self._link, distances)

    def begin(self, layers: Sequence[LayerNode]) -> Decision:
        """The first decision: the first chip in every slot, mapped, on a plain grid. Fixes the reference.

        Raises:
            InputError: The model does not fit; says by how much.
        """
        empty = Decision(
            chips=(self.first.name,) * self.slots, segments=(), mapping=(), positions_mm=self.places.grid()
        )
        plan = self.planned(layers, empty, fine=False)
        found = self.decision_of(layers, empty, plan)
        stats = plan.hw_stats
        self.reference = Reference(
            latency_ms=stats.total_latency_ms, energy_mj=stats.energy_mj,
            area_mm2=self.slots * self.first.area_mm2,
        )  # fmt: skip
        return found

    def fix_reference(self, told: Mapping[str, float]) -> None:
        """Take the reference of another run.

        Raises:
            InputError: It is none.
        """
        try:
            self.reference = Reference(**told)
        except TypeError as error:
            raise InputError(f"this is no reference: {error}") from error

    def price(self, layers: Sequence[LayerNode], decision: Decision) -> Priced:
        """What a decision costs for these layers.

        Splits of layers that have other units by now do not count.

        Raises:
            InputError: Memory does not fit, or a layer is on an empty slot (says which); or there is no
                reference.
        """
        zero = self.zeros
        costs, homes, splits = self._opened(layers, decision)
        if not feasible(costs, homes, splits):
            raise InputError(f"the decision does not fit the model: {_misfit(costs, homes, splits)}")
        stats = evaluate(costs, homes, splits, self.planner.weights)
        held = [self.library.chip(name) for name in decision.chips if name is not None]
        area = sum(chip.area_mm2 for chip in held)
        layout = self.places.score(decision.positions_mm, self.drawn(layers, decision))
        told = self.lambdas
        objective = (
            told.lambda_T * stats.total_latency_ms / zero.latency_ms
            + told.lambda_E * stats.energy_mj / zero.energy_mj
            + told.lambda_area * area / zero.area_mm2
            + told.lambda_chip * len(held) / self.slots
            + told.lambda_layout * layout
        )
        return Priced(objective=objective, stats=stats, area_mm2=area, chips=len(held), layout=layout)

    def better(self, layers: Sequence[LayerNode], now: Decision, tried: Decision | None) -> Decision:
        """The one with the lower objective; `now` where there is nothing else, or none is lower."""
        if tried is None or tried == now:
            return now
        before, after = self._worth(layers, now), self._worth(layers, tried)
        margin = _LEAST * abs(before) if math.isfinite(before) else 0.0
        return tried if after < before - margin else now

    def planned(
        self, layers: Sequence[LayerNode], decision: Decision, *, fine: bool, orders: Orders | None = None
    ) -> Plan:
        """A plan for the same chips at the same places.

        Args:
            layers: Of the model.
            decision: Chips and places.
            fine: Whether layers may be split.
            orders: Units of each layer in the order that parts take them.

        Raises:
            InputError: The model does not fit; says by how much.
        """
        network = self.network(decision.positions_mm)
        return self.planner.plan(
            layers, self.held(decision), network, use_fine_split=fine, orders=orders
        )  # fmt: skip

    def remap(
        self, layers: Sequence[LayerNode], decision: Decision, *, fine: bool, orders: Orders | None = None
    ) -> Decision | None:
        """The same chips at the same places, mapped anew; None where the model does not fit them."""
        try:
            plan = self.planned(layers, decision, fine=fine, orders=orders)
        except InputError:
            return None
        return self.decision_of(layers, decision, plan)

    def with_chips(
        self,
        layers: Sequence[LayerNode],
        decision: Decision,
        chips: Sequence[str | None],
        *,
        fine: bool,
        orders: Orders | None = None,
    ) -> Decision | None:
        """Other chips at the same places, mapped anew; None where there is none or they do not hold it."""
        if not any(chips):
            return None
        held = replace(decision, chips=tuple(chips))
        places = self.places.with_room(held.positions_mm, Drawn.of(self.held(held)))
        return self.remap(layers, replace(held, positions_mm=places), fine=fine, orders=orders)

    def replaced(
        self, layers: Sequence[LayerNode], decision: Decision, search: Search | None = None
    ) -> Decision:
        """The same chips and mapping at the best places that are found; see `Places.best`."""
        return replace(decision, positions_mm=self.places.best(self.drawn(layers, decision), search))

    def polish(
        self,
        layers: Sequence[LayerNode],
        decision: Decision,
        *,
        fine: bool,
        orders: Orders | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> Decision:
        """Change the chip of one slot at a time as long as the objective falls; then split and place."""
        now = self.fitted(layers, decision)
        now = self.better(layers, now, self.remap(layers, now, fine=False))
        names: list[str | None] = [*(chip.name for chip in self.chips), None]
        falls, passes = True, 0
        while falls:
            falls, passes = False, passes + 1
            for slot in range(self.slots):
                for name in names:
                    chips = (*now.chips[:slot], name, *now.chips[slot + 1 :])
                    tried = self.better(layers, now, self.with_chips(layers, now, chips, fine=False))
                    if tried is not now:
                        now, falls = tried, True
                if progress is not None:
                    progress(f"pass {passes}, chip of slot {slot}", slot / self.slots)
        now = self.better(layers, now, self.replaced(layers, now))
        if fine:
            now = self.better(layers, now, self.remap(layers, now, fine=True, orders=orders))
        return self.better(layers, now, self.replaced(layers, now))

    def concluded(
        self, layers: Sequence[LayerNode], decision: Decision, *, fine: bool, orders: Orders | None = None
    ) -> tuple[Decision, dict[str, Any]]:
        """A last plan for a decision's chips at its places, taken if it is better; and what to tell of it.

        Returns:
            The decision; and in JSON's types `considered`, the splits that the last plan looked at,
            `lower_bound_ms` of the latency without splits, `gap`, how much of that latency lies above the
            bound, and `finished`, whether the solver ended before its time was up.

        Raises:
            InputError: The model does not fit; says by how much.
        """
        last = self.planned(layers, decision, fine=fine, orders=orders)
        decision = self.better(layers, decision, self.decision_of(layers, decision, last))
        latency_ms = self.plan_of(layers, decision)[1].coarse_stats.total_latency_ms
        bound_ms = min(last.lower_bound_ms, latency_ms)
        return decision, {
            "considered": [asdict(each) for each in last.considered],
            "lower_bound_ms": bound_ms,
            "gap": (latency_ms - bound_ms) / latency_ms if latency_ms > 0.0 else 0.0,
            "finished": last.finished,
        }

    def check(self, layers: Sequence[LayerNode], decision: Decision) -> None:
        """Whether a decision is one for these slots and layers; raises FileFormatError where it is not."""
        names, there = decision.names, [layer.name for layer in layers]
        if len(decision.chips) != self.slots:
            raise FileFormatError(f"the decision is of {len(decision.chips)} slots; there are {self.slots}")
        if not names or names != there:
            other = ", ".join(sorted({*names} ^ {*there})[:5]) or "their order"
            raise FileFormatError(
                f"the decision is of {len(names)} layers and there are {len(there)}, or others; see {other}"
            )
        try:
            check(layers, decision.rewrite_plan or RewritePlan(splits=()), decision.homes(layers))
            if not any(self.held(decision)):
                raise InputError("every slot is empty")
            self.price(layers, decision)
        except InputError as error:
            raise FileFormatError(f"the decision cannot be: {error}") from error

    def fitted(self, layers: Sequence[LayerNode], decision: Decision) -> Decision:
        """The same decision for the layers that there are now; mapped anew where it does not fit them.

        Raises:
            InputError: The model does not fit these chips; says by how much.
        """
        now = decision.left(layers)
        if math.isfinite(self._worth(layers, now)):
            return now
        return self.decision_of(layers, now, self.planned(layers, now, fine=False))

    def layout_loss(self, layers: Sequence[LayerNode], decision: Decision, there: Tensor) -> Tensor:
        """L_layout of the decision's places, with gradients to how likely slots hold a chip.

        Args:
            layers: Of the model.
            decision: Places and mapping.
            there: 1 - alpha[:, empty], [S].
        """
        return self.places.loss(decision.positions_mm, self.drawn(layers, decision), there)

    def plan_of(self, layers: Sequence[LayerNode], decision: Decision) -> tuple[Costs, Plan]:
        """A decision as a plan, for a picture of it."""
        costs, homes, splits = self._opened(layers, decision)
        begins = begins_of(homes)
        stats = evaluate(costs, homes, splits, self.planner.weights)
        return costs, Plan(
            segments=chain(layers, begins), mapping=tuple(homes[at] for at in begins), homes=homes,
            rewrite_plan=rewrite_of({at: split for at, (split, _) in splits.items()}),
            hw_stats=stats, coarse_stats=evaluate(costs, homes, {}, self.planner.weights), considered=(),
            lower_bound_ms=0.0, gap=1.0, finished=True, weights=self.planner.weights,
            part_costs={layer: parts for layer, (_, parts) in splits.items()},
        )  # fmt: skip

    @staticmethod
    def orders(model: LayeredModel) -> Orders:
        """Units of a model's layers, the most important first."""
        return lambda layer: model.unit_importance(layer).argsort(descending=True).tolist()

    def _worth(self, layers: Sequence[LayerNode], decision: Decision) -> float:
        """The objective; infinite where the decision does not fit."""
        try:
            return self.price(layers, decision).objective
        except InputError:
            if self.reference is None:
                raise
            return math.inf

    def held(self, decision: Decision) -> list[ChipType | None]:
        """What each slot holds."""
        return [None if name is None else self.library.chip(name) for name in decision.chips]

    @staticmethod
    def decision_of(layers: Sequence[LayerNode], before: Decision, plan: Plan) -> Decision:
        """A plan as a decision, with the chips and places of another."""
        names = tuple(
            tuple(layers[layer].name for layer in segment.layer_ids) for segment in plan.segments.segments
        )
        return replace(before, segments=names, mapping=plan.mapping, rewrite_plan=plan.rewrite_plan)

    def _opened(
        self, layers: Sequence[LayerNode], decision: Decision
    ) -> tuple[Costs, tuple[int, ...], dict[int, tuple[Split, PartCosts]]]:
        held = self.held(decision)
        costs = self.planner.costs(layers, held, self.network(decision.positions_mm))
        splits = {}
        for layer, split in decision.splits(layers, same_units=True).items():
            chips = [held[slot] for slot in split.slots]
            if None in chips:
                empty = split.slots[chips.index(None)]
                raise InputError(f"a part of {layers[layer].name} is on slot {empty}, which is empty")
            splits[layer] = split, self.planner.part_costs(layers[layer], split.sizes, chips)
        return costs, decision.homes(layers), splits

    def drawn(self, layers: Sequence[LayerNode], decision: Decision) -> Drawn:
        """What a layout is made for."""
        traffic = np.zeros((self.slots, self.slots))
        plan = rewrite_of(decision.splits(layers, same_units=True))
        for pair, size_bytes in plan_bytes(layers, decision.homes(layers), plan).items():
            traffic[pair] = size_bytes
        return Drawn.of(self.held(decision), traffic)


def _misfit(costs: Costs, homes: Sequence[int], splits: Mapping[int, tuple[Split, PartCosts]]) -> str:
    """Why a decision is not feasible."""
    for at, slot in enumerate(homes):
        if not math.isfinite(costs.latency_ms[at, slot]):
            return f"{costs.layers[at].name} is on slot {slot}, which is empty"
    held = memory(costs, homes, splits)
    worst = int((held - costs.limit_mb).argmax())
    return f"slot {worst} is given {held[worst]:.6g} MB and holds {costs.limit_mb[worst]:.6g} MB"
