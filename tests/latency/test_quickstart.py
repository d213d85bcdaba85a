"""The quick start on machines on which something cannot be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError, RunError
from sparseflow.latency import quickstart
from sparseflow.latency.graph.synthetic_kernels import SyntheticKernelsConfig
from sparseflow.latency.measure import collection
from sparseflow.latency.model.dataset import LatencyDataset, load_dataset
from sparseflow.latency.model.predictor import Predictor
from tests.latency.conftest import MadeUp
from tests.latency.synthetic import SyntheticBench

pytestmark = pytest.mark.usefixtures("undrawn_figures")


class Bench(SyntheticBench):
    """Synthetic device as this machine's instruments; its load ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        if level:
            raise RunError(f"the load of {level:.2f} exited")
        with super().block(level) as columns:
            yield columns


@pytest.fixture
def trained(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> list[LatencyDataset]:
    """Replace or shorten the slow steps; the data of each training are appended to the result."""
    trained: list[LatencyDataset] = []

    def train(folders: list[Path], progress: object) -> Predictor:
        trained.append(load_dataset(folders))
        contention = replace(made_up.predictor.contention, samples=len(trained[-1].loaded))
        fingerprint = trained[-1].fingerprint
        return made_up.predictor.model_copy(update={"contention": contention, "fingerprint": fingerprint})

    monkeypatch.setattr(collection, "LocalInstruments", Bench)
    monkeypatch.setattr(
        quickstart, "_prepare_models", lambda *arguments: (made_up.models[:2], made_up.kernels[:2])
    )
    monkeypatch.setattr(quickstart, "train", train)
    monkeypatch.setattr(quickstart, "SyntheticKernelsConfig", partial(SyntheticKernelsConfig, kernels=12))
    return trained


@pytest.mark.usefixtures("at_home")
def test_quickstart_without_load_keeps_idle_measurements(
    trained: list[LatencyDataset], tmp_path: Path
) -> None:
    result = quickstart.run_quickstart(tmp_path, threads=2)
    (problem,) = result.problems
    assert "the load of 0.90 exited" in problem and "same command" in problem
    page = result.report_path.read_text()
    assert problem in result.to_dict()["problems"] and "0.90 exited" in page and "2 threads" in page
    assert result.threads == result.evaluation.threads == result.to_dict()["threads"] == 2
    assert [(row.model, row.level) for row in result.evaluation.rows] == [("net0_b1_12", 0.0)]
    assert trained[0].list_models() == ["net0_b1_12", "net0_b1_8"] and trained[0].loaded == ()
    assert Predictor.load(result.predictor_path).contention.samples == 0
    with pytest.raises(InputError, match="threads"):
        quickstart.run_quickstart(tmp_path, threads=1)


@pytest.mark.usefixtures("at_home")
def test_quickstart_that_cannot_evaluate_ends_with_a_report(
    trained: list[LatencyDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*arguments: object, **settings: object) -> None:
        raise RunError("no model could be evaluated")

    monkeypatch.setattr(quickstart, "evaluate", evaluate)
    result = quickstart.run_quickstart(tmp_path, loads=())
    assert not (tmp_path / "load").exists() and trained[0].loaded == ()
    assert result.predictor_path.is_file() and "no model could be evaluated" in result.report_path.read_text()
    for loads in ((1.5,), (0.0,)):
        with pytest.raises(InputError, match="loads"):
            quickstart.run_quickstart(tmp_path, loads=loads)
    with pytest.raises(InputError, match="threads"):
        quickstart.run_quickstart(tmp_path, threads=0)
