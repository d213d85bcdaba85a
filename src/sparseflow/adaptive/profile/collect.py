"""Collection of a profile: every round measures every cell once, in a new random order.

A cell is a plan, a number of text tokens, a batch size and a load. Rounds and random orders spread the drift
of a machine evenly over the cells. The first runs of a cell in a process are discarded, so that caches,
clocks and kernels are warm.

Measurements are stored as they arrive and are not repeated: the same call resumes an interrupted collection,
and a call with more plans, lengths, loads or rounds extends the file. With more decode steps, requests are
measured again and the shorter ones stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.profile.measurement import (
    Measurement,
    ProfileMetadata,
    get_device_facts,
)
from sparseflow.adaptive.profile.runner import ProfileRunner
from sparseflow.adaptive.profile.storage import PlanProfile, ProfileWriter
from sparseflow.core.checks import check_at_least, check_between
from sparseflow.core.load.stressor import Stressor
from sparseflow.core.load.workloads import DEFAULT_KINDS
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, RunError, SparseFlowError

BackgroundLoad = Callable[[float], AbstractContextManager[object]]
"""Maps a load from 0 to 1 to a context manager that keeps the device busy at that load."""

_WARMUP_STEPS = 2
_MAX_CONSECUTIVE_FAILURES = 20
"""Failed requests in a row after which the collection stops, for example because the GPU is lost."""
_TIME_DIGITS = 6
"""Stored digits of a millisecond: finer than any timer, and compact in a file."""

_Cell = tuple[Plan, int, int]
"""Plan, text tokens, batch size."""


def make_background_load(device: torch.device | str) -> BackgroundLoad:
    """Make a load of matrix products by other processes, on all available CPUs or on the GPU.

    Load 0 starts no process. Other loads are calibrated on the idle device and then held.
    """
    target = torch.device(device)
    kind = DEFAULT_KINDS[target.type]

    @contextmanager
    def run_stressor(load: float) -> Iterator[None]:
        with Stressor(kind, load, device=str(target)) as stressor:
            stressor.wait_until_steady()
            with stressor.hold_duty():
                yield

    return lambda load: nullcontext() if load == 0.0 else run_stressor(load)


def select_representative_plans(
    space: PlanSpace,
    count: int,
    *,
    seed: int = 0,
    num_text_plans: int = 0,
    tiers: Sequence[Tier | None] | None = None,
) -> tuple[Plan, ...]:
    """Select plans to measure: the largest, the smallest and random plans of each tier.

    Args:
        space: Plans.
        count: Number of plans, at least two per tier; all plans if the space has fewer.
        seed: Random seed.
        num_text_plans: Additional plans for requests without images, if the model takes images.
        tiers: Tiers to select from; by default all tiers of the space.

    Raises:
        InputError: A count is too small.
    """
    tiers = space.tiers if tiers is None else tiers
    check_at_least(2 * len(tiers), count=count)
    check_at_least(0, num_text_plans=num_text_plans)
    generator = np.random.default_rng(seed)
    selected: list[Plan] = []
    for index, tier in enumerate(tiers):
        candidates = [plan for plan in space.plans if plan.tier == tier]
        tier_count = count // len(tiers) + (index < count % len(tiers))
        selected += _select_extremes(candidates, tier_count, generator)
    if num_text_plans and space.geometry.tiers:
        text_plans = dict.fromkeys(replace(plan, tier=None) for plan in space.plans)
        selected += _select_extremes(list(text_plans), num_text_plans, generator)
    return tuple(selected)


def _select_extremes(plans: list[Plan], count: int, generator: np.random.Generator) -> list[Plan]:
    """Select the largest, the smallest and random plans."""
    ranked = sorted(plans, key=lambda plan: (len(plan.blocks), plan.top_k, plan.insertion_position))
    if count >= len(ranked):
        return ranked
    ends = [ranked[-1], ranked[0]][:count]
    inner = ranked[1:-1]
    indices = generator.choice(len(inner), size=max(min(count - 2, len(inner)), 0), replace=False)
    return ends + [inner[index] for index in sorted(indices)]


def collect_profile(
    runner: ProfileRunner,
    space: PlanSpace,
    out_path: Path | str,
    *,
    text_tokens: Sequence[int],
    plans: Sequence[Plan] | None = None,
    batch_sizes: Sequence[int] = (1,),
    loads: Sequence[float] = (0.0,),
    rounds: int = 5,
    warmup_runs: int = 1,
    decode_steps: int = 16,
    background: BackgroundLoad | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> PlanProfile:
    """Measure the latency of plans; measurements that the file already contains are skipped.

    Args:
        runner: Runs requests.
        space: Plans of the model.
        out_path: Parquet file, created or extended; its directory is created.
        text_tokens: Text tokens of prompts.
        plans: Plans to measure, by default all of the space; see `select_representative_plans`. Plans without
            a tier are measured without an image.
        batch_sizes: Concurrent requests; see `ProfileRunner.run`.
        loads: Shares of the device that other requests or processes use, 0 to 1; see `background`.
        rounds: Rounds.
        warmup_runs: Discarded first runs of each cell, with few steps.
        decode_steps: Tokens after the first in each request.
        background: Produces the load; by default other processes (`make_background_load`). An `EngineRunner`
            produces it by other requests: `runner.apply_load`.
        seed: Seed of the orders.
        progress: Called with (current cell, fraction done).

    Returns:
        Everything that the file contains.

    Raises:
        InputError: An argument is out of range, or the file is of another model, device, space or runner.
        FileFormatError: The file is foreign, damaged, or of another version.
        RunError: No plan could be run, the load was not reached, another process writes into the directory,
            or the disk is full.
    """
    loads = tuple(dict.fromkeys(map(float, loads)))
    for name, values in (("text_tokens", text_tokens), ("batch_sizes", batch_sizes), ("loads", loads)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"`{name}` (={values}) must be at least one value, without duplicates")
    for tokens, batch in product(text_tokens, batch_sizes):
        check_at_least(1, text_tokens=tokens, batch_sizes=batch)
    for load in loads:
        check_between(0.0, 1.0, loads=load)
    check_at_least(1, rounds=rounds, decode_steps=decode_steps)
    check_at_least(0, warmup_runs=warmup_runs, seed=seed)
    plans = tuple(dict.fromkeys(space.plans if plans is None else plans))
    for plan in plans:
        space.geometry.check(plan)
        if plan.tier is not None and plan.tier not in runner.vision_tokens:
            raise InputError(f"{plan.id} has an image; create the runner with an `example` that has one")
    if not plans:
        raise InputError("`plans` is empty; pass at least one plan")
    metadata = ProfileMetadata(
        model_id=runner.model_id, device=get_device_facts(runner.device), space=space,
        vision_tokens=dict(runner.vision_tokens), config=dict(runner.config),
    )  # fmt: skip
    schedule = _MeasurementSchedule(
        runner=runner, loads=loads, rounds=rounds, warmup_runs=warmup_runs, decode_steps=decode_steps,
        seed=seed,
        cells=list(product(plans, text_tokens, batch_sizes)),
    )  # fmt: skip
    path = Path(out_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProfileWriter(path, metadata, runner.device, seed) as writer:
        last_error = schedule.run(writer, background or make_background_load(runner.device), progress)
    profile = PlanProfile.load(path)
    if not profile.successful:
        raise RunError(f"none of {len(profile.measurements)} requests could be run: {last_error}")
    return profile


@dataclass(frozen=True, kw_only=True)
class _MeasurementSchedule:
    """Measurements of one call of `collect_profile`."""

    runner: ProfileRunner
    cells: list[_Cell]
    loads: tuple[float, ...]
    rounds: int
    warmup_runs: int
    decode_steps: int
    seed: int
    warm_cells: set[_Cell] = field(default_factory=set)

    def run(self, writer: ProfileWriter, background: BackgroundLoad, progress: Progress | None) -> str | None:
        """Make the missing measurements and return the last error."""
        measured = {
            measurement.case
            for measurement in writer.profile.successful
            if len(measurement.steps_ms) >= self.decode_steps
        }
        total = len(self.cells) * len(self.loads) * self.rounds
        missing = {
            (index, load): [
                (plan, tokens, batch)
                for plan, tokens, batch in cells
                if (plan.id, tokens, batch, load, index) not in measured
            ]
            for (index, load), cells in self.iterate_blocks()
        }
        num_done, num_failures, error = total - sum(map(len, missing.values())), 0, None
        for (round_index, load), cells in missing.items():
            if not cells:
                continue
            with background(load):
                for cell in cells:
                    measurement = self._measure(cell, round_index, load, writer.session)
                    writer.append(measurement)
                    error, num_done = measurement.error or error, num_done + 1
                    num_failures = num_failures + 1 if measurement.error else 0
                    if num_failures == _MAX_CONSECUTIVE_FAILURES:
                        raise RunError(f"{num_failures} requests in a row failed: {error}")
                    if progress is not None:
                        condition = f"round {round_index + 1}/{self.rounds}, load {load:g}"
                        progress(f"{condition}: {cell[0].id}, {cell[1]} tokens", num_done / total)
        return error

    def iterate_blocks(self) -> Iterator[tuple[tuple[int, float], list[_Cell]]]:
        """Yield (round, load) and the cells in the order of measurement."""
        for round_index in range(self.rounds):
            for load in self.loads:
                generator = np.random.default_rng((self.seed, round_index, round(load * 1e6)))
                order = generator.permutation(len(self.cells))
                yield (round_index, load), [self.cells[index] for index in order]

    def _measure(self, cell: _Cell, round_index: int, load: float, session: int) -> Measurement:
        plan, tokens, batch = cell
        result: dict[str, Any]
        try:
            if cell not in self.warm_cells:
                warmup_steps = min(_WARMUP_STEPS, self.decode_steps)
                for _ in range(self.warmup_runs):
                    self.runner.run(plan, tokens, steps=warmup_steps, batch=batch)
                self.warm_cells.add(cell)
            times = self.runner.run(plan, tokens, steps=self.decode_steps, batch=batch)
            result = {
                "prefill_ms": round(times.prefill_ms, _TIME_DIGITS),
                "steps_ms": tuple(round(step, _TIME_DIGITS) for step in times.steps_ms),
            }
        except SparseFlowError:
            raise
        except RuntimeError as error:  # from torch, mostly out of memory
            result = {"error": str(error).partition("\n")[0] or type(error).__name__}
        return Measurement(
            plan=plan,
            text_tokens=tokens,
            batch=batch,
            load=load,
            round=round_index,
            session=session,
            **result,
        )
