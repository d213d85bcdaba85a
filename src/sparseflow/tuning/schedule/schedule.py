"""Schedules: storage format, loop order and parallelization of a sparse operator.

A schedule has AutoSparse's eight primitives. Its text form is one line with tokens separated by one space::

    <n_fsplit> {axis n {sub size}*n}               fsplit: split sparse axes, outermost part first
    <n_sparse> {T ndim axis…}*n_sparse             freorder: storage order of each sparse tensor
               {T ndim {axis mode}*ndim}*n_sparse  fmode: storage mode of each level
    <n_lsplit> {axis n {sub size}*n}               lsplit: split dense axes
    <n_lreorder> axis…                             lreorder: all loops, outermost first
    <parallel|None> <vectorize|None> <unroll|None> <unroll factor> <threads> <chunk> [latency in ms]

A split axis `i` has the parts `i0`, `i1`, …, outermost first; an axis that is not split keeps its name. The
size of the outermost part is nominal: the generated loop runs as often as it takes to cover the axis. Modes 5
and 6 (`LevelMode.DIAGONAL`, `LevelMode.SYMMETRIC`) and chunk 0 (`rules.BALANCED`) are additions to
AutoSparse's language.

Parsing checks the grammar only. `Schedule.find_violations` checks whether a schedule can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from sparseflow.errors import InputError
from sparseflow.tuning.schedule import rules
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import (
    AxisSplit,
    FormatLevel,
    ScheduleFields,
    TokenReader,
    normalize_modes,
    read_formats,
    read_names,
    read_splits,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(ScheduleFields):
    """A schedule with its text form and rules; the module docstring describes its parts."""

    @classmethod
    def parse(cls, line: str) -> Schedule:
        """Parse a line without a latency.

        Raises:
            FileFormatError: The line violates the grammar; the message has the column.
        """
        tokens = TokenReader(line)
        schedule = _read_schedule(tokens)
        tokens.expect_end()
        return schedule

    def __str__(self) -> str:
        """Format as a line; a parsed schedule gives the line that was parsed, byte for byte."""
        out: list[object] = [len(self.fsplit)]
        _append_splits(out, self.fsplit)
        out.append(len(self.formats))
        for sparse_format in self.formats:
            out += (sparse_format.tensor, len(sparse_format.order), *sparse_format.order)
        for sparse_format in self.formats:
            out += (sparse_format.tensor, len(sparse_format.modes))
            for level in sparse_format.modes:
                out += (level.axis, int(level.mode))
        out.append(len(self.lsplit))
        _append_splits(out, self.lsplit)
        out += (len(self.lreorder), *self.lreorder, self.parallel, self.vectorize, self.unroll)
        out += (self.unroll_factor, self.threads, self.chunk)
        return " ".join(map(str, out))  # str(None) is the token of an optional loop

    def find_violations(self, operator: Operator, shape: Mapping[str, int] | None = None) -> list[str]:
        """List why this schedule cannot run; each message starts with a rule name and a colon.

        Args:
            operator: Operator to run.
            shape: Extent of every axis; without it, rules that depend on extents assume the worst case.

        Raises:
            InputError: `shape` does not fit the operator.
        """
        return rules.find_violations(self, operator, shape)

    def validate(self, operator: Operator, shape: Mapping[str, int] | None = None) -> Schedule:
        """Return this schedule if it can run.

        Raises:
            InputError: The schedule cannot run; the message has the first violation.
        """
        violations = self.find_violations(operator, shape)
        if violations:
            suffix = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
            raise InputError(
                f"the schedule cannot run as {operator.name}: {violations[0]}{suffix}; schedule: {self}"
            )
        return self

    def canonicalize(self, operator: Operator, shape: Mapping[str, int]) -> Schedule:
        """Return the common form of all schedules that run identically.

        - Outermost sizes are those that run; splits are sorted by axis and modes by storage order.
        - An unroll factor of 0 or 1 removes the unrolled loop.
        - One thread or no parallel loop removes the parallel loop, threads and chunk.
        - Non-unique levels that make no difference become unique; see `parser.normalize_modes`.

        Raises:
            InputError: The schedule cannot run, or `shape` does not fit the operator.
        """
        extents = operator.extents(shape)
        self.validate(operator, extents)
        is_unrolled = self.unroll is not None and self.unroll_factor > 1
        is_parallel = self.parallel is not None and self.threads > 1
        return replace(
            self,
            fsplit=_cover_extents(self.fsplit, extents),
            formats=tuple(
                replace(sparse_format, modes=_normalize_levels(sparse_format.levels()))
                for sparse_format in sorted(
                    self.formats, key=lambda item: operator.tensors.index(item.tensor)
                )
            ),
            lsplit=_cover_extents(self.lsplit, extents),
            parallel=self.parallel if is_parallel else None,
            unroll=self.unroll if is_unrolled else None,
            unroll_factor=self.unroll_factor if is_unrolled else 0,
            threads=self.threads if is_parallel else 1,
            chunk=self.chunk if is_parallel else 1,
        )


def _validate_line(value: object) -> Schedule:
    if isinstance(value, Schedule):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected the line of a schedule, got {type(value).__name__}")
    return Schedule.parse(value)


ScheduleLine = Annotated[Schedule, PlainValidator(_validate_line), PlainSerializer(str)]
"""A schedule that files store as its line."""


def parse_labeled_line(line: str) -> tuple[Schedule, float | None]:
    """Parse a line that may end with a latency in milliseconds.

    Raises:
        FileFormatError: The line violates the grammar; the message has the column.
    """
    tokens = TokenReader(line)
    schedule = _read_schedule(tokens)
    latency = tokens.read_decimal("a latency in milliseconds") if tokens.has_more() else None
    tokens.expect_end()
    return schedule, latency


def _read_schedule(tokens: TokenReader) -> Schedule:
    split_axes: set[str] = set()
    fsplit = read_splits(tokens, "sparse", split_axes)
    formats = read_formats(tokens)
    lsplit = read_splits(tokens, "dense", split_axes)
    lreorder = read_names(tokens, tokens.read_integer("the number of loops", 1), "a loop")
    return Schedule(
        fsplit=fsplit,
        formats=formats,
        lsplit=lsplit,
        lreorder=lreorder,
        parallel=tokens.read_optional_name("the parallel loop"),
        vectorize=tokens.read_optional_name("the vectorised loop"),
        unroll=tokens.read_optional_name("the unrolled loop"),
        unroll_factor=tokens.read_integer("the unroll factor"),
        threads=tokens.read_integer("the number of threads"),
        chunk=tokens.read_integer("the chunk"),
    )


def _append_splits(tokens: list[object], splits: tuple[AxisSplit, ...]) -> None:
    for split in splits:
        tokens += (split.axis, len(split.parts))
        for part in split.parts:
            tokens += part


def _cover_extents(splits: tuple[AxisSplit, ...], extents: Mapping[str, int]) -> tuple[AxisSplit, ...]:
    """Set outermost sizes to those that cover the extents, and sort the splits by axis."""
    return tuple(
        replace(
            split, parts=((split.parts[0][0], -(-extents[split.axis] // split.inner_size)), *split.parts[1:])
        )
        for split in sorted(splits, key=lambda split: split.axis)
    )


def _normalize_levels(levels: tuple[FormatLevel, ...]) -> tuple[FormatLevel, ...]:
    modes = normalize_modes(tuple(level.mode for level in levels))
    return tuple(FormatLevel(axis=level.axis, mode=mode) for level, mode in zip(levels, modes, strict=True))
