"""What is known about a tensor without looking at its numbers, and how arithmetic changes it.

The kinds form a chain; whatever holds for one holds for all that follow::

    binary       every element is 0 or 1
    integer      every element is one of 0, 1, …, max_value       (spikes added to spikes)
    sparse_real  an element is 0 wherever all its sources are 0   (spikes times a constant)
    dense        nothing is known

Each function here takes values and returns the strongest value that is *proven* for the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["binary", "integer", "sparse_real", "dense"]
_RANK: dict[Kind, int] = {"binary": 0, "integer": 1, "sparse_real": 2, "dense": 3}
_EXACT_INTEGERS = 2048  # beyond this float16 no longer holds every integer, and sums would round


@dataclass(frozen=True, kw_only=True)
class Value:
    """What is known about one tensor.

    Attributes:
        kind: See the module's docstring.
        max_value: The largest element of a binary (1, or 0 for a constant zero) or integer tensor; else None.
        sources: Names of the neuron modules that its non-zeros come from; empty for dense values.
        path: Operations walked since those neurons, in order, as `op` or `op@module`.
        shape: The tensor's shape in the run with the sample; None without one.
        scale: For `sparse_real`: the constant c when every element is c times a small non-negative
            integer (at most `count`), else None.
        count: For `sparse_real` with a `scale`: the largest such integer.
        inverted: True for 1 - spikes: elements are 0 or 1 but mostly 1. Such a value is `dense` and turns
            binary again when multiplied by spikes (SEW's IAND).
        cause: For dense values: what made them so, in words that fit after "fed by".
    """

    kind: Kind
    max_value: int | None = None
    sources: frozenset[str] = frozenset()
    path: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    scale: float | None = None
    count: int | None = None
    inverted: bool = False
    cause: str | None = None

    @property
    def is_spikes(self) -> bool:
        """Whether the elements are 0/1 or small integers, and come from at least one neuron."""
        return self.kind in ("binary", "integer") and bool(self.sources)

    def step(self, op: str) -> Value:
        """The same value after `op`, which changed no element's range."""
        return self if self.kind == "dense" and not self.inverted else replace(self, path=(*self.path, op))

    def with_shape(self, shape: Iterable[int] | None) -> Value:
        """The same value with the shape seen in a run."""
        return replace(self, shape=None if shape is None else tuple(int(size) for size in shape))


ZERO = Value(kind="binary", max_value=0)


def binary(*sources: str, path: tuple[str, ...] = ()) -> Value:
    """Spikes of the neurons named `sources`."""
    return Value(kind="binary", max_value=1, sources=frozenset(sources), path=path)


def integer(max_value: int, sources: Iterable[str], path: tuple[str, ...] = ()) -> Value:
    """Integers 0 … `max_value`; binary when that is 1, dense when it is too large to be exact."""
    if max_value > _EXACT_INTEGERS:
        return dense("integers too large to be exact in float16")
    kind: Kind = "binary" if max_value <= 1 else "integer"
    return Value(kind=kind, max_value=max_value, sources=frozenset(sources), path=path)


def dense(cause: str) -> Value:
    """A value about which nothing is known, because of `cause`."""
    return Value(kind="dense", cause=cause)


def _sparse(
    values: Iterable[Value], path: tuple[str, ...], scale: float | None = None, count: int | None = None
) -> Value:
    sources = frozenset[str]().union(*(value.sources for value in values))
    return Value(
        kind="sparse_real",
        sources=sources,
        path=path,
        scale=scale,
        count=count if scale is not None else None,
    )


def _longest_path(values: Iterable[Value]) -> tuple[str, ...]:
    return max((value.path for value in values), key=len, default=())


def _bound(value: Value) -> int:
    assert value.max_value is not None
    return value.max_value


def join(values: Iterable[Value], op: str) -> Value:
    """The value of a tensor each of whose elements comes from one of `values` (cat, stack, a merge)."""
    present = list(values)
    if not present:
        return dense(f"`{op}` of nothing")
    path = (*_longest_path(present), op)
    worst = max(present, key=lambda value: _RANK[value.kind])
    if worst.kind == "dense":
        if all(value.inverted for value in present):
            sources = frozenset[str]().union(*(value.sources for value in present))
            return Value(kind="dense", inverted=True, sources=sources, path=path, cause=worst.cause)
        return dense(worst.cause or f"`{op}`")
    if worst.kind == "sparse_real":
        scales = {value.scale for value in present if value != ZERO}
        same = scales.pop() if len(scales) == 1 else None
        return _sparse(present, path, same, max(value.count or 0 for value in present))
    sources = frozenset[str]().union(*(value.sources for value in present))
    return integer(max(_bound(value) for value in present), sources, path)


def add(left: Value, right: Value, op: str = "add") -> Value:
    """left + right, element by element."""
    if left.max_value == 0:
        return right.step(op)
    if right.max_value == 0:
        return left.step(op)
    for value in (left, right):
        if value.kind == "dense":
            return dense(value.cause or f"`{op}`")
    path = (*_longest_path((left, right)), op)
    if "sparse_real" in (left.kind, right.kind):
        same = left.scale if left.scale == right.scale else None
        return _sparse((left, right), path, same, (left.count or 0) + (right.count or 0))
    return integer(_bound(left) + _bound(right), left.sources | right.sources, path)


def subtract(left: Value, right: Value, op: str = "sub") -> Value:
    """left - right, element by element."""
    if right.max_value == 0:
        return left.step(op)
    for value in (left, right):
        if value.kind == "dense":
            return dense(value.cause or f"`{op}`")
    return _sparse((left, right), (*_longest_path((left, right)), op))


def one_minus(value: Value, op: str = "sub") -> Value:
    """1 - value."""
    path = (*value.path, op)
    if value.inverted:
        return Value(kind="binary", max_value=1, sources=value.sources, path=path)
    if value.kind == "binary":
        return Value(
            kind="dense",
            inverted=True,
            sources=value.sources,
            path=path,
            cause="1 - spikes, which are mostly ones",
        )
    return dense(value.cause or "a difference from one")


def multiply(left: Value, right: Value, op: str = "mul") -> Value:
    """left * right, element by element. Zeros win: 0 * anything finite is 0."""
    if left.max_value == 0 or right.max_value == 0:
        return ZERO
    path = (*_longest_path((left, right)), op)
    if left.inverted and right.inverted:
        # Both factors are 0 or 1 and so is their product, but nothing makes it sparse.
        return Value(
            kind="dense",
            inverted=True,
            sources=left.sources | right.sources,
            path=path,
            cause="1 - spikes, which are mostly ones",
        )
    for value, other in ((left, right), (right, left)):
        if other.inverted and value.kind != "dense":
            return replace(value, path=path, shape=None)
    if left.kind == "dense" and right.kind == "dense":
        return dense(left.cause or right.cause or f"`{op}`")
    if "dense" in (left.kind, right.kind) or "sparse_real" in (left.kind, right.kind):
        return _sparse([value for value in (left, right) if value.kind != "dense"], path)
    return integer(_bound(left) * _bound(right), left.sources | right.sources, path)


def scale_by(value: Value, factor: float, op: str = "mul") -> Value:
    """value * a Python number."""
    if not math.isfinite(factor):
        return dense(f"a product with {factor}")
    if factor == 1:
        return value.step(op)
    if factor == 0 and value.kind != "dense":
        return ZERO
    if value.kind == "dense":
        return dense(value.cause or f"`{op}`")
    path = (*value.path, op)
    if value.kind == "sparse_real":
        scale = None if value.scale is None else value.scale * factor
        return _sparse((value,), path, scale, value.count)
    return _sparse((value,), path, float(factor), _bound(value))


def floor_at_zero(value: Value, op: str = "relu") -> Value:
    """max(value, 0): spikes and integers are unchanged, other zeros stay zeros."""
    if value.kind in ("binary", "integer") or value.inverted:
        return value.step(op)
    if value.kind == "sparse_real":
        keep = value.scale is not None and value.scale > 0
        return _sparse((value,), (*value.path, op), value.scale if keep else None, value.count)
    return dense(f"`{op}`")
