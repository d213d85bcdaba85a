"""Tests of `codesign.design.saved_plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import PLAN_FILE, load_plan, save_plan
from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import LatencyRoofline, LayerHwProxy
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.toys import chain, hardware
from tests.conformance import check_artifact_file

Whole = tuple[Hardware, list[LayerNode], HardwareDecision]


@pytest.fixture(scope="module")
def saved_dir() -> Whole:
    hw, layers = hardware(hardware={"link": "ucie"}), chain()
    first = hw.initial_decision(layers)
    decision = hw.remap(layers, first, use_fine_split=True)
    assert decision is not None and decision.rewrite_plan is not None
    return hw, layers, decision


@pytest.fixture
def path(saved_dir: Whole, tmp_path: Path) -> Path:
    return save_plan(tmp_path, *saved_dir)


def test_plan_round_trip(saved_dir: Whole, path: Path) -> None:
    hw, layers, decision = saved_dir
    saved = load_plan(path)
    assert (saved.layers, saved.decision) == (layers, decision) and path.name == PLAN_FILE
    assert saved.hardware.config == hw.config and saved.hardware.library == hw.library
    assert saved.hardware.reference == hw.reference
    priced = saved.hardware.evaluate_cost(saved.layers, saved.decision)
    assert priced == hw.evaluate_cost(layers, decision)
    record = json.loads(path.read_text())
    assert record["cost"]["objective"] == priced.objective
    assert load_plan(str(path)).decision == decision


def test_save_plan_replaces_existing_plan(saved_dir: Whole, tmp_path: Path) -> None:
    hw, layers, decision = saved_dir
    save_plan(tmp_path, hw, layers, hw.initial_decision(layers))
    path = save_plan(tmp_path, hw, layers, decision, extra={"gap": 0.5})
    assert json.loads(path.read_text())["extra"]["gap"] == 0.5 and load_plan(path).decision == decision
    assert [item.name for item in tmp_path.iterdir()] == [PLAN_FILE]


def test_plan_file_conforms(path: Path) -> None:
    check_artifact_file(load_plan, path, "sparseflow codesign plan")


@pytest.mark.parametrize("name", ["settings", "library", "reference", "proxy", "layers", "decision", "cost"])
def test_load_plan_with_a_missing_or_wrong_part_is_refused(path: Path, name: str) -> None:
    record = json.loads(path.read_text())
    for value in (..., 3, "x", [], {}, [None]):
        record[name] = value
        path.write_text(json.dumps({key: item for key, item in record.items() if item is not ...}))
        with pytest.raises(FileFormatError, match=r"plan\.json"):
            load_plan(path)


DAMAGE: list[tuple[tuple[Any, ...], Any]] = [
    (("settings", "hardware", "slots"), -1),
    (("settings", "hardware", "slots"), 2),  # the decision is of three
    (("library", "chips", 0, "peak_flops"), 1e13),
    (("library", "chips", 0, "peak_flops", "float32"), -1.0),
    (("layers", 0, "traffic_in_bytes"), -5),
    (("layers", 1, "traffic_in_bytes"), 1),
    (("decision", "rewrite_plan", "splits", 0, "sizes"), [[1], 2]),
    (("decision", "rewrite_plan", "splits", 0, "layer"), [0]),
    (("library", "chips"), []),
    (("reference", "latency_ms"), 0.0),
    (("reference", "latency_ms"), "x"),
    (("layers", 0, "flops"), "x"),
    (("layers", 0, "name"), None),
    (("layers", 2, "units"), "x"),
    (("decision", "chips", 0), "npu-x"),
    (("decision", "chips"), ["npu-m"]),
    (("decision", "mapping", 0), 3),
    (("decision", "mapping", 0), -1),
    (("decision", "mapping"), [0]),
    (("decision", "segments", 0), []),
    (("decision", "positions_mm"), [[0.0, 0.0]]),
    (("decision", "positions_mm", 1), [None, 0.0]),
    (("decision", "rewrite_plan", "splits", 0, "layer"), 40),
    (("decision", "rewrite_plan", "splits", 0, "slots", 1), 3),
    (("decision", "rewrite_plan", "splits", 0, "permutation", 0), 1),
]


@pytest.mark.parametrize(("location", "value"), DAMAGE)
def test_load_plan_with_damaged_value_is_refused(path: Path, location: tuple[Any, ...], value: Any) -> None:
    record = json.loads(path.read_text())
    index = record
    for name in location[:-1]:
        index = index[name]
    assert index[location[-1]] != value
    index[location[-1]] = value
    path.write_text(json.dumps(record))
    with pytest.raises(InputError):
        saved = load_plan(path)
        saved.hardware.evaluate_cost(saved.layers, saved.decision)


@pytest.mark.parametrize("name", ["library", "proxy"])
def test_load_plan_needs_no_other_file(name: str, saved_dir: Whole, tmp_path: Path) -> None:
    own_part = tmp_path / "mine"
    if name == "library":
        own_part.write_text(json.dumps(read_library().model_dump(mode="json")))
    else:
        LayerHwProxy.analytic().save(own_part)
    hw = hardware(hardware={name: str(own_part)})
    decision = hw.initial_decision(saved_dir[1])
    path = save_plan(tmp_path, hw, saved_dir[1], decision)
    own_part.unlink()
    saved = load_plan(path)
    assert saved.hardware.evaluate_cost(saved.layers, saved.decision) == hw.evaluate_cost(
        saved_dir[1], decision
    )


def test_load_plan_uses_its_own_proxy(saved_dir: Whole, tmp_path: Path) -> None:
    # Of a proxy that was handed in, the settings say nothing.
    hw = Hardware(hardware().config, twice_as_slow())
    decision = hw.initial_decision(saved_dir[1])
    path = save_plan(tmp_path, hw, saved_dir[1], decision)
    saved = load_plan(path)
    assert saved.hardware.evaluate_cost(saved.layers, saved.decision) == hw.evaluate_cost(
        saved_dir[1], decision
    )


def twice_as_slow() -> LayerHwProxy:
    analytic, ideal = LayerHwProxy.analytic(), LatencyRoofline.ideal()
    return replace(analytic, roofline=replace(ideal, values=ideal.values * torch.tensor([0.5, 0.5, 1.0])))


def test_extra_round_trip(saved_dir: Whole, tmp_path: Path) -> None:
    record = {"considered": [{"name": "a"}], "gap": 0.5, "note": None}
    assert load_plan(save_plan(tmp_path, *saved_dir, extra=record)).extra == record
    assert load_plan(save_plan(tmp_path, *saved_dir)).extra == {}


def priced_by_proxy(folder: Path, layers: list[LayerNode]) -> tuple[Path, Path]:
    """A plan and the copy of its proxy."""
    hw = Hardware(hardware().config, twice_as_slow())
    path = save_plan(folder, hw, layers, hw.initial_decision(layers))
    (copy,) = folder.glob("proxy-*.safetensors")
    return path, copy


def test_save_plan_keeps_fitted_proxy(saved_dir: Whole, tmp_path: Path) -> None:
    # `profile` and `plan` may be told the same folder.
    fitted = tmp_path / "proxy.safetensors"
    LayerHwProxy.analytic().save(fitted)
    before = fitted.read_bytes()
    path, _ = priced_by_proxy(tmp_path, saved_dir[1])
    assert fitted.read_bytes() == before
    assert load_plan(path).hardware.proxy.digest == twice_as_slow().digest


def test_load_plan_with_replaced_proxy_is_refused(saved_dir: Whole, tmp_path: Path) -> None:
    path, copy = priced_by_proxy(tmp_path, saved_dir[1])
    LayerHwProxy.analytic().save(copy)
    with pytest.raises(FileFormatError, match=r"plan\.json"):
        load_plan(path)
    copy.write_bytes(b"no")
    with pytest.raises(FileFormatError):
        load_plan(path)
    copy.unlink()
    with pytest.raises(FileFormatError):
        load_plan(path)


@pytest.mark.parametrize("value", [True, 3, "x", "../../proxy", ["a"]])
def test_load_plan_with_invalid_digest_is_refused(value: Any, saved_dir: Whole, tmp_path: Path) -> None:
    path, _ = priced_by_proxy(tmp_path, saved_dir[1])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"proxy": value}))
    with pytest.raises(FileFormatError):
        load_plan(path)
