"""Throughput of a model: dense, masked and compact, timed against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseflow.core.progress import Progress
from sparseflow.core.timing import Comparison, compare
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.model.config import SOFT_SELECTORS
from sparseflow.pruning.model.video_vit import VideoViT

DENSE, SOFT, MASKED, COMPACT = "dense", "soft masks", "hard masks", "compact"

_MAX_GRAPHS = 128


@dataclass(frozen=True, kw_only=True)
class VideoViTProfile:
    """Result of `profile_video_vit`.

    Attributes:
        batch_size: Clips per call.
        flops: Candidate -> FLOPs per clip.
        error: Largest difference between the scores of the compact model and of the model with hard masks,
            divided by the largest score; both as timed.
        comparison: Times, with `"dense"` as the baseline.
    """

    batch_size: int
    flops: Mapping[str, int]
    error: float
    comparison: Comparison

    def clips_per_s(self, name: str) -> float:
        """Throughput of a candidate by its median time."""
        return self.batch_size * 1e3 / self.comparison.samples(name).median_ms


def profile_video_vit(
    model: VideoViT,
    *,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    rounds: int = 20,
    warmup: int = 3,
    extra_models: Mapping[str, VideoViT] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> VideoViTProfile:
    """Time a model without pruning, with masks, and compact, on random clips.

    Args:
        model: Model that prunes; not modified.
        batch_size: Clips per call.
        device: Device of the measurement.
        dtype: Dtype of weights and clips.
        compiled: Compile each model with `torch.compile` as one graph.
        rounds: Timed calls of each model.
        warmup: Untimed calls of each model.
        extra_models: More models to time, by names other than those of the module.
        seed: Random seed of clips and of the order of calls.
        progress: Called after each round.

    Raises:
        InputError: The model does not prune, or is compact already.
    """
    if model.ast is None or model.compacted or not (model.ast.stages or model.ast.keep):
        raise InputError(
            "the model must prune and must not be compact; otherwise there is nothing to compare"
        )
    models = {DENSE: make_dense(model)}
    if model.ast.selector in SOFT_SELECTORS and model.softness > 0.0:
        models[SOFT] = model
    models |= {MASKED: model, COMPACT: compact(model), **(extra_models or {})}
    calls = _make_calls(
        models, batch_size=batch_size, device=device, dtype=dtype, compiled=compiled, seed=seed,
        training={SOFT},
    )  # fmt: skip
    # All models share the code of `forward`, and torch.compile limits the graphs of a code.
    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
        masked, compacted = calls[MASKED]().float(), calls[COMPACT]().float()
        comparison = compare(
            calls, rounds=rounds, baseline=DENSE, warmup=warmup, device=device, seed=seed, progress=progress
        )
    error = float((masked - compacted).abs().max() / masked.abs().max())
    return VideoViTProfile(
        batch_size=batch_size,
        flops={name: count_flops(candidate)["total"] for name, candidate in models.items()},
        error=error,
        comparison=comparison,
    )


def compare_latency(
    models: Mapping[str, VideoViT],
    *,
    baseline: str,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    warmup: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Time models against each other on random clips; for the arguments see `profile_video_vit`.

    Raises:
        InputError: `baseline` is not among the models.
    """
    calls = _make_calls(models, batch_size=batch_size, device=device, dtype=dtype, seed=seed)
    return compare(
        calls, rounds=rounds, baseline=baseline, warmup=warmup, device=device, seed=seed, progress=progress
    )


def _make_calls(
    models: Mapping[str, VideoViT],
    *,
    batch_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    compiled: bool = False,
    training: Collection[str] = (),
) -> dict[str, Callable[[], Tensor]]:
    """Calls of copies of the models on the same clips; models in `training` run in training mode."""
    shape = (batch_size, *next(iter(models.values())).config.clip_shape)
    clips = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, model in models.items():
        model_copy = copy.deepcopy(model).to(device, dtype).train(name in training)
        runner: Any = torch.compile(model_copy, fullgraph=True) if compiled else model_copy

        def call(runner: Any = runner) -> Tensor:
            with torch.no_grad():
                return runner(clips)

        calls[name] = call
    return calls


def make_dense(model: VideoViT) -> VideoViT:
    """Return the same model without pruning: no stages, and all gates open."""
    arguments = model.to_dict() | {"use_ast_prune": False, "ast_cfg": None}
    dense = VideoViT(**arguments).to(model.head.weight)
    state = model.state_dict()
    dense.load_state_dict({name: state[name] for name in dense.state_dict()})
    return dense.eval()
