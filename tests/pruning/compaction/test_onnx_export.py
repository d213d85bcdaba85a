"""Compact models as ONNX files."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from sparseflow.latency import analyze
from sparseflow.pruning import compact
from tests.pruning.models import awake, clips

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("selector", ["ast", "attention", "uniform"])
def test_exported_model_has_same_logits_and_is_analyzed(selector: str, tmp_path: Path) -> None:
    model, path = compact(awake({"stages": {1: 0.5}, "selector": selector})), tmp_path / "model.onnx"
    samples = clips(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about checks of shapes
        torch.onnx.export(torch.nn.Sequential(model), (samples,), path, input_names=["clip"], dynamo=False)
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"clip": samples.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, model(samples).numpy(), rtol=1e-4, atol=1e-4)
    assert analyze(path).count_ops()
