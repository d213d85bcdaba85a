"""What a device brings to a plan: the event backend keeps its protocol's promises."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from sparseflow.errors import MissingExtraError, RunError
from sparseflow.spiking.backends.base import Backend, GroupShape
from sparseflow.spiking.backends.events.backend import EventBackend
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.selection import select_backend
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

NEURON = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=0.25, v_reset=0.0)


def grid(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def spikes(*shape: int, seed: int = 0, largest: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    fired = (torch.rand(shape, generator=generator) < 0.3).float()
    return fired * torch.randint(1, largest + 1, shape, generator=generator)


@pytest.mark.parametrize("out", ["native", "dense"])
@pytest.mark.parametrize("convolution", ["sparse", "dense"])
@pytest.mark.parametrize("carried", [False, True])
def test_a_prepared_group_is_the_reference(
    convolution: Any, out: Any, carried: bool, poisoned_empty: None
) -> None:
    backend: Backend = EventBackend()
    sources = (
        SpikeSource(weight=grid(5, 4, 3, 3), padding=1),
        SpikeSource(weight=grid(5, 3, 1, 1), stride=2),
    )
    spec = GroupSpec(
        sources=sources, bias=grid(5, seed=1), neuron=NEURON, skips=1, dense_inputs=2, post_skips=1
    )
    fed = [spikes(3, 2, 4, 5, 7), spikes(3, 2, 3, 10, 13, seed=1, largest=3)]
    skip, post = spikes(3, 2, 5, 5, 7, seed=2), spikes(3, 2, 5, 5, 7, seed=3, largest=2)
    dense = [grid(3, 2, 5, 5, 7, seed=4), grid(1, 2, 5, 5, 7, seed=5)]
    v = grid(2, 5, 5, 7, seed=6) if carried else None
    expected, membrane = run_group_reference(spec, fed, [skip], dense, [post], v, time_steps=3)
    shape = GroupShape(steps=3, images=2, sources=((4, 5, 7), (3, 10, 13)), output=(5, 5, 7), max_value=3)
    assert backend.get_unsupported_reason(spec, shape) is None
    group = backend.prepare(spec, shape, convolution)
    inputs = [backend.encode(x, 3) for x in fed] if convolution == "sparse" else fed
    for _ in range(2):
        actual, after = group(
            inputs, [backend.encode(skip, 1)], dense, [backend.encode(post, 2)], steps=3, v=v, out=out
        )
        actual = backend.decode(actual) if out == "native" else actual
        assert torch.equal(actual, expected) and torch.equal(after, membrane)
    assert expected.max() > 1


def test_stem_has_no_sparse_kernel() -> None:
    spec = GroupSpec(sources=(), bias=grid(5), neuron=NEURON, dense_inputs=1)
    shape = GroupShape(steps=2, images=1, sources=(), output=(5, 4, 4))
    assert "no convolution of spikes" in str(EventBackend().get_unsupported_reason(spec, shape))
    x = grid(1, 1, 5, 4, 4)
    expected, v = run_group_reference(spec, [], (), [x], time_steps=2)
    group = EventBackend().prepare(spec, shape, "dense")
    actual, after = group([], [], [x], [], steps=2, v=None, out="dense")
    assert torch.equal(actual, expected) and torch.equal(after, v)


@pytest.mark.parametrize("largest", [1, 7])
def test_spikes_survive_the_backends_form(largest: int) -> None:
    x = spikes(3, 2, 5, 4, 6, largest=largest)
    backend = EventBackend()
    native = backend.encode(x, largest)
    assert torch.equal(backend.decode(native), x)
    torch.testing.assert_close(backend.spatial_mean(native), x.mean((-2, -1)), rtol=1e-6, atol=0)
    assert backend.spatial_mean(native).shape == (3, 2, 5)


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), float("inf"), 256.0])
def test_what_are_no_spikes_is_not_encoded(value: float) -> None:
    x = spikes(1, 1, 2, 3, 3)
    x[0, 0, 1, 2, 2] = value
    with pytest.raises(RunError, match=r"\(.*\)"):
        EventBackend().encode(x, 1)


@pytest.mark.parametrize(
    ("original", "queries", "supported"),
    [
        (torch.float32, None, True),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.float16, False),
        (torch.float64, None, False),
        (torch.float64, torch.float32, False),
        (torch.bfloat16, None, False),
    ],
)
def test_a_cpu_computes_in_float32(
    original: torch.dtype, queries: torch.dtype | None, supported: bool
) -> None:
    actual = select_backend(torch.zeros(1, dtype=original), nn.Linear(1, 1, dtype=original), queries)
    assert (actual is not None) == supported
    assert actual is None or (actual.name, actual.dtype) == ("events", torch.float32)


def test_a_network_without_numbers_goes_by_its_input() -> None:
    assert select_backend(torch.zeros(1), nn.Identity()) is not None
    assert select_backend(torch.zeros(1, dtype=torch.float64), nn.Identity()) is None


def test_a_missing_numba_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"numba.*sparseflow\[spiking\]"):
        select_backend(torch.zeros(1), nn.Linear(1, 1))
