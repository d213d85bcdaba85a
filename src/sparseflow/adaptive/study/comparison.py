"""Comparison of controllers with baseline policies at equal attainment.

Each policy is given a fraction of every budget, calibrated on the validation split so that it reaches the
requested attainment (`policy.evaluation.calibrate_margin`), and evaluated on the test split. The oracle is
not calibrated: regret is measured against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.evaluation import (
    PolicyEvaluation,
    calibrate_margin,
    compare_policies,
    evaluate_policy,
)
from sparseflow.adaptive.policy.outcomes import budget_grid
from sparseflow.adaptive.policy.policies import (
    ControllerPolicy,
    LookupTablePolicy,
    OraclePolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
)
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.core.progress import Progress

ALL_REQUESTS = "all requests"
_NUM_RANDOM_SEEDS = 5
_BUDGET_THIRDS = ("tight", "middle", "loose")
_MIN_SAMPLES = 30
"""Minimum samples of a kind of question for a comparison."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyComparison:
    """Result of `compare_with_baselines`.

    Attributes:
        evaluations: Evaluation of each policy.
        gains: Gains of the first policy over each other one but the oracle: `"policy"`, `"baseline"`,
            `"subset"` (`ALL_REQUESTS`, a third of the budgets, or a kind of question), and the differences of
            `"accuracy"`, `"attainment"` and `"goodput"`, as `BootstrapEstimate` in JSON types.
        attainment: Requested fraction of answers in time.
        budgets_ms: Budgets, ascending, shape [budgets].
    """

    evaluations: tuple[PolicyEvaluation, ...]
    gains: tuple[dict[str, Any], ...]
    attainment: float
    budgets_ms: Tensor


def compare_with_baselines(
    tables: StudyTables,
    *,
    controllers: Sequence[Controllers] = (),
    supervised: Sequence[Controllers] = (),
    attainment: float = 0.99,
    num_budgets: int = 24,
    budget_range_ms: tuple[float, float] | None = None,
    progress: Progress | None = None,
) -> PolicyComparison:
    """Evaluate controllers and baselines.

    Args:
        tables: Outcomes.
        controllers: Controllers of each seed, evaluated together as their mean; without any, only the
            baselines are evaluated.
        supervised: Controllers that imitate the oracle.
        attainment: Requested fraction of answers in time.
        num_budgets: Number of budgets, at equal ratios.
        budget_range_ms: Smallest and largest budget; by default from the fastest plan to slightly above the
            slowest.
        progress: Called with (message, fraction done).

    Raises:
        InputError: Controllers are of other plans, or a number is out of range.
    """
    grid = budget_grid(budget_range_ms or tables.train.budget_range_ms(), num_budgets)
    costs_ms = tables.train.latency_quantiles_ms()
    groups: list[list[Policy]] = [
        [ControllerPolicy(controllers=trained, costs_ms=costs_ms) for trained in controllers],
        [LookupTablePolicy(accuracy=tables.train.correct.mean(0), costs_ms=costs_ms)],
        [
            ControllerPolicy(controllers=imitation, costs_ms=costs_ms, name="supervised on oracle")
            for imitation in supervised
        ],
        [StaticPolicy.from_outcomes(tables.train, grid, attainment=attainment)],
        [RandomPolicy(costs_ms=costs_ms, seed=seed) for seed in range(_NUM_RANDOM_SEEDS)],
        [OraclePolicy()],
    ]
    groups = [policies for policies in groups if policies]
    evaluations = []
    for index, policies in enumerate(groups):
        if progress is not None:
            progress(f"evaluating: {policies[0].name}", index / len(groups))
        # Each seed is calibrated separately, as it would be used.
        calibrated: list[Policy] = [
            policy
            if isinstance(policy, OraclePolicy)
            else calibrate_margin(policy, tables.validation, grid, attainment)
            for policy in policies
        ]
        evaluations.append(evaluate_policy(calibrated, tables.test, grid))
    first, *baselines = evaluations
    gains = [
        {"policy": first.name, "baseline": baseline.name, "subset": name}
        | {
            measure: asdict(gain)
            for measure, gain in compare_policies(first, baseline, **selection).items()
        }
        for baseline in baselines[:-1]
        for name, selection in _list_subsets(grid, tables.kinds)
    ]  # fmt: skip
    return PolicyComparison(
        evaluations=tuple(evaluations), gains=tuple(gains), attainment=attainment, budgets_ms=grid
    )


def _list_subsets(budgets_ms: Tensor, kinds: Mapping[str, Tensor]) -> list[tuple[str, dict[str, Any]]]:
    """Name of each subset and its arguments of `compare_policies`."""
    subsets: list[tuple[str, dict[str, Any]]] = [(ALL_REQUESTS, {})]
    count = len(budgets_ms)
    for index, name in enumerate(_BUDGET_THIRDS):
        third = slice(index * count // len(_BUDGET_THIRDS), (index + 1) * count // len(_BUDGET_THIRDS))
        budgets = budgets_ms[third].tolist()
        if budgets:
            subsets.append((f"{name} budgets ({budgets[0]:.3g} to {budgets[-1]:.3g} ms)", {"budgets": third}))
    subsets += [
        (f"questions of the kind {kind!r}", {"samples": samples})
        for kind, samples in kinds.items()
        if int(samples.sum()) >= _MIN_SAMPLES
    ]
    return subsets


def summarize_gains(gains: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summarize in sentences where the first policy is better or worse, by goodput.

    Args:
        gains: As in `PolicyComparison`.
    """
    sentences = []
    for policy, baseline in dict.fromkeys((row["policy"], row["baseline"]) for row in gains):
        by_subset = {
            row["subset"]: row["goodput"]
            for row in gains
            if (row["policy"], row["baseline"]) == (policy, baseline)
        }
        overall = by_subset.pop(ALL_REQUESTS)
        outcome = {1: "better", -1: "worse", 0: "no significant difference"}[_get_sign(overall)]
        sentences.append(
            f"{policy[0].upper()}{policy[1:]} against {baseline}: {outcome}, goodput {_format_gain(overall)}."
        )
        for word, sign in (("Worse", -1), ("Better", 1)):
            subsets = [
                f"{subset} ({_format_gain(gain)})"
                for subset, gain in by_subset.items()
                if _get_sign(gain) == sign
            ]
            if subsets:
                sentences.append(f"{word} than {baseline}: {'; '.join(subsets)}.")
    return sentences


def _get_sign(gain: Mapping[str, float]) -> int:
    """1 if the gain is significantly positive, -1 if significantly negative, else 0."""
    return int(gain["low"] > 0.0) - int(gain["high"] < 0.0)


def _format_gain(gain: Mapping[str, float]) -> str:
    # Adding 0.0 turns -0.0 into 0.0.
    mean, low, high = (round(100.0 * gain[name], 1) + 0.0 for name in ("mean", "low", "high"))
    return f"{mean:+.1f} points, {low:+.1f} to {high:+.1f}"
