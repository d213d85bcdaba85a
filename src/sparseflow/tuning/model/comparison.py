"""Comparison of networks by cross-validation over families of matrices.

A comparison's directory has `scores.jsonl`, one row for each network, fold and seed, and the directories of
the trainings. The same call resumes an interrupted comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from sparseflow.core.checks import check_between
from sparseflow.core.config import StrictModel, describe_validation_error
from sparseflow.core.journal import read_journal
from sparseflow.core.progress import Progress
from sparseflow.core.training.grid import GridCell, make_grid, run_grid
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.model.dataset import RankingDataset
from sparseflow.tuning.model.net.pattern_net import PatternConfig
from sparseflow.tuning.model.net.pretrained import SHIPPED, load_shipped_network
from sparseflow.tuning.model.ranking import RankingScore, evaluate_ranking, make_network_scorer
from sparseflow.tuning.model.training import TrainConfig, train
from sparseflow.tuning.model.tree_baseline import TreeBaseline

Config = TypeVar("Config", bound=StrictModel)

ROWS_FILE = "scores.jsonl"
BOOSTED = "boosted_trees"
"""Name prefix of the baseline: gradient boosting on the schedules of one operator."""

FULL = "AutoSparseNet_Full"
PRETRAINED = "AutoSparseNet_Pretrained"
"""Names of the networks that are trained on all operators."""

ENSEMBLE = "AutoSparseNet_Ensemble"
"""Name prefix of a fine-tuned network together with boosted trees, for one operator."""

_PRETRAINED_STEPS, _PRETRAINED_RATE = 0.3, 1 / 3
"""Steps and learning rate relative to a network with random initial weights."""


@dataclass(frozen=True, kw_only=True)
class NetworkEntry:
    """A network of a comparison.

    Attributes:
        name: Name, also of its directory.
        config: Training configuration; None for boosted trees.
        operators: Operators to train and evaluate on.
        with_trees: Whether schedules are ranked by the mean of their ranks by the network and by boosted
            trees. The errors of the two differ.
    """

    name: str
    config: TrainConfig | None
    operators: tuple[str, ...]
    with_trees: bool = False


def build_named_entries(base: TrainConfig, operators: Sequence[str]) -> list[NetworkEntry]:
    """Build AutoSparse's four networks, boosted trees and fine-tuned versions of the shipped network.

    `WACONet_<op>` reads the pattern with strided convolutions and combines it with the schedule in an MLP.
    `AutoSparseNet_WACONet_<op>` uses the same pattern branch with the transformer. `AutoSparseNet_<op>` reads
    the pattern with hybrid dilated convolutions. `AutoSparseNet_Full` is trained on all operators together.
    `AutoSparseNet_Pretrained` starts from the shipped network, which was trained on synthetic patterns only,
    with fewer steps and a lower learning rate. `AutoSparseNet_Ensemble_<op>` is that network for one operator
    together with boosted trees.

    Args:
        base: Shared configuration.
        operators: Operators with labels.
    """
    hdc = base.net.pattern or PatternConfig()
    waco = _change(hdc, kind="strided", pooling="concat")
    naive = _change(base.sampling, mode="naive", schedules=base.sampling.max_schedules)
    configs = {
        BOOSTED: None,
        "WACONet": _change(
            _change_net(base, pattern=waco, context_mode="mlp", dropout=0.0),
            loss="margin", pick_weight=0.0, sampling=naive,
        ),
        "AutoSparseNet_WACONet": _change_net(base, pattern=waco),
        "AutoSparseNet": _change_net(base, pattern=hdc),
    }  # fmt: skip
    pretrained = _change(
        base, init=SHIPPED, net=_change(load_shipped_network().config, dropout=base.net.dropout),
        steps=max(1, round(_PRETRAINED_STEPS * base.steps)),
        learning_rate=_PRETRAINED_RATE * base.learning_rate,
    )  # fmt: skip
    named = [
        (f"{name}_{operator}", config, (operator,))
        for operator in operators
        for name, config in configs.items()
    ]
    named += [(f"{PRETRAINED}_{operator}", pretrained, (operator,)) for operator in operators]
    named += [
        (FULL, configs["AutoSparseNet"], tuple(operators)), (PRETRAINED, pretrained, tuple(operators))
    ]  # fmt: skip
    entries = [NetworkEntry(name=name, config=config, operators=trained) for name, config, trained in named]
    return entries + [
        NetworkEntry(name=f"{ENSEMBLE}_{name}", config=pretrained, operators=(name,), with_trees=True)
        for name in operators
    ]


def build_ablation_entries(base: TrainConfig, operators: Sequence[str]) -> list[NetworkEntry]:
    """Build all combinations of pattern branch (dilated, strided, none), pooling and loss.

    The dilated branch is also trained without the pick term of the loss, without dropout, without hidden
    matrices, and with the other uses of the context by a transformer.
    """
    pattern = base.net.pattern or PatternConfig()
    patterns = {
        f"{kind}_{pooling}": _change(pattern, kind=kind, pooling=pooling)
        for kind in ("hdc", "strided")
        for pooling in ("concat", "last")
    }
    configs = {
        f"{name}_{loss}": _change(_change_net(base, pattern=pattern_config), loss=loss)
        for name, pattern_config in {**patterns, "none": None}.items()
        for loss in ("margin", "rank", "lambda")
    }
    full = _change_net(base, pattern=patterns["hdc_concat"])
    configs |= {
        "hdc_concat_no_pick": _change(full, pick_weight=0.0),
        "hdc_concat_no_dropout": _change_net(full, dropout=0.0),
        "hdc_concat_context_concat": _change_net(full, context_mode="concat", layers=max(2, full.net.layers)),
        "hdc_concat_context_cross": _change_net(full, context_mode="cross"),
        "hdc_concat_none_hidden": _change(full, sampling=_change(full.sampling, hidden_fraction=0.0)),
    }
    return [
        NetworkEntry(name=name, config=config, operators=tuple(operators)) for name, config in configs.items()
    ]


def _change(config: Config, **fields: Any) -> Config:
    return config.model_copy(update=fields)


def _change_net(config: TrainConfig, **fields: Any) -> TrainConfig:
    return _change(config, net=_change(config.net, **fields))


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Scores of one network in one fold with one seed.

    Attributes:
        entry: Network name.
        fold: Fold.
        seed: Random seed of the training.
        families: Held-out families.
        scores: Scores of the tasks of these families.
    """

    entry: str
    fold: int
    seed: int
    families: tuple[str, ...]
    scores: tuple[RankingScore, ...]


def assign_folds(data: RankingDataset, count: int) -> list[tuple[str, ...]]:
    """Distribute families of matrices over folds with similar numbers of schedules.

    Families with known patterns are distributed first.

    Raises:
        InputError: There are fewer families than folds, or fewer than two folds.
    """
    sizes: dict[str, int] = {}
    known: dict[str, bool] = {}
    for group in data.groups:
        family = group.task.family
        sizes[family] = sizes.get(family, 0) + len(group)
        known[family] = known.get(family, False) or group.task.pattern is not None
    check_between(2, len(sizes), folds=count)
    folds: list[list[str]] = [[] for _ in range(count)]
    fold_sizes = [(0, 0)] * count
    for family in sorted(sizes, key=lambda name: (not known[name], -sizes[name], name)):
        smallest = fold_sizes.index(min(fold_sizes))
        folds[smallest].append(family)
        # Balance the number of families first, then the number of schedules.
        fold_sizes[smallest] = (fold_sizes[smallest][0] + 1, fold_sizes[smallest][1] + sizes[family])
    return [tuple(part) for part in folds]


def compare_networks(
    entries: Sequence[NetworkEntry],
    label_sets: Sequence[Path | str],
    out_dir: Path | str,
    *,
    folds: int = 4,
    seeds: int = 1,
    device: str = "cpu",
    workers: int = 1,
    progress: Progress | None = None,
) -> list[ComparisonRow]:
    """Train and evaluate every network in every fold and with every seed.

    Args:
        entries: Networks.
        label_sets: Directories of label sets.
        out_dir: Output directory; an existing comparison is resumed.
        folds: Folds over the families of matrices.
        seeds: Trainings of each network in each fold, with seeds from 0. Seeds differ by more than many
            networks do.
        device: Device; `"cuda"` cycles through all GPUs.
        workers: Parallel trainings, each in its own process.
        progress: Progress callback.

    Raises:
        InputError: Two networks have the same name, the folds cannot be built, `seeds` is below 1, or
            `out_dir` has another comparison.
        FileFormatError: A line of the results is damaged.
    """
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    paths = tuple(Path(path) for path in label_sets)
    cells = make_grid([(entry.name, entry) for entry in entries], num_seeds=seeds, num_folds=folds)
    fold_families = assign_folds(_load_data(paths), folds)
    path = root / ROWS_FILE

    def check_row(record: Mapping[str, Any]) -> None:
        row = _parse_row(record, path)
        if row.fold >= len(fold_families) or row.families != fold_families[row.fold]:
            raise InputError(f"{root} has a comparison with other folds; choose another directory")

    train_cell = partial(_train_cell, root, paths, fold_families)
    records = run_grid(
        train_cell, cells, path, check_row=check_row, device=device, workers=workers, progress=progress
    )
    return [_parse_row(record, path) for record in records]


def read_comparison(out_dir: Path | str) -> list[ComparisonRow]:
    """Read the rows of a comparison.

    Raises:
        InputError: The directory has no comparison.
        FileFormatError: A line is damaged.
    """
    path = Path(out_dir) / ROWS_FILE
    if not path.is_file():
        raise InputError(f"{out_dir} has no comparison: {ROWS_FILE} is missing")
    return [_parse_row(record, path) for record in read_journal(path, dict)[1]]


def _parse_row(record: Mapping[str, Any], path: Path) -> ComparisonRow:
    try:
        return TypeAdapter(ComparisonRow).validate_python(record)
    except ValidationError as error:
        raise FileFormatError(
            f"{path}: a line is not a result of a comparison ({describe_validation_error(error)}); remove it"
        ) from error


_DATA_CACHE: dict[tuple[Path, ...], RankingDataset] = {}
"""Last data of this process; reading takes longer than some trainings."""


def _load_data(label_sets: tuple[Path, ...]) -> RankingDataset:
    if label_sets not in _DATA_CACHE:
        _DATA_CACHE.clear()
        _DATA_CACHE[label_sets] = RankingDataset.from_label_sets(map(LabelSet.open, label_sets))
    return _DATA_CACHE[label_sets]


def _train_cell(
    out_dir: Path,
    label_sets: tuple[Path, ...],
    fold_families: Sequence[tuple[str, ...]],
    cell: GridCell[NetworkEntry],
    device: str,
) -> dict[str, Any]:
    """Train and evaluate one network without the families of its fold."""
    entry, families = cell.config, fold_families[cell.fold]
    data = _load_data(label_sets).filter(lambda task: task.operator in entry.operators)
    train_data, held_out = data.hold_out(families)
    trees = None
    if entry.config is None or entry.with_trees:
        trees = TreeBaseline.fit(train_data.groups, data.encoder.table, seed=cell.seed)
    scorer = None if trees is None else partial(trees.score, table=data.encoder.table)
    if entry.config is None:
        assert scorer is not None
        scores = evaluate_ranking(held_out.groups, scorer)
    else:
        config = _change(entry.config, seed=cell.seed)
        result = train(
            config,
            train_data,
            out_dir / entry.name / f"fold-{cell.fold}-seed-{cell.seed}",
            held_out=held_out,
            device=device,
            name=entry.name,
            remarks=f"fold {cell.fold + 1} of {len(fold_families)}, seed {cell.seed}",
        )
        scores = result.scores
        if scorer is not None:
            network = make_network_scorer(result.net, held_out)
            scores = evaluate_ranking(
                held_out.groups, lambda group: _rank(network(group)) + _rank(scorer(group))
            )
    return {"families": families, "scores": [asdict(score) for score in scores]}


def _rank(scores: np.ndarray) -> np.ndarray:
    """Rank of each score from 0, int64, shape [n]."""
    return scores.argsort(kind="stable").argsort(kind="stable")
