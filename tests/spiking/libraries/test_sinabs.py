"""Networks of sinabs: equal outputs, and sparse layers behind binary and integer spikes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("sinabs.layers")

import sinabs.layers as sl
from sinabs.activation import MaxSpike, SingleSpike
from sinabs.from_torch import from_model

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.registry import get_neuron_info
from tests.spiking.libraries.dyadic import make_exact_input, set_exact_weights

Planned = Callable[..., list[int]]


def make_converted() -> nn.Module:
    """sinabs' MNIST example: an analog network whose ReLUs become neurons; with max pooling."""
    analog = nn.Sequential(
        nn.Conv2d(1, 20, 5, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(20, 32, 5, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(32, 64, 3, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(64, 50, bias=False), nn.ReLU(), nn.Linear(50, 10, bias=False),
    )  # fmt: skip
    return from_model(analog, add_spiking_output=True, batch_size=2)


def make_cnn(**options: Any) -> nn.Module:
    """A network of [N * T, C, H, W] built of sinabs' layers."""
    options = {"batch_size": 2, **options}
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1, bias=False), sl.IAFSqueeze(**options), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), sl.LIFSqueeze(tau_mem=20.0, **options), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10, bias=False), sl.IAFSqueeze(**options),
    )  # fmt: skip


def _run_from_rest(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Two calls, the second of which continues from the state of the first."""
    for module in net.modules():
        if isinstance(module, sl.StatefulLayer):
            module.reset_states()
    with torch.no_grad():
        return [net(x), net(x)]


def _check(net: nn.Module, x: torch.Tensor, planned: Planned) -> dict[str, str]:
    """Compare with the dense network; returns the backend of each layer."""
    expected = _run_from_rest(net, x)
    runs = planned(net, x)
    torch.testing.assert_close(_run_from_rest(net, x), expected, rtol=0, atol=0)
    assert expected[1].any() and len(runs) == 2
    return {row.name: row.backend for row in sparseflow.explain(net).layers}


def test_converted_network(planned: Planned) -> None:
    net = set_exact_weights(make_converted())
    layers = _check(net, make_exact_input(8, 1, 28, 28) * 4, planned)
    names = ("3", "6", "10", "12")
    assert {name: layers[f"spiking_model.{name}"] for name in names} == dict.fromkeys(names, "events")


@pytest.mark.parametrize("spike_fn", [SingleSpike, MaxSpike(3)], ids=["single", "at most 3"])
def test_network_of_squeezed_layers(spike_fn: Any, planned: Planned) -> None:
    net = set_exact_weights(make_cnn(spike_fn=spike_fn))
    layers = _check(net, make_exact_input(8, 2, 16, 16) * 4, planned)
    assert layers["3"] == layers["7"] == "events"


def test_sequences_of_five_dimensions(planned: Planned) -> None:
    net = nn.Sequential(
        sl.Repeat(nn.Conv2d(2, 8, 3)), sl.IAF(), sl.Repeat(nn.Conv2d(8, 8, 3)), sl.ExpLeak(tau_mem=20.0)
    )
    layers = _check(set_exact_weights(net), make_exact_input(2, 4, 2, 8, 8) * 4, planned)
    assert layers["2.module"] == "events"


def test_more_spikes_than_can_be_represented_run_dense(planned: Planned) -> None:
    net = set_exact_weights(make_cnn())
    x = make_exact_input(8, 2, 16, 16) * 64
    expected = _run_from_rest(net, x)
    planned(net, x)
    torch.testing.assert_close(_run_from_rest(net, x), expected, rtol=0, atol=0)
    assert get_accelerated_forward(net).list_plans()[-1] is not None


def test_outputs() -> None:
    cases: list[tuple[nn.Module, str, int | None, str]] = [
        (sl.IAF(), "integer", 256, "several spikes"),
        (sl.LIF(tau_mem=10.0, spike_fn=SingleSpike), "binary", 1, "time axis"),
        (sl.LIFSqueeze(tau_mem=10.0, batch_size=1, spike_fn=MaxSpike(4)), "integer", 4, "several spikes"),
        (sl.ExpLeak(tau_mem=10.0), "real", None, "membrane"),
        (sl.ALIF(tau_mem=10.0, tau_adapt=10.0), "binary", 1, "adapt"),
        (sl.IAFRecurrent(rec_connect=nn.Linear(3, 3)), "integer", 256, "fed back"),
    ]
    for layer, output, max_value, reason in cases:
        info = get_neuron_info(layer)
        assert info is not None and (info.output, info.max_value) == (output, max_value)
        assert info.spec is None and info.reason is not None and reason in info.reason
