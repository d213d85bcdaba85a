"""What an optimised network launches: kernels by name, waits of the host, and the bytes that its spikes take.

::

    PYTHONPATH=src python benchmarks/spiking/launches.py --out launches.json --model spiking_resnet18

The plan runs once without its CUDA graph under torch's profiler, so that every launch is seen.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sparseflow.core.files import write_atomic
from sparseflow.spiking import catalog
from sparseflow.spiking.accelerated import accelerated
from sparseflow.spiking.kernels.packed.format import PackedSpikes
from sparseflow.spiking.optimize import optimize
from sparseflow.spiking.plan import Env, GroupStep, Spikes
from sparseflow.spiking.state import reset

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


def spike_bytes(plan: Any, x: torch.Tensor) -> list[dict[str, Any]]:
    """Bytes of each group's spikes as they travel, and as the fp16 tensor that they stand for."""
    rows: list[dict[str, Any]] = []

    def around(group: GroupStep, env: Env) -> Spikes:
        found = group.run(env)
        native, dense = found._native, 2 * found.sequence.numel()
        held = native.nbytes if isinstance(native, PackedSpikes) else dense
        rows.append({"group": group.name, "way": group.way, "bytes": held, "fp16_bytes": dense})
        return found

    plan.run(x, around=around)
    return rows


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
    settings = catalog.Settings()
    model = catalog.build(args.model, settings, device=device)
    x = catalog.sample(settings, args.batch).to(device)
    optimize(model, x, dtype=torch.float16, cache=False)
    plan = accelerated(model).plans()[-1]
    if plan is None:
        raise SystemExit("the network's own code stayed: nothing to profile")
    with torch.no_grad():
        reset(model)
        rows = spike_bytes(plan, x)
        for _ in range(3):
            reset(model)
            plan.run(x)
        torch.cuda.synchronize(device)
        reset(model)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            plan.run(x)
    # The profiler itself waits for the device when it stops; only what happened before counts.
    kernels = Counter[str]()
    waits = Counter[str]()
    times: dict[str, float] = {}
    for event in seen.events() or ():
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
