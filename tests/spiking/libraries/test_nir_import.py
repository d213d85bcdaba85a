"""`import_nir`: networks of spikingjelly from NIR graphs, against the networks that were exported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("nir")
pytest.importorskip("nirtorch")
pytest.importorskip("spikingjelly")

import nir
from spikingjelly.activation_based import functional, layer, neuron, nir_exchange

import sparseflow
from sparseflow.errors import InputError
from sparseflow.spiking import import_nir
from tests.spiking.libraries.dyadic import make_exact_input, set_exact_weights

pytestmark = pytest.mark.filterwarnings("ignore")


def make_network() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        layer.Conv2d(2, 4, 3, padding=1), neuron.IFNode(), layer.AvgPool2d(2),
        layer.Conv2d(4, 8, 3, stride=2), neuron.LIFNode(tau=2.0), layer.Flatten(),
        layer.Linear(8, 10, bias=False), neuron.LIFNode(tau=4.0, decay_input=False),
    )  # fmt: skip
    return set_exact_weights(network)


def export(network: nn.Module) -> Any:
    network = copy.deepcopy(network)
    functional.set_step_mode(network, "s")
    graph = nir_exchange.export_to_nir(network, make_exact_input(1, 2, 8, 8))
    functional.reset_net(network)
    return graph


def test_a_graph_of_spikingjelly_is_optimized() -> None:
    network, x = make_network(), make_exact_input(3, 2, 2, 8, 8) * 4
    graph = export(network)
    functional.set_step_mode(network, "m")
    with torch.no_grad():
        expected = network(x)
        imported = sparseflow.optimize(graph, x, cache=False)
        assert expected.any() and torch.equal(imported(x), expected)
    assert [row.backend for row in sparseflow.explain(imported).layers if row.fed_by]


def test_a_graph_of_sinabs() -> None:
    sinabs, layers = pytest.importorskip("sinabs"), pytest.importorskip("sinabs.layers")
    from sinabs.nir import to_nir

    integrate = layers.IAFSqueeze(
        batch_size=2,
        spike_fn=sinabs.activation.SingleSpike,
        reset_fn=sinabs.activation.MembraneReset(),
    )
    network = set_exact_weights(
        nn.Sequential(nn.Conv2d(2, 4, 3), integrate, nn.Flatten(), nn.Linear(144, 10))
    )
    x = make_exact_input(2, 3, 2, 8, 8) * 4
    with torch.no_grad():
        graph: Any = to_nir(network, x.flatten(0, 1))
        integrate.reset_states()
        expected = network(x.flatten(0, 1)).unflatten(0, (2, 3)).movedim(0, 1)
        assert expected.any() and torch.equal(import_nir(graph, dt=1.0)(x.movedim(0, 1)), expected)


def test_a_graph_of_snntorch() -> None:
    snntorch = pytest.importorskip("snntorch")
    from snntorch.export_nir import export_to_nir

    def make(size: int, **options: Any) -> nn.Module:
        return snntorch.Leaky(
            beta=torch.full((size,), 0.5), threshold=torch.ones(size), init_hidden=True,
            reset_mechanism="zero", reset_delay=False, **options,
        )  # fmt: skip

    network = set_exact_weights(nn.Sequential(nn.Linear(20, 40), make(40), nn.Linear(40, 10), make(10)))
    x = make_exact_input(3, 2, 20) * 2
    graph: Any = export_to_nir(network, x[0], ignore_dims=[0])
    with torch.no_grad():
        for module in network:
            if hasattr(module, "reset_mem"):
                module.reset_mem()
        expected = torch.stack([network(step) for step in x])
        assert expected.any() and torch.equal(import_nir(graph)(x), expected)


def make_chain(*nodes: Any) -> Any:
    names = [f"node.{i}" for i in range(len(nodes))]
    sizes = {"input": torch.tensor([3]).numpy()}, {"output": torch.tensor([3]).numpy()}
    return nir.NIRGraph(
        nodes={
            "in": nir.Input(sizes[0]),
            **dict(zip(names, nodes, strict=True)),
            "out": nir.Output(sizes[1]),
        },
        edges=list(zip(["in", *names], [*names, "out"], strict=True)),
    )


def make_lif(**values: float | torch.Tensor) -> Any:
    defaults = {"tau": 2e-4, "r": 1.0, "v_leak": 0.0, "v_threshold": 1.0, "v_reset": 0.0} | values
    arrays: Any = {name: (torch.ones(3).double() * value).numpy() for name, value in defaults.items()}
    return nir.LIF(**arrays)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (make_lif(r=3.0), r"`r` \(=3\) is neither 1 nor tau / dt \(=2\)"),
        (make_lif(v_leak=0.5), r"`v_leak` \(=0.5\) is not `v_reset`"),
        (make_lif(tau=1e-5), "not more than dt"),
        (make_lif(tau=torch.tensor([1.0, 2.0, 1.0])), "`tau` differs between its neurons"),
        (nir.Threshold(torch.ones(3).numpy()), "is a Threshold; supported are Affine, AvgPool2d"),
        (
            nir.IF(
                r=torch.ones(3).numpy(), v_threshold=torch.ones(3).numpy(), v_reset=torch.zeros(3).numpy()
            ),
            "it fits dt=1",
        ),
    ],
)
def test_nodes_that_cannot_be_converted(node: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_nir(make_chain(node))


def test_inputs_of_a_node_are_added() -> None:
    graph = make_chain(nir.Linear(torch.eye(3).numpy()), nir.Linear(2 * torch.eye(3).numpy()))
    graph.edges.append(("node.0", "out"))
    x = torch.rand(2, 1, 3)
    with torch.no_grad():
        torch.testing.assert_close(import_nir(graph)(x), 3 * x)


def test_graphs_that_are_refused() -> None:
    graph = make_chain(make_lif(), make_lif())
    graph.edges.append(("node.1", "node.0"))
    with pytest.raises(InputError, match=r"has a cycle \(node\.[01] -> node\.[01]"):
        import_nir(graph)
    with pytest.raises(InputError, match=r"must be a nir\.NIRGraph, not dict"):
        import_nir({})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"`dt` \(=0\)"):
        import_nir(make_chain(make_lif()), dt=0)
