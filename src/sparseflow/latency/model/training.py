"""Training of a predictor, with its errors on held-out data."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparseflow.core.checks import check_one_of
from sparseflow.core.progress import Progress, subrange
from sparseflow.errors import InputError
from sparseflow.latency.model import validation
from sparseflow.latency.model.composition import MODES, QUEUE
from sparseflow.latency.model.dataset import LatencyDataset, load_dataset
from sparseflow.latency.model.fitting import DEFAULT_INTERVAL, fit_predictor
from sparseflow.latency.model.kernel_estimates import MIN_FREQUENT_KERNELS, KernelIntervals
from sparseflow.latency.model.kernel_regressor import KINDS, get_variant
from sparseflow.latency.model.predictor import Predictor

MIN_KERNELS = 10
"""Minimum number of kernels to learn from."""


def train(
    collections: Iterable[Path | str] | LatencyDataset,
    *,
    kind: str | None = None,
    mode: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """Train a predictor on collections of one device.

    `Predictor.quality` contains `kind` (selected regressor), `kernels` (regressor -> split -> scores for the
    splits `by_kernel`, `by_network` and `leaky`), `models` (scores of held-out networks: `rest` idle,
    `loaded` under load, `loaded_blind` under load without the load as an input) and `counts`. Scores are
    `mape`, `within_10` and `count`.

    Args:
        collections: Directories written by `latency collect`, or the data that `load_dataset` read from them.
        kind: Regressor, one of `kernel_regressor.KINDS`; by default all are evaluated and the best one on
            held-out kernels is used.
        mode: `"sum"`, `"critical_path"` (see `overlap`) or `"queue"`; by default a queue if kernels were
            measured in a stream, otherwise a sum.
        seed: Random seed of splits and trees.
        progress: Receives a message and the fraction done.

    Raises:
        InputError: The collections are of several devices, or too small.
        FileFormatError: One of them is damaged.
        MissingExtraError: XGBoost or scipy is missing.
    """
    report = progress or (lambda message, fraction: None)
    check_one_of((*KINDS, None), kind=kind)
    check_one_of((*MODES, None), mode=mode)
    report("reading the collections", 0.0)
    data = collections if isinstance(collections, LatencyDataset) else load_dataset(collections)
    if mode == QUEUE and not data.host_ms:
        raise InputError(
            "`mode` (='queue') requires kernels that were measured in a stream: collect with `copies` on a "
            "GPU, or choose another mode"
        )
    if len(data.list_device_kernels()) < MIN_KERNELS:
        raise InputError(
            f"the collections contain {len(data.list_device_kernels())} kernels measured while idle, "
            f"expected at least {MIN_KERNELS}; list more under `kernels`"
        )
    kinds = KINDS if kind is None else (kind,)
    kernels, kernel_predictions = _evaluate_kernels(data, kinds, seed, subrange(progress, 0.0, 0.5))
    selected_kind = min(kinds, key=lambda name: kernels[name]["by_kernel"]["mape"])
    models, idle, loaded = _evaluate_models(data, selected_kind, mode, seed, subrange(progress, 0.5, 0.9))
    report("fitting to all data", 0.9)
    predictor = fit_predictor(data, selected_kind, mode=mode, seed=seed)
    report("done", 1.0)
    counts = {
        "kernels": len(data.list_kernels()),
        "models": len(data.list_models()),
        "networks": len(validation.list_networks(data)),
        "beside_loads": len(data.loaded),
        "failed": data.failed,
    }
    return predictor.model_copy(
        update={
            "kernel_intervals": _fit_kernel_intervals(data, kernel_predictions[selected_kind]),
            "idle_interval": validation.fit_interval(idle) if idle else DEFAULT_INTERVAL,
            "loaded_interval": validation.fit_interval(loaded or idle) if idle else DEFAULT_INTERVAL,
            "quality": {"kind": selected_kind, "kernels": kernels, "models": models, "counts": counts},
        }
    )


def _fit_kernel_intervals(
    data: LatencyDataset, predictions: Sequence[validation.HeldOutPrediction]
) -> KernelIntervals:
    """Fit the intervals of frequent and of rare operators; without one of them, to all."""
    counts = Counter(get_variant(data.kernels[name]) for name in data.list_device_kernels())
    groups: dict[bool, list[validation.HeldOutPrediction]] = {True: [], False: []}
    for prediction in predictions:
        groups[counts[get_variant(data.kernels[prediction.name])] >= MIN_FREQUENT_KERNELS].append(prediction)
    return KernelIntervals(
        frequent=validation.fit_interval(groups[True] or predictions),
        rare=validation.fit_interval(groups[False] or predictions),
    )


def _evaluate_kernels(
    data: LatencyDataset, kinds: Sequence[str], seed: int, progress: Progress | None
) -> tuple[dict[str, Any], dict[str, list[validation.HeldOutPrediction]]]:
    """Return regressor -> split -> scores, and regressor -> predictions of the split by kernel."""
    splits = {"by_kernel": validation.predict_by_kernel, "leaky": validation.predict_leaky}
    if len(validation.list_networks(data)) > 1:
        splits["by_network"] = validation.predict_by_network
    scores: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    predictions: dict[str, list[validation.HeldOutPrediction]] = {}
    cases = list(itertools.product(kinds, splits))
    for index, (kind, split) in enumerate(cases):
        if progress is not None:
            progress(f"{kind}: {split.replace('_', ' ')}", index / len(cases))
        result = splits[split](data, kind, seed)
        if result:
            scores[kind][split] = validation.compute_scores(result)
        if split == "by_kernel":
            predictions[kind] = result
    return scores, predictions


def _evaluate_models(
    data: LatencyDataset, kind: str, mode: str | None, seed: int, progress: Progress | None
) -> tuple[dict[str, Any], list[validation.HeldOutPrediction], list[validation.HeldOutPrediction]]:
    """Return condition -> scores of held-out networks, and their predictions while idle and under load."""
    predictors = {}
    if len(validation.list_networks(data)) > 1:
        predictors = validation.fit_without_each_network(data, kind, mode=mode, seed=seed, progress=progress)
    idle = validation.predict_idle(data, predictors)
    loaded = validation.predict_under_load(data, predictors)
    blind = validation.predict_under_load(data, predictors, ignore_load=True)
    conditions = {"rest": idle, "loaded": loaded, "loaded_blind": blind}
    scores = {name: validation.compute_scores(result) for name, result in conditions.items() if result}
    return scores, idle, loaded
