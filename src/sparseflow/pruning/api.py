"""Operations on model files and configurations: evaluation, compaction, profiling, comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.layers import LayeredModel
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.compact import compact, list_units
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from sparseflow.pruning.compaction.saved_model import load_model, save_model
from sparseflow.pruning.config import PruningConfig, parse_config
from sparseflow.pruning.data.datasets import count_classes, load_video_dataset
from sparseflow.pruning.evaluation.accuracy import VideoAccuracy, evaluate_accuracy
from sparseflow.pruning.evaluation.latency_model import VideoViTLatencyModel, fit_latency_model
from sparseflow.pruning.evaluation.profile import VideoViTProfile, make_dense, profile_video_vit
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.training.comparison import (
    DENSE,
    AccuracySummary,
    LatencySummary,
    list_ablations,
    list_selector_models,
    measure_latencies,
    split_name,
    summarize_accuracy,
    train_models,
    write_results,
)
from sparseflow.pruning.training.task import VideoEpochTrainer


def evaluate_model(
    path: Path, config: PruningConfig, *, device: torch.device, progress: Progress | None = None
) -> VideoAccuracy:
    """Evaluate a saved model on the test split of a configuration's dataset.

    Args:
        path: Model of a training, or a compact one.
        config: Configuration with the dataset and the batch size.
        device: Device of the evaluation.
        progress: Called with a message and the fraction done.

    Raises:
        InputError: The model and the dataset differ in the number of classes.
    """
    model = load_model(path)
    data = load_video_dataset(config, progress=progress)
    if len(data.classes) != model.config.num_classes:
        raise InputError(
            f"{path} has {model.config.num_classes} classes and the dataset {len(data.classes)}; use the "
            "configuration that the model was trained with"
        )
    return evaluate_accuracy(
        model,
        data.test,
        batch_size=config.train.batch_size,
        workers=config.train.workers,
        device=device,
        progress=progress,
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
    model = load_model(path)
    compacted = compact(model)
    save_model(compacted, out_path)
    return CompactionResult(
        path=out_path,
        units=list_units(compacted),
        gflops=count_flops(compacted)["total"] / 1e9,
        dense_gflops=count_flops(model if model.compacted else make_dense(model))["total"] / 1e9,
        num_parameters=sum(parameter.numel() for parameter in compacted.parameters()),
        num_parameters_before=sum(parameter.numel() for parameter in model.parameters()),
    )


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """Throughput of the dense, masked and compact models, and optionally a fitted latency model.

    Attributes:
        profile: Timings.
        latency_model: Latency model for the budget loss; None if none was fitted.
        latency_model_path: File of the latency model.
    """

    profile: VideoViTProfile
    latency_model: VideoViTLatencyModel | None = None
    latency_model_path: Path | None = None

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
        if self.latency_model is not None:
            record["fit"] = {
                "file": str(self.latency_model_path),
                "error": self.latency_model.error,
                "coefficients": self.latency_model.coefficients,
            }
        return record


def profile_model(
    path: Path | None,
    config: PruningConfig | None,
    *,
    batch_size: int = 8,
    device: torch.device,
    dtype: str = "float32",
    compiled: bool = False,
    rounds: int = 20,
    latency_model_path: Path | None = None,
    progress: Progress | None = None,
) -> ProfileResult:
    """Time a model dense, masked and compact.

    Args:
        path: Saved model; None builds a model with random weights.
        config: Configuration of the model with random weights.
        batch_size: Clips per call.
        device: Device of the measurements.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        compiled: Compile the models with torch.compile.
        rounds: Timing rounds.
        latency_model_path: Fit a latency model for the budget loss and write it to this file.
        progress: Called with a message and the fraction done.

    Raises:
        InputError: Neither or both of `path` and `config` are given, or the model does not prune.
    """
    if path is not None and config is None:
        model = load_model(path)
    elif config is not None and path is None:
        model = _build_model(config, config.train.seed)
    else:
        raise InputError("give either a model or `--config`; `--config` builds a model with random weights")
    torch_dtype = getattr(torch, dtype)
    timings = profile_video_vit(
        model,
        batch_size=batch_size,
        device=device,
        dtype=torch_dtype,
        compiled=compiled,
        rounds=rounds,
        progress=progress,
    )
    if latency_model_path is None:
        return ProfileResult(profile=timings)
    latency_model = fit_latency_model(
        model, batch_size=batch_size, device=device, dtype=torch_dtype, progress=progress
    )
    latency_model.save(latency_model_path, indent=1)
    return ProfileResult(profile=timings, latency_model=latency_model, latency_model_path=latency_model_path)


def _build_model(config: PruningConfig, seed: int) -> VideoViT:
    """Build the untrained model of a configuration."""
    num_classes, num_channels = count_classes(config.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return config.build_model(num_classes, num_channels).eval()


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """Accuracy and latency of AST and its baselines.

    Attributes:
        models: Accuracy of each model over seeds.
        latency: Latency of each model against the dense one; empty without the dense model.
        page: Report page.
    """

    models: Sequence[AccuracySummary]
    latency: Sequence[LatencySummary]
    page: Path

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "models": [asdict(model) for model in self.models],
            "latency": [asdict(latency) for latency in self.latency],
            "page": str(self.page),
        }


def compare_models(
    config: PruningConfig,
    out_dir: Path,
    *,
    num_seeds: int = 5,
    names: Sequence[str] | None = None,
    shares: Sequence[float] = (),
    training_free: bool = False,
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
        config: Configuration that all trainings share.
        out_dir: Output directory; an existing comparison is resumed.
        num_seeds: Trainings of each model.
        names: Models or selectors to train; by default all.
        shares: Shares of tokens after the last stage; by default that of the configuration.
        training_free: Also evaluate each selector with the weights of the dense model.
        ablations: Also train AST without each of its parts, at the smallest share, and on one frame.
        workers: Parallel trainings.
        batch_size: Clips per timed call.
        rounds: Timing rounds.
        device: Device of trainings and measurements.
        command: Command line for the report.
        progress: Called with a message and the fraction done.

    Raises:
        InputError: A name is unknown, the configuration does not prune, or `training_free` without the dense
            model.
    """
    models = list_selector_models(config, shares)
    if ablations:
        models |= list_ablations(config, min(shares, default=None))
    if names is not None:
        parts = {name: split_name(name) for name in models}
        selectors = {name: selector for name, (selector, _, end) in parts.items() if not end}
        unknown = sorted(set(names) - {*models, *selectors.values()})
        if unknown:
            raise InputError(f"unknown models: {', '.join(unknown)}; known models: {', '.join(models)}")
        models = {
            name: model for name, model in models.items() if name in names or selectors.get(name) in names
        }
    if training_free and DENSE not in models:
        raise InputError(f"`training_free` needs the weights of the model {DENSE!r}; add it to the models")
    rows = train_models(
        models, out_dir, num_seeds=num_seeds, device=device, workers=workers, progress=progress
    )
    if training_free:
        rows += train_models(
            models, out_dir, num_seeds=num_seeds, device=device, workers=workers, training_free=True,
            progress=progress,
        )  # fmt: skip
    latencies: list[LatencySummary] = []
    if DENSE in models:
        latencies = measure_latencies(
            list(models), out_dir, batch_size=batch_size, device=device, rounds=rounds, progress=progress
        )
    page = write_results(out_dir, rows, latencies, config=config, device=device, command=command)
    return ComparisonResult(models=summarize_accuracy(rows), latency=latencies, page=page)


def open_layered_model(path: Path | None, config: Mapping[str, Any], *, seed: int = 0) -> LayeredVideoViT:
    """Open a compact model layer by layer, for partitioning.

    Args:
        path: Saved model; None builds the model of `config` with random weights.
        config: Configuration of the model; its dataset sets the number of classes and channels.
        seed: Random seed of the weights.

    Raises:
        InputError: A setting is invalid, or a file is missing.
    """
    if path is not None:
        return LayeredVideoViT(compact(load_model(path)))
    return LayeredVideoViT(compact(_build_model(parse_config(config, "`task`"), seed)))


def make_random_clips(model: LayeredModel, count: int, *, seed: int = 0) -> torch.Tensor:
    """Make random clips for a `LayeredVideoViT`, [count, frames, channels, height, width]."""
    assert isinstance(model, LayeredVideoViT)
    shape = (count, *model.model.config.clip_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_video_task(config: Mapping[str, Any], seed: int, device: str) -> VideoEpochTrainer:
    """Create the trainer of a configuration, for joint training with hardware."""
    train = {**config.get("train", {}), "seed": seed}
    return VideoEpochTrainer(parse_config({**config, "train": train}, "`task`"), device=device)
