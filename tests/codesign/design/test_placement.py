"""Places: legal ones, scored against a plain grid, and never worse than it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from sparseflow.codesign.design import placement as module
from sparseflow.codesign.design.config import WaferSettings
from sparseflow.codesign.design.placement import Drawn, Places, Positions, Search
from sparseflow.codesign.hardware.chips import ChipType, read_library
from sparseflow.codesign.layout import Wafer, WaferLayout
from sparseflow.codesign.workload.layers import number
from sparseflow.errors import InputError

CHIPS = [chip for chip in read_library().chips if chip.name in ("npu-s", "npu-m", "npu-l")]
QUICK: dict[str, Any] = {"radius_mm": 80.0, "restarts": 1, "refine_steps": 0}


def places(slots: int = 5, chips: Sequence[ChipType] = CHIPS, **changes: Any) -> Places:
    return Places(WaferSettings(**QUICK | changes), slots, chips)


def drawn(slots: int = 5, *, seed: int = 0, empty: Sequence[int] = (), silent: bool = False) -> Drawn:
    rng = np.random.default_rng(seed)
    kinds = [None if at in empty else CHIPS[int(rng.integers(len(CHIPS)))] for at in range(slots)]
    traffic = np.zeros((slots, slots)) if silent else rng.integers(0, 1000, (slots, slots)).astype(float)
    np.fill_diagonal(traffic, 0.0)
    for at in empty:
        traffic[at] = traffic[:, at] = 0.0
    return Drawn(
        traffic_bytes=traffic,
        sizes_mm=np.array([(0.0, 0.0) if kind is None else kind.size_mm for kind in kinds]),
        tdp_w=np.array([0.0 if kind is None else kind.tdp_w for kind in kinds]),
        names=tuple(None if kind is None else kind.name for kind in kinds),
    )


def wrong(where: Positions, what: Drawn, radius: float = 80.0, margin: float = 1.0) -> tuple[str, ...]:
    held = [at for at, name in enumerate(what.names) if name is not None]
    layout = WaferLayout(
        Wafer(radius_mm=radius, margin_mm=margin), what.sizes_mm[held], sigma_mm=1.0,
        positions_mm=np.array(where)[held],
    )  # fmt: skip
    return layout.check()


def test_a_grid_is_in_the_middle_and_legal_for_the_largest_chips() -> None:
    found = places(7)
    grid = found.grid()
    assert len(grid) == len(set(grid)) == 7 and all(isinstance(x, float) for at in grid for x in at)
    largest = Drawn(traffic_bytes=np.zeros((7, 7)), sizes_mm=np.array([CHIPS[2].size_mm] * 7),
                    tdp_w=np.ones(7), names=("npu-l",) * 7)  # fmt: skip
    assert not wrong(grid, largest)
    far = np.hypot(*np.array(grid).T)
    assert far.max() <= np.sort(np.hypot(*found.sites.positions_mm.T))[6] + 1e-9


@pytest.mark.parametrize("w_comm", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_plain_grid_scores_1(w_comm: float, seed: int) -> None:
    found = places(w_comm=w_comm)
    assert found.score(found.grid(), drawn(seed=seed)) == pytest.approx(1.0)


def test_a_score_is_by_hand() -> None:
    found, what = places(3, sigma_mm=20.0, w_comm=2.0, w_therm=1.0), drawn(3)
    where = ((0.0, 0.0), (30.0, 0.0), (0.0, 40.0))
    flow, tdp, d = what.traffic_bytes, what.tdp_w, {(0, 1): 30.0, (0, 2): 40.0, (1, 2): 50.0}

    def costs(apart: Any) -> tuple[float, float]:
        comm = sum((flow[i, j] + flow[j, i]) * apart(i, j) for i, j in d)
        therm = sum(tdp[i] * tdp[j] * np.exp(-apart(i, j) / 20.0) for i, j in d)
        return comm, therm

    grid = np.array(found.grid())
    plain = costs(lambda i, j: np.hypot(*(grid[i] - grid[j])))
    comm, therm = (one / other for one, other in zip(costs(lambda i, j: d[i, j]), plain, strict=True))
    assert found.score(where, what) == pytest.approx((2.0 * comm + therm) / 3.0)


def test_shorter_ways_and_chips_farther_apart_score_less() -> None:
    near, far = ((0.0, 0.0), (20.0, 0.0), (-20.0, 0.0)), ((0.0, 0.0), (50.0, 0.0), (-50.0, 0.0))
    comm, therm = places(3, w_therm=0.0), places(3, w_comm=0.0)
    assert comm.score(near, drawn(3)) < comm.score(far, drawn(3))
    assert therm.score(near, drawn(3)) > therm.score(far, drawn(3))


@given(seed=st.integers(0, 10**6), slots=st.integers(1, 5), weight=st.sampled_from([0.0, 0.5, 5.0]),
       silent=st.booleans())  # fmt: skip
@budget(max_examples=8, deadline=None)
def test_the_best_places_are_legal_and_no_worse_than_the_grid(
    seed: int, slots: int, weight: float, silent: bool
) -> None:
    found = places(slots, w_therm=weight)
    what = drawn(slots, seed=seed, empty=range(slots // 2, slots // 2 + slots // 3), silent=silent)
    best = found.best(what)
    assert len(best) == slots and not wrong(best, what)
    assert found.score(best, what) <= found.score(found.grid(), what)
    assert best == found.best(what) == places(slots, w_therm=weight).best(what)


@pytest.mark.parametrize("seed", range(2))
def test_refining_is_legal_and_no_worse(seed: int) -> None:
    what = drawn(4, seed=seed)
    on_sites, refined = places(4).best(what), places(4, refine_steps=80).best(what)
    assert not wrong(refined, what)
    assert places(4).score(refined, what) <= places(4).score(on_sites, what)
    assert refined == places(4, refine_steps=80).best(what)


@pytest.mark.parametrize("seed", range(3))
def test_chips_without_room_go_to_the_nearest_sites(seed: int) -> None:
    found, rng = places(5), np.random.default_rng(seed)
    what = drawn(5, seed=seed, empty=(2,))
    grid = found.grid()
    assert found.with_room(grid, what) is grid
    near = np.array(grid) + rng.uniform(-1.0, 1.0, (5, 2))
    near[0] = near[1] + 0.5  # one over the other
    close = tuple((float(x), float(y)) for x, y in near)
    assert wrong(close, what)
    moved = found.with_room(close, what)
    assert not wrong(moved, what) and len(set(moved)) == 5
    assert set(moved) <= {tuple(at) for at in found.sites.positions_mm.tolist()}
    # Those that nobody is in the way of stay near.
    assert moved[3:] == grid[3:]
    # A slot that is empty is in nobody's way.
    over = (*grid[:2], grid[1], *grid[3:])
    assert found.with_room(over, what) == over


def test_a_search_finds_the_best_of_few() -> None:
    import itertools

    found, what = places(3, sigma_mm=20.0), drawn(3, seed=5)
    sites = [tuple(at) for at in found.sites.positions_mm.tolist()]
    least = min(found.score(where, what) for where in itertools.permutations(sites, 3))
    assert found.score(found.best(what), what) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_score_of_what_is_there(seed: int) -> None:
    found = places()
    what = drawn(seed=seed)
    where = found.best(what)
    assert number(found.loss(where, what, torch.ones(5))) == pytest.approx(found.score(where, what), rel=1e-5)
    assert number(found.loss(where, what, torch.zeros(5))) == 0.0
    # A chip that is not there counts with nobody.
    some = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    traffic, tdp = what.traffic_bytes * np.outer(some, some), what.tdp_w * some.numpy()
    left = Drawn(traffic_bytes=traffic, sizes_mm=what.sizes_mm, tdp_w=tdp, names=what.names)
    share = [
        sum(each[at] for each in found._flows(two)[kind][0] * found._distances(np.array(where))[kind]
            for at in range(5))
        for kind in (0, 1) for two in (left, what)
    ]  # fmt: skip
    whole = [places(w_therm=0.0), places(w_comm=0.0)]
    for kind in (0, 1):
        wanted = whole[kind].score(where, what) * share[2 * kind] / share[2 * kind + 1]
        assert number(whole[kind].loss(where, what, some)) == pytest.approx(wanted, rel=1e-5)


def test_gradients_of_the_loss_are_those_of_differences() -> None:
    found, what = places(4), drawn(4)
    there = torch.tensor([0.9, 0.4, 0.6, 0.2], requires_grad=True)
    found.loss(found.grid(), what, there).backward()
    assert there.grad is not None and (there.grad > 0.0).all()
    for at in range(4):
        step = torch.zeros(4)
        step[at] = 0.05
        ends = [number(found.loss(found.grid(), what, there.detach() + sign * step)) for sign in (1, -1)]
        # In each of them the loss is linear.
        assert float(there.grad[at]) == pytest.approx((ends[0] - ends[1]) / 0.1, rel=1e-3)


def test_without_weights_no_place_is_better() -> None:
    found = places(w_comm=0.0, w_therm=0.0)
    assert found.score(found.grid(), drawn()) == 0.0 and found.best(drawn()) == found.grid()


def test_one_slot_and_empty_ones_are_no_trouble() -> None:
    one = places(1)
    assert one.best(drawn(1)) == one.grid() and one.score(one.grid(), drawn(1)) == 0.0
    found, none = places(3), drawn(3, empty=(0, 1, 2))
    assert found.score(found.grid(), none) == 0.0
    assert len(places(3, refine_steps=3).best(none)) == 3


def test_more_chips_than_sites() -> None:
    with pytest.raises(InputError, match="40"):
        places(40)
    with pytest.raises(InputError, match="5"):
        places(1, radius_mm=5.0)
    # Only what slots may hold counts.
    assert len(places(40, CHIPS[:1]).grid()) == 40


def test_a_front_begins_with_short_ways_and_ends_with_cool_chips() -> None:
    front = places(4).front(drawn(4))
    costs = [(each.comm, each.therm) for each in front.layouts]
    assert costs == sorted(costs) and [therm for _, therm in costs] == sorted(
        (therm for _, therm in costs), reverse=True
    )
    assert front.grid.comm == front.grid.therm == 1.0


@pytest.mark.parametrize("refine_steps", [0, 5])
@pytest.mark.parametrize(("w_comm", "w_therm"), [(1.0, 0.5), (3.0, 0.1), (0.0, 1.0)])
def test_where_nothing_is_sent_only_heat_counts(w_comm: float, w_therm: float, refine_steps: int) -> None:
    found = places(4, w_comm=w_comm, w_therm=w_therm, refine_steps=refine_steps)
    heat, what = places(4, w_comm=0.0, w_therm=1.0), drawn(4, silent=True)
    assert found.score(found.grid(), what) == pytest.approx(1.0)
    where = found.best(what)
    assert found.score(where, what) == pytest.approx(heat.score(where, what)) and not wrong(where, what)
    assert found.score(where, what) < 1.0
    for at in (found.grid(), where):
        loss = number(found.loss(at, what, torch.ones(4)))
        assert loss == pytest.approx(found.score(at, what), rel=1e-5)


def test_where_nothing_is_warm_only_ways_count() -> None:
    found, ways, what = places(3, w_therm=2.0), places(3, w_therm=0.0), drawn(3)
    cold = Drawn(
        traffic_bytes=what.traffic_bytes, sizes_mm=what.sizes_mm, tdp_w=np.zeros(3), names=what.names
    )
    where = ((0.0, 0.0), (30.0, 0.0), (0.0, 40.0))
    assert found.score(found.grid(), cold) == pytest.approx(1.0)
    assert found.score(where, cold) == pytest.approx(ways.score(where, what))


def test_weights_that_do_not_count_cost_nothing() -> None:
    # Heat alone is asked for, and there is one chip: no place is better than another.
    found, what = places(3, w_comm=0.0), drawn(3, empty=(0, 2))
    assert found.score(found.grid(), what) == 0.0
    assert number(found.loss(found.grid(), what, torch.ones(3))) == 0.0


def test_what_is_drawn_of_chips() -> None:
    found = Drawn.of([CHIPS[1], None, CHIPS[0]])
    assert found.names == ("npu-m", None, "npu-s") and found.tdp_w.tolist() == [22.0, 0.0, 6.0]
    assert found.sizes_mm.tolist() == [[10.0, 8.0], [0.0, 0.0], [5.0, 5.0]] and not found.traffic_bytes.any()
    traffic = np.ones((3, 3))
    assert Drawn.of([None] * 3, traffic).traffic_bytes is traffic


def test_how_sites_are_searched_is_told_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    original = module.assign

    def asking(*args: Any, **named: Any) -> Any:
        asked.append(named)
        return original(*args, **named)

    monkeypatch.setattr(module, "assign", asking)
    found = Places(WaferSettings(**QUICK), 4, CHIPS, seed=7)
    found.best(drawn(4))
    found.best(drawn(4), Search(method="annealing", restarts=3, seconds=9.0, seed=2))
    told = [tuple(each[name] for name in ("method", "restarts", "seconds", "seed")) for each in asked]
    assert told == [("auto", 1, None, 7), ("annealing", 3, 9.0, 2)]
    for wrong_search in (Search(method="luck"), Search(restarts=0), Search(seconds=0.0), Search(seed=-1)):
        with pytest.raises(InputError):
            found.best(drawn(4), wrong_search)
