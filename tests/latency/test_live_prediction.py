"""From an exporter through a real Prometheus server to a prediction, without a GPU."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")


from sparseflow.cli.root import run
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.latency import Predictor, predict
from sparseflow.latency.measure.exporter import Exporter
from tests.latency.conftest import MadeUp, of_this_machine
from tests.latency.measure.test_exporter import Reader, prometheus, until

MAX_AGE_S = 2.0
WINDOW_S = 1.0


@pytest.fixture
def local_predictor(made_up: MadeUp) -> Predictor:
    """Predictor of the synthetic device with this machine's fingerprint."""
    return of_this_machine(made_up.predictor)


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no `prometheus` here; on Debian: apt-get install prometheus"
)
def test_prediction_follows_the_load_until_exporter_dies(
    made_up: MadeUp, local_predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"busy": 0.5, "others": 0.1}
    reader = Reader(
        lambda: LoadReading(timestamp_s=1.0, interval_s=0.1, source="host", device="cpu", shares=shares)
    )
    model = made_up.models[0]
    file = local_predictor.save(tmp_path / "predictor.json")
    idle = predict(model, local_predictor)

    with ExitStack() as publishing:
        exporter = publishing.enter_context(Exporter(reader, port=0, interval_s=0.1))
        target = exporter.url.removeprefix("http://").removesuffix("/metrics")
        with prometheus(tmp_path, target) as url:
            command = [
                "latency",
                "predict",
                str(model),
                "--predictor",
                str(file),
                "--live",
                "prometheus",
                "--url",
                url,
                "--label",
                f"instance={target}",
                "--max-age-s",
                str(MAX_AGE_S),
                "--window-s",
                str(WINDOW_S),
                "--json",
            ]

            def query() -> tuple[int, dict[str, Any]]:
                code = run(command)
                return code, json.loads(capsys.readouterr().out)

            def read_until(load: float) -> dict[str, Any]:
                _, reading = until(
                    query,
                    lambda answer: answer[0] == 0 and answer[1]["load"]["others"] == pytest.approx(load),
                )
                return reading

            light = read_until(0.1)
            assert light["load"] == pytest.approx({"busy": 0.5, "others": 0.1})
            shares["others"] = 0.8
            heavy = read_until(0.8)
            assert idle.idle_ms == light["idle_ms"] == heavy["idle_ms"]
            assert idle.mean_ms < light["mean_ms"] < heavy["mean_ms"]
            assert light["p95_ms"] < heavy["p95_ms"]
            # Equal to a prediction with the load as argument.
            assert heavy["mean_ms"] == pytest.approx(
                predict(model, local_predictor, load={"others": 0.8}).mean_ms
            )

            publishing.close()
            code, dead = until(
                query, lambda answer: answer[0] != 0 and "is stale" in answer[1]["error"]["message"]
            )
            assert code == 1 and set(dead) == {"error"} and dead["error"]["type"] == "DeviceError"
            message = dead["error"]["message"]
            assert "check that the exporter is running" in message and url in message
        code, missing = query()
        assert code == 1 and url in missing["error"]["message"]
