"""Layers cut into parts that run on several slots: the plan, the split form of a model, and the way back.

Notation: a layer has U units (heads, hidden channels, columns). A split of it is a permutation pi of them,
sizes g_1 + ... + g_G = U and G slots, the first of which is the layer's home. Group j holds the units
pi[g_1 + ... + g_{j-1}], and so on, g_j of them: that is the grouping G.

- Where the output is a sum over units, y = sum_j part_j(x), in the order of groups; what is added whatever
  the units, the last bias, is in group 0 alone. A sum has no order, so G needs no way back.
- Where units are columns of a linear layer, parts give different columns: they are put side by side in the
  order of groups, and index_select with argsort(pi), which is G^-1, puts them back.

Moved for each batch are the states between layers on different slots and, for each group but the first, what
the layer takes, to it, and what it computed, back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from sparseflow.codesign.workload.splits import RewritePlan, Split, _other_units, check
from sparseflow.core.layers import LayeredModel, Splittable
from sparseflow.errors import InputError


class Form(nn.Module):
    """A layer's module in its split form: the parts of some groups, and how outputs of all are put together.

    Attributes:
        parts: In the order of groups.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *given: Tensor | None) -> Tensor:
        return self.combine([part(*given) for part in self.parts])

    def combine(self, found: Sequence[Tensor]) -> Tensor:
        """The whole's output from those of all parts, in the order of groups."""
        raise NotImplementedError


class Summed(Form):
    """Parts whose outputs are terms of a sum."""

    def combine(self, found: Sequence[Tensor]) -> Tensor:
        total = found[0]
        for each in found[1:]:
            total = total + each
        return total


class Joined(Form):
    """Parts whose outputs are columns.

    Attributes:
        back: G^-1, where each column of the whole stands among those of the groups, int64, [U].
    """

    back: Tensor

    def __init__(self, parts: Sequence[nn.Module], permutation: Tensor) -> None:
        super().__init__(parts)
        self.register_buffer("back", permutation.argsort(), persistent=False)

    def combine(self, found: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(found), -1).index_select(-1, self.back)


def split_form(module: nn.Module, split: Split) -> Form:
    """The split form of a module; parts have weights of their own.

    Raises:
        InputError: The module is neither `Splittable` nor linear, is split already, or has other units.
    """
    if isinstance(module, Form):
        raise InputError(f"layer {split.layer} is in its split form already: undo that first")
    if isinstance(module, nn.Linear):
        if module.out_features != len(split.permutation):
            raise _other_units(split, module.out_features)
        device = module.weight.device
        parts = [_columns(module, torch.tensor(group, device=device)) for group in split.groups()]
        return Joined(parts, torch.tensor(split.permutation, device=device))
    if not isinstance(module, Splittable):
        raise InputError(f"layer {split.layer} is a {type(module).__name__}, which has no `part`")
    device = next(module.parameters()).device
    groups = [torch.tensor(group, device=device) for group in split.groups()]
    return Summed([module.slice_units(group, bias=at == 0) for at, group in enumerate(groups)])


def _columns(whole: nn.Linear, units: Tensor) -> nn.Linear:
    """Some columns of what a linear layer gives."""
    found = nn.Linear(whole.in_features, len(units), bias=whole.bias is not None).to(whole.weight)
    with torch.no_grad():
        found.weight.copy_(whole.weight[units])
        if whole.bias is not None:
            found.bias.copy_(whole.bias[units])
    return found.train(whole.training)


class Rewrite:
    """A model whose split layers run in parts, all of them here; a context manager that undoes it.

    Attributes:
        model: The model, changed.
        plan: What is split.
        forms: Layer -> its split form.
    """

    def __init__(self, model: LayeredModel, plan: RewritePlan) -> None:
        self.model, self.plan = model, plan
        check(model.describe_layers(1), plan)
        self.forms: Mapping[int, Form] = {
            split.layer: split_form(model.get_layer(split.layer), split) for split in plan.splits
        }
        self._originals = {layer: model.get_layer(layer) for layer in self.forms}
        self._undone = False
        for layer, form in self.forms.items():
            model.replace_layer(layer, form)

    def undo(self) -> None:
        """Put the modules that were there back.

        Raises:
            InputError: That was done before, or someone put another module in place of a split form.
        """
        if self._undone:
            raise InputError("this rewrite was undone before")
        for layer, form in self.forms.items():
            if self.model.get_layer(layer) is not form:
                raise InputError(
                    f"layer {layer} is not in the split form that it was given: nothing was undone"
                )
        self._undone = True
        for layer, module in self._originals.items():
            self.model.replace_layer(layer, module)

    def __enter__(self) -> Rewrite:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._undone:
            self.undo()


def apply(model: LayeredModel, plan: RewritePlan) -> Rewrite:
    """Turn layers of a model into their split form.

    Raises:
        InputError: The plan is for another model, or a layer is split already; the model is then as it was.
    """
    return Rewrite(model, plan)


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
