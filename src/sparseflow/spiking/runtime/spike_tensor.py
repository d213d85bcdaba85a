"""`SpikeTensor`: one layer's spikes in a plan, in native form or as a dense tensor.

An Identity, a Dropout in eval mode, a max pooling and a mean over whole feature maps outside of all groups
are passthroughs: they take spikes in native form and need no dense tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from sparseflow.spiking.backends.base import Backend, ChannelOrder
from sparseflow.spiking.graph.layer_rules import has_library_forward, match_max_pooling
from sparseflow.spiking.graph.simplification import get_folded_pooling
from sparseflow.spiking.graph.time_steps import get_folded_sizes, run_step_by_step, runs_step_by_step
from sparseflow.spiking.runtime.feature_form import FeatureForm

NodeValues = dict[fx.Node, Any]
"""Values of the nodes that are still needed."""


@dataclass(frozen=True)
class Passthrough:
    """Effect of a layer on spikes.

    Attributes:
        kind: "same" returns them unchanged, "max" takes the maximum over windows, "mean" the mean over rows
            and columns (a real number, no longer spikes).
        kernel, stride, padding: Of the windows, in pixels.
    """

    kind: Literal["same", "max", "mean"]
    kernel: int = 1
    stride: int = 1
    padding: int = 0


def match_passthrough(layer: nn.Module, *, form: FeatureForm, folds: bool = False) -> Passthrough | None:
    """Return the effect of `layer` on spikes, or None if it needs a dense tensor.

    Args:
        layer: A leaf module.
        form: Form of its input.
        folds: Whether it is called with the time axis folded into the batch.
    """
    if not has_library_forward(layer):
        return None
    is_spikingjelly = type(layer).__module__.startswith("spikingjelly.")
    if isinstance(layer, nn.Identity):
        return Passthrough("same")
    if isinstance(layer, (nn.Dropout, nn.Dropout2d)) or (
        is_spikingjelly and type(layer).__name__ in ("Dropout", "Dropout2d")
    ):
        return None if layer.training else Passthrough("same")
    if form.kind != "map":
        return None
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return Passthrough("mean") if layer.output_size in (1, (1, 1)) else None
    pooling = match_max_pooling(layer, takes_time=not form.single_step, folds=folds)
    if pooling is None or pooling.padding > 1:
        return None
    return Passthrough("max", pooling.size, pooling.stride, pooling.padding)


class SpikeTensor:
    """One layer's spikes in native form, as a dense tensor, or both; converted on demand.

    Args:
        backend: The plan's backend.
        native: The backend's form, or None; its channels are in `order`.
        dense: The network's tensor, in `form`.
        form: Form of the network's tensor.
        dtype: Data type of the network's own operations.
        max_value: Largest spike value (1 for binary spikes).
        order: Channel order between groups; None for the network's.
        dense_in_network_order: Whether the channels of `dense` are in the network's order regardless of
            `order`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        native: Any = None,
        dense: Any = None,
        form: FeatureForm,
        dtype: torch.dtype,
        max_value: int = 1,
        order: ChannelOrder | None = None,
        dense_in_network_order: bool = True,
    ) -> None:
        self._backend, self._native, self._dense = backend, native, dense
        self.form, self.dtype, self.max_value = form, dtype, max_value
        self.order, self._dense_in_network_order = order, dense_in_network_order or order is None

    @property
    def native(self) -> Any:
        """Spikes in native form, channels in `order`."""
        if self._native is None:
            self._native = self._backend.encode(self.sequence, self.max_value)
        return self._native

    @property
    def addend(self) -> Any:
        """Spikes in a form that dense groups can add, channels in `order`."""
        return (
            self._backend.encode_addend(self.sequence, self.max_value)
            if self._native is None
            else self._native
        )

    @property
    def sequence(self) -> torch.Tensor:
        """Dense spikes with a time axis: [T, N, C, H, W], channels in `order`."""
        if self._dense is None:
            self._dense = self.form.from_maps(self._backend.decode(self._native))
            self._dense_in_network_order = self.order is None
        sequence = self.form.to_maps(self._dense)
        if self._dense_in_network_order and self.order is not None:
            return sequence.index_select(2, self.order.permutation)
        return sequence

    @property
    def dense(self) -> torch.Tensor:
        """Dense spikes as the network's own operations expect them."""
        if self._dense is not None and self._dense_in_network_order:
            return self._dense.to(self.dtype)
        sequence = self.sequence.to(self.dtype)
        if self.order is not None:
            sequence = sequence.index_select(2, self.order.inverse)
        return self.form.from_maps(sequence)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        if self._native is None:
            t, n, c, h, w = self.sequence.shape
            return t, n, c, h, w
        return self._native.shape

    def spatial_mean(self) -> torch.Tensor:
        """Average over H and W: [T, N, C], or [N, C] if the network runs one step at a time."""
        if self._native is None:
            return self.dense.mean(dim=(-2, -1))
        mean = self._backend.spatial_mean(self._native).to(self.dtype)
        if self.order is not None:
            mean = mean.index_select(-1, self.order.inverse)
        return mean[0] if self.form.single_step else mean

    def apply_passthrough(self, layer: Passthrough) -> Any:
        """Apply a layer that spikes pass: returns spikes, or for a mean a tensor [(T,) N, C, 1, 1]."""
        if layer.kind == "same":
            return self
        if layer.kind == "mean":
            return self.spatial_mean()[..., None, None]
        size = (layer.kernel, layer.stride, layer.padding)
        native = dense = None
        if self._native is None:
            dense_spikes = self._dense
            dense = F.max_pool2d(dense_spikes.reshape(-1, *dense_spikes.shape[-3:]), *size).unflatten(
                0, dense_spikes.shape[:-3]
            )
        else:
            native = self._backend.max_pool(self._native, *size)
        return SpikeTensor(
            self._backend, native=native, dense=dense, form=self.form, dtype=self.dtype,
            max_value=self.max_value, order=self.order, dense_in_network_order=self._dense_in_network_order,
        )  # fmt: skip


def to_dense(value: Any) -> Any:
    """Convert a value to the form that the network's own operations expect."""
    return value.dense if isinstance(value, SpikeTensor) else value


def run_node(node: fx.Node, env: NodeValues, modules: Mapping[str, Any]) -> Any:
    """Run one fx node of the original network on the values in `env`; `modules` are its layers by name."""
    args = map_arg(node.args, lambda n: to_dense(env[n]))
    kwargs = map_arg(node.kwargs, lambda n: to_dense(env[n]))
    pooling = get_folded_pooling(node)
    if pooling is not None:
        (flat,) = args
        assert isinstance(flat, torch.Tensor)
        args = (pooling.apply(flat),)
    if runs_step_by_step(node):
        sequence, *state = args
        assert isinstance(sequence, torch.Tensor)
        return run_step_by_step(node, modules[str(node.target)], sequence, *state)
    sizes = get_folded_sizes(node)
    if sizes is None:
        return _call(node, args, kwargs, modules)
    args, kwargs = map_aggregate(
        (args, kwargs), lambda x: x.flatten(0, 1) if isinstance(x, torch.Tensor) else x
    )
    return _call(node, args, kwargs, modules).unflatten(0, sizes)


def _call(node: fx.Node, args: Any, kwargs: Any, modules: Mapping[str, Any]) -> Any:
    if node.op == "call_module":
        return modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        receiver, *arguments = args
        return getattr(receiver, str(node.target))(*arguments, **kwargs)
    if node.op == "get_attr":
        owner, _, attribute = str(node.target).rpartition(".")
        return getattr(modules[owner], attribute)
    assert callable(node.target)
    return node.target(*args, **kwargs)
