"""Plans on disk: there and back, and what is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import PLAN, load_plan, save_plan
from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import LayerHwProxy, Roofline
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.toys import chain, hardware

Whole = tuple[Hardware, list[LayerNode], Decision]


@pytest.fixture(scope="module")
def whole() -> Whole:
    hw, layers = hardware(hardware={"link": "ucie"}), chain()
    first = hw.begin(layers)
    decision = hw.remap(layers, first, fine=True)
    assert decision is not None and decision.rewrite_plan is not None
    return hw, layers, decision


@pytest.fixture
def path(whole: Whole, tmp_path: Path) -> Path:
    return save_plan(tmp_path, *whole)


def test_there_and_back(whole: Whole, path: Path) -> None:
    hw, layers, decision = whole
    found = load_plan(path)
    assert (found.layers, found.decision) == (layers, decision) and path.name == PLAN
    assert found.hardware.settings == hw.settings and found.hardware.library == hw.library
    assert found.hardware.reference == hw.reference
    priced = found.hardware.price(found.layers, found.decision)
    assert priced == hw.price(layers, decision)
    told = json.loads(path.read_text())
    assert told["priced"]["objective"] == priced.objective
    assert load_plan(str(path)).decision == decision


def test_more_can_be_told_and_what_was_there_is_replaced(whole: Whole, tmp_path: Path) -> None:
    hw, layers, decision = whole
    save_plan(tmp_path, hw, layers, hw.begin(layers))
    path = save_plan(tmp_path, hw, layers, decision, extra={"gap": 0.5})
    assert json.loads(path.read_text())["gap"] == 0.5 and load_plan(path).decision == decision
    assert [each.name for each in tmp_path.iterdir()] == [PLAN]


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError):
            load_plan(missing)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"3", b'"plan"', b"\xff\xfe", b"{}", b'{"settings": {}}']
)
def test_what_is_no_plan_at_all(content: bytes, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_bytes(content)
    with pytest.raises(FileFormatError, match=r"plan\.json"):
        load_plan(tmp_path / PLAN)


PARTS = ("settings", "library", "reference", "layers", "decision")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_missing_or_something_else(path: Path, name: str) -> None:
    told = json.loads(path.read_text())
    for value in (..., None, 3, "x", [], {}, [None]):
        told[name] = value
        path.write_text(json.dumps({key: each for key, each in told.items() if each is not ...}))
        with pytest.raises(FileFormatError, match=r"plan\.json"):
            load_plan(path)


DAMAGE: list[tuple[tuple[Any, ...], Any]] = [
    (("settings", "hardware", "slots"), -1),
    (("settings", "hardware", "slots"), 2),  # the decision is of three
    (("library", "chips", 0, "peak_flops"), -1.0),
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


@pytest.mark.parametrize(("where", "value"), DAMAGE)
def test_damage_is_told_when_a_plan_is_read_or_priced(path: Path, where: tuple[Any, ...], value: Any) -> None:
    told = json.loads(path.read_text())
    at = told
    for name in where[:-1]:
        at = at[name]
    assert at[where[-1]] != value
    at[where[-1]] = value
    path.write_text(json.dumps(told))
    with pytest.raises(InputError):
        found = load_plan(path)
        found.hardware.price(found.layers, found.decision)


def test_a_file_cut_anywhere_is_no_plan(path: Path) -> None:
    content = path.read_bytes()
    for share in range(1, 20):
        path.write_bytes(content[: len(content) * share // 20])
        with pytest.raises(FileFormatError):
            load_plan(path)


@pytest.mark.parametrize("name", ["library", "proxy"])
def test_a_plan_holds_all_that_is_needed_to_price_it(name: str, whole: Whole, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    if name == "library":
        mine.write_text(json.dumps(read_library().model_dump(mode="json")))
    else:
        LayerHwProxy.analytic().save(mine)
    hw = hardware(hardware={name: str(mine)})
    decision = hw.begin(whole[1])
    path = save_plan(tmp_path, hw, whole[1], decision)
    mine.unlink()
    found = load_plan(path)
    assert found.hardware.price(found.layers, found.decision) == hw.price(whole[1], decision)


def test_a_plan_is_priced_by_what_it_was_made_with(whole: Whole, tmp_path: Path) -> None:
    # Of a proxy that was handed in, the settings say nothing.
    hw = Hardware(hardware().settings, twice_as_slow())
    decision = hw.begin(whole[1])
    path = save_plan(tmp_path, hw, whole[1], decision)
    found = load_plan(path)
    assert found.hardware.price(found.layers, found.decision) == hw.price(whole[1], decision)


def twice_as_slow() -> LayerHwProxy:
    analytic, ideal = LayerHwProxy.analytic(), Roofline.ideal()
    return replace(analytic, roofline=replace(ideal, values=ideal.values * torch.tensor([0.5, 0.5, 1.0])))


def test_what_else_a_plan_tells_comes_back(whole: Whole, tmp_path: Path) -> None:
    told = {"considered": [{"name": "a"}], "gap": 0.5, "note": None}
    assert load_plan(save_plan(tmp_path, *whole, extra=told)).extra == told
    assert load_plan(save_plan(tmp_path, *whole)).extra == {}


def priced_by_proxy(folder: Path, layers: list[LayerNode]) -> tuple[Path, Path]:
    """A plan and the copy of its proxy."""
    hw = Hardware(hardware().settings, twice_as_slow())
    path = save_plan(folder, hw, layers, hw.begin(layers))
    (copy,) = folder.glob("proxy-*.safetensors")
    return path, copy


def test_a_fit_in_the_same_folder_is_left_alone(whole: Whole, tmp_path: Path) -> None:
    # `profile` and `plan` may be told the same folder.
    fitted = tmp_path / "proxy.safetensors"
    LayerHwProxy.analytic().save(fitted)
    before = fitted.read_bytes()
    path, _ = priced_by_proxy(tmp_path, whole[1])
    assert fitted.read_bytes() == before
    assert load_plan(path).hardware.proxy.digest == twice_as_slow().digest


def test_another_proxy_in_its_place_is_refused(whole: Whole, tmp_path: Path) -> None:
    path, copy = priced_by_proxy(tmp_path, whole[1])
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
def test_a_digest_that_is_none_is_refused(value: Any, whole: Whole, tmp_path: Path) -> None:
    path, _ = priced_by_proxy(tmp_path, whole[1])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"proxy": value}))
    with pytest.raises(FileFormatError):
        load_plan(path)
