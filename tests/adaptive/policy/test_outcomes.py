"""Outcome tables: validation, sampling of latencies, quantiles and budgets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.adaptive.policy.outcomes import OutcomeTable, budget_grid, draw_budgets
from sparseflow.errors import InputError
from tests.adaptive.synthetic import WIDTH, make_outcomes, make_space

SMALL = make_space(depth=3, top_k=2, tiers=2)


def small(samples: int = 12, **options: float) -> OutcomeTable:
    return make_outcomes(samples, plans=SMALL, **options)  # pyright: ignore[reportArgumentType]


def test_features_of_samples_are_rows_of_table() -> None:
    table = small()
    samples, tiers, positions = torch.tensor([3, 0]), torch.tensor([1, 0]), torch.tensor([0, 1])
    assert len(table) == 12 and table.width == WIDTH
    assert torch.equal(table.get_language(samples), table.language[[3, 0]])
    latency_tokens = table.get_latency_tokens(samples, tiers, positions)
    assert torch.equal(latency_tokens, torch.stack([table.tokens[3, 1, 0], table.tokens[0, 0, 1]]))


def test_run_samples_measured_latencies() -> None:
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


def test_init_with_numpy_and_half_precision_converts() -> None:
    table = small()
    arrays: dict[str, Any] = {
        "correct": table.correct.numpy().astype(np.float64), "latency_ms": table.latency_ms.numpy(),
        "language": table.language.bfloat16(), "tokens": table.tokens.half(),
    }  # fmt: skip
    outcome_table = OutcomeTable(space=SMALL, **arrays)
    assert outcome_table.correct.dtype == torch.float32 and outcome_table.tokens.dtype == torch.float16
    assert outcome_table.get_language(torch.tensor([0])).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"correct": torch.zeros(12, 3)}, "`correct`"),
        ({"latency_ms": torch.ones(12, len(SMALL))}, "`latency_ms`"),
        ({"latency_ms": torch.ones(12, len(SMALL), 0)}, "`latency_ms`"),
        ({"language": torch.zeros(11, WIDTH)}, "`language`"),
        ({"tokens": torch.zeros(12, 3, 2, WIDTH)}, "`tokens`"),
        ({"correct": torch.full((12, len(SMALL)), 1.5)}, ""),
        ({"correct": torch.full((12, len(SMALL)), math.nan)}, ""),
        ({"latency_ms": torch.full((12, len(SMALL), 1), math.inf)}, ""),
        ({"latency_ms": torch.zeros(12, len(SMALL), 1)}, ""),
        ({"tokens": torch.full((12, 2, 2, WIDTH), math.nan)}, ""),
    ],
)
def test_init_with_invalid_values_raises(change: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(InputError, match=match or None):
        replace(small(), **change)  # pyright: ignore[reportArgumentType]


def test_latency_quantiles_are_measured_values() -> None:
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


def test_identity_of_other_outcomes_differs() -> None:
    assert small().identity() == small().identity() != small(seed=1).identity()


@given(st.floats(0.1, 1e4), st.floats(1.0, 100.0), st.floats(0, 1, exclude_max=True))
def test_draw_budgets_stays_in_range(low: float, ratio: float, uniform: float) -> None:
    budgets_ms = float(draw_budgets((low, low * ratio), torch.tensor(uniform, dtype=torch.float64)))
    assert low * (1 - 1e-9) <= budgets_ms <= low * ratio * (1 + 1e-9)


def test_draw_budgets_is_log_uniform() -> None:
    budgets_ms = draw_budgets((100.0, 400.0), torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    assert float((budgets_ms < 200.0).float().mean()) == pytest.approx(0.5, abs=0.02)
    grid = budget_grid((100.0, 400.0), 4)
    torch.testing.assert_close(grid, 100.0 * 2.0 ** torch.tensor([0.25, 0.75, 1.25, 1.75]))
    for wrong in ((0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(InputError):
            draw_budgets(wrong, torch.zeros(1))
    with pytest.raises(InputError):
        budget_grid((1.0, 2.0), 0)
