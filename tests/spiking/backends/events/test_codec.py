"""Dense tensors to events and back, sums over space, max pooling."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba", reason="the event kernels need numba (extra `spiking`)")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.spiking.backends.events import decode, encode, max_pool, sum_over_space
from sparseflow.spiking.backends.events import format as event_format
from sparseflow.spiking.backends.events.kernels.planes import list_planes


def _random(*shape: int, rate: float = 0.2, largest: int = 1, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    fired = (torch.rand(shape, generator=g) < rate).float()
    return fired * torch.randint(1, largest + 1, shape, generator=g)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (3, 3, 40, 5, 6))),
    rate=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    largest=st.sampled_from([1, 2, 255]),
    seed=st.integers(0, 99),
)
def test_round_trip(shape: tuple[int, ...], rate: float, largest: int, seed: int) -> None:
    x = _random(*shape, rate=rate, largest=largest, seed=seed)
    events = encode(x)
    assert torch.equal(decode(events), x)
    assert events.count_events() == x.sum()
    assert events.max_value >= max(1, x.max())
    assert events.shape == shape


@pytest.mark.parametrize("channels", [18, 130])
@pytest.mark.parametrize("time_steps", [1, 2, 4, 7])
def test_planes_hold_what_their_steps_share(channels: int, time_steps: int) -> None:
    x = _random(time_steps, 2, channels, 3, 5, rate=0.6)
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
    x = _random(1, 2, 64, 4, 4).expand(4, -1, -1, -1, -1)
    events = encode(x)
    assert events.start[..., -1].sum() == x[0].sum()
    assert events.count_events() == x.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = _random(2, 1, 5, 4, 3)
    assert torch.equal(decode(encode(x.to(dtype))), x)


def test_any_memory_layout() -> None:
    x = _random(3, 2, 20, 4, 6)
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 2))
    padded = torch.full((3, 2, 25, 5, 8), 7.0)
    padded[:, :, 2:22, 1:, 1:7] = x
    for view in (last, padded[:, :, 2:22, 1:, 1:7], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(decode(encode(view)), x)
    assert torch.equal(decode(encode(x[:1].expand(4, -1, -1, -1, -1))), x[:1].expand(4, -1, -1, -1, -1))


def test_decoded_memory_is_channels_last() -> None:
    out = decode(encode(_random(2, 3, 4, 5, 6)))
    assert out.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bad", [0.5, -1.0, float("nan"), float("inf"), 256.0])
@pytest.mark.parametrize("channels_last", [True, False])
def test_what_is_no_count_is_refused(bad: float, channels_last: bool) -> None:
    x = _random(2, 2, 20, 3, 4)
    x[1, 1, 19, 2, 3] = bad
    if channels_last:
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (2, 2))
    with pytest.raises(InputError, match="0 to 255"):
        encode(x)


def test_wrong_rank_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[T, N, C, H, W\]"):
        encode(torch.zeros(2, 3, 4, 5))


def test_wide_rows() -> None:
    x = _random(1, 1, 70, 2, 1000, rate=0.05, largest=2)
    events = encode(x)
    assert events.wide
    assert torch.equal(decode(events), x)
    assert torch.equal(sum_over_space(events), x.sum((-1, -2)))


def test_memory_is_below_dense() -> None:
    events = encode(_random(4, 2, 32, 16, 16))
    assert events.nbytes < 0.6 * 4 * 4 * 2 * 32 * 16 * 16


def test_memory_is_reused_once_events_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_format, "_POOL", event_format._BufferPool(limit_bytes=64 << 20))
    first = encode(_random(2, 2, 32, 8, 8))
    address = first.index.ctypes.data
    saved = encode(_random(2, 2, 32, 8, 8))
    assert saved.index.ctypes.data != address
    del first
    gc.collect()
    addresses = {encode(_random(2, 2, 32, 8, 8)).index.ctypes.data for _ in range(8)}
    assert saved.index.ctypes.data not in addresses
    assert len(addresses) <= 2


@pytest.mark.parametrize("channels", [1, 20, 64])
def test_sum_over_space(channels: int) -> None:
    x = _random(3, 2, channels, 5, 4, largest=3)
    assert torch.equal(sum_over_space(encode(x)), x.sum((-1, -2)))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 1, 0), (3, 3, 0)]
)
@pytest.mark.parametrize("size", [(4, 4), (5, 7)])
def test_max_pool(kernel: int, stride: int, padding: int, size: tuple[int, int]) -> None:
    x = _random(2, 3, 20, *size)
    expected = F.max_pool2d(x.flatten(0, 1), kernel, stride, padding).unflatten(0, (2, 3))
    assert torch.equal(decode(max_pool(encode(x), kernel=kernel, stride=stride, padding=padding)), expected)


def test_max_pool_refuses() -> None:
    with pytest.raises(InputError, match="values up to 2"):
        max_pool(encode(_random(1, 1, 2, 4, 4, rate=1.0) * 2), kernel=2)
    with pytest.raises(InputError, match="window"):
        max_pool(encode(_random(1, 1, 2, 4, 4)), kernel=5)
