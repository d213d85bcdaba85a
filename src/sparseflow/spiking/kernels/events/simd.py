"""Vector building blocks of the event kernels, written as LLVM IR because Numba keeps no array in registers.

Every block works on sixteen float lanes. LLVM lowers them to one AVX-512 register, two AVX2 registers or four
NEON registers, so there is one source for all machines; only the compaction of event indices asks for an
AVX-512 instruction by name and has a portable twin.

Addresses travel as int64 bytes: the kernels walk buffers of several element types whose strides are only known
at run time. Nothing here checks a bound; `group.py` and `codec.py` size the buffers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

LANES = 16
"""Float lanes of one vector; C_out is padded to a multiple of it."""
VECTOR_BYTES = 4 * LANES
ALL_LANES = 0xFFFF

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(_I16, LANES)
_MASK = ir.VectorType(_I1, LANES)


def cpu_features() -> frozenset[str]:
    """Names of the instruction set extensions that Numba generates code for here."""
    flat = (
        config.CPU_FEATURES if config.CPU_FEATURES is not None else binding.get_host_cpu_features().flatten()
    )
    return frozenset(name[1:] for name in flat.split(",") if name.startswith("+"))


def _const(value: int, kind: ir.IntType = _I64) -> ir.Constant:
    return ir.Constant(kind, value)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(_pointer(builder, address, kind), align=align)


def _store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=align)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _const(0, _I32))
    order = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), order)


def _mask_of(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, _I16), _MASK)


def _bits_of(builder: Any, mask: Any) -> Any:
    return builder.zext(builder.bitcast(mask, _I16), _I64)


def sums_side_by_side(vectors: int) -> int:
    """How many partial sums of a row of `vectors` vectors fit the registers, at most four.

    They hide the latency of additions, and short sums round less.
    """
    budget = 16 if "avx512f" in cpu_features() else 6
    return max(ways for ways in (1, 2, 4) if ways == 1 or ways * vectors <= budget)


@intrinsic(prefer_literal=True)
def add_rows(
    typingctx: Any, rows: Any, begin: Any, end: Any, table: Any, zero: Any, first: Any, out: Any, vectors: Any
) -> Any:
    """out = first + sum of the table's rows number `rows[begin:end]`; a row is 16*vectors floats.

    The sum lives in registers from the first row to the last. Rows are taken several at a time; those that are
    missing at the end are replaced by a row of zeros, which costs less than a mispredicted branch.

    Args:
        rows: Address of int32 row numbers; three more than `end` may be read.
        begin: First index into `rows`.
        end: One past the last index.
        table: Address of row 0, 64-byte aligned.
        zero: Number of a row that holds zeros.
        first: Address of 16*vectors floats; may be `out`.
        out: Address of 16*vectors floats.
        vectors: How many vectors a row has; a literal, a power of two.
    """
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    count = vectors.literal_value
    ways = sums_side_by_side(count)
    shift = (VECTOR_BYTES * count).bit_length() - 1

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, begin, end, table, zero, first, out, _ = args
        numbers = _pointer(builder, rows, _I32)
        function, entry = builder.function, builder.block
        head, body, done = (function.append_basic_block(name) for name in ("head", "body", "done"))
        builder.branch(head)

        builder.position_at_end(head)
        i = builder.phi(_I64)
        i.add_incoming(begin, entry)
        sums = [[builder.phi(_FLOATS) for _ in range(count)] for _ in range(ways)]
        for phi in (p for way in sums for p in way):
            phi.add_incoming(ir.Constant(_FLOATS, [0.0] * LANES), entry)
        builder.cbranch(builder.icmp_signed("<", i, end), body, done)

        builder.position_at_end(body)
        for way in range(ways):
            at = builder.add(i, _const(way))
            number = builder.sext(builder.load(builder.gep(numbers, [at])), _I64)
            if way:
                number = builder.select(builder.icmp_signed("<", at, end), number, zero)
            row = builder.add(table, builder.shl(number, _const(shift)))
            for a, phi in enumerate(sums[way]):
                weight = _load(builder, builder.add(row, _const(VECTOR_BYTES * a)), _FLOATS, VECTOR_BYTES)
                phi.add_incoming(builder.fadd(phi, weight), body)
        i.add_incoming(builder.add(i, _const(ways)), body)
        builder.branch(head)

        builder.position_at_end(done)
        for a in range(count):
            parts = [way[a] for way in sums]
            while len(parts) > 1:
                parts = [builder.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
            before = _load(builder, builder.add(first, _const(VECTOR_BYTES * a)), _FLOATS, 4)
            _store(builder, builder.fadd(before, parts[0]), builder.add(out, _const(VECTOR_BYTES * a)), 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64, i64, vectors), codegen


@intrinsic(prefer_literal=True)
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
            entries = _load(builder, source, _INTS, 4)
        else:
            entries = builder.zext(_load(builder, source, _SHORTS, 2), _INTS)
        _store(builder, builder.add(entries, _splat(builder, builder.trunc(add, _I32), _INTS)), out, 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, wide), codegen


@intrinsic(prefer_literal=True)
def append_entries(typingctx: Any, out: Any, first: Any, bits: Any, lanes: Any, wide: Any) -> Any:
    """Write `first + lane` for every set bit, packed from `out` on; all `lanes` places may be overwritten.

    Args:
        out: Address of `lanes` writable entries.
        first: Entry of lane 0.
        bits: Which of the lanes to keep.
        lanes: Literal 16 or 32.
        wide: Literal 1 for int32 entries, 0 for uint16.
    """
    if not isinstance(wide, types.IntegerLiteral) or not isinstance(lanes, types.IntegerLiteral):
        return None
    count, scalar = lanes.literal_value, _I32 if wide.literal_value else _I16
    size = scalar.width // 8
    # One AVX-512 register holds 16 int32 or 32 uint16.
    step = LANES if wide.literal_value else count
    vector = ir.VectorType(scalar, step)
    native = {"avx512vbmi2", "avx512vl", "avx512bw"} <= cpu_features()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, first, bits, *_ = args
        start = builder.trunc(first, scalar)
        if not native:
            place = out
            for lane in range(count):
                _store(builder, builder.add(start, _const(lane, scalar)), place, size)
                kept = builder.and_(builder.lshr(bits, _const(lane)), _const(1))
                place = builder.add(place, builder.mul(kept, _const(size)))
            return context.get_dummy_value()
        name = f"llvm.x86.avx512.mask.compress.v{step}i{scalar.width}"
        mask = ir.VectorType(_I1, step)
        kind = ir.FunctionType(vector, [vector, vector, mask])
        compress = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        for low in range(0, count, step):
            entries = builder.add(
                _splat(builder, start, vector), ir.Constant(vector, [low + lane for lane in range(step)])
            )
            some = builder.trunc(builder.lshr(bits, _const(low)), ir.IntType(step))
            packed = builder.call(compress, [entries, ir.Constant(vector, None), builder.bitcast(some, mask)])
            _store(builder, packed, out, size)
            kept = builder.ctpop(builder.zext(some, _I64))
            out = builder.add(out, builder.mul(kept, _const(size)))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, lanes, wide), codegen


@intrinsic
def fire(
    typingctx: Any, v: Any, x: Any, alpha: Any, beta: Any, delta: Any, threshold: Any, rest: Any, hard: Any
) -> Any:
    """One step of sixteen neurons, in place on their membranes; returns the lanes that fired as bits.

    The arithmetic is `alpha*v + beta*x + delta`, rounded after every operation, so that it matches plain torch.

    Args:
        v: Address of 16 membranes, updated.
        x: Address of 16 input currents.
        alpha: float32, as `NeuronSpec`; so are beta, delta and threshold.
        rest: float32 value after a hard reset.
        hard: int64, 1 for a hard reset and 0 for a soft one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v, x, *numbers, hard = args
        alpha, beta, delta, threshold, rest = (_splat(builder, n, _FLOATS) for n in numbers)
        old = _load(builder, v, _FLOATS, 4)
        current = _load(builder, x, _FLOATS, 4)
        charged = builder.fadd(builder.fadd(builder.fmul(alpha, old), builder.fmul(beta, current)), delta)
        fired = builder.fcmp_ordered(">=", charged, threshold)
        is_hard = builder.icmp_signed("!=", hard, _const(0))
        after = builder.select(is_hard, rest, builder.fsub(charged, threshold))
        _store(builder, builder.select(fired, after, charged), v, 4)
        return _bits_of(builder, fired)

    i64, f32 = types.int64, types.float32
    return i64(i64, i64, f32, f32, f32, f32, f32, i64), codegen


def _masked(builder: Any, operation: str) -> Any:
    name = f"llvm.masked.{operation}.v{LANES}f32.p0"
    pointer = _FLOATS.as_pointer()
    if operation == "load":
        kind = ir.FunctionType(_FLOATS, [pointer, _I32, _MASK, _FLOATS])
    else:
        kind = ir.FunctionType(ir.VoidType(), [_FLOATS, pointer, _I32, _MASK])
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _masked_load(builder: Any, address: Any, mask: Any) -> Any:
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    pointer = _pointer(builder, address, _FLOATS)
    return builder.call(_masked(builder, "load"), [pointer, _const(4, _I32), mask, zero])


def _masked_store(builder: Any, value: Any, address: Any, mask: Any) -> None:
    pointer = _pointer(builder, address, _FLOATS)
    builder.call(_masked(builder, "store"), [value, pointer, _const(4, _I32), mask])


@intrinsic
def copy_lanes(typingctx: Any, source: Any, out: Any, valid: Any) -> Any:
    """Copy the floats whose bit in `valid` is set; the other lanes are neither read nor written."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, out, valid = args
        mask = _mask_of(builder, valid)
        _masked_store(builder, _masked_load(builder, source, mask), out, mask)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64), codegen


@intrinsic
def add_lanes(typingctx: Any, first: Any, source: Any, out: Any, valid: Any) -> Any:
    """out = first + source; of `source`, only the floats whose bit in `valid` is set are read, else 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, source, out, valid = args
        more = _masked_load(builder, source, _mask_of(builder, valid))
        _store(builder, builder.fadd(_load(builder, first, _FLOATS, 4), more), out, 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64), codegen


@intrinsic
def store_bits(typingctx: Any, bits: Any, out: Any, valid: Any) -> Any:
    """Write 1.0 or 0.0 for each bit, in the lanes whose bit in `valid` is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, out, valid = args
        one, zero = (ir.Constant(_FLOATS, [value] * LANES) for value in (1.0, 0.0))
        value = builder.select(_mask_of(builder, bits), one, zero)
        _masked_store(builder, value, out, _mask_of(builder, valid))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64), codegen


@intrinsic
def load_bits(typingctx: Any, source: Any, valid: Any) -> Any:
    """Bits of the lanes that are 1.0, and, 16 places higher, of those that are neither 0.0 nor 1.0 (NaN too)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, valid = args
        value = _masked_load(builder, source, _mask_of(builder, valid))
        one, zero = (ir.Constant(_FLOATS, [number] * LANES) for number in (1.0, 0.0))
        ones = builder.fcmp_ordered("==", value, one)
        zeros = builder.fcmp_ordered("==", value, zero)
        others = builder.not_(builder.or_(ones, zeros))
        return builder.or_(_bits_of(builder, ones), builder.shl(_bits_of(builder, others), _const(LANES)))

    i64 = types.int64
    return i64(i64, i64), codegen


@intrinsic
def fill_lanes(typingctx: Any, out: Any, value: Any) -> Any:
    """Store a float32 sixteen times."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, _splat(builder, args[1], _FLOATS), args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def add_one(typingctx: Any, address: Any) -> Any:
    """Add 1.0 to the float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old = _load(builder, args[0], _F32, 4)
        _store(builder, builder.fadd(old, ir.Constant(_F32, 1.0)), args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def read_int(typingctx: Any, address: Any) -> Any:
    """The int32 at an address, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(_load(builder, args[0], _I32, 4), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def write_int(typingctx: Any, address: Any, value: Any) -> Any:
    """Store the low 32 bits of `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, builder.trunc(args[1], _I32), args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def read_long(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _I64, 2)

    return types.int64(types.int64), codegen


@intrinsic
def write_long(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[1], args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def read_short(typingctx: Any, address: Any) -> Any:
    """The uint16 at an address, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(_load(builder, args[0], _I16, 2), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def write_short(typingctx: Any, address: Any, value: Any) -> Any:
    """Store the low 16 bits of `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, builder.trunc(args[1], _I16), args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def read_float(typingctx: Any, address: Any) -> Any:
    """The float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _F32, 4)

    return types.float32(types.int64), codegen


@intrinsic
def write_float(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[1], args[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address; harmless wherever it points."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        reading, into_every_level, data = _const(0, _I32), _const(3, _I32), _const(1, _I32)
        builder.call(function, [_pointer(builder, args[0], _I8), reading, into_every_level, data])
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
    """Add to the int64 at `address` as one step that other threads see whole; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, amount = args
        return builder.atomic_rmw("add", _pointer(builder, address, _I64), amount, "seq_cst")

    i64 = types.int64
    return i64(i64, i64), codegen


@intrinsic
def atomic_max(typingctx: Any, address: Any, value: Any) -> Any:
    """Raise the int64 at `address` to at least `value`; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, value = args
        return builder.atomic_rmw("max", _pointer(builder, address, _I64), value, "seq_cst")

    i64 = types.int64
    return i64(i64, i64), codegen


@intrinsic
def as_pointer(typingctx: Any, address: Any) -> Any:
    """An address as a `void*`, which `numba.carray` takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _I8.as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """A `void*` as an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _I64)

    return types.int64(types.voidptr), codegen
