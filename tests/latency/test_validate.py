"""What is judged was never learned from: kernels, networks and levels that are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency import validate
from sparseflow.latency.dataset import Dataset
from sparseflow.latency.model import RATIO
from sparseflow.latency.validate import Judged
from tests.latency.conftest import MadeUp

pytestmark = pytest.mark.usefixtures("quick")

NET = "net1"


@pytest.fixture(scope="module")
def data(made_up: MadeUp) -> Dataset:
    """Without single samples: quantiles are not looked at here, and take long to learn."""
    return replace(made_up.data, loaded=tuple(replace(one, ratios=()) for one in made_up.data.loaded))


def spoiled(data: Dataset, items: Collection[str], levels: Collection[float] = (0.0, 0.4, 0.8)) -> Dataset:
    """The same, with these items' measurements at these levels far from the truth."""
    rest = items if 0.0 in levels else ()
    return replace(
        data,
        rest_ms={name: ms * (7.0 if name in rest else 1.0) for name, ms in data.rest_ms.items()},
        visits_ms={
            name: tuple(ms * (7.0 if name in rest else 1.0) for ms in visits)
            for name, visits in data.visits_ms.items()
        },
        loaded=tuple(
            replace(one, slowdown=3.0 * one.slowdown) if one.item in items and one.level in levels else one
            for one in data.loaded
        ),
    )


def predicted(judged: list[Judged], network: str = NET) -> list[float]:
    found = [one.predicted_ms for one in judged if validate.family(one.name) == network]
    assert found
    return found


@pytest.mark.parametrize("strict", [False, True])
def test_what_a_held_out_network_took_changes_nothing_that_is_said_of_it(data: Dataset, strict: bool) -> None:
    models = validate.cases(data, NET)
    own, all_of_it = validate.own_kernels(data, NET), validate.kernels_of(data, models)
    assert own < all_of_it, "a kernel that another network runs too is needed here"
    other = spoiled(data, {*models, *(all_of_it if strict else own)})
    before, after = (validate.without_each(one, RATIO, strict=strict) for one in (data, other))
    for judge in (validate.at_rest, validate.beside_loads):
        assert predicted(judge(data, before)) == predicted(judge(data, after))
        assert predicted(judge(data, before), "net0") != predicted(judge(data, after), "net0")


def test_strict_leaves_out_what_other_networks_share_too(data: Dataset) -> None:
    told: list[tuple[str, float]] = []
    kept = validate.without_each(data, RATIO, progress=lambda *what: told.append(what))
    strict = validate.without_each(data, RATIO, strict=True)
    assert set(kept) == set(strict) == set(validate.networks(data)) == {"net0", "net1", "net2"}
    assert [what for what, _ in told] == ["without net0", "without net1", "without net2"]
    measured = set(data.kernel_ids())
    for network in kept:
        models = validate.cases(data, network)
        assert set(kept[network].known_ms) == measured - validate.own_kernels(data, network)
        assert set(strict[network].known_ms) == measured - validate.kernels_of(data, models)
        assert kept[network].composition.models == len(data.models()) - len(models)


def test_a_level_that_is_left_out_is_not_learned_from_and_yet_predicted(data: Dataset) -> None:
    def held(one: Dataset) -> list[Judged]:
        return validate.beside_loads(one, validate.without_each(one, RATIO, levels=[0.8]))

    judged, others = held(data), held(spoiled(data, data.models(), [0.4]))
    assert [one.predicted_ms for one in judged] == [one.predicted_ms for one in others]
    unseen = [one for one in judged if one.level == 0.4]
    assert len(unseen) == len(data.models())
    assert validate.scores(unseen)["mape"] < 0.1


def test_a_predictor_that_is_not_told_of_the_load_misses_it(data: Dataset) -> None:
    held = validate.without_each(data, RATIO)
    told = validate.scores(validate.beside_loads(data, held))
    blind = validate.scores(validate.beside_loads(data, held, blind=True))
    assert told["count"] == blind["count"] == len(data.loaded)
    assert told["mape"] < 0.1 < 0.2 < blind["mape"]


@pytest.mark.parametrize("kind", ["ratio", "xgboost", "random_forest"])
def test_a_kernel_is_judged_by_what_saw_none_of_its_measurements(data: Dataset, kind: str) -> None:
    kernel = data.kernel_ids()[7]

    def of_it(judged: list[Judged]) -> list[Judged]:
        return [one for one in judged if one.name == kernel]

    judged = validate.kernels_by_kernel(data, kind)
    assert sorted(one.name for one in judged) == data.kernel_ids()
    (before,), (after,) = of_it(judged), of_it(validate.kernels_by_kernel(spoiled(data, [kernel]), kind))
    assert after.predicted_ms == before.predicted_ms
    assert (after.measured_ms, before.measured_ms) == (7.0 * data.rest_ms[kernel], data.rest_ms[kernel])


def test_networks_kernels_are_judged_by_what_saw_none_of_them(data: Dataset) -> None:
    judged = validate.kernels_by_network(data, RATIO)
    own = {name for network in validate.networks(data) for name in validate.own_kernels(data, network)}
    assert sorted(one.name for one in judged) == sorted(own) and own < set(data.kernel_ids())
    here = validate.own_kernels(data, NET)
    before, after = (
        {one.name: one.predicted_ms for one in validate.kernels_by_network(one, RATIO)}
        for one in (data, spoiled(data, here))
    )
    assert {name: before[name] for name in here} == {name: after[name] for name in here}
    assert before != after


def test_a_leaky_split_gives_answers_away_and_looks_better(data: Dataset) -> None:
    leaky = validate.kernels_leaky(data, "xgboost")
    times = Counter(one.name for one in leaky)
    assert sorted(times) == data.kernel_ids()
    # Its two visits are in different parts, so that each is judged by what saw the other one.
    kernel = next(name for name, count in times.items() if count == 2)
    other = validate.kernels_leaky(spoiled(data, [kernel]), "xgboost")
    before, after = ([o.predicted_ms for o in found if o.name == kernel] for found in (leaky, other))
    assert min(after) > 2.0 * max(before)
    grouped = validate.kernels_by_kernel(data, "xgboost")
    assert 2.0 * validate.scores(leaky)["mape"] < validate.scores(grouped)["mape"]


def test_scores_are_shares_of_what_was_measured() -> None:
    judged = [
        Judged(name="a", predicted_ms=1.1, measured_ms=1.0),
        Judged(name="b", predicted_ms=1.0, measured_ms=2.0),
        Judged(name="c", predicted_ms=4.0, measured_ms=4.0),
        Judged(name="d", predicted_ms=0.91, measured_ms=1.0),
    ]
    assert validate.scores(judged[1:]) == pytest.approx(
        {"mape": 0.59 / 3, "within_10": 2 / 3, "count": 3}, abs=1e-9
    )
    assert validate.scores(judged)["count"] == 4
    with pytest.raises(InputError):
        validate.scores([])


def test_intervals_are_judged_on_networks_that_they_were_not_made_from() -> None:
    def cases(network: str, error: float) -> list[Judged]:
        return [
            Judged(name=f"{network}_b{batch}_224", predicted_ms=1.0, measured_ms=error) for batch in (1, 2)
        ]

    like = cases("a", 1.02) + cases("b", 1.02)
    assert validate.coverage(like) == 1.0
    # The network that is off lies outside the intervals of the others, which its own errors would widen.
    assert validate.coverage(like + cases("c", 1.5)) == pytest.approx(2 / 3)
    ends = validate.interval(like + cases("c", 1.5)).bounds(2.0)
    assert ends == pytest.approx((2.0, 3.0))
    with pytest.raises(InputError, match="at least two"):
        validate.coverage(cases("a", 1.0))


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
def test_a_case_belongs_to_its_network(name: str, network: str) -> None:
    assert validate.family(name) == network
