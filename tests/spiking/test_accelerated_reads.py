"""What a forward reads from Python objects is watched; a forward that writes to them runs its own code."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from tests.spiking.nets import Small, from_rest, images, ready, same, small

IMAGE = images(2)
GLOBAL_GAIN = 1.0
GLOBAL_OPTIONS = {"shift": {0: 0.0}}
CALLS = {0: 0}


class Config:
    gain = 1.0


def make_scaling(gain: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    """Return a function that scales by a closure variable, and one that sets the variable."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * gain

    def set_gain(value: float) -> None:
        nonlocal gain
        gain = value

    return scale, set_gain


class Slots:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Head(nn.Module):
    """A nested module that reads plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Reader(Small):
    """Reads values of every kind in its forward; takes one image."""

    class_gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.T, self.return_feat, self.gain = 3, False, 1.0
        self.gains, self.options = [1.0, 1.0], {"gain": 1.0}
        self.config = types.SimpleNamespace(head=types.SimpleNamespace(gain=1.0))
        self.slots, self.head, self.heads = Slots(), Head(), [Head()]
        self.scale, self.set_gain = make_scaling(1.0)
        self.tensor = torch.ones(1)
        self.register_buffer("ones", torch.ones(1))

    @property
    def doubled_gain(self) -> float:
        return 2 * self.gain

    def apply_gain(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def forward(self, x: torch.Tensor) -> Any:
        h = self.features(x.unsqueeze(0).repeat(self.T, 1, 1, 1, 1))
        y = self.fc(h.flatten(-2).mean(-1)) * self.doubled_gain * sum(self.gains) * self.options["gain"]
        y = y * self.config.head.gain * self.slots.gain * GLOBAL_GAIN * Config.gain * self.class_gain
        y = self.heads[0](self.head(self.scale(y))) * (self.tensor * 2) * (self.ones * 2)  # type: ignore[operator]
        y = self.apply_gain(y) + GLOBAL_OPTIONS["shift"][0]
        return (y, h) if self.return_feat else y


def set_globally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GLOBAL_GAIN", 0.5)


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "time steps": lambda net, m: setattr(net, "T", 5),
    "a flag": lambda net, m: setattr(net, "return_feat", True),
    "an attribute behind a property": lambda net, m: setattr(net, "gain", 0.5),
    "an entry of a list": lambda net, m: net.gains.__setitem__(0, 0.5),
    "a longer list": lambda net, m: net.gains.append(0.5),
    "an entry of a dictionary": lambda net, m: net.options.update(gain=0.5),
    "an attribute of an object": lambda net, m: setattr(net.config.head, "gain", 0.5),
    "a slot": lambda net, m: setattr(net.slots, "gain", 0.5),
    "a nested module": lambda net, m: setattr(net.head, "gain", 0.5),
    "a module in a list": lambda net, m: setattr(net.heads[0], "gain", 0.5),
    "a closure variable": lambda net, m: net.set_gain(0.5),
    "a tensor in place": lambda net, m: net.tensor.mul_(2),
    "another tensor": lambda net, m: setattr(net, "tensor", torch.zeros(1)),
    "a buffer in place": lambda net, m: net.ones.mul_(2),
    "another buffer": lambda net, m: setattr(net, "ones", torch.zeros(1)),
    "a global": lambda net, m: set_globally(m),
    "a container in a global": lambda net, m: m.setitem(GLOBAL_OPTIONS["shift"], 0, 0.5),
    "an attribute of a class": lambda net, m: m.setattr(Config, "gain", 0.5),
    "a class attribute": lambda net, m: m.setattr(Reader, "class_gain", 0.5),
    "an instance attribute over a class attribute": lambda net, m: setattr(net, "class_gain", 0.5),
    "a method of the class": lambda net, m: m.setattr(Reader, "apply_gain", lambda self, x: x * 2),
    "a method of the instance": lambda net, m: setattr(net, "apply_gain", lambda x: x * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_value_that_the_forward_reads_is_watched(
    change: str, planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net: Any = ready(Reader())
    before = from_rest(net, IMAGE)
    runs = planned(net, images(1))  # IMAGE is traced in its first call
    assert same(from_rest(net, IMAGE), before) and runs
    CHANGES[change](net, monkeypatch)
    runs.clear()
    actual = [from_rest(net, IMAGE), from_rest(net, IMAGE)]
    assert len(runs) >= 2, "traced again, not given up"
    expected = from_rest(sparseflow.restore(net), IMAGE)
    assert not same(expected, before)
    assert same(actual, [expected, expected])


def test_change_back_reuses_the_first_plan(planned: Callable[..., Any], prefer: Any) -> None:
    net: Any = ready(Reader())
    planned(net, IMAGE)
    times = prefer("sparse")
    for _ in range(3):
        for net.T in (3, 5):
            from_rest(net, IMAGE)
    assert len(get_accelerated_forward(net).list_plans()) == 2
    num_groups = len(get_accelerated_forward(net).decisions)
    assert len(times.calls) <= num_groups + 1, "only T = 5 was measured"


def test_value_of_each_call_is_not_measured_in_each_call(planned: Callable[..., Any], prefer: Any) -> None:
    net: Any = ready(Reader())
    planned(net, IMAGE)
    plain: Any = sparseflow.restore(copy.deepcopy(net))
    for step in range(12):
        net.gain = plain.gain = step / 4
        assert same(from_rest(net, IMAGE), from_rest(plain, IMAGE))
    assert len(get_accelerated_forward(net).list_plans()) == 8


def test_equal_value_does_not_trace_again(planned: Callable[..., Any]) -> None:
    net: Any = ready(Reader())
    planned(net, IMAGE)
    net.gain, net.T, net.name = float("1.0"), 3, "unrelated"
    from_rest(net, IMAGE)
    assert len(get_accelerated_forward(net).list_plans()) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("stride", (2, 2)), ("padding", (0, 0)), ("dilation", (2, 2)), ("padding_mode", "circular")],
)
def test_constant_of_a_convolution_is_watched(name: str, value: Any, planned: Callable[..., Any]) -> None:
    net = small()
    before = from_rest(net, images(3, 2))
    planned(net, images(3, 2))
    setattr(net.conv2, name, value)
    actual = from_rest(net, images(3, 2))
    expected = from_rest(sparseflow.restore(net), images(3, 2))
    assert same(actual, expected) and not same(expected, before)


def test_constant_of_a_batchnorm_is_watched(planned: Callable[..., Any]) -> None:
    net = small()
    before = from_rest(net, images(3, 2))
    planned(net, images(3, 2))
    net.bn2.eps = 5.0
    actual = from_rest(net, images(3, 2))
    expected = from_rest(sparseflow.restore(net), images(3, 2))
    torch.testing.assert_close(actual, expected)
    assert not same(expected, before)


# --- forwards that write ------------------------------------------------------------------------------------


class Writer(Small):
    """Calls `effect` with its features."""

    def __init__(self, effect: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.calls, self.feat, self.rates, self.record = 0, None, [], {}
        self.log = types.SimpleNamespace(rate=None)
        self.register_buffer("rate", torch.zeros(1))
        self.effect = effect

    @cached_property
    def cached(self) -> int:
        return 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        self.effect(self, h)
        return self.fc(h.flatten(-2).mean(-1))


def count_global(net: Any, h: torch.Tensor) -> None:
    CALLS[0] += 1


def reset(net: Any, h: torch.Tensor) -> None:
    net.sn3.reset()


EFFECTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "calls": lambda net, h: setattr(net, "calls", net.calls + 1),
    "feat": lambda net, h: setattr(net, "feat", h),
    "rate": lambda net, h: setattr(net, "rate", 0.9 * net.rate + h.mean()),
    "rates": lambda net, h: net.rates.append(h.mean()),
    "record": lambda net, h: net.record.update(rate=h.mean()),
    "log": lambda net, h: setattr(net.log, "rate", h.mean()),
    "fc.calls": lambda net, h: setattr(net.fc, "calls", 1),
    "CALLS": count_global,
    "__dict__": lambda net, h: vars(net).__setitem__("feat", h),
}


def read_effects(net: Any) -> list[Any]:
    calls = [net.calls, getattr(net.fc, "calls", 0), CALLS[0]]
    return [*calls, net.feat, net.rate, net.rates, net.record, net.log.rate]


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.parametrize("with_sample", [True, False])
def test_forward_that_writes_runs_layer_by_layer(
    name: str, with_sample: bool, planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLS, 0, 0)
    plain: Any = ready(Writer(EFFECTS[name]))
    net, x = copy.deepcopy(plain), images(3, 2)
    planned(net, *[x] if with_sample else [])
    for module in (plain, net):
        from_rest(module, x)
    CALLS[0] = 0
    actual = [from_rest(net, x), from_rest(net, x)], read_effects(net)
    explanation = sparseflow.explain(net)
    assert "each layer was measured separately" in explanation.summary and f"`{name}`" in explanation.summary
    CALLS[0] = 0
    assert same(actual, ([from_rest(plain, x), from_rest(plain, x)], read_effects(plain)))


@pytest.mark.parametrize(
    "effect",
    [lambda net, h: setattr(net, "calls", 0), lambda net, h: net.cached],
    ids=["same value", "cached"],
)
def test_forward_that_writes_an_equal_value_computes_the_same(
    effect: Callable[[Any, torch.Tensor], Any], planned: Callable[..., Any]
) -> None:
    net, x = ready(Writer(effect)), images(3, 2)
    expected = from_rest(net, x)
    planned(net, x)
    assert same(from_rest(net, x), expected)


def test_forward_that_resets_its_neurons_is_not_replaced(planned: Callable[..., Any]) -> None:
    net, x = ready(Writer(reset)), images(3, 2)
    with torch.no_grad():
        expected = [net(x), net(x)]
        functional.reset_net(net)
        planned(net, x)
        assert same([net(x), net(x)], expected)
