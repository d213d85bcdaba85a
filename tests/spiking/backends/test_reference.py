"""The reference against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparseflow.spiking.backends.reference import run_group_reference, run_neuron_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource


def _neuron(**changes: Any) -> NeuronSpec:
    return replace(NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=0.0), **changes)


@pytest.mark.parametrize(
    ("neuron", "spikes", "membrane"),
    [
        (_neuron(), [0, 1, 0, 1], 0.0),
        (_neuron(v_reset=None), [0, 1, 0, 1], 0.5),
        (_neuron(alpha=0.5, beta=0.5), [0, 0, 0, 0], 0.703125),
        (_neuron(v_threshold=0.75), [1, 1, 1, 1], 0.0),
        (_neuron(v_reset=-0.25, delta=-0.25), [0, 0, 1, 0], 0.25),
        (_neuron(v_reset=None, v_subtract=0.0), [0, 1, 1, 1], 2.5),
        (_neuron(v_reset=None, delays_reset=True), [0, 1, 0, 1], 1.5),
        (_neuron(delays_reset=True), [0, 1, 0, 1], 1.5),
    ],
)
def test_neuron_follows_the_recurrence(neuron: NeuronSpec, spikes: list[int], membrane: float) -> None:
    x = torch.full((4, 1, 1, 1, 1), 0.75, dtype=torch.float64)
    if neuron.v_reset is None:
        x[0], x[1], x[2], x[3] = 0.5, 0.75, 0.5, 0.75  # 0.5 | 1.25 -> 0.25 | 0.75 | 1.5 -> 0.5
    out, v = run_neuron_reference(neuron, x)
    assert out.flatten().tolist() == spikes
    assert v.item() == membrane


def test_group_adds_every_term_once() -> None:
    weight = torch.zeros(2, 1, 3, 3)
    weight[0, 0, 1, 1], weight[1, 0, 0, 0] = 0.25, 0.5
    spec = GroupSpec(
        sources=(SpikeSource(weight=weight, padding=1),),
        bias=torch.tensor([0.125, 0.0]),
        neuron=_neuron(v_threshold=100.0),
        skips=1,
        dense_inputs=1,
        post_skips=1,
    )
    spikes = torch.zeros(1, 1, 1, 2, 2)
    spikes[..., 0, 0] = 1.0
    skip, post = torch.zeros(1, 1, 2, 2, 2), torch.zeros(1, 1, 2, 2, 2)
    skip[0, 0, 1, 1, 1], post[0, 0, 0, 0, 1] = 1.0, 2.0
    out, v = run_group_reference(spec, [spikes], [skip], [torch.full((1, 1, 2, 2, 2), 8.0)], [post])
    assert v.tolist() == [[[[8.375, 8.125], [8.125, 8.125]], [[8.0, 8.0], [8.0, 9.5]]]]
    assert torch.equal(out, post)


def test_group_keeps_the_callers_dtype_and_membrane() -> None:
    spec = GroupSpec(
        sources=(SpikeSource(weight=torch.full((1, 1, 1, 1), 1 / 3)),), bias=torch.zeros(1), neuron=_neuron()
    )
    ones = torch.ones(1, 1, 1, 1, 1)
    out, v = run_group_reference(spec, [ones], v=torch.full((1, 1, 1, 1), 0.5), dtype=torch.float64)
    assert out.dtype == v.dtype == torch.float64
    assert v.item() == 0.5 + torch.tensor(1 / 3).double().item()


def test_group_refuses_the_wrong_number_of_inputs() -> None:
    spec = GroupSpec(sources=(), bias=torch.zeros(1), neuron=_neuron(), dense_inputs=1)
    with pytest.raises(ValueError, match="1 `dense`, got 0"):
        run_group_reference(spec, [])
