"""Each dense baseline computes what the network computes from rest."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, neuron

from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.profile.baselines import EAGER, build_baselines, fold_network
from tests.spiking.families import CASES, FAMILIES
from tests.spiking.nets import (
    Constant,
    Opaque,
    Small,
    dyadic,
    from_rest,
    images,
    membranes,
    ready,
    same,
    small,
)

X = images(3, 2)


def test_folded_network_has_no_batchnorm_and_same_output() -> None:
    net = small(make=neuron.LIFNode)
    expected = from_rest(net, X)
    saved_state = copy.deepcopy(net.state_dict())
    duplicate = fold_network(analyze(net, X))
    called = {str(n.target) for n in duplicate.graph.nodes if n.op == "call_module"}
    assert called == {"conv1", "conv2", "conv3", "sn1", "sn2", "sn3", "fc"}
    for _ in range(2):
        functional.reset_net(duplicate)
        with torch.no_grad():
            assert same(duplicate(X), expected)
    assert same(net.state_dict(), saved_state) and type(net.sn1) is neuron.LIFNode


def test_shared_batchnorm_is_not_folded() -> None:
    class Shared(Small):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.bn1(self.conv2(x)))))

    net = ready(Shared())
    expected = from_rest(net, X)
    duplicate = fold_network(analyze(net, X))
    functional.reset_net(duplicate)
    with torch.no_grad():
        assert same(duplicate(X), expected)


def test_only_a_traced_network_can_be_folded() -> None:
    with pytest.raises(ValueError, match="traced"):
        fold_network(analyze(ready(Opaque()), X))


def check_forms(net: nn.Module, x: torch.Tensor, *, exact: bool = True, **options: Any) -> set[str]:
    expected = from_rest(net, x)
    saved = copy.deepcopy(net.state_dict())
    forms = build_baselines(net, analyze(net, x), x, **options)
    for name, form in forms.items():
        for _ in range(2):
            actual = form(x)
            if exact:
                assert same(actual, expected), name
            else:
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert same(net.state_dict(), saved)
    return set(forms)


ALL = {EAGER, "channels_last", "folded", "folded, channels_last"}


@pytest.mark.parametrize(
    ("build", "x"), [(small, X), (lambda: ready(Constant()), images(2)), (lambda: small("s"), images(2))]
)
def test_every_form_is_the_network_from_rest(build: Any, x: torch.Tensor) -> None:
    net = build()
    assert check_forms(net, x, compile=False) == ALL


def test_unreplaced_neurons_also_start_from_rest() -> None:
    """A neuron that is not replaced must not carry its membrane to the next timing round."""
    net = Small(make=lambda: neuron.KLIFNode())
    net.sn1 = neuron.IFNode(step_mode="m")
    assert check_forms(ready(net), X, compile=False, exact=False) == ALL


def test_untraceable_network_has_two_baselines() -> None:
    assert check_forms(ready(Opaque()), X, compile=False) == {EAGER, "channels_last"}


@pytest.mark.parametrize(
    ("name", "mode"), [c for c in CASES if c[0] in ("spiking_resnet", "sew_resnet", "spike_dhs")]
)
def test_families(name: str, mode: str) -> None:
    net, x = FAMILIES[name](mode)
    dyadic(net)
    check_forms(net, x.mul(16).round().div(16), compile=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_compiled_forms() -> None:
    assert check_forms(small(), X) == ALL | {"folded, compiled", "folded, channels_last, compiled"}


def test_baselines_do_not_change_the_networks_membranes() -> None:
    """Only the eager form runs the network itself."""
    net = small()
    forms = build_baselines(net, analyze(net, X), X, compile=False)
    functional.reset_net(net)
    for name, form in forms.items():
        if name != EAGER:
            form(X)
    assert all(not isinstance(v, torch.Tensor) for v in membranes(net).values())
