"""`sparseflow codesign`: text output, JSON output and errors."""

from __future__ import annotations

import html
import importlib
import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("numba")

from sparseflow.cli.root import run
from sparseflow.codesign.design.saved_plan import load_plan
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.pruning import save
from sparseflow.pruning.config import settings_of
from tests.codesign.toys import QUICK
from tests.pruning.small import QUICK as TASK

SETTINGS: dict[str, Any] = QUICK | {
    "task": TASK | {"train": TASK["train"] | {"epochs": 2}},
    "hardware": QUICK["hardware"] | {"batch": 4},
    "schedule": {"settle": 1, "ramp": 0, "most": 0.1},
    "joint": {"alpha_steps": 1},
}
"""Two epochs, the second with the hardware."""

SPLIT = [
    "--set", "hardware.batch=64", "--set", "hardware.link=ucie", "--set", "task.model.embed_dim=256",
    "--set", "task.model.mlp_ratio=8", "--set", "partition.w_comm=0.0",
]  # fmt: skip
"""A model so large that splits pay."""

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


def save_model(path: str, **model: Any) -> str:
    """Save a model with the settings of the task."""
    settings = settings_of(TASK | {"model": TASK["model"] | model})
    save(settings.make(8, 1), path)
    return path


def test_plan_verify_and_layout(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "plan", "--config", config, "--out", "plan"]
    assert run([*command, "--json"]) == 0
    found = read_json(capsys)
    assert Path(found["page"]).is_file() and found["plan"] == "plan/plan.json" and found["finished"] is True
    assert found["energy_delay_mj_ms"] == pytest.approx(found["latency_ms"] * found["energy_mj"])
    assert 0.0 <= found["gap"] <= 1.0 and found["lower_bound_ms"] <= found["latency_ms"]
    saved = load_plan("plan/plan.json")
    priced = saved.hardware.evaluate_cost(saved.layers, saved.decision)
    assert (priced.objective, priced.chips) == (found["objective"], found["chips"])
    before = Path("plan/plan.json").read_bytes()
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert "energy delay mj ms: " in shown and "layers split: " in shown
    assert Path("plan/plan.json").read_bytes() == before  # the same arguments give the same plan

    assert run(["codesign", "verify", "plan/plan.json", "--json"]) == 0
    checked = read_json(capsys)
    assert max(checked["error"].values()) <= 1e-5 and len(set(checked["moved_bytes"].values())) == 1
    assert run(["codesign", "verify", "plan", "--num-clips", "2", "--seed", "3"]) == 0
    assert "error: " in capsys.readouterr().out

    assert run(["codesign", "layout", "plan/plan.json", "--out", "laid", "--json"]) == 0
    laid = read_json(capsys)
    assert laid["layout"] <= laid["layout_before"] and Path(laid["page"]).is_file()
    assert laid["objective"] <= found["objective"]
    assert load_plan("laid/plan.json").decision.chips == saved.decision.chips
    assert Path("plan/plan.json").read_bytes() == before
    assert run(["codesign", "layout", "laid/plan.json"]) == 0
    assert "layout before: " in capsys.readouterr().out


def test_a_plan_that_is_placed_anew_stays_where_it_is(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["codesign", "plan", "--config", config, "--no-search", "--out", "plan", *SPLIT]) == 0
    capsys.readouterr()
    before, told_before = Path("plan/plan.json").read_bytes(), load_plan("plan/plan.json").extra
    assert set(told_before) == {"considered", "lower_bound_ms", "gap", "finished"}
    # The folder stands for the plan in it.
    for source in ("plan/plan.json", "plan"):
        assert run(["codesign", "layout", source, "--json"]) == 0
        found = read_json(capsys)
        assert found["plan"] == "plan/layout/plan.json" and found["page"] == "plan/layout/report.html"
        assert Path("plan/plan.json").read_bytes() == before
    laid, old = load_plan("plan/layout/plan.json"), load_plan("plan/plan.json")
    assert laid.decision.positions_mm != old.decision.positions_mm and laid.layers == old.layers
    # What was told of the plan is told of it still, but for bounds at places that it has left.
    assert laid.extra == {"considered": told_before["considered"]} and told_before["considered"]
    assert "No bound of this mapping was computed" in Path("plan/layout/report.html").read_text()
    # Placed again nothing moves, and nothing is lost.
    assert run(["codesign", "layout", "plan/layout", "--out", "again"]) == 0
    assert load_plan("again/plan.json").extra == laid.extra


def test_a_layout_is_searched_as_it_is_told(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.codesign.design import placement

    asked: list[Any] = []
    original = placement.assign

    def asking(*args: Any, **named: Any) -> Any:
        asked.append({name: named[name] for name in ("method", "restarts", "seconds", "seed")})
        return original(*args, **named)

    assert run(["codesign", "plan", "--config", config, "--no-search", "--out", "plan"]) == 0
    monkeypatch.setattr(placement, "assign", asking)
    command = ["codesign", "layout", "plan/plan.json", "--method", "tabu", "--restarts", "3",
               "--budget-s", "60.0", "--seed", "5"]  # fmt: skip
    assert run(command) == 0
    assert asked == [{"method": "tabu", "restarts": 3, "seconds": 60.0, "seed": 5}]
    assert shlex.join(["sparseflow", *command]) in Path("plan/layout/report.html").read_text()
    capsys.readouterr()
    assert run(["codesign", "layout", "plan/plan.json", "--method", "luck"]) == 2
    assert "must be one of" in read_error(capsys)


def test_commands_on_pages_can_be_run_again(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "codesign", "plan", "--config", config, "--set", "task.ast.keep={channel: 0.25}",
        "--model", save_model("deep.safetensors", depth=3), "--no-search", "--seed", "4", "--out", "a plan",
    ]  # fmt: skip
    assert run(command) == 0
    page = html.unescape(Path("a plan/report.html").read_text())
    (line,) = {line for line in re.findall(r"sparseflow codesign plan [^<\n]*", page)}
    again = shlex.split(line)[1:]
    assert sorted(again) == sorted(command)
    before = Path("a plan/plan.json").read_bytes()
    Path("a plan/plan.json").unlink()
    assert run(again) == 0 and Path("a plan/plan.json").read_bytes() == before
    capsys.readouterr()


def test_a_plan_is_verified_with_the_model_that_it_was_made_for(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two models whose layers have the same names, and a plan that splits nothing.
    wide = save_model("wide.safetensors", mlp_ratio=4)
    assert run(["codesign", "plan", "--config", config, "--no-search", "--out", "plan"]) == 0
    assert load_plan("plan/plan.json").decision.rewrite_plan is None
    capsys.readouterr()
    assert run(["codesign", "verify", "plan", "--model", wide]) == 2
    message = read_error(capsys)
    assert "another model: blocks.0.perceptron has `flops`" in message
    assert "`units` 64 (planned: 32)" in message and "name the model that was planned for" in message
    assert run(["codesign", "verify", "plan"]) == 0


def test_classes_are_those_of_the_lists(config: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_plan_of_a_model_is_verified_with_that_model(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["codesign", "plan", "--config", config, "--no-search", "--out", "plan"]
    assert run([*command, "--model", save_model("deep.safetensors", depth=3), "--json"]) == 0
    assert read_json(capsys)["chips"] == 3
    verify = ["codesign", "verify", "plan/plan.json"]
    assert run([*verify, "--model", "deep.safetensors", "--json"]) == 0
    assert read_json(capsys)["error"]["local"] <= 1e-5
    assert run([*verify, "--json"]) == 2
    assert read_json(capsys)["error"]["type"] == "InputError"
    assert run([*verify, "--model", save_model("deeper.safetensors", depth=4)]) == 2
    assert "the model that was planned for" in read_error(capsys)


def test_a_plan_that_splits_layers_is_exact(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "plan", "--config", config, "--no-search", "--out", "plan", *SPLIT]
    assert run([*command, "--json"]) == 0
    read_json(capsys)
    assert load_plan("plan/plan.json").decision.rewrite_plan is not None
    assert run(["codesign", "verify", "plan/plan.json", "--json"]) == 0
    found = read_json(capsys)
    assert found["splits"] >= 1 and max(found["error"].values()) <= 1e-5
    assert found["moved_bytes"]["planned"] == found["moved_bytes"]["local"] > 0


def test_train_verify_and_report(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["codesign", "train", "--config", config, "--out", "runs"]
    assert run([*command, "--json"]) == 0
    found = read_json(capsys)
    assert [line["mode"] for line in found["modes"]] == ["joint", "two-stage", "mapping-only", "layout-only"]
    assert found["verdict"].startswith("Of one seed nothing follows") and Path(found["page"]).is_file()
    designs = json.loads(Path("runs/designs.json").read_text())
    assert designs["modes"] == found["modes"] and "codesign train --config quick.yaml" in designs["command"]
    for name in ("joint-0", "two-stage-0"):
        assert (Path("runs") / name / "report.html").is_file()
        assert run(["codesign", "verify", f"runs/{name}", "--json"]) == 0
        assert read_json(capsys)["replayed"] == (3 if name == "joint-0" else 7)

    # What is done is not done again; what was asked for otherwise is refused.
    before = Path("runs/joint-0/trace.jsonl").read_bytes()
    assert run([*command, "--mode", "joint"]) == 0
    assert "were not both run" in capsys.readouterr().out
    assert Path("runs/joint-0/trace.jsonl").read_bytes() == before
    assert run([*command, "--set", "loss.lambda_T=2.0"]) == 2
    assert "settings.loss.lambda_T" in read_error(capsys)

    # A page is of the run's own design, not of the baselines that came with it.
    page = Path("runs/two-stage-0/report.html").read_text()
    own, *others = json.loads(Path("runs/two-stage-0/plan.json").read_text())["designs"]
    assert own["mode"] == "two-stage" and f"{own['energy_delay']:.4g} mJ ms" in page
    assert all(f"{each['energy_delay']:.4g} mJ ms" not in page for each in others)
    assert run(["codesign", "verify", "runs/joint-0/trace.jsonl", "--json"]) == 0
    assert {"replayed", "error"} <= set(read_json(capsys))

    (Path("runs/joint-0") / "report.html").unlink()
    assert run(["codesign", "report", "runs/joint-0", "--json"]) == 0
    assert read_json(capsys)["page"] == "runs/joint-0/report.html"
    assert "sparseflow codesign report runs/joint-0" in Path("runs/joint-0/report.html").read_text()
    assert run(["codesign", "report", "runs/joint-0"]) == 0
    assert capsys.readouterr().out.startswith("page: ")

    # A number that was tampered with: the run fails.
    trace = Path("runs/joint-0/trace.jsonl")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    rows[2]["priced"]["objective"] += 1e-9
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["codesign", "verify", "runs/joint-0", "--json"]) == 1
    assert "rows [2] come to another objective" in read_json(capsys)["error"]["message"]
    trace.write_text("{}\n{}\n")
    assert run(["codesign", "verify", "runs/joint-0"]) == 2
    assert run(["codesign", "report", "runs/joint-0"]) == 2


def test_what_was_trained_can_be_verified(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Gates close in training, so that the model is another one than one with fresh weights.
    close = ["--set", "task.train.gate_rate=1000.0", "--set", "task.ast.strength=20.0",
             "--set", "task.ast.keep={channel: 0.25}"]  # fmt: skip
    command = ["codesign", "train", "--config", config, "--out", "runs", "--mode", "joint", *close, *SPLIT]
    assert run([*command, "--json"]) == 0
    read_json(capsys)
    again = shlex.split(json.loads(Path("runs/designs.json").read_text())["command"])
    assert [each for each in again if "=" in each] == [each for each in (*close, *SPLIT) if "=" in each]
    planned = load_plan("runs/joint-0/plan.json")
    assert planned.decision.rewrite_plan is not None and planned.layers[2].units < 2048
    assert run(["codesign", "verify", "runs/joint-0", "--json"]) == 0, read_error(capsys)
    assert read_json(capsys)["splits"] >= 1


def test_quadratic_assignments(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("three.qap").write_text(QAP)
    for method in ("auto", "tabu", "annealing"):
        command = ["codesign", "layout", "three.qap", "--method", method, "--restarts", "2"]
        assert run([*command, "--json"]) == 0
        found = read_json(capsys)
        assert sorted(found["permutation"]) == [0, 1, 2] and found["cost"] == min(found["costs"])
        assert found["lower_bound"] <= found["cost"] and found["best_known"] == 5 and len(found["costs"]) == 2
    assert run(["codesign", "layout", "three.qap"]) == 0
    assert "cost: " in capsys.readouterr().out
    # Of a cost of 0 a bound below it is no share.
    Path("zero.qap").write_text("3\n3 -3 2 0 0 -1 2 -2 1\n1 0 1 -2 1 -1 -2 -1 -1\n")
    assert run(["codesign", "layout", "zero.qap", "--json"]) == 0
    found = read_json(capsys)
    assert found["cost"] == 0 > found["lower_bound"] and found["gap_to_bound"] is None


def test_profile(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Of few points there is little to learn; a name for the module is taken by the function in it.
    fitting = importlib.import_module("sparseflow.codesign.hardware.proxy.fitting")
    few = partial(fitting.Training, members=2, hidden=8, steps=30, decays=(0.3, 1.0))
    monkeypatch.setattr(fitting, "Training", few)
    monkeypatch.setattr("sparseflow.codesign.hardware.proxy.analytic._ROOFLINE_STEPS", 60)
    command = ["codesign", "profile", "--out", "profile", "--num-points", "8"]
    assert run([*command, "--json"]) == 0
    found = read_json(capsys)
    assert found["points"] == 8 and Path(found["proxy"]).is_file() and found["median_error"] >= 0.0
    plan = ["codesign", "plan", "--config", config, "--out", "plan", "--no-search", "--json",
            "--set", f"hardware.proxy={found['proxy']}"]  # fmt: skip
    assert run(plan) == 0
    assert read_json(capsys)["chips"] == 3

    # What was stopped goes on, though no two measurements of what the device can do are alike.
    held = LayerHwProxy.load(found["proxy"])
    assert found["device"] == held.devices[0].to_dict() and held.provenance["held_out"]["folds"] == 5
    assert list(held.provenance["environments"]) and found["median_error"] >= 0.0
    assert run(["codesign", "profile", "--out", "profile", "--num-points", "9", "--json"]) == 0
    more = read_json(capsys)
    assert more["points"] == 9 and more["device"] == found["device"] and more["device"]["tdp_w"] == 65.0
    assert run(["codesign", "profile", "--out", "profile", "--num-points", "9", "--tdp-w", "90"]) == 2
    assert "points.parquet says 65 W; leave it out, or name another" in read_error(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--config", "none.yaml", "--out", "x"], "these come with SparseFlow: chips, version_c"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "slots"], "such as train.epochs=3"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "hardware.slots=0"], "hardware.slots"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "hardware.slots=50"], "50 chips and"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "task.model.depth=0"], "`depth` (=0)"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "task.tasks=0"], "tasks"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--model", "none.safetensors"], "no file none"),
        (["plan", "--config", "quick.yaml", "--out", "x", "--set", "hardware.first=a100"], "one of `chips`"),
        (["plan", "--config", "quick.yaml"], "--out"),
        (["train", "--config", "quick.yaml", "--out", "x", "--mode", "both"], "joint, two-stage, all"),
        (["train", "--config", "quick.yaml", "--out", "x", "--device", "tpu"], "must be cpu or cuda"),
        (["train", "--config", "quick.yaml", "--out", "x", "--seeds", "0"], "seeds"),
        (["verify", "none.json"], "there is no plan none.json"),
        (["verify", "."], "holds neither plan.json nor trace.jsonl"),
        (["verify", "quick.yaml"], "quick.yaml"),
        (["report", "."], "there is no trace"),
        (["layout", "none.qap"], "there is no file none.qap"),
        (["layout", "quick.yaml"], "expected `n`"),
        (["layout", "none.json"], "there is no plan none.json"),
        (["layout", "three.qap", "--method", "luck"], "must be one of"),
        (["layout", "three.qap", "--out", "x"], "the answer to an assignment is printed"),
        (["layout", "three.qap", "--budget-s", "0"], "seconds"),
        (["layout", "."], "there is no plan plan.json"),
        (["profile", "--out", "x", "--num-points", "1"], "points"),
        (["profile", "--out", "x", "--precision", "int3"], "int3"),
        (["solve"], "solve"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("three.qap").write_text(QAP)
    assert run(["codesign", *arguments]) == 2
    assert message in read_error(capsys)
    assert run(["codesign", *arguments, "--json"]) == 2
    assert read_json(capsys)["error"]["message"]


def test_a_model_that_fits_nowhere(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    big = [
        "--set",
        "hardware.batch=4000000",
        "--set",
        "hardware.chips=[npu-s]",
        "--set",
        "hardware.first=npu-s",
    ]
    assert run(["codesign", "plan", "--config", config, "--out", "x", *big]) == 2
    assert "MB too little" in read_error(capsys)
