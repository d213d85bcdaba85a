"""What really ran in a model, seen from the inside: attention calls, and rows that went through experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Counts:
    """Of forwards so far.

    Attributes:
        attention: Block -> calls of its attention.
        rows: Block -> rows that its experts multiplied, one for each token and expert.
        tokens: Block -> tokens that came to its experts.
    """

    attention: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)

    def widths(self) -> dict[int, float]:
        """Block -> experts that a token went through."""
        return {block: self.rows[block] / self.tokens[block] for block in sorted(self.tokens)}


def experts_of(block: nn.Module) -> nn.Module | None:
    """The experts of a block."""
    return next((each for each in block.modules() if type(each).__name__.endswith("Experts")), None)


@contextmanager
def counted(blocks: Any) -> Iterator[Counts]:
    """Count forwards of a decoder's blocks, by hooks deep inside of them; experts must run eagerly."""
    found = Counts()
    hooks = []

    def attended(at: int) -> Any:
        return lambda module, given: found.attention.update([at])

    def came(at: int) -> Any:
        return lambda module, given: found.tokens.update({at: len(given[0])})

    def multiplied(at: int) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor], result: Tensor) -> None:
            found.rows[at] += len(result)

        return hook

    for at, block in enumerate(blocks):
        hooks.append(block.self_attn.register_forward_pre_hook(attended(at)))
        experts = experts_of(block)
        if experts is not None:
            hooks.append(experts.register_forward_pre_hook(came(at)))
            hooks.append(experts.get_submodule("act_fn").register_forward_hook(multiplied(at)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
