"""Layer descriptions: conversion to plain numbers, slicing by units, and (de)serialization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparseflow.core.config import StrictModel, describe_validation_error
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError


def to_float(value: object) -> float:
    """Convert a layer's FLOPs or bytes to a plain number, detached if it is a tensor."""
    return float(value.detach()) if hasattr(value, "detach") else float(value)  # pyright: ignore


def slice_layer(layer: LayerNode, units: int) -> LayerNode:
    """Describe one part of a split layer.

    Args:
        layer: The full layer.
        units: Number of units in the part, from 1 to `layer.units`.

    Raises:
        InputError: `units` is out of range.
    """
    if not 0 < units <= layer.units:
        raise InputError(f"a part of {layer.name} has {units} units; expected 1 to {layer.units}")
    fraction = units / layer.units
    io_bytes = layer.split_in_bytes + layer.split_out_bytes
    inner_bytes = max(0, layer.memory_bytes - layer.weight_bytes - io_bytes)
    weights = round(layer.weight_bytes * fraction)
    heads = layer.num_heads if layer.layer_type != "attention" else units
    return replace(
        layer,
        flops=layer.flops * fraction,
        bytes=io_bytes + (layer.bytes - io_bytes) * fraction if layer.bytes > io_bytes else layer.bytes,
        weight_bytes=weights,
        memory_bytes=round(weights + io_bytes + inner_bytes * fraction),
        num_heads=heads,
        mlp_ratio=layer.mlp_ratio * fraction,
        units=units,
    )


def layers_to_records(layers: Sequence[LayerNode]) -> list[dict[str, Any]]:
    """Convert layers to JSON types; `parse_layers` reads them."""
    return [
        vars(layer) | {"flops": to_float(layer.flops), "bytes": to_float(layer.bytes)} for layer in layers
    ]


class _LayerRecord(StrictModel):
    """File representation of `LayerNode`."""

    model_config = ConfigDict(strict=True)

    id: int
    name: str
    layer_type: str
    flops: float
    bytes: float
    weight_bytes: int
    memory_bytes: int
    seq_len: int
    embed_dim: int
    num_heads: int
    mlp_ratio: float
    precision: str
    batch: int
    traffic_in_bytes: int
    traffic_out_bytes: int
    splittable: bool
    units: int
    split_in_bytes: int
    split_out_bytes: int
    split_joins: bool


def parse_layers(records: Any) -> list[LayerNode]:
    """Read what `layers_to_records` returned.

    Raises:
        FileFormatError: A field is missing, unknown or of another type, or the ids are not 0, 1, 2, …
    """
    try:
        parsed = TypeAdapter(Annotated[list[_LayerRecord], MinLen(1)]).validate_python(records)
    except ValidationError as error:
        raise FileFormatError(f"invalid layers: {describe_validation_error(error)}") from error
    if [layer.id for layer in parsed] != list(range(len(parsed))):
        raise FileFormatError("invalid layers: ids must count from 0")
    return [LayerNode(**layer.model_dump()) for layer in parsed]
