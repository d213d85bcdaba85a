"""What `optimize` measures: each way of a group, a layer or the whole network, on its real input.

A way that computes something else than the network's own modules is out before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.autotune.decision_cache import Decision
from sparseflow.spiking.autotune.dispatch import Chooser, rate_bucket
from sparseflow.spiking.backends.base import Backend
from sparseflow.spiking.backends.blocks.geometry import static_block
from sparseflow.spiking.backends.precision import tf32_allowed
from sparseflow.spiking.graph.module_state import memories, put_back
from sparseflow.spiking.profile.firing import Activity, activity_of
from sparseflow.spiking.runtime.cuda_graphs import captured
from sparseflow.spiking.runtime.group_step import GroupStep
from sparseflow.spiking.runtime.sparse_conv import SparseConv2d
from sparseflow.spiking.runtime.spike_tensor import Env, Spikes, as_dense

GPU_CALLS = 20
"""Replays of a group timed together: one alone would mostly measure how long an idle GPU takes to start."""

MOST_FLIPS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Fraction of spikes that may flip at the threshold when sums are rounded otherwise, by weights' dtype."""

MOST_FLIPS_TF32 = 2e-3
"""The same for float32 weights where cuDNN may use TF32: the network's own convolutions round so, too."""


def decide_group(group: GroupStep, env: Env, chooser: Chooser, backend: Backend) -> tuple[Decision, Spikes]:
    """Time every way that a group can run in, and settle it on the fastest.

    Args:
        group: The group; its neuron's membrane is where the network has left it.
        env: The values that the group reads.
        chooser: Measures and remembers.
        backend: The plan's.

    Returns:
        The decision, and the group's spikes in the way that was chosen.
    """
    misfit = group.misfit(env)
    if misfit is not None:
        return Decision(way="module", why=misfit), group.run(env, way="module")
    before = group.neuron.v
    dense_env: Env = {node: as_dense(value) for node, value in env.items()}

    def timed(way: Any) -> Callable[[], object]:
        def work() -> object:
            group.neuron.v = before
            if way == "module":
                return group.run(dict(dense_env), way=way)
            return group.run(env, way=way, emit="native")

        return work

    candidates: dict[str, Callable[[], object]] = {"module": timed("module"), "dense": timed("dense")}
    notes: list[str] = []
    refusal = group.refusal(env)
    if refusal is None:
        candidates["sparse"] = timed("sparse")
    else:
        notes.append(f"sparse refused: {refusal}")
    expected = _spikes_of(candidates["module"]())
    for way in ("dense", "sparse"):
        if way in candidates:
            wrong = _disagreement(_spikes_of(candidates[way]()), expected, backend.dtype)
            if wrong:
                notes.append(f"'{way}' disagreed with the network's own modules on the sample: {wrong}")
                del candidates[way]
    key = _group_key(group, env, backend)
    decision = chooser.recall(key, candidates)
    if decision is None:
        if chooser.device.startswith("cuda"):
            candidates = {way: captured(work) for way, work in candidates.items()}
        decision = chooser.choose(key, candidates, "module")
    if notes:
        decision = decision.model_copy(update={"why": "; ".join([decision.why, *notes])})
    candidates.clear()
    group.settle(decision.way)  # type: ignore[arg-type]
    group.neuron.v = before
    return decision, group.run(env)


def decide_layer(
    conv: nn.Conv2d, x: torch.Tensor, chooser: Chooser
) -> tuple[Decision, Activity, SparseConv2d]:
    """Time one convolution alone against its sparse form.

    Args:
        conv: The convolution.
        x: What it reads, [N, C, H, W].
        chooser: Measures and remembers.

    Returns:
        The decision ('module' or the sparse form's backend), what fires in `x`, and the sparse form.
    """
    activity = activity_of(x)
    sparse = SparseConv2d.from_dense(conv, static_block(x.shape[-2]) or 4)
    rate = rate_bucket(activity.firing_rate)
    key = f"layer|{sparse}|{tuple(x.shape)}|{x.dtype}@{rate}|threads={torch.get_num_threads()}"
    with torch.no_grad():
        ways = {"module": lambda: conv(x), sparse.backend: lambda: sparse(x)}
        return chooser.choose(key, ways, "module"), activity, sparse


def decide_whole(
    model: nn.Module,
    own: Callable[..., Any],
    planned: Mapping[str, Callable[..., Any]],
    inputs: tuple[torch.Tensor, ...],
    chooser: Chooser,
) -> Decision:
    """Time the whole network ('own') against plans of it, by name, each from the memories it has now."""
    saved = memories(model)

    def timed(run: Callable[..., Any]) -> Callable[[], object]:
        def work() -> object:
            put_back(saved)
            return run(*inputs)

        return work

    fresh = replace(chooser, cache=None)
    runs = {"own": own, **planned}
    return fresh.choose("whole", {name: timed(run) for name, run in runs.items()}, "own")


def inputs_of(model: nn.Module, names: list[str], run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What each of the named modules reads while `run` runs; of several calls the last."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(partial(_keep, seen, name), with_kwargs=True)
        for name in names
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _keep(
    seen: dict[str, torch.Tensor], name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    seen[name] = (args[0] if args else next(iter(kwargs.values()))).detach().clone()


def _group_key(group: GroupStep, env: Env, backend: Backend) -> str:
    """What a group's time depends on, beside the device."""
    parts = [backend.name, str(backend.dtype), type(group.neuron).__name__]
    for conv in (*group.match.sources, *group.match.dense_convs):
        module = group.modules[conv.name]
        assert isinstance(module, nn.Conv2d)
        dense = as_dense(env[conv.input])
        rate = activity_of(dense).firing_rate if conv in group.match.sources else 1.0
        geometry = (tuple(dense.shape), module.out_channels, module.kernel_size[0], module.stride[0])
        parts.append(f"{geometry}{module.weight.dtype}@{rate_bucket(rate)}")
    for added in (group.match.skips, group.match.dense, group.match.post_skips):
        parts.append(f"+{[tuple(as_dense(env[node]).shape) for node in added]}")
    lies = group.arrangement
    parts.append(f"silent={lies.silent},marks={lies.marks},ordered={lies.output is not None}")
    parts.append(f"threads={torch.get_num_threads()}")
    return "|".join(parts)


def _spikes_of(result: object) -> torch.Tensor:
    assert isinstance(result, Spikes)
    return result.sequence


def _disagreement(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """A sentence when spikes differ by more than rounding at the threshold can explain, else None."""
    most = MOST_FLIPS[dtype]
    if dtype == torch.float32 and expected.is_cuda and tf32_allowed():
        most = MOST_FLIPS_TF32
    flips = int((found != expected).sum())
    return None if flips <= most * expected.numel() + 1 else f"{flips} of {expected.numel()} spikes differ"
