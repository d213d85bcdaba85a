"""What travels through a plan: one layer's spikes, in the backend's form or as a dense tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_arg

from sparseflow.spiking.backends.base import Backend, Order
from sparseflow.spiking.runtime.spike_passthrough import Passage

Env = dict[fx.Node, Any]
"""The value of every node that somebody still needs."""


class Spikes:
    """One layer's spikes in the backend's form, as a dense tensor, or both; converted when asked for.

    Args:
        native: The backend's form, or None; its channels lie as `order` says.
        dense: float [T, N, C, H, W], or [N, C, H, W] when `single`.
        single: The network runs one step at a time, so its dense tensors carry no time axis.
        dtype: What the network's own operations compute in.
        max_value: Largest spike value (1 for binary spikes).
        order: How the channels lie between groups; None as in the network.
        natural: Whether the channels of `dense` lie as in the network all the same.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        native: Any = None,
        dense: Any = None,
        single: bool,
        dtype: torch.dtype,
        max_value: int = 1,
        order: Order | None = None,
        natural: bool = True,
    ) -> None:
        self._backend, self._native, self._dense = backend, native, dense
        self.single, self.dtype, self.max_value = single, dtype, max_value
        self.order, self._natural = order, natural or order is None

    @property
    def native(self) -> Any:
        """In the backend's form, channels in `order`."""
        if self._native is None:
            self._native = self._backend.encode(self.sequence, self.max_value)
        return self._native

    @property
    def lent(self) -> Any:
        """In the backend's form or one that a dense group adds as gladly, channels in `order`."""
        return self._backend.lend(self.sequence, self.max_value) if self._native is None else self._native

    @property
    def sequence(self) -> torch.Tensor:
        """Dense, with a time axis: [T, N, C, H, W], channels in `order`."""
        if self._dense is None:
            self._dense = self._backend.decode(self._native)
            self._natural = self.order is None
            if self.single:
                self._dense = self._dense[0]
        whole = self._dense.unsqueeze(0) if self.single else self._dense
        if self._natural and self.order is not None:
            return whole.index_select(2, self.order.places)
        return whole

    @property
    def dense(self) -> torch.Tensor:
        """Dense, as the network's own operations expect it."""
        if self._dense is not None and self._natural:
            return self._dense.to(self.dtype)
        sequence = self.sequence.to(self.dtype)
        if self.order is not None:
            sequence = sequence.index_select(2, self.order.inverse)
        return sequence[0] if self.single else sequence

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        if self._native is None:
            t, n, c, h, w = self.sequence.shape
            return t, n, c, h, w
        native = self._native
        return native.T, native.N, native.C, native.H, native.W

    def spatial_mean(self) -> torch.Tensor:
        """Mean over H and W, [T, N, C], or [N, C] when the network runs one step at a time."""
        if self._native is None:
            return self.dense.mean(dim=(-2, -1))
        mean = self._backend.spatial_mean(self._native).to(self.dtype)
        if self.order is not None:
            mean = mean.index_select(-1, self.order.inverse)
        return mean[0] if self.single else mean

    def through(self, layer: Passage) -> Any:
        """What comes out of a layer that spikes pass: spikes, or of a mean a tensor [(T,) N, C, 1, 1]."""
        if layer.kind == "same":
            return self
        if layer.kind == "mean":
            return self.spatial_mean()[..., None, None]
        size = (layer.kernel, layer.stride, layer.padding)
        native = dense = None
        if self._native is None:
            whole = self._dense
            dense = F.max_pool2d(whole.reshape(-1, *whole.shape[-3:]), *size).unflatten(0, whole.shape[:-3])
        else:
            native = self._backend.max_pool(self._native, *size)
        return Spikes(
            self._backend, native=native, dense=dense, single=self.single, dtype=self.dtype,
            max_value=self.max_value, order=self.order, natural=self._natural,
        )  # fmt: skip


def as_dense(value: Any) -> Any:
    """A value of the network as its own operations expect it."""
    return value.dense if isinstance(value, Spikes) else value


def run_node(node: fx.Node, env: Env, modules: dict[str, nn.Module]) -> Any:
    """Run one fx node on the values in `env`, as the network's author wrote it."""
    args = map_arg(node.args, lambda n: as_dense(env[n]))
    kwargs = map_arg(node.kwargs, lambda n: as_dense(env[n]))
    if node.op == "call_module":
        return modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        receiver, *rest = args
        return getattr(receiver, str(node.target))(*rest, **kwargs)
    if node.op == "get_attr":
        owner, _, attribute = str(node.target).rpartition(".")
        return getattr(modules[owner], attribute)
    assert callable(node.target)
    return node.target(*args, **kwargs)
