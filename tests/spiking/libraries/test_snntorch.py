"""Networks of snnTorch: equal outputs and states, in groups, in all idioms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import snntorch
import torch
from snntorch import surrogate, utils
from torch import nn

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.graph.registry import get_neuron_info
from sparseflow.spiking.runtime.plan import Plan
from tests.spiking.libraries.dyadic import make_exact_input, set_exact_weights
from tests.spiking.libraries.snntorch_nets import (
    Convolutional,
    FullyConnected,
    HiddenLoop,
    OneStep,
    make_leaky,
    make_sequential,
    make_vgg,
)
from tests.spiking.nets import same

Planned = Callable[..., list[int]]
Lapicque: Any = snntorch.Lapicque  # its parameters are annotated as bool

NEURONS: dict[str, Callable[..., nn.Module]] = {
    "subtract": make_leaky,
    "zero": lambda **options: make_leaky(reset_mechanism="zero", **options),
    "none": lambda **options: make_leaky(reset_mechanism="none", **options),
    "threshold": lambda **options: make_leaky(threshold=0.75, **options),
    "learned": lambda **options: make_leaky(learn_beta=True, learn_threshold=True, **options),
    "default surrogate": lambda **options: snntorch.Leaky(beta=0.25, **options),
    "equal tensors": lambda **options: make_leaky(beta=torch.full((1,), 0.5), **options),
    "immediate reset to zero": lambda **options: make_leaky(
        reset_mechanism="zero", reset_delay=False, **options
    ),
    "no decay": lambda **options: make_leaky(beta=1.5, **options),
    "no memory": lambda **options: make_leaky(beta=0.0, **options),
    "lapicque": lambda **options: Lapicque(R=2.0, C=0.5, time_step=0.5, **options),
}
UNFUSED: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "inhibition": (lambda **o: make_leaky(inhibition=True, **o), "only the neuron with the largest"),
    "quantized": (lambda **o: make_leaky(state_quant=lambda v: v.round(), **o), "quantized"),
    "immediate reset": (lambda **o: make_leaky(reset_delay=False, **o), "depends on two steps"),
    "betas": (lambda **o: make_leaky(beta=torch.rand(3), **o), "decay rates differ"),
    "thresholds": (lambda **o: make_leaky(threshold=torch.rand(3) + 1, **o), "thresholds differ"),
    "synaptic": (lambda **o: snntorch.Synaptic(alpha=0.5, beta=0.5, **o), "synaptic current"),
    "lapicque zero": (
        lambda **o: Lapicque(beta=0.5, reset_mechanism="zero", **o),
        "sets the membrane to zero for a whole step",
    ),
    "recurrent": (lambda **o: snntorch.RLeaky(beta=0.5, all_to_all=False, **o), "fed back"),
}


def _make_pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Two networks with the same weights: `copy.deepcopy` hides the neurons from snnTorch's `reset`."""
    net, reference = set_exact_weights(make()), set_exact_weights(make())
    reference.load_state_dict(net.state_dict())
    return net, reference


def _run(net: nn.Module, *inputs: Any) -> Any:
    with torch.no_grad():
        return net(*inputs)


def _run_steps(net: nn.Module, x: torch.Tensor, steps: int = 4) -> Any:
    """The `forward_pass` of tutorial 6."""
    utils.reset(net)
    return [_run(net, x * (1 + step / 4)) for step in range(steps)]


def _get_plan(net: nn.Module) -> Plan:
    plan = get_accelerated_forward(net).list_plans()[-1]
    assert plan is not None
    return plan


def _list_fused(net: nn.Module) -> list[str]:
    return [group.match.neuron_name for group in _get_plan(net).groups if group.match.neuron is not None]


@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_explicit_membranes_in_a_loop(make: Callable[..., nn.Module], planned: Planned) -> None:
    class Net(FullyConnected):
        def forward(self, x: torch.Tensor) -> Any:
            mem1: Any = self.lif1.reset_mem()  # type: ignore[operator]
            mem2: Any = self.lif2.reset_mem()  # type: ignore[operator]
            spikes = []
            for _ in range(self.num_steps):
                spk1, mem1 = self.lif1(self.fc1(x), mem1)
                spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
                spikes.append(spk2)
            return torch.stack(spikes), mem1, mem2

    net, reference = _make_pair(lambda: Net(make=make))
    x = make_exact_input(3, 20) * 2
    runs = planned(net, x)
    expected: Any = None
    for _ in range(2):
        output, expected = _run(net, x), _run(reference, x)
        assert same(output, expected)
        assert torch.equal(net.lif1.mem, reference.lif1.mem) and torch.equal(net.lif2.mem, reference.lif2.mem)
    assert len(runs) == 2 and expected[0].any()
    assert _list_fused(net) == ["lif1", "lif2"]


def test_recorded_membranes(planned: Planned) -> None:
    net, reference = _make_pair(FullyConnected)
    x = make_exact_input(3, 20) * 2
    runs = planned(net, x)
    assert same(_run(net, x), _run(reference, x)) and runs
    # The kernels return the membrane after the last step only.
    assert _list_fused(net) == ["lif1"]
    assert [group.name for group in _get_plan(net).groups] == ["fc1", "fc2"]


@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (4, 2, 1, 28, 28)])
def test_convolutional_network(shape: tuple[int, ...], planned: Planned) -> None:
    net, reference = _make_pair(Convolutional)
    x = make_exact_input(*shape)
    runs = planned(net, x)
    output, expected = _run(net, x), _run(reference, x)
    assert same(output, expected) and expected[0].any() and runs
    assert _list_fused(net) == ["lif1", "lif2", "lif3"]
    modes = {group.name: group.mode for group in _get_plan(net).groups}
    assert modes["conv2"] == modes["fc1"] == "sparse"


def test_membranes_passed_by_the_caller(planned: Planned) -> None:
    net, reference = _make_pair(OneStep)
    x = make_exact_input(3, 20) * 2
    state: Any = (torch.zeros(3, 40), torch.zeros(3, 10))
    runs = planned(net, (x, *state))
    for _ in range(4):
        output, expected = _run(net, x, *state), _run(reference, x, *state)
        assert same(output, expected)
        state = expected[0], expected[2]
    assert len(runs) == 4 and _list_fused(net) == ["lif1", "lif2"]


@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_hidden_states(make: Callable[..., nn.Module], planned: Planned) -> None:
    net, reference = _make_pair(lambda: make_sequential(make))
    x = make_exact_input(2, 1, 28, 28)
    runs = planned(net, x)
    assert _list_fused(net) == ["2", "5", "8"]
    for _ in range(2):
        assert same(_run_steps(net, x), _run_steps(reference, x))
    assert len(runs) == 8
    # Another batch size starts from rest, as in snnTorch.
    smaller = make_exact_input(1, 1, 28, 28)
    assert same(_run(net, smaller), _run(reference, smaller))
    assert same(_run(net, x), _run(reference, x))


def test_state_carries_over_to_the_networks_own_code(planned: Planned) -> None:
    net, reference = _make_pair(make_sequential)
    x = make_exact_input(2, 1, 28, 28)
    planned(net, x)
    assert same(_run(net, x), _run(reference, x))
    assert same(_run(net, x), _run(reference, x))
    sparseflow.restore(net)
    assert same(_run(net, x), _run(reference, x))
    assert {name for name, _ in net.named_buffers()} == {name for name, _ in reference.named_buffers()}
    assert net.state_dict().keys() == reference.state_dict().keys()


def test_spiking_resnet_with_hidden_states(planned: Planned) -> None:
    net, reference = _make_pair(HiddenLoop)
    x = make_exact_input(4, 2, 2, 12, 12) * 2
    runs = planned(net, x)
    for _ in range(2):  # the network resets its neurons itself
        output, expected = _run(net, x), _run(reference, x)
        assert same(output, expected)
    assert runs and len(_list_fused(net)) == 5
    modes = [group.mode for group in _get_plan(net).groups]
    assert modes.count("sparse") == 5  # four convolutions in blocks, and the head


def test_vgg_with_batchnorm(planned: Planned) -> None:
    net, reference = _make_pair(make_vgg)
    x = make_exact_input(2, 3, 16, 16) * 2
    runs = planned(net, x)
    for output, expected in zip(_run_steps(net, x), _run_steps(reference, x), strict=True):
        assert same(output, expected)
    assert len(runs) == 4
    assert [row.backend for row in sparseflow.explain(net).layers] == [
        "dense, fused neuron", *["events"] * 5,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Inhibition is an unstable feature")
@pytest.mark.parametrize(("make", "reason"), UNFUSED.values(), ids=UNFUSED)
def test_other_neurons_have_a_reason(make: Callable[..., nn.Module], reason: str) -> None:
    info = get_neuron_info(make())
    assert info is not None and info.output == "binary" and info.spec is None
    assert info.reason is not None and reason in info.reason


def test_synaptic_neurons_join_and_their_layers_run_sparse(planned: Planned) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(20, 40), snntorch.Synaptic(alpha=0.5, beta=0.5)
            self.fc2, self.lif2 = nn.Linear(40, 10), snntorch.Synaptic(alpha=0.5, beta=0.5)

        def forward(self, x: torch.Tensor) -> Any:
            syn1, mem1 = self.lif1.init_synaptic()
            syn2, mem2 = self.lif2.init_synaptic()
            spikes, currents = [], []
            for step in range(x.shape[0]):
                spk1, syn1, mem1 = self.lif1(self.fc1(x[step]), syn1, mem1)
                spk2, syn2, mem2 = self.lif2(self.fc2(spk1), syn2, mem2)
                spikes.append(spk2)
                currents.append(syn2)
            return torch.stack(spikes), torch.stack(currents), mem2

    net, reference = _make_pair(Net)
    x = make_exact_input(4, 3, 20)
    runs = planned(net, x)
    assert same(_run(net, x), _run(reference, x)) and runs
    assert [(group.name, group.mode) for group in _get_plan(net).groups] == [("fc2", "sparse")]


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"graded_spikes_factor": 2.0}, "real"),
        ({"spike_grad": surrogate.SFS()}, "binary"),
        ({"spike_grad": lambda x: x.clamp(min=0)}, "real"),
        ({"surrogate_disable": True}, "binary"),
    ],
)
def test_outputs(options: dict[str, Any], output: str) -> None:
    info = get_neuron_info(make_leaky(**options))
    assert info is not None and info.output == output
    assert (info.returned_states, info.state, info.step_mode) == (1, "mem", "s")


def test_the_membrane_is_no_spike() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif, self.fc2 = nn.Linear(8, 8), make_leaky(), nn.Linear(8, 4)
            self.fc3 = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spikes, membrane = self.lif(self.fc1(x), None)
            return self.fc2(membrane) + self.fc3(spikes)

    for method in ("fx", "hooks"):
        graph = analyze(Net().eval(), torch.rand(2, 8), method=method)  # type: ignore[arg-type]
        assert [site.name for site in graph.sites if site.fed_by] == ["fc3"]


def test_the_tuple_may_be_indexed_from_its_end(planned: Planned) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(20, 40), make_leaky(init_hidden=True, output=True)
            self.fc2, self.lif2 = nn.Linear(40, 10), make_leaky(init_hidden=True, output=True)

        def forward(self, x: torch.Tensor) -> Any:
            first = self.lif1(self.fc1(x))
            second = self.lif2(self.fc2(first[-2]))
            return second[0], first[-1], second[:1]

    net, reference = _make_pair(Net)
    x = make_exact_input(3, 20) * 2
    runs = planned(net, x)
    assert same(_run(net, x), _run(reference, x)) and runs
    assert _list_fused(net) == ["lif1"]


@pytest.mark.parametrize(
    ("make", "shape"), [(FullyConnected, (2, 20)), (HiddenLoop, (2, 1, 2, 6, 6))], ids=["linear", "resnet"]
)
def test_packed_backend(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton", reason="the packed kernels need triton")
    from sparseflow.spiking.backends.packed.backend import PackedBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, reference = (network.to(device) for network in _make_pair(make))
    x = make_exact_input(*shape).to(device) * 2
    plan = Plan(analyze(net, x), PackedBackend(device, torch.float32))
    for group in plan.groups:
        group.mode = "dense" if group.match.dense_convs or not group.match.sources else "sparse"
        if group.match.neuron is None:
            group.mode = "module"
    plan.update_output_forms()
    with torch.no_grad():
        assert same(plan.run(x), reference(x))


def test_changed_constants_are_noticed(planned: Planned) -> None:
    net, reference = _make_pair(make_sequential)
    x = make_exact_input(2, 1, 28, 28)
    runs = planned(net, x)
    for changed in (net, reference):
        changed[2].threshold.fill_(0.5)
        changed[5].beta = torch.tensor(0.25)
    assert same(_run_steps(net, x), _run_steps(reference, x)) and runs


@pytest.mark.parametrize("output", [False, True])
def test_a_forward_that_resets_hidden_states_runs_by_a_plan(prefer: Callable[..., Any], output: bool) -> None:
    class Resetting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(8, 16), snntorch.Leaky(beta=0.5, threshold=0.3, init_hidden=True)
            self.fc2 = nn.Linear(16, 4)
            self.lif2 = snntorch.Leaky(beta=0.5, threshold=0.1, init_hidden=True, output=output)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lif1.reset_mem()
            self.lif2.reset_mem()
            steps = [self.lif2(self.fc2(self.lif1(self.fc1(image)))) for image in x.unbind()]
            return torch.stack([step[0] if output else step for step in steps])

    torch.manual_seed(0)
    net = Resetting().eval()
    reference = copy.deepcopy(net)
    prefer("sparse")
    x = torch.rand(5, 3, 8)
    sparseflow.optimize(net, x)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(net(x), reference(x))
    (plan,) = get_accelerated_forward(net).list_plans()
    assert plan is not None and plan.starts_at_rest and len(plan.groups) == 2
