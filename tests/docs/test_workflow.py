"""The workflow of `examples/` is valid YAML and calls the command with options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import typer

from sparseflow.cli import root
from sparseflow.core.config import read_config_file

WORKFLOW = Path(__file__).parents[2] / "examples" / "latency-check.yml"


def test_workflow_uses_existing_options() -> None:
    steps = read_config_file(WORKFLOW, extra="latency")["jobs"]["check"]["steps"]
    script = next(step["run"] for step in steps if step.get("name") == "Check")
    used = set(re.findall(r"(--[a-z-]+)", script))
    group = root._import_command("latency")
    command = group.get_command(typer.Context(group), "check")
    assert used and used <= {option for parameter in command.params for option in parameter.opts}
