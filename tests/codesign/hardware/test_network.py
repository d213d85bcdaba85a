"""Tests of `codesign.hardware.network`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

pytest.importorskip("scipy")

from sparseflow.codesign.hardware.chips import LinkType
from sparseflow.codesign.hardware.network import Network
from sparseflow.core import extras
from sparseflow.errors import InputError, MissingExtraError

ARRAYS = ("fixed_ms", "ms_per_byte", "mj_per_byte")


def link(**figures: Any) -> LinkType:
    return LinkType(**({"name": "wire", "bandwidth": 1e9, "latency_us": 1.0, "pj_per_bit": 1.0} | figures))


def positions(count: int, seed: int) -> np.ndarray:
    """Distances between random places on a wafer, mm, [count, count]."""
    index = np.random.default_rng(seed).uniform(0.0, 100.0, (count, 2))
    return np.linalg.norm(index[:, None] - index[None], axis=-1)


def test_time_of_a_message() -> None:
    wire = link(bandwidth=2e9, latency_us=500.0, latency_us_per_mm=2.0, pj_per_bit=1.0)
    network = Network.all_to_all(wire, np.array([[0.0, 250.0], [250.0, 0.0]]))
    # 500 us + 250 mm * 2 us/mm = 1 ms; 4 MB at 2 GB/s = 2 ms; 4e6 B * 8 bit/B * 1e-12 J = 32 uJ.
    assert network.num_slots == 2
    assert network.time_ms(0, 1, 4e6) == pytest.approx(3.0, rel=1e-12)
    assert network.time_ms(0, 1, 0) == pytest.approx(1.0, rel=1e-12)
    assert network.energy_mj(0, 1, 4e6) == pytest.approx(32e-3, rel=1e-12)
    assert network.energy_mj(0, 1, 1) == pytest.approx(8e-9, rel=1e-12)
    assert network.energy_mj(0, 1, 0) == 0.0


def test_energy_grows_with_distance() -> None:
    wire = link(pj_per_bit=2.0, pj_per_bit_mm=0.5)
    network = Network.all_to_all(wire, np.array([[0.0, 10.0], [10.0, 0.0]]))
    # (2 + 0.5 * 10) pJ/bit * 8 bit * 1e-9 mJ/pJ.
    assert network.energy_mj(0, 1, 1) == pytest.approx(56e-9, rel=1e-12)


def test_message_within_a_slot_is_free() -> None:
    distances = positions(4, seed=0)
    np.fill_diagonal(distances, 7.0)  # no slot is away from itself, whatever is told
    wire = link(latency_us_per_mm=1.0, pj_per_bit_mm=1.0)
    ring = [(slot, (slot + 1) % 4, wire) for slot in range(4)]
    for network in (Network.all_to_all(wire, distances), Network.from_links(4, ring, distances)):
        for name in ARRAYS:
            assert not np.diagonal(getattr(network, name)).any(), name
        assert network.time_ms(2, 2, 1e9) == network.energy_mj(2, 2, 1e9) == 0.0


@pytest.mark.parametrize("count", [1, 2, 7])
def test_all_to_all_follows_distances(count: int) -> None:
    distances = positions(count, seed=count)
    network = Network.all_to_all(link(latency_us_per_mm=0.01, pj_per_bit_mm=0.1), distances)
    assert network.num_slots == count
    for name in ARRAYS:
        result = getattr(network, name)
        assert result.shape == (count, count) and result.dtype == np.float64
        np.testing.assert_array_equal(result, result.T)
        assert (result[~np.eye(count, dtype=bool)] > 0.0).all()
    for s, t in itertools.permutations(range(count), 2):
        assert network.fixed_ms[s, t] == pytest.approx((1.0 + 0.01 * distances[s, t]) / 1e3)


def test_distances_are_not_modified() -> None:
    distances = positions(3, seed=1)
    before = distances.copy()
    Network.from_links(3, [(0, 1, link()), (1, 2, link())], distances)
    Network.all_to_all(link(), distances)
    np.testing.assert_array_equal(distances, before)


@pytest.mark.parametrize(
    "distances",
    [
        np.zeros(4), np.zeros((2, 3)), np.zeros((2, 2, 2)), np.array([[0.0, -1.0], [1.0, 0.0]]),
        np.array([[0.0, math.nan], [1.0, 0.0]]), np.array([[0.0, math.inf], [1.0, 0.0]]),
    ],
)  # fmt: skip
def test_invalid_distances_are_refused(distances: np.ndarray) -> None:
    with pytest.raises(InputError, match="`distances_mm`"):
        Network.all_to_all(link(), distances)
    with pytest.raises(InputError, match="`distances_mm`"):
        Network.from_links(2, [(0, 1, link())], distances)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_distances_of_wrong_shape_are_refused(size: int) -> None:
    with pytest.raises(InputError, match="`distances_mm`"):
        Network.from_links(3, [(0, 1, link()), (1, 2, link())], np.zeros((size, size)))


@pytest.mark.parametrize("pair", [(0, 3), (3, 0), (-1, 1), (1, 1)])
def test_link_to_missing_slot_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=rf"{pair[1]}"):
        Network.from_links(3, [(0, 1, link()), (1, 2, link()), (*pair, link())])


def test_unreachable_slots_are_named() -> None:
    with pytest.raises(InputError, match="2, 3"):
        Network.from_links(4, [(0, 1, link()), (2, 3, link())])
    with pytest.raises(InputError, match="1, 2"):
        Network.from_links(3, [])
    with pytest.raises(InputError, match="0"):
        Network.from_links(3, [(0, 2, link())])


def test_network_of_one_slot() -> None:
    assert Network.from_links(1, []).time_ms(0, 0, 1e6) == 0.0


def test_route_stores_and_forwards() -> None:
    chain = [(0, 1, link(bandwidth=1e9, latency_us=10.0, pj_per_bit=1.0)),
             (2, 1, link(bandwidth=2e9, latency_us=20.0, pj_per_bit=3.0))]  # fmt: skip
    network = Network.from_links(3, chain)
    # 0.01 + 0.02 ms, 1e6 B * (1 + 0.5) ns, 8e6 bit * (1 + 3) pJ; the same both ways.
    for s, t in ((0, 2), (2, 0)):
        assert network.time_ms(s, t, 1e6) == pytest.approx(0.03 + 1.5, rel=1e-12)
        assert network.energy_mj(s, t, 1e6) == pytest.approx(32e-3, rel=1e-12)


def test_route_is_best_for_typical_message() -> None:
    quick, wide = {"latency_us": 1.0, "bandwidth": 1e9}, {"latency_us": 1000.0, "bandwidth": 1e12}
    ways = [(0, 1, link(**quick)), (1, 2, link(**quick)), (0, 3, link(**wide)), (3, 2, link(**wide))]
    small, large = (Network.from_links(4, ways, typical_bytes=size) for size in (1e3, 1e9))
    assert small.fixed_ms[0, 2] == pytest.approx(0.002) and large.fixed_ms[0, 2] == pytest.approx(2.0)
    assert small.ms_per_byte[0, 2] == pytest.approx(2e-6) and large.ms_per_byte[0, 2] == pytest.approx(2e-9)
    # The choice is made once: what is sent then goes that way whatever its size.
    assert small.time_ms(0, 2, 1e9) > large.time_ms(0, 2, 1e9)


def test_better_of_two_links_is_used() -> None:
    pair = [(0, 1, link(latency_us=9.0)), (1, 0, link(latency_us=3.0)), (0, 1, link(latency_us=5.0))]
    for links in itertools.permutations(pair):
        network = Network.from_links(2, links)
        assert network.fixed_ms[0, 1] == network.fixed_ms[1, 0] == pytest.approx(0.003)


def test_route_avoids_slow_link() -> None:
    slow, quick = link(latency_us=1000.0), link(latency_us=1.0)
    network = Network.from_links(3, [(0, 2, slow), (0, 1, quick), (1, 2, quick)], typical_bytes=1.0)
    assert network.fixed_ms[0, 2] == pytest.approx(0.002)


def random_links(count: int, share: float, rng: np.random.Generator) -> list[tuple[int, int, LinkType]]:
    """Links that connect all slots, and some more."""
    order = rng.permutation(count).tolist()
    pairs = [(order[index], order[rng.integers(index)]) for index in range(1, count)]
    pairs += [pair for pair in itertools.combinations(range(count), 2) if rng.random() < share]
    return [
        (a, b, link(
            bandwidth=10.0 ** rng.uniform(8, 11), latency_us=rng.uniform(0.0, 50.0),
            latency_us_per_mm=rng.uniform(0.0, 0.1), pj_per_bit=rng.uniform(0.0, 20.0),
        ))
        for a, b in pairs
    ]  # fmt: skip


def best_ways(
    count: int, links: list[tuple[int, int, LinkType]], distances: np.ndarray, size: float
) -> tuple[np.ndarray, ...]:
    """Time of a message of a size, and fixed ms, ms/byte and mJ/byte of its way: Floyd and Warshall."""
    time = np.full((count, count), np.inf)
    record = np.zeros((3, count, count))
    np.fill_diagonal(time, 0.0)
    for a, b, item in links:
        fixed = (item.latency_us + item.latency_us_per_mm * distances[a, b]) * 1e-3
        byte, energy = 1e3 / item.bandwidth, 8.0 * item.pj_per_bit * 1e-12 * 1e3
        for s, t in ((a, b), (b, a)):
            if fixed + size * byte < time[s, t]:
                time[s, t], record[:, s, t] = fixed + size * byte, (fixed, byte, energy)
    for k, s, t in itertools.product(range(count), repeat=3):
        if time[s, k] + time[k, t] < time[s, t]:
            time[s, t], record[:, s, t] = time[s, k] + time[k, t], record[:, s, k] + record[:, k, t]
    return time, *record


@pytest.mark.parametrize("seed", range(12))
def test_routes_match_floyd_warshall(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(2, 10)), float(10.0 ** rng.uniform(2, 8))
    distances = positions(count, seed)
    links = random_links(count, 0.2, rng)
    network = Network.from_links(count, links, distances, typical_bytes=size)
    time, *record = best_ways(count, links, distances, size)
    own_value = {pair for a, b, _ in links for pair in ((a, b), (b, a))}
    for s, t in itertools.product(range(count), repeat=2):
        if (s, t) not in own_value:
            assert network.time_ms(s, t, size) == pytest.approx(time[s, t], rel=1e-12)
            for name, expected in zip(ARRAYS, record, strict=True):
                assert getattr(network, name)[s, t] == pytest.approx(expected[s, t], rel=1e-12), name
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(network, name), getattr(network, name).T, rtol=1e-12)


@given(st.integers(2, 7), st.integers(0, 2**32 - 1), st.integers(0, 3))
@budget(max_examples=30, deadline=None)
def test_routes_are_symmetric(count: int, seed: int, maximum: int) -> None:
    rng = np.random.default_rng(seed)
    # Links whose parts differ and whose sums are the same for a typical message, so that ties abound.
    links = [
        (a, b, link(latency_us=1e3 * part, bandwidth=1e9 / (maximum + 1 - part)))
        for a, b, _ in random_links(count, 0.3, rng)
        for part in [int(rng.integers(maximum + 1))]
    ]
    network = Network.from_links(count, links, typical_bytes=1e6)
    for s, t in itertools.combinations(range(count), 2):
        assert network.time_ms(s, t, 1e6) == pytest.approx(network.time_ms(t, s, 1e6), rel=1e-9)
        assert network.fixed_ms[s, t] == pytest.approx(network.fixed_ms[t, s], rel=1e-9)


@pytest.mark.parametrize("typical", [0.0, 1.0, 1e6])
def test_links_without_latency_connect_slots(typical: float) -> None:
    quick, slow = link(latency_us=0.0, bandwidth=1e12), link(latency_us=500.0)
    chain = Network.from_links(3, [(0, 1, quick), (1, 2, quick)], typical_bytes=typical)
    assert chain.ms_per_byte[0, 2] == pytest.approx(2e-9) and chain.fixed_ms[0, 2] == 0.0
    ring = [(0, 1, quick), (1, 2, quick), (2, 3, slow), (3, 0, slow)]
    network = Network.from_links(4, ring, typical_bytes=typical)
    assert network.fixed_ms[0, 2] == 0.0 and network.fixed_ms[0, 1] == 0.0


def test_from_links_with_all_pairs_equals_all_to_all() -> None:
    distances = positions(5, seed=3)
    wire = link(latency_us_per_mm=0.001, latency_us=50.0)
    all_items = [(a, b, wire) for a, b in itertools.combinations(range(5), 2)]
    subset, full = Network.from_links(5, all_items, distances), Network.all_to_all(wire, distances)
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(subset, name), getattr(full, name), rtol=1e-12)


def test_missing_scipy_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"`scipy`.*sparseflow\[codesign\]"):
        Network.from_links(2, [(0, 1, link())])
