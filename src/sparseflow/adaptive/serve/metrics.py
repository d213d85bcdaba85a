"""What Prometheus reads: requests by how they ended, latencies by plan, budgets kept, and what runs and
waits.

Every server has a registry of its own, so that several can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.extras import require

if TYPE_CHECKING:
    from sparseflow.adaptive.serve.admission import AdmissionQueue

Outcome = Literal["answered", "refused", "infeasible", "shed", "cancelled", "failed", "cut"]
"""How a request ended: with an answer; with a 4xx for what it was; with a budget that no plan keeps; for the
load; by its client's leaving; by an error of ours; by shutdown."""

_LATENCY_S = (
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    30.0,
)
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0)
_MOST_PLANS = 64
"""Plans with numbers of their own; each is a series for every bucket, so later ones are counted as
`other`."""


class ServerMetrics:
    """The numbers of one server.

    Args:
        line: Where requests wait and run.

    Attributes:
        replica: Which of several servers behind one address this is; a label of every number where it is set.

    Raises:
        MissingExtraError: prometheus_client is missing.
    """

    def __init__(self, line: AdmissionQueue) -> None:
        prometheus = require("prometheus_client", "adaptive")
        self.registry: Any = prometheus.CollectorRegistry()
        self.replica = ""
        self._prometheus = prometheus
        self._plans: set[str] = set()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Counter(f"sparseflow_{name}", what, labels, registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Histogram(
                f"sparseflow_{name}", what, labels, registry=self.registry, buckets=buckets
            )

        self._requests = counter("requests", "Requests that ended", ("outcome", "code"))
        self._budgets = counter("budgets", "Requests that were let in with a budget", ("result",))
        self._tokens = counter("tokens", "Tokens of prompts and answers", ("kind",))
        self._latency = histogram("latency_seconds", "Receipt to last token", _LATENCY_S, ("plan",))
        self._first = histogram("first_token_seconds", "Receipt to first token", _LATENCY_S)
        self._queued = histogram("queued_seconds", "Receipt to a request's turn", _LATENCY_S)
        self._ratio = histogram("measured_over_predicted_ratio", "Latency over predicted median", _RATIO)
        self._covered = counter("predictions", "Answers, by whether the predicted p99 held", ("result",))
        for name, what, read in (
            ("running", "Requests that run", lambda: line.running),
            ("waiting", "Requests that wait for their turn", lambda: line.waiting),
            ("slots", "Requests that can run at once", lambda: line.slots),
            (
                "service_milliseconds",
                "Mean time from turn to end, recent ones first",
                lambda: line.service_ms,
            ),
            ("pace", "What times are expected to be over those predicted", lambda: line.pace),
        ):
            prometheus.Gauge(f"sparseflow_{name}", what, registry=self.registry).set_function(read)

    def ended(self, outcome: Outcome, code: str = "") -> None:
        """A request ended, with the code of its error."""
        self._requests.labels(outcome, code).inc()

    def promised(self, *, kept: bool) -> None:
        """A request that was let in with a budget ended, and not because its client or the server went
        away."""
        self._budgets.labels("kept" if kept else "missed").inc()

    def answered(
        self,
        *,
        plan: Plan | None,
        prompt_tokens: int,
        new_tokens: int,
        measured_ms: float,
        first_ms: float | None,
        queued_ms: float,
        predicted_ms: tuple[float, float] | None,
    ) -> None:
        """A request was answered.

        Args:
            plan: What ran.
            prompt_tokens: At the highest tier.
            new_tokens: Of the answer.
            measured_ms: From receipt to the last token.
            first_ms: From receipt to the first one.
            queued_ms: From receipt to its turn.
            predicted_ms: Median and p99.
        """
        self.ended("answered")
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("completion").inc(new_tokens)
        self._latency.labels(self._name(plan)).observe(measured_ms / 1000.0)
        self._queued.observe(queued_ms / 1000.0)
        if first_ms is not None:
            self._first.observe(first_ms / 1000.0)
        if predicted_ms is not None and predicted_ms[0] > 0.0:
            self._ratio.observe(measured_ms / predicted_ms[0])
            self._covered.labels("held" if measured_ms <= predicted_ms[1] else "exceeded").inc()

    def value(self, name: str, **labels: str) -> float:
        """A number as it is now; 0 where nothing was counted yet. `name` is without the prefix."""
        found = self.registry.get_sample_value(f"sparseflow_{name}", labels)
        return 0.0 if found is None else float(found)

    def exposition(self) -> tuple[bytes, str]:
        """All of it as Prometheus reads it, and its content type."""
        source = self if self.replica else self.registry
        return self._prometheus.generate_latest(source), self._prometheus.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """The registry's families with the replica's name in every sample, as Prometheus's client collects
        them."""
        for family in self.registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "replica": self.replica})
                for sample in family.samples
            ]
            yield family

    def _name(self, plan: Plan | None) -> str:
        if plan is None:
            return "none"
        if plan.id not in self._plans and len(self._plans) >= _MOST_PLANS:
            return "other"
        self._plans.add(plan.id)
        return plan.id
