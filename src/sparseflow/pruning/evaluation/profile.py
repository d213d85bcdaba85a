"""What pruning is worth here: a model dense, masked and compact, timed against each other."""

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
from sparseflow.pruning.compaction.flops import flops
from sparseflow.pruning.model.video_vit import VideoViT

DENSE, SOFT, MASKED, COMPACT = "dense", "soft masks", "hard masks", "compact"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured.

    Attributes:
        batch: Clips of a call.
        dtype: Of weights and clips.
        compiled: Whether `torch.compile` compiled each.
        flops: Candidate -> operations a clip.
        error: Largest difference of the compact model's scores from those with hard masks, over the largest
            score; both as they were timed.
        comparison: Times, with `"dense"` as the baseline.
    """

    batch: int
    dtype: str
    compiled: bool
    flops: Mapping[str, int]
    error: float
    comparison: Comparison

    def clips_per_s(self, name: str) -> float:
        """Throughput of a candidate by its median time."""
        return self.batch * 1e3 / self.comparison.samples(name).median_ms


def profile(
    model: VideoViT,
    *,
    batch: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    mode: str | None = None,
    rounds: int = 20,
    warmup: int = 3,
    others: Mapping[str, VideoViT] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Time a model without pruning, with masks, and compact, on random clips.

    Args:
        model: One that prunes; left as it is.
        batch: Clips of a call.
        device: Where to measure.
        dtype: Of weights and clips.
        compiled: Whether to compile each with `torch.compile`, whole.
        mode: Its mode.
        rounds: Calls of each that are timed.
        warmup: Calls of each before.
        others: More models to time, each as it is.
        seed: What clips, and the order of calls, are drawn from.
        progress: Called after each round.

    Raises:
        InputError: The model prunes nothing, or is compact already.
    """
    if {DENSE, SOFT, MASKED, COMPACT} & set(others or {}):
        raise InputError(f"`others` must have names of their own: {', '.join(others or {})}")
    if model.ast is None or model.compacted or not (model.ast.stages or model.ast.keep):
        raise InputError("the model must be one that prunes and is not compact: there is nothing to compare")
    models = {DENSE: dense(model)}
    if model.ast.selector == "ast":
        models[SOFT] = model
    models |= {MASKED: model, COMPACT: compact(model), **(others or {})}
    work = _work(
        models, batch=batch, device=device, dtype=dtype, compiled=compiled, mode=mode, seed=seed, soft={SOFT}
    )
    masked, cut = work[MASKED]().float(), work[COMPACT]().float()
    error = float((masked - cut).abs().max() / masked.abs().max())
    return Profile(
        batch=batch,
        dtype=str(dtype).removeprefix("torch."),
        compiled=compiled,
        flops={name: flops(each)["total"] for name, each in models.items()},
        error=error,
        comparison=compare(
            work, rounds=rounds, baseline=DENSE, warmup=warmup, device=device, seed=seed, progress=progress
        ),
    )


def timed(
    models: Mapping[str, VideoViT],
    *,
    baseline: str,
    batch: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    rounds: int = 20,
    warmup: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Time models against each other on random clips, each as it is; arguments are those of `profile`.

    Raises:
        InputError: `baseline` is none of them.
    """
    work = _work(models, batch=batch, device=device, dtype=dtype, compiled=compiled, mode=None, seed=seed)
    return compare(
        work, rounds=rounds, baseline=baseline, warmup=warmup, device=device, seed=seed, progress=progress
    )


def _work(
    models: Mapping[str, VideoViT],
    *,
    batch: int,
    device: torch.device | str,
    dtype: torch.dtype,
    compiled: bool,
    mode: str | None,
    seed: int,
    soft: Collection[str] = (),
) -> dict[str, Callable[[], Tensor]]:
    """Calls of copies of the models on the same clips; those in `soft` are left to train."""
    config = next(iter(models.values())).config
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.num_frames, config.in_chans, config.img_size, config.img_size)
    clips = torch.randn(shape, generator=generator).to(device, dtype)
    work: dict[str, Callable[[], Tensor]] = {}
    for name, each in models.items():
        placed = copy.deepcopy(each).to(device, dtype).train(name in soft)
        ready: Any = torch.compile(placed, fullgraph=True, mode=mode) if compiled else placed

        def call(ready: Any = ready) -> Tensor:
            with torch.no_grad():
                return ready(clips)

        work[name] = call
    return work


def dense(model: VideoViT) -> VideoViT:
    """The same model without anything pruned: no stages, and every gate open."""
    made = model.to_dict() | {"use_ast_prune": False, "ast_cfg": None}
    found = VideoViT(**made).to(model.head.weight)
    state = model.state_dict()
    found.load_state_dict({name: state[name] for name in found.state_dict()})
    return found.eval()
