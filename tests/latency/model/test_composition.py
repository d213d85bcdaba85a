"""Composition of kernels to a graph: sums, longest paths and costs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure.overlap import CRITICAL_PATH, SUM
from sparseflow.latency.model.composition import (
    MIN_SHARE,
    CompositionModel,
    find_critical_path,
    list_counted_kernels,
)
from tests.latency.records import from_record, to_record
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


def composition(**changes: Any) -> CompositionModel:
    costs: dict[str, Any] = {
        "mode": SUM, "per_kernel_ms": 0.0, "per_view_ms": 0.0, "per_weight_ms": 0.0, "per_activation_ms": 0.0,
        "issue_scale": 1.0, "per_issue_ms": 0.0, "call_ms": 0.0, "models": 1,
    }  # fmt: skip
    return CompositionModel(**(costs | changes))


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


@settings(deadline=None)
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
        names = [str(n) for n in range(len(kernels))]
        edges = zip(names, kernels, [[], *([name] for name in names)], strict=False)
        built.append(make_graph({name: (kernel, before) for name, kernel, before in edges}))
        isolated_ms |= {kernel.id: 0.5 + kernel.flops / 1e8 for kernel in kernels}
        measured.append(sum(true.predict_kernel_ms(kernel, isolated_ms[kernel.id]) for kernel in kernels))
    return built, isolated_ms, measured


@pytest.mark.parametrize("mode", [SUM, CRITICAL_PATH])
@pytest.mark.parametrize("per_kernel", [-0.2, 0.3])
def test_fit_recovers_costs(mode: str, per_kernel: float) -> None:
    true = composition(
        mode=mode, per_kernel_ms=per_kernel, per_view_ms=0.05, per_weight_ms=0.4, per_activation_ms=0.1
    )
    graphs, isolated_ms, measured = networks(true)
    # Enough models to make the regularization negligible.
    fitted = to_record(CompositionModel.fit(1000 * list(graphs), isolated_ms, 1000 * list(measured), mode))
    assert (fitted.pop("models"), fitted.pop("mode")) == (12_000, mode)
    assert fitted == pytest.approx({name: to_record(true)[name] for name in fitted}, rel=0.01)


def test_fit_few_models_is_regularized() -> None:
    true = composition(per_kernel_ms=-0.2, per_view_ms=0.05, per_weight_ms=0.4, per_activation_ms=0.1)
    graphs, isolated_ms, measured = networks(true)
    few_models = CompositionModel.fit(graphs[:3], isolated_ms, measured[:3])
    many_models = CompositionModel.fit(1000 * list(graphs[:3]), isolated_ms, 1000 * list(measured[:3]))
    assert abs(few_models.per_kernel_ms) < abs(many_models.per_kernel_ms)


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


@settings(deadline=None)
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
