"""`Accelerated`: the forward that `optimize` puts in front of a network.

It runs a measured plan (`plan.py`) wherever that is surely faster, and the network's own code everywhere
else: while training, for an input that requires gradients, or when somebody hooked a module. It notices what
changes in the network between calls, and measures anew for each input shape (`deciding.py`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from sparseflow.core import timing
from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.autotune.candidates import (
    GPU_CALLS,
    decide_group,
    decide_layer,
    decide_whole,
    inputs_of,
)
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache
from sparseflow.spiking.autotune.dispatch import Chooser, Policy
from sparseflow.spiking.backends.blocks.geometry import static_block
from sparseflow.spiking.backends.selection import backend_for
from sparseflow.spiking.graph import ConvSite, SpikeGraph, analyze
from sparseflow.spiking.graph.module_state import reset, untouched
from sparseflow.spiking.profile.firing import Activity, activities
from sparseflow.spiking.runtime.cuda_graphs import Replay
from sparseflow.spiking.runtime.group_step import GroupStep, Shared, Way
from sparseflow.spiking.runtime.mutation_guard import Watch
from sparseflow.spiking.runtime.plan import Plan
from sparseflow.spiking.runtime.sparse_conv import SparseConv2d, default_backend, refusal
from sparseflow.spiking.runtime.spike_tensor import Env, Spikes

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how many are done, and how many there are."""

MOST_PLANS = 8
"""Input shapes that plans are kept for."""


class Accelerated:
    """A network's forward, accelerated.

    Args:
        model: The network.
        graph: What `analyze` found in it.
        inputs: The sample that it was analysed with, or None.
        policy, dtype, cache, progress: As for `optimize`.
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
        self._analysed: Any = None if inputs is None else key_of(inputs)
        self.decisions: dict[str, Decision] = {}
        self.activities: dict[str, Activity] = {}
        self.whole: Decision | None = None
        self.backend_name = "dense"
        self._cache, self.progress = cache, progress
        self._originals: dict[str, nn.Conv2d] = {}
        self._sparse: dict[str, SparseConv2d] = {}
        self._own_forward = model.__dict__.get("forward")
        self._plans: dict[Any, Plan | None] = {}
        self._replays: dict[Any, Replay] = {}
        self._shared: Shared = WeakValueDictionary()
        self._watch: Watch | None = None

    @property
    def graph(self) -> SpikeGraph:
        """What was found in the network."""
        if self._graph is None:
            self._graph = self._analyze(None)
        return self._graph

    def _analyze(self, inputs: tuple[torch.Tensor, ...] | None) -> SpikeGraph:
        """Analyse the network itself, without what was put in front of it."""
        self.uninstall()
        try:
            return analyze(self.model, inputs)
        finally:
            self.reinstall()

    # Installing and removing

    def install(self) -> None:
        """Put this callable in front of the network and, under the static policy, replace convolutions."""
        self.model.__dict__["forward"] = self
        if self.policy == "static":
            for site in self.graph.sites:
                self._replace_static(site)

    def uninstall(self) -> None:
        """Put every original module and the original forward back."""
        for name, conv in self._originals.items():
            sparse = self._sparse[name]
            if self.model.get_submodule(name) is sparse:
                # What was assigned or switched meanwhile holds for the original too.
                conv.weight, conv.bias = sparse.weight, sparse.bias
                conv.train(sparse.training)
                _set_submodule(self.model, name, conv)
        if self._own_forward is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.__dict__["forward"] = self._own_forward

    def reinstall(self) -> None:
        """Take `uninstall` back."""
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
        if self._analysed is None:
            raise SampleError("the static policy decides by feature-map height and needs a sample to see it")
        conv, shape = self.model.get_submodule(site.name), site.value.shape
        assert isinstance(conv, nn.Conv2d)
        unfit = refusal(conv) if shape else f"called {len(site.nodes)} times, so its height is not one number"
        if unfit is not None or shape is None:
            self.decisions[site.name] = Decision(way="dense", why=str(unfit))
            return
        block = static_block(shape[-2])
        if block is None:
            why = f"{shape[-2]} rows: below 8 the blocks cost more than they save"
            self.decisions[site.name] = Decision(way="dense", why=why)
            return
        self._replace(site.name, block)
        backend = default_backend(conv.weight.device)
        why = f"{shape[-2]} rows: blocks of {block}"
        if backend == "dense":
            why += f"; but nothing that skips them on {conv.weight.device} is installed (extra `spiking`)"
        self.decisions[site.name] = Decision(way=backend, why=why)

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or self.policy != "measured" or not self._may_accelerate(args):
            return self.original(*args, **kwargs)
        key = key_of(args)
        plan = self._plan_for(args, key)
        if plan is None or plan.overruled():
            return self.original(*args)
        replay = self._replays.get(key)
        with torch.no_grad():
            fits = replay is not None and replay.at_rest() and not plan.watched()
            if replay is not None and fits and not torch.cuda.is_current_stream_capturing():
                return replay(*args)
            return plan.run(*args)

    def _plan_for(self, args: tuple[torch.Tensor, ...], key: Any) -> Plan | None:
        """The plan for inputs of this shape, measured now if they are the first; None for the own forward."""
        self._refresh()
        if key not in self._plans:
            try:
                self.measure(args)
            except SampleError:
                return None  # the network's own code says what is wrong with its input
        return self._plans[key]

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The network's own forward."""
        if self._own_forward is not None:
            return self._own_forward(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _may_accelerate(self, args: tuple[Any, ...]) -> bool:
        tensors = all(isinstance(a, torch.Tensor) and not a.requires_grad and a.numel() > 0 for a in args)
        return bool(args) and tensors and not self.model.training

    def _refresh(self) -> None:
        """Notice what changed in the network since the last call.

        New numbers (an optimiser, load_state_dict, .to()) are prepared anew. Other modules, other parameters
        or neurons with other constants make another network, which is measured anew.
        """
        watch = self._watch
        if watch is None or (watch.same_parts() and watch.same_numbers()):
            return
        if not watch.same_parts():
            self._plans.clear()
            self._analysed = None
        for known in self._plans.values():
            if known is not None:
                known.forget()
        self._replays.clear()
        self._watch_now()

    def _watch_now(self) -> None:
        plan = next((plan for plan in self._plans.values() if plan is not None), None)
        self._watch = None if plan is None else Watch(self.model, [group.neuron for group in plan.groups])

    def plans(self) -> list[Plan | None]:
        """One entry an input shape seen, oldest first; None where the network's own code stays."""
        return list(self._plans.values())

    def times(self, inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
        """See `layer_times`."""
        plan = self._plan_for(inputs, key_of(inputs))
        found: dict[str, float] = {}
        if plan is None:
            return found

        def around(group: GroupStep, env: Env) -> Spikes:
            results: list[Spikes] = []
            samples = timing.measure(
                lambda: results.append(group.run(env)), warmup=0, repeats=1, device=inputs[0].device
            )
            found[group.name] = samples.median_ms
            return results[0]

        with untouched(self.model):
            plan.run(*inputs)
        with untouched(self.model):
            plan.run(*inputs, around=around)
        return found

    # Measuring

    def measure(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Decide how to run inputs of this shape, by timing; the network's memories are left as they were."""
        key = key_of(inputs)
        while len(self._plans) >= MOST_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._replays.pop(oldest, None)
        if self.whole is not None and self.whole.way == "layers":
            self._plans[key] = None
            return
        if key != self._analysed:
            # A trace holds for inputs like the one it was made with: branches and loops may depend on shapes.
            self._graph, self._analysed = self._analyze(inputs), key
        if self.graph.module is None:
            self._plans[key] = None
            self._measure_layers(inputs)
            return
        backend = backend_for(inputs[0], self.model, self.dtype)
        if backend is None:
            self._plans[key] = None
            held = next((p.dtype for p in self.model.parameters()), inputs[0].dtype)
            asked = f" with dtype={self.dtype}" if self.dtype not in (None, held) else ""
            self.whole = Decision(way="own", why=f"no backend for {held}{asked} on {inputs[0].device}")
            return
        self.backend_name = backend.name
        plan = Plan(self.graph, backend, self._shared)
        if plan.conflict is not None:
            self._plans[key] = None
            self.whole = Decision(way="own", why=plan.conflict)
            return
        queued = GPU_CALLS if inputs[0].is_cuda else 1
        chooser = Chooser(device=str(inputs[0].device), cache=self._cache, calls_per_sample=queued)
        with untouched(self.model):
            plan.arrange(*inputs)
        with untouched(self.model):
            if not self.activities:
                names = [s.name for s in self.graph.sites if s.fed_by]
                self.activities = self._observe(inputs, names)
            done = 0

            def around(group: GroupStep, env: Env) -> Spikes:
                nonlocal done
                if self.progress:
                    self.progress(group.name, done, len(plan.groups) + 1)
                done += 1
                self.decisions[group.name], spikes = decide_group(group, env, chooser, backend)
                return spikes

            plan.run(*inputs, around=around)
            if self.progress:
                self.progress("whole network", done, len(plan.groups) + 1)
            replay = self._decide_whole(plan, inputs, chooser)
            if self.progress:
                self.progress("done", done + 1, len(plan.groups) + 1)
        assert self.whole is not None
        self._plans[key] = plan if self.whole.way == "plan" else None
        self._watch_now()
        if replay is not None and self._plans[key] is not None:
            self._replays[key] = replay
        if self._cache:
            self._cache.save()

    def _decide_whole(self, plan: Plan, inputs: tuple[torch.Tensor, ...], chooser: Chooser) -> Replay | None:
        """Keep the network's own code, the plan, or the plan with every group dense. Returns its CUDA graph.

        Groups were timed one by one; that spikes change their form between a sparse and a dense one was not.
        """
        chosen: dict[str, Way] = {group.name: group.way for group in plan.groups}
        dense: dict[str, Way] = {name: "dense" if way == "sparse" else way for name, way in chosen.items()}
        plan.run_all(chosen)
        reset(self.model)
        replays = {"plan": _replay(plan, inputs)}
        if replays["plan"] is not None and dense != chosen:
            plan.run_all(dense)
            reset(self.model)
            replays["dense plan"] = _replay(plan, inputs)
            plan.run_all(chosen)
        runs = {name: replay or plan.run for name, replay in replays.items() if replay or name == "plan"}
        self.whole = decide_whole(self.model, self.original, runs, inputs, chooser)
        if self.whole.way == "dense plan":
            plan.run_all(dense)
            why = "in the whole network the dense way was faster: spikes need not change their form"
            for group in plan.groups:
                if chosen[group.name] == "sparse":
                    kept = self.decisions[group.name]
                    self.decisions[group.name] = kept.model_copy(update={"way": "dense", "why": why})
        for group in plan.groups:
            group.settle(group.way)
        replay = replays.get(self.whole.way)
        if self.whole.way == "dense plan":
            ms = {**self.whole.ms, "plan": self.whole.ms["dense plan"]}
            self.whole = self.whole.model_copy(update={"way": "plan", "ms": ms})
        return replay

    def _measure_layers(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Decide layer by layer, for a network that could not be traced."""
        chooser = Chooser(device=str(inputs[0].device), cache=self._cache)
        sites = [site for site in self.graph.sites if site.replaceable and site.name not in self._originals]
        with untouched(self.model):
            seen = inputs_of(self.model, [site.name for site in sites], lambda: self.original(*inputs))
        for done, site in enumerate(site for site in sites if site.name in seen):
            if self.progress:
                self.progress(site.name, done, len(sites))
            conv = self.model.get_submodule(site.name)
            assert isinstance(conv, nn.Conv2d)
            decision, activity, sparse = decide_layer(conv, seen[site.name], chooser)
            self.decisions[site.name], self.activities[site.name] = decision, activity
            if decision.way != "module":
                self._replace(site.name, sparse.block_size)
        self.whole = Decision(
            way="layers", why="the network could not be traced; each layer was measured alone"
        )
        if self._cache:
            self._cache.save()

    def _observe(self, inputs: tuple[torch.Tensor, ...], names: list[str]) -> dict[str, Activity]:
        self.model.__dict__.pop("forward", None)
        try:
            return activities(self.model, inputs, names)
        finally:
            self.model.__dict__["forward"] = self

    # Copying: a copy of the network gets an Accelerated of its own, which measures again when first called.

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        twin = Accelerated.__new__(Accelerated)
        memo[id(self)] = twin
        twin.__setstate__(self.__getstate__())
        for name in ("model", "_originals", "_sparse", "_own_forward"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "decisions": dict(self.decisions),
            "activities": dict(self.activities),
            "_graph": None,
            "_analysed": None,
            "_plans": {},
            "_replays": {},
            "_shared": None,
            "_watch": None,
            "progress": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plans, self._replays, self._shared = {}, {}, WeakValueDictionary()


def accelerated(model: nn.Module) -> Accelerated:
    """The machinery in front of an optimised model.

    Raises:
        ModelError: `model` was not optimised.
    """
    found = model.__dict__.get("forward") if isinstance(model, nn.Module) else None
    if not isinstance(found, Accelerated):
        raise ModelError(
            f"this {type(model).__name__} has not been optimised; call sparseflow.optimize(model) first"
        )
    return found


def _replay(plan: Plan, inputs: tuple[torch.Tensor, ...]) -> Replay | None:
    """The plan as one CUDA graph; None on a CPU, or when it is not at rest or waits for the device."""
    # A neuron that the forward pass does not call is no part of the traced network.
    named = [plan.modules[name] for name in plan.graph.neurons if name in plan.modules]
    neurons = [neuron for neuron in named if hasattr(neuron, "v")]
    at_rest = len(neurons) == len(named) and not any(isinstance(n.v, torch.Tensor) for n in neurons)
    if inputs[0].device.type != "cuda" or not at_rest:
        return None
    try:
        return Replay(plan.run, inputs, neurons)
    except RuntimeError as error:
        torch.cuda.synchronize(inputs[0].device)
        warnings.warn(f"the network runs without a CUDA graph: {str(error).splitlines()[0]}", stacklevel=2)
        return None


def key_of(inputs: tuple[torch.Tensor, ...]) -> Any:
    return tuple((tuple(x.shape), x.dtype, x.device) for x in inputs)


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent) if parent else model
    setattr(owner, leaf, module)
