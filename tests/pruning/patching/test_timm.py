"""Patched models of timm equal masked attention; timm requires torchvision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.pruning import get_kept_positions, patch, unpatch
from sparseflow.pruning.patching.reference import make_retained_masks
from tests.pruning.patching.zoo import randomize

try:
    import timm
except (ImportError, RuntimeError) as error:  # torchvision is missing, or built for another torch
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

_SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5,
}  # fmt: skip
STAGES = {1: 0.5, 3: 0.25}
MODELS = {
    "vit_tiny_patch16_224": 1,
    "deit_tiny_distilled_patch16_224": 2,
    "vit_base_patch16_siglip_224": 0,
    "eva02_tiny_patch14_224": 1,
    "vit_small_patch16_dinov3": 5,
}
"""Model -> prefix tokens."""


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_patch_timm_equals_masked_attention(name: str) -> None:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = randomize(timm.create_model(name, **_SMALL))
    original, expected = copy.deepcopy(model), model(x)
    patch(model, stages=STAGES)
    pruned = model(x)
    masks = make_retained_masks(get_kept_positions(model), MODELS[name], 16)
    add_masks(original, masks)
    torch.testing.assert_close(pruned, original(x), rtol=0, atol=1e-9 * float(pruned.abs().max()))
    unpatch(model)
    assert torch.equal(model(x), expected) and not torch.allclose(pruned, expected)


def add_masks(model: Any, masks: dict[int, Tensor]) -> None:
    """Mask the attention of all tokens, and pass on only the tokens that the last stage retains."""
    for index, block in enumerate(model.blocks):
        stages = [stage for stage in masks if stage <= index]
        if stages:
            mask = masks[stages[-1]][:, None, None]
            block.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, kwargs | {"attn_mask": mask}), with_kwargs=True
            )
    last = masks[max(masks)]
    model.blocks[-1].register_forward_hook(
        lambda _, args, output: torch.stack([x[keep] for x, keep in zip(output, last, strict=True)])
    )
