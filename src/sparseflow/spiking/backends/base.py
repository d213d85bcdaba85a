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
from torch import Tensor

from sparseflow.spiking.backends.spec import GroupSpec

Convolution = Literal["sparse", "dense"]
Form = Literal["native", "dense"]

TILE = 16
"""Pixels that are looked at together; what the kernels note activity for."""


@dataclass(frozen=True, eq=False)
class Order:
    """A permutation of channels.

    Attributes:
        places: int64 [C]: which of the network's channels lies at each place.
        inverse: int64 [C]: at which place each of the network's channels lies.
    """

    places: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, places: Tensor) -> Order:
        """The order with these `places`."""
        return cls(places, torch.argsort(places))


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How channels lie in what a group reads and yields.

    Attributes:
        output: Order of its output channels, and of everything that is added to its input or output.
        inputs: Order of the input channels of each source.
        silent: Share of the first source's blocks that were silent on the sample; 0 when it is not worth
            looking for them.
        marks: Whether a reader wants to know where the group's output is silent.
    """

    output: Order | None = None
    inputs: tuple[Order | None, ...] = ()
    silent: float = 0.0
    marks: bool = False


NATURAL = Arrangement()
"""Channels as the network has them, and nothing silent."""


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
