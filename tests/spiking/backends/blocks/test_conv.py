"""The two-stage block-sparse convolution against torch in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the block kernels need triton")

from sparseflow.errors import DeviceError, InputError
from sparseflow.spiking.backends.blocks import conv
from sparseflow.spiking.backends.blocks.conv import ActiveChunks, prescan, sparse_conv2d
from sparseflow.spiking.backends.blocks.geometry import (
    ConvTiling,
    choose_tiling,
    compute_reach,
    make_geometry,
)
from sparseflow.spiking.backends.blocks.reference import (
    run_active_reference,
    run_conv2d_reference,
    run_words_reference,
)

ROOT = Path(__file__).parents[4]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-14}
"""Largest error, as a fraction of the largest output. Sums are kept in float32 (float64 for float64)."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def _input(
    *shape: int, rate: float, dtype: torch.dtype = torch.float32, seed: int = 0, binary: bool = False
) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    fired = torch.rand(shape, generator=g) < rate
    values = torch.ones(shape) if binary else torch.randn(shape, generator=g)
    return (fired * values).to(dtype).to(DEVICE)


def _parameters(c_out: int, c_in: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(c_out + c_in)
    weight = torch.randn((c_out, c_in, k, k), generator=g) / (c_in * k * k) ** 0.5
    return weight.to(dtype).to(DEVICE), torch.randn(c_out, generator=g).to(dtype).to(DEVICE)


def _check(
    x: torch.Tensor,
    k: int,
    *,
    c_out: int = 16,
    stride: int = 1,
    padding: int | None = None,
    block: int = 8,
    bias: bool = True,
    tiling: ConvTiling | None = None,
) -> ActiveChunks:
    """Words, lists and output, all against the reference."""
    padding = k // 2 if padding is None else padding
    active = prescan(
        x, block, kernel_size=k, stride=stride, padding=padding, out_channels=c_out, tiling=tiling
    )
    assert torch.equal(active.words, run_words_reference(x, block, active.tiling.group))
    lists = [row[:count].tolist() for row, count in zip(active.chunks, active.counts.tolist(), strict=True)]
    assert lists == run_active_reference(active.words, active.geometry, active.tiling)
    weight, offset = _parameters(c_out, x.shape[1], k, x.dtype)
    inputs = offset if bias else None
    y = sparse_conv2d(x, weight, inputs, stride=stride, padding=padding, block_size=block, active=active)
    expected = run_conv2d_reference(x, weight, inputs, stride=stride, padding=padding)
    assert y.dtype == x.dtype and y.shape == expected.shape
    scale = max(expected.abs().max().item(), 1.0)
    assert (y.double() - expected).abs().max().item() <= TOLERANCE[x.dtype] * scale
    return active


@pytest.mark.parametrize(
    ("dtype", "channels_last"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)]
)
@pytest.mark.parametrize(
    ("k", "stride", "padding", "block"),
    [(3, 1, 1, 16), (3, 2, 1, 8), (3, 1, 0, 4), (1, 1, 0, 8), (1, 2, 0, 4)],
)
def test_matches_float64(
    k: int, stride: int, padding: int, block: int, dtype: torch.dtype, channels_last: bool
) -> None:
    # neither height, width, channels nor output channels fill their last block, chunk or tile
    x = _input(2, 20, 11, 18, rate=0.01, dtype=dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    active = _check(x, k, c_out=19, stride=stride, padding=padding, block=block)
    assert 0 < active.compute_active_ratio() <= 1


def test_float64() -> None:
    _check(_input(1, 20, 9, 6, rate=0.03, dtype=torch.float64), 3)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_both_stages_in_one_call(memory_format: torch.memory_format) -> None:
    x = _input(2, 40, 9, 8, rate=0.02).contiguous(memory_format=memory_format)
    weight, bias = _parameters(7, 40, 3, torch.float32)
    y = sparse_conv2d(x, weight, bias, block_size=4)
    assert (y - run_conv2d_reference(x, weight, bias)).abs().max() < 1e-5
    assert y.is_contiguous(memory_format=memory_format)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_bfloat16(k: int, channels_last: bool) -> None:
    x = _input(2, 40, 29, 30, rate=0.02, dtype=torch.bfloat16)
    _check(x.contiguous(memory_format=torch.channels_last) if channels_last else x, k, c_out=70)


@pytest.mark.parametrize(
    ("block", "k", "stride", "channels_last"),
    [(4, 3, 1, False), (8, 1, 2, False), (8, 3, 2, True), (16, 3, 1, True)],
)
def test_one_spike_in_each_corner_of_blocks_and_image(
    block: int, k: int, stride: int, channels_last: bool
) -> None:
    size = block + 3
    corners = [0, block - 1, block, size - 1]
    x = torch.zeros(16, 16, size, size, device=DEVICE)
    for n, (row, column) in enumerate((r, c) for r in corners for c in corners):
        x[n, n, row, column] = 1
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    height, width = (8, 16) if block == 16 else (4, 4)
    tiling = ConvTiling(tile_h=height, tile_w=width, tile_c=16, warps=1)
    active = _check(x, k, c_out=4, stride=stride, block=block, tiling=tiling)
    # one spike occupies one row and one column of one block: only tiles that read it have anything to do
    assert active.compute_zero_block_ratio() == 0.75
    read = run_conv2d_reference(x, torch.ones(1, 16, k, k, device=DEVICE), stride=stride, padding=k // 2)[
        :, 0
    ]
    read = torch.nn.functional.pad(read, (0, -read.shape[2] % width, 0, -read.shape[1] % height))
    reached = read.unflatten(2, (-1, width)).unflatten(1, (-1, height)).sum((2, 4)) > 0
    assert torch.equal(active.counts > 0, reached.flatten())


@pytest.mark.parametrize("channels_last", [False, True])
def test_all_zero_input_gives_the_bias(channels_last: bool) -> None:
    x = torch.zeros(2, 40, 16, 16, device=DEVICE)
    x[0, 3, 5, 5] = -0.0
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    active = _check(x, 3)
    assert active.compute_zero_block_ratio() == 1 and not active.counts.any()
    weight, bias = _parameters(16, 40, 3, torch.float32)
    assert torch.equal(sparse_conv2d(x, weight, bias), bias.view(-1, 1, 1).expand(2, 16, 16, 16))
    assert not sparse_conv2d(x, weight).any()
    # skipped is skipped: a weight that nothing meets cannot spoil the output
    weight[:, 7] = float("nan")
    assert torch.equal(sparse_conv2d(x, weight, bias), bias.view(-1, 1, 1).expand(2, 16, 16, 16))


def test_all_ones() -> None:
    active = _check(torch.ones(1, 33, 9, 9, device=DEVICE), 3, bias=False)
    assert active.compute_zero_block_ratio() == 0 and active.compute_active_ratio() == 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_many_channels(channels_last: bool) -> None:
    x = _input(1, 274, 5, 4, rate=0.001, dtype=torch.float16, binary=True)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    for k in (3, 1):
        assert _check(x, k, c_out=40, block=4).compute_active_ratio() < 0.9


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 40), (3, 150), (7, 7)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_odd_sizes(height: int, width: int, channels_last: bool) -> None:
    x = _input(1, 17, height, width, rate=0.05)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    _check(x, 3, block=4)
    _check(x, 1, block=4, stride=2)


def test_any_strides() -> None:
    wide = _input(1, 36, 8, 12, rate=0.03)
    _check(wide[:, ::2, :, 1:], 3)
    _check(wide.transpose(2, 3), 3, block=4)
    _check(wide[:1, :1].expand(3, 18, -1, -1), 1)
    _check(wide.contiguous(memory_format=torch.channels_last)[:, 2:20], 3)


def test_zero_block_ratio_counts_every_value() -> None:
    x = torch.zeros(1, 16, 8, 8, device=DEVICE)
    for value in (1e-45, float("nan"), -3.0):
        x[0, 5, 7, 0] = value
        assert prescan(x, 8, padding=1).counts.tolist() == [1], value


def test_tf32_is_used_on_request() -> None:
    x = _input(1, 32, 8, 8, rate=0.3, binary=True)
    weight, _ = _parameters(16, 32, 3, torch.float32)
    expected = run_conv2d_reference(x, weight)
    y = sparse_conv2d(x, weight, block_size=8, allow_tf32=True)
    assert (y - expected).abs().max() < 4e-3 * expected.abs().max()


def test_same_bits_every_time() -> None:
    x = _input(1, 48, 16, 16, rate=0.1)
    weight, bias = _parameters(16, 48, 3, torch.float32)
    first = sparse_conv2d(x, weight, bias)
    assert torch.equal(sparse_conv2d(x, weight, bias), first)


def test_changed_weight_is_detected() -> None:
    x = _input(1, 16, 8, 8, rate=0.3)
    weight, _ = _parameters(16, 16, 3, torch.float32)
    before = sparse_conv2d(x, weight)
    (laid,) = [layout for _, layout in conv._layouts[weight].values()]
    weight.mul_(2)
    assert torch.equal(sparse_conv2d(x, weight), 2 * before)
    # in the memory that a captured graph would read
    assert [layout.data_ptr() for _, layout in conv._layouts[weight].values()] == [laid.data_ptr()]
    with torch.inference_mode():
        weight = weight.clone()
        second = sparse_conv2d(x, weight)
        weight.mul_(2)
        assert torch.equal(sparse_conv2d(x, weight), 2 * second)


def test_layouts_go_with_their_weight() -> None:
    weight, _ = _parameters(16, 16, 1, torch.float32)
    before = len(conv._layouts)
    sparse_conv2d(_input(1, 16, 8, 8, rate=0.3), weight, padding=0)
    assert len(conv._layouts) == before + 1
    del weight
    assert len(conv._layouts) == before


def test_no_images() -> None:
    weight, bias = _parameters(5, 3, 3, torch.float32)
    assert sparse_conv2d(torch.zeros(0, 3, 8, 8, device=DEVICE), weight, bias).shape == (0, 5, 8, 8)


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_reach_covers_every_field(block: int, channels_last: bool) -> None:
    for size in (4, 7, 14, 28, 56, 57):
        for k, stride, padding in ((3, 1, 1), (3, 1, 0), (3, 2, 1), (1, 1, 0), (1, 2, 0)):
            g = make_geometry(
                (1, 64, size, size), kernel_size=k, stride=stride, padding=padding, block_size=block
            )
            t = choose_tiling(g, torch.float16, channels_last, 64)
            assert t.tile_h * t.tile_w >= 16
            for tile, max_value in zip((t.tile_h, t.tile_w), compute_reach(g, t), strict=True):
                for start in range(0, g.out_h, tile):
                    first, last = g.compute_field(tile, size, start)
                    assert first // block + max_value - 1 >= last // block


def test_refusals() -> None:
    x = torch.zeros(1, 4, 8, 8, device=DEVICE)
    weight = torch.zeros(8, 4, 3, 3, device=DEVICE)
    with pytest.raises(InputError, match="must be one of"):
        prescan(x.long(), 8)
    with pytest.raises(InputError, match="block_size"):
        prescan(x, 5)
    with pytest.raises(InputError, match="stride"):
        sparse_conv2d(x, weight, stride=3)
    with pytest.raises(InputError, match="padding"):
        sparse_conv2d(x, weight, padding=2)
    with pytest.raises(InputError, match=r"\(8, 5, 3, 3\)"):
        sparse_conv2d(x, torch.zeros(8, 5, 3, 3))
    with pytest.raises(InputError, match=r"\[N, C_in, H, W\]"):
        sparse_conv2d(x[0], weight)
    with pytest.raises(InputError, match="`weight`"):
        sparse_conv2d(x, weight.half())
    with pytest.raises(InputError, match="`bias`"):
        sparse_conv2d(x, weight, torch.zeros(8, device=DEVICE).double())
    with pytest.raises(InputError, match="too small"):
        sparse_conv2d(x[:, :, :2], weight, padding=0)
    with pytest.raises(InputError, match="`active`"):
        sparse_conv2d(x, weight, active=prescan(x, 8), block_size=16)


def test_cpu_tensor_without_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from sparseflow.spiking.backends.blocks import triton as kernels

    if not isinstance(kernels.convolve, triton.runtime.JITFunction):
        monkeypatch.setattr(triton.runtime, "JITFunction", type(kernels.convolve))
    with pytest.raises(DeviceError, match="CUDA"):
        prescan(torch.zeros(1, 4, 8, 8), 8)


def test_compiles_for_hopper_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.spiking.backends.blocks.compile_for_hopper"]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert completed.returncode == 0, completed.stderr[-3000:]
    kernels = json.loads(completed.stdout)
    assert len(kernels) == 11
    for name, report in kernels.items():
        assert report["spill_bytes"] == 0, (name, report)
    assert kernels["convolve fp16 planes"]["wgmma"] and kernels["convolve tf32 planes"]["wgmma"]


@pytest.mark.gpu
def test_replays_in_a_graph_while_the_sparsity_changes() -> None:
    x = torch.zeros(4, 64, 28, 28, device=DEVICE)
    weight, bias = _parameters(64, 64, 3, torch.float32)
    sparse_conv2d(x, weight, bias)
    torch.cuda.synchronize(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse_conv2d(x, weight, bias, block_size=8)
    for rate in (0.0, 0.001, 0.1, 1.0, 0.0):
        x.copy_(_input(*x.shape, rate=rate, binary=True))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(x.device)
        expected = run_conv2d_reference(x, weight, bias)
        assert (y - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
