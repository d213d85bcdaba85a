"""Hardware: chooses chips, mapping, splits and positions for a given model.

Decisions are compared by

    J = lambda_T latency / latency_0 + lambda_E energy / energy_0 + lambda_area area / area_0
        + lambda_chip chips / slots + lambda_layout L_layout

which is the hardware loss L_hw without relaxations. A new decision is accepted only if it lowers J.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from sparseflow.codesign.design.config import CodesignConfig
from sparseflow.codesign.design.decision import (
    CostReference,
    DecisionCost,
    HardwareDecision,
    build_rewrite_plan,
    find_segment_starts,
)
from sparseflow.codesign.design.placement import ChipPlacer, PlacementProblem, PlacementSearch
from sparseflow.codesign.hardware.chips import ChipLibrary, ChipType, read_library
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping.solver import MappingSolver
from sparseflow.codesign.partition.objective import (
    LayerCosts,
    PartCosts,
    compute_memory_mb,
    evaluate_plan,
    is_feasible,
)
from sparseflow.codesign.partition.planner import PartitionPlan, PartitionPlanner
from sparseflow.codesign.partition.split_search import UnitOrders
from sparseflow.codesign.workload.segments import build_chain
from sparseflow.codesign.workload.splits import (
    LayerSplit,
    RewritePlan,
    check_rewrite_plan,
    compute_transfer_bytes,
)
from sparseflow.core.checks import check_one_of
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError

log = logging.getLogger(__name__)

_MIN_RELATIVE_DECREASE = 1e-12
"""Relative decrease of the objective that counts as an improvement."""


class Hardware:
    """Available hardware, evaluation of decisions, and search for better ones.

    Args:
        config: Library, slots, links, mapping, partitioning, wafer and weights.
        proxy: Predicts layer costs; by default the proxy of the config.
        library: Chip library; by default that of the config.

    Attributes:
        chips: Available chip types.
        initial_chip: Initial type of all slots.
        batch_size: Batch size in the pipeline.
        has_custom_proxy: Whether costs come from another proxy than the plain roofline.
        reference: Reference costs; None before `initial_decision`.

    Raises:
        InputError: A name is unknown, slots are not connected, or they do not fit on the wafer.
        FileFormatError: The library or the proxy is invalid.
    """

    def __init__(
        self, config: CodesignConfig, proxy: LayerHwProxy | None = None, library: ChipLibrary | None = None
    ) -> None:
        hardware_config = config.hardware
        self.config, self.batch_size = config, hardware_config.batch_size
        self.library = read_library(hardware_config.library) if library is None else library
        names = hardware_config.chips or tuple(chip.name for chip in self.library.chips)
        self.chips: list[ChipType] = [self.library.get_chip(name) for name in names]
        self.initial_chip = max(self.chips, key=lambda chip: chip.mem_gb)
        if hardware_config.initial_chip is not None:
            check_one_of(names, initial_chip=hardware_config.initial_chip)
            self.initial_chip = self.library.get_chip(hardware_config.initial_chip)
        self.has_custom_proxy = proxy is not None or hardware_config.proxy is not None
        if proxy is None and hardware_config.proxy is not None:
            proxy = LayerHwProxy.load(hardware_config.proxy)
        self.proxy = proxy = proxy or LayerHwProxy.analytic()
        if proxy.devices and all(proxy.get_source(chip) == "analytic" for chip in self.chips):
            log.warning(
                "no chip has measured costs: the proxy was fitted to %s, the chips are %s; name, "
                "the largest of `peak_flops` and `peak_bw` must be equal",
                ", ".join(device.name for device in proxy.devices),
                ", ".join(names),
            )
        self.lambdas = config.loss
        mapping_config = config.mapping
        solver = MappingSolver(
            strategy=mapping_config.strategy,
            mode=mapping_config.mode,
            time_limit_s=mapping_config.time_limit_s,
            seed=config.joint.seed,
        )
        self.planner = PartitionPlanner(solver, self.proxy, config.partition)
        self.placer = ChipPlacer(config.wafer, hardware_config.slots, self.chips, seed=config.joint.seed)
        self.reference: CostReference | None = None
        self._link = self.library.get_link(hardware_config.link)
        self._links = [(a, b, self.library.get_link(name)) for a, b, name in hardware_config.links]
        self.build_network(self.placer.grid_positions())  # checks that all slots are reachable

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.config.hardware.slots

    @property
    def required_reference(self) -> CostReference:
        """The reference.

        Raises:
            InputError: There is none yet.
        """
        if self.reference is None:
            raise InputError("there is no cost reference; call `initial_decision` first")
        return self.reference

    def build_network(self, positions_mm: Sequence[tuple[float, float]]) -> Network:
        """Build the network between slots at these positions, mm."""
        positions = np.asarray(positions_mm, dtype=np.float64)
        distances = np.hypot(*(positions[:, None] - positions[None]).transpose(2, 0, 1))
        if self._links:
            return Network.from_links(self.num_slots, self._links, distances)
        return Network.all_to_all(self._link, distances)

    def initial_decision(self, layers: Sequence[LayerNode]) -> HardwareDecision:
        """Map the model to the initial chips on a plain grid, and set the reference costs.

        Raises:
            InputError: The model does not fit.
        """
        empty = HardwareDecision(
            chips=(self.initial_chip.name,) * self.num_slots,
            segments=(),
            mapping=(),
            positions_mm=self.placer.grid_positions(),
            rewrite_plan=None,
        )
        plan = self.make_plan(layers, empty, use_fine_split=False)
        decision = self.decision_from_plan(layers, empty, plan)
        stats = plan.hw_stats
        self.reference = CostReference(
            latency_ms=stats.total_latency_ms, energy_mj=stats.energy_mj,
            area_mm2=self.num_slots * self.initial_chip.area_mm2,
        )  # fmt: skip
        return decision

    def evaluate_cost(self, layers: Sequence[LayerNode], decision: HardwareDecision) -> DecisionCost:
        """Compute the cost of a decision for these layers.

        Splits of layers whose number of units has changed are ignored.

        Raises:
            InputError: Memory does not suffice, a layer is on an empty slot, or there is no reference.
        """
        reference = self.required_reference
        costs, assignment, splits = self._compute_inputs(layers, decision)
        if not is_feasible(costs, assignment, splits):
            raise InputError(
                f"the decision is infeasible for the model: {_explain_infeasible(costs, assignment, splits)}"
            )
        stats = evaluate_plan(costs, assignment, splits, self.planner.weights)
        chips = [self.library.get_chip(name) for name in decision.chips if name is not None]
        area = sum(chip.area_mm2 for chip in chips)
        layout = self.placer.compute_loss(
            decision.positions_mm, self.make_placement_problem(layers, decision)
        )
        lambdas = self.lambdas
        objective = (
            lambdas.lambda_T * stats.total_latency_ms / reference.latency_ms
            + lambdas.lambda_E * stats.energy_mj / reference.energy_mj
            + lambdas.lambda_area * area / reference.area_mm2
            + lambdas.lambda_chip * len(chips) / self.num_slots
            + lambdas.lambda_layout * layout
        )
        return DecisionCost(objective=objective, stats=stats, area_mm2=area, chips=len(chips), layout=layout)

    def select_better(
        self, layers: Sequence[LayerNode], current: HardwareDecision, candidate: HardwareDecision | None
    ) -> HardwareDecision:
        """Return the decision with the lower objective; `current` on ties and if there is no candidate."""
        if candidate is None or candidate == current:
            return current
        before, after = self._objective(layers, current), self._objective(layers, candidate)
        margin = _MIN_RELATIVE_DECREASE * abs(before) if math.isfinite(before) else 0.0
        return candidate if after < before - margin else current

    def make_plan(
        self,
        layers: Sequence[LayerNode],
        decision: HardwareDecision,
        *,
        use_fine_split: bool,
        unit_orders: UnitOrders | None = None,
        log_level: int = logging.DEBUG,
    ) -> PartitionPlan:
        """Plan the model on the chips and positions of a decision.

        Args:
            layers: All layers, in order.
            decision: Chips and positions.
            use_fine_split: Whether layers may be split.
            unit_orders: Returns the units of a layer in the order in which parts take them.
            log_level: Level at which the planner logs its decisions.

        Raises:
            InputError: The model does not fit.
        """
        network = self.build_network(decision.positions_mm)
        return self.planner.plan(
            layers, self.get_chips(decision), network, use_fine_split=use_fine_split, unit_orders=unit_orders,
            log_level=log_level,
        )  # fmt: skip

    def remap(
        self,
        layers: Sequence[LayerNode],
        decision: HardwareDecision,
        *,
        use_fine_split: bool,
        unit_orders: UnitOrders | None = None,
    ) -> HardwareDecision | None:
        """Remap the model on the same chips and positions; None if it does not fit."""
        try:
            plan = self.make_plan(layers, decision, use_fine_split=use_fine_split, unit_orders=unit_orders)
        except InputError:
            return None
        return self.decision_from_plan(layers, decision, plan)

    def replace_chips(
        self,
        layers: Sequence[LayerNode],
        decision: HardwareDecision,
        chips: Sequence[str | None],
        *,
        use_fine_split: bool,
        unit_orders: UnitOrders | None = None,
    ) -> HardwareDecision | None:
        """Replace the chips at the same positions and remap; None if the model does not fit."""
        if not any(chips):
            return None
        updated = replace(decision, chips=tuple(chips))
        positions = self.placer.legalize(
            updated.positions_mm, PlacementProblem.from_chips(self.get_chips(updated))
        )
        return self.remap(
            layers,
            replace(updated, positions_mm=positions),
            use_fine_split=use_fine_split,
            unit_orders=unit_orders,
        )

    def optimize_placement(
        self, layers: Sequence[LayerNode], decision: HardwareDecision, search: PlacementSearch | None = None
    ) -> HardwareDecision:
        """Optimize the positions of the same chips and mapping; see `ChipPlacer.optimize`."""
        return replace(
            decision, positions_mm=self.placer.optimize(self.make_placement_problem(layers, decision), search)
        )

    def refine(
        self,
        layers: Sequence[LayerNode],
        decision: HardwareDecision,
        *,
        use_fine_split: bool,
        unit_orders: UnitOrders | None = None,
        progress: Progress | None = None,
    ) -> HardwareDecision:
        """Change single chips while the objective decreases; then split layers and place chips."""
        current = self.fit_to_layers(layers, decision)
        current = self.select_better(layers, current, self.remap(layers, current, use_fine_split=False))
        names: list[str | None] = [*(chip.name for chip in self.chips), None]
        improved, passes = True, 0
        while improved:
            improved, passes = False, passes + 1
            for slot in range(self.num_slots):
                for name in names:
                    chips = (*current.chips[:slot], name, *current.chips[slot + 1 :])
                    candidate = self.select_better(
                        layers, current, self.replace_chips(layers, current, chips, use_fine_split=False)
                    )
                    if candidate is not current:
                        current, improved = candidate, True
                if progress is not None:
                    progress(f"pass {passes}, chip of slot {slot}", slot / self.num_slots)
        current = self.select_better(layers, current, self.optimize_placement(layers, current))
        if use_fine_split:
            current = self.select_better(
                layers, current, self.remap(layers, current, use_fine_split=True, unit_orders=unit_orders)
            )
        return self.select_better(layers, current, self.optimize_placement(layers, current))

    def finalize(
        self,
        layers: Sequence[LayerNode],
        decision: HardwareDecision,
        *,
        use_fine_split: bool,
        unit_orders: UnitOrders | None = None,
    ) -> tuple[HardwareDecision, dict[str, Any]]:
        """Plan once more on the final chips and positions, and describe the result.

        Returns:
            The better decision, and as JSON types `considered` (decisions about splits), `lower_bound_ms` (of
            the latency without splits), `gap` (relative distance from the bound) and `finished` (whether the
            solver ended before its time limit).

        Raises:
            InputError: The model does not fit.
        """
        plan = self.make_plan(
            layers, decision, use_fine_split=use_fine_split, unit_orders=unit_orders, log_level=logging.INFO
        )
        decision = self.select_better(layers, decision, self.decision_from_plan(layers, decision, plan))
        latency_ms = self.to_plan(layers, decision)[1].coarse_stats.total_latency_ms
        bound_ms = min(plan.lower_bound_ms, latency_ms)
        return decision, {
            "considered": [asdict(item) for item in plan.split_decisions],
            "lower_bound_ms": bound_ms,
            "gap": (latency_ms - bound_ms) / latency_ms if latency_ms > 0.0 else 0.0,
            "finished": plan.finished,
        }

    def check_decision(self, layers: Sequence[LayerNode], decision: HardwareDecision) -> None:
        """Check that a decision fits these slots and layers; raises FileFormatError otherwise."""
        names, model_names = decision.layer_names, [layer.name for layer in layers]
        if len(decision.chips) != self.num_slots:
            raise FileFormatError(f"the decision has {len(decision.chips)} slots; expected {self.num_slots}")
        if not names or names != model_names:
            differing = ", ".join(sorted({*names} ^ {*model_names})[:5]) or "their order"
            raise FileFormatError(
                f"the decision has {len(names)} layers, the model has {len(model_names)}; different: "
                f"{differing}"
            )
        try:
            check_rewrite_plan(
                layers, decision.rewrite_plan or RewritePlan(splits=()), decision.assign_layers(layers)
            )
            if not any(self.get_chips(decision)):
                raise InputError("all slots are empty")
            self.evaluate_cost(layers, decision)
        except InputError as error:
            raise FileFormatError(f"invalid decision: {error}") from error

    def fit_to_layers(self, layers: Sequence[LayerNode], decision: HardwareDecision) -> HardwareDecision:
        """Adapt a decision to the current layers; remap them if they no longer fit.

        Raises:
            InputError: The model does not fit these chips.
        """
        restricted = decision.restrict_to(layers)
        if math.isfinite(self._objective(layers, restricted)):
            return restricted
        return self.decision_from_plan(
            layers, restricted, self.make_plan(layers, restricted, use_fine_split=False)
        )

    def describe_prediction(self, decision: HardwareDecision | None = None) -> str:
        """Describe in one sentence where the costs of a decision come from.

        Args:
            decision: Chips; by default all available ones.
        """
        chips = self.chips if decision is None else [chip for chip in self.get_chips(decision) if chip]
        measured = sorted({chip.name for chip in chips if self.proxy.get_source(chip) == "measured"})
        if not measured:
            return (
                "Latency, energy and memory are predicted by an analytic roofline from the peak rates of the "
                "chip library; nothing was measured on these chips."
            )
        suffix = (
            ""
            if len(measured) == len({chip.name for chip in chips})
            else (", and for other chips by an analytic roofline")
        )
        return (
            "Latency, energy and memory are predicted, not measured: by a proxy that was fitted to "
            f"measurements of layers for {', '.join(measured)}{suffix}."
        )

    def layout_loss(
        self, layers: Sequence[LayerNode], decision: HardwareDecision, occupancy: Tensor
    ) -> Tensor:
        """L_layout of the decision's positions, differentiable with respect to the occupancy.

        Args:
            layers: All layers, in order.
            decision: Positions and mapping.
            occupancy: Probability that each slot contains a chip, 1 - alpha[:, empty], [S].
        """
        return self.placer.differentiable_loss(
            decision.positions_mm, self.make_placement_problem(layers, decision), occupancy
        )

    def to_plan(
        self, layers: Sequence[LayerNode], decision: HardwareDecision
    ) -> tuple[LayerCosts, PartitionPlan]:
        """Convert a decision to a plan, for reports."""
        costs, assignment, splits = self._compute_inputs(layers, decision)
        first_layers = find_segment_starts(assignment)
        stats = evaluate_plan(costs, assignment, splits, self.planner.weights)
        return costs, PartitionPlan(
            segments=build_chain(layers, first_layers),
            mapping=tuple(assignment[index] for index in first_layers),
            assignment=assignment,
            rewrite_plan=build_rewrite_plan({layer: split for layer, (split, _) in splits.items()}),
            hw_stats=stats,
            coarse_stats=evaluate_plan(costs, assignment, {}, self.planner.weights),
            split_decisions=(),
            lower_bound_ms=0.0,
            gap=1.0,
            finished=True,
            weights=self.planner.weights,
            part_costs={layer: parts for layer, (_, parts) in splits.items()},
        )

    @staticmethod
    def make_unit_orders(model: LayeredModel) -> UnitOrders:
        """Order the units of each layer by descending importance."""
        return lambda layer: model.unit_importance(layer).argsort(descending=True).tolist()

    def _objective(self, layers: Sequence[LayerNode], decision: HardwareDecision) -> float:
        """Objective of a decision; infinite if it does not fit."""
        try:
            return self.evaluate_cost(layers, decision).objective
        except InputError:
            if self.reference is None:
                raise
            return math.inf

    def get_chips(self, decision: HardwareDecision) -> list[ChipType | None]:
        """Chip type of each slot."""
        return [None if name is None else self.library.get_chip(name) for name in decision.chips]

    @staticmethod
    def decision_from_plan(
        layers: Sequence[LayerNode], base: HardwareDecision, plan: PartitionPlan
    ) -> HardwareDecision:
        """Combine a plan with the chips and positions of a decision."""
        names = tuple(
            tuple(layers[layer].name for layer in segment.layer_ids) for segment in plan.segments.segments
        )
        return replace(base, segments=names, mapping=plan.mapping, rewrite_plan=plan.rewrite_plan)

    def _compute_inputs(
        self, layers: Sequence[LayerNode], decision: HardwareDecision
    ) -> tuple[LayerCosts, tuple[int, ...], dict[int, tuple[LayerSplit, PartCosts]]]:
        slot_chips = self.get_chips(decision)
        costs = self.planner.compute_costs(layers, slot_chips, self.build_network(decision.positions_mm))
        splits = {}
        for layer, split in decision.select_splits(layers, same_units=True).items():
            part_chips = [slot_chips[slot] for slot in split.slots]
            if None in part_chips:
                empty = split.slots[part_chips.index(None)]
                raise InputError(f"a part of {layers[layer].name} is on the empty slot {empty}")
            splits[layer] = split, self.planner.compute_part_costs(layers[layer], split.sizes, part_chips)
        return costs, decision.assign_layers(layers), splits

    def make_placement_problem(
        self, layers: Sequence[LayerNode], decision: HardwareDecision
    ) -> PlacementProblem:
        """Build the placement problem of a decision."""
        traffic = np.zeros((self.num_slots, self.num_slots))
        plan = build_rewrite_plan(decision.select_splits(layers, same_units=True))
        for pair, size_bytes in compute_transfer_bytes(layers, decision.assign_layers(layers), plan).items():
            traffic[pair] = size_bytes
        return PlacementProblem.from_chips(self.get_chips(decision), traffic)


def _explain_infeasible(
    costs: LayerCosts, assignment: Sequence[int], splits: Mapping[int, tuple[LayerSplit, PartCosts]]
) -> str:
    """Explain why a decision does not fit."""
    for index, slot in enumerate(assignment):
        if not math.isfinite(costs.latency_ms[index, slot]):
            return f"{costs.layers[index].name} is on the empty slot {slot}"
    memory_mb = compute_memory_mb(costs, assignment, splits)
    worst = int((memory_mb - costs.limit_mb).argmax())
    return f"slot {worst} needs {memory_mb[worst]:.6g} MB and has {costs.limit_mb[worst]:.6g} MB"
