"""Types, casts, loads and stores for the kernels' LLVM IR.

Addresses are int64 bytes: the kernels index buffers of several element types whose strides are known only
at run time. Bounds are not checked; the caller of a kernel sizes its buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import config
from numba.extending import intrinsic as _intrinsic

LANES = 16
"""Float lanes of one vector; C_out is padded to a multiple of it."""
VECTOR_BYTES = 4 * LANES
ALL_LANES = 0xFFFF

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
SHORTS = ir.VectorType(I16, LANES)
MASK = ir.VectorType(I1, LANES)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator for functions in LLVM IR; passes constants as literal types."""
    return _intrinsic(prefer_literal=True)(function)


def get_cpu_features() -> frozenset[str]:
    """Names of the instruction set extensions that Numba generates code for."""
    flat: str | None = getattr(config, "CPU_FEATURES", None)
    if flat is None:
        flat = binding.get_host_cpu_features().flatten()
    return frozenset(name[1:] for name in flat.split(",") if name.startswith("+"))


def make_const(value: int, kind: ir.IntType = I64) -> ir.Constant:
    return ir.Constant(kind, value)


def cast_to_pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(cast_to_pointer(builder, address, kind), align=align)


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, cast_to_pointer(builder, address, value.type), align=align)


def splat(builder: Any, scalar: Any, kind: Any) -> Any:
    first_lane = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, make_const(0, I32))
    order = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first_lane, ir.Constant(kind, ir.Undefined), order)


def bits_to_mask(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, I16), MASK)


def mask_to_bits(builder: Any, mask: Any) -> Any:
    return builder.zext(builder.bitcast(mask, I16), I64)
