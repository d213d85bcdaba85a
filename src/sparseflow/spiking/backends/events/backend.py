"""`EventBackend`: runs groups of a plan on a CPU, with spikes as lists of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from sparseflow.errors import InputError, RunError
from sparseflow.spiking.backends import events
from sparseflow.spiking.backends.base import (
    NATURAL_LAYOUT,
    ChannelLayout,
    ConvolutionKind,
    GroupShape,
    PreparedGroup,
    SpikeForm,
)
from sparseflow.spiking.backends.spec import GroupSpec


class EventBackend:
    """CPU backend: spikes as sorted lists of events, groups in Numba."""

    name = "events"
    dtype = torch.float32
    channel_block = None
    shape_agnostic = True
    adds_dense_spikes = False

    def get_unsupported_reason(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        return None if spec.sources else "the group has no convolution of spikes"

    def prepare(
        self,
        spec: GroupSpec,
        shape: GroupShape,
        convolution: ConvolutionKind,
        layout: ChannelLayout = NATURAL_LAYOUT,
    ) -> PreparedGroup:
        assert layout.output is None, "the event backend does not reorder channels"
        prepared = events.prepare_group(spec, conv="event" if convolution == "sparse" else "dense")

        def run(
            sources: Sequence[Any],
            skips: Sequence[Any],
            dense: Sequence[torch.Tensor],
            post_skips: Sequence[Any],
            *,
            steps: int,
            v: torch.Tensor | None,
            out: SpikeForm,
        ) -> tuple[Any, torch.Tensor]:
            spikes, membrane = prepared(
                sources,
                skips,
                dense,
                post_skips,
                v=v,
                return_v=True,
                out="events" if out == "native" else "dense",
                time_steps=steps,
            )
            assert membrane is not None
            return spikes, membrane

        return run

    def encode(self, dense: torch.Tensor, max_value: int) -> Any:
        try:
            return events.encode(dense)
        except InputError as error:
            raise RunError(
                f"a tensor of shape {tuple(dense.shape)} must contain spikes by the analysis, but contains "
                "other values"
            ) from error

    encode_addend = encode

    def decode(self, native: Any) -> torch.Tensor:
        return events.decode(native)

    def spatial_mean(self, native: Any) -> torch.Tensor:
        return events.sum_over_space(native) / (native.H * native.W)

    def max_pool(self, native: Any, kernel: int, stride: int, padding: int) -> Any:
        dense = self.decode(native)
        pooled = F.max_pool2d(dense.flatten(0, 1), kernel, stride, padding)
        return self.encode(pooled.unflatten(0, dense.shape[:2]), max_value=1)
