"""Shapes of a model's inputs from extents of its open dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparseflow.errors import InputError

BATCH = "batch"
"""Name of the leading dimension of inputs, where no dimension has this name."""

OPEN = "?"
"""Name of an open dimension without a name."""

Extents = tuple[int | str, ...]
"""Extents of an input: numbers, or names of open dimensions."""

_TOTAL, _TOTAL_TERMS = "total_sequence_length", ("past_sequence_length", "sequence_length")
"""Dimension of ORT-GenAI's decoders and the dimensions that it is the sum of."""


def resolve_shapes(
    inputs: Mapping[str, Extents],
    sizes: Mapping[str, tuple[int, ...]],
    defaults: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return input -> shape, for the inputs whose extents are all known.

    Args:
        inputs: Input -> extents. An open dimension has a name, or a sum such as `past + sequence`.
        sizes: Input -> shape, or open dimension -> its extent as a shape of one entry. A dimension can be
            given by the words that it starts with: `past` for `past_sequence_length`. `batch` is also the
            leading open dimension, if all inputs have the same.
        defaults: Open dimension -> extent that applies without an entry of `sizes`.

    Raises:
        InputError: An entry is neither an input nor a dimension, or a dimension has several extents.
    """
    names = list(dict.fromkeys(term for extents in inputs.values() for term in _list_terms(extents)))
    dims = dict(defaults or {})
    for name, shape in sizes.items():
        if name in inputs:
            continue
        dimension = _match_dimension(name, names, inputs)
        if dimension is None:
            raise InputError(
                f"the model has no input and no open dimension `{name}`; its inputs are: "
                f"{'; '.join(f'{i} {list(extents)}' for i, extents in inputs.items())}"
            )
        if len(shape) != 1:
            raise InputError(f"the dimension `{name}` has one extent, got {list(shape)}")
        dims[dimension] = shape[0]
    if all(term in dims for term in _TOTAL_TERMS):
        dims.setdefault(_TOTAL, sum(dims[term] for term in _TOTAL_TERMS))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, extents in inputs.items():
        resolved = [_evaluate(extent, dims) for extent in extents]
        if name in sizes:
            shapes[name] = sizes[name]
        elif any(isinstance(extent, str) for extent in extents) and None not in resolved:
            shapes[name] = tuple(extent for extent in resolved if extent is not None)
    return shapes


def is_size(name: str, inputs: Mapping[str, Extents]) -> bool:
    """Return whether a model has an input or an open dimension of this name; see `resolve_shapes`."""
    names = {term for extents in inputs.values() for term in _list_terms(extents)}
    return name in inputs or _match_dimension(name, names, inputs) is not None


def list_names(entries: Iterable[str], model: str) -> list[str]:
    """List the names that entries of NAME or MODEL:NAME have for one model.

    Those of MODEL:NAME are last, so that they have precedence if a dimension has several names.
    """
    own_prefix = f"{model}:"
    return list(
        dict.fromkeys(
            key.removeprefix(own_prefix) for key in sorted(entries, key=lambda k: k.startswith(own_prefix))
        )
    )


def select_for_model(entries: Mapping[str, Any], model: str, names: Iterable[str]) -> dict[str, Any]:
    """Return name -> entry of one model: the entry of MODEL:NAME, otherwise that of NAME."""
    keys = {name: f"{model}:{name}" if f"{model}:{name}" in entries else name for name in names}
    return {name: entries[key] for name, key in keys.items() if key in entries}


def _match_dimension(name: str, dimensions: Iterable[str], inputs: Mapping[str, Extents]) -> str | None:
    """Return the dimension of a name; None if there is none or several match."""
    matches = [name] if name in dimensions else [d for d in dimensions if d.startswith(f"{name}_")]
    if not matches and name == BATCH:
        leading = {extents[0] for extents in inputs.values() if extents and isinstance(extents[0], str)}
        matches = [dimension for dimension in leading if isinstance(dimension, str)]
    return matches[0] if len(matches) == 1 else None


def _list_terms(extents: Extents) -> list[str]:
    """List the names of dimensions in extents."""
    terms = [term.strip() for extent in extents if isinstance(extent, str) for term in extent.split("+")]
    return [term for term in terms if term != OPEN and not term.isdecimal()]


def _evaluate(extent: int | str, dims: Mapping[str, int]) -> int | None:
    """Return the value of an extent; None if one of its dimensions is unknown."""
    if isinstance(extent, int):
        return extent
    values = [int(t) if t.isdecimal() else dims.get(t) for t in map(str.strip, extent.split("+"))]
    return None if None in values else sum(value for value in values if value is not None)
