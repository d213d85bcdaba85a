"""Workflows on model files and configurations: evaluation, compaction, profiling and comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.compact import compact, units
from sparseflow.pruning.compaction.flops import flops
from sparseflow.pruning.compaction.layered_model import Steps
from sparseflow.pruning.compaction.saved_model import load, save
from sparseflow.pruning.config import Settings, settings_of
from sparseflow.pruning.data.datasets import data_of
from sparseflow.pruning.evaluation import latency_model
from sparseflow.pruning.evaluation.accuracy import Accuracy, evaluate
from sparseflow.pruning.evaluation.profile import Profile, dense, profile
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training import comparison
from sparseflow.pruning.training.epoch_trainer import VideoTask
from sparseflow.pruning.training.page import write_comparison


def evaluate_model(
    path: Path, settings: Settings, *, device: torch.device, progress: Progress | None = None
) -> Accuracy:
    """Evaluate a saved model on the test split of a configuration's dataset.

    Args:
        path: Model of a training, or a compact one.
        settings: Configuration with the dataset and the batch size.
        device: Device of the evaluation.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: The model and the dataset differ in the number of classes.
    """
    model = load(path)
    data = data_of(settings, progress=_count(progress, "counting frames"))
    if len(data.classes) != model.config.num_classes:
        raise InputError(
            f"{path} has {model.config.num_classes} classes and the dataset {len(data.classes)}; use the "
            "configuration that the model was trained with"
        )
    return evaluate(
        model,
        data.test,
        batch_size=settings.train.batch_size,
        workers=settings.train.workers,
        device=device,
        progress=_count(progress, "evaluating clips"),
    )


@dataclass(frozen=True, kw_only=True)
class CompactionResult:
    """Sizes of a compacted model.

    Attributes:
        path: File of the compact model.
        units: Heads and channels of each block.
        gflops: GFLOP per clip.
        dense_gflops: GFLOP per clip before pruning.
        num_parameters: Parameters.
        num_parameters_before: Parameters before compaction.
    """

    path: Path
    units: list[tuple[int, int]]
    gflops: float
    dense_gflops: float
    num_parameters: int
    num_parameters_before: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "model": str(self.path),
            "units": self.units,
            "gflops": self.gflops,
            "dense_gflops": self.dense_gflops,
            "parameters": self.num_parameters,
            "parameters_before": self.num_parameters_before,
        }


def compact_file(path: Path, out_path: Path) -> CompactionResult:
    """Remove what a saved model prunes and save the compact model."""
    model = load(path)
    compacted = compact(model)
    save(compacted, out_path)
    return CompactionResult(
        path=out_path,
        units=units(compacted),
        gflops=flops(compacted)["total"] / 1e9,
        dense_gflops=flops(model if model.compacted else dense(model))["total"] / 1e9,
        num_parameters=sum(parameter.numel() for parameter in compacted.parameters()),
        num_parameters_before=sum(parameter.numel() for parameter in model.parameters()),
    )


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """Throughput of the dense, masked and compact models, and optionally a fitted cost model.

    Attributes:
        profile: Timings.
        cost_model: Cost model for the latency loss; None if none was fitted.
        cost_path: File of the cost model.
    """

    profile: Profile
    cost_model: latency_model.LatencyModel | None = None
    cost_path: Path | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One record for each model, in JSON types."""
        comparison = self.profile.comparison
        return [
            {
                "model": name,
                "clips_per_s": self.profile.clips_per_s(name),
                "latency_ms": comparison.samples(name).median_ms,
                "speedup": vars(comparison.speedup(name)),
                "gflops": self.profile.flops[name] / 1e9,
            }
            for name in comparison.times_ms
        ]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        record: dict[str, Any] = {"profile": self.rows(), "error": self.profile.error}
        if self.cost_model is not None:
            record["fit"] = {
                "file": str(self.cost_path),
                "error": self.cost_model.error,
                "coefficients": self.cost_model.coefficients,
            }
        return record


def profile_model(
    path: Path | None,
    settings: Settings | None,
    *,
    batch_size: int = 8,
    device: torch.device,
    dtype: str = "float32",
    compiled: bool = False,
    rounds: int = 20,
    cost_path: Path | None = None,
    progress: Progress | None = None,
) -> ProfileResult:
    """Time a model dense, masked and compact.

    Args:
        path: Saved model; None builds a model with random weights.
        settings: Configuration of the model with random weights.
        batch_size: Clips per call.
        device: Device of the measurements.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        compiled: Compile the models with torch.compile.
        rounds: Timing rounds.
        cost_path: Fit a cost model for the latency loss and write it to this file.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: Neither or both of `path` and `settings` are given, or the model does not prune.
    """
    if (path is None) == (settings is None):
        raise InputError("give either a model or `--config`; `--config` builds a model with random weights")
    model = load(path) if path is not None else _build_random_model(settings)
    torch_dtype = getattr(torch, dtype)
    timings = profile(
        model,
        batch=batch_size,
        device=device,
        dtype=torch_dtype,
        compiled=compiled,
        rounds=rounds,
        progress=progress,
    )
    if cost_path is None:
        return ProfileResult(profile=timings)
    cost_model = latency_model.fit(
        model, batch=batch_size, device=device, dtype=torch_dtype, progress=_count(progress, "fitting")
    )
    cost_model.save(cost_path)
    return ProfileResult(profile=timings, cost_model=cost_model, cost_path=cost_path)


def _build_random_model(settings: Settings | None) -> VideoViT:
    assert settings is not None
    num_classes, channels = (8, 1) if settings.data.kind == "moving_digits" else (101, 3)
    torch.manual_seed(settings.train.seed)
    return settings.make(num_classes, channels).eval()


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """Accuracy and latency of AST and its baselines.

    Attributes:
        models: Accuracy of each model over seeds, in JSON types.
        latency: Timings of each model against the dense one; empty without the dense model.
        page: The report.
    """

    models: Sequence[Mapping[str, Any]]
    latency: Sequence[Mapping[str, Any]]
    page: Path

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {"models": self.models, "latency": self.latency, "page": str(self.page)}


def compare_models(
    settings: Settings,
    out_dir: Path,
    *,
    seeds: int = 5,
    names: Sequence[str] | None = None,
    ablations: bool = False,
    workers: int = 1,
    batch_size: int = 8,
    rounds: int = 20,
    device: str = "cpu",
    command: str = "",
    progress: Progress | None = None,
) -> ComparisonResult:
    """Train AST and its baselines at an equal number of kept tokens; compare accuracy and latency.

    Args:
        settings: Configuration that all trainings share.
        out_dir: Output directory; an existing comparison is resumed.
        seeds: Trainings of each model.
        names: Models to train; by default all.
        ablations: Also train AST without each of its parts, and on one frame.
        workers: Parallel trainings.
        batch_size: Clips per timed call.
        rounds: Timing rounds.
        device: Device of trainings and measurements.
        command: Command line for the report.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: A name is unknown, or the configuration does not prune.
    """
    entries = comparison.rivals(settings) + (comparison.ablations(settings) if ablations else [])
    known = [entry.name for entry in entries]
    if names is not None:
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise InputError(f"unknown models: {', '.join(unknown)}; known models: {', '.join(known)}")
        entries = [entry for entry in entries if entry.name in names]
    rows = comparison.compare(
        entries, out_dir, seeds=seeds, device=device, workers=workers, progress=progress
    )
    times: list[dict[str, Any]] = []
    if comparison.DENSE in {entry.name for entry in entries}:
        times = comparison.latencies(
            entries,
            out_dir,
            batch=batch_size,
            device=device,
            rounds=rounds,
            progress=progress,
        )
    results = comparison.write_results(
        out_dir, rows, times, settings=settings, device=device, command=command
    )
    page = write_comparison(out_dir, results)
    return ComparisonResult(models=results["models"], latency=times, page=page)


def open_layered_model(path: Path | None, settings: Mapping[str, Any], *, seed: int = 0) -> Steps:
    """Open a compact model layer by layer, for partitioning.

    Args:
        path: Saved model; None builds the model of `settings` with random weights.
        settings: Configuration of the model; its dataset sets the number of classes and channels.
        seed: Random seed of the weights.

    Raises:
        InputError: A setting cannot be used, or a file is missing.
    """
    if path is not None:
        return Steps(compact(load(path)))
    checked = settings_of(settings, "`task`")
    num_classes, channels = _dataset_shape(checked)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Steps(compact(checked.make(num_classes, channels).eval()))


def make_random_clips(model: Steps, count: int, *, seed: int = 0) -> torch.Tensor:
    """Make random clips for a model, [count, frames, channels, height, width]."""
    config = model.model.config
    shape = (count, config.num_frames, config.in_chans, config.img_size, config.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_video_task(settings: Mapping[str, Any], seed: int, device: str) -> VideoTask:
    """Create the training task of a configuration, for joint training with hardware."""
    train = {**settings.get("train", {}), "seed": seed}
    return VideoTask(settings_of({**settings, "train": train}, "`task`"), device=device)


def _dataset_shape(settings: Settings) -> tuple[int, int]:
    """Number of classes and channels of a dataset, without opening videos."""
    if settings.data.kind == "moving_digits":
        from sparseflow.pruning.data.moving_digits import MovingDigits

        return len(MovingDigits.classes), 1
    from sparseflow.pruning.data.splits import read_split

    return len(read_split(settings.data.lists, settings.data.split).classes), 3


def _count(progress: Progress | None, message: str) -> Callable[[int, int], None] | None:
    """Adapt a progress callback to one that takes (done, total)."""
    if progress is None:
        return None
    return lambda done, total: progress(f"{message}, {done} of {total}", done / total)
