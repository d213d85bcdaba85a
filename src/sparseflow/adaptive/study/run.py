"""A study from beginning to end: tables, training, judging, files and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.task import GridVqaTask
from sparseflow.adaptive.profile import PlanProfile, weights_id
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.adaptive.questions.file_task import QuestionTask
from sparseflow.adaptive.questions.task import Progress, SampleCounts, StudyTask
from sparseflow.adaptive.study import results
from sparseflow.adaptive.study.comparison import contest
from sparseflow.adaptive.study.outcome_tables import StudyTables, dtype_of, tables
from sparseflow.adaptive.study.page import PAGE, write_page
from sparseflow.adaptive.study.training import GRPO, SUPERVISED, learn
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.train import CONTROLLERS
from sparseflow.core.environment import collect_environment
from sparseflow.core.training.distributed import DistributedContext, init_distributed
from sparseflow.errors import InputError

WORTH = "worth.json"
_ATTAINMENT = 0.99
_TABLES, _TRAINED = 0.4, 0.9
"""Share of the progress after which tables are there, and after which controllers are."""


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What a study is of.

    Attributes:
        model: Folder of a model; of a Grid-VQA model, if there are no questions.
        profile: Parquet file of its plans' times; it may be from another device.
        out: Folder of the study; made when absent.
        device: Where to compute; `"cuda"` with torchrun is each process' own GPU.
        counts: Of samples; of questions of a file, at most.
        questions: A file of these, as `questions.read` takes it; by default those of Grid-VQA.
        attainment: Share of answers that must be in time; by default what the training asks for, or 0.99
            where that is not known.
        budgets: How many to judge at.
        archives: Of images, if they are elsewhere now than when the model was trained.
        bank: Images in place of those that the model's settings name.
        command: What makes the study again, for the record.

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
    budgets: int = 24
    archives: Sequence[Path] = ()
    bank: ImageBank | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.attainment is not None and not 0.0 < self.attainment <= 1.0:
            raise InputError(f"`attainment` (={self.attainment}) must be a share of answers, above 0")
        if self.budgets < 1:
            raise InputError(f"`budgets` (={self.budgets}) must be at least 1")
        if self.questions is not None and (self.archives or self.bank is not None):
            raise InputError("archives of images are of Grid-VQA's questions; leave them out, or `questions`")


def train(
    asked: StudyConfig, config: GrpoConfig, *, seeds: int = 3, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Train controllers and judge them against their rivals, or go on where an earlier call was stopped.

    Args:
        asked: Model, profile and where to write.
        config: How to train; its seed is the first.
        seeds: How many times.
        progress: Called with (what was done, fraction done).

    Returns:
        What `judged.json` holds; None in processes but the first.

    Raises:
        InputError: A file is missing or of something else, or a setting cannot be used.
        FileFormatError: A file is damaged.
        RunError: A training failed; its last checkpoint is kept.
    """
    with init_distributed(asked.device) as mine:
        profile, task, made = _tables(asked, mine, _part(progress, 0.0, _TABLES))
        learnt = learn(
            made, config, asked.out, seeds=seeds, model_id=weights_id(task.model), mine=mine,
            progress=_part(progress, _TABLES, _TRAINED),
        )  # fmt: skip
        if mine.rank:
            return None
        told = {"seeds": seeds, "best_seed": learnt.best, "controllers": CONTROLLERS}
        return _judged(
            asked, profile, task, made, told, _part(progress, _TRAINED, 1.0),
            controllers=learnt.controllers, supervised=learnt.supervised, span_ms=config.budgets_ms,
            attainment=1.0 - config.violations if asked.attainment is None else asked.attainment,
        )  # fmt: skip


def evaluate(
    asked: StudyConfig, *, controllers: Path | None = None, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Judge controllers, or only what needs no training, without training any.

    Controllers in the folder of a study are judged at the attainment that it was judged at, and where the
    profile is of the same device, at budgets of the same span. What was used, and why, `judged_at` tells.

    Args:
        asked: Model, profile and where to write.
        controllers: Trained ones.
        progress: Called with (what was done, fraction done).

    Returns:
        What `judged.json` holds; None in processes but the first.

    Raises:
        InputError: A file is missing or of something else, or the folder holds a training.
        FileFormatError: A file is damaged.
    """
    held = [name for name in (CONTROLLERS, GRPO, SUPERVISED) if (asked.out / name).exists()]
    if held:
        raise InputError(
            f"`out` (={asked.out}) holds a training ({held[0]}), whose findings would be overwritten; name "
            "another folder than that of a training"
        )
    with init_distributed(asked.device) as mine:
        profile, task, made = _tables(asked, mine, _part(progress, 0.0, _TRAINED))
        if mine.rank:
            return None
        model_id = weights_id(task.model)
        given = () if controllers is None else (_load(controllers, model_id, made, mine),)
        told: dict[str, Any] = {} if controllers is None else {"controllers": str(controllers)}
        how, told["judged_at"] = _judged_at(asked, controllers, model_id, profile)
        return _judged(
            asked, profile, task, made, told, _part(progress, _TRAINED, 1.0), controllers=given, **how
        )


def _tables(
    asked: StudyConfig, mine: DistributedContext, progress: Progress | None
) -> tuple[PlanProfile, StudyTask, StudyTables]:
    """The profile, the task, and what these make of samples."""
    if asked.out.exists() and not asked.out.is_dir():
        raise InputError(f"`out` (={asked.out}) is a file; name a folder")
    profile = PlanProfile.read(asked.profile)
    how: dict[str, Any] = {"device": mine.device, "dtype": dtype_of(profile)}
    if asked.questions is None:
        task: StudyTask = GridVqaTask.open(asked.model, archives=asked.archives, bank=asked.bank, **how)
    else:
        most = profile.about.how.get("max_tokens")
        task = QuestionTask.open(asked.model, asked.questions, most_tokens=most, **how)
    asked.out.mkdir(parents=True, exist_ok=True)
    made = tables(task, profile, asked.out, counts=asked.counts, mine=mine, progress=progress)
    return profile, task, made


def _judged_at(
    asked: StudyConfig, controllers: Path | None, model_id: str, profile: PlanProfile
) -> tuple[dict[str, Any], dict[str, str]]:
    """Attainment and span of budgets to judge at, and where each is from."""
    study = None if controllers is None else _study_of(controllers, model_id)
    how: dict[str, Any] = {"attainment": _ATTAINMENT}
    told = {"attainment": "by default", "budgets": "by default, from the least that a plan keeps"}
    if study is not None:
        how["attainment"], told["attainment"] = study["attainment"], "of the controllers' study"
        budgets_ms = study["budgets_ms"]
        if len(budgets_ms) > 1 and study["device"].get("name") == profile.about.device.get("name"):
            # `budget_grid` has the middles of equal parts: half a part lies beyond the first and the last.
            half = (budgets_ms[-1] / budgets_ms[0]) ** (0.5 / (len(budgets_ms) - 1))
            how["span_ms"] = (budgets_ms[0] / half, budgets_ms[-1] * half)
            told["budgets"] = "of the controllers' study"
    if asked.attainment is not None:
        how["attainment"], told["attainment"] = asked.attainment, "as asked for"
    return how, told


def _study_of(controllers: Path, model_id: str) -> dict[str, Any] | None:
    """What the study found that controllers lie in, as its best or as those of a seed; None if in none."""
    for folder in controllers.absolute().parents[:3]:
        try:
            found = results.read(folder)
        except InputError:
            continue
        if "best_seed" in found and found["model_id"] == model_id:
            return found
    return None


def _load(path: Path, model_id: str, made: StudyTables, mine: DistributedContext) -> Controllers:
    found = Controllers.load(path, model_id=model_id, device=mine.device)
    if found.space != made.test.space:
        raise InputError(
            f"{path} chooses among other plans than the profile has; train controllers for these"
        )
    return found


def _judged(
    asked: StudyConfig, profile: PlanProfile, task: StudyTask, made: StudyTables, told: dict[str, Any],
    progress: Progress | None, **how: Any,
) -> dict[str, Any]:  # fmt: skip
    """Judge, and write everything that is made of it."""
    worth = _worth(made, task)
    worth.save(asked.out / WORTH)
    found = contest(made, budgets=asked.budgets, progress=progress, **how)
    about = {
        "model_id": worth.model_id, "task": {"name": task.name, "told": task.told},
        "environment": collect_environment(asked.device), "command": asked.command, **told,
    }  # fmt: skip
    kept = results.of_contest(profile, made, found, about=about)
    results.write(asked.out, kept)
    write_page(asked.out, asked.out / PAGE)
    return kept


def _worth(made: StudyTables, task: StudyTask) -> PlanQuality:
    """Of all samples but those of the test, which requests to come are like."""
    right = torch.cat([made.train.correct, made.validation.correct])
    return PlanQuality(
        model_id=weights_id(task.model), space=made.test.space,
        accuracy=tuple(right.double().mean(0).tolist()), samples=len(right), task=task.name,
    )  # fmt: skip


def _part(progress: Progress | None, begin: float, end: float) -> Progress | None:
    if progress is None:
        return None
    return lambda what, share: progress(what, begin + (end - begin) * share)
