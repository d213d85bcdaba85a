"""Networks against each other: each trained without some families of matrices, and judged on those.

A study's folder holds `judged.jsonl`, a row for each network, fold and seed, and the folder of each training
under the network's name. The same call goes on with a study that was stopped.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import round_robin_device
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.model.dataset import Dataset
from sparseflow.tuning.model.net.pattern_net import PatternConfig
from sparseflow.tuning.model.net.pretrained import SHIPPED, shipped
from sparseflow.tuning.model.ranking import Judged, judge
from sparseflow.tuning.model.training import TrainConfig, train
from sparseflow.tuning.model.tree_baseline import Boosted

ROWS = "judged.jsonl"
BOOSTED = "boosted_trees"
"""Name of the baseline: gradient boosting on schedules alone, for one operator at a time."""

FULL = "AutoSparseNet_Full"
PRETRAINED = "AutoSparseNet_Pretrained"
"""Names of the networks that learn all operators."""

_PRETRAINED_STEPS, _PRETRAINED_RATE = 0.3, 1 / 3
"""Of those of a network that begins with nothing."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A network that takes part.

    Attributes:
        name: Its name, which is also its folder's.
        config: How it is trained; None for boosted trees.
        operators: What it learns and is judged on.
    """

    name: str
    config: TrainConfig | None
    operators: tuple[str, ...]


def named(base: TrainConfig, operators: Sequence[str]) -> list[Entry]:
    """AutoSparse's four networks, boosted trees, and what the shipped network becomes with such labels.

    `WACONet_<op>` reads the pattern by strided convolutions and joins it with the schedule in a perceptron;
    `AutoSparseNet_WACONet_<op>` has its extractor, in front of the transformer; `AutoSparseNet_<op>` reads it
    by hybrid dilated blocks; `AutoSparseNet_Full` is that, trained on all operators together.
    `AutoSparseNet_Pretrained` begins with the shipped network, which saw synthetic patterns alone, and learns
    for less long, by smaller steps.

    Args:
        base: What all of them share: steps, batches, widths.
        operators: Those with labels.
    """
    hdc = base.net.pattern or PatternConfig()
    strided = replace(hdc, kind="strided", pooling="concat")
    naive = replace(base.sampling, mode="naive", schedules=base.sampling.most)
    found = []
    for operator in operators:
        alone = (operator,)
        waco = replace(
            base, net=replace(base.net, pattern=strided, joined="perceptron", dropout=0.0), loss="margin",
            pick=0.0, sampling=naive,
        )  # fmt: skip
        found += [
            Entry(name=f"{BOOSTED}_{operator}", config=None, operators=alone),
            Entry(name=f"WACONet_{operator}", config=waco, operators=alone),
            Entry(
                name=f"AutoSparseNet_WACONet_{operator}",
                config=replace(base, net=replace(base.net, pattern=strided)),
                operators=alone,
            ),
            Entry(
                name=f"AutoSparseNet_{operator}",
                config=replace(base, net=replace(base.net, pattern=hdc)),
                operators=alone,
            ),
        ]
    full = replace(base, net=replace(base.net, pattern=hdc))
    begun = replace(
        base, init=SHIPPED, net=replace(shipped().config, dropout=base.net.dropout),
        steps=max(1, round(_PRETRAINED_STEPS * base.steps)), rate=_PRETRAINED_RATE * base.rate,
    )  # fmt: skip
    return [
        *found,
        *(Entry(name=f"{PRETRAINED}_{each}", config=begun, operators=(each,)) for each in operators),
        Entry(name=FULL, config=full, operators=tuple(operators)),
        Entry(name=PRETRAINED, config=begun, operators=tuple(operators)),
    ]


def ablation(base: TrainConfig, operators: Sequence[str]) -> list[Entry]:
    """Extractor (dilated, strided, none) times pooling (concatenated, last) times loss.

    And the dilated one without what the network has besides: the pick in the loss, dropout, hidden matrices.
    """
    pattern = base.net.pattern or PatternConfig()
    readers: dict[str, PatternConfig | None] = {
        f"{kind}_{pooling}": replace(pattern, kind=kind, pooling=pooling)
        for kind in ("hdc", "strided")
        for pooling in ("concat", "last")
    }
    configs = {
        f"{name}_{loss}": replace(base, net=replace(base.net, pattern=reader), loss=loss)
        for name, reader in {**readers, "none": None}.items()
        for loss in ("margin", "rank", "lambda")
    }
    whole = replace(base, net=replace(base.net, pattern=readers["hdc_concat"]))
    configs |= {
        "hdc_concat_no_pick": replace(whole, pick=0.0),
        "hdc_concat_no_dropout": replace(whole, net=replace(whole.net, dropout=0.0)),
        "hdc_concat_none_hidden": replace(whole, sampling=replace(whole.sampling, hidden=0.0)),
    }
    return [Entry(name=name, config=config, operators=tuple(operators)) for name, config in configs.items()]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A network, a fold and a seed.

    Attributes:
        entry: The network's name.
        fold: Number of the fold.
        seed: What the network was drawn from, and what it learnt from at each step.
        families: What was held out.
        judged: The tasks of these families.
    """

    entry: str
    fold: int
    seed: int
    families: tuple[str, ...]
    judged: tuple[Judged, ...]


@dataclass(frozen=True, kw_only=True)
class _Job:
    entry: Entry
    fold: int
    seed: int
    families: tuple[str, ...]
    sets: tuple[Path, ...]
    folder: Path
    device: str
    number: int


def folds_of(data: Dataset, count: int) -> list[tuple[str, ...]]:
    """Families of matrices, in so many parts with about as many schedules each.

    Those whose patterns are known are spread over the parts first.

    Raises:
        InputError: There are fewer families than parts, or fewer than two parts.
    """
    sizes: dict[str, int] = {}
    known: dict[str, bool] = {}
    for group in data.groups:
        family = group.task.family
        sizes[family] = sizes.get(family, 0) + len(group)
        known[family] = known.get(family, False) or group.task.pattern is not None
    if not 2 <= count <= len(sizes):
        raise InputError(f"`folds` (={count}) must be from 2 to the {len(sizes)} families that there are")
    parts: list[list[str]] = [[] for _ in range(count)]
    held = [(0, 0)] * count
    for family in sorted(sizes, key=lambda name: (not known[name], -sizes[name], name)):
        least = held.index(min(held))
        parts[least].append(family)
        # As many families each, and then as many schedules.
        held[least] = (held[least][0] + 1, held[least][1] + sizes[family])
    return [tuple(part) for part in parts]


def study(
    entries: Sequence[Entry],
    sets: Sequence[Path | str],
    folder: Path | str,
    *,
    folds: int = 4,
    seeds: int = 1,
    device: str = "cpu",
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Row]:
    """Train and judge every network in every fold, with every seed; gives all rows of the folder.

    Args:
        entries: The networks.
        sets: Folders of label sets.
        folder: Made when absent.
        folds: Parts that the families of matrices are held out in.
        seeds: Trainings of a network in each fold, with seeds from 0: one differs from the next by more than
            many networks do.
        device: Where to compute; `"cuda"` is every GPU in its turn.
        workers: Trainings at the same time, in processes of their own.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: Two networks share a name, the folds cannot be made, there is no seed, or the folder holds
            another study.
        FileFormatError: A line of the folder is damaged.
    """
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise InputError(f"two networks have the same name: {', '.join(sorted(names))}")
    if seeds < 1:
        raise InputError(f"`seeds` (={seeds}) must be 1 or more")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    paths = tuple(Path(path) for path in sets)
    parts = folds_of(_data(paths), folds)
    writer = JsonLinesWriter(root / ROWS)
    try:
        rows = [_read(row, root / ROWS) for row in read_json_lines(root / ROWS)]
        for row in rows:
            if row.fold >= len(parts) or row.families != parts[row.fold]:
                raise InputError(f"{root} holds a study with other folds; name another folder")
        done = {(row.entry, row.fold, row.seed) for row in rows}
        # All networks with the first seed before any with the next: a study that is stopped can be read.
        wanted = [
            (entry, fold, seed)
            for seed in range(seeds)
            for entry in entries
            for fold in range(len(parts))
            if (entry.name, fold, seed) not in done
        ]
        jobs = [
            _Job(
                entry=entry,
                fold=fold,
                seed=seed,
                families=parts[fold],
                sets=paths,
                folder=root,
                device=device,
                number=number,
            )
            for number, (entry, fold, seed) in enumerate(wanted)
        ]
        for number, (_, row) in enumerate(map_unordered(_run, jobs, workers=workers), start=1):
            rows.append(row)
            writer.write(asdict(row))
            if progress is not None:
                told = f"{row.entry}, fold {row.fold + 1} of {len(parts)}, seed {row.seed}"
                progress(told, number / len(jobs))
    finally:
        writer.close()
    return [row for row in rows if row.entry in names]


def read_study(folder: Path | str) -> list[Row]:
    """The rows of a study's folder.

    Raises:
        InputError: There is no study.
        FileFormatError: A line is damaged.
    """
    path = Path(folder) / ROWS
    if not path.is_file():
        raise InputError(f"{folder} holds no study: there is no {ROWS} in it")
    return [_read(row, path) for row in read_json_lines(path)]


def _read(row: Mapping[str, Any], path: Path) -> Row:
    try:
        judged = tuple(
            Judged(
                **{
                    **one,
                    "top_k": {int(k): score for k, score in one["top_k"].items()},
                    "random_top_k": {int(k): score for k, score in one["random_top_k"].items()},
                }
            )
            for one in row["judged"]
        )
        return Row(
            entry=row["entry"],
            fold=row["fold"],
            seed=row["seed"],
            families=tuple(row["families"]),
            judged=judged,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path}: a line is no result of a study ({error}); remove it") from error


_DATA: dict[tuple[Path, ...], Dataset] = {}
"""What this process read last: reading takes longer than some trainings."""


def _data(sets: tuple[Path, ...]) -> Dataset:
    if sets not in _DATA:
        _DATA.clear()
        _DATA[sets] = Dataset.of(map(LabelSet.open, sets))
    return _DATA[sets]


def _run(job: _Job) -> Row:
    data = _data(job.sets).only(lambda task: task.operator in job.entry.operators)
    learnt, held = data.hold_out(job.families)
    if job.entry.config is None:
        boosted = Boosted.fit(learnt.groups, data.encoder.table, seed=job.seed)
        judged = judge(held.groups, lambda group: boosted.score(group, data.encoder.table))
    else:
        if multiprocessing.parent_process() is not None:
            torch.set_num_threads(1)  # others train beside it
        place = training(job.folder, job.entry.name, job.fold, job.seed)
        config = replace(job.entry.config, seed=job.seed)
        device = round_robin_device(job.device, job.number)
        judged = train(config, learnt, place, held_out=held, device=device).judged
    return Row(entry=job.entry.name, fold=job.fold, seed=job.seed, families=job.families, judged=judged)


def training(folder: Path, name: str, fold: int, seed: int) -> Path:
    """Where a study keeps a network's training."""
    return folder / name / f"fold-{fold}-seed-{seed}"
