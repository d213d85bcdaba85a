"""Composition of kernels to a graph: sums, longest paths, queues and costs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure.overlap import CRITICAL_PATH, SUM
from sparseflow.latency.model import composition as composition_module
from sparseflow.latency.model.composition import (
    MIN_SHARE,
    QUEUE,
    VIEW_OPS,
    CompositionModel,
    find_critical_path,
    list_counted_kernels,
)
from tests.latency.records import from_record, to_record
from tests.latency.synthetic import compute_end_ms, device_ms, make_graph, make_kernel, make_matmul

MEBIBYTE = 1 << 20
SMALL, MIDDLE, LARGE = (make_matmul(4, n, 4) for n in (1, 2, 3))
MS = {SMALL.id: 1.0, MIDDLE.id: 2.0, LARGE.id: 10.0}
VIEW = make_kernel("Reshape", [(4, 4), (1,)], (16,))
DIAMOND = make_graph(
    {
        "begin": (SMALL, []),
        "short": (MIDDLE, ["begin"]),
        "long": (LARGE, ["begin"]),
        "aside": (MIDDLE, []),
        "end": (SMALL, ["short", "long", "aside"]),
    }
)


def composition(**changes: Any) -> CompositionModel:
    costs: dict[str, Any] = {
        "mode": SUM, "per_kernel_ms": 0.0, "per_view_ms": 0.0, "per_weight_ms": 0.0, "per_activation_ms": 0.0,
        "cache": 0.0, "issue_scale": 1.0, "per_issue_ms": 0.0, "call_ms": 0.0, "models": 1,
    }  # fmt: skip
    return CompositionModel(**(costs | changes))


def chain(kernels: list[KernelSpec]) -> Graph:
    """Build a graph of consecutive kernels."""
    names = [str(number) for number in range(len(kernels))]
    edges = zip(names, kernels, [[], *([name] for name in names)], strict=False)
    return make_graph({name: (kernel, before) for name, kernel, before in edges})


def test_compose_sum_and_critical_path() -> None:
    added = composition().compose(DIAMOND, MS)
    assert {name: part.count for name, part in added.parts.items()} == {
        SMALL.id: 2,
        MIDDLE.id: 2,
        LARGE.id: 1,
    }
    longest = composition(mode=CRITICAL_PATH).compose(DIAMOND, MS)
    assert {name: part.count for name, part in longest.parts.items()} == {SMALL.id: 2, LARGE.id: 1}
    assert find_critical_path(DIAMOND, MS) == ["begin", "long", "end"]
    assert find_critical_path(DIAMOND, MS | {MIDDLE.id: 30.0}) == ["begin", "short", "end"]
    assert find_critical_path(make_graph({}), {}) == []


@st.composite
def graphs(draw: Any) -> Graph:
    nodes: dict[str, tuple[KernelSpec, list[str]]] = {}
    for number in range(draw(st.integers(1, 7))):
        before = draw(st.lists(st.sampled_from(sorted(nodes)), unique=True)) if nodes else []
        nodes[f"n{number}"] = (draw(st.sampled_from([SMALL, MIDDLE, LARGE])), before)
    return make_graph(nodes)


@given(graphs(), st.tuples(*[st.floats(0.0, 9.0)] * 3))
def test_critical_path_is_longest(graph: Graph, latencies_ms: tuple[float, float, float]) -> None:
    ms = dict(zip(MS, latencies_ms, strict=True))
    path = find_critical_path(graph, ms)
    nodes = {node.name: node for node in graph.nodes}
    assert all(first in nodes[second].inputs for first, second in itertools.pairwise(path))
    length = sum(ms[nodes[name].kernel_id] for name in path)
    longest: dict[str, float] = {}
    for node in graph.nodes:
        longest[node.name] = ms[node.kernel_id] + max([longest[name] for name in node.inputs], default=0.0)
    assert length == pytest.approx(max(longest.values()))
    assert [k.id for k in list_counted_kernels(graph, ms, SUM)] == [node.kernel_id for node in graph.nodes]


def networks(true: CompositionModel, count: int = 12) -> tuple[list[Graph], dict[str, float], list[float]]:
    """Build chains of random kernels and views that follow a rule: (graphs, isolated, measured)."""
    generator = random.Random(0)
    built, isolated_ms, measured = [], {}, []
    for _ in range(count):
        kernels = [
            make_matmul(*(generator.randint(1, 600) for _ in range(3)))
            for _ in range(generator.randint(2, 30))
        ]
        kernels += [VIEW] * generator.randint(0, 6)
        built.append(chain(kernels))
        isolated_ms |= {kernel.id: 0.5 + kernel.flops / 1e8 for kernel in kernels}
        inside_ms = [true.predict_kernel_ms(kernel, isolated_ms[kernel.id]) for kernel in kernels]
        measured.append(true.call_ms + sum(inside_ms))
    return built, isolated_ms, measured


@pytest.mark.parametrize("mode", [SUM, CRITICAL_PATH])
@pytest.mark.parametrize("per_kernel", [-0.2, 0.3])
def test_fit_recovers_costs(mode: str, per_kernel: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition_module, "_REGULARIZATION", 1e-3)
    true = composition(
        mode=mode, per_kernel_ms=per_kernel, per_view_ms=0.05, per_weight_ms=0.4, per_activation_ms=0.1,
        call_ms=max(-per_kernel, 0.0),
    )  # fmt: skip
    graphs, isolated_ms, measured = networks(true)
    fitted = to_record(CompositionModel.fit(graphs, isolated_ms, measured, mode))
    assert (fitted.pop("models"), fitted.pop("mode")) == (12, mode)
    assert fitted == pytest.approx({name: to_record(true)[name] for name in fitted}, rel=0.01)


def test_fit_few_models_is_regularized() -> None:
    true = composition(per_kernel_ms=-0.2, per_view_ms=0.05, per_weight_ms=0.4, per_activation_ms=0.1)
    graphs, isolated_ms, measured = networks(true)
    few_models = CompositionModel.fit(graphs[:3], isolated_ms, measured[:3])
    many_models = CompositionModel.fit(100 * graphs[:3], isolated_ms, 100 * measured[:3])
    assert abs(few_models.per_kernel_ms) < abs(many_models.per_kernel_ms)


@pytest.mark.parametrize("disturbance", [0.5, 3.0])
def test_fit_kernel_cost_at_most_one_launch(disturbance: float) -> None:
    # Latencies of a busy machine would give any cost.
    graphs, isolated_ms, measured = networks(composition())
    fitted = CompositionModel.fit(graphs, isolated_ms, [disturbance * ms for ms in measured])
    assert abs(fitted.per_kernel_ms) <= min(isolated_ms.values()) + 1e-12


def test_fit_byte_costs_non_negative() -> None:
    fitted = CompositionModel.fit(
        *networks(composition(per_weight_ms=-0.05, per_activation_ms=-0.05, per_view_ms=-0.1))
    )
    assert min(fitted.per_weight_ms, fitted.per_activation_ms, fitted.per_view_ms) >= 0.0


def test_fit_without_models_has_no_costs() -> None:
    fitted = CompositionModel.fit([], {}, [])
    assert fitted.models == 0
    assert [fitted.predict_kernel_ms(kernel, 3.0) for kernel in (SMALL, VIEW)] == [3.0, 3.0]


def test_view_cost_is_bounded() -> None:
    model = composition(per_view_ms=0.1, per_kernel_ms=5.0)
    assert [model.predict_kernel_ms(VIEW, ms) for ms in (9.0, 2.0, 0.04)] == [0.1, 0.1, 0.04]


@given(
    st.floats(-2.0, 2.0), st.floats(0.0, 1.0), st.floats(1e-3, 10.0), st.sampled_from([SMALL, VIEW]),
    st.integers(0, 2),
)  # fmt: skip
def test_kernel_latency_positive(
    per_kernel: float, per_view: float, isolated_ms: float, kernel: KernelSpec, models: int
) -> None:
    model = composition(per_kernel_ms=per_kernel, per_view_ms=per_view, models=models)
    assert model.predict_kernel_ms(kernel, isolated_ms) > 0.0


def test_kernel_latency_minimum_share() -> None:
    model = composition(per_kernel_ms=-1.0)
    assert model.predict_kernel_ms(SMALL, 3.0) == pytest.approx(2.0)
    assert model.predict_kernel_ms(SMALL, 1.0) == MIN_SHARE


def test_byte_costs_proportional_to_size() -> None:
    # 1 MiB of weights, 0.5 MiB of inputs and 0.5 MiB of outputs.
    kernel = make_kernel("MatMul", [(256, 512), (512, 512)], (256, 512), constants=(1,))
    assert composition(per_weight_ms=2.0).predict_kernel_ms(kernel, 1.0) == pytest.approx(3.0)
    assert composition(per_activation_ms=2.0).predict_kernel_ms(kernel, 1.0) == pytest.approx(3.0)
    assert kernel.constant_bytes == MEBIBYTE


def test_weights_cost_if_the_graph_evicts_them() -> None:
    model = composition(per_weight_ms=2.0, cache=2.0)
    kernel = make_kernel("MatMul", [(256, 512), (512, 512)], (256, 512), constants=(1,))  # 1 MiB of weights
    costs = [model.predict_kernel_ms(kernel, 1.0, weights) - 1.0 for weights in (1.0, 2.0, 5.0, 8.0, 99.0)]
    assert costs == pytest.approx([0.0, 0.0, 1.0, 2.0, 2.0])
    # Half of 5 MiB are not in the cache if the kernel runs alone, either.
    large = make_kernel("MatMul", [(256, 1024), (1024, 1280)], (256, 1280), constants=(1,))
    assert model.predict_kernel_ms(large, 1.0, 99.0) == pytest.approx(1.0 + 2.0 * 5.0 / 2.0)
    graph = chain([kernel] * 8)
    assert model.compose(graph, {kernel.id: 1.0}).total_ms == pytest.approx(8 * 3.0)


def test_fit_finds_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition_module, "_REGULARIZATION", 1e-3)
    true = composition(per_weight_ms=0.5, cache=2.0)
    kernels = [
        make_kernel("MatMul", [(8, 512), (512, width)], (8, width), constants=(1,))
        for width in (128, 256, 512, 1024, 2048)
    ]
    graphs = [chain([kernel] * count) for kernel in kernels for count in (1, 2, 4, 8, 16)]
    isolated_ms = {kernel.id: 1.0 + kernel.flops / 1e7 for kernel in kernels}
    measured = [true.compose(graph, isolated_ms).total_ms for graph in graphs]
    fitted = CompositionModel.fit(graphs, isolated_ms, measured)
    assert fitted.cache == 2.0
    assert fitted.per_weight_ms == pytest.approx(0.5, rel=0.01)


def test_lookup_reads_few_weights() -> None:
    table = make_kernel("Gather", [(30_000, 256), (1, 16)], (1, 16, 256), constants=(0,))
    assert table.constant_bytes > table.bytes_moved
    predicted_ms = composition(per_weight_ms=2.0).predict_kernel_ms(table, 1.0)
    assert predicted_ms == pytest.approx(1.0 + 2.0 * table.bytes_moved / MEBIBYTE)


@pytest.mark.parametrize(
    ("isolated_ms", "measured", "value"),
    [
        (MS, [], "1 .* 0 "),
        ({SMALL.id: 1.0}, [3.0], f"2 .*{min(MIDDLE.id, LARGE.id)}"),
    ],
)
def test_fit_incomplete_data_raises(isolated_ms: dict[str, float], measured: list[float], value: str) -> None:
    with pytest.raises(InputError, match=value):
        CompositionModel.fit([DIAMOND], isolated_ms, measured)


def test_composition_round_trip() -> None:
    model = composition(per_kernel_ms=-0.25, per_view_ms=0.1, mode=CRITICAL_PATH)
    assert from_record(CompositionModel, to_record(model)) == model


@pytest.mark.parametrize(
    "record",
    [
        to_record(composition()) | {"mode": "product"},
        to_record(composition()) | {"surprise": 1},
        to_record(composition()) | {"per_kernel_ms": "little"},
        to_record(composition()) | {"per_activation_ms": None},
        to_record(composition()) | {"per_view_ms": float("nan")},
        {"mode": SUM},
        [],
        None,
    ],
)
def test_composition_damaged_record_raises(record: Any) -> None:
    with pytest.raises(ValueError):
        from_record(CompositionModel, record)


# A queue of host and device.

KERNELS = (SMALL, MIDDLE, LARGE, VIEW)
MIXED = {"call_ms": 0.05, "issue_scale": 1.3, "per_issue_ms": 0.002, "per_kernel_ms": 0.003}


def queue_model(**changes: Any) -> CompositionModel:
    """Return a queue without costs except `changes`."""
    return composition(mode=QUEUE, **changes)


TIMES = st.tuples(*[st.floats(0.0, 5.0)] * len(KERNELS))
CHAINS = st.lists(st.sampled_from(KERNELS), min_size=1, max_size=12).map(chain)
COSTS = st.fixed_dictionaries(
    {
        "per_kernel_ms": st.floats(-1.0, 1.0),
        "per_view_ms": st.floats(0.0, 1.0),
        "per_weight_ms": st.floats(0.0, 1.0),
        "per_activation_ms": st.floats(0.0, 1.0),
        "issue_scale": st.floats(0.0, 3.0),
        "per_issue_ms": st.floats(-1.0, 1.0),
        "call_ms": st.floats(0.0, 1.0),
    }
)


def by_id(times_ms: tuple[float, ...]) -> dict[str, float]:
    return {kernel.id: ms for kernel, ms in zip(KERNELS, times_ms, strict=True)}


@given(CHAINS, TIMES, TIMES, COSTS)
def test_compose_queue_matches_simulation(
    graph: Graph, device: tuple[float, ...], host: tuple[float, ...], costs: dict[str, float]
) -> None:
    composed_model, issued, works = queue_model(**costs), by_id(host), by_id(device)
    composed = composed_model.compose(graph, works, issued)
    hosts = [
        max(composed_model.issue_scale * ms + composed_model.per_issue_ms, MIN_SHARE * ms)
        for ms in (issued[node.kernel_id] for node in graph.nodes)
    ]
    inside = [composed_model.predict_kernel_ms(node.kernel, works[node.kernel_id]) for node in graph.nodes]
    assert composed.call_ms == composed_model.call_ms
    assert composed.total_ms == pytest.approx(
        composed_model.call_ms + compute_end_ms(hosts, inside), abs=1e-9
    )
    # The contributions sum to the total, and every node counts once.
    assert composed.total_ms == pytest.approx(
        composed.call_ms + sum(part.count * part.ms for part in composed.parts.values()), abs=1e-9
    )
    ids = [node.kernel_id for node in graph.nodes]
    assert {name: part.count for name, part in composed.parts.items()} == {n: ids.count(n) for n in set(ids)}
    assert all(part.ms >= 0.0 for part in composed.parts.values())
    assert max(sum(hosts), sum(inside)) <= (composed.total_ms - composed_model.call_ms) * (1.0 + 1e-9) + 1e-9
    assert composed.total_ms - composed_model.call_ms <= sum(hosts) + sum(inside) + 1e-9


@given(CHAINS, TIMES, TIMES, st.sampled_from(KERNELS), st.floats(0.0, 5.0), st.booleans())
def test_compose_queue_monotone(
    graph: Graph,
    device: tuple[float, ...],
    host: tuple[float, ...],
    slower: KernelSpec,
    more: float,
    on_host: bool,
) -> None:
    issued, works = by_id(host), by_id(device)
    before = queue_model().compose(graph, works, issued).total_ms
    (issued if on_host else works)[slower.id] += more
    after = queue_model().compose(graph, works, issued).total_ms
    count = sum(node.kernel_id == slower.id for node in graph.nodes)
    assert before <= after + 1e-9 and after <= before + count * more + 1e-9


def test_compose_queue_bottleneck_hides_other() -> None:
    graph = chain([SMALL, MIDDLE, LARGE, MIDDLE])
    much, little = ({kernel.id: ms for kernel in KERNELS} for ms in (3.0, 0.1))
    by_device = queue_model(call_ms=0.5).compose(graph, much, little)
    assert by_device.total_ms == pytest.approx(0.5 + 0.1 + 4 * 3.0)
    # Only the first issue is on the critical path.
    assert {name: part.ms for name, part in by_device.parts.items()} == pytest.approx(
        {SMALL.id: 3.1, MIDDLE.id: 3.0, LARGE.id: 3.0}
    )
    by_host = queue_model(call_ms=0.5).compose(graph, little, much)
    assert by_host.total_ms == pytest.approx(0.5 + 4 * 3.0 + 0.1)
    assert by_host.parts[MIDDLE.id].count == 2 and by_host.parts[MIDDLE.id].ms == pytest.approx(3.05)
    # The hidden times may double.
    doubled = {name: 2.0 * ms for name, ms in little.items()}
    assert queue_model().compose(graph, much, doubled).total_ms == pytest.approx(0.2 + 4 * 3.0)
    assert queue_model().compose(graph, doubled, much).total_ms == pytest.approx(4 * 3.0 + 0.2)


def test_compose_queue_hides_small_kernels_after_large() -> None:
    device = {SMALL.id: 0.1, LARGE.id: 10.0}
    host = {SMALL.id: 1.0, LARGE.id: 1.0}
    first = queue_model().compose(chain([LARGE, *[SMALL] * 5]), device, host)
    last = queue_model().compose(chain([*[SMALL] * 5, LARGE]), device, host)
    assert first.total_ms == pytest.approx(1.0 + 10.0 + 5 * 0.1)
    assert last.total_ms == pytest.approx(6 * 1.0 + 10.0)


def test_compose_queue_views_have_host_time_only() -> None:
    composed_model = queue_model(per_kernel_ms=0.5, per_view_ms=0.7, per_weight_ms=0.1, per_activation_ms=0.1)
    kernels = {op: make_kernel(op, [(4, 4)], (4, 4)) for op in sorted(VIEW_OPS)}
    assert [composed_model.predict_kernel_ms(kernel, 3.0) for kernel in kernels.values()] == [0.0] * len(
        VIEW_OPS
    )
    assert replace(composed_model, models=0).predict_kernel_ms(VIEW, 3.0) == 0.0
    host = {kernel.id: 0.25 for kernel in (*KERNELS, *kernels.values())}
    device = {name: 2.0 for name in host}
    views = queue_model().compose(chain(list(kernels.values())), device, host)
    assert views.total_ms == pytest.approx(0.25 * len(VIEW_OPS))
    # They are hidden behind a kernel with a long device time.
    hidden = queue_model().compose(chain([LARGE, VIEW, VIEW]), device, host)
    assert hidden.total_ms == pytest.approx(0.25 + 2.0) and hidden.parts[VIEW.id].ms == 0.0
    assert hidden.parts[VIEW.id].count == 2
    before = queue_model().compose(chain([VIEW, VIEW, LARGE]), device, host)
    assert before.total_ms == pytest.approx(3 * 0.25 + 2.0)


@pytest.mark.parametrize("mode", [SUM, CRITICAL_PATH, QUEUE])
def test_compose_empty_graph_is_call(mode: str) -> None:
    composed = composition(mode=mode, call_ms=0.25).compose(make_graph({}), {}, {})
    assert (composed.total_ms, composed.call_ms, composed.parts) == (0.25, 0.25, {})


def test_compose_sum_ignores_host() -> None:
    graph, device = chain([SMALL, LARGE, SMALL]), by_id((1.0, 2.0, 3.0, 4.0))
    composed_model = composition(mode=SUM)
    assert composed_model.compose(
        graph, device, {kernel.id: 50.0 for kernel in KERNELS}
    ) == composed_model.compose(graph, device)


def test_compose_queue_host_minimum_share() -> None:
    graph = chain([SMALL, SMALL])
    composed = queue_model(per_issue_ms=-9.0).compose(graph, {SMALL.id: 0.0}, {SMALL.id: 2.0})
    assert composed.total_ms == pytest.approx(2 * MIN_SHARE * 2.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Graphs with known latencies."""

    graphs: list[Graph]
    device: dict[str, float]
    host: dict[str, float]
    total: list[float]

    def error(self, fitted_model: CompositionModel) -> float:
        """Return the mean relative error of a composition."""
        totals_ms = [fitted_model.compose(graph, self.device, self.host).total_ms for graph in self.graphs]
        return statistics.fmean(abs(ms / true - 1.0) for ms, true in zip(totals_ms, self.total, strict=True))


def measured(true: CompositionModel, count: int, seed: int = 0) -> Measured:
    """Build chains of random kernels and views, bound by the host or by the device."""
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
        works = [true.predict_kernel_ms(kernel, device[kernel.id]) for kernel in kernels]
        total.append(true.call_ms + compute_end_ms(issued, works))
    return Measured(graphs=graphs, device=device, host=host, total=total)


def fitted(data: Measured, count: int | None = None) -> CompositionModel:
    return CompositionModel.fit(data.graphs[:count], data.device, data.total[:count], QUEUE, data.host)


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
def test_fit_queue_recovers_costs(costs: dict[str, float]) -> None:
    true = queue_model(**costs)
    learned = fitted(measured(true, 60))
    held_out = measured(true, 30, seed=1)
    assert (learned.mode, learned.models, learned.per_view_ms) == (QUEUE, 60, 0.0)
    assert held_out.error(learned) < 0.005
    if costs:
        assert held_out.error(learned) < 0.1 * held_out.error(queue_model())
    # Scale and cost of a node are correlated: the time of a median node is known better than either.
    for host in (0.008, 0.012, 0.016):
        assert learned.issue_scale * host + learned.per_issue_ms == pytest.approx(
            true.issue_scale * host + true.per_issue_ms, rel=0.05, abs=3e-4
        )
    assert learned.issue_scale == pytest.approx(true.issue_scale, abs=0.1)
    assert learned.per_issue_ms == pytest.approx(true.per_issue_ms, abs=1.5e-3)
    assert learned.per_kernel_ms == pytest.approx(true.per_kernel_ms, abs=5e-4)
    assert learned.per_weight_ms == pytest.approx(true.per_weight_ms, abs=4e-3)
    assert learned.call_ms == pytest.approx(true.call_ms, rel=0.05, abs=1e-3)


def test_fit_queue_few_models_improve() -> None:
    true = queue_model(**MIXED)
    held_out = measured(true, 30, seed=1)
    assert held_out.error(fitted(measured(true, 4))) < 0.3 * held_out.error(queue_model())


def test_fit_queue_robust_to_outlier() -> None:
    true = queue_model(**MIXED)
    data, held_out = measured(true, 30), measured(true, 30, seed=1)
    spoiled = replace(data, total=[5.0 * data.total[0], *data.total[1:]])
    assert held_out.error(fitted(spoiled)) < 0.03


def test_fit_queue_without_models_has_no_costs() -> None:
    learned = CompositionModel.fit([], {}, [], QUEUE)
    assert learned == queue_model(models=0)
    graph = chain([SMALL, VIEW, LARGE])
    assert learned.compose(graph, by_id((1.0, 1.0, 1.0, 9.0)), by_id((0.1, 0.1, 0.1, 0.1))).total_ms == (
        pytest.approx(2.1)
    )


def test_fit_queue_without_host_times_raises() -> None:
    graph = chain([SMALL, LARGE])
    device, host = by_id((1.0,) * 4), {SMALL.id: 0.1, VIEW.id: 0.1}
    with pytest.raises(InputError, match=r"2"):
        CompositionModel.fit([graph], device, [3.0], QUEUE)
    with pytest.raises(InputError, match=rf"1.*{LARGE.id}"):
        CompositionModel.fit([graph], device, [3.0], QUEUE, host)
    with pytest.raises(InputError, match=rf"1.*{LARGE.id}"):
        CompositionModel.fit([graph], host, [3.0], QUEUE, device)
    with pytest.raises(InputError, match=r"1.*0"):
        CompositionModel.fit([graph], device, [], QUEUE, device)
    assert CompositionModel.fit([graph], device, [3.0], SUM).mode == SUM


def test_compose_queue_without_host_times_raises() -> None:
    with pytest.raises(InputError):
        queue_model().compose(chain([SMALL, LARGE]), by_id((1.0,) * 4))


def test_queue_round_trip() -> None:
    composed_model = queue_model(
        issue_scale=1.25, per_issue_ms=-0.5, per_kernel_ms=-0.25, call_ms=0.5, models=7
    )
    assert from_record(CompositionModel, to_record(composed_model)) == composed_model


@pytest.mark.parametrize("name", ["issue_scale", "per_issue_ms", "call_ms", "models"])
@pytest.mark.parametrize("wrong", ["much", None, [], math.nan, math.inf])
def test_queue_damaged_record_raises(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError):
        from_record(CompositionModel, to_record(queue_model()) | {name: wrong})
    less = to_record(queue_model())
    del less[name]
    with pytest.raises(ValueError):
        from_record(CompositionModel, less)
