"""Power without learning: what a device draws by how much of its peak rates a layer uses.

    power = idle + (tdp - idle) * min(1, busy + compute * flops_share + memory * bytes_share)

The shares are operations and bytes a second over the device's rates. It is the roofline of energy (Choi et
al., IPDPS 2013) with a share that is drawn as soon as anything runs. Coefficients are fitted where power was
measured; the others are illustrative: of what is to be had, a product that reaches the peak draws 0.8, a copy
0.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.codesign.proxy.roofline import descend
from sparseflow.codesign.proxy.work import Work

COEFFICIENTS = ("busy", "compute", "memory")
DEFAULT = (0.2, 0.6, 0.4)

_NOTHING_MS = 1e-12
_STEPS = 400
_RATE = 0.03
_LEAST = 8
"""Points that three coefficients are fitted to."""


def default_power() -> Tensor:
    """For devices that were not measured, float64 [1, 3]."""
    return torch.tensor([DEFAULT], dtype=torch.float64)


def analytic_power_w(work: Work, latency_ms: Tensor, values: Tensor, row: Tensor) -> Tensor:
    """Watts, float64.

    Args:
        work: Of what.
        latency_ms: What it takes.
        values: Coefficients, float64 [1 + D, 3].
        row: Of `values`, for each device of `work`; int64 [devices].
    """
    busy, compute, memory = values[row[work.device]].unbind(-1)
    used = (compute * work.compute_ms + memory * work.memory_ms) / latency_ms.clamp_min(_NOTHING_MS)
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
    enough = torch.bincount(work.device[there], minlength=len(work.devices)) >= _LEAST
    there &= enough[work.device]
    if not bool(there.any()):
        return values
    roots = values.sqrt().requires_grad_()

    def loss() -> Tensor:
        found = analytic_power_w(work, latency_ms, roots.square(), row)[there]
        return (found / power_w[there]).clamp_min(1e-6).log().abs().mean()

    descend([roots], loss, steps=_STEPS, rate=_RATE)
    values[1:][enough] = roots.detach().square()[1:][enough]
    return values
