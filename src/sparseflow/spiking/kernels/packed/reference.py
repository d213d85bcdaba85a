"""A group in plain torch: the oracle of every kernel in this package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflow.spiking.kernels.spec import GroupSpec


def group_reference(
    spec: GroupSpec,
    spikes: Sequence[Tensor],
    skips: Sequence[Tensor] = (),
    dense: Sequence[Tensor] = (),
    v: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Spikes and final membrane of a group, in `dtype`.

    Args:
        spec: The group.
        spikes: One [T, N, C_in, H_in, W_in] per source, zeros and ones.
        skips: [T, N, C_out, H, W] each, added to the neuron's input.
        dense: [T, N, C_out, H, W] or [1, N, C_out, H, W] each, added to the neuron's input.
        v: Initial membrane [N, C_out, H, W]; None starts at rest.
        dtype: What to compute in.
        weight_dtype: Round the weights to this first (a kernel that stores fp16 weights is right when it
            matches this).

    Returns:
        (spikes [T, N, C_out, H, W] of `dtype`, membrane [N, C_out, H, W] of `dtype`).
    """
    neuron = spec.neuron
    x: Tensor | None = None
    for source, s in zip(spec.sources, spikes, strict=True):
        weight = source.weight if weight_dtype is None else source.weight.to(weight_dtype)
        t, n = s.shape[:2]
        flat = F.conv2d(
            s.flatten(0, 1).to(dtype),
            weight.to(s.device, dtype),
            stride=source.stride,
            padding=source.padding,
        )
        current = flat.unflatten(0, (t, n))
        x = current if x is None else x + current
    for extra in (*skips, *dense):
        x = extra.to(dtype) if x is None else x + extra.to(dtype)
    if x is None:
        raise ValueError("a group needs a source, a skip or a dense input")
    x = x + spec.bias.to(x.device, dtype).view(-1, 1, 1)
    u = torch.full_like(x[0], neuron.v_rest) if v is None else v.to(dtype)
    out = []
    for current in x:
        charged = neuron.alpha * u + neuron.beta * current + neuron.delta
        fired = charged >= neuron.v_threshold
        reset = (
            charged - neuron.v_threshold
            if neuron.v_reset is None
            else torch.full_like(charged, neuron.v_reset)
        )
        u = torch.where(fired, reset, charged)
        out.append(fired.to(dtype))
    return torch.stack(out), u
