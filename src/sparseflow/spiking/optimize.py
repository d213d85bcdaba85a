"""`optimize`, `restore`: put the accelerated forward in front of a network, and take it away again.

The network keeps its parameters and state_dict keys. Its `forward` becomes an `Accelerated` callable, which
runs a measured plan (`plan.py`) wherever that is surely faster, and the network's own code everywhere else:
while training, for an input that requires gradients, or when somebody hooked a module. Under the static
policy, and where a network cannot be traced, single convolutions become `SparseConv2d` objects around the
same parameters instead.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparseflow.core import timing
from sparseflow.errors import InputError, ModelError, SampleError
from sparseflow.spiking.backend import Backend, backend_for
from sparseflow.spiking.dispatch import Chooser, Decision, DecisionCache, Policy, rate_bucket, static_block
from sparseflow.spiking.graph import ConvSite, SpikeGraph, analyze
from sparseflow.spiking.graphs import Replay, captured
from sparseflow.spiking.modules import SparseConv2d, default_backend, refusal
from sparseflow.spiking.plan import Env, GroupStep, Plan, Spikes, as_dense
from sparseflow.spiking.profile import Activity, activities, activity_of
from sparseflow.spiking.registry import is_spiking_neuron
from sparseflow.spiking.state import memories, put_back, reset, untouched
from sparseflow.spiking.watch import Watch

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how many are done, and how many there are."""

MOST_PLANS = 8
GPU_CALLS = 20
"""Replays of a group timed together: one alone would mostly measure how long an idle GPU takes to start."""
MOST_FLIPS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Fraction of spikes that may flip at the threshold when sums are rounded otherwise, by weights' dtype."""


def optimize(
    model: nn.Module,
    sample: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    policy: Policy = "measured",
    dtype: torch.dtype | None = None,
    cache: bool | Path = True,
    progress: Progress | None = None,
) -> nn.Module:
    """Make a trained spiking network faster. Returns `model` itself, accelerated.

    Weights, modules and neurons' constants may change afterwards; the next call notices. Only numbers written
    through a tensor's `.data` go unnoticed: optimise again after that.

    Args:
        model: A network in eval mode whose neurons are known (spikingjelly's, or registered ones).
        sample: An input (or a tuple of inputs) like those to come. With it, everything is measured now;
            without, on the first call, and again for each new input shape.
        policy: "measured" times every way a layer can run and keeps the fastest, never one slower than the
            network's own; "static" replaces by feature-map height (32 and up: blocks of 16; 16 to 31: 8;
            8 to 15: 4; below: left alone).
        dtype: On a GPU, the precision of weights inside groups: torch.float16 or torch.bfloat16 to trade
            accuracy for speed. By default the model's own; a float32 model stays as accurate as float32.
        cache: Remember decisions on disk; a path names the file.
        progress: Told about each measurement of this call; without a sample, about those of later ones.

    Whatever is raised, the model is then as it was.

    Raises:
        ModelError: Not a module; in training mode; on `meta`; NaN or Inf weights; no spiking neuron.
        SampleError: The sample does not fit the model or its device, or the static policy has none.
        InputError: `policy` or `dtype` is unknown.
        MissingExtraError: What runs on this device is not installed.
    """
    if policy not in ("measured", "static"):
        raise InputError(f"`policy` (={policy!r}) must be 'measured' or 'static'")
    if dtype not in (None, *MOST_FLIPS):
        raise InputError(f"`dtype` (={dtype!r}) must be torch.float32, torch.float16 or torch.bfloat16")
    check_model(model)
    inputs = _as_inputs(sample)
    before = model.__dict__.get("forward")
    before = before if isinstance(before, Accelerated) else None
    if before is not None:
        before.uninstall()
    accelerated: Accelerated | None = None
    try:
        if inputs is not None:
            check_sample(model, inputs)
        elif policy == "measured" and (weight := next(model.parameters(), None)) is not None:
            backend_for(weight, model, dtype)  # what is missing should be said now, not in the first call
        graph = analyze(model, inputs)
        store = DecisionCache(cache if isinstance(cache, Path) else None) if cache else None
        accelerated = Accelerated(
            model, graph, inputs, policy=policy, dtype=dtype, cache=store, progress=progress
        )
        accelerated.install()
        if inputs is not None and policy == "measured":
            accelerated.measure(inputs)
            accelerated.progress = None
    except BaseException:
        if accelerated is not None:
            accelerated.uninstall()
        if before is not None:
            before.reinstall()
        raise
    return model


def restore(model: nn.Module) -> nn.Module:
    """Put the original modules and forward back. Returns `model`, which need not have been optimised."""
    accelerated = model.__dict__.get("forward")
    if isinstance(accelerated, Accelerated):
        accelerated.uninstall()
    return model


def layer_times(model: nn.Module, *inputs: torch.Tensor) -> dict[str, float]:
    """Milliseconds that each group of an optimised network takes on `inputs`, one run, by name.

    The network's memories are left as they were. On a GPU each group is waited for.

    Raises:
        ModelError: `model` was not optimised.
    """
    return accelerated(model).times(inputs)


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


def check_model(model: object) -> None:
    """Refuse what cannot be optimised, naming what is wrong.

    Raises:
        ModelError: See `optimize`.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"`model` must be a torch.nn.Module, not {type(model).__name__}")
    if model.training:
        raise ModelError("the model is in training mode; call model.eval() before sparseflow.optimize(model)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(f"`{name}` has no shape yet; run the model once, so that it gets one")
        if tensor.is_meta:
            raise ModelError(f"`{name}` is on the meta device and holds no numbers; load the weights first")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(
                f"`{name}` holds NaN or Inf, which skipping zeros would hide (0 * NaN); mend the weights"
            )
    if not any(is_spiking_neuron(module) for module in model.modules()):
        raise ModelError(
            f"no spiking neuron was found in this {type(model).__name__}; spikingjelly's neurons are known, "
            "register others with sparseflow.register_neuron(cls)"
        )


def check_sample(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run the model once on the sample, leaving no trace.

    Raises:
        SampleError: The sample is on another device, or the model cannot take it.
    """
    device = next((p.device for p in model.parameters()), None)
    for tensor in inputs:
        if device is not None and tensor.device != device:
            raise SampleError(f"the sample is on {tensor.device}, the model on {device}; move one of them")
    try:
        with untouched(model):
            model(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        types = ", ".join(str(t.dtype) for t in inputs)
        raise SampleError(f"the model cannot take a sample of shape {shapes}, {types}: {error}") from error


def _as_inputs(sample: Any) -> tuple[torch.Tensor, ...] | None:
    if sample is None:
        return None
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    for item in inputs:
        if not isinstance(item, torch.Tensor):
            raise SampleError(f"`sample` must be a tensor or a tuple of tensors, not {type(item).__name__}")
    return inputs


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
        self._analysed: Any = None if inputs is None else _key(inputs)
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
        plan = self._plan_for(args)
        if plan is None or plan.overruled():
            return self.original(*args)
        replay = self._replays.get(_key(args))
        with torch.no_grad():
            fits = replay is not None and replay.at_rest() and not plan.watched()
            if replay is not None and fits and not torch.cuda.is_current_stream_capturing():
                return replay(*args)
            return plan.run(*args)

    def _plan_for(self, args: tuple[torch.Tensor, ...]) -> Plan | None:
        """The plan for inputs of this shape, measured now if they are the first; None for the own forward."""
        key = _key(args)
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
        plan = self._plan_for(inputs)
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
        key = _key(inputs)
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
        plan = Plan(self.graph, backend)
        if plan.conflict is not None:
            self._plans[key] = None
            self.whole = Decision(way="own", why=plan.conflict)
            return
        queued = GPU_CALLS if inputs[0].is_cuda else 1
        chooser = Chooser(device=str(inputs[0].device), cache=self._cache, calls_per_sample=queued)
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
                return self._decide(group, env, chooser, backend)

            plan.run(*inputs, around=around)
            plan.settle_forms()
            reset(self.model)
            if self.progress:
                self.progress("whole network", done, len(plan.groups) + 1)
            replay = _replay(plan, inputs)
            self.whole = self._decide_whole(replay or plan.run, inputs, chooser)
            if self.progress:
                self.progress("done", done + 1, len(plan.groups) + 1)
        self._plans[key] = plan if self.whole.way == "plan" else None
        self._watch_now()
        if replay is not None and self._plans[key] is not None:
            self._replays[key] = replay
        if self._cache:
            self._cache.save()

    def _measure_layers(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Decide layer by layer, for a network that could not be traced."""
        chooser = Chooser(device=str(inputs[0].device), cache=self._cache)
        seen: dict[str, torch.Tensor] = {}
        sites = [site for site in self.graph.sites if site.replaceable and site.name not in self._originals]
        handles = [
            self.model.get_submodule(site.name).register_forward_pre_hook(
                partial(_keep_input, seen, site.name), with_kwargs=True
            )
            for site in sites
        ]
        try:
            with untouched(self.model):
                self.original(*inputs)
        finally:
            for handle in handles:
                handle.remove()
        for done, site in enumerate(site for site in sites if site.name in seen):
            if self.progress:
                self.progress(site.name, done, len(sites))
            x = seen[site.name]
            self.activities[site.name] = activity_of(x)
            conv = self.model.get_submodule(site.name)
            assert isinstance(conv, nn.Conv2d)
            sparse = SparseConv2d.from_dense(conv, static_block(x.shape[-2]) or 4)
            with torch.no_grad():
                rate = rate_bucket(self.activities[site.name].firing_rate)
                key = f"layer|{sparse}|{tuple(x.shape)}|{x.dtype}@{rate}|threads={torch.get_num_threads()}"
                ways = {
                    "module": lambda conv=conv, x=x: conv(x),
                    sparse.backend: lambda sparse=sparse, x=x: sparse(x),
                }
                decision = chooser.choose(key, ways, "module")
            self.decisions[site.name] = decision
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

    def _decide(self, group: GroupStep, env: Env, chooser: Chooser, backend: Backend) -> Spikes:
        misfit = group.misfit(env)
        if misfit is not None:
            self.decisions[group.name] = Decision(way="module", why=misfit)
            return group.run(env, way="module")
        before = group.neuron.v
        dense_env: Env = {
            node: value.dense if isinstance(value, Spikes) else value for node, value in env.items()
        }

        def timed(way: Any) -> Callable[[], object]:
            def work() -> object:
                group.neuron.v = before
                if way == "module":
                    return group.run(dict(dense_env), way=way)
                return group.run(env, way=way, emit="native")

            return work

        candidates: dict[str, Callable[[], object]] = {"module": timed("module"), "dense": timed("dense")}
        reason = group.refusal(env)
        if reason is None:
            candidates["sparse"] = timed("sparse")
        expected = _spikes_of(candidates["module"]())
        for way in ("dense", "sparse"):
            if way in candidates and (
                wrong := _disagreement(_spikes_of(candidates[way]()), expected, backend.dtype)
            ):
                reason = f"'{way}' disagreed with the network's own modules on the sample: {wrong}"
                del candidates[way]
        if chooser.device.startswith("cuda"):
            candidates = {way: captured(work) for way, work in candidates.items()}
        decision = chooser.choose(self._group_key(group, env, backend), candidates, "module")
        if reason is not None:
            decision = decision.model_copy(update={"why": f"{decision.why}; sparse refused: {reason}"})
        candidates.clear()
        group.settle(decision.way)  # type: ignore[arg-type]
        self.decisions[group.name] = decision
        group.neuron.v = before
        return group.run(env)

    def _group_key(self, group: GroupStep, env: Env, backend: Backend) -> str:
        """What a group's time depends on, beside the device."""
        parts = [backend.name, str(backend.dtype), type(group.neuron).__name__]
        for conv in (*group.match.sources, *group.match.dense_convs):
            module = group.modules[conv.name]
            assert isinstance(module, nn.Conv2d)
            value = env[conv.input]
            dense = value.dense if isinstance(value, Spikes) else value
            rate = activity_of(dense).firing_rate if conv in group.match.sources else 1.0
            geometry = (tuple(dense.shape), module.out_channels, module.kernel_size[0], module.stride[0])
            parts.append(f"{geometry}{module.weight.dtype}@{rate_bucket(rate)}")
        for added in (group.match.skips, group.match.dense, group.match.post_skips):
            parts.append(f"+{[tuple(as_dense(env[node]).shape) for node in added]}")
        parts.append(f"threads={torch.get_num_threads()}")
        return "|".join(parts)

    def _decide_whole(
        self, run: Callable[..., Any], inputs: tuple[torch.Tensor, ...], chooser: Chooser
    ) -> Decision:
        saved = memories(self.model)

        def own() -> object:
            put_back(saved)
            return self.original(*inputs)

        def planned() -> object:
            put_back(saved)
            return run(*inputs)

        fresh = Chooser(device=chooser.device, rounds=chooser.rounds, warmup=chooser.warmup)
        return fresh.choose("whole", {"own": own, "plan": planned}, "own")

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
            "_watch": None,
            "progress": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plans, self._replays = {}, {}


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


def _keep_input(
    seen: dict[str, torch.Tensor], name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    seen[name] = (args[0] if args else next(iter(kwargs.values()))).detach().clone()


def _spikes_of(result: object) -> torch.Tensor:
    assert isinstance(result, Spikes)
    return result.sequence


def _disagreement(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """A sentence when spikes differ by more than rounding at the threshold can explain, else None."""
    allowed = MOST_FLIPS[dtype] * expected.numel() + 1
    flips = int((found != expected).sum())
    return None if flips <= allowed else f"{flips} of {expected.numel()} spikes differ"


def _key(inputs: tuple[torch.Tensor, ...]) -> Any:
    return tuple((tuple(x.shape), x.dtype, x.device) for x in inputs)


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent) if parent else model
    setattr(owner, leaf, module)
