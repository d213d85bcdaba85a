"""The share of layers behind spikes that run sparse or fused, in networks of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sparseflow
from tests.spiking.libraries.dyadic import make_exact_input, set_exact_weights

MIN_SHARE = 0.95
_SKIPPED = "its library is not installed"

Case = Callable[[], tuple[nn.Module, torch.Tensor]]


def _make_snntorch(name: str, *shape: int) -> Case:
    def make() -> tuple[nn.Module, torch.Tensor]:
        pytest.importorskip("snntorch", reason=_SKIPPED)
        from tests.spiking.libraries import snntorch_nets

        return getattr(snntorch_nets, name)(), make_exact_input(*shape) * 2

    return make


def _make_norse(name: str, *shape: int) -> Case:
    def make() -> tuple[nn.Module, torch.Tensor]:
        pytest.importorskip("norse.torch", reason=_SKIPPED)
        from tests.spiking.libraries import test_norse

        return getattr(test_norse, name)(test_norse.make_lif), make_exact_input(*shape) * 4

    return make


def _make_sinabs(name: str, *shape: int) -> Case:
    def make() -> tuple[nn.Module, torch.Tensor]:
        pytest.importorskip("sinabs.layers", reason=_SKIPPED)
        from tests.spiking.libraries import test_sinabs

        return getattr(test_sinabs, name)(), make_exact_input(*shape) * 4

    return make


CASES: dict[str, Case] = {
    "snntorch fully connected": _make_snntorch("FullyConnected", 3, 20),
    "snntorch convolutional": _make_snntorch("Convolutional", 2, 1, 28, 28),
    "snntorch sequential": _make_snntorch("make_sequential", 2, 1, 28, 28),
    "snntorch resnet": _make_snntorch("HiddenLoop", 4, 2, 2, 12, 12),
    "snntorch vgg": _make_snntorch("make_vgg", 2, 3, 16, 16),
    "norse mnist": _make_norse("MnistNet", 4, 2, 1, 28, 28),
    "norse sequential": _make_norse("SequenceNet", 4, 2, 1, 28, 28),
    "sinabs converted": _make_sinabs("make_converted", 8, 1, 28, 28),
    "sinabs squeezed": _make_sinabs("make_cnn", 8, 2, 16, 16),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_layers_behind_spikes_run_sparse_or_fused(make: Case, prefer: Callable[..., Any]) -> None:
    net, x = make()
    set_exact_weights(net)
    prefer("sparse", "dense")
    sparseflow.optimize(net, x)
    backends = {row.name: row.backend for row in sparseflow.explain(net).layers if row.fed_by}
    replaced = [name for name, backend in backends.items() if backend in ("events", "dense, fused neuron")]
    assert len(replaced) >= MIN_SHARE * len(backends) and backends, backends
