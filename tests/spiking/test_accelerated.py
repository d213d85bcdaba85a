"""An accelerated network computes what its own code computes; copies are independent."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

import sparseflow
from sparseflow.spiking import accelerated
from sparseflow.spiking.accelerated import AcceleratedForward, get_accelerated_forward
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.runtime.sparse_conv import SparseConv2d
from tests.spiking.families import CASES, FAMILIES
from tests.spiking.graph.test_module_state import differences, state
from tests.spiking.nets import (
    KINDS,
    Constant,
    Loop,
    Opaque,
    dyadic,
    from_rest,
    images,
    membranes,
    numbers,
    ready,
    same,
    small,
)

X = images(3, 2)
Prefer = Callable[..., Any]


# --- the same numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_family_is_unchanged_or_explains_why_not(name: str, mode: str, prefer: Prefer) -> None:
    prefer("sparse", "dense")
    net, x = FAMILIES[name](mode)
    dyadic(net)
    x = x.mul(16).round().div(16)
    saved = numbers(net)
    with torch.no_grad():
        functional.reset_net(net)
        expected = [net(x), net(x)]
        v = membranes(net)
        functional.reset_net(net)
    sparseflow.optimize(net, x)
    assert list(net.state_dict()) == list(saved) and same(numbers(net), saved)
    with torch.no_grad():
        actual = [net(x), net(x)]
    if name in ("masnn", "ms_resnet", "spiking_vggws_ottt"):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    else:
        assert same(actual, expected) and same(membranes(net), v)
    rows = sparseflow.explain(net).layers
    sites = {site.name: site for site in get_accelerated_forward(net).graph.sites}
    convs = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    assert [row.name for row in rows] == list(sites) and set(convs) <= set(sites)
    assert all(
        row.reason and row.reason != "run the network once, or give optimize() a sample" for row in rows
    )
    for row in rows:
        if row.backend == "events":
            assert sites[row.name].fed_by
        elif sites[row.name].refusal == "not-a-feature-map" and row.group is None:
            assert "called 2 times" in row.reason or "as a part of a plan" in row.reason
        elif not sites[row.name].replaceable and row.group is None:
            assert row.reason.partition("; the neuron `")[0] == sites[row.name].reason
    functional.reset_net(net)
    sparseflow.restore(net)
    with torch.no_grad():
        assert same(net(x), expected[0])


def test_really_measured_plan_equals_network() -> None:
    for build in (small, lambda: ready(Opaque())):
        net = build()
        expected, v = from_rest(net, X), membranes(net)
        sparseflow.optimize(net, X)
        assert same(from_rest(net, X), expected) and same(membranes(net), v)
        assert get_accelerated_forward(net).network_decision is not None


@pytest.mark.parametrize("mode", ["s", "m"])
def test_membranes_are_carried_and_reset_as_before(mode: str, planned: Callable[..., Any]) -> None:
    net = small(mode)
    x = X if mode == "m" else images(2)
    xs = [x, x + 1, x - 1]
    functional.reset_net(net)
    with torch.no_grad():
        expected = [(net(x), membranes(net)) for x in xs]
    functional.reset_net(net)
    runs = planned(net, x)
    assert all(not isinstance(v, torch.Tensor) for v in membranes(net).values()), "as it was: at rest"
    for _ in range(2):
        with torch.no_grad():
            assert same([(net(x), membranes(net)) for x in xs], expected)
        functional.reset_net(net)
        assert net.sn1.v == 0.0
    assert len(runs) == 6


def test_optimize_in_the_middle_of_a_sequence_keeps_state(planned: Callable[..., Any]) -> None:
    net = small()
    functional.reset_net(net)
    with torch.no_grad():
        net(X)
        before, expected, v = membranes(net), net(X), membranes(net)
        functional.reset_net(net)
        net(X)
        runs = planned(net, X)
        assert same(membranes(net), before)
        assert same(net(X), expected) and same(membranes(net), v) and runs == [1]


def test_other_batches_sizes_and_steps(planned: Callable[..., Any]) -> None:
    net = small()
    inputs = [images(3, 5), images(3, 1), images(3, 2, size=12), images(1, 2), X]
    expected = [from_rest(net, x) for x in inputs]
    runs = planned(net, X)
    for x, out in zip(inputs, expected, strict=True):
        assert same(from_rest(net, x), out)
    assert len(get_accelerated_forward(net).list_plans()) == 5 and len(runs) > 5
    before = len(runs)
    for x, out in zip(inputs, expected, strict=True):
        assert same(from_rest(net, x), out)
    assert len(runs) == before + 5, "each shape is measured once"


def test_other_batch_size_without_reset_runs_the_network(planned: Callable[..., Any]) -> None:
    net, xs = small(), [images(3, n) for n in (2, 3, 3, 2)]
    functional.reset_net(net)
    with torch.no_grad():
        expected = [net(x) for x in xs], membranes(net)
        functional.reset_net(net)
        planned(net, X)
        assert same(([net(x) for x in xs], membranes(net)), expected)


def test_networks_that_look_at_shapes_take_other_shapes(planned: Callable[..., Any]) -> None:
    """One graph asserts a rank, the other a number of time steps."""
    for net, sample, other_inputs in (
        (ready(Constant()), images(2), [X, images(4)]),
        (ready(Constant()), X, [images(2)]),
        (ready(Loop()), X, [images(2, 2), images(5, 2), X]),
    ):
        expected = [from_rest(net, x) for x in other_inputs]
        runs = planned(net, sample)
        for x, out in zip(other_inputs, expected, strict=True):
            assert same(from_rest(net, x), out)
        assert runs


def count_tunings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the batch size of each tuning."""
    batches: list[int] = []
    tune = AcceleratedForward.tune
    monkeypatch.setattr(
        AcceleratedForward, "tune", lambda self, x, **_: batches.append(x[0].shape[1]) or tune(self, x)
    )
    return batches


def test_more_shapes_than_plans_are_not_measured_in_each_call(
    planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes in rotation: those beyond the limit run the network's own code."""
    monkeypatch.setattr(accelerated, "MAX_SHARED_PLANS", 3)
    monkeypatch.setattr(accelerated, "MIN_CALLS_BETWEEN_TUNINGS", 20)
    net, xs = small(), [images(1, n) for n in range(1, 6)]
    expected = [from_rest(net, x) for x in xs]
    planned(net)
    batches = count_tunings(monkeypatch)
    for _ in range(3):
        assert same([from_rest(net, x) for x in xs], expected)
    assert batches == [1, 2, 3]
    for _ in range(8):
        assert same(from_rest(net, xs[4]), expected[4])
    assert batches == [1, 2, 3, 5], "a shape that stays gets a plan"
    assert len(get_accelerated_forward(net).list_plans()) == 3


def test_settings_in_rotation_are_not_measured_in_each_call(
    planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerated, "MAX_SHARED_PLANS", 3)
    net, plain = small(), small()
    planned(net)
    batches = count_tunings(monkeypatch)
    for i in range(8):
        net.sn2.v_threshold = plain.sn2.v_threshold = 0.25 * (1 + i % 4)
        assert same(from_rest(net, X), from_rest(plain, X))
    assert batches == [2, 2, 2]


def test_plan_that_was_not_used_for_the_longest_time_makes_room(
    planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerated, "MAX_SHARED_PLANS", 2)
    monkeypatch.setattr(accelerated, "MIN_CALLS_BETWEEN_TUNINGS", 0)
    net = small()
    planned(net)
    batches = count_tunings(monkeypatch)
    for n in (1, 2, 1, 3, 1, 2):
        from_rest(net, images(1, n))
    assert batches == [1, 2, 3, 2]


def test_inputs_that_are_no_numbers(planned: Callable[..., Any]) -> None:
    net, x = small(), X.clone()
    x[0, 0, 1, 3, 3] = float("nan")
    expected, v = from_rest(net, x), membranes(net)
    runs = planned(net, X)
    assert same(from_rest(net, x), expected) and same(membranes(net), v) and runs
    assert v["sn1"].isnan().any()


def test_empty_batch_and_keyword_call_run_the_network(planned: Callable[..., Any]) -> None:
    net = small()
    expected, empty = from_rest(net, X), from_rest(net, X[:, :0])
    runs = planned(net, X)
    functional.reset_net(net)
    with torch.no_grad():
        assert net(X[:, :0]).shape == empty.shape
        functional.reset_net(net)
        assert same(net(x=X), expected)
        assert runs == []
        with pytest.raises(TypeError, match="x"):
            net()
        with pytest.raises(TypeError):
            net(X, X)


def test_single_image_without_batch_axis(planned: Callable[..., Any]) -> None:
    net = ready(nn.Sequential(nn.Conv2d(3, 4, 3), neuron.IFNode(), nn.Conv2d(4, 4, 3), neuron.IFNode()))
    x = images()
    expected = from_rest(net, x)
    planned(net, x)
    assert same(from_rest(net, x), expected)


def test_under_inference_mode(planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X)
    functional.reset_net(net)
    with torch.inference_mode():
        runs = planned(net, X)
        assert same(net(X), expected)
    assert same(from_rest(net, X), expected) and len(runs) == 2


def test_optimize_child_before_parent(planned: Callable[..., Any]) -> None:
    net = nn.Sequential(small(), nn.Flatten(0, 1)).eval()
    expected = from_rest(net, X)
    planned(net[0], X)
    assert same(from_rest(net, X), expected)
    sparseflow.optimize(net, X)
    assert same(from_rest(net, X), expected)
    sparseflow.restore(net)
    assert isinstance(vars(net[0])["forward"], AcceleratedForward) and same(from_rest(net, X), expected)


def test_optimize_does_not_write_to_the_sample(planned: Callable[..., Any]) -> None:
    x = X.clone()
    net = small()
    planned(net, x)
    from_rest(net, x)
    assert same(x, X)


# --- without a sample ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "x"), [(small, X), (lambda: ready(Constant()), images(2)), (lambda: ready(Loop()), X)]
)
def test_without_a_sample_the_first_call_measures(
    build: Any, x: torch.Tensor, planned: Callable[..., Any]
) -> None:
    net = build()
    expected = from_rest(net, x)
    functional.reset_net(net)
    saved = state(net)
    runs = planned(net)
    explanation = sparseflow.explain(net)
    assert explanation.summary == "not measured yet" and "not measured yet" in str(explanation)
    assert (
        all(r.latency_before_ms is None for r in explanation.layers)
        and get_accelerated_forward(net).list_plans() == []
    )
    assert differences(state(net), saved) in ([], [("", "forward", "")])
    assert same(from_rest(net, x), expected) and runs
    assert (
        sparseflow.explain(net).summary != "not measured yet"
        and len(get_accelerated_forward(net).list_plans()) == 1
    )
    runs.clear()
    assert same(from_rest(net, x), expected) and runs == [1]


def test_without_a_sample_a_network_that_cannot_be_traced_is_watched(prefer: Prefer) -> None:
    prefer("events")
    net = ready(Opaque())
    expected = from_rest(net, X)
    sparseflow.optimize(net)
    assert type(net.conv2) is layer.Conv2d
    assert same(from_rest(net, X), expected)
    assert isinstance(net.conv2, SparseConv2d) and isinstance(net.conv3, SparseConv2d)
    assert not isinstance(net.conv1, SparseConv2d)
    assert same(from_rest(net, X), expected) and same(from_rest(net, images(3, 4))[:, :2], expected) is False
    assert "could not be traced" in sparseflow.explain(net).summary
    sparseflow.restore(net)
    assert same(from_rest(net, X), expected)


def test_first_call_with_bad_input_raises_the_networks_error(planned: Callable[..., Any]) -> None:
    bad = images(3, 2, channels=4)
    with pytest.raises(RuntimeError) as plain:
        from_rest(small(), bad)
    net = small()
    planned(net)
    saved = state(net)
    with pytest.raises(RuntimeError) as actual:
        from_rest(net, bad)
    assert str(actual.value) == str(plain.value)
    functional.reset_net(net)
    assert differences(state(net), saved) == []
    assert same(from_rest(net, X), from_rest(small(), X))


# --- copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy_is_independent(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net = build()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, **options)
    functional.reset_net(net)
    duplicate = copy.deepcopy(net)
    first, second = get_accelerated_forward(net), get_accelerated_forward(duplicate)
    assert second.model is duplicate and first.model is net and second is not first
    decided = dict(first.decisions)
    with torch.no_grad():
        duplicate.conv2.weight.neg_()
        duplicate.sn2.v_threshold = 0.5
    changed = from_rest(duplicate, X)
    assert same(from_rest(net, X), expected) and not same(changed, expected)
    second.decisions.clear()
    assert first.decisions == decided
    sparseflow.restore(duplicate)
    assert "forward" not in vars(duplicate) and "forward" in vars(net)
    assert type(duplicate.conv2) is layer.Conv2d and same(from_rest(duplicate, X), changed)
    assert same(from_rest(net, X), expected)


def test_deepcopy_of_a_network_that_needs_a_sample(planned: Callable[..., Any]) -> None:
    net, x = ready(Constant()), images(2)
    expected = from_rest(net, x)
    runs = planned(net, x)
    duplicate = copy.deepcopy(net)
    assert same(from_rest(duplicate, x), expected) and len(runs) >= 2
    assert "not measured" not in str(sparseflow.explain(duplicate))


@pytest.mark.parametrize("kind", KINDS)
def test_optimized_model_can_be_pickled(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net = build()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, **options)
    from_rest(net, X)
    functional.reset_net(net)
    duplicate = pickle.loads(pickle.dumps(net))
    assert same(from_rest(duplicate, X), expected)
    sparseflow.restore(duplicate)
    assert type(duplicate.conv2) is layer.Conv2d and same(from_rest(duplicate, X), expected)


# --- threads ------------------------------------------------------------------------------------------------


def call_in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run `calls` at the same time, one in each thread; an error is raised here."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        with torch.no_grad():
            return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_first_calls_of_several_networks_in_threads(planned: Callable[..., Any]) -> None:
    nets = [ready(Constant(), seed=seed) for seed in range(4)]
    x = images(2)
    expected = [from_rest(net, x) for net in nets]
    for net in nets:
        planned(net)
    for _ in range(2):
        assert same(call_in_threads([lambda net=net: from_rest(net, x) for net in nets]), expected)


def test_calls_of_one_network_in_threads_are_serialized(planned: Callable[..., Any]) -> None:
    """Each call finds the state that another call left, while the network is tuned or tuned again."""
    net, plain = small(), small()
    planned(net)
    for _ in range(2):
        functional.reset_net(plain)
        functional.reset_net(net)
        with torch.no_grad():
            expected = [plain(X) for _ in range(4)]
        actual = call_in_threads([lambda: net(X)] * 4)
        assert sorted(map(torch.Tensor.tolist, actual)) == sorted(map(torch.Tensor.tolist, expected))
        net.sn2.v_threshold = plain.sn2.v_threshold = 0.5


def test_network_is_right_while_another_thread_traces_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), neuron.IFNode()).eval()
    x = images(2)
    with torch.no_grad():
        expected = net[0](x)
    calls = [
        lambda: [analyze(net, x) for _ in range(3)],
        lambda: [same(net[0](x), expected) for _ in range(300)],
    ]
    assert all(call_in_threads(calls)[1])
