"""The compiled dense network as a candidate: when it runs, and that it computes the same."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional

import sparseflow
from sparseflow.spiking import accelerated
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.explanation import explain
from sparseflow.spiking.runtime.compiled_network import CompiledNetwork
from tests.spiking.conftest import FakeTimes
from tests.spiking.nets import from_rest, images, membranes, same, small

X = images(3, 2)


@pytest.fixture(autouse=True)
def _always_may_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times of groups do not add up."""
    monkeypatch.setattr(accelerated, "MIN_COMPILED_LATENCY", 0.0)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Modules given to torch.compile, which returns them as they are."""
    modules: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: modules.append(module) or module)
    return modules


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each run of a compiled network."""
    calls: list[int] = []
    run = CompiledNetwork.__call__
    monkeypatch.setattr(CompiledNetwork, "__call__", lambda self, *x: calls.append(1) or run(self, *x))
    return calls


@pytest.fixture
def compiled(
    prefer: Callable[..., FakeTimes], compilations: list[nn.Module], runs: list[int]
) -> Callable[..., Any]:
    """Returns a small network that runs compiled, and a copy that is not optimized."""

    def make() -> tuple[Any, Any]:
        prefer("dense", compiled=0.5)
        net = small()
        reference = copy.deepcopy(net)
        sparseflow.optimize(net, X, compile=True)
        runs.clear()
        return net, reference

    return make


def reset(*nets: nn.Module) -> None:
    for net in nets:
        functional.reset_net(net)


def step(net: nn.Module, x: torch.Tensor = X) -> Any:
    """Run a network from the state that it is in; return output and membranes."""
    with torch.no_grad():
        return net(x), membranes(net)


def test_it_runs_from_rest_and_the_plan_runs_in_other_states(compiled: Any, runs: list[int]) -> None:
    net, reference = compiled()
    summary = explain(net)
    assert "as a compiled dense network" in summary.summary
    assert {row.backend for row in summary.layers} == {"compiled"}
    assert "not used while the network runs compiled" in summary.layers[0].reason
    for count in (1, 1):
        assert same(step(net), step(reference)) and len(runs) == count
    reset(net, reference)
    with torch.inference_mode():
        assert same(net(X), reference(X)) and len(runs) == 2
    reset(net, reference)
    assert same(step(net, X[:, :1]), step(reference, X[:, :1])) and len(runs) == 2  # another shape
    assert same(net.state_dict(), reference.state_dict())


@pytest.mark.parametrize("form", ["compiled", "plan", "own"])
def test_each_call_starts_from_rest(
    prefer: Callable[..., FakeTimes], compilations: list[nn.Module], form: str
) -> None:
    prefer("dense", **{form: 0.5})
    net = small()
    expected = from_rest(net, X)
    reset(net)
    assert sparseflow.optimize(net, X, compile=True, reset=True) is net
    with torch.no_grad():
        for x, output in ((X, expected), (X[:, :1], expected[:, :1]), (X, expected)):
            assert same(net(x), output)
            assert not any(isinstance(v, torch.Tensor) for v in membranes(net).values())


def test_changes_of_the_network(compiled: Any, runs: list[int]) -> None:
    net, reference = compiled()
    with torch.no_grad():  # new weights are taken over
        for module in (net, reference):
            module.conv2.weight.mul_(2.0)
            module.fc.bias.add_(1.0)
    assert same(step(net), step(reference)) and len(runs) == 1
    for module in (net, reference):
        module.sn2.v_threshold = 0.5
        functional.reset_net(module)
    assert same(step(net), step(reference)) and len(runs) == 1
    fast_paths = [item.fast_path for item in get_accelerated_forward(net)._list_tuned()]
    assert not any(isinstance(path, CompiledNetwork) for path in fast_paths)  # tuned within the call


@pytest.mark.parametrize("change", ["hook", "training", "threads", "autocast"])
def test_conditions_under_which_it_does_not_run(compiled: Any, runs: list[int], change: str) -> None:
    net, reference = compiled()
    threads = torch.get_num_threads()
    calls: list[int] = []
    if change == "hook":
        net.fc.register_forward_hook(lambda *_: calls.append(1))
    elif change == "training":
        net.fc.train()
    elif change == "threads":
        torch.set_num_threads(threads + 1)
    try:
        with torch.autocast("cpu", enabled=change == "autocast"):
            actual = step(net)
    finally:
        torch.set_num_threads(threads)
    assert not runs and len(calls) == (change == "hook")
    if change != "autocast":
        assert same(actual, step(reference))


def test_it_is_a_candidate_only_if_it_may_be_faster(
    prefer: Callable[..., FakeTimes], compilations: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerated, "MIN_COMPILED_LATENCY", 0.8)
    prefer("sparse", dense=2.0, plan=4.7, compiled=0.5)  # three groups: 0.8 * 3 * 2.0 ms > 4.7 ms
    sparseflow.optimize(small(), X, compile=True, cache=False)
    assert not compilations
    prefer("sparse", dense=2.0, plan=4.9, compiled=0.5)
    sparseflow.optimize(small(), X, compile=False)
    sparseflow.optimize(small(), X)  # the tests set SPARSEFLOW_COMPILE
    net = sparseflow.optimize(small())
    assert from_rest(net, X) is not None and not compilations
    sparseflow.optimize(small(), X, compile=True)
    assert len(compilations) == 1


def test_the_decision_not_to_compile_is_cached(
    prefer: Callable[..., FakeTimes], compilations: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerated, "MIN_COMPILED_LATENCY", 0.8)
    for plan_ms in (4.7, 4.9):
        prefer("sparse", dense=2.0, plan=plan_ms, compiled=0.5)
        sparseflow.optimize(small(), X, compile=True)
    assert not compilations


@pytest.mark.parametrize(("ms", "choice"), [(0.5, "compiled"), (0.9, "plan"), (7.0, "plan")])
def test_the_fastest_is_selected(
    prefer: Callable[..., FakeTimes], compilations: list[nn.Module], ms: float, choice: str
) -> None:
    """A compiled network that is not significantly faster than the plan does not replace it."""
    prefer("dense", compiled=(ms, ms, ms, ms, 1.5 * ms, 1.5 * ms, 1.5 * ms))
    for count in (1, 2 if choice == "compiled" else 1):  # a network that lost is not compiled again
        net = sparseflow.optimize(small(), X, compile=True)
        decision = get_accelerated_forward(net).network_decision
        assert decision is not None and decision.choice == choice
        assert len(compilations) == count


def test_a_network_that_cannot_be_compiled_runs_by_its_plan(
    prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand more")

    prefer("dense", compiled=0.5)
    monkeypatch.setattr(torch, "compile", fail)
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, compile=True)
    assert same(from_rest(net, X), expected)
    assert "no compiled network: torch.compile raises RuntimeError: no C++ compiler" in explain(net).summary


def test_wrong_outputs_are_rejected(
    prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("dense", compiled=0.5)
    monkeypatch.setattr(torch, "compile", lambda module, **_: lambda x: (1.1 * module(x)[0], module(x)[1]))
    net = sparseflow.optimize(small(), X, compile=True)
    assert "its outputs differ by 0.1" in explain(net).summary


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_with_the_compiler(prefer: Callable[..., FakeTimes], runs: list[int]) -> None:
    prefer("dense", compiled=0.5)
    net = small()
    reference = copy.deepcopy(net)
    sparseflow.optimize(net, X, compile=True)
    runs.clear()
    for context in (torch.no_grad, torch.inference_mode):
        reset(net, reference)
        with context():
            torch.testing.assert_close(net(X.transpose(0, 1).contiguous().transpose(0, 1)), reference(X))
    assert len(runs) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["compiled", "plan"])
def test_each_call_starts_from_rest_on_a_gpu(prefer: Callable[..., FakeTimes], form: str) -> None:
    prefer("dense", **{form: 0.5})
    net, x = small().cuda(), X.cuda()
    expected = from_rest(net, x)
    reset(net)
    sparseflow.optimize(net, x, compile=True, reset=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu(runs: list[int], prefer: Callable[..., FakeTimes]) -> None:
    prefer("dense", compiled=0.5)
    net, x = small().cuda(), X.cuda()
    reference = copy.deepcopy(net)
    sparseflow.optimize(net, x, compile=True)
    assert "as a compiled dense network" in explain(net).summary
    runs.clear()
    torch.testing.assert_close(step(net, x), step(reference, x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for module in (net, reference):
            module.conv2.weight.mul_(2.0)
            functional.reset_net(module)
    torch.testing.assert_close(step(net, x), step(reference, x), rtol=1e-4, atol=1e-4)
    assert len(runs) == 2
