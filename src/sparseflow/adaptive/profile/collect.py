"""Measuring plans: every round runs every cell once, in an order drawn anew.

A cell is a plan, a number of text tokens, a batch and a load. Rounds and random orders spread a machine's
drift over all cells alike. A cell's first run in a process is thrown away, as often as `warmup` says: caches,
clocks and kernels are then what they are in the middle of a busy day.

Samples go to a file as they come in, and what is there is not measured again: after a kill, the same call
goes on; a call that asks for more plans, lengths, loads or rounds adds to the file. Where it asks for more
steps, requests are measured again and those with fewer stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.profile.measurement import Measurement, Turn
from sparseflow.adaptive.profile.metadata import ProfileMetadata, device_facts
from sparseflow.adaptive.profile.runner import ProfileRunner
from sparseflow.adaptive.profile.storage import PlanProfile, ProfileAppender
from sparseflow.core.load import Stressor
from sparseflow.errors import InputError, RunError, SparseFlowError

Background = Callable[[float], AbstractContextManager[object]]
"""A level between 0 and 1 -> what keeps the device so busy while it is entered."""


def background(device: torch.device | str) -> Background:
    """Products of matrices by other processes, on all CPUs that this one may use, or on the GPU.

    Level 0 is no process at all. Otherwise the level is reached while nothing else runs, and then held.
    """
    target = torch.device(device)
    kind = "cpu-fma" if target.type == "cpu" else "gpu-matmul"

    @contextmanager
    def busy(level: float) -> Iterator[None]:
        with Stressor(kind, level, device=str(target)) as stressor:
            stressor.wait_until_steady()
            with stressor.hold_duty():
                yield

    return lambda level: nullcontext() if level == 0.0 else busy(level)


def spread(
    space: PlanSpace,
    count: int,
    *,
    seed: int = 0,
    text_only: int = 0,
    tiers: Sequence[Tier | None] | None = None,
) -> tuple[Plan, ...]:
    """Some plans that tell about the others: of each tier the dearest, the cheapest, and random ones.

    Args:
        space: The plans.
        count: How many, at least two a tier; all of them where there are fewer.
        seed: What they are drawn from.
        text_only: How many more to choose for requests without image, of a model that takes them.
        tiers: Those to choose plans of; by default all of the space.

    Raises:
        InputError: A count is too small.
    """
    tiers = space.tiers if tiers is None else tiers
    if count < 2 * len(tiers) or text_only < 0:
        raise InputError(
            f"`count` (={count}) must be at least {2 * len(tiers)}, two a tier; `text_only` not negative"
        )
    generator = np.random.default_rng(seed)
    found: list[Plan] = []
    for at, tier in enumerate(tiers):
        mine = [plan for plan in space.plans if plan.tier == tier]
        share = count // len(tiers) + (at < count % len(tiers))
        found += _extremes(mine, share, generator)
    if text_only and space.geometry.tiers:
        bare = {_without_image(plan): None for plan in space.plans}
        found += _extremes(list(bare), text_only, generator)
    return tuple(found)


def _extremes(plans: list[Plan], count: int, generator: np.random.Generator) -> list[Plan]:
    """The dearest, the cheapest, and random ones of the rest."""
    ranked = sorted(plans, key=lambda plan: (len(plan.blocks), plan.top_k, plan.insertion_position))
    if count >= len(ranked):
        return ranked
    ends = [ranked[-1], ranked[0]][:count]
    rest = ranked[1:-1]
    drawn = generator.choice(len(rest), size=max(min(count - 2, len(rest)), 0), replace=False)
    return ends + [rest[at] for at in sorted(drawn)]


def _without_image(plan: Plan) -> Plan:
    return Plan(tier=None, insertion_position=plan.insertion_position, top_k=plan.top_k, blocks=plan.blocks)


Progress = Callable[[str, float], None]
"""Called with (what is measured, fraction done)."""

_WARM_STEPS = 2
_IN_A_ROW = 20
"""Requests that fail one after the other before no more are tried: a GPU that is lost fails them all."""

_NANO = 6
"""Decimals of a millisecond that are kept: finer than any timer, and shorter in a file."""

_Cell = tuple[Plan, int, int]
"""Plan, text tokens, batch."""


def collect_profile(
    runner: ProfileRunner,
    space: PlanSpace,
    out: Path | str,
    *,
    buckets: Sequence[int],
    plans: Sequence[Plan] | None = None,
    batches: Sequence[int] = (1,),
    loads: Sequence[float] = (0.0,),
    repeats: int = 5,
    warmup: int = 1,
    steps: int = 16,
    load: Background | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> PlanProfile:
    """Measure plans, or what is missing of them.

    Args:
        runner: Runs requests.
        space: The model's plans.
        out: Parquet file; made, or gone on with. Its folder is made.
        buckets: Text tokens of prompts.
        plans: Those to measure; by default all of the space. See `spread`. Plans without a tier are measured
            without image.
        batches: Requests that run at a time; see `ProfileRunner.run`.
        loads: Shares of the device that others want, 0 to 1; see `load`.
        repeats: Rounds.
        warmup: Runs of each cell that are thrown away first, with few steps.
        steps: Tokens after the first, in each request.
        load: Makes the load; by default `background(runner.device)`, other processes. An `EngineRunner` makes
            its own by other requests: `runner.busy`.
        seed: What orders are drawn from.
        progress: Called with (what is measured, fraction done).

    Returns:
        All that the file holds.

    Raises:
        InputError: An argument is out of range, or the file is of another model, device, space or runner.
        FileFormatError: The file holds something else.
        RunError: No plan could be run, the load missed its level, another process writes into the folder, or
            the disk is full.
    """
    levels = tuple(dict.fromkeys(map(float, loads)))
    _check(buckets, batches, levels, repeats, warmup, steps, seed)
    chosen = tuple(dict.fromkeys(space.plans if plans is None else plans))
    for plan in chosen:
        space.geometry.check(plan)
        if plan.tier is not None and plan.tier not in runner.vision_tokens:
            raise InputError(f"{plan.id} has an image, and the runner takes none; give the runner an example")
    if not chosen:
        raise InputError("`plans` must hold at least one")
    about = ProfileMetadata(
        model_id=runner.model_id, device=device_facts(runner.device), space=space,
        vision_tokens=dict(runner.vision_tokens), how=dict(runner.how),
    )  # fmt: skip
    work = _MeasurementPlan(
        runner=runner, levels=levels, repeats=repeats, warmup=warmup, steps=steps, seed=seed,
        cells=[(plan, tokens, batch) for plan in chosen for tokens in buckets for batch in batches],
    )  # fmt: skip
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    with ProfileAppender(file, about, runner.device, seed) as appending:
        failed = work.run(appending, load or background(runner.device), progress)
    found = PlanProfile.read(file)
    if not found.timed:
        raise RunError(f"none of {len(found.visits)} requests could be run: {failed}")
    return found


@dataclass(frozen=True, kw_only=True)
class _MeasurementPlan:
    """What one call measures."""

    runner: ProfileRunner
    cells: list[_Cell]
    levels: tuple[float, ...]
    repeats: int
    warmup: int
    steps: int
    seed: int
    warm: set[_Cell] = field(default_factory=set)

    def run(self, appending: ProfileAppender, load: Background, progress: Progress | None) -> str | None:
        """Make the visits that are missing; gives the last error."""
        there = {visit.turn for visit in appending.held.timed if len(visit.steps_ms) >= self.steps}
        total = len(self.cells) * len(self.levels) * self.repeats
        missing = {
            block: [cell for cell in cells if _turn(cell, *block) not in there]
            for block, cells in self.blocks()
        }
        done, failing, error = total - sum(map(len, missing.values())), 0, None
        for (number, level), cells in missing.items():
            if not cells:
                continue
            with load(level):
                for cell in cells:
                    visit = self._visit(cell, number, level, appending.session)
                    appending.add(visit)
                    error, done = visit.error or error, done + 1
                    failing = failing + 1 if visit.error else 0
                    if failing == _IN_A_ROW:
                        raise RunError(f"{failing} requests in a row could not be run: {error}")
                    if progress is not None:
                        where = f"round {number + 1}/{self.repeats}, load {level:g}"
                        progress(f"{where}: {cell[0].id}, {cell[1]} tokens", done / total)
        return error

    def blocks(self) -> Iterator[tuple[tuple[int, float], list[_Cell]]]:
        """(Round, load) and the cells in the order that they are run."""
        for number in range(self.repeats):
            for level in self.levels:
                generator = np.random.default_rng((self.seed, number, round(level * 1e6)))
                yield (number, level), [self.cells[at] for at in generator.permutation(len(self.cells))]

    def _visit(self, cell: _Cell, number: int, level: float, session: int) -> Measurement:
        plan, tokens, batch = cell
        found: dict[str, Any]
        try:
            if cell not in self.warm:
                for _ in range(self.warmup):
                    self.runner.run(plan, tokens, steps=min(_WARM_STEPS, self.steps), batch=batch)
                self.warm.add(cell)
            timed = self.runner.run(plan, tokens, steps=self.steps, batch=batch)
            found = {
                "prefill_ms": round(timed.prefill_ms, _NANO),
                "steps_ms": tuple(round(step, _NANO) for step in timed.steps_ms),
            }
        except SparseFlowError:
            raise
        except RuntimeError as error:  # of torch: memory, mostly
            found = {"error": str(error).partition("\n")[0] or type(error).__name__}
        return Measurement(
            plan=plan, text_tokens=tokens, batch=batch, load=level, round=number, session=session, **found
        )


def _turn(cell: _Cell, number: int, level: float) -> Turn:
    plan, tokens, batch = cell
    return (plan.id, tokens, batch, level, number)


def _check(
    buckets: Sequence[int], batches: Sequence[int], levels: Sequence[float], repeats: int, warmup: int,
    steps: int, seed: int,
) -> None:  # fmt: skip
    for name, values in (
        ("buckets", buckets),
        ("batches", batches),
        ("repeats", [repeats]),
        ("steps", [steps]),
    ):
        if not values or any(type(value) is not int or value < 1 for value in values):
            raise InputError(f"`{name}` (={values}) must be whole numbers of at least 1")
        if len(set(values)) < len(values):
            raise InputError(f"`{name}` (={values}) names one twice")
    if warmup < 0 or seed < 0:
        raise InputError(f"`warmup` (={warmup}) and `seed` (={seed}) must not be negative")
    if not levels or not all(0.0 <= level <= 1.0 for level in levels):
        raise InputError(f"`loads` (={levels}) must be shares of the device in [0, 1], at least one")
