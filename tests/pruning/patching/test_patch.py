"""Patched models: equal to the original with keep=1, and to masked attention with fewer tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sparseflow.errors import InputError
from sparseflow.pruning.patching.families import find_encoder
from sparseflow.pruning.patching.patch import get_kept_positions, patch, unpatch
from sparseflow.pruning.patching.pruner import TokenPruner
from sparseflow.pruning.patching.reference import mask_dropped_tokens
from tests.pruning.patching.zoo import CASES

TOLERANCE = 1e-9
"""Error of float64 outputs divided by the largest output."""

STAGES = {1: 0.5, 3: 0.25}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max() / expected.abs().max()) <= TOLERANCE


def count_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@torch.no_grad()
def test_patch_keep_one_is_identical_and_unpatch_restores(case: Any) -> None:
    model = case.build()
    expected, names, num_hooks = case.run(model), list(model.state_dict()), count_hooks(model)
    assert patch(model, keep=1.0).stages == {}
    assert torch.equal(case.run(model), expected)
    result = patch(model, keep=0.5)
    assert result.family == case.family and result.stages == {1: 0.5}
    assert list(model.state_dict()) == names
    pruned = case.run(model)
    assert pruned.shape != expected.shape or not torch.allclose(pruned, expected)
    unpatch(model)
    assert torch.equal(case.run(model), expected)
    assert count_hooks(model) == num_hooks


@pytest.mark.parametrize("selector", ["ast", "random", "uniform", "attention"])
@torch.no_grad()
def test_patch_equals_masked_attention(case: Any, selector: str) -> None:
    model = case.build()
    original = copy.deepcopy(model)
    if selector == "attention" and not case.attention:
        with pytest.raises(InputError, match=case.family):
            patch(model, stages=STAGES, selector=selector)
        return
    result = patch(model, stages=STAGES, selector=selector)
    actual = case.run(model)
    positions = get_kept_positions(model)
    num_tokens = 16 * case.frames
    assert result.tokens == (num_tokens, num_tokens // 2, num_tokens // 2, num_tokens // 4)
    assert {stage: value.shape[1] for stage, value in positions.items()} == {
        1: num_tokens // 2,
        3: num_tokens // 4,
    }
    encoder, family, _ = find_encoder(original)
    with mask_dropped_tokens(original, family.list_blocks(encoder), positions, case.num_prefix, num_tokens):
        expected = case.run(original)
    assert_close(actual, expected)


def test_images_have_fine_cells_by_default() -> None:
    case = CASES["vit"]
    model = case.build()
    rows = patch(model, keep=0.5).grid[1]
    (pruner,) = (module for module in model.modules() if isinstance(module, TokenPruner))
    assert max(pruner.config.score.levels) == max(1, rows // 2)
