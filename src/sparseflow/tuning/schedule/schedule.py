"""A schedule: how a sparse tensor program is stored, looped over and run; AutoSparse's eight primitives.

As a line, its parts one space apart::

    <n_fsplit> {axis n {sub size}*n}               fsplit: sparse axes that are split, outermost part first
    <n_sparse> {T ndim axis…}*n_sparse             freorder: the order in which each sparse tensor is stored
               {T ndim {axis mode}*ndim}*n_sparse  fmode: how each of its levels is stored
    <n_lsplit> {axis n {sub size}*n}               lsplit: dense axes that are split
    <n_lreorder> axis…                             lreorder: all loops, outermost first
    <parallel|None> <vectorize|None> <unroll|None> <unroll factor> <threads> <chunk> [latency in ms]

An axis `i` that is split has the parts `i0`, `i1`, …, outermost first; one that is not keeps its name. The
size of the outermost part is nominal: what runs is what it takes to cover the axis.

Reading checks the grammar. Whether a schedule can run is another question, for `Schedule.problems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.schedule import rules
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import (
    Level,
    Mode,
    SparseFormat,
    Split,
    Tokens,
    plain_modes,
    read_formats,
    read_names,
    read_splits,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule; the module's docstring says what each part means.

    Attributes:
        fsplit: Splits of sparse axes, in the order of the line.
        formats: Storage of each sparse tensor.
        lsplit: Splits of dense axes.
        lreorder: The loops, outermost first.
        parallel: The loop that threads share.
        vectorize: The loop that becomes vector instructions.
        unroll: The loop that is unrolled.
        unroll_factor: How often; 0 without `unroll`.
        threads: How many threads run.
        chunk: Iterations of the parallel loop that a thread takes at a time.
    """

    fsplit: tuple[Split, ...]
    formats: tuple[SparseFormat, ...]
    lsplit: tuple[Split, ...]
    lreorder: tuple[str, ...]
    parallel: str | None
    vectorize: str | None
    unroll: str | None
    unroll_factor: int
    threads: int
    chunk: int

    @classmethod
    def parse(cls, line: str) -> Schedule:
        """Reads a line without a latency.

        Raises:
            FileFormatError: The line breaks the grammar; the message names the column.
        """
        tokens = Tokens(line)
        schedule = _schedule(tokens)
        tokens.end()
        return schedule

    def __str__(self) -> str:
        """The line: of a schedule that was read, byte for byte what was read."""
        out: list[object] = [len(self.fsplit)]
        _write_splits(out, self.fsplit)
        out.append(len(self.formats))
        for each in self.formats:
            out += (each.tensor, len(each.order), *each.order)
        for each in self.formats:
            out += (each.tensor, len(each.modes))
            for level in each.modes:
                out += (level.axis, int(level.mode))
        out.append(len(self.lsplit))
        _write_splits(out, self.lsplit)
        out += (len(self.lreorder), *self.lreorder, self.parallel, self.vectorize, self.unroll)
        out += (self.unroll_factor, self.threads, self.chunk)
        return " ".join(map(str, out))  # str(None) is what the language writes

    def to_dict(self) -> dict[str, Any]:
        """The schedule in JSON's types; `from_dict` reads them back."""
        return {
            "fsplit": _splits_as_lists(self.fsplit),
            "formats": [
                {
                    "tensor": each.tensor,
                    "order": list(each.order),
                    "modes": [[level.axis, int(level.mode)] for level in each.modes],
                }
                for each in self.formats
            ],
            "lsplit": _splits_as_lists(self.lsplit),
            "lreorder": list(self.lreorder),
            "parallel": self.parallel,
            "vectorize": self.vectorize,
            "unroll": self.unroll,
            "unroll_factor": self.unroll_factor,
            "threads": self.threads,
            "chunk": self.chunk,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that `to_dict` wrote.

        Raises:
            FileFormatError: A field is missing or unknown, or the schedule would not be one as a line.
        """
        try:
            fields = dict(data)
            formats = tuple(
                SparseFormat(
                    tensor=each["tensor"],
                    order=tuple(each["order"]),
                    modes=tuple(Level(axis=axis, mode=Mode(mode)) for axis, mode in each["modes"]),
                )
                for each in fields.pop("formats")
            )
            built = cls(
                formats=formats,
                fsplit=_splits_of_lists(fields.pop("fsplit")),
                lsplit=_splits_of_lists(fields.pop("lsplit")),
                lreorder=tuple(fields.pop("lreorder")),
                **fields,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(
                f"no schedule: {type(error).__name__}: {error}; expected what `Schedule.to_dict` writes"
            ) from error
        read = cls.parse(str(built))
        if read != built:
            raise FileFormatError(f"no schedule: it differs from its line, {str(built)!r}")
        return read

    def sub_axes(self, axis: str) -> tuple[tuple[str, int | None], ...]:
        """The parts of an axis with their sizes, outermost first; itself without a size if not split."""
        for split in self.fsplit + self.lsplit:
            if split.axis == axis:
                return split.parts
        return ((axis, None),)

    def problems(self, operator: Operator, shape: Mapping[str, int] | None = None) -> list[str]:
        """Why this cannot run, in sentences that start with a short reason and a colon; none if it can.

        Args:
            operator: What it is to be a schedule of.
            shape: Extent of every axis; without it, what depends on extents is judged on the safe side.

        Raises:
            InputError: `shape` does not fit the operator.
        """
        return rules.problems(self, operator, shape)

    def checked(self, operator: Operator, shape: Mapping[str, int] | None = None) -> Schedule:
        """Itself, if it can run.

        Raises:
            InputError: It cannot; the message is the first of `problems`.
        """
        found = self.problems(operator, shape)
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise InputError(f"the schedule cannot run as {operator.name}: {found[0]}{more}; it reads {self}")
        return self

    def canonical(self, operator: Operator, shape: Mapping[str, int]) -> Schedule:
        """The form that this shares with schedules that run the same.

        - Outermost sizes are what runs, splits go by axis and modes by storage order.
        - A loop is not unrolled once or less.
        - With one thread or without a parallel loop there is none of loop, threads and chunk.
        - Below a non-unique level every position has one element, and so has every position of the last level
          (matrices hold no element twice): whether such a level is unique makes no difference.

        Raises:
            InputError: It cannot run, or `shape` does not fit the operator.
        """
        extents = operator.extents(shape)
        self.checked(operator, extents)
        unrolled = self.unroll is not None and self.unroll_factor > 1
        shared = self.parallel is not None and self.threads > 1
        return replace(
            self,
            fsplit=_covering(self.fsplit, extents),
            formats=tuple(
                replace(each, modes=_plain(each.levels()))
                for each in sorted(self.formats, key=lambda each: operator.tensors.index(each.tensor))
            ),
            lsplit=_covering(self.lsplit, extents),
            parallel=self.parallel if shared else None,
            unroll=self.unroll if unrolled else None,
            unroll_factor=self.unroll_factor if unrolled else 0,
            threads=self.threads if shared else 1,
            chunk=self.chunk if shared else 1,
        )


def parse_labelled(line: str) -> tuple[Schedule, float | None]:
    """Reads a line that may end in a latency, in milliseconds.

    Raises:
        FileFormatError: The line breaks the grammar; the message names the column.
    """
    tokens = Tokens(line)
    schedule = _schedule(tokens)
    latency = tokens.decimal("a latency in milliseconds") if tokens.more() else None
    tokens.end()
    return schedule, latency


def _schedule(tokens: Tokens) -> Schedule:
    split: set[str] = set()
    fsplit = read_splits(tokens, "sparse", split)
    formats = read_formats(tokens)
    lsplit = read_splits(tokens, "dense", split)
    lreorder = read_names(tokens, tokens.integer("the number of loops", 1), "a loop")
    return Schedule(
        fsplit=fsplit,
        formats=formats,
        lsplit=lsplit,
        lreorder=lreorder,
        parallel=tokens.name_or_nothing("the parallel loop"),
        vectorize=tokens.name_or_nothing("the vectorised loop"),
        unroll=tokens.name_or_nothing("the unrolled loop"),
        unroll_factor=tokens.integer("the unroll factor"),
        threads=tokens.integer("the number of threads"),
        chunk=tokens.integer("the chunk"),
    )


def _write_splits(out: list[object], splits: tuple[Split, ...]) -> None:
    for split in splits:
        out += (split.axis, len(split.parts))
        for part in split.parts:
            out += part


def _splits_as_lists(splits: tuple[Split, ...]) -> list[dict[str, Any]]:
    return [{"axis": split.axis, "parts": [list(part) for part in split.parts]} for split in splits]


def _splits_of_lists(splits: list[dict[str, Any]]) -> tuple[Split, ...]:
    return tuple(
        Split(axis=split["axis"], parts=tuple((part, size) for part, size in split["parts"]))
        for split in splits
    )


def _covering(splits: tuple[Split, ...], extents: Mapping[str, int]) -> tuple[Split, ...]:
    """Outermost sizes as they run, in the order of the axes' names."""
    return tuple(
        replace(split, parts=((split.parts[0][0], -(-extents[split.axis] // split.inner)), *split.parts[1:]))
        for split in sorted(splits, key=lambda split: split.axis)
    )


def _plain(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    modes = plain_modes(tuple(level.mode for level in levels))
    return tuple(Level(axis=level.axis, mode=mode) for level, mode in zip(levels, modes, strict=True))
