"""Tokenization of schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.tuning.model.net.tokenizer import (
    FIELD_SIZES,
    LOG2_SCALE,
    PARTS,
    PRIMITIVES,
    ROLES,
    ScheduleTokenizer,
)
from sparseflow.tuning.schedule.operators import OPERATORS, SDDMM, SPMM, SPMV
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.tuning.random_schedules import (
    CSR_LINE,
    SDDMM_LINE,
    SPMM_LINE,
    SPMV_LINE,
    any_schedule,
    generators,
    spaces,
)


def readable(encoder: ScheduleTokenizer, row: np.ndarray) -> list[tuple[object, ...]]:
    """Tokens as (primitive, role, part, mode, position from outside, from inside, first number, second)."""
    table, result = encoder.table, []
    for token in row[row > 0]:
        primitive, role, part, mode, outside, inside = table.fields[token].tolist()
        numbers = np.exp2(table.numbers[token] * LOG2_SCALE).round().astype(int).tolist()
        result.append((PRIMITIVES[primitive], ROLES[role], PARTS[part], mode, outside, inside, *numbers))
    return result


def test_encode_every_primitive() -> None:
    encoder = ScheduleTokenizer()
    (row,) = encoder.encode([Schedule.parse(CSR_LINE)], SPMM, {"i": 100, "k": 50, "j": 250})
    assert readable(encoder, row) == [
        ("lsplit", "dense", "outer", 0, 0, 0, 4, 64),
        ("lsplit", "dense", "inner", 0, 0, 0, 64, 1),
        ("freorder", "rows", "whole", 0, 1, 2, 100, 1),
        ("fmode", "rows", "whole", 1, 1, 2, 100, 1),
        ("freorder", "columns", "whole", 0, 2, 1, 50, 1),
        ("fmode", "columns", "whole", 2, 2, 1, 50, 1),
        ("lreorder", "rows", "whole", 0, 1, 4, 100, 1),
        ("lreorder", "dense", "outer", 0, 2, 3, 4, 64),
        ("lreorder", "columns", "whole", 0, 3, 2, 50, 1),
        ("lreorder", "dense", "inner", 0, 4, 1, 64, 1),
        ("parallel", "rows", "whole", 0, 1, 4, 100, 1),
        ("vectorize", "dense", "inner", 0, 4, 1, 64, 1),
        ("run", "none", "none", 0, 0, 0, 2, 16),
    ]


def test_encode_outermost_size_from_extent() -> None:
    encoder = ScheduleTokenizer()
    schedule = Schedule.parse(SPMM_LINE)
    for extents, size in (({"i": 1000, "k": 65536, "j": 128}, 63), ({"k": 65536, "j": 128}, 256)):
        (row,) = encoder.encode([schedule], SPMM, extents)
        assert ("fsplit", "rows", "outer", 0, 0, 0, size, 16) in readable(encoder, row)


def test_encode_unroll_factor_and_first_tensor() -> None:
    encoder = ScheduleTokenizer()
    (row,) = encoder.encode([Schedule.parse(SDDMM_LINE)], SDDMM)
    result = readable(encoder, row)
    assert ("unroll", "rows", "inner", 0, 3, 4, 4, 4) in result
    assert sum(token[0] == "fmode" for token in result) == 4


def test_encode_operators_share_tokens() -> None:
    encoder, extents = ScheduleTokenizer(), {"i": 4096, "k": 4096, "j": 4096}
    spmm, spmv = (
        encoder.encode([Schedule.parse(line)], op, extents)[0]
        for line, op in ((SPMM_LINE, SPMM), (SPMV_LINE.replace("4096 j1 2 ", "4096 j1 16 "), SPMV))
    )
    shared = [token[:3] for token in readable(encoder, np.intersect1d(spmm, spmv))]
    assert ("fsplit", "columns", "outer") in shared
    assert all(token[1] != "dense" for token in readable(encoder, spmv))


def test_encode_pads_rows() -> None:
    encoder = ScheduleTokenizer()
    short, long = (Schedule.parse(line) for line in (CSR_LINE, SPMM_LINE))
    ids = encoder.encode([short, long], SPMM)
    single = encoder.encode([short], SPMM)
    assert ids.dtype == np.int32
    assert np.array_equal(ids[0, : single.shape[1]], single[0])
    assert not ids[0, single.shape[1] :].any() and ids[1].all()
    assert encoder.encode([], SPMM).shape == (0, 0)


def test_encode_ids_stay_valid() -> None:
    encoder = ScheduleTokenizer()
    ids = encoder.encode([Schedule.parse(CSR_LINE)], SPMM)
    before = readable(encoder, ids[0])
    encoder.encode([Schedule.parse(SPMM_LINE)], SPMM)
    assert readable(encoder, ids[0]) == before
    assert not encoder.table.fields[0].any() and not encoder.table.numbers[0].any()


@settings(max_examples=30)
@given(spaces(), generators)
def test_encode_canonical_schedules_are_unique(space: ScheduleSpace, rng: np.random.Generator) -> None:
    encoder = ScheduleTokenizer()
    schedules = [space.sample(rng).canonicalize(space.operator, space.shape) for _ in range(12)]
    ids = encoder.encode(schedules, space.operator, space.shape)
    assert len({tuple(sorted(row)) for row in ids.tolist()}) == len(set(schedules))
    table = encoder.table
    assert (table.fields.max(0) < np.array(FIELD_SIZES)).all()
    assert np.isfinite(table.numbers).all() and table.numbers.max() <= 2.0
    assert ids.max(initial=0) < len(table.fields)


@given(any_schedule(), st.sampled_from(sorted(OPERATORS)), st.booleans())
def test_encode_any_grammatical_schedule(schedule: Schedule, name: str, known: bool) -> None:
    op, encoder = OPERATORS[name], ScheduleTokenizer()
    try:
        ids = encoder.encode([schedule], op, dict.fromkeys(op.axes, 100) if known else None)
    except InputError as error:
        assert str(error)
    else:
        assert ids.all() and np.isfinite(encoder.table.numbers).all()


def test_encode_other_operator_raises() -> None:
    with pytest.raises(InputError):
        ScheduleTokenizer().encode([Schedule.parse(SPMM_LINE)], SPMV)
