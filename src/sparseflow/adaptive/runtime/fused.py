"""Faster modules for the time of a recording: experts and normalisations by kernels.

A recorded step plays kernels only, so what stands in front of a module's forward while it is recorded is what
runs from then on; the model itself is as it was before, right after. Each replacement is first tried against
the module on random numbers: one that gives something else is not used.

Which experts' implementation can be recorded: the loop over experts asks the device which were hit, so never;
transformers' `grouped_mm` in bf16, which reads each hit expert once, however many tokens; `batched_mm` in
every type, which copies the chosen experts' weights; our kernels for a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import util
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.adapters.base import Adapter
from sparseflow.core.extras import require

_LOG = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a replacement's output from the module's, over the largest of it."""

_COPIED_BYTES = 2**30
"""Of chosen experts' weights that may be copied."""

Forward = Callable[..., Tensor]


class Fused:
    """What of a model can be replaced while it is recorded.

    Args:
        adapter: The model.
        kernels: Whether to use our kernels; by default where Triton and a GPU are.

    Attributes:
        experts: Modules of experts that our kernels can stand in for.
        norms: Normalisations that our kernel can stand in for.
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
        if kernels:
            from sparseflow.adaptive.kernels.rms_norm.triton import DTYPES

            norms = [module for module in adapter.decoder.modules() if _is_rms_norm(module)]
            self.experts = [module for module in self._stacked if self._agrees(module, _few)]
            if self._dtype in DTYPES:
                self.norms = [module for module in norms if self._agrees(module, _rms_norm)]

    @contextmanager
    def installed(self, tokens: int) -> Iterator[None]:
        """Forwards within, in this thread, use the replacements.

        Args:
            tokens: Of all rows of a forward.
        """
        chosen: list[tuple[nn.Module, Forward]] = [(module, _rms_norm) for module in self.norms]
        for module in self._stacked:
            replacement = self._for(module, tokens)
            if replacement is not None:
                chosen.append((module, replacement))
        kept: list[tuple[nn.Module, Any]] = []
        try:
            for module, replacement in chosen:
                kept.append((module, vars(module).get("forward")))
                module.forward = partial(replacement, module)
            yield
        finally:
            for module, forward in reversed(kept):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _for(self, module: nn.Module, tokens: int) -> Forward | None:
        if module in self.experts and tokens <= _most():
            return _few
        if self._device.type != "cuda" or not hasattr(module, "has_gate"):
            return None
        kind = "grouped_mm" if self._dtype == torch.bfloat16 else "batched_mm"
        if kind == "batched_mm" and tokens * _bytes_a_token(module) > _COPIED_BYTES:
            return None
        return require("transformers.integrations.moe", "adaptive").ALL_EXPERTS_FUNCTIONS[kind]

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
        largest = float(expected.double().abs().max())
        difference = float((found.double() - expected.double()).abs().max())
        limit = TOLERANCE.get(self._dtype, 0.0) * largest
        if difference > limit:
            _LOG.warning(
                "%s keeps its own forward: a kernel differs from it by %.1e",
                type(module).__name__,
                difference,
            )
        return difference <= limit


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
