"""Comparison of AST2.0-lite v2 with baseline token selectors at equal numbers of kept tokens.

All models are trained and evaluated alike, and timed together. A name is a selector, with the share of kept
tokens if there are several, such as `"ast 0.3"`. The output directory has `accuracy.jsonl`, one row for each
model and seed, and the directory of each training under the name of the model. The same call resumes an
interrupted comparison, also in the middle of a training.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from sparseflow.core.checks import check_between
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_json
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.core.progress import Progress
from sparseflow.core.report import Page, plot_curves, plot_intervals
from sparseflow.core.training.grid import GridCell, make_grid, run_grid
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.compaction.saved_model import load_model
from sparseflow.pruning.config import PruningConfig, parse_config
from sparseflow.pruning.data.datasets import load_video_dataset
from sparseflow.pruning.evaluation.accuracy import VideoAccuracy, evaluate_accuracy
from sparseflow.pruning.evaluation.profile import compare_latency
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS, ASTConfig
from sparseflow.pruning.training.page import PAGE_FILE
from sparseflow.pruning.training.task import AMP_DTYPES, MODEL_FILE
from sparseflow.pruning.training.train import train

ROWS_FILE = "accuracy.jsonl"
RESULTS_FILE = "comparison.json"
DENSE, AST = "dense", "ast"
ONE_FRAME = "one frame"
GRADUAL_TOME = "tome_gradual"
"""Name of ToMe that merges tokens before every block, as published, instead of at the stages."""
TRAINING_FREE = ", training-free"
"""End of the name of a selector with the weights of the dense model."""

_NAME = re.compile(r"(.+?)( [\d.]+)?(, .*)?")


@dataclass(frozen=True, kw_only=True)
class SelectorRow:
    """Result of one model with one seed.

    Attributes:
        entry: Name of the model.
        seed: Random seed of weights and clips.
        settings: Digest of the configuration.
        clip_top1: Top-1 accuracy over test clips.
        video_top1: Top-1 accuracy over test videos.
        stats: `ast_stats` of the last step.
    """

    entry: str
    seed: int
    settings: str
    clip_top1: float
    video_top1: float
    stats: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AccuracySummary:
    """Accuracy of a model over seeds, with 95 % bootstrap intervals of the mean.

    Differences are paired by seed; they are None without the other model.

    Attributes:
        model: Name of the model.
        seeds: Number of seeds.
        accuracy: Mean top-1 accuracy over test videos.
        over_dense: Mean difference to the dense model.
        over_ast: Mean difference to AST with the same share of tokens.
    """

    model: str
    seeds: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    over_dense: float | None = None
    over_dense_low: float | None = None
    over_dense_high: float | None = None
    over_ast: float | None = None
    over_ast_low: float | None = None
    over_ast_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """Latency of a compact model.

    Attributes:
        model: Name of the model.
        gflops: GFLOP per clip.
        latency_ms: Median latency per clip.
        speedup: Median speedup over the dense model.
        speedup_low: Lower end of its interval.
        speedup_high: Upper end of its interval.
        times_ms: Latency of each timed call.
    """

    model: str
    gflops: float
    latency_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    times_ms: list[float]


def list_selector_models(config: PruningConfig, shares: Sequence[float] = ()) -> dict[str, PruningConfig]:
    """List the configurations, by name, of the dense model and of models for each selector.

    ToMe is listed twice: with the stages of the other selectors, and merging before every block.

    Args:
        config: Configuration that all models share.
        shares: Shares of tokens after the last stage; by default that of the configuration.

    Raises:
        InputError: The configuration does not prune.
    """
    if config.mode == "dense":
        raise InputError("`mode` (='dense') keeps all tokens; a comparison needs a mode that prunes")
    models = {DENSE: _update_config(config, mode="dense", latency=None)}
    for selector in SELECTORS:
        keep = config.ast.keep
        if selector in ATTENTION_SELECTORS:
            keep = {grain: share for grain, share in keep.items() if grain == "channel"}
        softness = config.ast.softness
        if selector == "dynamic_vit":  # learns through soft masks
            softness = softness or ASTConfig().softness
        ast = replace(config.ast, selector=selector, keep=keep, softness=softness)
        for share in shares or (None,):
            end, shared = ("", ast) if share is None else (f" {share:g}", _set_share(ast, share))
            models[f"{selector}{end}"] = _update_config(config, ast=shared)
            if selector == "tome" and shared.stages:
                gradual = _spread_stages(shared, config.model.depth)
                models[f"{GRADUAL_TOME}{end}"] = _update_config(config, ast=gradual)
    return models


def _spread_stages(ast: ASTConfig, depth: int) -> ASTConfig:
    """Reach the last share in equal ratios before every block from the first stage on."""
    first, last_share = min(ast.stages), ast.stages[max(ast.stages)]
    blocks = range(first, depth)
    stages = {block: last_share ** (index / len(blocks)) for index, block in enumerate(blocks, start=1)}
    return replace(ast, stages=stages)


def _set_share(ast: ASTConfig, share: float) -> ASTConfig:
    """Scale the stages, so that the last one has a share."""
    if not ast.stages:
        raise InputError("the configuration has no stages whose shares of tokens can change")
    check_between(1e-6, 1.0, share=share)
    if ast.stages[max(ast.stages)] == 1.0:
        raise InputError("the last stage keeps all tokens; its share must be below 1")
    return ast.scale_stages(share)


def list_ablations(config: PruningConfig, share: float | None = None) -> dict[str, PruningConfig]:
    """List AST without each of its parts, AST with entropies, and the dense model on one frame.

    Args:
        config: Configuration that all models share.
        share: Share of tokens after the last stage; by default that of the configuration.
    """
    score_changes: dict[str, dict[str, Any]] = {
        "no time": {"time": 0.0},
        "no space": {"space": 0.0},
        "no regions": {"region": 0.0},
        "one level": {"levels": (1,)},
        "entropy": {"measure": "entropy"},
    }
    models = {}
    base, end = (config.ast, "") if share is None else (_set_share(config.ast, share), f" {share:g}")
    for name, change in score_changes.items():
        ast = replace(base, selector=AST, score=replace(base.score, **change))
        models[f"{AST}{end}, {name}"] = _update_config(config, ast=ast)
    if config.data.kind == "moving_digits":
        frozen = config.data.model_copy(update={"frozen": True})
        models[ONE_FRAME] = _update_config(config, mode="dense", latency=None, data=frozen)
    return models


def _update_config(config: PruningConfig, **changes: Any) -> PruningConfig:
    return parse_config(config.model_copy(update=changes).model_dump(mode="json"))


def train_models(
    models: Mapping[str, PruningConfig],
    out_dir: Path | str,
    *,
    num_seeds: int = 5,
    device: str = "cpu",
    workers: int = 1,
    training_free: bool = False,
    progress: Progress | None = None,
) -> list[SelectorRow]:
    """Train and evaluate every model with every seed.

    Args:
        models: Name of each model, which is also that of its directory -> configuration.
        out_dir: Output directory, created if absent; an existing comparison is resumed.
        num_seeds: Trainings of each model, with seeds from 0.
        device: Device; `"cuda"` cycles through all GPUs.
        workers: Parallel trainings, each in its own process.
        training_free: Do not train, but evaluate the selectors with the weights of the dense models, which an
            earlier call trained. Selectors that learn are left out.
        progress: Called after each training.

    Raises:
        InputError: There is no seed, or the directory has results of another configuration.
        FileFormatError: A row of the directory is damaged.
        RunError: A training failed.
    """
    run_cell = _train_model
    if training_free:
        run_cell = _evaluate_dense_weights
        models = {
            f"{name}{TRAINING_FREE}": config
            for name, config in models.items()
            if config.mode != "dense" and config.ast.selector != "dynamic_vit" and "," not in name
        }
    root = Path(out_dir)
    digests = {name: _digest_config(config) for name, config in models.items()}

    def check_row(record: Mapping[str, Any]) -> None:
        row = _parse_row(record, root / ROWS_FILE)
        if digests.get(row.entry, row.settings) != row.settings:
            raise InputError(
                f"{root} has results of {row.entry} with another configuration; choose another directory"
            )

    rows = run_grid(
        partial(run_cell, root), make_grid(models.items(), num_seeds=num_seeds), root / ROWS_FILE,
        check_row=check_row, device=device, workers=workers,
        describe=lambda row: f"{row['entry']}, seed {row['seed']}: {row['video_top1']:.1%}",
        progress=progress,
    )  # fmt: skip
    return [_parse_row(row, root / ROWS_FILE) for row in rows]


def _digest_config(config: PruningConfig) -> str:
    """Digest of the settings that determine the weights, without the seed."""
    settings = config.model_dump(mode="json", exclude={"train": {"workers", "checkpoint_every", "seed"}})
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _train_model(root: Path, cell: GridCell[PruningConfig], device: str) -> dict[str, Any]:
    config = _set_seed(cell.config, cell.seed)
    result = train(config, get_training_dir(root, cell.name, cell.seed), device=device)
    assert result.accuracy is not None
    return _make_row(cell, result.accuracy, result.stats)


def _evaluate_dense_weights(root: Path, cell: GridCell[PruningConfig], device: str) -> dict[str, Any]:
    config = _set_seed(cell.config, cell.seed)
    dense = load_model(get_training_dir(root, DENSE, cell.seed) / MODEL_FILE)
    data = load_video_dataset(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell.seed)  # for the order of the random selector
        model = config.build_model(len(data.classes), data.num_channels)
    model.load_state_dict(model.state_dict() | dense.state_dict())
    accuracy = evaluate_accuracy(
        model.to(device).eval(), data.test, batch_size=config.train.batch_size, workers=config.train.workers,
        device=torch.device(device), amp=AMP_DTYPES[config.train.amp],
    )  # fmt: skip
    return _make_row(cell, accuracy, {})


def _set_seed(config: PruningConfig, seed: int) -> PruningConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})


def _make_row(
    cell: GridCell[PruningConfig], accuracy: VideoAccuracy, stats: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "settings": _digest_config(cell.config),
        "clip_top1": accuracy.clip_top1,
        "video_top1": accuracy.video_top1,
        "stats": dict(stats),
    }


def get_training_dir(root: Path, name: str, seed: int) -> Path:
    """Directory of a training in the directory of a comparison."""
    return root / name.replace(", ", "-").replace(" ", "-") / f"seed-{seed}"


def _parse_row(record: Mapping[str, Any], path: Path) -> SelectorRow:
    try:
        return SelectorRow(**record)
    except TypeError as error:
        raise FileFormatError(
            f"{path}: a line is not a result of a comparison ({error}); remove it"
        ) from error


def summarize_accuracy(rows: Sequence[SelectorRow]) -> list[AccuracySummary]:
    """Summarize the accuracy of each model over its seeds."""
    accuracies = {(row.entry, row.seed): row.video_top1 for row in rows}
    summaries = []
    for name in dict.fromkeys(row.entry for row in rows):
        by_seed = {seed: accuracy for (entry, seed), accuracy in accuracies.items() if entry == name}
        fields = _summarize(list(by_seed.values()), "accuracy")
        for key, baseline in (("over_dense", DENSE), ("over_ast", _get_ast_name(name))):
            differences = [
                accuracy - accuracies[baseline, seed]
                for seed, accuracy in by_seed.items()
                if (baseline, seed) in accuracies
            ]
            if differences:
                fields |= _summarize(differences, key)
        summaries.append(AccuracySummary(model=name, seeds=len(by_seed), **fields))
    return summaries


def split_name(name: str) -> tuple[str, str, str]:
    """Split the name of a model: selector, share and end, such as `("ast", " 0.3", ", training-free")`."""
    match = _NAME.fullmatch(name)
    assert match is not None
    selector, share, end = match.groups(default="")
    return selector, share, end


def _get_ast_name(name: str) -> str:
    """Name of AST with the same share of tokens and the same origin of the weights."""
    _, share, end = split_name(name)
    return f"{AST}{share}{TRAINING_FREE if end == TRAINING_FREE else ''}"


def _summarize(values: Sequence[float], name: str) -> dict[str, float]:
    low, high = bootstrap_mean(values)
    return {name: mean(values), f"{name}_low": low, f"{name}_high": high}


def measure_latencies(
    names: Sequence[str],
    out_dir: Path | str,
    *,
    batch_size: int = 8,
    device: str = "cpu",
    rounds: int = 20,
    progress: Progress | None = None,
) -> list[LatencySummary]:
    """Time the compact models of seed 0 against the dense model.

    Args:
        names: Trained models, among them the dense one.
        out_dir: Directory of the comparison.
        batch_size: Clips per call.
        device: Device of the measurement.
        rounds: Timed calls of each model.
        progress: Called after each round.

    Raises:
        InputError: The dense model is not among the models.
    """
    root = Path(out_dir)
    compacted = {name: compact(load_model(get_training_dir(root, name, 0) / MODEL_FILE)) for name in names}
    if DENSE not in compacted:
        raise InputError(f"the model {DENSE!r} is required as the baseline, got {', '.join(compacted)}")
    comparison = compare_latency(
        compacted, baseline=DENSE, batch_size=batch_size, device=device, rounds=rounds, progress=progress
    )
    summaries = []
    for name, model in compacted.items():
        speedup = comparison.speedup(name)
        summaries.append(
            LatencySummary(
                model=name, gflops=count_flops(model)["total"] / 1e9,
                latency_ms=comparison.samples(name).median_ms / batch_size, speedup=speedup.median,
                speedup_low=speedup.low, speedup_high=speedup.high, times_ms=list(comparison.times_ms[name]),
            )
        )  # fmt: skip
    return summaries


def write_results(
    out_dir: Path | str,
    rows: Sequence[SelectorRow],
    latencies: Sequence[LatencySummary],
    *,
    config: PruningConfig,
    device: str,
    command: str,
) -> Path:
    """Write `comparison.json` and `report.html` of a comparison; return the path of the report.

    Args:
        out_dir: Directory of the comparison.
        rows: Results of the trainings.
        latencies: Latencies of the models; may be empty.
        config: Configuration of the comparison.
        device: Device of trainings and measurements.
        command: Command line that repeats the comparison.
    """
    root = Path(out_dir)
    summaries, environment = summarize_accuracy(rows), collect_environment(device)
    record = {
        "environment": environment,
        "command": command,
        "settings": config.model_dump(mode="json"),
        "models": [asdict(summary) for summary in summaries],
        "latency": [asdict(latency) for latency in latencies],
        "rows": [asdict(row) for row in rows],
    }
    write_json(root / RESULTS_FILE, record)
    return _build_page(summaries, latencies, environment, command).write(root / PAGE_FILE)


def _build_page(
    summaries: Sequence[AccuracySummary],
    latencies: Sequence[LatencySummary],
    environment: Mapping[str, Any],
    command: str,
) -> Page:
    best = max(summaries, key=lambda summary: summary.accuracy)
    page = Page(
        "AST2.0-lite v2 and baseline token selectors",
        f"Highest accuracy: {best.model}, {best.accuracy:.2%}.",
        environment=environment,
        reproduce=command,
    )
    page.section(
        "Accuracy",
        "All models are trained alike and keep the same number of tokens, except for the dense model. "
        "Differences are paired by seed.",
    )
    page.figure(
        plot_intervals(
            "Accuracy on test videos",
            [summary.model for summary in summaries],
            [summary.accuracy for summary in summaries],
            [summary.accuracy_low for summary in summaries],
            [summary.accuracy_high for summary in summaries],
            unit="top-1 accuracy",
            caption="Mean over seeds, with 95 % bootstrap intervals.",
        )
    )
    accuracy_columns = {
        "model": "model", "seeds": "seeds", "accuracy": "accuracy", "accuracy_low": "from",
        "accuracy_high": "to", "over_dense": "over dense", "over_dense_low": "from", "over_dense_high": "to",
        "over_ast": "over AST", "over_ast_low": "from", "over_ast_high": "to",
    }  # fmt: skip
    page.table("Accuracy", [asdict(summary) for summary in summaries], columns=accuracy_columns, digits=4)
    for end, title in (("", "after training"), (TRAINING_FREE, "with the weights of the dense model")):
        _plot_accuracy_over_time(page, f"Accuracy over time, {title}", end, summaries, latencies)
    page.section("Cost")
    cost_columns = {
        "model": "model", "gflops": "GFLOP per clip", "latency_ms": "ms per clip", "speedup": "over dense",
        "speedup_low": "from", "speedup_high": "to",
    }  # fmt: skip
    rows = [asdict(latency) for latency in latencies]
    page.table("Cost of the compact models", rows, columns=cost_columns, digits=3)
    return page


def _plot_accuracy_over_time(
    page: Page,
    title: str,
    end: str,
    summaries: Sequence[AccuracySummary],
    latencies: Sequence[LatencySummary],
) -> None:
    """Plot a curve for each selector over the latency of its models; nothing without several shares."""
    latency_ms = {latency.model: latency.latency_ms for latency in latencies}
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for summary in summaries:
        selector, share, summary_end = split_name(summary.model)
        time_ms = latency_ms.get(summary.model.removesuffix(TRAINING_FREE))
        if summary_end != end or time_ms is None or not share:
            continue
        point = (time_ms, summary.accuracy, summary.accuracy_low, summary.accuracy_high)
        points.setdefault(selector, []).append(point)
    if max(map(len, points.values()), default=0) < 2:
        return
    dense = next(summary for summary in summaries if summary.model == DENSE)
    points[DENSE] = [(latency_ms[DENSE], dense.accuracy, dense.accuracy_low, dense.accuracy_high)]
    columns = {name: list(zip(*sorted(rows), strict=True)) for name, rows in points.items()}
    page.figure(
        plot_curves(
            title,
            {name: (values[0], values[1]) for name, values in columns.items()},
            intervals={name: (values[2], values[3]) for name, values in columns.items()},
            x="ms per clip", y="top-1 accuracy",
            caption="Bars are 95 % bootstrap intervals of the mean over seeds.",
        )
    )  # fmt: skip
