"""AST2.0-lite v2 against its rivals at equal kept tokens: trained alike, judged alike, and timed together.

A comparison's folder holds `accuracy.jsonl`, a row for each model and seed, and the folder of each training
under the model's name. The same call goes on with a comparison that was stopped, in mid-training, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.core.training.grid import GridCell, make_grid, run_grid
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.flops import flops
from sparseflow.pruning.compaction.saved_model import load
from sparseflow.pruning.config import Settings, settings_of
from sparseflow.pruning.evaluation.profile import timed
from sparseflow.pruning.model.config import BY_HEADS, SELECTORS
from sparseflow.pruning.training.train import MODEL, train

Progress = Callable[[str, float], None]

ROWS = "accuracy.jsonl"
DENSE, AST = "dense", "ast"
ONE_FRAME = "one frame"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model that takes part: its name, which is also its folder's, and how it is trained."""

    name: str
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model trained with a seed.

    Attributes:
        entry: Its name.
        seed: Of weights, clips and their order.
        settings: Digest of what it was trained by.
        clip_top1: Share of test clips that it got right.
        video_top1: Share of test videos.
        stats: `ast_stats` of its last step.
    """

    entry: str
    seed: int
    settings: str
    clip_top1: float
    video_top1: float
    stats: dict[str, float]


def rivals(settings: Settings) -> list[Entry]:
    """The dense model, and one for each selector, all else alike.

    Raises:
        InputError: The settings prune nothing.
    """
    if settings.mode == "dense":
        raise InputError("`mode` is dense: there are no tokens to keep that models could be compared by")
    found = [Entry(name=DENSE, settings=_changed(settings, mode="dense", latency=None))]
    for selector in SELECTORS:
        ast: dict[str, Any] = dict(settings.ast) | {"selector": selector}
        if selector in BY_HEADS:
            keep: dict[str, float] = settings.ast.get("keep", {})
            ast["keep"] = {name: share for name, share in keep.items() if name == "channel"}
        found.append(Entry(name=selector, settings=_changed(settings, ast=ast)))
    return found


def ablations(settings: Settings) -> list[Entry]:
    """AST2.0-lite v2 without one of its parts; with divergences for entropies; and clips of one frame."""
    parts: dict[str, dict[str, Any]] = {
        "no time": {"time": 0.0},
        "no space": {"space": 0.0},
        "no regions": {"region": 0.0},
        "one level": {"levels": [1]},
        "divergence": {"measure": "divergence"},
    }
    found = []
    for name, change in parts.items():
        score = dict(settings.ast.get("score", {})) | change
        ast = dict(settings.ast) | {"selector": AST, "score": score}
        found.append(Entry(name=f"{AST}, {name}", settings=_changed(settings, ast=ast)))
    if settings.data.kind == "moving_digits":
        still = settings.data.model_dump() | {"frozen": True}
        found.append(
            Entry(name=ONE_FRAME, settings=_changed(settings, mode="dense", latency=None, data=still))
        )
    return found


def _changed(settings: Settings, **changes: Any) -> Settings:
    return settings_of(settings.model_dump(mode="json") | changes)


def compare(
    entries: Sequence[Entry],
    folder: Path | str,
    *,
    seeds: int = 5,
    device: str = "cpu",
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Row]:
    """Train and judge every model with every seed; gives all rows of the entries.

    Args:
        entries: The models.
        folder: Made when absent.
        seeds: Trainings of each, with seeds from 0.
        device: Where to compute; `"cuda"` is every GPU in its turn.
        workers: Trainings at the same time, in processes of their own.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: Two entries share a name, there is no seed, or the folder holds one of them trained by
            other settings.
        FileFormatError: A line of the folder is damaged.
        RunError: A training failed.
    """
    root = Path(folder)
    digests = {entry.name: _digest(entry.settings) for entry in entries}

    def check_row(row: Mapping[str, Any]) -> None:
        read = _read(row, root / ROWS)
        if digests.get(read.entry, read.settings) != read.settings:
            raise InputError(f"{root} holds {read.entry} trained by other settings; choose another directory")

    cells = make_grid([(entry.name, entry) for entry in entries], num_seeds=seeds)
    rows = run_grid(
        partial(_run, root), cells, root / ROWS, check_row=check_row, device=device, workers=workers,
        describe=lambda row: f"{row['entry']}, seed {row['seed']}: {row['video_top1']:.1%}",
        progress=progress,
    )  # fmt: skip
    return [_read(row, root / ROWS) for row in rows]


def _digest(settings: Settings) -> str:
    """Of what changes the weights, but for the seed."""
    told = settings.model_dump(mode="json", exclude={"train": {"workers", "checkpoint_every", "seed"}})
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _run(folder: Path, cell: GridCell[Entry], device: str) -> dict[str, Any]:
    settings = cell.config.settings
    seeded = _changed(settings, train=settings.train.model_dump() | {"seed": cell.seed})
    trained = train(seeded, training(folder, cell.name, cell.seed), device=device)
    assert trained.accuracy is not None
    return {
        "settings": _digest(settings),
        "clip_top1": trained.accuracy.clip_top1,
        "video_top1": trained.accuracy.video_top1,
        "stats": dict(trained.stats),
    }


def training(folder: Path, name: str, seed: int) -> Path:
    """Where a comparison keeps a model's training."""
    return folder / name.replace(", ", "-").replace(" ", "-") / f"seed-{seed}"


def _read(row: Mapping[str, Any], path: Path) -> Row:
    try:
        return Row(**row)
    except TypeError as error:
        raise FileFormatError(f"{path}: a line is no result of a comparison ({error}); remove it") from error


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each model: accuracy on videos, and how much above the dense model and AST it is.

    Differences are those of the same seed; intervals are 95 % bootstrap intervals of the mean over seeds.
    """
    found = []
    of = {(row.entry, row.seed): row.video_top1 for row in rows}
    for name in dict.fromkeys(row.entry for row in rows):
        mine = {seed: value for (entry, seed), value in of.items() if entry == name}
        line: dict[str, Any] = {
            "model": name,
            "seeds": len(mine),
            **_interval(list(mine.values()), "accuracy"),
        }
        for base in (DENSE, AST):
            gains = [value - of[base, seed] for seed, value in mine.items() if (base, seed) in of]
            line |= _interval(gains, f"over_{base}") if gains else {}
        found.append(line)
    return found


def _interval(values: Sequence[float], name: str) -> dict[str, float]:
    low, high = bootstrap_mean(values)
    return {name: mean(values), f"{name}_low": low, f"{name}_high": high}


def latencies(
    entries: Sequence[Entry],
    folder: Path | str,
    *,
    batch: int = 8,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    rounds: int = 20,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Time the compact models of the first seed in turns: a line for each, with operations a clip."""
    root = Path(folder)
    models = {entry.name: compact(load(training(root, entry.name, 0) / MODEL)) for entry in entries}
    if DENSE not in models:
        raise InputError("without the dense model there is nothing that the others could be timed against")
    found = timed(
        models, baseline=DENSE, batch=batch, device=device, dtype=dtype, compiled=compiled, rounds=rounds,
        progress=progress,
    )  # fmt: skip
    return [
        {
            "model": name,
            "gflops": flops(model)["total"] / 1e9,
            "latency_ms": found.samples(name).median_ms / batch,
            "speedup": found.speedup(name).median,
            "speedup_low": found.speedup(name).low,
            "speedup_high": found.speedup(name).high,
            "times_ms": list(found.times_ms[name]),
        }
        for name, model in models.items()
    ]


def write_results(
    folder: Path | str,
    rows: Sequence[Row],
    times: Sequence[Mapping[str, Any]],
    *,
    settings: Settings,
    device: str,
    command: str,
) -> dict[str, Any]:
    """Write `comparison.json` into a comparison's folder; gives what it holds."""
    told = {
        "environment": collect_environment(device),
        "command": command,
        "settings": settings.model_dump(mode="json"),
        "models": summary(rows),
        "latency": [dict(line) for line in times],
        "rows": [asdict(row) for row in rows],
    }
    write_atomic(Path(folder) / "comparison.json", json.dumps(told) + "\n")
    return told
