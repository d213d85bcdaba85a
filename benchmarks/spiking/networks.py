"""Whole networks on a GPU against their strongest dense form.

::

    PYTHONPATH=src python benchmarks/spiking/networks.py --out networks.json --compiled --prepare 6 \\
        --case spiking_resnet50:4:32 --case spiking_resnet18:16:32 --case spiking_resnet18:4:32,silent=0.5 \\
        --trained runs/train/spk_w64 --test cifar10-test.tar.gz
    PYTHONPATH=src python benchmarks/spiking/networks.py --out grid.json --grid quick --prepare 12
    PYTHONPATH=src python benchmarks/spiking/networks.py --out exact.json --exact --trained …

What a case may say stands in ``network_cases.py``; ``--grid`` adds all of the grid, with the dense forms that
come into question for the fastest. Rows are kept in ``--out`` after each case; what is there already is not
measured again, unless it failed. Groups run in fp16, with ``--exact`` in float32, whose rows also hold the
errors of all forms against float64.

All forms are timed in turn in a few rounds; those near the fastest dense one, and the optimised network, then
in ``--rounds`` more. ``--prepare`` compiles the kernels of all cases in parallel processes first: compilers
keep what they made on disk.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from network_cases import Job, grid, parse, trained_job
from network_kernels import prepare, tidy

from sparseflow.core import timing
from sparseflow.core.files import write_atomic
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.api import layer_times, optimize
from sparseflow.spiking.explanation import explain
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.profile import bench
from sparseflow.spiking.profile.baselines import EAGER, FUSED_DENSE, Forward, build_baselines, make_stateless
from sparseflow.spiking.profile.bench import OPTIMIZED

CONTENDERS = (EAGER, "tf32 NCHW", "tf32 channels_last", "fp16 channels_last", FUSED_DENSE)
"""Beginnings of the dense forms' names that a grid is measured against."""

SCREENING_ROUNDS = 5
NEAR = 1.25
"""Dense forms up to this many times slower than the fastest in the screening are measured on."""

SAMPLE_MS = 8.0
MOST_CALLS = 20
ERROR_BATCHES = 16


class Phases:
    """Seconds that the parts of a case took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start_s, 3)


def peak_bytes(model: torch.nn.Module, x: torch.Tensor, base: int) -> int | None:
    """Peak bytes above `base` of a run of `model`, with everything that it holds; None on a CPU."""
    if not x.is_cuda:
        return None
    forward = make_stateless(model)
    forward(x)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(x.device)
    forward(x)
    return torch.cuda.max_memory_allocated(x.device) - base


def hits(forward: Forward, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """Fraction right over all batches, each from rest; None without any."""
    if not batches:
        return None
    right = sum(int((forward(x).argmax(-1) == labels).sum()) for x, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


def errors(
    model: torch.nn.Module, forms: dict[str, Forward], inputs: list[torch.Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error of every form's logits against float64, and how often both agree about the class."""
    double = make_stateless(copy.deepcopy(model).double())
    expected = [double(x.double()) for x in inputs]
    scale = math.sqrt(sum((y**2).sum().item() for y in expected))
    rows: dict[str, float] = {}
    agreed: dict[str, float] = {}

    def judge(name: str, form: Forward) -> None:
        pairs = [(form(x).double(), y) for x, y in zip(inputs, expected, strict=True)]
        rows[name] = math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in pairs)) / scale
        same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
        agreed[name] = same / sum(len(b) for _, b in pairs)

    for name, form in forms.items():
        judge(name, form)
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        judge(f"{EAGER}, without TF32", forms[EAGER])
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    return rows, agreed


def compare(forms: dict[str, Forward], x: torch.Tensor, rounds: int, calls: int) -> timing.Comparison:
    """Time forms in turn."""
    return timing.compare(
        {name: lambda form=form: form(x) for name, form in forms.items()},
        baseline=OPTIMIZED,
        rounds=rounds,
        warmup=1,
        device=str(x.device),
        calls_per_sample=calls,
    )


def fastest_dense(comparison: timing.Comparison) -> str:
    """The fastest form that people have without SparseFlow."""
    names = [name for name in comparison.times_ms if name not in (OPTIMIZED, FUSED_DENSE)]
    return min(names, key=lambda name: comparison.samples(name).median_ms)


def finalists(comparison: timing.Comparison, *, eager: bool) -> list[str]:
    """Forms worth all rounds, `eager` among them or only if it is fast."""
    limit = NEAR * comparison.samples(fastest_dense(comparison)).median_ms
    always = {OPTIMIZED, FUSED_DENSE, *([EAGER] if eager else [])}
    return [
        name for name in comparison.times_ms if name in always or comparison.samples(name).median_ms <= limit
    ]


def calls_for(form: Forward, x: torch.Tensor) -> int:
    """Calls a sample: enough to hide how an idle GPU starts, and no more."""
    if not x.is_cuda:
        return 1
    ms = timing.measure(lambda: form(x), warmup=2, repeats=3, device=x.device).median_ms
    return min(max(math.ceil(SAMPLE_MS / ms), 3), MOST_CALLS)


def measure(job: Job, args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """One case: times, agreement, memory, and where its own time went."""
    phase = Phases()
    dtype = args.dtype
    with phase("build"):
        model, x, labels = job.build(args.device)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    if labels is not None:
        full = len(x) // job.batch * job.batch  # CUDA graphs are captured for one shape
        batches = list(zip(x[:full].split(job.batch), labels[:full].split(job.batch), strict=True))
    inputs = [b for b, _ in batches] or [x]
    x = inputs[0]
    base = torch.cuda.memory_allocated(args.device) if x.is_cuda else 0
    optimized_model = copy.deepcopy(model)
    with phase("as it is"):
        expected = make_stateless(optimized_model)(x)
        eager_bytes = peak_bytes(optimized_model, x, base)
        before = hits(make_stateless(optimized_model), batches)
    with phase("optimise"):
        optimize(optimized_model, x, dtype=dtype, cache=cache)
        optimised_bytes = peak_bytes(optimized_model, x, base)
    with phase("dense forms"):
        forms = build_baselines(model, analyze(model), x, compile=args.compiled)
        if job.grid:
            forms = {k: v for k, v in forms.items() if k.startswith(CONTENDERS) or "compiled" in k}
        if args.exact:
            # Half precision is no rival where float32 accuracy was asked for.
            forms = {k: v for k, v in forms.items() if "16" not in k}
        forms = bench.warm_up(forms, (x,), lambda message, part: None)
        forms[OPTIMIZED] = make_stateless(optimized_model)
    with phase("screening"):
        calls = calls_for(forms[OPTIMIZED], x)
        screening = compare(forms, x, SCREENING_ROUNDS, calls)
    with phase("rounds"):
        final_names = {name: forms[name] for name in finalists(screening, eager=not job.grid)}
        final = compare(final_names, x, args.rounds, calls)
    baseline = fastest_dense(final)
    against_eager = final if EAGER in final_names else screening
    with phase("checks"):
        state, output = get_accelerated_forward(optimized_model), forms[OPTIMIZED](x)
        fed = list(state.firing.values())
        row: dict[str, Any] = {
            **job.facts(),
            "dtype": str(dtype),
            "compiled": args.compiled,
            "command": f"python benchmarks/spiking/networks.py {' '.join(sys.argv[1:])}",
            "latency_ms": {
                name: (final if name in final_names else screening).samples(name).median_ms for name in forms
            },
            "baseline": baseline,
            "speedup": vars(final.speedup(OPTIMIZED, baseline=baseline)),
            "speedup_our_dense": vars(final.speedup(OPTIMIZED, baseline=FUSED_DENSE))
            if FUSED_DENSE in final_names
            else None,
            "speedup_eager": vars(against_eager.speedup(OPTIMIZED, baseline=EAGER)),
            "samples": {name: list(times) for name, times in final.times_ms.items()},
            "screening": {name: list(times) for name, times in screening.times_ms.items()},
            "calls_per_sample": calls,
            "top1_agreement": (output.argmax(-1) == expected.argmax(-1)).float().mean().item(),
            "images_for_accuracy": sum(len(b) for b, _ in batches),
            "accuracy_before": before,
            "accuracy_after": hits(forms[OPTIMIZED], batches),
            "memory_eager_bytes": eager_bytes,
            "memory_optimised_bytes": optimised_bytes,
            "firing_rate": _mean([a.firing_rate for a in fed]),
            "zero_block_ratio": _mean([a.zero_block_ratio for a in fed]),
            "silent_channels": _mean([a.silent_channels for a in fed]),
            "nearly_silent": [layer.name for layer in explain(optimized_model).layers if layer.warning],
            "whole": state.network_decision.model_dump() if state.network_decision else None,
            "decisions": {k: v.model_dump() for k, v in state.decisions.items()},
            "layer_ms": layer_times(optimized_model, x),
        }
    if args.exact or args.reference:
        with phase("errors"):
            row["errors"], row["agreement"] = errors(model, forms, inputs[:ERROR_BATCHES])
            row["images_for_errors"] = sum(len(b) for b in inputs[:ERROR_BATCHES])
            row["error_eager"], row["error_optimised"] = row["errors"][EAGER], row["errors"][OPTIMIZED]
    if args.energy:
        with phase("energy"):
            row["energy_j"] = bench.measure_energy({n: forms[n] for n in (EAGER, baseline, OPTIMIZED)}, (x,))
    return row | {"seconds": phase.seconds}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def line(row: dict[str, Any], *, seconds: bool = False) -> str:
    """One row of the table."""
    if "error" in row:
        return f"{row['case']:34} FAILED {row['error'][:150]}"
    ms, base = row["latency_ms"], row["baseline"]
    speed, eager, optimized_ms = row["speedup"], row["speedup_eager"], row["speedup_our_dense"]
    ways = [d["choice"] for d in row["decisions"].values()]
    parts = [
        f"{row['case']:34} {row['dtype'][6:]:8} {ms[EAGER]:8.3f} {ms[base]:8.3f} {ms[OPTIMIZED]:8.3f} ms",
        f"{speed['median']:5.2f}x ({speed['low']:.2f}-{speed['high']:.2f}) of [{base}]",
        f"{optimized_ms['median']:.2f}x of our dense" if optimized_ms else "",
        f"eager {eager['median']:.2f}x",
        f"top1 {row['top1_agreement']:.3f} sparse {ways.count('sparse')}/{len(ways)}",
        f"firing {row['firing_rate'] or 0:.3f} silent {row['silent_channels'] or 0:.3f}",
    ]
    if row["accuracy_before"] is not None:
        parts.append(f"acc {row['accuracy_before']:.4f} {row['accuracy_after']:.4f}")
    if row["memory_eager_bytes"]:
        mib = [row[f"memory_{k}_bytes"] / 2**20 for k in ("eager", "optimised")]
        parts.append(f"mem {mib[0]:.0f}->{mib[1]:.0f} MiB")
    if "errors" in row:
        parts.append(f"error {row['error_eager']:.2e} {row['error_optimised']:.2e}")
    parts.append(f"{sum(row['seconds'].values()):.1f} s")
    if seconds:
        parts.append(", ".join(f"{name} {value:.1f}" for name, value in row["seconds"].items()))
    return " ".join(filter(None, parts))


def kept_rows(out: Path) -> list[dict[str, Any]]:
    """Rows of an earlier run that need not be measured again."""
    if not out.exists():
        return []
    return [row for row in json.loads(out.read_text())["rows"] if "error" not in row]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU; no result to keep")
    parser.add_argument(
        "--case", type=parse, action="append", default=[], help="model:T:batch[:image][,key=value…]"
    )
    parser.add_argument("--grid", choices=["quick", "full"], help="10 classes, or 10 and 100")
    parser.add_argument(
        "--trained", action="append", default=[], help="folder of train_cifar10.py[,steps=16][,silent=0.5]"
    )
    parser.add_argument("--test", type=Path)
    parser.add_argument("--batch", type=int, default=32, help="of trained networks")
    parser.add_argument("--images", type=int, default=2048, help="test images for a trained one's accuracy")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiled", action="store_true", help="let the dense side use torch.compile too")
    parser.add_argument("--exact", action="store_true", help="keep float32 accuracy instead of fp16")
    parser.add_argument("--reference", action="store_true", help="errors against float64 without --exact too")
    parser.add_argument("--energy", action="store_true", help="joules a batch, about 7 s a case")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile in N processes first")
    parser.add_argument("--seconds", action="store_true", help="print where each case's own time went")
    parser.add_argument(
        "--list", action="store_true", help="print the cases that are to be measured, and end"
    )
    parser.add_argument("--time-limit-s", type=float, default=500.0, help="start no case after this long")
    args = parser.parse_args(argv)
    if args.trained and args.test is None:
        parser.error("--trained needs --test, the archive of test images")
    if not (args.case or args.trained or args.grid):
        parser.error("there is nothing to measure: give --case, --trained or --grid")
    args.device = torch.device("cpu") if args.cpu else torch.device("cuda", args.gpu)
    args.dtype = None if args.exact or args.cpu else torch.float16
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    start_s = time.monotonic()
    jobs = [trained_job(run, args.test, args.batch, args.images) for run in args.trained]
    jobs += args.case + (grid(args.grid) if args.grid else [])
    rows = kept_rows(args.out)
    have = {(row["case"], row["dtype"]) for row in rows}
    jobs = [job for job in jobs if (job.name, str(args.dtype)) not in have]
    if args.list:
        print("\n".join(job.name for job in jobs))
        return
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
        torch.backends.cudnn.benchmark = True
    if args.prepare and jobs:
        prepare(jobs, args, limit_s=args.time_limit_s / 2)
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        for completed, job in enumerate(jobs):
            if time.monotonic() - start_s > args.time_limit_s:
                print(f"not started for lack of time: {', '.join(j.name for j in jobs[completed:])}")
                break
            # Equal layers share what was decided about them, unless some of their channels are silent.
            cache = Path(folder) / f"{job.silent:g}.json"
            try:
                rows.append(measure(job, args, cache))
            except Exception as error:
                # The other cases go on; what failed stands in the results.
                traceback.print_exc(limit=-6)
                failed = {"dtype": str(args.dtype), "error": f"{type(error).__name__}: {error}"}
                rows.append(job.facts() | failed)
            print(line(rows[-1], seconds=args.seconds), flush=True)
            facts = {"device": device, "torch": torch.__version__, "argv": sys.argv[1:]}
            write_atomic(args.out, json.dumps({**facts, "rows": rows}))
            tidy(args)


if __name__ == "__main__":
    main()
