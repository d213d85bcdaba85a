"""Saved decisions: loaded without measuring, refused where they do not apply."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, neuron

import sparseflow
from sparseflow.core import timing
from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.spiking import load_plan, save_plan
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.explanation import explain
from tests.spiking.conftest import FakeTimes
from tests.spiking.nets import Opaque, from_rest, images, ready, same, small

X = images(3, 2)


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make every later measurement fail."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing may be measured")

    return lambda: monkeypatch.setattr(timing, "compare", fail)


def get_modes(net: nn.Module) -> list[str]:
    plan = get_accelerated_forward(net).list_plans()[-1]
    return [] if plan is None else [group.mode for group in plan.groups]


@pytest.mark.parametrize(
    ("ways", "modes"),
    [
        (("sparse", "dense"), ["dense", "sparse", "sparse"]),
        (("dense",), ["dense"] * 3),
        (("own",), []),
    ],
)
def test_a_loaded_plan_runs_as_the_saved_one(
    prefer: Callable[..., FakeTimes], no_timing: Any, tmp_path: Path, ways: Any, modes: list[str]
) -> None:
    prefer(*ways, **({"plan": 9.0} if ways == ("own",) else {}))
    net, path = small(), tmp_path / "plan.json"
    other, expected = copy.deepcopy(net), from_rest(net, X)
    functional.reset_net(net)
    save_plan(sparseflow.optimize(net, X, reset=True), path)
    no_timing()
    assert load_plan(other, path, X) is other
    assert get_modes(net)[: len(modes)] == get_modes(other)[: len(modes)] == modes
    with torch.no_grad():
        for _ in range(2):  # `reset` is saved, too
            assert same(other(X), expected)
    assert "from the cache" in explain(other).layers[1].reason or not modes
    save_plan(other, path)
    assert json.loads(path.read_text())["shapes"][0]["decisions"]["network"]["from_cache"]


def test_a_compiled_network_is_compiled_again(
    prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch, no_timing: Any, tmp_path: Path
) -> None:
    compilations: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: compilations.append(module) or module)
    prefer("dense", plan=2.6, compiled=0.5)
    net = small()
    other, expected = copy.deepcopy(net), from_rest(net, X)
    functional.reset_net(net)
    save_plan(sparseflow.optimize(net, X, compile=True), tmp_path / "plan.json")
    no_timing()
    load_plan(other, tmp_path / "plan.json", X)
    assert len(compilations) == 2 and same(from_rest(other, X), expected)


def test_all_shapes_are_saved(prefer: Callable[..., FakeTimes], no_timing: Any, tmp_path: Path) -> None:
    prefer("sparse", "dense")
    net = small()
    other = copy.deepcopy(net)
    sparseflow.optimize(net, X)
    expected = from_rest(net, X[:, :1])
    save_plan(net, tmp_path / "plan.json")
    no_timing()
    load_plan(other, tmp_path / "plan.json", X)
    assert same(from_rest(other, X[:, :1]), expected)
    assert get_modes(other) == ["dense", "sparse", "sparse"]


def test_a_network_that_runs_layer_by_layer(
    prefer: Callable[..., FakeTimes], no_timing: Any, tmp_path: Path
) -> None:
    prefer("events")
    net = ready(Opaque())
    other, expected = copy.deepcopy(net), from_rest(net, X)
    save_plan(sparseflow.optimize(net, X), tmp_path / "plan.json")
    no_timing()
    load_plan(other, tmp_path / "plan.json", X)
    assert same(from_rest(other, X), expected)
    assert [row.backend for row in explain(other).layers] == [row.backend for row in explain(net).layers]


@pytest.mark.parametrize("measure", ["call", "never"])
def test_other_shapes_follow_the_decisions_if_nothing_is_measured(
    prefer: Callable[..., FakeTimes], measure: Any
) -> None:
    times = prefer("sparse", "dense")
    net = small()
    expected = [from_rest(net, x) for x in (X[:, :1], X[:2])]
    functional.reset_net(net)
    sparseflow.optimize(net, X, measure=measure)
    count = len(times.calls)
    assert same([from_rest(net, x) for x in (X[:, :1], X[:2])], expected)
    assert get_modes(net) == ["dense", "sparse", "sparse"]
    assert (len(times.calls) > count) == (measure == "call")


def test_other_shapes_are_measured_in_the_background(prefer: Callable[..., FakeTimes]) -> None:
    times = prefer("sparse", "dense")
    net = small()
    expected = [from_rest(net, x) for x in (X[:2], X)]
    functional.reset_net(net)
    sparseflow.optimize(net, measure="background", cache=False)
    background = get_accelerated_forward(net)._background
    for x, output in zip((X[:2], X), expected, strict=True):
        count = len(times.calls)
        assert same(from_rest(net, x), output)
        background.wait()
        assert len(times.calls) > count
        count = len(times.calls)
        assert same(from_rest(net, x), output) and get_modes(net) == ["dense", "sparse", "sparse"]
        assert len(times.calls) == count, "the decisions of the background are followed"


def test_a_shape_that_cannot_be_measured_runs_its_own_code(
    prefer: Callable[..., FakeTimes], no_timing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefer("sparse", "dense")
    net = small()
    expected = from_rest(net, X)
    functional.reset_net(net)
    sparseflow.optimize(net, measure="background", cache=False)
    no_timing()
    for _ in range(3):
        assert same(from_rest(net, X), expected)
        get_accelerated_forward(net)._background.wait()
    assert [record.message for record in caplog.records] == ["inputs of a new shape cannot be measured"]


def test_without_decisions_the_own_code_runs_if_nothing_is_measured(
    prefer: Callable[..., FakeTimes],
) -> None:
    times = prefer("sparse")
    net = small()
    expected = from_rest(net, X)
    functional.reset_net(net)
    sparseflow.optimize(net, measure="never")
    assert same(from_rest(net, X), expected) and not times.calls
    with pytest.raises(ModelError, match="nothing was measured yet"):
        save_plan(net, "plan.json")


def test_plans_that_do_not_apply(prefer: Callable[..., FakeTimes], tmp_path: Path) -> None:
    prefer("sparse", "dense")
    path, net = tmp_path / "plan.json", small()
    other = copy.deepcopy(net)
    save_plan(sparseflow.optimize(net, X), path)
    before = path.read_bytes()
    with pytest.raises(
        InputError, match=r"no decisions about inputs of the shapes \[\[2, 2, 3, 8, 8\]\], but"
    ):
        load_plan(other, path, X[:2])
    with pytest.raises(InputError, match="saved for another network"):
        load_plan(small(make=neuron.LIFNode), path, X)
    for field, message in (("device", "another device"), ("versions", "other versions")):
        path.write_text(json.dumps({**json.loads(before), field: "nothing"}))
        with pytest.raises(InputError, match=rf"saved for {message} \(nothing, now "):
            load_plan(other, path, X)
    path.write_bytes(before[:100])
    with pytest.raises(FileFormatError):
        load_plan(other, path, X)
    assert "forward" not in vars(other)
    with pytest.raises(ModelError, match="is not optimized"):
        save_plan(other, path)
    with pytest.raises(InputError, match="`measure`"):
        sparseflow.optimize(other, X, measure="sometimes")  # type: ignore[arg-type]
