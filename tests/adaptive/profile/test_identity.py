"""Ids of models: what times hold for, and what choices hold for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import adapter_of
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.profile import model_id, weights_id
from tests.adaptive import tiny


def test_times_hold_for_a_number_format_and_choices_for_weights() -> None:
    model, retrained = tiny.olmoe(dtype=torch.float32), tiny.olmoe(seed=1, dtype=torch.float32)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert weights_id(half) == weights_id(model) and model_id(half) != model_id(model)
    assert weights_id(copy.deepcopy(half).float()) == weights_id(model)
    assert weights_id(copy.deepcopy(model).double()) == weights_id(model)
    assert weights_id(copy.deepcopy(half).to(torch.float16)) == weights_id(half)
    assert weights_id(retrained) != weights_id(model) and model_id(retrained) == model_id(model)


def test_other_architectures_and_knobs(tmp_path: Path) -> None:
    model = tiny.llava_siglip(dtype=torch.float32)
    before = weights_id(model)
    assert weights_id(tiny.llava_siglip(depth=7, dtype=torch.float32)) != before
    knobs = PlanRuntime(adapter_of(model))
    assert weights_id(model) == before
    knobs.remove()
    model.save_pretrained(tmp_path)
    assert weights_id(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)) == before


def test_a_change_of_one_block_is_seen() -> None:
    model = tiny.olmoe(dtype=torch.float32)
    before = weights_id(model)
    with torch.no_grad():
        model.model.layers[-1].mlp.gate.weight.mul_(1.1)
    assert weights_id(model) != before
