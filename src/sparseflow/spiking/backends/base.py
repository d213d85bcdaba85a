"""What a backend provides to a plan: a spike format, and groups prepared to run on a device.

A plan (`runtime/plan.py`) keeps spikes in the backend's native form and converts them only where a dense
tensor is read. There are two backends: `EventBackend` (CPU, Numba: lists of events) and `PackedBackend`
(GPU, Triton: one bit per spike).

Shapes: T time steps, N images, C channels, H x W pixels; spikes are [T, N, C, H, W].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec

ConvolutionKind = Literal["sparse", "dense"]
SpikeForm = Literal["native", "dense"]

ACTIVITY_TILE = 16
"""Pixels per activity word of a group's output."""


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """A permutation of channels.

    Attributes:
        permutation: int64 [C], the network's channel at each position.
        inverse: int64 [C], the position of each of the network's channels.
    """

    permutation: Tensor
    inverse: Tensor

    @classmethod
    def from_permutation(cls, permutation: Tensor) -> ChannelOrder:
        return cls(permutation, torch.argsort(permutation))


@dataclass(frozen=True, kw_only=True)
class ChannelLayout:
    """Channel orders of what a group reads and writes.

    Attributes:
        output: Order of the output channels and of everything added to the group's input or output; None for
            the network's.
        inputs: Order of the input channels of each source.
        silent_fraction: Fraction of the first source's channel blocks that were silent on the sample; 0
            disables skipping.
        emit_activity: Whether the output carries activity words for its readers.
    """

    output: ChannelOrder | None = None
    inputs: tuple[ChannelOrder | None, ...] = ()
    silent_fraction: float = 0.0
    emit_activity: bool = False


NATURAL_LAYOUT = ChannelLayout()
"""The network's own channel orders, without skipping."""


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Sizes of one group.

    Attributes:
        steps: T.
        images: N.
        sources: (C, H, W) of each source's input.
        output: (C, H, W) of the output.
        max_value: Largest spike value in the sources' inputs.
    """

    steps: int
    images: int
    sources: tuple[tuple[int, int, int], ...]
    output: tuple[int, int, int]
    max_value: int = 1


def convolve_maps(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    stride: int | tuple[int, int],
    padding: int | tuple[int, int] | str,
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    """Convolve [T, N, C, H, W] by the library; 1x1 convolutions of maps of one row are matrix products."""
    is_row = x.shape[-2] == 1 and weight.shape[-2:] == (1, 1) and groups == 1
    if is_row and stride in (1, (1, 1)) and padding in (0, (0, 0)):
        # With more dimensions, cuBLAS gets a batch of small products, which are far slower.
        rows = x.movedim(-3, -1)
        y = F.linear(rows.reshape(-1, rows.shape[-1]), weight.flatten(1))
        return y.view(*rows.shape[:-1], -1).movedim(-1, -3)
    flat = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    y = F.conv2d(flat, weight, None, stride, padding, dilation, groups)
    return y.unflatten(0, x.shape[:2])


class PreparedGroup(Protocol):
    """A group with its weights laid out and its buffers allocated."""

    def __call__(
        self,
        sources: Sequence[Any],
        skips: Sequence[Any],
        dense: Sequence[torch.Tensor],
        post_skips: Sequence[Any],
        *,
        steps: int,
        v: torch.Tensor | None,
        out: SpikeForm,
    ) -> tuple[Any, torch.Tensor | None]:
        """Run the group.

        Args:
            sources: One spike value per source: in native form for a sparse convolution, else dense float [T,
                N, C, H, W].
            skips: Spikes added to the neuron's input, in native form.
            dense: Real tensors [T, N, C, H, W], or [1, N, C, H, W] if constant over time.
            post_skips: Spikes added to the neuron's output, in native form.
            steps: T.
            v: Initial membrane [N, C, H, W], float32; None for the rest value.
            out: Form of the output.

        Returns:
            The spikes, and the membrane after the last step, [N, C, H, W] float32; it may be None if the
            group's spec does not keep it.
        """
        ...

    def convolve(self, sources: Sequence[Any], addends: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Compute the sum of bias, convolutions and addends, without a neuron: [T, N, C, H, W].

        Args:
            sources: As for a run of the group.
            addends: Real tensors [T, N, C, H, W], or [1, N, C, H, W] if constant over time.
        """
        ...


class PreparedStem(Protocol):
    """A convolution of few dense channels and its neurons, with its weights laid out."""

    def __call__(
        self, x: torch.Tensor, *, v: torch.Tensor | None, out: SpikeForm
    ) -> tuple[Any, torch.Tensor | None]:
        """Run the convolution and the neurons.

        Args:
            x: Input, [T, N, C, H, W], or [1, N, C, H, W] if constant over time.
            v: Initial membrane [N, C, H, W], float32; None for the rest value.
            out: Form of the output.

        Returns:
            The spikes, and the membrane after the last step, [N, C, H, W] float32; None if the spec does not
            keep it.
        """
        ...


class FusedKernels(Protocol):
    """Kernels that fuse neurons with what stands before them, besides sparse convolutions.

    A backend that has them also runs a max pooling between a dense convolution and its neurons.
    """

    def get_stem_unsupported_reason(self, geometry: ConvGeometry, in_channels: int) -> str | None:
        """Return why a convolution cannot run as a stem (a sentence), or None if it can."""
        ...

    def prepare_stem(
        self,
        weight: torch.Tensor,
        spec: GroupSpec,
        geometry: ConvGeometry,
        shape: GroupShape,
        layout: ChannelLayout = NATURAL_LAYOUT,
    ) -> PreparedStem:
        """Lay out the weights of a stem.

        Args:
            weight: float32 [C_out, C_in, kh, kw] of the only convolution, in the order of `layout`.
            spec: Bias and neuron.
            geometry: Of the convolution.
            shape: Sizes; it has no sources.
            layout: Channel order of the output.
        """
        ...

    def compile_kernels(self, run: Callable[[], object]) -> None:
        """Compile the kernels that a function launches, in several processes, without launching them."""
        ...

    def attend(
        self,
        factors: Sequence[torch.Tensor],
        neuron: NeuronSpec,
        *,
        rows_are_tokens: bool,
        scale: float,
        v: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run neurons on a product of three spike tensors; see `packed.attention.run_attention`."""
        ...


class Backend(Protocol):
    """Runs groups on one device.

    Attributes:
        name: Short name, also used in cache keys.
        dtype: Data type of a group's dense convolutions.
        shape_agnostic: Whether a prepared group runs on inputs of any shape.
        runs_bare_convolutions: Whether sparse groups run without their neuron.
        adds_dense_spikes: Whether groups prepared for a dense convolution add dense spikes at no extra cost.
        channel_block: Channels that a sparse convolution skips together if all are silent; None if it does
            not skip.
    """

    name: str
    dtype: torch.dtype
    shape_agnostic: bool
    runs_bare_convolutions: bool
    adds_dense_spikes: bool

    @property
    def channel_block(self) -> int | None: ...

    @property
    def fused_kernels(self) -> FusedKernels | None:
        """Further kernels; None if there are none."""
        ...

    def get_unsupported_reason(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        """Return why the sparse convolution cannot run (a sentence), or None if it can."""
        ...

    def prepare(
        self,
        spec: GroupSpec,
        shape: GroupShape,
        convolution: ConvolutionKind,
        layout: ChannelLayout = NATURAL_LAYOUT,
    ) -> PreparedGroup:
        """Lay out weights and buffers of one group.

        The channels of `spec` already follow `layout`; membranes are passed in the network's order.
        """
        ...

    def encode(self, dense: torch.Tensor, max_value: int) -> Any:
        """Convert spikes [T, N, C, H, W] to native form."""
        ...

    def encode_addend(self, dense: torch.Tensor, max_value: int) -> Any:
        """Convert spikes [T, N, C, H, W] to a form that dense groups can add."""
        ...

    def decode(self, native: Any) -> torch.Tensor:
        """Convert native spikes to float [T, N, C, H, W]."""
        ...

    def spatial_mean(self, native: Any) -> torch.Tensor:
        """Average native spikes over H and W: [T, N, C]."""
        ...

    def max_pool(self, native: Any, kernel: int, stride: int, padding: int) -> Any:
        """Max-pool native spikes; `padding` is 0 or 1, at most half the window."""
        ...
