"""Kernel regressors: fit, supported operators and records."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("xgboost")

from sparseflow.core import metrics
from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.kernel_regressor import KINDS, RATIO, KernelRegressor
from sparseflow.latency.model.roofline import Roofline
from tests.latency.records import from_record, to_record
from tests.latency.synthetic import make_kernel, make_matmul, rest_ms


def matmuls(min_size: int, max_size: int, count: int, seed: int = 0) -> list[KernelSpec]:
    generator = random.Random(seed)
    return [make_matmul(*(generator.randint(min_size, max_size) for _ in range(3))) for _ in range(count)]


def relus(min_size: int, max_size: int, count: int) -> list[KernelSpec]:
    generator = random.Random(1)
    return [
        make_kernel("Relu", [(n,)], (n,))
        for n in (generator.randint(min_size, max_size) for _ in range(count))
    ]


LEARNED = [*matmuls(4, 64, 80), *relus(10, 10000, 40)]
TAKEN = [rest_ms(kernel) for kernel in LEARNED]


@pytest.fixture(scope="module")
def models() -> dict[str, KernelRegressor]:
    return {kind: KernelRegressor.fit(LEARNED, TAKEN, kind) for kind in KINDS}


def error(model: KernelRegressor, kernels: list[KernelSpec]) -> float:
    return metrics.mape(model.predict(kernels), [rest_ms(kernel) for kernel in kernels])


def test_predict_similar_kernels(models: dict[str, KernelRegressor]) -> None:
    unseen = [*matmuls(4, 64, 40, seed=7), *relus(20, 9000, 10)]
    assert {kind: error(model, unseen) < 0.25 for kind, model in models.items()} == dict.fromkeys(KINDS, True)
    assert error(models[RATIO], unseen) < 0.1


def test_only_ratio_extrapolates(models: dict[str, KernelRegressor]) -> None:
    large = [*matmuls(150, 300, 10), *relus(10**5, 10**6, 5)]
    errors = {kind: error(model, large) for kind, model in models.items()}
    assert errors[RATIO] < 0.35 and all(errors[kind] > 0.6 for kind in KINDS if kind != RATIO)


def test_ratio_at_least_roofline() -> None:
    bound = Roofline(
        launch_ms=1.0, flops_per_s=1e6, integer_ops_per_s=1e6, bytes_per_s=1e6, typical=1.0, low=1.0, high=1.0
    )
    model = KernelRegressor.fit(LEARNED, TAKEN, RATIO, roofline=bound)
    assert model.roofline == bound
    assert model.predict(LEARNED) == [bound.compute_bound_ms(kernel) for kernel in LEARNED]


def test_regressor_round_trip(models: dict[str, KernelRegressor]) -> None:
    for model in models.values():
        reloaded = from_record(KernelRegressor, to_record(model))
        assert reloaded.predict(LEARNED) == model.predict(LEARNED)
        assert (reloaded.kind, reloaded.roofline, reloaded.encoder) == (
            model.kind,
            model.roofline,
            model.encoder,
        )


def test_fit_depends_on_seed() -> None:
    first, same, other = (
        KernelRegressor.fit(LEARNED, TAKEN, seed=seed).predict(matmuls(4, 64, 20, seed=3))
        for seed in (0, 0, 1)
    )
    assert first == same != other


def test_supports_known_operators_only(
    models: dict[str, KernelRegressor],
) -> None:
    model = models[RATIO]
    assert model.supports(make_matmul(1000, 1000, 1000))
    for kernel in (
        make_kernel("Tanh", [(8,)], (8,)),
        make_kernel("Relu", [(8,)], (8,), dtype="float16"),
        make_kernel("Relu", [(8,)], (8,), domain="com.microsoft"),
    ):
        assert not model.supports(kernel)


def test_predict_empty(models: dict[str, KernelRegressor]) -> None:
    assert [model.predict([]) for model in models.values()] == [[]] * len(KINDS)


def test_fit_single_kernel() -> None:
    kernel = make_matmul(8, 8, 8)
    assert KernelRegressor.fit([kernel], [3.0]).predict([kernel]) == pytest.approx([3.0], rel=0.01)


@pytest.mark.parametrize(
    ("kernels", "latencies_ms", "kind", "value"),
    [
        (LEARNED, TAKEN, "forest", "must be one of: ratio, xgboost, random_forest"),
        ([], [], RATIO, "0 kernels and 0 latencies"),
        (LEARNED, TAKEN[1:], RATIO, "120 kernels and 119 latencies"),
    ],
)
def test_fit_invalid_data_raises(
    kernels: list[KernelSpec], latencies_ms: list[float], kind: str, value: str
) -> None:
    with pytest.raises(InputError) as caught:
        KernelRegressor.fit(kernels, latencies_ms, kind)
    assert value in str(caught.value)


def damaged(record: dict[str, Any]) -> list[Any]:
    space = {**record["encoder"], "numbers": record["encoder"]["numbers"][1:]}
    return [
        record | {"kind": "forest"},
        record | {"encoder": space},
        record | {"encoder": None},
        record | {"trees": {**record["trees"], "model": "AAAA"}},
        record | {"trees": {**record["trees"], "model": record["trees"]["model"][:-40]}},
        record | {"trees": {"kind": "xgboost"}},
        record | {"roofline": []},
        {name: value for name, value in record.items() if name != "trees"},
        [],
        None,
    ]


def test_regressor_damaged_record_raises(models: dict[str, KernelRegressor]) -> None:
    for record in damaged(to_record(models[RATIO])):
        with pytest.raises(ValueError):
            from_record(KernelRegressor, record)
