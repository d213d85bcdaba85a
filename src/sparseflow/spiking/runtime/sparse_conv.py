"""`SparseConv2d`: a drop-in `nn.Conv2d` for spikes that skips zeros."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from sparseflow.core.checks import check_one_of
from sparseflow.errors import InputError
from sparseflow.spiking.backends.blocks.geometry import BLOCK_SIZES
from sparseflow.spiking.backends.conv_geometry import get_padding
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource
from sparseflow.spiking.graph.sites import check_geometry, is_plain_conv

ConvBackend = Literal["dense", "events", "blocks"]
_UNUSED_NEURON = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=None)
"""Completes the spec of a group of which only the convolution runs."""


class SparseConv2d(nn.Conv2d):
    """A 3x3 or 1x1 convolution of spikes with the parameters and state_dict keys of `nn.Conv2d`.

    In eval mode and without gradients it runs on `backend`; otherwise (training, an input that requires
    gradients, an input that is not spikes) it runs `F.conv2d` with gradients.

    Input [N, C, H, W] or [T, N, C, H, W], floating point; the output has the same rank and dtype.

    Attributes:
        backend: "events" (CPU, Numba), "blocks" (GPU, Triton, two-stage) or "dense".
        block_size: Edge of a block of pixels for "blocks" (4, 8 or 16).
        timed: Measure each call into `last_ms`. On a GPU this waits for the device.
        last_ms: Milliseconds of the last call while `timed`, else None.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: int = 16,
        backend: ConvBackend = "dense",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype,
        )  # fmt: skip
        reason = get_conv_unsupported_reason(self)
        if reason is not None:
            raise InputError(f"SparseConv2d does not support this convolution: {reason}")
        check_one_of(BLOCK_SIZES, block_size=block_size)
        self.block_size = block_size
        self.backend: ConvBackend = backend
        self.timed = False
        self.last_ms: float | None = None
        self._prepared: tuple[tuple[int, ...], Any] | None = None

    @classmethod
    def from_dense(
        cls, conv: nn.Conv2d, block_size: int = 16, *, backend: ConvBackend | None = None
    ) -> SparseConv2d:
        """Create a sparse version of `conv` that shares its parameters.

        Args:
            conv: 3x3 or 1x1, stride 1 or 2, groups 1, dilation 1, zero padding.
            block_size: Edge of a block of pixels (4, 8 or 16).
            backend: Backend; by default the one for `conv`'s device.

        Raises:
            InputError: `conv` is not a plain `nn.Conv2d`, its geometry is not supported, or `block_size` is
                unknown.
        """
        if not isinstance(conv, nn.Conv2d) or not is_plain_conv(conv):
            raise InputError(
                f"`conv` must be a plain nn.Conv2d; {type(conv).__name__} defines its own forward"
            )
        names = (
            "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
            "padding_mode",
        )  # fmt: skip
        sparse = cls(
            **{name: getattr(conv, name) for name in names},
            bias=conv.bias is not None,
            block_size=block_size,
            backend=backend or select_conv_backend(conv.weight.device),
            device="meta",
        )
        sparse.weight = conv.weight
        sparse.bias = conv.bias
        sparse.train(conv.training)
        if hasattr(conv, "step_mode"):
            sparse.step_mode = conv.step_mode  # type: ignore[assignment]
        return sparse

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() not in (4, 5):
            raise InputError(
                f"SparseConv2d expects [N, C, H, W] or [T, N, C, H, W], got shape {tuple(input.shape)}"
            )
        if not self.timed:
            return self._run(input)
        if input.is_cuda:
            torch.cuda.synchronize(input.device)
        start = time.perf_counter()
        output = self._run(input)
        if input.is_cuda:
            torch.cuda.synchronize(input.device)
        self.last_ms = (time.perf_counter() - start) * 1e3
        return output

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        if self.backend == "dense" or self.training or (torch.is_grad_enabled() and x.requires_grad):
            return self._run_dense(x)
        with torch.no_grad():
            output = self._run_events(x) if self.backend == "events" else self._run_blocks(x)
        return self._run_dense(x) if output is None else output

    def _run_dense(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-3]
        y = super().forward(x.flatten(0, -4))
        return y.view(*lead, *y.shape[1:])

    def _run_events(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run on events; None if the input is not spikes or not float32 on a CPU."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or x.numel() == 0:
            return None
        from sparseflow.spiking.backends.events.backend import encode
        from sparseflow.spiking.backends.events.group import EventGroup

        try:
            events = encode(x if x.dim() == 5 else x.unsqueeze(0))
        except InputError:
            return None
        stamp = tuple(
            number
            for tensor in (self.weight, self.bias)
            if tensor is not None
            for number in (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        )
        if self._prepared is None or self._prepared[0] != stamp:
            source = SpikeSource(
                weight=self.weight.detach(), stride=self.stride[0], padding=self._get_square_padding()
            )
            bias = torch.zeros(self.out_channels) if self.bias is None else self.bias.detach()
            spec = GroupSpec(sources=(source,), bias=bias, neuron=_UNUSED_NEURON)
            self._prepared = stamp, EventGroup(spec, "sparse")
        y = self._prepared[1].convolve([events])
        return y if x.dim() == 5 else y[0]

    def _get_square_padding(self) -> int:
        padding = get_padding(self)
        assert padding is not None
        return padding[0]

    def _run_blocks(self, x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_cuda:
            return None
        from sparseflow.spiking.backends.blocks.conv import sparse_conv2d

        y = sparse_conv2d(
            x.flatten(0, -4),
            self.weight,
            self.bias,
            stride=int(self.stride[0]),
            padding=self._get_square_padding(),
            block_size=self.block_size,
        )
        return y.view(*x.shape[:-3], *y.shape[1:])

    def __getstate__(self) -> dict[str, Any]:
        # Prepared weights hold addresses of their own memory, so a copy prepares its own.
        return {**self.__dict__, "_prepared": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}, block_size={self.block_size}"


def get_conv_unsupported_reason(conv: nn.Conv2d) -> str | None:
    """Return why `conv` cannot be replaced (a sentence), or None if it can."""
    refusal = check_geometry(conv)
    if refusal is not None:
        return refusal[1]
    if conv.kernel_size == (1, 1) and get_padding(conv) != (0, 0):
        return f"`padding` (={conv.padding}) of a 1x1 convolution is not 0"
    return None


def select_conv_backend(device: torch.device) -> ConvBackend:
    """Select the backend of single convolutions on `device`."""
    if device.type == "cpu" and find_spec("numba"):
        return "events"
    if device.type == "cuda" and find_spec("triton"):
        return "blocks"
    return "dense"
