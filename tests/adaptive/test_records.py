"""Records of trained models and studies, and the claims that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseflow.errors import InputError

CUDA = {"device": {"kind": "cuda"}}


def folder(root: Path, seed: int, accuracy: float, *, steps: int = 10) -> Path:
    """Of a training that has ended."""
    made = root / f"seed-{seed}"
    made.mkdir()
    report = {
        "accuracy": accuracy, "by_kind": {"at": 0.9, "count": accuracy}, 
        "blind": {"accuracy": 0.2 + seed / 100},
        "samples": 200, "train_seconds": 60.0 * (1 + seed), "environment": CUDA,
    }  # fmt: skip
    settings = {
        "images": {"archives": [f"/of/{seed}"]}, "train": {"seed": seed, "steps": steps},
        "model": {"depth": 16},
    }  # fmt: skip
    (made / "report.json").write_text(json.dumps(report))
    (made / "settings.json").write_text(json.dumps(settings))
    return made


def test_seeds_become_one_record_and_the_worst_counts(tmp_path: Path, script: Any) -> None:
    folders = [str(folder(tmp_path, seed, share)) for seed, share in enumerate((0.93, 0.91))]
    out = tmp_path / "trained.json"
    assert script("trained").main([*folders, "--out", str(out)]) == 0
    assert "/of/" not in out.read_text()
    record = json.loads(out.read_text())
    (claim,) = script("trained").make_claims(record)
    assert (claim.value, claim.met) == (91.0, True)
    assert claim.baseline == "from the question alone: 21.0 %"


def front(*ms: float) -> dict[str, Any]:
    """Of plans that no other beats, each half as good as the one before."""
    rows = [{"id": f"p{at}", "accuracy": 0.9 / 2**at, "ms": each} for at, each in enumerate(ms)]
    return {"pareto": rows[::-1], "span": ms[0] / ms[-1]}


def test_what_plans_span_alone_and_at_one_rate(script: Any) -> None:
    record = {
        "alone": front(4.0, 3.0), "at_rate": front(6.0, 4.0), "at_rate_p95": front(9.0, 5.0, 3.0),
        "environment": CUDA, "rate_per_s": 100.0, "settings": {"load": 0.7}, "samples": {"test": 64},
        "plans": [{}] * 5,
    }  # fmt: skip
    alone, tail, count = script("spans").make_claims(record)
    assert [(each.value, each.met) for each in (alone, tail, count)] == [
        (1.333, False), (3.0, True), (2, False),
    ]  # fmt: skip
    assert (alone.details["slowest_ms"], alone.details["slowest_accuracy"]) == (4.0, 0.9)
    assert [tail.details[key] for key in ("rate_per_s", "load", "median_span")] == [100.0, 0.7, 1.5]


def test_plans_that_another_beats_do_not_count(script: Any) -> None:
    rows = [
        {"id": name, "accuracy": share, "ms": [ms, ms + 1.0, ms + more]}
        for name, share, ms, more in (("a", 0.5, 3.0, 9.0), ("b", 0.4, 4.0, 2.0), ("c", 0.9, 7.0, 17.0))
    ]  # fmt: skip
    told = script("spans").told
    assert [each["id"] for each in told(rows, "ms", 0.5)["pareto"]] == ["a", "c"]
    assert told(rows, "ms", 0.5)["span"] == 2.0
    assert [(each["id"], each["ms"]) for each in told(rows, "ms", 1.0)["pareto"]] == [
        ("b", 6.0), ("a", 12.0), ("c", 24.0),
    ]  # fmt: skip


def test_trainings_that_differ_are_refused(tmp_path: Path, script: Any) -> None:
    folders = [str(folder(tmp_path, 0, 0.9)), str(folder(tmp_path, 1, 0.9, steps=20))]
    asked = [*folders, "--out", str(tmp_path / "out.json")]
    with pytest.raises(InputError, match="more than their seeds"):
        script("trained").main(asked)
    (tmp_path / "seed-1" / "report.json").unlink()
    with pytest.raises(InputError, match="let its training end"):
        script("trained").main(asked)


def test_what_controllers_gain_is_told_with_its_interval(script: Any) -> None:
    names = ("controllers", "lookup table", "best static plan", "oracle")
    policies = [{"name": name, "goodput": {"mean": 0.8}, "attainment": {"mean": 0.99}} for name in names]
    gains = {"lookup table": (0.01, 0.001, 0.02), "best static plan": (-0.02, -0.03, -0.01)}
    compared = [
        {
            "one": "controllers", "other": other, "where": where,
            "goodput": dict(zip(("mean", "low", "high"), gain, strict=True)),
        }
        for other, gain in gains.items() for where in ("all requests", "tight budgets")
    ]  # fmt: skip
    for kind, suffix in (("cpu", "-cpu"), ("cuda", "")):
        record = {"policies": policies, "compared": compared, "environment": {"device": {"kind": kind}}}
        claims = list(script("study").make_claims(record))
        assert [(claim.value, claim.met) for claim in claims] == [(1.0, True), (-2.0, False)]
        assert claims[0].id == f"adaptive/5-lookup-table{suffix}"
        assert (claims[0].details["low"], claims[0].details["high"]) == (0.1, 2.0)
