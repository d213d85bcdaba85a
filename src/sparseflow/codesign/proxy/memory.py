"""Memory without learning: what a layer holds, and what libraries take beside it.

    memory = held bytes + workspace

A workspace is of the same size however small the layer is; there is one for every device that was measured,
type of layer and precision, 0 by default.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.codesign.proxy.work import Work
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS

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
