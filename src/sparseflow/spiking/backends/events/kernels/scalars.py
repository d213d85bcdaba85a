"""Scalar building blocks of the event kernels: memory access, bits, atomics."""

from __future__ import annotations

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


@intrinsic
def read_int(typingctx: Any, address: Any) -> Any:
    """The int32 at an address, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(load(builder, args[0], I32, 4), I64)

    return types.int64(types.int64), codegen


@intrinsic
def write_int(typingctx: Any, address: Any, value: Any) -> Any:
    """Store the low 32 bits of `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, builder.trunc(args[1], I32), args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def read_long(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], I64, 2)

    return types.int64(types.int64), codegen


@intrinsic
def write_long(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[1], args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def read_short(typingctx: Any, address: Any) -> Any:
    """The uint16 at an address, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(load(builder, args[0], I16, 2), I64)

    return types.int64(types.int64), codegen


@intrinsic
def write_short(typingctx: Any, address: Any, value: Any) -> Any:
    """Store the low 16 bits of `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, builder.trunc(args[1], I16), args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def read_float(typingctx: Any, address: Any) -> Any:
    """The float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], F32, 4)

    return types.float32(types.int64), codegen


@intrinsic
def write_float(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[1], args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


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
