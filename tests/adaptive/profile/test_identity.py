"""Ids of models: what times hold for, and what choices hold for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.profile import compute_model_id, compute_weights_id
from tests.adaptive import tiny


def test_ids_depend_on_number_format_or_weights() -> None:
    model, retrained = tiny.build_olmoe(dtype=torch.float32), tiny.build_olmoe(seed=1, dtype=torch.float32)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert compute_weights_id(half) == compute_weights_id(model) and compute_model_id(
        half
    ) != compute_model_id(model)
    assert compute_weights_id(copy.deepcopy(half).float()) == compute_weights_id(model)
    assert compute_weights_id(copy.deepcopy(model).double()) == compute_weights_id(model)
    assert compute_weights_id(copy.deepcopy(half).to(torch.float16)) == compute_weights_id(half)
    assert compute_weights_id(retrained) != compute_weights_id(model) and compute_model_id(
        retrained
    ) == compute_model_id(model)


def test_ids_of_other_architectures_differ(tmp_path: Path) -> None:
    model = tiny.build_llava_siglip(dtype=torch.float32)
    before = compute_weights_id(model)
    assert compute_weights_id(tiny.build_llava_siglip(depth=7, dtype=torch.float32)) != before
    runtime = PlanRuntime(get_adapter(model))
    assert compute_weights_id(model) == before
    runtime.remove()
    model.save_pretrained(tmp_path)
    assert compute_weights_id(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)) == before


def test_weights_id_changes_with_one_block() -> None:
    model = tiny.build_olmoe(dtype=torch.float32)
    before = compute_weights_id(model)
    with torch.no_grad():
        model.model.layers[-1].mlp.gate.weight.mul_(1.1)
    assert compute_weights_id(model) != before
