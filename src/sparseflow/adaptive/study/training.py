"""Training controllers by several seeds, and beside each one that imitates the oracle as long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import QuantileLatencies
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.train import CONTROLLERS, train
from sparseflow.core.files import write_atomic
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import InputError

Progress = Callable[[str, float], None]

GRPO, SUPERVISED = "controllers", "supervised"
"""Folders of trainings; each holds one for each seed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedControllers:
    """Controllers of each seed.

    Attributes:
        controllers: By GRPO.
        supervised: By imitating the oracle alone, for as many steps.
        best: Which of the first did best on the validation split.
    """

    controllers: tuple[Controllers, ...]
    supervised: tuple[Controllers, ...]
    best: int


def learn(
    tables: StudyTables,
    config: GrpoConfig,
    folder: Path | str,
    *,
    seeds: int,
    model_id: str,
    mine: DistributedContext,
    progress: Progress | None = None,
) -> TrainedControllers:
    """Train, or go on where an earlier call in the same folder was stopped.

    The folder then holds `controllers.safetensors`, those of the best seed, and a folder for each training.
    Plans whose 99 % quantile is beyond a budget are masked, as they are for the rivals.

    Args:
        tables: What is learnt from, and validated with.
        config: How; its seed is the first.
        folder: Must exist.
        seeds: How many.
        model_id: Of the model, as `profile.weights_id` gives it.
        mine: This process among all that train together.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: `seeds` is not positive, a setting cannot be used, or a folder holds another training.
        FileFormatError: A checkpoint or a history is damaged.
        RunError: A training failed; its last checkpoint is kept.
    """
    if seeds < 1:
        raise InputError(f"`seeds` (={seeds}) must be at least 1")
    root, costs = Path(folder), QuantileLatencies.of(tables.train)
    ways = {GRPO: config, SUPERVISED: replace(config, steps=0, warm_start=config.all_steps)}
    found: dict[str, list[Controllers]] = {name: [] for name in ways}
    scores = []
    for number in range(seeds):
        for at, (name, how) in enumerate(ways.items()):
            trained = train(
                replace(how, seed=config.seed + number), tables.train, root / name / f"seed-{number}",
                held_out=tables.validation, model_id=model_id, costs=costs, device=mine.device,
                progress=_part(progress, f"{name}, seed {number}", 2 * number + at, 2 * seeds),
            )  # fmt: skip
            found[name].append(trained.controllers)
            if name == GRPO:
                # Only the first process knows.
                scores.append(trained.validation.get("score", 0.0))
    best = max(range(seeds), key=lambda at: scores[at])
    if mine.rank == 0:
        write_atomic(root / CONTROLLERS, (root / GRPO / f"seed-{best}" / CONTROLLERS).read_bytes())
    return TrainedControllers(
        controllers=tuple(found[GRPO]), supervised=tuple(found[SUPERVISED]), best=best
    )  # fmt: skip


def _part(progress: Progress | None, name: str, at: int, of: int) -> Progress | None:
    if progress is None:
        return None
    return lambda what, share: progress(f"{name}: {what}", (at + share) / of)
