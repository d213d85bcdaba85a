"""Rewrites layers of a model into parts, and restores them.

- If a layer's output is a sum over units, y = sum_j part_j(x), in the order of groups; the last bias is in
  group 0.
- If units are columns of a linear layer, parts compute different columns: they are concatenated in the order
  of groups and reordered by index_select with argsort(pi), the inverse of the grouping.

See `workload.splits` for notation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from sparseflow.codesign.workload.splits import (
    LayerSplit,
    RewritePlan,
    check_rewrite_plan,
    unit_mismatch_error,
)
from sparseflow.core.layers import LayeredModel, Splittable
from sparseflow.errors import InputError


class SplitModule(nn.Module):
    """A layer's module split into parts, with the combination of their outputs.

    Attributes:
        parts: Parts in the order of groups.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.combine([part(*inputs) for part in self.parts])

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """Combine the outputs of all parts, in the order of groups."""
        raise NotImplementedError


class SumSplit(SplitModule):
    """Parts whose outputs are summed."""

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


class ConcatSplit(SplitModule):
    """Parts whose outputs are columns.

    Attributes:
        inverse_permutation: Index of each column among the concatenated columns, int64, [U].
    """

    inverse_permutation: Tensor

    def __init__(self, parts: Sequence[nn.Module], permutation: Tensor) -> None:
        super().__init__(parts)
        self.register_buffer("inverse_permutation", permutation.argsort(), persistent=False)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(outputs), -1).index_select(-1, self.inverse_permutation)


def split_module(module: nn.Module, split: LayerSplit) -> SplitModule:
    """Split a module; parts have their own weights.

    Raises:
        InputError: The module is neither `Splittable` nor linear, is already split, or has other units.
    """
    if isinstance(module, SplitModule):
        raise InputError(f"layer {split.layer} is already split; undo that rewrite first")
    if isinstance(module, nn.Linear):
        if module.out_features != len(split.permutation):
            raise unit_mismatch_error(split, module.out_features)
        device = module.weight.device
        parts = [_slice_columns(module, torch.tensor(group, device=device)) for group in split.unit_groups()]
        return ConcatSplit(parts, torch.tensor(split.permutation, device=device))
    if not isinstance(module, Splittable):
        raise InputError(f"layer {split.layer} is a {type(module).__name__} without `slice_units`")
    device = next(module.parameters()).device
    groups = [torch.tensor(group, device=device) for group in split.unit_groups()]
    return SumSplit([module.slice_units(group, bias=index == 0) for index, group in enumerate(groups)])


def _slice_columns(linear: nn.Linear, units: Tensor) -> nn.Linear:
    """Linear layer that computes some of the output columns."""
    part = nn.Linear(linear.in_features, len(units), bias=linear.bias is not None).to(linear.weight)
    with torch.no_grad():
        part.weight.copy_(linear.weight[units])
        if linear.bias is not None:
            part.bias.copy_(linear.bias[units])
    return part.train(linear.training)


class ModelRewrite:
    """A model with split layers, all parts in this process; a context manager that restores it.

    Attributes:
        model: The model, modified.
        plan: The splits.
        split_modules: Layer -> its split module.
    """

    def __init__(self, model: LayeredModel, plan: RewritePlan) -> None:
        self.model, self.plan = model, plan
        check_rewrite_plan(model.describe_layers(1), plan)
        self.split_modules: Mapping[int, SplitModule] = {
            split.layer: split_module(model.get_layer(split.layer), split) for split in plan.splits
        }
        self._originals = {layer: model.get_layer(layer) for layer in self.split_modules}
        self._undone = False
        for layer, form in self.split_modules.items():
            model.replace_layer(layer, form)

    def undo(self) -> None:
        """Restore the original modules.

        Raises:
            InputError: The rewrite was already undone, or a split module was replaced.
        """
        if self._undone:
            raise InputError("the rewrite was already undone")
        for layer, form in self.split_modules.items():
            if self.model.get_layer(layer) is not form:
                raise InputError(f"the split module of layer {layer} was replaced; nothing was undone")
        self._undone = True
        for layer, module in self._originals.items():
            self.model.replace_layer(layer, module)

    def __enter__(self) -> ModelRewrite:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._undone:
            self.undo()


def apply_rewrite(model: LayeredModel, plan: RewritePlan) -> ModelRewrite:
    """Split layers of a model in place.

    Raises:
        InputError: The plan does not match the model, or a layer is already split; the model is unchanged.
    """
    return ModelRewrite(model, plan)


PartInputs = tuple[Tensor | None, ...]
PartRequest = Callable[[PartInputs], Callable[[], Tensor]]
"""Sends a part its input; the returned function waits for the output."""


class DistributedSplit(nn.Module):
    """Stands for a split layer's module on its home slot: requests the other parts and computes its own
    meanwhile.

    Args:
        module: Contains the first part.
        requests: Requests of the other parts, in the order of groups.
    """

    def __init__(self, module: SplitModule, requests: Sequence[PartRequest]) -> None:
        super().__init__()
        self.form, self.requests = module, tuple(requests)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        pending = [request(inputs) for request in self.requests]
        output = self.form.parts[0](*inputs)
        return self.form.combine([output, *(answer() for answer in pending)])


def detach_parts(form: SplitModule) -> list[nn.Module]:
    """Keep only the first part in a split module and return the others."""
    _, *parts = form.parts
    form.parts = nn.ModuleList([form.parts[0]])
    return parts
