"""Tests of the registry: neurons, their outputs and their constants."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.registry import (
    get_neuron_info,
    is_spiking_neuron,
    register_neuron,
    unregister_neuron,
)

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, neuron, surrogate


def simulate(spec: NeuronSpec, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Spikes [T, …] and final membrane by the equations of `backends/spec.py`, in x's dtype."""
    u = torch.full_like(x[0], spec.v_rest)
    spikes = []
    for step in x:
        v = spec.alpha * u + spec.beta * step + spec.delta
        s = (v >= spec.v_threshold).to(x)
        u = v - s * spec.v_threshold if spec.v_reset is None else torch.where(s > 0, spec.v_reset, v)
        spikes.append(s)
    return torch.stack(spikes), u


LINEAR: list[tuple[str, Callable[..., nn.Module]]] = [
    ("IF", neuron.IFNode),
    ("LIF", lambda **kw: neuron.LIFNode(tau=1.7, **kw)),
    ("LIF-no-decay", lambda **kw: neuron.LIFNode(tau=3.0, decay_input=False, **kw)),
    ("PLIF", lambda **kw: neuron.ParametricLIFNode(init_tau=2.5, **kw)),
    ("PLIF-no-decay", lambda **kw: neuron.ParametricLIFNode(init_tau=1.3, decay_input=False, **kw)),
    ("SLTT", lambda **kw: neuron.SLTTLIFNode(tau=2.0, **kw)),
    ("OTTT", lambda **kw: neuron.OTTTLIFNode(tau=2.0, **kw)),
]


@pytest.mark.parametrize(
    "v_threshold, v_reset",
    [(1.0, None), (1.0, 0.0), (1.0, 0.5), (1.0, -0.25), (0.3, None), (0.3, 0.0), (0.3, -0.25)],
)
@pytest.mark.parametrize("name, make", LINEAR, ids=[name for name, _ in LINEAR])
def test_spec_reproduces_the_neuron(
    name: str, make: Callable[..., nn.Module], v_threshold: float, v_reset: float | None
) -> None:
    node: Any = make(v_threshold=v_threshold, v_reset=v_reset).eval().double()
    info = get_neuron_info(node)
    assert info is not None and info.output == "binary" and info.max_value == 1
    assert info.reason is None and info.spec is not None
    x = 3 * torch.randn(12, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        spikes = torch.stack([node(step) for step in x])
    expected, membrane = simulate(info.spec, x)
    assert 0.05 < float(spikes.mean()) < 0.95
    assert torch.equal(spikes, expected)
    # sigmoid(w) of a ParametricLIF is rounded to float32 when the constants are read.
    torch.testing.assert_close(node.v, membrane, rtol=0, atol=1e-5)


def test_parametric_lif_is_read_at_each_call() -> None:
    node = neuron.ParametricLIFNode(init_tau=2.0)
    first = get_neuron_info(node)
    node.w.data.fill_(1.0)
    second = get_neuron_info(node)
    assert first is not None and first.spec is not None and first.spec.beta == pytest.approx(0.5)
    assert second is not None and second.spec is not None
    assert second.spec.beta == pytest.approx(float(torch.tensor(1.0).sigmoid()))
    assert second.spec.alpha == pytest.approx(1 - second.spec.beta)


class _Quiet(neuron.LIFNode):
    """Overrides nothing relevant."""

    def __init__(self) -> None:
        super().__init__(tau=4.0)
        self.label = "quiet"

    def extra_repr(self) -> str:
        return "quiet"


class _Halved(neuron.LIFNode):
    def single_step_functional_forward(self, inputs: Any, states: Any, **kwargs: Any) -> Any:
        (spike,), states = super().single_step_functional_forward(inputs, states, **kwargs)
        return (spike * 0.5,), states


class _Sluggish(neuron.LIFNode):
    """Has other dynamics but outputs spikes."""

    def single_step_functional_forward(self, inputs: Any, states: Any, **kwargs: Any) -> Any:
        return super().single_step_functional_forward((inputs[0] * 0.9,), states, **kwargs)


class _OwnTau(neuron.LIFNode):
    tau = property(lambda self: 2.0, lambda self, value: None)  # type: ignore[assignment]


class _Overloud(neuron.IFNode):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: Any = super().forward(x)
        return out + (x > 1000)


class _Dead(neuron.IFNode):
    def single_step_functional_forward(self, inputs: Any, states: Any, **kwargs: Any) -> Any:
        return (torch.zeros_like(inputs[0]),), states


class _FromScratch(neuron.BaseNode):
    def single_step_functional_forward(self, inputs: Any, states: Any, **kwargs: Any) -> Any:
        v = states[0] * 0.3 + inputs[0]
        spike = self.surrogate_function(v - self.v_threshold)
        return (spike,), (v * (1 - spike),)


class _SimpleUsers(neuron.SimpleBaseNode):
    def neuronal_charge(self, x: torch.Tensor) -> None:
        self.v = 0.5 * self.v + x


def test_subclass_without_overrides_inherits_the_spec() -> None:
    info = get_neuron_info(_Quiet())
    assert info is not None and info.reason is None and info.spec is not None
    assert info.spec.beta == pytest.approx(0.25) and info.type == "_Quiet"


@pytest.mark.parametrize(
    "make, step_mode, output, word",
    [
        (_Halved, "s", "real", "single_step_functional_forward"),
        (_Halved, "m", "binary", "single_step_functional_forward"),  # a LIFNode's 'm' does not call it
        (_Sluggish, "s", "binary", "single_step_functional_forward"),
        (_OwnTau, "s", "binary", "tau"),
        (_OwnTau, "m", "binary", "tau"),
        (_Overloud, "s", "real", "forward"),
        (_Overloud, "m", "real", "forward"),
        (_Dead, "s", "real", "single_step_functional_forward"),
        (_FromScratch, "s", "binary", "single_step_functional_forward"),
        (_FromScratch, "m", "binary", "single_step_functional_forward"),
        (_SimpleUsers, "s", "binary", "neuronal_charge"),
        (_SimpleUsers, "m", "binary", "neuronal_charge"),
    ],
)
def test_subclass_with_other_dynamics_has_no_spec(
    make: Callable[[], Any], step_mode: str, output: str, word: str
) -> None:
    node = make().eval()
    node.step_mode = step_mode
    info = get_neuron_info(node)
    assert info is not None and is_spiking_neuron(node)
    assert info.spec is None and info.reason is not None and word in info.reason
    assert info.output == output
    assert info.step_mode == step_mode


def test_inspecting_a_neuron_does_not_change_it() -> None:
    node: Any = _Sluggish()
    node(torch.rand(2, 3))
    before, rng = node.v.clone(), torch.get_rng_state()
    saved = node.v
    get_neuron_info(node)
    assert node.v is saved and torch.equal(node.v, before)
    assert torch.equal(torch.get_rng_state(), rng)


def test_patched_instance_has_no_spec() -> None:
    node = neuron.IFNode()
    node.forward = lambda x: x * 2  # type: ignore[method-assign]
    info = get_neuron_info(node)
    assert info is not None and info.spec is None and info.output == "real"


@pytest.mark.parametrize(
    "function, output, max_value, has_spec",
    [
        (surrogate.ATan(), "binary", 1, True),
        (surrogate.Rect(), "binary", 1, True),
        (surrogate.heaviside, "binary", 1, True),
        (lambda x: (x >= 0).float(), "binary", 1, True),
        (lambda x: (x > 0).float(), "binary", 1, False),
        (surrogate.PoissonPass(), "binary", 1, False),
        (surrogate.Sigmoid(spiking=False), "real", None, False),
        (surrogate.MultiLevelSpikeCount(4), "integer", 4, False),
        (torch.sigmoid, "real", None, False),
        (lambda x: x.sign(), "real", None, False),
    ],
)
def test_surrogate_determines_the_output(
    function: Any, output: str, max_value: int | None, has_spec: bool
) -> None:
    info = get_neuron_info(neuron.LIFNode(surrogate_function=function).eval())
    assert info is not None
    assert (info.output, info.max_value) == (output, max_value)
    assert (info.spec is not None) == has_spec and (info.reason is None) == has_spec


@pytest.mark.parametrize(
    "make, output",
    [
        (neuron.QIFNode, "binary"),
        (neuron.EIFNode, "binary"),
        (neuron.IzhikevichNode, "binary"),
        (neuron.KLIFNode, "binary"),
        (neuron.CUBALIFNode, "binary"),
        (neuron.ComplementaryLIFNode, "binary"),
        (neuron.HalfThresholdIFNode, "binary"),
        (neuron.ActivationAwareIFNode, "binary"),
        (lambda: neuron.GatedLIFNode(T=2), "binary"),
        (lambda: neuron.PSN(T=2), "binary"),
        (lambda: neuron.SlidingPSN(k=2), "binary"),
        (neuron.ILIFNode, "integer"),
        (neuron.TernaryIFNode, "real"),
        (lambda: neuron.LIAFNode(torch.relu, True), "real"),
        (neuron.DSRIFNode, "real"),
    ],
)
def test_other_dynamics_are_neurons_with_a_named_refusal(make: Callable[[], nn.Module], output: str) -> None:
    info = get_neuron_info(make().eval())
    assert info is not None and info.spec is None and info.reason
    assert info.output == output


def test_unsupported_neuron_feature_refuses_the_spec() -> None:
    recording = neuron.IFNode(store_v_seq=True)
    hooked = neuron.IFNode()
    hooked.register_forward_hook(lambda *_: None)
    shifted = neuron.IFNode()
    shifted.set_reset_value("v", 0.25)
    for node, word in ((recording, "store_v_seq"), (hooked, "hooks"), (shifted, "0.25")):
        info = get_neuron_info(node)
        assert info is not None and info.output == "binary" and info.spec is None
        assert info.reason is not None and word in info.reason


def test_online_neuron_in_training_mode_is_real() -> None:
    info = get_neuron_info(neuron.OTTTLIFNode().train())
    assert info is not None and info.output == "real" and info.spec is None


@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.Conv2d(1, 1, 1), neuron.NonSpikingIFNode(), nn.Sequential()]
)
def test_other_modules_are_not_neurons(module: nn.Module) -> None:
    assert not is_spiking_neuron(module) and get_neuron_info(module) is None


# --- the user's own -----------------------------------------------------------------------------------------


class _Mine(nn.Module):
    v = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 0.5).float()


class _MineToo(_Mine):
    """Overrides nothing."""


class _MineScaled(_Mine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


@pytest.fixture
def user_module() -> Iterator[type[_Mine]]:
    yield _Mine
    unregister_neuron(_Mine)


SPEC = NeuronSpec(alpha=0.0, beta=1.0, delta=0.0, v_threshold=0.5, v_reset=0.0)


def test_registered_class_and_unchanged_subclasses_are_neurons(user_module: type[_Mine]) -> None:
    assert register_neuron(user_module, spec=SPEC) is user_module
    for cls in (_Mine, _MineToo):
        info = get_neuron_info(cls())
        assert info is not None and info.spec == SPEC and info.output == "binary" and info.step_mode is None
    scaled = get_neuron_info(_MineScaled())
    assert scaled is not None and scaled.spec is None and scaled.output == "real"
    unregister_neuron(user_module)
    assert not is_spiking_neuron(_Mine())


def test_register_neuron_spec_function(user_module: type[_Mine]) -> None:
    register_neuron(user_module, spec=lambda module: SPEC)
    info = get_neuron_info(_Mine())
    assert info is not None and info.spec == SPEC


def test_neuron_without_membrane_has_no_spec(
    user_module: type[_Mine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(user_module, "v")
    register_neuron(user_module, spec=SPEC)
    info = get_neuron_info(_Mine())
    assert info is not None and info.spec is None and info.output == "binary" and "`v`" in str(info.reason)


def test_registration_overrides_builtin_neuron() -> None:
    try:
        register_neuron(_Halved, output="integer", max_value=2)
        info = get_neuron_info(_Halved())
        assert info is not None and (info.output, info.max_value, info.spec) == ("integer", 2, None)
    finally:
        unregister_neuron(_Halved)


@pytest.mark.parametrize(
    "arguments, error, word",
    [
        ({"cls": 3}, TypeError, "subclass of torch.nn.Module"),
        ({"cls": _Mine()}, TypeError, "subclass of torch.nn.Module"),
        ({"cls": _Mine, "output": "ternary"}, ValueError, "ternary"),
        ({"cls": _Mine, "output": "integer"}, ValueError, "max_value"),
        ({"cls": _Mine, "output": "integer", "max_value": 0}, ValueError, "max_value"),
    ],
)
def test_bad_registration_error_names_the_value(
    arguments: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        register_neuron(arguments.pop("cls"), **arguments)


def test_spikingjelly_is_not_imported_for_a_network_without_it() -> None:
    code = (
        "import sys, torch\n"
        "from sparseflow.spiking.graph.analysis import analyze\n"
        "analyze(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3)))\n"
        "assert not any(name.split('.')[0] == 'spikingjelly' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reset_net_keeps_working_on_a_neuron_that_was_looked_at() -> None:
    node = _Sluggish()
    get_neuron_info(node)
    node(torch.ones(2, 2))
    functional.reset_net(node)
    assert node.v == 0.0
