"""The packed format: round trips, and the path of every bit through the wgmma A fragment, emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import (
    BLOCK,
    K_CHANNEL,
    K_EXPONENT,
    allocate_packed,
    count_padded_pixels,
    make_channel_table,
    pack,
    unpack,
)
from sparseflow.spiking.backends.packed.hopper.group import pack_hopper_weights
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

IF = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=0.0)


@pytest.mark.parametrize("shape", [(1, 1, 64, 1, 1), (2, 3, 96, 5, 7), (4, 2, 1, 3, 3), (1, 2, 200, 2, 1)])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_round_trip(shape: tuple[int, ...], density: float) -> None:
    spikes = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < density).float()
    packed = pack(spikes)
    assert packed.shape == shape
    assert torch.equal(unpack(packed), spikes)


def test_border_and_padding_are_zero() -> None:
    packed = pack(torch.ones(2, 3, 70, 3, 5))
    border = packed.data.clone()
    replace(packed, data=border).pixels.zero_()
    assert packed.data.any() and not border.any()
    wide = unpack(replace(packed, shape=(2, 3, 128, 3, 5)))
    assert not wide[:, :, 70:].any()
    assert not allocate_packed(1, 1, 64, 2, 2, "cpu").data.any()


@pytest.mark.parametrize(("n", "h", "w"), [(1, 1, 1), (3, 4, 4), (2, 5, 3), (4, 1, 7), (2, 6, 1)])
def test_neighbours_share_a_border_that_is_zero(n: int, h: int, w: int) -> None:
    """The formula of the module's docstring, also one step outside; no place is left over."""
    packed = pack(torch.ones(2, n, 64, h, w))
    assert packed.data.shape == (2, count_padded_pixels(n, h, w), 1, 4)
    observed = set()
    for image in range(n):
        for y in range(-1, h + 1):
            for x in range(-1, w + 1):
                position = ((h + 1) * image + y + 1) * (w + 1) + x + 1
                observed.add(position)
                inside = 0 <= y < h and 0 <= x < w
                assert bool((packed.words[:, position] == -1).all()) == inside
                assert bool((packed.words[:, position] == 0).all()) != inside
                if inside:
                    pixel = packed.pixels[0, image, y, x]
                    assert pixel.data_ptr() == packed.data[0, position].data_ptr()
    assert observed == set(range(count_padded_pixels(n, h, w)))


def test_spikes_of_4x4_maps_take_an_eighth_of_the_bytes_of_fp16() -> None:
    packed = allocate_packed(4, 32, 512, 4, 4, "cpu", tile=16)
    assert packed.activity is not None
    assert packed.nbytes == packed.words.numel() * 8 + packed.activity.numel() * 4
    as_fp16 = 2 * 4 * 32 * 512 * 4 * 4
    assert packed.nbytes * 10 < as_fp16


def test_channel_table_refuses_non_permutations() -> None:
    assert make_channel_table(None, 3, "cpu") is None
    table = make_channel_table(torch.tensor([2, 0, 1]), 3, "cpu")
    assert table is not None and table.dtype == torch.int32 and table.tolist() == [2, 0, 1]
    for wrong in ([0, 1], [0, 1, 3], [0, 0, 2], [-1, 0, 1]):
        with pytest.raises(InputError, match="permutation of 3"):
            make_channel_table(torch.tensor(wrong), 3, "cpu")


def test_pack_refuses_other_ranks() -> None:
    with pytest.raises(InputError, match=r"\[T, N, C, H, W\]"):
        pack(torch.zeros(3, 4))


def _fragment_values(half: int) -> list[tuple[int, float]]:
    """What the kernel's PTX makes of one halfword: (place along K relative to the lane's, fp16 value)."""
    word = half | half << 16
    actual = []
    for r in range(8):
        turn = 4 * (r // 2)
        turned = ((word << turn) | (word >> (32 - turn))) & 0xFFFFFFFF if turn else word
        masked = turned & ((1 << (11 + r % 2)) | (1 << (29 + r % 2)))
        for p in range(2):
            bits = (masked >> (16 * p)) & 0xFFFF
            signed = bits - (1 << 16) if bits >= 1 << 15 else bits
            value = torch.tensor([signed], dtype=torch.int16).view(torch.float16).item()
            actual.append((8 * r + p, value))
    return actual


def test_every_bit_maps_to_its_k_position() -> None:
    for lane in range(4):
        for bit in range(16):
            channel = 8 * (bit // 2) + 2 * lane + bit % 2
            hits = [(index + 2 * lane, value) for index, value in _fragment_values(1 << bit) if value != 0]
            assert len(hits) == 1
            position, value = hits[0]
            assert K_CHANNEL[position] == channel
            assert value == 2.0 ** K_EXPONENT[position]


@pytest.mark.parametrize(("parts", "bits"), [(1, 11), (2, 21)])
def test_weights_are_kept_to_their_bits(parts: int, bits: int) -> None:
    g = torch.Generator().manual_seed(2)
    weight = torch.randn((64, 96, 3, 3), generator=g) * 0.3
    second = torch.randn((64, 64, 1, 1), generator=g)
    spec = GroupSpec(
        sources=(SpikeSource(weight=weight, padding=1), SpikeSource(weight=second, stride=2)),
        bias=torch.zeros(64),
        neuron=IF,
    )
    laid, scale = pack_hopper_weights(spec, parts)
    assert laid.shape == (64, (2 * 9 + 1) * parts * BLOCK)
    assert torch.isfinite(laid).all()
    value = torch.tensor([2.0**e for e in K_EXPONENT], dtype=torch.float64)
    # what the tensor core sums for a spike at every place, put back in the order of channels
    steps = (laid.double().view(64, 19, parts, BLOCK).sum(2) * value * scale)[
        ..., torch.tensor(K_CHANNEL).argsort()
    ]
    back = steps[:, :18].reshape(64, 2, 9, BLOCK).permute(0, 1, 3, 2).reshape(64, 128, 3, 3)
    expected = F.pad(weight, (0, 0, 0, 0, 0, 32)).double()
    assert (back - expected).abs().max() <= 2.0**-bits * 2 * weight.abs().max()
    assert (steps[:, 18] - second[..., 0, 0].double()).abs().max() <= 2.0**-bits * 2 * second.abs().max()
    relative = ((back - expected).norm() / expected.norm()).item()
    assert relative < 2.0**-bits


def test_large_weights_do_not_overflow() -> None:
    weight = torch.full((64, 64, 1, 1), 3.0e4)
    spec = GroupSpec(sources=(SpikeSource(weight=weight),), bias=torch.zeros(64), neuron=IF)
    laid, scale = pack_hopper_weights(spec, 1)
    assert torch.isfinite(laid).all()
    value = torch.tensor([2.0**e for e in K_EXPONENT], dtype=torch.float64)
    assert torch.allclose(
        laid.double() * value * scale, torch.full((64, 64), 3.0e4, dtype=torch.float64), rtol=2e-3
    )
