"""Tests of `codesign.hardware.proxy.fitting`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import (
    DeviceSpec,
    LayerHwProxy,
    ProxyTrainingConfig,
    cross_validate,
    fit_proxy,
)
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.made_up import GPU, change, node, points

QUICK = ProxyTrainingConfig(members=2, hidden=8, steps=30, decays=(1.0,))


@pytest.fixture
def rough_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not matter how good the fit is."""
    monkeypatch.setattr("sparseflow.codesign.hardware.proxy.analytic._ROOFLINE_STEPS", 60)


def test_cross_validation_beats_roofline() -> None:
    measured = points(360)
    result = cross_validate(measured, num_folds=3).summarize()
    assert result["points"] == result["configurations"] == 360
    assert result["median_error"] <= 0.08 and result["spearman"] >= 0.98
    assert result["median_error"] < 0.7 * result["roofline_median_error"]
    assert result["spearman"] >= result["roofline_spearman"]
    assert result["mem_error"] < 0.02 and result["power_error"] < 0.05
    assert sum(value["points"] for value in result["by"]["layer_type"].values()) == 360
    assert set(result["by"]["precision"]) == {"float32", "bfloat16"}


@pytest.mark.usefixtures("rough_roofline")
def test_cross_validation_holds_out_whole_configurations() -> None:
    first = points(24)
    repeated = first + [
        change(p, layer=replace(p.layer, name="again", id=3), lat_ms=1.01 * p.lat_ms) for p in first
    ]
    evaluation = cross_validate(repeated, num_folds=4, training=QUICK)
    # The same layer under two names was predicted by the same proxy.
    np.testing.assert_array_equal(evaluation.predicted_ms[:24], evaluation.predicted_ms[24:])
    assert evaluation.summarize()["configurations"] == 24


@pytest.mark.usefixtures("rough_roofline")
def test_fit_proxy_records_held_out_errors() -> None:
    fractions: list[float] = []
    proxy = fit_proxy(
        points(30), num_folds=2, training=QUICK, progress=lambda _, fraction: fractions.append(fraction)
    )
    held_out = proxy.provenance["held_out"]
    assert held_out["folds"] == 2 and held_out["median_error"] > 0.0
    assert fractions == pytest.approx([1 / 3, 2 / 3, 1.0]) and proxy.devices == (GPU,)
    assert fit_proxy(points(30), num_folds=0, training=QUICK).provenance["held_out"] is None


@pytest.mark.usefixtures("rough_roofline")
def test_fit_proxy_is_deterministic_for_a_seed() -> None:
    measured, longer = points(60), replace(QUICK, steps=200)
    tables = [
        fit_proxy(measured, num_folds=0, training=longer, seed=seed)
        .predict_table([node()], [GPU])["lat_ms"]
        .item()
        for seed in (0, 0, 1)
    ]
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.usefixtures("rough_roofline")
def test_fit_proxy_ignores_analytic_points() -> None:
    measured = points(30)
    chip = DeviceSpec.from_chip(read_library().get_chip("npu-m"))
    prediction = LayerHwProxy.analytic().predict_layer(measured[0].layer, chip)
    analytic = change(
        measured[0], device=chip, lat_ms=float(prediction["lat_ms"]), power_w=float(prediction["power_w"]),
        provenance="analytic", mem_provenance="analytic", environment="",
    )  # fmt: skip
    proxy = fit_proxy([*measured, analytic], num_folds=0, training=QUICK)
    assert (proxy.provenance["measured"], proxy.provenance["analytic"]) == (30, 1)
    assert proxy.get_source(chip) == "analytic" and proxy.get_source(GPU) == "measured"
    single = fit_proxy(measured, num_folds=0, training=QUICK)
    assert proxy.predict_table([node()], [GPU])["lat_ms"] == single.predict_table([node()], [GPU])["lat_ms"]


def test_fit_proxy_of_two_devices() -> None:
    slow = replace(
        GPU, name="slow", peak_flops=1e14, peak_bw=5e11, rates=(("float32", 1e14), ("bfloat16", 1e14))
    )
    present = points(60)
    both = present + [change(point, device=slow, lat_ms=10.0 * point.lat_ms) for point in present]
    proxy = fit_proxy(both, num_folds=0, training=replace(QUICK, steps=200))
    assert proxy.get_source(slow) == proxy.get_source(GPU) == "measured"
    result = proxy.predict_table([point.layer for point in present], [GPU, slow])["lat_ms"]
    assert float(np.median(result[:, 1] / result[:, 0])) == pytest.approx(10.0, rel=0.15)


def test_fit_proxy_with_invalid_points_is_refused() -> None:
    measured = points(12)
    with pytest.raises(InputError, match="7"):
        fit_proxy(measured[:7])
    with pytest.raises(InputError):
        fit_proxy([*measured, change(measured[0], mode="eager")])
    with pytest.raises(InputError, match="`folds`"):
        fit_proxy(measured, num_folds=13)


@pytest.mark.usefixtures("rough_roofline")
def test_fit_proxy_under_no_grad() -> None:
    with torch.no_grad():
        proxy = fit_proxy(points(12), num_folds=0, training=QUICK)
    assert proxy.predict_table([node()], [GPU])["lat_ms"].item() > 0.0


@pytest.mark.usefixtures("rough_roofline")
def test_fit_proxy_progress_ends_at_one() -> None:
    measured, fractions = points(12), []
    cross_validate(
        measured, num_folds=3, training=QUICK, progress=lambda _, fraction: fractions.append(fraction)
    )
    assert fractions == pytest.approx([1 / 3, 2 / 3, 1.0])
    fractions.clear()
    fit_proxy(measured, num_folds=3, training=QUICK, progress=lambda _, fraction: fractions.append(fraction))
    assert fractions == pytest.approx([0.25, 0.5, 0.75, 1.0])
