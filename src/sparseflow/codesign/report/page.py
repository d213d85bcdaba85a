"""Report page of a co-design: chips, pipeline, wafer, time and energy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import PLAN_FILE, load_plan
from sparseflow.codesign.joint.trace import TRACE_FILE, TraceRow, read_trace
from sparseflow.codesign.layout import solve_temperatures
from sparseflow.codesign.partition.objective import HwStats, LayerCosts
from sparseflow.codesign.partition.planner import PartitionPlan
from sparseflow.codesign.report.timeline import plot_timeline, simulate_pipeline
from sparseflow.codesign.report.wafer import plot_front, plot_wafer
from sparseflow.core.layers import LayerNode
from sparseflow.core.report import Figure, Page, from_matplotlib, plot_stacked_bars
from sparseflow.core.report.figures import open_axes, set_plain_log_ticks
from sparseflow.core.report.svg import AFTER, BAD, BEFORE, GOOD, INK, MUTED
from sparseflow.errors import FileFormatError

PAGE_FILE = "report.html"
_SOURCES = {"measured": "measured", "analytic": "not measured"}
BOUND_KEYS = ("lower_bound_ms", "gap", "finished")
"""Results of `Hardware.finalize` about the mapping."""


def write_page(
    out_dir: Path | str,
    hardware: Hardware,
    layers: Sequence[LayerNode],
    decision: HardwareDecision,
    *,
    rows: Sequence[TraceRow] = (),
    details: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    command: str = "",
) -> Path:
    """Write `report.html` and return its path.

    Args:
        out_dir: Output directory.
        hardware: Evaluates the decision.
        layers: Layers of the model.
        decision: The decision.
        rows: Rows of the trace; none for a plan without training.
        details: Result of `Hardware.finalize`, if known: decisions about splits, and bounds.
        environment: Environment, see `core.environment`.
        command: Command that reproduces the page.
    """
    cost = hardware.evaluate_cost(layers, decision)
    costs, plan = hardware.to_plan(layers, decision)
    stats, details = cost.stats, details or {}
    num_chips, verb = ("1 chip", "runs") if cost.chips == 1 else (f"{cost.chips} chips", "run")
    page = Page(
        "Co-design: a model and its chips",
        f"Predicted: {num_chips} with {cost.area_mm2:.0f} mm2 {verb} a batch of {hardware.batch_size} in "
        f"{stats.total_latency_ms:.4g} ms with {stats.energy_mj:.4g} mJ.",
        environment=environment,
        reproduce=command,
        prediction=hardware.describe_prediction(decision),
    )
    page.headline(f"{stats.total_latency_ms:.4g} ms", f"predicted latency ({plan.weights.mode})")
    page.headline(f"{stats.energy_mj:.4g} mJ", "predicted energy per batch")
    page.headline(f"{cost.energy_delay:.4g} mJ\N{DOT OPERATOR}ms", "predicted energy-delay product")
    page.headline(f"{cost.area_mm2:.0f} mm2", num_chips)
    page.section("Chips")
    _add_chips(page, hardware, decision, costs, plan)
    _add_pipeline(page, hardware, decision, costs, plan, details)
    page.section("Wafer")
    _add_wafer(page, hardware, layers, decision, costs, plan)
    if details.get("considered"):
        page.section("Evaluated splits")
        _add_splits(page, details["considered"])
    if rows:
        page.section("Training", "Accuracies are measured on test clips; hardware costs are predicted.")
        _add_training(page, rows)
    return page.write(Path(out_dir) / PAGE_FILE)


def write_comparison(out_dir: Path | str, results: Mapping[str, Any]) -> Path:
    """Write `report.html` for several designs and return its path.

    Args:
        out_dir: Output directory.
        results: Result of `summarize_designs`.
    """
    page = Page(
        "Joint training and its baselines",
        results["verdict"],
        environment=results["environment"],
        reproduce=results["command"],
        prediction=results["prediction"],
    )
    page.section("Designs")
    columns = {
        "mode": "mode", "seeds": "seeds", "accuracy": "accuracy, 0 to 1", "energy_delay": "mJ ms",
        "ratio": "relative to two-stage", "low": "from", "high": "to", "violations": "frozen epochs",
    }  # fmt: skip
    caption = (
        "Accuracies are measured on test clips, energy-delay products are predicted. Means over seeds; "
        "ratios are geometric means over equal seeds, with 95 % bootstrap intervals."
    )
    page.table("Predicted energy-delay product", results["modes"], columns=columns, caption=caption)
    page.figure(_plot_designs(results["runs"]))
    return page.write(Path(out_dir) / PAGE_FILE)


def _plot_designs(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot accuracy against predicted energy-delay product, one point per design."""
    modes = list(dict.fromkeys(str(run["mode"]) for run in runs))
    with open_axes(rows=1, row_in=3.2) as (figure, axes):
        for mode, color in zip(modes, itertools.cycle((AFTER, BEFORE, GOOD, BAD, INK, MUTED))):
            points = [(run["energy_delay"], run["accuracy"]) for run in runs if run["mode"] == mode]
            axes.plot(*zip(*points, strict=True), "o", color=color, markersize=6, alpha=0.85, label=mode)
        axes.set_xscale("log")
        set_plain_log_ticks(axes.xaxis)
        axes.grid(True, axis="both")
        axes.set_xlabel("predicted energy-delay product, mJ ms")
        axes.set_ylabel("accuracy on test clips")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0)
        text = "; ".join(
            f"{run['mode']}, seed {run['seed']}: {run['energy_delay']:.3g} mJ ms, {run['accuracy']:.1%}"
            for run in runs
        )
        return from_matplotlib(
            figure,
            title="Accuracy and energy-delay product",
            alt=f"{text}.",
            caption="One point per seed and mode; the best designs are at the top left.",
        )


def write_run_page(run_dir: Path | str, *, command: str = "") -> Path:
    """Write the page of a run from its trace and, if finished, its plan; returns its path.

    Raises:
        InputError: There is no trace.
        FileFormatError: Trace or plan is damaged.
    """
    trace, plan = Path(run_dir) / TRACE_FILE, Path(run_dir) / PLAN_FILE
    hardware, header, rows = read_trace(trace)
    # The last rows of a two-stage run belong to other baselines.
    rows = [row for row in rows if row.mode == header.mode]
    if not rows:
        raise FileFormatError(f"{trace} contains no row of its mode, {header.mode}")
    layers, decision = rows[-1].layers, rows[-1].decision
    hardware.check_decision(layers, decision)
    saved = load_plan(plan) if plan.is_file() else None
    return write_page(
        run_dir, hardware, layers, decision, rows=rows,
        details=saved.extra if saved is not None and saved.decision == decision else None,
        environment=header.environment, command=command,
    )  # fmt: skip


def _add_chips(
    page: Page, hardware: Hardware, decision: HardwareDecision, costs: LayerCosts, plan: PartitionPlan
) -> None:
    rows = [
        {
            "slot": slot, "type": chip.name,
            "layers of this chip were": _SOURCES[hardware.proxy.get_source(chip)],
            "layers": plan.assignment.count(slot),
            "parts of split layers": sum(slot in split.slots[1:] for split, _ in plan.splits.values()),
            "busy, ms per batch": plan.hw_stats.busy_ms[slot],
            "memory, MB": plan.hw_stats.memory_mb[slot], "available, MB": float(costs.limit_mb[slot]),
            "x, mm": decision.positions_mm[slot][0], "y, mm": decision.positions_mm[slot][1],
        }
        for slot, chip in enumerate(hardware.get_chips(decision))
        if chip is not None
    ]  # fmt: skip
    page.table("Chips", rows, digits={"memory, MB": 1, "available, MB": 0, "x, mm": 1, "y, mm": 1})


def _add_pipeline(
    page: Page,
    hardware: Hardware,
    decision: HardwareDecision,
    costs: LayerCosts,
    plan: PartitionPlan,
    details: Mapping[str, Any],
) -> None:
    stats, timeline = plan.hw_stats, simulate_pipeline(costs, plan)
    page.section(
        "Pipeline",
        f"One batch of {hardware.batch_size} alone is predicted to take {stats.serial_ms:.4g} ms. In a full "
        "pipeline, in which each slot works in a fixed order, the simulation completes one batch every "
        f"{timeline.period_ms:.4g} ms.",
        _describe_bound(stats.total_latency_ms, details),
    )
    names = [f"{slot}: {chip or 'empty'}" for slot, chip in enumerate(decision.chips)]
    page.figure(plot_timeline(timeline, names))
    used = [slot for slot, chip in enumerate(decision.chips) if chip is not None]
    labels = [names[slot] for slot in used]
    time = {
        "compute": [stats.compute_ms[slot] for slot in used],
        "receive or wait": [max(0.0, stats.busy_ms[slot] - stats.compute_ms[slot]) for slot in used],
        "idle": [max(0.0, stats.total_latency_ms - stats.busy_ms[slot]) for slot in used],
    }
    page.figure(
        plot_stacked_bars("Predicted time per slot", labels, time, unit="ms per batch", remainder="idle")
    )
    compute_mj, idle_mj = _compute_energy_mj(costs, plan), _idle_energy_mj(costs, stats)
    energy = {
        "compute": [*(float(compute_mj[slot]) for slot in used), 0.0],
        "idle": [*(float(idle_mj[slot]) for slot in used), 0.0],
        "transfer": [*(0.0 for _ in used), stats.comm_energy_mj],
    }
    page.figure(
        plot_stacked_bars(
            "Predicted energy per slot", [*labels, "links"], energy, unit="mJ per batch", remainder="idle"
        )
    )


def _describe_bound(latency_ms: float, details: Mapping[str, Any]) -> str:
    if not set(BOUND_KEYS) <= set(details):
        return "No lower bound of this mapping was computed."
    note = "" if details["finished"] else " The solver reached its time limit; a better mapping may exist."
    return (
        "Without splits, every mapping of the coarse segments to these chips takes at least "
        f"{details['lower_bound_ms']:.4g} ms. The latency of this mapping without splits exceeds the bound "
        f"by {100.0 * details['gap']:.2g} % of itself; with splits it is {latency_ms:.4g} ms.{note}"
    )


def _add_wafer(
    page: Page,
    hardware: Hardware,
    layers: Sequence[LayerNode],
    decision: HardwareDecision,
    costs: LayerCosts,
    plan: PartitionPlan,
) -> None:
    problem, stats = hardware.make_placement_problem(layers, decision), plan.hw_stats
    power = (_compute_energy_mj(costs, plan) + _idle_energy_mj(costs, stats)) / stats.total_latency_ms
    occupied = [slot for slot, name in enumerate(problem.names) if name is not None]
    wafer, sizes = hardware.placer.wafer, problem.sizes_mm[occupied]
    positions = np.asarray(decision.positions_mm)[occupied]
    figure = plot_wafer(
        wafer, positions, sizes, names=[f"{slot}: {problem.names[slot]}" for slot in occupied],
        traffic_bytes=problem.traffic_bytes[np.ix_(occupied, occupied)],
        heat=solve_temperatures(wafer, positions, sizes, power[occupied]), title="Wafer",
        caption="Line width shows traffic, color the steady-state temperature at the mean power of the plan.",
    )  # fmt: skip
    page.figure(figure)
    front = hardware.placer.compute_front(problem)
    if len(front.layouts) > 1:
        page.figure(plot_front(front))
    else:
        page.section(
            "Alternative layouts",
            "No other layout trades communication for heat: one layout is the best in both.",
        )


def _compute_energy_mj(costs: LayerCosts, plan: PartitionPlan) -> np.ndarray:
    """Compute energy of each slot per batch, mJ, [S]."""
    energy_mj = np.zeros(costs.num_slots)
    for slot, time_ms, power_w in _iterate_work(costs, plan):
        energy_mj[slot] += time_ms * power_w
    return energy_mj


def _idle_energy_mj(costs: LayerCosts, stats: HwStats) -> np.ndarray:
    """Idle energy of each slot per batch, mJ, [S]."""
    return np.maximum(stats.total_latency_ms - np.array(stats.compute_ms), 0.0) * costs.idle_w


def _iterate_work(costs: LayerCosts, plan: PartitionPlan) -> Iterator[tuple[int, float, float]]:
    """Yield slot, ms and W of each layer and part."""
    for index, slot in enumerate(plan.assignment):
        if index in plan.splits:
            split, parts = plan.splits[index]
            yield from zip(split.slots, parts.latency_ms, parts.power_w, strict=True)
        else:
            yield slot, float(costs.latency_ms[index, slot]), float(costs.power_w[index, slot])


def _add_splits(page: Page, decisions: Sequence[Mapping[str, Any]]) -> None:
    columns = {
        "name": "layer", "sizes": "units", "slots": "slots", "objective_before": "objective before",
        "objective_after": "after", "gain_ratio": "gain", "accepted": "accepted",
    }  # fmt: skip
    rows = [
        {**decision, "sizes": str(list(decision["sizes"])), "slots": str(list(decision["slots"]))}
        for decision in decisions
    ]
    page.table("Splits", rows, columns=columns)


def _add_training(page: Page, rows: Sequence[TraceRow]) -> None:
    x = [float(index) for index in range(1, len(rows) + 1)]
    first, stats = rows[0].cost, [row.cost.stats for row in rows]
    costs = {
        "objective": [row.cost.objective / first.objective for row in rows],
        "latency": [item.total_latency_ms / first.stats.total_latency_ms for item in stats],
        "energy": [item.energy_mj / first.stats.energy_mj for item in stats],
    }
    training = {"accuracy": [row.accuracy for row in rows]}
    if rows[0].mode == "joint":
        training["hardware-loss weight"] = [row.lambda_hw for row in rows]
        training["frozen"] = [float(row.frozen) for row in rows]
    for title, curves, y in (
        ("Accuracy", training, "fraction"),
        ("Predicted hardware cost", costs, "relative to the first"),
    ):
        curves = {name: (x, values) for name, values in curves.items()}
        page.curves(title, curves, x="epochs, then rounds", y=y)
