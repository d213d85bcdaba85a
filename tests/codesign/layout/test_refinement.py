"""Refining makes layouts better or leaves them alone, and never illegal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.codesign.layout.refinement import refine_layout
from sparseflow.codesign.layout.sites import Wafer, build_site_grid
from sparseflow.codesign.layout.wafer import LayoutWeights, WaferLayout
from sparseflow.errors import InputError

WAFER = Wafer(radius_mm=70.0)


def on_sites(chips: int = 5, **settings: Any) -> WaferLayout:
    sizes = np.random.default_rng(1).uniform(8.0, 16.0, (chips, 2))
    layout = WaferLayout(WAFER, sizes, sigma_mm=20.0, **settings)
    sites = build_site_grid(WAFER, sizes)
    layout.set_assignment(sites, np.random.default_rng(2).permutation(len(sites)))
    return layout


def work(chips: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.rand(chips, chips, generator=g), torch.rand(chips, generator=g)


def test_it_gets_better_and_stays_legal() -> None:
    layout = on_sites()
    before = layout.positions_mm.detach().clone()
    result = refine_layout(layout, *work(), steps=80)
    assert result.was_legal and result.improved and layout.is_legal()
    assert result.after is not None and result.after < result.before
    assert not torch.equal(layout.positions_mm, before)
    _, stats = layout(*work())
    assert (stats["comm"] + stats["therm"]).item() == pytest.approx(result.after, rel=1e-6)
    assert stats["boundary"] < 1e-6 and stats["overlap"] < 1e-6
    assert layout.positions_mm.grad is None


def test_only_what_counts_is_made_better() -> None:
    layout = on_sites(weights=LayoutWeights(comm=0.0, therm=1.0))
    therm = layout(*work())[1]["therm"]
    assert refine_layout(layout, *work(), steps=60).improved
    assert layout(*work())[1]["therm"] < therm


def test_what_cannot_get_better_stays_as_it_is() -> None:
    layout = on_sites(weights=LayoutWeights(comm=0.0, therm=0.0))
    before = layout.positions_mm.detach().clone()
    result = refine_layout(layout, *work(), steps=5)
    assert not result.improved and result.before == result.after == 0.0
    torch.testing.assert_close(layout.positions_mm.detach(), before, rtol=0, atol=0)


def test_an_illegal_layout_becomes_legal_where_it_can() -> None:
    layout = WaferLayout(WAFER, [12.0] * 4, sigma_mm=20.0, positions_mm=[[0, 0], [9, 1], [-1, 9], [68, 3]])
    result = refine_layout(layout, *work(4), steps=200)
    assert not result.was_legal and result.improved and result.after is not None
    assert layout.is_legal()
    # Nine large chips do not fit, wherever they are.
    full = WaferLayout(WAFER, [45.0] * 9, sigma_mm=20.0)
    before = full.positions_mm.detach().clone()
    lost = refine_layout(full, *work(9), steps=5)
    assert (lost.after, lost.improved, lost.was_legal) == (None, False, False)
    torch.testing.assert_close(full.positions_mm.detach(), before, rtol=0, atol=0)


def test_empty_slots_do_not_matter() -> None:
    layout = on_sites()
    with torch.no_grad():
        layout.positions_mm[0] = 1000.0
    present = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], requires_grad=True)
    result = refine_layout(layout, *work(), present=present, steps=40)
    assert result.was_legal and layout.is_legal(present=present)
    assert present.grad is None


def test_gradients_that_were_there_stay() -> None:
    layout = on_sites()
    layout(*work())[0].backward()
    gradient = layout.positions_mm.grad
    assert gradient is not None
    saved = gradient.clone()
    refine_layout(layout, *work(), steps=3)
    assert layout.positions_mm.grad is gradient
    torch.testing.assert_close(gradient, saved)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"step_mm": 0.0}, {"step_mm": float("nan")}])
def test_what_cannot_be_asked_for(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        refine_layout(on_sites(), *work(), **settings)
