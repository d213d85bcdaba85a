"""Vector building blocks of the event kernels, written as LLVM IR because Numba keeps no array in registers.

Each block works on sixteen float lanes. LLVM lowers them to one AVX-512 register, two AVX2 registers or
four NEON registers, so all machines share one source. Only the compaction of event indices uses an AVX-512
instruction explicitly and has a portable fallback.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from sparseflow.spiking.backends.events.kernels.llvm import (
    FLOATS,
    I1,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    MASK,
    SHORTS,
    VECTOR_BYTES,
    bits_to_mask,
    cast_to_pointer,
    get_cpu_features,
    intrinsic,
    load,
    make_const,
    mask_to_bits,
    splat,
    store,
)


def count_parallel_sums(vectors: int) -> int:
    """Count the partial sums of a row of `vectors` vectors that fit into registers, at most four.

    Several sums hide the latency of additions, and shorter sums round less.
    """
    budget = 16 if "avx512f" in get_cpu_features() else 6
    return max(
        parallel_sums
        for parallel_sums in (1, 2, 4)
        if parallel_sums == 1 or parallel_sums * vectors <= budget
    )


@intrinsic
def add_rows(
    typingctx: Any, rows: Any, start: Any, end: Any, table: Any, zero: Any, first: Any, out: Any, vectors: Any
) -> Any:
    """out = first + sum of the table's rows number `rows[start:end]`; a row is 16*vectors floats.

    The sum stays in registers. Rows are read several at a time; missing rows at the end are replaced by a
    row of zeros, which costs less than a mispredicted branch.

    Args:
        rows: Address of int32 row numbers; up to three after `end` may be read.
        start: First index into `rows`.
        end: One past the last index.
        table: Address of row 0, 64-byte aligned.
        zero: Number of a row that holds zeros.
        first: Address of 16*vectors floats; may be `out`.
        out: Address of 16*vectors floats.
        vectors: Vectors per row; a literal, a power of two.
    """
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    count = vectors.literal_value
    num_sums = count_parallel_sums(count)
    shift = (VECTOR_BYTES * count).bit_length() - 1

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, start, end, table, zero, first, out, _ = args
        numbers = cast_to_pointer(builder, rows, I32)
        function, entry = builder.function, builder.block
        head, body, exit_block = (function.append_basic_block(name) for name in ("head", "body", "done"))
        builder.branch(head)

        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(start, entry)
        sums = [[builder.phi(FLOATS) for _ in range(count)] for _ in range(num_sums)]
        for phi in (phi for partial in sums for phi in partial):
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
        builder.cbranch(builder.icmp_signed("<", i, end), body, exit_block)

        builder.position_at_end(body)
        for k in range(num_sums):
            position = builder.add(i, make_const(k))
            number = builder.sext(builder.load(builder.gep(numbers, [position])), I64)
            if k:
                number = builder.select(builder.icmp_signed("<", position, end), number, zero)
            row = builder.add(table, builder.shl(number, make_const(shift)))
            for a, phi in enumerate(sums[k]):
                weight = load(builder, builder.add(row, make_const(VECTOR_BYTES * a)), FLOATS, VECTOR_BYTES)
                phi.add_incoming(builder.fadd(phi, weight), body)
        i.add_incoming(builder.add(i, make_const(num_sums)), body)
        builder.branch(head)

        builder.position_at_end(exit_block)
        for a in range(count):
            parts = [partial[a] for partial in sums]
            while len(parts) > 1:
                parts = [builder.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
            before = load(builder, builder.add(first, make_const(VECTOR_BYTES * a)), FLOATS, 4)
            store(builder, builder.fadd(before, parts[0]), builder.add(out, make_const(VECTOR_BYTES * a)), 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64, i64, vectors), codegen


@intrinsic
def expand_entries(typingctx: Any, source: Any, add: Any, out: Any, wide: Any) -> Any:
    """Sixteen int32 at `out` = sixteen entries at `source` + add.

    Args:
        source: Address of entries, uint16 or (wide) int32.
        add: int64, truncated to 32 bits.
        out: Address of 64 writable bytes.
        wide: Literal 1 for int32 entries, 0 for uint16.
    """
    if not isinstance(wide, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, add, out, _ = args
        if wide.literal_value:
            entries = load(builder, source, INTS, 4)
        else:
            entries = builder.zext(load(builder, source, SHORTS, 2), INTS)
        store(builder, builder.add(entries, splat(builder, builder.trunc(add, I32), INTS)), out, 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, wide), codegen


@intrinsic
def append_entries(typingctx: Any, out: Any, first: Any, bits: Any, lanes: Any, wide: Any) -> Any:
    """Write `first + lane` for each set bit, packed from `out` on; all `lanes` positions may be overwritten.

    Args:
        out: Address of `lanes` writable entries.
        first: Entry of lane 0.
        bits: Lanes to keep.
        lanes: Literal 16 or 32.
        wide: Literal 1 for int32 entries, 0 for uint16.
    """
    if not isinstance(wide, types.IntegerLiteral) or not isinstance(lanes, types.IntegerLiteral):
        return None
    count, scalar = lanes.literal_value, I32 if wide.literal_value else I16
    size = scalar.width // 8
    # One AVX-512 register holds 16 int32 or 32 uint16.
    step = LANES if wide.literal_value else count
    vector = ir.VectorType(scalar, step)
    native = {"avx512vbmi2", "avx512vl", "avx512bw"} <= get_cpu_features()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, first, bits, *_ = args
        start = builder.trunc(first, scalar)
        if not native:
            cursor = out
            for lane in range(count):
                store(builder, builder.add(start, make_const(lane, scalar)), cursor, size)
                is_set = builder.and_(builder.lshr(bits, make_const(lane)), make_const(1))
                cursor = builder.add(cursor, builder.mul(is_set, make_const(size)))
            return context.get_dummy_value()
        name = f"llvm.x86.avx512.mask.compress.v{step}i{scalar.width}"
        mask = ir.VectorType(I1, step)
        kind = ir.FunctionType(vector, [vector, vector, mask])
        compress = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        for low in range(0, count, step):
            entries = builder.add(
                splat(builder, start, vector), ir.Constant(vector, [low + lane for lane in range(step)])
            )
            step_bits = builder.trunc(builder.lshr(bits, make_const(low)), ir.IntType(step))
            packed = builder.call(
                compress, [entries, ir.Constant(vector, None), builder.bitcast(step_bits, mask)]
            )
            store(builder, packed, out, size)
            num_set = builder.ctpop(builder.zext(step_bits, I64))
            out = builder.add(out, builder.mul(num_set, make_const(size)))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, lanes, wide), codegen


@intrinsic
def fire(
    typingctx: Any,
    v: Any,
    x: Any,
    alpha: Any,
    beta: Any,
    delta: Any,
    threshold: Any,
    reset_value: Any,
    reset_mode: Any,
) -> Any:
    """Step sixteen neurons, updating their membranes; returns the lanes that fired as bits.

    Computes the recurrence of `spec.py`, rounded after each operation, so that it matches plain torch.

    Args:
        v: Address of 16 membranes, updated.
        x: Address of 16 input currents.
        alpha: float32, as in `NeuronSpec`, like beta, delta and threshold.
        reset_value, reset_mode: float32 and int64, as in `NeuronSpec`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v, x, *numbers, reset_mode = args
        alpha, beta, delta, threshold, reset_value = (splat(builder, n, FLOATS) for n in numbers)
        is_soft = builder.icmp_signed("!=", builder.and_(reset_mode, make_const(1)), make_const(0))
        is_delayed = builder.icmp_signed("!=", builder.and_(reset_mode, make_const(2)), make_const(0))
        zeros = ir.Constant(FLOATS, [0.0] * LANES)
        old = load(builder, v, FLOATS, 4)
        current = load(builder, x, FLOATS, 4)
        resets = builder.and_(builder.fcmp_ordered(">=", old, threshold), splat(builder, is_delayed, MASK))
        resets_hard = builder.and_(resets, splat(builder, builder.not_(is_soft), MASK))
        resets_soft = builder.and_(resets, splat(builder, is_soft, MASK))
        old = builder.select(resets_hard, reset_value, old)
        charged = builder.fadd(builder.fadd(builder.fmul(alpha, old), builder.fmul(beta, current)), delta)
        charged = builder.fsub(charged, builder.select(resets_soft, reset_value, zeros))
        fired = builder.fcmp_ordered(">=", charged, threshold)
        after = builder.select(is_soft, builder.fsub(charged, reset_value), reset_value)
        after = builder.select(is_delayed, charged, after)
        store(builder, builder.select(fired, after, charged), v, 4)
        return mask_to_bits(builder, fired)

    i64, f32 = types.int64, types.float32
    return i64(i64, i64, f32, f32, f32, f32, f32, i64), codegen


def _get_masked_intrinsic(builder: Any, operation: str) -> Any:
    name = f"llvm.masked.{operation}.v{LANES}f32.p0"
    vector_pointer = FLOATS.as_pointer()
    if operation == "load":
        kind = ir.FunctionType(FLOATS, [vector_pointer, I32, MASK, FLOATS])
    else:
        kind = ir.FunctionType(ir.VoidType(), [FLOATS, vector_pointer, I32, MASK])
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _masked_load(builder: Any, address: Any, mask: Any) -> Any:
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    arguments = [cast_to_pointer(builder, address, FLOATS), make_const(4, I32), mask, zero]
    return builder.call(_get_masked_intrinsic(builder, "load"), arguments)


def _masked_store(builder: Any, value: Any, address: Any, mask: Any) -> None:
    arguments = [value, cast_to_pointer(builder, address, FLOATS), make_const(4, I32), mask]
    builder.call(_get_masked_intrinsic(builder, "store"), arguments)


@intrinsic
def copy_lanes(typingctx: Any, source: Any, out: Any, valid: Any) -> Any:
    """Copy the floats whose bit in `valid` is set; other lanes are neither read nor written."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, out, valid = args
        mask = bits_to_mask(builder, valid)
        _masked_store(builder, _masked_load(builder, source, mask), out, mask)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64), codegen


@intrinsic
def add_lanes(typingctx: Any, first: Any, source: Any, out: Any, valid: Any) -> Any:
    """out = first + source; floats of `source` without their bit in `valid` count as 0 and are not read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, source, out, valid = args
        addend = _masked_load(builder, source, bits_to_mask(builder, valid))
        store(builder, builder.fadd(load(builder, first, FLOATS, 4), addend), out, 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64), codegen


@intrinsic
def fill_lanes(typingctx: Any, out: Any, value: Any) -> Any:
    """Store a float32 sixteen times."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, splat(builder, args[1], FLOATS), args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def store_bits(typingctx: Any, bits: Any, out: Any, valid: Any) -> Any:
    """Write 1.0 or 0.0 for each bit, in the lanes whose bit in `valid` is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, out, valid = args
        ones, zeros = (ir.Constant(FLOATS, [value] * LANES) for value in (1.0, 0.0))
        value = builder.select(bits_to_mask(builder, bits), ones, zeros)
        _masked_store(builder, value, out, bits_to_mask(builder, valid))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64), codegen


@intrinsic
def load_bits(typingctx: Any, source: Any, valid: Any) -> Any:
    """Bits of the lanes that are 1.0 and, 16 positions higher, of the lanes that are neither 0.0 nor 1.0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, valid = args
        value = _masked_load(builder, source, bits_to_mask(builder, valid))
        one_vector, zero_vector = (ir.Constant(FLOATS, [number] * LANES) for number in (1.0, 0.0))
        ones = builder.fcmp_ordered("==", value, one_vector)
        zeros = builder.fcmp_ordered("==", value, zero_vector)
        invalid = builder.not_(builder.or_(ones, zeros))
        return builder.or_(
            mask_to_bits(builder, ones), builder.shl(mask_to_bits(builder, invalid), make_const(LANES))
        )

    i64 = types.int64
    return i64(i64, i64), codegen
