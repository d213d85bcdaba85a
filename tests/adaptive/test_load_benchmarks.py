"""Tests of the benchmark scripts with small models: complete records and correct statistics."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("fastapi")
pytest.importorskip("PIL")

from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.adaptive.study.results import save_results
from sparseflow.cli.root import run
from tests.adaptive.grid_vqa.little import quick, untrained


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An untrained Grid-VQA model and its predictor."""
    root = tmp_path_factory.mktemp("served")
    untrained(root / "model", quick(**{"images.digits": True}))
    options = [
        "--num-plans", "6", "--num-text-plans", "0", "--text-tokens", "8", "--text-tokens", "16",
        "--rounds", "1", "--decode-steps", "2", "--max-batch-size", "4", "--load", "0",
    ]  # fmt: skip
    assert (
        run(["adaptive", "profile", str(root / "model"), *options, "--out", str(root / "profile.parquet")])
        == 0
    )
    return root / "model", root / "predictor.json"


def test_server_benchmark_answers_equal_sequential_runs(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    out = tmp_path / "server.json"
    options = ["--requests", "12", "--clients", "4", "--plans", "6", "--depth", "4", "--out", str(out)]
    assert script("server").main(options) == 0
    record = json.loads(out.read_text())
    assert (record["equal"], record["streamed"], record["with_image"]) == (12, 6, 6)
    assert record["texts"] > 6 and len({sample["plan"] for sample in record["samples"]}) > 3
    pieces = [sample["pieces"] for sample in record["samples"] if sample["stream"] and sample["tokens"] > 4]
    # A delayed client may receive an answer in one piece.
    assert min(pieces) >= 1 and statistics.median(pieces) > 1


@pytest.mark.parametrize("http_options", [[], ["--http"]], ids=["direct", "HTTP"])
def test_load_benchmark_records_all_requests(
    script: Any, served: tuple[Path, Path], tmp_path: Path, http_options: list[str]
) -> None:
    import pyarrow.parquet as pq

    model, predictor = served
    out = tmp_path / "load.json"
    options = [
        "--requests",
        "30",
        "--warmup",
        "12",
        "--step-s",
        "0.5",
        "--questions",
        "4",
        "--new-tokens",
        "4",
    ]
    load = script("load")
    # Large budgets, so that a server with a high correction does not refuse all requests.
    options += ["--plans", "3", "--max-budget-ratio", "50", "--out", str(out)]
    assert load.main([str(model), "--profile", str(predictor), *options, *http_options]) == 0
    record = json.loads(out.read_text())
    assert record["steady"]["requests"] == 30 and record["capacity_per_s"] > 0.0
    rows = pq.read_table(out.with_suffix(".parquet")).to_pylist()
    assert len(rows) == 30 + record["step"]["requests"]
    answered = [row for row in rows if row["outcome"] == "answered"]
    assert answered and all(row["measured_ms"] > 0.0 and row["plan"] for row in answered)
    assert {row["right"] for row in answered} <= {0.0, 1.0}
    assert record["steady"]["failed"] == record["step"]["failed"] == 0
    assert record["samples"] == "load.parquet" and not record["settings"]["model"].startswith("/")


def test_resolve_settings_paths_keep_names_only(script: Any) -> None:
    args = Namespace(model=Path("/a/b"), archives=[Path("/c/d.tar.gz")], out=Path("x"), load=0.7)
    settings = script("load").resolve_settings(args)
    assert json.loads(json.dumps(settings)) == {"model": "b", "archives": ["d.tar.gz"], "load": 0.7}


def test_summarize_counts_outcomes(script: Any) -> None:
    load = script("load")

    def make_record(outcome: str, measured_ms: float = math.nan, **fields: Any) -> Any:
        base: dict[str, Any] = {"phase": 0, "due_s": 0.0, "ended_s": 1.0, "budget_ms": 10.0}
        return load.RequestRecord(**base | {"outcome": outcome, "measured_ms": measured_ms} | fields)

    requests = [
        make_record("answered", 5.0, p99_ms=6.0, right=1.0),
        make_record("answered", 11.0, p99_ms=6.0, right=0.0),
        make_record("overloaded", retry=True),
        make_record("budget_infeasible"),
        make_record("engine_failed"),
    ]
    summary = load.summarize(requests, 2.0, 1.0)
    assert summary["attainment"]["share"] == pytest.approx(1 / 3), "failed requests were admitted"
    assert summary["attainment_of_all"]["share"] == 0.2 and summary["attainment_of_feasible"]["share"] == 0.25
    assert (summary["shed_share"], summary["infeasible_share"], summary["goodput_per_s"]) == (0.2, 0.2, 0.5)
    assert (summary["utilisation"], summary["accuracy"], summary["below_p99"]["share"]) == (0.5, 0.5, 0.5)
    assert summary["failed"] == 1
    assert load.estimate_share(0, 0)["of"] == 0
    low, high = (load.estimate_share(99, 100)[name] for name in ("low", "high"))
    assert 0.94 < low < 0.99 < high < 1.0


def test_send_segments_failed_request_is_one_outcome(script: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    load = script("load")
    answer = {
        "text": "2", "plan": {"id": "some"}, "predicted_ms": None, "measured_ms": 3.0,
    }  # fmt: skip
    responses = iter([OSError("reset"), answer, json.JSONDecodeError("no", "", 0), {"text": "partial"}])

    async def send_request(content: bytes, due_s: float) -> Any:
        response = next(responses)
        if isinstance(response, Exception):
            raise response
        return response

    question = load.Question(content=[], answer="2", new_tokens=3, budgets_ms=(5.0, 6.0))
    service = SimpleNamespace(model="m", backend=object.__new__(load.EngineBackend))
    service.backend._engine = SimpleNamespace(busy_s=0.0)
    generator = load.LoadGenerator(SimpleNamespace(seed=0), service, send_request, [question])
    asyncio.run(generator.send_segments(load.Segment(phase=0, rate=1e3, count=4)))
    assert sorted(record.outcome for record in generator.sent) == [
        "answered", "error: JSONDecodeError", "error: KeyError", "error: OSError"
    ]  # fmt: skip
    assert load.summarize(generator.sent, 1.0, 0.5)["failed"] == 3
    for records in (generator.sent, []):
        load.write_samples(tmp_path / "s.parquet", records)
        table = pq.read_table(tmp_path / "s.parquet")
        assert table.num_rows == len(records) and table.column_names[:2] == ["phase", "due_s"]


def test_replace_non_finite_empty_summary_has_null(script: Any) -> None:
    load = script("load")
    summary = load.replace_non_finite(load.summarize([], 1.0, 0.0))
    assert summary["attainment"]["share"] is None and summary["p99_ms"] is None
    json.dumps(summary, allow_nan=False)


def test_measure_recovery_last_window_below_target_counts(script: Any) -> None:
    load = script("load")
    latencies = [(0.1 * index, 12.0 if 11 <= index < 20 else 8.0) for index in range(100)]
    requests = [
        load.RequestRecord(
            phase=1, due_s=ended, ended_s=ended, budget_ms=10.0, outcome="answered", measured_ms=measured
        )
        for ended, measured in latencies
    ]
    refused = load.RequestRecord(phase=1, due_s=0, ended_s=0, budget_ms=1, outcome="overloaded")
    recovery = load.measure_recovery([*requests, refused])
    # The last late request ended at 1.9 s and is in windows that end before 2.9 s.
    assert recovery["back_after_s"] == pytest.approx(2.75, abs=0.01)
    assert recovery["refused"] == 1 and recovery["refused_rightly"]["share"] == 0.0
    assert recovery["track"][0][1] == 1.0 and recovery["track"][-1][1] == 1.0


def test_overhead_benchmark_records_pairs(script: Any, tmp_path: Path) -> None:
    overhead = script("overhead")
    out = tmp_path / "overhead.json"
    options = ["--pairs", "4", "--warmup", "1", "--plans", "2", "--new-tokens", "3", "--text-tokens", "8"]
    assert overhead.main(["--geometry", "least", "--max-tokens", "96", *options, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [len(case["samples"]) for case in record["cases"]] == [4, 4]
    assert record["columns"] == ["given_ms", "decided_ms", "given_again_ms", "decide_ms"]
    assert all(len(samples) == 4 for samples in record["host"]["samples_us"].values())
    assert all(0.0 < row[3] < row[1] for case in record["cases"] for row in case["samples"])
    (claim,) = overhead.make_claims(record)
    assert claim.id == "adaptive/6-deciding-least-cpu" and "--geometry least" in claim.command
    estimate, low, high = overhead.estimate_ratio(np.full(50, 1.1), np.full(50, 1.0), 0)
    assert (estimate, low, high) == pytest.approx((0.1, 0.1, 0.1))


@pytest.mark.parametrize("runner", ["engine", "eager"])
def test_predictor_benchmark_evaluates_requests(
    script: Any, tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgboost")
    import pyarrow.parquet as pq

    # The accuracy of the load depends on other processes of the machine.
    for name in ("_TARGET_ERROR", "_MAX_ERROR"):
        monkeypatch.setattr(f"sparseflow.adaptive.profile.background_traffic.{name}", float("inf"))
    out = tmp_path / "predictor.json"
    size = ["--geometry", "least", "--max-tokens", "96", "--max-batch", "3", "--runner", runner]
    # The eager runner makes its load with processes, which are too slow for a test; 0 needs none.
    loads = ["--loads", "0", "0.5"] if runner == "engine" else ["--loads", "0"]
    profile_options = [
        "--plans",
        "6",
        "--buckets",
        "6",
        "12",
        "--lengths",
        "9",
        "--repeats",
        "1",
        "--steps",
        "2",
    ]
    evaluation_options = ["--requests", "3", "--runs", "2", "--settle-s", "1"]
    assert (
        script("predictor").main([*size, *profile_options, *loads, *evaluation_options, "--out", str(out)])
        == 0
    )
    record = json.loads(out.read_text())
    assert [row["load"] for row in record["loads"]] == [float(load) for load in loads[1:]]
    samples = pq.read_table(out.with_suffix(".parquet")).to_pylist()
    assert all(row["requests"] == 6 for row in record["loads"])
    assert len(samples) == 6 * len(loads[1:]) and min(sample["learning_p99_ms"] for sample in samples) > 0.0
    assert record["profile"]["visits"] == 6 * 2 * (2 * 2 if runner == "engine" else 1)
    assert len(record["boosting"]) == len(record["loads"])


def test_predictor_benchmark_existing_profile_sets_options(
    script: Any, served: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("xgboost")
    model, predictor = served
    out = tmp_path / "predictor.json"
    model_options = ["--model", str(model), "--profile", str(predictor.with_name("profile.parquet"))]
    evaluation_options = ["--requests", "3", "--runs", "2", "--out", str(out)]
    assert script("predictor").main([*model_options, *evaluation_options]) == 0
    record = json.loads(out.read_text())
    assert [row["load"] for row in record["loads"]] == [0.0]
    settings = record["settings"]
    assert (settings["buckets"], settings["lengths"]) == ([8, 16], [12])
    assert (settings["steps"], settings["max_batch"]) == (2, 4)
    assert record["profile"]["plans"] == 6 and record["profile"]["visits"] == 6 * 2 * 2
    evaluated = {request["plan"] for request in record["requests"]}
    profile = PlanProfile.load(predictor.with_name("profile.parquet"))
    profiled = {measurement.plan.id for measurement in profile.measurements}
    assert len(evaluated) == 3 and not evaluated & profiled
    other = ["--geometry", "least", "--max-tokens", "96", "--out", str(tmp_path / "other.json")]
    with pytest.raises(SystemExit):
        script("predictor").main([*other, *model_options[2:]])


def test_spans_benchmark_measures_front_and_full_plan(
    script: Any, served: tuple[Path, Path], tmp_path: Path
) -> None:
    model, predictor = served
    plans = PlanLatencyPredictor.load(predictor).metadata.space.plans
    rows = [
        {
            "plan": plan.to_dict(), "id": plan.id, "front": index < 5, "p50_ms": 1.0 + index,
            "accuracy": (1 + index) / 8,
        }
        for index, plan in enumerate(plans[:7])
    ]  # fmt: skip
    size = {"text_tokens": 8, "new_tokens": 2}
    save_results(tmp_path, {"plans": rows, "samples": {"test": 8}, "size": size})
    out = tmp_path / "spans.json"
    options = ["--plans", "3", "--sequential", "4", "--requests", "8", "--max-batch", "2"]
    argv = ["--model", str(model), "--study", str(tmp_path), "--out", str(out), *options]
    assert script("spans").main(argv) == 0
    record = json.loads(out.read_text())
    ids = [row["id"] for row in record["plans"]]
    # Both ends and the middle of the front, and the full plan.
    assert len(ids) == 4 and {rows[0]["id"], rows[4]["id"]} < set(ids)
    assert all(len(row["alone_ms"]) == 4 and len(row["at_rate_ms"]) == 8 for row in record["plans"])
    assert record["rate_per_s"] == pytest.approx(0.7 * record["capacity_per_s"])
    assert all(record[name]["span"] >= 1.0 for name in ("alone", "at_rate", "at_rate_p95"))
    with pytest.raises(SystemExit):
        script("spans").main(argv[2:])
