"""Counts attention calls and expert rows inside a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class CallCounts:
    """Counts of all forwards.

    Attributes:
        attention: Block -> calls of its attention.
        rows: Block -> rows that its experts multiply, one per token and expert.
        tokens: Block -> tokens that reach its experts.
    """

    attention: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)

    def experts_per_token(self) -> dict[int, float]:
        """Return the number of experts per token for each block."""
        return {block: self.rows[block] / self.tokens[block] for block in sorted(self.tokens)}


def find_experts(block: nn.Module) -> nn.Module | None:
    """Return the experts module of a block; None without experts."""
    return next((module for module in block.modules() if type(module).__name__.endswith("Experts")), None)


@contextmanager
def count_calls(blocks: Any) -> Iterator[CallCounts]:
    """Count forwards of a decoder's blocks with hooks; experts must use the eager implementation."""
    counts = CallCounts()
    hooks = []

    def count_attention(index: int) -> Any:
        return lambda module, inputs: counts.attention.update([index])

    def count_tokens(index: int) -> Any:
        return lambda module, inputs: counts.tokens.update({index: len(inputs[0])})

    def count_rows(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor], result: Tensor) -> None:
            counts.rows[index] += len(result)

        return hook

    for index, block in enumerate(blocks):
        hooks.append(block.self_attn.register_forward_pre_hook(count_attention(index)))
        experts = find_experts(block)
        if experts is not None:
            hooks.append(experts.register_forward_pre_hook(count_tokens(index)))
            hooks.append(experts.get_submodule("act_fn").register_forward_hook(count_rows(index)))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
