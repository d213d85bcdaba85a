"""A contest: all policies by one table, at one attainment, and the sentences that say who wins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.study.comparison import compare_with_baselines, summarize_gains
from sparseflow.adaptive.study.latencies import LatencySamples, RequestSize
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.errors import InputError
from tests.adaptive.synthetic import WIDTH, make_outcomes, make_space

PLANS = make_space(depth=4, top_k=3)


def made(*, samples: int = 64) -> StudyTables:
    """Tables of requests whose needs are known."""

    def of(seed: int) -> OutcomeTable:
        return make_outcomes(samples, seed=seed, plans=PLANS)

    half = torch.arange(samples) < samples // 2
    return StudyTables(
        train=of(1),
        validation=of(2),
        test=of(3),
        kinds={"one": half, "other": ~half},
        size=RequestSize(8, 2),
        latency=LatencySamples(
            ms=np.ones((1, len(PLANS), 2), np.float32), measured=np.ones(len(PLANS), bool), load=0.0
        ),
    )


def controllers(seed: int = 0) -> Controllers:
    return Controllers(PLANS, width=WIDTH, model_id="m", seed=seed)


def test_everybody_is_judged_at_the_attainment_that_is_asked() -> None:
    told: list[float] = []
    found = compare_with_baselines(
        made(), controllers=[controllers(), controllers(1)], supervised=[controllers(2)], attainment=0.9,
        num_budgets=6, progress=lambda _, share: told.append(share),
    )  # fmt: skip
    assert [each.name for each in found.evaluations] == [
        "controllers", "lookup table", "supervised on oracle", "best static plan", "random", "oracle"
    ]  # fmt: skip
    assert len(found.budgets_ms) == 6 and len(told) == 6
    *others, oracle = found.evaluations
    assert oracle.regret.mean == 0.0 and oracle.met is None
    for each in others:
        assert each.met is not None and each.regret.mean >= 0.0
        assert not each.met or each.attainment.mean > 0.8
    where = [(each.baseline, each.subset.partition(" (")[0]) for each in found.gains]
    places = [
        "all requests", "tight budgets", "middle budgets", "loose budgets",
        "questions of the kind 'one'", "questions of the kind 'other'",
    ]  # fmt: skip
    assert where == [(each.name, place) for each in others[1:] for place in places]
    gain = found.gains[0].gains["goodput"]
    assert gain.mean == pytest.approx(others[0].goodput.mean - others[1].goodput.mean, abs=1e-6)
    thirds = [each.gains["goodput"].mean for each in found.gains[1:4]]
    assert gain.mean == pytest.approx(sum(thirds) / 3, abs=1e-6)


def test_without_controllers_the_lookup_table_is_held_against_the_others() -> None:
    found = compare_with_baselines(made(), num_budgets=3)
    assert [each.name for each in found.evaluations] == [
        "lookup table",
        "best static plan",
        "random",
        "oracle",
    ]
    assert {each.policy for each in found.gains} == {"lookup table"}


def test_few_questions_of_a_kind_are_not_compared() -> None:
    few = torch.arange(64) < 10
    tables = made()
    one = StudyTables(**{**vars(tables), "kinds": {"one": few}})
    assert not any("kind" in each.subset for each in compare_with_baselines(one, num_budgets=3).gains)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"`attainment` \(=0.0\)"):
        compare_with_baselines(made(), attainment=0.0)
    with pytest.raises(InputError, match="other plans"):
        compare_with_baselines(
            made(), controllers=[Controllers(make_space(), width=WIDTH, model_id="m")], num_budgets=3
        )


def row(other: str, where: str, low: float, high: float) -> dict[str, object]:
    return {
        "policy": "controllers", "baseline": other, "subset": where,
        "goodput": {"mean": (low + high) / 2, "low": low, "high": high},
    }  # fmt: skip


def test_the_verdict_says_who_wins_and_where_not() -> None:
    found = summarize_gains(
        [
            row("lookup table", "all requests", 0.01, 0.03),
            row("lookup table", "tight budgets", -0.04, -0.02),
            row("lookup table", "loose budgets", 0.02, 0.06),
            row("lookup table", "middle budgets", -0.1, 0.1),
            row("random", "all requests", -0.01, 0.03),
            row("best static plan", "all requests", -0.05, -0.03),
        ]
    )
    assert found == [
        "Controllers against lookup table: better, goodput +2.0 points, +1.0 to +3.0.",
        "Worse than lookup table: tight budgets (-3.0 points, -4.0 to -2.0).",
        "Better than lookup table: loose budgets (+4.0 points, +2.0 to +6.0).",
        "Controllers against random: no significant difference, goodput +1.0 points, -1.0 to +3.0.",
        "Controllers against best static plan: worse, goodput -4.0 points, -5.0 to -3.0.",
    ]
    assert summarize_gains([]) == []
