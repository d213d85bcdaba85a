"""Adapters: one per architecture."""

from __future__ import annotations

from sparseflow.adaptive.adapters.decoders import ROUTERS, DecoderAdapter
from sparseflow.adaptive.adapters.llava import LlavaAdapter
from sparseflow.adaptive.adapters.qwen3_vl import Qwen3VLMoeAdapter
from sparseflow.adaptive.plan.adapter import Adapter, Inputs, get_adapter, register

for _model_type in ROUTERS:
    register(_model_type, DecoderAdapter)
register("llava", LlavaAdapter)
register("qwen3_vl_moe", Qwen3VLMoeAdapter)

__all__ = [
    "Adapter",
    "DecoderAdapter",
    "Inputs",
    "LlavaAdapter",
    "Qwen3VLMoeAdapter",
    "get_adapter",
    "register",
]
