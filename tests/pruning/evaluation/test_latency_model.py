"""The cost model: what it predicts, what it refuses, and that gates learn to keep a budget by it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.evaluation.latency_model import LatencyModel, fit, over_budget
from sparseflow.pruning.evaluation.profile import dense
from sparseflow.pruning.training.train import train
from tests.pruning.small import quick

EVEN = dict.fromkeys(("outside", "block", "linear", "attention", "perceptron"), 2.0)
"""Each term is 2 ms of a dense model's 10."""


def cost_of(**changes: float) -> LatencyModel:
    config = asdict(quick().make(8, 1).config)
    return LatencyModel(
        model=config, batch=1, coefficients=EVEN | changes, dense_ms=10.0, error=0.0, environment={}
    )


def test_a_dense_model_takes_the_sum_and_a_compact_one_its_shares() -> None:
    settings = quick(ast={"stages": {"0": 0.5}, "keep": {}})
    model = settings.make(8, 1)
    assert float(cost_of().predict(dense(model))) == pytest.approx(10.0)
    # Half of the tokens: a quarter of attention's products, half of what is linear in them.
    assert float(cost_of().predict(compact(model))) == pytest.approx(2 + 2 + 1 + 0.5 + 1)


def test_gates_count_as_what_they_will_leave() -> None:
    model = quick(ast={"stages": {}, "keep": {"head": 0.5, "block": 0.5}}).make(8, 1)
    assert model.gates is not None
    with torch.no_grad():
        model.gates.logits["head"].fill_(0.0)
        model.gates.logits["block"].copy_(torch.tensor([40.0, -40.0]))
    # One block of two is left; of its heads, half.
    assert cost_of().predict(model).item() == pytest.approx(2 + 1 + 0.5 + 0.5 + 1, rel=1e-4)
    loss = over_budget(cost_of(), model, 0.25)
    assert loss.item() == pytest.approx(1.0, rel=1e-3)
    loss.backward()
    assert all(each.grad is not None and bool((each.grad >= 0).all()) for each in model.gates.parameters())
    assert over_budget(cost_of(), model, 0.6).item() == 0.0


def test_it_is_fitted_to_what_is_measured() -> None:
    found = fit(quick().make(8, 1), models=8, rounds=2)
    assert set(found.coefficients) == set(EVEN) and min(found.coefficients.values()) >= 0.0
    assert found.dense_ms > 0.0 and found.error >= 0.0
    with pytest.raises(InputError, match="at least 8"):
        fit(quick().make(8, 1), models=7)


def test_a_file_of_it(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    cost_of().save(file)
    assert LatencyModel.load(file) == cost_of()
    with pytest.raises(InputError, match="profile --fit"):
        LatencyModel.load(tmp_path / "none.json")
    file.write_text(json.dumps(asdict(cost_of()) | {"coefficients": {"block": 1.0}}))
    with pytest.raises(FileFormatError, match="its coefficients"):
        LatencyModel.load(file)
    other = replace(cost_of(), model=cost_of().model | {"depth": 3})
    with pytest.raises(InputError, match="other depth: fit one"):
        other.predict(quick().make(8, 1))


def test_a_training_keeps_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody looks at the page, which takes longer than the training.
    monkeypatch.setattr("sparseflow.pruning.training.train.write_page", lambda *_: None)
    cost_of().save(tmp_path / "cost.json")
    settings = quick(
        mode="ast+latency",
        ast={"stages": {"1": 0.5}, "keep": {"head": 1.0, "channel": 1.0}, "strength": 0.0, "gate_init": 0.8},
        latency={"model": str(tmp_path / "cost.json"), "budget": 0.6, "weight": 50.0},
        train={"epochs": 6, "gate_rate": 100.0},
    )
    train(settings, tmp_path / "run")
    over = [row["over_budget"] for row in read_history(tmp_path / "run") if row["kind"] == "train"]
    assert over[0] > 0.001 and over[-1] < 0.1 * over[0]
