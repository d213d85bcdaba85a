"""What a study found, in one JSON file: every number that its page shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.predictor.validation import check, enough
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.adaptive.profile.plan_quality import PlanQuality, pareto
from sparseflow.adaptive.study.comparison import PolicyComparison, verdict
from sparseflow.adaptive.study.latencies import LatencySamples, RequestSize, latencies
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.core.files import write_atomic
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import FileFormatError, InputError

FILE = "judged.json"
_FORMAT = "sparseflow-adaptive-judged-1"


def of_contest(
    profile: PlanProfile, tables: StudyTables, found: PolicyComparison, *, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What a contest, its tables and its profile tell.

    Args:
        profile: That latencies are from.
        tables: That policies were judged on.
        found: How they did.
        about: What else the file says, such as the environment.
    """
    compared = [each.to_dict() for each in found.compared]
    test = tables.test
    accuracy = test.correct.mean(0).tolist()
    told = _of_plans(profile, accuracy, tables.latency, tables.size)
    for row in told["plans"]:
        if row["front"]:
            right = test.correct[:, row["number"]]
            row["low"], row["high"] = bootstrap_mean(right.numpy(), test.groups)
            row["by_kind"] = {kind: float(right[which].mean()) for kind, which in tables.kinds.items()}
    samples = {name: len(getattr(tables, name)) for name in ("train", "validation", "test")}
    return {
        "format": _FORMAT, **told, "samples": samples, "attainment": found.attainment,
        "budgets_ms": found.budgets_ms.tolist(), "policies": [each.to_dict() for each in found.judged],
        "compared": compared, "verdict": verdict(compared), **about,
    }  # fmt: skip


def of_worth(profile: PlanProfile, worth: PlanQuality, *, size: RequestSize | None = None) -> dict[str, Any]:
    """What a profile and the worth of its plans tell, without any requests.

    Args:
        profile: That latencies are from.
        worth: How good its plans are.
        size: Of the request that latencies are of; by default the shortest that was measured.

    Raises:
        InputError: The worth is of other plans, or the profile has too little.
    """
    if worth.space != profile.space:
        raise InputError("worth and profile are of different plans; judge the plans of this profile")
    if size is None:
        timed = [visit for visit in profile.timed if visit.batch == 1]
        if not timed:
            raise InputError("the profile measured no request alone, with batch 1; profile some")
        size = min(RequestSize(visit.text_tokens, 1 + len(visit.steps_ms)) for visit in timed)
    told = _of_plans(profile, worth.accuracy, latencies(profile, [size]), size)
    return {"format": _FORMAT, **told, "samples": {"worth": worth.samples}, "model_id": worth.model_id}


def write(folder: Path | str, found: Mapping[str, Any]) -> Path:
    """Write `judged.json` into a folder, in place of what is there; gives its path.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(folder) / FILE
    write_atomic(path, json.dumps(found, allow_nan=False) + "\n")
    return path


def read(folder: Path | str) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        InputError: There is no such file.
        FileFormatError: It holds something else.
    """
    path = Path(folder) / FILE
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is not there; `sparseflow adaptive train` and `eval` write it") from error
    except (ValueError, OSError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise FileFormatError(f"{path} holds no findings of this version of SparseFlow")
    return found


def _of_plans(
    profile: PlanProfile, accuracy: Sequence[float], latency: LatencySamples, size: RequestSize
) -> dict[str, Any]:
    """Plans with their latency and accuracy, which of them are best, and whether the predictor is right."""
    samples = latency.ms[0].astype(float)
    plans, medians = profile.space.plans, np.median(samples, axis=1).tolist()
    front = pareto(plans, medians, accuracy, most=max(2, len(plans)))
    rows = [
        _row(number, plan, samples[number], accuracy[number], bool(latency.measured[number]), front)
        for number, plan in enumerate(plans)
    ]
    return {
        "plans": rows, "size": {"text_tokens": size.text_tokens, "new_tokens": size.new_tokens},
        "load": latency.load,
        "depth": profile.space.geometry.depth, "device": dict(profile.about.device),
        "how": dict(profile.about.how),
        "predictor": check(profile).to_dict() if enough(profile) else None,
    }  # fmt: skip


def _row(
    number: int, plan: Plan, samples_ms: np.ndarray, accuracy: float, measured: bool, front: Sequence[Plan]
) -> dict[str, Any]:
    """A plan; every sample of those that are best or were measured, and quantiles of all."""
    low, middle, high = np.quantile(samples_ms, (0.05, 0.5, 0.95)).tolist()
    row = {
        "number": number, "plan": plan.to_dict(), "id": plan.id, "accuracy": accuracy, "measured": measured,
        "front": plan in front, "p5_ms": low, "p50_ms": middle, "p95_ms": high,
    }  # fmt: skip
    return row | ({"samples_ms": samples_ms.tolist()} if plan in front or measured else {})
