"""Evaluation of cost models: cross-validated scores, search comparisons and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from sparseflow.core.checks import check_one_of
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import read_json, write_json
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.core.progress import Progress
from sparseflow.core.report import Page, plot_intervals
from sparseflow.core.training.history import read_history, smooth_curve
from sparseflow.errors import FileFormatError
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.model.comparison import (
    BOOSTED,
    ROWS_FILE,
    ComparisonRow,
    build_ablation_entries,
    build_named_entries,
    compare_networks,
    read_comparison,
)
from sparseflow.tuning.model.net.pretrained import load_prior
from sparseflow.tuning.model.ranking import TOP_K, summarize_scores
from sparseflow.tuning.model.training import TrainConfig
from sparseflow.tuning.model.training_log import TrainingRecord, read_training_log
from sparseflow.tuning.schedule.matrix_files import parse_matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.search.comparison import SearchRecord, add_searches, compare_searches

PAGE_FILE = "report.html"
SCORES_FILE = "scores.json"
SEARCHES_DIR = "searches"

Suite = Literal["named", "ablation", "both"]
Curve = tuple[list[float], list[float]]

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
        command: Command line that repeats the evaluation; may be empty.
        training: Settings shared by all trainings.
        scores: One record for each model and operator; see `compute_scores`.
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
    suite: Suite = "named",
    models: Sequence[str] | None = None,
    operators: Sequence[str] | None = None,
    folds: int = 4,
    seeds: int = 1,
    device: str = "cpu",
    workers: int = 1,
    matrices: Sequence[Path] = (),
    workloads: Sequence[tuple[str, int | None]] = (),
    max_trials: int = 100,
    net: Path | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Cross-validate cost models over matrix families, compare searches, and write the report.

    Args:
        base: Settings shared by all trainings.
        label_sets: Directories of label sets.
        out_dir: Output directory; an existing evaluation is resumed.
        suite: `"named"` for AutoSparse's networks and boosted trees, `"ablation"`, or both.
        models: Names of the models of the suite to evaluate; by default all.
        operators: Operators to learn; by default all with labels.
        folds: Number of folds over matrix families.
        seeds: Trainings of each network in each fold.
        device: Device of the trainings.
        workers: Parallel trainings.
        matrices: Matrix Market files to search schedules for, with and without a model.
        workloads: Operators and columns to search on each matrix.
        max_trials: Schedules that each search measures.
        net: Network that guided searches start from; by default the shipped one.
        command: Command line of this evaluation, for the report.
        progress: Progress callback.

    Raises:
        InputError: An argument is out of range, or `out_dir` has another evaluation.
        FileFormatError: A label set or a file of `out_dir` is damaged.
    """
    labeled = dict.fromkeys(task.operator for path in label_sets for task in LabelSet.open(path).tasks)
    requested = None if operators is None else {get_operator(name).name for name in operators}
    selected = [name for name in labeled if requested is None or name in requested]
    # Read before the trainings, which take long.
    named_matrices = [(parse_matrix_name(path), read_matrix(path)) for path in matrices]
    entries = [entry for build in _ENTRY_BUILDERS[suite] for entry in build(base, selected)]
    if models is not None:
        names = [entry.name for entry in entries]
        for name in models:
            check_one_of(names, models=name)
        entries = [entry for entry in entries if entry.name in models]
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
    for name, matrix in named_matrices:
        for operator, n_cols in workloads:
            compare_searches(
                name,
                operator,
                matrix,
                out_dir / SEARCHES_DIR,
                n_cols=n_cols,
                max_trials=max_trials,
                prior=prior,
                progress=progress,
            )
    record = {
        "environment": collect_environment(device),
        "command": command,
        "training": base.model_dump(mode="json"),
        "scores": compute_scores(rows),
        "scores_known": compute_scores(rows, known=True),
    }
    write_json(out_dir / SCORES_FILE, record)
    return EvaluationResult(**record, page=write_page(out_dir))


def compute_scores(rows: Sequence[ComparisonRow], *, known: bool = False) -> list[dict[str, Any]]:
    """Summarize each model and operator over all folds and seeds; see `ranking.summarize_scores`.

    `"over_boosted"` has, for each k, the gain of the top-k score over boosted trees: the difference of the
    means over seeds for each matrix, then the mean over matrices and its bootstrap interval. It is None
    without boosted trees.

    Args:
        rows: Rows of a comparison.
        known: Whether to use only matrices with a known pattern.
    """
    records = []
    tree_means: dict[str, dict[str, dict[int, float]]] = {}
    entries = dict.fromkeys(row.entry for row in rows)
    for entry in sorted(entries, key=lambda name: not name.startswith(BOOSTED)):
        scores = [
            score
            for row in rows
            if row.entry == entry
            for score in row.scores
            if score.pattern_known or not known
        ]
        for operator in dict.fromkeys(score.operator for score in scores):
            operator_scores = [score for score in scores if score.operator == operator]
            means = {
                matrix: {
                    k: mean(score.top_k[k] for score in operator_scores if score.matrix == matrix)
                    for k in TOP_K
                }
                for matrix in dict.fromkeys(score.matrix for score in operator_scores)
            }
            if entry == f"{BOOSTED}_{operator}":
                tree_means[operator] = means
            gain = None
            if tree_means.get(operator, {}).keys() >= means.keys():
                gains = {k: [means[name][k] - tree_means[operator][name][k] for name in means] for k in TOP_K}
                bounds = {k: bootstrap_mean(gains[k]) for k in TOP_K}
                gain = {
                    f"top{k}": {"mean": mean(gains[k]), "low": bounds[k][0], "high": bounds[k][1]}
                    for k in TOP_K
                }
            summary = summarize_scores(operator_scores)
            records.append({"model": entry, "operator": operator, **summary, "over_boosted": gain})
    return records


def write_page(out_dir: Path | str) -> Path:
    """Write the report page of an evaluation, or of trainings without one, and return its path.

    The environment and the command are those of its scores; an interrupted evaluation has none yet.

    Args:
        out_dir: Directory of an evaluation, of a training, or of several trainings.

    Raises:
        InputError: The directory has neither a comparison nor a finished training.
        FileFormatError: A file is damaged.
    """
    root = Path(out_dir)
    trainings = read_training_log(root)
    # Without trainings, the error of a missing comparison is raised.
    rows = read_comparison(root) if (root / ROWS_FILE).is_file() or not trainings else []
    environment, command = _read_circumstances(root / SCORES_FILE)
    searches = [SearchRecord.load(path) for path in sorted((root / SEARCHES_DIR).glob("*.json"))]
    page = Page(
        "AutoSparse Net: ranking quality and search time",
        f"{len({row.entry for row in rows})} models, evaluated on families of matrices that they were not "
        "trained on."
        if rows
        else f"{len(trainings)} trainings.",
        environment=environment,
        reproduce=command,
    )
    if rows:
        _add_rankings(page, rows)
    if trainings:
        _add_trainings(page, trainings)
    add_searches(page, searches)
    return page.write(root / PAGE_FILE)


def _read_circumstances(path: Path) -> tuple[Mapping[str, Any], str]:
    """Read the environment and the command of an evaluation; both are empty if it is not finished."""
    record = read_json(path) if path.exists() else {"environment": {}, "command": ""}
    if isinstance(record, dict):
        environment, command = record.get("environment"), record.get("command")
        if isinstance(environment, dict) and isinstance(command, str):
            return environment, command
    raise FileFormatError(
        f"{path} has no environment or command; evaluate again with `sparseflow tuning eval`"
    )


def _add_rankings(page: Page, rows: Sequence[ComparisonRow]) -> None:
    records = compute_scores(rows)
    num_seeds = len({row.seed for row in rows})
    seeds = "" if num_seeds == 1 else f" Scores are means over {num_seeds} trainings of each network."
    page.section(
        "Rankings of held-out matrices",
        "A model ranks all labeled schedules of a task, its pool. The top-k score is the best latency of the "
        "pool over the best latency among the k schedules that are ranked highest; 1 is optimal. The table "
        "also shows the expected score of a random pick of k schedules from the same pool." + seeds,
    )
    for k in TOP_K[:2]:
        page.figure(
            plot_intervals(
                f"Top-{k} score",
                [f"{record['model']}, {record['operator']}" for record in records],
                [record[f"top{k}"]["mean"] for record in records],
                [record[f"top{k}"]["low"] for record in records],
                [record[f"top{k}"]["high"] for record in records],
                unit=f"best latency of the pool / best among the {k} ranked highest",
                caption="Mean over tasks, with 95 % bootstrap intervals over matrices.",
            )
        )
    _add_table(page, "Scores", records)
    _add_table(page, "Scores on matrices with a known pattern", compute_scores(rows, known=True))


def _add_table(page: Page, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    columns = {
        "model": "model",
        "operator": "operator",
        "matrices": "matrices",
        "pool": "schedules in a pool",
    }
    bounds = {"mean": "", "low": ", low", "high": ", high"}
    for k in TOP_K:
        for part, suffix in (bounds | {"random": ", random pick"}).items():
            columns[f"top{k}_{part}"] = f"top-{k}{suffix}"
    for k in TOP_K:
        for part, suffix in bounds.items():
            columns[f"gain{k}_{part}"] = f"top-{k} gain over boosted trees{suffix}"
    columns["pairs"] = "pairs in order"
    rows = []
    for record in records:
        row = {key: record[key] for key in ("model", "operator", "matrices", "pool")}
        for k in TOP_K:
            row |= {f"top{k}_{part}": value for part, value in record[f"top{k}"].items()}
            gain = record["over_boosted"]
            row |= {f"gain{k}_{part}": gain and gain[f"top{k}"][part] for part in bounds}
        rows.append(row | {"pairs": record["pair_accuracy"]["mean"]})
    digits = dict.fromkeys(columns, 3) | {"pool": 0}
    page.table(title, rows, columns=columns, digits=digits)


def _add_trainings(page: Page, trainings: Sequence[tuple[Path, TrainingRecord]]) -> None:
    """Add the mean loss curves of each model over its trainings, and the log of all trainings."""
    page.section("Trainings")
    histories = [(record.model, list(read_history(train_dir))) for train_dir, record in trainings]
    for kind, title in {"train": "Training loss", "held_out": "Loss on held-out matrices"}.items():
        curves: dict[str, list[Curve]] = {}
        for model, history in histories:
            curve = smooth_curve((row for row in history if row.get("kind") == kind), "loss")
            curves.setdefault(model, []).append(curve)
        page.curves(
            title,
            {model: _average_curves(model_curves) for model, model_curves in curves.items()},
            x="step",
            y="loss",
            caption="Mean over the trainings of a model: all folds and seeds. Margin, rank and LambdaRank "
            "losses have different scales.",
        )
    columns = {
        "date": "date",
        "model": "model",
        "structure": "structure",
        "dataset": "data set",
        "steps": "steps",
        "train_loss": "training loss",
        "validation_loss": "validation loss",
        "top1": "top-1",
        "top5": "top-5",
        "remarks": "remarks",
    }
    rows = [vars(record) | {"date": f"{record.date:%Y-%m-%d %H:%M}"} for _, record in trainings]
    page.table("Training log", rows, columns=columns, digits=3)


def _average_curves(curves: Sequence[Curve]) -> Curve:
    """Average curves at the steps that all of them have."""
    values: dict[float, list[float]] = {}
    for xs, ys in curves:
        for x, y in zip(xs, ys, strict=True):
            values.setdefault(x, []).append(y)
    steps = sorted(x for x, ys in values.items() if len(ys) == len(curves))
    return steps, [mean(values[x]) for x in steps]
