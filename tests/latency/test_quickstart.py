"""The quick start on a machine whose other work prevents a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError, RunError
from sparseflow.latency import quickstart
from sparseflow.latency.measure import collection
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


@pytest.mark.usefixtures("at_home", "quick")
def test_quickstart_without_load_keeps_idle_measurements(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "LocalInstruments", Bench)
    monkeypatch.setattr(quickstart, "_prepare_models", lambda *arguments: (made_up.models, made_up.kernels))
    result = quickstart.run_quickstart(tmp_path)
    (problem,) = result.problems
    assert "did not reach level" in problem and "same command" in problem
    assert problem in result.to_dict()["problems"] and "did not reach level" in result.report_path.read_text()
    assert {row.level for row in result.evaluation.rows} == {0.0}
    predictor = Predictor.load(result.predictor_path)
    graph = made_up.graphs[0]
    assert predictor.predict(graph).mean_ms == pytest.approx(
        made_up.predictor.predict(graph).mean_ms, rel=0.05
    )
    with pytest.raises(InputError, match="idle measurements only"):
        predictor.predict(graph, {"others": 0.5})
