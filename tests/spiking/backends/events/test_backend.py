"""The event backend complies with the backend protocol; spikes convert to events and back."""

from __future__ import annotations

import gc
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("numba", reason="the event kernels need numba (extra `spiking`)")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError, MissingExtraError, RunError
from sparseflow.spiking.backends.base import Backend, GroupShape
from sparseflow.spiking.backends.events import format as event_format
from sparseflow.spiking.backends.events.backend import EventBackend, decode, encode, sum_over_space
from sparseflow.spiking.backends.events.kernels.planes import list_planes
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.selection import select_backend
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

NEURON = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=0.25, v_reset=0.0)


def grid(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def spikes(*shape: int, seed: int = 0, largest: int = 1, rate: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    fired = (torch.rand(shape, generator=generator) < rate).float()
    return fired * torch.randint(1, largest + 1, shape, generator=generator)


@pytest.mark.parametrize("out", ["native", "dense"])
@pytest.mark.parametrize("convolution", ["sparse", "dense"])
@pytest.mark.parametrize("carried", [False, True])
def test_prepared_group_equals_reference(
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
        assert after is not None and torch.equal(actual, expected) and torch.equal(after, membrane)
    assert expected.max() > 1


def test_stem_has_no_sparse_kernel() -> None:
    spec = GroupSpec(sources=(), bias=grid(5), neuron=NEURON, dense_inputs=1)
    shape = GroupShape(steps=2, images=1, sources=(), output=(5, 4, 4))
    assert "no convolution of spikes" in str(EventBackend().get_unsupported_reason(spec, shape))
    x = grid(1, 1, 5, 4, 4)
    expected, v = run_group_reference(spec, [], (), [x], time_steps=2)
    group = EventBackend().prepare(spec, shape, "dense")
    actual, after = group([], [], [x], [], steps=2, v=None, out="dense")
    assert after is not None and torch.equal(actual, expected) and torch.equal(after, v)


@pytest.mark.parametrize("largest", [1, 7])
def test_encode_decode_round_trip(largest: int) -> None:
    x = spikes(3, 2, 5, 4, 6, largest=largest)
    backend = EventBackend()
    native = backend.encode(x, largest)
    assert torch.equal(backend.decode(native), x)
    torch.testing.assert_close(backend.spatial_mean(native), x.mean((-2, -1)), rtol=1e-6, atol=0)
    assert backend.spatial_mean(native).shape == (3, 2, 5)


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), float("inf"), 256.0])
def test_encode_non_spikes_raises(value: float) -> None:
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
def test_select_backend_cpu_supports_float32_only(
    original: torch.dtype, queries: torch.dtype | None, supported: bool
) -> None:
    actual = select_backend(torch.zeros(1, dtype=original), nn.Linear(1, 1, dtype=original), queries)
    assert (actual is not None) == supported
    assert actual is None or (actual.name, actual.dtype) == ("events", torch.float32)


def test_select_backend_without_parameters_uses_the_input() -> None:
    assert select_backend(torch.zeros(1), nn.Identity()) is not None
    assert select_backend(torch.zeros(1, dtype=torch.float64), nn.Identity()) is None


def test_missing_numba_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"numba.*sparseflow\[spiking\]"):
        select_backend(torch.zeros(1), nn.Linear(1, 1))


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (3, 3, 40, 5, 6))),
    rate=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    largest=st.sampled_from([1, 2, 255]),
    seed=st.integers(0, 99),
)
def test_round_trip(shape: tuple[int, ...], rate: float, largest: int, seed: int) -> None:
    x = spikes(*shape, rate=rate, largest=largest, seed=seed)
    events = encode(x)
    assert torch.equal(decode(events), x)
    assert events.count_events() == x.sum()
    assert events.max_value >= max(1, x.max())
    assert events.shape == shape


@pytest.mark.parametrize("channels", [18, 130])
@pytest.mark.parametrize("time_steps", [1, 2, 4, 7])
def test_planes_hold_what_their_steps_share(channels: int, time_steps: int) -> None:
    x = spikes(time_steps, 2, channels, 3, 5, rate=0.6)
    events = encode(x)
    observed = torch.zeros_like(x)
    for number, plane in enumerate(list_planes(time_steps, channels)):
        inside = torch.from_numpy(plane.extract(x.numpy()))
        for n, y in np.ndindex(2, 3):
            start = events.start[number, n, y]
            assert start[0] == 0 and (np.diff(start) >= 0).all()
            for column in range(5):
                entries = events.index[number, n, y, start[column] : start[column + 1]].astype(int)
                assert (entries // channels == column).all()
                assert sorted(entries % channels) == inside[n, :, y, column].nonzero().flatten().tolist()
        observed[list(plane.steps)] += inside
    assert torch.equal(observed, x)


def test_shared_steps_need_fewer_entries() -> None:
    x = spikes(1, 2, 64, 4, 4).expand(4, -1, -1, -1, -1)
    events = encode(x)
    assert events.start[..., -1].sum() == x[0].sum()
    assert events.count_events() == x.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = spikes(2, 1, 5, 4, 3)
    assert torch.equal(decode(encode(x.to(dtype))), x)


def test_any_memory_layout() -> None:
    x = spikes(3, 2, 20, 4, 6)
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 2))
    padded = torch.full((3, 2, 25, 5, 8), 7.0)
    padded[:, :, 2:22, 1:, 1:7] = x
    for view in (last, padded[:, :, 2:22, 1:, 1:7], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(decode(encode(view)), x)
    assert torch.equal(decode(encode(x[:1].expand(4, -1, -1, -1, -1))), x[:1].expand(4, -1, -1, -1, -1))


def test_decoded_memory_is_channels_last() -> None:
    out = decode(encode(spikes(2, 3, 4, 5, 6)))
    assert out.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bad", [0.5, -1.0, float("nan"), float("inf"), 256.0])
@pytest.mark.parametrize("channels_last", [True, False])
def test_encode_non_counts_raises(bad: float, channels_last: bool) -> None:
    x = spikes(2, 2, 20, 3, 4)
    x[1, 1, 19, 2, 3] = bad
    if channels_last:
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (2, 2))
    with pytest.raises(InputError, match="0 to 255"):
        encode(x)


def test_wrong_rank_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[T, N, C, H, W\]"):
        encode(torch.zeros(2, 3, 4, 5))


def test_wide_rows() -> None:
    x = spikes(1, 1, 70, 2, 1000, rate=0.05, largest=2)
    events = encode(x)
    assert events.wide
    assert torch.equal(decode(events), x)
    assert torch.equal(sum_over_space(events), x.sum((-1, -2)))


def test_memory_is_below_dense() -> None:
    events = encode(spikes(4, 2, 32, 16, 16))
    assert events.nbytes < 0.6 * 4 * 4 * 2 * 32 * 16 * 16


def test_memory_is_reused_once_events_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_format, "_POOL", event_format._BufferPool(limit_bytes=64 << 20))
    first = encode(spikes(2, 2, 32, 8, 8))
    address = first.index.ctypes.data
    saved = encode(spikes(2, 2, 32, 8, 8))
    assert saved.index.ctypes.data != address
    del first
    gc.collect()
    addresses = {encode(spikes(2, 2, 32, 8, 8)).index.ctypes.data for _ in range(8)}
    assert saved.index.ctypes.data not in addresses
    assert len(addresses) <= 2


@pytest.mark.parametrize("channels", [1, 20, 64])
def test_sum_over_space(channels: int) -> None:
    x = spikes(3, 2, channels, 5, 4, largest=3)
    assert torch.equal(sum_over_space(encode(x)), x.sum((-1, -2)))
