"""Block importance of a model folder, measured on Grid-VQA or on questions of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.grid_vqa.task import GridVqaTask
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import BlockImportance, measure_importance
from sparseflow.adaptive.questions.file_task import QuestionTask
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError


def measure_model_importance(
    model: Path,
    out_path: Path,
    *,
    questions: Path | None = None,
    archives: Sequence[Path] = (),
    max_samples: int = 512,
    beam: int = 4,
    device: torch.device,
    progress: Progress,
) -> BlockImportance:
    """Measure the accuracy of a model without each block and without sets of blocks.

    Args:
        model: Directory of the model.
        out_path: JSON file of the result; a journal next to it allows an interrupted search to resume.
        questions: Questions, JSON lines; by default those of Grid-VQA.
        archives: Grid-VQA's image archives, if they were moved.
        max_samples: Maximum number of questions for each set of blocks.
        beam: Sets of each size that are extended.
        device: Device of the model.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: The model or a file is missing, or archives are given with questions.
    """
    journal = out_path.with_suffix(".jsonl")
    if questions is None:
        task = GridVqaTask.open(model, device=device, archives=archives)
        scorer: Any = task.make_scorer(max_samples)
    elif archives:
        raise InputError("--archive is for Grid-VQA's questions and excludes --questions")
    else:
        task = QuestionTask.open(model, questions, device=device)
        scorer = task.make_scorer(max_samples)
        # Scores on other questions are not comparable, so each file of questions has its own journal.
        journal = out_path.with_name(f"{out_path.stem}-{scorer.digest[:8]}.jsonl")
    out_path.parent.mkdir(parents=True, exist_ok=True)
    importance = measure_importance(
        scorer,
        get_adapter(task.model).geometry,
        beam=beam,
        journal_path=journal,
        model_id=compute_weights_id(task.model),
        progress=progress,
    )
    importance.save(out_path)
    return importance
