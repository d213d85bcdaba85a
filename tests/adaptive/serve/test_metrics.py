"""What Prometheus reads."""

from __future__ import annotations

from typing import Any

import pytest

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.serve.admission import AdmissionQueue
from sparseflow.adaptive.serve.metrics import ServerMetrics

PLAN = Plan(tier="low", insertion_position=1, top_k=4, blocks=(0, 1))


def metrics() -> ServerMetrics:
    return ServerMetrics(AdmissionQueue(slots=2, places=3))


def answered(to: ServerMetrics, **how: Any) -> None:
    base: dict[str, Any] = {
        "plan": PLAN, "prompt_tokens": 20, "new_tokens": 3, "measured_ms": 120.0, "first_ms": 60.0,
        "queued_ms": 10.0, "predicted_ms": (100.0, 130.0),
    }  # fmt: skip
    to.answered(**{**base, **how})


def test_an_answer_is_counted_everywhere() -> None:
    found = metrics()
    answered(found)
    assert found.value("requests_total", outcome="answered", code="") == 1
    assert found.value("tokens_total", kind="prompt") == 20
    assert found.value("tokens_total", kind="completion") == 3
    assert found.value("latency_seconds_sum", plan=PLAN.id) == pytest.approx(0.12)
    assert found.value("first_token_seconds_sum") == pytest.approx(0.06)
    assert found.value("queued_seconds_sum") == pytest.approx(0.01)
    assert found.value("measured_over_predicted_ratio_sum") == pytest.approx(1.2)
    assert found.value("predictions_total", result="held") == 1


def test_what_is_not_known_is_not_counted() -> None:
    found = metrics()
    answered(found, plan=None, first_ms=None, predicted_ms=None)
    assert found.value("latency_seconds_count", plan="none") == 1
    for name in ("first_token_seconds_count", "measured_over_predicted_ratio_count"):
        assert found.value(name) == 0


def test_promises_and_predictions_that_did_not_hold() -> None:
    found = metrics()
    answered(found, measured_ms=131.0)
    found.promised(kept=False)
    found.promised(kept=True)
    assert found.value("budgets_total", result="missed") == found.value("budgets_total", result="kept") == 1
    assert found.value("predictions_total", result="exceeded") == 1


def test_what_runs_and_waits_is_read_from_the_line() -> None:
    line = AdmissionQueue(slots=2, places=5)
    found = ServerMetrics(line)
    for _ in range(3):
        line.join(line.enter(), least_ms=1.0)
    line.next()
    read = [found.value(name) for name in ("running", "waiting", "slots", "pace", "service_milliseconds")]
    assert read == [1, 2, 2, 1, 0]


def test_servers_share_no_numbers() -> None:
    one, other = metrics(), metrics()
    one.ended("shed", "overloaded")
    assert one.value("requests_total", outcome="shed", code="overloaded") == 1
    assert other.value("requests_total", outcome="shed", code="overloaded") == 0


def test_plans_beyond_count_as_others() -> None:
    found = metrics()
    plans = [
        Plan(tier=None, insertion_position=1, top_k=k, blocks=tuple(range(n)))
        for k in range(1, 9)
        for n in range(1, 10)
    ]
    for plan in plans + plans[:2]:
        answered(found, plan=plan)
    assert found.value("latency_seconds_count", plan="other") == 8
    assert found.value("latency_seconds_count", plan=plans[0].id) == 2


def test_the_text_for_prometheus() -> None:
    found = metrics()
    found.ended("shed", "overloaded")
    text, kind = found.exposition()
    assert kind.startswith("text/plain")
    assert 'sparseflow_requests_total{code="overloaded",outcome="shed"} 1.0' in text.decode()
    found.replica = "r7"
    text, _ = found.exposition()
    samples = [line for line in text.decode().splitlines() if not line.startswith("#")]
    assert samples
    assert all('replica="r7"' in line for line in samples)
    assert found.value("requests_total", outcome="shed", code="overloaded") == 1
