"""Pages: whose design they show, where time and energy go, and what they say of bounds and splits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.design.saved_plan import PLAN, save_plan
from sparseflow.codesign.joint.trace import TRACE
from sparseflow.codesign.report import page
from sparseflow.codesign.report.page import page_of_run, write_comparison, write_page
from sparseflow.core.report import Table
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.toys import PAYS, Toy, chain, hardware, rows_of, trained


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What goes into pages: the arguments of the last figure or page of each kind."""
    found: dict[str, Any] = {}

    def spy(name: str, key: Any) -> None:
        original = getattr(page, name)

        def spying(*args: Any, **named: Any) -> Any:
            found[key(*args, **named)] = (args, named)
            return original(*args, **named)

        monkeypatch.setattr(page, name, spying)

    spy("plot_stacked_bars", lambda title, *_, **__: title)
    spy("plot_curves", lambda title, *_, **__: title)
    spy("Table", lambda **named: named["title"])
    spy("write_page", lambda *_, **__: "page")
    return found


@pytest.mark.parametrize("mode", ["serial", "balanced"])
@pytest.mark.parametrize("fine", [False, True])
def test_time_and_energy_of_all_slots_are_accounted_for(
    mode: str, fine: bool, tmp_path: Path, shown: dict[str, Any]
) -> None:
    hw = hardware(**PAYS, mapping={"mode": mode}, partition={"min_split_gain_ratio": 0.0})
    layers = chain(seed=2)
    decision = hw.remap(layers, hw.begin(layers), fine=fine)
    assert decision is not None
    decision = replace(decision, mapping=tuple(at % 2 for at in range(len(decision.mapping))),
                       rewrite_plan=None) if not fine else decision  # fmt: skip
    path = write_page(tmp_path, hw, layers, decision)
    assert path == tmp_path / "report.html" and path.read_text().startswith("<!doctype html>")
    stats = hw.price(layers, decision).stats
    (_, labels, time), _ = shown["Where time goes"]
    # A batch takes each slot as long as any other, busy or not.
    assert len(labels) == 3
    for parts in zip(*time.values(), strict=True):
        assert sum(parts) == pytest.approx(stats.total_latency_ms)
    (_, _, energy), _ = shown["Where energy goes"]
    assert sum(sum(values) for values in energy.values()) == pytest.approx(stats.energy_mj)


def test_it_says_whether_costs_were_measured(tmp_path: Path, shown: dict[str, Any]) -> None:
    hw, layers = hardware(), chain()
    write_page(tmp_path, hw, layers, replace(hw.begin(layers), chips=("npu-m", "npu-m", "npu-s")))
    _, named = shown["Chips"]
    assert [row["priced"] for row in named["rows"]] == ["analytic"] * 3
    assert [row["chip"] for row in named["rows"]] == ["npu-m", "npu-m", "npu-s"]
    assert isinstance(Table(**named), Table)


def test_bounds_and_splits_are_told_where_they_are_known(tmp_path: Path, shown: dict[str, Any]) -> None:
    hw, layers = hardware(**PAYS, partition={"min_split_gain_ratio": 0.0}), chain()
    decision, told = hw.concluded(layers, hw.begin(layers), fine=True)
    text = write_page(tmp_path, hw, layers, decision, told=told).read_text()
    assert f"takes less than {told['lower_bound_ms']:.4g} ms" in text and "ran out of time" not in text
    assert len(shown["Splits"][1]["rows"]) == len(told["considered"]) > 0
    assert "ran out of time" in write_page(
        tmp_path, hw, layers, decision, told=told | {"finished": False}
    ).read_text()  # fmt: skip
    text = write_page(tmp_path, hw, layers, decision).read_text()
    assert "No bound of this mapping was computed" in text and "were considered" not in text


def test_a_page_of_a_run_shows_its_own_design(tmp_path: Path, shown: dict[str, Any]) -> None:
    for mode in ("joint", "two-stage"):
        folder = tmp_path / mode
        _, found = trained(folder, Toy(4), mode=mode, **PAYS)
        text = page_of_run(folder, command="the command").read_text()
        (_, _, _, decision), named = shown["page"]
        # The trace of a two-stage run ends with other baselines.
        assert decision == found[0].decision and found[0].mode == mode
        assert f"{found[0].priced.energy_delay:.4g} mJ ms" in text and "the command" in text
        own = [row for row in rows_of(folder)[1:] if row["mode"] == mode]
        assert named["rows"] == own and named["told"]["considered"] and "takes less than" in text
        (_, series), _ = shown["Accuracy"]
        assert set(series) == (
            {"accuracy", "weight of the hardware", "frozen"} if mode == "joint" else {"accuracy"}
        )
        assert all(len(values) == len(own) for _, values in series.values())


def test_of_a_run_that_goes_on_the_last_row_is_shown(tmp_path: Path, shown: dict[str, Any]) -> None:
    trained(tmp_path, Toy(4))
    lines = (tmp_path / TRACE).read_bytes().splitlines(keepends=True)
    (tmp_path / TRACE).write_bytes(b"".join(lines[:3]))
    (tmp_path / PLAN).unlink()
    page_of_run(tmp_path)
    (_, _, _, decision), named = shown["page"]
    assert decision == Decision.from_dict(json.loads(lines[2])["decision"]) and named["told"] is None


def test_what_a_plan_tells_is_of_that_plan(tmp_path: Path, shown: dict[str, Any]) -> None:
    _, (found,) = trained(tmp_path, Toy(4))
    hw, layers = hardware(), chain()
    other = hw.begin(layers)
    assert other != found.decision
    save_plan(tmp_path, hw, layers, other, extra={"considered": [], "gap": 0.0})
    page_of_run(tmp_path)
    assert shown["page"][1]["told"] is None


@pytest.mark.parametrize("name", ["mode", "accuracy", "lambda_hw", "guard", "layers", "decision", "priced"])
def test_a_row_that_lacks_something_is_damage(name: str, tmp_path: Path) -> None:
    trained(tmp_path, Toy(2))
    rows = [json.loads(line) for line in (tmp_path / TRACE).read_text().splitlines()]
    del rows[2][name]
    (tmp_path / TRACE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FileFormatError, match=rf"{name}"):
        page_of_run(tmp_path)


def test_a_trace_of_nothing_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        page_of_run(tmp_path)
    trained(tmp_path, Toy(2))
    rows = [json.loads(line) for line in (tmp_path / TRACE).read_text().splitlines()]
    rows[0]["mode"] = "other"
    (tmp_path / TRACE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FileFormatError):
        page_of_run(tmp_path)


def test_a_comparison_is_a_table(tmp_path: Path, shown: dict[str, Any]) -> None:
    line = {"mode": "joint", "seeds": 2, "accuracy": 0.9, "energy_delay": 1.5, "ratio": None, "low": None,
            "high": None, "violations": 1}  # fmt: skip
    told = {"modes": [line], "verdict": "Neither wins.", "environment": {}, "command": "the command"}
    text = write_comparison(tmp_path, told).read_text()
    assert "Neither wins." in text and "the command" in text
    assert shown["Energy-delay product"][1]["rows"] == [line]
