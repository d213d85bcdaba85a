"""Workflows: profile a device, plan and place chips, train jointly, and verify what was planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from sparseflow.codesign.design.config import CodesignConfig
from sparseflow.codesign.design.decision import HardwareDecision, summarize_cost
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.placement import PlacementSearch
from sparseflow.codesign.design.saved_plan import PLAN_FILE, SavedPlan, load_plan, save_plan
from sparseflow.codesign.execution.verification import verify
from sparseflow.codesign.hardware.proxy import LayerGrid, fit_proxy, read_points
from sparseflow.codesign.hardware.proxy.profiling import (
    ProfileConfig,
    measure_device,
    profile_grid,
    read_device,
)
from sparseflow.codesign.joint import comparison
from sparseflow.codesign.joint.comparison import TaskFactory
from sparseflow.codesign.joint.trace import TRACE_FILE, replay
from sparseflow.codesign.joint.trainer import MODEL_FILE, MODES, Mode
from sparseflow.codesign.layout.qap.assignment import QapAssignment, assign
from sparseflow.codesign.layout.qap.problem import read_qaplib
from sparseflow.codesign.report.page import BOUND_KEYS, write_comparison, write_page, write_run_page
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_json
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, RunError

ModelT = TypeVar("ModelT", bound=LayeredModel)

CPU_TDP_W = 65.0
"""Power of a CPU at full load, where it is not given."""


@dataclass(frozen=True, kw_only=True)
class ProxyResult:
    """A fitted hardware proxy.

    Attributes:
        proxy: File of the proxy.
        device: Description of the device, in JSON types.
        held_out: Errors on held-out layers, in JSON types.
    """

    proxy: Path
    device: Mapping[str, Any]
    held_out: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**self.held_out, "proxy": str(self.proxy), "device": dict(self.device)}


def profile_device(
    out_dir: Path,
    *,
    num_points: int = 300,
    precisions: Sequence[str] = ("float32",),
    device: torch.device,
    tdp_w: float | None = None,
    seed: int = 0,
    progress: Progress,
) -> ProxyResult:
    """Measure layers on a device and fit the hardware proxy to them.

    Args:
        out_dir: Directory of the points and the proxy; an existing profile is resumed.
        num_points: Layers to measure.
        precisions: Data types of the layers.
        device: Device to profile.
        tdp_w: Power at full load, W; by default that of the profile, else a GPU's power limit or 65 W.
        seed: Random seed.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: `tdp_w` differs from that of the existing profile, or the peak rate of the device at a
            precision was not measured.
    """
    kinds = tuple(precisions)
    grid = LayerGrid.small(kinds) if device.type == "cpu" else LayerGrid(precisions=kinds)
    out_dir.mkdir(parents=True, exist_ok=True)
    points = out_dir / "points.jsonl"
    spec = read_device(points, device)
    if spec is None:
        progress("measuring the peak performance of the device", 0.0)
        spec = measure_device(device, tdp_w=CPU_TDP_W if tdp_w is None and device.type == "cpu" else tdp_w)
    elif tdp_w not in (None, spec.tdp_w):
        raise InputError(f"`--tdp-w {tdp_w:g}` differs from {spec.tdp_w:g} W in {points}; leave it out")
    for precision in kinds:
        spec.rate(precision)  # raises before layers are measured if the device's rate is unknown
    measurements = profile_grid(
        points,
        spec,
        num_points=num_points,
        grid=grid,
        device=device,
        config=ProfileConfig(mode="graph" if device.type == "cuda" else "eager"),
        seed=seed,
        progress=progress,
    )
    proxy = fit_proxy(
        measurements,
        environments=read_points(points).environments,
        seed=seed,
        progress=progress,
    )
    path = out_dir / "proxy.safetensors"
    proxy.save(path)
    return ProxyResult(
        proxy=path, device=asdict(spec) | {"rates": dict(spec.rates)}, held_out=proxy.provenance["held_out"]
    )


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan and its report.

    Attributes:
        metrics: Latency, energy, area and objective, with units in the names.
        prediction: Sentence about where the metrics come from.
        plan: File of the plan.
        page: The report.
        hardware: Evaluates the decision.
        layers: Layers of the model.
        decision: Chips, mapping, splits and positions.
    """

    metrics: Mapping[str, Any]
    prediction: str
    plan: Path
    page: Path
    hardware: Hardware
    layers: Sequence[LayerNode]
    decision: HardwareDecision

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            **self.metrics, "prediction": self.prediction, "plan": str(self.plan), "page": str(self.page)
        }  # fmt: skip


def plan_design(
    settings: CodesignConfig,
    model: LayeredModel,
    out_dir: Path | str,
    *,
    search: bool = True,
    command: str = "",
    progress: Progress | None = None,
) -> PlanResult:
    """Choose chips, mapping, splits and placement for a model, and write the plan and a report.

    Args:
        settings: Configuration; its `task` is not read.
        model: Model to partition.
        out_dir: Directory of plan.json and report.html.
        search: Also change the chip of each slot and the placement.
        command: Command line for the report.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: The model fits on no chips.
    """
    hardware = Hardware(settings)
    layers, orders = model.describe_layers(hardware.batch_size), Hardware.make_unit_orders(model)
    use_fine_split = settings.joint.use_fine_split
    decision = hardware.initial_decision(layers)
    if search:
        decision = hardware.refine(
            layers, decision, use_fine_split=use_fine_split, unit_orders=orders, progress=progress
        )
    decision, extra = hardware.finalize(layers, decision, use_fine_split=use_fine_split, unit_orders=orders)
    metrics = {
        **summarize_cost(hardware.evaluate_cost(layers, decision)),
        **{name: extra[name] for name in BOUND_KEYS},
        "layers_split": len(decision.select_splits(layers)),
        "splits_considered": len(extra["considered"]),
    }
    saved = SavedPlan(hardware=hardware, layers=list(layers), decision=decision, extra=extra)
    return _write_plan(Path(out_dir), saved, metrics, command)


def place_chips(
    source: Path, out_dir: Path | None, search: PlacementSearch, *, command: str = ""
) -> PlanResult:
    """Place the chips of a plan again.

    Args:
        source: Plan, or its directory.
        out_dir: Directory of the new plan and its report; by default `layout` next to the plan.
        search: Search of the placement.
        command: Command line for the report.
    """
    file = source / PLAN_FILE if source.is_dir() else source
    saved = load_plan(file)
    hardware, layers = saved.hardware, saved.layers
    candidate = hardware.optimize_placement(layers, saved.decision, search)
    decision = hardware.select_better(layers, saved.decision, candidate)
    directory = file.parent / "layout" if out_dir is None else out_dir
    # The bounds hold only for the placement that they were computed for.
    stale = BOUND_KEYS if decision != saved.decision else ()
    extra = {name: value for name, value in saved.extra.items() if name not in stale}
    before, after = (hardware.evaluate_cost(layers, item) for item in (saved.decision, decision))
    metrics = {"layout_before": before.layout, **summarize_cost(after), "layout": after.layout}
    return _write_plan(directory, replace(saved, decision=decision, extra=extra), metrics, command)


def _write_plan(out_dir: Path, saved: SavedPlan, metrics: Mapping[str, Any], command: str) -> PlanResult:
    hardware, layers, decision = saved.hardware, saved.layers, saved.decision
    plan = save_plan(out_dir, hardware, layers, decision, extra=saved.extra)
    page = write_page(
        out_dir, hardware, layers, decision, details=saved.extra, environment=collect_environment("cpu"),
        command=command,
    )  # fmt: skip
    return PlanResult(
        metrics=metrics, prediction=hardware.describe_prediction(decision), plan=plan, page=page,
        hardware=hardware, layers=layers, decision=decision,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AssignmentResult:
    """Solution of a quadratic assignment problem.

    Attributes:
        assignment: Best permutation of the search.
        best_known: Best known cost in the file; None without one.
    """

    assignment: QapAssignment
    best_known: int | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; a gap that is not finite becomes None."""
        result = self.assignment
        return {
            "cost": result.cost, "best_known": self.best_known, "lower_bound": result.lower_bound,
            "gap_to_bound": result.gap if math.isfinite(result.gap) else None,
            "costs": list(result.costs), "seconds": result.elapsed_s, "finished": result.finished,
            "permutation": result.permutation.tolist(),
        }  # fmt: skip


def solve_assignment(path: Path, search: PlacementSearch) -> AssignmentResult:
    """Solve a quadratic assignment problem in QAPLIB's format; 5 restarts and seed 0 by default."""
    instance = read_qaplib(path)
    assignment = assign(
        instance.flow, instance.distance, method=search.method, restarts=search.restarts or 5,
        budget_s=search.budget_s, seed=search.seed or 0,
    )  # fmt: skip
    return AssignmentResult(assignment=assignment, best_known=instance.best_known)


@dataclass(frozen=True, kw_only=True)
class DesignComparison:
    """Joint training compared with two-stage baselines.

    Attributes:
        modes: One record for each mode: accuracy, energy-delay product and ratio to two-stage.
        verdict: Conclusion in one sentence.
        prediction: Sentence about where the energy-delay products come from.
        page: The report.
    """

    modes: Sequence[Mapping[str, Any]]
    verdict: str
    prediction: str
    page: Path

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "modes": list(self.modes), "verdict": self.verdict, "prediction": self.prediction,
            "page": str(self.page),
        }  # fmt: skip


def compare_designs(
    settings: CodesignConfig,
    make_task: TaskFactory,
    out_dir: Path,
    *,
    seeds: int = 1,
    mode: Mode | Literal["all"] = "all",
    device: str = "cpu",
    workers: int = 1,
    command: str = "",
    progress: Progress,
) -> DesignComparison:
    """Train models together with their hardware, and the baselines.

    Args:
        settings: Configuration of all runs.
        make_task: Creates the training task of a run; importable, for worker processes.
        out_dir: Directory of the runs; existing runs are resumed.
        seeds: Runs of each mode, with seeds from 0.
        mode: `"joint"`, `"two-stage"` with its baselines, or `"all"`.
        device: Device of the trainings.
        workers: Parallel runs.
        command: Command line for the reports.
        progress: Callback that takes a message and the fraction done.
    """
    modes: tuple[Mode, ...] = tuple(run_mode for run_mode in MODES if mode in (run_mode, "all"))
    designs = comparison.compare_designs(
        settings,
        make_task,
        out_dir,
        num_seeds=seeds,
        modes=modes,
        device=device,
        workers=workers,
        progress=progress,
    )
    for seed in range(seeds):
        for run_mode in modes:
            write_run_page(out_dir / f"{run_mode}-{seed}", command=command)
    results = comparison.summarize_designs(designs, settings, device=device, command=command)
    write_json(out_dir / comparison.RESULTS_FILE, results, indent=1)
    page = write_comparison(out_dir, results)
    return DesignComparison(
        modes=results["modes"], verdict=results["verdict"], prediction=results["prediction"], page=page
    )


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """What was verified of a plan or run.

    Attributes:
        replayed: Rows of the trace with the same objective as before; None without a trace.
        execution: Errors, moved bytes and splits of the partitioned model; empty without a plan.
    """

    replayed: int | None
    execution: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        replayed = {} if self.replayed is None else {"replayed": self.replayed}
        return {**replayed, **self.execution}


def verify_design(
    source: Path,
    open_model: Callable[[Path | None, Mapping[str, Any]], ModelT],
    make_samples: Callable[[ModelT], torch.Tensor],
    *,
    model: Path | None = None,
    device: torch.device,
    ranks: bool = False,
) -> VerificationResult:
    """Run the partitioned model of a plan and replay the trace of a run.

    Args:
        source: Plan, trace, or the directory of a plan or run.
        open_model: Opens a model file, or builds the model of a task without a file.
        make_samples: Makes a batch of inputs for a model.
        model: Model file; by default the trained model of the run.
        device: Device of all slots.
        ranks: Also run each slot in its own process.

    Raises:
        InputError: There is neither a plan nor a trace, or the plan is of another model.
        RunError: Logits, moved bytes or a replayed objective differ.
    """
    if not source.exists():
        raise InputError(f"no such plan: {source}; `sparseflow codesign plan` makes one")
    if source.name == TRACE_FILE:
        source = source.parent
    directory = source if source.is_dir() else source.parent
    if model is None and (directory / MODEL_FILE).is_file():
        model = directory / MODEL_FILE
    replayed = None
    if (directory / TRACE_FILE).is_file():
        rows = replay(directory / TRACE_FILE)
        different = [row.row for row in rows if not row.is_exact]
        if different:
            raise RunError(
                f"{directory / TRACE_FILE}: the objective of rows {different} differs when recomputed"
            )
        replayed = len(rows)
    elif source.is_dir() and not (directory / PLAN_FILE).is_file():
        raise InputError(f"{source} has neither {PLAN_FILE} nor {TRACE_FILE}")
    plan = directory / PLAN_FILE if source.is_dir() else source
    if not plan.is_file():
        return VerificationResult(replayed=replayed, execution={})
    saved = load_plan(plan)
    layered_model = open_model(model, saved.hardware.config.task)
    execution = verify(
        layered_model,
        saved.decision,
        make_samples(layered_model),
        planned=saved.layers,
        device=device,
        ranks=ranks,
    )
    return VerificationResult(replayed=replayed, execution=execution.to_dict())
