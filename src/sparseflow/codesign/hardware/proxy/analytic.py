"""Analytic models of latency, memory and power, with coefficients fitted per device.

Latency is a roofline with an overhead (Williams, Waterman, Patterson, CACM 2009):

    latency = max(flops / (rate * compute), bytes / (peak_bw * memory)) + overhead

`compute` and `memory` are efficiencies and `overhead` is in ms, for each measured device, layer type and
precision; other devices use 1, 1 and 0. The maximum is exact: the gradient goes to the binding term, or half
to each on ties.

Memory is that of the layer plus a workspace of libraries, which does not depend on the layer's size.

Power follows the roofline model of energy (Choi et al., IPDPS 2013) with a constant share for any activity:

    power = idle + (tdp - idle) * min(1, busy + compute * flops_share + memory * bytes_share)

The shares are achieved over peak rates. Default coefficients are illustrative: a compute-bound layer draws
0.8 and a memory-bound one 0.6 of the dynamic range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.inputs import ProxyInputs
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS
from sparseflow.errors import InputError

COEFFICIENTS = ("compute", "memory", "overhead_ms")
SHAPE = (len(LAYER_TYPES), len(PRECISIONS), len(COEFFICIENTS))

_INITIAL_OFFSETS = ((0.0, 0.0, 0.0), (0.7, 0.7, -0.7), (0.0, 0.7, -2.0), (0.7, 0.0, -2.0))
"""Offsets of the initial log coefficients; the best of the fits is kept."""

_ROOFLINE_STEPS = 600
_ROOFLINE_RATE = 0.03
_REGULARIZATION = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyRoofline:
    """Coefficients of the roofline.

    Attributes:
        values: float64 [1 + D, types, precisions, 3], see `COEFFICIENTS`; row 0 is for unmeasured devices.
        fitted: Whether there were points, bool [1 + D, types, precisions]; other coefficients are means.
    """

    values: Tensor
    fitted: Tensor

    @classmethod
    def ideal(cls) -> LatencyRoofline:
        """Create the roofline of peak rates without overhead."""
        values = torch.ones(1, *SHAPE, dtype=torch.float64)
        values[..., 2] = 0.0
        return cls(values=values, fitted=torch.zeros(values.shape[:-1], dtype=torch.bool))

    def latency_ms(self, work: ProxyInputs, row: Tensor) -> Tensor:
        """Predict latency, ms, float64.

        Args:
            work: Layers and devices.
            row: Row of `values` for each device of `work`, int64 [devices].
        """
        coefficients = self.values[row[work.device], work.type_index, work.precision]
        compute, memory, overhead = coefficients.unbind(-1)
        return torch.maximum(work.compute_ms / compute, work.memory_ms / memory) + overhead


def fit_roofline(work: ProxyInputs, latency_ms: Tensor) -> LatencyRoofline:
    """Fit the coefficients to latencies by the log ratio (Huber loss).

    Args:
        work: Pairs of layers and devices, [N]; row 1 + d of the result belongs to device d.
        latency_ms: Measured latencies, ms, float64 [N].

    Raises:
        InputError: The lengths differ.
    """
    if latency_ms.shape != work.flops.shape:
        raise InputError(f"{latency_ms.numel()} latencies were given for {work.flops.numel()} layers")
    types, precisions, kinds = SHAPE
    shape = (1 + len(work.devices), types, precisions)
    cell = ((1 + work.device) * types + work.type_index) * precisions + work.precision
    cells, group = cell.unique(return_inverse=True)
    compute_ms, memory_ms = work.compute_ms.detach(), work.memory_ms.detach()
    guess = torch.stack(
        [
            torch.stack(
                [
                    torch.quantile(compute_ms[mask] / latency_ms[mask], 0.95),
                    torch.quantile(memory_ms[mask] / latency_ms[mask], 0.95),
                    latency_ms[mask].min(),
                ]
            )
            for mask in (group == index for index in range(len(cells)))
        ]
    ).log()
    initial = guess[None] + torch.tensor(_INITIAL_OFFSETS, dtype=torch.float64)[:, None]
    log_values = initial.clone().requires_grad_()

    def compute_log_ratios() -> Tensor:
        compute, memory, overhead = log_values.exp()[:, group].unbind(-1)
        return (torch.maximum(compute_ms / compute, memory_ms / memory) + overhead).div(latency_ms).log()

    def loss() -> Tensor:
        log_ratios = compute_log_ratios()
        huber = torch.nn.functional.huber_loss(
            log_ratios, torch.zeros_like(log_ratios), reduction="sum", delta=0.05
        )
        return huber + _REGULARIZATION * (log_values - initial).square().sum()

    minimize_adam([log_values], loss, steps=_ROOFLINE_STEPS, learning_rate=_ROOFLINE_RATE)
    with torch.no_grad():
        errors = torch.zeros(len(_INITIAL_OFFSETS), len(cells), dtype=torch.float64)
        errors.index_add_(1, group, compute_log_ratios().abs())
        best = log_values.exp()[errors.argmin(0), torch.arange(len(cells))]
    values = torch.zeros(*shape, kinds, dtype=torch.float64).flatten(0, 2)
    fitted = torch.zeros(shape, dtype=torch.bool).flatten()
    values[cells], fitted[cells] = best, True
    values, fitted = values.view(*shape, kinds), fitted.view(shape)
    values[1:] = _fill_missing(values[1:], fitted[1:])
    values[0] = LatencyRoofline.ideal().values[0]
    return LatencyRoofline(values=values, fitted=fitted)


def minimize_adam(
    parameters: list[Tensor],
    loss: Callable[[], Tensor],
    *,
    steps: int,
    learning_rate: float,
    after_step: Callable[[float], None] | None = None,
) -> None:
    """Minimize a full-batch loss with Adam and a cosine learning-rate schedule down to 0.

    Args:
        parameters: Tensors to optimize.
        loss: Computes the loss.
        steps: Number of steps.
        learning_rate: Initial learning rate.
        after_step: Called after each step with its learning rate, without gradients.
    """
    adam = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    # The caller may disable gradients, but a fit needs them.
    with torch.enable_grad():
        for _ in range(steps):
            adam.zero_grad()
            loss().backward()
            current_rate = float(schedule.get_last_lr()[0])
            adam.step()
            schedule.step()
            if after_step is not None:
                with torch.no_grad():
                    after_step(current_rate)


def _fill_missing(values: Tensor, fitted: Tensor) -> Tensor:
    """Replace unfitted coefficients by geometric means of fitted ones.

    Means are taken over the precisions of the same layer type if any is fitted, else over the device.
    """
    filled = values.clone()
    for device in range(len(values)):
        logs, known = values[device].clamp_min(1e-12).log(), fitted[device]
        for kind in range(values.shape[1]):
            available = logs[kind][known[kind]] if known[kind].any() else logs[known]
            if len(available):
                filled[device, kind, ~known[kind]] = available.mean(0).exp()
    return filled


_WORKSPACE_QUANTILE = 0.1
"""Quantile of the memory beyond the layer's own that counts as workspace."""


def default_workspace() -> Tensor:
    """Workspace of unmeasured devices, MB, float64 [1, types, precisions]."""
    return torch.zeros(1, len(LAYER_TYPES), len(PRECISIONS), dtype=torch.float64)


def analytic_memory_mb(work: ProxyInputs, workspace: Tensor, row: Tensor) -> Tensor:
    """Predict memory, MB (1e6 bytes), float64.

    Args:
        work: Layers and devices.
        workspace: MB, float64 [1 + D, types, precisions].
        row: Row of `workspace` for each device of `work`, int64 [devices].
    """
    return work.memory_bytes / 1e6 + workspace[row[work.device], work.type_index, work.precision]


def fit_workspace(work: ProxyInputs, memory_mb: Tensor) -> Tensor:
    """Fit workspaces, MB, float64 [1 + D, types, precisions]; cells without points get the device's mean.

    Args:
        work: Pairs of layers and devices, [N].
        memory_mb: Measured memory, MB, [N]; NaN where not measured.
    """
    workspace = default_workspace().repeat(1 + len(work.devices), 1, 1)
    extra_mb, measured = memory_mb - work.memory_bytes / 1e6, torch.isfinite(memory_mb)
    for device in range(len(work.devices)):
        known = torch.zeros_like(workspace[0], dtype=torch.bool)
        for kind, precision in {*zip(work.type_index.tolist(), work.precision.tolist(), strict=True)}:
            mask = (
                measured & (work.device == device) & (work.type_index == kind) & (work.precision == precision)
            )
            if bool(mask.any()):
                workspace[1 + device, kind, precision] = torch.quantile(
                    extra_mb[mask], _WORKSPACE_QUANTILE
                ).clamp_min(0.0)
                known[kind, precision] = True
        if bool(known.any()):
            workspace[1 + device, ~known] = workspace[1 + device, known].mean()
    return workspace


_DEFAULT_POWER = (0.2, 0.6, 0.4)

_MIN_LATENCY_MS = 1e-12
_POWER_STEPS = 400
_POWER_RATE = 0.03
_MIN_POWER_POINTS = 8
"""Points that are needed to fit the three coefficients."""


def default_power() -> Tensor:
    """Power coefficients of unmeasured devices, float64 [1, 3]."""
    return torch.tensor([_DEFAULT_POWER], dtype=torch.float64)


def analytic_power_w(work: ProxyInputs, latency_ms: Tensor, values: Tensor, row: Tensor) -> Tensor:
    """Predict power, W, float64.

    Args:
        work: Layers and devices.
        latency_ms: Latency, ms.
        values: Coefficients, float64 [1 + D, 3].
        row: Row of `values` for each device of `work`, int64 [devices].
    """
    busy, compute, memory = values[row[work.device]].unbind(-1)
    used = (compute * work.compute_ms + memory * work.memory_ms) / latency_ms.clamp_min(_MIN_LATENCY_MS)
    share = busy + used
    return work.idle_w + (work.tdp_w - work.idle_w) * share.clamp_max(1.0)


def fit_power(work: ProxyInputs, latency_ms: Tensor, power_w: Tensor) -> Tensor:
    """Fit non-negative coefficients for each device with enough points, float64 [1 + D, 3].

    Args:
        work: Pairs of layers and devices, [N].
        latency_ms: Measured latency, ms, [N].
        power_w: Measured power, W, [N]; NaN where not measured.
    """
    values = default_power().repeat(1 + len(work.devices), 1)
    row = 1 + torch.arange(len(work.devices))
    measured = torch.isfinite(power_w)
    enough = torch.bincount(work.device[measured], minlength=len(work.devices)) >= _MIN_POWER_POINTS
    measured &= enough[work.device]
    if not bool(measured.any()):
        return values
    roots = values.sqrt().requires_grad_()

    def loss() -> Tensor:
        predicted = analytic_power_w(work, latency_ms, roots.square(), row)[measured]
        return (predicted / power_w[measured]).clamp_min(1e-6).log().abs().mean()

    minimize_adam([roots], loss, steps=_POWER_STEPS, learning_rate=_POWER_RATE)
    values[1:][enough] = roots.detach().square()[1:][enough]
    return values
