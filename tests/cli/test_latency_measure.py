"""`sparseflow latency` run, stress and collect: text output, JSON output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("yaml")

from sparseflow.cli.root import run
from tests.latency.onnx_models import convnet, save


def test_run_times_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(save(convnet(), tmp_path))
    assert run(["latency", "run", model, "--warmup", "1", "--loops", "4", "--threads", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["latency_ms"]) == result["loops"] == 4 and result["warmup"] == 1
    assert result["provider"] == "CPUExecutionProvider" and result["end_s"] > result["start_s"] > 1.7e9
    assert run(["latency", "run", model, "--loops", "2", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 samples after 5 warm-up" in out and "CPU time / wall time" in out
    assert run(["latency", "run", str(tmp_path / "absent.onnx"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "InputError"


def test_stress_reports_levels(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["latency", "stress", "--threads", "1", "--duration-s", "0.2", "--json"]
    assert run([*command, "--load", "0.05", "--load", "0.1", "--timeout-s", "60"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [level["target"] for level in result["levels"]] == [0.05, 0.1] and len(result["cpus"]) == 1
    assert all(0.0 <= level["other_work"] <= level["achieved"] <= 1.0 for level in result["levels"])
    assert run([*command, "--load", "2"]) == 2
    # A level that is not reached is no error.
    assert run([*command[:-1], "--load", "0.1", "--timeout-s", "0"]) == 0
    assert "by other work" in capsys.readouterr().out


def test_collect_resumes_and_refuses_other_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save(convnet(), tmp_path / "models", "net.onnx")
    config, out = tmp_path / "collect.yaml", tmp_path / "out"
    config.write_text("models: models\nlevels: [0]\nrounds: 1\nmin_time_s: 0.12\nloops: 2\n")
    assert run(["latency", "collect", "--config", str(config), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["added"], result["failed"], result["targets"]) == (3, 3, 0, 1)
    assert (out / "kernels.csv").is_file() and (out / "rows.parquet").is_file()
    assert run(["latency", "collect", "--config", str(config), "--out", str(out)]) == 0
    assert "3 rows (0 new, 0 failed)" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "models" / "bad.onnx").write_bytes(b"no model")
    assert run(["latency", "collect", "--config", str(config), "--out", str(tmp_path / "two"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == 3 and [Path(name).name for name in result["problems"]] == ["bad.onnx"]
    (tmp_path / "models" / "bad.onnx").unlink()
    config.write_text("models: models\nlevels: [0]\nrounds: 2\n")
    assert run(["latency", "collect", "--config", str(config), "--out", str(out)]) == 2
    assert "min_time_s" in capsys.readouterr().err
