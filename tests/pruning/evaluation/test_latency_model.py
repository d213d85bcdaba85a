"""Latency model: predictions, errors, and training with a budget."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.evaluation.latency_model import (
    VideoViTLatencyModel,
    compute_budget_loss,
    fit_latency_model,
)
from sparseflow.pruning.evaluation.profile import make_dense
from sparseflow.pruning.training.train import train
from tests.conformance import check_artifact_file
from tests.pruning.small import quick

EVEN = dict.fromkeys(("outside", "block", "linear", "attention", "mlp"), 2.0)
"""Each term is 2 ms of the dense model's 10 ms."""


def cost_of(**changes: float) -> VideoViTLatencyModel:
    config = asdict(quick().build_model(8, 1).config)
    return VideoViTLatencyModel(
        model=config, batch_size=1, coefficients=EVEN | changes, dense_ms=10.0, error=0.0, environment={}
    )


def test_predict_scales_terms_by_kept_share() -> None:
    settings = quick(ast={"stages": {"0": 0.5}, "keep": {}})
    model = settings.build_model(8, 1)
    assert float(cost_of().predict(make_dense(model))) == pytest.approx(10.0)
    # With half of the tokens attention products cost a quarter, linear terms a half.
    assert float(cost_of().predict(compact(model))) == pytest.approx(2 + 2 + 1 + 0.5 + 1)


def test_predict_uses_soft_gates() -> None:
    model = quick(ast={"stages": {}, "keep": {"head": 0.5, "block": 0.5}}).build_model(8, 1)
    assert model.gates is not None
    with torch.no_grad():
        model.gates.logits["head"].fill_(0.0)
        model.gates.logits["block"].copy_(torch.tensor([40.0, -40.0]))
    # One of two blocks remains, with half of its heads.
    assert cost_of().predict(model).item() == pytest.approx(2 + 1 + 0.5 + 0.5 + 1, rel=1e-4)
    loss = compute_budget_loss(cost_of(), model, 0.25)
    assert loss.item() == pytest.approx(1.0, rel=1e-3)
    loss.backward()
    assert all(
        logits.grad is not None and bool((logits.grad >= 0).all()) for logits in model.gates.parameters()
    )
    assert compute_budget_loss(cost_of(), model, 0.6).item() == 0.0


def test_fit_gives_non_negative_coefficients() -> None:
    latency_model = fit_latency_model(quick().build_model(8, 1), num_models=8, rounds=2)
    assert set(latency_model.coefficients) == set(EVEN) and min(latency_model.coefficients.values()) >= 0.0
    assert latency_model.dense_ms > 0.0 and latency_model.error >= 0.0
    with pytest.raises(InputError, match=r"`num_models` .*7"):
        fit_latency_model(quick().build_model(8, 1), num_models=7)


def test_file_conforms_to_artifacts(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost_of().save(path)
    assert VideoViTLatencyModel.load(path) == cost_of()
    check_artifact_file(VideoViTLatencyModel.load, path, VideoViTLatencyModel.HINT)
    path.write_text(json.dumps(cost_of().to_dict() | {"coefficients": {"block": 1.0}}))
    with pytest.raises(FileFormatError, match="coefficients"):
        VideoViTLatencyModel.load(path)


def test_predict_of_another_architecture_raises() -> None:
    other = cost_of().model_copy(update={"model": cost_of().model | {"depth": 3}})
    with pytest.raises(InputError, match="depth"):
        other.predict(quick().build_model(8, 1))


@pytest.mark.usefixtures("no_page")
def test_training_with_budget_reduces_predicted_latency(tmp_path: Path) -> None:
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
