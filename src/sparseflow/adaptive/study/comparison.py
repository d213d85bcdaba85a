"""Controllers against their rivals: all as late as each other on the validation split, judged on the test.

A policy is shown a share of each budget, chosen on the validation split so that it keeps the attainment that
is asked for (`judging.matched`). The oracle is not held back: it is what regret is measured to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.evaluation import BootstrapEstimate, PolicyEvaluation, judge, matched, versus
from sparseflow.adaptive.policy.outcomes import QuantileLatencies, budget_grid
from sparseflow.adaptive.policy.policies import (
    ControllerPolicy,
    ImitationPolicy,
    LookupTablePolicy,
    OraclePolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
)
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.errors import InputError

Progress = Callable[[str, float], None]

ALL = "all requests"
_RANDOM_SEEDS = 5
_PARTS = ("tight", "middle", "loose")
"""Thirds of the budgets."""
_LEAST = 30
"""Samples of a kind of question that a comparison is made by."""


@dataclass(frozen=True, kw_only=True)
class PairedGain:
    """What one policy has over another, on some of the requests.

    Attributes:
        one: Its name.
        other: The other's.
        where: Which requests: `ALL`, a third of the budgets, or a kind of question.
        gains: `"accuracy"`, `"attainment"` and `"goodput"` of `one` less those of `other`.
    """

    one: str
    other: str
    where: str
    gains: Mapping[str, BootstrapEstimate]

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        gains = {name: each.to_dict() for name, each in self.gains.items()}
        return {"one": self.one, "other": self.other, "where": self.where, **gains}


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyComparison:
    """What a contest gave.

    Attributes:
        judged: Each policy's results.
        compared: The first policy against each other one but the oracle, everywhere.
        attainment: Share of answers in time that was asked for.
        budgets_ms: [budgets], ascending.
    """

    judged: tuple[PolicyEvaluation, ...]
    compared: tuple[PairedGain, ...]
    attainment: float
    budgets_ms: Tensor


def contest(
    tables: StudyTables,
    *,
    controllers: Sequence[Controllers] = (),
    supervised: Sequence[Controllers] = (),
    attainment: float = 0.99,
    budgets: int = 24,
    span_ms: tuple[float, float] | None = None,
    progress: Progress | None = None,
) -> PolicyComparison:
    """Judge policies.

    Args:
        tables: Outcomes.
        controllers: Of each seed; judged together, as their mean. Without any, the rivals are judged alone.
        supervised: Those that imitate the oracle.
        attainment: Share of answers that must be in time.
        budgets: How many to judge at, at equal ratios.
        span_ms: From and to; by default from the least that a plan keeps to a little above the dearest.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: Controllers are of other plans, or a number is out of range.
    """
    if not 0.0 < attainment <= 1.0:
        raise InputError(f"`attainment` (={attainment}) must be a share of answers, above 0")
    grid = budget_grid(span_ms or tables.train.span_ms(), budgets)
    costs = QuantileLatencies.of(tables.train)
    kinds: list[list[Policy]] = [
        [ControllerPolicy(controllers=each, costs=costs) for each in controllers],
        [LookupTablePolicy(accuracy=tables.train.correct.mean(0), costs=costs)],
        [ImitationPolicy(controllers=each, costs=costs) for each in supervised],
        [StaticPolicy.of(tables.train, grid, attainment=attainment)],
        [RandomPolicy(costs=costs, seed=seed) for seed in range(_RANDOM_SEEDS)],
        [OraclePolicy()],
    ]
    kinds = [policies for policies in kinds if policies]
    judged = []
    for at, policies in enumerate(kinds):
        name = policies[0].name
        if progress is not None:
            progress(f"judging: {name}", at / len(kinds))
        # Of several, each by itself: so would each be used.
        ready: list[Policy] = [
            policy
            if isinstance(policy, OraclePolicy)
            else matched(policy, tables.validation, grid, attainment)
            for policy in policies
        ]
        judged.append(judge(ready, tables.test, grid))
    first, *others = judged
    compared = [
        PairedGain(one=first.name, other=other.name, where=where, gains=versus(first, other, **which))
        for other in others[:-1]
        for where, which in _places(grid, tables.kinds)
    ]
    return PolicyComparison(
        judged=tuple(judged), compared=tuple(compared), attainment=attainment, budgets_ms=grid
    )  # fmt: skip


def _places(budgets_ms: Tensor, kinds: Mapping[str, Tensor]) -> list[tuple[str, dict[str, Any]]]:
    """What comparisons are made on."""
    found: list[tuple[str, dict[str, Any]]] = [(ALL, {})]
    count = len(budgets_ms)
    for at, name in enumerate(_PARTS):
        part = slice(at * count // len(_PARTS), (at + 1) * count // len(_PARTS))
        mine = budgets_ms[part].tolist()
        if mine:
            found.append((f"{name} budgets ({mine[0]:.3g} to {mine[-1]:.3g} ms)", {"budgets": part}))
    found += [
        (f"questions of the kind {kind!r}", {"samples": which})
        for kind, which in kinds.items()
        if int(which.sum()) >= _LEAST
    ]
    return found


def verdict(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who wins and where, in sentences, by goodput.

    Args:
        compared: What `PairedGain.to_dict` gave.
    """
    found = []
    for one, other in dict.fromkeys((row["one"], row["other"]) for row in compared):
        mine = {
            row["where"]: row["goodput"] for row in compared if (row["one"], row["other"]) == (one, other)
        }
        found.append(f"{one[0].upper()}{one[1:]} against {other}: {_told(mine.pop(ALL))}.")
        for word, sign in (("Worse", -1), ("Better", 1)):
            there = [f"{where} ({_points(gain)})" for where, gain in mine.items() if _sign(gain) == sign]
            if there:
                found.append(f"{word} than {other}: {'; '.join(there)}.")
    return found


def _told(gain: Mapping[str, float]) -> str:
    words = {1: "better", -1: "worse", 0: "no difference that could be told"}
    return f"{words[_sign(gain)]}, goodput {_points(gain)}"


def _sign(gain: Mapping[str, float]) -> int:
    """1 where it is surely more, -1 where it is surely less."""
    return int(gain["low"] > 0.0) - int(gain["high"] < 0.0)


def _points(gain: Mapping[str, float]) -> str:
    # Not -0.0.
    mean, low, high = (round(100.0 * gain[name], 1) + 0.0 for name in ("mean", "low", "high"))
    return f"{mean:+.1f} points, {low:+.1f} to {high:+.1f}"
