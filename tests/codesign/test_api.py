"""The planning workflow, for models that only describe their layers."""

from __future__ import annotations

from pathlib import Path

from sparseflow import codesign
from tests.codesign.toys import QUICK, Listed, chain, parse_config


def test_plan_design_returns_what_it_saves(tmp_path: Path) -> None:
    settings = parse_config({name: part for name, part in QUICK.items() if name != "task"})
    layers = chain()
    result = codesign.plan_design(settings, Listed(layers), tmp_path)  # type: ignore[arg-type]  # cannot run
    saved = codesign.load_plan(result.plan)
    assert (saved.decision, saved.layers) == (result.decision, list(result.layers)) and result.page.is_file()
    cost = result.hardware.evaluate_cost(layers, result.decision)
    assert result.metrics["latency_ms"] == cost.stats.total_latency_ms > 0.0
    assert result.metrics["chips"] == sum(chip is not None for chip in result.decision.chips)
