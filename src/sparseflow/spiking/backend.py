"""What a device brings to a plan: its own form of spikes, and groups prepared to run on it.

A plan (`plan.py`) holds spikes in whatever form the backend likes best and converts only where somebody needs
a dense tensor. Two backends exist: `EventBackend` (CPU, Numba: lists of events) and `PackedBackend` (GPU,
Triton: one bit a spike). Shapes: spikes are [T, N, C, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from sparseflow.core import extras
from sparseflow.errors import InputError, RunError
from sparseflow.spiking.channels import NATURAL, Arrangement
from sparseflow.spiking.kernels.spec import GroupSpec

Convolution = Literal["sparse", "dense"]
Form = Literal["native", "dense"]

TUNED_VARIANTS = 2
"""Variants of a GPU kernel that are timed when a group is prepared."""


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Sizes of one group's work: its inputs' [C, H, W] and its output's, T time steps and N images."""

    steps: int
    images: int
    sources: tuple[tuple[int, int, int], ...]
    output: tuple[int, int, int]
    max_value: int = 1


class PreparedGroup(Protocol):
    """A group ready to run: weights laid out, buffers allocated."""

    def __call__(
        self,
        sources: Sequence[Any],
        skips: Sequence[Any],
        dense: Sequence[torch.Tensor],
        post_skips: Sequence[Any],
        *,
        steps: int,
        v: torch.Tensor | None,
        out: Form,
    ) -> tuple[Any, torch.Tensor]:
        """Run the group.

        Args:
            sources: One spike value a source: in the backend's form when prepared for a sparse convolution,
                else dense float tensors [T, N, C, H, W].
            skips, post_skips: Spike values in the backend's form.
            dense: Real tensors [T, N, C, H, W], or [1, N, C, H, W] when constant over time.
            steps: T.
            v: Membrane [N, C, H, W] float32 to start from; None for a network at rest.
            out: Which form the output is wanted in.

        Returns:
            The spikes, and the membrane after the last step, [N, C, H, W] float32.
        """
        ...


class Backend(Protocol):
    """One device's way to run groups.

    Attributes:
        name: Short, for people and for cache keys.
        dtype: In which dense convolutions of a group run.
        block: Channels that a sparse convolution skips together where all are silent; None where it gains
            nothing by that.
        fits_every_shape: Whether a prepared group runs on inputs of any shape.
        adds_dense: Whether groups prepared for a dense convolution add dense spikes as gladly as their own.
    """

    name: str
    dtype: torch.dtype
    fits_every_shape: bool
    adds_dense: bool

    @property
    def block(self) -> int | None: ...

    def refusal(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        """Why the sparse convolution cannot run here (a sentence), or None when it can."""
        ...

    def prepare(
        self, spec: GroupSpec, shape: GroupShape, convolution: Convolution, arrangement: Arrangement = NATURAL
    ) -> PreparedGroup:
        """Lay out weights and buffers for one group.

        `spec` has its channels in the arrangement's orders already; membranes come and go in the network's.
        """
        ...

    def encode(self, dense: torch.Tensor, max_value: int) -> Any:
        """[T, N, C, H, W] spikes to the backend's own form."""
        ...

    def lend(self, dense: torch.Tensor, max_value: int) -> Any:
        """As `encode`, for a group prepared for a dense convolution that only adds these spikes."""
        ...

    def decode(self, native: Any) -> torch.Tensor:
        """The backend's own form to float spikes [T, N, C, H, W]."""
        ...

    def spatial_mean(self, native: Any) -> torch.Tensor:
        """Mean over H and W: float32 [T, N, C]."""
        ...

    def max_pool(self, native: Any, kernel: int, stride: int, padding: int) -> Any:
        """Maximum over windows, in the backend's own form; `padding` is 0 or 1, at most half the window."""
        ...


class EventBackend:
    """CPU: spikes as sorted lists of events, groups in Numba."""

    name = "events"
    dtype = torch.float32
    block = None
    fits_every_shape = True
    adds_dense = False

    def refusal(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        return None if spec.sources else "no convolution of spikes in this group"

    def prepare(
        self, spec: GroupSpec, shape: GroupShape, convolution: Convolution, arrangement: Arrangement = NATURAL
    ) -> PreparedGroup:
        from sparseflow.spiking.kernels import events

        assert arrangement.output is None, "events are skipped one by one: nothing is gained by an order"
        prepared = events.prepare_group(spec, conv="event" if convolution == "sparse" else "dense")

        def run(
            sources: Sequence[Any],
            skips: Sequence[Any],
            dense: Sequence[torch.Tensor],
            post_skips: Sequence[Any],
            *,
            steps: int,
            v: torch.Tensor | None,
            out: Form,
        ) -> tuple[Any, torch.Tensor]:
            spikes, membrane = prepared(
                sources,
                skips,
                dense,
                post_skips,
                v=v,
                want_v=True,
                out="events" if out == "native" else "dense",
                time_steps=steps,
            )
            assert membrane is not None
            return spikes, membrane

        return run

    def encode(self, dense: torch.Tensor, max_value: int) -> Any:
        from sparseflow.spiking.kernels import events

        try:
            return events.encode(dense)
        except InputError as error:
            raise RunError(
                f"a tensor of shape {tuple(dense.shape)} that the analysis proved to hold spikes holds other "
                "numbers"
            ) from error

    lend = encode

    def decode(self, native: Any) -> torch.Tensor:
        from sparseflow.spiking.kernels import events

        return events.decode(native)

    def spatial_mean(self, native: Any) -> torch.Tensor:
        from sparseflow.spiking.kernels import events

        return events.sum_over_space(native) / (native.H * native.W)

    def max_pool(self, native: Any, kernel: int, stride: int, padding: int) -> Any:
        dense = self.decode(native)
        pooled = F.max_pool2d(dense.flatten(0, 1), kernel, stride, padding)
        return self.encode(pooled.unflatten(0, dense.shape[:2]), max_value=1)


def backend_for(sample: torch.Tensor, model: nn.Module, dtype: torch.dtype | None = None) -> Backend | None:
    """The backend for a network and its input, or None where none exists for the device or dtype.

    Args:
        sample: An input; its device counts.
        model: The network; its parameters' dtype counts unless `dtype` is given.
        dtype: What the user asked for.

    Raises:
        MissingExtraError: The device has a backend whose packages are not installed.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), sample.dtype)
    dtype = dtype or own
    if sample.device.type == "cpu" and dtype == torch.float32 == own:
        extras.require("numba", "spiking")
        return EventBackend()
    if sample.device.type == "cuda" and dtype in (torch.float32, torch.float16, torch.bfloat16):
        extras.require("triton", "spiking")
        from sparseflow.spiking.packed_backend import PackedBackend

        return PackedBackend(dtype=dtype, device=sample.device, tune=TUNED_VARIANTS)
    return None
