"""Values hold at run time, and each convolution gets the right verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import fx, nn

from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.graph.analysis import SpikeGraph, analyze
from sparseflow.spiking.graph.registry import register_neuron, unregister_neuron
from sparseflow.spiking.graph.sites import Refusal
from sparseflow.spiking.graph.tracing import UntraceableError
from sparseflow.spiking.graph.values import SpikeValue
from tests.spiking import families

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, layer, neuron


def verdicts(graph: SpikeGraph) -> list[tuple[Any, ...]]:
    return [
        (s.name, s.fed_by, s.value.kind, s.value.max_value, s.replaceable, s.refusal, s.num_calls)
        for s in graph.sites
    ]


def all_ways(model: nn.Module, sample: Any) -> Iterator[SpikeGraph]:
    yield analyze(model)
    yield analyze(model, sample)
    yield analyze(model, sample, method="hooks")


# --- one operation at a time --------------------------------------------------------------------------------


class OneOp(nn.Module):
    """spikes a, spikes b -> an operation -> a convolution. [N, 4, 6, 6] everywhere."""

    def __init__(self, op: Any, channels: int = 4) -> None:
        super().__init__()
        self.a, self.b = neuron.IFNode(), neuron.LIFNode(tau=1.5)
        self.op = op
        self.conv = nn.Conv2d(channels, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.op(self.a(x), self.b(x)))


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)) * 3
AB, A = ("a", "b"), ("a",)


def iadd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a


BINARY: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "identity": (lambda a, b: a, A),
    "reshape": (lambda a, b: a.reshape(2, -1).view(2, 4, 6, 6), A),
    "flatten": (lambda a, b: torch.flatten(a, 1).unflatten(1, (4, 6, 6)), A),
    "permute": (lambda a, b: a.permute(0, 1, 3, 2).transpose(2, 3).contiguous(), A),
    "squeeze": (lambda a, b: a.unsqueeze(0).squeeze(0), A),
    "slice": (lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1), AB),
    "chunk": (lambda a, b: torch.cat(a.chunk(2, 1)[::-1], 1), A),
    "split": (lambda a, b: torch.cat((a.split(2, 1)[1], b.split(2, 1)[0]), dim=1), AB),
    "stack": (lambda a, b: torch.stack((a, b)).select(0, 1), AB),
    "expand": (lambda a, b: a.unsqueeze(0).expand(2, -1, -1, -1, -1).flatten(0, 1), A),
    "repeat": (lambda a, b: a.repeat(2, 1, 1, 1), A),
    "max_pool": (lambda a, b: F.max_pool2d(a, 3, 1, 1), A),
    "torch.max_pool": (lambda a, b: torch.max_pool2d(a, 2), A),
    "adaptive_max_pool": (lambda a, b: F.adaptive_max_pool2d(a, 3), A),
    "and": (lambda a, b: a * b, AB),
    "iand": (lambda a, b: a * (1.0 - b), A),
    "iand-reversed": (lambda a, b: (1 - a) * b, ("b",)),
    "or": (lambda a, b: 1 - (1 - a) * (1 - b), AB),
    "maximum": (lambda a, b: torch.maximum(a, b), AB),
    "max": (lambda a, b: torch.max(a, b), AB),
    "max over a dimension": (lambda a, b: torch.stack((a, b)).max(dim=0)[0], AB),
    "max values": (lambda a, b: torch.stack((a, b)).max(0).values, AB),
    "amax": (lambda a, b: torch.stack((a, b)).amax(0), AB),
    "clamped sum": (lambda a, b: torch.clamp(a + b, 0, 1), AB),
    "pad": (lambda a, b: F.pad(a, (1, 1, 1, 1)), A),
    "reflect": (lambda a, b: F.pad(a, (1, 1, 1, 1), mode="reflect"), A),
    "nearest": (lambda a, b: F.interpolate(a, scale_factor=2), A),
    "nearest-exact": (lambda a, b: F.interpolate(a, size=5, mode="nearest-exact"), A),
    "dropout at rest": (lambda a, b: F.dropout(a, 0.5, training=False), A),
    "relu": (lambda a, b: F.relu(a), A),
    "plus nothing": (lambda a, b: a + 0, A),
    "plus zeros": (lambda a, b: a + torch.zeros_like(a), A),
    "sum from zero": (lambda a, b: sum([a]), A),  # type: ignore[return-value]
    "times one": (lambda a, b: a * 1.0, A),
    "cast": (lambda a, b: a.half().float(), A),
    "index": (lambda a, b: a[:, [3, 1, 0, 2]], A),
    "roll": (lambda a, b: a.roll(1, 2).flip(3), A),
    "attribute T": (lambda a, b: a.mT, A),
    "clone": (lambda a, b: a.clone().detach(), A),
}
INTEGER: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "add": (lambda a, b: a + b, 2),
    "torch.add": (lambda a, b: torch.add(a, b), 2),
    "method add": (lambda a, b: a.add(b), 2),
    "in place": (iadd, 2),
    "in place method": (lambda a, b: a.add_(b), 2),
    "twice": (lambda a, b: (a + b) + (a + b), 4),
    "sum": (lambda a, b: sum([a, b, a]), 3),  # type: ignore[dict-item]
    "product": (lambda a, b: (a + b) * (b + a), 4),
    "masked": (lambda a, b: (a + b) * (1 - a), 2),
    "pooled": (lambda a, b: F.max_pool2d(a + b, 2), 2),
    "joined": (lambda a, b: torch.cat([a[:, :2], (a + b)[:, 2:]], 1), 2),
    "clamped": (lambda a, b: (a + b + a).clamp(max=2.0), 2),
}
SPARSE: dict[str, Callable[..., torch.Tensor]] = {
    "scaled": lambda a, b: a * 2.74,
    "scaled twice": lambda a, b: 0.5 * (a * 3),
    "sum of scaled": lambda a, b: a * 0.5 + b * 0.5,
    "negative": lambda a, b: -a,
    "halved": lambda a, b: a / 2,
    "a third": lambda a, b: a / 3,
    "difference": lambda a, b: a - b,
    "weighted": lambda a, b: a + 2 * b,
    "attention": lambda a, b: a * torch.sigmoid(b),
    "alpha": lambda a, b: torch.add(a, b, alpha=0.5),
    "active dropout": lambda a, b: F.dropout(a, 0.5),
}
DENSE: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "average pooling": (lambda a, b: F.avg_pool2d(a, 2), "average pooling"),
    "bilinear": (lambda a, b: F.interpolate(a, scale_factor=2, mode="bilinear"), "bilinear"),
    "inverted": (lambda a, b: 1 - a, "mostly ones"),
    "both inverted": (lambda a, b: (1 - a) * (1 - b), "mostly ones"),
    "partly inverted": (lambda a, b: torch.cat([a[:, :2], 1 - b[:, :2]], 1), "mostly ones"),
    "two less": (lambda a, b: 2 - a, "2 - spikes"),
    "offset": (lambda a, b: a + 0.5, "constant"),
    "with a constant": (lambda a, b: a + torch.full((6,), 0.1), ""),
    "mean": (lambda a, b: a - a.mean(0, keepdim=True), "mean"),
    "matrix product": (lambda a, b: a @ b, "matrix product"),
    "sigmoid": (lambda a, b: torch.sigmoid(a), "sigmoid"),
    "indices": (lambda a, b: torch.stack((a, b)).max(dim=0)[1].float(), ""),
    "indices by name": (lambda a, b: torch.stack((a, b)).max(dim=0).indices.float(), ""),
    "padded with ones": (lambda a, b: F.pad(a, (1, 1, 1, 1), value=1.0), "padding"),
    "not a number": (lambda a, b: a * float("nan"), "nan"),
    "other bits": (lambda a, b: a.view(torch.int32).float(), "bits"),
    "dilated pool": (lambda a, b: F.max_pool2d(a, 2, 1, 1, 2), "max_pool2d"),
    "where": (lambda a, b: torch.where(a > 0, b, a), "where"),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_stays_binary(name: str) -> None:
    op, sources = BINARY[name]
    for graph in all_ways(OneOp(op).eval(), X):
        site = graph.sites[0]
        assert (site.value.kind, site.value.max_value, site.fed_by) == ("binary", 1, sources), str(graph)
        assert site.replaceable and site.refusal is None and site.num_calls == 1
        assert len(site.value.path) >= 1


@pytest.mark.parametrize("name", INTEGER)
def test_sums_of_spikes_are_small_integers(name: str) -> None:
    op, max_value = INTEGER[name]
    for graph in all_ways(OneOp(op).eval(), X):
        site = graph.sites[0]
        assert (site.value.kind, site.value.max_value) == ("integer", max_value), str(graph)
        assert site.fed_by and set(site.fed_by) <= set(AB)
        assert site.replaceable


@pytest.mark.parametrize("name", SPARSE)
def test_scaled_spikes_keep_their_zeros_only(name: str) -> None:
    for graph in all_ways(OneOp(SPARSE[name]).eval(), X):
        site = graph.sites[0]
        assert site.value.kind == "sparse_real"
        assert site.refusal is Refusal.REAL_VALUES and not site.replaceable and site.fed_by


@pytest.mark.parametrize("name", DENSE)
def test_other_operations_are_dense(name: str) -> None:
    op, word = DENSE[name]
    for graph in all_ways(OneOp(op).eval(), X):
        site = graph.sites[0]
        assert site.value.kind == "dense" and site.fed_by == (), str(graph)
        assert site.refusal is Refusal.NOT_SPIKE_FED and site.reason is not None and word in site.reason


LAYERS: dict[str, tuple[nn.Module, str]] = {
    "Identity": (nn.Identity(), "binary"),
    "Dropout": (nn.Dropout(), "binary"),
    "spikingjelly's Dropout": (layer.Dropout(), "binary"),
    "MaxPool2d": (nn.MaxPool2d(2), "binary"),
    "spikingjelly's MaxPool2d": (layer.MaxPool2d(2), "binary"),
    "ceil": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), "binary"),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(2), "binary"),
    "Upsample": (nn.Upsample(scale_factor=2), "binary"),
    "spikingjelly's Upsample": (layer.Upsample(scale_factor=2), "binary"),
    "ZeroPad2d": (nn.ZeroPad2d(1), "binary"),
    "ConstantPad2d": (nn.ConstantPad2d(1, 0.0), "binary"),
    "ReLU": (nn.ReLU(inplace=True), "binary"),
    "Sequential": (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 6, 6))), "binary"),
    "dilated MaxPool2d": (nn.MaxPool2d(2, 1, 1, 2), "dense"),
    "ConstantPad2d with ones": (nn.ConstantPad2d(1, 1.0), "dense"),
    "AvgPool2d": (nn.AvgPool2d(2), "dense"),
    "spikingjelly's AvgPool2d": (layer.AvgPool2d(2), "dense"),
    "BatchNorm2d": (nn.BatchNorm2d(4), "dense"),
    "spikingjelly's BatchNorm2d": (layer.BatchNorm2d(4), "dense"),
    "bilinear Upsample": (nn.Upsample(scale_factor=2, mode="bilinear"), "dense"),
    "GELU": (nn.GELU(), "dense"),
    "Linear": (nn.Linear(6, 6), "dense"),
    "another convolution": (nn.Conv2d(4, 4, 3), "dense"),
    "SynapseFilter": (layer.SynapseFilter(), "dense"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    inner, kind = LAYERS[name]
    net = nn.Sequential(neuron.IFNode(), inner, nn.Conv2d(4, 2, 1)).eval()
    for graph in all_ways(net, X):
        site = next(s for s in graph.sites if s.name == "2")
        assert site.value.kind == kind and site.replaceable == (kind == "binary"), str(graph)
        if kind == "dense":
            assert site.reason is not None and "`1" in site.reason


def test_layer_with_hook_or_other_forward_is_dense() -> None:
    class Half(nn.Identity):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input * 0.5 + 1

    def louder(module: nn.Module, args: Any, output: Any) -> Any:
        return output + 1

    hooked = nn.Identity()
    hooked.register_forward_hook(louder)
    for inner in (Half(), hooked):
        for graph in all_ways(nn.Sequential(neuron.IFNode(), inner, nn.Conv2d(4, 2, 1)).eval(), X):
            assert graph.sites[0].value.kind == "dense"


def test_active_dropout_is_not_an_identity() -> None:
    net = nn.Sequential(neuron.IFNode(), nn.Dropout(), nn.Conv2d(4, 2, 1)).train()
    for graph in all_ways(net, X):
        assert graph.sites[0].value.kind == "sparse_real"
    assert net.training


# --- verdicts on the convolution itself ---------------------------------------------------------------------


class Doubled(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Named(nn.Conv2d):
    """A subclass without changes."""


def hooked_conv() -> nn.Conv2d:
    conv = nn.Conv2d(4, 4, 3)
    conv.register_forward_hook(lambda *_: None)
    return conv


@pytest.mark.parametrize(
    "conv, refusal",
    [
        (nn.Conv2d(4, 4, 3, padding=1), None),
        (nn.Conv2d(4, 4, 3, stride=2), None),
        (nn.Conv2d(4, 4, 1, stride=2), None),
        (nn.Conv2d(4, 4, 3, padding="same"), None),
        (nn.Conv2d(4, 4, 3, padding="valid"), None),
        (Named(4, 4, 3), None),
        (nn.Conv2d(4, 4, 5), Refusal.KERNEL_SIZE),
        (nn.Conv2d(4, 4, (1, 3)), Refusal.KERNEL_SIZE),
        (nn.Conv2d(4, 4, 3, stride=3), Refusal.STRIDE),
        (nn.Conv2d(4, 4, 3, stride=(1, 2)), Refusal.STRIDE),
        (nn.Conv2d(4, 4, 3, dilation=2), Refusal.DILATION),
        (nn.Conv2d(4, 4, 3, groups=2), Refusal.GROUPS),
        (nn.Conv2d(4, 4, 3, padding=2), Refusal.PADDING),
        (nn.Conv2d(4, 4, 3, padding=(0, 1)), Refusal.PADDING),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), Refusal.PADDING_MODE),
        (nn.ConvTranspose2d(4, 4, 3), Refusal.TRANSPOSED),
        (Doubled(4, 4, 3), Refusal.CUSTOM_CONV),
        (layer.WSConv2d(4, 4, 3), Refusal.CUSTOM_CONV),
        (hooked_conv(), Refusal.HOOKED),
    ],
)
def test_unsupported_geometry_is_refused(conv: Any, refusal: Refusal | None) -> None:
    for graph in all_ways(nn.Sequential(neuron.IFNode(), conv).eval(), X):
        (site,) = graph.sites
        assert site.refusal == refusal and site.replaceable == (refusal is None)
        assert (site.reason is None) == (refusal is None)
        assert site.fed_by == ("0",) and site.name == "1"
        assert (site.in_channels, site.out_channels) == (4, 4)
        assert site.kernel_size == conv.kernel_size and site.stride == conv.stride


def test_patched_forward_is_refused() -> None:
    conv = nn.Conv2d(4, 4, 1)
    conv.forward = lambda input: input  # type: ignore[method-assign]
    for graph in all_ways(nn.Sequential(neuron.IFNode(), conv).eval(), X):
        assert graph.sites[0].refusal is Refusal.CUSTOM_CONV


# --- wiring -------------------------------------------------------------------------------------------------


class Fork(nn.Module):
    """One neuron feeds a main path and a shortcut; their sum is dense until the next neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.sn = nn.Conv2d(4, 4, 3, padding=1), neuron.IFNode()
        self.main, self.bn, self.short = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.after, self.sn2, self.last = nn.Conv2d(4, 4, 1), neuron.IFNode(), nn.Conv2d(4, 4, 1)
        self.unused = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn(self.stem(x))
        y = self.bn(self.main(x))
        y += self.short(x)
        return self.last(self.sn2(y)) + self.after(y)


def test_fork_reaches_every_successor() -> None:
    for graph in all_ways(Fork().eval(), X):
        actual = {site.name: site for site in graph.sites}
        assert actual["main"].fed_by == actual["short"].fed_by == ("sn",)
        assert actual["last"].fed_by == ("sn2",)
        assert actual["stem"].refusal is actual["after"].refusal is Refusal.NOT_SPIKE_FED
        assert actual["stem"].reason == "fed by the network's input"
        assert actual["unused"].refusal is Refusal.NOT_CALLED
        assert list(graph.neurons) == ["sn", "sn2"]
        assert len(graph.replaceable) == 3


class InPlaceBehindTheBack(nn.Module):
    """Spikes are changed in place; later readers must not treat them as spikes."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.sn, self.before, self.later = neuron.IFNode(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes = self.sn(x)
        y = self.before(spikes)
        self.change(spikes)
        return y + self.later(spikes)


def assign(x: torch.Tensor) -> None:
    x[0] = 0.5


@pytest.mark.parametrize(
    "change, kind",
    [
        (lambda x: x.add_(0.5), "dense"),
        (lambda x: x.mul_(2.0), "sparse_real"),
        (lambda x: x.view(2, -1).add_(0.5), "dense"),
        (lambda x: x[0].sub_(0.5), "dense"),
        (lambda x: x.data.add_(0.5), "dense"),
        (lambda x: x.detach().zero_().add_(0.25), "dense"),
        (lambda x: F.relu(x, inplace=True), "binary"),
        (lambda x: F.elu_(x), "dense"),
        (lambda x: F.threshold(x, 0.5, -3.0, True), "dense"),
        (lambda x: torch.sigmoid_(x), "dense"),
        (lambda x: torch.add(x, 0.5, out=x), "dense"),
        (assign, "dense"),
        (lambda x: x.requires_grad_(False), "binary"),
    ],
)
def test_in_place_change_is_dense(change: Callable[[torch.Tensor], Any], kind: str) -> None:
    for graph in all_ways(InPlaceBehindTheBack(change).eval(), X):
        actual = {site.name: site for site in graph.sites}
        assert actual["before"].value.kind == "binary"
        # The run that is watched may give up earlier, never later.
        kinds = (kind, "dense") if graph.method == "hooks" else (kind,)
        assert actual["later"].value.kind in kinds, str(graph)
        if graph.method == "fx":
            assert graph.values["sn"].kind == kind


class Twice(nn.Module):
    """One convolution that is called twice."""

    def __init__(self, second: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.sn, self.conv, self.second = neuron.IFNode(), nn.Conv2d(4, 4, 1), second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.sn(x)) + self.conv(self.second(self.sn(x)))


def test_shared_convolution_joins_all_calls() -> None:
    for graph in all_ways(Twice(lambda x: x + x).eval(), X):
        (site,) = graph.sites
        assert site.replaceable and site.num_calls == 2 and site.value.max_value == 2
    for graph in all_ways(Twice(lambda x: x + 0.5).eval(), X):
        (site,) = graph.sites
        assert site.refusal is Refusal.SHARED_MODULE and site.fed_by == ()
        assert site.reason == "called 2 times, but only 1 of the calls read spikes"


def test_convolution_in_opaque_module_is_refused() -> None:
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), neuron.IFNode())
    net = nn.Sequential(neuron.IFNode(), layer.ElementWiseRecurrentContainer(inner, lambda a, b: a + b))
    for graph in all_ways(net.eval(), X):
        (site,) = graph.sites
        assert site.refusal is Refusal.OPAQUE and site.reason is not None and "`1`" in site.reason


@pytest.mark.parametrize("step_mode", ["s", "m"])
def test_containers_and_step_modes(step_mode: str) -> None:
    if step_mode == "s":
        net = nn.Sequential(neuron.IFNode(), layer.Conv2d(4, 4, 3), layer.BatchNorm2d(4), neuron.IFNode())
        net.append(nn.Conv2d(4, 4, 1))
        names, sample = {"1": ("0",), "4": ("3",)}, X
    else:
        net = nn.Sequential(
            neuron.IFNode(step_mode="m"),
            layer.SeqToANNContainer(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
            layer.MultiStepContainer(neuron.LIFNode(tau=1.5), nn.Conv2d(4, 4, 1)),
            layer.StepModeContainer(True, "m", neuron.IFNode(), layer.Conv2d(4, 4, 1)),
        )
        names, sample = {"1.0": ("0",), "2.1": ("2.0",), "3.1": ("3.0",)}, X.repeat(2, 1, 1, 1, 1)
    for graph in all_ways(net.eval(), sample):
        assert {site.name: site.fed_by for site in graph.sites} == names
        assert all(site.replaceable for site in graph.sites), str(graph)


def test_trace_module_created_during_the_call() -> None:
    class Resize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn, self.conv = neuron.IFNode(), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(nn.Sequential(nn.Upsample(scale_factor=2), nn.MaxPool2d(2))(self.sn(x)))

    for graph in all_ways(Resize().eval(), X):
        assert graph.sites[0].value.kind == "binary", str(graph)


# --- when tracing fails -------------------------------------------------------------------------------------


class Untraceable(nn.Module):
    """Branches on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.sn, self.conv = nn.Conv2d(4, 4, 1), neuron.IFNode(), nn.Conv2d(4, 4, 3)
        self.pool, self.sn2, self.other = nn.AvgPool2d(2), neuron.IFNode(), nn.Conv2d(4, 4, 1)
        self.third = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn(self.stem(x))
        if x.mean() >= 0:
            x = x[:, torch.arange(4)] + torch.zeros(1)
        y = self.third(x + torch.ones(1))
        x = F.max_pool2d(self.sn2(self.conv(x)), 2)
        return self.other(self.pool(x)).mean() + y


def test_analyze_untraceable_network_observes_a_run() -> None:
    net = Untraceable().eval()
    blind = analyze(net)
    assert blind.method == "hooks" and blind.module is None and blind.trace_error
    assert {site.refusal for site in blind.sites} == {Refusal.UNTRACEABLE}
    assert list(blind.neurons) == ["sn", "sn2"]
    net.sn(torch.ones(1))
    saved = net.sn.v
    graph = analyze(net, X)
    assert net.sn.v is saved and net.sn2.v == 0.0
    assert (
        graph.method == "hooks" and graph.module is None and "depends on the values" in str(graph.trace_error)
    )
    actual = {site.name: site for site in graph.sites}
    assert actual["third"].refusal is Refusal.NOT_SPIKE_FED  # a constant of unknown numbers was added
    assert actual["conv"].fed_by == ("sn",)
    assert actual["other"].reason == "fed by average pooling at `pool`"
    assert graph.values["sn2"].kind == "binary" and graph.values["sn2"].shape == (2, 4, 4, 4)
    assert any("branches" in sentence for sentence in graph.warnings)
    with pytest.raises(UntraceableError, match="tensor"):
        analyze(net, X, method="fx")


def test_network_with_stored_activations_is_observed() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn, self.conv, self.last = neuron.IFNode(), nn.Conv2d(4, 4, 1), torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.sn(x + self.last)
            return self.conv(self.last)

    net = Remembers().eval()
    graph = analyze(net, X)
    assert graph.method == "hooks" and "does not compute" in str(graph.trace_error)
    assert graph.sites[0].fed_by == ("sn",)


def test_tensor_of_unobserved_origin_is_dense() -> None:
    class Smuggled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn, self.conv = neuron.IFNode(), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spikes = torch.from_numpy(self.sn(x).numpy() * 1.0)
            return self.conv(spikes)

    graph = analyze(Smuggled().eval(), X)
    assert graph.method == "hooks" and graph.sites[0].refusal is Refusal.NOT_SPIKE_FED


# --- all families -------------------------------------------------------------------------------------------

REPLACED = {
    "spiking_resnet": (11, 12),
    "sew_resnet": (13, 14),
    "ms_resnet": (6, 10),
    "spiking_vgg": (2, 3),
    "parametric_lif_net": (1, 2),
    "spikformer": (4, 5),
    "qkformer": (9, 10),
    "spike_driven_transformer": (10, 11),
    "maxformer": (15, 18),
    "masnn": (2, 6),
    "snas_net": (7, 8),
    "spike_dhs": (36, 111),
    "spiking_vggws_ottt": (0, 3),
}


@pytest.mark.parametrize("name, step_mode", families.CASES)
def test_every_family(name: str, step_mode: str) -> None:
    net, sample = families.FAMILIES[name](step_mode)
    graphs = list(all_ways(net, sample))
    blind, observed, watched = graphs
    assert blind.method == observed.method == "fx" and watched.method == "hooks"
    assert verdicts(blind) == verdicts(observed) == verdicts(watched)
    assert [site.reason for site in blind.sites] == [site.reason for site in observed.sites]
    convs = [key for key, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    assert (len(observed.replaceable), len(convs)) == REPLACED[name]
    linear = [s for s in observed.sites if isinstance(net.get_submodule(s.name), (nn.Linear, nn.Conv1d))]
    assert [site.name for site in observed.sites if site not in linear] == convs
    assert all(bool(site.fed_by) == (site.refusal == "not-a-feature-map") for site in linear)
    assert all(site.replaceable or site.reason for site in observed.sites)
    rates = check_at_run_time(observed, net, sample)
    fed = {neuron_name for site in observed.replaceable for neuron_name in site.fed_by}
    assert all(0.01 < rates[neuron_name] < 0.95 for neuron_name in fed), "tests need networks that fire"
    text = str(observed)
    assert all(site.name in text for site in observed.sites) and observed.method in text


@pytest.mark.parametrize("cnf, kind", [("ADD", "integer"), ("AND", "binary"), ("IAND", "binary")])
@pytest.mark.parametrize("step_mode", ["s", "m"])
def test_sew_connections(cnf: str, kind: str, step_mode: str) -> None:
    net, sample = families.sew(step_mode, cnf)
    for graph in all_ways(net, sample):
        actual = {site.name: site for site in graph.sites}
        assert actual["layer1.1.conv1"].value.kind == kind
        assert actual["layer2.0.conv1"].value.max_value == (3 if cnf == "ADD" else 1)
    check_at_run_time(analyze(net, sample), net, sample)


def check_at_run_time(graph: SpikeGraph, net: nn.Module, sample: torch.Tensor) -> dict[str, float]:
    """Check every value against the analysis, in a run that fires and in a silent run.

    Returns:
        The first run's firing rates by neuron.
    """
    assert graph.module is not None
    runs = [Recorder(graph.module)]
    functional.reset_net(net)
    runs[0].run(sample)
    functional.reset_net(net)
    thresholds = [(m, m.v_threshold) for m in net.modules() if isinstance(m, neuron.BaseNode)]
    for node, _ in thresholds:
        node.v_threshold = 1e30
    runs.append(Recorder(graph.module))
    runs[1].run(sample)
    for node, saved_state in thresholds:
        node.v_threshold = saved_state
    functional.reset_net(net)
    for firing, run in zip((True, False), runs, strict=True):
        for name, tensors in run.recorded.items():
            value = graph.values[name]
            for tensor in tensors:
                holds(value, tensor, firing)
            assert value.shape == tuple(tensors[0].shape)
    calls = {node.name: str(node.target) for node in graph.module.graph.nodes if node.op == "call_module"}
    fired = {calls[name]: tensors[0] for name, tensors in runs[0].recorded.items() if name in calls}
    return {name: float(tensor.mean()) for name, tensor in fired.items() if name in graph.neurons}


def holds(value: SpikeValue, tensor: torch.Tensor, firing: bool) -> None:
    if value.kind == "dense":
        return
    if not firing:
        assert not tensor.any()
    elif value.kind != "sparse_real":
        assert value.max_value is not None
        assert bool((tensor == tensor.round()).all())
        assert float(tensor.min()) >= 0 and float(tensor.max()) <= value.max_value
        assert value.kind == "integer" or value.max_value <= 1


class Recorder(fx.Interpreter):
    """Records every tensor when it is created and again after all in-place operations."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.recorded: dict[str, list[torch.Tensor]] = {}

    @torch.no_grad()
    def run(self, *args: Any) -> Any:  # type: ignore[override]
        result = super().run(*args)
        for node, tensor in self.env.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self.recorded.setdefault(node.name, []).append(tensor)
        return result

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.numel():
            self.recorded.setdefault(n.name, []).append(result.clone())
        return result


# --- random networks ----------------------------------------------------------------------------------------

UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: F.max_pool2d(x, 3, 1, 1),
    lambda x: F.avg_pool2d(x, 3, 1, 1),
    lambda x: x.flatten(1).view_as(x),
    lambda x: x.transpose(2, 3),
    lambda x: x.roll(1, 1).flip(2),
    lambda x: torch.cat((x[:, 2:], x[:, :2]), 1),
    lambda x: torch.stack(x.chunk(4, 1)[::-1]).transpose(0, 1).reshape(x.shape),
    lambda x: F.interpolate(x[:, :, ::2, ::2], size=4),
    lambda x: F.pad(x[:, :, 1:], (0, 0, 1, 0)),
    lambda x: x.clone(),
    lambda x: 1 - x,
    lambda x: 1.0 - (1.0 - x),
    lambda x: -x,
    lambda x: x * 0.3,
    lambda x: x / 4,
    lambda x: x / 3,
    lambda x: 2 * x,
    lambda x: x * 0,
    lambda x: x + 0.25,
    lambda x: x.abs(),
    lambda x: F.relu(x),
    lambda x: x.clamp(0, 2),
    lambda x: x.half().float(),
    lambda x: torch.sigmoid(x),
    lambda x: x.max(dim=1, keepdim=True)[0].expand(-1, 4, -1, -1).contiguous(),
    lambda x: x.mul_(0.5),
    lambda x: F.relu_(x),
    lambda x: (x[:, :2].add_(1.0), x)[1],
)
PAIRS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - b,
    lambda a, b: a * (1 - b),
    lambda a, b: torch.max(a, b),
    lambda a, b: torch.minimum(a, b),
    lambda a, b: torch.cat((a[:, :2], b[:, :2]), 1),
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: a @ b,
    lambda a, b: a.add_(b),
    lambda a, b: a.copy_(b),
    iadd,
)
STEP = st.one_of(
    st.tuples(st.just("neuron"), st.integers(0, 9)),
    st.tuples(st.just("unary"), st.integers(0, 9), st.integers(0, len(UNARY) - 1)),
    st.tuples(st.just("pair"), st.integers(0, 9), st.integers(0, 9), st.integers(0, len(PAIRS) - 1)),
)


class Random(nn.Module):
    """A straight-line program over tensors [2, 4, 4, 4]; each step reads earlier results."""

    def __init__(self, steps: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.steps = steps
        self.first, self.second = neuron.IFNode(), neuron.LIFNode(tau=1.5)
        self.more = nn.ModuleList(neuron.IFNode() for _ in steps)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in steps)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        created, read = [self.first(x), self.second(x)], []
        for number, (operation, *choices) in enumerate(self.steps):
            picked = created[choices[0] % len(created)]
            if operation == "neuron":
                result = self.more[number](picked)
            elif operation == "unary":
                result = UNARY[choices[1]](picked)
            else:
                result = PAIRS[choices[2]](picked, created[choices[1] % len(created)])
            created.append(result)
            read.append(self.convs[number](result))
        return [*created, *read]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(STEP, min_size=1, max_size=9))
def test_values_of_random_networks_hold_at_run_time(steps: list[tuple[Any, ...]]) -> None:
    net = Random(steps).eval()
    sample = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(2)) * 3
    try:
        graph = analyze(net, sample)
    except SampleError:  # torch refuses to write one view of a tensor into another
        reject()
    assert graph.method == "fx"
    assert verdicts(graph) == verdicts(analyze(net))
    check_at_run_time(graph, net, sample)
    watched = analyze(net, sample, method="hooks")
    inputs: dict[str, list[torch.Tensor]] = {}
    names = {module: f"convs.{number}" for number, module in enumerate(net.convs)}
    for conv in net.convs:
        conv.register_forward_pre_hook(
            lambda m, args: inputs.setdefault(names[m], []).append(args[0].clone())
        )
    functional.reset_net(net)
    with torch.no_grad():
        net(sample)
    for site in (*graph.sites, *watched.sites):
        for tensor in inputs.get(site.name, []):
            holds(site.value, tensor, firing=True)


# --- the interface ------------------------------------------------------------------------------------------


def test_analysis_changes_nothing() -> None:
    net, sample = families.FAMILIES["sew_resnet"]("m")
    net(sample)
    state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    memories = {
        name: (m.v, torch.as_tensor(m.v).clone())
        for name, m in net.named_modules()
        if isinstance(m, neuron.BaseNode)
    }
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in net.modules()]
    rng = torch.get_rng_state()
    for _ in all_ways(net, sample):
        pass
    assert all(torch.equal(tensor, state[key]) for key, tensor in net.state_dict().items())
    for name, (saved, copy) in memories.items():
        current: Any = net.get_submodule(name).v
        assert current is saved and torch.equal(current, copy)
    assert hooks == [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in net.modules()]
    assert torch.equal(torch.get_rng_state(), rng)


def test_registered_neuron_is_a_source_and_is_checked() -> None:
    class Step(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > 0).float() * 2

    net = nn.Sequential(Step(), nn.Conv2d(4, 4, 1)).eval()
    assert not analyze(net).sites[0].fed_by
    try:
        register_neuron(Step)
        assert analyze(net).sites[0].value.kind == "binary"
        for method in ("fx", "hooks"):
            with pytest.raises(ModelError, match=r"neuron `0`.* 2\.0.*register_neuron\(Step"):
                analyze(net, X, method=method)
        register_neuron(Step, output="integer", max_value=2)
        for graph in all_ways(net, X):
            assert graph.sites[0].value.max_value == 2 and graph.sites[0].replaceable
        register_neuron(Step, output="real")
        for graph in all_ways(net, X):
            assert graph.sites[0].reason == "fed by neuron `0`, whose outputs are not spikes"
    finally:
        unregister_neuron(Step)


def test_shapes_are_those_of_the_sample() -> None:
    net = nn.Sequential(neuron.IFNode(), nn.Conv2d(4, 3, 3, stride=2), neuron.IFNode()).eval()
    graph = analyze(net, X)
    assert graph.sites[0].value.shape == (2, 4, 6, 6)
    assert [graph.values[n].shape for n in ("input_1", "_0", "_1")] == [(2, 4, 6, 6)] * 2 + [(2, 3, 2, 2)]
    assert analyze(net).sites[0].value.shape is None


def test_network_without_neurons_has_no_sparse_convolution() -> None:
    for graph in all_ways(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval(), X):
        assert not graph.neurons and not graph.replaceable
        assert graph.sites[1].reason == "fed by ReLU at `1`"


def test_samples_come_in_several_forms() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn, self.conv = neuron.IFNode(), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.sn(x)
            return self.conv(x if mask is None else x * self.sn(mask))

    net = Two().eval()
    for sample in (X, (X,), [X, X], {"mask": X, "x": X}):
        for method in ("fx", "hooks"):
            assert analyze(net, sample, method=method).sites[0].fed_by == ("sn",)


@pytest.mark.parametrize("model", [None, 3, nn.Conv2d, "net"])
def test_only_modules_are_analysed(model: Any) -> None:
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        analyze(model)


@pytest.mark.parametrize("method", ["fx", "hooks", "auto"])
@pytest.mark.parametrize("sample", [torch.rand(2, 5, 6, 6), torch.rand(3), "image", (X, X, X)])
def test_unfitting_sample_raises(sample: Any, method: Any) -> None:
    net = nn.Sequential(neuron.IFNode(), nn.Conv2d(4, 4, 3)).eval()
    with pytest.raises(SampleError):
        analyze(net, sample, method=method)
    node: Any = net[0]
    assert node.v == 0.0


def test_analyze_unknown_method_raises() -> None:
    with pytest.raises(ValueError, match="'guess'"):
        analyze(nn.Identity(), method="guess")  # type: ignore[arg-type]
    assert analyze(nn.Identity(), method="hooks").sites == ()


def test_analyze_meta_network_does_not_run_it() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), neuron.IFNode(), nn.Conv2d(4, 4, 3)).eval()
    assert [site.replaceable for site in analyze(net).sites] == [False, True]
