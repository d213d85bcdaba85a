"""Reports: the work of plans, and which of them no other beats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.grid_vqa.config import KINDS
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import build_vqa_model
from sparseflow.adaptive.grid_vqa.report import (
    count_multiply_adds,
    load_report,
    make_report,
    save_report,
)
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import FileFormatError
from tests.adaptive.grid_vqa.little import bank, quick

DATA = VqaDataset(quick(), bank=bank())
PLAN = Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 2, 3))


def test_work_is_that_of_the_matrices() -> None:
    config = DATA.config.model
    torch.manual_seed(0)
    model = build_vqa_model(DATA.config, DATA.vocabulary)
    counted = [0]

    def count(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Linear):
            counted[0] += output.numel() * module.in_features
        elif isinstance(module, torch.nn.Conv2d):
            counted[0] += output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(count)
    sample = next(DATA.iterate_samples("test", 1))
    with torch.no_grad():
        model(**sample.inputs, logits_to_keep=1)
    length, text = sample.inputs["input_ids"].shape[1], sample.inputs["input_ids"].shape[1] - 57
    linear = counted[0] - 16 * len(DATA.vocabulary)
    # What no hook sees: experts, routers and the products of attention.
    experts = 4 * length * (3 * 3 * 16 * 8 + 4 * 16)
    attention = 4 * length * length * 16 + 14 * 4 * 2 * 4 * 16
    assert count_multiply_adds(config, PLAN, text) == linear + experts + attention


def test_every_knob_saves_work() -> None:
    config = DATA.config.model
    full = count_multiply_adds(config, PLAN, 10)
    for less in (
        Plan(tier="medium", insertion_position=1, top_k=3, blocks=(0, 1, 2, 3)),
        Plan(tier="high", insertion_position=1, top_k=2, blocks=(0, 1, 2, 3)),
        Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 3)),
    ):
        assert count_multiply_adds(config, less, 10) < full
    later = Plan(tier="high", insertion_position=2, top_k=2, blocks=(0, 1, 2, 3))
    assert (
        count_multiply_adds(config, Plan(tier="high", insertion_position=1, top_k=2, blocks=(0, 1, 2, 3)), 10)
        < count_multiply_adds(config, later, 10)
        < full
    )


def test_a_report_holds_what_was_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = make_report(build_vqa_model(DATA.config, DATA.vocabulary), DATA)
    assert (report["samples"], report["plan_samples"]) == (12, 12) and set(report["by_kind"]) <= set(KINDS)
    assert report["names"] == ["cat", "one", "two", "dog"]
    rows = {row["plan"]: row for row in report["plans"]}
    assert rows[PLAN.id]["accuracy"] == report["accuracy"]
    assert report["pareto_plans"] == sum(row["pareto"] for row in rows.values()) >= 1
    assert report["blind"]["chance"] > 0.0 and len(report["importance"]) == 4
    subset = VqaDataset(quick(plan_samples=5), bank=bank())
    other = make_report(build_vqa_model(subset.config, subset.vocabulary), subset)
    assert (other["samples"], other["plan_samples"]) == (12, 5)
    assert all(5 * row["accuracy"] == round(5 * row["accuracy"]) for row in other["plans"])
    assert load_report(tmp_path) is None
    save_report(tmp_path, report)
    assert load_report(tmp_path) == report
    for torn in ("{", "[]", "{}"):
        (tmp_path / "report.json").write_text(torn)
        with pytest.raises(FileFormatError, match="report"):
            load_report(tmp_path)
