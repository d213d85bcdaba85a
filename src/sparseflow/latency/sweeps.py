"""Predictions of one model over shapes or over loads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.progress import Progress
from sparseflow.errors import DeviceError, InputError, SparseFlowError
from sparseflow.latency.api import analyze_for, load_predictor
from sparseflow.latency.graph.sources import open_source
from sparseflow.latency.graph.torch_export import Exporter
from sparseflow.latency.model.predictor import Prediction, Predictor

if TYPE_CHECKING:
    from torch import nn

MAX_POINTS = 1000
"""Maximum number of points of a sweep."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """Prediction at one combination of sizes.

    Attributes:
        sizes: Input -> shape, or open dimension -> its extent as a shape of one entry.
        items: Leading extent of the first input; None if the prediction failed.
        prediction: Prediction; None if it failed.
        problem: Error message; None on success.
    """

    sizes: Mapping[str, tuple[int, ...]]
    items: int | None = None
    prediction: Prediction | None = None
    problem: str | None = None

    @property
    def items_per_s(self) -> float | None:
        """Items per second of runs one after another; None if the prediction failed."""
        if self.items is None or self.prediction is None:
            return None
        return 1e3 * self.items / self.prediction.mean_ms

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "sizes": {name: list(shape) for name, shape in self.sizes.items()},
            "items": self.items,
            "items_per_s": self.items_per_s,
            "prediction": None if self.prediction is None else self.prediction.to_dict(),
            "problem": self.problem,
        }


def sweep(
    model: Path | str | nn.Module,
    predictor: Predictor | Path | str | None,
    sizes: Mapping[str, Sequence[int | tuple[int, ...]]],
    *,
    example: Any = None,
    load: Mapping[str, float] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    exporter: Exporter = "torchscript",
    provider: str = "cpu",
    gpu: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[SweepPoint]:
    """Predict the latency of a model at every combination of sizes.

    A combination that fails, such as one that exceeds 2 GB, is reported in its point.

    Args:
        model, predictor, example, load, inputs, exporter, provider, gpu, seed: As in `predict`.
        sizes: Open dimension -> extents, or input -> shapes; the last one varies fastest.
        shapes: Sizes that are equal at all points.
        progress: Receives the sizes and the fraction done.

    Raises:
        InputError: There are no sizes or too many combinations, all combinations fail with a wrong name or
            shape, or as in `predict`.
        FileFormatError: The predictor is invalid.
        DeviceError: As in `predict`.
    """
    values = {
        name: [(entry,) if isinstance(entry, int) else tuple(entry) for entry in entries]
        for name, entries in sizes.items()
    }
    combinations = list(itertools.product(*values.values()))
    if not values or not combinations or len(combinations) > MAX_POINTS:
        raise InputError(
            f"a sweep needs 1 to {MAX_POINTS} combinations of sizes, got {len(combinations) if values else 0}"
        )
    fitted = load_predictor(predictor, provider, gpu)
    source = open_source(model, example=example, exporter=exporter)
    points: list[SweepPoint] = []
    errors: list[SparseFlowError] = []
    for index, combination in enumerate(combinations):
        point_sizes = dict(zip(values, combination, strict=True))
        if progress is not None:
            progress(f"{dict(point_sizes)}", index / len(combinations))
        try:
            graph = analyze_for(fitted, source, {**(shapes or {}), **point_sizes}, inputs)
            shape = graph.inputs[0].shape if graph.inputs else ()
            prediction = fitted.predict(graph, load, seed=seed)
        except DeviceError:
            raise
        except SparseFlowError as error:
            errors.append(error)
            points.append(SweepPoint(sizes=point_sizes, problem=str(error)))
        else:
            items = shape[0] if shape else 1
            points.append(SweepPoint(sizes=point_sizes, items=items, prediction=prediction))
    if len(errors) == len(combinations):
        raise errors[0]
    if progress is not None:
        progress("done", 1.0)
    return points


def predict_loads(
    model: Path | str | nn.Module,
    predictor: Predictor | Path | str | None,
    loads: Sequence[float],
    *,
    example: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    exporter: Exporter = "torchscript",
    provider: str = "cpu",
    gpu: int = 0,
    seed: int = 0,
) -> list[Prediction]:
    """Predict the latency of a model at several loads.

    Args:
        model, predictor, example, shapes, inputs, exporter, provider, gpu, seed: As in `predict`.
        loads: Shares of the load metric of the predictor, in [0, 1].

    Raises:
        InputError: A share is out of range, or as in `predict`.
        FileFormatError, ModelError, RunError, DeviceError: As in `predict`.
    """
    fitted = load_predictor(predictor, provider, gpu)
    graph = analyze_for(fitted, open_source(model, example=example, exporter=exporter), shapes, inputs)
    return [fitted.predict(graph, {fitted.contention.metric: share}, seed=seed) for share in loads]
