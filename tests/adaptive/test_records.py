"""Tests of records and claims of trained models, spans and studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseflow.errors import InputError

CUDA = {"device": {"kind": "cuda"}}


def write_training(root: Path, seed: int, accuracy: float, *, steps: int = 10) -> Path:
    """Write the directory of a completed training."""
    out_dir = root / f"seed-{seed}"
    out_dir.mkdir()
    report = {
        "accuracy": accuracy, "by_kind": {"at": 0.9, "count": accuracy}, 
        "blind": {"accuracy": 0.2 + seed / 100},
        "samples": 200, "train_seconds": 60.0 * (1 + seed), "environment": CUDA,
    }  # fmt: skip
    settings = {
        "images": {"archives": [f"/of/{seed}"]}, "train": {"seed": seed, "steps": steps},
        "model": {"depth": 16},
    }  # fmt: skip
    (out_dir / "report.json").write_text(json.dumps(report))
    (out_dir / "settings.json").write_text(json.dumps(settings))
    return out_dir


def test_trained_claim_is_worst_seed(tmp_path: Path, script: Any) -> None:
    folders = [str(write_training(tmp_path, seed, accuracy)) for seed, accuracy in enumerate((0.93, 0.91))]
    out = tmp_path / "trained.json"
    assert script("trained").main([*folders, "--out", str(out)]) == 0
    assert "/of/" not in out.read_text()
    record = json.loads(out.read_text())
    (claim,) = script("trained").make_claims(record)
    assert (claim.value, claim.met) == (91.0, True)
    assert claim.baseline == "from the question alone: 21.0 %"


def make_front(*latencies_ms: float) -> dict[str, Any]:
    """Return a Pareto front; each plan has half the accuracy of the one before."""
    rows = [
        {"id": f"p{index}", "accuracy": 0.9 / 2**index, "ms": latency_ms}
        for index, latency_ms in enumerate(latencies_ms)
    ]
    return {"pareto": rows[::-1], "span": latencies_ms[0] / latencies_ms[-1]}


def test_spans_claims_sequential_and_at_rate(script: Any) -> None:
    record = {
        "alone": make_front(4.0, 3.0), "at_rate": make_front(6.0, 4.0),
        "at_rate_p95": make_front(9.0, 5.0, 3.0),
        "environment": CUDA, "rate_per_s": 100.0, "settings": {"load": 0.7}, "samples": {"test": 64},
        "plans": [{}] * 5,
    }  # fmt: skip
    sequential, tail, count = script("spans").make_claims(record)
    assert [(claim.value, claim.met) for claim in (sequential, tail, count)] == [
        (1.333, False), (3.0, True), (2, False),
    ]  # fmt: skip
    assert (sequential.details["slowest_ms"], sequential.details["slowest_accuracy"]) == (4.0, 0.9)
    assert [tail.details[key] for key in ("rate_per_s", "load", "median_span")] == [100.0, 0.7, 1.5]


def test_summarize_span_excludes_dominated_plans(script: Any) -> None:
    rows = [
        {"id": name, "accuracy": accuracy, "ms": [ms, ms + 1.0, ms + excess]}
        for name, accuracy, ms, excess in (("a", 0.5, 3.0, 9.0), ("b", 0.4, 4.0, 2.0), ("c", 0.9, 7.0, 17.0))
    ]  # fmt: skip
    summarize_span = script("spans").summarize_span
    assert [row["id"] for row in summarize_span(rows, "ms", 0.5)["pareto"]] == ["a", "c"]
    assert summarize_span(rows, "ms", 0.5)["span"] == 2.0
    assert [(row["id"], row["ms"]) for row in summarize_span(rows, "ms", 1.0)["pareto"]] == [
        ("b", 6.0), ("a", 12.0), ("c", 24.0),
    ]  # fmt: skip


def test_trained_different_settings_raise(tmp_path: Path, script: Any) -> None:
    folders = [str(write_training(tmp_path, 0, 0.9)), str(write_training(tmp_path, 1, 0.9, steps=20))]
    argv = [*folders, "--out", str(tmp_path / "out.json")]
    with pytest.raises(InputError, match="seed"):
        script("trained").main(argv)
    (tmp_path / "seed-1" / "report.json").unlink()
    with pytest.raises(InputError, match="seed-1"):
        script("trained").main(argv)


def test_study_claims_gain_with_interval(script: Any) -> None:
    names = ("controllers", "lookup table", "best static plan", "oracle")
    policies = [{"name": name, "goodput": {"mean": 0.8}, "attainment": {"mean": 0.99}} for name in names]
    gains = {"lookup table": (0.01, 0.001, 0.02), "best static plan": (-0.02, -0.03, -0.01)}
    compared = [
        {
            "policy": "controllers", "baseline": baseline, "subset": subset,
            "goodput": dict(zip(("mean", "low", "high"), gain, strict=True)),
        }
        for baseline, gain in gains.items() for subset in ("all requests", "tight budgets")
    ]  # fmt: skip
    for kind, suffix in (("cpu", "-cpu"), ("cuda", "")):
        record = {"policies": policies, "compared": compared, "environment": {"device": {"kind": kind}}}
        claims = list(script("study").make_claims(record))
        assert [(claim.value, claim.met) for claim in claims] == [(1.0, True), (-2.0, False)]
        assert claims[0].id == f"adaptive/5-lookup-table{suffix}"
        assert (claims[0].details["low"], claims[0].details["high"]) == (0.1, 2.0)
