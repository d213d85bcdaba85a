"""Abstract values of tensors: what is known without their numbers, and how arithmetic changes it.

The kinds form a chain; a tensor of one kind also satisfies the kinds below it::

    binary       each element is 0 or 1
    integer      each element is one of 0, 1, …, max_value       (spikes added to spikes)
    sparse_real  an element is 0 wherever all its sources are 0   (spikes times a constant)
    dense        nothing is known

Each function takes values and returns the strongest value that is *proven* for the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

ValueKind = Literal["binary", "integer", "sparse_real", "dense"]
_RANK: dict[ValueKind, int] = {"binary": 0, "integer": 1, "sparse_real": 2, "dense": 3}
_MAX_EXACT_INTEGER = 2048  # beyond this float16 no longer holds every integer, and sums would round


@dataclass(frozen=True, kw_only=True)
class SpikeValue:
    """What is known about one tensor.

    Attributes:
        kind: See the module's docstring.
        max_value: The largest element of a binary (1, or 0 for a constant zero) or integer tensor; else None.
        sources: Names of the neuron modules that its non-zeros come from; empty for dense values.
        path: Operations since those neurons, in order, as `op` or `op@module`.
        shape: Shape of the tensor in the sample's run; None without one.
        inverted: True for 1 - spikes: elements are 0 or 1 but mostly 1. Such a value is `dense` and becomes
            binary again when multiplied by spikes (SEW's IAND).
        cause: For dense values: what made them so, in words that fit after "fed by".
    """

    kind: ValueKind
    max_value: int | None = None
    sources: frozenset[str] = frozenset()
    path: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    inverted: bool = False
    cause: str | None = None

    @property
    def is_spikes(self) -> bool:
        """Whether the elements are 0/1 or small integers, and come from at least one neuron."""
        return self.kind in ("binary", "integer") and bool(self.sources)

    def append_op(self, op: str) -> SpikeValue:
        """Return the value after `op`, which does not change the range of any element."""
        return self if self.kind == "dense" and not self.inverted else replace(self, path=(*self.path, op))

    def with_shape(self, shape: Iterable[int] | None) -> SpikeValue:
        return replace(self, shape=None if shape is None else tuple(int(size) for size in shape))


ZERO = SpikeValue(kind="binary", max_value=0)


def make_integer(max_value: int, sources: Iterable[str], path: tuple[str, ...] = ()) -> SpikeValue:
    """Make integers 0 … `max_value`; binary if that is 1, dense if it is too large to be exact."""
    if max_value > _MAX_EXACT_INTEGER:
        return make_dense("integers too large to be exact in float16")
    kind: ValueKind = "binary" if max_value <= 1 else "integer"
    return SpikeValue(kind=kind, max_value=max_value, sources=frozenset(sources), path=path)


def make_dense(cause: str) -> SpikeValue:
    """Make a value about which nothing is known, because of `cause`."""
    return SpikeValue(kind="dense", cause=cause)


def _make_inverted(sources: frozenset[str], path: tuple[str, ...]) -> SpikeValue:
    cause = "1 - spikes, which are mostly ones"
    return SpikeValue(kind="dense", inverted=True, sources=sources, path=path, cause=cause)


def _make_sparse(values: Iterable[SpikeValue], path: tuple[str, ...]) -> SpikeValue:
    return SpikeValue(kind="sparse_real", sources=_unite_sources(values), path=path)


def _unite_sources(values: Iterable[SpikeValue]) -> frozenset[str]:
    return frozenset[str]().union(*(value.sources for value in values))


def _find_longest_path(values: Iterable[SpikeValue]) -> tuple[str, ...]:
    return max((value.path for value in values), key=len, default=())


def _get_max_value(value: SpikeValue) -> int:
    assert value.max_value is not None
    return value.max_value


def join(values: Iterable[SpikeValue], op: str) -> SpikeValue:
    """Value of a tensor each of whose elements comes from one of `values` (cat, stack, a merge)."""
    operands = list(values)
    if not operands:
        return make_dense(f"`{op}` of nothing")
    path = (*_find_longest_path(operands), op)
    weakest = max(operands, key=lambda value: _RANK[value.kind])
    if weakest.kind == "dense":
        if all(value.inverted for value in operands):
            return _make_inverted(_unite_sources(operands), path)
        return make_dense(weakest.cause or f"`{op}`")
    if weakest.kind == "sparse_real":
        return _make_sparse(operands, path)
    return make_integer(max(map(_get_max_value, operands)), _unite_sources(operands), path)


def add(first: SpikeValue, second: SpikeValue, op: str = "add") -> SpikeValue:
    """Value of first + second, elementwise."""
    if first.max_value == 0:
        return second.append_op(op)
    if second.max_value == 0:
        return first.append_op(op)
    for value in (first, second):
        if value.kind == "dense":
            return make_dense(value.cause or f"`{op}`")
    path = (*_find_longest_path((first, second)), op)
    if "sparse_real" in (first.kind, second.kind):
        return _make_sparse((first, second), path)
    return make_integer(_get_max_value(first) + _get_max_value(second), first.sources | second.sources, path)


def subtract(first: SpikeValue, second: SpikeValue, op: str = "sub") -> SpikeValue:
    """Value of first - second, elementwise."""
    if second.max_value == 0:
        return first.append_op(op)
    for value in (first, second):
        if value.kind == "dense":
            return make_dense(value.cause or f"`{op}`")
    return _make_sparse((first, second), (*_find_longest_path((first, second)), op))


def subtract_from_one(value: SpikeValue, op: str = "sub") -> SpikeValue:
    """Value of 1 - value."""
    path = (*value.path, op)
    if value.inverted:
        return SpikeValue(kind="binary", max_value=1, sources=value.sources, path=path)
    if value.kind == "binary":
        return _make_inverted(value.sources, path)
    return make_dense(value.cause or "a difference from one")


def multiply(first: SpikeValue, second: SpikeValue, op: str = "mul") -> SpikeValue:
    """Value of first * second, elementwise; 0 times anything finite is 0."""
    if first.max_value == 0 or second.max_value == 0:
        return ZERO
    path = (*_find_longest_path((first, second)), op)
    if first.inverted and second.inverted:
        # Both factors are 0 or 1 and so is their product, but nothing makes it sparse.
        return _make_inverted(first.sources | second.sources, path)
    for value, other in ((first, second), (second, first)):
        if other.inverted and value.kind != "dense":
            return replace(value, path=path, shape=None)
    if first.kind == "dense" and second.kind == "dense":
        return make_dense(first.cause or second.cause or f"`{op}`")
    if "dense" in (first.kind, second.kind) or "sparse_real" in (first.kind, second.kind):
        return _make_sparse([value for value in (first, second) if value.kind != "dense"], path)
    return make_integer(_get_max_value(first) * _get_max_value(second), first.sources | second.sources, path)


def scale_by(value: SpikeValue, factor: float, op: str = "mul") -> SpikeValue:
    """Value of value * a Python number."""
    if not math.isfinite(factor):
        return make_dense(f"a product with {factor}")
    if factor == 1:
        return value.append_op(op)
    if factor == 0 and value.kind != "dense":
        return ZERO
    if value.kind == "dense":
        return make_dense(value.cause or f"`{op}`")
    return _make_sparse((value,), (*value.path, op))


def clamp_at_zero(value: SpikeValue, op: str = "relu") -> SpikeValue:
    """Value of max(value, 0): spikes and integers are unchanged, other zeros stay zeros."""
    if value.kind in ("binary", "integer") or value.inverted:
        return value.append_op(op)
    if value.kind == "sparse_real":
        return _make_sparse((value,), (*value.path, op))
    return make_dense(f"`{op}`")
