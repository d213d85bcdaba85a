"""Candidates of a group, a layer and a whole network, checked and timed on real inputs.

A candidate whose result differs from the network's own modules is rejected before timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.autotune.decision_cache import Decision
from sparseflow.spiking.autotune.dispatch import CandidateSelector, compute_rate_bucket
from sparseflow.spiking.backends.base import Backend, SpikeForm
from sparseflow.spiking.backends.blocks.geometry import select_block_size
from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.precision import is_tf32_allowed
from sparseflow.spiking.graph.module_state import copy_neuron_states, restore_neuron_states
from sparseflow.spiking.profile.firing import FiringStats, measure_firing
from sparseflow.spiking.runtime.group_step import GroupMode, GroupStep
from sparseflow.spiking.runtime.sparse_conv import SparseConv2d
from sparseflow.spiking.runtime.spike_tensor import NodeValues, SpikeTensor, to_dense

GPU_CALLS_PER_SAMPLE = 20
"""Replays timed together; a single one would mostly measure the start-up time of an idle GPU."""

MAX_FLIP_FRACTION = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Fraction of spikes that may flip at the threshold through different rounding of sums, by weight dtype."""

MAX_SUM_ERROR = 256.0
"""Largest error of a convolution's outputs, in units of the dtype's rounding of the largest output."""

MAX_FLIP_FRACTION_TF32 = 2e-3
"""The limit for float32 weights if cuDNN may use TF32, which rounds the network's own convolutions too."""


def tune_group(
    group: GroupStep, env: NodeValues, selector: CandidateSelector, backend: Backend
) -> tuple[Decision, Any]:
    """Time all modes of a group and fix the fastest.

    Each call starts from the membrane that the neuron has on entry. A mode whose spikes differ from those of
    the network's own modules is not timed.

    Args:
        group: The group; its neuron's membrane is in the state before the group runs.
        env: The values that the group reads.
        selector: Times candidates and caches decisions.
        backend: The plan's backend.

    Returns:
        The decision, and the group's output in the selected mode.
    """
    shape_mismatch = group.get_shape_mismatch(env)
    if shape_mismatch is not None:
        return Decision(choice="module", reason=shape_mismatch), group.run(env, mode="module")
    initial_v = group.membrane
    candidates, notes = _list_candidates(group, env)
    notes += _remove_mismatches(candidates, backend.dtype)
    decision = selector.select(make_group_key(group, env, backend), candidates, "module")
    if notes:
        decision = decision.model_copy(update={"reason": "; ".join([decision.reason, *notes])})
    group.fix_mode(decision.choice)  # type: ignore[arg-type]
    group.membrane = initial_v
    return decision, group.run(env)


def run_candidates(group: GroupStep, env: NodeValues, selector: CandidateSelector, backend: Backend) -> Any:
    """Run a group in all modes that `tune_group` will time, to compile their kernels.

    Args:
        group: The group.
        env: The values that it reads.
        selector: Knows which groups are cached; their modes are not run.
        backend: The plan's backend.

    Returns:
        The output of the network's own modules.
    """
    initial_v = group.membrane
    if (
        group.get_shape_mismatch(env) is None
        and selector.find_cached(make_group_key(group, env, backend)) is None
    ):
        candidates, _ = _list_candidates(group, env)
        for mode, form in product([mode for mode in candidates if mode != "module"], ("native", "dense")):
            with suppress(Exception):  # `tune_group` runs the same and raises
                to_dense(_run_group(group, mode, env, initial_v, form))
    group.membrane = initial_v
    return group.run(env, mode="module")


def find_possible_mode(group: GroupStep, env: NodeValues, decision: Decision | None) -> GroupMode:
    """Return the mode of a decision if the group can run in it on the values in `env`, else a safe one.

    Args:
        group: The group.
        env: The values that it reads.
        decision: A decision about the group, possibly on inputs of another shape.
    """
    mode = "module" if decision is None else decision.choice
    if mode == "module" or group.get_shape_mismatch(env) is not None:
        return "module"
    if mode == "sparse" and group.get_unsupported_reason(env) is None:
        return "sparse"
    return "fused" if mode == "fused" and group.can_fuse() else "dense"


def _list_candidates(group: GroupStep, env: NodeValues) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """List the modes in which a group can run, each from its current membrane, and why others cannot."""
    initial_v = group.membrane
    candidates: dict[str, Callable[[], Any]] = {
        mode: partial(_run_group, group, mode, values, initial_v)
        for mode, values in {
            "module": _to_dense_values(env),
            "dense": env,
            "fused": env,
            "sparse": env,
        }.items()
    }
    notes: list[str] = []
    if not group.can_fuse():
        del candidates["fused"]
    unsupported_reason = group.get_unsupported_reason(env)
    if unsupported_reason is not None:
        del candidates["sparse"]
        notes.append(f"sparse not supported: {unsupported_reason}")
    return candidates, notes


def _to_dense_values(env: NodeValues) -> NodeValues:
    return {node: to_dense(value) for node, value in env.items()}


def _run_group(
    group: GroupStep, mode: Any, env: NodeValues, initial_v: Any, output_form: SpikeForm = "native"
) -> Any:
    """Run a group in a mode from the membrane `initial_v`."""
    group.membrane = initial_v
    return group.run(env, mode=mode, output_form=None if mode == "module" else output_form)


def _remove_mismatches(candidates: dict[str, Callable[[], Any]], dtype: torch.dtype) -> list[str]:
    """Remove candidates whose outputs differ from those of `"module"`, and describe the differences."""
    expected = candidates["module"]()
    notes: list[str] = []
    for mode in [mode for mode in candidates if mode != "module"]:
        mismatch = _describe_mismatch(candidates[mode](), expected, dtype)
        if mismatch:
            notes.append(f"'{mode}' differs from the network's own modules on the sample: {mismatch}")
            del candidates[mode]
    return notes


def tune_layer(
    conv: nn.Conv2d, x: torch.Tensor, selector: CandidateSelector, decision: Decision | None = None
) -> tuple[Decision, FiringStats, SparseConv2d]:
    """Time one convolution against its sparse version.

    Args:
        conv: The convolution.
        x: Its input, [N, C, H, W].
        selector: Times candidates and caches decisions.
        decision: A decision to follow; nothing is timed.

    Returns:
        The decision ('module' or the sparse version's backend), the firing statistics of `x`, and the sparse
        version.
    """
    firing = measure_firing(x)
    sparse = SparseConv2d.from_dense(conv, select_block_size(x.shape[-2]) or 4)
    if decision is not None:
        return decision, firing, sparse
    rate = compute_rate_bucket(firing.firing_rate)
    key = f"layer|{sparse}|{tuple(x.shape)}|{x.dtype}@{rate}|threads={torch.get_num_threads()}"
    with torch.no_grad():
        candidates = {"module": lambda: conv(x), sparse.backend: lambda: sparse(x)}
        return selector.select(key, candidates, "module"), firing, sparse


def tune_network(
    model: nn.Module,
    original: Callable[..., Any],
    forms: Mapping[str, Callable[..., Any]],
    inputs: tuple[torch.Tensor, ...],
    selector: CandidateSelector,
    *,
    key: str | None = None,
    incumbent: str | None = None,
) -> Decision:
    """Time the original network (`"own"`) against other forms; each run starts from its current state.

    Args:
        model: The network.
        original: Runs the network as it is.
        forms: Name of each form, and a function that runs it.
        inputs: Inputs of the network.
        selector: Times candidates.
        key: Key of the decision in the selector's cache; by default it is not cached.
        incumbent: The form that only a significantly faster one replaces.
    """
    saved_states = copy_neuron_states(model)

    def run_from_saved_states(run: Callable[..., Any]) -> object:
        restore_neuron_states(saved_states)
        return run(*inputs)

    candidates = {
        name: partial(run_from_saved_states, run) for name, run in {"own": original, **forms}.items()
    }
    selector = replace(selector, cache=selector.cache if key else None, capture=False)
    return selector.select(key or "network", candidates, "own", incumbent=incumbent)


def make_group_key(group: GroupStep, env: NodeValues, backend: Backend) -> str:
    """Make the cache key of a group from everything but the device that its time depends on."""
    parts = [backend.name, str(backend.dtype), type(group.neuron).__name__]
    for conv in (*group.match.sources, *group.match.dense_convs):
        module = group.modules[conv.name]
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        dense = to_dense(env[conv.input])
        rate = float((dense != 0).float().mean()) if conv in group.match.sources else 1.0
        geometry = ConvGeometry.from_layer(module)
        sizes = (tuple(dense.shape), weight.shape[0], geometry.kernel_size[-1], geometry.stride[-1])
        parts.append(f"{conv.features}{sizes}{weight.dtype}@{compute_rate_bucket(rate)}")
    for addends in (group.match.skips, group.match.dense, group.match.post_skips):
        parts.append(f"+{[tuple(to_dense(env[node]).shape) for node in addends]}")
    parts += [f"pooling={group.match.pooling}", f"attention={group.match.attention is not None}"]
    parts += [f"repeats={conv.repeats}" for conv in group.match.dense_convs]
    layout = group.layout
    parts.append(
        f"silent={layout.silent_fraction},marks={layout.emit_activity},ordered={layout.output is not None}"
    )
    parts.append(f"keeps_membrane={group.keeps_membrane},threads={torch.get_num_threads()}")
    return "|".join(parts)


def _describe_mismatch(
    actual: SpikeTensor | torch.Tensor, expected: SpikeTensor | torch.Tensor, dtype: torch.dtype
) -> str | None:
    """Describe how outputs differ; None if rounding of sums can explain it."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        scale = float(expected.abs().max())
        error = float((actual - expected).abs().max())
        limit = MAX_SUM_ERROR * torch.finfo(dtype).eps
        return None if error <= limit * scale else f"the largest error is {error:.2g} of {scale:.2g}"
    assert isinstance(actual, SpikeTensor) and isinstance(expected, SpikeTensor)
    return _describe_flips(actual.sequence, expected.sequence, dtype)


def _describe_flips(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Describe how spikes differ; None if rounding of sums near the threshold can explain it."""
    max_fraction = MAX_FLIP_FRACTION[dtype]
    if dtype == torch.float32 and expected.is_cuda and is_tf32_allowed():
        max_fraction = MAX_FLIP_FRACTION_TF32
    flips = int((actual != expected).sum())
    if flips <= max_fraction * expected.numel() + 1:
        return None
    return f"{flips} of {expected.numel()} spikes differ"
