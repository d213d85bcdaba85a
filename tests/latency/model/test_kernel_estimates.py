"""Estimates of kernels with related operators and with subgraphs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.kernels import Body, KernelSpec
from sparseflow.latency.model.kernel_estimates import COMPOSED, WIDENING, KernelIntervals
from sparseflow.latency.model.kernel_regressor import RELATED, ROOFLINE, KernelRegressor
from sparseflow.latency.model.predictor import Predictor
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import looping, save
from tests.latency.synthetic import make_graph, make_kernel, rest_ms

CONV = [(1, 8, 16, 16), (8, 8, 3, 3), (8,)], (1, 8, 14, 14)
GEMM = [(4, 60), (60, 30), (30,)], (4, 30)


def make_if(constants: tuple[int, ...], *bodies: Body) -> KernelSpec:
    condition = make_kernel("If", [()], ())
    return condition.model_copy(
        update={"bodies": bodies, "constants": constants, "flops_known": True, "id": ""}
    )


def make_graph_of(kernel: KernelSpec) -> Graph:
    return make_graph({"node": (KernelSpec.model_validate(kernel.model_dump() | {"id": ""}), ())})


@pytest.mark.parametrize(
    "kernel",
    [
        make_kernel("FusedGemm", *GEMM, constants=(1, 2), domain="com.microsoft", activation="Relu"),
        make_kernel("Gemm", *GEMM, constants=(1, 2), dtype="float64"),
        make_kernel("FusedConv", *CONV, constants=(1, 2), domain="com.microsoft", activation="Tanh"),
    ],
)
def test_related_operator(made_up: MadeUp, kernel: KernelSpec) -> None:
    """The rule of the synthetic device is that of all operators, so the estimate is exact."""
    predictor = made_up.predictor
    estimate = predictor.estimate_kernels([kernel])[kernel.id]
    assert estimate.source == RELATED and estimate.guess_share == 0.0
    assert estimate.ms == pytest.approx(rest_ms(kernel), rel=0.5)
    low, high = predictor.kernel_intervals.rare.bounds(estimate.ms)
    assert estimate.low_ms < low / 2 and estimate.high_ms > 2 * high
    assert predictor.predict(make_graph_of(kernel)).coverage == 1.0


def test_loop_grows_with_its_trips(made_up: MadeUp, tmp_path: Path) -> None:
    def predict(trips: int) -> float:
        graph = analyze(save(looping(trips, width=24), tmp_path, f"{trips}.onnx"))
        prediction = made_up.predictor.predict(graph)
        (kernel,) = prediction.per_kernel
        assert kernel.source == COMPOSED
        assert prediction.interval[0] < prediction.mean_ms < prediction.interval[1] < math.inf
        return prediction.mean_ms

    assert predict(200) - predict(100) == pytest.approx(100 * (predict(101) - predict(100)), rel=1e-3)
    assert predict(0) > 0.0


def test_branches_bound_interval_of_if(made_up: MadeUp) -> None:
    fast, slow = (make_kernel("Conv", [(1, 8, n, n), *CONV[0][1:]], (1, 8, n, n)) for n in (8, 64))
    bodies = (
        Body(name="then_branch", trips=1, kernels=(fast,)),
        Body(name="else_branch", trips=0, kernels=(slow,)),
    )

    def predict(*constants: int) -> tuple[float, float, float]:
        prediction = made_up.predictor.predict(make_graph_of(make_if(constants, *bodies)))
        return prediction.mean_ms, *prediction.interval

    estimates = made_up.predictor.estimate_kernels([fast, slow])
    mean, low, high = predict()
    assert low < mean < 2 * estimates[fast.id].ms and high > estimates[slow.id].ms
    fixed_mean, fixed_low, fixed_high = predict(0)
    assert fixed_mean == mean and fixed_low == low and fixed_high < estimates[slow.id].ms


def test_subgraph_of_unknown_operators_is_guess(made_up: MadeUp) -> None:
    known, unknown = make_kernel("Erf", [(8, 8)], (8, 8)), make_kernel("NeverHeardOf", [(8, 8)], (8, 8))

    def get_sources(predictor: Predictor, inner: KernelSpec) -> tuple[str, bool, str]:
        loop = make_if((0,), Body(name="then_branch", trips=1, kernels=(inner,)))
        prediction = predictor.predict(make_graph_of(loop))
        assert prediction.is_guess and inner.op in prediction.notes[0] and prediction.coverage < 0.95
        return prediction.per_kernel[0].source, math.isinf(prediction.interval[1]), prediction.notes[-1]

    assert get_sources(made_up.predictor, known)[:2] == (COMPOSED, False)
    source, is_unbounded, note = get_sources(made_up.predictor, unknown)
    assert (source, is_unbounded) == (COMPOSED, True) and "NeverHeardOf" in note
    assert made_up.predictor.estimate_kernels([unknown])[unknown.id].source == ROOFLINE


def test_interval_depends_on_measured_kernels() -> None:
    narrow, wide = (ConformalInterval(low=1 / w, high=w, coverage=0.9, samples=9) for w in (1.1, 2.0))
    intervals = KernelIntervals(frequent=narrow, rare=wide)
    bounds = [intervals.compute_bounds(6.0, n)[1] for n in (99, 20, 19, 4, 3, 0)]
    assert bounds == pytest.approx([6.6, 6.6, 12.0, 12.0, 36.0, 36.0])


def test_far_larger_kernel_is_not_similar() -> None:
    kernels = [make_kernel("Conv", [(1, 8, n, n), *CONV[0][1:]], (1, 8, n, n)) for n in range(8, 38)]
    regressor = KernelRegressor.fit(kernels, [rest_ms(kernel) for kernel in kernels])
    small, large = (make_kernel("Conv", [(1, 8, n, n), *CONV[0][1:]], (1, 8, n, n)) for n in (40, 80))
    assert [regressor.count_similar(kernel) for kernel in (small, large)] == [30, 0]
    assert regressor.count_similar(make_kernel("Exp", [(8,)], (8,))) == 0


def test_model_of_one_operator_has_interval_of_its_kernels(made_up: MadeUp) -> None:
    """Errors of several operators cancel, those of several kernels of one operator do not."""
    wide = ConformalInterval(low=0.5, high=2.0, coverage=0.9, samples=9)
    narrow = ConformalInterval(low=0.9, high=1.1, coverage=0.9, samples=9)
    predictor = made_up.predictor.model_copy(
        update={"kernel_intervals": KernelIntervals(frequent=wide, rare=wide), "idle_interval": narrow}
    )
    nodes = [node for graph in made_up.graphs[:2] for node in graph.nodes]
    convs = {node.kernel.id: node.kernel for node in nodes if node.kernel.op.startswith("Conv")}
    unmeasured = predictor.model_copy(update={"measured_ms": {}})

    def get_low_share(kernels: list[KernelSpec]) -> float:
        prediction = unmeasured.predict(make_graph({k.id: (k, ()) for k in kernels}))
        return prediction.interval[0] / prediction.mean_ms

    by_op: dict[str, list[KernelSpec]] = {}
    for kernel in convs.values():
        by_op.setdefault(kernel.op, []).append(kernel)
    same = max(by_op.values(), key=len)
    different = [members[0] for members in by_op.values()]
    assert len(same) > 1 < len(different)
    # Fewer than four kernels of each operator were measured.
    assert get_low_share(same) == pytest.approx(0.5 / WIDENING, rel=0.1)
    assert 1.1 * get_low_share(same) < get_low_share(different) < 0.9
