"""The kernels compile for GPUs without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

pytest.importorskip("triton", reason="the packed kernels need triton")

_COMPILE = """
import json, sys
import torch
from benchmarks.spiking.offline_compile import compile_launches
from sparseflow.spiking.backends.packed import addition, attention, codec, neuron, pooling, stem
from sparseflow.spiking.backends.packed import triton_fallback
from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.packed.format import allocate_packed
from sparseflow.spiking.backends.spec import GroupSpec, MaxPooling, NeuronSpec, SpikeSource

lif = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)


def group(t, n, c_in, c_out, k, size, parts):
    source = SpikeSource(weight=torch.ones(c_out, c_in, k, k), padding=k // 2)
    spec = GroupSpec(sources=(source,), bias=torch.zeros(c_out), neuron=lif, skips=1)
    run = triton_fallback.TritonFallbackGroup(spec, T=t, N=n, H=size, W=size, device="cpu", parts=parts,
                                 emit_activity=int(sys.argv[1]) >= 90)  # only Hopper reads it
    inputs = [allocate_packed(t, n, c_in, size, size, "cpu")]
    skips = [allocate_packed(t, n, c_out, size, size, "cpu")]
    run(inputs, skips, write_v=True)


with compile_launches(int(sys.argv[1])) as launches:
    for t, n, c, size in ((4, 2, 128, 28), (1, 1, 1, 1)):
        x = torch.zeros(t, n, size, size, c, dtype=torch.float16).permute(0, 1, 4, 2, 3)
        p = codec.pack(x)
        codec.unpack(p, torch.float16, add=[p])
        pooling.spatial_mean(p)
        v = torch.zeros(n, size, size, c)
        neuron.run_neuron([x, x[:1]], lif, bias=torch.zeros(c), skips=[p], v=v, write_v=True)
        marked = codec.pack(x, tile=16)
        neuron.run_neuron([x], lif, packed=marked)
        neuron.run_neuron([x[:1]], lif, steps=t, packed=False, dense=torch.float16, post_skips=[p])
        for current in (x, x[:1]):
            neuron.run_neuron([current], lif, steps=t, dense=torch.float16, pooling=MaxPooling(3, 2, 1))
        group(t, n, c, c, 3, size, 1)
    for channels, tokens in ((32, 196), (64, 49)):
        factors = [torch.zeros(4, 2, 3, tokens, channels, dtype=torch.float16) for _ in range(3)]
        q, k, v = factors
        attention.run_attention(q, k.mT, v, lif, rows_are_tokens=True, dtype=torch.float16)
        attention.run_attention(v.mT, k, q.mT, lif, rows_are_tokens=False, dtype=torch.float16)
    for dtype, channels, size in ((torch.float16, 2, 3), (torch.float16, 3, 7), (torch.float32, 3, 3)):
        images = torch.zeros(4, 2, channels, 28, 28, dtype=dtype)
        geometry = ConvGeometry(kernel_size=(size, size), padding=(size // 2, size // 2))
        weight = stem.pack_weight(torch.zeros(64, channels, size, size, dtype=dtype), geometry)
        for x in (images, images[:1]):
            out = allocate_packed(4, 2, 64, 28, 28, "cpu", tile=16)
            stem.run_stem(x, weight, torch.zeros(64), lif, geometry, steps=4, packed=out)
            stem.run_stem(x, weight, torch.zeros(64), lif, geometry, steps=4, dense=dtype)
    addition.add_maps([images, images[:1]], torch.zeros(3))
    for c, tile in ((64, 0), (64, 16), (512, 16)):
        pooling.max_pool(allocate_packed(4, 2, c, 28, 28, "cpu"), 3, 2, 1, tile=tile)
    group(4, 2, 256, 64, 1, 14, 2)
rows = [(c.kernel, c.ptxas.registers, c.ptxas.spill_bytes, c.shared_bytes, c.asm["ptx"].count("mma"))
        for c in launches]
print(json.dumps(rows))
"""


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_without_spills(arch: int) -> None:
    # In a process of its own: in this one, Triton may be interpreting.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(arch)],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    actual = json.loads(completed.stdout)
    kernels = {name for name, *_ in actual}
    assert kernels == {
        "addition_kernel", "attention_kernel", "pack_kernel", "unpack_kernel", "spatial_mean_kernel",
        "max_pool_kernel", "neuron_kernel", "pad_kernel", "stem_kernel", "triton_group_kernel",
    }  # fmt: skip
    for name, registers, spill_bytes, shared_bytes, multiplies in actual:
        assert spill_bytes == 0, (name, registers, spill_bytes)
        assert shared_bytes <= 99 * 1024, (name, shared_bytes)
        if name != "stem_kernel":  # in fp32, it does not use matrix units
            assert (multiplies > 0) == (name in ("triton_group_kernel", "attention_kernel")), name


_COMPILE_HOPPER = """
import json
import torch
from sparseflow.spiking.backends.packed.hopper.group import make_kernel_constants
from sparseflow.spiking.backends.packed.hopper.variants import list_hopper_variants
from benchmarks.spiking.offline_compile import compile_hopper_group
from sparseflow.spiking.backends.spec import GroupSpec, MaxPooling, NeuronSpec, SpikeSource

lif = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)
source = SpikeSource(weight=torch.ones(128, 128, 3, 3), padding=1)
spec = GroupSpec(sources=(source,), bias=torch.zeros(128), neuron=lif)
rows = []
for parts, moved in ((1, False), (1, True), (2, False), (2, True)):
    first = list_hopper_variants(spec, T=4, N=32, H=14, W=14, parts=parts)[0]
    constants = make_kernel_constants(spec, first, H=14, W=14, in_sizes=[(14, 14)], parts=parts, read_v=True,
                                 write_v=True, v_columns=moved)
    report, _ = compile_hopper_group(constants, max_registers=first.max_registers if parts == 1 else None)
    rows.append((parts, moved, report.spill_bytes, report.serialized))
print(json.dumps(rows))
"""


def test_the_hopper_kernel_compiles_with_asynchronous_products() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = subprocess.run(
        [sys.executable, "-c", _COMPILE_HOPPER],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(completed.stdout)
    assert len(rows) == 4
    for parts, moved, spill_bytes, serialised in rows:
        assert spill_bytes == 0 and not serialised, (parts, moved, spill_bytes, serialised)


_COMPILE_IN_PROCESSES = """
import os
import torch
from triton.runtime import driver
from benchmarks.spiking.offline_compile import CompileOnlyDriver
from sparseflow.spiking.backends.packed import codec, pooling, words
from sparseflow.spiking.backends.packed.format import allocate_packed

driver.set_active(CompileOnlyDriver(90))
compiled_here = []


def run():
    x = torch.zeros(4, 2, 28, 28, 128, dtype=torch.float16).permute(0, 1, 4, 2, 3)
    for _ in range(2):
        pooling.spatial_mean(codec.pack(x))
    compiled_here.append(os.getpid())


assert words.compile_launches(run) == 2 and compiled_here == [os.getpid()]
try:
    words.compile_launches(lambda: [run(), 1 / 0])
except ZeroDivisionError:
    pass
else:
    raise AssertionError("an error of the function is raised")
assert words.launcher is None
"""


def test_kernels_compile_in_several_processes(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", _COMPILE_IN_PROCESSES],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        timeout=300,
        check=True,
    )
    assert sorted(path.stem for path in tmp_path.rglob("*.cubin")) == ["pack_kernel", "spatial_mean_kernel"]
