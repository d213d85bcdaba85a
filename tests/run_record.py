"""Record of a test run: device, versions, revision and outcome."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_json

OUTCOMES = ("passed", "failed", "error", "skipped")


def write_record(directory: Path, reporter: pytest.TerminalReporter) -> Path:
    """Write the outcome of a finished run and return the file, which is named after the device.

    The record holds the environment with the versions of packages, the number of tests by outcome, the names
    of failed tests, and how many tests each reason skipped.
    """
    environment = collect_environment("cuda:0" if torch.cuda.is_available() else "cpu")
    stats = reporter.stats
    skipped: Counter[str] = Counter(report.longrepr[2] for report in stats.get("skipped", []))
    content = {
        "environment": environment,
        "duration_s": round(time.time() - reporter._session_start.time, 1),
        "tests": {name: len(stats.get(name, [])) for name in OUTCOMES},
        "failed": sorted(report.nodeid for name in ("failed", "error") for report in stats.get(name, [])),
        "skip_reasons": dict(skipped.most_common()),
    }
    device = re.sub(r"[^a-z0-9]+", "-", environment["device"]["name"].lower()).strip("-")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{device}.json"
    write_json(path, content, indent=1)
    return path
