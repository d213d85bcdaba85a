"""Replaces modules by fused kernels while a forward is captured: experts, routers, rotary embedding and RMS
norm.

A CUDA graph contains only kernels, so the forwards that are installed during the capture are those that run
on replay; the model itself is restored immediately. Each replacement is first compared with the module on
random inputs and not used if it differs.

Expert implementations that can be captured: transformers' `grouped_mm` in bf16, which reads each selected
expert once; `batched_mm` in any dtype, which copies the weights of the selected experts; our kernels for few
tokens, and the dense kernel for more tokens of small experts. The loop over experts synchronizes and cannot
be captured.

The rotary function is a global of the module file that defines a model's attention, so it is replaced there
during a capture; calls of other threads use the original.
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
"""Maximum difference of a replacement's output, relative to the largest output."""

_MAX_LOGIT = 0.5
"""Largest logit in router checks."""

_ROTARY = "apply_rotary_pos_emb"
"""Name of the rotary function in transformers."""

_MAX_COPIED_BYTES = 2**30
"""Maximum size of expert weights copied by `batched_mm`."""

Forward = Callable[..., Tensor]


class KernelPatcher:
    """Finds the modules of a model that kernels can replace.

    Args:
        adapter: Adapter of the model.
        kernels: Whether to use our kernels; default: if Triton and a GPU are available.

    Attributes:
        experts: Expert modules that our kernels can replace.
        norms: RMS norms that our kernel can replace.
        routers: Routers that our kernel can replace -> whether weights are normalized to sum 1.
        rotary_modules: Python modules whose rotary function our kernel can replace.
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
        self.rotary_modules: list[ModuleType] = []
        if kernels:
            from sparseflow.adaptive.kernels.experts import dense
            from sparseflow.adaptive.kernels.experts import triton as few
            from sparseflow.adaptive.kernels.rms_norm.triton import DTYPES

            self._few_tokens, self._max_few_tokens = partial(_run_experts, few.experts), few.MAX_TOKENS
            self._dense, self._is_dense_profitable = partial(_run_experts, dense.experts), dense.is_profitable
            self.experts = [
                module
                for module in self._stacked
                if all(self._check_module(module, forward) for forward in (self._few_tokens, self._dense))
            ]
            routers = [router for block in adapter.blocks if (router := adapter.router(block)) is not None]
            normalized = {router: self._check_router(adapter, router) for router in routers}
            self.routers = {router: value for router, value in normalized.items() if value is not None}
            files = {sys.modules[type(module).__module__] for module in modules}
            self.rotary_modules = [file for file in files if self._check_rotary(file)]
            if self._dtype in DTYPES:
                norms = [module for module in adapter.decoder.modules() if _is_rms_norm(module)]
                self.norms = [module for module in norms if self._check_module(module, _rms_norm)]

    @contextmanager
    def patch(self, tokens: int, running: PlanExecution | None = None) -> Iterator[None]:
        """Use the replacements in forwards of this thread.

        Args:
            tokens: Tokens of all rows of a forward.
            running: Plan execution of the forward; without it routers are not replaced.
        """
        replacements: list[tuple[nn.Module, Forward]] = [(module, _rms_norm) for module in self.norms]
        for module in self._stacked:
            replacement = self._select_forward(module, tokens)
            if replacement is not None:
                replacements.append((module, replacement))
        replaced: list[tuple[nn.Module, Any]] = []
        patched_files: list[ModuleType] = []
        try:
            if running is not None and self.routers:
                running.route_override = self._route_tokens
            for file in self.rotary_modules:
                _ROTARY_PATCH.install(file)
                patched_files.append(file)
            for module, replacement in replacements:
                replaced.append((module, vars(module).get("forward")))
                module.forward = partial(replacement, module)
            yield
        finally:
            if running is not None:
                running.route_override = None
            for file in patched_files:
                _ROTARY_PATCH.remove(file)
            for module, forward in reversed(replaced):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _select_forward(self, module: nn.Module, tokens: int) -> Forward | None:
        if module in self.experts and tokens <= self._max_few_tokens:
            return self._few_tokens
        if self._device.type != "cuda":
            return None
        fallback: Forward | None = None
        if hasattr(module, "has_gate"):
            implementation = "grouped_mm" if self._dtype == torch.bfloat16 else "batched_mm"
            copied_bytes = tokens * _expert_bytes_per_token(module)
            if implementation == "grouped_mm" or copied_bytes <= _MAX_COPIED_BYTES:
                moe_integration = require("transformers.integrations.moe", "adaptive")
                fallback = moe_integration.ALL_EXPERTS_FUNCTIONS[implementation]
        if module in self.experts:
            return partial(self._run_many_tokens, fallback or type(module).forward)
        return fallback

    def _run_many_tokens(
        self, fallback: Forward, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, *args: Tensor
    ) -> Tensor:
        """Dense experts if profitable, otherwise another forward."""
        gate_up = module.get_parameter("gate_up_proj")
        profitable = self._is_dense_profitable(len(hidden_states), top_k_index.shape[1], gate_up)
        return (self._dense if profitable else fallback)(module, hidden_states, top_k_index, *args)

    def _route_tokens(self, router: nn.Module, top_k: int, hidden: Tensor) -> Any:
        """Routing by our kernel; None if it does not support the router."""
        normalized = self.routers.get(router)
        return (
            None if normalized is None else _route_with_kernel(router, top_k, hidden, normalized=normalized)
        )

    @torch.no_grad()
    def _check_router(self, adapter: Adapter, router: nn.Module) -> bool | None:
        """Whether a router normalizes its weights; None if our kernel does not reproduce it."""
        weight, top_k = getattr(router, "weight", None), getattr(router, "top_k", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not isinstance(top_k, int):
            return None
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        # Nearly uniform logits, so that normalized and unnormalized weights differ clearly.
        x = x * (_MAX_LOGIT / float((x @ weight.T).abs().max().clamp_min(1e-30)))
        top_k = max(1, min(top_k, len(weight) // 2))
        try:
            view = adapter.with_top_k(router, top_k)
            # The copy also has the plan runtime's hook.
            vars(view).pop("forward", None)
            logits, scores, expert_ids = view.forward(x)
            for normalized in (False, True):
                output = _route_with_kernel(router, top_k, x, normalized=normalized)
                if output is None:
                    break
                same_dtypes = scores.dtype == output[1].dtype and expert_ids.dtype == output[2].dtype
                same_scores = scores.shape == output[1].shape and compare_outputs(output[1], scores)[1]
                same_experts = torch.equal(expert_ids, output[2]) and compare_outputs(output[0], logits)[1]
                if same_dtypes and same_scores and same_experts:
                    return normalized
        except Exception as error:  # A module that only looks similar may fail in any way.
            _LOG.info("%s keeps its own routing: %s", type(router).__name__, error)
        return None

    @torch.no_grad()
    def _check_rotary(self, file: ModuleType) -> bool:
        """Whether our kernel reproduces the rotary function of a file."""
        function = vars(file).get(_ROTARY)
        if function is None or self._dtype not in TOLERANCE:
            return False
        g = torch.Generator().manual_seed(0)
        query, key = (torch.randn(1, 3, heads, 8, generator=g).transpose(1, 2) for heads in (4, 2))
        half = torch.randn(1, 3, 4, generator=g)
        cosine_and_sine = [torch.cat([angle, angle], dim=-1) for angle in (half.cos(), half.sin())]
        args = [angle.to(self._device, self._dtype) for angle in (query, key, *cosine_and_sine)]
        try:
            expected = function(*args)
            actual = _make_rotary(function, [threading.get_ident()])(*args)
            return all(compare_outputs(*pair)[1] for pair in zip(actual, expected, strict=True))
        except Exception as error:
            _LOG.info("%s keeps its own rotary function: %s", file.__name__, error)
            return False

    @torch.no_grad()
    def _check_module(self, module: nn.Module, replacement: Forward) -> bool:
        """Whether a replacement reproduces a module."""
        generator = torch.Generator().manual_seed(0)
        width = module.get_parameter("gate_up_proj" if _is_stacked(module) else "weight").shape[-1]
        x = torch.randn(2, width, generator=generator).to(self._device, self._dtype)
        args: tuple[Any, ...] = (x,)
        if _is_stacked(module):
            count = len(module.get_parameter("down_proj"))
            expert_ids = torch.tensor([[0, count - 1], [count // 2, 0]], device=self._device)
            args = (x, expert_ids, torch.tensor([[0.5, 0.25], [0.125, 1.0]]).to(x))
        try:
            expected, actual = module(*args), replacement(module, *args)
        except Exception as error:  # A module that only looks similar may fail in any way.
            _LOG.info("%s keeps its own forward: %s", type(module).__name__, error)
            return False
        difference, is_close = compare_outputs(actual, expected)
        if not is_close:
            name = type(module).__name__
            _LOG.warning("%s keeps its own forward: the kernel differs by %.1e", name, difference)
        return is_close


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module holds gated experts as stacked by transformers."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    stacked = all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in (gate_up, down))
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


def _expert_bytes_per_token(module: nn.Module) -> int:
    stacks = [module.get_parameter(name) for name in ("gate_up_proj", "down_proj")]
    experts_per_token = getattr(getattr(module, "config", None), "num_experts_per_tok", len(stacks[0]))
    return experts_per_token * sum(stack[0].numel() * stack.element_size() for stack in stacks)


def compare_outputs(actual: Tensor, expected: Tensor) -> tuple[float, bool]:
    """Maximum difference of two outputs, and whether `TOLERANCE` allows it."""
    difference = float((actual.double() - expected.double()).abs().max())
    limit = TOLERANCE.get(expected.dtype, 0.0) * float(expected.double().abs().max())
    return difference, difference <= limit


def _route_with_kernel(router: nn.Module, top_k: int, hidden: Tensor, *, normalized: bool) -> Any:
    """Logits, weights and experts as transformers routers return them; None if not supported."""
    from sparseflow.adaptive.kernels.routing.triton import fits, top_experts

    weight = router.get_parameter("weight")
    logits = nn.functional.linear(hidden.reshape(-1, weight.shape[1]), weight)
    return (logits, *top_experts(logits, top_k, normalized=normalized)) if fits(logits, top_k) else None


def _make_rotary(function: Callable[..., Any], threads: Collection[int]) -> Callable[..., Any]:
    """Rotary function that uses our kernel for supported calls of some threads, and `function` otherwise."""
    from sparseflow.adaptive.kernels.rotary.triton import fits, rotate

    def turn(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *args: Any, **kwargs: Any) -> Any:
        use_kernel = threading.get_ident() in threads and not args and not kwargs
        rotary = rotate if use_kernel and fits(query, key, cosine, sine) else function
        return rotary(query, key, cosine, sine, *args, **kwargs)

    return turn


class _RotaryPatch:
    """Files whose rotary function is replaced, and the threads that use the kernel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[ModuleType, tuple[Any, list[int]]] = {}

    def install(self, file: ModuleType) -> None:
        """Use our kernel in calls of this thread."""
        with self._lock:
            if file not in self._files:
                threads: list[int] = []
                self._files[file] = vars(file)[_ROTARY], threads
                vars(file)[_ROTARY] = _make_rotary(vars(file)[_ROTARY], threads)
            self._files[file][1].append(threading.get_ident())

    def remove(self, file: ModuleType) -> None:
        """Stop using it; the original function is restored when no thread is left."""
        with self._lock:
            function, threads = self._files[file]
            threads.remove(threading.get_ident())
            if not threads:
                vars(file)[_ROTARY] = function
                del self._files[file]


_ROTARY_PATCH = _RotaryPatch()


def _run_experts(
    kernel: Forward, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    return kernel(hidden_states, top_k_index, top_k_weights, gate_up, down)


def _rms_norm(module: nn.Module, hidden_states: Tensor) -> Tensor:
    from sparseflow.adaptive.kernels.rms_norm.triton import rms_norm

    return rms_norm(hidden_states, module.get_parameter("weight"), float(module.variance_epsilon))  # pyright: ignore[reportArgumentType]
