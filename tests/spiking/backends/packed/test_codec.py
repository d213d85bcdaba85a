"""Packing and unpacking in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.errors import DeviceError, InputError
from sparseflow.spiking.backends.packed import codec, words
from sparseflow.spiking.backends.packed import format as reference
from sparseflow.spiking.backends.packed.words import choose_time_chunk, to_channels_last
from tests.spiking.backends.packed.cases import DEVICE, assert_activity, assert_packed, grid, seeded, spikes

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SHAPES = [(1, 1, 1, 1, 1), (2, 3, 96, 5, 7), (3, 2, 64, 4, 4), (2, 1, 200, 3, 2), (1, 2, 65, 1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_pack_is_the_reference_bit_for_bit(shape: tuple[int, ...], density: float) -> None:
    x = spikes(seeded(1), *shape, rate=density)
    assert_packed(codec.pack(x), x)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.int64]
)
def test_pack_takes_any_dtype(dtype: torch.dtype) -> None:
    x = spikes(seeded(2), 2, 2, 70, 3, 3)
    assert_packed(codec.pack(x.to(dtype)), x)


def test_pack_takes_any_strides() -> None:
    x = spikes(seeded(3), 2, 3, 40, 3, 5)
    views = {
        "channels last": rows_view(x),
        "transposed": x.transpose(3, 4).contiguous().transpose(3, 4),
        "slice": torch.cat([x, 1 - x], dim=2)[:, :, :40],
        "every other column": torch.stack([x, 1 - x], dim=-1).flatten(-2)[..., ::2],
        "time last": x.permute(1, 2, 3, 4, 0).contiguous().permute(4, 0, 1, 2, 3),
    }
    for name, view in views.items():
        assert torch.equal(view, x), name
        assert_packed(codec.pack(view), x)
    same = x[:1].expand(4, -1, -1, -1, -1)
    assert_packed(codec.pack(same), same.contiguous())


def rows_view(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def test_pack_writes_to_destination() -> None:
    x = spikes(seeded(4), 2, 1, 64, 3, 3)
    out = reference.allocate_packed(2, 1, 64, 3, 3, DEVICE)
    out.data.fill_(-1)
    assert codec.pack(x, out) is out
    assert_packed(out, x)
    with pytest.raises(InputError, match=r"\(2, 1, 64, 3, 3\)"):
        codec.pack(x[:1], out)


@pytest.mark.parametrize("shape", [(4, 3, 70, 5, 3), (32, 1, 64, 1, 9), (3, 2, 130, 5, 7), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("tile", [1, 8, 16, 32])
def test_pack_marks_what_fires(shape: tuple[int, ...], tile: int) -> None:
    x = spikes(seeded(7), *shape, rate=0.002)
    x[-1, -1, -1, -1, -1] = 1
    actual = codec.pack(x, tile=tile)
    assert_packed(actual, x)
    assert_activity(actual, tile)


def test_pack_fills_the_activity_that_it_is_given() -> None:
    out = reference.allocate_packed(2, 1, 64, 3, 3, DEVICE, tile=4)
    for rate in (0.0, 1.0, 0.01):
        codec.pack(spikes(seeded(8), 2, 1, 64, 3, 3, rate=rate), out)
        assert_activity(out, 4)


def test_pack_refuses_tiles_that_it_cannot_mark() -> None:
    for tile in (3, 64):
        with pytest.raises(InputError, match=f"32, got {tile}"):
            codec.pack(torch.zeros(1, 1, 1, 3, 3, device=DEVICE), tile=tile)
    with pytest.raises(InputError, match="33 time steps"):
        codec.pack(torch.zeros(33, 1, 1, 3, 3, device=DEVICE), tile=16)


def test_pack_refuses_other_ranks() -> None:
    with pytest.raises(InputError, match=r"\[T, N, C, H, W\]"):
        codec.pack(torch.zeros(3, 4))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unpack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = spikes(seeded(5), *shape)
    actual = codec.unpack(reference.pack(x), dtype)
    assert actual.dtype == dtype and torch.equal(actual, x.to(dtype))
    assert actual.permute(0, 1, 3, 4, 2).is_contiguous()


def test_unpack_adds_shortcuts() -> None:
    g = seeded(6)
    x, other = spikes(g, 3, 2, 72, 4, 3), spikes(g, 3, 2, 72, 4, 3)
    real, constant = grid(g, 3, 2, 72, 4, 3), grid(g, 1, 2, 72, 4, 3)
    add = [reference.pack(other), real.half(), constant]
    actual = codec.unpack(reference.pack(x), torch.float32, add=add)
    assert torch.equal(actual, x + other + real + constant)
    with pytest.raises(InputError, match="shape"):
        codec.unpack(reference.pack(x), add=[real[:2]])


def test_words_are_the_halfwords_memory() -> None:
    x = torch.zeros(1, 1, 128, 1, 1, device=DEVICE)
    x[0, 0, 64 + 8 * 3 + 2 * 2 + 1] = 1  # j = 3, q = 2, p = 1
    packed = codec.pack(x)
    assert packed.words.shape == (1, 7, 2)
    assert packed.words[0, 3].tolist() == [0, 1 << (16 * 2 + 2 * 3 + 1)]
    assert tuple(x.shape) == packed.shape


def test_channels_last_copies_only_when_it_must() -> None:
    x = torch.zeros(3, 2, 8, 4, 4)
    view = rows_view(x)
    assert to_channels_last(view).data_ptr() == view.data_ptr()
    assert to_channels_last(x[:1].expand(5, -1, -1, -1, -1)).shape == (1, 2, 4, 4, 8)
    assert [choose_time_chunk(t) for t in (1, 2, 3, 4, 6, 16)] == [1, 2, 1, 4, 2, 4]


def test_cpu_tensor_without_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(words, "compute_channel_shift", object.__new__(triton.JITFunction))
    with pytest.raises(DeviceError, match="CUDA"):
        words.check_launchable(torch.zeros(1))


def test_too_large_time_steps_are_refused() -> None:
    with pytest.raises(InputError, match="2\\^31"):
        words.check_step_size(torch.zeros(1, device="meta").expand(1, 1 << 31))
