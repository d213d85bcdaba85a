"""Latency: what an ONNX model will take on a loaded device."""

from __future__ import annotations
