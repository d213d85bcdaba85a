"""A fictitious GPU with known layer costs, to evaluate fits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerConfig, LayerGrid, LayerPoint
from sparseflow.core.layers import LayerNode

GPU = DeviceSpec(
    name="made-up", peak_flops=4e14, peak_bw=2e12, mem_gb=80, tdp_w=500, idle_w=60, cores=100,
    rates=(("float32", 4e13), ("bfloat16", 4e14)),
)  # fmt: skip


def node(kind: str = "mlp", precision: str = "bfloat16", batch: int = 8, inner: int = 3072) -> LayerNode:
    """Create a layer of ViT-B."""
    head_dim = 64 if kind == "attention" else 0
    return LayerConfig(
        layer_type=kind, precision=precision, batch=batch, seq_len=196, embed_dim=768, inner=inner,
        head_dim=head_dim,
    ).to_node()  # fmt: skip


def latency_ms(config: LayerConfig) -> float:
    """Latency: products in full waves of tiles, bytes at 80 % of the bandwidth, and three launches."""
    layer, c = config.to_node(), config.embed_dim
    rows = config.batch * config.seq_len
    peak = GPU.rate(config.precision) / 100 * 0.7
    products = {
        "embed": [(rows, c, 3 * config.inner**2)],
        "attention": [
            (rows, 3 * config.inner * config.head_dim, c),
            (rows, c, config.inner * config.head_dim),
        ],
        "mlp": [(rows, config.inner, c), (rows, c, config.inner)],
        "head": [(config.batch, config.inner, c)],
    }[config.layer_type]
    seconds = 0.0
    for m, n, k in products:
        waves = math.ceil(math.ceil(m / 128) * math.ceil(n / 128) / 100)
        seconds += waves * 2 * 128 * 128 * k / peak
    if config.layer_type == "attention":
        waves = math.ceil(config.batch * config.inner * math.ceil(config.seq_len / 128) / 100)
        seconds += waves * 4 * 128 * config.seq_len * config.head_dim / (peak * 0.6)
    return 1e3 * (seconds + float(layer.bytes) / (0.8 * GPU.peak_bw)) + 0.006


def change(point: LayerPoint, **values: Any) -> LayerPoint:
    """A copy of a point with other values."""
    return LayerPoint(**dict(point) | values)


def points(count: int, *, noise: float = 0.02, seed: int = 0, power: bool = True) -> list[LayerPoint]:
    """Create measurements with noise."""
    random = np.random.default_rng(seed)
    rows = []
    for index, config in enumerate(LayerGrid(precisions=("float32", "bfloat16")).sample(count, seed)):
        layer = config.to_node()
        elapsed_ms = latency_ms(config) * math.exp(random.normal(0.0, noise))
        compute = 1e3 * float(layer.flops) / GPU.rate(config.precision) / elapsed_ms
        memory = 1e3 * float(layer.bytes) / GPU.peak_bw / elapsed_ms
        watts = 60.0 + 440.0 * min(1.0, 0.1 + 0.7 * compute + 0.3 * memory)
        rows.append(
            LayerPoint(
                layer=layer,
                device=GPU,
                mode="graph",
                lat_ms=elapsed_ms,
                samples_ms=(elapsed_ms, elapsed_ms),
                mem_mb=1.1 * layer.memory_bytes / 1e6,
                power_w=watts if power and index % 4 == 0 else None,
                environment="here",
            )
        )
    return rows
