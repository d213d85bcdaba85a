"""C code of a loop nest, with vector extensions and OpenMP.

The function is `void sparseflow_kernel(const void *const *in, void *const *out)`. `in` has the rows and
columns of the matrix and the chunk of the schedule (int64 [3]), then the first step of each thread if the
schedule balances elements (int64 [threads + 1]), then the arrays of `formats.PackedMatrix.arrays`, then the
dense inputs and, for an output stored like the matrix, the number of its values as one int64; `out` has the
output.

The source has neither the content of the matrix nor, in most schedules, its shape, so matrices share the
compiled code of a schedule. Extents of dense axes, blocks and inner dense levels are constants.

In the generated code `c0` is a coordinate along the sub axis of loop 0, `p0` a position in storage level 0,
and `s…` a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from sparseflow.tuning.codegen.loop_nest import NUM_CHAINS, Loop, LoopNest
from sparseflow.tuning.schedule.operators import DENSE_INPUTS
from sparseflow.tuning.schedule.parser import LevelMode

SYMBOL = "sparseflow_kernel"

_MAX_INLINE_VECTORS = 16
"""Vectors of a loop that are written out; more vectors become a loop."""

_MAX_GATHER_BYTES = 32
"""Widest gathered vector; wider vectors take longer to assemble than they save."""

_DECLARE_MAX_THREADS = (
    "#ifdef _OPENMP",
    "int omp_get_max_threads(void);",
    "#else",
    "#define omp_get_max_threads() 1",
    "#endif",
)

_ZERO_CHUNK_BYTES = 65536
"""Bytes of the output that a thread zeroes at a time."""


def generate_source(nest: LoopNest, *, wide: bool = False) -> str:
    """Generate the C source of a kernel.

    Args:
        nest: Loop nest.
        wide: Whether `pos` arrays are int64; see `formats.select_index_dtype`.
    """
    return _SourceWriter(nest, wide).source()


@dataclass(frozen=True)
class _Env:
    """Expressions of the current coordinates and position, and shortened extents of sub axes."""

    coordinate: Mapping[str, str]
    extents: Mapping[str, int]
    position: str

    def with_coordinate(self, loop: Loop, coordinate: str, position: str | None = None) -> _Env:
        return _Env({**self.coordinate, loop.sub_axis: coordinate}, self.extents, position or self.position)

    def with_extent(self, axis: str, extent: int) -> _Env:
        return _Env(self.coordinate, {**self.extents, axis: extent}, self.position)


@dataclass
class _Accumulators:
    """Sums in variables: variable name -> C type, and result index -> its variables with their widths."""

    types: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class _SourceWriter:
    def __init__(self, nest: LoopNest, wide: bool) -> None:
        self.nest, self.wide = nest, wide
        self.real = "float" if nest.dtype == np.float32 else "double"
        self.lines: list[str] = []
        self.depth = 1
        self.widths: set[int] = set()
        self.sums: _Accumulators | None = None
        self.in_array = False
        self.last = nest.loops[-1]
        self.extents = dict(zip(nest.operator.sparse_axes, ("rows", "cols"), strict=True))
        self.diagonal = next((loop for loop in nest.loops if loop.mode is LevelMode.DIAGONAL), None)
        rows = nest.operator.sparse_axes[0]
        self.last_row = [loop for loop in nest.loops if loop.axis == rows][-1]
        # The vectors of the innermost loop are adjacent elements of x.
        self.reads_diagonal = (
            self.diagonal is not None and nest.vector == "results" and self.last.level is not None
        )

    def source(self) -> str:
        if self.nest.levels[-1].mode is LevelMode.SYMMETRIC:
            self.write_symmetric()
        else:
            if self.nest.needs_zeroing:
                self.write_zeroing()
            self.write_loop(0, _Env({}, {}, "0"))
        size = self.nest.dtype.itemsize
        # The sum of the lanes of a vector needs the vectors of half the width, down to two lanes.
        widths = [1 << power for power in range(1, max(self.widths, default=1).bit_length())]
        return "\n".join(
            [
                "#include <stdint.h>",
                "#include <string.h>",
                f"typedef {self.real} real;",
                *(
                    f"typedef {self.real} v{width} "
                    f"__attribute__((vector_size({width * size}), aligned({size}), may_alias));"
                    for width in widths
                ),
                *(_DECLARE_MAX_THREADS if self.nest.threads > 1 else ()),
                "static inline long least(long a, long b) { return a < b ? a : b; }",
                "static inline long clamp(long a, long b) { return a < 0 ? 0 : least(a, b); }",
                *(_format_lane_sum(width) for width in widths if self.nest.vector == "sum"),
                f"void {SYMBOL}(const void *const *in, void *const *out)",
                "{",
                *self.format_arguments(),
                *self.lines,
                "}",
                "",
            ]
        )

    def format_arguments(self) -> Iterator[str]:
        names = [("sizes", "int64_t"), *([("ranges", "int64_t")] if self.nest.balanced else [])]
        for number, spec in enumerate(self.nest.levels):
            if spec.mode.has_loop and spec.mode is not LevelMode.DENSE:
                names.append((f"pos{number}", "int64_t" if self.wide else "int32_t"))
            if spec.mode is not LevelMode.DENSE:
                names.append((f"crd{number}", f"{np.dtype(spec.coordinate_dtype).name}_t"))
        names.append(("val", "real"))
        names += [(name, "real") for name, _ in DENSE_INPUTS[self.nest.operator.name]]
        if self.nest.operator.sparse_output:
            names.append(("count", "int64_t"))
        for index, (name, kind) in enumerate(names):
            yield f"    const {kind} *restrict const {name} = in[{index}];"
        yield "    real *restrict const res = out[0];"
        for index, name in enumerate((*self.extents.values(), "chunk")):
            yield f"    const long {name} = sizes[{index}];"
        if self.nest.threads > 1:
            yield f"    const int threads = least({self.nest.threads}, omp_get_max_threads());"

    def write_zeroing(self) -> None:
        nest = self.nest
        shape = nest.output_shape
        if shape is None:
            self.write("const long results = *count;")
        else:
            rows = self.format_padded_extent(nest.operator.output_axes[0])
            self.write(f"const long results = {_format_multiple(rows, math.prod(shape[1:]))};")
        step = _ZERO_CHUNK_BYTES // nest.dtype.itemsize
        if nest.threads > 1 and any(loop.parallel for loop in nest.loops):
            self.write("#pragma omp parallel for schedule(static) num_threads(threads)")
        with self.open_block(f"for (long b = 0; b < results; b += {step})"):
            self.write(f"memset(res + b, 0, least({step}, results - b) * sizeof(real));")

    def write_loop(self, index: int, env: _Env) -> None:
        nest = self.nest
        if index == nest.region and nest.vector == "lanes":
            self.write_lanes(index, env)
        elif index == nest.region and self.sums is None and not self.in_array:
            self.write_region(index, env)
        elif index == len(nest.loops):
            self.write_addition(env, self.format_product(env))
        else:
            self.write_step(nest.loops[index], index, env)

    def write_step(self, loop: Loop, index: int, env: _Env) -> None:
        nest = self.nest
        if loop is self.last and nest.vector in ("results", "sum"):
            self.write_vectors(env)
        elif loop is self.last and nest.vector == "hint" and not loop.output:
            self.write_simd_sum(env)
        elif loop.mode is not None and not loop.mode.has_loop:
            with self.open_block(""):
                self.write(f"const long c{index} = crd{loop.level}[{env.position}];")
                self.write_loop(index + 1, env.with_coordinate(loop, f"c{index}"))
        elif loop.mode is not None and loop.mode is not LevelMode.DENSE:
            self.write_compressed_loop(index, loop, env)
        elif self.sums is not None and loop.output:
            self.write_unrolled_loop(index, loop, env)
        else:
            self.write_counted_loop(index, loop, env)

    def write_compressed_loop(self, index: int, loop: Loop, env: _Env) -> None:
        with (
            self.open_block(""),
            self.open_compressed_loop(index, loop, env, self.format_pragma(loop)) as inside,
        ):
            self.write_loop(index + 1, inside)

    @contextmanager
    def open_compressed_loop(self, index: int, loop: Loop, env: _Env, pragma: str | None) -> Iterator[_Env]:
        """Open the loop over the entries of a compressed level below a position."""
        level = loop.level
        self.write(f"const long b{index} = pos{level}[{env.position}];")
        self.write(f"const long e{index} = pos{level}[{env.position} + 1];")
        with self.open_block(f"for (long p{level} = b{index}; p{level} < e{index}; p{level}++)", pragma):
            self.write(f"const long c{index} = crd{level}[p{level}];")
            yield env.with_coordinate(loop, f"c{index}", f"p{level}")

    def write_counted_loop(self, index: int, loop: Loop, env: _Env) -> None:
        """Write a loop of fixed extent; a partial last block gets its own code."""
        tail = self.get_tail(loop)
        full_steps: int | str = self.get_extent(loop, env) - (tail > 0)
        if index == 0 and loop.level is not None and self.nest.region != 0:
            full_steps = self.format_steps(loop.axis)  # so that the source does not depend on the shape
        inner = self.get_inner_axis(loop)
        if tail and loop.parallel:
            assert isinstance(full_steps, int)
            with self.open_counted_loop(index, full_steps + 1, self.format_pragma(loop)):
                with self.open_block(f"if (c{index} < {full_steps})"):
                    self.write_loop(index + 1, env.with_coordinate(loop, f"c{index}"))
                with self.open_block("else"):
                    self.write_loop(
                        index + 1, env.with_coordinate(loop, f"c{index}").with_extent(inner, tail)
                    )
            return
        if loop.parallel and self.nest.balanced:
            pragma = "#pragma omp parallel for schedule(static, 1) num_threads(threads)"
            with (
                self.open_block(f"for (long t = 0; t < {self.nest.threads}; t++)", pragma),
                self.open_block(f"for (long c{index} = ranges[t]; c{index} < ranges[t + 1]; c{index}++)"),
            ):
                self.write_loop(index + 1, self.enter_step(index, loop, env, f"c{index}"))
        elif full_steps:
            with self.open_counted_loop(index, full_steps, self.format_pragma(loop)):
                self.write_loop(index + 1, self.enter_step(index, loop, env, f"c{index}"))
        if tail:
            self.write_loop(index + 1, env.with_coordinate(loop, str(full_steps)).with_extent(inner, tail))

    def write_unrolled_loop(self, index: int, loop: Loop, env: _Env) -> None:
        """Write the body once for each result whose sums are variables."""
        tail, extent = self.get_tail(loop), self.get_extent(loop, env)
        for step in range(extent):
            with self.open_block(""):
                inside = self.enter_step(index, loop, env, str(step))
                if tail and step == extent - 1:
                    inside = inside.with_extent(self.get_inner_axis(loop), tail)
                self.write_loop(index + 1, inside)

    def enter_step(self, index: int, loop: Loop, env: _Env, coordinate: str) -> _Env:
        if loop.level is None:
            return env.with_coordinate(loop, coordinate)
        position = _format_sum(_format_multiple(env.position, loop.extent), coordinate)
        self.write(f"const long p{loop.level} = {position};")
        return env.with_coordinate(loop, coordinate, f"p{loop.level}")

    def format_pragma(self, loop: Loop) -> str | None:
        if loop.parallel:
            return "#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads)"
        if loop is self.last and self.nest.vector == "hint" and (loop.mode is None or loop.mode.unique):
            return "#pragma omp simd"
        return f"#pragma GCC unroll {loop.unroll}" if loop.unroll > 1 else None

    def write_region(self, index: int, env: _Env) -> None:
        """Write the region, with declarations of its sums before it and writes of the results after it."""
        with self.open_block(""):
            if self.nest.in_array:
                tile = math.prod(loop.extent for loop in self.nest.loops[index:] if loop.output)
                self.write(f"real sums[{tile}] __attribute__((aligned(64))) = {{0}};")
                self.in_array = True
                self.write_loop(index, env)
                self.in_array = False
                self.write_array_results(index, env)
                return
            outside, self.lines = self.lines, []
            self.sums = _Accumulators()
            self.write_loop(index, env)
            accumulators, self.sums = self.sums, None
            body, self.lines = self.lines, outside
            for name, kind in accumulators.types.items():
                self.write(f"{kind} {name} = {'0' if kind == 'real' else '{0}'};")
            self.lines += body
            for address, parts in accumulators.results.items():
                self.write_result(address, parts, env)

    def write_result(self, address: str, parts: list[tuple[str, int]], env: _Env) -> None:
        sign = "=" if self.nest.writes_once else "+="
        if self.nest.vector == "results":
            ((name, width),) = parts
            self.write(f"{self.format_access('res', address, width)} {sign} {name};")
            return
        # Vectors of the same width are added before their lanes are.
        names: dict[int, list[str]] = {}
        for name, width in parts:
            names.setdefault(width, []).append(name)
        sums = {width: " + ".join(vectors) for width, vectors in names.items()}
        total = " + ".join(value if width == 1 else f"sum{width}({value})" for width, value in sums.items())
        self.write(f"res[{address}] {sign} {self.scale_sum(f'({total})', env)};")

    def scale_sum(self, total: str, env: _Env) -> str:
        """Multiply a sum by the matrix element, for outputs stored like the matrix."""
        return f"val[{env.position}] * {total}" if self.nest.operator.sparse_output else total

    def write_array_results(self, index: int, env: _Env) -> None:
        """Add the sums of the array to the results."""
        if index == len(self.nest.loops):
            sign = "=" if self.nest.writes_once else "+="
            total = self.scale_sum(f"sums[{self.format_sum_index(env)}]", env)
            self.write(f"res[{self.format_result_index(env)}] {sign} {total};")
            return
        loop = self.nest.loops[index]
        if not loop.output:
            self.write_array_results(index + 1, env)
            return
        tail = self.get_tail(loop)
        full_steps = self.get_extent(loop, env) - (tail > 0)
        with self.open_counted_loop(index, full_steps):
            self.write_array_results(index + 1, env.with_coordinate(loop, f"c{index}"))
        if tail:
            self.write_array_results(
                index + 1,
                env.with_coordinate(loop, str(full_steps)).with_extent(self.get_inner_axis(loop), tail),
            )

    def write_simd_sum(self, env: _Env) -> None:
        """Write the innermost loop as a SIMD reduction."""
        index, loop = len(self.nest.loops) - 1, self.last
        pragma = "#pragma omp simd reduction(+:part)"
        with self.open_block(""):
            self.write("real part = 0;")
            if loop.fixed:
                with self.open_counted_loop(index, self.get_extent(loop, env), pragma):
                    inside = self.enter_step(index, loop, env, f"c{index}")
                    self.write(f"part += {self.format_product(inside)};")
            else:
                with self.open_compressed_loop(index, loop, env, pragma) as inside:
                    self.write(f"part += {self.format_product(inside)};")
            self.write_addition(env.with_coordinate(loop, "0"), "part")

    def write_addition(self, env: _Env, part: str) -> None:
        if self.sums is not None:
            self.write(f"{self.get_accumulator(self.format_result_index(env), 'real', 1)} += {part};")
        elif self.in_array:
            self.write(f"sums[{self.format_sum_index(env)}] += {part};")
        else:
            self.write(f"res[{self.format_result_index(env)}] += {part};")

    def write_symmetric(self) -> None:
        """Write the product with a symmetric matrix, of which the elements up to the diagonal are stored.

        Each element also adds to the result of its column. Columns before the range of a thread belong to
        other threads, so their sums follow the results in the output, and are added in the end.
        """
        threads = self.nest.threads
        ((x, _),) = DENSE_INPUTS[self.nest.operator.name]
        if threads == 1:
            self.write("const long first = 0;")
            self.write("memset(res, 0, rows * sizeof(real));")
            self.write_triangle(x, "rows", shared=False)
            return
        loop = f"for (long t = 0; t < {threads}; t++)"
        self.write("#pragma omp parallel num_threads(threads)")
        with self.open_block(""):
            with self.open_block(loop, "#pragma omp for schedule(static, 1)"):
                self.write("const long first = ranges[t], last = ranges[t + 1];")
                self.write(f"const long lowest = ranges[{threads + 1} + t];")
                self.write(f"real *const sums = res + ranges[{2 * threads + 1} + t] - lowest;")
                self.write("memset(res + first, 0, (last - first) * sizeof(real));")
                self.write("memset(sums + lowest, 0, (first - lowest) * sizeof(real));")
                self.write_triangle(x, "last", shared=True)
            with (
                self.open_block(loop, "#pragma omp for schedule(static, 1)"),
                self.open_block(f"for (long u = t + 1; u < {threads}; u++)"),
            ):
                self.write(f"const long lowest = ranges[{threads + 1} + u];")
                self.write(f"const real *const sums = res + ranges[{2 * threads + 1} + u] - lowest;")
                self.write("const long first = ranges[t], end = least(ranges[u], ranges[t + 1]);")
                with self.open_block("for (long i = lowest > first ? lowest : first; i < end; i++)"):
                    self.write("res[i] += sums[i];")

    def write_triangle(self, x: str, last: str, *, shared: bool) -> None:
        """Write the loops over the rows from `first` and their elements up to the diagonal."""
        with self.open_block(f"for (long i = first; i < {last}; i++)"):
            self.write(f"const real value = {x}[i];")
            self.write("real sum = 0;")
            self.write("long p = pos1[i], end = pos1[i + 1];")
            self.write("if (p < end && crd1[end - 1] == i)")
            self.write("    sum = val[--end] * value;")
            conditions = {"sums": " && crd1[p] < first", "res": ""} if shared else {"res": ""}
            for array, condition in conditions.items():
                with self.open_block(f"for (; p < end{condition}; p++)"):
                    self.write("const long j = crd1[p];")
                    self.write(f"sum += val[p] * {x}[j];")
                    self.write(f"{array}[j] += val[p] * value;")
            self.write("res[i] += sum;")

    def write_diagonal(self, env: _Env) -> None:
        """Write a pointer to the elements of x on a diagonal, of which those outside of x are zeros."""
        assert self.diagonal is not None
        ((name, axes),) = DENSE_INPUTS[self.nest.operator.name]
        start = env.coordinate[self.diagonal.sub_axis]
        extent, rows = self.extents[axes[0]], self.last.extent
        self.write(f"real edge[{rows}];")
        self.write("const real *diagonal = edge;")
        with self.open_block(f"if ({start} >= 0 && {start} <= {extent} - {rows})"):
            self.write(f"diagonal = {name} + {start};")
        with self.open_block("else"), self.open_block(f"for (long v = 0; v < {rows}; v++)"):
            column = f"{start} + v"
            self.write(f"edge[v] = {column} >= 0 && {column} < {extent} ? {name}[{column}] : 0;")

    def write_vectors(self, env: _Env) -> None:
        """Write the innermost loop as full vectors, then as narrower vectors for the remainder."""
        nest, loop = self.nest, self.last
        extent, lanes = self.get_extent(loop, env), nest.lanes
        num_full = extent // lanes
        inside = env.with_coordinate(loop, "0")
        if loop.level is not None:
            inside = env.with_coordinate(loop, "0", _format_multiple(env.position, loop.extent))
        if self.reads_diagonal:
            self.write_diagonal(env)
        partial_vectors, start = [], num_full * lanes
        while start < extent:
            width = 1 << ((extent - start).bit_length() - 1)
            partial_vectors.append((start, width))
            start += width
        if num_full > _MAX_INLINE_VECTORS and self.sums is not None and nest.vector == "sum":
            head = num_full // NUM_CHAINS * NUM_CHAINS
            with self.open_block(f"for (long v = 0; v < {head * lanes}; v += {NUM_CHAINS * lanes})"):
                for chain in range(NUM_CHAINS):
                    self.write_vector(inside, f"v + {chain * lanes}", lanes, chain)
            for step in range(head, num_full):
                self.write_vector(inside, str(step * lanes), lanes, step % NUM_CHAINS)
        elif num_full > _MAX_INLINE_VECTORS and self.sums is None:
            with self.open_block(f"for (long v = 0; v < {num_full * lanes}; v += {lanes})"):
                self.write_vector(inside, "v", lanes, 0)
        else:
            for step in range(num_full):
                self.write_vector(inside, str(step * lanes), lanes, step % NUM_CHAINS)
        for offset, width in partial_vectors:
            self.write_vector(inside, str(offset), width, 0)

    def write_vector(self, env: _Env, offset: str, width: int, chain: int) -> None:
        value = self.format_product(env, offset, width)
        if width > 1:
            self.widths.add(width)
        kind = "real" if width == 1 else f"v{width}"
        if self.nest.vector == "sum":
            # All lanes belong to one sum; each width has its own accumulator.
            if self.sums is not None:
                self.write(
                    f"{self.get_accumulator(self.format_result_index(env), kind, width, chain)} += {value};"
                )
            else:
                total = value if width == 1 else f"sum{width}({value})"
                self.write(f"sums[{self.format_sum_index(env)}] += {total};")
        elif self.sums is not None:
            result = _format_sum(self.format_result_index(env), offset)
            self.write(f"{self.get_accumulator(result, kind, width)} += {value};")
        elif self.in_array:
            address = _format_sum(self.format_sum_index(env), offset)
            self.write(f"{self.format_access('sums', address, width)} += {value};")
        else:
            address = _format_sum(self.format_result_index(env), offset)
            self.write(f"{self.format_access('res', address, width)} += {value};")

    def write_lanes(self, index: int, env: _Env) -> None:
        """Write the two innermost loops: adjacent results, each with its own group to sum."""
        nest, rows, group_loop = self.nest, self.nest.loops[index], self.last
        lanes, level = nest.levels[-1].lanes, group_loop.level
        width = min(lanes, _MAX_GATHER_BYTES // nest.dtype.itemsize)
        self.widths.add(width)
        ((name, axes),) = DENSE_INPUTS[nest.operator.name]
        groups = rows.extent // lanes
        with self.open_counted_loop(index, groups):
            inside = env.with_coordinate(rows, f"c{index} * {lanes}")
            self.write(f"const long g = {_format_sum(_format_multiple(env.position, groups), f'c{index}')};")
            for first in range(0, lanes, width):
                self.write(f"v{width} s{first} = {{0}};")
            loop_head = f"for (long p{level} = pos{level}[g]; p{level} < pos{level}[g + 1]; p{level}++)"
            with self.open_block(loop_head, self.format_pragma(group_loop)):
                for first in range(0, lanes, width):
                    position = _format_sum(f"p{level} * {lanes}", str(first))
                    lane_envs = (
                        inside.with_coordinate(group_loop, f"crd{level}[{position} + {lane}]")
                        for lane in range(width)
                    )
                    gathered = ", ".join(
                        f"{name}[{self.format_index(axes, lane_env, nest.padded)}]" for lane_env in lane_envs
                    )
                    value = self.format_access("val", position, width)
                    self.write(f"s{first} += {value} * (v{width}){{{gathered}}};")
            for first in range(0, lanes, width):
                target = self.format_access(
                    "res", _format_sum(self.format_result_index(inside), str(first)), width
                )
                self.write(f"{target} {'=' if nest.writes_once else '+='} s{first};")

    def format_product(self, env: _Env, offset: str = "0", width: int = 1) -> str:
        """Format the product of the matrix element and the dense inputs, for `width` adjacent elements."""
        nest, loop = self.nest, self.last
        terms = []
        if not (nest.operator.sparse_output and nest.region is not None):
            is_vector = loop.level is not None and nest.vector in ("results", "sum")
            address = _format_sum(env.position, offset) if is_vector else env.position
            terms.append(self.format_access("val", address, width if is_vector else 1))
        for name, axes in DENSE_INPUTS[nest.operator.name]:
            if self.reads_diagonal:
                terms.append(self.format_access("diagonal", offset, width))
                continue
            is_vector = loop.axis in axes and nest.vector in ("results", "sum")
            address = self.format_index(axes, env, nest.padded)
            if is_vector:
                address = _format_sum(address, offset)
            terms.append(self.format_access(name, address, width if is_vector else 1))
        return " * ".join(terms)

    def get_accumulator(self, result: str, kind: str, width: int, chain: int = 0) -> str:
        """Return the variable that accumulates a result or a vector of results."""
        assert self.sums is not None
        parts = self.sums.results.setdefault(result, [])
        number = list(self.sums.results).index(result)
        name = f"s{number}_{width}_{chain}"
        if name not in self.sums.types:
            self.sums.types[name] = kind
            parts.append((name, width))
        return name

    def format_access(self, base: str, address: str, width: int) -> str:
        if width == 1:
            return f"{base}[{address}]"
        kind = f"v{width}" if base in ("res", "sums") else f"const v{width}"
        return f"*({kind} *)({base} + {address})"

    def format_index(self, axes: tuple[str, ...], env: _Env, clamped: frozenset[str] = frozenset()) -> str:
        """Format the index of an element of a dense array."""
        nest = self.nest
        total = ""
        for axis in axes:
            extent = nest.extents[axis]
            part = self.format_coordinate(axis, env)
            if axis in clamped:
                # Blocks beyond the end of the axis have zeros there, so any element is correct.
                part = f"least({part}, {self.extents[axis]} - 1)"
            elif self.diagonal is not None and axis == self.diagonal.axis:
                # Diagonals have zeros outside of the matrix.
                part = f"clamp({part}, {self.extents[axis]} - 1)"
            total = _format_sum(_format_multiple(total, extent), part) if total else part
        return total

    def format_coordinate(self, axis: str, env: _Env) -> str:
        """Format the coordinate of an axis from those of its sub axes."""
        terms, fixed = [], 0
        for loop in self.nest.loops:
            if loop.axis != axis:
                continue
            coordinates = [env.coordinate[loop.sub_axis]]
            if loop is self.diagonal:  # the column in the first row of the block, and the row in the block
                coordinates.append(env.coordinate[self.last_row.sub_axis])
            for coordinate in coordinates:
                if coordinate.isdecimal():
                    fixed += int(coordinate) * loop.weight
                else:
                    terms.append(coordinate if loop.weight == 1 else f"{coordinate} * {loop.weight}")
        return " + ".join([*terms, *([str(fixed)] if fixed or not terms else [])])

    def format_result_index(self, env: _Env) -> str:
        operator = self.nest.operator
        return env.position if operator.sparse_output else self.format_index(operator.output_axes, env)

    def format_sum_index(self, env: _Env) -> str:
        """Format the index of a result in the array of sums."""
        assert self.nest.region is not None
        total = ""
        for loop in self.nest.loops[self.nest.region :]:
            if loop.output:
                coordinate = env.coordinate[loop.sub_axis]
                total = _format_sum(_format_multiple(total, loop.extent), coordinate) if total else coordinate
        return total or "0"

    def get_extent(self, loop: Loop, env: _Env) -> int:
        return env.extents.get(loop.sub_axis, loop.extent)

    def format_steps(self, axis: str) -> str:
        """Format the steps of the outermost loop of a sparse axis."""
        inner, extent = self.get_inner_extent(axis), self.extents[axis]
        return extent if inner == 1 else f"({extent} + {inner - 1}) / {inner}"

    def format_padded_extent(self, axis: str) -> str:
        """Format the extent of a sparse axis, rounded up to full blocks."""
        return _format_multiple(self.format_steps(axis), self.get_inner_extent(axis))

    def get_inner_extent(self, axis: str) -> int:
        """Return the coordinates that a step of the outermost loop of an axis covers."""
        return max(loop.weight for loop in self.nest.loops if loop.axis == axis)

    def get_tail(self, loop: Loop) -> int:
        """Return the steps of the last, partial block of a dense axis for its outer loop; 0 otherwise."""
        return self.nest.tail(loop.axis) if loop.level is None and loop.weight > 1 else 0

    def get_inner_axis(self, loop: Loop) -> str:
        return next(
            inner_loop.sub_axis
            for inner_loop in self.nest.loops
            if inner_loop.axis == loop.axis and inner_loop.weight == 1
        )

    def write(self, line: str) -> None:
        self.lines.append(line if line.startswith("#") else "    " * self.depth + line)

    def open_counted_loop(
        self, index: int, steps: int | str, pragma: str | None = None
    ) -> AbstractContextManager[None]:
        return self.open_block(f"for (long c{index} = 0; c{index} < {steps}; c{index}++)", pragma)

    @contextmanager
    def open_block(self, head: str, pragma: str | None = None) -> Iterator[None]:
        if pragma is not None:
            self.write(pragma)
        self.write(f"{head} {{".strip())
        self.depth += 1
        yield
        self.depth -= 1
        self.write("}")


def _format_lane_sum(width: int) -> str:
    """Function that adds the lanes of a vector in pairs."""
    if width == 2:
        body = "return v[0] + v[1];"
    else:
        half = width // 2
        body = f"const v{half} *h = (const v{half} *)&v; return sum{half}(h[0] + h[1]);"
    return f"static inline real sum{width}(v{width} v) {{ {body} }}"


def _format_sum(base: str, offset: str) -> str:
    if offset == "0":
        return base
    return offset if base == "0" else f"{base} + {offset}"


def _format_multiple(base: str, extent: int) -> str:
    if extent == 1 or base == "0":
        return base
    return f"({base}) * {extent}" if " " in base else f"{base} * {extent}"
