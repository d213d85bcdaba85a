"""A study from start to end: outcome tables, training, evaluation, files and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.profile import PlanProfile, compute_weights_id
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.adaptive.questions.task import SampleCounts, StudyTask
from sparseflow.adaptive.study.comparison import compare_with_baselines
from sparseflow.adaptive.study.outcome_tables import StudyTables, build_study_tables, get_dtype
from sparseflow.adaptive.study.page import PAGE_FILE, write_page
from sparseflow.adaptive.study.results import load_results, make_study_results, save_results
from sparseflow.adaptive.study.tasks import open_task
from sparseflow.adaptive.study.training import GRPO, SUPERVISED, train_controllers
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.train import CONTROLLERS
from sparseflow.core.checks import check_at_least, check_between, check_positive
from sparseflow.core.environment import collect_environment
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.training.distributed import DistributedContext, init_distributed
from sparseflow.errors import InputError

PLAN_QUALITY_FILE = "plan_quality.json"
_DEFAULT_ATTAINMENT = 0.99
_TABLES_DONE, _TRAINING_DONE = 0.4, 0.9
"""Fractions of the progress."""


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Inputs and outputs of a study.

    Attributes:
        model: Directory of the model; a Grid-VQA model if there are no questions.
        profile: Parquet file of its profile, possibly from another device.
        out: Output directory; created if it does not exist.
        device: Device; `"cuda"` with torchrun is one GPU per process.
        counts: Number of samples; for questions of a file the maximum.
        questions: File of questions (`questions.file.read_questions`); by default those of Grid-VQA.
        attainment: Requested fraction of answers in time; by default that of the training, or 0.99.
        num_budgets: Number of budgets of the evaluation.
        archives: Image archives, if they were moved since the training of the model.
        bank: Images that replace those of the model's settings.
        command: Command line of the study, for the record.

    Raises:
        InputError: A number is out of range.
    """

    model: Path
    profile: Path
    out: Path
    device: torch.device | str = "cpu"
    counts: SampleCounts = field(default_factory=SampleCounts)
    questions: Path | None = None
    attainment: float | None = None
    num_budgets: int = 24
    archives: Sequence[Path] = ()
    bank: ImageBank | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.attainment is not None:
            check_positive(attainment=self.attainment)
            check_between(0.0, 1.0, attainment=self.attainment)
        check_at_least(1, num_budgets=self.num_budgets)


def train(
    config: StudyConfig, grpo: GrpoConfig, *, num_seeds: int = 3, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Train controllers and compare them with baselines, or resume an earlier call.

    Args:
        config: Inputs and outputs.
        grpo: Training settings; its seed is the first.
        num_seeds: Number of seeds.
        progress: Called with (message, fraction done).

    Returns:
        The content of `results.json`; None except on rank 0.

    Raises:
        InputError: A file does not exist or does not fit, or a setting is invalid.
        FileFormatError: A file is damaged.
        RunError: A training failed; its last checkpoint is kept.
    """
    with init_distributed(config.device) as context:
        profile, task, tables = _build_tables(config, context, subrange(progress, 0.0, _TABLES_DONE))
        trained = train_controllers(
            tables, grpo, config.out, num_seeds=num_seeds, model_id=compute_weights_id(task.model),
            context=context, progress=subrange(progress, _TABLES_DONE, _TRAINING_DONE),
        )  # fmt: skip
        if context.rank:
            return None
        return _evaluate(
            config, profile, task, tables,
            metadata={
                "seeds": num_seeds, "best_seed": trained.best_seed, "controllers": CONTROLLERS,
            },
            controllers=trained.controllers, supervised=trained.supervised,
            attainment=1.0 - grpo.violations if config.attainment is None else config.attainment,
            budget_range_ms=grpo.budgets_ms, progress=subrange(progress, _TRAINING_DONE, 1.0),
        )  # fmt: skip


def evaluate(
    config: StudyConfig, *, controllers: Path | None = None, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Compare trained controllers with baselines, or evaluate the baselines only.

    Controllers in the directory of a study are evaluated at the attainment of that study and, if the profile
    is of the same device, at its range of budgets. The entry `judged_at` of the results names the origin of
    both.

    Args:
        config: Inputs and outputs.
        controllers: File of trained controllers.
        progress: Called with (message, fraction done).

    Returns:
        The content of `results.json`; None except on rank 0.

    Raises:
        InputError: A file does not exist or does not fit, or the output directory contains a training.
        FileFormatError: A file is damaged.
    """
    existing = [name for name in (CONTROLLERS, GRPO, SUPERVISED) if (config.out / name).exists()]
    if existing:
        raise InputError(
            f"`out` (={config.out}) contains a training ({existing[0]}), whose results would be overwritten; "
            "use another directory"
        )
    with init_distributed(config.device) as context:
        profile, task, tables = _build_tables(config, context, subrange(progress, 0.0, _TRAINING_DONE))
        if context.rank:
            return None
        model_id = compute_weights_id(task.model)
        metadata: dict[str, Any] = {} if controllers is None else {"controllers": str(controllers)}
        loaded = () if controllers is None else (_load_controllers(controllers, model_id, tables, context),)
        attainment, budget_range_ms, metadata["judged_at"] = _select_conditions(
            config, controllers, model_id, profile
        )
        return _evaluate(
            config, profile, task, tables, metadata=metadata, controllers=loaded, supervised=(),
            attainment=attainment, budget_range_ms=budget_range_ms,
            progress=subrange(progress, _TRAINING_DONE, 1.0),
        )  # fmt: skip


def _build_tables(
    config: StudyConfig, context: DistributedContext, progress: Progress | None
) -> tuple[PlanProfile, StudyTask, StudyTables]:
    if config.out.exists() and not config.out.is_dir():
        raise InputError(f"`out` (={config.out}) is a file; use a directory")
    profile = PlanProfile.load(config.profile)
    task = open_task(
        config.model, config.questions, device=context.device, dtype=get_dtype(profile),
        max_total_tokens=profile.metadata.config.get("max_tokens"), archives=config.archives,
        bank=config.bank,
    )  # fmt: skip
    config.out.mkdir(parents=True, exist_ok=True)
    tables = build_study_tables(
        task, profile, config.out, counts=config.counts, context=context, progress=progress
    )
    return profile, task, tables


def _select_conditions(
    config: StudyConfig, controllers: Path | None, model_id: str, profile: PlanProfile
) -> tuple[float, tuple[float, float] | None, dict[str, str]]:
    """Attainment and range of budgets, and the origin of each."""
    study = None if controllers is None else _find_study(controllers, model_id)
    attainment, budget_range_ms = _DEFAULT_ATTAINMENT, None
    origin = {"attainment": "default", "budgets": "default, from the fastest plan"}
    if study is not None:
        attainment, origin["attainment"] = study["attainment"], "study of the controllers"
        budgets_ms = study["budgets_ms"]
        if len(budgets_ms) > 1 and study["device"].get("name") == profile.metadata.device.get("name"):
            # `budget_grid` returns centers of equal intervals, so half an interval lies outside at each end.
            half = (budgets_ms[-1] / budgets_ms[0]) ** (0.5 / (len(budgets_ms) - 1))
            budget_range_ms = (budgets_ms[0] / half, budgets_ms[-1] * half)
            origin["budgets"] = "study of the controllers"
    if config.attainment is not None:
        attainment, origin["attainment"] = config.attainment, "argument"
    return attainment, budget_range_ms, origin


def _find_study(controllers: Path, model_id: str) -> dict[str, Any] | None:
    """Results of the study that contains the controllers, as its best or as those of a seed."""
    for directory in controllers.absolute().parents[:3]:
        try:
            results = load_results(directory)
        except InputError:
            continue
        if "best_seed" in results and results["model_id"] == model_id:
            return results
    return None


def _load_controllers(
    path: Path, model_id: str, tables: StudyTables, context: DistributedContext
) -> Controllers:
    controllers = Controllers.load(path, model_id=model_id, device=context.device)
    if controllers.space != tables.test.space:
        raise InputError(f"{path} selects other plans than those of the profile; train controllers for these")
    return controllers


def _evaluate(
    config: StudyConfig,
    profile: PlanProfile,
    task: StudyTask,
    tables: StudyTables,
    *,
    metadata: Mapping[str, Any],
    controllers: Sequence[Controllers],
    supervised: Sequence[Controllers],
    attainment: float,
    budget_range_ms: tuple[float, float] | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Compare the policies and write plan quality, results and page."""
    quality = _measure_plan_quality(tables, task)
    quality.save(config.out / PLAN_QUALITY_FILE)
    comparison = compare_with_baselines(
        tables, controllers=controllers, supervised=supervised, attainment=attainment,
        num_budgets=config.num_budgets, budget_range_ms=budget_range_ms, progress=progress,
    )  # fmt: skip
    results = make_study_results(
        profile, tables, comparison,
        metadata={
            "model_id": quality.model_id, "task": {"name": task.name, "description": task.description},
            "environment": collect_environment(config.device), "command": config.command, **metadata,
        },
    )  # fmt: skip
    save_results(config.out, results)
    write_page(config.out, config.out / PAGE_FILE)
    return results


def _measure_plan_quality(tables: StudyTables, task: StudyTask) -> PlanQuality:
    """Accuracy on all samples but the test, which stands for future requests."""
    correct = torch.cat([tables.train.correct, tables.validation.correct])
    return PlanQuality(
        model_id=compute_weights_id(task.model), space=tables.test.space,
        accuracy=tuple(correct.double().mean(0).tolist()), samples=len(correct), task=task.name,
    )  # fmt: skip
