"""Fused stems against a convolution and neurons."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.packed.format import allocate_packed, make_channel_table
from sparseflow.spiking.backends.packed.stem import get_stem_unsupported_reason, pack_weight, run_stem
from sparseflow.spiking.backends.reference import run_neuron_reference
from sparseflow.spiking.backends.spec import NeuronSpec
from tests.spiking.backends.neurons import LIF, NEURONS
from tests.spiking.backends.packed.cases import DEVICE, assert_packed, grid, seeded

pytestmark = pytest.mark.usefixtures("poisoned_empty")

GEOMETRIES = [
    ConvGeometry(kernel_size=(3, 3), padding=(1, 1)),
    ConvGeometry(kernel_size=(7, 7), stride=(2, 2), padding=(3, 3)),
    ConvGeometry(kernel_size=(1, 3), padding=(0, 1), dilation=(1, 2)),
    ConvGeometry(kernel_size=(3, 2), stride=(3, 1), padding=(0, 2), dilation=(2, 3)),
    ConvGeometry(),
]


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, geometry: ConvGeometry
) -> torch.Tensor:
    y = F.conv2d(
        x.double().flatten(0, 1),
        weight.double(),
        bias.double(),
        geometry.stride,
        geometry.padding,
        geometry.dilation,
    )
    return y.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("spec", "geometry"),
    [
        # The fast tests combine LIF with every geometry, and other neurons with one.
        pytest.param(
            spec, geometry, marks=[] if spec is LIF or i % len(GEOMETRIES) == j else pytest.mark.slow
        )
        for i, spec in enumerate(NEURONS.values())
        for j, geometry in enumerate(GEOMETRIES)
    ],
)
def test_matches_convolution_and_neurons(spec: NeuronSpec, geometry: ConvGeometry, steps: int) -> None:
    generator = seeded(0)
    x = grid(generator, steps, 2, 3, 9, 11)
    weight, bias = grid(generator, 70, 3, *geometry.kernel_size), grid(generator, 70)
    current = _convolve(x, weight, bias, geometry).expand(3, -1, -1, -1, -1)
    v, membrane = None, None
    for _ in range(2):  # from rest, then from the last membrane
        _, n, c, h, w = current.shape
        packed = allocate_packed(3, n, c, h, w, torch.device(DEVICE), tile=16)
        rows = pack_weight(weight, geometry)
        dense, v = run_stem(x, rows, bias, spec, geometry, steps=3, v=v, packed=packed, dense=torch.float32)
        expected, membrane = run_neuron_reference(spec, current, membrane)
        assert dense is not None and torch.equal(dense.double(), expected)
        assert_packed(packed, expected.float())
        assert v is not None and torch.equal(v.permute(0, 3, 1, 2).double(), membrane)


def test_membranes_follow_the_networks_channels() -> None:
    generator, geometry = seeded(1), GEOMETRIES[0]
    x, weight = grid(generator, 2, 1, 2, 5, 5), grid(generator, 8, 2, 3, 3)
    bias, order = torch.zeros(8, device=DEVICE), torch.randperm(8, generator=generator).to(DEVICE)
    rows = pack_weight(weight[order], geometry)
    table = make_channel_table(order, 8, torch.device(DEVICE))
    dense, v = run_stem(x, rows, bias, LIF, geometry, steps=2, dense=torch.float32, v_columns=table)
    expected, membrane = run_neuron_reference(LIF, _convolve(x, weight, bias, geometry))
    assert dense is not None and torch.equal(dense.double(), expected[:, :, order])
    assert v is not None and torch.equal(v.permute(0, 3, 1, 2).double(), membrane)


def test_large_windows_groups_and_uneven_padding_are_not_supported() -> None:
    assert get_stem_unsupported_reason(ConvGeometry(kernel_size=(7, 7)), 5) is None
    for geometry in (ConvGeometry(kernel_size=(7, 7)), ConvGeometry(groups=2), ConvGeometry(padding="same")):
        assert get_stem_unsupported_reason(geometry, 6) is not None
