"""`PackedBackend`: runs groups of a plan on a GPU, with one bit per spike and one fused kernel per group.

A sparse group runs the Gluon kernel on Hopper and the portable Triton kernel elsewhere; a dense group runs
`F.conv2d` in the model's dtype followed by one fused neuron kernel. After `prepare`, nothing waits for the
GPU and no host decision depends on values, so a whole plan can be captured into a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.base import (
    ACTIVITY_TILE,
    NATURAL_LAYOUT,
    ChannelLayout,
    ConvolutionKind,
    GroupShape,
    PreparedGroup,
    PreparedStem,
    SpikeForm,
    convolve_maps,
)
from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.packed import (
    attention,
    codec,
    pooling,
    stem,
    triton_fallback,
    variant_timing,
    words,
)
from sparseflow.spiking.backends.packed.addition import add_maps
from sparseflow.spiking.backends.packed.format import (
    BLOCK,
    MAX_ACTIVITY_STEPS,
    PackedSpikes,
    allocate_packed,
    make_channel_table,
)
from sparseflow.spiking.backends.packed.group import get_unsupported_reason
from sparseflow.spiking.backends.packed.hopper import group as hopper
from sparseflow.spiking.backends.packed.neuron import run_neuron
from sparseflow.spiking.backends.precision import full_precision
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


NativeSpikes = PackedSpikes | Tensor
"""Packed bits, or small integers [T, N, C, H, W] that do not fit into one bit."""


class PackedBackend:
    """GPU backend: packed spikes, groups in Gluon and Triton.

    Args:
        device: The GPU, or the CPU if Triton interprets its kernels (TRITON_INTERPRET=1).
        dtype: The model's: fp16, bf16 or fp32. fp32 keeps about 22 bits of each weight of a sparse group
            and adds in fp32; its spikes differ from fp32 convolutions no more than a different summation
            order does.
        tune: Number of kernel variants to time when a group is prepared, most promising first (once per
            group shape); 0 or 1 takes the first. Timing compiles the variants and waits for the GPU.

    Raises:
        InputError: `dtype` is not supported.
    """

    name = "packed"
    shape_agnostic = False
    runs_bare_convolutions = False
    adds_dense_spikes = True

    def __init__(self, device: torch.device | str, dtype: torch.dtype, *, tune: int = 0) -> None:
        if dtype not in DTYPES:
            raise InputError(f"the packed backend supports fp16, bf16 and fp32, got {dtype}")
        self.device, self.dtype = torch.device(device), dtype
        self._tune = tune
        self._tuned: dict[Any, str] = {}
        self._variant_index = 0  # of the variant that runs while kernels are only compiled

    @property
    def channel_block(self) -> int | None:
        """Channels skipped together if they are silent; None for the portable kernel, which does not skip."""
        return BLOCK if self.is_hopper() else None

    @property
    def fused_kernels(self) -> PackedBackend:
        """The backend itself has the further kernels."""
        return self

    def get_unsupported_reason(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        """Return why the sparse convolution cannot run, or None if it can."""
        if shape.max_value > 1:
            return "integer spikes do not fit into one bit"
        if spec.pooling is not None:
            return "a max pooling stands between the convolution and its neuron"
        return get_unsupported_reason(replace(spec, post_skips=0))

    def prepare(
        self,
        spec: GroupSpec,
        shape: GroupShape,
        convolution: ConvolutionKind,
        layout: ChannelLayout = NATURAL_LAYOUT,
    ) -> PreparedGroup:
        """Lay out weights and buffers of one group; see `Backend.prepare`.

        Raises:
            InputError: The sparse convolution does not support the group.
        """
        with self.use_device():
            if convolution == "dense":
                return _DenseGroup(self, spec, shape, layout)
            reason = self.get_unsupported_reason(spec, shape)
            if reason is not None:
                raise InputError(f"packed spikes do not support this group: {reason}")
            return _SparseGroup(self, spec, shape, layout)

    def get_stem_unsupported_reason(self, geometry: ConvGeometry, in_channels: int) -> str | None:
        """Return why a convolution cannot run as a stem, or None if it can."""
        return stem.get_stem_unsupported_reason(geometry, in_channels)

    def prepare_stem(
        self,
        weight: Tensor,
        spec: GroupSpec,
        geometry: ConvGeometry,
        shape: GroupShape,
        layout: ChannelLayout = NATURAL_LAYOUT,
    ) -> PreparedStem:
        """Lay out the weights of a stem; see `Backend.prepare_stem`."""
        with self.use_device():
            return _Stem(self, weight, spec, geometry, shape, layout)

    def compile_kernels(self, run: Callable[[], object]) -> None:
        """Compile the kernels that a function launches, in all variants, without launching them."""
        if self.device.type != "cuda":
            return

        def run_all_variants() -> None:
            for index in range(max(self._tune, 1)):
                self._variant_index = index
                run()

        words.compile_launches(run_all_variants)

    def attend(
        self,
        factors: Sequence[Tensor],
        neuron: NeuronSpec,
        *,
        rows_are_tokens: bool,
        scale: float,
        v: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Run neurons on a product of three spike tensors; see `attention.run_attention`."""
        with self.use_device():
            first, second, third = factors
            return attention.run_attention(
                first, second, third, neuron, rows_are_tokens=rows_are_tokens, scale=scale, v=v, dtype=dtype
            )

    def encode(self, dense: Tensor, max_value: int) -> NativeSpikes:
        """Pack spikes [T, N, C, H, W] of 0 and 1; integers stay as they are."""
        if max_value > 1:
            return dense
        with self.use_device():
            return codec.pack(dense)

    def encode_addend(self, dense: Tensor, max_value: int) -> NativeSpikes:
        """Return spikes [T, N, C, H, W] as they are: a neuron adds them without packing."""
        return dense

    def decode(self, native: NativeSpikes) -> Tensor:
        """Convert to [T, N, C, H, W] in the model's dtype."""
        if isinstance(native, Tensor):
            return native
        with self.use_device():
            return codec.unpack(native, self.dtype)

    def spatial_mean(self, native: NativeSpikes) -> Tensor:
        """Average over H and W: [T, N, C] in the model's dtype."""
        if isinstance(native, Tensor):
            return native.mean(dim=(-2, -1))
        with self.use_device():
            return pooling.spatial_mean(native, self.dtype)

    def max_pool(self, native: NativeSpikes, kernel: int, stride: int, padding: int) -> NativeSpikes:
        """Max-pool; `padding` is 0 or 1, at most half the window."""
        if isinstance(native, Tensor):
            pooled = F.max_pool2d(native.flatten(0, 1), kernel, stride, padding)
            return pooled.unflatten(0, native.shape[:2])
        with self.use_device():
            has_activity = native.activity is not None
            return pooling.max_pool(
                native, kernel, stride, padding, tile=ACTIVITY_TILE if has_activity else 0
            )

    def use_device(self) -> AbstractContextManager[Any]:
        """Make the backend's GPU current, on which Triton launches."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def is_hopper(self) -> bool:
        """Return whether the Gluon kernel can run."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9

    def select_variant(self, key: Any, candidates: Mapping[str, Callable[[], Callable[[], Any]]]) -> str:
        """Select a variant, timed if tuning is on.

        Args:
            key: What the times depend on.
            candidates: Name -> function that prepares and returns the call to time; most promising first.
        """
        names = list(candidates)[: max(self._tune, 1)]
        if words.launcher is not None:  # compiles instead of launching
            for name in names:
                candidates[name]()()
            return names[min(self._variant_index, len(names) - 1)]
        if len(names) == 1:
            return names[0]
        if key not in self._tuned:
            self._tuned[key] = variant_timing.find_fastest({name: candidates[name] for name in names})
        return self._tuned[key]


def _split_skips(skips: Sequence[NativeSpikes]) -> tuple[list[PackedSpikes], list[Tensor]]:
    """Split skips into packed ones and dense tensors [T, N, C, H, W]."""
    bits = [skip for skip in skips if isinstance(skip, PackedSpikes)]
    return bits, [skip for skip in skips if isinstance(skip, Tensor)]


def _to_channels_last(v: Tensor | None) -> Tensor | None:
    """Convert [N, C, H, W] to contiguous fp32 [N, H, W, C]; no copy for this backend's membranes."""
    return None if v is None else v.to(torch.float32).permute(0, 2, 3, 1).contiguous()


def _to_channels_first(v: Tensor | None) -> Tensor | None:
    """View a kernel's membrane [N, H, W, C] as [N, C, H, W]."""
    return None if v is None else v.permute(0, 3, 1, 2)


def _get_network_channels(layout: ChannelLayout) -> Tensor | None:
    return None if layout.output is None else layout.output.permutation


def _emits_activity(layout: ChannelLayout, shape: GroupShape) -> bool:
    return layout.emit_activity and shape.steps <= MAX_ACTIVITY_STEPS


class _SparseGroup:
    """A group on the packed kernels; `kernel` and `variant` name the one that runs."""

    def __init__(
        self, backend: PackedBackend, spec: GroupSpec, shape: GroupShape, layout: ChannelLayout
    ) -> None:
        self.backend, self.spec, self.shape, self.layout = backend, spec, shape, layout
        self._parts = 2 if backend.dtype == torch.float32 else 1
        self._emit_activity = _emits_activity(layout, shape)
        fused = replace(spec, post_skips=0)
        # `__call__` adds up the dense addends, of which the Hopper kernel reads one.
        single = replace(fused, dense_inputs=min(fused.dense_inputs, 1))
        names = self._list_hopper_variants(single)
        self.kernel = "gluon" if names else "triton"
        if names:
            self._fused, self._group_class = single, hopper.HopperGroup
        else:
            self._fused, self._group_class = fused, triton_fallback.TritonFallbackGroup
            variants = triton_fallback.list_fallback_variants(fused, T=shape.steps, parts=self._parts)
            names = [v.name for v in variants]
        geometry = tuple((tuple(s.weight.shape), s.stride, s.padding) for s in fused.sources)
        key = (
            self.kernel, geometry, shape, fused.skips, fused.dense_inputs, layout.silent_fraction,
            self._emit_activity,
        )  # fmt: skip
        self.variant = backend.select_variant(key, {name: partial(self._make_trial, name) for name in names})
        self._group: Any = self._prepare(self.variant)
        self.spec, self._fused = spec.without_weights(), self._fused.without_weights()

    def _prepare(self, variant: str) -> Any:
        shape, (_, h, w) = self.shape, self.shape.output
        return self._group_class(
            self._fused,
            T=shape.steps,
            N=shape.images,
            H=h,
            W=w,
            device=self.backend.device,
            parts=self._parts,
            variant=variant,
            in_sizes=[(height, width) for _, height, width in shape.sources],
            emit_activity=self._emit_activity,
            v_columns=_get_network_channels(self.layout),
        )

    def _make_trial(self, variant: str) -> Callable[[], Any]:
        """Prepare a variant and return a call of it on zeros, with the layout's fraction of silent blocks.

        The time does not depend on which spikes fire in the active blocks.
        """
        shape, (c, h, w), spec = self.shape, self.shape.output, self._fused
        t, n, device = shape.steps, shape.images, self.backend.device
        candidate = self._prepare(variant)
        sources = [allocate_packed(t, n, *size, device) for size in shape.sources]
        if self.layout.silent_fraction:
            sources[0] = allocate_packed(t, n, *shape.sources[0], device, tile=ACTIVITY_TILE)
            activity = sources[0].activity
            assert activity is not None
            activity[math.ceil((1 - self.layout.silent_fraction) * len(activity)) :] = 0
        skips = [allocate_packed(t, n, c, h, w, device) for _ in range(spec.skips)]
        dense = [torch.zeros((t, n, h, w, c), dtype=self.backend.dtype, device=device)] * spec.dense_inputs
        return lambda: candidate(sources, skips, dense, None, self.spec.keeps_membrane)

    def _list_hopper_variants(self, spec: GroupSpec) -> list[str]:
        """List the Hopper kernel's variants that fit; empty if it cannot run."""
        if not self.backend.is_hopper() or hopper.get_hopper_unsupported_reason(spec) is not None:
            return []
        _, h, w = self.shape.output
        variants = hopper.list_hopper_variants(
            spec, T=self.shape.steps, N=self.shape.images, H=h, W=w, parts=self._parts
        )
        return [v.name for v in variants]

    def convolve(self, sources: Sequence[PackedSpikes], addends: Sequence[Tensor] = ()) -> Tensor:
        """Not available: the kernels keep the sums in registers."""
        raise InputError("a packed group runs with its neuron only")

    def __call__(
        self,
        sources: Sequence[PackedSpikes],
        skips: Sequence[NativeSpikes],
        dense: Sequence[Tensor],
        post_skips: Sequence[NativeSpikes],
        *,
        steps: int,
        v: Tensor | None,
        out: SpikeForm,
    ) -> tuple[Any, Tensor | None]:
        with self.backend.use_device():
            for s in sources:
                if steps != s.shape[0]:
                    raise InputError(f"a source has {s.shape[0]} time steps, expected {steps}")
            if not self.layout.silent_fraction:
                sources = [replace(sources[0], activity=None, tile=0), *sources[1:]]
            bits, dense_skips = _split_skips(skips)
            reals = [*dense, *dense_skips]
            if self.kernel == "gluon" and len(reals) > 1:
                # The kernel reads one addend; the sum is fp32, so it is not rounded twice.
                reals = [sum((x.float() for x in reals[1:]), start=reals[0].float())]
            keeps_membrane = self.spec.keeps_membrane
            if keeps_membrane:
                # The caller keeps the last membrane, so each call writes to a new one.
                self._group.v = torch.empty_like(self._group.v)
            rows = [words.to_channels_last(x) for x in reals]
            spikes, v_last = self._group(sources, bits, rows, _to_channels_last(v), keeps_membrane)
            membrane = _to_channels_first(v_last)
            if post_skips or out == "dense":
                return codec.unpack(spikes, self.backend.dtype, add=post_skips), membrane
            return spikes, membrane


class _DenseGroup:
    """A group of library convolutions followed by the fused neuron kernel."""

    def __init__(
        self, backend: PackedBackend, spec: GroupSpec, shape: GroupShape, layout: ChannelLayout
    ) -> None:
        self.backend, self.spec = backend, spec.without_weights()
        c, h, w = shape.output
        self._weights = [
            s.weight.to(backend.device, backend.dtype).contiguous(memory_format=torch.channels_last)
            for s in spec.sources
        ]
        # The neuron kernel adds it in fp32; cuDNN would need one more pass over memory.
        self._bias = spec.bias.to(backend.device, torch.float32) if bool(spec.bias.any()) else None
        self._out: PackedSpikes | None = None
        if not spec.post_skips:
            tile = ACTIVITY_TILE if _emits_activity(layout, shape) else 0
            self._out = allocate_packed(shape.steps, shape.images, c, h, w, backend.device, tile=tile)
        self._v_columns = make_channel_table(_get_network_channels(layout), c, backend.device)

    def convolve(self, sources: Sequence[Tensor], addends: Sequence[Tensor] = ()) -> Tensor:
        """Compute the input of the neuron only, in the model's dtype."""
        with self.backend.use_device():
            maps = [*(self._convolve(i, x) for i, x in enumerate(sources)), *addends]
            return maps[0] if len(maps) == 1 and self._bias is None else add_maps(maps, self._bias)

    def _convolve(self, number: int, x: Tensor) -> Tensor:
        source, x = self.spec.sources[number], x.to(self.backend.dtype)
        with full_precision(self.backend.dtype):
            return convolve_maps(x, self._weights[number], stride=source.stride, padding=source.padding)

    def __call__(
        self,
        sources: Sequence[Tensor],
        skips: Sequence[NativeSpikes],
        dense: Sequence[Tensor],
        post_skips: Sequence[NativeSpikes],
        *,
        steps: int,
        v: Tensor | None,
        out: SpikeForm,
    ) -> tuple[Any, Tensor | None]:
        packs = out == "native" and not post_skips
        with self.backend.use_device():
            bits, dense_skips = _split_skips(skips)
            currents = [self._convolve(i, x) for i, x in enumerate(sources)]
            result = run_neuron(
                [*currents, *dense, *dense_skips],
                self.spec.neuron,
                steps=steps,
                bias=self._bias,
                skips=bits,
                post_skips=post_skips,
                v=_to_channels_last(v),
                packed=self._out if packs and self._out is not None else False,
                dense=None if packs else self.backend.dtype,
                write_v=self.spec.keeps_membrane,
                v_columns=self._v_columns,
                pooling=self.spec.pooling,
            )
        return result.packed if packs else result.dense, _to_channels_first(result.v)


class _Stem:
    """A convolution of few dense channels and its neurons, in one kernel."""

    def __init__(
        self,
        backend: PackedBackend,
        weight: Tensor,
        spec: GroupSpec,
        geometry: ConvGeometry,
        shape: GroupShape,
        layout: ChannelLayout,
    ) -> None:
        self.backend, self._neuron, self._geometry, self._steps = backend, spec.neuron, geometry, shape.steps
        self._keeps_membrane = spec.keeps_membrane
        c, h, w = shape.output
        self._weight = stem.pack_weight(weight.to(backend.device, backend.dtype), geometry)
        self._bias = spec.bias.to(backend.device, torch.float32)
        tile = ACTIVITY_TILE if _emits_activity(layout, shape) else 0
        self._out = allocate_packed(shape.steps, shape.images, c, h, w, backend.device, tile=tile)
        self._v_columns = make_channel_table(_get_network_channels(layout), c, backend.device)

    def __call__(self, x: Tensor, *, v: Tensor | None, out: SpikeForm) -> tuple[Any, Tensor | None]:
        with self.backend.use_device():
            dense, last = stem.run_stem(
                x,
                self._weight,
                self._bias,
                self._neuron,
                self._geometry,
                steps=self._steps,
                v=_to_channels_last(v),
                packed=self._out if out == "native" else None,
                dense=self.backend.dtype if out == "dense" else None,
                write_v=self._keeps_membrane,
                v_columns=self._v_columns,
            )
        return self._out if out == "native" else dense, _to_channels_first(last)
