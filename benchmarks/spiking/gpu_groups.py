"""Check and time the packed groups on a Hopper GPU against the strongest dense group, layer by layer.

A group is convolution + folded BatchNorm + IF/LIF over T. Every variant of every layer is first checked
in a process of its own (fresh random input, poisoned output, fp64 reference, a time limit: a variant
that hangs is killed and recorded); only what passed is timed, in CUDA graphs, interleaved with the dense
groups. A dense group is as strong as two kernels get: cuDNN's convolution (fp16, bf16, TF32 or fp32;
channels_last, benchmarked, without bias; for a 1x1 also cuBLAS), then one Triton kernel that adds bias and
residuals, runs the neurons over T in registers and writes the spikes that the next convolution reads.

Every row states floors: `packed` and `dense` bytes at 4.3 TB/s, and the dense FLOPs at 790 TFLOP/s.

    PYTHONPATH=src:. python benchmarks/spiking/gpu_groups.py --out runs/groups.json --quick
"""

# The neuron kernel is Triton's subset of Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from offline_compile import compile_hopper_group

from benchmarks.claims import Claim, slugify, write_samples
from sparseflow.spiking.backends.packed.format import PackedSpikes, add_activity, pack, unpack
from sparseflow.spiking.backends.packed.hopper.group import (
    HopperGroup,
    count_input_activity_words,
    list_hopper_variants,
    make_kernel_constants,
)
from sparseflow.spiking.backends.packed.variant_timing import capture_graph
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

MISMATCH_LIMIT = 2e-5
"""Largest fraction of spikes that may differ from the fp64 reference on the same rounded weights."""

SUM_LIMIT = 4e-7
"""Largest relative error of sums of weights in two parts; an fp32 convolution has 1e-7 to 2e-7."""

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
"""What an H200 reaches: memory, and fp16 tensor cores."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One group of the benchmark; `size` is the input's height and width."""

    name: str
    size: int
    c_in: int
    c_out: int
    k: int = 3
    stride: int = 1
    T: int = 4
    N: int = 32
    parts: int = 1
    second: int = 0  # channels of a 1x1 stride-2 second source, at twice the output's size
    skip: bool = False
    dense: int = 0  # 0 none, 1 constant over time, 2 a value for every time step
    state: bool = False  # reads and writes the membrane
    sums: bool = False  # nothing fires: the membrane is the sum of everything, held to SUM_LIMIT
    moved: bool = False  # the membrane's channels lie in another order
    soft: bool = False
    width: int = 0
    tile: int = 0  # pixels of the input's activity words, 0 for none; with them silence is skipped
    silent: float = 0.0  # fraction of the input's blocks of channels that never fire
    quiet: float = 0.0  # fraction of the images without a spike
    check_only: bool = False

    @property
    def out(self) -> tuple[int, int]:
        """Output rows and columns."""
        return -(-self.size // self.stride), -(-(self.width or self.size) // self.stride)

    @property
    def flops(self) -> float:
        """Multiplications and additions of all convolutions, dense."""
        h, w = self.out
        return 2.0 * self.T * self.N * h * w * self.c_out * (self.c_in * self.k**2 + self.second)

    def floors_us(self) -> dict[str, float]:
        """Least time of the FLOPs, of the packed group's bytes and of the dense fp16 group's bytes."""
        h, w = self.out
        area_in = self.size * (self.width or self.size)
        inputs = self.T * self.N * (area_in * self.c_in + 4 * h * w * self.second)
        outputs = self.T * self.N * h * w * self.c_out
        addends = outputs * int(self.skip)
        weights = 2.0 * self.c_out * (self.c_in * self.k**2 + self.second)
        packed = weights * self.parts + (inputs + outputs + addends) / 8
        # the convolution's result is written once and read once
        dense = weights + 2.0 * (inputs + outputs * 3 + addends)
        return {
            "flops": self.flops / FLOPS_PER_S * 1e6, "packed_bytes": packed / BYTES_PER_S * 1e6,
            "dense_bytes": dense / BYTES_PER_S * 1e6,
        }  # fmt: skip


def _layer(name: str, size: int, c_in: int, c_out: int, **kw: Any) -> Layer:
    return Layer(name=name, size=size, c_in=c_in, c_out=c_out, **kw)


FIRST = [
    _layer("56_64", 56, 64, 64), _layer("28_128", 28, 128, 128), _layer("14_256", 14, 256, 256),
    _layer("7_512", 7, 512, 512), _layer("32_64", 32, 64, 64), _layer("16_128", 16, 128, 128),
    _layer("8_256", 8, 256, 256), _layer("4_512", 4, 512, 512),
]  # fmt: skip
FEATURES = [
    _layer("check_odd", 7, 64, 128, width=5, N=3, T=8, check_only=True),
    _layer("check_stride", 9, 128, 64, stride=2, N=2, check_only=True),
    _layer("check_second", 6, 128, 128, N=3, second=64, soft=True, check_only=True),
    _layer("check_residual", 5, 64, 64, N=5, skip=True, dense=2, state=True, check_only=True),
    _layer("check_v_columns", 5, 64, 128, N=5, dense=2, state=True, moved=True, check_only=True),
    _layer("check_dense_const", 6, 128, 64, k=1, N=5, dense=1, state=True, soft=True, T=6, check_only=True),
    _layer("check_parts", 6, 192, 64, N=4, parts=2, check_only=True),
    _layer("check_sums", 6, 512, 128, N=5, parts=2, state=True, sums=True, check_only=True),
    _layer("check_sums_64", 6, 64, 64, N=5, parts=2, state=True, sums=True, T=2, check_only=True),
    _layer("check_sums_1x1", 6, 2048, 128, k=1, N=5, parts=2, state=True, sums=True, check_only=True),
    _layer("check_sums_2", 6, 256, 64, N=5, parts=2, second=512, state=True, sums=True, check_only=True),
    _layer("check_96", 6, 96, 64, N=4, T=1, check_only=True),
]
SILENT_CHECKS = [
    _layer("check_silent", 9, 320, 128, N=6, tile=16, silent=0.5, check_only=True),
    _layer("check_silent_1x1", 6, 1024, 64, k=1, N=5, tile=16, silent=0.5, check_only=True),
    _layer("check_silent_down", 9, 192, 64, stride=2, width=5, N=5, T=8, tile=8, silent=0.5, check_only=True),
    _layer("check_silent_sum", 6, 320, 128, N=5, second=128, tile=16, silent=0.5, soft=True, check_only=True),
    _layer("check_silent_sum_64", 7, 64, 64, N=9, second=64, tile=16, quiet=0.5, check_only=True),
    _layer("check_silent_64", 7, 64, 64, N=9, tile=16, quiet=0.5, state=True, check_only=True),
]
SILENT = [
    _layer(f"{kind}_{size}_{c}", size, c, c, tile=16, silent=silent)
    for kind, silent in (("active", 0.0), ("silent50", 0.5), ("silent80", 0.8))
    for size, c in ((28, 128), (14, 256), (7, 512), (16, 128), (8, 256), (4, 512))
    if c > 128 or silent < 0.8
] + [
    _layer("silent50_sum_14_256", 14, 256, 256, second=128, tile=16, silent=0.5),
    _layer("active_56_64", 56, 64, 64, tile=16),
    _layer("quiet50_56_64", 56, 64, 64, tile=16, quiet=0.5),
]
MORE = [
    _layer("down_28_128", 56, 64, 128, stride=2), _layer("down_14_256", 28, 128, 256, stride=2),
    _layer("down_7_512", 14, 256, 512, stride=2),
    _layer("sum_28_128", 28, 128, 128, second=64), _layer("sum_14_256", 14, 256, 256, second=128),
    _layer("sum_7_512", 7, 512, 512, second=256),
    _layer("skip_56_64", 56, 64, 64, skip=True), _layer("skip_14_256", 14, 256, 256, skip=True),
    _layer("p56_256_64", 56, 256, 64, k=1), _layer("p56_64_256", 56, 64, 256, k=1),
    _layer("p28_512_128", 28, 512, 128, k=1), _layer("p28_128_512", 28, 128, 512, k=1),
    _layer("p14_1024_256", 14, 1024, 256, k=1), _layer("p14_256_1024", 14, 256, 1024, k=1),
    _layer("p7_2048_512", 7, 2048, 512, k=1), _layer("p7_512_2048", 7, 512, 2048, k=1),
    _layer("fp32_56_64", 56, 64, 64, parts=2), _layer("fp32_28_128", 28, 128, 128, parts=2),
    _layer("fp32_14_256", 14, 256, 256, parts=2), _layer("fp32_7_512", 7, 512, 512, parts=2),
    _layer("t16_56_64", 56, 64, 64, T=16), _layer("t16_28_128", 28, 128, 128, T=16),
    _layer("t16_14_256", 14, 256, 256, T=16), _layer("t16_7_512", 7, 512, 512, T=16),
    _layer("n8_56_64", 56, 64, 64, N=8), _layer("n8_28_128", 28, 128, 128, N=8),
    _layer("n8_14_256", 14, 256, 256, N=8), _layer("n8_7_512", 7, 512, 512, N=8),
]  # fmt: skip
ALL = {layer.name: layer for layer in [*FIRST, *FEATURES, *SILENT_CHECKS, *SILENT, *MORE]}


@dataclass
class Case:
    """A layer with random weights and inputs on the GPU."""

    layer: Layer
    spec: GroupSpec
    spikes: list[torch.Tensor]
    skips: list[torch.Tensor]
    dense: list[torch.Tensor]
    v: torch.Tensor | None
    v_channels: torch.Tensor | None = None  # which channel of the membrane each of the group's is

    def packed(
        self,
    ) -> tuple[list[PackedSpikes], list[PackedSpikes], list[torch.Tensor], torch.Tensor | None]:
        """The inputs as the packed kernel takes them."""
        dense = [d.permute(0, 1, 3, 4, 2).contiguous() for d in self.dense]
        v = None if self.v is None else self.v.permute(0, 2, 3, 1).contiguous()
        if v is not None and self.v_channels is not None:
            v = v[..., self.v_channels.argsort()].contiguous()
        spikes = [pack(s) for s in self.spikes]
        if self.layer.tile:
            spikes[0] = add_activity(spikes[0], self.layer.tile)
        return spikes, [pack(s) for s in self.skips], dense, v

    def silenced(self, fraction: float) -> Case:
        """The same case with this fraction of the input's blocks of channels silent."""
        blocks = -(-self.layer.c_in // 64)
        spikes = [self.spikes[0].clone(), *self.spikes[1:]]
        spikes[0][:, :, 64 * (blocks - round(blocks * fraction)) :] = 0
        return replace(self, spikes=spikes)

    def prepare(self, variant: str | None) -> HopperGroup:
        """The packed kernel for this case."""
        h, w = self.layer.out
        return HopperGroup(
            self.spec, T=self.layer.T, N=self.layer.N, H=h, W=w, device="cuda", parts=self.layer.parts,
            variant=variant, in_sizes=[(s.shape[3], s.shape[4]) for s in self.spikes],
            emit_activity=self.layer.tile > 0, v_columns=self.v_channels,
        )  # fmt: skip


def make_case(layer: Layer, density: float, seed: int) -> Case:
    """Random spikes of `density`, weights that make the output fire, on the current GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    h, w = layer.out

    def rand_spikes(c: int, rows: int, columns: int) -> torch.Tensor:
        shape = (layer.T, layer.N, c, rows, columns)
        return (torch.rand(shape, generator=g, device="cuda") < density).to(torch.float16)

    def conv(c: int, k: int, stride: int) -> SpikeSource:
        weight = torch.randn((layer.c_out, c, k, k), generator=g, device="cuda")
        gain = 1.0 / (c * k * k * density * (1.0 - layer.silent)) ** 0.5
        return SpikeSource(weight=weight * gain, stride=stride, padding=k // 2)

    sources = [conv(layer.c_in, layer.k, layer.stride)]
    spikes = [rand_spikes(layer.c_in, layer.size, layer.width or layer.size)]
    if layer.second:
        sources.append(conv(layer.second, 1, 2))
        spikes.append(rand_spikes(layer.second, 2 * h, 2 * w))
    neuron = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=None if layer.soft else 0.0)
    if layer.sums:
        neuron = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1e9, v_reset=0.0)
    skips = [rand_spikes(layer.c_out, h, w)] if layer.skip else []
    dense = []
    if layer.dense:
        shape = (1 if layer.dense == 1 else layer.T, layer.N, layer.c_out, h, w)
        dense.append(torch.randn(shape, generator=g, device="cuda").half())
    bias = torch.randn(layer.c_out, generator=g, device="cuda") * 0.3
    v = torch.randn((layer.N, layer.c_out, h, w), generator=g, device="cuda") * 0.3 if layer.state else None
    spec = GroupSpec(
        sources=tuple(sources), bias=bias, neuron=neuron, skips=len(skips), dense_inputs=len(dense)
    )
    spikes[0][:, layer.N - round(layer.N * layer.quiet) :] = 0
    v_channels = torch.randperm(layer.c_out, generator=g, device="cuda") if layer.moved else None
    case = Case(layer=layer, spec=spec, spikes=spikes, skips=skips, dense=dense, v=v, v_channels=v_channels)
    return case.silenced(layer.silent)


Expected = tuple[torch.Tensor, torch.Tensor]


def check(
    case: Case, variant: str, expected: Expected, other_cases: list[tuple[Case, Expected]], seed: int
) -> dict[str, Any]:
    """Run one variant on a poisoned output and compare with the reference; raises nothing on a mismatch.

    `others` are inputs that are swapped in between replays of one CUDA graph.
    """
    started = time.perf_counter()
    group = case.prepare(variant)
    spikes, skips, dense, v = case.packed()
    worst = 0.0
    info: dict[str, Any] = {}
    for run in range(3):  # the second and third run see counters and barriers that the first one left behind
        inner = group.out.pixels
        g = torch.Generator("cuda").manual_seed(seed + run)
        if group.out.activity is not None:
            group.out.activity.fill_(0x5A5A5A5A)
        inner.copy_(torch.randint(-(2**15), 2**15, inner.shape, generator=g, device="cuda").to(torch.int16))
        group.v.fill_(float("nan"))
        compiled = group.launch(spikes, skips, dense, v, write_v=case.layer.state)
        torch.cuda.synchronize()
        info = {
            "registers": getattr(compiled, "n_regs", None), "spills": getattr(compiled, "n_spills", None),
            "shared": getattr(getattr(compiled, "metadata", None), "shared", None),
        }  # fmt: skip
        spikes_out = unpack(group.out, torch.float64)
        differ = (spikes_out != expected[0]).any(0)
        worst = max(worst, (spikes_out != expected[0]).double().mean().item())
        border = replace(group.out, data=group.out.data.clone())
        border.pixels.zero_()
        info["border_clean"] = not bool(border.data.any())
        if group.out.activity is not None:
            right = add_activity(group.out, group.out.tile).activity
            info["activity_right"] = right is not None and torch.equal(group.out.activity, right)
        if case.layer.state:
            last = group.v if case.v_channels is None else group.v[..., case.v_channels]
            error = (last.permute(0, 3, 1, 2).double() - expected[1]).abs()[~differ]
            info["v_error"] = error.max().item()
            info["v_relative"] = (error.norm() / expected[1].norm()).item()
    if other_cases:
        graph, _ = capture_graph(lambda: group.launch(spikes, skips, dense, v, write_v=case.layer.state))
        for other, expected_spikes in other_cases:
            fresh = other.packed()[0][0]
            spikes[0].data.copy_(fresh.data)
            if spikes[0].activity is not None and fresh.activity is not None:
                spikes[0].activity.copy_(fresh.activity)
            group.out.pixels.fill_(-1)
            graph.replay()
            torch.cuda.synchronize()
            spikes_out = unpack(group.out, torch.float64)
            worst = max(worst, (spikes_out != expected_spikes[0]).double().mean().item())
        info["replays"] = len(other_cases)
    clean = info["border_clean"] and info.get("activity_right", True)
    ok = worst <= MISMATCH_LIMIT and clean and info.get("v_error", 0.0) <= 1e-3
    if case.layer.sums:
        ok = ok and info["v_relative"] <= SUM_LIMIT
    return {
        "status": "ok" if ok else "wrong", "mismatch": worst, "rate": expected[0].mean().item(),
        "grid": group.grid,
        "check_s": time.perf_counter() - started, **info,
    }  # fmt: skip


def worker(name: str, only: list[str], out: Path, density: float, seed: int) -> None:
    """Check variants of one layer, appending a line before and after each."""
    layer = ALL[name]
    case = make_case(layer, density, seed)

    def reference(case: Case) -> Expected:
        spec = case.spec
        if layer.parts == 1:
            # The kernel rounds after scaling by a power of two, which is the same for normal numbers.
            rounded = tuple(replace(source, weight=source.weight.half()) for source in spec.sources)
            spec = replace(spec, sources=rounded)
        return run_group_reference(spec, case.spikes, case.skips, case.dense, v=case.v, dtype=torch.float64)

    expected = reference(case)
    other_cases: list[tuple[Case, Expected]] = []
    if layer.tile and layer.check_only:
        full = make_case(replace(layer, silent=0.0), density, seed + 1)
        full = replace(full, spec=case.spec, v=case.v, spikes=[full.spikes[0], *case.spikes[1:]])
        turns = [full.silenced(fraction) for fraction in (0.0, 0.5, 0.8, 1.0, 0.0)]
        other_cases = [(turn, reference(turn)) for turn in turns]
    with out.open("a") as stream:
        for variant in only:
            stream.write(json.dumps({"variant": variant, "status": "start"}) + "\n")
            stream.flush()
            try:
                row = check(case, variant, expected, other_cases, seed + 17)
            except Exception as error:  # a variant that does not compile must not stop the others
                row = {"status": "error", "error": f"{type(error).__name__}: {error}"[:600],
                       "where": traceback.format_exc()[-1200:]}  # fmt: skip
            stream.write(json.dumps({"variant": variant, **row}) + "\n")
            stream.flush()


class Checker:
    """One layer's worker process, watched: a variant over its limit is killed and the rest go on."""

    def __init__(self, layer: Layer, density: float, seed: int, limit_s: float, folder: Path) -> None:
        h, w = layer.out
        with torch.device("cpu"):
            spec = make_spec_shape(layer)
        self.layer, self.density, self.seed, self.limit_s = layer, density, seed, limit_s
        self.remaining = [
            v.name for v in list_hopper_variants(spec, T=layer.T, N=layer.N, H=h, W=w, parts=layer.parts)
        ]
        self.default = self.remaining[0]
        self.rows: dict[str, dict[str, Any]] = {}
        self.path = folder / f"{layer.name}.jsonl"
        self.log = folder / f"{layer.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.num_checked = 0
        self.current: str | None = None
        self.since = time.monotonic()

    def start(self) -> None:
        command = [
            sys.executable, __file__, "--worker", self.layer.name, "--only", ",".join(self.remaining),
            "--out", str(self.path), "--density", str(self.density), "--seed", str(self.seed),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=self.log.open("ab"), stderr=subprocess.STDOUT)
        self.since = time.monotonic()
        self.current = None

    def poll(self) -> bool:
        """Advance; returns whether this layer is finished."""
        if self.process is None:
            self.start()
        assert self.process is not None
        ended = self.process.poll() is not None
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines[self.num_checked :]:
            row = json.loads(line)
            self.since = time.monotonic()
            if row["status"] == "start":
                self.current = row["variant"]
            else:
                self.rows[row["variant"]] = row
                self.remaining.remove(row["variant"])
                self.current = None
        self.num_checked = len(lines)
        late = time.monotonic() - self.since > self.limit_s + (0 if self.current else 60)
        if (ended and self.remaining) or late:
            if not ended:
                self.process.kill()
                self.process.wait()
            lost = self.current or self.remaining[0]
            tail = self.log.read_bytes()[-600:].decode(errors="replace")
            self.rows[lost] = {"variant": lost, "status": "timeout" if late else "died", "error": tail}
            self.remaining.remove(lost)
            self.process = None
            return not self.remaining
        return ended and not self.remaining


def make_spec_shape(layer: Layer) -> GroupSpec:
    """A spec with the layer's shapes and no meaningful values, to enumerate variants without a GPU."""
    sources = [SpikeSource(weight=torch.ones(layer.c_out, layer.c_in, layer.k, layer.k), stride=layer.stride,
                           padding=layer.k // 2)]  # fmt: skip
    if layer.second:
        sources.append(SpikeSource(weight=torch.ones(layer.c_out, layer.second, 1, 1), stride=2))
    neuron = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)
    return GroupSpec(
        sources=tuple(sources), bias=torch.zeros(layer.c_out), neuron=neuron, skips=int(layer.skip),
        dense_inputs=int(layer.dense > 0),
    )  # fmt: skip


def compile_only(layers: list[Layer]) -> None:
    """Compile every variant without a GPU; print registers, spills and whether wgmmas got serialised."""
    reports: dict[str, Any] = {}
    for layer in layers:
        h, w = layer.out
        spec = make_spec_shape(layer)
        sizes = [(layer.size, layer.width or layer.size), *([(2 * h, 2 * w)] if layer.second else [])]
        for variant in list_hopper_variants(spec, T=layer.T, N=layer.N, H=h, W=w, parts=layer.parts):
            constants = make_kernel_constants(
                spec, variant, H=h, W=w, in_sizes=sizes, parts=layer.parts, skips=int(layer.skip),
                dense=int(layer.dense > 0), read_v=layer.state, write_v=layer.state, in_tile=layer.tile,
                v_columns=layer.moved,
                emit_activity=layer.tile > 0,
                activity_words=count_input_activity_words(
                    spec, variant, N=layer.N, H=h, W=w, in_size=sizes[0], tile=layer.tile
                ) if layer.tile else 0,
            )  # fmt: skip
            limit = variant.max_registers if layer.parts == 1 else None
            key = json.dumps([constants, limit])
            if key not in reports:
                try:
                    reports[key] = compile_hopper_group(constants, max_registers=limit)
                except Exception as error:
                    reports[key] = f"{type(error).__name__}: {error}"[:300]
                print(layer.name, variant.name, reports[key], flush=True)


@triton.jit
def dense_neuron_kernel(x_ptr, x2_ptr, skip_ptr, bias_ptr, s_ptr, M, alpha, beta, threshold, v_reset,
                        T: tl.constexpr, C: tl.constexpr, SECOND: tl.constexpr, SKIP: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Bias and LIF with hard reset over T on channels-last values [T, M], M = pixels x C.

    One pass: all loads of a thread (16 bytes each) before its first store, the membrane in registers.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < M
    bias = tl.load(bias_ptr + (index % C)) * beta
    currents = ()
    for t in tl.static_range(T):
        x = tl.load(x_ptr + t * M + index, mask=inside, other=0.0).to(tl.float32)
        if SECOND:
            x += tl.load(x2_ptr + t * M + index, mask=inside, other=0.0).to(tl.float32)
        if SKIP:
            x += tl.load(skip_ptr + t * M + index, mask=inside, other=0.0).to(tl.float32)
        currents = currents + (x,)  # noqa: RUF005
    v = tl.zeros([BLOCK], tl.float32) + v_reset
    for t in tl.static_range(T):
        v = v * alpha + (currents[t] * beta + bias)
        fired = v >= threshold
        v = tl.where(fired, v_reset, v)
        tl.store(s_ptr + t * M + index, fired.to(s_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """One way to run the dense group.

    Attributes:
        dtype: Of weights, spikes and the convolution's result.
        tf32: Whether fp32 convolutions may use TF32.
        gemm: A 1x1 convolution as a matrix product (cuBLAS) instead of cuDNN.
        block: Elements a CTA of the neuron kernel, with 8 (fp16) or 4 (fp32) a thread.
    """

    dtype: torch.dtype = torch.float16
    tf32: bool = False
    gemm: bool = False
    block: int = 1024


def dense_group(case: Case, setting: DenseConfig, part: str = "group") -> Callable[[], Any]:
    """The dense group as one callable, channels_last; `part` may be "conv" or "neuron" alone."""
    layer, dtype = case.layer, setting.dtype
    last = torch.channels_last
    flats = [s.flatten(0, 1).to(dtype).contiguous(memory_format=last) for s in case.spikes]
    weights = [s.weight.to(dtype).contiguous(memory_format=last) for s in case.spec.sources]
    skips = [s.flatten(0, 1).to(dtype).contiguous(memory_format=last) for s in case.skips]
    bias = case.spec.bias.float()
    h, w = layer.out
    shape = (layer.T * layer.N, layer.c_out, h, w)
    out = torch.empty(shape, dtype=dtype, device="cuda", memory_format=last)
    m = layer.N * layer.c_out * h * w
    n = case.spec.neuron
    threads = setting.block // (8 if dtype.itemsize == 2 else 4)

    def convolve() -> list[torch.Tensor]:
        torch.backends.cudnn.allow_tf32 = setting.tf32
        torch.backends.cuda.matmul.allow_tf32 = setting.tf32
        if setting.gemm:
            rows = flats[0].permute(0, 2, 3, 1).reshape(-1, layer.c_in)
            first = (rows @ weights[0].flatten(1).t()).view(shape[0], h, w, -1).permute(0, 3, 1, 2)
        else:
            first = F.conv2d(flats[0], weights[0], None, layer.stride, layer.k // 2)
        chunks = [F.conv2d(f, x, None, 2, 0) for f, x in zip(flats[1:], weights[1:], strict=True)]
        return [first, *chunks]

    def neurons(x: list[torch.Tensor]) -> torch.Tensor:
        if any(not y.is_contiguous(memory_format=last) for y in x):
            raise RuntimeError("the convolution's result is not channels_last")
        dense_neuron_kernel[(triton.cdiv(m, setting.block),)](
            x[0], x[-1], skips[0] if skips else x[0], bias, out, m, n.alpha, n.beta, n.v_threshold, n.v_rest,
            T=layer.T, C=layer.c_out, SECOND=len(x) > 1, SKIP=bool(skips), BLOCK=setting.block,
            num_warps=max(1, threads // 32),
        )  # fmt: skip
        return out

    if part == "conv":
        return convolve
    if part == "neuron":
        once = convolve()
        return lambda: neurons(once)
    return lambda: neurons(convolve())


def make_dense_configs(layer: Layer, quick: bool) -> dict[str, DenseConfig]:
    """The dense groups to time; a packed group with two parts is compared with TF32 and fp32."""
    configs: dict[str, DenseConfig] = {"dense tf32": DenseConfig(dtype=torch.float32, tf32=True, block=512)}
    if layer.parts == 2 or not quick:
        configs["dense fp32"] = DenseConfig(dtype=torch.float32, block=512)
    if layer.parts == 1:
        configs["dense fp16"] = DenseConfig()
        configs["dense fp16 b512"] = DenseConfig(block=512)
        configs["dense bf16"] = DenseConfig(dtype=torch.bfloat16)
        if layer.k == 1 and layer.stride == 1 and not layer.second:
            configs["dense fp16 gemm"] = DenseConfig(gemm=True)
    return configs


def time_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], *, calls: int, rounds: int
) -> dict[str, list[float]]:
    """Time each graph of `calls` calls `rounds` times in rotating order; microseconds per call."""
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize(torch.cuda.current_device())
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for r in range(rounds):
        events = []
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize(torch.cuda.current_device())
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1000.0 / calls)
    return samples


def time_layer(layer: Layer, passed: list[str], density: float, seed: int, quick: bool) -> dict[str, Any]:
    """Time the passing variants and the dense groups of one layer."""
    case = make_case(layer, density, seed)
    calls, rounds = (10, 20) if quick else (20, 40)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    keep: list[Any] = []
    errors: dict[str, str] = {}

    def attempt(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            fn = make()
            graphs[name], _ = capture_graph(fn, calls=calls)
            keep.append(fn)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:400]

    for name, setting in make_dense_configs(layer, quick).items():
        attempt(name, lambda setting=setting: dense_group(case, setting))
    base = DenseConfig(dtype=torch.float32, tf32=True, block=512) if layer.parts == 2 else DenseConfig()
    attempt("conv alone", lambda: dense_group(case, base, "conv"))
    attempt("neuron alone", lambda: dense_group(case, base, "neuron"))
    spikes, skips, dense, v = case.packed()
    for name in passed:

        def make(name: str = name) -> Callable[[], Any]:
            group = case.prepare(name)
            return lambda: group(spikes, skips, dense, v)

        attempt(name, make)
    if layer.tile:  # what the masks cost, and what they save
        plain = replace(case, layer=replace(layer, tile=0))
        bits = [pack(s) for s in case.spikes]
        for name in passed:

            def make_plain(name: str = name) -> Callable[[], Any]:
                group = plain.prepare(name)
                return lambda: group(bits, skips, dense, v)

            attempt(f"plain {name}", make_plain)
    samples = time_graphs(graphs, calls=calls, rounds=rounds)
    rates = {s.float().mean().item() for s in case.spikes}
    return {"samples_us": samples, "errors": errors, "density": max(rates)}


def table(result: dict[str, Any]) -> str:
    """One line a layer: dense, the best variants, the ratio."""
    lines = []
    for name, row in result["layers"].items():
        timing = row.get("timing")
        if not timing:
            bad = {v: r["status"] for v, r in row["checks"].items() if r["status"] != "ok"}
            lines.append(
                f"{name:18s} checks {len(row['checks']) - len(bad)}/{len(row['checks'])} ok {bad or ''}"
            )
            continue
        median = {k: statistics.median(v) for k, v in timing["samples_us"].items()}
        dense = min(t for k, t in median.items() if k.startswith("dense "))
        packed_us = sorted((t, v) for v, t in median.items() if v in row["checks"])
        flops = row["flops"]
        bad = {v: r["status"] for v, r in row["checks"].items() if r["status"] != "ok"}
        floor = row["floors_us"]
        head = (
            f"{name:18s} dense {dense:6.1f} (conv {median.get('conv alone', 0):5.1f} + neuron "
            f"{median.get('neuron alone', 0):5.1f}; floor flops {floor['flops']:.1f}, bytes "
            f"{floor['dense_bytes']:.1f}; packed bytes {floor['packed_bytes']:.1f}) "
        )
        if packed_us:
            default = row["default"]
            without = [t for k, t in median.items() if k.startswith("plain ")]
            if without:
                head += f"| without masks {min(without):.1f} "
            head += f"| {dense / packed_us[0][0]:5.2f}x {flops / packed_us[0][0] / 1e6:4.0f} TF | "
            if default in median:
                head += f"default +{100 * (median[default] / packed_us[0][0] - 1):.1f} % | "
            head += "  ".join(
                f"{v} {t:.1f} ({row['checks'][v].get('registers')}r{row['checks'][v].get('spills')}s)"
                for t, v in packed_us[:5]
            )
        lines.append(head + (f"  BAD {bad}" if bad else ""))
    return "\n".join(lines)


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: packed groups against cuDNN with one fused neuron kernel."""
    for name, layer in record["layers"].items():
        if "timing" not in layer:
            continue
        samples_us = layer["timing"]["samples_us"]
        medians_us = {form: statistics.median(samples) for form, samples in samples_us.items()}
        dense_forms = [form for form in samples_us if form.startswith("dense")]
        packed_forms = [form for form in samples_us if form in layer["checks"]]
        if not dense_forms or not packed_forms:
            continue
        dense = min(dense_forms, key=medians_us.__getitem__)
        packed = min(packed_forms, key=medians_us.__getitem__)
        size = layer["layer"]
        silent = f", {100 * size['silent']:.0f} % silent channel groups" if size["silent"] else ""
        facts = {key: layer[key] for key in ("layer", "flops", "floors_us")}
        facts |= {"check": layer["checks"][packed]}
        facts |= {"samples_us": {form: samples_us[form] for form in (dense, packed)}}
        yield Claim(
            id=f"spiking/3-group-{slugify(name)}",
            claim=f"Speedup of one group: {size['size']}² {size['c_in']}→{size['c_out']} "
            f"{size['k']}x{size['k']}, T {size['T']}, {size['N']} images{silent}.",
            value=round(
                statistics.median(d / p for d, p in zip(samples_us[dense], samples_us[packed], strict=False)),
                3,
            ),
            unit="x",
            baseline=f"{dense}: cuDNN and one fused neuron kernel",
            command="python benchmarks/spiking/gpu_groups.py " + " ".join(record["argv"]),
            samples=write_samples(f"spiking/3-group-{slugify(name)}.json", facts),
            details={"dense_us": round(medians_us[dense], 2), "packed_us": round(medians_us[packed], 2)},
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="eight 3x3 layers, the same with silence, and the feature checks"
    )
    parser.add_argument("--layers", default="", help="comma-separated names or globs")
    parser.add_argument(
        "--time-limit-s", type=float, default=420.0, help="stop starting work after this long"
    )
    parser.add_argument("--variant-limit-s", type=float, default=40.0)
    parser.add_argument("--jobs", type=int, default=max(2, min(10, (os.cpu_count() or 4) - 4)))
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cudnn-limit", type=int, default=0, help="algorithms that cuDNN tries; 0 for all")
    parser.add_argument(
        "--compile-only", action="store_true", help="no GPU: compile every variant and report"
    )
    parser.add_argument("--worker", default="")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.compile_only:
        selected = args.layers.split(",") if args.layers else ["*"]
        compile_only([x for x in ALL.values() if any(fnmatch.fnmatch(x.name, p) for p in selected)])
        return
    torch.cuda.set_device(args.gpu)
    if args.worker:
        worker(args.worker, args.only.split(","), args.out, args.density, args.seed)
        return
    start_s = time.monotonic()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = args.cudnn_limit
    layers = [*FIRST, *FEATURES, *SILENT_CHECKS, *SILENT] if args.quick else list(ALL.values())
    if args.layers:
        layers = [x for x in ALL.values() if any(fnmatch.fnmatch(x.name, p) for p in args.layers.split(","))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "argv": sys.argv[1:], "density": args.density, "layers": {},
    }  # fmt: skip

    def save() -> None:
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(args.out)

    folder = Path(tempfile.mkdtemp(prefix="groups-"))
    waiting = [Checker(layer, args.density, args.seed, args.variant_limit_s, folder) for layer in layers]
    running: list[Checker] = []
    finished: list[Checker] = []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            running.append(waiting.pop(0))
        for checker in list(running):
            if checker.poll():
                running.remove(checker)
                finished.append(checker)
        if time.monotonic() - start_s > 0.6 * args.time_limit_s:
            for checker in running:
                if checker.process is not None:
                    checker.process.kill()
                finished.append(checker)
            break
        time.sleep(0.1)
    print(f"checks done after {time.monotonic() - start_s:.0f} s", flush=True)
    for checker in finished:
        layer = checker.layer
        result["layers"][layer.name] = {
            "layer": asdict(layer), "flops": layer.flops, "floors_us": layer.floors_us(),
            "default": checker.default, "checks": checker.rows,
        }  # fmt: skip
        bad = [r for r in checker.rows.values() if r["status"] != "ok"]
        for row in bad[:2]:
            print(
                layer.name,
                row["variant"],
                row["status"],
                row.get("mismatch"),
                row.get("error", "")[-300:],
                flush=True,
            )
    save()
    order = {layer.name: i for i, layer in enumerate(layers)}
    for checker in sorted(finished, key=lambda c: order[c.layer.name]):
        passed = [v for v, r in checker.rows.items() if r["status"] == "ok"]
        if checker.layer.check_only or time.monotonic() - start_s > args.time_limit_s:
            continue
        try:
            row = time_layer(checker.layer, passed, args.density, args.seed + 1, args.quick)
            result["layers"][checker.layer.name]["timing"] = row
        except Exception as error:
            result["layers"][checker.layer.name]["timing_error"] = f"{type(error).__name__}: {error}"[:800]
            print(checker.layer.name, "timing failed:", error, flush=True)
        save()
    print(table(result), flush=True)
    print(f"all done after {time.monotonic() - start_s:.0f} s; {args.out}", flush=True)


if __name__ == "__main__":
    main()
