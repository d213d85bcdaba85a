"""`sparseflow spiking`: optimize, profile and benchmark spiking networks."""

from __future__ import annotations

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
    open_device,
)
from sparseflow.cli.output import emit, fail, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from sparseflow.spiking.api import LayerProfile

app = typer.Typer(
    name="spiking",
    help="Spiking networks: faster inference by skipping zero activations.",
    no_args_is_help=True,
)

DEFAULT_MODEL = "cifar10-sew-resnet18"

_TIME_STEPS = typer.Option("--time-steps", "-T", min=1, help="Time steps of networks with random weights.")

WeightsOption = Annotated[Path | None, typer.Option("--weights", help="Weights to load, a safetensors file.")]
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
    package.module:factory.
    """


def _open_model(
    model: str,
    weights: Path | None,
    batch_size: int,
    time_steps: int,
    image_size: int,
    width: int,
    num_classes: int,
    device: str,
) -> tuple[Any, Any]:
    from sparseflow.spiking.models.model_zoo import BenchCase, NetworkConfig

    settings = NetworkConfig(
        time_steps=time_steps, num_classes=num_classes, image_size=image_size, width=width
    )
    network, images, _ = BenchCase(model=model, config=settings, batch_size=batch_size).build(weights)
    torch_device = open_device(device)
    return network.to(torch_device), images.to(torch_device)


@app.command()
def optimize(
    model: ModelOption = DEFAULT_MODEL,
    weights: WeightsOption = None,
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

    network, images = _open_model(
        model, weights, batch_size, time_steps, image_size, width, num_classes, device
    )
    with progress_bar() as progress:
        sparseflow.optimize(network, images, policy=policy, cache=cache, progress=progress)
    explanation = sparseflow.explain(network)
    emit(explanation.to_dict(), as_json, explanation)


@app.command()
def profile(
    model: ModelOption = DEFAULT_MODEL,
    weights: WeightsOption = None,
    batch_size: BatchSizeOption = 32,
    time_steps: TimeStepsOption = 4,
    image_size: ImageSizeOption = 32,
    width: WidthOption = 64,
    num_classes: NumClassesOption = 10,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Show the inputs and the sparsity of each convolution and the latency of its optimized group."""
    from sparseflow.spiking.api import profile_layers

    network, images = _open_model(
        model, weights, batch_size, time_steps, image_size, width, num_classes, device
    )
    layers = profile_layers(network, images)
    emit(
        {"model": model, "batch_size": batch_size, "layers": [layer.to_dict() for layer in layers]},
        as_json,
        _layer_table(layers, title=f"{model}, batch size {batch_size}"),
    )


@app.command()
def bench(
    model: ModelsOption = None,
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
    repeatable. --compile applies to the dense forms, float16 to the optimized networks on GPUs. A case that
    fails is reported and does not stop the others; the exit code is then 1.
    """
    import torch

    from sparseflow.spiking.profile.bench import build_cases, run_grid

    cases = build_cases(
        models=model,
        dataset=dataset,
        time_steps=time_steps,
        batch_sizes=batch_size,
        image_size=image_size,
        width=width,
        full_grid=grid,
    )
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


def _layer_table(layers: list[LayerProfile], *, title: str) -> Table:
    rows = []
    for layer in layers:
        activity = layer.firing if layer.fed_by else None
        rows.append(
            (
                layer.name,
                ", ".join(layer.fed_by) or "–",
                layer.values,
                f"{100 * activity.firing_rate:.2f} %" if activity else "–",
                f"{100 * activity.zero_block_ratio:.1f} %" if activity else "–",
                f"{100 * activity.silent_channels:.0f} %" if activity else "–",
                f"{layer.firing.height} x {layer.firing.width}" if layer.firing else "–",
                "–" if layer.latency_ms is None else f"{layer.latency_ms:.3f}",
                layer.reason or "",
            )
        )
    columns = (
        "layer", "inputs", "values", "firing", "zero blocks", "silent channels", "H x W", "ms", "note",
    )  # fmt: skip
    return make_table(columns, rows, title=title, no_wrap=("layer", "H x W", "ms"))


def _grid_table(run_dir: Path, results: dict[str, Any]) -> Table:
    rows = []
    for name, case in results.items():
        if "error" in case:
            rows.append((name, "failed", "", "", "", "", ""))
            continue
        speedup, latency_ms = case["speedup"], case["latency_ms"]
        rows.append(
            (
                name,
                case["baseline"],
                f"{latency_ms[case['baseline']]:.3f} → {latency_ms['optimised']:.3f}",
                f"{speedup['median']:.2f}x ({speedup['low']:.2f}–{speedup['high']:.2f})",
                f"{case['speedup_eager']['median']:.2f}x",
                "–" if case["firing_rate"] is None else f"{100 * case['firing_rate']:.1f} %",
                f"{100 * case['top1_agreement']:.1f} %",
            )
        )
    columns = (
        "case", "fastest dense", "ms dense → sparse", "speedup (95 %)", "over eager", "firing", "same top-1",
    )  # fmt: skip
    return make_table(columns, rows, title=str(run_dir))
