"""Plain-torch reference of a fused group (`GroupSpec`); all backends are tested against it.

It follows the recurrence of `spec.py` line by line, in the dtype that the caller passes. float64 measures
rounding errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource


def run_convolution_reference(source: SpikeSource, spikes: torch.Tensor) -> torch.Tensor:
    """Run one convolution of spikes, without bias.

    Args:
        source: Weight [C_out, C_in, k, k], stride and padding.
        spikes: [T, N, C_in, H, W]; its dtype is the dtype of the computation.

    Returns:
        [T, N, C_out, H_out, W_out] in the dtype of `spikes`.
    """
    weight = source.weight.to(spikes)
    out = F.conv2d(spikes.flatten(0, 1), weight, stride=source.stride, padding=source.padding)
    return out.unflatten(0, spikes.shape[:2])


def run_neuron_reference(
    neuron: NeuronSpec, x: torch.Tensor, v: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Charge, fire and reset over time.

    Args:
        neuron: Neuron dynamics.
        x: Input current [T, N, C, H, W].
        v: Membrane before the first step [N, C, H, W]; `neuron.v_rest` if None.

    Returns:
        Spikes [T, N, C, H, W] (0 or 1) and the membrane after the last step [N, C, H, W], both in x's dtype.
    """
    u = torch.full_like(x[0], neuron.v_rest) if v is None else v.to(x)
    spikes = torch.empty_like(x)
    for t in range(x.shape[0]):
        has_fired = u >= neuron.v_threshold
        if neuron.delays_reset and neuron.v_reset is not None:
            u = u.masked_fill(has_fired, neuron.v_reset)
        v = neuron.alpha * u + neuron.beta * x[t] + neuron.delta
        if neuron.delays_reset and neuron.v_reset is None:
            v = v - has_fired.to(x) * neuron.amount
        fired = v >= neuron.v_threshold
        spikes[t] = fired.to(x.dtype)
        if neuron.delays_reset:
            u = v
        elif neuron.v_reset is None:
            u = v - spikes[t] * neuron.amount
        else:
            u = v.masked_fill(fired, neuron.v_reset)
    return spikes, u


def run_group_input_reference(
    spec: GroupSpec,
    spikes: Sequence[torch.Tensor],
    skips: Sequence[torch.Tensor] = (),
    dense: Sequence[torch.Tensor] = (),
    *,
    time_steps: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the input of the group's neuron, [T, N, C_out, H_out, W_out] in `dtype`.

    Args:
        spec: The group.
        spikes: One [T, N, C_in, H, W] per source.
        skips: `spec.skips` tensors [T, N, C_out, H_out, W_out].
        dense: `spec.dense_inputs` tensors [T or 1, N, C_out, H_out, W_out].
        time_steps: T.
        dtype: Floating dtype of the computation.
    """
    terms = [run_convolution_reference(s, x.to(dtype)) for s, x in zip(spec.sources, spikes, strict=True)]
    terms += [skip.to(dtype) for skip in skips]
    terms += [d.to(dtype).expand(time_steps, -1, -1, -1, -1) for d in dense]
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total + spec.bias.to(total).view(-1, 1, 1)


def run_group_reference(
    spec: GroupSpec,
    spikes: Sequence[torch.Tensor],
    skips: Sequence[torch.Tensor] = (),
    dense: Sequence[torch.Tensor] = (),
    post_skips: Sequence[torch.Tensor] = (),
    v: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    time_steps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a whole group: convolutions, residuals, neuron and SEW addition.

    Args:
        spec: The group.
        spikes: One [T, N, C_in, H, W] per source.
        skips: `spec.skips` spike tensors added to the neuron's input.
        dense: `spec.dense_inputs` real tensors [T or 1, N, C_out, H_out, W_out] added to the neuron's input.
        post_skips: `spec.post_skips` spike tensors added to the neuron's output.
        v: Membrane before the first step [N, C_out, H_out, W_out]; the rest value if None.
        dtype: Floating dtype of the computation.
        time_steps: T; by default the longest leading dimension among the inputs.

    Returns:
        Output [T, N, C_out, H_out, W_out] and final membrane [N, C_out, H_out, W_out], in `dtype`.

    Raises:
        ValueError: The number of inputs does not match the spec.
    """
    for name, actual, expected in (
        ("spikes", len(spikes), len(spec.sources)),
        ("skips", len(skips), spec.skips),
        ("dense", len(dense), spec.dense_inputs),
        ("post_skips", len(post_skips), spec.post_skips),
    ):
        if actual != expected:
            raise ValueError(f"the group takes {expected} `{name}`, got {actual}")
    steps = time_steps or max(x.shape[0] for x in (*spikes, *skips, *dense, *post_skips))
    x = run_group_input_reference(spec, spikes, skips, dense, time_steps=steps, dtype=dtype)
    out, v_final = run_neuron_reference(spec.neuron, x, v)
    for post in post_skips:
        out = out + post.to(dtype)
    return out, v_final
