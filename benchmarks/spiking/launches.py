"""What an optimised network launches: kernels by name, waits of the host, and the bytes that its spikes take.

::

    PYTHONPATH=src:. python benchmarks/spiking/launches.py --out launches.json --model spiking_resnet18

The plan runs once without its CUDA graph under torch's profiler, so that every launch is seen.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.claims import Claim, write_samples
from sparseflow.core.files import write_atomic
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.api import optimize
from sparseflow.spiking.backends.packed.format import PackedSpikes
from sparseflow.spiking.graph.module_state import reset_neurons
from sparseflow.spiking.models import model_zoo
from sparseflow.spiking.runtime.plan import GroupStep, NodeValues, SpikeTensor

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


def spike_bytes(plan: Any, x: torch.Tensor) -> list[dict[str, Any]]:
    """Bytes of each group's spikes as they travel, and as the fp16 tensor that they stand for."""
    rows: list[dict[str, Any]] = []

    def record_bytes(group: GroupStep, env: NodeValues) -> SpikeTensor:
        spikes = group.run(env)
        native, dense = spikes._native, 2 * spikes.sequence.numel()
        num_bytes = native.nbytes if isinstance(native, PackedSpikes) else dense
        rows.append({"group": group.name, "way": group.mode, "bytes": num_bytes, "fp16_bytes": dense})
        return spikes

    plan.run(x, around=record_bytes)
    return rows


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: host waits, prescan kernels and spike bytes of one run."""
    common: dict[str, Any] = {
        "command": "python benchmarks/spiking/launches.py",
        "samples": write_samples("spiking/6-launches.json", record),
    }
    yield Claim(
        id="spiking/6-host-waits",
        claim="Host synchronizations within one run of an optimized spiking ResNet-18.",
        # The profiler itself waits once when it stops.
        value=sum(record["waits_of_the_host"].values()) - 1,
        unit="waits",
        target="== 0",
        **common,
    )
    yield Claim(
        id="spiking/6-prescan",
        claim="Prescan kernels within one run of an optimized spiking ResNet-18.",
        value=record["prescan_kernels"],
        unit="kernels",
        target="== 0",
        **common,
    )
    yield Claim(
        id="spiking/6-bytes",
        claim="Reduction of spike bytes against fp16 on the packed layer with the smallest reduction.",
        value=round(record["smallest_saving_of_packed"], 3),
        unit="x",
        target=">= 8.0",
        **common,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--model", default="spiking_resnet18")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.cuda.set_device(args.gpu)
    device = torch.device("cuda", args.gpu)
    settings = model_zoo.NetworkConfig()
    model = model_zoo.build_network(args.model, settings, device=device)
    x = model_zoo.sample_images(settings, args.batch).to(device)
    optimize(model, x, dtype=torch.float16, cache=False)
    plan = get_accelerated_forward(model).list_plans()[-1]
    if plan is None:
        raise SystemExit("the network's own code stayed: nothing to profile")
    with torch.no_grad():
        reset_neurons(model)
        rows = spike_bytes(plan, x)
        for _ in range(3):
            reset_neurons(model)
            plan.run(x)
        torch.cuda.synchronize(device)
        reset_neurons(model)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
            plan.run(x)
    # The profiler itself waits for the device when it stops; only what happened before counts.
    kernels = Counter[str]()
    waits = Counter[str]()
    times: dict[str, float] = {}
    for event in events.events() or ():
        if str(event.device_type).endswith("CUDA"):
            kernels[event.name] += 1
            times[event.name] = times.get(event.name, 0.0) + event.device_time_total
        if any(wait in event.name for wait in WAITS):
            waits[event.name] += 1
    packed = [row for row in rows if row["bytes"] < row["fp16_bytes"]]
    result = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "kernels": dict(kernels.most_common()),
        "kernel_us": {name: round(us, 1) for name, us in sorted(times.items(), key=lambda kv: -kv[1])},
        "waits_of_the_host": dict(waits),
        "prescan_kernels": sum(n for name, n in kernels.items() if "prescan" in name or "occupancy" in name),
        "spikes": rows,
        "smallest_saving_of_packed": min((r["fp16_bytes"] / r["bytes"] for r in packed), default=None),
    }
    write_atomic(args.out, json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "spikes"}, indent=1)[:5000])


if __name__ == "__main__":
    main()
