"""Joint training against its baselines: the same seeds, the same epochs, the same rounds of the hardware."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sparseflow.codesign.design.config import Settings
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.joint.trainer import BASELINES, MODES, Designed, JointTrainer, Mode
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.core.parallel import map_unordered
from sparseflow.core.training.distributed import round_robin_device
from sparseflow.core.training.epoch_trainer import EpochTrainer
from sparseflow.errors import InputError

RESULTS = "designs.json"
EQUAL_POINTS = 0.5
"""Accuracies that differ by no more, in points, are taken as equal."""

MakeTask = Callable[[Mapping[str, Any], int, str], Any]
"""Gives a context manager whose value is a `EpochTrainer`, from its settings, a seed and a device."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class _Job:
    settings: Settings
    make: MakeTask
    mode: Mode
    seed: int
    folder: Path
    device: str


def compare(
    settings: Settings,
    make: MakeTask,
    folder: Path | str,
    *,
    seeds: int = 5,
    modes: Sequence[Mode] = MODES,
    device: str = "cpu",
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[int, list[Designed]]:
    """Run joint training and its baselines for several seeds; goes on where an earlier call was stopped.

    Args:
        settings: Of all runs.
        make: Makes the task of a run; must be importable where there are several workers.
        folder: Made when absent; each run has its own folder in it.
        seeds: Runs of each, with seeds from 0.
        modes: Which runs; a two-stage run brings the other baselines.
        device: Where to train; `"cuda"` is every GPU in its turn.
        workers: Runs at the same time, in processes of their own.
        progress: Called with (what was done, fraction done).

    Returns:
        Seed -> its designs, in the order of `modes`.

    Raises:
        InputError: `seeds` or `workers` is not positive, a setting cannot be used, or a folder holds another
            run.
        RunError: A run failed; those that ended are not done again by the next call.
    """
    if seeds < 1:
        raise InputError(f"`seeds` (={seeds}) must be at least 1")
    root = Path(folder)
    wanted: list[tuple[int, Mode]] = [(seed, mode) for seed in range(seeds) for mode in modes]
    jobs = [
        _Job(
            settings=settings, make=make, mode=mode, seed=seed, folder=root / f"{mode}-{seed}",
            device=round_robin_device(device, number),
        )
        for number, (seed, mode) in enumerate(wanted)
    ]  # fmt: skip
    found: dict[int, list[Designed]] = {}
    for at, designs in map_unordered(_run, jobs, workers=workers):
        found[at] = designs
        if progress is not None:
            told = ", ".join(f"{each.mode} {each.priced.energy_delay:.4g} mJ ms" for each in designs)
            progress(f"seed {jobs[at].seed}: {told}", len(found) / len(jobs))
    # In the order of the jobs, whichever of them ended first.
    return {
        seed: [each for at, job in enumerate(jobs) if job.seed == seed for each in found[at]]
        for seed in range(seeds)
    }


def _run(job: _Job) -> list[Designed]:
    told = job.settings.joint.model_dump() | {"seed": job.seed}
    settings = Settings.model_validate(job.settings.model_dump(mode="json") | {"joint": told})
    with job.make(settings.task, job.seed, job.device) as task:
        trained: EpochTrainer = task
        return JointTrainer(trained, Hardware(settings), settings, job.folder, mode=job.mode).run()


def results(
    found: Mapping[int, Sequence[Designed]], settings: Settings, *, device: str, command: str
) -> dict[str, Any]:
    """What the runs say, in JSON's types.

    Args:
        found: What `compare` gave.
        settings: Of all runs.
        device: Where they were trained.
        command: What makes them again.

    Returns:
        `modes`, a line for each way to a design: its accuracy and energy-delay product, means over seeds, and
        the ratio of the latter to the two-stage baseline's, geometric mean over seeds with its interval;
        `verdict`, a sentence, which names a winner only where its accuracy is not lower by more than
        `EQUAL_POINTS`; `runs`, every design. Energy-delay products are in mJ ms.
    """
    lines = []
    of = {
        mode: {seed: each for seed, designs in found.items() for each in designs if each.mode == mode}
        for mode in ("joint", *BASELINES)
    }
    base = of["two-stage"]
    for mode, runs in of.items():
        if not runs:
            continue
        logs = [
            math.log(each.priced.energy_delay / base[seed].priced.energy_delay)
            for seed, each in runs.items()
            if seed in base
        ]
        low, high = bootstrap_mean(logs) if len(logs) > 1 else (math.nan, math.nan)
        lines.append(
            {
                "mode": mode, "seeds": len(runs), "accuracy": mean(each.accuracy for each in runs.values()),
                "energy_delay": mean(each.priced.energy_delay for each in runs.values()),
                "ratio": math.exp(mean(logs)) if logs else None,
                "low": math.exp(low) if len(logs) > 1 else None,
                "high": math.exp(high) if len(logs) > 1 else None,
                "violations": sum(each.violations for each in runs.values()),
            }
        )  # fmt: skip
    return {
        "environment": collect_environment(device), "command": command,
        "settings": settings.model_dump(mode="json"),
        "modes": lines, "verdict": _verdict({line["mode"]: line for line in lines}),
        "runs": [
            {
                "seed": seed, "mode": each.mode, "accuracy": each.accuracy, "violations": each.violations,
                "energy_delay": each.priced.energy_delay, "chips": list(each.decision.chips),
                "priced": asdict(each.priced),
            }
            for seed, designs in found.items()
            for each in designs
        ],
    }  # fmt: skip


def _verdict(lines: Mapping[str, Mapping[str, Any]]) -> str:
    if "joint" not in lines or "two-stage" not in lines:
        return "Joint training and its two-stage baseline were not both run."
    joint, base = lines["joint"], lines["two-stage"]
    points = 100.0 * (joint["accuracy"] - base["accuracy"])
    fair = "equal" if abs(points) <= EQUAL_POINTS else "not equal"
    what = (
        f"accuracies are {fair} ({points:+.2f} points); energy-delay is {joint['ratio']:.3f} of two-stage's"
    )
    if joint["low"] is None:
        return f"Of one seed nothing follows: {what}."
    what = f"{what} ({joint['low']:.3f} to {joint['high']:.3f})"
    if joint["low"] <= 1.0 <= joint["high"]:
        return f"Neither wins: {what}."
    ahead = joint["high"] < 1.0
    if (points if ahead else -points) < -EQUAL_POINTS:
        return f"Neither wins, since what is less costs accuracy: {what}."
    return f"{'Joint training' if ahead else 'The two-stage baseline'} wins: {what}."


def write_results(folder: Path | str, told: Mapping[str, Any]) -> Path:
    """Write `designs.json` into a folder; gives its path."""
    path = Path(folder) / RESULTS
    write_atomic(path, json.dumps(told, indent=1) + "\n")
    return path
