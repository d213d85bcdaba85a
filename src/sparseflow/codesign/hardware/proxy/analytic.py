"""Latency without learning: the longer of operations and bytes, each at its rate, plus an overhead.

    latency = max(flops / (rate * compute), bytes / (peak_bw * memory)) + overhead

`compute` and `memory` are efficiencies, `overhead` is in milliseconds; there is one of each for every device
that was measured, type of layer and precision. A device that was not measured has 1, 1 and 0 unless told
otherwise. The maximum is exact: gradients go to what binds, and where both do, half to each.

    Williams, Waterman, Patterson: Roofline. CACM 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.inputs import Work
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS
from sparseflow.errors import InputError

COEFFICIENTS = ("compute", "memory", "overhead_ms")
SHAPE = (len(LAYER_TYPES), len(PRECISIONS), len(COEFFICIENTS))

_STARTS = ((0.0, 0.0, 0.0), (0.7, 0.7, -0.7), (0.0, 0.7, -2.0), (0.7, 0.0, -2.0))
"""What is added to the logarithms of the first guess; the best end counts."""

_ROOFLINE_STEPS = 600
_ROOFLINE_RATE = 0.03
_REGULARIZATION = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Roofline:
    """Coefficients.

    Attributes:
        values: float64 [1 + D, types, precisions, 3], see `COEFFICIENTS`; the first row is for devices that
            were not measured.
        fitted: bool [1 + D, types, precisions], where there were points; other coefficients are means.
    """

    values: Tensor
    fitted: Tensor

    @classmethod
    def ideal(cls) -> Roofline:
        """Peak rates are reached, and nothing is added."""
        values = torch.ones(1, *SHAPE, dtype=torch.float64)
        values[..., 2] = 0.0
        return cls(values=values, fitted=torch.zeros(values.shape[:-1], dtype=torch.bool))

    def latency_ms(self, work: Work, row: Tensor) -> Tensor:
        """Milliseconds, float64.

        Args:
            work: Of what.
            row: Of `values`, for each device of `work`; int64 [devices].
        """
        found = self.values[row[work.device], work.kind, work.precision]
        compute, memory, overhead = found.unbind(-1)
        return torch.maximum(work.compute_ms / compute, work.memory_ms / memory) + overhead

    def alike(self) -> Roofline:
        """The same, but devices that were not measured are taken to be like those that were, on average."""
        values = self.values.clone()
        values[0] = _means(values[1:], self.fitted[1:]).mean(0) if len(values) > 1 else values[0]
        return Roofline(values=values, fitted=self.fitted)


def fit_roofline(work: Work, latency_ms: Tensor) -> Roofline:
    """The coefficients that come nearest to what was measured, by the logarithm of the ratio.

    Args:
        work: Pairs of layers and devices, [N]; row 1 + d of the result is the d-th of its devices.
        latency_ms: float64 [N].

    Raises:
        InputError: Lengths differ.
    """
    if latency_ms.shape != work.flops.shape:
        raise InputError(f"{latency_ms.numel()} latencies of {work.flops.numel()} layers")
    types, precisions, kinds = SHAPE
    shape = (1 + len(work.devices), types, precisions)
    place = ((1 + work.device) * types + work.kind) * precisions + work.precision
    names, group = place.unique(return_inverse=True)
    compute_ms, memory_ms = work.compute_ms.detach(), work.memory_ms.detach()
    guess = torch.stack(
        [
            torch.stack(
                [
                    torch.quantile(compute_ms[mine] / latency_ms[mine], 0.95),
                    torch.quantile(memory_ms[mine] / latency_ms[mine], 0.95),
                    latency_ms[mine].min(),
                ]
            )
            for mine in (group == at for at in range(len(names)))
        ]
    ).log()
    first = guess[None] + torch.tensor(_STARTS, dtype=torch.float64)[:, None]
    found = first.clone().requires_grad_()

    def ratios() -> Tensor:
        compute, memory, overhead = found.exp()[:, group].unbind(-1)
        return (torch.maximum(compute_ms / compute, memory_ms / memory) + overhead).div(latency_ms).log()

    def loss() -> Tensor:
        off = ratios()
        near = torch.nn.functional.huber_loss(off, torch.zeros_like(off), reduction="sum", delta=0.05)
        return near + _REGULARIZATION * (found - first).square().sum()

    descend([found], loss, steps=_ROOFLINE_STEPS, rate=_ROOFLINE_RATE)
    with torch.no_grad():
        errors = torch.zeros(len(_STARTS), len(names), dtype=torch.float64)
        errors.index_add_(1, group, ratios().abs())
        best = found.exp()[errors.argmin(0), torch.arange(len(names))]
    values = torch.zeros(*shape, kinds, dtype=torch.float64).flatten(0, 2)
    fitted = torch.zeros(shape, dtype=torch.bool).flatten()
    values[names], fitted[names] = best, True
    values, fitted = values.view(*shape, kinds), fitted.view(shape)
    values[1:] = _means(values[1:], fitted[1:])
    values[0] = Roofline.ideal().values[0]
    return Roofline(values=values, fitted=fitted)


def descend(
    parameters: list[Tensor],
    loss: Callable[[], Tensor],
    *,
    steps: int,
    rate: float,
    after: Callable[[float], None] | None = None,
) -> None:
    """Adam on all data at once, with a rate that falls to 0 along a cosine.

    Args:
        parameters: What is changed.
        loss: Of them.
        steps: How many.
        rate: At first.
        after: Called after each step with its rate, without gradients.
    """
    adam = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    # Whoever fits may be within `no_grad`; a fit needs gradients of its own.
    with torch.enable_grad():
        for _ in range(steps):
            adam.zero_grad()
            loss().backward()
            now = float(schedule.get_last_lr()[0])
            adam.step()
            schedule.step()
            if after is not None:
                with torch.no_grad():
                    after(now)


def _means(values: Tensor, fitted: Tensor) -> Tensor:
    """Values of which those that were not fitted are geometric means of those that were, nearest first.

    Nearest are the same type in other precisions, then all of the device.
    """
    found = values.clone()
    for device in range(len(values)):
        logs, there = values[device].clamp_min(1e-12).log(), fitted[device]
        for kind in range(values.shape[1]):
            some = logs[kind][there[kind]] if there[kind].any() else logs[there]
            if len(some):
                found[device, kind, ~there[kind]] = some.mean(0).exp()
    return found


_SURE = 0.1
"""What all but this share of layers take beyond what they hold is workspace."""


def default_workspace() -> Tensor:
    """For devices that were not measured, MB, float64 [1, types, precisions]."""
    return torch.zeros(1, len(LAYER_TYPES), len(PRECISIONS), dtype=torch.float64)


def analytic_memory_mb(work: Work, workspace: Tensor, row: Tensor) -> Tensor:
    """MB of 1e6 bytes, float64.

    Args:
        work: Of what.
        workspace: MB, float64 [1 + D, types, precisions].
        row: Of `workspace`, for each device of `work`; int64 [devices].
    """
    return work.memory_bytes / 1e6 + workspace[row[work.device], work.kind, work.precision]


def fit_workspace(work: Work, memory_mb: Tensor) -> Tensor:
    """Workspaces, MB, float64 [1 + D, types, precisions]; a group without points gets the device's mean.

    Args:
        work: Pairs, [N].
        memory_mb: As measured, [N]; NaN where it was not.
    """
    found = default_workspace().repeat(1 + len(work.devices), 1, 1)
    beyond, there = memory_mb - work.memory_bytes / 1e6, torch.isfinite(memory_mb)
    for device in range(len(work.devices)):
        known = torch.zeros_like(found[0], dtype=torch.bool)
        for kind, precision in {*zip(work.kind.tolist(), work.precision.tolist(), strict=True)}:
            mine = there & (work.device == device) & (work.kind == kind) & (work.precision == precision)
            if bool(mine.any()):
                found[1 + device, kind, precision] = torch.quantile(beyond[mine], _SURE).clamp_min(0.0)
                known[kind, precision] = True
        if bool(known.any()):
            found[1 + device, ~known] = found[1 + device, known].mean()
    return found


_DEFAULT_POWER = (0.2, 0.6, 0.4)

_MIN_LATENCY_MS = 1e-12
_POWER_STEPS = 400
_POWER_RATE = 0.03
_MIN_POWER_POINTS = 8
"""Points that three coefficients are fitted to."""


def default_power() -> Tensor:
    """For devices that were not measured, float64 [1, 3]."""
    return torch.tensor([_DEFAULT_POWER], dtype=torch.float64)


def analytic_power_w(work: Work, latency_ms: Tensor, values: Tensor, row: Tensor) -> Tensor:
    """Watts, float64.

    Args:
        work: Of what.
        latency_ms: What it takes.
        values: Coefficients, float64 [1 + D, 3].
        row: Of `values`, for each device of `work`; int64 [devices].
    """
    busy, compute, memory = values[row[work.device]].unbind(-1)
    used = (compute * work.compute_ms + memory * work.memory_ms) / latency_ms.clamp_min(_MIN_LATENCY_MS)
    share = busy + used
    return work.idle_w + (work.tdp_w - work.idle_w) * share.clamp_max(1.0)


def fit_power(work: Work, latency_ms: Tensor, power_w: Tensor) -> Tensor:
    """Coefficients for each device of which there are enough points, float64 [1 + D, 3]; none is negative.

    Args:
        work: Pairs, [N].
        latency_ms: As measured, [N].
        power_w: As measured, [N]; NaN where it was not.
    """
    values = default_power().repeat(1 + len(work.devices), 1)
    row = 1 + torch.arange(len(work.devices))
    there = torch.isfinite(power_w)
    enough = torch.bincount(work.device[there], minlength=len(work.devices)) >= _MIN_POWER_POINTS
    there &= enough[work.device]
    if not bool(there.any()):
        return values
    roots = values.sqrt().requires_grad_()

    def loss() -> Tensor:
        found = analytic_power_w(work, latency_ms, roots.square(), row)[there]
        return (found / power_w[there]).clamp_min(1e-6).log().abs().mean()

    descend([roots], loss, steps=_POWER_STEPS, rate=_POWER_RATE)
    values[1:][enough] = roots.detach().square()[1:][enough]
    return values
