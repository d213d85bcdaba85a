"""`sparseflow codesign`: text output, JSON output and errors."""

from __future__ import annotations

import html
import importlib
import json
import re
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("numba")

from sparseflow.cli.root import run
from sparseflow.codesign.design.saved_plan import load_plan
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.core.device.ceilings import Ceilings
from sparseflow.pruning import save_model
from sparseflow.pruning.config import parse_config
from tests.codesign.toys import QUICK
from tests.pruning.small import QUICK as TASK

pytestmark = pytest.mark.usefixtures("undrawn_figures")

SETTINGS: dict[str, Any] = QUICK | {
    "task": TASK | {"train": TASK["train"] | {"epochs": 2}},
    "hardware": QUICK["hardware"] | {"batch_size": 4},
    "schedule": {"warmup_epochs": 1, "ramp_epochs": 0, "max_weight": 0.1},
    "joint": {"alpha_steps": 1},
}
"""Two epochs, the second with the hardware loss."""

SPLIT = [
    "--set", "hardware.batch_size=64", "--set", "hardware.link=ucie", "--set", "task.model.embed_dim=256",
    "--set", "task.model.mlp_ratio=8", "--set", "partition.w_comm=0.0",
]  # fmt: skip
"""Settings of a model that is large enough for splits to pay off."""

QAP = "3 5 5\n0 1 2\n1 0 0\n2 0 0\n0 1 1\n1 0 2\n1 2 0\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text(json.dumps(SETTINGS))  # JSON is YAML
    return "quick.yaml"


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    """Parse the only output, strict JSON."""
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def read_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Read the error message as one line."""
    return " ".join(capsys.readouterr().err.split())


def write_model(path: str, **model: Any) -> str:
    """Save a model with the settings of the task."""
    settings = parse_config(TASK | {"model": TASK["model"] | model})
    save_model(settings.build_model(8, 1), path)
    return path


def test_plan_verify_layout_agree(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "plan", "--config", config, "--out", "plan"]
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert (
        Path(result["page"]).is_file() and result["plan"] == "plan/plan.json" and result["finished"] is True
    )
    assert result["energy_delay_mj_ms"] == pytest.approx(result["latency_ms"] * result["energy_mj"])
    assert 0.0 <= result["gap"] <= 1.0 and result["lower_bound_ms"] <= result["latency_ms"]
    saved = load_plan("plan/plan.json")
    priced = saved.hardware.evaluate_cost(saved.layers, saved.decision)
    assert (priced.objective, priced.chips) == (result["objective"], result["chips"])
    before = Path("plan/plan.json").read_bytes()
    assert run(command) == 0
    output = capsys.readouterr().out
    assert "energy delay mj ms: " in output and "layers split: " in output
    assert Path("plan/plan.json").read_bytes() == before  # the same arguments give the same plan

    assert run(["codesign", "verify", "plan/plan.json", "--json"]) == 0
    checked = read_json(capsys)
    assert max(checked["error"].values()) <= 1e-5 and len(set(checked["moved_bytes"].values())) == 1
    assert run(["codesign", "verify", "plan", "--num-clips", "2", "--seed", "3"]) == 0
    assert "error: " in capsys.readouterr().out

    assert run(["codesign", "layout", "plan/plan.json", "--out", "laid", "--json"]) == 0
    laid = read_json(capsys)
    assert laid["layout"] <= laid["layout_before"] and Path(laid["page"]).is_file()
    assert laid["objective"] <= result["objective"]
    assert load_plan("laid/plan.json").decision.chips == saved.decision.chips
    assert Path("plan/plan.json").read_bytes() == before
    assert run(["codesign", "layout", "laid/plan.json"]) == 0
    assert "layout before: " in capsys.readouterr().out


def test_layout_keeps_the_source_plan(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["codesign", "plan", "--config", config, "--no-search", "--out", "plan", *SPLIT]) == 0
    capsys.readouterr()
    before, extra_before = Path("plan/plan.json").read_bytes(), load_plan("plan/plan.json").extra
    assert set(extra_before) == {"considered", "lower_bound_ms", "gap", "finished"}
    # A directory stands for its plan.
    for source in ("plan/plan.json", "plan"):
        assert run(["codesign", "layout", source, "--json"]) == 0
        result = read_json(capsys)
        assert result["plan"] == "plan/layout/plan.json" and result["page"] == "plan/layout/report.html"
        assert Path("plan/plan.json").read_bytes() == before
    laid, old = load_plan("plan/layout/plan.json"), load_plan("plan/plan.json")
    assert laid.decision.positions_mm != old.decision.positions_mm and laid.layers == old.layers
    # The bounds hold only for the former placement, so they are dropped.
    assert laid.extra == {"considered": extra_before["considered"]} and extra_before["considered"]
    # Placing the chips again changes nothing.
    assert run(["codesign", "layout", "plan/layout", "--out", "again"]) == 0
    assert load_plan("again/plan.json").extra == laid.extra


def test_layout_passes_search_options(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.codesign.design import placement

    calls: list[Any] = []
    original = placement.assign

    def record_call(*args: Any, **named: Any) -> Any:
        calls.append({name: named[name] for name in ("method", "restarts", "budget_s", "seed")})
        return original(*args, **named)

    assert run(["codesign", "plan", "--config", config, "--no-search", "--out", "plan"]) == 0
    monkeypatch.setattr(placement, "assign", record_call)
    command = ["codesign", "layout", "plan/plan.json", "--method", "tabu", "--restarts", "3",
               "--budget-s", "60.0", "--seed", "5"]  # fmt: skip
    assert run(command) == 0
    assert calls == [{"method": "tabu", "restarts": 3, "budget_s": 60.0, "seed": 5}]
    assert shlex.join(["sparseflow", *command]) in Path("plan/layout/report.html").read_text()
    capsys.readouterr()
    assert run(["codesign", "layout", "plan/plan.json", "--method", "luck"]) == 2
    assert "luck" in read_error(capsys)


def test_plan_report_command_can_be_repeated(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "codesign", "plan", "--config", config, "--set", "task.ast.keep={channel: 0.25}",
        "--model", write_model("deep.safetensors", depth=3), "--no-search", "--seed", "4", "--out", "a plan",
    ]  # fmt: skip
    assert run(command) == 0
    page = html.unescape(
        Path("a plan/report.html").read_text().partition('<script type="application/json"')[0]
    )
    (line,) = {line for line in re.findall(r"sparseflow codesign plan [^<\n]*", page)}
    repeated_command = shlex.split(line)[1:]
    assert sorted(repeated_command) == sorted(command)
    before = Path("a plan/plan.json").read_bytes()
    Path("a plan/plan.json").unlink()
    assert run(repeated_command) == 0 and Path("a plan/plan.json").read_bytes() == before
    capsys.readouterr()


def test_verify_refuses_model_with_other_shapes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Both models have the same layer names, and the plan splits no layer.
    wide = write_model("wide.safetensors", mlp_ratio=4)
    assert run(["codesign", "plan", "--config", config, "--no-search", "--out", "plan"]) == 0
    assert load_plan("plan/plan.json").decision.rewrite_plan is None
    capsys.readouterr()
    assert run(["codesign", "verify", "plan", "--model", wide]) == 2
    message = read_error(capsys)
    assert "`flops`" in message and "`units` 64" in message and "32" in message
    assert run(["codesign", "verify", "plan"]) == 0


def test_plan_takes_number_of_classes_from_lists(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    lists = Path("lists")
    lists.mkdir()
    (lists / "classInd.txt").write_text("1 Archery\n2 Biking\n3 Diving\n")
    (lists / "trainlist01.txt").write_text("Archery/v_Archery_g08_c01.avi 1\n")
    (lists / "testlist01.txt").write_text("Biking/v_Biking_g01_c01.avi\n")
    data = "task.data={kind: ucf101, lists: lists, videos: nowhere}"
    command = ["codesign", "plan", "--config", config, "--no-search", "--set", data]
    assert run([*command, "--out", "plan", "--json"]) == 0
    read_json(capsys)
    head = load_plan("plan/plan.json").layers[-1]
    assert head.layer_type == "head" and head.units == 3
    assert run(["codesign", "verify", "plan", "--json"]) == 0
    read_json(capsys)
    (lists / "classInd.txt").unlink()
    assert run([*command, "--out", "other"]) == 2
    assert "classInd.txt" in read_error(capsys) and not Path("other").exists()


def test_verify_plan_of_model_file_needs_that_model(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "plan", "--config", config, "--no-search", "--out", "plan"]
    assert run([*command, "--model", write_model("deep.safetensors", depth=3), "--json"]) == 0
    assert read_json(capsys)["chips"] == 3
    verify = ["codesign", "verify", "plan/plan.json"]
    assert run([*verify, "--model", "deep.safetensors", "--json"]) == 0
    assert read_json(capsys)["error"]["local"] <= 1e-5
    assert run([*verify, "--json"]) == 2
    assert read_json(capsys)["error"]["type"] == "InputError"
    assert run([*verify, "--model", write_model("deeper.safetensors", depth=4)]) == 2
    assert "model" in read_error(capsys)


def test_verify_plan_with_splits_is_exact(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "plan", "--config", config, "--no-search", "--out", "plan", *SPLIT]
    assert run([*command, "--json"]) == 0
    read_json(capsys)
    assert load_plan("plan/plan.json").decision.rewrite_plan is not None
    assert run(["codesign", "verify", "plan/plan.json", "--json"]) == 0
    result = read_json(capsys)
    assert result["splits"] >= 1 and max(result["error"].values()) <= 1e-5
    assert result["moved_bytes"]["planned"] == result["moved_bytes"]["local"] > 0


def test_train_verify_report_resume(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "train", "--config", config, "--out", "runs"]
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert [line["mode"] for line in result["modes"]] == ["joint", "two-stage", "mapping-only", "layout-only"]
    assert result["verdict"].startswith("One seed is not enough") and Path(result["page"]).is_file()
    designs = json.loads(Path("runs/designs.json").read_text())
    assert designs["modes"] == result["modes"] and "codesign train --config quick.yaml" in designs["command"]
    for name in ("joint-0", "two-stage-0"):
        assert (Path("runs") / name / "report.html").is_file()
        assert run(["codesign", "verify", f"runs/{name}", "--json"]) == 0
        assert read_json(capsys)["replayed"] == (3 if name == "joint-0" else 7)

    # Finished runs are kept, and other settings are refused.
    before = Path("runs/joint-0/trace.jsonl").read_bytes()
    assert run([*command, "--mode", "joint"]) == 0
    assert "was not run" in capsys.readouterr().out
    assert Path("runs/joint-0/trace.jsonl").read_bytes() == before
    assert run([*command, "--set", "loss.lambda_T=2.0"]) == 2
    assert "settings.loss.lambda_T" in read_error(capsys)

    # The report shows the design of the run, not those of its baselines.
    page = Path("runs/two-stage-0/report.html").read_text()
    own_design, *baselines = json.loads(Path("runs/two-stage-0/plan.json").read_text())["extra"]["designs"]
    assert own_design["mode"] == "two-stage" and f"{own_design['energy_delay']:.4g} mJ⋅ms" in page
    assert all(f"{record['energy_delay']:.4g} mJ ms" not in page for record in baselines)
    assert run(["codesign", "verify", "runs/joint-0/trace.jsonl", "--json"]) == 0
    assert {"replayed", "error"} <= set(read_json(capsys))

    (Path("runs/joint-0") / "report.html").unlink()
    assert run(["codesign", "report", "runs/joint-0", "--json"]) == 0
    assert read_json(capsys)["page"] == "runs/joint-0/report.html"
    assert "sparseflow codesign report runs/joint-0" in Path("runs/joint-0/report.html").read_text()
    assert run(["codesign", "report", "runs/joint-0"]) == 0
    assert capsys.readouterr().out.startswith("page: ")

    # A changed number is detected.
    trace = Path("runs/joint-0/trace.jsonl")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    rows[2]["cost"]["objective"] += 1e-9
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["codesign", "verify", "runs/joint-0", "--json"]) == 1
    assert "rows [2]" in read_json(capsys)["error"]["message"]
    trace.write_text("{}\n{}\n")
    assert run(["codesign", "verify", "runs/joint-0"]) == 2
    assert run(["codesign", "report", "runs/joint-0"]) == 2


def test_verify_trained_run(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Gates close during training, so the trained model has fewer units.
    close = ["--set", "task.train.gate_rate=1000.0", "--set", "task.ast.strength=20.0",
             "--set", "task.ast.keep={channel: 0.25}"]  # fmt: skip
    command = ["codesign", "train", "--config", config, "--out", "runs", "--mode", "joint", *close, *SPLIT]
    assert run([*command, "--json"]) == 0
    read_json(capsys)
    repeated_command = shlex.split(json.loads(Path("runs/designs.json").read_text())["command"])
    assert [record for record in repeated_command if "=" in record] == [
        record for record in (*close, *SPLIT) if "=" in record
    ]
    planned = load_plan("runs/joint-0/plan.json")
    assert planned.decision.rewrite_plan is not None and planned.layers[2].units < 2048
    assert run(["codesign", "verify", "runs/joint-0", "--json"]) == 0, read_error(capsys)
    assert read_json(capsys)["splits"] >= 1


def test_layout_solves_quadratic_assignments(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("three.qap").write_text(QAP)
    for method in ("auto", "tabu", "annealing"):
        command = ["codesign", "layout", "three.qap", "--method", method, "--restarts", "2"]
        assert run([*command, "--json"]) == 0
        result = read_json(capsys)
        assert sorted(result["permutation"]) == [0, 1, 2] and result["cost"] == min(result["costs"])
        assert (
            result["lower_bound"] <= result["cost"]
            and result["best_known"] == 5
            and len(result["costs"]) == 2
        )
    assert run(["codesign", "layout", "three.qap"]) == 0
    assert "cost: " in capsys.readouterr().out
    # The gap is undefined for a cost of 0.
    Path("zero.qap").write_text("3\n3 -3 2 0 0 -1 2 -2 1\n1 0 1 -2 1 -1 -2 -1 -1\n")
    assert run(["codesign", "layout", "zero.qap", "--json"]) == 0
    result = read_json(capsys)
    assert result["cost"] == 0 > result["lower_bound"] and result["gap_to_bound"] is None


def test_profile_resumes_and_refuses_another_tdp(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small network is enough for few points.
    fitting = importlib.import_module("sparseflow.codesign.hardware.proxy.fitting")
    small_config = partial(fitting.ProxyTrainingConfig, members=2, hidden=8, steps=30, decays=(0.3, 1.0))
    monkeypatch.setattr(fitting, "ProxyTrainingConfig", small_config)
    monkeypatch.setattr("sparseflow.codesign.hardware.proxy.analytic._ROOFLINE_STEPS", 60)
    device_module = importlib.import_module("sparseflow.codesign.hardware.proxy.device")
    ceilings = Ceilings(flops_per_s={"float32": 1e11}, bytes_per_s=1e10)
    monkeypatch.setattr(device_module, "measure_ceilings", lambda device: ceilings)
    command = ["codesign", "profile", "--out", "profile", "--num-points", "8"]
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert result["points"] == 8 and Path(result["proxy"]).is_file() and result["median_error"] >= 0.0
    plan = ["codesign", "plan", "--config", config, "--out", "plan", "--no-search", "--json",
            "--set", f"hardware.proxy={result['proxy']}"]  # fmt: skip
    assert run(plan) == 0
    assert read_json(capsys)["chips"] == 3

    # The device is not measured again, because its measurements vary.
    proxy = LayerHwProxy.load(result["proxy"])
    device = proxy.devices[0]
    assert result["device"] == asdict(device) | {"rates": dict(device.rates)}
    assert proxy.provenance["held_out"]["folds"] == 5
    assert list(proxy.provenance["environments"]) and result["median_error"] >= 0.0
    assert run(["codesign", "profile", "--out", "profile", "--num-points", "9", "--json"]) == 0
    more = read_json(capsys)
    assert more["points"] == 9 and more["device"] == result["device"] and more["device"]["tdp_w"] == 65.0
    assert run(["codesign", "profile", "--out", "profile", "--num-points", "9", "--tdp-w", "90"]) == 2
    assert "`--tdp-w 90` differs from 65 W" in read_error(capsys)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["plan", "--config", "none.yaml", "--out", "x"], "none.yaml"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "slots"], "`--set slots`"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "hardware.slots=0"], "hardware.slots"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "hardware.slots=50"], "50"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "task.model.depth=0"], "`depth` (=0)"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "task.tasks=0"], "tasks"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--model", "none.safetensors"], "none.safetensors"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "hardware.initial_chip=a100"], "a100"),
        (["plan", "--config", "quick.yaml"], "--out"),
        (["train", "--config", "quick.yaml", "--out", "x", "--mode", "both"], "'both'"),
        (["train", "--config", "quick.yaml", "--out", "x", "--device", "tpu"], "`--device tpu`"),
        (["train", "--config", "quick.yaml", "--out", "x", "--seeds", "0"], "seeds"),
        (["verify", "none.json"], "none.json"),
        (["verify", "."], "trace.jsonl"),
        (["verify", "quick.yaml"], "quick.yaml"),
        (["report", "."], "trace"),
        (["layout", "none.qap"], "none.qap"),
        (["layout", "quick.yaml"], "quick.yaml"),
        (["layout", "none.json"], "none.json"),
        (["layout", "three.qap", "--method", "luck"], "luck"),
        (["layout", "three.qap", "--out", "x"], "`--out x`"),
        (["layout", "three.qap", "--budget-s", "0"], "(=0"),
        (["layout", "."], "plan.json"),
        (["profile", "--out", "x", "--num-points", "1"], "points"),
        (["profile", "--out", "x", "--precision", "int3"], "int3"),
        (["solve"], "solve"),
    ],
)
def test_invalid_arguments_exit_with_2_and_show_the_value(
    arguments: list[str], value: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("three.qap").write_text(QAP)
    assert run(["codesign", *arguments]) == 2
    assert value in read_error(capsys)
    assert run(["codesign", *arguments, "--json"]) == 2
    assert read_json(capsys)["error"]["message"]


def test_plan_model_that_does_not_fit_exits_with_2(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    big = [
        "--set",
        "hardware.batch_size=4000000",
        "--set",
        "hardware.chips=[npu-s]",
        "--set",
        "hardware.initial_chip=npu-s",
    ]
    assert run(["codesign", "plan", "--config", config, "--out", "x", *big]) == 2
    assert "MB" in read_error(capsys)
