"""`AcceleratedForward`: the forward that `optimize` installs on a network.

It runs a tuned plan (`runtime/plan.py`) where that is faster, and the network's own code everywhere else:
in training mode, for an input that requires gradients, or if a module has hooks. It detects changes to the
network between calls and tunes again for each new input shape.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from sparseflow.core import timing
from sparseflow.core.progress import Progress
from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.autotune.candidates import (
    GPU_CALLS_PER_SAMPLE,
    capture_inputs,
    tune_group,
    tune_layer,
    tune_network,
)
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache
from sparseflow.spiking.autotune.dispatch import CandidateSelector, Policy
from sparseflow.spiking.backends.blocks.geometry import select_block_size
from sparseflow.spiking.backends.selection import select_backend
from sparseflow.spiking.graph import ConvSite, SpikeGraph, analyze
from sparseflow.spiking.graph.module_state import preserve_state_without_grad, reset_neurons
from sparseflow.spiking.profile.firing import FiringStats, profile_firing
from sparseflow.spiking.runtime.cuda_graphs import GraphReplay
from sparseflow.spiking.runtime.group_step import GroupMode, GroupStep, SharedGroups
from sparseflow.spiking.runtime.mutation_guard import MutationGuard
from sparseflow.spiking.runtime.plan import Plan
from sparseflow.spiking.runtime.sparse_conv import (
    SparseConv2d,
    get_conv_unsupported_reason,
    select_conv_backend,
)
from sparseflow.spiking.runtime.spike_tensor import NodeValues, SpikeTensor

MAX_PLANS = 8
"""Input shapes for which plans are kept."""


class AcceleratedForward:
    """A network's forward, accelerated.

    Args:
        model: The network.
        graph: Its analysis.
        inputs: The sample of the analysis, or None.
        policy, dtype, cache, progress: See `optimize`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: SpikeGraph,
        inputs: tuple[torch.Tensor, ...] | None = None,
        *,
        policy: Policy = "measured",
        dtype: torch.dtype | None = None,
        cache: DecisionCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.policy, self.dtype = model, policy, dtype
        self._graph: SpikeGraph | None = graph
        self._analyzed_key: Any = None if inputs is None else make_input_key(inputs)
        self.decisions: dict[str, Decision] = {}
        self.firing: dict[str, FiringStats] = {}
        self.network_decision: Decision | None = None
        self.backend_name = "dense"
        self._cache, self.progress = cache, progress
        self._originals: dict[str, nn.Conv2d] = {}
        self._sparse: dict[str, SparseConv2d] = {}
        self._original_forward = model.__dict__.get("forward")
        self._plans: dict[Any, Plan | None] = {}
        self._replays: dict[Any, GraphReplay] = {}
        self._shared: SharedGroups = WeakValueDictionary()
        self._guard: MutationGuard | None = None

    @property
    def graph(self) -> SpikeGraph:
        """The network's analysis."""
        if self._graph is None:
            self._graph = self._analyze(None)
        return self._graph

    def _analyze(self, inputs: tuple[torch.Tensor, ...] | None) -> SpikeGraph:
        """Analyze the network itself, without the accelerated forward."""
        self.uninstall()
        try:
            return analyze(self.model, inputs)
        finally:
            self.reinstall()

    def install(self) -> None:
        """Install this callable on the network; under the static policy, also replace convolutions."""
        self.model.__dict__["forward"] = self
        if self.policy == "static":
            for site in self.graph.sites:
                self._replace_static(site)

    def uninstall(self) -> None:
        """Restore all original modules and the original forward."""
        for name, conv in self._originals.items():
            sparse = self._sparse[name]
            if self.model.get_submodule(name) is sparse:
                # Parameters and mode may have been changed on the sparse module.
                conv.weight, conv.bias = sparse.weight, sparse.bias
                conv.train(sparse.training)
                _set_submodule(self.model, name, conv)
        if self._original_forward is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.__dict__["forward"] = self._original_forward

    def reinstall(self) -> None:
        """Undo `uninstall`."""
        for name, conv in self._originals.items():
            if self.model.get_submodule(name) is conv:
                _set_submodule(self.model, name, self._sparse[name])
        self.model.__dict__["forward"] = self

    def _replace(self, name: str, block_size: int = 16, backend: Any = None) -> None:
        conv = self.model.get_submodule(name)
        if isinstance(conv, nn.Conv2d) and not isinstance(conv, SparseConv2d):
            sparse = SparseConv2d.from_dense(conv, block_size, backend=backend)
            self._originals[name], self._sparse[name] = conv, sparse
            _set_submodule(self.model, name, sparse)

    def _replace_static(self, site: ConvSite) -> None:
        if not site.replaceable:
            return
        if self._analyzed_key is None:
            raise SampleError("the static policy decides by feature-map height and needs a `sample`")
        conv, shape = self.model.get_submodule(site.name), site.value.shape
        assert isinstance(conv, nn.Conv2d)
        unsupported_reason = (
            get_conv_unsupported_reason(conv)
            if shape
            else f"called {len(site.nodes)} times, possibly with different heights"
        )
        if unsupported_reason is not None or shape is None:
            self.decisions[site.name] = Decision(choice="dense", reason=str(unsupported_reason))
            return
        block = select_block_size(shape[-2])
        if block is None:
            reason = f"{shape[-2]} rows: blocks do not pay off below 8"
            self.decisions[site.name] = Decision(choice="dense", reason=reason)
            return
        self._replace(site.name, block)
        backend = select_conv_backend(conv.weight.device)
        reason = f"{shape[-2]} rows: blocks of {block}"
        if backend == "dense":
            reason += f"; no backend for {conv.weight.device} is installed (extra `spiking`)"
        self.decisions[site.name] = Decision(choice=backend, reason=reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or self.policy != "measured" or not self._is_accelerable(args):
            return self.run_original(*args, **kwargs)
        key = make_input_key(args)
        plan = self._get_plan(args, key)
        if plan is None or plan.get_bypass_conflict():
            return self.run_original(*args)
        replay = self._replays.get(key)
        with torch.no_grad():
            can_replay = replay is not None and replay.is_at_rest() and not plan.has_hooks()
            if replay is not None and can_replay and not torch.cuda.is_current_stream_capturing():
                return replay(*args)
            return plan.run(*args)

    def _get_plan(self, args: tuple[torch.Tensor, ...], key: Any) -> Plan | None:
        """Return the plan for inputs of this shape, tuned on first use; None for the own forward."""
        self._apply_mutations()
        if key not in self._plans:
            try:
                self.tune(args)
            except SampleError:
                return None  # the network's own code raises the error about its input
        return self._plans[key]

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network's own forward."""
        if self._original_forward is not None:
            return self._original_forward(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _is_accelerable(self, args: tuple[Any, ...]) -> bool:
        tensors = all(isinstance(a, torch.Tensor) and not a.requires_grad and a.numel() > 0 for a in args)
        return bool(args) and tensors and not self.model.training

    def _apply_mutations(self) -> None:
        """Apply changes made to the network since the last call.

        New values (an optimizer, load_state_dict, .to()) invalidate prepared weights. Other modules, other
        parameters or neurons with other constants invalidate the plans, which are tuned again.
        """
        guard = self._guard
        if guard is None or (guard.is_structure_unchanged() and guard.are_values_unchanged()):
            return
        if not guard.is_structure_unchanged():
            self._plans.clear()
            self._analyzed_key = None
        for plan in self._plans.values():
            if plan is not None:
                plan.invalidate()
        self._replays.clear()
        self._reset_guard()

    def _reset_guard(self) -> None:
        plan = next((plan for plan in self._plans.values() if plan is not None), None)
        self._guard = (
            None if plan is None else MutationGuard(self.model, [group.neuron for group in plan.groups])
        )

    def list_plans(self) -> list[Plan | None]:
        """List one plan per input shape, oldest first; None if the network's own code runs."""
        return list(self._plans.values())

    def measure_layer_times(self, inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
        """See `layer_times`."""
        plan = self._get_plan(inputs, make_input_key(inputs))
        latency_ms: dict[str, float] = {}
        if plan is None:
            return latency_ms

        def time_group(group: GroupStep, env: NodeValues) -> SpikeTensor:
            results: list[SpikeTensor] = []
            samples = timing.measure(
                lambda: results.append(group.run(env)), warmup=0, repeats=1, device=inputs[0].device
            )
            latency_ms[group.name] = samples.median_ms
            return results[0]

        with preserve_state_without_grad(self.model):
            plan.run(*inputs)
        with preserve_state_without_grad(self.model):
            plan.run(*inputs, group_runner=time_group)
        return latency_ms

    def tune(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Select how to run inputs of this shape, by timing; the network's state is restored."""
        key = make_input_key(inputs)
        while len(self._plans) >= MAX_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._replays.pop(oldest, None)
        if self.network_decision is not None and self.network_decision.choice == "layers":
            self._plans[key] = None
            return
        if key != self._analyzed_key:
            # A trace is valid for one input shape: branches and loops may depend on shapes.
            self._graph, self._analyzed_key = self._analyze(inputs), key
        if self.graph.module is None:
            self._plans[key] = None
            self._tune_layers(inputs)
            return
        backend = select_backend(inputs[0], self.model, self.dtype)
        if backend is None:
            self._plans[key] = None
            model_dtype = next((p.dtype for p in self.model.parameters()), inputs[0].dtype)
            requested = f" with dtype={self.dtype}" if self.dtype not in (None, model_dtype) else ""
            self.network_decision = Decision(
                choice="own", reason=f"no backend for {model_dtype}{requested} on {inputs[0].device}"
            )
            return
        self.backend_name = backend.name
        plan = Plan(self.graph, backend, self._shared)
        if plan.write_hazard is not None:
            self._plans[key] = None
            self.network_decision = Decision(choice="own", reason=plan.write_hazard)
            return
        calls_per_sample = GPU_CALLS_PER_SAMPLE if inputs[0].is_cuda else 1
        selector = CandidateSelector(
            device=str(inputs[0].device), cache=self._cache, calls_per_sample=calls_per_sample
        )
        with preserve_state_without_grad(self.model):
            plan.choose_layouts(*inputs)
        with preserve_state_without_grad(self.model):
            if not self.firing:
                names = [s.name for s in self.graph.sites if s.fed_by]
                self.firing = self._profile_firing(inputs, names)
            num_tuned = 0

            def tune_and_run(group: GroupStep, env: NodeValues) -> SpikeTensor:
                nonlocal num_tuned
                self._report(f"measuring {group.name}", num_tuned, len(plan.groups) + 1)
                num_tuned += 1
                self.decisions[group.name], spikes = tune_group(group, env, selector, backend)
                return spikes

            plan.run(*inputs, group_runner=tune_and_run)
            self._report("measuring the whole network", num_tuned, len(plan.groups) + 1)
            replay = self._tune_network(plan, inputs, selector)
            self._report("done", 1, 1)
        assert self.network_decision is not None
        self._plans[key] = plan if self.network_decision.choice == "plan" else None
        self._reset_guard()
        if replay is not None and self._plans[key] is not None:
            self._replays[key] = replay
        if self._cache:
            self._cache.save()

    def _tune_network(
        self, plan: Plan, inputs: tuple[torch.Tensor, ...], selector: CandidateSelector
    ) -> GraphReplay | None:
        """Select the network's own code, the plan, or the plan with all groups dense. Returns its CUDA graph.

        Groups were timed one by one, without the conversions of spikes between sparse and dense groups.
        """
        modes: dict[str, GroupMode] = {group.name: group.mode for group in plan.groups}
        dense_modes: dict[str, GroupMode] = {
            name: "dense" if mode == "sparse" else mode for name, mode in modes.items()
        }
        plan.set_modes(modes)
        reset_neurons(self.model)
        replays = {"plan": _capture_plan(plan, inputs)}
        if replays["plan"] is not None and dense_modes != modes:
            plan.set_modes(dense_modes)
            reset_neurons(self.model)
            replays["dense plan"] = _capture_plan(plan, inputs)
            plan.set_modes(modes)
        runs = {name: replay or plan.run for name, replay in replays.items() if replay or name == "plan"}
        self.network_decision = tune_network(self.model, self.run_original, runs, inputs, selector)
        if self.network_decision.choice == "dense plan":
            plan.set_modes(dense_modes)
            reason = "dense was faster in the whole network, without conversions of spikes"
            for group in plan.groups:
                if modes[group.name] == "sparse":
                    decision = self.decisions[group.name]
                    self.decisions[group.name] = decision.model_copy(
                        update={"choice": "dense", "reason": reason}
                    )
        for group in plan.groups:
            group.fix_mode(group.mode)
        replay = replays.get(self.network_decision.choice)
        if self.network_decision.choice == "dense plan":
            latency_ms = {
                **self.network_decision.latency_ms,
                "plan": self.network_decision.latency_ms["dense plan"],
            }
            self.network_decision = self.network_decision.model_copy(
                update={"choice": "plan", "latency_ms": latency_ms}
            )
        return replay

    def _tune_layers(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Select layer by layer, for a network that could not be traced."""
        selector = CandidateSelector(device=str(inputs[0].device), cache=self._cache)
        sites = [site for site in self.graph.sites if site.replaceable and site.name not in self._originals]
        with preserve_state_without_grad(self.model):
            layer_inputs = capture_inputs(
                self.model, [site.name for site in sites], lambda: self.run_original(*inputs)
            )
        for index, site in enumerate(site for site in sites if site.name in layer_inputs):
            self._report(f"measuring {site.name}", index, len(sites))
            conv = self.model.get_submodule(site.name)
            assert isinstance(conv, nn.Conv2d)
            decision, firing, sparse = tune_layer(conv, layer_inputs[site.name], selector)
            self.decisions[site.name], self.firing[site.name] = decision, firing
            if decision.choice != "module":
                self._replace(site.name, sparse.block_size)
        self.network_decision = Decision(
            choice="layers", reason="the network could not be traced; each layer was measured separately"
        )
        if self._cache:
            self._cache.save()

    def _report(self, message: str, completed: int, total: int) -> None:
        if self.progress:
            self.progress(message, completed / max(total, 1))

    def _profile_firing(self, inputs: tuple[torch.Tensor, ...], names: list[str]) -> dict[str, FiringStats]:
        self.model.__dict__.pop("forward", None)
        try:
            return profile_firing(self.model, inputs, names)
        finally:
            self.model.__dict__["forward"] = self

    # A copy of the network gets its own AcceleratedForward, which tunes again when first called.

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedForward:
        duplicate = AcceleratedForward.__new__(AcceleratedForward)
        memo[id(self)] = duplicate
        duplicate.__setstate__(self.__getstate__())
        for name in ("model", "_originals", "_sparse", "_original_forward"):
            setattr(duplicate, name, copy.deepcopy(getattr(self, name), memo))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "decisions": dict(self.decisions),
            "firing": dict(self.firing),
            "_graph": None,
            "_analyzed_key": None,
            "_plans": {},
            "_replays": {},
            "_shared": None,
            "_guard": None,
            "progress": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plans, self._replays, self._shared = {}, {}, WeakValueDictionary()


def get_accelerated_forward(model: nn.Module) -> AcceleratedForward:
    """Return the accelerated forward of an optimized model.

    Raises:
        ModelError: `model` was not optimized.
    """
    forward = model.__dict__.get("forward") if isinstance(model, nn.Module) else None
    if not isinstance(forward, AcceleratedForward):
        raise ModelError(
            f"this {type(model).__name__} is not optimized; call sparseflow.optimize(model) first"
        )
    return forward


def _capture_plan(plan: Plan, inputs: tuple[torch.Tensor, ...]) -> GraphReplay | None:
    """Capture the plan as one CUDA graph; None on a CPU, or if it is not at rest or waits for the device."""
    # A neuron that the forward pass does not call is not in the traced network.
    traced_neurons = [plan.modules[name] for name in plan.graph.neurons if name in plan.modules]
    neurons = [neuron for neuron in traced_neurons if hasattr(neuron, "v")]
    at_rest = len(neurons) == len(traced_neurons) and not any(isinstance(n.v, torch.Tensor) for n in neurons)
    if inputs[0].device.type != "cuda" or not at_rest:
        return None
    try:
        return GraphReplay(plan.run, inputs, neurons)
    except RuntimeError as error:
        torch.cuda.synchronize(inputs[0].device)
        warnings.warn(f"the network runs without a CUDA graph: {str(error).splitlines()[0]}", stacklevel=2)
        return None


def make_input_key(inputs: tuple[torch.Tensor, ...]) -> Any:
    return tuple((tuple(x.shape), x.dtype, x.device) for x in inputs)


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent) if parent else model
    setattr(owner, leaf, module)
