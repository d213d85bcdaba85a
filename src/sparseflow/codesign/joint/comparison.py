"""Comparison of joint training with its baselines: same seeds, epochs and hardware rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sparseflow.codesign.design.config import CodesignConfig
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.joint.trainer import BASELINES, MODES, DesignResult, JointTrainer, Mode
from sparseflow.core.checks import check_at_least
from sparseflow.core.environment import collect_environment
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import round_robin_device
from sparseflow.core.training.epoch_trainer import EpochTrainer

RESULTS_FILE = "designs.json"
ACCURACY_TOLERANCE_POINTS = 0.5
"""Accuracy difference that counts as equal, in percentage points."""

TaskFactory = Callable[[Mapping[str, Any], int, str], Any]
"""Creates a context manager of an `EpochTrainer` from task config, seed and device."""


@dataclass(frozen=True, kw_only=True)
class _DesignJob:
    config: CodesignConfig
    make_task: TaskFactory
    mode: Mode
    seed: int
    out_dir: Path
    device: str


def compare_designs(
    config: CodesignConfig,
    make_task: TaskFactory,
    out_dir: Path | str,
    *,
    num_seeds: int = 5,
    modes: Sequence[Mode] = MODES,
    device: str = "cpu",
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[int, list[DesignResult]]:
    """Run joint training and its baselines for several seeds; existing runs are resumed.

    Args:
        config: Config of all runs.
        make_task: Creates the task of a run; must be importable if there are several workers.
        out_dir: Output directory; each run has its own subdirectory.
        num_seeds: Runs per mode, with seeds from 0.
        modes: Modes to run; a two-stage run includes the other baselines.
        device: Training device; `"cuda"` cycles through all GPUs.
        workers: Parallel processes.
        progress: Progress callback.

    Returns:
        Seed -> its designs, in the order of `modes`.

    Raises:
        InputError: An argument is out of range, or a directory contains another run.
        RunError: A run failed; completed runs are not repeated by the next call.
    """
    check_at_least(1, num_seeds=num_seeds)
    root = Path(out_dir)
    runs: list[tuple[int, Mode]] = [(seed, mode) for seed in range(num_seeds) for mode in modes]
    jobs = [
        _DesignJob(
            config=config, make_task=make_task, mode=mode, seed=seed, out_dir=root / f"{mode}-{seed}",
            device=round_robin_device(device, number),
        )
        for number, (seed, mode) in enumerate(runs)
    ]  # fmt: skip
    results: dict[int, list[DesignResult]] = {}
    for index, designs in map_unordered(_run_job, jobs, workers=workers):
        results[index] = designs
        if progress is not None:
            summary = ", ".join(f"{design.mode} {design.cost.energy_delay:.4g} mJ ms" for design in designs)
            progress(f"seed {jobs[index].seed}: {summary}", len(results) / len(jobs))
    # In the order of the jobs, which may differ from the order of completion.
    return {
        seed: [design for index, job in enumerate(jobs) if job.seed == seed for design in results[index]]
        for seed in range(num_seeds)
    }


def _run_job(job: _DesignJob) -> list[DesignResult]:
    joint = job.config.joint.model_copy(update={"seed": job.seed})
    config = job.config.model_copy(update={"joint": joint})
    with job.make_task(config.task, job.seed, job.device) as task:
        trained: EpochTrainer = task
        return JointTrainer(trained, Hardware(config), config, job.out_dir, mode=job.mode).run()


def summarize_designs(
    designs: Mapping[int, Sequence[DesignResult]], config: CodesignConfig, *, device: str, command: str
) -> dict[str, Any]:
    """Summarize the runs as JSON types.

    Args:
        designs: Result of `compare_designs`.
        config: Config of all runs.
        device: Training device.
        command: Command that reproduces the runs.

    Returns:
        `modes`: per mode accuracy and energy-delay product (means over seeds), and the ratio of the latter to
        the two-stage baseline (geometric mean over seeds, with confidence interval); `verdict`: a sentence
        that declares a winner only if its accuracy is not lower by more than `ACCURACY_TOLERANCE_POINTS`;
        `runs`: all designs; `prediction`: a sentence about where hardware costs come from. Energy-delay
        products are in mJ ms.
    """
    rows = []
    by_mode = {
        mode: {seed: design for seed, results in designs.items() for design in results if design.mode == mode}
        for mode in ("joint", *BASELINES)
    }
    base = by_mode["two-stage"]
    for mode, runs in by_mode.items():
        if not runs:
            continue
        log_ratios = [
            math.log(design.cost.energy_delay / base[seed].cost.energy_delay)
            for seed, design in runs.items()
            if seed in base
        ]
        low, high = bootstrap_mean(log_ratios) if len(log_ratios) > 1 else (math.nan, math.nan)
        rows.append(
            {
                "mode": mode,
                "seeds": len(runs),
                "accuracy": mean(design.accuracy for design in runs.values()),
                "energy_delay": mean(design.cost.energy_delay for design in runs.values()),
                "ratio": math.exp(mean(log_ratios)) if log_ratios else None,
                "low": math.exp(low) if len(log_ratios) > 1 else None,
                "high": math.exp(high) if len(log_ratios) > 1 else None,
                "violations": sum(design.violations for design in runs.values()),
            }
        )
    return {
        "environment": collect_environment(device),
        "command": command,
        "settings": config.model_dump(mode="json"),
        "modes": rows,
        "prediction": Hardware(config).describe_prediction(),
        "verdict": _verdict({row["mode"]: row for row in rows}),
        "runs": [
            {"seed": seed, **design.to_dict()} for seed, results in designs.items() for design in results
        ],
    }


def _verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    if "joint" not in rows or "two-stage" not in rows:
        return "Joint training or its two-stage baseline was not run."
    joint, base = rows["joint"], rows["two-stage"]
    points = 100.0 * (joint["accuracy"] - base["accuracy"])
    equality = "equal" if abs(points) <= ACCURACY_TOLERANCE_POINTS else "not equal"
    summary = (
        f"accuracies are {equality} ({points:+.2f} points); the predicted energy-delay product is "
        f"{joint['ratio']:.3f} of the two-stage baseline's"
    )
    if joint["low"] is None:
        return f"One seed is not enough for a conclusion: {summary}."
    summary = f"{summary} ({joint['low']:.3f} to {joint['high']:.3f})"
    if joint["low"] <= 1.0 <= joint["high"]:
        return f"No winner: {summary}."
    joint_is_lower = joint["high"] < 1.0
    if (points if joint_is_lower else -points) < -ACCURACY_TOLERANCE_POINTS:
        return f"No winner, because the lower energy-delay product has lower accuracy: {summary}."
    return f"{'Joint training' if joint_is_lower else 'The two-stage baseline'} wins: {summary}."
