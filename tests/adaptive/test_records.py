"""Records of trained models and studies, and the claims that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

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


def test_seeds_and_measured_plans_become_one_record(tmp_path: Path, study: Path, script: Any) -> None:
    folders = [str(folder(tmp_path, seed, share)) for seed, share in enumerate((0.93, 0.91))]
    out = tmp_path / "trained.json"
    assert script("trained").main([*folders, "--study", str(study), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [each["id"] for each in record["plans"]] == ["a", "b", "c", "d"]
    assert [each["pareto"] for each in record["plans"]] == [True, False, True, True]
    assert (record["pareto_plans"], record["span"]) == (3, 3.0)
    assert "/of/" not in out.read_text()
    common = {"device": "a", "samples": "adaptive/trained.json", "git": "b", "date": "2026-01-01"}
    claims = [Claim.model_validate(each | common) for each in script("record").trained(record)]
    # The worst seed counts; three plans are too few.
    assert [(each.value, each.met) for each in claims] == [(91.0, True), (3.0, True), (3, False)]
    assert claims[0].baseline == "from the question alone: 21.0 %"


def test_trainings_that_differ_are_refused(tmp_path: Path, study: Path, script: Any) -> None:
    folders = [str(folder(tmp_path, 0, 0.9)), str(folder(tmp_path, 1, 0.9, steps=20))]
    asked = ["--study", str(study), "--out", str(tmp_path / "out.json")]
    with pytest.raises(InputError, match="more than their seeds"):
        script("trained").main([*folders, *asked])
    (tmp_path / "seed-1" / "report.json").unlink()
    with pytest.raises(InputError, match="let its training end"):
        script("trained").main([*folders, *asked])


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
