"""`PackedGroup`: what the Hopper and the portable group kernel have in common on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import (
    BLOCK,
    PackedSpikes,
    allocate_packed,
    count_blocks,
    make_channel_table,
)
from sparseflow.spiking.backends.packed.words import check_launchable, check_step_size
from sparseflow.spiking.backends.spec import GroupSpec


class PackedGroup(ABC):
    """A group prepared for one shape on one device.

    Calling it launches one kernel without allocation or host synchronization, so it can be captured into a
    CUDA graph. The returned tensors are the same at each call.

    Args:
        spec: The group; `get_unsupported_reason(spec)` must be None.
        T: Time steps.
        N: Images.
        H: Output rows.
        W: Output columns.
        device: A GPU that the kernel supports.
        parts: 1 rounds the weights to fp16; 2 keeps about 22 bits and is about as accurate as an fp32
            convolution.
        variant: Name of a variant; None takes the most promising one.
        in_sizes: (rows, columns) of each source's input; stride x output if None.
        emit_activity: Whether the output has activity words (`PackedSpikes.activity`), so that the next
            group can skip silent blocks; at most 32 time steps.
        v_columns: Integers [C_out], the channel of the membranes' memory for each of the group's channels;
            None for the identity.

    Raises:
        InputError: The group, the variant's name or the membrane order is not supported.
        DeviceError: The kernel cannot run on `device`.
    """

    def __init__(
        self,
        spec: GroupSpec,
        *,
        T: int,
        N: int,
        H: int,
        W: int,
        device: torch.device | str,
        parts: int = 1,
        variant: str | None = None,
        in_sizes: Sequence[tuple[int, int]] | None = None,
        emit_activity: bool = False,
        v_columns: Tensor | None = None,
    ) -> None:
        reason = self.get_unsupported_reason(spec)
        if reason is not None:
            raise InputError(f"the packed group kernel does not support this group: {reason}")
        self.device = torch.device(device)
        self.spec, self.T, self.N, self.H, self.W, self.parts = spec, T, N, H, W, parts
        self.in_sizes = list(in_sizes) if in_sizes else [(s.stride * H, s.stride * W) for s in spec.sources]
        for source, (h, w) in zip(spec.sources, self.in_sizes, strict=True):
            if (source.compute_out_size(h), source.compute_out_size(w)) != (H, W):
                raise InputError(f"an input of {h}x{w} does not yield an output of {H}x{W}")
        variants = {v.name: v for v in self.list_variants(spec, T=T, N=N, H=H, W=W, parts=parts)}
        if variant is not None and variant not in variants:
            raise InputError(f"unknown variant {variant!r}; available: {list(variants)}")
        self.variant = variants[variant or next(iter(variants))]
        weights, scale = self.pack_weights(spec, parts)
        neuron = spec.neuron
        self.weights, self.scale = weights.to(self.device), scale * neuron.beta
        self.c_out = spec.sources[0].weight.shape[0]
        bias = (spec.bias.double() * neuron.beta + neuron.delta).float()
        self.bias = F.pad(bias, (0, count_blocks(self.c_out) * BLOCK - self.c_out)).to(self.device)
        tile = self.variant.activity_tile if emit_activity else 0
        self.out = allocate_packed(T, N, self.c_out, H, W, self.device, tile=tile)
        self._v_columns = make_channel_table(v_columns, self.c_out, self.device)
        self.v = torch.empty((N, H, W, self.c_out), dtype=torch.float32, device=self.device)
        check_launchable(self.bias)
        check_step_size(self.v.unsqueeze(0))

    @staticmethod
    @abstractmethod
    def get_unsupported_reason(spec: GroupSpec) -> str | None:
        """Return why the kernel cannot run `spec`, or None if it can."""

    @staticmethod
    @abstractmethod
    def list_variants(spec: GroupSpec, *, T: int, N: int, H: int, W: int, parts: int = 1) -> Sequence[Any]:
        """List the kernel's variants that fit, the most promising first."""

    @staticmethod
    @abstractmethod
    def pack_weights(spec: GroupSpec, parts: int) -> tuple[Tensor, float]:
        """Lay out the weights for the kernel; also return the factor of its sums."""

    @abstractmethod
    def launch(
        self,
        spikes: Sequence[PackedSpikes],
        skips: Sequence[PackedSpikes] = (),
        dense: Sequence[Tensor] = (),
        v: Tensor | None = None,
        write_v: bool = False,
    ) -> Any:
        """Launch the kernel; see `__call__`. Returns Triton's compiled kernel."""

    def __call__(
        self,
        spikes: Sequence[PackedSpikes],
        skips: Sequence[PackedSpikes] = (),
        dense: Sequence[Tensor] = (),
        v: Tensor | None = None,
        write_v: bool = False,
    ) -> tuple[PackedSpikes, Tensor | None]:
        """Run the group.

        Args:
            spikes: One per source. The Hopper kernel skips silent blocks of the first if it has activity
                words.
            skips: Packed spikes of the output's shape, added to the neuron's input.
            dense: fp16, bf16 or fp32 [T or 1, N, H, W, C_out], contiguous (channels last).
            v: Initial membrane, fp32 [N, H, W, C_out], in the order of `v_columns`; the rest value if None.
            write_v: Whether to write the final membrane.

        Returns:
            (packed spikes [T, N, C_out, H, W], membrane fp32 [N, H, W, C_out] or None).
        """
        self.launch(spikes, skips, dense, v, write_v)
        return self.out, self.v if write_v else None


def get_unsupported_reason(spec: GroupSpec) -> str | None:
    """Return why no packed kernel can run `spec`, or None if the portable one can."""
    if not spec.sources:
        return "the group has no convolution of spikes"
    if len(spec.sources) > 2:
        return f"{len(spec.sources)} convolutions of spikes (at most 2)"
    if spec.post_skips:
        return "spikes are added to the output (its values are integers, not bits)"
    for i, source in enumerate(spec.sources):
        k = source.weight.shape[-1]
        if k not in (1, 3) or source.weight.shape[-2] != k or source.padding not in (0, 1):
            return f"source {i}: kernel {k}, padding {source.padding}"
        if source.stride not in (1, 2):
            return f"source {i}: stride {source.stride}"
        if not bool(torch.isfinite(source.weight).all()):
            return f"source {i} has NaN or Inf weights"
    return None


def split_into_halves(numbers: Tensor, parts: int, dim: int) -> Tensor:
    """Split float64 numbers into `parts` fp16 numbers along a new dimension; each is the rest's rounding."""
    pieces: list[Tensor] = []
    for _ in range(parts):
        pieces.append(numbers.half())
        numbers = numbers - pieces[-1].double()
    return torch.stack(pieces, dim=dim)
