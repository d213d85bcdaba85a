"""Tests of `explain`: every convolution has a row with correct values."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

import sparseflow
from sparseflow.errors import ModelError
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.registry import unregister_neuron
from sparseflow.spiking.profile.firing import measure_firing
from tests.spiking.nets import Opaque, Small, from_rest, images, ready, small

X = images(3, 2)
Prefer = Callable[..., Any]


def rows(net: nn.Module) -> dict[str, Any]:
    return {row.name: row for row in sparseflow.explain(net).layers}


def test_explain_measured_network(prefer: Prefer) -> None:
    prefer("sparse", "dense", own=4.0, plan=2.0, module=3.0, sparse=1.0, dense=1.5)
    net = small()
    fed: dict[str, torch.Tensor] = {}
    for name in ("conv2", "conv3"):
        net.get_submodule(name).register_forward_pre_hook(
            lambda m, args, name=name: fed.update({name: args[0].clone()})
        )
    from_rest(net, X)
    for module in net.modules():
        module._forward_pre_hooks.clear()
    for name in ("sn1", "sn2", "sn3"):
        net.get_submodule(name).reset()
    sparseflow.optimize(net, X)
    explanation = sparseflow.explain(net)
    assert (explanation.model, explanation.policy) == ("Small", "measured")
    assert explanation.summary == "4.00 ms → 2.00 ms, 2.00x (2.00–2.00) over the network's own modules"
    stem, second, third, head = explanation.layers
    assert (stem.name, second.name, third.name, head.name) == ("conv1", "conv2", "conv3", "fc")
    assert (head.backend, head.group, head.reason) == ("dense", None, "fed by a mean")
    assert (stem.fed_by, stem.values, stem.firing_rate, stem.zero_block_ratio) == ((), "dense", None, None)
    assert (stem.backend, stem.latency_before_ms, stem.latency_after_ms) == ("dense, fused neuron", 3.0, 1.5)
    assert "no convolution of spikes" in stem.reason and stem.reason.startswith("fed by the network's input")
    assert (second.fed_by, second.values, second.backend) == (("sn1",), "binary", "events")
    for row in (second, third):
        observed = measure_firing(fed[row.name])
        assert (row.firing_rate, row.zero_block_ratio) == (observed.firing_rate, observed.zero_block_ratio)
        assert (row.latency_before_ms, row.latency_after_ms, row.group) == (3.0, 1.0, row.name)
        assert "3.00x" in row.reason and row.warning is None


def test_layers_of_one_group_and_integers(prefer: Prefer) -> None:
    class Block(Small):
        def __init__(self) -> None:
            super().__init__("s")
            self.down = nn.Conv2d(6, 8, 1, stride=2)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            a = self.sn1(self.bn1(self.conv1(x)))
            b = self.sn2(self.bn2(self.conv2(a))) + a
            return self.sn3(self.conv3(b) + self.down(a))

    prefer("sparse", "dense")
    net = ready(Block())
    sparseflow.optimize(net, images(2))
    actual = rows(net)
    assert (actual["conv3"].values, actual["conv3"].fed_by) == ("integer", ("sn1", "sn2"))
    assert actual["down"].values == "binary" and actual["down"].group == actual["conv3"].group == "conv3"
    assert actual["down"].backend == actual["conv3"].backend == "events"
    assert "in conv3" in str(sparseflow.explain(net))


def test_explain_stem_of_a_sparse_group_is_dense(prefer: Prefer) -> None:
    class Mixed(Small):
        def __init__(self) -> None:
            super().__init__("s")
            self.second = nn.Conv2d(3, 6, 3, padding=1)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            a = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.bn2(self.conv2(a)) + self.second(x))))

    prefer("sparse", "dense")
    net = ready(Mixed())
    sparseflow.optimize(net, images(2))
    actual = rows(net)
    assert actual["second"].group == actual["conv2"].group == "conv2"
    assert (actual["conv2"].backend, actual["second"].backend) == ("events", "dense, fused neuron")


def test_explain_sparse_linear_layer(prefer: Prefer) -> None:
    prefer("sparse", "dense", own=4.0, plan=2.0, module=3.0, sparse=1.0, dense=1.5)
    net = ready(nn.Sequential(neuron.IFNode(), layer.Linear(8, 6), neuron.IFNode()))
    functional.set_step_mode(net, "m")
    sparseflow.optimize(net, 2 * torch.rand(3, 2, 8))
    (row,) = sparseflow.explain(net).layers
    assert (row.name, row.values, row.backend) == ("1", "binary", "events")


def test_explain_says_how_much_slower_sparse_is(prefer: Prefer) -> None:
    prefer("dense", "sparse", module=3.0, dense=1.0, sparse=2.0)
    net = small()
    sparseflow.optimize(net, X)
    row = rows(net)["conv2"]
    assert row.backend == "dense, fused neuron" and "sparse takes 2.000 ms, this 1.000 ms" in row.reason
    prefer(module=1.0, dense=2.0, sparse=4.0)
    sparseflow.optimize(net, images(3, 1))
    row = rows(net)["conv2"]
    assert "best: dense, 0.50x, 0.50–0.50" in row.reason and "sparse takes 4.000 ms" in row.reason


class OwnNeuron(nn.Module):
    """A neuron without constants."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Any = 0.0

    def reset(self) -> None:
        self.v = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(0) > 1).to(x.dtype)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: neuron.KLIFNode(step_mode="m"), "`sn2` behind it runs its own code: "),
        (OwnNeuron, "`sn2` behind it runs its own code: `OwnNeuron` was registered without a spec"),
    ],
)
def test_explain_shows_why_a_neuron_is_not_fused(make: Callable[[], Any], words: str, prefer: Prefer) -> None:
    prefer("sparse", "dense")
    sparseflow.register_neuron(OwnNeuron)
    try:
        net = small(make=make)
        sparseflow.optimize(net, X)
        actual = rows(net)
    finally:
        unregister_neuron(OwnNeuron)
    assert words in actual["conv2"].reason and actual["conv2"].backend == "events"
    assert "`sn1` behind it" in actual["conv1"].reason and "behind it" not in actual["fc"].reason


def test_explain_layer_that_is_called_twice(prefer: Prefer) -> None:
    class Twice(Small):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.conv2(self.conv2(x)))))

    prefer("sparse", "dense")
    net = ready(Twice())
    sparseflow.optimize(net, X)
    assert "called 2 times" in rows(net)["conv2"].reason


def test_explain_unchanged_network(prefer: Prefer) -> None:
    prefer("sparse", plan=9.0)
    net = small()
    sparseflow.optimize(net, X)
    explanation = sparseflow.explain(net)
    assert explanation.summary.startswith("unchanged: no candidate")
    for row in explanation.layers:
        assert row.backend == "dense"
        assert row.latency_before_ms == row.latency_after_ms or row.latency_before_ms is None


@pytest.mark.parametrize(
    ("build", "name", "words"),
    [
        (lambda: small(), "conv1", "the network's input"),
        (lambda: ready(with_conv(nn.Conv2d(6, 6, 5, padding=2))), "conv2", "`kernel_size` (=(5, 5))"),
        (lambda: ready(with_conv(nn.Conv2d(6, 6, 3, padding=1, groups=2))), "conv2", "`groups` (=2)"),
        (lambda: ready(with_conv(nn.Conv2d(6, 6, 3, padding=2, dilation=2))), "conv2", "`dilation`"),
    ],
)
def test_explain_shows_every_refusal(build: Any, name: str, words: str, prefer: Prefer) -> None:
    prefer("sparse", plan=1.0)
    net = build()
    sparseflow.optimize(net, images(2) if net.sn1.step_mode == "s" else X)
    row = rows(net)[name]
    reasons = {site.name: site.reason for site in get_accelerated_forward(net).graph.sites}
    assert words in str(reasons[name])
    assert words in row.reason or row.group is not None


def with_conv(conv: nn.Conv2d) -> Small:
    net = Small("s")
    net.conv2 = conv  # type: ignore[assignment]
    return net


def test_explain_flags_silent_layer(prefer: Prefer) -> None:
    prefer("sparse")
    net = small()
    net.sn1.v_threshold = 1e6
    sparseflow.optimize(net, X)
    explanation = sparseflow.explain(net)
    row = {r.name: r for r in explanation.layers}["conv2"]
    assert row.firing_rate == 0.0 and row.zero_block_ratio == 1.0
    assert "fires under 0.1 %" in str(row.warning)
    text = str(explanation)
    assert "0.00 % !" in text and "under 0.1 %" in text.replace("\n", " ")


def test_explain_before_the_first_call() -> None:
    net = small()
    sparseflow.optimize(net)
    explanation = sparseflow.explain(net)
    assert explanation.summary == "not measured yet"
    backends = [r.backend for r in explanation.layers]
    assert backends == ["dense", "not measured yet", "not measured yet", "dense"]
    assert "run the network once" in explanation.layers[1].reason


def test_explain_static_policy() -> None:
    net = small()
    sparseflow.optimize(net, images(1, 1, size=16), policy="static")
    explanation = sparseflow.explain(net)
    assert explanation.summary == "replaced by the static policy, not measured"
    assert [r.backend for r in explanation.layers] == ["dense", "events", "events", "dense"]
    assert all(r.latency_before_ms is None and r.latency_after_ms is None for r in explanation.layers)


def test_explain_untraceable_network(prefer: Prefer) -> None:
    prefer(events=1.0, module=2.0)
    net = ready(Opaque())
    sparseflow.optimize(net, X)
    actual = rows(net)
    summary = sparseflow.explain(net).summary
    assert "could not be traced" in summary and "`if x.sum() < 0:`" in summary
    assert "nets.py:" in summary and "depends on the values of a tensor" in summary
    assert (actual["conv2"].backend, actual["conv2"].latency_before_ms, actual["conv2"].latency_after_ms) == (
        "events",
        2.0,
        1.0,
    )
    assert actual["conv1"].backend == "dense" and actual["conv2"].firing_rate is not None


def test_explanation_to_dict_round_trips_json(prefer: Prefer) -> None:
    prefer("sparse", "dense")
    net = small()
    sparseflow.optimize(net, X)
    plain = json.loads(json.dumps(sparseflow.explain(net).to_dict()))
    assert set(plain) == {"model", "policy", "summary", "layers"}
    assert set(plain["layers"][0]) == {
        "name", "fed_by", "values", "firing_rate", "zero_block_ratio", "warning", "backend", "reason",
        "group", "latency_before_ms", "latency_after_ms", "from_cache",
    }  # fmt: skip


def test_explanation_prints_a_table(prefer: Prefer) -> None:
    prefer("sparse", "dense", module=3.0, sparse=1.0)
    net = small()
    sparseflow.optimize(net, X)
    explanation = sparseflow.explain(net)
    text = str(explanation)
    for part in (
        "Small",
        "layer",
        "fed by",
        "firing",
        "zero blocks",
        "conv2",
        "sn1",
        "events",
        "3.000 → 1.000",
    ):
        assert part in text
    assert "\x1b" not in text
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explanation)
    assert "conv3" in console.export_text()
    console.file.close()


@pytest.mark.parametrize("width", [60, 80, 120, 160, 250])
def test_explanation_fits_a_console_and_cuts_nothing(width: int, prefer: Prefer) -> None:
    prefer("sparse", "dense", module=12345.678, sparse=1.0)

    class Long(Small):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"3_mlp_fc2_convolution": self.conv2})
            del self.conv2

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.sn1(self.bn1(self.conv1(x)))
            x = self.sn2(self.bn2(self.blocks["3_mlp_fc2_convolution"](x)))
            return self.sn3(self.conv3(x))

    net = ready(Long())
    sparseflow.optimize(net, X)
    console = Console(width=width, file=io.StringIO())
    console.print(sparseflow.explain(net))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    columns = ["".join(cell.strip() for cell in column) for column in zip(*rows, strict=True)]
    assert "blocks.3_mlp_fc2_convolution" in columns[0]
    assert any("12345.678 →" in column and "1.000" in column for column in columns)
    assert "sparse not supported" in " ".join((columns[-1] if width >= 160 else text).split())


def test_explanation_escapes_markup(prefer: Prefer) -> None:
    """Module names may contain square brackets, which Rich parses as markup."""
    prefer("sparse")

    class Bold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn = neuron.IFNode()
            self.add_module("[red]conv", nn.Conv2d(3, 3, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule("[red]conv")(self.sn(x))

    net = Bold().eval()
    sparseflow.optimize(net, images(2))
    assert "[red]conv" in str(sparseflow.explain(net))


@pytest.mark.parametrize("message", [None, nn.Identity(), "model"])
def test_unoptimized_model_raises(message: Any) -> None:
    with pytest.raises(ModelError, match=r"sparseflow\.optimize"):
        sparseflow.explain(message)


def test_summary_shows_the_statement_that_writes(prefer: Prefer) -> None:
    class Counting(Small):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    prefer(events=1.0, module=2.0)
    net = ready(Counting())
    sparseflow.optimize(net, X)
    summary = sparseflow.explain(net).summary
    assert "writes `calls` at" in summary and "test_explanation.py:" in summary
    assert "`self.calls += 1`" in summary
