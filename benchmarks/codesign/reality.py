r"""A pruned video transformer on several devices, a process each: plans against what is measured (line 6).

::

    export PYTHONPATH=src:.
    python benchmarks/codesign/reality.py --device cuda --slots 2 --dtype bfloat16 \
        --out results/codesign/reality-2.json

Layers are measured on one device, in passes over the whole model: of one batch alone, and of batches right
behind each other, where launches hide behind work. The link between two processes is measured by messages of
several sizes. From these figures alone come the plans: a pipeline for throughput, by the layers of batches
behind each other, and a plan for the latency of one batch alone, in which layers are split. Then both run.
What one batch takes is predicted by the first figures, and how soon the next follows by the second.
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
from frame import begun, ended, logits_tolerance, options
from benchmarks.codesign.layer_times import layer_times
from benchmarks.codesign.link_probe import probe
from torch import nn

from benchmarks.claims import Claim
from sparseflow.codesign.execution import Measured, RankExecutor, launch
from sparseflow.codesign.execution.verification import error_of, whole
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping import MappingSolver
from sparseflow.codesign.partition.objective import Costs, Mode, PartCosts, evaluate
from sparseflow.codesign.partition.planner import PartitionPlanner, Plan
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.codesign.report.timeline import play
from sparseflow.core.device import describe_device
from sparseflow.core.layers import LayerNode, Splittable
from sparseflow.core.timing import measure
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.steps import Steps

Samples = list[list[float]]
"""Milliseconds, [passes][layers]."""


def made(asked: argparse.Namespace) -> Steps:
    """The pruned model, with the same weights in every process, on the CPU."""
    torch.manual_seed(asked.seed)
    model = VideoViT(
        asked.size, asked.frames, 101, asked.dim, asked.depth, asked.heads, 4, 16,
        use_ast_prune=True, ast_cfg={"selector": "ast", "stages": {1: asked.keep}},
    )  # fmt: skip
    return Steps(compact(model).to(getattr(torch, asked.dtype)))


def clips(asked: argparse.Namespace) -> torch.Tensor:
    shape = (asked.batch, asked.frames, 3, asked.size, asked.size)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(asked.seed))
    return values.to(getattr(torch, asked.dtype))


def layer_costs(asked: argparse.Namespace, steps: Steps, network: Network, samples_ms: Samples) -> Costs:
    """Every layer as it was measured on one device; all slots are alike."""
    layers = tuple(steps.describe_layers(asked.batch))
    latency = np.median(np.array(samples_ms), axis=0)
    return Costs(
        layers=layers, latency_ms=np.repeat(latency[:, None], asked.slots, 1),
        power_w=np.zeros((len(layers), asked.slots)),
        memory_mb=np.array([layer.memory_bytes / 1e6 for layer in layers]),
        limit_mb=np.full(asked.slots, describe_device(asked.device).memory_bytes / 1e6),
        idle_w=np.zeros(asked.slots), network=network,
    )  # fmt: skip


class Parts:
    """What parts of a layer take, measured when first asked for.

    Home also does what of the layer is not split: its norm, what its stage drops, and the sum.
    """

    def __init__(self, asked: argparse.Namespace, steps: Steps, costs: Costs) -> None:
        self._asked, self._steps, self._costs = asked, steps, costs
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
        whole = float(self._costs.latency_ms[layer.id, slots[0]])
        took = [self._ms(layer, size) for size in sizes]
        took[0] += max(0.0, whole - self._ms(layer, layer.units))
        count = len(sizes)
        return PartCosts(
            latency_ms=tuple(took), power_w=(0.0,) * count, memory_mb=(layer.memory_bytes / 1e6,) * count
        )

    def _ms(self, layer: LayerNode, size: int) -> float:
        if (layer.id, size) not in self._known:
            asked, module = self._asked, self._steps.get_layer(layer.id)
            device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
            if isinstance(module, nn.Linear):
                part, width = nn.Linear(module.in_features, size), module.in_features
            else:
                assert isinstance(module, Splittable)
                part, width = module.slice_units(torch.arange(size), bias=True), layer.embed_dim
            tokens = () if layer.layer_type == "head" else (layer.seq_len,)
            x = torch.randn(asked.batch, *tokens, width, device=device, dtype=dtype)
            moved = part.to(device, dtype)
            with torch.no_grad():
                found = measure(lambda: moved(x), warmup=3, repeats=15, device=device)
            self._known[layer.id, size] = found.median_ms
        return self._known[layer.id, size]


def run(
    asked: argparse.Namespace, homes: list[int], plan: Plan, device: torch.device
) -> tuple[Measured, Any]:
    """One process: its slot, timed, and the logits where they come out."""
    batch = clips(asked).to(device)
    with RankExecutor(made(asked), homes, plan.rewrite_plan, device=device) as executor:
        found = executor.run([batch])
        timed = executor.measure(batch, repeats=asked.repeats, batches=asked.batches, warmup=5)
        return timed, (found[0].cpu() if found else None)


def reference(asked: argparse.Namespace) -> tuple[torch.Tensor, float]:
    """Logits of the whole model on one device, and what it takes there, ms a batch."""
    device = torch.device(asked.device)
    steps = made(asked)
    moved, batch = (
        steps.select_layers([layer.id for layer in steps.describe_layers(1)], device),
        clips(asked).to(device),
    )
    took = measure(lambda: whole(moved, batch), repeats=asked.repeats, device=device)
    return whole(moved, batch).cpu(), took.median_ms


def priced(plan: Plan, costs: Costs, parts: Parts) -> Plan:
    """The same plan at other costs."""
    of = {
        layer: (split, parts(costs.layers[layer], split.sizes, split.slots))
        for layer, (split, _) in plan.splits.items()
    }
    return dataclasses.replace(
        plan, hw_stats=evaluate(costs, plan.homes, of, plan.weights),
        part_costs={layer: each for layer, (_, each) in of.items()},
    )  # fmt: skip


def case(
    asked: argparse.Namespace, name: str, one: Plan, costs: Costs, plan: Plan, wanted: torch.Tensor
) -> dict[str, Any]:
    """A plan's figures beside those of its run.

    Args:
        asked: The command's arguments.
        name: Of the case.
        one: The plan at costs of one batch alone.
        costs: Of layers with batches behind each other.
        plan: The same plan at these.
        wanted: Logits of the whole model.
    """
    homes = list(plan.homes)
    told = launch(partial(run, asked, homes, plan), len({*homes, *_parts(plan)}), device=asked.device)
    measured = told[0][0]
    logits = next(found for _, found in told if found is not None)
    latency = statistics.median(measured.latency_ms) - measured.token_ms
    period = statistics.median(measured.period_ms)
    planned = play(costs, plan)
    return {
        "case": name, "homes": homes,
        "splits": [dataclasses.asdict(split) | {"permutation": None} for split, _ in plan.splits.values()],
        "predicted_ms": {"latency": one.hw_stats.serial_ms, "period": planned.period_ms},
        "measured_ms": {"latency": latency, "period": period},
        "samples_ms": {"latency": list(measured.latency_ms), "period": list(measured.period_ms)},
        "token_ms": measured.token_ms,
        "error": {
            "latency": abs(one.hw_stats.serial_ms / latency - 1.0),
            "period": abs(planned.period_ms / period - 1.0),
        },
        "planned_bytes": plan.hw_stats.comm_bytes, "moved_bytes": sum(measured.moved_bytes.values()),
        "logits_error": error_of(logits, wanted), "logits_equal": bool(torch.equal(logits, wanted)),
        "clips_per_s": 1e3 * asked.batch / period,
    }  # fmt: skip


def _rounded(samples_ms: Samples) -> Samples:
    """To the microsecond, which keeps the file small."""
    return [[round(each, 3) for each in row] for row in samples_ms]


def _parts(plan: Plan) -> list[int]:
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
    parser = options(__doc__, seed="weights and clips")
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
    asked = parser.parse_args()
    steps = made(asked)
    link, samples = launch(probe, asked.slots, device=asked.device)[0]
    print(f"link: {link.bandwidth / 1e9:.1f} GB/s, {link.latency_us:.1f} us", flush=True)
    network = Network.all_to_all(link, np.zeros((asked.slots, asked.slots)))
    moved = steps.select_layers([layer.id for layer in steps.describe_layers(1)], torch.device(asked.device))
    batch = clips(asked).to(asked.device)
    layers_ms, costs, parts = {}, {}, {}
    for name, behind in (("alone", False), ("behind", True)):
        layers_ms[name] = layer_times(
            moved, batch, device=asked.device, passes=asked.repeats, warmup=10, behind=behind
        )
        costs[name] = layer_costs(asked, steps, network, layers_ms[name])
        parts[name] = Parts(asked, steps, costs[name])
        took = costs[name].latency_ms[:, 0].sum()
        print(f"one device, layers of batches {name}: {took:.3f} ms a batch of {asked.batch}", flush=True)
    del moved
    wanted, alone_ms = reference(asked)
    print(f"one device, whole, one batch alone: {alone_ms:.3f} ms", flush=True)
    config = PartitionConfig(segments=len(steps.describe_layers(1)), min_split_gain_ratio=0.01, w_comm=0.0,
                             w_balance=0.0, flops_ratio_thresh=0.03, max_split_layers=8)  # fmt: skip
    found = []
    cases: tuple[tuple[str, Mode, str], ...] = (
        ("pipeline", "balanced", "behind"),
        ("split", "serial", "alone"),
    )
    for name, mode, by in cases:
        solver = MappingSolver(strategy="dp" if mode == "balanced" else "auto", mode=mode)
        planner = PartitionPlanner(solver, LayerHwProxy.analytic(), config)
        plan = planner.decide(costs[by], parts[by], use_fine_split=mode == "serial")
        if len({*plan.homes, *_parts(plan)}) < 2:
            print(f"{name}: the plan uses one device", flush=True)
            continue
        one, many = (priced(plan, costs[each], parts[each]) for each in ("alone", "behind"))
        each = case(asked, name, one, costs["behind"], many, wanted)
        what = "period" if mode == "balanced" else "latency"
        each["speedup"] = {
            "of": what, "predicted": costs[by].latency_ms[:, 0].sum() / each["predicted_ms"][what],
            "measured": alone_ms / each["measured_ms"][what],
        }  # fmt: skip
        found.append(each)
        for what in ("latency", "period"):
            print(
                f"{name:9s} {what:8s} predicted {each['predicted_ms'][what]:8.3f} ms, measured "
                f"{each['measured_ms'][what]:8.3f} ms, off by {each['error'][what]:.1%}", flush=True,
            )  # fmt: skip
        print(f"{name:9s} {len(each['splits'])} splits, logits differ by {each['logits_error']:.1e}, bytes "
              f"{each['moved_bytes']} (planned {each['planned_bytes']})", flush=True)  # fmt: skip
    record = {
        **begun(asked, device=asked.device),
        "link": link.model_dump(), "link_samples_ms": {str(size): values for size, values in samples.items()},
        "layers": [layer.name for layer in steps.describe_layers(1)],
        "layers_ms": {name: _rounded(passes) for name, passes in layers_ms.items()},
        "one_device_ms": {"measured": alone_ms}, "cases": found,
    }  # fmt: skip
    wrong = []
    for each in found:
        if each["planned_bytes"] != each["moved_bytes"]:
            wrong.append(f"{each['case']}: other bytes were moved than planned")
        if each["logits_error"] > logits_tolerance(asked.dtype, split=bool(each["splits"])):
            wrong.append(f"{each['case']}: logits differ by {each['logits_error']:.1e}")
    return ended(asked, record, wrong, make_claims)


if __name__ == "__main__":
    sys.exit(main())
