"""Evaluation of cost models: cross-validated scores, search comparisons and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.model.comparison import ablation, named, study
from sparseflow.tuning.model.net.pretrained import load_prior
from sparseflow.tuning.model.page import SCORES, SEARCHES, scores, write_page
from sparseflow.tuning.model.training import TrainConfig
from sparseflow.tuning.schedule.matrices import matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import operator as operator_of
from sparseflow.tuning.search.comparison import compare_searches

Models = Literal["named", "ablation", "both"]

_ENTRY_BUILDERS = {"named": (named,), "ablation": (ablation,), "both": (named, ablation)}


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Scores of an evaluation.

    Attributes:
        environment: Hardware and software, as `core.environment` collects it.
        command: Command line that repeats the evaluation.
        training: Settings shared by all trainings.
        scores: One record for each model and operator; see `page.scores`.
        scores_known: The same over matrices with a known pattern.
        page: The report.
    """

    environment: Mapping[str, Any]
    command: str
    training: Mapping[str, Any]
    scores: Sequence[Mapping[str, Any]]
    scores_known: Sequence[Mapping[str, Any]]
    page: Path

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self) | {"page": str(self.page)}


def evaluate_models(
    base: TrainConfig,
    label_sets: Sequence[Path],
    out_dir: Path,
    *,
    models: Models = "named",
    operators: Sequence[str] | None = None,
    folds: int = 4,
    seeds: int = 1,
    device: str = "cpu",
    workers: int = 1,
    matrices: Sequence[Path] = (),
    workloads: Sequence[tuple[str, int | None]] = (),
    trials: int = 100,
    net: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> EvaluationResult:
    """Cross-validate cost models over matrix families, compare searches, and write the report.

    Args:
        base: Settings shared by all trainings.
        label_sets: Directories of label sets.
        out_dir: Output directory; an existing evaluation is resumed.
        models: `"named"` for AutoSparse's networks and boosted trees, `"ablation"`, or both.
        operators: Operators to learn; by default all with labels.
        folds: Number of folds over matrix families.
        seeds: Trainings of each network in each fold.
        device: Device of the trainings.
        workers: Parallel trainings.
        matrices: Matrix Market files to search schedules for, with and without a model.
        workloads: Operators and columns to search on each matrix.
        trials: Schedules that each search measures.
        net: Network that guided searches start from; by default the shipped one.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: An argument is out of range, or `out_dir` has another evaluation.
        FileFormatError: A label set or a file of `out_dir` is damaged.
    """
    labeled = dict.fromkeys(task.operator for path in label_sets for task in LabelSet.open(path).tasks)
    requested = None if operators is None else {operator_of(name).name for name in operators}
    selected = [name for name in labeled if requested is None or name in requested]
    entries = [entry for build in _ENTRY_BUILDERS[models] for entry in build(base, selected)]
    rows = study(
        entries,
        label_sets,
        out_dir,
        folds=folds,
        seeds=seeds,
        device=device,
        workers=workers,
        progress=progress,
    )
    prior = None if net is None else load_prior(net)
    for path in matrices:
        matrix = read_matrix(path)
        for operator, n_cols in workloads:
            compare_searches(
                matrix_name(path),
                operator,
                matrix,
                out_dir / SEARCHES,
                n_cols=n_cols,
                trials=trials,
                prior=prior,
                progress=progress,
            )
    environment = collect_environment(device)
    command = f"sparseflow tuning eval … --models {models} --folds {folds} --seeds {seeds}"
    result = EvaluationResult(
        environment=environment,
        command=command,
        training=base.to_dict(),
        scores=scores(rows),
        scores_known=scores(rows, known=True),
        page=write_page(out_dir, environment=environment, reproduce=command),
    )
    record = {name: value for name, value in result.to_dict().items() if name != "page"}
    write_atomic(out_dir / SCORES, json.dumps(record) + "\n")
    return result
