"""Prometheus metrics: outcomes, latency by plan, budgets, and queue state.

Every server has its own registry, so several servers can share a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.extras import require

if TYPE_CHECKING:
    from sparseflow.adaptive.serve.admission import AdmissionQueue

Outcome = Literal["answered", "refused", "infeasible", "shed", "cancelled", "failed", "cut"]
"""Outcome of a request: an answer; an invalid request (4xx); an infeasible budget; refusal under load; client
disconnect; server error; shutdown."""

_LATENCY_BUCKETS_S = (
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
_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0)
_MAX_PLAN_LABELS = 64
"""Maximum number of plans with their own label (one series per bucket); others count as `other`."""


class ServerMetrics:
    """Metrics of one server.

    Args:
        queue: Admission queue, read for the gauges.

    Attributes:
        replica: Name of this replica; added to every sample as a label if set.

    Raises:
        MissingExtraError: prometheus_client is missing.
    """

    def __init__(self, queue: AdmissionQueue) -> None:
        prometheus = require("prometheus_client", "adaptive")
        self.registry: Any = prometheus.CollectorRegistry()
        self.replica = ""
        self._prometheus = prometheus
        self._plans: set[str] = set()

        def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Counter(f"sparseflow_{name}", help_text, labels, registry=self.registry)

        def histogram(
            name: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Any:
            return prometheus.Histogram(
                f"sparseflow_{name}", help_text, labels, registry=self.registry, buckets=buckets
            )

        self._requests = counter("requests", "Ended requests", ("outcome", "code"))
        self._budgets = counter("budgets", "Requests with a guaranteed budget", ("result",))
        self._tokens = counter("tokens", "Prompt and completion tokens", ("kind",))
        self._latency = histogram(
            "latency_seconds", "Latency from receipt to last token", _LATENCY_BUCKETS_S, ("plan",)
        )
        self._first = histogram(
            "first_token_seconds", "Latency from receipt to first token", _LATENCY_BUCKETS_S
        )
        self._queued = histogram("queued_seconds", "Time from receipt to start", _LATENCY_BUCKETS_S)
        self._ratio = histogram(
            "measured_over_predicted_ratio", "Measured latency over predicted median", _RATIO_BUCKETS
        )
        self._p99_results = counter("predictions", "Answers within the predicted p99", ("result",))
        for name, gauge_help, read in (
            ("running", "Running requests", lambda: queue.running),
            ("waiting", "Queued requests", lambda: queue.waiting),
            ("slots", "Maximum number of running requests", lambda: queue.slots),
            (
                "service_milliseconds",
                "Mean service time, exponentially weighted",
                lambda: queue.service_ms,
            ),
            ("pace", "Factor applied to predicted times", lambda: queue.mean_correction),
        ):
            prometheus.Gauge(f"sparseflow_{name}", gauge_help, registry=self.registry).set_function(read)

    def count_end(self, outcome: Outcome, code: str = "") -> None:
        """Count an ended request with the code of its error."""
        self._requests.labels(outcome, code).inc()

    def count_budget(self, *, met: bool) -> None:
        """Count a request with a guaranteed budget that ended without disconnect or shutdown."""
        self._budgets.labels("kept" if met else "missed").inc()

    def observe_answer(
        self,
        *,
        plan: Plan | None,
        prompt_tokens: int,
        new_tokens: int,
        measured_ms: float,
        first_token_ms: float | None,
        queued_ms: float,
        predicted_ms: tuple[float, float] | None,
    ) -> None:
        """Record an answered request.

        Args:
            plan: Plan that ran.
            prompt_tokens: Prompt length at the highest tier.
            new_tokens: Number of generated tokens.
            measured_ms: Latency from receipt to last token.
            first_token_ms: Latency from receipt to first token.
            queued_ms: Time from receipt to start.
            predicted_ms: Predicted median and p99.
        """
        self.count_end("answered")
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("completion").inc(new_tokens)
        self._latency.labels(self._get_plan_label(plan)).observe(measured_ms / 1000.0)
        self._queued.observe(queued_ms / 1000.0)
        if first_token_ms is not None:
            self._first.observe(first_token_ms / 1000.0)
        if predicted_ms is not None and predicted_ms[0] > 0.0:
            self._ratio.observe(measured_ms / predicted_ms[0])
            self._p99_results.labels("held" if measured_ms <= predicted_ms[1] else "exceeded").inc()

    def export(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its content type."""
        source = self if self.replica else self.registry
        return self._prometheus.generate_latest(source), self._prometheus.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """Yield metric families with the replica label, as prometheus_client collects them."""
        for family in self.registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "replica": self.replica})
                for sample in family.samples
            ]
            yield family

    def _get_plan_label(self, plan: Plan | None) -> str:
        if plan is None:
            return "none"
        if plan.id not in self._plans and len(self._plans) >= _MAX_PLAN_LABELS:
            return "other"
        self._plans.add(plan.id)
        return plan.id
