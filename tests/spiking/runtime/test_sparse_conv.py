"""`SparseConv2d` computes what `nn.Conv2d` computes, on every backend."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

import sparseflow
from sparseflow.errors import InputError
from sparseflow.spiking.runtime import sparse_conv
from sparseflow.spiking.runtime.sparse_conv import (
    SparseConv2d,
    get_conv_unsupported_reason,
    select_conv_backend,
)


def grid(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def spikes(*shape: int, seed: int = 0, largest: int = 1, rate: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    fired = (torch.rand(shape, generator=generator) < rate).float()
    return fired * torch.randint(1, largest + 1, shape, generator=generator)


def conv(k: int = 3, *, c_in: int = 5, c_out: int = 7, **options: Any) -> nn.Conv2d:
    created = nn.Conv2d(c_in, c_out, k, **options).eval()
    with torch.no_grad():
        created.weight.copy_(grid(*created.weight.shape))
        if created.bias is not None:
            created.bias.copy_(grid(c_out, seed=1))
    return created


GEOMETRIES: list[dict[str, Any]] = [
    {"k": 3, "padding": 1},
    {"k": 3, "padding": 0},
    {"k": 3, "padding": 1, "stride": 2},
    {"k": 3, "padding": "same", "bias": False},
    {"k": 3, "padding": "valid", "stride": 2},
    {"k": 1},
    {"k": 1, "stride": 2, "bias": False},
    {"k": 1, "padding": "valid"},
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_from_dense_computes_what_the_convolution_computes(geometry: dict[str, Any]) -> None:
    dense = conv(**geometry)
    sparse = sparseflow.SparseConv2d.from_dense(dense, 8)
    assert sparse.backend == "events" and sparse.block_size == 8
    assert sparse.weight is dense.weight and sparse.bias is dense.bias
    assert list(sparse.state_dict()) == list(dense.state_dict())
    assert [p.device.type for p in sparse.parameters()] == ["cpu"] * len(list(dense.parameters()))
    for shape in ((2, 5, 6, 9), (3, 2, 5, 3, 3), (1, 5, 17, 4)):
        for largest in (1, 3):
            x = spikes(*shape, largest=largest)
            expected = dense(x.flatten(0, -4)).unflatten(0, x.shape[:-3])
            with torch.no_grad():
                assert torch.equal(sparse(x), expected)
                assert torch.equal(sparse(x.transpose(-1, -2).contiguous().transpose(-1, -2)), expected)


def test_plan_runs_the_event_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = SparseConv2d.from_dense(conv(padding=1))
    monkeypatch.setattr(SparseConv2d, "_run_dense", lambda self, x: pytest.fail("ran F.conv2d"))
    with torch.no_grad():
        sparse(spikes(2, 5, 6, 6))


@pytest.mark.parametrize(
    "x",
    [
        grid(2, 5, 6, 6),
        spikes(2, 5, 6, 6) * 0.5,
        spikes(2, 5, 6, 6).double(),
        -spikes(2, 5, 6, 6),
        spikes(2, 5, 6, 6) * 300,
        torch.zeros(0, 5, 6, 6),
        torch.full((1, 5, 6, 6), float("nan")),
    ],
    ids=["real", "halves", "float64", "negative", "large", "no images", "NaN"],
)
def test_non_spike_input_takes_the_dense_path(x: torch.Tensor) -> None:
    dense = conv(padding=1).to(x.dtype)
    sparse = SparseConv2d.from_dense(dense)
    with torch.no_grad():
        assert torch.equal(sparse(x).nan_to_num(7.0), dense(x).nan_to_num(7.0))


def test_zero_input_gives_the_bias() -> None:
    dense = conv(padding=1)
    assert dense.bias is not None
    with torch.no_grad():
        out = SparseConv2d.from_dense(dense)(torch.zeros(2, 5, 4, 4))
    assert torch.equal(out, dense.bias.view(-1, 1, 1).expand(2, 7, 4, 4))


# --- gradients and modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_the_convolution(training: bool) -> None:
    dense = conv(padding=1).train(training)
    sparse = SparseConv2d.from_dense(copy.deepcopy(dense))
    assert sparse.training == training
    grads = []
    for module in (dense, sparse):
        x = spikes(2, 5, 6, 6).requires_grad_()
        module(x).square().sum().backward()
        assert module.bias is not None
        grads.append((x.grad, module.weight.grad, module.bias.grad))
    for expected, actual in zip(*grads, strict=True):
        assert expected is not None and actual is not None and torch.equal(expected, actual)


def test_training_gives_weights_gradients_without_input_gradients() -> None:
    sparse = SparseConv2d.from_dense(conv(padding=1)).train()
    sparse(spikes(2, 5, 6, 6)).sum().backward()
    assert sparse.weight.grad is not None and sparse.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("change", ["weight", "bias", "load", "assign"])
def test_new_weights_are_used(change: str) -> None:
    dense = conv(padding=1)
    sparse, x = SparseConv2d.from_dense(dense), spikes(2, 5, 6, 6)
    with torch.no_grad():
        before = sparse(x)
        if change in ("weight", "bias"):
            getattr(sparse, change).mul_(-2)
        else:
            negative = {key: -value for key, value in sparse.state_dict().items()}
            sparse.load_state_dict(negative, assign=change == "assign")
        after = sparse(x)
        expected = torch.nn.functional.conv2d(x, sparse.weight, sparse.bias, padding=1)
    assert torch.equal(after, expected) and not torch.equal(before, after)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(copier: Any) -> None:
    sparse, x = SparseConv2d.from_dense(conv(padding=1), 4), spikes(2, 5, 6, 6)
    with torch.no_grad():
        before = sparse(x)
        duplicate = copier(sparse)
        assert duplicate._prepared is None and duplicate.block_size == 4 and duplicate.backend == "events"
        duplicate.weight.zero_()
        assert not torch.equal(duplicate(x), before)
        assert torch.equal(sparse(x), before)


def test_calls_are_timed_on_request() -> None:
    sparse, x = SparseConv2d.from_dense(conv(padding=1)), spikes(2, 5, 6, 6)
    with torch.no_grad():
        sparse(x)
        assert sparse.last_ms is None
        sparse.timed = True
        sparse(x)
    assert isinstance(sparse.last_ms, float) and sparse.last_ms > 0


def test_repr() -> None:
    text = repr(SparseConv2d.from_dense(conv(padding=1), 8))
    assert "backend=events" in text and "block_size=8" in text and "kernel_size=(3, 3)" in text


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (nn.Conv2d(2, 2, 5), r"`kernel_size` \(=\(5, 5\)\)"),
        (nn.Conv2d(2, 2, (3, 1)), r"`kernel_size` \(=\(3, 1\)\)"),
        (nn.Conv2d(2, 2, 3, stride=3), r"`stride` \(=\(3, 3\)\)"),
        (nn.Conv2d(2, 2, 3, stride=(1, 2)), r"`stride` \(=\(1, 2\)\)"),
        (nn.Conv2d(2, 2, 3, groups=2), r"`groups` \(=2\)"),
        (nn.Conv2d(2, 2, 3, dilation=2), r"`dilation` \(=\(2, 2\)\)"),
        (nn.Conv2d(2, 2, 3, padding=2), r"`padding` \(=\(2, 2\)\)"),
        (nn.Conv2d(2, 2, 3, padding=(0, 1)), r"`padding` \(=\(0, 1\)\)"),
        (nn.Conv2d(2, 2, 1, padding=1), r"`padding` \(=\(1, 1\)\)"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "`padding_mode` .='reflect'"),
        (nn.Linear(2, 2), "Linear"),
        (nn.ConvTranspose2d(2, 2, 3), "ConvTranspose2d"),
    ],
)
def test_from_dense_unsupported_convolution_raises(bad: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        SparseConv2d.from_dense(bad)
    if isinstance(bad, nn.Conv2d):
        assert get_conv_unsupported_reason(bad) is not None


def test_convolution_with_custom_forward_is_rejected() -> None:
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    with pytest.raises(InputError, match="WSConv2d"):
        SparseConv2d.from_dense(layer.WSConv2d(2, 2, 3))
    assert SparseConv2d.from_dense(layer.Conv2d(2, 2, 3, step_mode="m")).step_mode == "m"


@pytest.mark.parametrize("block", [0, 3, 32, -4])
def test_block_sizes_are_checked(block: int) -> None:
    with pytest.raises(InputError, match=rf"`block_size` \(={block}\)"):
        SparseConv2d.from_dense(conv(), block)


@pytest.mark.parametrize("shape", [(5, 6, 6), (1, 1, 1, 5, 6, 6), (5,)])
def test_shapes_are_checked(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"\[T, N, C, H, W\]"):
        SparseConv2d.from_dense(conv())(torch.zeros(shape))


def test_select_conv_backend_without_numba_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        sparse_conv, "find_spec", lambda name: None if name in ("numba", "triton") else find(name)
    )
    assert select_conv_backend(torch.device("cpu")) == select_conv_backend(torch.device("cuda")) == "dense"
    dense = conv(padding=1)
    x = spikes(2, 5, 6, 6)
    with torch.no_grad():
        assert torch.equal(SparseConv2d.from_dense(dense)(x), dense(x))


def test_select_conv_backend_gpu_uses_blocks() -> None:
    pytest.importorskip("triton")
    assert select_conv_backend(torch.device("cuda")) == "blocks"
    assert select_conv_backend(torch.device("mps")) == "dense"
