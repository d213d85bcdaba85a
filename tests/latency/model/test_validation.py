"""Held-out kernels, networks and levels are not learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from benchmarks.latency.evaluate import compute_coverage
from sparseflow.errors import InputError
from sparseflow.latency.model import validation
from sparseflow.latency.model.dataset import LatencyDataset
from sparseflow.latency.model.fitting import fit_predictor
from sparseflow.latency.model.kernel_regressor import RATIO
from sparseflow.latency.model.validation import HeldOutPrediction
from tests.latency.conftest import MadeUp

pytestmark = pytest.mark.usefixtures("quick")

NET = "net1"


@pytest.fixture(scope="module")
def data(made_up: MadeUp) -> LatencyDataset:
    """Dataset without single samples, which only quantiles need."""
    return replace(
        made_up.data, loaded=tuple(replace(measurement, ratios=()) for measurement in made_up.data.loaded)
    )


def spoiled(
    data: LatencyDataset, items: Collection[str], levels: Collection[float] = (0.0, 0.4, 0.8)
) -> LatencyDataset:
    """Return the dataset with wrong measurements of some targets and levels."""
    idle_targets = items if 0.0 in levels else ()
    return replace(
        data,
        idle_ms={name: ms * (7.0 if name in idle_targets else 1.0) for name, ms in data.idle_ms.items()},
        measurements_ms={
            name: tuple(ms * (7.0 if name in idle_targets else 1.0) for ms in medians_ms)
            for name, medians_ms in data.measurements_ms.items()
        },
        loaded=tuple(
            replace(measurement, slowdown=3.0 * measurement.slowdown)
            if measurement.target in items and measurement.level in levels
            else measurement
            for measurement in data.loaded
        ),
    )


def predicted(predictions: list[HeldOutPrediction], network: str = NET) -> list[float]:
    latencies_ms = [
        prediction.predicted_ms
        for prediction in predictions
        if validation.get_network(prediction.name) == network
    ]
    assert latencies_ms
    return latencies_ms


@pytest.mark.parametrize("strict", [False, True])
def test_held_out_network_does_not_affect_prediction(data: LatencyDataset, strict: bool) -> None:
    models = validation.list_cases(data, NET)
    exclusive, all_of_it = (
        validation.find_exclusive_kernels(data, [NET]),
        validation.list_kernels(data, models),
    )
    assert exclusive < all_of_it, "the networks must share a kernel"
    other = spoiled(data, {*models, *(all_of_it if strict else exclusive)})
    before, after = (
        validation.fit_without_each_network(measurement, RATIO, strict=strict)
        for measurement in (data, other)
    )
    for predict in (validation.predict_idle, validation.predict_under_load):
        assert predicted(predict(data, before)) == predicted(predict(data, after))
        assert predicted(predict(data, before), "net0") != predicted(predict(data, after), "net0")


def test_strict_excludes_shared_kernels(data: LatencyDataset) -> None:
    reports: list[tuple[str, float]] = []
    predictors = validation.fit_without_each_network(
        data, RATIO, progress=lambda *message: reports.append(message)
    )
    strict = validation.fit_without_each_network(data, RATIO, strict=True)
    assert set(predictors) == set(strict) == set(validation.list_networks(data)) == {"net0", "net1", "net2"}
    assert [message for message, _ in reports] == ["without net0", "without net1", "without net2"]
    measured = set(data.list_kernels())
    for network in predictors:
        models = validation.list_cases(data, network)
        exclusive = validation.find_exclusive_kernels(data, [network])
        assert set(predictors[network].measured_ms) == measured - exclusive
        assert set(strict[network].measured_ms) == measured - validation.list_kernels(data, models)
        assert predictors[network].composition.models == len(data.list_models()) - len(models)


def test_many_networks_are_held_out_in_groups(data: LatencyDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "NETWORK_FOLDS", 2)
    assert validation.split_networks(data) == [["net0"], ["net1", "net2"]]
    predictors = validation.fit_without_each_network(data, RATIO)
    assert predictors["net1"] is predictors["net2"] is not predictors["net0"]
    exclusive = validation.find_exclusive_kernels(data, ["net1", "net2"])
    assert exclusive > validation.find_exclusive_kernels(data, ["net1"])
    assert not exclusive & set(predictors["net1"].measured_ms)
    models = [*validation.list_cases(data, "net1"), *validation.list_cases(data, "net2")]
    assert predictors["net1"].composition.models == len(data.list_models()) - len(models)


def test_held_out_level_predicted(data: LatencyDataset) -> None:
    def predict_level(dataset: LatencyDataset) -> list[HeldOutPrediction]:
        predictor = fit_predictor(dataset, RATIO, levels=[0.8])
        predictors = dict.fromkeys(validation.list_networks(dataset), predictor)
        return validation.predict_under_load(dataset, predictors)

    predictions, other_predictions = (
        predict_level(data),
        predict_level(spoiled(data, data.list_models(), [0.4])),
    )
    assert [dataset.predicted_ms for dataset in predictions] == [
        dataset.predicted_ms for dataset in other_predictions
    ]
    unseen = [dataset for dataset in predictions if dataset.level == 0.4]
    assert len(unseen) == len(data.list_models())
    assert validation.compute_scores(unseen)["mape"] < 0.1


def test_ignoring_load_increases_error(data: LatencyDataset) -> None:
    predictors = validation.fit_without_each_network(data, RATIO)
    scores = validation.compute_scores(validation.predict_under_load(data, predictors))
    blind = validation.compute_scores(validation.predict_under_load(data, predictors, ignore_load=True))
    assert scores["count"] == blind["count"] == len(data.loaded)
    assert scores["mape"] < 0.1 < 0.2 < blind["mape"]


@pytest.mark.parametrize("kind", ["ratio", "xgboost", "random_forest"])
def test_by_kernel_excludes_own_measurements(data: LatencyDataset, kind: str) -> None:
    kernel = data.list_kernels()[7]

    def select_kernel(predictions: list[HeldOutPrediction]) -> list[HeldOutPrediction]:
        return [prediction for prediction in predictions if prediction.name == kernel]

    predictions = validation.predict_by_kernel(data, kind)
    assert sorted(prediction.name for prediction in predictions) == data.list_kernels()
    (before,), (after,) = (
        select_kernel(predictions),
        select_kernel(validation.predict_by_kernel(spoiled(data, [kernel]), kind)),
    )
    assert after.predicted_ms == before.predicted_ms
    assert (after.measured_ms, before.measured_ms) == (7.0 * data.idle_ms[kernel], data.idle_ms[kernel])


def test_by_network_excludes_own_kernels(data: LatencyDataset) -> None:
    predictions = validation.predict_by_network(data, RATIO)
    exclusive = {
        name
        for network in validation.list_networks(data)
        for name in validation.find_exclusive_kernels(data, [network])
    }
    assert sorted(prediction.name for prediction in predictions) == sorted(exclusive) and exclusive < set(
        data.list_kernels()
    )
    kernel_ids = validation.find_exclusive_kernels(data, [NET])
    before, after = (
        {
            prediction.name: prediction.predicted_ms
            for prediction in validation.predict_by_network(prediction, RATIO)
        }
        for prediction in (data, spoiled(data, kernel_ids))
    )
    assert {name: before[name] for name in kernel_ids} == {name: after[name] for name in kernel_ids}
    assert before != after


def test_leaky_split_looks_better(data: LatencyDataset) -> None:
    leaky = validation.predict_leaky(data, "xgboost")
    times = Counter(prediction.name for prediction in leaky)
    assert sorted(times) == data.list_kernels()
    # Its two measurements are in different folds, so each is predicted by a regressor that learned the other.
    kernel = next(name for name, count in times.items() if count == 2)
    other = validation.predict_leaky(spoiled(data, [kernel]), "xgboost")
    before, after = ([o.predicted_ms for o in samples if o.name == kernel] for samples in (leaky, other))
    assert min(after) > 2.0 * max(before)
    grouped = validation.predict_by_kernel(data, "xgboost")
    assert 2.0 * validation.compute_scores(leaky)["mape"] < validation.compute_scores(grouped)["mape"]


def test_scores() -> None:
    predictions = [
        HeldOutPrediction(name="a", predicted_ms=1.1, measured_ms=1.0),
        HeldOutPrediction(name="b", predicted_ms=1.0, measured_ms=2.0),
        HeldOutPrediction(name="c", predicted_ms=4.0, measured_ms=4.0),
        HeldOutPrediction(name="d", predicted_ms=0.91, measured_ms=1.0),
    ]
    assert validation.compute_scores(predictions[1:]) == pytest.approx(
        {"mape": 0.59 / 3, "within_10": 2 / 3, "count": 3}, abs=1e-9
    )
    assert validation.compute_scores(predictions)["count"] == 4
    with pytest.raises(InputError):
        validation.compute_scores([])


def test_coverage_excludes_own_network() -> None:
    def cases(network: str, error: float) -> list[HeldOutPrediction]:
        return [
            HeldOutPrediction(name=f"{network}_b{batch}_224", predicted_ms=1.0, measured_ms=error)
            for batch in (1, 2)
        ]

    like = cases("a", 1.02) + cases("b", 1.02)
    assert compute_coverage(like) == 1.0
    # The outlier is outside the intervals of the other networks, which its own errors would widen.
    assert compute_coverage(like + cases("c", 1.5)) == pytest.approx(2 / 3)
    ends = validation.fit_interval(like + cases("c", 1.5)).bounds(2.0)
    assert ends == pytest.approx((2.0, 3.0))
    with pytest.raises(InputError):
        compute_coverage(cases("a", 1.0))


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("resnet18_b16_224", "resnet18"),
        ("vit_b1_8_b1_8", "vit_b1_8"),
        ("my_net", "my_net"),
        ("net_b1", "net_b1"),
        ("net_b1_224_int8", "net_b1_224_int8"),
    ],
)
def test_get_network(name: str, network: str) -> None:
    assert validation.get_network(name) == network
