"""Tasks of a model's directory: the task of a study, and the block importance of a model on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.task import GridVqaTask
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import BlockImportance, measure_importance
from sparseflow.adaptive.questions.file_task import QuestionScorer, QuestionTask
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError


def open_task(
    model_dir: Path,
    questions: Path | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    max_total_tokens: int | None = None,
    archives: Sequence[Path] = (),
    bank: ImageBank | None = None,
) -> GridVqaTask | QuestionTask:
    """Open a model and its task.

    Args:
        model_dir: Directory of the model; a Grid-VQA model if there are no questions.
        questions: File of questions (`questions.file.read_questions`); by default those of Grid-VQA.
        device: Device.
        dtype: Number format of the weights; by default float32 for Grid-VQA, else that of the directory.
        max_total_tokens: Maximum tokens of a question of a file with its answer; by default the model's
            context.
        archives: Image archives of Grid-VQA, if they were moved since the training of the model.
        bank: Images that replace those of the model's settings.

    Raises:
        InputError: A file does not exist, or images are given with questions.
        FileFormatError: A file is damaged.
        ModelError: The model's architecture has no adapter.
    """
    if questions is None:
        return GridVqaTask.open(
            model_dir, device=device, dtype=dtype or torch.float32, archives=archives, bank=bank
        )
    if archives or bank is not None:
        raise InputError("image archives are for Grid-VQA and exclude `questions`")
    return QuestionTask.open(
        model_dir, questions, device=device, dtype=dtype, max_total_tokens=max_total_tokens
    )


def measure_model_importance(
    model_dir: Path,
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
        model_dir: As in `open_task`, like `questions` and `archives`.
        out_path: JSON file of the result; a journal next to it allows an interrupted search to resume.
        questions: Questions, JSON lines.
        archives: Image archives.
        max_samples: Maximum number of questions for each set of blocks.
        beam: Sets of each size that are extended.
        device: Device of the model.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: The model or a file is missing, or archives are given with questions.
    """
    task = open_task(model_dir, questions, device=device, archives=archives)
    scorer = task.make_scorer(max_samples)
    journal = out_path.with_suffix(".jsonl")
    if isinstance(scorer, QuestionScorer):
        # Scores on other questions are not comparable, so each file of questions has its own journal.
        journal = out_path.with_name(f"{out_path.stem}-{scorer.digest[:8]}.jsonl")
    out_path.parent.mkdir(parents=True, exist_ok=True)
    importance = measure_importance(
        scorer, get_adapter(task.model).geometry, beam=beam, journal_path=journal,
        model_id=compute_weights_id(task.model), progress=progress,
    )  # fmt: skip
    importance.save(out_path)
    return importance
