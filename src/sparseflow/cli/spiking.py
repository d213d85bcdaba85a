"""`sparseflow spiking`: optimize, profile and benchmark spiking networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparseflow.cli.options import (
    BatchSizeOption,
    BatchSizesOption,
    CacheOption,
    CompileOption,
    DeviceOption,
    Fp16DtypeOption,
    JsonOption,
    ModelOption,
    ModelsOption,
    OutDirOption,
    PairedRoundsOption,
    ShapesOption,
    open_device,
)
from sparseflow.cli.output import emit, fail, format_speedup, make_table
from sparseflow.cli.progress import progress_bar
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from sparseflow.spiking.api import LayerProfile
    from sparseflow.spiking.models.model_zoo import BenchCase
    from sparseflow.spiking.profile.check import CheckResult, Difference

app = typer.Typer(
    name="spiking",
    help="Spiking networks: faster inference by skipping zero activations.",
    no_args_is_help=True,
)

DEFAULT_MODEL = "cifar10-sew-resnet18"

_TIME_STEPS = typer.Option("--time-steps", "-T", min=1, help="Time steps of networks with random weights.")

WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="Weights to load: a .safetensors, .pt or .pth file.")
]
ArgumentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        help="Argument of the factory: a Python literal, module:object or a string. Repeatable.",
    ),
]
StepModeOption = Annotated[
    Literal["s", "m"] | None,
    typer.Option(
        "--step-mode", help="Step mode to set in spikingjelly's layers: one time step a call, or all."
    ),
]
InputsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="FILE[:KEY]",
        help="Input tensors: a .pt, .pth, .npy, .npz or .safetensors file. Repeatable, in the order of the "
        "arguments of forward.",
    ),
]
EventRateOption = Annotated[
    float | None,
    typer.Option("--event-rate", help="Fraction of ones in random inputs, which are then frames of events."),
]
TimeStepsOption = Annotated[int, _TIME_STEPS]
TimeStepsListOption = Annotated[list[int] | None, _TIME_STEPS]
ImageSizeOption = Annotated[
    int, typer.Option("--image-size", min=8, help="Height and width of the input, pixels.")
]
WidthOption = Annotated[
    int, typer.Option("--width", min=8, help="Channels of the first stage, with random weights.")
]
NumClassesOption = Annotated[
    int, typer.Option("--num-classes", min=2, help="Number of classes, with random weights.")
]


@app.callback()
def spiking() -> None:
    """Spiking networks: faster inference by skipping zero activations.

    A model is a shipped network, spiking_resnet18 or sew_resnet18 (34, 50, 101, 152) with random weights, or
    a function or class that makes a network: package.module:factory or path/to/file.py:factory. Its inputs
    are images, the tensors of files (--input) or random numbers (--shape).
    """


def _parse_options(
    inputs: list[str] | None,
    shapes: list[str] | None,
    event_rate: float | None,
    arguments: list[str] | None,
    step_mode: Literal["s", "m"] | None,
) -> dict[str, Any]:
    """Parse the options that describe a network of the user's and its inputs: fields of a `BenchCase`."""
    from sparseflow.core.factory import parse_arguments
    from sparseflow.spiking.models.network_inputs import InputConfig, parse_shape

    if event_rate is not None and not shapes:
        raise InputError(f"`--event-rate {event_rate}` needs random inputs; give their `--shape`")
    source = None
    if inputs or shapes:
        source = InputConfig(
            files=tuple(inputs or ()), shapes=tuple(map(parse_shape, shapes or ())), event_rate=event_rate
        )
    return {"inputs": source, "arguments": parse_arguments(arguments or []), "step_mode": step_mode}


def _build(case: BenchCase, weights: Path | None, device: str) -> tuple[Any, Any]:
    """Build the network and its inputs on a device."""
    torch_device = open_device(device)
    network, inputs, _ = case.build(weights)
    return network.to(torch_device), tuple(x.to(torch_device) for x in inputs)


def _make_case(model: str, batch_size: int, options: dict[str, Any], **config: int) -> BenchCase:
    """Make a case from `_parse_options` and the fields of a `NetworkConfig`."""
    from sparseflow.spiking.models.model_zoo import BenchCase, NetworkConfig

    return BenchCase(model=model, config=NetworkConfig(**config), batch_size=batch_size, **options)


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Network, such as package.module:factory.")],
    inputs: InputsOption = None,
    shapes: ShapesOption = None,
    event_rate: EventRateOption = None,
    arguments: ArgumentsOption = None,
    weights: WeightsOption = None,
    step_mode: StepModeOption = None,
    batch_size: BatchSizeOption = 8,
    time_steps: TimeStepsOption = 4,
    image_size: ImageSizeOption = 32,
    device: DeviceOption = "cpu",
    dtype: Fp16DtypeOption = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            help="Accepted mean error of outputs and membranes, relative to their size.",
        ),
    ] = None,
    rounds: PairedRoundsOption = 20,
    compile_dense: CompileOption = True,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Do not check for changes of the network in each call.")
    ] = False,
    offload_weights: Annotated[
        bool, typer.Option("--offload-weights", help="Move weights that no call reads to slower memory.")
    ] = False,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Check on this machine that a network's optimized form computes the same, and how fast it is.

    Compares outputs, predictions and membranes from rest, with the state carried over, after a reset and with
    another batch size; shows for each layer how it runs and why; and measures latency and peak memory. The
    exit code is 1 if the outputs differ or if the optimized network is slower than the network's own code.
    """
    import torch

    from sparseflow.spiking.profile.check import check_network

    options = _parse_options(inputs, shapes, event_rate, arguments, step_mode)
    case = _make_case(model, batch_size, options, time_steps=time_steps, image_size=image_size)
    network, sample = _build(case, weights, device)
    with progress_bar() as progress:
        result = check_network(
            network,
            sample,
            dtype=torch.float16 if dtype == "float16" else None,
            tolerance=tolerance,
            rounds=rounds,
            compile_baselines=compile_dense,
            freeze=freeze,
            offload_weights=offload_weights,
            cache=cache,
            progress=progress,
        )
    emit(
        {"model": model, **result.to_dict()},
        as_json,
        result.bench.explanation,
        _call_table(result, title=f"{case.name}: differences between the optimized network and its own code"),
        *(f"{call.name}: {call.problem}" for call in result.calls if call.problem),
        *_format_performance(result.bench.to_dict()),
    )
    if not result.agrees:
        fail("the outputs of the optimized network differ from those of its own code", code=1)
    if result.is_slower:
        fail("the optimized network is slower than its own code", code=1)


@app.command()
def optimize(
    model: ModelOption = DEFAULT_MODEL,
    inputs: InputsOption = None,
    shapes: ShapesOption = None,
    event_rate: EventRateOption = None,
    arguments: ArgumentsOption = None,
    weights: WeightsOption = None,
    step_mode: StepModeOption = None,
    batch_size: BatchSizeOption = 32,
    time_steps: TimeStepsOption = 4,
    image_size: ImageSizeOption = 32,
    width: WidthOption = 64,
    num_classes: NumClassesOption = 10,
    device: DeviceOption = "cpu",
    policy: Annotated[
        Literal["measured", "static"],
        typer.Option(help="Select backends by measuring, or by the static rule on feature-map height."),
    ] = "measured",
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Optimize a network for this machine; show for each layer what was done and why."""
    import sparseflow

    options = _parse_options(inputs, shapes, event_rate, arguments, step_mode)
    case = _make_case(
        model, batch_size, options,
        time_steps=time_steps, image_size=image_size, width=width, num_classes=num_classes,
    )  # fmt: skip
    network, sample = _build(case, weights, device)
    with progress_bar() as progress:
        sparseflow.optimize(network, sample, policy=policy, cache=cache, progress=progress)
    explanation = sparseflow.explain(network)
    emit(explanation.to_dict(), as_json, explanation)


@app.command()
def profile(
    model: ModelOption = DEFAULT_MODEL,
    inputs: InputsOption = None,
    shapes: ShapesOption = None,
    event_rate: EventRateOption = None,
    arguments: ArgumentsOption = None,
    weights: WeightsOption = None,
    step_mode: StepModeOption = None,
    batch_size: BatchSizeOption = 32,
    time_steps: TimeStepsOption = 4,
    image_size: ImageSizeOption = 32,
    width: WidthOption = 64,
    num_classes: NumClassesOption = 10,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Show the inputs and the sparsity of each layer and the latency of its optimized group."""
    from sparseflow.spiking.api import profile_layers

    options = _parse_options(inputs, shapes, event_rate, arguments, step_mode)
    case = _make_case(
        model, batch_size, options,
        time_steps=time_steps, image_size=image_size, width=width, num_classes=num_classes,
    )  # fmt: skip
    network, sample = _build(case, weights, device)
    layers = profile_layers(network, *sample)
    emit(
        {"model": model, "batch_size": batch_size, "layers": [layer.to_dict() for layer in layers]},
        as_json,
        _layer_table(layers, title=case.name),
        *(f"{layer.name}: {_describe_input(layer)}" for layer in layers),
    )


@app.command()
def bench(
    model: ModelsOption = None,
    inputs: InputsOption = None,
    shapes: ShapesOption = None,
    event_rate: EventRateOption = None,
    arguments: ArgumentsOption = None,
    weights: WeightsOption = None,
    step_mode: StepModeOption = None,
    batch_size: BatchSizesOption = None,
    time_steps: TimeStepsListOption = None,
    image_size: ImageSizeOption = 32,
    width: WidthOption = 64,
    dataset: Annotated[
        Literal["cifar10", "cifar100"], typer.Option(help="Dataset, which sets the number of classes.")
    ] = "cifar10",
    grid: Annotated[
        bool, typer.Option("--grid", help="Every depth, both datasets, T 4 and 16, batch sizes 1, 8 and 32.")
    ] = False,
    device: DeviceOption = "cpu",
    dtype: Fp16DtypeOption = "float32",
    rounds: PairedRoundsOption = 20,
    compile_dense: CompileOption = True,
    cache: CacheOption = True,
    out: OutDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Benchmark networks against their fastest dense form.

    Measures one case for each network, dataset, T and batch size; --model, --batch-size and -T are
    repeatable. With --input or --shape, each network is one case. --compile applies to the dense forms,
    float16 to the optimized networks on GPUs. A case that fails is reported and does not stop the others; the
    exit code is then 1.
    """
    import torch

    from sparseflow.spiking.profile.bench import build_cases, run_grid

    options = _parse_options(inputs, shapes, event_rate, arguments, step_mode)
    if options["inputs"] is not None:
        if grid or batch_size or time_steps:
            raise InputError(
                "`--input` and `--shape` set the shapes of inputs; omit -T, --batch-size and --grid"
            )
        cases = [
            _make_case(name, 1, options, image_size=image_size, width=width)
            for name in model or [DEFAULT_MODEL]
        ]
    else:
        cases = [
            replace(case, **options)
            for case in build_cases(
                models=model,
                dataset=dataset,
                time_steps=time_steps,
                batch_sizes=batch_size,
                image_size=image_size,
                width=width,
                full_grid=grid,
            )
        ]
    torch_device = open_device(device)
    with progress_bar() as progress:
        run = run_grid(
            cases,
            out,
            device=torch_device,
            dtype=torch.float16 if dtype == "float16" else None,
            rounds=rounds,
            compile_baselines=compile_dense,
            cache=cache,
            weights=weights,
            progress=progress,
        )
    results = run.info["results"]
    errors = {name: case["error"] for name, case in results.items() if "error" in case}
    emit(
        {"run": str(run.path), "cases": results},
        as_json,
        _grid_table(run.path, results),
        *(f"failed: {name}: {error}" for name, error in errors.items()),
    )
    if errors:
        fail(f"{len(errors)} of {len(results)} cases failed", code=1)


def _call_table(result: CheckResult, *, title: str) -> Table:
    def describe(difference: Difference | None) -> str:
        if difference is None:
            return "–"
        return f"{difference.largest:.2g} ({100 * difference.mean_error:.2f} %)"

    calls = [*result.calls, *([] if result.rounding is None else [result.rounding])]
    rows = [
        (
            call.name,
            describe(call.outputs),
            describe(call.membranes),
            f"{call.num_predictions - call.num_changed} of {call.num_predictions}",
        )
        for call in calls
    ]
    columns = ("call", ">outputs", ">membranes", ">equal predictions")
    title += ", largest (mean error)"
    return make_table(columns, rows, title=title, no_wrap=("outputs", "membranes"))


def _format_performance(record: dict[str, Any]) -> list[str]:
    """Format latencies, speedups and peak memory of one network."""
    lines = [f"{latency_ms:12.3f} ms  {name}" for name, latency_ms in record["latency_ms"].items()]
    lines.append(f"over the network's own code: {format_speedup(record['speedup_eager'])}")
    lines.append(f"over its fastest dense form: {format_speedup(record['speedup'])}")
    if record["memory_mb"]:
        lines.append(f"peak memory: {_format_memory(record['memory_mb'])}")
    return lines


def _format_memory(memory_mb: dict[str, float]) -> str:
    own_mb, optimized_mb = memory_mb.values()
    return f"{optimized_mb:.1f} MB, {own_mb:.1f} MB with its own code"


def _describe_input(layer: LayerProfile) -> str:
    sources = f" from {', '.join(layer.fed_by)}" if layer.fed_by else ""
    return f"{layer.values} values{sources}" + (f"; {layer.reason}" if layer.reason else "")


def _layer_table(layers: list[LayerProfile], *, title: str) -> Table:
    rows = []
    for layer in layers:
        activity = layer.firing if layer.fed_by else None
        rows.append(
            (
                layer.name,
                f"{100 * activity.firing_rate:.2f} %" if activity else "–",
                f"{100 * activity.zero_block_ratio:.1f} %" if activity else "–",
                f"{100 * activity.silent_channels:.0f} %" if activity else "–",
                f"{layer.firing.height} x {layer.firing.width}" if layer.firing else "–",
                "–" if layer.latency_ms is None else f"{layer.latency_ms:.3f}",
            )
        )
    columns = ("layer", ">firing", ">zero blocks", ">silent channels", ">H x W", ">ms")
    return make_table(columns, rows, title=title, no_wrap=("firing", "H x W", "ms"))


def _grid_table(run_dir: Path, results: dict[str, Any]) -> Table:
    rows = []
    for name, case in results.items():
        if "error" in case:
            rows.append((name, "failed", "", ""))
            continue
        latency_ms = case["latency_ms"]
        facts = [f"fastest dense: {case['baseline']}", f"same top-1: {100 * case['top1_agreement']:.1f} %"]
        if case["firing_rate"] is not None:
            facts.append(f"firing: {100 * case['firing_rate']:.1f} %")
        if case.get("memory_mb"):
            facts.append(f"peak memory: {_format_memory(case['memory_mb'])}")
        rows.append(
            (
                "\n".join([name, *facts]),
                f"{latency_ms[case['baseline']]:.3f} → {latency_ms['optimised']:.3f}",
                format_speedup(case["speedup"]),
                format_speedup(case["speedup_eager"]),
            )
        )
    columns = ("case", ">ms dense → sparse", ">speedup (95 %)", ">over eager (95 %)")
    return make_table(columns, rows, title=str(run_dir))
