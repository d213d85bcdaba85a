"""`AcceleratedForward`: the forward that `optimize` installs on a network.

It runs a tuned plan (`runtime/plan.py`) where that is faster, and the network's own code everywhere else:
in training mode, where gradients are required, or if a module has hooks. It detects changes to the network
between calls and tunes again for each new input shape.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import statistics
import threading
import types
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack

from sparseflow.core import timing
from sparseflow.core.progress import Progress
from sparseflow.core.telemetry.cpu_contention import MAX_OTHER_SHARE, CpuUsageMonitor
from sparseflow.errors import ModelError, SampleError, SparseFlowError
from sparseflow.spiking.autotune.background import BackgroundTuner
from sparseflow.spiking.autotune.candidates import (
    GPU_CALLS_PER_SAMPLE,
    find_possible_mode,
    run_candidates,
    tune_group,
    tune_layer,
    tune_network,
)
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache, ShapeDecisions
from sparseflow.spiking.autotune.dispatch import CandidateSelector, Policy, compute_rate_bucket
from sparseflow.spiking.backends.blocks.geometry import select_block_size
from sparseflow.spiking.backends.selection import select_backend
from sparseflow.spiking.graph.analysis import SpikeGraph, analyze
from sparseflow.spiking.graph.forward_reads import ForwardReads
from sparseflow.spiking.graph.module_state import MutationGuard, preserve_state_without_grad, reset_neurons
from sparseflow.spiking.graph.sites import ConvSite
from sparseflow.spiking.graph.tracing import TRACE_LOCK
from sparseflow.spiking.profile.firing import FiringStats, observe_inputs, profile_firing
from sparseflow.spiking.runtime.compiled_network import CompiledNetwork, compile_network
from sparseflow.spiking.runtime.cuda_graphs import GraphReplay
from sparseflow.spiking.runtime.group_step import GroupMode, GroupStep, SharedGroups
from sparseflow.spiking.runtime.plan import Plan
from sparseflow.spiking.runtime.precision_casts import cast_tensors
from sparseflow.spiking.runtime.sparse_conv import (
    SparseConv2d,
    get_conv_unsupported_reason,
)
from sparseflow.spiking.runtime.spike_tensor import NodeValues, SpikeTensor
from sparseflow.spiking.runtime.weight_offloading import OffloadedWeights, find_offloadable

MAX_PLANS = 8
"""Plans that a network keeps where each holds its own weights, and plans of one input shape."""

MAX_SHARED_PLANS = 32
"""Plans that a network keeps where they share their weights."""

MAX_GROUPS_OVER_NETWORK = 1.5
"""Sum of the groups' latencies over the network's above which cached latencies are measured again."""

MIN_COMPILED_LATENCY = 0.75
"""Least latency of a compiled network, in units of the sum of its groups' latencies run dense.

A network that is faster than that is not compiled. Ten networks of spikingjelly took at least 0.77 on an
H100, and three took at least 0.9 on two CPU cores.
"""

MIN_CALLS_BETWEEN_TUNINGS = 1000
"""Calls between two tunings once that many were made, so that tuning stays a small share of the time."""


MeasureTime = Literal["call", "background", "never"]
"""When inputs of a new shape are measured."""

_NOT_COPIED = (
    "_graph", "_analyzed_key", "_tuned", "_shared", "_guard", "_offloaded", "_background", "_lock",
    "progress",
)  # fmt: skip
"""Attributes that a copy of an `AcceleratedForward` does not have."""

_TENSOR_TYPES = (torch.Tensor, nn.Parameter)


@dataclass(kw_only=True)
class _TunedShape:
    """How inputs of one shape run while the forward reads the same values.

    Attributes:
        plan: The plan; None for the network's own code.
        fast_path: What runs a network at rest instead of the plan: its CUDA graph, or the compiled network.
        reads: What the forward read when it was traced; None for a network that runs layer by layer.
        decisions: Why it runs so; None if tuning failed.
        last_call: Number of the last call that used this.
    """

    plan: Plan | None
    fast_path: GraphReplay | CompiledNetwork | None
    reads: ForwardReads | None
    decisions: ShapeDecisions | None
    last_call: int


class AcceleratedForward:
    """A network's forward, accelerated.

    Args:
        model: The network.
        graph: Its analysis.
        inputs: The sample of the analysis, or None.
        policy, dtype, reset, measure, freeze, offload_weights, cache, progress: See `optimize`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: SpikeGraph,
        inputs: tuple[torch.Tensor, ...] | None = None,
        *,
        policy: Policy = "measured",
        dtype: torch.dtype | None = None,
        reset: bool = False,
        measure: MeasureTime = "call",
        freeze: bool = False,
        offload_weights: bool = False,
        cache: DecisionCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.policy, self.dtype, self.reset, self.measure = model, policy, dtype, reset, measure
        self.freeze, self.offload_weights = freeze, offload_weights
        self.loaded_decisions: dict[Any, ShapeDecisions] = {}
        self._graph: SpikeGraph | None = graph
        self._analyzed_key: Any = None if inputs is None else make_input_key(inputs)
        self.decisions: dict[str, Decision] = {}
        self.firing: dict[str, FiringStats] = {}
        self.network_decision: Decision | None = None
        self.disturbance: float | None = None
        self.backend_name = "dense"
        self._cache, self.progress = cache, progress
        self._replaced: dict[str, tuple[nn.Conv2d, SparseConv2d]] = {}
        self._original_forward = model.__dict__.get("forward")
        self._reset_tuning()

    def _reset_tuning(self) -> None:
        self._tuned: dict[Any, list[_TunedShape]] = {}
        self._shared: SharedGroups = WeakValueDictionary()
        self._guard: MutationGuard | None = None
        self._offloaded: OffloadedWeights | None = None
        self._background = BackgroundTuner(_tune_copy)
        self._num_calls = self._num_tunings = self._last_tuning = 0
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._analyzing_thread: int | None = None
        _INSTANCES.add(self)

    @property
    def graph(self) -> SpikeGraph:
        """The network's analysis."""
        if self._graph is None:
            self._graph = self._analyze(None)
        return self._graph

    def _analyze(self, inputs: tuple[torch.Tensor, ...] | None) -> SpikeGraph:
        """Analyze the network itself: this thread's calls run its own code, those of other threads wait."""
        with TRACE_LOCK, self._lock:
            self._analyzing_thread = threading.get_ident()
            self._restore_modules()
            try:
                return analyze(self.model, inputs)
            finally:
                self._analyzing_thread = None
                self._replace_modules()

    def install(self) -> None:
        """Install this callable on the network; under the static policy, also replace convolutions."""
        self.model.__dict__["forward"] = self
        if self.policy == "static":
            for site in self.graph.replaceable:
                self.decisions[site.name] = self._replace_static(site)

    def uninstall(self) -> None:
        """Restore all original modules, the original forward, and the place of the weights."""
        self._load_weights()
        self._restore_modules()
        if self._original_forward is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.__dict__["forward"] = self._original_forward

    def reinstall(self) -> None:
        """Undo `uninstall`."""
        self._replace_modules()
        self.model.__dict__["forward"] = self

    def _restore_modules(self) -> None:
        for name, (conv, sparse) in self._replaced.items():
            if self.model.get_submodule(name) is sparse:
                # Parameters and mode may have been changed on the sparse module.
                conv.weight, conv.bias = sparse.weight, sparse.bias
                conv.train(sparse.training)
                self.model.set_submodule(name, conv)

    def _replace_modules(self) -> None:
        for name, (conv, sparse) in self._replaced.items():
            if self.model.get_submodule(name) is conv:
                self.model.set_submodule(name, sparse)

    def _replace(self, name: str, sparse: SparseConv2d) -> None:
        conv = self.model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        self._replaced[name] = conv, sparse
        self.model.set_submodule(name, sparse)

    def _replace_static(self, site: ConvSite) -> Decision:
        """Replace a convolution by the static rule, if the rule does not leave it dense."""
        if self._analyzed_key is None:
            raise SampleError("the static policy decides by feature-map height and needs a `sample`")
        conv, shape = self.model.get_submodule(site.name), site.value.shape
        assert isinstance(conv, nn.Conv2d)
        if shape is None:
            reason = f"called {site.num_calls} times, possibly with different heights"
            return Decision(choice="dense", reason=reason)
        unsupported_reason = get_conv_unsupported_reason(conv)
        if unsupported_reason is not None:
            return Decision(choice="dense", reason=unsupported_reason)
        block = select_block_size(shape[-2])
        if block is None:
            return Decision(choice="dense", reason=f"{shape[-2]} rows: blocks do not pay off below 8")
        sparse = SparseConv2d.from_dense(conv, block)
        self._replace(site.name, sparse)
        reason = f"{shape[-2]} rows: blocks of {block}"
        if sparse.backend == "dense":
            reason += f"; no backend for {conv.weight.device} is installed (extra `spiking`)"
        return Decision(choice=sparse.backend, reason=reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.export and fx inline this method; torch.compile leaves `_run` as it is.
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            if not torch.compiler.is_dynamo_compiling():  # which cannot trace a warning
                self._warn(
                    "an optimized network is exported or traced as its own code; call "
                    "sparseflow.restore(model) first to leave out this warning"
                )
            return self.run_original(*args, **kwargs)
        return self._run(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._get_original())

    @property
    def __code__(self) -> Any:
        return self._get_original().__code__

    @property
    def __globals__(self) -> Any:
        # torch.jit.script compiles source code, which an optimized network does not run.
        raise AttributeError(
            "this network is optimized; call sparseflow.restore(model) before torch.jit.script"
        )

    @torch.compiler.disable(reason="an optimized spiking network is not compiled; see sparseflow.restore")
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        limit_threads_after_fork()
        if kwargs or self.policy != "measured" or not self._is_accelerable(args):
            return self._finish(self.run_original(*args, **kwargs))
        with self._lock:  # a network has one state, so its calls cannot overlap
            tuned = self._get_tuned(args)
            plan = None if tuned is None else tuned.plan
            if tuned is None or plan is None:
                return self._finish(self.run_original(*args))
            needs_module_calls = not self.freeze and plan.needs_module_calls()
            if needs_module_calls and plan.get_bypass_conflict():
                return self._finish(self.run_original(*args))
            with torch.no_grad():
                fast_path = None if needs_module_calls else tuned.fast_path
                if fast_path is not None and fast_path.can_run() and self._may_bypass(args[0].device):
                    output = fast_path(*args)
                else:
                    output = self._finish(plan.run(*args))
            if self.offload_weights and self._offloaded is None:
                self._offload_again()
            return output

    def _finish(self, output: Any) -> Any:
        """Return the output of a call, after which the network is reset if it is to be."""
        if self.reset:
            reset_neurons(self.model)
        return output

    @staticmethod
    def _may_bypass(device: torch.device) -> bool:
        """Return whether a call may run no operation of torch."""
        if torch.is_autocast_enabled(device.type):
            return False
        return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _get_tuned(self, args: tuple[torch.Tensor, ...]) -> _TunedShape | None:
        """Return how inputs of this shape run, tuned on first use; None if the own code runs this time."""
        if not self.freeze:
            self._apply_mutations()
            if torch.is_grad_enabled() and self._has_trainable_parameters():
                self._warn(
                    "gradients are enabled and parameters of this network require them, so its own code "
                    "runs; call it under torch.no_grad() or torch.inference_mode() to run it accelerated"
                )
                return None
        self._num_calls += 1
        key = make_input_key(args)
        if self.measure == "background":
            self._take_background_decisions()
        for tuned in self._tuned.get(key, ()):
            if self.freeze or tuned.reads is None or tuned.reads.is_unchanged():
                tuned.last_call = self._num_calls
                return tuned
        # A thread that tunes may wait for this network's lock, so a call never waits for that thread.
        if not self._may_tune(key) or not TRACE_LOCK.acquire(blocking=False):
            return None
        try:
            decisions = self._find_decisions(key)
            if self.measure == "background" and key not in self.loaded_decisions:
                self._background.start(key, self.model, args)
            if decisions is None and self.measure != "call":
                self._add_tuned(key, None, None, None)
            else:
                self.tune(args, decisions=decisions)
        except SampleError:
            return None  # the network's own code raises the error about its input
        except SparseFlowError:
            raise
        except Exception as error:
            self._warn(f"the network runs its own code, since tuning failed: {type(error).__name__}: {error}")
            self._add_tuned(key, None, None, None)
        finally:
            TRACE_LOCK.release()
        return self._tuned[key][-1]

    def _find_decisions(self, key: Any) -> ShapeDecisions | None:
        """Return decisions for inputs of a new shape that are not measured now; None to measure."""
        if key in self.loaded_decisions or self.measure == "call":
            return self.loaded_decisions.get(key)
        measured = [tuned.decisions for tuned in self._list_tuned() if tuned.decisions is not None]
        return measured[-1] if measured else None

    def _take_background_decisions(self) -> None:
        """Let the next call of each shape that was measured in the background follow its decisions."""
        for key, decisions in self._background.take_finished().items():
            self.loaded_decisions[key] = decisions
            self._num_tunings -= len(self._tuned.pop(key, ()))

    def list_decisions(self) -> dict[Any, ShapeDecisions]:
        """List the decisions by input key: those in use, and those that were loaded."""
        current = {
            key: items[-1].decisions
            for key, items in self._tuned.items()
            if items and items[-1].decisions is not None
        }
        return {**self.loaded_decisions, **current}

    @property
    def _max_plans(self) -> int:
        shared = all(plan is None or plan.backend.shape_agnostic for plan in self.list_plans())
        return MAX_SHARED_PLANS if shared else MAX_PLANS

    def _may_tune(self, key: Any) -> bool:
        """Return whether there were few tunings, of this network and of this shape, or many calls since."""
        is_new = self._num_tunings < self._max_plans and len(self._tuned.get(key, ())) < MAX_PLANS
        return is_new or self._num_calls - self._last_tuning >= MIN_CALLS_BETWEEN_TUNINGS

    def _has_trainable_parameters(self) -> bool:
        if self._guard is not None:
            return self._guard.has_trainable_parameters()
        return any(parameter.requires_grad for parameter in self.model.parameters())

    def _warn(self, message: str) -> None:
        """Warn once for each message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network's own forward."""
        if self._original_forward is not None:
            return self._original_forward(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _get_original(self) -> Any:
        if self._original_forward is not None:
            return self._original_forward
        return types.MethodType(type(self.model).forward, self.model)

    def _is_accelerable(self, args: tuple[Any, ...]) -> bool:
        if not args or self.model.training or self._analyzing_thread == threading.get_ident():
            return False
        # A subclass or a mode stands for a transformation (vmap, fake tensors, counting of FLOPs).
        if torch._C._len_torch_dispatch_stack() > 0 or peek_interpreter_stack() is not None:
            return False
        return all(type(x) in _TENSOR_TYPES and not x.requires_grad and x.numel() > 0 for x in args)

    def _apply_mutations(self) -> None:
        """Apply changes made to the network since the last call.

        New values (an optimizer, load_state_dict, .to()) invalidate prepared weights. Other modules, other
        parameters or neurons with other constants invalidate the plans, which are tuned again.
        """
        guard = self._guard
        if guard is None or (guard.is_structure_unchanged() and guard.are_values_unchanged()):
            return
        self._load_weights()
        if not guard.is_structure_unchanged():
            self._tuned.clear()
            self._analyzed_key = None
        for tuned in self._list_tuned():
            fast_path = tuned.fast_path
            if not isinstance(fast_path, CompiledNetwork) or not fast_path.refresh():
                tuned.fast_path = None
            if tuned.plan is not None:
                tuned.plan.invalidate()
        self._reset_guard()

    def _reset_guard(self) -> None:
        tuned = [(item.plan, item.fast_path) for item in self._list_tuned()]
        plans = [(plan, fast_path is not None) for plan, fast_path in tuned if plan is not None]
        modules = {module: None for plan, all_layers in plans for module in plan.list_layers(all_layers)}
        self._guard = MutationGuard(self.model, modules) if plans else None

    def _offload_weights(self) -> None:
        """Offload the parameters that no plan reads, if that is requested."""
        tuned = self._list_tuned()
        parameters: list[nn.Parameter] = []
        if self.offload_weights and all(item.plan is not None for item in tuned):
            users = [user for item in tuned for user in (item.plan, item.fast_path)]
            used = [
                user.list_used_parameters() for user in users if isinstance(user, (Plan, CompiledNetwork))
            ]
            parameters = find_offloadable(self.model, set().union(*used))
        try:
            self._offloaded = OffloadedWeights(parameters)
        except (OSError, RuntimeError) as error:
            self._warn(f"the weights are not offloaded: {error}")
            self._offloaded = OffloadedWeights([])

    def _offload_again(self) -> None:
        """Offload the weights after a call that has prepared the new ones."""
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not is_capturing and self._guard is not None and self._guard.are_values_unchanged():
            self._offload_weights()
            self._reset_guard()

    def _load_weights(self) -> None:
        """Undo `_offload_weights`: the network's own code is measured, or weights are prepared anew."""
        if self._offloaded is not None:
            self._offloaded.load()
            self._offloaded = None
            self._reset_guard()

    @property
    def offloaded_bytes(self) -> int:
        """Size of the parameters that are offloaded, in bytes."""
        return 0 if self._offloaded is None else self._offloaded.nbytes

    def _list_tuned(self) -> list[_TunedShape]:
        """List what was tuned, the one that was used last at the end."""
        tuned = [item for items in self._tuned.values() for item in items]
        return sorted(tuned, key=lambda item: item.last_call)

    def list_plans(self) -> list[Plan | None]:
        """List the plans, the one that was used last at the end; None where the network's own code runs."""
        return [tuned.plan for tuned in self._list_tuned()]

    def release_prepared(self) -> int:
        """Drop the weights that plans have prepared, on a CPU; the next call prepares them again.

        Returns:
            The bytes of the weights of compiled networks, which stay.
        """
        tuned = self._list_tuned()
        for item in tuned:
            if item.plan is not None:
                item.plan.invalidate()
        return sum(item.fast_path.nbytes for item in tuned if isinstance(item.fast_path, CompiledNetwork))

    def measure_layer_times(self, inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
        """See `layer_times`."""
        with self._lock, torch.no_grad():
            return self._measure_layer_times(inputs)

    def _measure_layer_times(self, inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
        tuned = self._get_tuned(inputs)
        plan = None if tuned is None else tuned.plan
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

    def tune(
        self,
        inputs: tuple[torch.Tensor, ...],
        *,
        compile: bool = False,
        decisions: ShapeDecisions | None = None,
    ) -> None:
        """Select how to run inputs of this shape, by timing; the network's state is restored.

        Args:
            inputs: Inputs of the network.
            compile: Whether the compiled dense network is a candidate.
            decisions: Decisions to follow; nothing is timed.
        """
        key = make_input_key(inputs)
        plan = fast_path = reads = None
        cpus = CpuUsageMonitor()
        with TRACE_LOCK, self._lock:
            self._load_weights()
            if self.network_decision is None or self.network_decision.choice != "layers":
                if key != self._analyzed_key or not self._is_graph_current():
                    # A trace is valid for one input shape: branches and loops may depend on shapes.
                    self._graph, self._analyzed_key = self._analyze(inputs), key
                reads = self.graph.reads
                if reads is None or reads.side_effect is not None:
                    self._tune_layers(inputs, decisions)
                    reads = None
                elif decisions is None:
                    plan, fast_path = self._tune_plan(inputs, compile)
                else:
                    plan, fast_path = self._follow_decisions(inputs, decisions, compile)
                if decisions is None:
                    self._finish_measurement(cpus, inputs[0].device)
            self._add_tuned(key, plan, fast_path, reads, self._collect_decisions())

    def _finish_measurement(self, cpus: CpuUsageMonitor, device: torch.device) -> None:
        """Cache the decisions, unless other programs used the CPUs that they were measured on."""
        other_share = cpus.measure_other_share() if device.type == "cpu" else None
        is_disturbed = other_share is not None and other_share > MAX_OTHER_SHARE
        self.disturbance = other_share if is_disturbed else None
        if self._cache:
            if is_disturbed:
                self._cache.discard_added()
            self._cache.save()

    def _is_graph_current(self) -> bool:
        reads = self.graph.reads
        return reads is None or reads.is_unchanged()

    def _add_tuned(
        self,
        key: Any,
        plan: Plan | None,
        fast_path: GraphReplay | CompiledNetwork | None,
        reads: ForwardReads | None,
        decisions: ShapeDecisions | None = None,
    ) -> None:
        """Add what was tuned; the plans that were not used for the longest time make room."""
        for oldest in self._list_tuned()[: 1 - self._max_plans]:
            for items in self._tuned.values():
                items[:] = [item for item in items if item is not oldest]
        self._num_tunings += 1
        self._last_tuning = self._num_calls
        tuned = _TunedShape(
            plan=plan, fast_path=fast_path, reads=reads, decisions=decisions, last_call=self._num_calls
        )
        self._tuned.setdefault(key, []).append(tuned)
        self._load_weights()
        self._offload_weights()
        self._reset_guard()

    def _make_plan(self, inputs: tuple[torch.Tensor, ...]) -> Plan | str:
        """Make a plan of the traced network, or return why the network cannot run by a plan."""
        backend = select_backend(inputs[0], self.model, self.dtype)
        if backend is None:
            model_dtype = next((p.dtype for p in self.model.parameters()), inputs[0].dtype)
            requested = f" with dtype={self.dtype}" if self.dtype not in (None, model_dtype) else ""
            return f"no backend for {model_dtype}{requested} on {inputs[0].device}"
        self.backend_name = backend.name
        plan = Plan(self.graph, backend, self._shared, keeps_membranes=not self.reset)
        if plan.casts:
            try:
                with preserve_state_without_grad(self.model):
                    plan.run(*inputs)
            except RuntimeError:  # an operation does not take tensors of the requested precision
                plan = Plan(self.graph, backend, self._shared, casts=False, keeps_membranes=not self.reset)
        return plan if plan.write_hazard is None else plan.write_hazard

    def _tune_plan(
        self, inputs: tuple[torch.Tensor, ...], compile: bool
    ) -> tuple[Plan | None, GraphReplay | CompiledNetwork | None]:
        """Select each group's mode, then what runs the network.

        Returns:
            The plan, and its CUDA graph or the compiled network; (None, None) for the network's own code.
        """
        plan = self._make_plan(inputs)
        if isinstance(plan, str):
            self.network_decision = Decision(choice="own", reason=plan)
            return None, None
        is_cuda = inputs[0].is_cuda
        selector = CandidateSelector(
            device=str(inputs[0].device),
            cache=self._cache,
            calls_per_sample=GPU_CALLS_PER_SAMPLE if is_cuda else 1,
            capture=is_cuda,
        )
        self._observe(plan, inputs)
        self._compile_kernels(plan, inputs, selector)
        replay = self._measure_plan(plan, inputs, selector)
        if self._contradicts_cache(plan):
            replay = self._measure_plan(plan, inputs, replace(selector, refresh=True))
        compiled = self._tune_compiled(plan, replay, inputs, selector) if compile else None
        assert self.network_decision is not None
        if self.network_decision.choice == "own":
            return None, None
        return plan, compiled or replay

    def _observe(self, plan: Plan, inputs: tuple[torch.Tensor, ...]) -> None:
        """Choose the plan's channel layouts and, the first time, measure how often neurons fire."""
        with preserve_state_without_grad(self.model):
            plan.choose_layouts(*inputs)
        if not self.firing:
            names = [s.name for s in self.graph.sites if s.fed_by]
            with preserve_state_without_grad(self.model):
                self.firing = profile_firing(self.model, inputs, names, forward=self.run_original)

    def _compile_kernels(
        self, plan: Plan, inputs: tuple[torch.Tensor, ...], selector: CandidateSelector
    ) -> None:
        """Compile the kernels of all groups in several processes, before the groups need them."""
        kernels = plan.backend.fused_kernels
        if kernels is None:
            return

        def run(group: GroupStep, env: NodeValues) -> Any:
            return run_candidates(group, env, selector, plan.backend)

        def run_plan() -> None:
            plan.invalidate()
            plan.run(*inputs, group_runner=run)

        self._report("compiling kernels", 0, len(plan.groups) + 1)
        with preserve_state_without_grad(self.model):
            kernels.compile_kernels(run_plan)
        plan.invalidate()

    def _collect_decisions(self) -> ShapeDecisions | None:
        """Collect the decisions of the last tuning."""
        if self.network_decision is None:
            return None
        return ShapeDecisions(network=self.network_decision, groups=dict(self.decisions))

    def _follow_decisions(
        self, inputs: tuple[torch.Tensor, ...], decisions: ShapeDecisions, compile: bool
    ) -> tuple[Plan | None, GraphReplay | CompiledNetwork | None]:
        """Prepare what the decisions select, without timing; see `_tune_plan`.

        A compiled network is compiled only with `compile`; the plan runs otherwise.
        """
        self.network_decision = decisions.network
        if decisions.network.choice not in ("plan", "compiled"):
            return None, None
        plan = self._make_plan(inputs)
        if isinstance(plan, str):
            self.network_decision = Decision(choice="own", reason=plan)
            return None, None
        self._observe(plan, inputs)
        self.decisions.update(decisions.groups)

        def set_mode_and_run(group: GroupStep, env: NodeValues) -> Any:
            group.fix_mode(find_possible_mode(group, env, decisions.groups.get(group.name)))
            return group.run(env)

        with preserve_state_without_grad(self.model):
            plan.run(*inputs, group_runner=set_mode_and_run)
            plan.update_output_forms()
            reset_neurons(self.model)
            replay = _capture_plan(plan, inputs, self.reset)
            if compile and decisions.network.choice == "compiled":
                compiled = compile_network(plan, inputs, self.run_original, reset=self.reset)
                return plan, replay if isinstance(compiled, str) else compiled
        return plan, replay

    def _measure_plan(
        self, plan: Plan, inputs: tuple[torch.Tensor, ...], selector: CandidateSelector
    ) -> GraphReplay | None:
        """Measure the groups, then the network; store the decisions and return the plan's CUDA graph."""
        num_tuned = 0

        def tune_and_run(group: GroupStep, env: NodeValues) -> SpikeTensor:
            nonlocal num_tuned
            self._report(f"measuring {group.name}", num_tuned, len(plan.groups) + 1)
            num_tuned += 1
            self.decisions[group.name], spikes = tune_group(group, env, selector, plan.backend)
            return spikes

        with preserve_state_without_grad(self.model):
            plan.run(*inputs, group_runner=tune_and_run)
            self._report("measuring the whole network", num_tuned, len(plan.groups) + 1)
            self.network_decision, replay = self._tune_network(plan, inputs, selector)
            self._report("done", 1, 1)
        return replay

    def _contradicts_cache(self, plan: Plan) -> bool:
        """Return whether groups, some from the cache, take far longer than the network that contains them."""
        decisions = [self.decisions[group.name] for group in plan.groups]
        if self.network_decision is None or not any(decision.from_cache for decision in decisions):
            return False
        modules_ms = sum(decision.latency_ms.get("module", 0.0) for decision in decisions)
        return modules_ms > MAX_GROUPS_OVER_NETWORK * self.network_decision.latency_ms["own"]

    def _tune_network(
        self, plan: Plan, inputs: tuple[torch.Tensor, ...], selector: CandidateSelector
    ) -> tuple[Decision, GraphReplay | None]:
        """Select the network's own code, the plan, or the plan with all groups dense, and its CUDA graph.

        Groups were timed one by one, without the conversions of spikes between sparse and dense groups.
        """
        modes: dict[str, GroupMode] = {group.name: group.mode for group in plan.groups}
        sparse_names = [name for name, mode in modes.items() if mode == "sparse"]
        dense_modes: dict[str, GroupMode] = {**modes, **dict.fromkeys(sparse_names, "dense")}
        plan.set_modes(modes)
        reset_neurons(self.model)
        replays = {"plan": _capture_plan(plan, inputs, self.reset)}
        if replays["plan"] is not None and sparse_names:
            plan.set_modes(dense_modes)
            reset_neurons(self.model)
            replays["dense plan"] = _capture_plan(plan, inputs, self.reset)
            plan.set_modes(modes)
        runs = {name: replay or plan.run for name, replay in replays.items() if replay or name == "plan"}
        decision = tune_network(self.model, self.run_original, runs, inputs, selector)
        replay = replays.get(decision.choice)
        if decision.choice == "dense plan":
            plan.set_modes(dense_modes)
            sparse_ms, dense_ms = (decision.latency_ms[name] for name in ("plan", "dense plan"))
            reason = (
                "dense was faster in the whole network, without conversions of spikes: "
                f"{dense_ms:.3f} ms against {sparse_ms:.3f} ms"
            )
            for name in sparse_names:
                update = {"choice": "dense", "reason": reason}
                self.decisions[name] = self.decisions[name].model_copy(update=update)
            latency_ms = {**decision.latency_ms, "plan": decision.latency_ms["dense plan"]}
            decision = decision.model_copy(update={"choice": "plan", "latency_ms": latency_ms})
        for group in plan.groups:
            group.fix_mode(group.mode)
        return decision, replay

    def _tune_compiled(
        self,
        plan: Plan,
        replay: GraphReplay | None,
        inputs: tuple[torch.Tensor, ...],
        selector: CandidateSelector,
    ) -> CompiledNetwork | None:
        """Time the compiled dense network against what was selected; return it if it is faster."""
        decision = self.network_decision
        assert decision is not None
        key = self._make_compiled_key(plan, inputs)
        cached = selector.find_cached(key)
        if cached is None and not self._may_gain_from_compiling(plan, decision):
            cached = decision
            selector.remember(key, decision)
        if cached is not None and cached.choice != "compiled":
            return None
        self._report("compiling the dense network", len(plan.groups), len(plan.groups) + 1)
        with preserve_state_without_grad(self.model):
            compiled = compile_network(plan, inputs, self.run_original, reset=self.reset)
            if isinstance(compiled, str):
                reason = f"{decision.reason}; no compiled network: {compiled}"
                self.network_decision = decision.model_copy(update={"reason": reason})
                return None
            reset_neurons(self.model)
            runs = {"plan": replay or plan.run, "compiled": compiled}
            self.network_decision = tune_network(
                self.model, self.run_original, runs, inputs, selector, key=key, incumbent=decision.choice
            )
        self._report("done", 1, 1)
        if self.network_decision.choice != "compiled":
            return None
        plan.invalidate()  # its weights are prepared again if a call carries state over
        return compiled

    def _may_gain_from_compiling(self, plan: Plan, decision: Decision) -> bool:
        """Return whether what was selected takes longer than the least that a compiled network takes."""
        groups_ms = [self.decisions[group.name].latency_ms for group in plan.groups]
        dense_ms = sum(ms.get("dense", ms.get("module", 0.0)) for ms in groups_ms)
        network_ms = min(decision.latency_ms["own"], decision.latency_ms["plan"])
        return network_ms > MIN_COMPILED_LATENCY * dense_ms

    def _make_compiled_key(self, plan: Plan, inputs: tuple[torch.Tensor, ...]) -> str:
        """Make the cache key of the decision between the plan and the compiled network."""
        assert plan.graph.module is not None
        code = f"{plan.graph.module.code}\n{self.model}"
        rates = [stats.firing_rate for stats in self.firing.values()]
        rate = compute_rate_bucket(statistics.fmean(rates) if rates else 0.0)
        shapes = [(tuple(x.shape), str(x.dtype)) for x in inputs]
        digest = hashlib.sha256(code.encode()).hexdigest()[:32]
        return f"network|{digest}|{shapes}|{plan.dtype}@{rate}|threads={torch.get_num_threads()}"

    def _tune_layers(self, inputs: tuple[torch.Tensor, ...], decisions: ShapeDecisions | None = None) -> None:
        """Select layer by layer, for a network that could not be traced; or follow decisions."""
        selector = CandidateSelector(device=str(inputs[0].device), cache=self._cache)
        names = [site.name for site in self.graph.replaceable if site.name not in self._replaced]
        layer_inputs: dict[str, torch.Tensor] = {}
        with preserve_state_without_grad(self.model):
            observe_inputs(
                self.model,
                names,
                lambda: self.run_original(*inputs),
                lambda name, x: layer_inputs.update({name: x.detach().clone()}),
            )
        for index, name in enumerate(name for name in names if name in layer_inputs):
            self._report(f"measuring {name}", index, len(names))
            conv = self.model.get_submodule(name)
            assert isinstance(conv, nn.Conv2d)
            decision = None if decisions is None else decisions.groups.get(name)
            self.decisions[name], self.firing[name], sparse = tune_layer(
                conv, layer_inputs[name], selector, decision
            )
            if self.decisions[name].choice != "module":
                self._replace(name, sparse)
        problem = f"the network could not be traced ({self.graph.trace_error})"
        if (reads := self.graph.reads) is not None:
            problem = f"a plan cannot replace the network's forward, which {reads.side_effect}"
        self.network_decision = Decision(
            choice="layers", reason=f"{problem}; each layer was measured separately"
        )

    def _report(self, message: str, completed: int, total: int) -> None:
        if self.progress:
            self.progress(message, completed / max(total, 1))

    # A copy of the network gets its own AcceleratedForward, which tunes again when first called.

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedForward:
        duplicate = AcceleratedForward.__new__(AcceleratedForward)
        memo[id(self)] = duplicate
        duplicate.__setstate__(self.__getstate__())
        for name in ("model", "_replaced", "_original_forward"):
            setattr(duplicate, name, copy.deepcopy(getattr(self, name), memo))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "decisions": dict(self.decisions),
            "firing": dict(self.firing),
            **dict.fromkeys(_NOT_COPIED),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_tuning()


_INSTANCES: WeakSet[AcceleratedForward] = WeakSet()
_is_forked = False


def limit_threads_after_fork() -> None:
    """Run torch on one thread if the parent of this process has run networks.

    Its operations would wait for OpenMP threads that exist in the parent only.
    """
    if _is_forked and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _adapt_to_fork() -> None:
    """Forget the threads of the parent process: those that held locks, and torch's OpenMP team."""
    global _is_forked
    _is_forked = bool(_INSTANCES)
    TRACE_LOCK._at_fork_reinit()  # type: ignore[attr-defined]
    for forward in _INSTANCES:
        forward._lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_adapt_to_fork)


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


def _tune_copy(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> ShapeDecisions | None:
    """Measure inputs on a copy of an optimized network; return the decisions."""
    forward = get_accelerated_forward(model)
    forward.tune(inputs)
    return forward.list_decisions().get(make_input_key(inputs))


def _capture_plan(plan: Plan, inputs: tuple[torch.Tensor, ...], reset: bool) -> GraphReplay | None:
    """Capture the plan as one CUDA graph; None on a CPU, or if it is not at rest or waits for the device."""
    # A neuron that the forward pass does not call is not in the traced network.
    traced_neurons = [plan.modules[name] for name in plan.graph.neurons if name in plan.modules]
    neurons = [neuron for neuron in traced_neurons if hasattr(neuron, "v")]
    at_rest = len(neurons) == len(traced_neurons) and not any(isinstance(n.v, torch.Tensor) for n in neurons)
    if inputs[0].device.type != "cuda" or not at_rest or plan.keeps_other_state:
        return None
    try:
        # The copy of the inputs casts them, so that the plan need not.
        inputs = cast_tensors(inputs, plan.dtype) if plan.casts else inputs
        return GraphReplay(plan.run, inputs, neurons, reset=reset, starts_at_rest=plan.starts_at_rest)
    except RuntimeError as error:
        torch.cuda.synchronize(inputs[0].device)
        warnings.warn(f"the network runs without a CUDA graph: {str(error).splitlines()[0]}", stacklevel=2)
        return None


def make_input_key(inputs: tuple[torch.Tensor, ...]) -> Any:
    return tuple((tuple(x.shape), x.dtype, x.device) for x in inputs)
