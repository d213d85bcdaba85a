"""Tests of `codesign.report.page`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.saved_plan import PLAN_FILE, save_plan
from sparseflow.codesign.hardware.proxy import DeviceSpec
from sparseflow.codesign.joint.trace import TRACE_FILE
from sparseflow.codesign.joint.trainer import DesignResult
from sparseflow.codesign.report import page
from sparseflow.codesign.report.page import write_comparison, write_page, write_run_page
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.toys import PAYS, Toy, chain, hardware, rows_of, trained


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What goes into pages: the arguments of the last figure or page of each kind."""
    result: dict[str, Any] = {}

    def spy(name: str, key: Any) -> None:
        original = getattr(page, name)

        def spying(*args: Any, **named: Any) -> Any:
            result[key(*args, **named)] = (args, named)
            return original(*args, **named)

        monkeypatch.setattr(page, name, spying)

    spy("plot_stacked_bars", lambda title, *_, **__: title)
    table, curves = page.Page.table, page.Page.curves

    def spy_curves(self: page.Page, title: str, *args: Any, **named: Any) -> None:
        result[title] = ((title, *args), named)
        curves(self, title, *args, **named)

    monkeypatch.setattr(page.Page, "curves", spy_curves)

    def spy_table(self: page.Page, title: str, rows: Any, **named: Any) -> None:
        result[title] = ((), {"rows": rows, **named})
        table(self, title, rows, **named)

    monkeypatch.setattr(page.Page, "table", spy_table)
    spy("write_page", lambda *_, **__: "page")
    return result


@pytest.mark.parametrize("mode", ["serial", "balanced"])
@pytest.mark.parametrize("use_fine_split", [False, True])
def test_figures_account_for_all_time_and_energy(
    mode: str, use_fine_split: bool, tmp_path: Path, captured: dict[str, Any]
) -> None:
    hw = hardware(**PAYS, mapping={"mode": mode}, partition={"min_split_gain_ratio": 0.0})
    layers = chain(seed=2)
    decision = hw.remap(layers, hw.initial_decision(layers), use_fine_split=use_fine_split)
    assert decision is not None
    decision = replace(decision, mapping=tuple(index % 2 for index in range(len(decision.mapping))),
                       rewrite_plan=None) if not use_fine_split else decision  # fmt: skip
    path = write_page(tmp_path, hw, layers, decision)
    assert path == tmp_path / "report.html" and path.read_text().startswith("<!doctype html>")
    stats = hw.evaluate_cost(layers, decision).stats
    (_, labels, time), _ = captured["Predicted time per slot"]
    # A batch takes each slot as long as any other, busy or not.
    assert len(labels) == 3
    for parts in zip(*time.values(), strict=True):
        assert sum(parts) == pytest.approx(stats.total_latency_ms)
    (_, _, energy), _ = captured["Predicted energy per slot"]
    assert sum(sum(values) for values in energy.values()) == pytest.approx(stats.energy_mj)


def test_chip_table_states_source_of_costs(tmp_path: Path, captured: dict[str, Any]) -> None:
    hw, layers = hardware(), chain()
    write_page(tmp_path, hw, layers, replace(hw.initial_decision(layers), chips=("npu-m", "npu-m", "npu-s")))
    _, named = captured["Chips"]
    assert [row["layers of this chip were"] for row in named["rows"]] == ["not measured"] * 3
    assert [row["type"] for row in named["rows"]] == ["npu-m", "npu-m", "npu-s"]


def test_page_labels_predictions(tmp_path: Path) -> None:
    hw, layers = hardware(), chain()
    environment = {"device": {"name": "a CPU"}}
    text = write_page(tmp_path, hw, layers, hw.initial_decision(layers), environment=environment).read_text()
    assert "Computed <time" in text and "Where this was computed" in text
    assert "predicted by an analytic roofline" in text and "predicted latency" in text
    # Only the sentences that deny it contain the word.
    assert text.lower().count("measured") == text.count("nothing was measured") + text.count("not measured")


def test_prediction_names_the_measured_chips() -> None:
    hw = hardware()
    assert "nothing was measured" in hw.describe_prediction()
    measured = DeviceSpec.from_chip(hw.library.get_chip("npu-m"))
    hw.proxy = replace(hw.proxy, devices=(measured,))
    assert hw.describe_prediction().endswith(
        "fitted to measurements of layers for npu-m, and for other chips by an analytic roofline."
    )
    only = replace(hw.initial_decision(chain()), chips=("npu-m", None, None))
    assert hw.describe_prediction(only).endswith("fitted to measurements of layers for npu-m.")


def test_page_shows_bounds_and_splits_if_known(tmp_path: Path, captured: dict[str, Any]) -> None:
    hw, layers = hardware(**PAYS, partition={"min_split_gain_ratio": 0.0}), chain()
    decision, record = hw.finalize(layers, hw.initial_decision(layers), use_fine_split=True)
    text = write_page(tmp_path, hw, layers, decision, details=record).read_text()
    assert f"{record['lower_bound_ms']:.4g} ms" in text and "time limit" not in text
    assert len(captured["Splits"][1]["rows"]) == len(record["considered"]) > 0
    assert "time limit" in write_page(
        tmp_path, hw, layers, decision, details=record | {"finished": False}
    ).read_text()  # fmt: skip
    text = write_page(tmp_path, hw, layers, decision).read_text()
    assert "No lower bound of this mapping was computed" in text and "Splits" not in text


def test_run_page_shows_design_of_its_mode(tmp_path: Path, captured: dict[str, Any]) -> None:
    for mode in ("joint", "two-stage"):
        folder = tmp_path / mode
        _, result = trained(folder, Toy(4), mode=mode, **PAYS)
        text = write_run_page(folder, command="the command").read_text()
        (_, _, _, decision), named = captured["page"]
        # The trace of a two-stage run ends with other baselines.
        assert decision == result[0].decision and result[0].mode == mode
        assert f"{result[0].cost.energy_delay:.4g} mJ\N{DOT OPERATOR}ms" in text and "the command" in text
        own_value = [row for row in rows_of(folder)[1:] if row["mode"] == mode]
        assert (
            [row.model_dump(mode="json") for row in named["rows"]] == own_value
            and named["details"]["considered"]
            and "takes at least" in text
        )
        (_, series), _ = captured["Accuracy"]
        assert set(series) == (
            {"accuracy", "hardware-loss weight", "frozen"} if mode == "joint" else {"accuracy"}
        )
        assert all(len(values) == len(own_value) for _, values in series.values())


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DesignResult]:
    """Directory of a finished run, and its result."""
    folder = tmp_path_factory.mktemp("trained")
    _, (result,) = trained(folder, Toy(4))
    return folder, result


@pytest.fixture
def finished(trained_run: tuple[Path, DesignResult], tmp_path: Path) -> DesignResult:
    """Result of the finished run that is copied to `tmp_path`."""
    folder, result = trained_run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return result


@pytest.mark.usefixtures("finished")
def test_run_page_of_unfinished_run_shows_last_row(tmp_path: Path, captured: dict[str, Any]) -> None:
    lines = (tmp_path / TRACE_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / TRACE_FILE).write_bytes(b"".join(lines[:3]))
    (tmp_path / PLAN_FILE).unlink()
    write_run_page(tmp_path)
    (_, _, _, decision), named = captured["page"]
    assert decision == HardwareDecision.from_dict(json.loads(lines[2])["decision"])
    assert named["details"] is None


def test_run_page_ignores_details_of_other_plan(
    finished: DesignResult, tmp_path: Path, captured: dict[str, Any]
) -> None:
    hw, layers = hardware(), chain()
    other = hw.initial_decision(layers)
    assert other != finished.decision
    save_plan(tmp_path, hw, layers, other, extra={"considered": [], "gap": 0.0})
    write_run_page(tmp_path)
    assert captured["page"][1]["details"] is None


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("name", ["mode", "accuracy", "decision", "cost"])
def test_run_page_with_incomplete_row_is_refused(name: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (tmp_path / TRACE_FILE).read_text().splitlines()]
    del rows[2][name]
    (tmp_path / TRACE_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FileFormatError, match=rf"{name}"):
        write_run_page(tmp_path)


def test_run_page_without_own_rows_is_refused(trained_run: tuple[Path, DesignResult], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_run_page(tmp_path)
    shutil.copytree(trained_run[0], tmp_path, dirs_exist_ok=True)
    rows = [json.loads(line) for line in (tmp_path / TRACE_FILE).read_text().splitlines()]
    rows[0]["mode"] = "other"
    (tmp_path / TRACE_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FileFormatError):
        write_run_page(tmp_path)


def test_comparison_page_has_table(tmp_path: Path, captured: dict[str, Any]) -> None:
    line = {"mode": "joint", "seeds": 2, "accuracy": 0.9, "energy_delay": 1.5, "ratio": None, "low": None,
            "high": None, "violations": 1}  # fmt: skip
    runs = [{"seed": seed, "mode": mode, "accuracy": 0.5 + seed / 10, "energy_delay": 2.0 + seed}
            for seed in (0, 1) for mode in ("joint", "two-stage")]  # fmt: skip
    record = {"modes": [line], "runs": runs, "verdict": "No winner.", "environment": {"device": "a CPU"},
              "command": "the command", "prediction": "All products are guesses."}  # fmt: skip
    text = write_comparison(tmp_path, record).read_text()
    assert (
        "No winner." in text
        and "the command" in text
        and text.count('<p class="summary">All products are guesses.') == 1
    )
    assert "joint, seed 1: 3 mJ ms, 60.0%" in text and "Accuracy and energy-delay product" in text
    assert "Where this was computed" in text and "Measured" not in text
    assert captured["Predicted energy-delay product"][1]["rows"] == [line]
