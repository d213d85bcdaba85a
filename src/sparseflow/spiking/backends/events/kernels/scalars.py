"""Scalar building blocks of the event kernels: memory access, bits, atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from sparseflow.spiking.backends.events.kernels.llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    cast_to_pointer,
    intrinsic,
    load,
    make_const,
    store,
)


def _make_reader(kind: ir.Type, result: Any, convert: Callable[[Any, Any], Any], align: int) -> Any:
    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(builder, load(builder, args[0], kind, align))

        return result(types.int64), codegen

    return read


read_int = _make_reader(I32, types.int64, lambda builder, value: builder.sext(value, I64), 4)
"""The int32 at an address, as int64."""
read_short = _make_reader(I16, types.int64, lambda builder, value: builder.zext(value, I64), 2)
"""The uint16 at an address, as int64."""
read_long = _make_reader(I64, types.int64, lambda builder, value: value, 2)
"""The int64 at an address."""
read_float = _make_reader(F32, types.float32, lambda builder, value: value, 4)
"""The float32 at an address."""


def _make_writer(kind: ir.IntType, align: int) -> Any:
    @intrinsic
    def write(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = args[1] if kind is I64 else builder.trunc(args[1], kind)
            store(builder, value, args[0], align)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return write


write_int = _make_writer(I32, 4)
"""Store the low 32 bits of an int64."""
write_short = _make_writer(I16, 2)
"""Store the low 16 bits of an int64."""
write_long = _make_writer(I64, 2)
"""Store an int64."""


@intrinsic
def add_one(typingctx: Any, address: Any) -> Any:
    """Add 1.0 to the float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old = load(builder, args[0], F32, 4)
        store(builder, builder.fadd(old, ir.Constant(F32, 1.0)), args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address; any address is safe."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        reading, into_every_level, data = make_const(0, I32), make_const(3, I32), make_const(1, I32)
        builder.call(function, [cast_to_pointer(builder, args[0], I8), reading, into_every_level, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def count_bits(typingctx: Any, bits: Any) -> Any:
    """Number of set bits of an int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add atomically to the int64 at `address`; returns the previous value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, amount = args
        return builder.atomic_rmw("add", cast_to_pointer(builder, address, I64), amount, "seq_cst")

    i64 = types.int64
    return i64(i64, i64), codegen


@intrinsic
def atomic_max(typingctx: Any, address: Any, value: Any) -> Any:
    """Raise the int64 at `address` atomically to at least `value`; returns the previous value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, value = args
        return builder.atomic_rmw("max", cast_to_pointer(builder, address, I64), value, "seq_cst")

    i64 = types.int64
    return i64(i64, i64), codegen


@intrinsic
def as_pointer(typingctx: Any, address: Any) -> Any:
    """Convert an address to a `void*` for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], I8.as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """Convert a `void*` to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], I64)

    return types.int64(types.voidptr), codegen
