"""Layer descriptions: conversion to plain numbers, slicing by units, and fields of file records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from sparseflow.core.config import StrictModel
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError


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
    weights = compute_part_weight_bytes(layer, units)
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


def compute_part_weight_bytes(layer: LayerNode, units: int) -> int:
    """Bytes of the parameters of a part of a layer with some of its units."""
    return round(layer.weight_bytes * (units / layer.units))


_SIZES = (
    "weight_bytes",
    "memory_bytes",
    "traffic_in_bytes",
    "traffic_out_bytes",
    "split_in_bytes",
    "split_out_bytes",
)


def check_chain(layers: Sequence[LayerNode]) -> None:
    """Check that layers form a chain: ids count from 0, sizes are at least 0, and each feeds the next.

    Raises:
        InputError: The layers are no such chain.
    """
    for index, layer in enumerate(layers):
        if layer.id != index:
            raise InputError(f"layer {layer.name} has the id {layer.id}; ids must count from 0, here {index}")
        for name in _SIZES:
            size = getattr(layer, name)
            if not (math.isfinite(size) and size >= 0):
                raise InputError(f"`{name}` (={size}) of layer {layer.name} must be finite and at least 0")
    for layer, following in pairwise(layers):
        if layer.traffic_out_bytes != following.traffic_in_bytes:
            raise InputError(
                f"layer {layer.name} sends {layer.traffic_out_bytes} bytes, but the next layer, "
                f"{following.name}, receives {following.traffic_in_bytes}; both must be equal, because each "
                "layer feeds the next (models with branches are not supported)"
            )


_RECORD_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "float | Tensor": float}
_RECORD_FIELDS: dict[str, Any] = {
    field.name: (_RECORD_TYPES[str(field.type)], ...) for field in fields(LayerNode)
}
_LayerRecord = create_model(
    "_LayerRecord", __config__=StrictModel.model_config | ConfigDict(strict=True), **_RECORD_FIELDS
)
"""File representation of `LayerNode`, with plain numbers in place of tensors."""


def layer_to_record(layer: LayerNode) -> dict[str, Any]:
    """Convert a layer to JSON types."""
    return vars(layer) | {"flops": to_float(layer.flops), "bytes": to_float(layer.bytes)}


def _parse_layer(record: object) -> LayerNode:
    if isinstance(record, LayerNode):
        return record
    return LayerNode(**_LayerRecord.model_validate(record).model_dump())


def _check_layers(layers: list[LayerNode]) -> list[LayerNode]:
    check_chain(layers)
    return layers


class _LayerSchema:
    """Pydantic schema of `LayerNode`, whose own annotations are not available at runtime."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _parse_layer, serialization=core_schema.plain_serializer_function_ser_schema(layer_to_record)
        )


LayerField = Annotated[LayerNode, _LayerSchema()]
"""A layer as a field of a pydantic model."""

LayersField = Annotated[list[LayerField], MinLen(1), AfterValidator(_check_layers)]
"""All layers of a model, in order, as a field of a pydantic model."""
