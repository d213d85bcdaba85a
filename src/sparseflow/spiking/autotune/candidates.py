"""Candidates of a group, a layer and a whole network, checked and timed on real inputs.

A candidate whose result differs from the network's own modules is rejected before timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.autotune.decision_cache import Decision
from sparseflow.spiking.autotune.dispatch import CandidateSelector, compute_rate_bucket
from sparseflow.spiking.backends.base import Backend
from sparseflow.spiking.backends.blocks.geometry import select_block_size
from sparseflow.spiking.backends.precision import is_tf32_allowed
from sparseflow.spiking.graph.module_state import copy_neuron_states, restore_neuron_states
from sparseflow.spiking.profile.firing import FiringStats, measure_firing
from sparseflow.spiking.runtime.group_step import GroupStep
from sparseflow.spiking.runtime.sparse_conv import SparseConv2d
from sparseflow.spiking.runtime.spike_tensor import NodeValues, SpikeTensor, to_dense

GPU_CALLS_PER_SAMPLE = 20
"""Replays timed together; a single one would mostly measure the start-up time of an idle GPU."""

MAX_FLIP_FRACTION = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Fraction of spikes that may flip at the threshold through different rounding of sums, by weight dtype."""

MAX_FLIP_FRACTION_TF32 = 2e-3
"""The limit for float32 weights if cuDNN may use TF32, which rounds the network's own convolutions too."""


def tune_group(
    group: GroupStep, env: NodeValues, selector: CandidateSelector, backend: Backend
) -> tuple[Decision, SpikeTensor]:
    """Time all modes of a group and fix the fastest.

    Args:
        group: The group; its neuron's membrane is in the state before the group runs.
        env: The values that the group reads.
        selector: Times candidates and caches decisions.
        backend: The plan's backend.

    Returns:
        The decision, and the group's spikes in the selected mode.
    """
    shape_mismatch = group.get_shape_mismatch(env)
    if shape_mismatch is not None:
        return Decision(choice="module", reason=shape_mismatch), group.run(env, mode="module")
    v_before = group.neuron.v
    dense_env: NodeValues = {node: to_dense(value) for node, value in env.items()}

    def make_run(mode: Any) -> Callable[[], object]:
        def work() -> object:
            group.neuron.v = v_before
            if mode == "module":
                return group.run(dict(dense_env), mode=mode)
            return group.run(env, mode=mode, output_form="native")

        return work

    candidates: dict[str, Callable[[], object]] = {"module": make_run("module"), "dense": make_run("dense")}
    notes: list[str] = []
    unsupported_reason = group.get_unsupported_reason(env)
    if unsupported_reason is None:
        candidates["sparse"] = make_run("sparse")
    else:
        notes.append(f"sparse not supported: {unsupported_reason}")
    expected = _get_spikes(candidates["module"]())
    for mode in ("dense", "sparse"):
        if mode in candidates:
            mismatch = _describe_mismatch(_get_spikes(candidates[mode]()), expected, backend.dtype)
            if mismatch:
                notes.append(f"'{mode}' differs from the network's own modules on the sample: {mismatch}")
                del candidates[mode]
    decision = selector.select(_make_group_key(group, env, backend), candidates, "module")
    if notes:
        decision = decision.model_copy(update={"reason": "; ".join([decision.reason, *notes])})
    group.fix_mode(decision.choice)  # type: ignore[arg-type]
    group.neuron.v = v_before
    return decision, group.run(env)


def tune_layer(
    conv: nn.Conv2d, x: torch.Tensor, selector: CandidateSelector
) -> tuple[Decision, FiringStats, SparseConv2d]:
    """Time one convolution against its sparse version.

    Args:
        conv: The convolution.
        x: Its input, [N, C, H, W].
        selector: Times candidates and caches decisions.

    Returns:
        The decision ('module' or the sparse version's backend), the firing statistics of `x`, and the sparse
        version.
    """
    activity = measure_firing(x)
    sparse = SparseConv2d.from_dense(conv, select_block_size(x.shape[-2]) or 4)
    rate = compute_rate_bucket(activity.firing_rate)
    key = f"layer|{sparse}|{tuple(x.shape)}|{x.dtype}@{rate}|threads={torch.get_num_threads()}"
    with torch.no_grad():
        candidates = {"module": lambda: conv(x), sparse.backend: lambda: sparse(x)}
        return selector.select(key, candidates, "module"), activity, sparse


def tune_network(
    model: nn.Module,
    original: Callable[..., Any],
    plans: Mapping[str, Callable[..., Any]],
    inputs: tuple[torch.Tensor, ...],
    selector: CandidateSelector,
) -> Decision:
    """Time the original network ('own') against plans of it, by name, each from its current state."""
    saved = copy_neuron_states(model)

    def make_run(run: Callable[..., Any]) -> Callable[[], object]:
        def work() -> object:
            restore_neuron_states(saved)
            return run(*inputs)

        return work

    uncached = replace(selector, cache=None, capture=False)
    runs = {"own": original, **plans}
    return uncached.select("network", {name: make_run(run) for name, run in runs.items()}, "own")


def _make_group_key(group: GroupStep, env: NodeValues, backend: Backend) -> str:
    """Make the cache key of a group: what its time depends on besides the device."""
    parts = [backend.name, str(backend.dtype), type(group.neuron).__name__]
    for conv in (*group.match.sources, *group.match.dense_convs):
        module = group.modules[conv.name]
        assert isinstance(module, nn.Conv2d)
        dense = to_dense(env[conv.input])
        rate = measure_firing(dense).firing_rate if conv in group.match.sources else 1.0
        geometry = (tuple(dense.shape), module.out_channels, module.kernel_size[0], module.stride[0])
        parts.append(f"{geometry}{module.weight.dtype}@{compute_rate_bucket(rate)}")
    for added in (group.match.skips, group.match.dense, group.match.post_skips):
        parts.append(f"+{[tuple(to_dense(env[node]).shape) for node in added]}")
    layout = group.layout
    parts.append(
        f"silent={layout.silent_fraction},marks={layout.emit_activity},ordered={layout.output is not None}"
    )
    parts.append(f"threads={torch.get_num_threads()}")
    return "|".join(parts)


def _get_spikes(result: object) -> torch.Tensor:
    assert isinstance(result, SpikeTensor)
    return result.sequence


def _describe_mismatch(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return a sentence if spikes differ by more than rounding at the threshold can explain, else None."""
    max_fraction = MAX_FLIP_FRACTION[dtype]
    if dtype == torch.float32 and expected.is_cuda and is_tf32_allowed():
        max_fraction = MAX_FLIP_FRACTION_TF32
    flips = int((actual != expected).sum())
    return (
        None
        if flips <= max_fraction * expected.numel() + 1
        else f"{flips} of {expected.numel()} spikes differ"
    )
