"""Fitting a proxy: how good it is on configurations that it has not seen, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerHwProxy, Training, fit, judge
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.made_up import GPU, node, points

QUICK = Training(members=2, hidden=8, steps=30, decays=(1.0,))


@pytest.fixture
def rough_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not matter how good the fit is."""
    monkeypatch.setattr("sparseflow.codesign.hardware.proxy.analytic._ROOFLINE_STEPS", 60)


def test_unseen_configurations_are_predicted_better_than_by_the_roofline() -> None:
    measured = points(360)
    found = judge(measured, folds=3).summary()
    assert found["points"] == found["configurations"] == 360
    assert found["median_error"] <= 0.08 and found["spearman"] >= 0.98
    assert found["median_error"] < 0.7 * found["roofline_median_error"]
    assert found["spearman"] >= found["roofline_spearman"]
    assert found["mem_error"] < 0.02 and found["power_error"] < 0.05
    assert sum(each["points"] for each in found["by"]["layer_type"].values()) == 360
    assert set(found["by"]["precision"]) == {"float32", "bfloat16"}


@pytest.mark.usefixtures("rough_roofline")
def test_a_configuration_is_held_out_as_a_whole() -> None:
    one = points(24)
    twice = one + [
        replace(p, layer=replace(p.layer, name="again", id=3), lat_ms=1.01 * p.lat_ms) for p in one
    ]
    judged = judge(twice, folds=4, training=QUICK)
    # The same layer under two names was predicted by the same proxy.
    np.testing.assert_array_equal(judged.predicted_ms[:24], judged.predicted_ms[24:])
    assert judged.summary()["configurations"] == 24


@pytest.mark.usefixtures("rough_roofline")
def test_a_proxy_carries_how_good_it_is() -> None:
    done: list[tuple[int, int]] = []
    proxy = fit(points(30), folds=2, training=QUICK, progress=lambda *told: done.append(told))
    held_out = proxy.provenance["held_out"]
    assert held_out["folds"] == 2 and held_out["median_error"] > 0.0
    assert done == [(1, 3), (2, 3), (3, 3)] and proxy.devices == (GPU,)
    assert fit(points(30), folds=0, training=QUICK).provenance["held_out"] is None


@pytest.mark.usefixtures("rough_roofline")
def test_a_seed_decides_all() -> None:
    measured, longer = points(60), replace(QUICK, steps=200)
    tables = [
        fit(measured, folds=0, training=longer, seed=seed).table([node()], [GPU])["lat_ms"].item()
        for seed in (0, 0, 1)
    ]
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.usefixtures("rough_roofline")
def test_analytic_points_are_counted_and_not_learnt_from() -> None:
    measured = points(30)
    chip = DeviceSpec.of(read_library().chip("npu-m"))
    made = LayerHwProxy.analytic().predict_layer(measured[0].layer, chip)
    analytic = replace(
        measured[0], device=chip, lat_ms=float(made["lat_ms"]), power_w=float(made["power_w"]),
        provenance="analytic", mem_provenance="analytic", environment="",
    )  # fmt: skip
    proxy = fit([*measured, analytic], folds=0, training=QUICK)
    assert (proxy.provenance["measured"], proxy.provenance["analytic"]) == (30, 1)
    assert proxy.known(chip) == "analytic" and proxy.known(GPU) == "measured"
    alone = fit(measured, folds=0, training=QUICK)
    assert proxy.table([node()], [GPU])["lat_ms"] == alone.table([node()], [GPU])["lat_ms"]


def test_two_devices_have_coefficients_of_their_own() -> None:
    slow = replace(GPU, name="slow", peak_flops=1e14, peak_bw=5e11, rates=())
    there = points(60)
    both = there + [replace(point, device=slow, lat_ms=10.0 * point.lat_ms) for point in there]
    proxy = fit(both, folds=0, training=replace(QUICK, steps=200))
    assert proxy.known(slow) == proxy.known(GPU) == "measured"
    found = proxy.table([point.layer for point in there], [GPU, slow])["lat_ms"]
    assert float(np.median(found[:, 1] / found[:, 0])) == pytest.approx(10.0, rel=0.15)


def test_devices_without_points_can_be_taken_for_alike() -> None:
    measured, chip = points(60), read_library().chip("a100")
    ideal = fit(measured, folds=0, training=QUICK).table([node()], [chip])["lat_ms"].item()
    alike = fit(measured, folds=0, others="alike", training=QUICK)
    assert ideal == pytest.approx(LayerHwProxy.analytic().table([node()], [chip])["lat_ms"].item())
    assert alike.table([node()], [chip])["lat_ms"].item() > 1.1 * ideal
    assert alike.known(chip) == "analytic"


@pytest.mark.parametrize(
    "wrong", [{"lat_ms": math.nan}, {"lat_ms": 0.0}, {"mem_mb": -1.0}, {"power_w": math.inf}]
)
def test_points_that_are_no_measurement_are_named(wrong: dict[str, float]) -> None:
    measured = points(12)
    measured[7] = replace(measured[7], **wrong)
    with pytest.raises(InputError, match=rf"7 .{measured[7].layer.name}"):
        fit(measured)


def test_what_cannot_be_fitted_is_refused() -> None:
    measured = points(12)
    with pytest.raises(InputError, match="7"):
        fit(measured[:7])
    with pytest.raises(InputError):
        fit([*measured, replace(measured[0], mode="eager")])
    with pytest.raises(InputError, match="`folds`"):
        fit(measured, folds=13)


@pytest.mark.usefixtures("rough_roofline")
def test_fitting_works_without_gradients_around_it() -> None:
    with torch.no_grad():
        proxy = fit(points(12), folds=0, training=QUICK)
    assert proxy.table([node()], [GPU])["lat_ms"].item() > 0.0


@pytest.mark.usefixtures("rough_roofline")
def test_progress_ends_when_the_work_does() -> None:
    measured, told = points(12), []
    judge(measured, folds=3, training=QUICK, progress=lambda *one: told.append(one))
    assert told == [(1, 3), (2, 3), (3, 3)]
    told.clear()
    fit(measured, folds=3, training=QUICK, progress=lambda *one: told.append(one))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
