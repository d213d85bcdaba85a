"""Fits a proxy to measurements and evaluates it by cross-validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.analytic import (
    analytic_memory_mb,
    analytic_power_w,
    fit_power,
    fit_roofline,
    fit_workspace,
)
from sparseflow.codesign.hardware.proxy.features import compute_features
from sparseflow.codesign.hardware.proxy.inputs import ProxyInputs
from sparseflow.codesign.hardware.proxy.layer_proxy import LayerHwProxy
from sparseflow.codesign.hardware.proxy.points import LayerPoint
from sparseflow.codesign.hardware.proxy.residual_model import LayerProxyModel
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.metrics import median_error, spearman
from sparseflow.core.progress import Progress, subrange
from sparseflow.errors import InputError

MIN_POINTS = 8
"""Minimum number of measured points."""


@dataclass(frozen=True, kw_only=True)
class ProxyTrainingConfig:
    """Training of the residual model; see `LayerProxyModel`.

    Attributes:
        members: Number of networks in the committee.
        hidden: Width of their hidden layers.
        steps: Gradient steps.
        learning_rate: Initial learning rate.
        decays: Weight decays to select from.
    """

    members: int = 5
    hidden: int = 32
    steps: int = 400
    learning_rate: float = 0.01
    decays: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxyEvaluation:
    """Out-of-fold predictions of measured points.

    Attributes:
        points: The measured points.
        predicted_ms: Latency predicted by the proxy, ms, float64 [N].
        roofline_ms: Latency predicted by the fitted roofline alone, ms, float64 [N].
        mem_mb: Predicted memory, MB, float64 [N].
        power_w: Predicted power, W, float64 [N].
    """

    points: tuple[LayerPoint, ...]
    predicted_ms: np.ndarray
    roofline_ms: np.ndarray
    mem_mb: np.ndarray
    power_w: np.ndarray

    def summarize(self) -> dict[str, Any]:
        """Compute errors and rank correlations, overall and by layer type and precision, as JSON types.

        `mem_error` and `power_error` are medians over the points with such measurements; None without any.
        """
        mask = np.ones(len(self.points), dtype=bool)
        groups = {name: [getattr(p.layer, name) for p in self.points] for name in ("layer_type", "precision")}
        return {
            **self._summarize_subset(mask),
            "configurations": len({point.config_key for point in self.points}),
            "mem_error": self._median_error_where(
                "mem_mb", [p.mem_provenance == "measured" for p in self.points]
            ),
            "power_error": self._median_error_where("power_w", [p.power_w is not None for p in self.points]),
            "by": {
                name: {
                    group: self._summarize_subset(np.array([v == group for v in values]))
                    for group in dict.fromkeys(values)
                }
                for name, values in groups.items()
            },
        }

    def _summarize_subset(self, mask: np.ndarray) -> dict[str, Any]:
        measured = np.array([point.lat_ms for point in self.points])[mask]
        return {
            "points": int(mask.sum()),
            "median_error": median_error(self.predicted_ms[mask], measured),
            "spearman": spearman(self.predicted_ms[mask], measured),
            "roofline_median_error": median_error(self.roofline_ms[mask], measured),
            "roofline_spearman": spearman(self.roofline_ms[mask], measured),
        }

    def _median_error_where(self, name: str, mask: Sequence[bool]) -> float | None:
        if not any(mask):
            return None
        measured = [
            getattr(point, name) for point, selected in zip(self.points, mask, strict=True) if selected
        ]
        return median_error(getattr(self, name)[np.array(mask)], measured)


def fit_proxy(
    points: Sequence[LayerPoint],
    *,
    environments: Mapping[str, Mapping[str, Any]] | None = None,
    num_folds: int = 5,
    training: ProxyTrainingConfig | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> LayerHwProxy:
    """Fit a proxy to measured points and cross-validate it.

    Analytic points are counted but not used for fitting.

    Args:
        points: Points in one mode, of one or more devices.
        environments: Environment id -> environment, for provenance.
        num_folds: Folds of the cross-validation; 0 for none.
        training: Training of the residual model.
        seed: Random seed of weights and folds.
        progress: Progress callback.

    Raises:
        InputError: Fewer than `MIN_POINTS` points are measured, or the modes differ.
    """
    measured = _select_measured(points)
    training = training or ProxyTrainingConfig()
    held_out = None
    if num_folds:
        evaluation = cross_validate(
            points,
            num_folds=num_folds,
            training=training,
            seed=seed,
            progress=subrange(progress, 0.0, num_folds / (num_folds + 1)),
        )
        held_out = {"folds": num_folds, **evaluation.summarize()}
    proxy = _fit_measured(measured, training, seed)
    if progress is not None:
        progress("fit to all points", 1.0)
    used = {point.environment for point in measured}
    provenance = {
        "measured": len(measured),
        "analytic": len(points) - len(measured),
        "environments": {
            name: dict(environment) for name, environment in (environments or {}).items() if name in used
        },
        "held_out": held_out,
    }
    return replace(proxy, provenance=provenance)


def cross_validate(
    points: Sequence[LayerPoint],
    *,
    num_folds: int = 5,
    training: ProxyTrainingConfig | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ProxyEvaluation:
    """Predict every measured point with a proxy that was not fitted to its configuration.

    All points with the same layer configuration, on any device, are in the same fold.

    Args:
        points: See `fit_proxy`.
        num_folds: Number of folds, at least 2.
        training: Training of the residual model.
        seed: Random seed of weights and folds.
        progress: Progress callback.

    Raises:
        InputError: See `fit_proxy`; or there are fewer configurations than folds.
    """
    measured = _select_measured(points)
    training = training or ProxyTrainingConfig()
    predictions = {name: np.zeros(len(measured)) for name in ("lat_ms", "roofline_ms", "mem_mb", "power_w")}
    parts = split_group_k_fold([point.config_key for point in measured], num_folds, seed)
    for fold, (train_rows, test_rows) in enumerate(parts):
        proxy = _fit_measured([measured[row] for row in train_rows], training, seed)
        roofline_proxy = replace(proxy, model=None)
        layers, devices = _unzip_points([measured[row] for row in test_rows])
        with torch.no_grad():
            prediction = proxy.predict_pairs(layers, devices)
            predictions["roofline_ms"][test_rows] = roofline_proxy.predict_pairs(layers, devices)[
                "lat_ms"
            ].numpy()
        for name, value in prediction.items():
            predictions[name][test_rows] = value.numpy()
        if progress is not None:
            progress(f"fold {fold + 1} of {num_folds}", (fold + 1) / num_folds)
    return ProxyEvaluation(
        points=tuple(measured), predicted_ms=predictions["lat_ms"], roofline_ms=predictions["roofline_ms"],
        mem_mb=predictions["mem_mb"], power_w=predictions["power_w"],
    )  # fmt: skip


def _select_measured(points: Sequence[LayerPoint]) -> list[LayerPoint]:
    measured = [point for point in points if point.provenance == "measured"]
    if len(measured) < MIN_POINTS:
        raise InputError(
            f"{len(measured)} of {len(points)} points are measured; expected at least {MIN_POINTS}"
        )
    modes = sorted({point.mode for point in measured})
    if len(modes) > 1:
        raise InputError(f"points have several modes: {', '.join(modes)}; fit a separate proxy for each")
    return measured


def _unzip_points(points: Sequence[LayerPoint]) -> tuple[list[Any], list[Any]]:
    return [point.layer for point in points], [point.device for point in points]


def _fit_measured(points: Sequence[LayerPoint], training: ProxyTrainingConfig, seed: int) -> LayerHwProxy:
    work = ProxyInputs.from_pairs(*_unzip_points(points))
    latency, memory = _to_column(points, "lat_ms"), _to_column(points, "mem_mb")
    memory[[point.mem_provenance != "measured" for point in points]] = float("nan")
    power = _to_column(points, "power_w")
    roofline, power_model = fit_roofline(work, latency), fit_power(work, latency, power)
    workspace = fit_workspace(work, memory)
    row = 1 + torch.arange(len(work.devices))
    ratios = (
        latency / roofline.latency_ms(work, row),
        memory / analytic_memory_mb(work, workspace, row),
        power / analytic_power_w(work, latency, power_model, row),
    )
    model = LayerProxyModel(members=training.members, hidden=training.hidden)
    model.fit(
        compute_features(work), torch.stack(ratios, -1).log(), [point.config_key for point in points],
        decays=training.decays, steps=training.steps, learning_rate=training.learning_rate, seed=seed,
    )  # fmt: skip
    return LayerHwProxy(
        roofline=roofline,
        power=power_model,
        workspace=workspace,
        devices=work.devices,
        model=model,
        mode=points[0].mode,
    )


def _to_column(points: Sequence[LayerPoint], name: str) -> Tensor:
    values = [getattr(point, name) for point in points]
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)
