"""Host side of the Hopper group kernel: lays out the weights once and launches one kernel per call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflow.errors import DeviceError
from sparseflow.spiking.backends.packed.format import (
    BLOCK,
    K_CHANNEL,
    K_EXPONENT,
    WEIGHT_LIMIT,
    PackedSpikes,
    count_blocks,
)
from sparseflow.spiking.backends.packed.group import PackedGroup, get_unsupported_reason, split_into_halves
from sparseflow.spiking.backends.packed.hopper.variants import (
    HopperVariant,
    count_units,
    list_hopper_variants,
)
from sparseflow.spiking.backends.packed.words import launch
from sparseflow.spiking.backends.spec import GroupSpec


def get_hopper_unsupported_reason(spec: GroupSpec) -> str | None:
    """Return why the Hopper kernel cannot run `spec`, or None if it can."""
    reason = get_unsupported_reason(spec)
    if reason is not None:
        return reason
    if spec.skips > 1 or spec.dense_inputs > 1:
        return f"{spec.skips} skips and {spec.dense_inputs} dense inputs (at most one of each)"
    c_out = spec.sources[0].weight.shape[0]
    if c_out % BLOCK:
        return f"{c_out} output channels (must be a multiple of {BLOCK})"
    for i, source in enumerate(spec.sources):
        k = source.weight.shape[-1]
        if (k, source.padding) not in ((3, 1), (1, 0)):
            return f"source {i}: kernel {k}, padding {source.padding}"
        if i == 1 and k != 1:
            return "the second source is not a 1x1 convolution"
    return None


def pack_hopper_weights(spec: GroupSpec, parts: int) -> tuple[Tensor, float]:
    """Lay out the weights for the kernel; also return the power of two to multiply its sums by.

    Returns:
        (fp16 [C_out, K steps x 64], scale): steps in the order (block, tap, part), then the second source's
        (block, part); within a step the order of `K_CHANNEL`, each column scaled by 2^-K_EXPONENT.
    """
    largest = max(float(s.weight.abs().max()) for s in spec.sources)
    # The power of two that brings the largest weight just under the limit: small weights and the low parts
    # then stay clear of fp16's subnormals.
    shift = math.floor(math.log2(WEIGHT_LIMIT / largest)) if largest > 0 else 0
    if largest > 0 and largest * 2.0**shift >= WEIGHT_LIMIT:
        shift -= 1
    steps = []
    for source in spec.sources:
        c_out, c_in, k, _ = source.weight.shape
        blocks = count_blocks(c_in)
        device = source.weight.device
        w = torch.zeros((c_out, blocks * BLOCK, k * k), dtype=torch.float64, device=device)
        w[:, :c_in] = source.weight.double().reshape(c_out, c_in, k * k) * 2.0**shift
        order = torch.tensor(K_CHANNEL, device=device)
        power = torch.tensor([2.0**-e for e in K_EXPONENT], dtype=torch.float64, device=device)
        # [C_out, block, place, tap] -> [C_out, block, tap, place]
        w = (w.view(c_out, blocks, BLOCK, k * k)[:, :, order].transpose(2, 3)) * power
        steps.append(split_into_halves(w, parts, 3).reshape(c_out, -1))
    return torch.cat(steps, dim=1).contiguous(), 2.0**-shift


class HopperGroup(PackedGroup):
    """A group on a Hopper GPU (compute capability 9.0); `kernel.py` describes its arithmetic."""

    get_unsupported_reason = staticmethod(get_hopper_unsupported_reason)
    list_variants = staticmethod(list_hopper_variants)
    pack_weights = staticmethod(pack_hopper_weights)

    def __init__(self, spec: GroupSpec, *, device: torch.device | str, **options: Any) -> None:
        if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
            raise DeviceError(
                f"the packed group kernel needs a Hopper GPU (compute capability 9.0), got {device}"
            )
        super().__init__(spec, device=device, **options)
        v = self.variant
        self.tiles = -(-self.N * self.H * self.W // v.pixels)
        columns = self.c_out // v.bn
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        walkers = self.tiles if v.ctas == 0 else min(self.tiles, max(1, sms * v.ctas // (columns * v.split)))
        self.grid = (walkers, columns, v.split)
        self._input_words: dict[int, int] = {}
        shares = self.tiles * columns if v.split > 1 else 1
        self._count = torch.zeros(shares, dtype=torch.int32, device=self.device)
        self._partial = self.bias
        if v.split > 1:
            self._partial = torch.empty(shares * v.split * (v.tc // v.pair) * v.bm * v.bn, device=self.device)
        self._descriptor = None

    def launch(
        self,
        spikes: Sequence[PackedSpikes],
        skips: Sequence[PackedSpikes] = (),
        dense: Sequence[Tensor] = (),
        v: Tensor | None = None,
        write_v: bool = False,
    ) -> Any:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from sparseflow.spiking.backends.packed.hopper.kernel import group_kernel

        spec, c = self.spec, self.variant
        if self._descriptor is None:
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            self._descriptor = TensorDescriptor.from_tensor(self.weights, [c.bn, BLOCK], layout)
        x, x2 = spikes[0].data, spikes[-1].data
        units, units2 = count_units(spec)
        activity_words = self._get_input_activity_words(spikes)
        constants = make_kernel_constants(
            spec, c, H=self.H, W=self.W, in_sizes=self.in_sizes, parts=self.parts, skips=len(skips),
            dense=len(dense), read_v=v is not None, write_v=write_v,
            activity_words=activity_words, in_tile=spikes[0].tile,
            emit_activity=self.out.activity is not None, v_columns=self._v_columns is not None,
        )  # fmt: skip
        # With skipping and without resident weights, a CTA works on one tile only.
        grid = (self.tiles, *self.grid[1:]) if activity_words and not constants["RESIDENT"] else self.grid
        activity = spikes[0].activity if activity_words else self._count
        assert activity is not None
        emitted = self._count if self.out.activity is None else self.out.activity
        return launch(
            group_kernel, grid, x, x2, self._descriptor, self.bias, self.out.data,
            skips[0].data if skips else x, dense[0] if dense else self.bias,
            self.v if v is None else v, self.v,
            self._count if self._v_columns is None else self._v_columns, self._partial, self._count,
            activity, emitted,
            self.scale, spec.neuron.alpha, spec.neuron.beta, spec.neuron.v_threshold, spec.neuron.reset_value,
            self.N * self.H * self.W, self.tiles, self.T, units // c.ub, units2,
            x.stride(0), x2.stride(0), self.out.data.stride(0),
            dense[0].stride(0) if dense and dense[0].shape[0] > 1 else 0,
            activity.shape[-1], emitted.shape[-1],
            **constants, num_warps=c.warps, maxnreg=c.max_registers if self.parts == 1 else None,
        )  # fmt: skip

    def _get_input_activity_words(self, spikes: Sequence[PackedSpikes]) -> int:
        """Count the activity words that a tile reads; cached because each launch needs it."""
        tile = spikes[0].tile
        if spikes[0].activity is None:
            return 0
        if tile not in self._input_words:
            self._input_words[tile] = count_input_activity_words(
                self.spec, self.variant, N=self.N, H=self.H, W=self.W, in_size=self.in_sizes[0], tile=tile
            )
        return self._input_words[tile]


def count_input_activity_words(
    spec: GroupSpec, variant: HopperVariant, *, N: int, H: int, W: int, in_size: tuple[int, int], tile: int
) -> int:
    """Count the activity words that a variant's tile reads, rounded up to a power of two.

    A word covers `tile` input pixels. Covers the first source only. 0 if the variant cannot skip: a split K
    loop, or more blocks than mask bits.
    """
    source = spec.sources[0]
    lists = count_units(spec)[0] // max(variant.ub, source.weight.shape[-1] ** 2)
    if variant.split > 1 or lists > 32:
        return 0
    in_height, in_width = in_size
    first = torch.arange(0, N * H * W, variant.pixels)
    last = (first + variant.pixels - 1).clamp(max=N * H * W - 1)

    def input_position(pixel: Tensor) -> Tensor:
        n, y, x = pixel // (H * W), pixel // W % H, pixel % W
        return (n * in_height + y * source.stride) * in_width + x * source.stride

    halo = source.padding * (in_width + 1)
    low = (input_position(first) - halo).clamp(min=0) // tile
    high = (input_position(last) + halo).clamp(max=N * in_height * in_width - 1) // tile
    return 1 << int((high - low).max()).bit_length()


def make_kernel_constants(
    spec: GroupSpec,
    variant: HopperVariant,
    *,
    H: int,
    W: int,
    in_sizes: Sequence[tuple[int, int]],
    parts: int = 1,
    skips: int = 0,
    dense: int = 0,
    read_v: bool = False,
    write_v: bool = False,
    activity_words: int = 0,
    in_tile: int = 16,
    emit_activity: bool = False,
    v_columns: bool = False,
) -> dict[str, int | bool]:
    """Make the compile-time constants of `group_kernel` for a group and a variant."""
    c, first, second = variant, spec.sources[0], spec.sources[-1]
    units, units2 = count_units(spec)
    c_out = first.weight.shape[0]
    return {
        "H": H, "W": W, "IH": in_sizes[0][0], "IW": in_sizes[0][1],
        "CH": count_blocks(first.weight.shape[1]) * 4, "TAPS": first.weight.shape[-1] ** 2,
        "STRIDE": first.stride,
        "IH2": in_sizes[-1][0], "IW2": in_sizes[-1][1], "CH2": count_blocks(second.weight.shape[1]) * 4,
        "STRIDE2": second.stride, "OCH": c_out // 16, "C_OUT": c_out,
        "BM": c.bm, "BN": c.bn, "TC": c.tc, "PAIR": c.pair, "UB": c.ub, "UB2": 1 if units2 else 0,
        "PARTS": parts,
        "RING": c.ring, "RESIDENT": c.split == 1 and c.ring == units // c.ub + units2, "SPLIT": c.split,
        "ACTIVITY_WORDS": activity_words, "IN_TILE": in_tile, "EMIT": emit_activity,
        "RESET": spec.neuron.reset_mode, "SKIPS": skips, "DENSE": dense, "READ_V": read_v,
        "WRITE_V": write_v, "V_COLUMNS": v_columns, "NUM_WARPS": c.warps,
    }  # fmt: skip
