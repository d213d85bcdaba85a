"""From kernels to a graph: sums, longest paths, and what a kernel costs inside a graph."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("scipy")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.compose import LEAST_SHARE, Composition, counted_nodes, critical_path
from sparseflow.latency.graph import Graph
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.overlap import CRITICAL_PATH, SUM
from tests.latency.synthetic import make_graph, make_kernel, make_matmul

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


def composition(**changes: Any) -> Composition:
    given: dict[str, Any] = {"models": 1}
    return Composition(**(given | changes))


def test_a_sum_counts_every_node_and_a_path_those_on_it() -> None:
    added = composition().compose(DIAMOND, MS)
    assert {name: part.count for name, part in added.parts.items()} == {
        SMALL.id: 2,
        MIDDLE.id: 2,
        LARGE.id: 1,
    }
    longest = composition(mode=CRITICAL_PATH).compose(DIAMOND, MS)
    assert {name: part.count for name, part in longest.parts.items()} == {SMALL.id: 2, LARGE.id: 1}
    assert critical_path(DIAMOND, MS) == ["begin", "long", "end"]
    assert critical_path(DIAMOND, MS | {MIDDLE.id: 30.0}) == ["begin", "short", "end"]
    assert critical_path(make_graph({}), {}) == []


@st.composite
def graphs(draw: Any) -> Graph:
    nodes: dict[str, tuple[Kernel, list[str]]] = {}
    for number in range(draw(st.integers(1, 7))):
        before = draw(st.lists(st.sampled_from(sorted(nodes)), unique=True)) if nodes else []
        nodes[f"n{number}"] = (draw(st.sampled_from([SMALL, MIDDLE, LARGE])), before)
    return make_graph(nodes)


@settings(deadline=None)
@given(graphs(), st.tuples(*[st.floats(0.0, 9.0)] * 3))
def test_no_chain_of_nodes_is_longer_than_the_critical_path(
    graph: Graph, taken: tuple[float, float, float]
) -> None:
    ms = dict(zip(MS, taken, strict=True))
    path = critical_path(graph, ms)
    nodes = {node.name: node for node in graph.nodes}
    assert all(first in nodes[second].inputs for first, second in itertools.pairwise(path))
    length = sum(ms[nodes[name].kernel_id] for name in path)
    longest: dict[str, float] = {}
    for node in graph.nodes:
        longest[node.name] = ms[node.kernel_id] + max([longest[name] for name in node.inputs], default=0.0)
    assert length == pytest.approx(max(longest.values()))
    assert [k.id for k in counted_nodes(graph, ms, SUM)] == [node.kernel_id for node in graph.nodes]


def networks(true: Composition, count: int = 12) -> tuple[list[Graph], dict[str, float], list[float]]:
    """Chains of random kernels and views that follow a known rule; (graphs, alone, measured)."""
    generator = random.Random(0)
    built, alone, measured = [], {}, []
    for _ in range(count):
        kernels = [
            make_matmul(*(generator.randint(1, 600) for _ in range(3)))
            for _ in range(generator.randint(2, 30))
        ]
        kernels += [VIEW] * generator.randint(0, 6)
        names = [str(n) for n in range(len(kernels))]
        edges = zip(names, kernels, [[], *([name] for name in names)], strict=False)
        built.append(make_graph({name: (kernel, before) for name, kernel, before in edges}))
        alone |= {kernel.id: 0.5 + kernel.flops / 1e8 for kernel in kernels}
        measured.append(sum(true.inside_ms(kernel, alone[kernel.id]) for kernel in kernels))
    return built, alone, measured


@pytest.mark.parametrize("mode", [SUM, CRITICAL_PATH])
@pytest.mark.parametrize("per_kernel", [-0.2, 0.3])
def test_costs_are_learned_back_from_models_that_follow_them(mode: str, per_kernel: float) -> None:
    true = composition(
        mode=mode, per_kernel_ms=per_kernel, per_view_ms=0.05, per_weight_ms=0.4, per_flow_ms=0.1
    )
    graphs, alone, measured = networks(true)
    # So many of them that caution has no say.
    found = Composition.fit(1000 * list(graphs), alone, 1000 * list(measured), mode).to_dict()
    assert (found.pop("models"), found.pop("mode")) == (12_000, mode)
    assert found == pytest.approx({name: true.to_dict()[name] for name in found}, rel=0.01)


def test_a_few_models_are_not_explained_by_large_costs_that_cancel() -> None:
    true = composition(per_kernel_ms=-0.2, per_view_ms=0.05, per_weight_ms=0.4, per_flow_ms=0.1)
    graphs, alone, measured = networks(true)
    few = Composition.fit(graphs[:3], alone, measured[:3])
    many = Composition.fit(1000 * list(graphs[:3]), alone, 1000 * list(measured[:3]))
    assert abs(few.per_kernel_ms) < abs(many.per_kernel_ms)


def test_costs_of_bytes_are_never_learned_to_be_negative() -> None:
    found = Composition.fit(*networks(composition(per_weight_ms=-0.05, per_flow_ms=-0.05, per_view_ms=-0.1)))
    assert min(found.per_weight_ms, found.per_flow_ms, found.per_view_ms) >= 0.0


def test_without_models_a_graph_is_its_kernels_alone() -> None:
    found = Composition.fit([], {}, [])
    assert found.models == 0
    assert [found.inside_ms(kernel, 3.0) for kernel in (SMALL, VIEW)] == [3.0, 3.0]


def test_a_view_costs_the_same_whatever_it_takes_alone_but_never_more() -> None:
    one = composition(per_view_ms=0.1, per_kernel_ms=5.0)
    assert [one.inside_ms(VIEW, ms) for ms in (9.0, 2.0, 0.04)] == [0.1, 0.1, 0.04]


@settings(deadline=None)
@given(
    st.floats(-2.0, 2.0), st.floats(0.0, 1.0), st.floats(1e-3, 10.0), st.sampled_from([SMALL, VIEW]),
    st.integers(0, 2),
)  # fmt: skip
def test_nothing_inside_a_graph_is_free(
    per_kernel: float, per_view: float, alone: float, kernel: Kernel, models: int
) -> None:
    one = composition(per_kernel_ms=per_kernel, per_view_ms=per_view, models=models)
    assert one.inside_ms(kernel, alone) > 0.0


def test_a_kernel_keeps_a_least_share_of_what_it_takes_alone() -> None:
    one = composition(per_kernel_ms=-1.0)
    assert one.inside_ms(SMALL, 3.0) == pytest.approx(2.0)
    assert one.inside_ms(SMALL, 1.0) == LEAST_SHARE


def test_weights_and_what_flows_cost_by_their_size() -> None:
    # 1 MiB of weights, half of it of what goes in, and as much of what comes out.
    kernel = make_kernel("MatMul", [(256, 512), (512, 512)], (256, 512), constants=(1,))
    assert composition(per_weight_ms=2.0).inside_ms(kernel, 1.0) == pytest.approx(3.0)
    assert composition(per_flow_ms=2.0).inside_ms(kernel, 1.0) == pytest.approx(3.0)
    assert kernel.constant_bytes == MEBIBYTE


@pytest.mark.parametrize(
    ("alone", "measured", "says"),
    [
        (MS, [], "1 graphs and 0 latencies"),
        ({SMALL.id: 1.0}, [3.0], f"2 kernels have no latency, {min(MIDDLE.id, LARGE.id)} for one"),
    ],
)
def test_what_is_incomplete_is_refused(alone: dict[str, float], measured: list[float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Composition.fit([DIAMOND], alone, measured)


def test_a_record_is_read_back() -> None:
    one = composition(per_kernel_ms=-0.25, per_view_ms=0.1, mode=CRITICAL_PATH)
    assert Composition.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize(
    "record",
    [
        composition().to_dict() | {"mode": "product"},
        composition().to_dict() | {"surprise": 1},
        composition().to_dict() | {"per_kernel_ms": "little"},
        composition().to_dict() | {"per_flow_ms": None},
        composition().to_dict() | {"per_view_ms": float("nan")},
        {"mode": SUM},
        [],
        None,
    ],
)
def test_a_damaged_record_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="composition"):
        Composition.from_dict(record)
