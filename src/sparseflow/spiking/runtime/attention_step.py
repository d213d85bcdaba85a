"""`AttentionStep`: attention of spikes and its neuron as one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparseflow.spiking.backends.attention import AttentionShape
from sparseflow.spiking.graph.attention_matcher import AttentionMatch
from sparseflow.spiking.runtime.group_step import GroupMode, GroupStep
from sparseflow.spiking.runtime.spike_tensor import NodeValues, SpikeTensor, run_node, to_dense


@dataclass
class AttentionStep(GroupStep):
    """A product of three spike tensors and the neuron that reads it; "dense" is the fused kernel."""

    _layouts: dict[AttentionShape, Tensor] = field(default_factory=dict)

    @property
    def attention(self) -> AttentionMatch:
        assert self.match.attention is not None
        return self.match.attention

    def get_shape_mismatch(self, env: NodeValues) -> str | None:
        shape = self._choose_shape(self._get_factors(env))
        return shape if isinstance(shape, str) else None

    def _choose_shape(self, factors: tuple[Tensor, Tensor, Tensor]) -> AttentionShape | str:
        """Return the reading of the product that has less to compute, or why there is none (a sentence)."""
        shapes = [AttentionShape.from_factors(*factors, rows_are_tokens=reading) for reading in (True, False)]
        first, second, third = (self.max_values.get(node, 1) for node in self.attention.factors)
        reason: str | None = None
        for shape in sorted(shapes, key=lambda shape: shape.summary_size):
            reason = shape.get_unsupported_reason((first, second, third))
            if reason is None:
                layout = self._get_layout(shape)
                if layout._is_view() and layout.shape[0] == shape.steps:
                    return shape
                reason = "its result is copied before the neuron reads it"
        assert reason is not None
        return reason

    def get_unsupported_reason(self, env: NodeValues) -> str | None:
        return "attention runs on dense spikes"

    def run(
        self,
        env: NodeValues,
        mode: GroupMode | None = None,
        output_form: Literal["native", "dense"] | None = None,
    ) -> SpikeTensor:
        """Run attention and its neuron and store the membrane; the spikes are dense."""
        if (mode or self.mode) == "module":
            return self._run_modules(env)
        factors = self._get_factors(env)
        shape = self._choose_shape(factors)
        if isinstance(shape, str):
            return self._run_modules(env)
        layout = self._get_layout(shape)
        state = self.neuron.v
        if isinstance(state, Tensor) and state.shape != layout.shape[1:]:
            return self._run_modules(env)  # the neuron itself handles membranes of another batch size
        spec, v = self._get_neuron_spec(), None
        if isinstance(state, Tensor) or float(state) != spec.v_rest:
            size = (shape.images, shape.tokens, shape.heads, shape.value_channels)
            v = torch.empty(size, dtype=torch.float32, device=factors[0].device)
            v.as_strided(layout.shape[1:], layout.stride()[1:]).copy_(torch.as_tensor(state))
        assert self.backend.fused_kernels is not None
        spikes, v = self.backend.fused_kernels.attend(
            factors,
            spec,
            rows_are_tokens=shape.rows_are_tokens,
            scale=self.attention.scale,
            v=v,
            dtype=self.dtype,
        )
        self.neuron.v = v.as_strided(layout.shape[1:], layout.stride()[1:])
        dense = self._arrange(shape.to_product(spikes))
        return self._make_spike_tensor(self.match.output, dense=dense)

    def _get_factors(self, env: NodeValues) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors as [T, N, H, rows, columns]."""
        first, second, third = (to_dense(env[node]) for node in self.attention.factors)
        if not self.attention.has_heads:
            return first.unsqueeze(2), second.unsqueeze(2), third.unsqueeze(2)
        return first, second, third

    def _get_layout(self, shape: AttentionShape) -> Tensor:
        """Return a tensor without memory that has the shape and the strides of the neuron's input."""
        if shape not in self._layouts:
            size = (shape.steps, shape.images, shape.tokens, shape.heads, shape.value_channels)
            self._layouts[shape] = self._arrange(shape.to_product(torch.empty(size, device="meta")))
        return self._layouts[shape]

    def _arrange(self, product: Tensor) -> Tensor:
        """Rearrange the product [T, N, H, rows, columns] as the network does before the neuron."""
        result = product if self.attention.has_heads else product.squeeze(2)
        for node in self.attention.views:
            result = run_node(node, {node.all_input_nodes[0]: result}, self.modules)
        return result
