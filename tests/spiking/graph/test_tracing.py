"""Traced graphs compute what the network computes; tracing leaves the network unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.graph.module_state import preserve_state
from sparseflow.spiking.graph.tracing import UntraceableError, trace
from tests.spiking import families

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, layer, neuron


def outputs(run: Any, sample: torch.Tensor, times: int = 2) -> list[torch.Tensor]:
    with torch.no_grad():
        actual = [run(sample) for _ in range(times)]
    return [item[0] if isinstance(item, tuple) else item for item in actual]


def same(first: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, right, strict=True))


def module_calls(traced: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name, step_mode", families.CASES)
def test_every_family_computes_the_same(name: str, step_mode: str) -> None:
    net, sample = families.FAMILIES[name](step_mode)
    traced = trace(net, sample)
    other = torch.rand_like(sample)
    for x in (sample, other):
        expected = outputs(net, x)
        assert not torch.equal(expected[0], torch.zeros_like(expected[0]))
        memories = [
            m.v.clone() for m in net.modules() if isinstance(m, neuron.BaseNode) and torch.is_tensor(m.v)
        ]
        functional.reset_net(net)
        assert same(outputs(traced, x), expected)
        after = [m.v for m in net.modules() if isinstance(m, neuron.BaseNode) and torch.is_tensor(m.v)]
        assert same(after, memories)
        functional.reset_net(traced)
        assert all(m.v == 0.0 for m in net.modules() if isinstance(m, neuron.BaseNode))
    names = dict(net.named_modules())
    called: list[nn.Module] = []
    hooks = [m.register_forward_hook(lambda m, *_: called.append(m)) for m in names.values()]
    outputs(net, sample, times=1)
    for hook in hooks:
        hook.remove()
    convs = [key for key, module in names.items() if isinstance(module, nn.Conv2d) and module in called]
    assert set(convs) <= set(module_calls(traced))


@pytest.mark.parametrize("celltype", ["forward", "backward"])
def test_activations_kept_within_a_call_are_traced(celltype: str) -> None:
    net, sample = families.snas("s", celltype)
    traced = trace(net, sample)
    expected = outputs(net, sample)
    functional.reset_net(net)
    assert same(outputs(traced, sample), expected)


def net_in_containers() -> nn.Sequential:
    return nn.Sequential(
        layer.Conv2d(3, 8, 3, padding=1, step_mode="m"),
        neuron.IFNode(step_mode="m"),
        layer.SeqToANNContainer(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
        layer.MultiStepContainer(neuron.LIFNode(), nn.Conv2d(8, 4, 1)),
        layer.StepModeContainer(False, "m", nn.Conv2d(4, 4, 1)),
    ).eval()


def test_containers_are_seen_through() -> None:
    net, sample = net_in_containers(), torch.rand(3, 2, 3, 8, 8) * 4
    traced = trace(net, sample)
    calls = module_calls(traced)
    assert calls.count("2.0") == 1 and calls.count("4.0") == 1
    assert calls.count("3.0") == calls.count("3.1") == 3  # one call a time step
    expected = outputs(net, sample)
    functional.reset_net(net)
    assert same(outputs(traced, sample), expected)


def test_trace_loop_over_steps_needs_a_sample() -> None:
    net = net_in_containers()
    with pytest.raises(UntraceableError, match=r"`3`.*sample"):
        trace(net)
    traced = trace(net, torch.rand(3, 2, 3, 8, 8))
    for batch, size in ((1, 8), (5, 6)):
        traced(torch.rand(3, batch, 3, size, size))
        functional.reset_net(net)
    with pytest.raises(AssertionError):
        traced(torch.rand(4, 2, 3, 8, 8))


class Ranks(nn.Module):
    """Takes an image or a sequence, as spikingjelly's own models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.spike = layer.Conv2d(3, 4, 1, step_mode="m"), neuron.IFNode(step_mode="m")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 4:
            x = x.unsqueeze(0).repeat(2, 1, 1, 1, 1)
        elif x.dim() != 5:
            raise ValueError("neither")
        x = self.spike(self.conv(x))
        assert x.ndim == 5
        return x


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (3, 2, 3, 4, 4)])
def test_trace_branch_on_rank_takes_the_samples_branch(shape: tuple[int, ...]) -> None:
    net, sample = Ranks().eval(), torch.rand(shape)
    traced = trace(net, sample)
    expected = outputs(net, sample)
    functional.reset_net(net)
    assert same(outputs(traced, sample), expected)
    other = torch.rand(2, 3, 4, 4) if len(shape) == 5 else torch.rand(3, 2, 3, 4, 4)
    with pytest.raises(AssertionError):
        traced(other)
    # Settled questions leave no readers behind: only the neuron reads the convolution.
    conv = next(node for node in traced.graph.nodes if node.target == "conv")
    assert [str(user.target) for user in conv.users] == ["spike"]


class InPlace(nn.Module):
    """`+=` on a tensor with another reader, and an element assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = neuron.IFNode(), neuron.LIFNode(tau=1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x), self.second(x)
        saved = a
        a += b
        a *= 2.0
        y = torch.zeros_like(a)
        y[:, 0] = a[:, 1]
        view = y[:, 1:]
        view -= 1.0
        return torch.cat((saved, y))


def test_in_place_operations_stay_in_place() -> None:
    net, sample = InPlace().eval(), torch.rand(2, 3, 4) * 3
    expected = outputs(net, sample)
    functional.reset_net(net)
    assert same(outputs(trace(net), sample), expected)


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spike = neuron.IFNode()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, doubled: bool = False
    ) -> torch.Tensor:
        out = self.spike(x) * self.scale
        if mask is not None:
            out = out * mask
        return out * 2 if doubled else out


def test_arguments_that_are_left_out_keep_their_defaults() -> None:
    net, x = Options().eval(), torch.rand(2, 3) * 3
    traced = trace(net)
    assert torch.equal(traced(x), net(x) if functional.reset_net(net) is None else x)
    functional.reset_net(net)
    masked = trace(net, {"x": x, "mask": torch.zeros(2, 3)})
    assert torch.equal(masked(x, torch.zeros(2, 3)), torch.zeros(2, 3))


def test_convolution_subclass_is_one_node() -> None:
    class Mine(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum() > 0 else input

    assert module_calls(trace(nn.Sequential(neuron.IFNode(), Mine(2, 2, 1)))) == ["0", "1"]


class DependsOnNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spike = neuron.IFNode()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.spike(x)
        return x + 1 if x.sum() > 0 else x


class Remembers(nn.Module):
    """Adds its previous output."""

    def __init__(self) -> None:
        super().__init__()
        self.spike, self.last = neuron.IFNode(), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.spike(x + self.last)
        return self.last


def test_trace_branch_on_numbers_raises() -> None:
    for sample in (None, torch.rand(2, 2)):
        with pytest.raises(UntraceableError):
            trace(DependsOnNumbers(), sample)


def test_activations_kept_in_attributes_are_reported_and_not_left_behind() -> None:
    net = Remembers()
    saved = net.last
    with pytest.raises(UntraceableError, match=r"`last`"):
        trace(net)
    assert net.last is saved


@pytest.mark.parametrize("model", [None, "net", torch.rand, neuron.IFNode])
def test_only_modules_are_traced(model: Any) -> None:
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        trace(model)


def test_unfitting_sample_raises() -> None:
    with pytest.raises(SampleError):
        trace(Ranks(), torch.rand(2, 5, 4, 4))
    with pytest.raises(SampleError):
        trace(Ranks(), {"image": torch.rand(2, 3, 4, 4)})


# --- leaving the network as it was --------------------------------------------------------------------------


def test_tracing_changes_nothing() -> None:
    net: Any = Ranks().eval()
    sample = torch.rand(2, 3, 4, 4)
    net(sample)
    net.spike.v[0, 0, 0, 0] = float("nan")
    net.extra = {"seen": [torch.ones(2)], "count": 3}
    saved, before = net.spike.v, net.spike.v.clone()
    attributes, rng = set(vars(net)), torch.get_rng_state()
    parameters = [(p, p.clone(), p._version) for p in net.parameters()]
    for inputs in (None, sample):
        try:
            trace(net, inputs)
        except UntraceableError:
            assert inputs is None
    assert net.spike.v is saved
    assert torch.equal(saved.view(torch.int32), before.view(torch.int32))
    assert set(vars(net)) == attributes and not net.training
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(p, copy) and p._version == version for p, copy, version in parameters)


def test_kept_state_undoes_whatever_a_run_does() -> None:
    class Messy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(2)
            self.queue, self.table = [torch.zeros(2)], {"a": torch.zeros(2)}
            self.pair = (torch.zeros(2), 1)
            self.count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.queue.append(x)
            self.queue[0] += 1
            self.table["a"].mul_(0).add_(3)
            self.table["b"] = x
            self.pair[0].fill_(7)
            self.new = x
            return F.dropout(self.bn(x), 0.5)

    net: Any = Messy().train()
    first, mean = net.queue[0], net.bn.running_mean
    rng = torch.get_rng_state()
    with preserve_state(net):
        net(torch.rand(4, 2))
        assert net.count == 1 and len(net.queue) == 2
    assert net.count == 0 and not hasattr(net, "new") and net.training
    assert len(net.queue) == 1 and net.queue[0] is first and torch.equal(first, torch.zeros(2))
    assert set(net.table) == {"a"} and torch.equal(net.table["a"], torch.zeros(2))
    assert torch.equal(net.pair[0], torch.zeros(2))
    assert net.bn.running_mean is mean and torch.equal(mean, torch.zeros(2))
    assert int(net.bn.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), rng)


def test_state_is_restored_after_an_error() -> None:
    net = neuron.IFNode()
    with pytest.raises(RuntimeError, match="stop"), preserve_state(net):
        net(torch.ones(2))
        raise RuntimeError("stop")
    assert net.v == 0.0
