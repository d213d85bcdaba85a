"""From measured points to a proxy, and how good it is on configurations that it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from sparseflow.codesign.hardware.proxy.features import features
from sparseflow.codesign.hardware.proxy.inputs import Work
from sparseflow.codesign.hardware.proxy.layer_proxy import LayerHwProxy
from sparseflow.codesign.hardware.proxy.points import Point
from sparseflow.codesign.hardware.proxy.residual_model import LayerProxyModel
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.metrics import median_error, spearman
from sparseflow.errors import InputError

Progress = Callable[[int, int], None]
Others = Literal["ideal", "alike"]

_LEAST = 8
"""Measured points that anything is fitted to."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the residual is learned; see `LayerProxyModel`.

    Attributes:
        members: Perceptrons.
        hidden: Their width.
        steps: Of gradient descent.
        rate: Of learning, at first.
        decays: Of weights, to choose from.
    """

    members: int = 5
    hidden: int = 32
    steps: int = 400
    rate: float = 0.01
    decays: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """Predictions for points whose configurations were not learnt from.

    Attributes:
        points: Measured ones, each judged once.
        predicted_ms: Latency by the proxy, float64 [N].
        roofline_ms: By a roofline that was fitted to the same points as the proxy, float64 [N].
        mem_mb: Memory, float64 [N].
        power_w: Float64 [N].
    """

    points: tuple[Point, ...]
    predicted_ms: np.ndarray
    roofline_ms: np.ndarray
    mem_mb: np.ndarray
    power_w: np.ndarray

    def summary(self) -> dict[str, Any]:
        """Errors and rank correlations: of all, and by type of layer and precision; JSON's types.

        `mem_error` and `power_error` are medians over points where those were measured, else None.
        """
        every = np.ones(len(self.points), dtype=bool)
        groups = {name: [getattr(p.layer, name) for p in self.points] for name in ("layer_type", "precision")}
        return {
            **self._of(every),
            "configurations": len({point.configuration for point in self.points}),
            "mem_error": self._other("mem_mb", [p.mem_provenance == "measured" for p in self.points]),
            "power_error": self._other("power_w", [p.power_w is not None for p in self.points]),
            "by": {
                name: {
                    each: self._of(np.array([v == each for v in values])) for each in dict.fromkeys(values)
                }
                for name, values in groups.items()
            },
        }

    def _of(self, some: np.ndarray) -> dict[str, Any]:
        measured = np.array([point.lat_ms for point in self.points])[some]
        return {
            "points": int(some.sum()),
            "median_error": median_error(self.predicted_ms[some], measured),
            "spearman": spearman(self.predicted_ms[some], measured),
            "roofline_median_error": median_error(self.roofline_ms[some], measured),
            "roofline_spearman": spearman(self.roofline_ms[some], measured),
        }

    def _other(self, name: str, there: Sequence[bool]) -> float | None:
        if not any(there):
            return None
        measured = [
            getattr(point, name) for point, is_there in zip(self.points, there, strict=True) if is_there
        ]
        return median_error(getattr(self, name)[np.array(there)], measured)


def fit(
    points: Sequence[Point],
    *,
    environments: Mapping[str, Mapping[str, Any]] | None = None,
    folds: int = 5,
    others: Others = "ideal",
    training: Training | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> LayerHwProxy:
    """Fit a proxy to points, and judge it on configurations that were held out.

    Analytic points are counted and not learnt from: they know nothing that the roofline does not.

    Args:
        points: Measured ones, all in one mode, of one device or more.
        environments: Id -> circumstances, as the file of points holds them; for the record.
        folds: Parts that configurations are held out in, each in its turn; see `judge`. 0 for no judging.
        others: What devices without points are taken for: `"ideal"`, or `"alike"` those with points, which
            makes for a fairer comparison between them.
        training: How the residual is learned.
        seed: What weights and parts are drawn from.
        progress: Called with (fits done, fits).

    Raises:
        InputError: A figure of a point is no measurement (says which); there are fewer than 8 measured ones,
            or some in each mode.
    """
    measured = _checked(points)
    training = training or Training()
    held_out = None
    if folds:

        def judging(done: int, of: int) -> None:
            if progress is not None:
                progress(done, of + 1)

        judged = judge(points, folds=folds, training=training, seed=seed, progress=judging)
        held_out = {"folds": folds, **judged.summary()}
    found = _fitted(measured, training, seed)
    if progress is not None:
        progress(folds + 1, folds + 1)
    used = {point.environment for point in measured}
    provenance = {
        "measured": len(measured),
        "analytic": len(points) - len(measured),
        "environments": {name: dict(told) for name, told in (environments or {}).items() if name in used},
        "held_out": held_out,
    }
    roofline = found.roofline.alike() if others == "alike" else found.roofline
    return replace(found, roofline=roofline, provenance=provenance)


def judge(
    points: Sequence[Point],
    *,
    folds: int = 5,
    training: Training | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Judged:
    """Predict every measured point by a proxy that has seen nothing of its configuration.

    A configuration is what a layer is, whatever it is called and on whichever device: all its points are held
    out together.

    Args:
        points: As for `fit`.
        folds: Parts, at least 2.
        training: How the residual is learned.
        seed: What weights and parts are drawn from.
        progress: Called with (fits done, fits).

    Raises:
        InputError: As for `fit`, or there are fewer configurations than parts.
    """
    measured = _checked(points)
    training = training or Training()
    found = {name: np.zeros(len(measured)) for name in ("lat_ms", "roofline_ms", "mem_mb", "power_w")}
    parts = split_group_k_fold([point.configuration for point in measured], folds, seed)
    for number, (learnt, held) in enumerate(parts):
        proxy = _fitted([measured[at] for at in learnt], training, seed)
        bare = replace(proxy, model=None)
        layers, devices = _split([measured[at] for at in held])
        with torch.no_grad():
            told = proxy.predict_pairs(layers, devices)
            found["roofline_ms"][held] = bare.predict_pairs(layers, devices)["lat_ms"].numpy()
        for name, value in told.items():
            found[name][held] = value.numpy()
        if progress is not None:
            progress(number + 1, folds)
    return Judged(
        points=tuple(measured), predicted_ms=found["lat_ms"], roofline_ms=found["roofline_ms"],
        mem_mb=found["mem_mb"], power_w=found["power_w"],
    )  # fmt: skip


def _checked(points: Sequence[Point]) -> list[Point]:
    """The measured ones."""
    for at, point in enumerate(points):
        point.check(f"point {at}")
    measured = [point for point in points if point.provenance == "measured"]
    if len(measured) < _LEAST:
        raise InputError(
            f"{len(measured)} of {len(points)} points are measured; at least {_LEAST} are needed"
        )
    modes = sorted({point.mode for point in measured})
    if len(modes) > 1:
        raise InputError(f"points were measured in the modes {' and '.join(modes)}: fit a proxy to each")
    return measured


def _split(points: Sequence[Point]) -> tuple[list[Any], list[Any]]:
    return [point.layer for point in points], [point.device for point in points]


def _fitted(points: Sequence[Point], training: Training, seed: int) -> LayerHwProxy:
    work = Work.pairs(*_split(points))
    latency, memory = _column(points, "lat_ms"), _column(points, "mem_mb")
    memory[[point.mem_provenance != "measured" for point in points]] = float("nan")
    power = _column(points, "power_w")
    roofline, watts = fit_roofline(work, latency), fit_power(work, latency, power)
    workspace = fit_workspace(work, memory)
    row = 1 + torch.arange(len(work.devices))
    ratios = (
        latency / roofline.latency_ms(work, row),
        memory / analytic_memory_mb(work, workspace, row),
        power / analytic_power_w(work, latency, watts, row),
    )
    model = LayerProxyModel(members=training.members, hidden=training.hidden)
    model.learn(
        features(work), torch.stack(ratios, -1).log(), [point.configuration for point in points],
        decays=training.decays, steps=training.steps, rate=training.rate, seed=seed,
    )  # fmt: skip
    return LayerHwProxy(
        roofline=roofline,
        power=watts,
        workspace=workspace,
        devices=work.devices,
        model=model,
        mode=points[0].mode,
    )


def _column(points: Sequence[Point], name: str) -> Tensor:
    values = [getattr(point, name) for point in points]
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)
