"""Runs plans on a model by forward hooks, one plan per call and thread.

The model is not forked, and there is no global state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn

from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.execution import CachePlan, DecidePlan, PlanExecution
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError, ModelError, PlanError


class ForwardHook:
    """Replaces a module's forward on one instance.

    Copies and pickles of the module do not have the hook, because it would refer to the original module.

    Args:
        module: The module.
        handler: Called with the hook, `args`, and the positional and keyword arguments of a call.
        args: Further arguments of `handler`.

    Attributes:
        module: The module.
        original: The replaced forward.
    """

    def __init__(self, module: nn.Module, handler: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.original: Callable[..., Any] = module.forward
        # Keeps the signature for `inspect.signature`.
        functools.update_wrapper(self, self.original)
        self.module = module
        self._handler, self._args = handler, args
        self._replaced: Any = vars(module).get("forward")

    @staticmethod
    def find(module: nn.Module) -> ForwardHook | None:
        """Hook of a module; None if it has none."""
        hook = vars(module).get("forward")
        return hook if isinstance(hook, ForwardHook) else None

    @staticmethod
    def is_foreign(module: nn.Module) -> bool:
        """Whether a module has an instance forward that is neither a hook nor its class's."""
        forward = vars(module).get("forward")
        bound_to_module = isinstance(forward, MethodType) and forward.__self__ is module
        return not (
            forward is None
            or isinstance(forward, ForwardHook)
            or (bound_to_module and forward.__func__ is type(module).forward)
        )

    def install(self) -> None:
        """Replace the module's forward."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Restore the module's forward."""
        if self._replaced is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self, *self._args, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _restore_forward, (self.module, self._replaced)


def _restore_forward(module: nn.Module, replaced: Any) -> Any:
    return MethodType(type(module).forward, module) if replaced is None else replaced


class PlanRuntime:
    """Runs plans on a model.

    Args:
        adapter: Adapter of the model.

    Raises:
        ModelError: The model already has a runtime, or a plan parameter would have no effect.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.geometry = adapter.geometry
        self._running: ContextVar[PlanExecution | None] = ContextVar("running", default=None)
        self._hooks: list[ForwardHook] = []
        self._narrowed_routers: dict[tuple[int, int], nn.Module] = {}
        blocks = list(adapter.blocks)
        if len(blocks) != self.geometry.depth:
            raise ModelError(
                f"the model has {len(blocks)} blocks, but its geometry has {self.geometry.depth}"
            )
        routers_by_block = {index: adapter.router(block) for index, block in enumerate(blocks)}
        routers = {index: router for index, router in routers_by_block.items() if router is not None}
        self._moe_blocks = frozenset(routers)
        hook_specs: list[tuple[nn.Module, Callable[..., Any], tuple[Any, ...]]] = [
            (adapter.decoder, self._call_decoder, ()),
            *((block, self._call_block, (index, block)) for index, block in enumerate(blocks)),
            *((router, self._call_router, (index, router)) for index, router in routers.items()),
        ]
        if adapter.model is not adapter.decoder:
            hook_specs.append((adapter.model, self._call_model, ()))
        if any(ForwardHook.find(module) is not None for module, _, _ in hook_specs):
            raise ModelError("this model already has a plan runtime; detach it first")
        self._check_routers(routers)
        self._hooks = [ForwardHook(module, handler, args) for module, handler, args in hook_specs]
        for hook in self._hooks:
            hook.install()

    @property
    def installed(self) -> bool:
        """Whether the hooks are installed."""
        return bool(self._hooks)

    @contextmanager
    def use_plan(self, plan: Plan) -> Iterator[PlanExecution]:
        """Run a plan in calls of the model in this context and thread.

        Raises:
            PlanError: The model cannot run the plan.
        """
        self.check(plan)
        execution = PlanExecution(tier=plan.tier, insertion_position=plan.insertion_position, plan=plan)
        with self.activate(execution) as running:
            yield running

    @contextmanager
    def use_decided_plan(
        self, tier: Tier | None, insertion_position: int, decide: DecidePlan
    ) -> Iterator[PlanExecution]:
        """Like `use_plan`, but the first forward decides the plan at the insertion.

        Args:
            tier: Tier of the plan.
            insertion_position: Insertion position of the plan.
            decide: Returns the complete plan.

        Raises:
            PlanError: Tier or position do not exist, or `decide` returns others.
        """
        geometry = self.geometry
        all_blocks = tuple(range(geometry.depth))
        self.check(
            Plan(tier=tier, insertion_position=insertion_position, top_k=geometry.top_k, blocks=all_blocks)
        )
        first = PlanExecution(tier=tier, insertion_position=insertion_position, plan=None, decide=decide)
        with self.activate(first) as running:
            yield running

    def check(self, plan: Plan) -> None:
        """Check that the model can run a plan, and that each of its parameters has an effect.

        Raises:
            PlanError: It cannot, or one has none.
        """
        self.geometry.check(plan)
        after = set(plan.blocks) - set(range(plan.insertion_position))
        if plan.top_k != self.geometry.top_k and not after & self._moe_blocks:
            raise PlanError(
                f"{plan.id}: no block after the insertion has experts, so `top_k` (={plan.top_k}) has "
                f"no effect; use {self.geometry.top_k}"
            )

    def remove(self) -> None:
        """Remove the hooks and restore the model; a second call does nothing.

        Raises:
            ModelError: A forward was replaced after installation; nothing is removed.
        """
        replaced = [hook.module for hook in self._hooks if ForwardHook.find(hook.module) is not hook]
        if replaced:
            raise ModelError(
                f"the forward of {len(replaced)} modules (such as {type(replaced[0]).__name__}) was "
                "replaced after attaching; undo that first"
            )
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._narrowed_routers.clear()

    @contextmanager
    def activate(self, running: PlanExecution) -> Iterator[PlanExecution]:
        """Run calls of the model in this context and thread with an execution state."""
        if not self.installed:
            raise InputError("the model was detached; attach again")
        token = self._running.set(running)
        try:
            yield running
        finally:
            self._running.reset(token)

    def _check_routers(self, routers: Mapping[int, nn.Module]) -> None:
        """Check that each narrowed router selects fewer experts."""
        max_top_k = self.geometry.top_k
        if not routers and max_top_k > 1:
            raise ModelError("no block has a router, so `top_k` has no effect; fix the adapter's `router`")
        expected = (self.geometry.top_ks[0], max_top_k)
        for index, router in routers.items():
            # accelerate's hook only moves inputs to the device, where they already are.
            if ForwardHook.is_foreign(router) and not hasattr(router, "_hf_hook"):
                raise ModelError(
                    f"the router of block {index} has an instance forward, which a narrowed router would "
                    "bypass; remove it"
                )
            view = self._narrow_router(router, expected[0])
            actual = self.adapter.measure_top_k(view), self.adapter.measure_top_k(router)
            if actual != expected:
                raise ModelError(
                    f"the router of block {index} selects {actual[0]} and {actual[1]} experts instead of "
                    f"{expected[0]} and {expected[1]}; fix the adapter's `with_top_k`"
                )

    def _narrow_router(self, router: nn.Module, top_k: int) -> nn.Module:
        view = self.adapter.with_top_k(router, top_k)
        # The copy also has the hook.
        vars(view).pop("forward", None)
        return view

    def _get_lengths(self, cache: Any) -> dict[int, int] | None:
        """Cached tokens per block; None without a cache and during CUDA graph capture."""
        if cache is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return None
        return self.adapter.get_kv_lengths(cache)

    def _call_model(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        running = self._running.get()
        if running is None:
            return hook.original(*args, **kwargs)
        call = dict(kwargs)
        if args:
            call |= inspect.signature(hook.original).bind_partial(*args).arguments
        cache = call.get("past_key_values")
        cache_plan, lengths = CachePlan.read_from(cache), self._get_lengths(cache)
        if lengths and cache_plan is not None:
            # Another request may have run in between.
            for (module, name), value in zip(self.adapter.state, cache_plan.state, strict=True):
                setattr(module, name, value)
        tokens = call.get("input_ids")
        # One token is not a prompt, but the next token of a request whose cache length is unknown.
        if tokens is not None and tokens.shape[-1] > 1 and (cache is None or lengths == {}):
            self.adapter.check_tier(call, running.tier)
        output = hook.original(*args, **kwargs)
        cache_plan = CachePlan.read_from(self.adapter.get_cache(output) if cache is None else cache)
        if cache_plan is not None:
            cache_plan.state = [getattr(module, name) for module, name in self.adapter.state]
        return output

    def _call_decoder(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        running, cache = self._running.get(), kwargs.get("past_key_values")
        cache_plan, lengths = CachePlan.read_from(cache), self._get_lengths(cache)
        if running is None:
            if lengths and cache_plan is not None:
                raise PlanError(f"this cache was filled with plan {cache_plan.plan.id}; run that plan")
            return hook.original(*args, **kwargs)
        if lengths:
            if cache_plan is None:
                raise PlanError(
                    "this cache holds tokens of a forward without a plan or of a failed one; use a new cache"
                )
            cache_plan.check(running, lengths)
        elif getattr(cache, "offloading", False):
            raise PlanError("an offloaded cache prefetches blocks that a plan skips; use another cache")
        running.executed_blocks.clear()
        running.executed_routers.clear()
        output = hook.original(*args, **kwargs)
        plan = self._check_executed(running)
        cache = self.adapter.get_cache(output) if cache is None else cache
        after = self._get_lengths(cache)
        if after is not None:
            if not lengths or cache_plan is None:
                cache_plan = CachePlan(plan=plan)
                cache_plan.attach_to(cache)
            cache_plan.check_lengths(after)
        return output

    def _check_executed(self, running: PlanExecution) -> Plan:
        """Check that the forward ran the plan's blocks and routers; returns the plan."""
        plan = running.plan
        if plan is None or running.executed_blocks != [block for block in plan.blocks if running.runs(block)]:
            raise ModelError(
                f"blocks {running.executed_blocks} ran instead of those of "
                f"{(plan.id if plan else 'a plan')}; fix the adapter's `blocks`"
            )
        unused_routers = self._moe_blocks.intersection(running.executed_blocks) - running.executed_routers
        if unused_routers:
            raise ModelError(
                f"the routers of blocks {sorted(unused_routers)} did not run; fix the adapter's `router`"
            )
        return plan

    def _call_block(
        self,
        hook: ForwardHook,
        index: int,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        running = self._running.get()
        if running is None:
            return hook.original(*args, **kwargs)
        if not running.runs(index):
            return self.adapter.skip_block(args[0] if args else kwargs["hidden_states"])
        if block.training and getattr(block, "gradient_checkpointing", False):
            raise PlanError("gradient checkpointing would rerun blocks with another plan; disable it")
        running.executed_blocks.append(index)
        output = hook.original(*args, **kwargs)
        if running.plan is None and index + 1 == running.insertion_position:
            plan = running.decide_plan(self.adapter.get_hidden_states(output))
            self.check(plan)
            running.plan = plan
        return output

    def _call_router(
        self,
        hook: ForwardHook,
        index: int,
        router: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        running = self._running.get()
        if running is None:
            return hook.original(*args, **kwargs)
        running.executed_routers.add(index)
        top_k = self.geometry.top_k
        if index >= running.insertion_position:
            assert running.plan is not None
            top_k = running.plan.top_k
        if running.route_override is not None and len(args) == 1 and not kwargs:
            routing = running.route_override(router, top_k, args[0])
            if routing is not None:
                return routing
        if top_k == self.geometry.top_k:
            return hook.original(*args, **kwargs)
        if (index, top_k) not in self._narrowed_routers:
            self._narrowed_routers[index, top_k] = self._narrow_router(router, top_k)
        view = self._narrowed_routers[index, top_k]
        view.training = router.training
        return view.forward(*args, **kwargs)
