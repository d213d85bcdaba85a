"""NIR: networks from a library's importer are optimized, and `restore` gives back what its exporter takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("snntorch")
pytest.importorskip("sinabs.layers")
pytest.importorskip("nirtorch")

import sinabs.layers as sl
import snntorch
from sinabs.nir import to_nir
from snntorch.export_nir import export_to_nir
from snntorch.import_nir import import_from_nir

import sparseflow
from tests.spiking.libraries.dyadic import make_exact_input, set_exact_weights

Planned = Callable[..., list[int]]
pytestmark = pytest.mark.filterwarnings("ignore")


def make_snntorch_network() -> Any:
    def make(size: int, **options: Any) -> nn.Module:
        beta, threshold = torch.full((size,), 0.5), torch.ones(size)
        leaky: Any = snntorch.Leaky  # `threshold` is annotated as float
        return leaky(
            beta=beta,
            threshold=threshold,
            init_hidden=True,
            reset_mechanism="zero",
            reset_delay=False,
            **options,
        )

    layers = (nn.Linear(20, 40), make(40), nn.Linear(40, 10), make(10, output=True))
    return set_exact_weights(nn.Sequential(*layers))


def test_export_after_restore_from_snntorch(planned: Planned) -> None:
    net, x = make_snntorch_network(), make_exact_input(3, 20)
    expected: Any = export_to_nir(net, x, ignore_dims=[0])
    runs = planned(net, x)
    with torch.no_grad():
        net(x)
    sparseflow.restore(net)
    graph: Any = export_to_nir(net, x, ignore_dims=[0])
    assert runs and graph.edges == expected.edges
    for key, node in expected.nodes.items():
        assert type(graph.nodes[key]) is type(node)
    assert (graph.nodes["0"].weight == net[0].weight.detach().numpy()).all()


def test_import_to_snntorch(planned: Planned) -> None:
    net, x = make_snntorch_network(), make_exact_input(3, 20) * 2
    graph: Any = export_to_nir(net, x, ignore_dims=[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imported, reference = import_from_nir(graph).eval(), import_from_nir(graph).eval()
    runs = planned(imported, x)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(imported(x)[0][0], reference(x)[0][0])
    assert len(runs) == 3
    assert [row.backend for row in sparseflow.explain(imported).layers if row.fed_by] == ["events"]


def test_export_after_restore_from_sinabs(planned: Planned) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), sl.IAFSqueeze(batch_size=1), nn.Flatten(), nn.Linear(144, 10),
        sl.LIFSqueeze(tau_mem=10.0, batch_size=1),
    )  # fmt: skip
    set_exact_weights(net)
    x = make_exact_input(5, 2, 8, 8) * 4
    with torch.no_grad():
        expected: Any = to_nir(net, x)
        runs = planned(net, x)
        net(x)
        sparseflow.restore(net)
        graph: Any = to_nir(net, x)
        assert graph.edges == expected.edges and runs
