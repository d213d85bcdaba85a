r"""Plans of a pruned video transformer against their execution on several devices, one process per device.

::

    export PYTHONPATH=src:.
    python benchmarks/codesign/reality.py --device cuda --slots 2 --dtype bfloat16 \
        --out results/codesign/reality-2.json

Layers are measured on one device in passes over the full model: passes of one batch, and passes of
consecutive batches, in which launches overlap with computation. The link between two processes is measured
with messages of several sizes. Two plans are made from these measurements alone: a pipeline for throughput,
from the layer times of consecutive batches, and a plan for the latency of one batch, with split layers. Both
plans are then executed. The latency is predicted from the first kind of passes and the period from the
second.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from frame import finish_record, logits_tolerance, make_parser, start_record
from torch import nn

from benchmarks.claims import Claim
from benchmarks.codesign.layer_times import layer_times
from benchmarks.codesign.link_probe import probe
from sparseflow.codesign.execution import PipelineTiming, RankExecutor, launch
from sparseflow.codesign.execution.verification import compute_error, run_unpartitioned
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping import MappingSolver
from sparseflow.codesign.partition.objective import LayerCosts, Mode, PartCosts, evaluate_plan
from sparseflow.codesign.partition.planner import PartitionPlan, PartitionPlanner
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.codesign.report.timeline import simulate_pipeline
from sparseflow.core.device import describe_device
from sparseflow.core.layers import LayerNode, Splittable
from sparseflow.core.timing import measure
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT

Samples = list[list[float]]
"""Milliseconds, [passes][layers]."""


def make_model(args: argparse.Namespace) -> LayeredVideoViT:
    """Create the pruned model on the CPU, with the same weights in every process."""
    torch.manual_seed(args.seed)
    model = VideoViT(
        args.size, args.frames, 101, args.dim, args.depth, args.heads, 4, 16,
        use_ast_prune=True, ast_cfg={"selector": "ast", "stages": {1: args.keep}},
    )  # fmt: skip
    return LayeredVideoViT(compact(model).to(getattr(torch, args.dtype)))


def clips(args: argparse.Namespace) -> torch.Tensor:
    shape = (args.batch, args.frames, 3, args.size, args.size)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(args.seed))
    return values.to(getattr(torch, args.dtype))


def layer_costs(
    args: argparse.Namespace, steps: LayeredVideoViT, network: Network, samples_ms: Samples
) -> LayerCosts:
    """Costs of the layers as measured on one device; all slots are equal."""
    layers = tuple(steps.describe_layers(args.batch))
    latency = np.median(np.array(samples_ms), axis=0)
    return LayerCosts(
        layers=layers, latency_ms=np.repeat(latency[:, None], args.slots, 1),
        power_w=np.zeros((len(layers), args.slots)),
        memory_mb=np.array([layer.memory_bytes / 1e6 for layer in layers]),
        limit_mb=np.full(args.slots, describe_device(args.device).memory_bytes / 1e6),
        idle_w=np.zeros(args.slots), network=network,
    )  # fmt: skip


class Parts:
    """Measured times of the parts of a layer, cached.

    Home also does what of the layer is not split: its norm, what its stage drops, and the sum.
    """

    def __init__(self, args: argparse.Namespace, steps: LayeredVideoViT, costs: LayerCosts) -> None:
        self._args, self._steps, self._costs = args, steps, costs
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
        full = float(self._costs.latency_ms[layer.id, slots[0]])
        elapsed_ms = [self._ms(layer, size) for size in sizes]
        elapsed_ms[0] += max(0.0, full - self._ms(layer, layer.units))
        count = len(sizes)
        return PartCosts(
            latency_ms=tuple(elapsed_ms),
            power_w=(0.0,) * count,
            memory_mb=(layer.memory_bytes / 1e6,) * count,
        )

    def _ms(self, layer: LayerNode, size: int) -> float:
        if (layer.id, size) not in self._known:
            args, module = self._args, self._steps.get_layer(layer.id)
            device, dtype = torch.device(args.device), getattr(torch, args.dtype)
            if isinstance(module, nn.Linear):
                part, width = nn.Linear(module.in_features, size), module.in_features
            else:
                assert isinstance(module, Splittable)
                part, width = module.slice_units(torch.arange(size), bias=True), layer.embed_dim
            tokens = () if layer.layer_type == "head" else (layer.seq_len,)
            x = torch.randn(args.batch, *tokens, width, device=device, dtype=dtype)
            moved = part.to(device, dtype)
            with torch.no_grad():
                timing = measure(lambda: moved(x), warmup=3, repeats=15, device=device)
            self._known[layer.id, size] = timing.median_ms
        return self._known[layer.id, size]


def run(
    args: argparse.Namespace, assignment: list[int], plan: PartitionPlan, device: torch.device
) -> tuple[PipelineTiming, Any]:
    """Run and time the slot of this process; return its logits on the last slot."""
    batch = clips(args).to(device)
    with RankExecutor(make_model(args), assignment, plan.rewrite_plan, device=device) as executor:
        outputs = executor.run([batch])
        timed = executor.measure(batch, repeats=args.repeats, num_batches=args.batches, warmup=5)
        return timed, (outputs[0].cpu() if outputs else None)


def reference(args: argparse.Namespace) -> tuple[torch.Tensor, float]:
    """Return the logits of the full model on one device and its time per batch, ms."""
    device = torch.device(args.device)
    steps = make_model(args)
    moved, batch = (
        steps.select_layers([layer.id for layer in steps.describe_layers(1)], device),
        clips(args).to(device),
    )
    timing = measure(lambda: run_unpartitioned(moved, batch), repeats=args.repeats, device=device)
    return run_unpartitioned(moved, batch).cpu(), timing.median_ms


def priced(plan: PartitionPlan, costs: LayerCosts, parts: Parts) -> PartitionPlan:
    """Evaluate the same plan at other costs."""
    total = {
        layer: (split, parts(costs.layers[layer], split.sizes, split.slots))
        for layer, (split, _) in plan.splits.items()
    }
    return dataclasses.replace(
        plan, hw_stats=evaluate_plan(costs, plan.assignment, total, plan.weights),
        part_costs={layer: item for layer, (_, item) in total.items()},
    )  # fmt: skip


def case(
    args: argparse.Namespace,
    name: str,
    first: PartitionPlan,
    costs: LayerCosts,
    plan: PartitionPlan,
    expected: torch.Tensor,
) -> dict[str, Any]:
    """Compare a plan with its execution.

    Args:
        asked: The command's arguments.
        name: Of the case.
        one: The plan at costs of one batch alone.
        costs: Of layers with batches behind each other.
        plan: The same plan at these.
        wanted: Logits of the whole model.
    """
    assignment = list(plan.assignment)
    results = launch(
        partial(run, args, assignment, plan), len({*assignment, *_parts(plan)}), device=args.device
    )
    measured = results[0][0]
    logits = next(result for _, result in results if result is not None)
    latency = statistics.median(measured.latency_ms) - measured.token_ms
    period = statistics.median(measured.period_ms)
    planned = simulate_pipeline(costs, plan)
    return {
        "case": name, "homes": assignment,
        "splits": [dataclasses.asdict(split) | {"permutation": None} for split, _ in plan.splits.values()],
        "predicted_ms": {"latency": first.hw_stats.serial_ms, "period": planned.period_ms},
        "measured_ms": {"latency": latency, "period": period},
        "samples_ms": {"latency": list(measured.latency_ms), "period": list(measured.period_ms)},
        "token_ms": measured.token_ms,
        "error": {
            "latency": abs(first.hw_stats.serial_ms / latency - 1.0),
            "period": abs(planned.period_ms / period - 1.0),
        },
        "planned_bytes": plan.hw_stats.comm_bytes, "moved_bytes": sum(measured.moved_bytes.values()),
        "logits_error": compute_error(logits, expected), "logits_equal": bool(torch.equal(logits, expected)),
        "clips_per_s": 1e3 * args.batch / period,
    }  # fmt: skip


def _rounded(samples_ms: Samples) -> Samples:
    """Round to microseconds, to keep the file small."""
    return [[round(item, 3) for item in row] for row in samples_ms]


def _parts(plan: PartitionPlan) -> list[int]:
    return [slot for split, _ in plan.splits.values() for slot in split.slots]


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: plans against their execution on several devices."""
    settings = record["settings"]
    slots, batch = settings["slots"], settings["batch"]
    command = (
        f"python benchmarks/codesign/reality.py --device {settings['device']} --slots {slots} --dtype "
        f"{settings['dtype']} --batch {batch}"
    )
    for case in record["cases"]:
        splits = f", {len(case['splits'])} split layers" if case["splits"] else ""
        # A plan with split layers optimizes the latency of a single batch.
        for quantity in ("latency",) if case["splits"] else ("latency", "period"):
            yield Claim(
                id=f"codesign/6-{case['case']}-{quantity}-{slots}-b{batch}",
                claim=f"Error of the predicted {quantity} of a pruned ViT-B on {slots} devices, batch {batch}"
                f"{splits}.",
                value=round(100.0 * case["error"][quantity], 1),
                unit="%",
                target="<= 15",
                baseline="measured",
                command=command,
                details={
                    "predicted_ms": round(case["predicted_ms"][quantity], 3),
                    "measured_ms": round(case["measured_ms"][quantity], 3),
                    "one_device_ms": round(record["one_device_ms"]["measured"], 3),
                },
            )
        tolerance = logits_tolerance(settings["dtype"], split=bool(case["splits"]))
        yield Claim(
            id=f"codesign/6-{case['case']}-logits-{slots}-b{batch}",
            claim=f"Largest relative difference of logits from the unpartitioned model on {slots} devices, "
            f"{settings['dtype']}, batch {batch}{splits}.",
            value=case["logits_error"],
            unit="relative",
            target=f"<= {tolerance:g}",
            baseline="the unpartitioned model",
            command=command,
            details={"moved_bytes": case["moved_bytes"], "planned_bytes": case["planned_bytes"]},
        )


def main() -> int:
    parser = make_parser(__doc__, seed="weights and clips")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--batches", type=int, default=60)
    args = parser.parse_args()
    steps = make_model(args)
    link, samples = launch(probe, args.slots, device=args.device)[0]
    print(f"link: {link.bandwidth / 1e9:.1f} GB/s, {link.latency_us:.1f} us", flush=True)
    network = Network.all_to_all(link, np.zeros((args.slots, args.slots)))
    moved = steps.select_layers([layer.id for layer in steps.describe_layers(1)], torch.device(args.device))
    batch = clips(args).to(args.device)
    layers_ms, costs, parts = {}, {}, {}
    for name, behind in (("alone", False), ("behind", True)):
        layers_ms[name] = layer_times(
            moved, batch, device=args.device, passes=args.repeats, warmup=10, behind=behind
        )
        costs[name] = layer_costs(args, steps, network, layers_ms[name])
        parts[name] = Parts(args, steps, costs[name])
        elapsed_ms = costs[name].latency_ms[:, 0].sum()
        print(
            f"one device, layers of batches {name}: {elapsed_ms:.3f} ms a batch of {args.batch}", flush=True
        )
    del moved
    expected, alone_ms = reference(args)
    print(f"one device, whole, one batch alone: {alone_ms:.3f} ms", flush=True)
    config = PartitionConfig(segments=len(steps.describe_layers(1)), min_split_gain_ratio=0.01, w_comm=0.0,
                             w_balance=0.0, flops_ratio_thresh=0.03, max_split_layers=8)  # fmt: skip
    rows = []
    cases: tuple[tuple[str, Mode, str], ...] = (
        ("pipeline", "balanced", "behind"),
        ("split", "serial", "alone"),
    )
    for name, mode, by in cases:
        solver = MappingSolver(strategy="dp" if mode == "balanced" else "auto", mode=mode)
        planner = PartitionPlanner(solver, LayerHwProxy.analytic(), config)
        plan = planner.plan_from_costs(costs[by], parts[by], use_fine_split=mode == "serial")
        if len({*plan.assignment, *_parts(plan)}) < 2:
            print(f"{name}: the plan uses one device", flush=True)
            continue
        first, large = (priced(plan, costs[row], parts[row]) for row in ("alone", "behind"))
        row = case(args, name, first, costs["behind"], large, expected)
        kind = "period" if mode == "balanced" else "latency"
        row["speedup"] = {
            "of": kind, "predicted": costs[by].latency_ms[:, 0].sum() / row["predicted_ms"][kind],
            "measured": alone_ms / row["measured_ms"][kind],
        }  # fmt: skip
        rows.append(row)
        for kind in ("latency", "period"):
            print(
                f"{name:9s} {kind:8s} predicted {row['predicted_ms'][kind]:8.3f} ms, measured "
                f"{row['measured_ms'][kind]:8.3f} ms, off by {row['error'][kind]:.1%}", flush=True,
            )  # fmt: skip
        print(f"{name:9s} {len(row['splits'])} splits, logits differ by {row['logits_error']:.1e}, bytes "
              f"{row['moved_bytes']} (planned {row['planned_bytes']})", flush=True)  # fmt: skip
    record = {
        **start_record(args, device=args.device),
        "link": link.model_dump(), "link_samples_ms": {str(size): values for size, values in samples.items()},
        "layers": [layer.name for layer in steps.describe_layers(1)],
        "layers_ms": {name: _rounded(passes) for name, passes in layers_ms.items()},
        "one_device_ms": {"measured": alone_ms}, "cases": rows,
    }  # fmt: skip
    wrong = []
    for row in rows:
        if row["planned_bytes"] != row["moved_bytes"]:
            wrong.append(f"{row['case']}: other bytes were moved than planned")
        if row["logits_error"] > logits_tolerance(args.dtype, split=bool(row["splits"])):
            wrong.append(f"{row['case']}: logits differ by {row['logits_error']:.1e}")
    return finish_record(args, record, wrong, make_claims)


if __name__ == "__main__":
    sys.exit(main())
