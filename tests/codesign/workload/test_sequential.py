"""Chains of modules as models to partition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.codesign.random_plan import random_plan
from sparseflow import codesign
from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.errors import InputError, ModelError, SampleError
from tests.codesign.toys import parse_config


def make_model() -> tuple[codesign.SequentialModel, torch.Tensor]:
    torch.manual_seed(0)
    modules = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 5),
    )  # fmt: skip
    samples = torch.randn(4, 3, 8, 8)
    return codesign.SequentialModel(modules.eval(), samples), samples


def test_describe_layers_matches_manual_count() -> None:
    model, _ = make_model()
    layers = model.describe_layers(2)
    assert [layer.name for layer in layers] == [str(index) for index in range(8)]
    assert (layers[0].flops, layers[5].flops) == (2 * 2 * 8 * 64 * 27, 2 * 2 * 128 * 64)
    assert layers[2].flops == 2 * 8 * 64 and layers[2].weight_bytes == 0
    assert layers[5].bytes == 4 * (128 * 64 + 64 + 2 * 128 + 2 * 64) == layers[5].memory_bytes
    assert [layer.units for layer in layers] == [0, 0, 0, 0, 0, 64, 0, 5]
    assert all(a.traffic_out_bytes == b.traffic_in_bytes for a, b in pairwise(layers))
    assert model.describe_layers(4)[0].flops == 2 * layers[0].flops


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_compute_the_same_and_move_planned_bytes(seed: int) -> None:
    model, samples = make_model()
    layers = model.describe_layers(len(samples))
    assignment, plan = random_plan(layers, 3, seed=seed, share=0.9)
    decision = HardwareDecision(
        chips=("npu-m",) * 3,
        segments=tuple((layer.name,) for layer in layers),
        mapping=tuple(assignment),
        positions_mm=((0.0, 0.0),) * 3,
        rewrite_plan=plan if plan.splits else None,
    )
    result = codesign.verify(model, decision, samples, planned=layers)
    assert result.moved_bytes["local"] == result.moved_bytes["planned"]
    with pytest.raises(InputError):
        codesign.verify(model, decision, samples, planned=[replace(layer, flops=1.0) for layer in layers])


def test_plan_design_of_a_chain_can_be_run(tmp_path: Path) -> None:
    model, samples = make_model()
    config = parse_config({"hardware": {"slots": 2, "batch_size": 4}, "mapping": {"strategy": "dp"}})
    plan = codesign.plan_design(config, model, tmp_path, search=False)
    assert codesign.verify(model, plan.decision, samples, planned=plan.layers).errors["local"] == 0.0


def test_unusable_chain_is_refused() -> None:
    linear, sample = nn.Linear(4, 4), torch.randn(2, 4)
    for modules in (nn.Sequential(linear), nn.Sequential().eval()):
        with pytest.raises(ModelError):
            codesign.SequentialModel(modules, sample)
    with pytest.raises(SampleError):
        codesign.SequentialModel(nn.Sequential(linear).eval(), sample[:0])
    for module in (nn.Flatten(0), nn.LSTM(4, 4)):
        model = codesign.SequentialModel(nn.Sequential(module).eval(), torch.randn(2, 3, 4))
        with pytest.raises(ModelError):
            model.describe_layers(2)
    with pytest.raises(InputError):
        codesign.SequentialModel(nn.Sequential(linear).eval(), sample).describe_layers(0)
