"""Latency and FLOPs of a patched model, and the share of tokens that meets a latency budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from sparseflow.core.progress import Progress
from sparseflow.core.timing import Comparison, compare, measure
from sparseflow.errors import InputError
from sparseflow.pruning.patching.families import PatchAdapter, PatchTarget, find_encoder
from sparseflow.pruning.patching.hooks import remove_pruners

DENSE, PATCHED = "dense", "patched"

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch does not count it
_SHARE_STEP = 0.05
_MIN_TIME_S = 0.2

Inputs = Tensor | Mapping[str, Any]
"""Input of a model: its first argument, or all arguments by name."""


@dataclass(frozen=True, kw_only=True)
class PatchProfile:
    """Latency and FLOPs of the encoder of a model before and after `patch`.

    Attributes:
        batch_size: Samples per call.
        gflops: `"dense"` and `"patched"` -> GFLOP per sample; only matrix products are counted.
        comparison: Paired samples of `"dense"` and `"patched"`.
    """

    batch_size: int
    gflops: Mapping[str, float]
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, without the samples."""
        names = list(self.comparison.times_ms)
        return {
            "batch_size": self.batch_size,
            "gflops": dict(self.gflops),
            "latency_ms": {name: self.comparison.samples(name).median_ms for name in names},
            "speedup": vars(self.comparison.speedup(PATCHED)),
        }


def profile_patch(
    model: nn.Module,
    *,
    adapter: PatchAdapter | None = None,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    rounds: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> PatchProfile:
    """Time the encoder of a patched model against the encoder without pruning, on random inputs.

    Args:
        model: Patched model; not modified.
        adapter: The adapter that `patch` got.
        batch_size: Samples per call.
        device: Device of the measurement.
        dtype: Dtype of weights and inputs.
        compiled: Compile both encoders with `torch.compile` as one graph.
        rounds: Timing rounds.
        seed: Random seed of the inputs and of the order of calls.
        progress: Called after each round.
    """
    target = find_encoder(model, adapter)
    inputs = make_inputs(target, batch_size, seed=seed).to(device, dtype)
    encoders = {name: copy.deepcopy(target.encoder).eval().to(device, dtype) for name in (DENSE, PATCHED)}
    remove_pruners(encoders[DENSE])
    gflops = {name: count_gflops(value, inputs[:1]) for name, value in encoders.items()}
    if compiled:
        for value in encoders.values():
            value.compile(fullgraph=True)
    comparison = compare(
        {name: make_call(value, inputs) for name, value in encoders.items()},
        rounds=rounds, baseline=DENSE, device=device, seed=seed, progress=progress,
    )  # fmt: skip
    return PatchProfile(batch_size=batch_size, gflops=gflops, comparison=comparison)


def count_gflops(encoder: nn.Module, inputs: Inputs) -> float:
    """Count the FLOPs of the matrix products of a call, in GFLOP; a multiply-add is two operations."""
    with FlopCounterMode(display=False, custom_mapping={_CPU_ATTENTION: _count_attention_flops}) as counter:
        make_call(encoder, inputs)()
    return counter.get_total_flops() / 1e9


def _count_attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of an attention from the shapes of its inputs."""
    return sdpa_flop_count(query, key, value)


def make_inputs(target: PatchTarget, batch_size: int = 1, *, seed: int = 0) -> Tensor:
    """Random inputs of an encoder, of the usual size, in the dtype and on the device of its weights."""
    shape = (batch_size, *target.adapter.get_input_shape(target.encoder))
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return inputs.to(next(target.encoder.parameters()))


def make_call(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    """Make a call of a model without gradients."""

    def call() -> object:
        with torch.no_grad():
            return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    return call


def choose_share(
    apply: Callable[[float], object], call: Callable[[], object], budget_ms: float, device: torch.device | str
) -> tuple[float, float]:
    """Choose the largest share of tokens whose measured latency meets a budget, by bisection.

    Args:
        apply: Patches the model so that its last stage keeps a share.
        call: Calls the model.
        budget_ms: Latency budget, milliseconds per call.
        device: Device of the model.

    Returns:
        The share, a multiple of 0.05, and its latency in milliseconds. The model may be patched with another.

    Raises:
        InputError: The smallest share does not meet the budget. The model is then patched with it.
    """

    def measure_share(steps: int) -> float:
        apply(steps * _SHARE_STEP)
        return measure(call, min_time_s=_MIN_TIME_S, repeats=5, device=device).median_ms

    low, high = 1, round(1.0 / _SHARE_STEP)
    latency_ms = measure_share(low)
    if latency_ms > budget_ms:
        raise InputError(
            f"`budget_ms` (={budget_ms}) cannot be met: with {low * _SHARE_STEP:.0%} of the tokens, a call "
            f"takes {latency_ms:.3g} ms. Add an earlier stage, or raise the budget"
        )
    dense_ms = measure_share(high)
    if dense_ms <= budget_ms:
        return 1.0, dense_ms
    while high - low > 1:  # `low` meets the budget, `high` does not
        middle = (low + high) // 2
        middle_ms = measure_share(middle)
        if middle_ms <= budget_ms:
            low, latency_ms = middle, middle_ms
        else:
            high = middle
    return low * _SHARE_STEP, latency_ms
