"""The page of a co-design: what was chosen, the pipeline, the wafer, where time and energy go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import PLAN, load_plan
from sparseflow.codesign.joint.trace import TRACE, opened
from sparseflow.codesign.layout import temperatures
from sparseflow.codesign.partition.objective import Costs, HwStats
from sparseflow.codesign.partition.planner import Plan
from sparseflow.codesign.report.timeline import gantt, play
from sparseflow.codesign.report.wafer import front_picture, wafer_picture
from sparseflow.codesign.workload.layers import layers_of
from sparseflow.core.layers import LayerNode
from sparseflow.core.report import (
    Column,
    Figure,
    Headline,
    Report,
    Section,
    Table,
    plot_curves,
    plot_stacked_bars,
)
from sparseflow.errors import FileFormatError

PAGE = "report.html"
BOUNDS = ("lower_bound_ms", "gap", "finished")
"""What `Hardware.concluded` tells of a mapping at its places."""

_ROW = {"mode", "accuracy", "lambda_hw", "guard", "layers", "decision", "priced"}
"""What is shown of each row of a trace but the first."""


def write_page(
    folder: Path | str,
    hardware: Hardware,
    layers: Sequence[LayerNode],
    decision: Decision,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    told: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    command: str = "",
) -> Path:
    """Write `report.html` into a folder; gives its path.

    Args:
        folder: Where to write.
        hardware: What a decision is priced by.
        layers: Of the model.
        decision: What was decided.
        rows: Epochs, rounds and the end of a run, as its trace holds them; none for a plan without training.
        told: What `Hardware.concluded` told, as far as it is known: splits that were considered, and bounds.
        environment: Circumstances, as `core.environment` writes them.
        command: What makes this page again.
    """
    priced = hardware.price(layers, decision)
    costs, plan = hardware.plan_of(layers, decision)
    stats, played = priced.stats, play(costs, plan)
    names = [f"{slot}: {chip or 'empty'}" for slot, chip in enumerate(decision.chips)]
    sections = [
        Section(title="What was chosen", items=[_chips(hardware, decision, costs, plan)]),
        Section(
            title="The pipeline",
            text=[
                f"One batch of {hardware.batch} alone takes {stats.serial_ms:.4g} ms. With many in flight, "
                f"each slot does its own work in a fixed order; played through, one comes out every "
                f"{played.period_ms:.4g} ms.",
                _bound(stats.total_latency_ms, told or {}),
            ],
            items=[gantt(played, names), *_where(decision, costs, plan, names)],
        ),
        Section(title="The wafer", items=_wafer(hardware, layers, decision, costs, plan)),
    ]
    if told and told.get("considered"):
        sections.append(Section(title="Splits that were considered", items=[_considered(told["considered"])]))
    if rows:
        sections.append(Section(title="The way there", items=_way(rows)))
    page = Report(
        title="Co-design: a model and its chips",
        summary=f"{priced.chips} chips of {priced.area_mm2:.0f} mm2 run the model at "
        f"{stats.total_latency_ms:.4g} ms and {stats.energy_mj:.4g} mJ a batch of {hardware.batch}.",
        headlines=[
            Headline(value=f"{stats.total_latency_ms:.4g} ms", label=f"latency ({plan.weights.mode})"),
            Headline(value=f"{stats.energy_mj:.4g} mJ", label="energy a batch"),
            Headline(value=f"{priced.energy_delay:.4g} mJ ms", label="energy-delay product"),
            Headline(value=f"{priced.area_mm2:.0f} mm2", label=f"{priced.chips} chips"),
        ],
        sections=sections,
        environment=environment or {},
        reproduce=command,
    )
    return page.write(Path(folder) / PAGE)


def _chips(hardware: Hardware, decision: Decision, costs: Costs, plan: Plan) -> Table:
    """What slots hold and have to do."""
    rows = [
        {
            "slot": slot, "chip": chip.name, "priced": hardware.proxy.known(chip),
            "layers": sum(home == slot for home in plan.homes),
            "parts": sum(slot in split.slots[1:] for split, _ in plan.splits.values()),
            "busy": plan.hw_stats.busy_ms[slot], "memory": plan.hw_stats.memory_mb[slot],
            "limit": float(costs.limit_mb[slot]),
            "x": decision.positions_mm[slot][0], "y": decision.positions_mm[slot][1],
        }
        for slot, chip in enumerate(hardware.held(decision))
        if chip is not None
    ]  # fmt: skip
    return Table(
        title="Chips",
        columns=[
            Column(key="slot", title="slot"), Column(key="chip", title="type"),
            Column(key="priced", title="latencies are"), Column(key="layers", title="layers"),
            Column(key="parts", title="parts of split layers"),
            Column(key="busy", title="taken up, ms a batch"),
            Column(key="memory", title="memory, MB", digits=1), Column(key="limit", title="of, MB", digits=0),
            Column(key="x", title="x, mm", digits=1), Column(key="y", title="y, mm", digits=1),
        ],
        rows=rows,
    )  # fmt: skip


def write_comparison(folder: Path | str, told: Mapping[str, Any]) -> Path:
    """Write `report.html` for several ways to a design; gives its path.

    Args:
        folder: Where to write.
        told: What `compare.results` gave.
    """
    titles = {
        "mode": "found by", "seeds": "seeds", "accuracy": "accuracy, 0 to 1", "energy_delay": "mJ ms",
        "ratio": "over two-stage", "low": "from", "high": "to", "violations": "epochs frozen",
    }  # fmt: skip
    table = Table(
        title="Energy-delay product",
        columns=[Column(key=key, title=title) for key, title in titles.items()],
        rows=[{key: line[key] for key in titles} for line in told["modes"]],
        caption="Means over seeds; ratios are geometric means of those of the same seed, with 95 % bootstrap "
        "intervals.",
    )
    page = Report(
        title="Joint training against its baselines",
        summary=told["verdict"],
        sections=[Section(title="Designs", items=[table])],
        environment=told["environment"],
        reproduce=told["command"],
    )
    return page.write(Path(folder) / PAGE)


def _bound(latency_ms: float, told: Mapping[str, Any]) -> str:
    if not set(BOUNDS) <= set(told):
        return "No bound of this mapping was computed."
    how = "" if told["finished"] else " The solver ran out of time: a better mapping may be there."
    return (
        f"Without splits, no mapping of coarse segments to these chips takes less than "
        f"{told['lower_bound_ms']:.4g} ms. Of what this one takes without splits, "
        f"{100.0 * told['gap']:.2g} % lie above that; with them it takes {latency_ms:.4g} ms.{how}"
    )


def _where(decision: Decision, costs: Costs, plan: Plan, names: Sequence[str]) -> list[Figure]:
    """Where latency and energy go, slot by slot."""
    stats = plan.hw_stats
    used = [slot for slot, chip in enumerate(decision.chips) if chip is not None]
    energy, idle = _energy_mj(costs, plan), _idle_mj(costs, stats)
    labels = [names[slot] for slot in used]
    time = {
        "computes": [stats.compute_ms[slot] for slot in used],
        "receives or waits": [max(0.0, stats.busy_ms[slot] - stats.compute_ms[slot]) for slot in used],
        "idle": [max(0.0, stats.total_latency_ms - stats.busy_ms[slot]) for slot in used],
    }
    return [
        plot_stacked_bars("Where time goes", labels, time, unit="ms a batch"),
        plot_stacked_bars(
            "Where energy goes", [*labels, "links"],
            {
                "computing": [*(float(energy[slot]) for slot in used), 0.0],
                "waiting": [*(float(idle[slot]) for slot in used), 0.0],
                "moving": [*(0.0 for _ in used), stats.comm_energy_mj],
            },
            unit="mJ a batch",
        ),
    ]  # fmt: skip


def _wafer(
    hardware: Hardware, layers: Sequence[LayerNode], decision: Decision, costs: Costs, plan: Plan
) -> list[Figure]:
    """The wafer with its traffic and heat, and what else it could be."""
    drawn, stats = hardware.drawn(layers, decision), plan.hw_stats
    power = (_energy_mj(costs, plan) + _idle_mj(costs, stats)) / stats.total_latency_ms
    held = [slot for slot, name in enumerate(drawn.names) if name is not None]
    wafer, places, sizes = (
        hardware.places.wafer,
        np.asarray(decision.positions_mm)[held],
        drawn.sizes_mm[held],
    )
    return [
        wafer_picture(
            wafer, places, sizes, names=[f"{slot}: {drawn.names[slot]}" for slot in held],
            traffic_bytes=drawn.traffic_bytes[np.ix_(held, held)],
            heat=temperatures(wafer, places, sizes, power[held]), title="The wafer",
            caption="Links are as wide as their traffic; colours are steady-state temperatures at the power "
            "that the plan draws.",
        ),
        front_picture(hardware.places.front(drawn)),
    ]  # fmt: skip


def _energy_mj(costs: Costs, plan: Plan) -> np.ndarray:
    """What computing takes on each slot for a batch, [S]."""
    found = np.zeros(costs.slots)
    for slot, took, power in _work(costs, plan):
        found[slot] += took * power
    return found


def _idle_mj(costs: Costs, stats: HwStats) -> np.ndarray:
    """What waiting takes on each slot for a batch, [S]."""
    return np.maximum(stats.total_latency_ms - np.array(stats.compute_ms), 0.0) * costs.idle_w


def _work(costs: Costs, plan: Plan) -> Iterator[tuple[int, float, float]]:
    """Slot, milliseconds and watts of each layer and part."""
    for at, home in enumerate(plan.homes):
        if at in plan.splits:
            split, parts = plan.splits[at]
            yield from zip(split.slots, parts.latency_ms, parts.power_w, strict=True)
        else:
            yield home, float(costs.latency_ms[at, home]), float(costs.power_w[at, home])


def _considered(considered: Sequence[Mapping[str, Any]]) -> Table:
    titles = {
        "name": "layer", "sizes": "units", "slots": "slots", "objective_before": "objective before",
        "objective_after": "after", "gain_ratio": "gain", "accepted": "accepted",
    }  # fmt: skip
    return Table(
        title="Splits",
        columns=[Column(key=key, title=title) for key, title in titles.items()],
        rows=[
            {key: str(list(each[key])) if key in ("sizes", "slots") else each[key] for key in titles}
            for each in considered
        ],
    )


def _way(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Accuracy, weight and figures over the rows of a trace."""
    at = [float(place) for place in range(1, len(rows) + 1)]
    first = rows[0]["priced"]
    series = {
        "objective": [row["priced"]["objective"] / first["objective"] for row in rows],
        "latency": [
            row["priced"]["stats"]["total_latency_ms"] / first["stats"]["total_latency_ms"] for row in rows
        ],
        "energy": [row["priced"]["stats"]["energy_mj"] / first["stats"]["energy_mj"] for row in rows],
    }
    training = {"accuracy": [row["accuracy"] for row in rows]}
    if rows[0]["mode"] == "joint":
        training["weight of the hardware"] = [row["lambda_hw"] for row in rows]
        training["frozen"] = [float(row["guard"]["frozen"]) for row in rows]
    return [
        plot_curves("Accuracy", {name: (at, values) for name, values in training.items()},
               x="epochs, then rounds", y="share"),
        plot_curves("The hardware", {name: (at, values) for name, values in series.items()},
               x="epochs, then rounds", y="over the first"),
    ]  # fmt: skip


def page_of_run(folder: Path | str, *, command: str = "") -> Path:
    """Write the page of a run's folder from its trace and, once it has ended, its plan; gives its path.

    Raises:
        InputError: There is no trace.
        FileFormatError: It is damaged, or the plan is.
    """
    trace, plan = Path(folder) / TRACE, Path(folder) / PLAN
    hardware, rows = opened(trace)
    for place, row in enumerate(rows[1:], start=1):
        missing = sorted(_ROW - set(row))
        if missing:
            raise FileFormatError(f"{trace}, row {place}, holds no {', '.join(missing)}")
    # The last rows of a two-stage run are of other baselines.
    own = [row for row in rows[1:] if row["mode"] == rows[0].get("mode")]
    if not own:
        raise FileFormatError(f"{trace} holds no row of the run that it begins with, {rows[0].get('mode')}")
    layers, decision = layers_of(own[-1]["layers"]), Decision.from_dict(own[-1]["decision"])
    hardware.check(layers, decision)
    saved = load_plan(plan) if plan.is_file() else None
    return write_page(
        folder, hardware, layers, decision, rows=own,
        told=saved.extra if saved is not None and saved.decision == decision else None,
        environment=rows[0].get("environment"), command=command,
    )  # fmt: skip
