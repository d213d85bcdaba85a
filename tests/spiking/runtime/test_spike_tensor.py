"""Passthrough layers take spikes in native form and compute what the network computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

from sparseflow.spiking.backends.events.backend import EventBackend
from sparseflow.spiking.runtime.feature_form import FeatureForm
from sparseflow.spiking.runtime.spike_tensor import Passthrough, match_passthrough
from tests.spiking.nets import force, from_rest, images, planned, ready, same


class Between(nn.Module):
    """conv, neuron, some layers, conv, neuron, global mean."""

    def __init__(self, step_mode: str, *between: nn.Module) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(3, 8, 3, padding=1, bias=False)
        self.sn1 = neuron.IFNode()
        self.between = nn.Sequential(*between)
        self.conv2 = layer.Conv2d(8, 8, 3, padding=1, bias=False)
        self.sn2 = neuron.IFNode()
        self.pool = layer.AdaptiveAvgPool2d((1, 1))
        functional.set_step_mode(self, step_mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn1(self.conv1(x))
        return self.pool(self.sn2(self.conv2(self.between(x))))


def between(step_mode: str, *layers: nn.Module) -> tuple[Any, torch.Tensor]:
    """Return the prepared, firing network and its input."""
    x = images(3, 2) if step_mode == "m" else images(3, 2)[0]
    return ready(Between(step_mode, *layers)), x


@pytest.mark.parametrize("step_mode", ["m", "s"])
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Identity()],
        [layer.Dropout(0.5)],
        [layer.MaxPool2d(2)],
        [layer.MaxPool2d(3, stride=2, padding=1)],
        [nn.Identity(), layer.MaxPool2d(3, 1, 1), layer.Dropout(0.1)],
        [layer.MaxPool2d(3, padding=1, ceil_mode=True)],
        [layer.AvgPool2d(2)],
    ],
    ids=str,
)
def test_plan_with_passthroughs_equals_the_network(step_mode: str, layers: list[nn.Module]) -> None:
    net, x = between(step_mode, *layers)
    plan = planned(net, x)
    expected = from_rest(net, x)
    for group_mode in ("sparse", "dense", "module"):
        force(plan, group_mode, x)
        with torch.no_grad():
            assert same(plan.run(x), expected), group_mode
    assert expected.any(), "a silent network would prove nothing"


def test_passthrough_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = between("m", nn.Identity(), layer.Dropout(0.5))
    plan = planned(net, x)
    force(plan, "sparse", x)
    assert [group.output_form for group in plan.groups] == ["native", "native"]
    calls: list[str] = []
    for name in ("encode", "decode"):
        original = getattr(EventBackend, name)
        monkeypatch.setattr(
            EventBackend, name, lambda self, *a, name=name, f=original: calls.append(name) or f(self, *a)
        )
    with torch.no_grad():
        plan.run(x)
    assert calls == []


def test_passthrough_with_hook_or_in_training_conflicts() -> None:
    net, x = between("m", layer.Dropout(0.5))
    plan = planned(net, x)
    assert plan.get_bypass_conflict() is None
    net.between[0].train()
    assert "training" in str(plan.get_bypass_conflict())
    net.between[0].eval()
    net.between[0].register_forward_hook(lambda *_: None)
    assert "hooks" in str(plan.get_bypass_conflict())


@pytest.mark.parametrize(
    ("module", "single", "expected"),
    [
        (nn.Identity(), True, Passthrough("same")),
        (nn.Dropout(0.5).train(), True, None),
        (nn.MaxPool2d(2), True, Passthrough("max", 2, 2, 0)),
        (nn.MaxPool2d(2), False, None),
        (layer.MaxPool2d(3, 2, 1, step_mode="m"), False, Passthrough("max", 3, 2, 1)),
        (layer.MaxPool2d(3, 2, 1, step_mode="m"), True, None),
        (nn.MaxPool2d((2, 2), (1, 1)), True, Passthrough("max", 2, 1, 0)),
        (nn.MaxPool2d((2, 3)), True, None),
        (nn.MaxPool2d(5, padding=2), True, None),
        (nn.MaxPool2d(2, dilation=2), True, None),
        (nn.AdaptiveAvgPool2d(1), True, Passthrough("mean")),
        (nn.AdaptiveAvgPool2d((1, 1)), True, Passthrough("mean")),
        (nn.AdaptiveAvgPool2d(2), True, None),
        (nn.AdaptiveMaxPool2d(1), True, None),
        (nn.Flatten(), True, None),
    ],
)
def test_match_passthrough(module: nn.Module, single: bool, expected: Passthrough | None) -> None:
    assert match_passthrough(module, form=FeatureForm(single_step=single)) == expected
