"""C for the loops of a schedule, with vectors of the compiler's extension and OpenMP.

The function is `void sparseflow_kernel(const void *const *in, void *const *out)`: `in` holds the arrays of
`formats.Packed.arrays`, then the dense inputs and, for an output that is stored as the matrix is, the number
of its values as one int64; `out` holds the output. Extents are constants in the source: a schedule is tuned
for one shape, and the compiler may know it. What a matrix holds is not in the source, so matrices of one
shape share what one schedule is compiled to.

In there `c0` is a coordinate along the sub axis of loop 0, `p0` a position in storage level 0, `s…` a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from sparseflow.tuning.codegen.loop_nest import CHAINS, Loop, Nest
from sparseflow.tuning.schedule.formats import coordinate_type
from sparseflow.tuning.schedule.operators import DENSE_INPUTS
from sparseflow.tuning.schedule.schedule import Mode

SYMBOL = "sparseflow_kernel"

_COPIES = 16
"""Vectors of one loop that are written out; more are looped over."""

_GATHERED_BYTES = 32
"""Vectors that are put together element by element are no wider: wider ones take longer to put together."""

_BLOCK_BYTES = 65536
"""Output that one thread sets to zero at a time."""


def generate(nest: Nest, *, wide: bool = False) -> str:
    """C source of a kernel.

    Args:
        nest: Its loops.
        wide: Whether `pos` arrays are int64 (`formats.index_type`).
    """
    return _Writer(nest, wide).source()


@dataclass(frozen=True)
class _Env:
    """Where the writer is: a coordinate of each sub axis so far, an extent for those that are cut short."""

    coordinate: Mapping[str, str]
    cut: Mapping[str, int]
    position: str

    def at(self, loop: Loop, coordinate: str, position: str | None = None) -> _Env:
        return _Env({**self.coordinate, loop.axis: coordinate}, self.cut, position or self.position)

    def shortened(self, axis: str, extent: int) -> _Env:
        return _Env(self.coordinate, {**self.cut, axis: extent}, self.position)


@dataclass
class _Sums:
    """Sums in variables: name -> its type; and result -> the variables that add up to it."""

    types: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class _Writer:
    def __init__(self, nest: Nest, wide: bool) -> None:
        self.nest, self.wide = nest, wide
        self.real = "float" if nest.dtype == np.float32 else "double"
        self.lines: list[str] = []
        self.depth = 1
        self.widths: set[int] = set()
        self.sums: _Sums | None = None
        self.in_array = False
        self.last = nest.loops[-1]

    # The whole -----------------------------------------------------------------------------------------

    def source(self) -> str:
        if self.nest.zeroed:
            self.zero()
        self.loop(0, _Env({}, {}, "0"))
        size = self.nest.dtype.itemsize
        return "\n".join(
            [
                "#include <stdint.h>",
                "#include <string.h>",
                f"typedef {self.real} real;",
                *(
                    f"typedef {self.real} v{width} "
                    f"__attribute__((vector_size({width * size}), aligned({size}), may_alias));"
                    for width in sorted(self.widths)
                ),
                "static inline long least(long a, long b) { return a < b ? a : b; }",
                *(
                    f"static inline real sum{width}(v{width} v) "
                    f"{{ return {' + '.join(f'v[{lane}]' for lane in range(width))}; }}"
                    for width in sorted(self.widths)
                ),
                f"void {SYMBOL}(const void *const *in, void *const *out)",
                "{",
                *self.arguments(),
                *self.lines,
                "}",
                "",
            ]
        )

    def arguments(self) -> Iterator[str]:
        names = []
        for number, spec in enumerate(self.nest.levels):
            if spec.mode.has_loop and spec.mode is not Mode.DENSE:
                names.append((f"pos{number}", "int64_t" if self.wide else "int32_t"))
            if spec.mode is not Mode.DENSE:
                names.append((f"crd{number}", f"{np.dtype(coordinate_type(spec.extent)).name}_t"))
        names.append(("val", "real"))
        names += [(name, "real") for name, _ in DENSE_INPUTS[self.nest.operator.name]]
        if self.nest.operator.sparse_output:
            names.append(("count", "int64_t"))
        for place, (name, kind) in enumerate(names):
            yield f"    const {kind} *restrict const {name} = in[{place}];"
        yield "    real *restrict const res = out[0];"

    def zero(self) -> None:
        nest = self.nest
        shape = nest.output_shape
        if shape is None:
            self.write("const long results = *count;")
        else:
            self.write(f"const long results = {math.prod(shape)};")
        step = _BLOCK_BYTES // nest.dtype.itemsize
        if nest.threads > 1 and any(loop.parallel for loop in nest.loops):
            self.write(f"#pragma omp parallel for schedule(static) num_threads({nest.threads})")
        with self.block(f"for (long b = 0; b < results; b += {step})"):
            self.write(f"memset(res + b, 0, least({step}, results - b) * sizeof(real));")

    # Loops ---------------------------------------------------------------------------------------------

    def loop(self, place: int, env: _Env) -> None:
        nest = self.nest
        if place == nest.region and nest.vector == "lanes":
            self.lanes(place, env)
        elif place == nest.region and self.sums is None and not self.in_array:
            self.region(place, env)
        elif place == len(nest.loops):
            self.product(env)
        else:
            self.step(nest.loops[place], place, env)

    def step(self, loop: Loop, place: int, env: _Env) -> None:
        nest = self.nest
        if loop is self.last and nest.vector in ("results", "sum"):
            self.vectors(env)
        elif loop is self.last and nest.vector == "hint" and not loop.output:
            self.summed_by_hint(env)
        elif loop.mode is not None and not loop.mode.has_loop:
            with self.block(""):
                self.write(f"const long c{place} = crd{loop.level}[{env.position}];")
                self.loop(place + 1, env.at(loop, f"c{place}"))
        elif loop.mode is not None and loop.mode is not Mode.DENSE:
            self.compressed(place, loop, env)
        elif self.sums is not None and loop.output:
            self.copies(place, loop, env)
        else:
            self.counted(place, loop, env)

    def compressed(self, place: int, loop: Loop, env: _Env) -> None:
        with self.block(""), self.stored(place, loop, env, self.pragma(loop)) as inside:
            self.loop(place + 1, inside)

    @contextmanager
    def stored(self, place: int, loop: Loop, env: _Env, pragma: str | None) -> Iterator[_Env]:
        """The loop over what a compressed level stores below a position."""
        level = loop.level
        self.write(f"const long b{place} = pos{level}[{env.position}];")
        self.write(f"const long e{place} = pos{level}[{env.position} + 1];")
        with self.block(f"for (long p{level} = b{place}; p{level} < e{place}; p{level}++)", pragma):
            self.write(f"const long c{place} = crd{level}[p{level}];")
            yield env.at(loop, f"c{place}", f"p{level}")

    def counted(self, place: int, loop: Loop, env: _Env) -> None:
        """A loop of known length; of an axis whose last block is partial, that one apart."""
        tail = self.tail(loop)
        whole = self.extent(loop, env) - (tail > 0)
        inner = self.inner(loop)
        if tail and loop.parallel:
            with self.counting(place, whole + 1, self.pragma(loop)):
                with self.block(f"if (c{place} < {whole})"):
                    self.loop(place + 1, env.at(loop, f"c{place}"))
                with self.block("else"):
                    self.loop(place + 1, env.at(loop, f"c{place}").shortened(inner, tail))
            return
        if whole:
            with self.counting(place, whole, self.pragma(loop)):
                self.loop(place + 1, self.into(place, loop, env, f"c{place}"))
        if tail:
            self.loop(place + 1, env.at(loop, str(whole)).shortened(inner, tail))

    def copies(self, place: int, loop: Loop, env: _Env) -> None:
        """A loop over results whose sums are variables: its body, once for each."""
        tail, extent = self.tail(loop), self.extent(loop, env)
        for step in range(extent):
            with self.block(""):
                inside = self.into(place, loop, env, str(step))
                if tail and step == extent - 1:
                    inside = inside.shortened(self.inner(loop), tail)
                self.loop(place + 1, inside)

    def into(self, place: int, loop: Loop, env: _Env, coordinate: str) -> _Env:
        if loop.level is None:
            return env.at(loop, coordinate)
        position = _plus(_times(env.position, loop.extent), coordinate)
        self.write(f"const long p{loop.level} = {position};")
        return env.at(loop, coordinate, f"p{loop.level}")

    def pragma(self, loop: Loop) -> str | None:
        """What stands before a loop."""
        if loop.parallel:
            shared = f"schedule(dynamic, {self.nest.chunk}) num_threads({self.nest.threads})"
            return f"#pragma omp parallel for {shared}"
        if loop is self.last and self.nest.vector == "hint" and (loop.mode is None or loop.mode.unique):
            return "#pragma omp simd"
        return f"#pragma GCC unroll {loop.unroll}" if loop.unroll > 1 else None

    # Sums ----------------------------------------------------------------------------------------------

    def region(self, place: int, env: _Env) -> None:
        """What lies inside the region, its sums declared before and added to the results after it."""
        with self.block(""):
            if self.nest.in_array:
                tile = math.prod(loop.extent for loop in self.nest.loops[place:] if loop.output)
                self.write(f"real sums[{tile}] __attribute__((aligned(64))) = {{0}};")
                self.in_array = True
                self.loop(place, env)
                self.in_array = False
                self.spill(place, env)
                return
            outside, self.lines = self.lines, []
            self.sums = _Sums()
            self.loop(place, env)
            kept, self.sums = self.sums, None
            body, self.lines = self.lines, outside
            for name, kind in kept.types.items():
                self.write(f"{kind} {name} = {'0' if kind == 'real' else '{0}'};")
            self.lines += body
            for address, parts in kept.results.items():
                self.store(address, parts, env)

    def store(self, address: str, parts: list[tuple[str, int]], env: _Env) -> None:
        sign = "=" if self.nest.once else "+="
        if self.nest.vector == "results":
            ((name, width),) = parts
            self.write(f"{self.memory('res', address, width)} {sign} {name};")
            return
        total = " + ".join(name if width == 1 else f"sum{width}({name})" for name, width in parts)
        self.write(f"res[{address}] {sign} {self.scaled(f'({total})', env)};")

    def scaled(self, total: str, env: _Env) -> str:
        """An output that is stored as the matrix is takes each sum times the matrix's element."""
        return f"val[{env.position}] * {total}" if self.nest.operator.sparse_output else total

    def spill(self, place: int, env: _Env) -> None:
        """Add the sums of an array to the results."""
        if place == len(self.nest.loops):
            sign = "=" if self.nest.once else "+="
            self.write(f"res[{self.result(env)}] {sign} {self.scaled(f'sums[{self.slot(env)}]', env)};")
            return
        loop = self.nest.loops[place]
        if not loop.output:
            self.spill(place + 1, env)
            return
        tail = self.tail(loop)
        whole = self.extent(loop, env) - (tail > 0)
        with self.counting(place, whole):
            self.spill(place + 1, env.at(loop, f"c{place}"))
        if tail:
            self.spill(place + 1, env.at(loop, str(whole)).shortened(self.inner(loop), tail))

    # Products ------------------------------------------------------------------------------------------

    def product(self, env: _Env) -> None:
        """One element's share of one result."""
        self.add(env, self.factors(env))

    def summed_by_hint(self, env: _Env) -> None:
        """The innermost loop, which sums, as one that the compiler may reorder."""
        place, loop = len(self.nest.loops) - 1, self.last
        pragma = "#pragma omp simd reduction(+:part)"
        with self.block(""):
            self.write("real part = 0;")
            if loop.fixed:
                with self.counting(place, self.extent(loop, env), pragma):
                    inside = self.into(place, loop, env, f"c{place}")
                    self.write(f"part += {self.factors(inside)};")
            else:
                with self.stored(place, loop, env, pragma) as inside:
                    self.write(f"part += {self.factors(inside)};")
            self.add(env.at(loop, "0"), "part")

    def add(self, env: _Env, part: str) -> None:
        if self.sums is not None:
            self.write(f"{self.variable(self.result(env), 'real', 1)} += {part};")
        elif self.in_array:
            self.write(f"sums[{self.slot(env)}] += {part};")
        else:
            self.write(f"res[{self.result(env)}] += {part};")

    def vectors(self, env: _Env) -> None:
        """The innermost loop as vectors: full ones, and what is left in ever smaller ones."""
        nest, loop = self.nest, self.last
        extent, lanes = self.extent(loop, env), nest.lanes
        full = extent // lanes
        inside = env.at(loop, "0")
        if loop.level is not None:
            inside = env.at(loop, "0", _times(env.position, loop.extent))
        rest, start = [], full * lanes
        while start < extent:
            width = 1 << ((extent - start).bit_length() - 1)
            rest.append((start, width))
            start += width
        if full > _COPIES and self.sums is not None and nest.vector == "sum":
            head = full // CHAINS * CHAINS
            with self.block(f"for (long v = 0; v < {head * lanes}; v += {CHAINS * lanes})"):
                for chain in range(CHAINS):
                    self.vector(inside, f"v + {chain * lanes}", lanes, chain)
            for step in range(head, full):
                self.vector(inside, str(step * lanes), lanes, step % CHAINS)
        elif full > _COPIES and self.sums is None:
            with self.block(f"for (long v = 0; v < {full * lanes}; v += {lanes})"):
                self.vector(inside, "v", lanes, 0)
        else:
            for step in range(full):
                self.vector(inside, str(step * lanes), lanes, step % CHAINS)
        for offset, width in rest:
            self.vector(inside, str(offset), width, 0)

    def vector(self, env: _Env, offset: str, width: int, chain: int) -> None:
        value = self.factors(env, offset, width)
        if width > 1:
            self.widths.add(width)
        kind = "real" if width == 1 else f"v{width}"
        if self.nest.vector == "sum":
            # One sum in every lane; a chain of its own for each width.
            if self.sums is not None:
                self.write(f"{self.variable(self.result(env), kind, width, chain)} += {value};")
            else:
                total = value if width == 1 else f"sum{width}({value})"
                self.write(f"sums[{self.slot(env)}] += {total};")
        elif self.sums is not None:
            self.write(f"{self.variable(_plus(self.result(env), offset), kind, width)} += {value};")
        elif self.in_array:
            self.write(f"{self.memory('sums', _plus(self.slot(env), offset), width)} += {value};")
        else:
            self.write(f"{self.memory('res', _plus(self.result(env), offset), width)} += {value};")

    def lanes(self, place: int, env: _Env) -> None:
        """The two innermost loops: results side by side, each with a group of its own to walk and to sum."""
        nest, rows, walk = self.nest, self.nest.loops[place], self.last
        lanes, level = nest.levels[-1].lanes, walk.level
        width = min(lanes, _GATHERED_BYTES // nest.dtype.itemsize)
        self.widths.add(width)
        ((name, axes),) = DENSE_INPUTS[nest.operator.name]
        groups = rows.extent // lanes
        with self.counting(place, groups):
            inside = env.at(rows, f"c{place} * {lanes}")
            self.write(f"const long g = {_plus(_times(env.position, groups), f'c{place}')};")
            for first in range(0, lanes, width):
                self.write(f"v{width} s{first} = {{0}};")
            walked = f"for (long p{level} = pos{level}[g]; p{level} < pos{level}[g + 1]; p{level}++)"
            with self.block(walked, self.pragma(walk)):
                for first in range(0, lanes, width):
                    at = _plus(f"p{level} * {lanes}", str(first))
                    near = (inside.at(walk, f"crd{level}[{at} + {lane}]") for lane in range(width))
                    gathered = ", ".join(f"{name}[{self.index(axes, one, nest.padded)}]" for one in near)
                    self.write(f"s{first} += {self.memory('val', at, width)} * (v{width}){{{gathered}}};")
            for first in range(0, lanes, width):
                to = self.memory("res", _plus(self.result(inside), str(first)), width)
                self.write(f"{to} {'=' if nest.once else '+='} s{first};")

    def factors(self, env: _Env, offset: str = "0", width: int = 1) -> str:
        """The product of the matrix's element and the dense inputs, `width` neighbours at once."""
        nest, loop = self.nest, self.last
        found = []
        if not (nest.operator.sparse_output and nest.region is not None):
            along = loop.level is not None and nest.vector in ("results", "sum")
            where = _plus(env.position, offset) if along else env.position
            found.append(self.memory("val", where, width if along else 1))
        for name, axes in DENSE_INPUTS[nest.operator.name]:
            along = loop.of in axes and nest.vector in ("results", "sum")
            where = self.index(axes, env, nest.padded)
            if along:
                where = _plus(where, offset)
            found.append(self.memory(name, where, width if along else 1))
        return " * ".join(found)

    # Names and places ----------------------------------------------------------------------------------

    def variable(self, result: str, kind: str, width: int, chain: int = 0) -> str:
        """The variable that adds up one result, or a vector of them."""
        assert self.sums is not None
        parts = self.sums.results.setdefault(result, [])
        number = list(self.sums.results).index(result)
        name = f"s{number}_{width}_{chain}"
        if name not in self.sums.types:
            self.sums.types[name] = kind
            parts.append((name, width))
        return name

    def memory(self, base: str, where: str, width: int) -> str:
        if width == 1:
            return f"{base}[{where}]"
        kind = f"v{width}" if base in ("res", "sums") else f"const v{width}"
        return f"*({kind} *)({base} + {where})"

    def index(self, axes: tuple[str, ...], env: _Env, clamped: frozenset[str] = frozenset()) -> str:
        """Where an element of a dense array lies."""
        nest = self.nest
        total = ""
        for axis in axes:
            extent = nest.extents[axis]
            part = self.along(axis, env)
            if axis in clamped:
                # Blocks that reach over the end hold zeros there: any element will do.
                part = f"least({part}, {extent - 1})"
            total = _plus(_times(total, extent), part) if total else part
        return total

    def along(self, axis: str, env: _Env) -> str:
        """A coordinate along an axis from those along its sub axes."""
        terms, fixed = [], 0
        for loop in self.nest.loops:
            if loop.of != axis:
                continue
            coordinate = env.coordinate[loop.axis]
            if coordinate.isdecimal():
                fixed += int(coordinate) * loop.weight
            else:
                terms.append(coordinate if loop.weight == 1 else f"{coordinate} * {loop.weight}")
        return " + ".join([*terms, *([str(fixed)] if fixed or not terms else [])])

    def result(self, env: _Env) -> str:
        operator = self.nest.operator
        return env.position if operator.sparse_output else self.index(operator.output_axes, env)

    def slot(self, env: _Env) -> str:
        """Where a result's sum lies in the array of sums."""
        assert self.nest.region is not None
        total = ""
        for loop in self.nest.loops[self.nest.region :]:
            if loop.output:
                coordinate = env.coordinate[loop.axis]
                total = _plus(_times(total, loop.extent), coordinate) if total else coordinate
        return total or "0"

    def extent(self, loop: Loop, env: _Env) -> int:
        return env.cut.get(loop.axis, loop.extent)

    def tail(self, loop: Loop) -> int:
        """Steps of the inner part in the last step of an outer part of a dense axis; 0 elsewhere."""
        return self.nest.tail(loop.of) if loop.level is None and loop.weight > 1 else 0

    def inner(self, loop: Loop) -> str:
        return next(one.axis for one in self.nest.loops if one.of == loop.of and one.weight == 1)

    def write(self, line: str) -> None:
        self.lines.append(line if line.startswith("#") else "    " * self.depth + line)

    def counting(self, place: int, steps: int, pragma: str | None = None) -> AbstractContextManager[None]:
        return self.block(f"for (long c{place} = 0; c{place} < {steps}; c{place}++)", pragma)

    @contextmanager
    def block(self, head: str, pragma: str | None = None) -> Iterator[None]:
        if pragma is not None:
            self.write(pragma)
        self.write(f"{head} {{".strip())
        self.depth += 1
        yield
        self.depth -= 1
        self.write("}")


def _plus(where: str, offset: str) -> str:
    if offset == "0":
        return where
    return offset if where == "0" else f"{where} + {offset}"


def _times(where: str, extent: int) -> str:
    if extent == 1 or where == "0":
        return where
    return f"({where}) * {extent}" if " " in where else f"{where} * {extent}"
