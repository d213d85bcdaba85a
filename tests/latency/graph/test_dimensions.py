"""Shapes from extents of open dimensions."""

from __future__ import annotations

import pytest

from sparseflow.errors import InputError
from sparseflow.latency.graph.dimensions import Extents, resolve_shapes

DECODER: dict[str, Extents] = {
    "input_ids": ("batch_size", "sequence_length"),
    "attention_mask": ("batch_size", "total_sequence_length"),
    "past_key_values.0.key": ("batch_size", 2, "past_sequence_length", 16),
}


def test_resolve_decoder_by_past_and_sequence() -> None:
    assert resolve_shapes(DECODER, {"batch": (2,), "sequence": (1,), "past": (127,)}) == {
        "input_ids": (2, 1),
        "attention_mask": (2, 128),
        "past_key_values.0.key": (2, 2, 127, 16),
    }
    summed = DECODER | {"attention_mask": ("batch_size", "past_sequence_length + 1")}
    assert resolve_shapes(summed, {"past": (0,), "batch": (1,)}) == {
        "attention_mask": (1, 1),
        "past_key_values.0.key": (1, 2, 0, 16),
    }


def test_resolve_prefers_shapes_and_extents_over_defaults() -> None:
    inputs: dict[str, Extents] = {"x": ("batch", "time"), "state": ("batch", 8), "weight": (4, 4)}
    defaults = {"batch": 1, "time": 5}
    assert resolve_shapes(inputs, {}, defaults) == {"x": (1, 5), "state": (1, 8)}
    assert resolve_shapes(inputs, {"batch": (3,), "x": (7, 9)}, defaults) == {"x": (7, 9), "state": (3, 8)}


def test_resolve_batch_is_the_common_leading_dimension() -> None:
    assert resolve_shapes({"x": ("N", 3), "y": ("N",)}, {"batch": (2,)}) == {"x": (2, 3), "y": (2,)}
    for inputs in ({"x": ("N", 3), "y": ("M", 3)}, {"x": (1, "N")}):
        with pytest.raises(InputError, match="`batch`"):
            resolve_shapes(inputs, {"batch": (2,)})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"past": (1, 2)}, "one extent"), ({"p": (1,)}, "no open dimension `p`"), ({"?": (1,)}, "`[?]`")],
)
def test_resolve_invalid_sizes_raise(sizes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_shapes(DECODER | {"x": ("?", 1)}, sizes)
