"""Sparse Linear and BatchNorm kernels beside cuBLAS and ATen: why those layers are not replaced.

Every candidate is checked against float64 before and inside its CUDA graph; all samples are kept.

    PYTHONPATH=src python benchmarks/spiking/not_replaced.py --out runs/not_replaced.json --quick
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from replay import DTYPE, Bench, Results, close_to, fastest, floor_ms, measured_ceilings, ratio, timed
from sparse_batchnorm import BLOCK, run_batchnorm2d_reference, sparse_batchnorm2d
from sparse_linear import FEATURES, ROWS, run_linear_reference, sparse_linear

from sparseflow.core.device import select_device
from sparseflow.core.device.ceilings import Ceilings
from sparseflow.errors import SparseFlowError


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer with one kind of input.

    Attributes:
        name: What it is.
        shape: [M, K, N] of a linear layer, [N, C, H, W] of a BatchNorm.
        zero: Fraction of chunks (blocks) that are all zero.
        rate: Fraction of non-zeros in the others.
    """

    name: str
    shape: tuple[int, ...]
    zero: float
    rate: float


def linear_cases(quick: bool, tiny: bool) -> Iterator[Case]:
    """Classifiers of ResNets and a wide hidden layer, T x batch rows."""
    shapes = {
        "resnet18 head, T=4, batch 32": (128, 512, 10),
        "resnet50 head, T=16, batch 32": (512, 2048, 100),
    }
    if not quick:
        shapes |= {
            "resnet18 head, T=16, batch 32": (512, 512, 100),
            "vgg hidden, T=4, batch 32": (128, 4096, 4096),
        }
    if tiny:
        shapes = {"tiny": (20, 70, 10)}
    for name, shape in shapes.items():
        for zero, rate in ((1.0, 0.0), (0.9, 0.05), (0.0, 0.05)):
            yield Case(name=name, shape=shape, zero=zero, rate=rate)


def batchnorm_cases(quick: bool, tiny: bool) -> Iterator[Case]:
    """BatchNorms of a ResNet, T=4, batch 32."""
    shapes = {"56² x 64": (128, 64, 56, 56), "14² x 256": (128, 256, 14, 14)}
    if not quick:
        shapes |= {"28² x 128": (128, 128, 28, 28), "7² x 512": (128, 512, 7, 7)}
    if tiny:
        shapes = {"tiny": (2, 8, 12, 11)}
    for name, shape in shapes.items():
        for zero, rate in ((1.0, 0.0), (0.9, 0.05), (0.0, 0.05)):
            yield Case(name=name, shape=shape, zero=zero, rate=rate)


def spikes(case: Case, seed: int, device: torch.device) -> torch.Tensor:
    """float32 input of a case; silence comes in the very chunks that the kernels look at."""
    g = torch.Generator(device).manual_seed(seed)
    shape = case.shape[:2] if len(case.shape) == 3 else case.shape
    x = (torch.rand(shape, generator=g, device=device) < case.rate).float()
    if len(case.shape) == 3:
        m, k = shape
        grid = torch.rand((-(-m // ROWS), -(-k // FEATURES)), generator=g, device=device) >= case.zero
        return x * grid.repeat_interleave(ROWS, 0)[:m].repeat_interleave(FEATURES, 1)[:, :k]
    grid = torch.rand(-(-x.numel() // BLOCK), generator=g, device=device) >= case.zero
    return x * grid.repeat_interleave(BLOCK)[: x.numel()].view(shape)


def run_linear(bench: Bench, case: Case, seed: int) -> str:
    """Admit cuBLAS and ours in three precisions; returns the baseline's name."""
    g = torch.Generator(bench.device).manual_seed(seed)
    _, k, n = case.shape
    x = spikes(case, seed + 1, bench.device)
    weight = torch.randn((n, k), generator=g, device=bench.device) / k**0.5
    bias = torch.randn(n, generator=g, device=bench.device)
    for precision in ("fp32", "tf32", "fp16"):
        w, b = weight.to(DTYPE[precision]), bias.to(DTYPE[precision])
        x_cast = x.to(w.dtype)
        check = close_to(run_linear_reference(x_cast, w, b), precision)
        bench.admit(
            f"cuBLAS {precision}", lambda x=x_cast, w=w, b=b: lambda: F.linear(x, w, b), check,
            precision=precision,
        )  # fmt: skip
        bench.admit(
            f"sparse {precision}",
            lambda x=x_cast, w=w, b=b, p=precision: lambda: sparse_linear(x, w, b, allow_tf32=p == "tf32"),
            check,
            precision=precision,
        )
    return "cuBLAS fp32"


def run_batchnorm(bench: Bench, case: Case, seed: int) -> str:
    """Admit ATen and ours in two dtypes and memory formats; returns the baseline's name."""
    g = torch.Generator(bench.device).manual_seed(seed)
    x = spikes(case, seed + 1, bench.device)
    c = case.shape[1]
    mean, weight, bias = (torch.randn(c, generator=g, device=bench.device) for _ in range(3))
    var = torch.rand(c, generator=g, device=bench.device) + 0.1
    for precision, layout in (("fp32", "NCHW"), ("fp16", "channels_last")):
        x_cast = x.to(DTYPE[precision])
        # made silent in memory order, so that the blocks the kernel looks at are the silent ones
        if layout == "channels_last":
            n, _, h, w = x_cast.shape
            x_cast = x_cast.flatten().view(n, h, w, c).permute(0, 3, 1, 2)
        check = close_to(run_batchnorm2d_reference(x_cast, mean, var, weight, bias), precision)
        bench.admit(
            f"ATen {precision} {layout}",
            lambda x=x_cast: lambda: F.batch_norm(x, mean, var, weight, bias),
            check, precision=precision,
        )  # fmt: skip
        bench.admit(
            f"sparse {precision} {layout}",
            lambda x=x_cast: lambda: sparse_batchnorm2d(x, mean, var, weight, bias), check,
            precision=precision,
        )  # fmt: skip
    return "ATen fp32 NCHW"


def floors(ceilings: Ceilings | None, kind: str, case: Case) -> dict[str, float | None]:
    """Milliseconds at best, by precision: what dense and sparse kernels must move and do alike."""
    if kind == "linear":
        m, k, n = case.shape
        values, flops = m * k + n * k + m * n, 2.0 * m * k * n
        return {p: floor_ms(ceilings, values * DTYPE[p].itemsize, flops, p) for p in ("fp32", "tf32", "fp16")}
    values = 2 * math.prod(case.shape)
    return {p: floor_ms(ceilings, values * DTYPE[p].itemsize, 0.0, p) for p in ("fp32", "fp16")}


def run_case(bench: Bench, kind: str, case: Case, seed: int) -> dict[str, Any]:
    """Time one case; its row, with the fastest of either side."""
    bench.start()
    baseline = run_linear(bench, case, seed) if kind == "linear" else run_batchnorm(bench, case, seed)
    comparison = bench.compare(baseline)
    pairs = [
        ratio(comparison, name, name.replace("sparse", "cuBLAS" if kind == "linear" else "ATen"))
        for name in comparison.times_ms
        if name.startswith("sparse")
    ]
    library = fastest(comparison, [n for n in comparison.times_ms if not n.startswith("sparse")])
    sparse_name = fastest(comparison, [n for n in comparison.times_ms if n.startswith("sparse")])
    if library and sparse_name:
        pairs.append(ratio(comparison, sparse_name, library))
    return {**timed(bench, comparison), "ratios": pairs}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all samples")
    parser.add_argument("--gpu", type=int, help="index; by default the GPU with most free memory")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and samples")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to try the script; a CPU will do")
    parser.add_argument("--time-limit-s", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        device = select_device(args.gpu)
    except SparseFlowError as error:
        parser.error(str(error))
    if device.type != "cuda" and not args.dry_run:
        parser.error("torch sees no GPU here; --dry-run tries the script without one")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rounds, calls, warmup = (2, 1, 0) if args.dry_run else (15, 20, 2) if args.quick else (40, 20, 2)
    bench = Bench(device, rounds=rounds, calls=calls, warmup=warmup, seed=args.seed)
    results = Results(args.out, device, vars(args), seed=args.seed, limit_s=args.time_limit_s)
    peaks = measured_ceilings(device)
    results.content["ceilings"] = asdict(peaks) if peaks else None
    for kind, cases in (("linear", linear_cases), ("batchnorm", batchnorm_cases)):
        for case in cases(args.quick, args.dry_run):
            row: dict[str, Any] = {
                "name": f"{kind}: {case.name}", "kind": kind, "shape": list(case.shape),
                "zero_chunks": case.zero, "rate": case.rate,
                "floor_ms": floors(peaks, kind, case),
            }  # fmt: skip
            try:
                with torch.no_grad():
                    row |= run_case(bench, kind, case, args.seed)
                summary = "  ".join(
                    f"{p['ours']} {p['speedup']:.2f}x of {p['other'].split()[0]}" for p in row["ratios"]
                )
            except Exception as error:  # the other cases are worth having
                row["failed"] = summary = f"{type(error).__name__}: {error}"[:500]
            results.add(row)
            print(f"{row['name']:42s} {case.zero:4.0%} zero  {summary}", flush=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
