"""Six layers of a spiking ResNet-50 at given zero-block ratios, against eager torch and the best dense form.

The layers are those of an earlier table: T=16, batch 32 (512 images), 3x3, stride 1, blocks of 16 or 8
pixels. Spikes are drawn with exactly the stated ratio of zero blocks; the others fire at `--rate`. Which
blocks are silent comes in two ways: blocks of a single channel, as that table counted them, scattered
(`channel`); and blocks of 16 neighbouring channels that fall silent together (`group`), which is what a
kernel can skip whole.

Two comparisons a row, every candidate checked against float64 before and inside its CUDA graph:

- *conv*: `F.conv2d` as a user has it (fp32, NCHW, default flags, eager), the best of cuDNN over formats and
  precisions in CUDA graphs, and the two-stage block kernels with the prescan inside the time; the prescan and
  the second stage also on their own;
- *group*: convolution and LIF neurons over T, with cuDNN, with the block kernels, and (`packed`, timed last,
  on Hopper only) in one kernel on 1-bit spikes.

::

    PYTHONPATH=src:. python benchmarks/spiking/user_table.py --out runs/user_table.json --quick
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from replay import (
    DTYPE,
    Bench,
    Results,
    Run,
    close_to,
    fastest,
    floor_ms,
    measured_ceilings,
    ratio,
    same_spikes,
    timed,
)

from benchmarks.claims import Claim, slugify, write_samples
from sparseflow.core.device import select_device
from sparseflow.core.device.ceilings import Ceilings
from sparseflow.errors import SparseFlowError
from sparseflow.spiking.backends.blocks.conv import prescan, sparse_conv2d
from sparseflow.spiking.backends.blocks.geometry import ConvTiling
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
CHANNELS_TOGETHER = {"channel": 1, "group": 16}
EAGER = "eager fp32 NCHW"
TAU = 2.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One row of the table."""

    name: str
    size: int
    channels: int
    block: int
    zero: float
    T: int = 16
    batch: int = 32

    @property
    def images(self) -> int:
        return self.T * self.batch

    @property
    def flops(self) -> float:
        """Of the dense convolution, a multiply-add counted as two."""
        return 2.0 * self.images * self.size**2 * self.channels**2 * 9


LAYERS = [
    Layer(name="layer1.0.conv2", size=56, channels=64, block=16, zero=0.985),
    Layer(name="layer1.1.conv2", size=56, channels=64, block=16, zero=0.989),
    Layer(name="layer1.2.conv2", size=56, channels=64, block=16, zero=0.994),
    Layer(name="layer2.1.conv2", size=28, channels=128, block=8, zero=1.0),
    Layer(name="layer2.2.conv2", size=28, channels=128, block=8, zero=0.999),
    Layer(name="layer3.1.conv2", size=14, channels=256, block=8, zero=0.997),
]
TINY = [
    Layer(name="tiny", size=7, channels=16, block=4, zero=0.9, T=2, batch=1),
    Layer(name="silent", size=4, channels=16, block=8, zero=1.0, T=2, batch=1),
]


def draw_spikes(
    layer: Layer, channels_per_block: int, rate: float, seed: int, device: torch.device
) -> torch.Tensor:
    """Spikes float32 [T * batch, C, H, W] with the layer's ratio of zero blocks, rounded to whole blocks.

    Args:
        layer: The layer.
        together: Channels of a block.
        rate: Firing rate inside the blocks that are not zero; each has one spike at least.
        seed: Of the draw.
        device: Where to draw.
    """
    g = torch.Generator(device).manual_seed(seed)
    n, c, size, b = layer.images, layer.channels, layer.size, layer.block
    grid = -(-size // b)
    groups = -(-c // channels_per_block)
    blocks = n * groups * grid * grid
    count = round((1.0 - layer.zero) * blocks)
    zero_blocks_mask = torch.randperm(blocks, generator=g, device=device)[:count]
    active = torch.zeros(blocks, dtype=torch.bool, device=device)
    active[zero_blocks_mask] = True
    spread = active.view(n, groups, grid, grid).repeat_interleave(channels_per_block, 1)[:, :c]
    spread = spread.repeat_interleave(b, 2)[:, :, :size].repeat_interleave(b, 3)[..., :size]
    x = ((torch.rand((n, c, size, size), generator=g, device=device) < rate) & spread).float()

    def inside(start: torch.Tensor, edge: int, end: int) -> torch.Tensor:
        """A random place of [start, start + edge), cut off at `end`."""
        length = (start + edge).clamp(max=end) - start
        sampled = torch.rand(count, generator=g, device=device) * length
        # rounding in float32 may reach the length itself
        return start + torch.minimum(sampled.long(), length - 1)

    column = inside(zero_blocks_mask % grid * b, b, size)
    row = inside(zero_blocks_mask // grid % grid * b, b, size)
    channel = inside(zero_blocks_mask // grid**2 % groups * channels_per_block, channels_per_block, c)
    x[zero_blocks_mask // (grid**2 * groups), channel, row, column] = 1.0
    return x


def zero_blocks(x: torch.Tensor, block: int, channels_per_block: int) -> float:
    """Ratio of blocks of `together` channels without a spike."""
    size, c = x.shape[-1], x.shape[1]
    pooled = F.max_pool2d(F.pad(x, (0, -size % block, 0, -size % block)), block)
    pooled = (
        F.pad(pooled, (0, 0, 0, 0, 0, -c % channels_per_block)).unflatten(1, (-1, channels_per_block)).amax(2)
    )
    return (pooled == 0).double().mean().item()


def in_chunks(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`fn` over 64 images at a time: float64 convolutions want much working memory."""
    return torch.cat([fn(part) for part in x.split(64)])


def on_grid(shape: tuple[int, ...], largest: int, g: torch.Generator, device: torch.device) -> torch.Tensor:
    """Random multiples of 1/64 up to `largest` / 64: their sums are exact, so that spikes can be compared."""
    return torch.randint(-largest, largest + 1, shape, generator=g, device=device).float() / 64


def stage_two(x: torch.Tensor, w: torch.Tensor, layer: Layer, tf32: bool) -> Run:
    """The second stage alone, on what a prescan found beforehand."""
    active = prescan(x, layer.block, out_channels=w.shape[0])
    return lambda: sparse_conv2d(x, w, block_size=layer.block, allow_tf32=tf32, active=active)


def prescan_alone(x: torch.Tensor, layer: Layer) -> Run:
    """The first stage alone."""
    return lambda: prescan(x, layer.block, out_channels=layer.channels).words


def tilings(precision: str) -> list[ConvTiling]:
    """Other tile sizes than the rule's, for `--sweep`."""
    if precision == "fp32":
        return [ConvTiling(tile_h=h, tile_w=w, warps=n) for (h, w), n in
                itertools.product([(2, 16), (1, 32), (2, 32), (4, 16), (8, 8)], (4, 8))]  # fmt: skip
    shapes = [(1, 64), (2, 32), (4, 32), (4, 16), (8, 8), (8, 16)]
    candidates = [
        ConvTiling(tile_h=h, tile_w=w, group=n) for (h, w), n in itertools.product(shapes, (16, 32))
    ]
    return [*candidates, *(ConvTiling(tile_h=h, tile_w=w, tile_c=128, warps=8) for h, w in shapes)]


def run_conv(bench: Bench, layer: Layer, x: torch.Tensor, seed: int, sweep: bool) -> dict[str, Any]:
    """The comparison of convolutions alone."""
    bench.start()
    g = torch.Generator(bench.device).manual_seed(seed)
    c = layer.channels
    weight = torch.randn((c, c, 3, 3), generator=g, device=bench.device) / (9 * c) ** 0.5
    expected = {
        precision: in_chunks(
            lambda part, precision=precision: F.conv2d(
                part.double(), weight.to(DTYPE[precision]).double(), padding=1
            ),
            x,
        )
        for precision in ("fp32", "fp16", "bf16")
    }
    expected["tf32"] = expected["fp32"]
    # by default torch lets cuDNN use TF32, and that is what a user has
    bench.admit(
        EAGER, lambda: lambda: F.conv2d(x, weight, padding=1), close_to(expected["tf32"], "tf32"), graph=False
    )
    default_tiling = close_to(expected["fp32"], "fp32")
    bench.admit(
        "blocks fp32 NCHW, eager",
        lambda: lambda: sparse_conv2d(x, weight, block_size=layer.block),
        default_tiling,
        graph=False,
    )
    inputs = {(p, name): x.to(DTYPE[p]).contiguous(memory_format=f)
              for p, (name, f) in itertools.product(("fp32", "fp16", "bf16"), LAYOUTS.items())}  # fmt: skip
    for precision, layout in itertools.product(("fp32", "tf32", "fp16", "bf16"), LAYOUTS):
        x_cast = inputs[precision if precision != "tf32" else "fp32", layout]
        w = weight.to(x_cast.dtype)
        wd = w.contiguous(memory_format=LAYOUTS[layout])
        check = close_to(expected[precision], precision)
        bench.admit(
            f"dense {precision} {layout}",
            lambda x=x_cast, wd=wd: lambda: F.conv2d(x, wd, padding=1), check, precision=precision,
        )  # fmt: skip
        if precision == "bf16" and bench.device.type == "cpu":
            continue  # Triton's interpreter multiplies bfloat16 wrongly
        tf32 = precision == "tf32"
        bench.admit(
            f"blocks {precision} {layout}",
            lambda x=x_cast, w=w, tf32=tf32: (
                lambda: sparse_conv2d(x, w, block_size=layer.block, allow_tf32=tf32)
            ),
            check,
        )
        if precision in ("fp32", "fp16"):
            bench.admit(f"prescan {precision} {layout}", lambda x=x_cast: prescan_alone(x, layer), None)
            bench.admit(
                f"stage 2 {precision} {layout}",
                lambda x=x_cast, w=w: stage_two(x, w, layer, False),
                check,
            )
        if sweep and precision != "bf16":
            for t in tilings(precision):
                bench.admit(
                    f"sweep {precision} {layout} g{t.group} {t.tile_h}x{t.tile_w}x{t.tile_c} w{t.warps}",
                    lambda x=x_cast, w=w, tf32=tf32, t=t: (
                        lambda: sparse_conv2d(x, w, block_size=layer.block, allow_tf32=tf32, tiling=t)
                    ),
                    check,
                )
    comparison = bench.compare(EAGER)
    names = list(comparison.times_ms)
    dense = fastest(comparison, [n for n in names if n.startswith("dense")])
    sparse_names = fastest(comparison, [n for n in names if n.startswith("blocks") and "eager" not in n])
    pairs = []
    if dense and sparse_names:
        pairs = [
            ratio(comparison, sparse_names, dense),
            ratio(comparison, sparse_names, EAGER),
            ratio(comparison, dense, EAGER),
        ]
    for precision, layout in itertools.product(("fp32", "tf32", "fp16", "bf16"), LAYOUTS):
        pair = f"blocks {precision} {layout}", f"dense {precision} {layout}"
        if all(name in names for name in pair):
            pairs.append(ratio(comparison, *pair))
    if "blocks fp32 NCHW, eager" in names:
        pairs.append(ratio(comparison, "blocks fp32 NCHW, eager", EAGER))
    active = prescan(x, layer.block, out_channels=c)
    return {
        **timed(bench, comparison), "best_dense": dense, "best_ours": sparse_names, "ratios": pairs,
        "active_chunks": active.compute_active_ratio(),
        "zero_chunk_blocks": active.compute_zero_block_ratio(), "tiling": asdict(active.tiling),
    }  # fmt: skip


def run_group(bench: Bench, layer: Layer, x: torch.Tensor, seed: int, packed_variants: int) -> dict[str, Any]:
    """The comparison of convolution and LIF neurons over T.

    With `packed_variants` = 0 the block kernels stand beside the dense ones, otherwise that many packed ones.
    """
    lif: Any = importlib.import_module("training_lif_triton")
    bench.start()
    g = torch.Generator(bench.device).manual_seed(seed)
    c, images, size = layer.channels, layer.images, layer.size
    weight = on_grid((c, c, 3, 3), 96, g, bench.device)
    bias = on_grid((c,), 48, g, bench.device)
    neuron = NeuronSpec(alpha=1 - 1 / TAU, beta=1 / TAU, delta=0.0, v_threshold=1.0, v_reset=0.0)
    spec = GroupSpec(sources=(SpikeSource(weight=weight, padding=1),), bias=bias, neuron=neuron)
    sequence = x.view(layer.T, layer.batch, c, size, size)
    parts = [
        run_group_reference(spec, [part], dtype=torch.float64)[0].to(torch.bool)
        for part in sequence.split(4, dim=1)
    ]
    expected = torch.cat(parts, dim=1).flatten(0, 1)
    check = same_spikes(expected)
    per_step = layer.batch * c * size * size

    def fire(current: torch.Tensor) -> torch.Tensor:
        spikes = torch.empty_like(current)
        lif.forward_kernel[(-(-per_step // 1024),)](
            current, spikes, per_step, per_step, 1 / TAU, 1.0,
            T=layer.T, WIDE=images * c * size * size >= 2**31, BLOCK=1024,
        )  # fmt: skip
        return spikes

    def convolve_and_fire(conv: Callable[[], torch.Tensor]) -> Run:
        return lambda: fire(conv())

    bench.admit(
        EAGER, lambda: convolve_and_fire(lambda: F.conv2d(x, weight, bias, padding=1)), check, graph=False
    )
    for precision, layout in itertools.product(("fp32", "tf32", "fp16"), LAYOUTS):
        x_cast = x.to(DTYPE[precision]).contiguous(memory_format=LAYOUTS[layout])
        w, b = weight.to(x_cast.dtype), bias.to(x_cast.dtype)
        wd = w.contiguous(memory_format=LAYOUTS[layout])
        bench.admit(
            f"dense {precision} {layout}",
            lambda x=x_cast, wd=wd, b=b: convolve_and_fire(lambda: F.conv2d(x, wd, b, padding=1)),
            check,
            precision=precision,
        )  # fmt: skip
        if packed_variants:
            continue
        tf32 = precision == "tf32"
        bench.admit(
            f"blocks {precision} {layout}",
            lambda x=x_cast, w=w, b=b, tf32=tf32: convolve_and_fire(
                lambda: sparse_conv2d(x, w, b, block_size=layer.block, allow_tf32=tf32)
            ),
            check,
        )
    if packed_variants:
        admit_packed(bench, spec, sequence, expected, packed_variants)
    comparison = bench.compare(EAGER)
    names = list(comparison.times_ms)
    dense = fastest(comparison, [n for n in names if n.startswith("dense")])
    candidates = {
        kind: fastest(comparison, [n for n in names if n.startswith(kind)]) for kind in ("blocks", "packed")
    }
    sparse_names = [name for name in candidates.values() if name]
    pairs = [ratio(comparison, name, other) for name in sparse_names for other in (dense, EAGER) if other]
    return {
        **timed(bench, comparison), "ratios": pairs,
        "best_dense": dense, "best_ours": fastest(comparison, sparse_names),
        "output_rate": expected.double().mean().item(),
    }  # fmt: skip


def admit_packed(
    bench: Bench, spec: GroupSpec, sequence: torch.Tensor, expected: torch.Tensor, max_variants: int
) -> None:
    """Admit the packed kernel's default and further variants, for fp16 weights and for fp32 accuracy.

    Its input is packed beforehand: the kernel of the layer before writes it so, and this one's time holds
    the writing of its own packed output. Where silence is skipped, the input's activity words likewise come
    with it, and this kernel's time holds the writing of its own.
    """
    from sparseflow.spiking.backends.packed.format import PackedSpikes, add_activity, pack, unpack
    from sparseflow.spiking.backends.packed.hopper.group import HopperGroup

    t, n, c, h, w = sequence.shape
    shape: dict[str, Any] = {"T": t, "N": n, "H": h, "W": w, "device": bench.device}
    same = same_spikes(expected)

    def packed(data: torch.Tensor) -> PackedSpikes:
        return PackedSpikes(data=data, shape=(t, n, c, h, w))

    def check(actual: torch.Tensor) -> dict[str, float]:
        return same(unpack(packed(actual), torch.float32).flatten(0, 1))

    def make(parts: int, name: str, skips: bool) -> Run:
        group = HopperGroup(spec, parts=parts, variant=name, emit_activity=skips, **shape)
        inputs = [add_activity(pack(sequence)) if skips else pack(sequence)]
        return lambda: group(inputs)[0].data

    for parts, skips in ((1, False), (1, True), (2, False)):
        kind = f"packed x{parts}" + (", silence skipped" if skips else "")
        try:
            variants = HopperGroup.list_variants(spec, T=t, N=n, H=h, W=w, parts=parts)[:max_variants]
        except Exception as error:
            bench.errors[kind] = f"{type(error).__name__}: {error}"[:300]
            continue
        for name in (v.name for v in variants):
            bench.admit(
                f"{kind} {name}",
                lambda parts=parts, name=name, skips=skips: make(parts, name, skips),
                check,
                # every bit of the pixels; the border of the buffer is zero by contract and not written
                poison=lambda words: packed(words).pixels.fill_(-1),
            )


def floors(ceilings: Ceilings | None, layer: Layer, x: torch.Tensor) -> dict[str, float | None]:
    """Milliseconds at best on this GPU, by precision.

    `dense` does every operation, `sparse` only those that a spike takes part in; both read the input and
    write the output once. `packed` moves one bit a spike, for convolution and neuron together.
    """
    values, weights = 2 * x.numel(), layer.channels**2 * 9
    events = 2.0 * x.sum().item() * layer.channels * 9
    floors_ms: dict[str, float | None] = {}
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        moved = (values + weights) * DTYPE[precision].itemsize
        floors_ms[f"dense {precision}"] = floor_ms(ceilings, moved, layer.flops, precision)
        floors_ms[f"sparse {precision}"] = floor_ms(ceilings, moved, events, precision)
    floors_ms["packed"] = floor_ms(ceilings, values / 8 + 2 * weights, events, "fp16")
    return floors_ms


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    head = f"{row['name']:15s} {row['silent']:8s}{row['comparison']:6s}"
    if "failed" in row:
        return f"{head} failed: {row['failed'][:120]}"
    median, dense, candidate = row["median_ms"], row["best_dense"], row["best_ours"]
    text = f"{head} eager {median[EAGER]:7.3f}"
    if dense:
        text += f" | {dense:24s} {median[dense]:7.3f}"
    if candidate:
        prescan_name = candidate.replace("blocks", "prescan").replace("tf32", "fp32").replace("bf16", "fp16")
        scanned = f" (prescan {median[prescan_name]:.3f})" if prescan_name in median else ""
        text += f" | {candidate:24s} {median[candidate]:7.3f}{scanned}"
    for pair in row["ratios"][:2]:
        text += (
            f" | {pair['speedup']:.2f}x [{pair['low']:.2f}, {pair['high']:.2f}] {pair['other'].split()[0]}"
        )
    floor = row["floor_ms"]
    if floor["dense fp16"] is not None:
        names = ("dense fp16", "sparse fp32", "sparse fp16", "packed")
        text += " | floor " + ", ".join(f"{name} {floor[name]:.3f}" for name in names)
    flag = " FIRES UNDER 0.1 %" if row["rate"] < 1e-3 else ""
    return f"{text} | zero {row['zero_blocks']:.2%}, firing {row['rate']:.4%}{flag}"


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: fastest sparse kernel of each layer against dense and eager ones."""
    for row in record["rows"]:
        if not row.get("best_ours") or not row.get("best_dense"):
            continue
        dense_ms = {form: ms for form, ms in row["median_ms"].items() if form.startswith("dense")}
        dense, eager = min(dense_ms, key=dense_ms.__getitem__), "eager fp32 NCHW"
        name = slugify(f"{row['name']}-{row['silent']}-{row['comparison']}")
        columns = {
            key: value for key, value in row.items() if key not in ("samples_ms", "checks", "median_ms")
        }
        columns["samples_ms"] = {
            form: samples
            for form, samples in row["samples_ms"].items()
            if form in (dense, row["best_ours"], eager)
        }
        samples = write_samples(f"spiking/4-{name}.json", columns)
        for pair in row["ratios"]:
            if pair["ours"] != row["best_ours"] or pair["other"] not in (dense, eager):
                continue
            baseline = "eager" if pair["other"] == eager else "dense"
            yield Claim(
                id=f"spiking/4-{name}-{baseline}",
                claim=f"Speedup of {row['name']} with {100 * row['zero_blocks']:.1f} % zero blocks "
                f"({row['silent']}), {row['comparison']} kernel, over {baseline} execution.",
                value=round(pair["speedup"], 3),
                unit="x",
                baseline=pair["other"],
                command="python benchmarks/spiking/user_table.py --quick",
                samples=samples,
                details={"kernel": row["best_ours"], "floor_ms": round(min(row["floor_ms"].values()), 6)},
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all samples")
    parser.add_argument("--gpu", type=int, help="index; by default the GPU with most free memory")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to try the script; a CPU will do")
    parser.add_argument("--layers", default="", help="comma-separated names; all by default")
    parser.add_argument("--silent", choices=("channel", "group", "both"), default="both")
    parser.add_argument(
        "--rate", type=float, default=0.02, help="firing rate inside blocks that are not zero"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="also time other tile sizes of the block kernels"
    )
    parser.add_argument(
        "--packed-variants", type=int, default=4, help="of the packed kernel; 0 leaves it out"
    )
    parser.add_argument("--time-limit-s", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    layers = [
        layer
        for layer in (TINY if args.dry_run else LAYERS)
        if not args.layers or layer.name in args.layers.split(",")
    ]
    if not layers:
        parser.error(f"no layer is called {args.layers}; there are {', '.join(x.name for x in LAYERS)}")
    try:
        device = select_device(args.gpu)
    except SparseFlowError as error:
        parser.error(str(error))
    if device.type != "cuda" and not args.dry_run:
        parser.error("torch sees no GPU here; --dry-run tries the script without one")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rounds, calls, warmup = (1, 1, 0) if args.dry_run else (12, 4, 2) if args.quick else (25, 4, 2)
    bench = Bench(device, rounds=rounds, calls=calls, warmup=warmup, seed=args.seed)
    results = Results(args.out, device, vars(args), seed=args.seed, limit_s=args.time_limit_s)
    peaks = measured_ceilings(device)
    results.content["ceilings"] = asdict(peaks) if peaks else None
    silent = ("channel", "group") if args.silent == "both" else (args.silent,)
    # The packed kernel comes last: a variant that hangs then costs nothing that was measured before.
    kinds = ("conv", "group", "packed") if args.packed_variants else ("conv", "group")
    for kind, layer, grouping in itertools.product(kinds, layers, silent):
        row: dict[str, Any] = {"name": layer.name, "silent": grouping, "comparison": kind, **asdict(layer)}
        try:
            with torch.no_grad():
                x = draw_spikes(layer, CHANNELS_TOGETHER[grouping], args.rate, args.seed, device)
                row |= {
                    "rate": x.mean(dtype=torch.float64).item(),
                    "zero_blocks": zero_blocks(x, layer.block, CHANNELS_TOGETHER[grouping]),
                    "flops": layer.flops,
                    "floor_ms": floors(peaks, layer, x),
                }
                if kind == "conv":
                    row |= run_conv(bench, layer, x, args.seed + 1, args.sweep)
                else:
                    row |= run_group(
                        bench, layer, x, args.seed + 1, args.packed_variants if kind == "packed" else 0
                    )
        except Exception as error:  # the other rows are worth having
            row["failed"] = f"{type(error).__name__}: {error}"[:500]
        results.add(row)
        print(line(row), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
