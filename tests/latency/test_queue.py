"""A device beside a host: graphs as a queue of both, and what is learned of kernels measured in a stream."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from sparseflow.errors import FileFormatError, InputError, SparseFlowError
from sparseflow.latency import validate
from sparseflow.latency.campaign import Item
from sparseflow.latency.compose import LEAST_SHARE, QUEUE, VIEWS, Composition
from sparseflow.latency.dataset import LEAST_DEVICE_MS, Dataset, load
from sparseflow.latency.extract import extract
from sparseflow.latency.graph import Graph, analyze
from sparseflow.latency.issue import Issue
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.learn import learn, usual_mode
from sparseflow.latency.model import LEARNED, MEASURED, RATIO, ROOFLINE
from sparseflow.latency.overlap import CRITICAL_PATH, SUM
from sparseflow.latency.predictor import Predictor
from sparseflow.latency.train import train
from tests.latency.conftest import MadeUp, few_tries
from tests.latency.onnx_models import FLOAT, convnet, model, save, values
from tests.latency.synthetic import (
    CALL_MS,
    NOISE,
    StreamedBench,
    collection,
    device_ms,
    done_ms,
    host_ms,
    make_graph,
    make_kernel,
    make_matmul,
    networks,
    queued_ms,
    slowdown,
    streamed_item_ms,
)

SMALL, MIDDLE, LARGE = (make_matmul(4, n, 4) for n in (1, 2, 3))
VIEW = make_kernel("Reshape", [(4, 4), (1,)], (16,))
KERNELS = (SMALL, MIDDLE, LARGE, VIEW)
MIXED = {"call_ms": 0.05, "issue_scale": 1.3, "per_issue_ms": 0.002, "per_kernel_ms": 0.003}


def composition(**changes: Any) -> Composition:
    """A queue without costs but these."""
    given: dict[str, Any] = {
        "mode": QUEUE, "per_kernel_ms": 0.0, "per_view_ms": 0.0, "per_weight_ms": 0.0, "per_flow_ms": 0.0,
        "issue_scale": 1.0, "per_issue_ms": 0.0, "call_ms": 0.0, "models": 1,
    }  # fmt: skip
    return Composition(**(given | changes))


def chain(kernels: list[Kernel]) -> Graph:
    """A graph of kernels that run one after the other."""
    names = [str(number) for number in range(len(kernels))]
    edges = zip(names, kernels, [[], *([name] for name in names)], strict=False)
    return make_graph({name: (kernel, before) for name, kernel, before in edges})


# From kernels to a graph.

TIMES = st.tuples(*[st.floats(0.0, 5.0)] * len(KERNELS))
CHAINS = st.lists(st.sampled_from(KERNELS), min_size=1, max_size=12).map(chain)
COSTS = st.fixed_dictionaries(
    {
        "per_kernel_ms": st.floats(-1.0, 1.0),
        "per_view_ms": st.floats(0.0, 1.0),
        "per_weight_ms": st.floats(0.0, 1.0),
        "per_flow_ms": st.floats(0.0, 1.0),
        "issue_scale": st.floats(0.0, 3.0),
        "per_issue_ms": st.floats(-1.0, 1.0),
        "call_ms": st.floats(0.0, 1.0),
    }
)


def by_id(taken: tuple[float, ...]) -> dict[str, float]:
    return {kernel.id: ms for kernel, ms in zip(KERNELS, taken, strict=True)}


@settings(deadline=None)
@given(CHAINS, TIMES, TIMES, COSTS)
def test_a_graph_is_done_when_the_device_has_worked_off_what_the_host_issued(
    graph: Graph, device: tuple[float, ...], host: tuple[float, ...], costs: dict[str, float]
) -> None:
    one, issued, works = composition(**costs), by_id(host), by_id(device)
    found = one.compose(graph, works, issued)
    hosts = [
        max(one.issue_scale * ms + one.per_issue_ms, LEAST_SHARE * ms)
        for ms in (issued[node.kernel_id] for node in graph.nodes)
    ]
    inside = [one.inside_ms(node.kernel, works[node.kernel_id]) for node in graph.nodes]
    assert found.call_ms == one.call_ms
    assert found.total_ms == pytest.approx(one.call_ms + done_ms(hosts, inside), abs=1e-9)
    # What it consists of is all of it, and each node is in it once.
    assert found.total_ms == pytest.approx(
        found.call_ms + sum(part.count * part.ms for part in found.parts.values()), abs=1e-9
    )
    ids = [node.kernel_id for node in graph.nodes]
    assert {name: part.count for name, part in found.parts.items()} == {n: ids.count(n) for n in set(ids)}
    assert all(part.ms >= 0.0 for part in found.parts.values())
    assert max(sum(hosts), sum(inside)) <= (found.total_ms - one.call_ms) * (1.0 + 1e-9) + 1e-9
    assert found.total_ms - one.call_ms <= sum(hosts) + sum(inside) + 1e-9


@settings(deadline=None)
@given(CHAINS, TIMES, TIMES, st.sampled_from(KERNELS), st.floats(0.0, 5.0), st.booleans())
def test_a_kernel_that_takes_longer_makes_no_graph_quicker(
    graph: Graph,
    device: tuple[float, ...],
    host: tuple[float, ...],
    slower: Kernel,
    more: float,
    on_host: bool,
) -> None:
    issued, works = by_id(host), by_id(device)
    before = composition().compose(graph, works, issued).total_ms
    (issued if on_host else works)[slower.id] += more
    after = composition().compose(graph, works, issued).total_ms
    count = sum(node.kernel_id == slower.id for node in graph.nodes)
    assert before <= after + 1e-9 and after <= before + count * more + 1e-9


def test_where_the_device_is_slow_the_host_hides_and_the_other_way_round() -> None:
    graph = chain([SMALL, MIDDLE, LARGE, MIDDLE])
    much, little = ({kernel.id: ms for kernel in KERNELS} for ms in (3.0, 0.1))
    by_device = composition(call_ms=0.5).compose(graph, much, little)
    assert by_device.total_ms == pytest.approx(0.5 + 0.1 + 4 * 3.0)
    # The first call is waited for, and no other.
    assert {name: part.ms for name, part in by_device.parts.items()} == pytest.approx(
        {SMALL.id: 3.1, MIDDLE.id: 3.0, LARGE.id: 3.0}
    )
    by_host = composition(call_ms=0.5).compose(graph, little, much)
    assert by_host.total_ms == pytest.approx(0.5 + 4 * 3.0 + 0.1)
    assert by_host.parts[MIDDLE.id].count == 2 and by_host.parts[MIDDLE.id].ms == pytest.approx(3.05)
    # What hides may take twice as long.
    twice = {name: 2.0 * ms for name, ms in little.items()}
    assert composition().compose(graph, much, twice).total_ms == pytest.approx(0.2 + 4 * 3.0)
    assert composition().compose(graph, twice, much).total_ms == pytest.approx(4 * 3.0 + 0.2)


def test_small_kernels_hide_behind_a_large_one_before_them_and_not_after_them() -> None:
    device = {SMALL.id: 0.1, LARGE.id: 10.0}
    host = {SMALL.id: 1.0, LARGE.id: 1.0}
    first = composition().compose(chain([LARGE, *[SMALL] * 5]), device, host)
    last = composition().compose(chain([*[SMALL] * 5, LARGE]), device, host)
    assert first.total_ms == pytest.approx(1.0 + 10.0 + 5 * 0.1)
    assert last.total_ms == pytest.approx(6 * 1.0 + 10.0)


def test_views_are_nothing_to_the_device_and_a_call_to_the_host() -> None:
    one = composition(per_kernel_ms=0.5, per_view_ms=0.7, per_weight_ms=0.1, per_flow_ms=0.1)
    kernels = {op: make_kernel(op, [(4, 4)], (4, 4)) for op in sorted(VIEWS)}
    assert [one.inside_ms(kernel, 3.0) for kernel in kernels.values()] == [0.0] * len(VIEWS)
    assert replace(one, models=0).inside_ms(VIEW, 3.0) == 0.0
    host = {kernel.id: 0.25 for kernel in (*KERNELS, *kernels.values())}
    device = {name: 2.0 for name in host}
    views = composition().compose(chain(list(kernels.values())), device, host)
    assert views.total_ms == pytest.approx(0.25 * len(VIEWS))
    # Behind a kernel that takes the device long enough they hide.
    hidden = composition().compose(chain([LARGE, VIEW, VIEW]), device, host)
    assert hidden.total_ms == pytest.approx(0.25 + 2.0) and hidden.parts[VIEW.id].ms == 0.0
    assert hidden.parts[VIEW.id].count == 2
    before = composition().compose(chain([VIEW, VIEW, LARGE]), device, host)
    assert before.total_ms == pytest.approx(3 * 0.25 + 2.0)


@pytest.mark.parametrize("mode", [SUM, CRITICAL_PATH, QUEUE])
def test_an_empty_graph_takes_the_call(mode: str) -> None:
    found = composition(mode=mode, call_ms=0.25).compose(make_graph({}), {}, {})
    assert (found.total_ms, found.call_ms, found.parts) == (0.25, 0.25, {})


def test_the_host_changes_nothing_where_kernels_add_up() -> None:
    graph, device = chain([SMALL, LARGE, SMALL]), by_id((1.0, 2.0, 3.0, 4.0))
    one = composition(mode=SUM)
    assert one.compose(graph, device, {kernel.id: 50.0 for kernel in KERNELS}) == one.compose(graph, device)


def test_a_node_takes_the_host_some_time_whatever_was_learned() -> None:
    graph = chain([SMALL, SMALL])
    found = composition(per_issue_ms=-9.0).compose(graph, {SMALL.id: 0.0}, {SMALL.id: 2.0})
    assert found.total_ms == pytest.approx(2 * LEAST_SHARE * 2.0)


# What it costs.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Graphs of which it is known what they take."""

    graphs: list[Graph]
    device: dict[str, float]
    host: dict[str, float]
    total: list[float]

    def error(self, one: Composition) -> float:
        """How far a composition is off, the mean over graphs as a share."""
        found = [one.compose(graph, self.device, self.host).total_ms for graph in self.graphs]
        return statistics.fmean(abs(ms / true - 1.0) for ms, true in zip(found, self.total, strict=True))


def measured(true: Composition, count: int, seed: int = 0) -> Measured:
    """Chains of random kernels and views, some of which wait for the host and some for the device."""
    draw = random.Random(seed)
    graphs, device, host, total = [], {}, {}, []
    for _ in range(count):
        largest = draw.choice([64, 300, 900])
        kernels = [
            make_matmul(*(draw.randint(1, largest) for _ in range(3))) for _ in range(draw.randint(3, 30))
        ]
        kernels += [VIEW] * draw.randint(0, 6)
        draw.shuffle(kernels)
        graphs.append(chain(kernels))
        for kernel in kernels:
            device[kernel.id] = 0.0 if kernel is VIEW else device_ms(kernel)
            host.setdefault(kernel.id, draw.uniform(0.004, 0.02))
        issued = [true.issue_scale * host[kernel.id] + true.per_issue_ms for kernel in kernels]
        works = [true.inside_ms(kernel, device[kernel.id]) for kernel in kernels]
        total.append(true.call_ms + done_ms(issued, works))
    return Measured(graphs=graphs, device=device, host=host, total=total)


def fitted(data: Measured, count: int | None = None) -> Composition:
    return Composition.fit(data.graphs[:count], data.device, data.total[:count], QUEUE, data.host)


@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"issue_scale": 1.5},
        {"issue_scale": 0.8},
        {"per_issue_ms": 0.005},
        {"per_issue_ms": -0.002},
        {"per_kernel_ms": 0.004},
        {"per_kernel_ms": -0.0015},
        {"per_weight_ms": 0.02},
        {"call_ms": 0.1},
        MIXED,
    ],
)
def test_costs_are_learned_back_from_models_that_follow_them(costs: dict[str, float]) -> None:
    true = composition(**costs)
    found = fitted(measured(true, 60))
    held = measured(true, 30, seed=1)
    assert (found.mode, found.models, found.per_view_ms) == (QUEUE, 60, 0.0)
    assert held.error(found) < 0.005
    if costs:
        assert held.error(found) < 0.1 * held.error(composition())
    # Scale and cost of a node go together: what a node of middling time takes is known better than either.
    for host in (0.008, 0.012, 0.016):
        assert found.issue_scale * host + found.per_issue_ms == pytest.approx(
            true.issue_scale * host + true.per_issue_ms, rel=0.05, abs=3e-4
        )
    assert found.issue_scale == pytest.approx(true.issue_scale, abs=0.1)
    assert found.per_issue_ms == pytest.approx(true.per_issue_ms, abs=1.5e-3)
    assert found.per_kernel_ms == pytest.approx(true.per_kernel_ms, abs=5e-4)
    assert found.per_weight_ms == pytest.approx(true.per_weight_ms, abs=4e-3)
    assert found.call_ms == pytest.approx(true.call_ms, rel=0.05, abs=1e-3)


def test_a_few_models_are_enough_to_be_better_than_without_costs() -> None:
    true = composition(**MIXED)
    held = measured(true, 30, seed=1)
    assert held.error(fitted(measured(true, 4))) < 0.3 * held.error(composition())


def test_one_model_that_is_off_does_not_spoil_the_costs() -> None:
    true = composition(**MIXED)
    data, held = measured(true, 30), measured(true, 30, seed=1)
    spoiled = replace(data, total=[5.0 * data.total[0], *data.total[1:]])
    assert held.error(fitted(spoiled)) < 0.03


def test_without_models_a_queue_has_no_costs() -> None:
    found = Composition.fit([], {}, [], QUEUE)
    assert found == composition(models=0)
    graph = chain([SMALL, VIEW, LARGE])
    assert found.compose(graph, by_id((1.0, 1.0, 1.0, 9.0)), by_id((0.1, 0.1, 0.1, 0.1))).total_ms == (
        pytest.approx(2.1)
    )


def test_a_queue_without_times_of_the_host_is_refused() -> None:
    graph = chain([SMALL, LARGE])
    device, host = by_id((1.0,) * 4), {SMALL.id: 0.1, VIEW.id: 0.1}
    with pytest.raises(InputError, match="2 kernels have no latency"):
        Composition.fit([graph], device, [3.0], QUEUE)
    with pytest.raises(InputError, match=f"1 kernels have no latency, {LARGE.id} for one"):
        Composition.fit([graph], device, [3.0], QUEUE, host)
    with pytest.raises(InputError, match=f"1 kernels have no latency, {LARGE.id} for one"):
        Composition.fit([graph], host, [3.0], QUEUE, device)
    with pytest.raises(InputError, match="1 graphs and 0 latencies"):
        Composition.fit([graph], device, [], QUEUE, device)
    assert Composition.fit([graph], device, [3.0], SUM).mode == SUM


def test_a_queue_is_not_composed_without_times_of_the_host() -> None:
    with pytest.raises(InputError, match="host"):
        composition().compose(chain([SMALL, LARGE]), by_id((1.0,) * 4))


def test_a_record_of_a_queue_is_read_back() -> None:
    one = composition(issue_scale=1.25, per_issue_ms=-0.5, per_kernel_ms=-0.25, call_ms=0.5, models=7)
    assert Composition.from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False))) == one


@pytest.mark.parametrize("name", ["issue_scale", "per_issue_ms", "call_ms", "models"])
@pytest.mark.parametrize("wrong", ["much", None, [], math.nan, math.inf])
def test_a_damaged_record_of_a_queue_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(FileFormatError, match="composition"):
        Composition.from_dict(composition().to_dict() | {name: wrong})
    less = composition().to_dict()
    del less[name]
    with pytest.raises(FileFormatError, match="composition"):
        Composition.from_dict(less)


# Collections whose kernels were measured in a stream.


class Nothing(StreamedBench):
    """Products are nothing to the device, and one kind is even told to be less."""

    def in_stream(self, kernel: Kernel) -> tuple[float, float] | None:
        if kernel.node_op == "GlobalAveragePool":
            return 0.0, 0.0
        return (1e-6, host_ms(kernel)) if kernel.node_op == "Gemm" else super().in_stream(kernel)


class Partly(StreamedBench):
    """Pooling is only run alone."""

    def in_stream(self, kernel: Kernel) -> tuple[float, float] | None:
        return None if kernel.node_op == "GlobalAveragePool" else super().in_stream(kernel)


class Overtaken(StreamedBench):
    """The host is too slow for pooling."""

    def measure(self, item: Item) -> dict[str, Any]:
        row = super().measure(item)
        return row | ({"overtaken": item.op == "GlobalAveragePool"} if "copies" in row else {})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    return networks(tmp_path_factory.mktemp("files"), 4)


@pytest.fixture(scope="module")
def queued(files: tuple[list[Path], list[Path]], tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    """The device beside a host, learned by default."""
    folder = tmp_path_factory.mktemp("queued")
    models, kernels = files
    rest = collection(folder, models, kernels, out="rest", levels=[0.0], bench=StreamedBench)
    beside = collection(folder, models, [], out="load", rounds=1, bench=StreamedBench)
    with few_tries():
        predictor = train([rest, beside])
    data = load([rest, beside])
    return MadeUp(models=models, kernels=kernels, rest=rest, load=beside, data=data, predictor=predictor)


def test_what_a_kernel_takes_is_the_devices_time_in_the_stream(queued: MadeUp) -> None:
    data = queued.data
    assert set(data.kernel_ids()) == set(data.kernels) == set(data.host_ms)
    assert data.nothing == VIEWS and data.failed == 0
    views = {name for name, kernel in data.kernels.items() if kernel.node_op in VIEWS}
    assert views and set(data.working_ids()) == set(data.kernel_ids()) - views
    assert data.working_ids() == sorted(data.working_ids())
    for name, kernel in data.kernels.items():
        expected = 0.0 if name in views else device_ms(kernel)
        assert data.rest_ms[name] == pytest.approx(expected, rel=4 * NOISE)
        assert data.host_ms[name] == pytest.approx(host_ms(kernel), rel=4 * NOISE)
        # Two rounds, of which the middle is what counts.
        assert len(data.visits_ms[name]) == 2
        assert statistics.median(data.visits_ms[name]) == data.rest_ms[name]
    for path in queued.models:
        assert data.rest_ms[path.stem] == pytest.approx(queued_ms(data.graphs[path.stem]), rel=2 * NOISE)
        assert data.visits_ms[path.stem] and path.stem not in data.host_ms
    assert set(data.jitter) >= set(data.rest_ms)


def test_slowdowns_stay_relative_to_runs_alone(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    models, kernels = files
    folder = collection(tmp_path, models[:2], kernels[:2], rounds=2, bench=StreamedBench)
    data = load([folder])
    paths = {path.stem: path for folder in kernels[:2] for path in (folder / "kernels").glob("*.onnx")}
    assert {one.item for one in data.loaded if not one.model} == set(data.kernels)
    for one in data.loaded:
        path = models[0].parent / f"{one.item}.onnx" if one.model else paths[one.item]
        alone = streamed_item_ms(str(path.resolve()), one.model, "cpu")
        assert one.rest_ms == pytest.approx(alone, rel=4 * NOISE)
        assert one.slowdown == pytest.approx(slowdown(one.level), rel=5 * NOISE)
        if not one.model:
            assert one.rest_ms > data.rest_ms[one.item] + 0.5 * CALL_MS
    # Kernels were in a stream at rest only, so that load is in none of the device's times.
    assert all(
        data.rest_ms[name] == pytest.approx(device_ms(data.kernels[name]), rel=4 * NOISE)
        for name in data.working_ids()
    )


def test_what_is_next_to_nothing_counts_as_the_least_there_is(
    files: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    data = load([collection(tmp_path, *files, levels=[0.0], bench=Nothing)])
    ops = {name: data.kernels[name].node_op for name in data.kernel_ids()}
    assert set(ops.values()) >= {"GlobalAveragePool", "Gemm", "Flatten"}
    for name, op in ops.items():
        if op in VIEWS:
            assert data.visits_ms[name] == (0.0, 0.0)
        elif op in ("GlobalAveragePool", "Gemm"):
            assert data.visits_ms[name] == (LEAST_DEVICE_MS,) * 2
            assert data.rest_ms[name] == LEAST_DEVICE_MS
        else:
            assert data.rest_ms[name] > LEAST_DEVICE_MS
    # Of that, too, there is something to learn, and every time of the host is above 0.
    with few_tries():
        predictor = learn(data)
    assert predictor.issue is not None and min(predictor.issue.known_ms.values()) > 0.0
    for graph in data.graphs.values():
        found = predictor.predict(graph, {"others": 0.5})
        assert math.isfinite(found.mean_ms) and found.interval[0] > 0.0


@pytest.mark.parametrize("bench", [Partly, Overtaken])
def test_kernels_that_were_only_run_alone_are_left_out_where_others_were_in_a_stream(
    files: tuple[list[Path], list[Path]], tmp_path: Path, bench: type[StreamedBench]
) -> None:
    folder = collection(tmp_path, *files, levels=[0.0], bench=bench)
    data = load([folder])
    left_out = {name for name, kernel in data.kernels.items() if kernel.node_op == "GlobalAveragePool"}
    assert left_out and set(data.kernel_ids()) == set(data.kernels) - left_out == set(data.host_ms)
    assert data.models() == sorted(path.stem for path in files[0])
    with few_tries():
        predictor = learn(data)
    assert not left_out & predictor.known_ms.keys()
    for graph in data.graphs.values():
        found = predictor.predict(graph)
        guessed = {kernel.op for kernel in found.per_kernel if kernel.source == ROOFLINE}
        assert guessed == {"GlobalAveragePool"} and 0.0 < found.coverage < 1.0
        assert found.interval[0] <= found.mean_ms <= found.interval[1]


def test_where_no_kernel_was_in_a_stream_nothing_changes(made_up: MadeUp) -> None:
    assert made_up.data.host_ms == {} and made_up.data.nothing == frozenset()
    assert made_up.data.working_ids() == made_up.data.kernel_ids()
    assert usual_mode(made_up.data) == SUM and made_up.predictor.composition.mode == SUM
    assert made_up.predictor.issue is None


def test_a_collection_in_a_stream_and_one_without_leave_the_kernels_of_the_stream(
    files: tuple[list[Path], list[Path]], queued: MadeUp, tmp_path: Path
) -> None:
    models, kernels = files
    plain = collection(tmp_path, models, kernels, levels=[0.0])
    both = load([queued.rest, plain])
    assert {name: both.rest_ms[name] for name in both.kernel_ids()} == {
        name: queued.data.rest_ms[name] for name in queued.data.kernel_ids()
    }
    assert both.host_ms == queued.data.host_ms


# Learning and predicting.


def test_a_queue_is_learned_by_default_and_a_sum_where_asked_for(queued: MadeUp) -> None:
    assert usual_mode(queued.data) == QUEUE
    assert queued.predictor.composition.mode == QUEUE
    assert queued.predictor.predict(queued.graphs[0]).mode == QUEUE
    with few_tries():
        for mode in (SUM, CRITICAL_PATH):
            other = learn(queued.data, mode=mode)
            assert other.composition.mode == mode
            assert other.predict(queued.graphs[0]).mode == mode
            assert other.composition.call_ms == 0.0


def test_a_queue_without_streams_is_refused_with_what_to_do(made_up: MadeUp) -> None:
    with pytest.raises(InputError, match=r"measured in a stream.*collect with `copies` on a GPU"):
        train([made_up.rest, made_up.load], mode=QUEUE)
    with pytest.raises(InputError, match="kernels have no latency"):
        learn(made_up.data, mode=QUEUE)


def test_networks_that_were_held_out_are_predicted_within_a_few_percent(queued: MadeUp) -> None:
    quality = queued.predictor.quality
    data = queued.data
    assert quality["models"]["rest"]["count"] == len(data.models()) == 8
    assert quality["models"]["rest"]["mape"] < 0.04
    assert quality["models"]["rest"]["within_10"] == 1.0
    assert quality["models"]["loaded"]["mape"] < 0.06 < quality["models"]["loaded_blind"]["mape"]
    working = len(data.working_ids())
    assert all(splits["by_kernel"]["count"] == working for splits in quality["kernels"].values())
    assert quality["counts"]["kernels"] == len(data.kernel_ids()) > working
    assert queued.predictor.kernel_interval.samples == working
    # As sums of the device's times they are far off: some of them wait for the host.
    with few_tries():
        held = validate.without_each(data, RATIO)
        summed = validate.without_each(data, RATIO, mode=SUM)
    queue, plain = (validate.scores(validate.at_rest(data, one))["mape"] for one in (held, summed))
    assert queue < 0.04 and queue < 0.5 * plain


def test_nothing_that_is_judged_was_learned_from_not_even_by_the_host(queued: MadeUp) -> None:
    data = queued.data
    models, own = validate.cases(data, "net1"), validate.own_kernels(data, "net1")
    assert own and any(data.kernels[name].node_op not in VIEWS for name in own)

    def spoiled(items: set[str]) -> Dataset:
        return replace(
            data,
            rest_ms={name: ms * (7.0 if name in items else 1.0) for name, ms in data.rest_ms.items()},
            host_ms={name: ms * (7.0 if name in items else 1.0) for name, ms in data.host_ms.items()},
            loaded=tuple(replace(one, ratios=()) for one in data.loaded if one.item not in items),
        )

    with few_tries():
        before, after = (
            validate.without_each(spoiled(items), RATIO) for items in (set[str](), {*models, *own})
        )
    for name in models:
        assert after["net1"].predict(data.graphs[name]) == before["net1"].predict(data.graphs[name])
    issue = before["net1"].issue
    assert issue is not None and set(issue.known_ms) == set(data.host_ms) - own
    assert set(before["net1"].known_ms) == set(data.working_ids()) - own
    other = data.graphs[validate.cases(data, "net0")[0]]
    assert after["net0"].predict(other).mean_ms != before["net0"].predict(other).mean_ms


@pytest.mark.parametrize("kind", ["ratio", "xgboost", "random_forest"])
def test_kernels_are_judged_without_views(queued: MadeUp, kind: str) -> None:
    data = queued.data
    for judge in (validate.kernels_by_kernel, validate.kernels_leaky):
        judged = judge(data, kind)
        assert {one.name for one in judged} == set(data.working_ids())
        assert all(one.predicted_ms > 0.0 and one.measured_ms > 0.0 for one in judged)
    judged = validate.kernels_by_network(data, kind)
    assert judged and {one.name for one in judged} <= set(data.working_ids())


def test_a_network_without_which_only_views_are_left_does_not_keep_others_from_being_learned(
    tmp_path: Path,
) -> None:
    models, kernels = [], []
    for size in (8, 10, 12, 16):
        models.append(save(convnet(width=4, size=size), tmp_path / "models", f"net_b1_{size}.onnx"))
        kernels.append(tmp_path / "graphs" / models[-1].stem)
        extract(models[-1], kernels[-1], check=False, threads=1)
        # Its other kernels were not measured.
        twin = model(
            [
                helper.make_node("Erf", ["x"], ["e"]),
                helper.make_node("Flatten", ["e"], ["f"], axis=1),
                helper.make_node("Softmax", ["f"], ["y"]),
            ],
            [("x", FLOAT, [1, 4, 1, 1])],
            [("y", FLOAT, None)],
        )
        models.append(save(twin, tmp_path / "models", f"other_b1_{size}.onnx"))
    folder = collection(tmp_path, models, kernels, levels=[0.0], rounds=1, bench=StreamedBench)
    data = load([folder])
    left = set(data.kernel_ids()) - validate.own_kernels(data, "net")
    assert left and {data.kernels[name].node_op for name in left} <= VIEWS
    with few_tries():
        quality = train([folder], kind=RATIO).quality
    assert quality["counts"]["networks"] == 2 and quality["models"]["rest"]["count"] == 4


@cache
def of_views() -> Any:
    """A network that was not measured, of operators that were, with views that were not between them."""
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    return model(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], **pads),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("GlobalAveragePool", ["b"], ["c"]),
            helper.make_node("Reshape", ["c", "to"], ["d"]),
            helper.make_node("Gemm", ["d", "v", "u"], ["y"], transB=1),
        ],
        [("x", FLOAT, [1, 6, 10, 10])],
        [("y", FLOAT, None)],
        {
            "w": values(6, 6, 3, 3),
            "v": values(5, 3, seed=1),
            "u": values(5, seed=2),
            "to": np.array([2, 3], np.int64),
        },
    )


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return analyze(save(of_views(), tmp_path_factory.mktemp("unseen")))


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Two operators that were measured for nothing."""
    built = model(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Erf", ["b"], ["c"]),
            helper.make_node("Softmax", ["c"], ["y"]),
        ],
        [("x", FLOAT, [1, 8, 16, 16])],
        [("y", FLOAT, None)],
        {"w": values(8, 8, 3, 3)},
    )
    return analyze(save(built, tmp_path_factory.mktemp("unmeasured")))


def test_a_view_that_was_never_measured_is_nothing_to_the_device_and_known_to_be(
    queued: MadeUp, unseen: Graph
) -> None:
    views = [node for node in unseen.nodes if node.kernel.node_op in VIEWS]
    assert views and not {node.kernel.node_op for node in views} & {
        kernel.node_op for kernel in queued.data.kernels.values()
    }
    for load_of in (None, {"others": 0.6}):
        found = queued.predictor.predict(unseen, load_of)
        sources = {kernel.kernel_id: kernel.source for kernel in found.per_kernel}
        assert {sources[node.kernel_id] for node in views} == {MEASURED}
        assert set(sources.values()) == {MEASURED, LEARNED} and found.coverage == 1.0
    kernels = {node.kernel_id: node.kernel for node in views}
    for entry in queued.predictor.kernels_ms(kernels).values():
        assert entry == (0.0, 0.0, 0.0, MEASURED)
    assert queued.predictor.predict(unseen).mean_ms == pytest.approx(queued_ms(unseen), rel=0.15)


def test_call_and_kernels_add_up_and_the_interval_holds_the_mean(
    queued: MadeUp, unseen: Graph, unmeasured: Graph
) -> None:
    graphs = [*queued.graphs, unseen, unmeasured]

    @settings(max_examples=30, deadline=None)
    @given(load=st.floats(0.0, 1.0), number=st.integers(0, len(graphs) - 1))
    def holds(load: float, number: int) -> None:
        found = queued.predictor.predict(graphs[number], {"others": load})
        kernels = found.per_kernel
        assert found.call_ms == queued.predictor.composition.call_ms > 0.0
        assert found.call_ms + sum(k.count * k.rest_ms for k in kernels) == pytest.approx(found.rest_ms)
        assert found.call_ms + sum(k.count * k.mean_ms for k in kernels) == pytest.approx(found.mean_ms)
        assert sum(k.count for k in kernels) == len(graphs[number].nodes)
        assert 0.0 < found.interval[0] <= found.mean_ms <= found.interval[1]
        assert 0.0 < found.p50_ms <= found.p95_ms and 0.0 < found.coverage <= 1.0 + 1e-9
        assert found.slowdown >= 1.0 - 1e-9
        for k in kernels:
            assert 0.0 <= k.low_ms <= k.rest_ms * (1 + 1e-9) and k.rest_ms <= k.high_ms * (1 + 1e-9)
            assert k.rest_ms <= k.mean_ms * (1 + 1e-9)
        json.dumps(found.to_dict(), allow_nan=False)

    holds()


def test_an_operator_that_was_never_measured_takes_the_host_what_is_usual(
    queued: MadeUp, unmeasured: Graph
) -> None:
    issue = queued.predictor.issue
    assert issue is not None
    host = issue.ms(unmeasured.kernels)
    of_op = {kernel.node_op: host[kernel.id] for kernel in unmeasured.kernels}
    assert of_op["Erf"] == of_op["Softmax"] == issue.usual_ms
    found = queued.predictor.predict(unmeasured)
    sources = {kernel.op: kernel.source for kernel in found.per_kernel}
    assert sources["Erf"] == sources["Softmax"] == ROOFLINE and 0.0 < found.coverage < 1.0


def test_load_slows_a_queue_down_by_what_was_learned(queued: MadeUp) -> None:
    for graph in queued.graphs:
        for level in (0.4, 0.8):
            found = queued.predictor.predict(graph, {"others": level})
            assert found.mean_ms == pytest.approx(queued_ms(graph) * slowdown(level), rel=0.1)


def test_a_predictor_of_a_queue_that_was_saved_says_the_same(
    queued: MadeUp, unseen: Graph, unmeasured: Graph, tmp_path: Path
) -> None:
    path = queued.predictor.save(tmp_path / "predictor.json")
    back = Predictor.load(path)
    assert isinstance(back.issue, Issue) and back.composition == queued.predictor.composition
    for graph in (*queued.graphs, unseen, unmeasured):
        for load_of in (None, {"others": 0.3}, {"others": 1.0}):
            assert back.predict(graph, load_of) == queued.predictor.predict(graph, load_of)
    assert back.model.nothing == VIEWS
    assert path.read_bytes() == back.save(tmp_path / "again.json").read_bytes()
    with few_tries():
        again = learn(queued.data, queued.predictor.model.kind)
    assert again.composition == queued.predictor.composition
    assert asdict(again.sharing) == asdict(queued.predictor.sharing)


@pytest.fixture(scope="module")
def record(queued: MadeUp, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = queued.predictor.save(tmp_path_factory.mktemp("file") / "predictor.json")
    return json.loads(path.read_text())


def reloaded(record: dict[str, Any], folder: Path) -> Predictor:
    path = folder / "predictor.json"
    path.write_text(json.dumps(record))
    return Predictor.load(path)


@pytest.mark.parametrize("wrong", [[], "text", 3.0, {}, {"known_ms": {}}])
def test_a_predictor_whose_times_of_the_host_are_damaged_is_refused(
    record: dict[str, Any], tmp_path: Path, wrong: Any
) -> None:
    with pytest.raises(FileFormatError):
        reloaded(record | {"issue": wrong}, tmp_path)
    less = {name: part for name, part in record.items() if name != "issue"}
    with pytest.raises(FileFormatError, match=r"predictor\.json is a damaged predictor"):
        reloaded(less, tmp_path)
    for name in record["issue"]:
        part = {key: value for key, value in record["issue"].items() if key != name}
        with pytest.raises(FileFormatError, match="cannot be read"):
            reloaded(record | {"issue": part}, tmp_path)


def test_a_predictor_of_a_queue_that_lost_the_times_of_the_host_is_refused(
    record: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FileFormatError):
        reloaded(record | {"issue": None}, tmp_path)


def check_sense(damaged: dict[str, Any], graphs: list[Graph], folder: Path) -> None:
    """See that a record is refused, or what it predicts could be so."""
    for graph in graphs:
        try:
            found = reloaded(damaged, folder).predict(graph, {"others": 0.5})
        except SparseFlowError:
            continue
        assert math.isfinite(found.mean_ms) and found.mean_ms > 0.0
        assert found.interval[0] <= found.mean_ms <= found.interval[1]


@pytest.mark.parametrize("wrong", [None, "text", [], -1.0, 0.0, math.nan])
@pytest.mark.parametrize(
    "name", ["per_kernel_ms", "per_weight_ms", "per_flow_ms", "issue_scale", "per_issue_ms", "models"]
)
def test_a_queue_with_a_wrong_cost_is_refused_or_still_makes_sense(
    queued: MadeUp, record: dict[str, Any], tmp_path: Path, name: str, wrong: Any
) -> None:
    damaged = record | {"composition": record["composition"] | {name: wrong}}
    check_sense(damaged, queued.graphs, tmp_path)


@pytest.mark.parametrize("wrong", [None, "text", [], 0.0, math.nan])
def test_a_queue_with_a_wrong_cost_of_the_call_is_refused_or_still_makes_sense(
    queued: MadeUp, record: dict[str, Any], tmp_path: Path, wrong: Any
) -> None:
    damaged = record | {"composition": record["composition"] | {"call_ms": wrong}}
    check_sense(damaged, queued.graphs, tmp_path)


def test_a_queue_whose_call_costs_less_than_nothing_is_refused(
    queued: MadeUp, record: dict[str, Any], tmp_path: Path
) -> None:
    damaged = record | {"composition": record["composition"] | {"call_ms": -1.0}}
    check_sense(damaged, queued.graphs, tmp_path)
