"""Faster modules for the time of a recording: experts, routers, rotary positions and norms by kernels.

A recorded step plays kernels only, so what stands in front of a module's forward while it is recorded is what
runs from then on; the model itself is as it was before, right after. Each replacement is first tried against
the module on random numbers: one that gives something else is not used.

Which experts' implementation can be recorded: the loop over experts asks the device which were hit, so never;
transformers' `grouped_mm` in bf16, which reads each hit expert once, however many tokens; `batched_mm` in
every type, which copies the chosen experts' weights; our kernels for a few tokens, and for more of them all
experts at once, where these are small.

Rotary positions are a function of the file that a model's attention is written in, so for the time of a
recording it is replaced there; calls of other threads go to the one that was there.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.execution import PlanExecution
from sparseflow.core.extras import require

_LOG = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a replacement's output from the module's, over the largest of it."""

_FLAT = 0.5
"""Largest logit that routers are tried with."""

_ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the function."""

_COPIED_BYTES = 2**30
"""Of chosen experts' weights that may be copied."""

Forward = Callable[..., Tensor]


class KernelPatcher:
    """What of a model can be replaced while it is recorded.

    Args:
        adapter: The model.
        kernels: Whether to use our kernels; by default where Triton and a GPU are.

    Attributes:
        experts: Modules of experts that our kernels can stand in for.
        norms: Normalisations that our kernel can stand in for.
        routers: Routers that our kernel can stand in for -> whether weights are made to sum to 1.
        turning: Modules of Python whose rotary function our kernel can stand in for.
    """

    def __init__(self, adapter: Adapter, *, kernels: bool | None = None) -> None:
        weight = next(adapter.decoder.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        if kernels is None:
            kernels = weight.is_cuda and util.find_spec("triton") is not None
        modules = [module for block in adapter.blocks for module in block.modules()]
        self._stacked = [module for module in modules if _is_stacked(module)]
        self.experts: list[nn.Module] = []
        self.norms: list[nn.Module] = []
        self.routers: dict[nn.Module, bool] = {}
        self.turning: list[ModuleType] = []
        if kernels:
            from sparseflow.adaptive.kernels.rms_norm.triton import DTYPES

            norms = [module for module in adapter.decoder.modules() if _is_rms_norm(module)]
            self.experts = [
                module
                for module in self._stacked
                if self._agrees(module, _few) and self._agrees(module, _all)
            ]
            routers = [each for block in adapter.blocks if (each := adapter.router(block)) is not None]
            self.routers = {
                each: kind for each in routers if (kind := self._routes(adapter, each)) is not None
            }
            files = {sys.modules[type(module).__module__] for module in modules}
            self.turning = [each for each in files if self._turns(each)]
            if self._dtype in DTYPES:
                self.norms = [module for module in norms if self._agrees(module, _rms_norm)]

    @contextmanager
    def installed(self, tokens: int, running: PlanExecution | None = None) -> Iterator[None]:
        """Forwards within, in this thread, use the replacements.

        Args:
            tokens: Of all rows of a forward.
            running: The call that they are of; without it routers are asked themselves.
        """
        chosen: list[tuple[nn.Module, Forward]] = [(module, _rms_norm) for module in self.norms]
        for module in self._stacked:
            replacement = self._for(module, tokens)
            if replacement is not None:
                chosen.append((module, replacement))
        kept: list[tuple[nn.Module, Any]] = []
        turned: list[ModuleType] = []
        try:
            if running is not None and self.routers:
                running.route = self._route
            for file in self.turning:
                _TURNS.install(file)
                turned.append(file)
            for module, replacement in chosen:
                kept.append((module, vars(module).get("forward")))
                module.forward = partial(replacement, module)
            yield
        finally:
            if running is not None:
                running.route = None
            for file in turned:
                _TURNS.remove(file)
            for module, forward in reversed(kept):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _for(self, module: nn.Module, tokens: int) -> Forward | None:
        if module in self.experts and tokens <= _most():
            return _few
        if self._device.type != "cuda":
            return None
        known: Forward | None = None
        if hasattr(module, "has_gate"):
            kind = "grouped_mm" if self._dtype == torch.bfloat16 else "batched_mm"
            if kind == "grouped_mm" or tokens * _bytes_a_token(module) <= _COPIED_BYTES:
                found = require("transformers.integrations.moe", "adaptive")
                known = found.ALL_EXPERTS_FUNCTIONS[kind]
        if module in self.experts:
            return partial(_many, known or type(module).forward)
        return known

    def _route(self, router: nn.Module, top_k: int, hidden: Tensor) -> Any:
        """As a router does it; None where it is not one of ours."""
        normalized = self.routers.get(router)
        return None if normalized is None else _routed(router, top_k, hidden, normalized=normalized)

    @torch.no_grad()
    def _routes(self, adapter: Adapter, router: nn.Module) -> bool | None:
        """Whether the weights of a router that ours can stand in for sum to 1; None where ours cannot."""
        weight, top_k = getattr(router, "weight", None), getattr(router, "top_k", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not isinstance(top_k, int):
            return None
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        # With few of many experts about as likely, weights that sum to 1 are far from those that do not.
        x = x * (_FLAT / float((x @ weight.T).abs().max().clamp_min(1e-30)))
        top_k = max(1, min(top_k, len(weight) // 2))
        try:
            view = adapter.narrowed(router, top_k)
            # A copy has the knobs' front, too.
            vars(view).pop("forward", None)
            logits, scores, chosen = view.forward(x)
            for normalized in (False, True):
                found = _routed(router, top_k, x, normalized=normalized)
                if found is None:
                    break
                same = scores.dtype == found[1].dtype and chosen.dtype == found[2].dtype
                near = scores.shape == found[1].shape and compared(found[1], scores)[1]
                if same and near and torch.equal(chosen, found[2]) and compared(found[0], logits)[1]:
                    return normalized
        except Exception as error:  # A module that only looks alike may fail in any way.
            _LOG.info("%s chooses experts itself: %s", type(router).__name__, error)
        return None

    @torch.no_grad()
    def _turns(self, file: ModuleType) -> bool:
        """Whether our kernel gives what the rotary function of a file gives."""
        function = vars(file).get(_ROTARY)
        if function is None or self._dtype not in TOLERANCE:
            return False
        g = torch.Generator().manual_seed(0)
        query, key = (torch.randn(1, 3, heads, 8, generator=g).transpose(1, 2) for heads in (4, 2))
        half = torch.randn(1, 3, 4, generator=g)
        places = [torch.cat([each, each], dim=-1) for each in (half.cos(), half.sin())]
        given = [each.to(self._device, self._dtype) for each in (query, key, *places)]
        try:
            expected = function(*given)
            found = _turning(function, [threading.get_ident()])(*given)
            return all(compared(*pair)[1] for pair in zip(found, expected, strict=True))
        except Exception as error:
            _LOG.info("%s turns by its own function: %s", file.__name__, error)
            return False

    @torch.no_grad()
    def _agrees(self, module: nn.Module, replacement: Forward) -> bool:
        """Whether a replacement gives what a module gives."""
        generator = torch.Generator().manual_seed(0)
        width = _width(module)
        x = torch.randn(2, width, generator=generator).to(self._device, self._dtype)
        given: tuple[Any, ...] = (x,)
        if _is_stacked(module):
            count = len(module.get_parameter("down_proj"))
            chosen = torch.tensor([[0, count - 1], [count // 2, 0]], device=self._device)
            given = (x, chosen, torch.tensor([[0.5, 0.25], [0.125, 1.0]]).to(x))
        try:
            expected, found = module(*given), replacement(module, *given)
        except Exception as error:  # A module that only looks alike may fail in any way.
            _LOG.info("%s keeps its own forward: %s", type(module).__name__, error)
            return False
        difference, near = compared(found, expected)
        if not near:
            _LOG.warning(
                "%s keeps its own forward: a kernel differs from it by %.1e",
                type(module).__name__,
                difference,
            )
        return near


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module holds gated experts as transformers stacks them."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    stacked = all(isinstance(each, nn.Parameter) and each.ndim == 3 for each in (gate_up, down))
    plain = not any(
        getattr(module, name, False)
        for name in ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel")
    )
    return stacked and plain


def _is_rms_norm(module: nn.Module) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and isinstance(getattr(module, "weight", None), nn.Parameter)
    )


def _width(module: nn.Module) -> int:
    name = "gate_up_proj" if _is_stacked(module) else "weight"
    return module.get_parameter(name).shape[-1]


def _bytes_a_token(module: nn.Module) -> int:
    """Weights that a token's experts have."""
    stacks = [module.get_parameter(name) for name in ("gate_up_proj", "down_proj")]
    chosen = getattr(getattr(module, "config", None), "num_experts_per_tok", len(stacks[0]))
    return chosen * sum(stack[0].numel() * stack.element_size() for stack in stacks)


def compared(found: Tensor, expected: Tensor) -> tuple[float, bool]:
    """The largest difference of what a replacement gives, and whether `TOLERANCE` allows it."""
    difference = float((found.double() - expected.double()).abs().max())
    limit = TOLERANCE.get(expected.dtype, 0.0) * float(expected.double().abs().max())
    return difference, difference <= limit


def _routed(router: nn.Module, top_k: int, hidden: Tensor, *, normalized: bool) -> Any:
    """Logits, weights and experts, as routers of transformers give them; None for what does not fit."""
    from sparseflow.adaptive.kernels.routing.triton import fits, top_experts

    weight = router.get_parameter("weight")
    logits = nn.functional.linear(hidden.reshape(-1, weight.shape[1]), weight)
    return (logits, *top_experts(logits, top_k, normalized=normalized)) if fits(logits, top_k) else None


def _turning(function: Callable[..., Any], threads: Collection[int]) -> Callable[..., Any]:
    """A rotary function that is ours for calls of some threads that fit, and `function` for others."""
    from sparseflow.adaptive.kernels.rotary.triton import fits, rotate

    def turn(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *given: Any, **named: Any) -> Any:
        ours = threading.get_ident() in threads and not given and not named
        turns = rotate if ours and fits(query, key, cosine, sine) else function
        return turns(query, key, cosine, sine, *given, **named)

    return turn


class _RotaryPatch:
    """Files whose rotary function is replaced now, and the threads that it is ours for; of all engines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[ModuleType, tuple[Any, list[int]]] = {}

    def install(self, file: ModuleType) -> None:
        """Have this thread's calls turned by our kernel."""
        with self._lock:
            if file not in self._files:
                threads: list[int] = []
                self._files[file] = vars(file)[_ROTARY], threads
                vars(file)[_ROTARY] = _turning(vars(file)[_ROTARY], threads)
            self._files[file][1].append(threading.get_ident())

    def remove(self, file: ModuleType) -> None:
        """No longer; when no thread is left, the file has its own function again."""
        with self._lock:
            function, threads = self._files[file]
            threads.remove(threading.get_ident())
            if not threads:
                vars(file)[_ROTARY] = function
                del self._files[file]


_TURNS = _RotaryPatch()


def _many(
    known: Forward, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Every expert for every token where that pays, else a forward that is known to be right."""
    from sparseflow.adaptive.kernels.experts.dense import pays

    enough = pays(len(hidden_states), top_k_index.shape[1], module.get_parameter("gate_up_proj"))
    return (_all if enough else known)(module, hidden_states, top_k_index, top_k_weights)


def _all(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert for every token."""
    from sparseflow.adaptive.kernels.experts.dense import experts

    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    return experts(hidden_states, top_k_index, top_k_weights, gate_up, down)


def _most() -> int:
    from sparseflow.adaptive.kernels.experts.triton import MOST

    return MOST


def _few(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of a few tokens, by our kernels."""
    from sparseflow.adaptive.kernels.experts.triton import experts

    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    return experts(hidden_states, top_k_index, top_k_weights, gate_up, down)


def _rms_norm(module: nn.Module, hidden_states: Tensor) -> Tensor:
    from sparseflow.adaptive.kernels.rms_norm.triton import rms_norm

    return rms_norm(hidden_states, module.get_parameter("weight"), float(module.variance_epsilon))  # pyright: ignore[reportArgumentType]
