"""Errors of predictors on held-out kernels, networks and levels.

A predicted kernel was not learned from any measurement. A predicted network was learned neither from its
cases nor from kernels that only it has. More than `NETWORK_FOLDS` networks are held out in groups of similar
names, so that the sizes of one architecture are held out together. The `leaky` split is shown for
comparison: it splits rows, so that other measurements of the same kernel reveal the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparseflow.core import metrics
from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.core.costmodel.splits import Fold, split_group_k_fold, split_k_fold
from sparseflow.core.progress import Progress
from sparseflow.latency.model.dataset import LatencyDataset
from sparseflow.latency.model.fitting import fit_predictor
from sparseflow.latency.model.kernel_regressor import KernelRegressor
from sparseflow.latency.model.predictor import Predictor

FOLDS = 5
NETWORK_FOLDS = 12
_CASE = re.compile(r"_b\d+_\d+$")


@dataclass(frozen=True, kw_only=True)
class HeldOutPrediction:
    """One prediction of a held-out target.

    Attributes:
        name: Id of the kernel, or name of the model.
        predicted_ms: Predicted latency.
        measured_ms: Measured latency.
        level: Load during the measurement.
    """

    name: str
    predicted_ms: float
    measured_ms: float
    level: float = 0.0


def get_network(name: str) -> str:
    """Return the network of a zoo model: `resnet18` for `resnet18_b16_224`."""
    return _CASE.sub("", name)


def list_networks(data: LatencyDataset) -> list[str]:
    """List the measured networks."""
    return list(dict.fromkeys(get_network(name) for name in data.list_models()))


def split_networks(data: LatencyDataset) -> list[list[str]]:
    """Split the measured networks into at most `NETWORK_FOLDS` groups of consecutive names."""
    names = sorted(list_networks(data))
    folds = min(NETWORK_FOLDS, len(names))
    return [names[len(names) * n // folds : len(names) * (n + 1) // folds] for n in range(folds)]


def compute_scores(predictions: Sequence[HeldOutPrediction]) -> dict[str, float]:
    """Return `mape`, `within_10` and `count` of predictions."""
    predicted, measured = [p.predicted_ms for p in predictions], [p.measured_ms for p in predictions]
    return {
        "mape": metrics.mape(predicted, measured),
        "within_10": metrics.fraction_within(predicted, measured),
        "count": len(predictions),
    }


def fit_interval(predictions: Sequence[HeldOutPrediction]) -> ConformalInterval:
    """Fit an interval to the errors of predictions."""
    return ConformalInterval.fit([p.predicted_ms for p in predictions], [p.measured_ms for p in predictions])


def predict_by_kernel(data: LatencyDataset, kind: str, seed: int = 0) -> list[HeldOutPrediction]:
    """Predict each kernel by a regressor without its measurements."""
    names = data.list_device_kernels()
    idle = [(name, data.idle_ms[name]) for name in names]
    folds = split_group_k_fold(names, min(FOLDS, len(names)), seed)
    return _cross_validate(data, idle, folds, kind, seed)


def predict_by_network(data: LatencyDataset, kind: str, seed: int = 0) -> list[HeldOutPrediction]:
    """Predict the kernels that only one network, or group, has by a regressor without them."""
    names = data.list_device_kernels()
    idle = [(name, data.idle_ms[name]) for name in names]
    folds = []
    for networks in split_networks(data):
        exclusive = find_exclusive_kernels(data, networks)
        held_out = [n for n, name in enumerate(names) if name in exclusive]
        remaining = [n for n, name in enumerate(names) if name not in exclusive]
        if remaining and held_out:
            folds.append((remaining, held_out))
    return _cross_validate(data, idle, folds, kind, seed)


def predict_leaky(data: LatencyDataset, kind: str, seed: int = 0) -> list[HeldOutPrediction]:
    """Predict kernels by a regressor that learned other measurements of them, for comparison only."""
    measurements = [(name, ms) for name in data.list_device_kernels() for ms in data.measurements_ms[name]]
    return _cross_validate(data, measurements, split_k_fold(len(measurements), FOLDS, seed), kind, seed)


def fit_without_each_network(
    data: LatencyDataset,
    kind: str,
    *,
    mode: str | None = None,
    strict: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Predictor]:
    """Return network -> predictor without it and its group, for networks that leave kernels to learn.

    Args:
        data: Measurements.
        kind: Regressor, one of `kernel_regressor.KINDS`.
        mode: Composition; by default as `fit_predictor`.
        strict: Also exclude kernels that other networks share with it.
        seed: Random seed of the trees.
        progress: Receives the network and the fraction done.
    """
    groups = split_networks(data)
    predictors: dict[str, Predictor] = {}
    for index, networks in enumerate(groups):
        if progress is not None:
            progress(f"without {', '.join(networks)}", index / len(groups))
        cases = [case for network in networks for case in list_cases(data, network)]
        excluded = list_kernels(data, cases) if strict else find_exclusive_kernels(data, networks)
        remaining = set(data.list_kernels()) - excluded
        if not remaining.intersection(data.list_device_kernels()):
            continue
        predictor = fit_predictor(
            data, kind, kernels=remaining, models=set(data.list_models()) - set(cases), mode=mode, seed=seed
        )
        predictors |= dict.fromkeys(networks, predictor)
    return predictors


def predict_idle(data: LatencyDataset, predictors: dict[str, Predictor]) -> list[HeldOutPrediction]:
    """Predict each idle model by the predictor without its network."""
    return [
        HeldOutPrediction(
            name=name,
            predicted_ms=predictors[get_network(name)].predict(data.graphs[name]).mean_ms,
            measured_ms=data.idle_ms[name],
        )
        for name in data.list_models()
        if get_network(name) in predictors
    ]


def predict_under_load(
    data: LatencyDataset, predictors: dict[str, Predictor], *, ignore_load: bool = False
) -> list[HeldOutPrediction]:
    """Predict each measurement of a model under load by the predictor without its network.

    Networks without which no measurement under load remains are omitted.

    Args:
        data: Measurements.
        predictors: Network -> predictor without it.
        ignore_load: Predict as if the device were idle.
    """
    return [
        HeldOutPrediction(
            name=measurement.target,
            predicted_ms=predictors[get_network(measurement.target)]
            .predict(data.graphs[measurement.target], None if ignore_load else measurement.load)
            .mean_ms,
            measured_ms=measurement.slowdown * measurement.idle_ms,
            level=measurement.level,
        )
        for measurement in data.loaded
        if measurement.is_model
        and get_network(measurement.target) in predictors
        and (ignore_load or predictors[get_network(measurement.target)].contention.samples)
    ]


def list_cases(data: LatencyDataset, network: str) -> list[str]:
    """List the models that are cases of a network."""
    return [name for name in data.list_models() if get_network(name) == network]


def list_kernels(data: LatencyDataset, models: Iterable[str]) -> set[str]:
    """Return the ids of all kernels of some models."""
    return {kernel.id for name in models for kernel in data.graphs[name].kernels}


def find_exclusive_kernels(data: LatencyDataset, networks: Sequence[str]) -> set[str]:
    """Return the ids of the kernels that only cases of these networks run."""
    cases = {case for network in networks for case in list_cases(data, network)}
    return list_kernels(data, cases) - list_kernels(data, set(data.graphs) - cases)


def _cross_validate(
    data: LatencyDataset,
    measurements: Sequence[tuple[str, float]],
    folds: Iterable[Fold],
    kind: str,
    seed: int,
) -> list[HeldOutPrediction]:
    """Predict the kernels of each fold by a regressor that learned the (kernel, latency) of the others."""
    predictions: list[HeldOutPrediction] = []
    for train_indices, test_indices in folds:
        names, latency_ms = zip(*(measurements[n] for n in train_indices), strict=True)
        model = KernelRegressor.fit([data.kernels[n] for n in names], latency_ms, kind, seed=seed)
        tested = [data.kernels[measurements[n][0]] for n in test_indices]
        predictions += [
            HeldOutPrediction(name=name, predicted_ms=ms, measured_ms=data.idle_ms[name])
            for name, ms in model.estimate_idle_ms(tested, {}).items()
        ]
    return predictions
