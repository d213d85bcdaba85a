"""The address arithmetic of the Hopper kernel, run on tensors without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.spiking.backends.packed.format import BLOCK, count_padded_pixels, pack
from sparseflow.spiking.backends.packed.hopper import addressing, block_activity


def _as_python(function: object):
    return function.fn  # type: ignore[attr-defined]


@pytest.mark.parametrize("taps", [9, 1])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("n", "ih", "iw"), [(3, 7, 5), (2, 4, 6), (2, 1, 1), (1, 9, 2)])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_every_tap_of_every_batch(taps: int, stride: int, n: int, ih: int, iw: int, rate: float) -> None:
    blocks, t = 3, 1
    g = torch.Generator().manual_seed(1)
    packed = pack((torch.rand((2, n, blocks * BLOCK, ih, iw), generator=g) < rate).float())
    ch, step = 4 * packed.blocks, packed.data.stride(0)
    assert step == count_padded_pixels(n, ih, iw) * ch
    halves = packed.data.flatten()
    h, w = -(-ih // stride), -(-iw // stride)
    image, y, x = _as_python(addressing.split_pixel)(torch.arange(n * h * w), h, w)
    reach = 1 if taps == 9 else 0
    src = _as_python(addressing.padded_index)(image, y * stride - reach, x * stride - reach, ih, iw) * ch
    lanes = src[:, None] + torch.arange(4)
    # [N, 4 halfwords, H + 2, W + 2] of every block, as a convolution sees it
    run_group = F.pad(packed.pixels[t].permute(3, 0, 4, 1, 2), (reach, reach, reach, reach))
    for units in (3, 9) if taps == 9 else (1, 3):
        for batch in range(blocks * taps // units):
            base = t * step + _as_python(addressing.batch_shift)(batch, taps, units, iw, ch)
            for unit in range(units):
                actual = halves[lanes + (base + _as_python(addressing.unit_shift)(unit, taps, iw, ch))]
                if taps == 9:
                    block, tap = batch * units // 9, batch * units % 9 + unit
                else:
                    block, tap = batch * units + unit, 0
                rows = slice(tap // 3, tap // 3 + stride * (h - 1) + 1, stride)
                columns = slice(tap % 3, tap % 3 + stride * (w - 1) + 1, stride)
                required = run_group[block, :, :, rows, columns].permute(0, 2, 3, 1).reshape(-1, 4)
                assert torch.equal(actual, required), (units, batch, unit)


def test_outputs_go_to_their_pixels() -> None:
    n, h, w, blocks = 3, 4, 5, 2
    packed = pack(torch.ones(1, n, 64 * blocks, h, w))
    image, y, x = _as_python(addressing.split_pixel)(torch.arange(n * h * w), h, w)
    dst = (_as_python(addressing.padded_index)(image, y, x, h, w) * (4 * blocks))[:, None] + torch.arange(
        4 * blocks
    )
    written = torch.zeros_like(packed.data).flatten()
    written[dst] = -1
    assert torch.equal(written.view_as(packed.data), packed.data)


@pytest.mark.parametrize("per_list", [1, 3])
@pytest.mark.parametrize("second", [0, 1, 4])
@pytest.mark.parametrize("mask", [0, 1, 0b1000, 0b10110])
def test_weights_are_fetched_in_the_order_of_use(
    monkeypatch: pytest.MonkeyPatch, per_list: int, second: int, mask: int
) -> None:
    """Of what is not silent, then of the second source, time after time, whatever is silent."""
    monkeypatch.setattr(block_activity, "gl", SimpleNamespace(where=lambda c, a, b: a if c else b))
    monkeypatch.setattr(
        block_activity, "find_lowest_bit", lambda bits: (bits & -bits).bit_length() - 1 if bits else 32
    )
    monkeypatch.setattr(block_activity, "advance_batch", _as_python(block_activity.advance_batch))
    lists, chunks = 5, 3
    stop, batches = mask.bit_count() * per_list, lists * per_list
    required = [b for b in range(batches) if mask >> b // per_list & 1]
    required += range(batches, batches + second)
    pending, sub, turn = mask, 0, 0
    actual = []
    for _ in range(chunks * (stop + second)):
        batch, pending, sub, turn = _as_python(block_activity.advance_fetch)(
            pending, sub, turn, mask, stop, batches, second, per_list, 1 if second else 0
        )
        actual.append(batch)
    assert actual == required * chunks
