"""The quick start on a machine whose other work prevents a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import RunError
from sparseflow.latency import quickstart
from sparseflow.latency.measure import collection
from sparseflow.latency.model.dataset import LatencyDataset, load_dataset
from sparseflow.latency.model.predictor import Predictor
from tests.latency.conftest import MadeUp
from tests.latency.synthetic import SyntheticBench


class Bench(SyntheticBench):
    """Synthetic device as this machine's instruments; no load is reached."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        if level:
            raise RunError(f"did not reach level {level:.2f}")
        with super().block(level) as columns:
            yield columns


@pytest.mark.usefixtures("at_home")
def test_quickstart_without_load_keeps_idle_measurements(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[LatencyDataset] = []

    def train(folders: list[Path], progress: object) -> Predictor:
        trained.append(load_dataset(folders))
        contention = replace(made_up.predictor.contention, samples=0)
        return made_up.predictor.model_copy(update={"contention": contention})

    monkeypatch.setattr(collection, "LocalInstruments", Bench)
    monkeypatch.setattr(
        quickstart, "_prepare_models", lambda *arguments: (made_up.models[:2], made_up.kernels[:2])
    )
    monkeypatch.setattr(quickstart, "train", train)
    result = quickstart.run_quickstart(tmp_path)
    (problem,) = result.problems
    assert "did not reach level" in problem and "same command" in problem
    assert problem in result.to_dict()["problems"] and "did not reach level" in result.report_path.read_text()
    assert [(row.model, row.level) for row in result.evaluation.rows] == [("net0_b1_12", 0.0)]
    assert trained[0].list_models() == ["net0_b1_12", "net0_b1_8"] and trained[0].loaded == ()
    assert Predictor.load(result.predictor_path).contention.samples == 0
