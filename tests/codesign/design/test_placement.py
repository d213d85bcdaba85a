"""Tests of `codesign.design.placement`."""

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
from sparseflow.codesign.design.config import WaferConfig
from sparseflow.codesign.design.placement import ChipPlacer, PlacementProblem, PlacementSearch, Positions
from sparseflow.codesign.hardware.chips import ChipType, read_library
from sparseflow.codesign.layout import Wafer, WaferLayout
from sparseflow.codesign.workload.layers import to_float
from sparseflow.errors import InputError

CHIPS = [chip for chip in read_library().chips if chip.name in ("npu-s", "npu-m", "npu-l")]
QUICK: dict[str, Any] = {"radius_mm": 80.0, "restarts": 1, "refine_steps": 0}


def make_placer(slots: int = 5, chips: Sequence[ChipType] = CHIPS, **changes: Any) -> ChipPlacer:
    return ChipPlacer(WaferConfig(**QUICK | changes), slots, chips)


def make_problem(
    slots: int = 5, *, seed: int = 0, empty: Sequence[int] = (), silent: bool = False
) -> PlacementProblem:
    rng = np.random.default_rng(seed)
    kinds = [None if index in empty else CHIPS[int(rng.integers(len(CHIPS)))] for index in range(slots)]
    traffic = np.zeros((slots, slots)) if silent else rng.integers(0, 1000, (slots, slots)).astype(float)
    np.fill_diagonal(traffic, 0.0)
    for index in empty:
        traffic[index] = traffic[:, index] = 0.0
    return PlacementProblem(
        traffic_bytes=traffic,
        sizes_mm=np.array([(0.0, 0.0) if kind is None else kind.size_mm for kind in kinds]),
        tdp_w=np.array([0.0 if kind is None else kind.tdp_w for kind in kinds]),
        names=tuple(None if kind is None else kind.name for kind in kinds),
    )


def wrong(
    location: Positions, kind: PlacementProblem, radius: float = 80.0, margin: float = 1.0
) -> tuple[str, ...]:
    contents = [index for index, name in enumerate(kind.names) if name is not None]
    layout = WaferLayout(
        Wafer(radius_mm=radius, margin_mm=margin), kind.sizes_mm[contents], sigma_mm=1.0,
        positions_mm=np.array(location)[contents],
    )  # fmt: skip
    return layout.find_violations()


def test_grid_positions_are_central_and_legal() -> None:
    result = make_placer(7)
    grid = result.grid_positions()
    assert len(grid) == len(set(grid)) == 7 and all(isinstance(x, float) for index in grid for x in index)
    largest = PlacementProblem(traffic_bytes=np.zeros((7, 7)), sizes_mm=np.array([CHIPS[2].size_mm] * 7),
                    tdp_w=np.ones(7), names=("npu-l",) * 7)  # fmt: skip
    assert not wrong(grid, largest)
    far = np.hypot(*np.array(grid).T)
    assert far.max() <= np.sort(np.hypot(*result.site_grid.positions_mm.T))[6] + 1e-9


@pytest.mark.parametrize("w_comm", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_loss_of_plain_grid_is_one(w_comm: float, seed: int) -> None:
    result = make_placer(w_comm=w_comm)
    assert result.compute_loss(result.grid_positions(), make_problem(seed=seed)) == pytest.approx(1.0)


def test_loss_matches_manual_value() -> None:
    result, kind = make_placer(3, sigma_mm=20.0, w_comm=2.0, w_therm=1.0), make_problem(3)
    location = ((0.0, 0.0), (30.0, 0.0), (0.0, 40.0))
    flow, tdp, d = kind.traffic_bytes, kind.tdp_w, {(0, 1): 30.0, (0, 2): 40.0, (1, 2): 50.0}

    def costs(distances: Any) -> tuple[float, float]:
        comm = sum((flow[i, j] + flow[j, i]) * distances(i, j) for i, j in d)
        therm = sum(tdp[i] * tdp[j] * np.exp(-distances(i, j) / 20.0) for i, j in d)
        return comm, therm

    grid = np.array(result.grid_positions())
    plain = costs(lambda i, j: np.hypot(*(grid[i] - grid[j])))
    comm, therm = (first / other for first, other in zip(costs(lambda i, j: d[i, j]), plain, strict=True))
    assert result.compute_loss(location, kind) == pytest.approx((2.0 * comm + therm) / 3.0)


def test_loss_decreases_with_distance_and_heat() -> None:
    close, far = ((0.0, 0.0), (20.0, 0.0), (-20.0, 0.0)), ((0.0, 0.0), (50.0, 0.0), (-50.0, 0.0))
    comm, therm = make_placer(3, w_therm=0.0), make_placer(3, w_comm=0.0)
    assert comm.compute_loss(close, make_problem(3)) < comm.compute_loss(far, make_problem(3))
    assert therm.compute_loss(close, make_problem(3)) > therm.compute_loss(far, make_problem(3))


@given(seed=st.integers(0, 10**6), slots=st.integers(1, 5), weight=st.sampled_from([0.0, 0.5, 5.0]),
       silent=st.booleans())  # fmt: skip
@budget(max_examples=8, deadline=None)
def test_optimize_is_legal_and_no_worse_than_grid(seed: int, slots: int, weight: float, silent: bool) -> None:
    result = make_placer(slots, w_therm=weight)
    kind = make_problem(slots, seed=seed, empty=range(slots // 2, slots // 2 + slots // 3), silent=silent)
    best = result.optimize(kind)
    assert len(best) == slots and not wrong(best, kind)
    assert result.compute_loss(best, kind) <= result.compute_loss(result.grid_positions(), kind)
    assert best == result.optimize(kind) == make_placer(slots, w_therm=weight).optimize(kind)


@pytest.mark.parametrize("seed", range(2))
def test_refinement_is_legal_and_no_worse(seed: int) -> None:
    kind = make_problem(4, seed=seed)
    on_sites, refined = make_placer(4).optimize(kind), make_placer(4, refine_steps=80).optimize(kind)
    assert not wrong(refined, kind)
    assert make_placer(4).compute_loss(refined, kind) <= make_placer(4).compute_loss(on_sites, kind)
    assert refined == make_placer(4, refine_steps=80).optimize(kind)


@pytest.mark.parametrize("seed", range(3))
def test_legalize_moves_to_nearest_sites(seed: int) -> None:
    result, rng = make_placer(5), np.random.default_rng(seed)
    kind = make_problem(5, seed=seed, empty=(2,))
    grid = result.grid_positions()
    assert result.legalize(grid, kind) is grid
    nearby = np.array(grid) + rng.uniform(-1.0, 1.0, (5, 2))
    nearby[0] = nearby[1] + 0.5  # one over the other
    close = tuple((float(x), float(y)) for x, y in nearby)
    assert wrong(close, kind)
    moved = result.legalize(close, kind)
    assert not wrong(moved, kind) and len(set(moved)) == 5
    assert set(moved) <= {tuple(index) for index in result.site_grid.positions_mm.tolist()}
    # Those that nobody is in the way of stay near.
    assert moved[3:] == grid[3:]
    # A slot that is empty is in nobody's way.
    over = (*grid[:2], grid[1], *grid[3:])
    assert result.legalize(over, kind) == over


def test_optimize_finds_optimum_of_few_sites() -> None:
    import itertools

    result, kind = make_placer(3, sigma_mm=20.0), make_problem(3, seed=5)
    sites = [tuple(index) for index in result.site_grid.positions_mm.tolist()]
    minimum = min(result.compute_loss(location, kind) for location in itertools.permutations(sites, 3))
    assert result.compute_loss(result.optimize(kind), kind) == pytest.approx(minimum)


@pytest.mark.parametrize("seed", range(3))
def test_differentiable_loss_equals_loss(seed: int) -> None:
    result = make_placer()
    problem = make_problem(seed=seed)
    positions = result.optimize(problem)
    assert to_float(result.differentiable_loss(positions, problem, torch.ones(5))) == pytest.approx(
        result.compute_loss(positions, problem), rel=1e-5
    )
    assert to_float(result.differentiable_loss(positions, problem, torch.zeros(5))) == 0.0
    # A chip that is not there counts with nobody.
    subset = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    traffic, tdp = problem.traffic_bytes * np.outer(subset, subset), problem.tdp_w * subset.numpy()
    remaining = PlacementProblem(
        traffic_bytes=traffic, sizes_mm=problem.sizes_mm, tdp_w=tdp, names=problem.names
    )
    share = [
        sum(
            item[index]
            for item in result._weighted_flows(two)[kind][0]
            * result._distance_matrices(np.array(positions))[kind]
            for index in range(5)
        )
        for kind in (0, 1)
        for two in (remaining, problem)
    ]
    full = [make_placer(w_therm=0.0), make_placer(w_comm=0.0)]
    for kind in (0, 1):
        expected = full[kind].compute_loss(positions, problem) * share[2 * kind] / share[2 * kind + 1]
        assert to_float(full[kind].differentiable_loss(positions, problem, subset)) == pytest.approx(
            expected, rel=1e-5
        )


def test_differentiable_loss_gradients() -> None:
    result, kind = make_placer(4), make_problem(4)
    present = torch.tensor([0.9, 0.4, 0.6, 0.2], requires_grad=True)
    result.differentiable_loss(result.grid_positions(), kind, present).backward()
    assert present.grad is not None and (present.grad > 0.0).all()
    for index in range(4):
        step = torch.zeros(4)
        step[index] = 0.05
        ends = [
            to_float(
                result.differentiable_loss(result.grid_positions(), kind, present.detach() + sign * step)
            )
            for sign in (1, -1)
        ]
        # In each of them the loss is linear.
        assert float(present.grad[index]) == pytest.approx((ends[0] - ends[1]) / 0.1, rel=1e-3)


def test_loss_without_weights_is_zero() -> None:
    result = make_placer(w_comm=0.0, w_therm=0.0)
    assert (
        result.compute_loss(result.grid_positions(), make_problem()) == 0.0
        and result.optimize(make_problem()) == result.grid_positions()
    )


def test_optimize_with_one_slot_or_empty_slots() -> None:
    first = make_placer(1)
    assert (
        first.optimize(make_problem(1)) == first.grid_positions()
        and first.compute_loss(first.grid_positions(), make_problem(1)) == 0.0
    )
    result, none = make_placer(3), make_problem(3, empty=(0, 1, 2))
    assert result.compute_loss(result.grid_positions(), none) == 0.0
    assert len(make_placer(3, refine_steps=3).optimize(none)) == 3


def test_more_chips_than_sites_is_refused() -> None:
    with pytest.raises(InputError, match="40"):
        make_placer(40)
    with pytest.raises(InputError, match="5"):
        make_placer(1, radius_mm=5.0)
    # Only what slots may hold counts.
    assert len(make_placer(40, CHIPS[:1]).grid_positions()) == 40


def test_front_trades_communication_for_heat() -> None:
    front = make_placer(4).compute_front(make_problem(4))
    costs = [(layout.comm, layout.therm) for layout in front.layouts]
    assert costs == sorted(costs) and [therm for _, therm in costs] == sorted(
        (therm for _, therm in costs), reverse=True
    )
    assert front.grid.comm == front.grid.therm == 1.0


@pytest.mark.parametrize("refine_steps", [0, 5])
@pytest.mark.parametrize(("w_comm", "w_therm"), [(1.0, 0.5), (3.0, 0.1), (0.0, 1.0)])
def test_loss_without_traffic_counts_heat(w_comm: float, w_therm: float, refine_steps: int) -> None:
    result = make_placer(4, w_comm=w_comm, w_therm=w_therm, refine_steps=refine_steps)
    heat, kind = make_placer(4, w_comm=0.0, w_therm=1.0), make_problem(4, silent=True)
    assert result.compute_loss(result.grid_positions(), kind) == pytest.approx(1.0)
    positions = result.optimize(kind)
    assert result.compute_loss(positions, kind) == pytest.approx(
        heat.compute_loss(positions, kind)
    ) and not wrong(positions, kind)
    assert result.compute_loss(positions, kind) < 1.0
    for index in (result.grid_positions(), positions):
        loss = to_float(result.differentiable_loss(index, kind, torch.ones(4)))
        assert loss == pytest.approx(result.compute_loss(index, kind), rel=1e-5)


def test_loss_without_power_counts_communication() -> None:
    result, ways, kind = make_placer(3, w_therm=2.0), make_placer(3, w_therm=0.0), make_problem(3)
    cold = PlacementProblem(
        traffic_bytes=kind.traffic_bytes, sizes_mm=kind.sizes_mm, tdp_w=np.zeros(3), names=kind.names
    )
    location = ((0.0, 0.0), (30.0, 0.0), (0.0, 40.0))
    assert result.compute_loss(result.grid_positions(), cold) == pytest.approx(1.0)
    assert result.compute_loss(location, cold) == pytest.approx(ways.compute_loss(location, kind))


def test_term_with_zero_weight_costs_nothing() -> None:
    # Heat alone is asked for, and there is one chip: no place is better than another.
    result, kind = make_placer(3, w_comm=0.0), make_problem(3, empty=(0, 2))
    assert result.compute_loss(result.grid_positions(), kind) == 0.0
    assert to_float(result.differentiable_loss(result.grid_positions(), kind, torch.ones(3))) == 0.0


def test_placement_problem_from_chips() -> None:
    result = PlacementProblem.from_chips([CHIPS[1], None, CHIPS[0]])
    assert result.names == ("npu-m", None, "npu-s") and result.tdp_w.tolist() == [22.0, 0.0, 6.0]
    assert (
        result.sizes_mm.tolist() == [[10.0, 8.0], [0.0, 0.0], [5.0, 5.0]] and not result.traffic_bytes.any()
    )
    traffic = np.ones((3, 3))
    assert PlacementProblem.from_chips([None] * 3, traffic).traffic_bytes is traffic


def test_optimize_passes_search_options(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []
    original = module.assign

    def asking(*args: Any, **named: Any) -> Any:
        requests.append(named)
        return original(*args, **named)

    monkeypatch.setattr(module, "assign", asking)
    result = ChipPlacer(WaferConfig(**QUICK), 4, CHIPS, seed=7)
    result.optimize(make_problem(4))
    result.optimize(make_problem(4), PlacementSearch(method="annealing", restarts=3, budget_s=9.0, seed=2))
    record = [
        tuple(request[name] for name in ("method", "restarts", "budget_s", "seed")) for request in requests
    ]
    assert record == [("auto", 1, None, 7), ("annealing", 3, 9.0, 2)]
    for wrong_search in (
        PlacementSearch(method="luck"),
        PlacementSearch(restarts=0),
        PlacementSearch(budget_s=0.0),
        PlacementSearch(seed=-1),
    ):
        with pytest.raises(InputError):
            result.optimize(make_problem(4), wrong_search)
