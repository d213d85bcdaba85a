"""Layer descriptions: conversion to plain numbers, slicing by units, and (de)serialization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sparseflow.core.config import describe_validation_error
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError


def number(value: object) -> float:
    """What a layer's figure is, whether or not gradients go through it."""
    return float(value.detach()) if hasattr(value, "detach") else float(value)  # pyright: ignore


def part_layer(layer: LayerNode, units: int) -> LayerNode:
    """A layer with some of its units only: what one part of a split costs."""
    if not 0 < units <= layer.units:
        raise InputError(f"a part of {layer.name} has {units} units; expected 1 to {layer.units}")
    share = units / layer.units
    passing = layer.split_in_bytes + layer.split_out_bytes
    held = max(0, layer.memory_bytes - layer.weight_bytes - passing)
    weights = round(layer.weight_bytes * share)
    heads = layer.num_heads if layer.layer_type != "attention" else units
    return replace(
        layer,
        flops=layer.flops * share,
        bytes=passing + (layer.bytes - passing) * share if layer.bytes > passing else layer.bytes,
        weight_bytes=weights,
        memory_bytes=round(weights + passing + held * share),
        num_heads=heads,
        mlp_ratio=layer.mlp_ratio * share,
        units=units,
    )


def layer_records(layers: Sequence[LayerNode]) -> list[dict[str, Any]]:
    """Layers in JSON's types."""
    return [vars(layer) | {"flops": number(layer.flops), "bytes": number(layer.bytes)} for layer in layers]


class _Layer(BaseModel):
    """`LayerNode` as a file holds it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

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


def layers_of(records: Any) -> list[LayerNode]:
    """What `layer_records` gave.

    Raises:
        FileFormatError: It is something else.
    """
    try:
        read = TypeAdapter(Annotated[list[_Layer], MinLen(1)]).validate_python(records)
    except ValidationError as error:
        raise FileFormatError(f"these are no layers: {describe_validation_error(error)}") from error
    if [layer.id for layer in read] != list(range(len(read))):
        raise FileFormatError("these are no layers: their ids do not count from 0")
    return [LayerNode(**layer.model_dump()) for layer in read]
