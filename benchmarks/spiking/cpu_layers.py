"""Event kernels against dense ones on this CPU: one group (convolution + BN + neuron) at a time.

Every row is one layer shape at one firing rate. The candidates run interleaved in the same rounds:

- `dense_eager`: oneDNN convolution, channels last, BN folded, neuron in plain torch;
- `dense_compiled`: the same through torch.compile;
- `dense_fused`: oneDNN convolution, then this package's fused neuron (bias, neuron, dense spikes out);
- `events`: events in, events out;
- `events_encoded`: dense spikes in, encoded first.

The strongest dense one is the fastest of the first two; ratios are paired, with their 95 % interval. Input
spikes are independent of one another, or those of LIF neurons with a steady drive, which is closer to a real
network. Before a row is timed its events are compared with the reference.

    PYTHONPATH=src python benchmarks/spiking/cpu_layers.py --rounds 30 --out runs/cpu_layers.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from sparseflow.core.environment import collect_environment
from sparseflow.core.timing import compare
from sparseflow.spiking.backends.events.backend import decode, encode
from sparseflow.spiking.backends.events.format import Events
from sparseflow.spiking.backends.events.group import EventGroup
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

NEURON = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)
LAYERS = {
    "32x32x32": (32, 32, 32, 3, 1),
    "16x16x64": (16, 64, 64, 3, 1),
    "8x8x128": (8, 128, 128, 3, 1),
    "4x4x256": (4, 256, 256, 3, 1),
    "32x32x32 -> 16x16x64": (32, 32, 64, 3, 2),
    "16x16x64 -> 8x8x128 1x1": (16, 64, 128, 1, 2),
    "32x32x64": (32, 64, 64, 3, 1),
}
"""Name -> input size, C_in, C_out, kernel, stride."""
RATES = (0.02, 0.05, 0.10, 0.20)
OUTPUT_RATE = 0.06


@dataclass(frozen=True, kw_only=True)
class Case:
    """One group with its input."""

    spec: GroupSpec
    spikes: torch.Tensor
    """Channels-last memory, [T, N, C, H, W]."""


def random_spikes(shape: tuple[int, ...], rate: float, generator: torch.Generator) -> torch.Tensor:
    """Spikes [T, ...] that are independent of one another."""
    return (torch.rand(shape, generator=generator) < rate).float()


def driven_spikes(shape: tuple[int, ...], rate: float, generator: torch.Generator) -> torch.Tensor:
    """Spikes [T, ...] of LIF neurons that are each driven by a current of their own, with a little noise.

    This is how activations of a network with constant input look: who fires, fires again. The mean current
    is found by bisection so that the mean rate is `rate`.
    """
    drive = torch.randn(shape[1:], generator=generator)
    noise = 0.3 * torch.randn(shape, generator=generator)

    def fire(mean: float) -> torch.Tensor:
        v, out = torch.zeros_like(drive), []
        for extra in noise:
            v = 0.5 * v + 0.5 * (mean + drive + extra)
            out.append((v >= 1.0).float())
            v = v * (1.0 - out[-1])
        return torch.stack(out)

    low, high = -10.0, 10.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if fire(middle).mean() > rate else (middle, high)
    return fire(high)


INPUTS = {"independent": random_spikes, "driven": driven_spikes}


def make_case(name: str, rate: float, inputs: str, *, time_steps: int, images: int, seed: int) -> Case:
    """Random weights and spikes; the bias is such that about `OUTPUT_RATE` of the first charges fire."""
    size, c_in, c_out, k, stride = LAYERS[name]
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(c_out, c_in, k, k, generator=g) * (2 / (c_in * k * k * rate)) ** 0.5
    source = SpikeSource(weight=weight, stride=stride, padding=k // 2)
    spikes = INPUTS[inputs]((time_steps, images, size, size, c_in), rate, g).movedim(-1, 2)
    current = F.conv2d(spikes[0, :4], weight, stride=stride, padding=k // 2).flatten()[:1_000_000]
    bias = NEURON.v_threshold / NEURON.beta - torch.quantile(current, 1 - OUTPUT_RATE)
    spec = GroupSpec(sources=(source,), bias=bias.expand(c_out).contiguous() * 0.8, neuron=NEURON)
    return Case(spec=spec, spikes=spikes)


def dense_group(spec: GroupSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The group in plain torch: one convolution over T * N images, then the neuron step by step."""
    (source,) = spec.sources
    weight = source.weight.contiguous(memory_format=torch.channels_last)
    neuron, bias, stride, padding = spec.neuron, spec.bias, source.stride, source.padding

    def run(spikes: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(spikes.flatten(0, 1), weight, bias, stride, padding).unflatten(0, spikes.shape[:2])
        v, out = torch.zeros_like(x[0]), []
        for current in x.unbind(0):
            v = neuron.alpha * v + neuron.beta * current
            fired = (v >= neuron.v_threshold).to(v.dtype)
            v = v * (1.0 - fired)
            out.append(fired)
        return torch.stack(out)

    return run


def check(case: Case, out: Events) -> float:
    """Fraction of spikes that differ from the float64 reference: rounding moves a few over the threshold."""
    expected, _ = run_group_reference(case.spec, [case.spikes], dtype=torch.float64)
    return (decode(out) != expected.float()).float().mean().item()


def run_case(name: str, rate: float, inputs: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Check and time one row."""
    case = make_case(
        name, rate, inputs, time_steps=arguments.time_steps, images=arguments.images, seed=arguments.seed
    )
    events = encode(case.spikes)
    event_group = EventGroup(case.spec, "sparse")
    fused = EventGroup(case.spec, "dense")
    eager = dense_group(case.spec)
    out, _ = event_group([events])
    assert isinstance(out, Events)
    mismatch = check(case, out)
    if mismatch > 1e-4:
        raise SystemExit(f"{name} at {rate}: {mismatch:.2%} of the spikes are wrong; nothing was timed")

    candidates: dict[str, Callable[[], object]] = {
        "dense_eager": lambda: eager(case.spikes),
        "dense_fused": lambda: fused([case.spikes], out="dense"),
        "events": lambda: event_group([events]),
        "events_encoded": lambda: event_group([encode(case.spikes)]),
    }
    if not arguments.no_compile:
        compiled = torch.compile(eager, dynamic=False)
        candidates["dense_compiled"] = lambda: compiled(case.spikes)
    result = compare(candidates, rounds=arguments.rounds, baseline="dense_eager", seed=arguments.seed)
    strongest = min(
        (c for c in ("dense_eager", "dense_compiled") if c in candidates),
        key=lambda c: result.samples(c).median_ms,
    )
    size = out.T * out.N * out.C * out.H * out.W
    row: dict[str, object] = {
        "layer": name,
        "inputs": inputs,
        "firing_rate": rate,
        "output_firing_rate": out.count_events() / size,
        "mismatch": mismatch,
        "strongest_dense": strongest,
        "times_ms": {c: result.times_ms[c] for c in candidates},
    }
    for candidate in ("events", "events_encoded", "dense_fused"):
        ratio = result.speedup(candidate, baseline=strongest)
        row[f"{candidate}_speedup"] = (ratio.median, ratio.low, ratio.high)
    medians = "  ".join(f"{c} {result.samples(c).median_ms:7.3f}" for c in sorted(candidates))
    speed = result.speedup("events", baseline=strongest)
    print(
        f"{name:24s} {inputs:11s} {rate:4.0%} -> {row['output_firing_rate']:5.1%} | {medians} ms | events "
        f"{speed.median:5.2f}x [{speed.low:.2f}, {speed.high:.2f}] of {strongest}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    parser.add_argument("--inputs", nargs="*", default=list(INPUTS), choices=list(INPUTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--time-steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile, which needs a C++ compiler"
    )
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        rows = [
            run_case(name, rate, inputs, arguments)
            for name in arguments.layers
            for inputs in arguments.inputs
            for rate in arguments.rates
        ]
    if arguments.out is not None:
        content = {
            "environment": collect_environment("cpu", seed=arguments.seed),
            "threads": torch.get_num_threads(),
            "rows": rows,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(content, indent=1, default=str))


if __name__ == "__main__":
    main()
