"""Networks of norse: equal outputs and states, in groups where the dynamics fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("norse.torch")

import norse.torch as norse
from norse.torch.functional.lif_box import LIFBoxParameters
from norse.torch.functional.reset import reset_subtract
from norse.torch.module.leaky_integrator import LILinearCell

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.registry import get_neuron_info
from tests.spiking.libraries.dyadic import make_exact_input, set_exact_weights
from tests.spiking.nets import same

Planned = Callable[..., list[int]]


def make_box(**options: Any) -> nn.Module:
    """A cell whose constants are exact: dt / tau is 1/2."""
    return norse.LIFBoxCell(LIFBoxParameters(tau_mem_inv=torch.tensor(500.0), **options), dt=2**-10 * 1.024)


def make_lif() -> nn.Module:
    """A cell with a synaptic current, whose constants are exact."""
    parameters = norse.LIFParameters(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(250.0))
    return norse.LIFCell(parameters, dt=2**-10 * 1.024)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "box": make_box,
    "soft box": lambda: make_box(reset_method=reset_subtract),
    "reset to another value": lambda: make_box(v_leak=torch.tensor(-0.25), v_reset=torch.tensor(-0.25)),
    "iaf": lambda: norse.IAFCell(),
    "lif": lambda: make_lif(),
}
UNFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "refractory": (lambda: norse.LIFRefracCell(), "refractory"),
    "recurrent": (lambda: norse.LIFRecurrentCell(4, 4), "fed back"),
    "adaptive": (lambda: norse.LSNNCell(), "thresholds adapt"),
    "sequence": (lambda: norse.LIF(), "synaptic current"),
    "leak": (lambda: make_box(v_leak=torch.tensor(0.5)), "starts at another value"),
    "reset method": (lambda: make_box(reset_method=lambda z, v, reset, th: v), "user-defined"),
}


class MnistNet(nn.Module):
    """The convolutional network of norse's MNIST task: writes voltages into a tensor step by step."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 5, 1), nn.Conv2d(12, 16, 5, 1)
        self.fc1, self.out = nn.Linear(4 * 4 * 16, 50), LILinearCell(50, 10)
        self.lif0, self.lif1, self.lif2 = make(), make(), make()

    def forward(self, x: Tensor) -> Tensor:
        steps, batch_size = x.shape[0], x.shape[1]
        s0 = s1 = s2 = so = None
        voltages = torch.zeros(steps, batch_size, 10, device=x.device, dtype=x.dtype)
        for ts in range(steps):
            z = self.conv1(x[ts, :])
            z, s0 = self.lif0(z, s0)
            z = F.max_pool2d(z, 2, 2)
            z = 4 * self.conv2(z)
            z, s1 = self.lif1(z, s1)
            z = F.max_pool2d(z, 2, 2)
            z = z.view(-1, 4 * 4 * 16)
            z = self.fc1(z)
            z, s2 = self.lif2(z, s2)
            v, so = self.out(F.relu(z), so)
            voltages[ts, :, :] = v
        return voltages


class SequenceNet(nn.Module):
    """Runs a `SequentialState` once for each time step and returns the final state."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = norse.SequentialState(
            nn.Conv2d(1, 12, 5), make(), nn.MaxPool2d(2, 2),
            nn.Conv2d(12, 16, 3), make(), nn.Flatten(), nn.Linear(16 * 10 * 10, 10), make(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        state: Any = None
        outputs = []
        for step in x:
            out, state = self.net(step, state)
            outputs.append(out)
        return torch.stack(outputs), state


def _run(net: nn.Module, *inputs: Any) -> Any:
    with torch.no_grad():
        return net(*inputs)


def _list_modes(net: nn.Module) -> dict[str, tuple[str, str]]:
    plan = get_accelerated_forward(net).list_plans()[-1]
    assert plan is not None
    return {group.name: (group.match.neuron_name, group.mode) for group in plan.groups}


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_state_passed_through_a_sequence(make: Callable[[], nn.Module], planned: Planned) -> None:
    net, reference = set_exact_weights(SequenceNet(make)), set_exact_weights(SequenceNet(make))
    x = make_exact_input(4, 2, 1, 28, 28) * 2
    runs = planned(net, x)
    (output, state), (expected, expected_state) = _run(net, x), _run(reference, x)
    assert torch.equal(output, expected) and expected.any() and runs
    for before, after in zip(expected_state, state, strict=True):
        assert type(before) is type(after)
        if before is not None:
            for part, expected_part in zip(after, before, strict=True):
                torch.testing.assert_close(part, expected_part)
    modes = _list_modes(net)
    assert {neuron for neuron, _ in modes.values() if neuron} == {"net.1", "net.4", "net.7"}
    assert modes["net.3"][1] == modes["net.6"][1] == "sparse"


def test_one_step_per_call(planned: Planned) -> None:
    def make() -> Any:
        return set_exact_weights(
            norse.SequentialState(nn.Conv2d(1, 8, 3), norse.IAFCell(), nn.Conv2d(8, 4, 3), norse.IAFCell())
        )

    net, reference = make(), make()
    x = make_exact_input(2, 1, 8, 8) * 2
    runs = planned(net, x)
    output, state = _run(net, x)
    expected, expected_state = _run(reference, x)
    assert torch.equal(output, expected) and isinstance(state, list) and len(runs) == 1
    # The state is no tensor, so the next steps run the network's own code.
    (output, state), (expected, expected_state) = _run(net, x, state), _run(reference, x, expected_state)
    assert torch.equal(output, expected) and same(state[1].v, expected_state[1].v) and len(runs) == 1


@pytest.mark.parametrize("make", [make_box, make_lif, norse.IAFCell], ids=["box", "lif", "iaf"])
def test_mnist_network(make: Callable[[], nn.Module], planned: Planned) -> None:
    net, reference = set_exact_weights(MnistNet(make)), set_exact_weights(MnistNet(make))
    reference.load_state_dict(net.state_dict())
    x = make_exact_input(5, 2, 1, 28, 28) * 4
    runs = planned(net, x)
    expected = _run(reference, x)
    torch.testing.assert_close(_run(net, x), expected)
    assert expected.any() and runs
    layers = {row.name: row.backend for row in sparseflow.explain(net).layers}
    assert layers["conv2"] == layers["fc1"] == "events"


def test_lifted_layers_and_sequences(planned: Planned) -> None:
    def make() -> Any:
        return set_exact_weights(
            norse.SequentialState(
                norse.Lift(nn.Conv2d(1, 8, 3)), norse.LIF(), norse.Lift(nn.Conv2d(8, 4, 3)), norse.LIF()
            ),
            gain=20.0,
        )

    net, reference = make(), make()
    x = make_exact_input(6, 2, 1, 8, 8) * 8
    runs = planned(net, x)
    output, expected = _run(net, x)[0], _run(reference, x)[0]
    assert torch.equal(output, expected) and expected.any() and runs
    assert _list_modes(net) == {"2.lifted_module": ("", "sparse")}


@pytest.mark.parametrize(("make", "reason"), UNFUSED.values(), ids=UNFUSED)
def test_other_cells_have_a_reason(make: Callable[[], nn.Module], reason: str) -> None:
    info = get_neuron_info(make())
    assert info is not None and info.output == "binary" and info.spec is None
    assert info.reason is not None and reason in info.reason


def test_integrators_output_no_spikes() -> None:
    for make in (norse.LICell, norse.LI, norse.LIBoxCell, lambda: LILinearCell(4, 4)):
        info = get_neuron_info(make())
        assert info is not None and info.output == "real"
