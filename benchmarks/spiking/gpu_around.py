"""What surrounds the packed group kernel on a GPU, each beside the time that moving its bytes takes at best.

Two kinds of rows, every candidate checked bit for bit before and inside its CUDA graph (weights and currents
lie on a dyadic grid, so sums are exact in any order):

- *passes* over one activation: the fused neuron behind a dense convolution (plain, with a skip, with a
  time-constant current, with its membrane read and written, with a SEW shortcut), packing, unpacking, max
  pooling, spatial mean;
- *groups*: convolution + neuron, as cuDNN with the fused neuron, as every variant of the plain-Triton twin,
  and as the Gluon kernel where there is a Hopper GPU.

::

    PYTHONPATH=src python benchmarks/spiking/gpu_around.py --out runs/gpu_around.json --quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from replay import Bench, Results, Run, fastest, floor_ms, measured_ceilings, same_spikes, timed

from sparseflow.core.device import select_device
from sparseflow.core.device.ceilings import Ceilings
from sparseflow.errors import SparseFlowError
from sparseflow.spiking.backends.packed import codec, pooling, triton_fallback
from sparseflow.spiking.backends.packed.format import PackedSpikes, allocate_packed
from sparseflow.spiking.backends.packed.format import pack as pack_reference
from sparseflow.spiking.backends.packed.hopper import group
from sparseflow.spiking.backends.packed.neuron import run_neuron
from sparseflow.spiking.backends.packed.words import to_channels_last
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

LIF = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An activation [T, N, C, size, size]; a group's convolution has `c_in` channels and a kernel of `k`."""

    name: str
    size: int
    c: int
    c_in: int = 0
    k: int = 3
    T: int = 4
    N: int = 32

    @property
    def full_shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        return self.T, self.N, self.c, self.size, self.size


PASSES = [
    Shape(name="112x64", size=112, c=64, N=8),
    Shape(name="56x64", size=56, c=64),
    Shape(name="32x64 T=16", size=32, c=64, T=16),
    Shape(name="14x256", size=14, c=256),
    Shape(name="7x512", size=7, c=512),
]
GROUPS = [
    Shape(name="56 64-64 3x3", size=56, c=64, c_in=64),
    Shape(name="28 128-128 3x3", size=28, c=128, c_in=128),
    Shape(name="14 256-256 3x3", size=14, c=256, c_in=256),
    Shape(name="7 512-512 3x3", size=7, c=512, c_in=512),
    Shape(name="56 256-64 1x1", size=56, c=64, c_in=256, k=1),
    Shape(name="56 64-256 1x1", size=56, c=256, c_in=64, k=1),
]
TINY_PASS = Shape(name="tiny", size=5, c=70, N=1, T=2)
TINY_GROUP = Shape(name="tiny", size=4, c=64, c_in=64, N=1, T=2)


class Draw:
    """Random numbers on a grid, from one seed, on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def grid(self, *shape: int) -> torch.Tensor:
        """Multiples of 1/64 in [-0.5, 0.5]."""
        integers = torch.randint(-32, 33, shape, generator=self._generator, device=self.device)
        return integers.float() / 64

    def spikes(self, *shape: int, rate: float = 0.05) -> torch.Tensor:
        """Zeros and ones."""
        return (torch.rand(shape, generator=self._generator, device=self.device) < rate).float()


def exactly(expected: torch.Tensor) -> Callable[[torch.Tensor], dict[str, float]]:
    """A check that nothing differs, not even a border."""
    return same_spikes(expected, limit=0.0)


def flip(tensor: torch.Tensor) -> None:
    """Spoil a result, packed or not."""
    tensor.fill_(-1 if tensor.dtype == torch.int16 else float("nan"))


def spoiler(like: PackedSpikes) -> Callable[[torch.Tensor], object]:
    """What spoils packed spikes but for the border, which most kernels leave as it is."""
    return lambda original: replace(like, data=original).pixels.fill_(-1)


def run_passes(bench: Bench, shape: Shape, draw: Draw, peaks: Ceilings | None) -> dict[str, Any]:
    """All passes over one activation; floors by the bytes they must move."""
    t, n, c, h, w = shape.full_shape
    bench.start()
    values, bits = t * n * c * h * w, t * n * h * w * 8 * -(-c // 64)
    x = to_channels_last(draw.grid(*shape.full_shape) * 4).half().permute(0, 1, 4, 2, 3)
    s = to_channels_last(draw.spikes(*shape.full_shape)).half().permute(0, 1, 4, 2, 3)
    packed, bias = codec.pack(s), draw.grid(c)
    membrane = to_channels_last(draw.grid(1, n, c, h, w))[0]
    out, marked = (allocate_packed(t, n, c, h, w, x.device, tile=tile) for tile in (0, 16))
    spoil_inside = spoiler(out)
    moved: dict[str, float] = {}

    def fire(dense: list[torch.Tensor], skips: int = 0, posts: int = 0, v: torch.Tensor | None = None) -> Any:
        spec = GroupSpec(
            sources=(), bias=bias, neuron=LIF, skips=skips, dense_inputs=len(dense), post_skips=posts
        )
        floats = [d.float() for d in dense]
        start = None if v is None else v.permute(0, 3, 1, 2)
        return run_group_reference(
            spec, [], [s.float()] * skips, floats, [s.float()] * posts, start, time_steps=t
        )[0]

    def admit(
        name: str,
        nbytes: float,
        run: Run,
        expected: torch.Tensor,
        poison: Callable[[torch.Tensor], object] = flip,
    ) -> None:
        moved[name] = nbytes
        bench.admit(name, lambda: run, exactly(expected), poison=poison)

    def fused(**options: Any) -> Run:
        options = {"currents": [x], "packed": out, **options}
        return lambda: run_neuron(spec=LIF, steps=t, bias=bias, **options).packed.data  # type: ignore[union-attr]

    admit("neuron", 2 * values + bits, fused(), pack_reference(fire([x])).data, spoil_inside)
    admit(
        "neuron + activity", 2 * values + bits, fused(packed=marked), pack_reference(fire([x])).data,
        spoil_inside,
    )  # fmt: skip
    admit(
        "neuron + skip", 2 * values + 2 * bits, fused(skips=[packed]),
        pack_reference(fire([x], skips=1)).data,
        spoil_inside,
    )  # fmt: skip
    admit(
        "neuron, constant current", 2 * values / t + bits, fused(currents=[x[:1]]),
        pack_reference(fire([x[:1]])).data, spoil_inside,
    )  # fmt: skip
    admit(
        "neuron, membrane in and out", 2 * values + bits + 8 * values / t, fused(v=membrane, write_v=True),
        pack_reference(fire([x], v=membrane)).data, spoil_inside,
    )  # fmt: skip
    admit(
        "neuron + SEW shortcut, dense out", 4 * values + bits,
        lambda: run_neuron([x], LIF, bias=bias, post_skips=[packed], packed=False, dense=torch.float16).dense,  # type: ignore[return-value]
        fire([x], posts=1).half(),
    )  # fmt: skip
    admit("pack", 2 * values + bits, lambda: codec.pack(s, out).data, pack_reference(s).data)
    admit("pack + activity", 2 * values + bits, lambda: codec.pack(s, marked).data, pack_reference(s).data)
    admit("unpack", 2 * values + bits, lambda: codec.unpack(packed, torch.float16), s.contiguous())
    if min(h, w) >= 3:
        pooled = pooling.run_max_pool_reference(packed, 3, 2, 1)
        for name, tile in (("max pool 3x3/2", 0), ("max pool 3x3/2 + activity", 16)):
            admit(
                name, 1.25 * bits, lambda tile=tile: pooling.max_pool(packed, 3, 2, 1, tile=tile).data,
                pooled.data,
            )  # fmt: skip
    mean = pooling.run_spatial_mean_reference(packed)
    admit("spatial mean", bits, lambda: pooling.spatial_mean(packed), mean)
    comparison = bench.compare("neuron")
    floors = {name: floor_ms(peaks, nbytes, 0.0, "fp16") for name, nbytes in moved.items()}
    return {"kind": "passes", "bytes": moved, "floor_ms": floors, **timed(bench, comparison)}


def run_groups(bench: Bench, shape: Shape, draw: Draw, peaks: Ceilings | None) -> dict[str, Any]:
    """One group, by cuDNN and the fused neuron, by the twin's variants, and by the Hopper kernel."""
    t, n, c, h, w = shape.full_shape
    bench.start()
    weight = draw.grid(c, shape.c_in, shape.k, shape.k)
    source = SpikeSource(weight=weight, padding=shape.k // 2)
    spec = GroupSpec(sources=(source,), bias=draw.grid(c), neuron=LIF)
    s = to_channels_last(draw.spikes(t, n, shape.c_in, h, w)).half().permute(0, 1, 4, 2, 3)
    packed = codec.pack(s)
    expected = pack_reference(run_group_reference(spec, [s], dtype=torch.float64)[0]).data
    out = allocate_packed(t, n, c, h, w, s.device)
    spoil_inside = spoiler(out)
    half = weight.half().contiguous(memory_format=torch.channels_last)

    def cudnn() -> torch.Tensor:
        y = F.conv2d(s.flatten(0, 1), half, padding=source.padding).unflatten(0, (t, n))
        run_neuron([y], LIF, bias=spec.bias, packed=out)
        return out.data

    # cuDNN rounds its sums to fp16, so a few spikes may differ.
    bench.admit(
        "cudnn + neuron",
        lambda: cudnn,
        same_spikes(expected, limit=1e-2),
        precision="fp16",
        poison=spoil_inside,
    )
    sizes: dict[str, Any] = {"T": t, "N": n, "H": h, "W": w, "device": s.device}

    def admit(name: str, make: Callable[[], Callable[..., tuple[PackedSpikes, Any]]]) -> None:
        def prepared() -> Run:
            call = make()
            return lambda: call([packed])[0].data

        bench.admit(name, prepared, exactly(expected), poison=spoil_inside)

    for v in triton_fallback.list_fallback_variants(spec, T=t):
        admit(
            f"twin {v.name}", lambda v=v: triton_fallback.TritonFallbackGroup(spec, variant=v.name, **sizes)
        )
    if s.is_cuda and torch.cuda.get_device_capability(s.device)[0] == 9:
        admit("gluon", lambda: group.HopperGroup(spec, **sizes))
    comparison = bench.compare("cudnn + neuron")
    flops = 2.0 * t * n * h * w * c * shape.c_in * shape.k**2
    nbytes = packed.data.nbytes + out.data.nbytes + half.nbytes
    return {
        "kind": "groups",
        "flops": flops,
        "floor_ms": floor_ms(peaks, nbytes, flops, "fp16"),
        "fastest_twin": fastest(comparison, [name for name in bench.work if name.startswith("twin")]),
        **timed(bench, comparison),
    }


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    print(f"{row['kind']} {row['name']}")
    floors = row["floor_ms"]
    for name, ms in row["median_ms"].items():
        floor = floors.get(name) if isinstance(floors, dict) else floors
        reference = f", {floor / ms:5.0%} of the floor's speed" if floor else ""
        print(f"    {name:32s} {1e3 * ms:9.1f} µs{reference}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all samples")
    parser.add_argument("--gpu", type=int, help="index; by default the GPU with most free memory")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to try the script; a CPU will do")
    parser.add_argument("--time-limit-s", type=float, default=400.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        device = select_device(args.gpu)
    except SparseFlowError as error:
        parser.error(str(error))
    if device.type != "cuda" and not args.dry_run:
        parser.error(
            "torch sees no GPU here; --dry-run (with TRITON_INTERPRET=1) tries the script without one"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rounds, calls, warmup = (1, 1, 0) if args.dry_run else (9, 4, 2) if args.quick else (25, 8, 2)
    bench = Bench(device, rounds=rounds, calls=calls, warmup=warmup, seed=args.seed)
    results = Results(args.out, device, vars(args), seed=args.seed, limit_s=args.time_limit_s)
    peaks = measured_ceilings(device)
    results.content["ceilings"] = asdict(peaks) if peaks else None
    passes, groups = ([TINY_PASS], [TINY_GROUP]) if args.dry_run else (PASSES, GROUPS)
    for run, shapes in ((run_passes, passes), (run_groups, groups)):
        for shape in shapes:
            row: dict[str, Any] = {**asdict(shape)}
            try:
                with torch.no_grad():
                    row |= run(bench, shape, Draw(args.seed, device), peaks)
                show(row)
            except Exception as error:  # one shape must not cost the others their rows
                row |= {"failed": f"{type(error).__name__}: {error}"[:500]}
                print(f"{shape.name}: failed: {row['failed']}", flush=True)
            results.add(row)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
