"""`PackedBackend`: the GPU's way to run a plan. Spikes travel as one bit each, groups as one fused kernel.

A sparse group is the Gluon kernel on Hopper and its plain-Triton twin everywhere else; a dense group is
`F.conv2d` in the model's dtype with one fused neuron behind it. After `prepare` nothing waits for the GPU and
the host decides nothing by values, so a whole plan captures into a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.base import (
    NATURAL,
    TILE,
    Arrangement,
    Convolution,
    Form,
    GroupShape,
    PreparedGroup,
)
from sparseflow.spiking.backends.packed import codec, pooling, triton_fallback, variant_timing, words
from sparseflow.spiking.backends.packed.format import (
    ACTIVITY_STEPS,
    BLOCK,
    PackedSpikes,
    channel_table,
    empty_packed,
)
from sparseflow.spiking.backends.packed.hopper import group
from sparseflow.spiking.backends.packed.neuron import neuron
from sparseflow.spiking.backends.precision import full_precision
from sparseflow.spiking.backends.spec import GroupSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(kw_only=True)
class DenseSpikes:
    """Spikes that are not packed: small integers, or bits that nobody has needed packed yet.

    Attributes:
        values: [T, N, C, H, W].
    """

    values: Tensor
    _packed: PackedSpikes | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        t, n, c, h, w = self.values.shape
        return t, n, c, h, w

    @property
    def T(self) -> int:
        """Time steps."""
        return self.values.shape[0]

    @property
    def N(self) -> int:
        """Images."""
        return self.values.shape[1]

    @property
    def C(self) -> int:
        """Channels."""
        return self.values.shape[2]

    @property
    def H(self) -> int:
        """Rows."""
        return self.values.shape[3]

    @property
    def W(self) -> int:
        """Columns."""
        return self.values.shape[4]

    def packed(self) -> PackedSpikes:
        """The same, one bit each; only for spikes known to be 0 or 1."""
        if self._packed is None:
            self._packed = codec.pack(self.values)
        return self._packed


Native = PackedSpikes | DenseSpikes


class PackedBackend:
    """GPU: spikes packed into bits, groups in Triton.

    Args:
        device: The GPU (or the CPU, where TRITON_INTERPRET=1 has Triton interpret its kernels).
        dtype: The model's: fp16, bf16 or fp32. fp32 keeps about 22 bits of every weight of a sparse group and
            adds in fp32; spikes then differ from fp32's own no more than another order of sums makes them.
        tune: How many of a kernel's variants to time when a group is prepared, the most promising ones (once
            for groups of the same shapes); 0 or 1 takes the first. Timing waits for the GPU and compiles.
        own_membranes: Each group writes its membrane into one buffer of its own, so that a captured graph
            carries it from replay to replay without a copy. Otherwise every call returns a new tensor and
            leaves the one handed in as it was.

    Raises:
        InputError: `dtype` is another one.
    """

    name = "packed"
    fits_every_shape = False
    adds_dense = True

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        tune: int = 0,
        own_membranes: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"packed spikes serve networks in fp16, bf16 or fp32, got {dtype}")
        self.device, self.dtype = torch.device(device), dtype
        self.own_membranes = own_membranes
        self._tune = tune
        self._tuned: dict[Any, str] = {}

    @property
    def block(self) -> int | None:
        """Channels skipped together where they are silent; the portable kernel skips nothing."""
        return BLOCK if self.is_hopper() else None

    def refusal(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        """Why the sparse convolution cannot run here, or None when it can."""
        if shape.max_value > 1:
            return "small integers do not fit into one bit"

        return triton_fallback.twin_refusal(replace(spec, post_skips=0))

    def prepare(
        self, spec: GroupSpec, shape: GroupShape, convolution: Convolution, arrangement: Arrangement = NATURAL
    ) -> PreparedGroup:
        """Lay out weights and buffers for one group.

        `spec` has its channels in the arrangement's orders already; membranes come and go in the network's.

        Raises:
            InputError: A sparse convolution that `refusal` refuses.
        """
        with self.guard():
            if convolution == "dense":
                return _DenseGroup(self, spec, shape, arrangement)
            reason = self.refusal(spec, shape)
            if reason is not None:
                raise InputError(f"this group cannot run on packed spikes: {reason}")
            return _SparseGroup(self, spec, shape, arrangement)

    def encode(self, dense: Tensor, max_value: int | None = None) -> Native:
        """[T, N, C, H, W] spikes to this backend's form.

        They are packed when first needed as bits, or at once where `max_value` says that they are.
        """
        spikes = DenseSpikes(values=dense)
        if max_value == 1:
            with self.guard():
                return spikes.packed()
        return spikes

    def lend(self, dense: Tensor, max_value: int) -> Native:
        """Spikes [T, N, C, H, W] that a neuron only adds: as they are."""
        return DenseSpikes(values=dense)

    def decode(self, native: Native) -> Tensor:
        """Spikes [T, N, C, H, W] in the model's dtype."""
        if isinstance(native, DenseSpikes):
            return native.values

        with self.guard():
            return codec.unpack(native, self.dtype)

    def spatial_mean(self, native: Native) -> Tensor:
        """Mean over H and W: [T, N, C] in the model's dtype."""
        if isinstance(native, DenseSpikes):
            return native.values.mean(dim=(-2, -1))

        with self.guard():
            return pooling.spatial_mean(native, self.dtype)

    def max_pool(self, native: Native, kernel: int, stride: int, padding: int) -> Native:
        """Maximum over windows; `padding` is 0 or 1, at most half the window."""
        if isinstance(native, DenseSpikes):
            pooled = F.max_pool2d(native.values.flatten(0, 1), kernel, stride, padding)
            return DenseSpikes(values=pooled.unflatten(0, native.values.shape[:2]))

        with self.guard():
            marks = native.activity is not None
            return pooling.max_pool(native, kernel, stride, padding, tile=TILE if marks else 0)

    def guard(self) -> AbstractContextManager[Any]:
        """Make this backend's GPU the current one, on which Triton launches."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def is_hopper(self) -> bool:
        """Whether the Gluon kernel runs here."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9

    def fastest(self, key: Any, candidates: Mapping[str, Callable[[], Callable[[], Any]]]) -> str:
        """The candidate to use, timed where that was asked for.

        Args:
            key: What the times depend on.
            candidates: For every name a function that prepares, and returns what to time; best guess first.
        """
        names = list(candidates)[: max(self._tune, 1)]
        if len(names) == 1:
            return names[0]
        if key not in self._tuned:
            self._tuned[key] = variant_timing.fastest({name: candidates[name] for name in names})[0]
        return self._tuned[key]


def _split(skips: Sequence[Native]) -> tuple[list[PackedSpikes], list[Tensor]]:
    """Skips as bits, and the others as tensors [T, N, C, H, W]."""
    bits: list[PackedSpikes] = []
    reals: list[Tensor] = []
    for skip in skips:
        if isinstance(skip, DenseSpikes) and skip._packed is None:
            reals.append(skip.values)
        else:
            bits.append(skip._packed if isinstance(skip, DenseSpikes) else skip)  # type: ignore[arg-type]
    return bits, reals


def _membrane_rows(v: Tensor | None) -> Tensor | None:
    """[N, C, H, W] as contiguous fp32 [N, H, W, C]; no copy for what a group of this backend returned."""
    return None if v is None else v.to(torch.float32).permute(0, 2, 3, 1).contiguous()


def _membrane(rows: Tensor) -> Tensor:
    """[N, H, W, C] as [N, C, H, W]."""
    return rows.permute(0, 3, 1, 2)


def _network_channels(arrangement: Arrangement) -> Tensor | None:
    """Which of the network's channels lies at each place of a group's output; None where all lie alike."""
    return None if arrangement.output is None else arrangement.output.places


def _marks(arrangement: Arrangement, shape: GroupShape) -> bool:
    """Whether a group's output says where it is silent."""
    return arrangement.marks and shape.steps <= ACTIVITY_STEPS


class _SparseGroup:
    """A group on the packed kernels. `kernel` and `variant` say which one runs."""

    def __init__(
        self, backend: PackedBackend, spec: GroupSpec, shape: GroupShape, arrangement: Arrangement
    ) -> None:

        self.backend, self.spec, self.shape, self.lies = backend, spec, shape, arrangement
        self._parts = 2 if backend.dtype == torch.float32 else 1
        self._marks = _marks(arrangement, shape)
        fused = replace(spec, post_skips=0)
        # More dense addends than the Hopper kernel reads are added up for it, see `__call__`.
        single = replace(fused, dense_inputs=min(fused.dense_inputs, 1))
        names = self._gluon_variants(single)
        self.kernel = "gluon" if names else "twin"
        if names:
            self._fused, self._make = single, group.PreparedPackedGroup
        else:
            self._fused, self._make = fused, triton_fallback.PreparedTwinGroup
            names = [v.name for v in triton_fallback.twin_variants(fused, T=shape.steps, parts=self._parts)]
        geometry = tuple((tuple(s.weight.shape), s.stride, s.padding) for s in fused.sources)
        key = (self.kernel, geometry, shape, fused.skips, fused.dense_inputs, self.lies.silent, self._marks)
        self.variant = backend.fastest(key, {name: partial(self._trial, name) for name in names})
        self._group: Any = self._prepared(self.variant)
        self.spec, self._fused = spec.without_weights(), self._fused.without_weights()

    def _prepared(self, variant: str) -> Any:
        shape, (_, h, w) = self.shape, self.shape.output
        return self._make(
            self._fused,
            T=shape.steps,
            N=shape.images,
            H=h,
            W=w,
            device=self.backend.device,
            parts=self._parts,
            variant=variant,
            in_sizes=[(height, width) for _, height, width in shape.sources],
            emit_activity=self._marks,
            v_columns=_network_channels(self.lies),
        )

    def _trial(self, variant: str) -> Callable[[], Any]:
        """A call of a variant on zeros, of which as many blocks pass for silent as the arrangement says.

        What fires in the others does not change its time.
        """
        shape, (c, h, w), spec = self.shape, self.shape.output, self._fused
        t, n, device = shape.steps, shape.images, self.backend.device
        made = self._prepared(variant)
        fed = [empty_packed(t, n, *size, device) for size in shape.sources]
        if self.lies.silent:
            fed[0] = empty_packed(t, n, *shape.sources[0], device, tile=TILE)
            activity = fed[0].activity
            assert activity is not None
            activity[math.ceil((1 - self.lies.silent) * len(activity)) :] = 0
        skips = [empty_packed(t, n, c, h, w, device) for _ in range(spec.skips)]
        dense = [torch.zeros((t, n, h, w, c), dtype=self.backend.dtype, device=device)] * spec.dense_inputs
        return lambda: made(fed, skips, dense, None, True)

    def _gluon_variants(self, spec: GroupSpec) -> list[str]:
        """Variants of the Hopper kernel that fit; none where it cannot run."""
        if not self.backend.is_hopper():
            return []

        if group.refusal(spec) is not None:
            return []
        _, h, w = self.shape.output
        found = group.variants(spec, T=self.shape.steps, N=self.shape.images, H=h, W=w, parts=self._parts)
        return [v.name for v in found]

    def __call__(
        self,
        sources: Sequence[Native],
        skips: Sequence[Native],
        dense: Sequence[Tensor],
        post_skips: Sequence[Native],
        *,
        steps: int,
        v: Tensor | None,
        out: Form,
    ) -> tuple[Any, Tensor]:

        with self.backend.guard():
            fed = [s.packed() if isinstance(s, DenseSpikes) else s for s in sources]
            for s in fed:
                if steps != s.T:
                    raise InputError(f"a source has {s.T} time steps, the group runs {steps}")
            if fed and not self.lies.silent:
                fed[0] = replace(fed[0], activity=None, tile=0)
            bits, others = _split(skips)
            reals = [*dense, *others]
            if self.kernel == "gluon" and len(reals) > 1:
                # That kernel reads one; the sum is fp32, so nothing is rounded twice.
                reals = [sum((x.float() for x in reals[1:]), start=reals[0].float())]
            if not self.backend.own_membranes:
                self._group.v = torch.empty_like(self._group.v)
            rows = [words.channels_last(x) for x in reals]
            spikes, last = self._group(fed, bits, rows, _membrane_rows(v), True)
            membrane = _membrane(last)
            if post_skips:
                added = [s.values if isinstance(s, DenseSpikes) else s for s in post_skips]
                total = codec.unpack(spikes, self.backend.dtype, add=added)
                return total if out == "dense" else DenseSpikes(values=total), membrane
            return codec.unpack(spikes, self.backend.dtype) if out == "dense" else spikes, membrane


class _DenseGroup:
    """A group whose convolutions are the library's, with the fused neuron behind them."""

    def __init__(
        self, backend: PackedBackend, spec: GroupSpec, shape: GroupShape, arrangement: Arrangement
    ) -> None:
        self.backend, self.spec = backend, spec.without_weights()
        c, h, w = shape.output
        self._weights = [
            s.weight.to(backend.device, backend.dtype).contiguous(memory_format=torch.channels_last)
            for s in spec.sources
        ]
        # Added in fp32 by the neuron: cuDNN would spend a pass over memory on it.
        self._bias = spec.bias.to(backend.device, torch.float32) if bool(spec.bias.any()) else None
        self._out: PackedSpikes | None = None
        if not spec.post_skips:
            tile = TILE if _marks(arrangement, shape) else 0
            self._out = empty_packed(shape.steps, shape.images, c, h, w, backend.device, tile=tile)
        self._v_columns = channel_table(_network_channels(arrangement), c, backend.device)
        self._v: Tensor | None = None
        if backend.own_membranes:
            self._v = torch.empty((shape.images, h, w, c), dtype=torch.float32, device=backend.device)

    def _convolve(self, number: int, x: Tensor) -> Tensor:
        source = self.spec.sources[number]
        flat = x.to(self.backend.dtype).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        with full_precision(self.backend.dtype):
            y = F.conv2d(flat, self._weights[number], stride=source.stride, padding=source.padding)
        return y.unflatten(0, x.shape[:2])

    def __call__(
        self,
        sources: Sequence[Tensor],
        skips: Sequence[Native],
        dense: Sequence[Tensor],
        post_skips: Sequence[Native],
        *,
        steps: int,
        v: Tensor | None,
        out: Form,
    ) -> tuple[Any, Tensor]:

        packs = out == "native" and not post_skips
        with self.backend.guard():
            bits, others = _split(skips)
            currents = [self._convolve(i, x) for i, x in enumerate(sources)]
            found = neuron(
                [*currents, *dense, *others],
                self.spec.neuron,
                steps=steps,
                bias=self._bias,
                skips=bits,
                post_skips=[s.values if isinstance(s, DenseSpikes) else s for s in post_skips],
                v=_membrane_rows(v),
                packed=self._out if packs and self._out is not None else False,
                dense=None if packs else self.backend.dtype,
                v_out=True if self._v is None else self._v,
                v_columns=self._v_columns,
            )
        assert found.v is not None
        membrane = _membrane(found.v)
        if packs:
            return found.packed, membrane
        assert found.dense is not None
        return found.dense if out == "dense" else DenseSpikes(values=found.dense), membrane
