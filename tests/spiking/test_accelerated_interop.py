"""An optimized network under torch's compilers, exporters and transformations, in copies and in forks."""

from __future__ import annotations

import copy
import inspect
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import layer, neuron
from torch.utils.flop_counter import FlopCounterMode

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.registry import unregister_neuron
from sparseflow.spiking.graph.tracing import TRACE_LOCK
from tests.killed import wait_for_child
from tests.spiking.nets import from_rest, images, ready, same, small

X = images(3, 2)


def pooled() -> Any:
    """A network with max pooling between groups, which broke torch.compile."""
    parts = [
        layer.Conv2d(3, 6, 3, step_mode="m"), neuron.IFNode(step_mode="m"), layer.MaxPool2d(2, step_mode="m"),
        layer.Conv2d(6, 6, 1, step_mode="m"), neuron.IFNode(step_mode="m"),
    ]  # fmt: skip
    return ready(nn.Sequential(*parts))


@pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential], ids=["network", "part of another"])
def test_compiled_network_runs_its_plan(wrap: Callable[[Any], Any], planned: Callable[..., Any]) -> None:
    net = pooled()
    expected = from_rest(net, X)
    runs = planned(net, X)
    compiled: Any = torch.compile(wrap(net), backend="eager")
    assert same(from_rest(compiled, X), expected) and same(from_rest(compiled, X), expected)
    assert len(runs) == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_network_is_its_own_code(strict: bool, planned: Callable[..., Any]) -> None:
    net = pooled()
    expected = from_rest(net, X)
    planned(net, X)
    for module in net.modules():
        if isinstance(module, neuron.BaseNode):
            module.reset()
    if strict:
        with pytest.warns(UserWarning, match="side effects"):  # of torch, on the membranes
            exported = torch.export.export(net, (X,), strict=True)
    else:
        with pytest.warns(UserWarning, match="restore"):
            exported = torch.export.export(net, (X,))
    with torch.no_grad():
        assert same(exported.module()(X), expected)


class Threshold(nn.Module):
    """A neuron without state that TorchScript can trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x >= 1.0).to(x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript(planned: Callable[..., Any]) -> None:
    sparseflow.register_neuron(Threshold)
    try:
        net = ready(nn.Sequential(nn.Conv2d(3, 6, 3), Threshold(), nn.Conv2d(6, 6, 3), Threshold()))
        x = images(2)
        expected = from_rest(net, x)
        planned(net, x)
        with pytest.warns(UserWarning, match="restore"), torch.no_grad():
            traced: Any = torch.jit.trace(net, x)
        assert same(traced(x), expected)
        with pytest.raises(AttributeError, match=r"restore\(model\)"):
            torch.jit.script(net)
    finally:
        unregister_neuron(Threshold)


def test_transformations_see_the_own_operations(planned: Callable[..., Any]) -> None:
    net, plain = pooled(), pooled()
    runs = planned(net, X)
    counts = []
    for module in (plain, net):
        with FlopCounterMode(display=False) as counter:
            from_rest(module, X)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    batches = torch.stack([X, X + 1])
    expected = torch.stack([from_rest(plain, x) for x in batches])
    net.requires_grad_(False)
    assert same(
        torch.stack([torch.func.vmap(lambda x: from_rest(net, x))(x[None])[0] for x in batches]), expected
    )
    parameters = {name: -value for name, value in net.named_parameters()}
    for module in (plain, net):
        from_rest(module, X)  # leaves a membrane of the right type
    with torch.no_grad():
        actual = [torch.func.functional_call(module, parameters, X) for module in (plain, net)]
    assert same(*actual) and runs


def test_signature_is_the_one_of_the_network(planned: Callable[..., Any]) -> None:
    net = small()
    signature = inspect.signature(net.forward)
    planned(net, X)
    assert inspect.signature(net.forward) == signature


# --- copies and processes -----------------------------------------------------------------------------------


def copy_by_joblib(net: nn.Module) -> Any:
    joblib = pytest.importorskip("joblib")
    file = io.BytesIO()
    joblib.dump(net, file)
    file.seek(0)
    return joblib.load(file)


def copy_by_cloudpickle(net: nn.Module) -> Any:
    cloudpickle = pytest.importorskip("cloudpickle")
    return cloudpickle.loads(cloudpickle.dumps(net))


def copy_by_torch(net: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy_by_joblib, copy_by_cloudpickle, copy_by_torch])
def test_copy_of_a_network_that_has_run(duplicate: Callable[[Any], Any], planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X)
    runs = planned(net, X)
    from_rest(net, X)
    other = duplicate(net)
    assert get_accelerated_forward(other).model is other
    runs.clear()
    assert same(from_rest(other, X), expected) and runs
    with torch.no_grad():
        other.conv2.weight.neg_()
    assert not same(from_rest(other, X), expected) and same(from_rest(net, X), expected)


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    """Hold `locks` in another thread while the body runs."""
    locked, released = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            locked.set()
            released.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    try:
        yield
    finally:
        released.set()
        thread.join()


def run_in_fork(is_right: Callable[[], bool], *, timeout_s: float = 60.0) -> int | None:
    """Run in a forked process; return 0 if the result is true, None for a process that hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads, which are the point
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if is_right() else 3)
        finally:
            os._exit(4)
    return wait_for_child(child, timeout_s)


@pytest.mark.usefixtures("two_threads")
def test_forked_process_does_not_wait_for_threads_of_its_parent(planned: Callable[..., Any]) -> None:
    """OpenMP's team and the threads that hold locks do not exist in a forked process."""
    (net, other), x = (small(channels=16) for _ in range(2)), images(3, 4, size=16)
    expected = from_rest(net, x)
    planned(net, x)
    assert same(from_rest(net, x), expected)

    def is_right() -> bool:
        sparseflow.optimize(other, x, cache=False)
        return same([from_rest(net, x), from_rest(other, x)], [expected, expected])

    with held_by_another_thread(TRACE_LOCK, get_accelerated_forward(net)._lock):
        assert run_in_fork(is_right) == 0
