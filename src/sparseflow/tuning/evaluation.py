"""Evaluation of cost models: cross-validated scores, search comparisons and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.model.comparison import (
    build_ablation_entries,
    build_named_entries,
    compare_networks,
    read_comparison,
)
from sparseflow.tuning.model.net.pretrained import load_prior
from sparseflow.tuning.model.page import build_page, compute_scores
from sparseflow.tuning.model.training import TrainConfig
from sparseflow.tuning.schedule.matrices import parse_matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.search.comparison import add_searches, compare_searches, read_search_record

PAGE_FILE = "report.html"
SCORES_FILE = "scores.json"
SEARCHES_DIR = "searches"

Models = Literal["named", "ablation", "both"]

_ENTRY_BUILDERS = {
    "named": (build_named_entries,),
    "ablation": (build_ablation_entries,),
    "both": (build_named_entries, build_ablation_entries),
}


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Scores of an evaluation.

    Attributes:
        environment: Hardware and software, as `core.environment` collects it.
        command: Command line that repeats the evaluation.
        training: Settings shared by all trainings.
        scores: One record for each model and operator; see `model.page.compute_scores`.
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
    max_trials: int = 100,
    net: Path | None = None,
    progress: Progress | None = None,
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
        max_trials: Schedules that each search measures.
        net: Network that guided searches start from; by default the shipped one.
        progress: Progress callback.

    Raises:
        InputError: An argument is out of range, or `out_dir` has another evaluation.
        FileFormatError: A label set or a file of `out_dir` is damaged.
    """
    labeled = dict.fromkeys(task.operator for path in label_sets for task in LabelSet.open(path).tasks)
    requested = None if operators is None else {get_operator(name).name for name in operators}
    selected = [name for name in labeled if requested is None or name in requested]
    entries = [entry for build in _ENTRY_BUILDERS[models] for entry in build(base, selected)]
    rows = compare_networks(
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
                parse_matrix_name(path),
                operator,
                matrix,
                out_dir / SEARCHES_DIR,
                n_cols=n_cols,
                max_trials=max_trials,
                prior=prior,
                progress=progress,
            )
    environment = collect_environment(device)
    command = f"sparseflow tuning eval … --models {models} --folds {folds} --seeds {seeds}"
    result = EvaluationResult(
        environment=environment,
        command=command,
        training=base.to_dict(),
        scores=compute_scores(rows),
        scores_known=compute_scores(rows, known=True),
        page=write_page(out_dir, environment=environment, reproduce=command),
    )
    record = {name: value for name, value in result.to_dict().items() if name != "page"}
    write_atomic(out_dir / SCORES_FILE, json.dumps(record) + "\n")
    return result


def write_page(
    out_dir: Path | str, *, environment: Mapping[str, Any] | None = None, reproduce: str = ""
) -> Path:
    """Write the report page of an evaluation and return its path.

    Args:
        out_dir: Directory of the evaluation.
        environment: Hardware and software, as `core.environment` collects it.
        reproduce: Command line that repeats the evaluation.

    Raises:
        InputError: The directory has no comparison.
        FileFormatError: A file is damaged.
    """
    root = Path(out_dir)
    rows = read_comparison(root)
    searches = [read_search_record(path) for path in sorted((root / SEARCHES_DIR).glob("*.json"))]
    page = build_page(root, rows, environment=environment, reproduce=reproduce)
    add_searches(page, searches)
    return page.write(root / PAGE_FILE)
