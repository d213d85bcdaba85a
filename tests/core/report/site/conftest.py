"""Runs, pages and claims that sites are built from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparseflow.core.report import Page
from sparseflow.core.run import Run

HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Environment of the runs of a test; tests may change it between runs."""
    values: dict[str, Any] = {"device": {"name": "a CPU"}, "git": "1111", "seed": 0, "load_average": [0.5]}
    monkeypatch.setattr("sparseflow.core.run.collect_environment", lambda device, seed: dict(values))
    return values


@pytest.fixture
def write_run(environment: dict[str, Any]) -> Callable[..., Run]:
    """Function that writes a run whose rounds take `factor` times as long, with or without a page."""

    seconds = itertools.count()

    def write(
        root: Path,
        factor: float = 1.0,
        *,
        command: str = "sparseflow demo",
        page: bool = True,
        rounds: int = 8,
    ) -> Run:
        with Run.start(root, command, {"rounds": rounds, "factor": factor}) as run:
            # Runs of a test start in the same second.
            run.info["started"] = f"2026-11-26T10:00:{next(seconds):02d}+00:00"
            for index in range(rounds):
                for candidate, time_ms in (("dense", 2.0), ("optimized", factor)):
                    row = {
                        "round": index,
                        "candidate": candidate,
                        "latency_ms": time_ms * (1 + index % 3 / 100),
                    }
                    run.append(row)
            if page:
                report = Page("A demo", reproduce=f"{command} --rounds {rounds}")
                report.headline(f"{2.0 / factor:.2f}×", "faster than dense")
                report.section("Samples")
                report.samples("All", {"optimized": [factor, 2 * factor]})
                report.table("Layers", [{"layer": HOSTILE}])
                report.write(run.path / "report.html")
        return run

    return write


@pytest.fixture
def claims_dir(tmp_path: Path) -> Path:
    """Directory of claims of two wings, one of which misses a target."""
    directory = tmp_path / "results"
    claim = {
        "id": "spiking/1-speedup",
        "claim": "Speedup of the shipped network.",
        "value": 3.2,
        "unit": "x",
        "target": ">= 1.5",
        "met": True,
        "baseline": "dense",
        "device": "another CPU",
        "command": "sparseflow demo --json",
        "samples": "spiking/demo.json",
        "git": "aaaa",
        "date": "2026-01-02",
        "details": {"low": 3.0, "high": 3.4, "images": 256},
    }
    lost = claim | {
        "id": "tuning/1-speedup",
        "claim": "Speedup of a tuned kernel.",
        "value": 0.8,
        "met": False,
        "command": "python benchmarks/tuning.py",
        "details": {},
    }
    for item in (claim, lost):
        wing = directory / item["id"].split("/")[0]
        wing.mkdir(parents=True)
        (wing / "claims.json").write_text(json.dumps([item]))
    record = {"environment": {"device": {"name": "another CPU"}, "seed": 0}}
    (directory / "spiking" / "demo.json").write_text(json.dumps(record))
    return directory
