"""Channel orders are exact and gather silent channels in blocks."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparseflow.spiking.backends.packed.format import add_activity, pack
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource
from sparseflow.spiking.runtime.channel_layout import (
    FiringPattern,
    cluster_channels,
    compute_silent_fraction,
    permute_group,
)

LIF = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)


def _group(c_in: int, c_out: int, k: int, g: torch.Generator, second: int = 0) -> GroupSpec:
    def weight(c: int, k: int) -> torch.Tensor:
        return torch.randn((c_out, c, k, k), generator=g) * (4.0 / (c * k * k)) ** 0.5

    sources = [SpikeSource(weight=weight(c_in, k), padding=k // 2)]
    if second:
        sources.append(SpikeSource(weight=weight(second, 1)))
    return GroupSpec(sources=tuple(sources), bias=torch.randn(c_out, generator=g), neuron=LIF)


def test_permute_group_is_exact() -> None:
    g = torch.Generator().manual_seed(1)
    spikes = (torch.rand((3, 2, 10, 5, 4), generator=g) < 0.4).double()
    first, second = _group(10, 130, 3, g), _group(130, 7, 1, g, second=10)
    middle, _ = run_group_reference(first, [spikes], dtype=torch.float64)
    order = cluster_channels(middle.mean((0, 1, 3, 4)))
    assert 0 < middle.mean() < 1

    permuted, _ = run_group_reference(permute_group(first, outputs=order), [spikes], dtype=torch.float64)
    assert torch.equal(permuted, middle[:, :, order])
    assert torch.equal(permuted[:, :, torch.argsort(order)], middle)
    expected, v = run_group_reference(second, [middle, spikes], dtype=torch.float64)
    permuted_actual, v_got = run_group_reference(
        permute_group(second, inputs=[order, None]), [permuted, spikes], dtype=torch.float64
    )
    assert torch.equal(permuted_actual, expected)
    torch.testing.assert_close(v_got, v)


def test_silent_channels_end_up_in_silent_blocks() -> None:
    g = torch.Generator().manual_seed(2)
    silent = torch.rand(256, generator=g) < 0.6  # scattered: every block has some that fire
    spikes = (torch.rand((4, 2, 256, 6, 6), generator=g) < 0.5).float() * ~silent.view(-1, 1, 1)
    order = cluster_channels(spikes.mean((0, 1, 3, 4)))
    before, after = add_activity(pack(spikes)).activity, add_activity(pack(spikes[:, :, order])).activity
    assert before is not None and after is not None
    assert (before != 0).all()
    used = -(-int((~silent).sum()) // 64)
    assert used < 4
    assert (after[:used] != 0).all() and not after[used:].any()


def test_cluster_channels_maximizes_silent_blocks() -> None:
    quiet = 1.0 - torch.tensor([0.9, 0.0, 0.3, 0.02, 0.5, 0.1])

    def silent_blocks(order: torch.Tensor) -> float:
        return quiet[order].view(2, 3).prod(1).sum().item()

    best = max(silent_blocks(torch.tensor(p)) for p in itertools.permutations(range(6)))
    assert silent_blocks(cluster_channels(1.0 - quiet)) == pytest.approx(best)


def test_cluster_channels_equal_rates_keep_order() -> None:
    assert torch.equal(cluster_channels(torch.zeros(200)), torch.arange(200))


def test_silent_fraction_counts_blocks_and_windows() -> None:
    fires = torch.zeros(4, 16, dtype=torch.bool)
    fires[0, 3] = True
    pattern = FiringPattern(1, fires)
    assert compute_silent_fraction(pattern, 2) == 0.75  # one of two blocks by two windows
    assert compute_silent_fraction(pattern, 4) == 0.5
    fires[2, 12] = True
    assert compute_silent_fraction(pattern, 2) == 0.5
    assert compute_silent_fraction(pattern, 2, torch.tensor([0, 2, 1, 3])) == 0.5
    fires[2, 12], fires[2, 3] = False, True
    assert compute_silent_fraction(pattern, 2, torch.tensor([0, 2, 1, 3])) == 0.75


def test_firing_pattern_covers_all_steps_and_images() -> None:
    spikes = torch.zeros(3, 2, 5, 4, 3)
    spikes[2, 1, 4, 3, 2] = 2.0
    pattern = FiringPattern.from_spikes(spikes)
    assert pattern.steps == 3 and pattern.active.shape == (5, 2)
    assert pattern.active.nonzero().tolist() == [[4, 1]]
