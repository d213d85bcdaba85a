"""Results of a study in one JSON file: every number that its page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.predictor.validation import can_validate, validate
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.adaptive.profile.plan_quality import PlanQuality, select_pareto_plans
from sparseflow.adaptive.study.comparison import PolicyComparison, summarize_gains
from sparseflow.adaptive.study.latencies import LatencySamples, RequestSize, sample_latencies
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.core.artifact import Artifact
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import InputError

RESULTS_FILE = "results.json"


class _ResultsFile(Artifact, extra="allow"):
    FORMAT: ClassVar[str] = "sparseflow.adaptive.study-results"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "make it with `sparseflow adaptive train` or `sparseflow adaptive eval`"

    plans: list[dict[str, Any]]


def make_study_results(
    profile: PlanProfile, tables: StudyTables, comparison: PolicyComparison, *, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Collect the results of a comparison of policies.

    Args:
        profile: Profile with the latencies.
        tables: Outcomes on which the policies were evaluated.
        comparison: Evaluations of the policies.
        metadata: Further entries, such as the environment.
    """
    test = tables.test
    results = _make_plan_entries(profile, test.correct.mean(0).tolist(), tables.latency, tables.size)
    for row in results["plans"]:
        if row["front"]:
            correct = test.correct[:, row["number"]]
            row["low"], row["high"] = bootstrap_mean(correct.numpy())
            row["by_kind"] = {kind: float(correct[samples].mean()) for kind, samples in tables.kinds.items()}
    return {
        **results,
        "samples": {name: len(getattr(tables, name)) for name in ("train", "validation", "test")},
        "attainment": comparison.attainment, "budgets_ms": comparison.budgets_ms.tolist(),
        "policies": [evaluation.to_dict() for evaluation in comparison.evaluations],
        "compared": list(comparison.gains), "verdict": summarize_gains(comparison.gains), **metadata,
    }  # fmt: skip


def make_plan_results(profile: PlanProfile, quality: PlanQuality) -> dict[str, Any]:
    """Collect the results of a profile and the quality of its plans, for the smallest measured request.

    Args:
        profile: Profile with the latencies.
        quality: Quality of its plans.

    Raises:
        InputError: The quality is of other plans, or the profile is too small.
    """
    if quality.space != profile.space:
        raise InputError(
            "plan quality and profile are of different plans; evaluate the plans of this profile"
        )
    unbatched = [measurement for measurement in profile.successful if measurement.batch == 1]
    if not unbatched:
        raise InputError("the profile has no request with batch size 1; profile some")
    size = min(RequestSize(m.text_tokens, 1 + len(m.steps_ms)) for m in unbatched)
    results = _make_plan_entries(profile, quality.accuracy, sample_latencies(profile, [size]), size)
    return {**results, "samples": {"plan_quality": quality.samples}, "model_id": quality.model_id}


def save_results(out_dir: Path | str, results: Mapping[str, Any]) -> Path:
    """Write `results.json` into a directory and return its path.

    Raises:
        OSError: The file cannot be written.
    """
    return _ResultsFile(**results).save(Path(out_dir) / RESULTS_FILE)


def load_results(out_dir: Path | str) -> dict[str, Any]:
    """Read what `save_results` wrote.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is foreign, damaged, or of another version.
    """
    return _ResultsFile.load(Path(out_dir) / RESULTS_FILE).model_dump()


def _make_plan_entries(
    profile: PlanProfile, accuracy: Sequence[float], latency: LatencySamples, size: RequestSize
) -> dict[str, Any]:
    """Latency and accuracy of plans, the Pareto front, and the validation of the predictor."""
    samples_ms = latency.ms[0].astype(float)
    plans, median_ms = profile.space.plans, np.median(samples_ms, axis=1).tolist()
    front = select_pareto_plans(plans, median_ms, accuracy, max_plans=max(2, len(plans)))
    rows = [
        _make_plan_row(
            number, plan, samples_ms[number], accuracy[number], bool(latency.measured[number]), plan in front
        )
        for number, plan in enumerate(plans)
    ]
    return {
        "plans": rows, "size": {"text_tokens": size.text_tokens, "new_tokens": size.new_tokens},
        "load": latency.load, "depth": profile.space.geometry.depth,
        "device": dict(profile.metadata.device), "config": dict(profile.metadata.config),
        "predictor": validate(profile).to_dict() if can_validate(profile) else None,
    }  # fmt: skip


def _make_plan_row(
    number: int, plan: Plan, samples_ms: np.ndarray, accuracy: float, measured: bool, on_front: bool
) -> dict[str, Any]:
    """Entry of a plan; samples are kept for plans that are measured or on the front."""
    low, median, high = np.quantile(samples_ms, (0.05, 0.5, 0.95)).tolist()
    row = {
        "number": number, "plan": plan.to_dict(), "id": plan.id, "accuracy": accuracy, "measured": measured,
        "front": on_front, "p5_ms": low, "p50_ms": median, "p95_ms": high,
    }  # fmt: skip
    return row | ({"samples_ms": samples_ms.tolist()} if on_front or measured else {})
