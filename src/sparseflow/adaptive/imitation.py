"""Controllers that imitate the oracle: cross-entropy on the plan that it takes.

Of plans that are equally good for a request, the label is the one that is right most often over all requests:
a plan that is right by luck teaches nothing. Still, the oracle decides with hindsight. Where Stage 1 would
have to insert late in order to find out what a request needs, the oracle knows and inserts early, and so do
its imitators, blindly.
"""

from __future__ import annotations

from torch import Tensor

from sparseflow.adaptive.choices import Choices
from sparseflow.adaptive.controllers import Controllers
from sparseflow.adaptive.costs import Costs, fitting
from sparseflow.adaptive.environment import Outcomes
from sparseflow.adaptive.policies import Oracle


class Imitation:
    """What there is to imitate.

    Args:
        outcomes: Requests and what every plan makes of them.
        costs: As in `Controlled`: the label is the best of the plans that are not masked.
    """

    def __init__(self, outcomes: Outcomes, costs: Costs | None = None) -> None:
        self._outcomes, self._costs = outcomes, costs
        self._oracle = Oracle(prefer=outcomes.correct.mean(0))
        self._actions = Choices(outcomes.space).actions

    def loss(self, controllers: Controllers, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        """Mean negative log-likelihood of the oracle's choices: [n] and [n] -> a scalar, in nats."""
        allowed = None
        if self._costs is not None:
            allowed = fitting(self._costs(self._outcomes, samples), budgets_ms)
        plans = self._oracle.choose(self._outcomes, samples, budgets_ms, allowed=allowed)
        choice = controllers.choose(
            self._outcomes.language_of(samples), budgets_ms,
            lambda rows, tiers, positions: self._outcomes.tokens_of(
                samples[rows.cpu()], tiers.cpu(), positions.cpu()
            ),
            allowed=allowed, action=self._actions[plans].to(controllers.device),
        )  # fmt: skip
        return -choice.log_prob.mean()
