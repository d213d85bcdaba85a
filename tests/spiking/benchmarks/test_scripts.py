"""The GPU benchmark scripts, tried at tiny sizes: they run, check what they time, and keep every sample."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the block kernels need triton")

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "spiking"
sys.path.insert(0, str(SCRIPTS))
replay: Any = importlib.import_module("replay")
user_table: Any = importlib.import_module("user_table")
not_replaced: Any = importlib.import_module("not_replaced")

# Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def _rows(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["status"] == "finished"
    assert content["environment"]["device"]["versions"]["torch"]
    for row in content["rows"]:
        assert "failed" not in row
        assert set(row["samples_ms"]) == set(row["median_ms"]) == set(row["checks"])
        assert all(len(times) >= 1 and min(times) > 0 for times in row["samples_ms"].values())
    return content["rows"]


def test_user_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "table.json"
    code = user_table.main(
        ["--dry-run", "--out", str(out), "--layers", "tiny", "--silent", "group", "--packed-variants", "1"]
    )
    assert code == 0
    rows = _rows(out)
    assert [row["comparison"] for row in rows] == ["conv", "group", "packed"]
    conv, group, packed = rows
    assert {"eager fp32 NCHW", "blocks fp32 NCHW", "blocks fp16 channels_last", "prescan fp16 NCHW",
            "stage 2 fp32 channels_last", "dense tf32 NCHW"} <= set(conv["samples_ms"])  # fmt: skip
    assert conv["checks"]["blocks fp32 NCHW"]["max_error"] < 1e-6
    assert group["checks"]["blocks fp16 NCHW"]["mismatch"] == 0
    assert 0 < group["output_rate"] < 1
    if not torch.cuda.is_available():
        assert packed["errors"]["packed x1"]
    assert "tiny" in capsys.readouterr().out


def test_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "not_replaced.json"
    assert not_replaced.main(["--dry-run", "--out", str(out)]) == 0
    rows = _rows(out)
    assert [row["kind"] for row in rows] == ["linear"] * 3 + ["batchnorm"] * 3
    assert all(len(row["ratios"]) >= 3 for row in rows)


@pytest.mark.parametrize("channels_per_block", [1, 16])
@pytest.mark.parametrize(
    ("size", "channels", "block", "zero"), [(14, 40, 8, 0.97), (9, 16, 4, 1.0), (7, 33, 16, 0.5)]
)
def test_spikes_have_exactly_the_stated_zero_blocks(
    size: int, channels: int, block: int, zero: float, channels_per_block: int
) -> None:
    layer = user_table.Layer(name="x", size=size, channels=channels, block=block, zero=zero, T=3, batch=5)
    x = user_table.draw_spikes(layer, channels_per_block, 0.01, 1, torch.device("cpu"))
    blocks = 15 * -(-channels // channels_per_block) * (-(-size // block)) ** 2
    assert user_table.zero_blocks(x, block, channels_per_block) == pytest.approx(
        1 - round((1 - zero) * blocks) / blocks
    )
    assert set(x.unique().tolist()) <= {0.0, 1.0}


def test_wrong_result_is_excluded_and_fails_the_script(tmp_path: Path) -> None:
    bench = replay.Bench(torch.device("cpu"), rounds=1, calls=1, warmup=0, seed=0)
    expected = torch.ones(3, dtype=torch.float64)
    check = replay.close_to(expected, "fp32")
    bench.admit("right", lambda: lambda: torch.ones(3), check)
    bench.admit("wrong", lambda: lambda: torch.tensor([1.0, 1.0, 1.1]), check)
    bench.admit("nan", lambda: lambda: torch.tensor([1.0, float("nan"), 1.0]), check)
    bench.admit("shape", lambda: lambda: torch.ones(2), check)
    assert set(bench.work) == {"right"} and set(bench.errors) == {"wrong", "nan", "shape"}
    results = replay.Results(tmp_path / "r.json", torch.device("cpu"), {}, seed=0, limit_s=60)
    results.add({"name": "row", **replay.timed(bench, bench.compare("right"))})
    assert results.finish() == 1
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "failed"


def test_time_limit_ends_a_hanging_script(tmp_path: Path) -> None:
    script = (
        "import sys, time, torch; from pathlib import Path; import replay; "
        "r = replay.Results(Path(sys.argv[1]), torch.device('cpu'), {}, seed=0, limit_s=1); "
        "r.add({'name': 'kept'}); time.sleep(100)"
    )
    paths = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "r.json"
    completed = subprocess.run(
        [sys.executable, "-c", script, str(out)],
        env={**os.environ, "PYTHONPATH": paths},
        timeout=90,
        check=False,
    )
    assert completed.returncode == 3
    content = json.loads(out.read_text())
    assert content["status"] == "stopped after 1 s" and content["rows"] == [{"name": "kept"}]


@pytest.mark.parametrize("script", [user_table, not_replaced])
def test_bad_arguments_exit_with_2(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as first:
        script.main(["--out", str(tmp_path / "x.json"), "--gpu", "99"])
    assert first.value.code == 2
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as first:
            script.main(["--out", str(tmp_path / "x.json")])
        assert first.value.code == 2
    assert not (tmp_path / "x.json").exists()
