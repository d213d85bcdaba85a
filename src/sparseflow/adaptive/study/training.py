"""Training of controllers with several seeds, by GRPO and by imitating the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.train import CONTROLLERS, train
from sparseflow.core.checks import check_at_least
from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.training.distributed import DistributedContext

GRPO, SUPERVISED = "controllers", "supervised"
"""Directories of trainings, with one subdirectory per seed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedControllers:
    """Controllers of each seed.

    Attributes:
        controllers: Trained by GRPO.
        supervised: Trained by imitating the oracle, for as many steps.
        best_seed: Index of the GRPO controllers with the best validation score.
    """

    controllers: tuple[Controllers, ...]
    supervised: tuple[Controllers, ...]
    best_seed: int


def train_controllers(
    tables: StudyTables,
    config: GrpoConfig,
    out_dir: Path | str,
    *,
    num_seeds: int,
    model_id: str,
    context: DistributedContext,
    progress: Progress | None = None,
) -> TrainedControllers:
    """Train controllers, or resume an earlier call with the same directory.

    Writes `controllers.safetensors`, those of the best seed, and one directory per training. Plans whose 99 %
    latency quantile exceeds a budget are masked, as they are for the baselines.

    Args:
        tables: Outcomes to train on and to validate with.
        config: Training settings; its seed is the first.
        out_dir: Existing output directory.
        num_seeds: Number of seeds.
        model_id: `compute_weights_id` of the model.
        context: Processes that train together.
        progress: Called with (message, fraction done).

    Raises:
        InputError: `num_seeds` is below 1, a setting is invalid, or a directory holds another training.
        FileFormatError: A checkpoint or a history is damaged.
        RunError: A training failed; its last checkpoint is kept.
    """
    check_at_least(1, num_seeds=num_seeds)
    root, costs_ms = Path(out_dir), tables.train.latency_quantiles_ms()
    methods = {
        GRPO: config,
        SUPERVISED: config.model_copy(update={"steps": 0, "warm_start": config.total_steps}),
    }
    controllers: dict[str, list[Controllers]] = {name: [] for name in methods}
    scores = []
    num_trainings = num_seeds * len(methods)
    for seed in range(num_seeds):
        for index, (name, method_config) in enumerate(methods.items(), start=seed * len(methods)):
            result = train(
                method_config.model_copy(update={"seed": config.seed + seed}), tables.train,
                root / name / f"seed-{seed}",
                held_out=tables.validation, model_id=model_id, costs_ms=costs_ms, device=context.device,
                progress=subrange(
                    progress, index / num_trainings, (index + 1) / num_trainings, f"{name}, seed {seed}: "
                ),
            )  # fmt: skip
            controllers[name].append(result.controllers)
            if name == GRPO:
                # Only rank 0 has the score.
                scores.append(result.validation.get("score", 0.0))
    best_seed = max(range(num_seeds), key=lambda seed: scores[seed])
    if context.rank == 0:
        write_atomic(root / CONTROLLERS, (root / GRPO / f"seed-{best_seed}" / CONTROLLERS).read_bytes())
    return TrainedControllers(
        controllers=tuple(controllers[GRPO]), supervised=tuple(controllers[SUPERVISED]), best_seed=best_seed
    )
