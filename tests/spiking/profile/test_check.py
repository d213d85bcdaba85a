"""`check_network` finds networks whose optimized form computes something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import encoding, neuron

from sparseflow.errors import InputError, ModelError, SampleError
from sparseflow.spiking.accelerated import AcceleratedForward
from sparseflow.spiking.profile.check import check_network
from sparseflow.spiking.runtime.output_difference import compute_difference
from tests.spiking.nets import KINDS, T, images, ready, small

X = images(T, 2)
Prefer = Callable[..., Any]


def check(net: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    return check_network(net, inputs, rounds=4, compile_baselines=False, cache=False, **options)


@pytest.mark.parametrize("kind", ["plan", "layers"])
def test_check_network_agrees(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "dense", "events")
    result = check(KINDS[kind][0](), X)
    assert result.agrees and result.tolerance == 0.01
    names = [call.name for call in result.calls]
    assert names[0] == "from rest" and "not reset" in names[1] and f"{T}x1x3x8x8" in names[4]
    assert all(call.outputs.largest <= 1e-5 and call.membranes.largest <= 1e-5 for call in result.calls)
    assert result.calls[0].num_predictions == T * 2 and result.rounding is not None
    record = json.loads(json.dumps(result.to_dict()))
    assert record["agrees"] and record["layers"] and record["speedup"]["low"] <= record["speedup"]["high"]


def test_check_single_step_network_compares_membranes(prefer: Prefer) -> None:
    prefer("sparse")
    result = check(small("s"), images(2))
    assert result.agrees and [call.membranes is None for call in result.calls] == [False] * 6
    assert result.calls[4].shapes == ((1, 3, 8, 8),)


class Scaled(nn.Module):
    """Takes and returns two tensors, and fails for an input of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.net(x * scale.view(T, 2, 1, 1, 1))
        return y, {"sum": y.sum()}


def test_check_takes_several_inputs_and_outputs(prefer: Prefer) -> None:
    prefer("sparse", "dense")
    result = check(Scaled().eval(), X, torch.ones(T, 2))
    assert result.agrees and len(result.calls) == 4, "no other shape is accepted"


def test_check_random_encoder_gets_the_same_numbers(prefer: Prefer) -> None:
    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.net = encoding.PoissonEncoder(), small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.encoder(x))

    prefer("sparse", "dense")
    assert check(Encoded().eval(), X.abs().clamp(max=1)).agrees


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda output: output + 1.0, "outputs differ"),
        (lambda output: -output, "predictions differ"),
        (lambda output: output[:1], "other types or shapes"),
        (lambda output: output.double(), "other types or shapes"),
        (lambda output: (output, output), "other types or shapes"),
        (lambda output: output * float("nan"), "differ"),
    ],
)
def test_check_reports_changed_outputs(
    change: Callable[[torch.Tensor], Any], problem: str, prefer: Prefer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("sparse", "dense")
    net = small()
    torch.manual_seed(0)
    original = AcceleratedForward.__call__

    def wrong(self: AcceleratedForward, *inputs: torch.Tensor) -> Any:
        return change(original(self, *inputs))

    monkeypatch.setattr(AcceleratedForward, "__call__", wrong)
    try:
        result = check(net, X)
    except Exception:
        pytest.fail("a network with other outputs is a result, not an error")
    assert not result.agrees and all(problem in str(call.problem) for call in result.calls)


def test_check_reports_changed_states_and_errors(prefer: Prefer, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer("sparse", "dense")
    original = AcceleratedForward.__call__
    net, calls = small(), []

    def forget(self: AcceleratedForward, *inputs: torch.Tensor) -> Any:
        output = original(self, *inputs)
        net.sn2.v = net.sn2.v * 0
        if inputs[0].shape[1] == 1:
            raise RuntimeError("no such batch size")
        calls.append(1)
        return output

    monkeypatch.setattr(AcceleratedForward, "__call__", forget)
    problems = [str(call.problem) for call in check(net, X).calls]
    assert "membranes differ" in problems[0] and "no such batch size" in problems[4]


def test_check_bad_arguments_raise(prefer: Prefer) -> None:
    with pytest.raises(InputError, match="tolerance"):
        check(small(), X, tolerance=-1.0)
    with pytest.raises(SampleError, match=r"\(2, 3\)"):
        check(small(), torch.zeros(2, 3))
    with pytest.raises(ModelError, match="training mode"):
        check(small().train(), X)
    with pytest.raises(ModelError, match="no spiking neuron"):
        check(nn.Linear(2, 2).eval(), torch.zeros(2, 2))


def test_compute_difference() -> None:
    x = torch.tensor([1.0, -3.0, float("nan"), float("inf")])
    same = compute_difference([x, 1], [x.clone(), 1])
    assert same is not None and (same.largest, same.mean_error) == (0.0, 0.0)
    other = compute_difference({"a": x[:2]}, {"a": x[:2] + 1})
    assert other is not None and (other.largest, other.mean_error) == (1.0, 0.5)
    assert compute_difference(x, x[:2]) is None and compute_difference(x, None) is None
    assert compute_difference([x, 1.0], [x, 2.0]) is None
    broken = compute_difference(x[:2], x[2:])
    assert broken is not None and broken.mean_error == float("inf")


def test_check_of_a_neuron_with_own_code(prefer: Prefer) -> None:
    prefer("sparse", "dense")
    net = ready(small(make=lambda: neuron.KLIFNode(step_mode="m")))
    assert check(net, X).agrees
