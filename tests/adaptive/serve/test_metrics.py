"""Tests of Prometheus metrics."""

from __future__ import annotations

from typing import Any

import pytest

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.serve.admission import AdmissionQueue
from sparseflow.adaptive.serve.metrics import ServerMetrics
from tests.adaptive.serve.fake import read_metric

PLAN = Plan(tier="low", insertion_position=1, top_k=4, blocks=(0, 1))


def make_metrics() -> ServerMetrics:
    return ServerMetrics(AdmissionQueue(slots=2, max_queued=3))


def observe_answer(metrics: ServerMetrics, **overrides: Any) -> None:
    base: dict[str, Any] = {
        "plan": PLAN, "prompt_tokens": 20, "new_tokens": 3, "measured_ms": 120.0, "first_token_ms": 60.0,
        "queued_ms": 10.0, "predicted_ms": (100.0, 130.0),
    }  # fmt: skip
    metrics.observe_answer(**{**base, **overrides})


def test_observe_answer_updates_all_metrics() -> None:
    metrics = make_metrics()
    observe_answer(metrics)
    assert read_metric(metrics, "requests_total", outcome="answered", code="") == 1
    assert read_metric(metrics, "tokens_total", kind="prompt") == 20
    assert read_metric(metrics, "tokens_total", kind="completion") == 3
    assert read_metric(metrics, "latency_seconds_sum", plan=PLAN.id) == pytest.approx(0.12)
    assert read_metric(metrics, "first_token_seconds_sum") == pytest.approx(0.06)
    assert read_metric(metrics, "queued_seconds_sum") == pytest.approx(0.01)
    assert read_metric(metrics, "measured_over_predicted_ratio_sum") == pytest.approx(1.2)
    assert read_metric(metrics, "predictions_total", result="held") == 1


def test_observe_answer_without_plan_skips_predictions() -> None:
    metrics = make_metrics()
    observe_answer(metrics, plan=None, first_token_ms=None, predicted_ms=None)
    assert read_metric(metrics, "latency_seconds_count", plan="none") == 1
    for name in ("first_token_seconds_count", "measured_over_predicted_ratio_count"):
        assert read_metric(metrics, name) == 0


def test_observe_answer_above_p99_counts_exceeded() -> None:
    metrics = make_metrics()
    observe_answer(metrics, measured_ms=131.0)
    metrics.count_budget(met=False)
    metrics.count_budget(met=True)
    assert (
        read_metric(metrics, "budgets_total", result="missed")
        == read_metric(metrics, "budgets_total", result="kept")
        == 1
    )
    assert read_metric(metrics, "predictions_total", result="exceeded") == 1


def test_gauges_read_admission_queue() -> None:
    queue = AdmissionQueue(slots=2, max_queued=5)
    metrics = ServerMetrics(queue)
    for _ in range(3):
        queue.enqueue(queue.reserve(), min_service_ms=1.0)
    queue.start_next()
    values = [
        read_metric(metrics, name) for name in ("running", "waiting", "slots", "pace", "service_milliseconds")
    ]
    assert values == [1, 2, 2, 1, 0]


def test_metrics_of_two_servers_are_separate() -> None:
    first, second = make_metrics(), make_metrics()
    first.count_end("shed", "overloaded")
    assert read_metric(first, "requests_total", outcome="shed", code="overloaded") == 1
    assert read_metric(second, "requests_total", outcome="shed", code="overloaded") == 0


def test_observe_answer_above_64_plans_uses_other_label() -> None:
    metrics = make_metrics()
    plans = [
        Plan(tier=None, insertion_position=1, top_k=top_k, blocks=tuple(range(num_blocks)))
        for top_k in range(1, 9)
        for num_blocks in range(1, 10)
    ]
    for plan in plans + plans[:2]:
        observe_answer(metrics, plan=plan)
    assert read_metric(metrics, "latency_seconds_count", plan="other") == 8
    assert read_metric(metrics, "latency_seconds_count", plan=plans[0].id) == 2


def test_export_with_replica_adds_label() -> None:
    metrics = make_metrics()
    metrics.count_end("shed", "overloaded")
    text, content_type = metrics.export()
    assert content_type.startswith("text/plain")
    assert 'sparseflow_requests_total{code="overloaded",outcome="shed"} 1.0' in text.decode()
    metrics.replica = "r7"
    text, _ = metrics.export()
    samples = [line for line in text.decode().splitlines() if not line.startswith("#")]
    assert samples
    assert all('replica="r7"' in line for line in samples)
    assert read_metric(metrics, "requests_total", outcome="shed", code="overloaded") == 1
