"""Fictitious layers of transformers, as a `LayeredModel` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.core.layers import LayerNode

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""


def made_layers(
    blocks: int,
    *,
    seed: int,
    batch: int = 2,
    tokens: int = 16,
    head_dim: int = 8,
    precision: str = "float32",
    splittable: bool = True,
) -> list[LayerNode]:
    """Layers of a pruned transformer: embed, then attention and mlp for each block, then head.

    Costs follow from sizes as in a real model: the input of each layer is the output of the previous one, and
    weights are part of `bytes` and `memory_bytes`. A part of a layer receives the full input. Heads, channels
    and tokens differ between blocks; the number of tokens never increases.

    Args:
        blocks: Number of blocks with attention and MLP.
        seed: Random seed of the sizes.
        batch: Samples.
        tokens: Initial tokens per sample.
        head_dim: Width of a head; the embedding is 2, 4 or 8 times as wide.
        precision: A key of `WIDTHS`.
        splittable: Whether layers with several units can be split.

    Returns:
        2 * blocks + 2 layers.
    """
    rng = np.random.default_rng(seed)
    e, remaining, heads = WIDTHS[precision], tokens, int(rng.choice((2, 4, 8)))
    c, pixels, classes = heads * head_dim, int(rng.integers(12, 49)), int(rng.integers(2, 21))
    result: list[LayerNode] = []
    received = batch * tokens * pixels * e
    kinds = ["embed", *["attention", "mlp"] * blocks, "head"]
    for id, kind in enumerate(kinds):
        n, passed = remaining, batch * remaining * c * e
        shape: dict[str, Any] = {"num_heads": 0, "mlp_ratio": 0.0}
        if kind == "embed":
            units, weights, between, flops = c, (pixels + 1) * c, 0, 2 * n * pixels * c
            sent, back, removed = received, passed, passed
        elif kind == "head":
            units, weights, between, flops = classes, (c + 1) * classes, c, 2 * c * classes
            sent, back, removed = batch * c * e, batch * classes * e, batch * classes * e
        else:
            if kind == "attention":
                units = int(rng.integers(1, heads + 1))
                width = units * head_dim
                weights, flops = 4 * c * width + 3 * width + c, 8 * n * c * width + 4 * n * n * width
                between, shape["num_heads"] = 4 * n * width, units
            else:
                units = int(rng.integers(c, 4 * c + 1))
                weights, flops = 2 * c * units + units + c, 4 * n * c * units
                between, shape["mlp_ratio"] = n * units, units / c
                remaining = max(1, int(n * rng.choice((1.0, 0.75))))
            sent, back, removed = passed, passed, batch * remaining * c * e
        split: dict[str, Any] = {}
        if splittable and units > 1:
            split = {
                "splittable": True, "units": units, "split_in_bytes": sent, "split_out_bytes": back,
                "split_joins": kind in ("embed", "head"),
            }  # fmt: skip
        result.append(
            LayerNode(
                id=id,
                name=f"blocks.{(id - 1) // 2}.{kind}" if kind in ("attention", "mlp") else kind,
                layer_type=kind,
                flops=float(batch * flops),
                bytes=float(weights * e + received + removed + 2 * batch * between * e),
                weight_bytes=weights * e,
                memory_bytes=weights * e + received + removed + batch * between * e,
                seq_len=n,
                embed_dim=c,
                precision=precision,
                batch_size=batch,
                traffic_in_bytes=received,
                traffic_out_bytes=removed,
                **shape,
                **split,
            )
        )
        received = removed
    return result


def chained(layers: Sequence[LayerNode]) -> list[LayerNode]:
    """The layers, each with the input that its predecessor sends."""
    result = list(layers)
    for index in range(1, len(result)):
        result[index] = replace(result[index], traffic_in_bytes=result[index - 1].traffic_out_bytes)
    return result


def peak_mb(layers: Sequence[LayerNode]) -> float:
    """Memory that layers or parts need together on one slot, MB: all weights and the largest activations."""
    activations = (layer.memory_bytes - layer.weight_bytes for layer in layers)
    return (sum(layer.weight_bytes for layer in layers) + max(activations, default=0)) / 1e6


def set_chips(slots: ChipSlotConfig, names: Sequence[str | None]) -> None:
    """Set the logits so that each slot contains the named chip type; None is an empty slot."""
    with torch.no_grad():
        slots.logits.zero_()
        for slot, name in enumerate(names):
            types = [chip.name for chip in slots.chips]
            slots.logits[slot, len(types) if name is None else types.index(name)] = 4.0
