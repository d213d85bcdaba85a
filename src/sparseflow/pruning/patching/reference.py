"""Slow reference of a patched model of transformers: the original model with masked attention.

All blocks compute all tokens; from a stage on, no token attends to the tokens that the stage drops. After the
last block only the kept tokens are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def make_retained_masks(
    positions: Mapping[int, Tensor], num_prefix: int, num_tokens: int
) -> dict[int, Tensor]:
    """Stage -> whether each token is retained, bool, [B, P + N]."""
    masks = {}
    for stage, index in positions.items():
        mask = torch.zeros(len(index), num_prefix + num_tokens, dtype=torch.bool, device=index.device)
        mask[:, :num_prefix] = True
        masks[stage] = mask.scatter(1, index + num_prefix, True)
    return masks


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        logits = logits + attention_mask
    retained = getattr(module, "retained", None)
    if retained is not None:
        logits = logits.masked_fill(~retained[:, None, None], float("-inf"))
    return (logits.softmax(-1) @ value).transpose(1, 2), None


def _attend_frames(module: Any, tokens: Tensor) -> tuple[Tensor]:
    """The attention of a TimeSformer within frames, [B * T, 1 + N, C]."""
    b, s, dim = tokens.shape
    q, k, v = module.qkv(tokens).view(b, s, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
    logits = (q @ k.mT * module.scale).masked_fill(~module.retained[:, None, None], float("-inf"))
    return ((logits.softmax(-1) @ v).transpose(1, 2).reshape(b, s, dim),)


@contextmanager
def mask_dropped_tokens(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    positions: Mapping[int, Tensor],
    num_prefix: int,
    num_tokens: int,
) -> Iterator[None]:
    """Mask the attention of a model of transformers as the stages of a patched model do.

    Args:
        model: Model that is not patched.
        blocks: Its blocks.
        positions: Stage -> positions of the kept grid tokens, [B, kept].
        num_prefix: Prefix tokens.
        num_tokens: Grid tokens.
    """
    from transformers import AttentionInterface  # pyright: ignore

    AttentionInterface.register("masked_reference", _attend)
    masks = make_retained_masks(positions, num_prefix, num_tokens)
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    last = masks[max(masks)]

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) else output
        tokens = torch.stack([x[keep] for x, keep in zip(tokens, last, strict=True)])
        return (tokens, *output[1:]) if isinstance(output, tuple) else tokens

    handle = blocks[-1].register_forward_hook(gather)
    changed: list[Any] = []
    for config, _ in implementations:
        config._attn_implementation = "masked_reference"
    for index, block in enumerate(blocks):
        stages = [stage for stage in masks if stage <= index]
        for module in block.modules() if stages else ():
            module.retained = masks[stages[-1]]  # pyright: ignore
            changed.append(module)
        if stages and hasattr(block, "temporal_attention"):
            attention: Any = block.get_submodule("attention.attention")
            frames: Any = model.config.num_frames  # pyright: ignore
            mask = masks[stages[-1]]
            cells = mask[:, 1:].unflatten(1, (-1, frames)).transpose(1, 2).flatten(0, 1)
            attention.retained = torch.cat(
                [torch.ones(len(cells), 1, dtype=torch.bool, device=cells.device), cells], 1
            )
            attention.forward = lambda x, *_, attention=attention: _attend_frames(attention, x)
    try:
        yield
    finally:
        handle.remove()
        for config, implementation in implementations:
            config._attn_implementation = implementation
        for module in changed:
            del module.retained
            module.__dict__.pop("forward", None)
