"""Outcomes: what they refuse, what they draw, how they split, and their file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.policy.outcomes import Environment, OutcomeTable, budget_grid, draw_budgets
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.synthetic import WIDTH, make_outcomes, make_space

SMALL = make_space(depth=3, top_k=2, tiers=2)


def small(samples: int = 12, **options: float) -> OutcomeTable:
    return make_outcomes(samples, plans=SMALL, **options)  # pyright: ignore[reportArgumentType]


def test_a_table_answers_what_is_asked() -> None:
    table = small()
    environment: Environment = table
    samples, tiers, positions = torch.tensor([3, 0]), torch.tensor([1, 0]), torch.tensor([0, 1])
    assert len(environment) == 12 and environment.width == WIDTH
    assert torch.equal(environment.get_language(samples), table.language[[3, 0]])
    latency_tokens = environment.get_latency_tokens(samples, tiers, positions)
    assert torch.equal(latency_tokens, torch.stack([table.tokens[3, 1, 0], table.tokens[0, 0, 1]]))


def test_jitter_is_drawn_from_what_was_measured() -> None:
    table = small(repeats=4)
    samples, plans = torch.full((4000,), 2), torch.full((4000,), 5)
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    right, latency_ms = table.run(samples, plans, uniform)
    assert bool((right == table.correct[2, 5]).all())
    for measured in table.latency_ms[2, 5]:
        assert float((latency_ms == measured).float().mean()) == pytest.approx(0.25, abs=0.03)
    repeated = table.run(samples, plans, uniform)
    assert torch.equal(repeated[1], latency_ms)
    # In float32, the last number below 1 times a count can be the count.
    nearly = torch.full((1,), math.nextafter(1.0, 0.0), dtype=torch.float64)
    assert table.run(samples[:1], plans[:1], nearly)[1] == table.latency_ms[2, 5, 3]


def test_arrays_of_numpy_and_half_precision_are_taken() -> None:
    table = small()
    arrays: dict[str, Any] = {
        "correct": table.correct.numpy().astype(np.float64), "latency_ms": table.latency_ms.numpy(),
        "language": table.language.bfloat16(), "tokens": table.tokens.half(),
    }  # fmt: skip
    outcome_table = OutcomeTable(space=SMALL, **arrays)
    assert outcome_table.correct.dtype == torch.float32 and outcome_table.tokens.dtype == torch.float16
    assert outcome_table.get_language(torch.tensor([0])).dtype == torch.float32
    assert outcome_table.groups == list(range(12))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"correct": torch.zeros(12, 3)}, "`correct`"),
        ({"latency_ms": torch.ones(12, len(SMALL))}, "`latency_ms`"),
        ({"latency_ms": torch.ones(12, len(SMALL), 0)}, "`latency_ms`"),
        ({"language": torch.zeros(11, WIDTH)}, "`language`"),
        ({"tokens": torch.zeros(12, 3, 2, WIDTH)}, "`tokens`"),
        ({"images": torch.zeros(3)}, "`images`"),
        ({"correct": torch.full((12, len(SMALL)), 1.5)}, ""),
        ({"correct": torch.full((12, len(SMALL)), math.nan)}, ""),
        ({"latency_ms": torch.full((12, len(SMALL), 1), math.inf)}, ""),
        ({"latency_ms": torch.zeros(12, len(SMALL), 1)}, ""),
        ({"tokens": torch.full((12, 2, 2, WIDTH), math.nan)}, ""),
    ],
)
def test_what_is_refused(change: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(InputError, match=match or None):
        replace(small(), **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError):
        small().select(torch.tensor([], dtype=torch.int64))


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 40), st.integers(0, 100), st.sampled_from([(0.5, 0.5), (0.8, 0.1, 0.1), (1.0,)]))
def test_no_image_is_in_two_parts(samples: int, seed: int, shares: tuple[float, ...]) -> None:
    table = small(samples)
    assert table.images is not None
    count = len(table.images.unique())
    try:
        parts = table.split(*shares, seed=seed)
    except InputError:
        assert count * min(shares) < 1
        return
    images = [set(part.groups) for part in parts]
    assert sum(map(len, images)) == len(set().union(*images)) == count
    assert sum(map(len, parts)) == samples
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(set(part.groups)) - share * count) <= 1
    repeated = table.split(*shares, seed=seed)
    assert [part.groups for part in repeated] == [part.groups for part in parts]


def test_parts_keep_their_rows_together() -> None:
    table = small(20)
    for part in table.split(0.6, 0.4):
        for row in range(len(part)):
            (index,) = (table.language == part.language[row]).all(1).nonzero()[:, 0].tolist()
            assert torch.equal(part.latency_ms[row], table.latency_ms[index])
            assert torch.equal(part.tokens[row], table.tokens[index])
    for shares in ((0.5, 0.6), (), (1.5, -0.5)):
        with pytest.raises(InputError):
            table.split(*shares)


def test_quantiles_are_measured_values() -> None:
    table = small(repeats=3)
    quantiles = table.latency_quantiles_ms(0.9)
    for plan in range(len(SMALL)):
        sorted_latencies = sorted(table.latency_ms[:, plan].flatten().tolist())
        assert float(quantiles[plan]) == pytest.approx(
            sorted_latencies[math.ceil(0.9 * (len(sorted_latencies) - 1))]
        )
    low, high = table.budget_range_ms()
    assert low == pytest.approx(float(table.latency_quantiles_ms(0.99).min()))
    assert high == pytest.approx(1.1 * float(table.latency_quantiles_ms(0.99).max()))
    with pytest.raises(InputError):
        table.latency_quantiles_ms(1.1)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    table = small()
    table.save(tmp_path / "o.safetensors")
    reloaded = OutcomeTable.load(tmp_path / "o.safetensors")
    assert (
        reloaded.space == table.space
        and reloaded.identity() == table.identity()
        and reloaded.groups == table.groups
    )
    assert small(seed=1).identity() != table.identity()
    (tmp_path / "o.safetensors").write_bytes(b"{}")
    with pytest.raises(FileFormatError):
        OutcomeTable.load(tmp_path / "o.safetensors")
    with pytest.raises(InputError):
        OutcomeTable.load(tmp_path / "absent")


@given(st.floats(0.1, 1e4), st.floats(1.0, 100.0), st.floats(0, 1, exclude_max=True))
def test_budgets_are_within_their_span(low: float, ratio: float, uniform: float) -> None:
    budgets_ms = float(draw_budgets((low, low * ratio), torch.tensor(uniform, dtype=torch.float64)))
    assert low * (1 - 1e-9) <= budgets_ms <= low * ratio * (1 + 1e-9)


def test_budgets_are_as_likely_in_each_doubling() -> None:
    budgets_ms = draw_budgets((100.0, 400.0), torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    assert float((budgets_ms < 200.0).float().mean()) == pytest.approx(0.5, abs=0.02)
    grid = budget_grid((100.0, 400.0), 4)
    torch.testing.assert_close(grid, 100.0 * 2.0 ** torch.tensor([0.25, 0.75, 1.25, 1.75]))
    for wrong in ((0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(InputError):
            draw_budgets(wrong, torch.zeros(1))
    with pytest.raises(InputError):
        budget_grid((1.0, 2.0), 0)
