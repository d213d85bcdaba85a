"""The knobs of a model: run plans on it, each call its own, without a fork of it and without global state.

Installing puts a forward in front of those of the model, its decoder, its blocks and its routers, on the
instances only; removing takes them away, and everything is as before. Which plan runs is told by the context
of the call, so calls of several threads do not meet. A cache remembers the plan that it was begun with.

Nothing of a plan is taken on trust: at a prefill the adapter checks that inputs are of the plan's tier, and
after each forward the blocks that ran, the routers that were asked and the lengths of the cache are compared
with the plan.
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
from sparseflow.adaptive.plan.execution import CachePlan, Decide, PlanExecution
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError, ModelError, PlanError


class ForwardHook:
    """Stands in front of a module's forward.

    A copy or a pickle of the module has none: it would reach back to the module that it was copied from.

    Args:
        module: The module.
        inside: Called with the front, `args`, and the positional and named arguments of a call.
        args: What else `inside` is told.

    Attributes:
        module: The module.
        original: The forward that stands behind.
    """

    def __init__(self, module: nn.Module, inside: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.original: Callable[..., Any] = module.forward
        # `inspect.signature` sees the signature behind.
        functools.update_wrapper(self, self.original)
        self.module = module
        self._inside, self._args = inside, args
        self._replaced: Any = vars(module).get("forward")

    @staticmethod
    def of(module: nn.Module) -> ForwardHook | None:
        """The front that a module has."""
        found = vars(module).get("forward")
        return found if isinstance(found, ForwardHook) else None

    @staticmethod
    def is_foreign(module: nn.Module) -> bool:
        """Whether a module has a forward on the instance that is neither a front nor that of its class."""
        found = vars(module).get("forward")
        own = isinstance(found, MethodType) and found.__self__ is module
        return not (
            found is None
            or isinstance(found, ForwardHook)
            or (own and found.__func__ is type(module).forward)
        )

    def install(self) -> None:
        """Put it in front."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Take it away; whatever stood there stands there again."""
        if self._replaced is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self._replaced

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._inside(self, *self._args, given, named)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _behind, (self.module, self._replaced)


def _behind(module: nn.Module, replaced: Any) -> Any:
    return MethodType(type(module).forward, module) if replaced is None else replaced


__all__ = ["Decide", "PlanExecution", "PlanRuntime"]


class PlanRuntime:
    """Knobs installed on a model.

    Args:
        adapter: Where they are.

    Raises:
        ModelError: The model has knobs already, or a knob would change nothing.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.geometry = adapter.geometry
        self._running: ContextVar[PlanExecution | None] = ContextVar("running", default=None)
        self._fronts: list[ForwardHook] = []
        self._narrowed: dict[tuple[int, int], nn.Module] = {}
        blocks = list(adapter.blocks)
        if len(blocks) != self.geometry.depth:
            raise ModelError(f"the model has {len(blocks)} blocks, its geometry says {self.geometry.depth}")
        found = {at: adapter.router(block) for at, block in enumerate(blocks)}
        routers = {at: router for at, router in found.items() if router is not None}
        self._with_experts = frozenset(routers)
        wanted: list[tuple[nn.Module, Callable[..., Any], tuple[Any, ...]]] = [
            (adapter.decoder, self._decoder, ()),
            *((block, self._block, (at, block)) for at, block in enumerate(blocks)),
            *((router, self._router, (at, router)) for at, router in routers.items()),
        ]
        if adapter.model is not adapter.decoder:
            wanted.append((adapter.model, self._model, ()))
        if any(ForwardHook.of(module) is not None for module, _, _ in wanted):
            raise ModelError("this model has knobs already; detach them first")
        self._try(routers)
        self._fronts = [ForwardHook(module, inside, args) for module, inside, args in wanted]
        for front in self._fronts:
            front.install()

    @property
    def installed(self) -> bool:
        """Whether they are on the model."""
        return bool(self._fronts)

    @contextmanager
    def running(self, plan: Plan) -> Iterator[PlanExecution]:
        """Calls of the model in this context, in this thread, run a plan.

        Raises:
            PlanError: The model cannot run it.
        """
        self.check(plan)
        whole = PlanExecution(tier=plan.tier, insertion_position=plan.insertion_position, plan=plan)
        with self._enter(whole) as running:
            yield running

    @contextmanager
    def deciding(self, tier: Tier | None, insertion_position: int, decide: Decide) -> Iterator[PlanExecution]:
        """As `running`, but the rest of the plan is decided by the first forward, at the insertion.

        Args:
            tier: What was decided before.
            insertion_position: What was decided before.
            decide: Gives the whole plan.

        Raises:
            PlanError: There is no such tier or position, or another one is decided later.
        """
        geometry = self.geometry
        every = tuple(range(geometry.depth))
        self.check(Plan(tier=tier, insertion_position=insertion_position, top_k=geometry.top_k, blocks=every))
        first = PlanExecution(tier=tier, insertion_position=insertion_position, plan=None, decide=decide)
        with self._enter(first) as running:
            yield running

    def check(self, plan: Plan) -> None:
        """That the model can run a plan, and that each of its knobs would change something.

        Raises:
            PlanError: It cannot, or one would not.
        """
        self.geometry.check(plan)
        after = set(plan.blocks) - set(range(plan.insertion_position))
        if plan.top_k != self.geometry.top_k and not after & self._with_experts:
            raise PlanError(
                f"{plan.id}: no block after the insertion has experts, so `top_k` (={plan.top_k}) would "
                f"change nothing; use {self.geometry.top_k}"
            )

    def remove(self) -> None:
        """Take the knobs away; the model is as it was before. A second time does nothing.

        Raises:
            ModelError: Another forward was put in front since; nothing is taken away.
        """
        covered = [front.module for front in self._fronts if ForwardHook.of(front.module) is not front]
        if covered:
            raise ModelError(
                f"the forward of {len(covered)} modules, as {type(covered[0]).__name__}, was replaced after "
                "the knobs were attached; undo that first"
            )
        for front in self._fronts:
            front.remove()
        self._fronts.clear()
        self._narrowed.clear()

    @contextmanager
    def _enter(self, running: PlanExecution) -> Iterator[PlanExecution]:
        if not self.installed:
            raise InputError("these knobs were detached; attach to the model again")
        token = self._running.set(running)
        try:
            yield running
        finally:
            self._running.reset(token)

    def _try(self, routers: Mapping[int, nn.Module]) -> None:
        """That each narrowed router really chooses fewer."""
        most = self.geometry.top_k
        if not routers and most > 1:
            raise ModelError(
                "no block has a router, so knob 2 would change nothing; the adapter must find them"
            )
        wanted = (self.geometry.top_ks[0], most)
        for at, router in routers.items():
            # That of accelerate only moves to the device, where the block's inputs are already.
            if ForwardHook.is_foreign(router) and not hasattr(router, "_hf_hook"):
                raise ModelError(
                    f"the router of block {at} has a forward of its own on the instance, which fewer experts "
                    "would bypass; remove it"
                )
            view = self._view(router, wanted[0])
            found = self.adapter.width(view), self.adapter.width(router)
            if found != wanted:
                raise ModelError(
                    f"the router of block {at}, asked for {wanted[0]} and {wanted[1]} experts, chooses "
                    f"{found[0]} and {found[1]}: knob 2 would do something else than it says"
                )

    def _view(self, router: nn.Module, top_k: int) -> nn.Module:
        view = self.adapter.narrowed(router, top_k)
        # A copy has the front, too.
        vars(view).pop("forward", None)
        return view

    def _lengths(self, cache: Any) -> dict[int, int] | None:
        """Tokens that a cache holds of each block that has any.

        None where there is no cache, and while a CUDA graph is recorded, in which nothing can be read.
        """
        if cache is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return None
        return self.adapter.kv_lengths(cache)

    def _model(self, front: ForwardHook, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        running = self._running.get()
        if running is None:
            return front.original(*given, **named)
        call = dict(named)
        if given:
            call |= inspect.signature(front.original).bind_partial(*given).arguments
        cache = call.get("past_key_values")
        begun, lengths = CachePlan.of(cache), self._lengths(cache)
        if lengths and begun is not None:
            # Another request may have run since.
            for (module, name), value in zip(self.adapter.state, begun.state, strict=True):
                setattr(module, name, value)
        tokens = call.get("input_ids")
        # One token is no prompt, but the next of a request whose cache is not told about.
        if tokens is not None and tokens.shape[-1] > 1 and (cache is None or lengths == {}):
            self.adapter.check_tier(call, running.tier)
        found = front.original(*given, **named)
        begun = CachePlan.of(self.adapter.cache(found) if cache is None else cache)
        if begun is not None:
            begun.state = [getattr(module, name) for module, name in self.adapter.state]
        return found

    def _decoder(self, front: ForwardHook, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        running, cache = self._running.get(), named.get("past_key_values")
        begun, lengths = CachePlan.of(cache), self._lengths(cache)
        if running is None:
            if lengths and begun is not None:
                raise PlanError(f"this cache was begun with {begun.plan.id}; go on with it")
            return front.original(*given, **named)
        if lengths:
            if begun is None:
                raise PlanError(
                    "this cache holds tokens of a forward without a plan, or of one that broke off; begin an "
                    "empty one"
                )
            begun.check(running, lengths)
        elif getattr(cache, "offloading", False):
            raise PlanError(
                "an offloaded cache fetches blocks in turn, also those that a plan skips; use another cache"
            )
        running.ran.clear()
        running.routed.clear()
        found = front.original(*given, **named)
        plan = self._check_ran(running)
        cache = self.adapter.cache(found) if cache is None else cache
        after = self._lengths(cache)
        if after is not None:
            if not lengths or begun is None:
                begun = CachePlan(plan=plan)
                begun.mark(cache)
            begun.check_lengths(after)
        return found

    def _check_ran(self, running: PlanExecution) -> Plan:
        """That the forward was the plan's, which is given back."""
        plan = running.plan
        if plan is None or running.ran != [block for block in plan.blocks if running.runs(block)]:
            raise ModelError(
                f"blocks {running.ran} ran, not those of {plan.id if plan else 'a plan'}: the adapter's "
                "blocks are not what the model runs"
            )
        silent = self._with_experts.intersection(running.ran) - running.routed
        if silent:
            raise ModelError(
                f"the routers of blocks {sorted(silent)} were not asked: they are not what the model uses"
            )
        return plan

    def _block(
        self, front: ForwardHook, at: int, block: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        running = self._running.get()
        if running is None:
            return front.original(*given, **named)
        if not running.runs(at):
            return self.adapter.skipped(given[0] if given else named["hidden_states"])
        if block.training and getattr(block, "gradient_checkpointing", False):
            raise PlanError(
                "gradient checkpointing runs blocks again where the plan is not known, so with another one; "
                "switch it off for this model"
            )
        running.ran.append(at)
        found = front.original(*given, **named)
        if running.plan is None and at + 1 == running.insertion_position:
            plan = running.decided(self.adapter.hidden(found))
            self.check(plan)
            running.plan = plan
        return found

    def _router(
        self, front: ForwardHook, at: int, router: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        running = self._running.get()
        if running is None:
            return front.original(*given, **named)
        running.routed.add(at)
        top_k = self.geometry.top_k
        if at >= running.insertion_position:
            assert running.plan is not None
            top_k = running.plan.top_k
        if running.route is not None and len(given) == 1 and not named:
            found = running.route(router, top_k, given[0])
            if found is not None:
                return found
        if top_k == self.geometry.top_k:
            return front.original(*given, **named)
        if (at, top_k) not in self._narrowed:
            self._narrowed[at, top_k] = self._view(router, top_k)
        view = self._narrowed[at, top_k]
        view.training = router.training
        return view.forward(*given, **named)
