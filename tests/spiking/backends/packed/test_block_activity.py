"""Activity words: what they say, how many a tile needs, and which variants fit a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import (
    add_activity,
    allocate_packed,
    pack,
)
from sparseflow.spiking.backends.packed.hopper.group import count_input_activity_words
from sparseflow.spiking.backends.packed.hopper.variants import (
    HopperVariant,
    estimate_us,
    list_hopper_variants,
)
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

IF = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=0.0)


def _spec(c_in: int, c_out: int, k: int = 3, stride: int = 1) -> GroupSpec:
    source = SpikeSource(weight=torch.ones(c_out, c_in, k, k), stride=stride, padding=k // 2)
    return GroupSpec(sources=(source,), bias=torch.zeros(c_out), neuron=IF)


def test_one_spike_sets_one_bit() -> None:
    spikes = torch.zeros(32, 2, 130, 5, 3)
    spikes[31, 1, 64, 2, 1] = 1  # pixel 15 + 7 = 22
    spikes[3, 1, 129, 4, 2] = 1  # the last pixel, 29
    activity = add_activity(pack(spikes), tile=8).activity
    assert activity is not None and activity.shape == (3, 4) and activity.dtype == torch.int32
    expected = torch.zeros(3, 4, dtype=torch.int32)
    expected[1, 2] = -(2**31)
    expected[2, 3] = 8
    assert torch.equal(activity, expected)


def test_unrepresentable_spikes_raise() -> None:
    with pytest.raises(InputError, match="33 time steps"):
        add_activity(pack(torch.zeros(33, 1, 64, 1, 1)))
    with pytest.raises(InputError, match="33 time steps"):
        allocate_packed(33, 1, 64, 1, 1, "cpu", tile=16)
    unwritten = allocate_packed(4, 1, 65, 3, 3, "cpu", tile=4).activity
    assert unwritten is not None and unwritten.shape == (2, 3) and (unwritten == -1).all()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("reach", [0, 1])
@pytest.mark.parametrize(
    ("h", "w", "n", "pixels", "tile"), [(7, 7, 3, 32, 8), (9, 5, 2, 64, 16), (1, 1, 3, 2, 4)]
)
def test_tile_reads_all_words_of_its_inputs(
    stride: int, reach: int, h: int, w: int, n: int, pixels: int, tile: int
) -> None:
    """Every input pixel of every tile lies in the words that the kernel's arithmetic makes it read."""
    ih, iw = stride * h, stride * w - (stride - 1)
    count = count_input_activity_words(
        _spec(64, 64, 1 + 2 * reach, stride), HopperVariant(bm=pixels), N=n, H=h, W=w, in_size=(ih, iw),
        tile=tile,
    )  # fmt: skip
    max_words = 0
    for start in range(0, n * h * w, pixels):
        inputs = set()
        for pixel in range(start, min(start + pixels, n * h * w)):
            image, y, x = pixel // (h * w), pixel // w % h, pixel % w
            for row in range(y * stride - reach, y * stride + reach + 1):
                for column in range(x * stride - reach, x * stride + reach + 1):
                    if 0 <= row < ih and 0 <= column < iw:
                        inputs.add((image * ih + row) * iw + column)
        words = {i // tile for i in inputs}
        max_words = max(max_words, max(words) - min(words) + 1)
        # the kernel's first and last word, as in `_load_activity`
        image, y, x = start // (h * w), start // w % h, start % w
        halo = reach * (iw + 1)
        first = max((image * ih + y * stride) * iw + x * stride - halo, 0) // tile
        end = min(start + pixels, n * h * w) - 1
        image, y, x = end // (h * w), end // w % h, end % w
        last = min(((image * ih + y * stride) * iw + x * stride + halo) // tile, (n * ih * iw - 1) // tile)
        assert first <= min(words) and max(words) <= last < first + count
    assert max_words <= count < 2 * (max_words + 2 + 2 * reach * (iw + 1) // tile)


def test_only_unsplit_variants_skip() -> None:
    spec = _spec(320, 128)
    actual = list_hopper_variants(spec, T=4, N=6, H=9, W=9)
    assert {v.split for v in actual} > {1}
    for v in actual:
        words = count_input_activity_words(spec, v, N=6, H=9, W=9, in_size=(9, 9), tile=16)
        assert (words == 0) == (v.split > 1)
        assert words & (words - 1) == 0
    two = replace(spec, sources=(*spec.sources, _spec(64, 128, 1, 2).sources[0]))
    for v in list_hopper_variants(two, T=4, N=6, H=9, W=9):
        assert (count_input_activity_words(two, v, N=6, H=9, W=9, in_size=(9, 9), tile=16) == 0) == (
            v.split > 1
        )
    wide = _spec(33 * 64, 64)
    assert not count_input_activity_words(wide, actual[0], N=1, H=4, W=4, in_size=(4, 4), tile=16)


@pytest.mark.parametrize("t", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize(("c_in", "c_out", "k"), [(64, 64, 3), (128, 256, 3), (96, 64, 1), (512, 128, 1)])
def test_variants_fit_and_the_likely_fastest_comes_first(t: int, c_in: int, c_out: int, k: int) -> None:
    spec = _spec(c_in, c_out, k)
    actual = list_hopper_variants(spec, T=t, N=8, H=14, W=14)
    assert actual and len({v.name for v in actual}) == len(actual)
    times = [estimate_us(spec, v, T=t, N=8, H=14, W=14) for v in actual]
    assert times == sorted(times)
    for v in actual:
        assert t % v.tc == 0 and v.tc % v.pair == 0 and c_out % v.bn == 0
        assert v.ring * v.ub * v.bn * 128 * max(v.ctas, 1) <= 227 * 1024
        assert v.max_registers is None or v.max_registers * v.warps * 32 * v.ctas <= 65536
