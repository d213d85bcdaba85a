"""A split layer at home: others are asked for their parts, and meanwhile its own is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from sparseflow.codesign.rewrite import Form

Given = tuple[Tensor | None, ...]
Ask = Callable[[Given], Callable[[], Tensor]]
"""Hands a part its input; what it returns waits for the output."""


class Spread(nn.Module):
    """Stands for a split layer's module on its home slot.

    Args:
        form: Holds the first part.
        asks: For the other parts, in the order of groups.
    """

    def __init__(self, form: Form, asks: Sequence[Ask]) -> None:
        super().__init__()
        self.form, self.asks = form, tuple(asks)

    def forward(self, *given: Tensor | None) -> Tensor:
        answers = [ask(given) for ask in self.asks]
        own = self.form.parts[0](*given)
        return self.form.combine([own, *(answer() for answer in answers)])


def at_home(form: Form) -> list[nn.Module]:
    """Leave the first part in a form; the others are returned."""
    _, *others = form.parts
    form.parts = nn.ModuleList([form.parts[0]])
    return others
