"""Records of trained models and studies, and the claims that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseflow.adaptive.plan import Geometry, Plan, PlanSpace
from sparseflow.adaptive.profile import Profile, Visit
from sparseflow.adaptive.profile.about import About
from sparseflow.core.claims import Claim
from sparseflow.errors import InputError


def folder(root: Path, seed: int, accuracy: float, *, steps: int = 10) -> Path:
    """Of a training that has ended."""
    made = root / f"seed-{seed}"
    made.mkdir()
    report = {
        "accuracy": accuracy, "by_kind": {"at": 0.9, "count": accuracy}, 
        "blind": {"accuracy": 0.2 + seed / 100},
        "samples": 200, "train_seconds": 60.0 * (1 + seed), "environment": {},
    }  # fmt: skip
    settings = {
        "images": {"archives": [f"/of/{seed}"]}, "train": {"seed": seed, "steps": steps},
        "model": {"depth": 16},
    }  # fmt: skip
    (made / "report.json").write_text(json.dumps(report))
    (made / "settings.json").write_text(json.dumps(settings))
    return made


def row(name: str, ms: float, accuracy: float, *, measured: bool = True) -> dict[str, Any]:
    return {
        "id": name, "p5_ms": 0.9 * ms, "p50_ms": ms, "p95_ms": 1.1 * ms, "accuracy": accuracy,
        "measured": measured, "samples_ms": [ms],
    }  # fmt: skip


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Of plans: one is beaten by another, and one was not measured."""
    made = tmp_path / "study"
    made.mkdir()
    plans = [
        row("a", 3.0, 0.5), row("b", 4.0, 0.4), row("c", 5.0, 0.7), row("d", 9.0, 0.9),
        row("e", 1.0, 0.9, measured=False),
    ]  # fmt: skip
    found = {
        "format": "sparseflow-adaptive-judged-1", "plans": plans, "environment": {},
        "size": {"text_tokens": 9, "new_tokens": 2}, "load": 0.0,
    }  # fmt: skip
    (made / "judged.json").write_text(json.dumps(found))
    return made


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Without any request."""
    space = PlanSpace.of(Geometry(depth=16, top_k=8), [float(16 - block) for block in range(16)])
    about = About(
        model_id="a", device={}, space=space, vision_tokens={"low": 4, "medium": 20, "high": 56}, how={}
    )
    Profile(about=about).write(tmp_path / "profile.parquet")
    return tmp_path / "profile.parquet"


def test_what_plans_span_alone_and_beside_others(script: Any) -> None:
    plans = [
        Plan(tier=tier, insertion_position=1, top_k=8, blocks=tuple(range(16)))
        for tier in ("low", "medium", "high")
    ]
    visits = [
        Visit(
            plan=plan, text_tokens=tokens, batch=batch, round=turn,
            prefill_ms=(1.0 + at) * batch + tokens / 10.0 + turn, steps_ms=(1.0, 1.0, 50.0),
        )
        for at, plan in enumerate(plans) for tokens in (10, 20) for batch in (1, 8) for turn in range(3)
    ]  # fmt: skip
    rows = [{"id": plan.id, "accuracy": share} for plan, share in zip(plans, (0.5, 0.4, 0.9), strict=True)]
    size = {"text_tokens": 12, "new_tokens": 3}
    found = script("spans").spans(SimpleNamespace(timed=visits), rows, size)
    # The median of three turns, at the nearer length, and two steps; the second plan is beaten by the first.
    assert [(each["batch"], each["plans"], each["pareto_plans"]) for each in found] == [(1, 3, 2), (8, 3, 2)]
    assert [(each["least_ms"], each["most_ms"]) for each in found] == [(5.0, 7.0), (12.0, 28.0)]
    assert [each["span"] for each in found] == [pytest.approx(7.0 / 5.0), pytest.approx(28.0 / 12.0)]


def claims_of(script: Any, kind: str, record: dict[str, Any]) -> list[Claim]:
    common = {"device": "a", "samples": f"adaptive/{kind}.json", "git": "b", "date": "2026-01-01"}
    return [Claim.model_validate(each | common) for each in getattr(script("record"), kind)(record)]


def test_seeds_become_one_record_and_the_worst_counts(tmp_path: Path, script: Any) -> None:
    folders = [str(folder(tmp_path, seed, share)) for seed, share in enumerate((0.93, 0.91))]
    out = tmp_path / "trained.json"
    assert script("trained").main([*folders, "--out", str(out)]) == 0
    assert "/of/" not in out.read_text()
    (claim,) = claims_of(script, "trained", json.loads(out.read_text()))
    assert (claim.value, claim.met) == (91.0, True)
    assert claim.baseline == "from the question alone: 21.0 %"


def test_measured_plans_become_one_record(tmp_path: Path, study: Path, profile: Path, script: Any) -> None:
    out = tmp_path / "spans.json"
    asked = ["--study", str(study), "--profile", str(profile), "--out", str(out)]
    assert script("spans").main(asked) == 0
    record = json.loads(out.read_text())
    assert record["spans"] == []
    record["spans"] = [{"batch": 1, "load": 0.0, "span": 3.0}, {"batch": 8, "load": 0.7, "span": 4.25}]
    assert [each["id"] for each in record["plans"]] == ["a", "b", "c", "d"]
    assert [each["pareto"] for each in record["plans"]] == [True, False, True, True]
    assert (record["pareto_plans"], record["span"]) == (3, 3.0)
    span, count = claims_of(script, "spans", record)
    # Three plans are too few.
    assert [(each.value, each.met) for each in (span, count)] == [(3.0, True), (3, False)]
    assert span.claim.endswith("; 8 at a time, load 0.7: 4.25x")


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
    found = list(script("record").study({"policies": policies, "compared": compared}))
    assert [(each["value"], each["met"]) for each in found] == [(1.0, True), (-2.0, False)]
    assert "better" in found[0]["claim"] and "worse" in found[1]["claim"]
    for kind, end in (("cpu", "table-cpu"), ("cuda", "table")):
        record = {"policies": policies, "compared": compared, "environment": {"device": {"kind": kind}}}
        assert next(script("record").KINDS["study"](record))["id"] == f"adaptive/5-lookup-{end}"
