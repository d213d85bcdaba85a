"""spikingjelly's own networks, optimized, against the fastest of the settings that its users have.

::

    python benchmarks/spiking/zoo_networks.py --out runs/zoo.json --jobs 4
    python benchmarks/spiking/zoo_networks.py --out runs/zoo-cpu.json --device cpu --case vgg11:1

The settings are eager execution and one CUDA graph of the whole network, with spikingjelly's torch and
Triton neurons, in float32, TF32, fp16 and bf16, in NCHW and channels_last, with BatchNorm folded; and
`torch.compile` of the folded network in a CUDA graph. On a CPU they are eager, folded and compiled, in both
layouts. Graphs and the optimized network start from rest without `reset_net`, copy their input to the memory
that the graph reads, and do not look for changes of the network. Each setting is timed once; the two fastest,
eager execution and the optimized network are then timed in turn.

Weights are random. BatchNorm has seen eight batches, and each neuron has the threshold at which it fires as
often as `FIRING_RATE` says.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional, neuron, surrogate
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import sparseflow
from benchmarks.claims import Claim, write_samples
from sparseflow.core import timing
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import read_json, write_json
from sparseflow.spiking.explanation import explain

Forward = Callable[[], torch.Tensor]

FIRING_RATE = 0.15
NUM_BISECTIONS = 12
OPTIMIZED = "sparseflow"
EAGER = "eager fp32 NCHW"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
COMPILED = (("fp16", "channels_last"),)
"""Settings that are compiled; compiling all of them takes hours, and this was the fastest in trials."""


@dataclass(frozen=True)
class Network:
    """A network of spikingjelly.

    Attributes:
        module: Module below `spikingjelly.activation_based.model`.
        name: Function or class that makes it.
        steps: Time steps of its input; None if it repeats images itself.
        sample: Shape of one image or frame.
        options: Further arguments.
    """

    module: str
    name: str
    steps: int | None
    sample: tuple[int, int, int]
    options: tuple[tuple[str, Any], ...] = ()


NETWORKS = {
    "vgg11": Network("spiking_vgg", "spiking_vgg11_bn", 4, (3, 32, 32), (("num_classes", 10),)),
    "vgg16": Network("spiking_vgg", "spiking_vgg16_bn", 4, (3, 32, 32), (("num_classes", 10),)),
    "resnet18": Network("spiking_resnet", "spiking_resnet18", 4, (3, 224, 224)),
    "resnet34_t16": Network("spiking_resnet", "spiking_resnet34", 16, (3, 64, 64)),
    "sew_resnet18": Network("sew_resnet", "sew_resnet18", 4, (3, 224, 224), (("cnf", "ADD"),)),
    "sew_resnet18_136": Network("sew_resnet", "sew_resnet18", 4, (3, 136, 136), (("cnf", "ADD"),)),
    "ms_resnet18": Network("ms_resnet", "ms_resnet18", None, (3, 224, 224), (("T", 4),)),
    "plif_dvs": Network("parametric_lif_net", "DVSGestureNet", 16, (2, 128, 128), (("channels", 128),)),
    "plif_cifar10": Network("parametric_lif_net", "CIFAR10Net", 8, (3, 32, 32)),
    "spikformer_s": Network("spikformer", "spikformer_s", None, (3, 224, 224)),
    "spikformer_cifar10": Network("spikformer", "spikformer_cifar10", None, (3, 32, 32)),
    "qkformer": Network("qkformer", "qkformer_10_384", None, (3, 224, 224)),
    "spike_driven": Network("spike_driven_transformer", "sdt_8_384", None, (3, 224, 224)),
    "maxformer_cifar": Network("maxformer", "maxformer_cifar", None, (3, 32, 32)),
}
CASES = tuple(f"{name}:{batch}" for batch in (32, 1) for name in NETWORKS)


def build(network: Network, batch: int, device: torch.device) -> tuple[nn.Module, torch.Tensor, float]:
    """Return a calibrated network in eval mode, an input, and the mean firing rate."""
    torch.manual_seed(0)
    module = import_models(network.module)
    options: dict[str, Any] = dict(network.options)
    if network.steps is not None:
        neurons = {"surrogate_function": surrogate.ATan(), "detach_reset": True}
        options |= {"spiking_neuron": neuron.LIFNode, **neurons}
        if network.module != "parametric_lif_net":
            options["pretrained"] = False
    model: nn.Module = getattr(module, network.name)(**options).to(device)
    functional.set_step_mode(model, "m")
    inputs = [make_input(network, batch, seed).to(device) for seed in range(4)]
    calibrate_batch_norms(model, inputs)
    set_thresholds(model, inputs[0])
    return model, inputs[0], measure_firing_rate(model, inputs[0])


def import_models(name: str) -> Any:
    """Import a module of spikingjelly's networks, which imports one download function of torchvision."""
    names = ("torchvision", "torchvision.models", "torchvision.models.utils")
    if importlib.util.find_spec("torchvision") is None:
        stand_ins = {name: types.ModuleType(name) for name in names}
        stand_ins[names[-1]].load_state_dict_from_url = None  # type: ignore[attr-defined]
        sys.modules.update(stand_ins)
    try:
        return importlib.import_module(f"spikingjelly.activation_based.model.{name}")
    finally:
        for stand_in in names:
            if not hasattr(sys.modules.get(stand_in), "__file__"):
                sys.modules.pop(stand_in, None)


def make_input(network: Network, batch: int, seed: int) -> torch.Tensor:
    """Return smooth random images, or frames of events of which 5 % are 1."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = network.sample
    if channels == 2:
        assert network.steps is not None
        return (torch.rand(network.steps, batch, *network.sample, generator=generator) < 0.05).float()
    low = torch.rand(batch, channels, height // 8, width // 8, generator=generator)
    images = (nn.functional.interpolate(low, size=(height, width), mode="bilinear") - 0.5) / 0.25
    if network.steps is None:
        return images
    return images.unsqueeze(0).expand(network.steps, -1, -1, -1, -1).contiguous()


def calibrate_batch_norms(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Let BatchNorm see the inputs twice."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        for x in [*inputs, *inputs]:
            model(x)
            functional.reset_net(model)
    model.eval()


def set_thresholds(model: nn.Module, x: torch.Tensor) -> None:
    """Set the threshold of each neuron so that it fires at `FIRING_RATE` on an input."""

    def choose(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        trial = copy.deepcopy(module)
        trial._forward_pre_hooks.clear()
        low, high = 0.0, float(inputs[0].abs().max()) * inputs[0].shape[0]
        for _ in range(NUM_BISECTIONS):
            trial.v_threshold = (low + high) / 2
            trial.reset()
            fires_more = float(trial(*inputs).mean()) > FIRING_RATE
            low, high = (trial.v_threshold, high) if fires_more else (low, trial.v_threshold)
        module.v_threshold = high

    neurons = [module for module in model.modules() if isinstance(module, neuron.BaseNode)]
    hooks = [module.register_forward_pre_hook(choose) for module in neurons]
    run(model, x)
    for hook in hooks:
        hook.remove()


def measure_firing_rate(model: nn.Module, x: torch.Tensor) -> float:
    """Return the mean over neurons of their firing rates."""
    rates: list[float] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: rates.append(float((out != 0).float().mean())))
        for module in model.modules()
        if isinstance(module, neuron.BaseNode)
    ]
    run(model, x)
    for hook in hooks:
        hook.remove()
    return statistics.fmean(rates)


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a network from rest."""
    functional.reset_net(model)
    with torch.no_grad():
        return model(x)


def fold_batch_norms(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorms are folded into the convolution before them in the same module."""
    model = copy.deepcopy(model)
    for parent in model.modules():
        children = list(parent._modules.items())
        for (name, conv), (bn_name, bn) in itertools.pairwise(children):
            if not isinstance(conv, (nn.Conv1d, nn.Conv2d)) or not isinstance(bn, BATCH_NORMS):
                continue
            if conv.out_channels == bn.num_features:
                parent._modules[name], parent._modules[bn_name] = fuse_conv_bn_eval(conv, bn), nn.Identity()
    return model


def convert(
    model: nn.Module, x: torch.Tensor, precision: str, layout: str, backend: str = "torch"
) -> tuple[nn.Module, torch.Tensor]:
    """Return a copy of a network, and the input, in a precision and a layout, with one kind of neurons."""
    dtype, memory_format = PRECISIONS[precision], LAYOUTS[layout]
    model, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=memory_format)
        if isinstance(module, neuron.BaseNode):
            setattr(module, "backend", backend)  # noqa: B010 - a property, which pyright does not see
    images = x.flatten(0, -4).contiguous(memory_format=memory_format)
    return model, images.view(x.shape) if layout == "NCHW" else images.unflatten(0, x.shape[:-3])


class Graph:
    """A network's run as one CUDA graph.

    A call copies the input to the memory that the graph reads, as `torch.cuda.make_graphed_callables` does.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self._forward = forward  # a graph does not keep weights alive
        self._input, self._static_input = x, x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                forward(self._static_input)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = forward(self._static_input)

    def __call__(self) -> torch.Tensor:
        self._static_input.copy_(self._input)
        self._graph.replay()
        return self._output


def list_settings(
    model: nn.Module, x: torch.Tensor, *, compiles: bool
) -> Iterator[tuple[str, Callable[[], Forward]]]:
    """Yield the name of each setting of spikingjelly's users and a function that prepares it."""
    folded = fold_batch_norms(model)
    yield EAGER, lambda: lambda: run(model, x)
    if not x.is_cuda:
        for layout in LAYOUTS:
            net, inputs = convert(folded, x, "fp32", layout)
            yield f"folded fp32 {layout}", lambda net=net, x=inputs: lambda: run(net, x)
            if compiles:
                yield f"compiled fp32 {layout}", lambda net=net, x=inputs: compile_forward(net, x)
        return

    def prepare_graph(precision: str, layout: str, backend: str) -> Forward:
        net, inputs = convert(folded, x, precision, layout, backend)
        with allow_tf32(precision == "tf32"):
            return Graph(lambda x: run(net, x), inputs)

    def prepare_compiled(precision: str, layout: str) -> Forward:
        net, inputs = convert(folded, x, precision, layout)
        return Graph(torch.compile(lambda x: run(net, x), dynamic=False), inputs)

    for precision in PRECISIONS:
        for layout in LAYOUTS:
            for backend in ("torch", "triton"):
                yield (
                    f"graph {precision} {layout} {backend}",
                    lambda precision=precision, layout=layout, backend=backend: prepare_graph(
                        precision, layout, backend
                    ),
                )
            if compiles and (precision, layout) in COMPILED:
                yield (
                    f"compiled graph {precision} {layout}",
                    lambda precision=precision, layout=layout: prepare_compiled(precision, layout),
                )


def compile_forward(model: nn.Module, x: torch.Tensor) -> Forward:
    """Return a call of the compiled network."""
    compiled = torch.compile(lambda x: run(model, x), dynamic=False)
    return lambda: compiled(x)


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Let convolutions and matrix products use TF32 or not in the body."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case: a row of the record."""
    name, _, batch = case.partition(":")
    device = torch.device(options.device)
    model, x, rate = build(NETWORKS[name], int(batch), device)
    expected = flatten(run(model, x)).argmax(-1)
    forms: dict[str, Forward]
    memory_mib = {EAGER: measure_peak_memory(model, x) >> 20}
    row: dict[str, Any] = {
        "case": case, "shape": list(x.shape), "firing_rate": round(rate, 4), "failed": {}, "agreement": {},
        "preparation_s": {}, "latency_ms": {}, "memory_mib": memory_mib,
    }  # fmt: skip

    def prepare_optimized() -> Forward:
        before = get_reserved_memory(device)
        optimized = copy.deepcopy(model)
        dtype = torch.float16 if x.is_cuda else None
        sparseflow.optimize(
            optimized, x, dtype=dtype, reset=True, freeze=True, cache=False,
            offload_weights=options.offload_weights,
        )  # fmt: skip
        explanation = explain(optimized)
        row["layers"] = [site.backend for site in explanation.layers]
        row["summary"] = explanation.summary
        forward = torch.no_grad()(lambda: optimized(x))
        forward()
        row["memory_mib"][OPTIMIZED] = (get_reserved_memory(device) - before) >> 20
        return forward

    settings = [*list_settings(model, x, compiles=not options.no_compile), (OPTIMIZED, prepare_optimized)]
    if options.prepare_only:
        settings = [setting for setting in settings if "compiled" in setting[0] or setting[0] == OPTIMIZED]
    calls, forms = (10 if x.is_cuda else 1), {}
    for setting, prepare in settings:
        start = time.monotonic()
        try:
            forms[setting] = prepare()
            classes = flatten(forms[setting]().float()).argmax(-1)
        except Exception as error:
            row["failed"][setting] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        row["agreement"][setting] = round(float((classes == expected).float().mean()), 4)
        row["preparation_s"][setting] = round(time.monotonic() - start, 2)
        screening = timing.measure(forms[setting], warmup=1, repeats=3, device=device, calls_per_sample=calls)
        row["latency_ms"][setting] = screening.median_ms
        drop_slow_forms(forms, row["latency_ms"])
    if options.prepare_only:
        return row
    final = timing.compare(
        forms, baseline=OPTIMIZED, rounds=options.rounds, warmup=1, device=device, calls_per_sample=calls
    )
    row["latency_ms"] |= {form: final.samples(form).median_ms for form in forms}
    baseline = min((form for form in forms if form != OPTIMIZED), key=row["latency_ms"].__getitem__)
    return row | {
        "baseline": baseline,
        "speedup": vars(final.speedup(OPTIMIZED, baseline=baseline)),
        "speedup_eager": vars(final.speedup(OPTIMIZED, baseline=EAGER)),
        "samples": {form: list(final.samples(form).times_ms) for form in forms},
    }


def get_reserved_memory(device: torch.device) -> int:
    """Return the bytes of the GPU that torch holds, including those of CUDA graphs; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def measure_peak_memory(model: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes of the weights and of the peak while the network runs on a GPU; 0 for a CPU."""
    if not x.is_cuda:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    run(model, x)
    functional.reset_net(model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return torch.cuda.max_memory_allocated(x.device) - before + weights


def drop_slow_forms(forms: dict[str, Forward], latency_ms: dict[str, float]) -> None:
    """Drop all forms but the two fastest, eager execution and the optimized network; a graph holds memory."""
    settings = sorted((form for form in forms if form not in (EAGER, OPTIMIZED)), key=latency_ms.__getitem__)
    for form in settings[2:]:
        del forms[form]
    gc.collect()


def flatten(output: torch.Tensor) -> torch.Tensor:
    """Return the logits [N, classes] of an output with or without a time axis."""
    return output.mean(0) if output.dim() == 3 else output


def describe(row: dict[str, Any]) -> str:
    """Return one line about a row."""
    if "error" in row:
        return f"{row['case']:22} failed: {row['error']}"
    ms, speed = row["latency_ms"], row["speedup"]
    return (
        f"{row['case']:22} firing {100 * row['firing_rate']:4.1f} %  eager {ms[EAGER]:8.3f}  "
        f"best {ms[row['baseline']]:8.3f} [{row['baseline']}]  optimized {ms[OPTIMIZED]:8.3f} ms  "
        f"{speed['median']:.2f}x ({speed['low']:.2f}-{speed['high']:.2f})  "
        f"agreement {row['agreement'][OPTIMIZED]:.2f}  optimize {row['preparation_s'][OPTIMIZED]:.0f} s  "
        f"memory {row['memory_mib'][EAGER]} -> {row['memory_mib'].get(OPTIMIZED, 0)} MiB"
    )


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record."""
    rows = [row for row in record["rows"] if "speedup" in row]
    kind = "cpu" if record["arguments"]["device"] == "cpu" else "gpu"
    samples = write_samples(f"spiking/5-zoo-{kind}.json", {"rows": rows})
    cases = {row["case"].partition(":")[::2]: row["speedup"]["median"] for row in rows}
    for batch in sorted({int(size) for _, size in cases}, reverse=True):
        selected = {name: speedup for (name, size), speedup in cases.items() if size == str(batch)}
        common: dict[str, Any] = {
            "unit": "x", "baseline": "fastest of the settings of spikingjelly 2.0", "samples": samples,
            "command": record["command"], "details": {name: round(x, 2) for name, x in selected.items()},
        }  # fmt: skip
        yield Claim(
            id=f"spiking/5-zoo-{kind}-b{batch}-mean",
            claim=f"Geometric mean speedup of {len(selected)} networks of spikingjelly at batch {batch}.",
            value=round(statistics.geometric_mean(selected.values()), 3),
            target=">= 2.0" if batch > 1 or kind == "cpu" else None,
            **common,
        )
        yield Claim(
            id=f"spiking/5-zoo-{kind}-b{batch}-worst",
            claim=f"Smallest speedup of {len(selected)} networks of spikingjelly at batch {batch}.",
            value=round(min(selected.values()), 3),
            target=">= 1.0",
            **common,
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases and write the record; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME:BATCH", help="by default all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--offload-weights", action="store_true", help="of the optimized network")
    parser.add_argument("--jobs", type=int, default=0, help="compile in that many processes first")
    parser.add_argument("--prepare-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help="start no case after that")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    rows = read_rows(options)
    measured = {row["case"] for row in rows}
    cases = [case for case in options.case or CASES if case not in measured]
    if options.jobs:
        prepare_in_parallel(cases, options)
    for case in cases:
        if time.monotonic() - start > options.time_limit_s:
            break
        torch.compiler.reset()
        try:
            rows.append(measure(case, options))
        except Exception as error:
            traceback.print_exc()
            rows.append({"case": case, "error": f"{type(error).__name__}: {error}"[:300]})
        if not options.prepare_only:
            print(describe(rows[-1]), flush=True)
        command = f"python benchmarks/spiking/zoo_networks.py {' '.join(arguments or sys.argv[1:])}"
        record = {
            "command": command,
            "arguments": {"device": options.device},
            "environment": collect_environment(options.device),
            "rows": rows,
        }
        write_json(options.out, record, indent=1)
    return int(any("error" in row for row in rows))


def read_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of an earlier, interrupted run on the same device; they are not measured again."""
    if not options.out.exists():
        return []
    record = read_json(options.out)
    measured, device = record["environment"]["device_key"], collect_environment(options.device)["device_key"]
    if measured != device:
        raise SystemExit(f"{options.out} was measured on {measured}, not on {device}")
    return [row for row in record["rows"] if "error" not in row]


def prepare_in_parallel(cases: list[str], options: argparse.Namespace) -> None:
    """Compile the kernels of all cases; compilers keep them on disk."""
    running: list[subprocess.Popen[bytes]] = []
    for number, case in enumerate(cases):
        while sum(process.poll() is None for process in running) >= options.jobs:
            time.sleep(0.1)
        out = options.out.with_suffix(f".prepare-{number}.json")
        command = [sys.executable, __file__, "--prepare-only", "--case", case, "--out", str(out)]
        command += ["--device", options.device, *(["--no-compile"] if options.no_compile else [])]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for process in running:
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
