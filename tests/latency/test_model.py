"""Regressors of kernels: what they learn, what they know, and their records."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("xgboost")

from sparseflow.core import metrics
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.model import KINDS, RATIO, KernelModel
from sparseflow.latency.roofline import Roofline
from tests.latency.synthetic import make_kernel, make_matmul, rest_ms


def matmuls(least: int, most: int, count: int, seed: int = 0) -> list[Kernel]:
    generator = random.Random(seed)
    return [make_matmul(*(generator.randint(least, most) for _ in range(3))) for _ in range(count)]


def relus(least: int, most: int, count: int) -> list[Kernel]:
    generator = random.Random(1)
    return [make_kernel("Relu", [(n,)], (n,)) for n in (generator.randint(least, most) for _ in range(count))]


LEARNED = [*matmuls(4, 64, 80), *relus(10, 10000, 40)]
TAKEN = [rest_ms(kernel) for kernel in LEARNED]


@pytest.fixture(scope="module")
def models() -> dict[str, KernelModel]:
    return {kind: KernelModel.fit(LEARNED, TAKEN, kind) for kind in KINDS}


def error(model: KernelModel, kernels: list[Kernel]) -> float:
    return metrics.mape(model.predict(kernels), [rest_ms(kernel) for kernel in kernels])


def test_every_kind_predicts_kernels_like_those_it_saw(models: dict[str, KernelModel]) -> None:
    unseen = [*matmuls(4, 64, 40, seed=7), *relus(20, 9000, 10)]
    assert {kind: error(model, unseen) < 0.25 for kind, model in models.items()} == dict.fromkeys(KINDS, True)
    assert error(models[RATIO], unseen) < 0.1


def test_only_the_ratio_carries_on_beyond_the_largest_kernel_seen(models: dict[str, KernelModel]) -> None:
    large = [*matmuls(150, 300, 10), *relus(10**5, 10**6, 5)]
    found = {kind: error(model, large) for kind, model in models.items()}
    assert found[RATIO] < 0.35 and all(found[kind] > 0.6 for kind in KINDS if kind != RATIO)


def test_the_ratio_never_predicts_below_the_roofline() -> None:
    bound = Roofline(launch_ms=1.0, flops_per_s=1e6, bytes_per_s=1e6, typical=1.0, low=1.0, high=1.0)
    model = KernelModel.fit(LEARNED, TAKEN, RATIO, roofline=bound)
    assert model.roofline == bound
    assert model.predict(LEARNED) == [bound.floor_ms(kernel) for kernel in LEARNED]


def test_predictions_survive_the_disk_to_the_last_bit(models: dict[str, KernelModel]) -> None:
    for model in models.values():
        again = KernelModel.from_dict(json.loads(json.dumps(model.to_dict(), allow_nan=False)))
        assert again.predict(LEARNED) == model.predict(LEARNED)
        assert (again.kind, again.roofline, again.space) == (model.kind, model.roofline, model.space)


def test_the_seed_decides_what_is_learned() -> None:
    first, same, other = (
        KernelModel.fit(LEARNED, TAKEN, seed=seed).predict(matmuls(4, 64, 20, seed=3)) for seed in (0, 0, 1)
    )
    assert first == same != other


def test_kernels_of_operators_types_and_domains_that_were_not_seen_are_unknown(
    models: dict[str, KernelModel],
) -> None:
    model = models[RATIO]
    assert model.knows(make_matmul(1000, 1000, 1000))
    for kernel in (
        make_kernel("Tanh", [(8,)], (8,)),
        make_kernel("Relu", [(8,)], (8,), dtype="float16"),
        make_kernel("Relu", [(8,)], (8,), domain="com.microsoft"),
    ):
        assert not model.knows(kernel)


def test_nothing_to_predict_is_no_error(models: dict[str, KernelModel]) -> None:
    assert [model.predict([]) for model in models.values()] == [[]] * len(KINDS)


def test_one_kernel_is_enough_to_learn_from() -> None:
    kernel = make_matmul(8, 8, 8)
    assert KernelModel.fit([kernel], [3.0]).predict([kernel]) == pytest.approx([3.0], rel=0.01)


@pytest.mark.parametrize(
    ("kernels", "taken", "kind", "says"),
    [
        (LEARNED, TAKEN, "forest", "must be one of: ratio, xgboost, random_forest"),
        ([], [], RATIO, "0 kernels and 0 latencies"),
        (LEARNED, TAKEN[1:], RATIO, "120 kernels and 119 latencies"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    kernels: list[Kernel], taken: list[float], kind: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        KernelModel.fit(kernels, taken, kind)
    assert says in str(caught.value)


def damaged(record: dict[str, Any]) -> list[Any]:
    space = {**record["space"], "numbers": record["space"]["numbers"][1:]}
    return [
        record | {"kind": "forest"},
        record | {"space": space},
        record | {"space": None},
        record | {"trees": {**record["trees"], "model": "AAAA"}},
        record | {"trees": {**record["trees"], "model": record["trees"]["model"][:-40]}},
        record | {"trees": {"kind": "xgboost"}},
        record | {"roofline": []},
        {name: value for name, value in record.items() if name != "trees"},
        [],
        None,
    ]


def test_a_damaged_record_is_refused(models: dict[str, KernelModel]) -> None:
    for record in damaged(models[RATIO].to_dict()):
        with pytest.raises(FileFormatError, match="cannot be read"):
            KernelModel.from_dict(record)
