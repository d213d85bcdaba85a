"""`sparseflow pruning`: train, evaluate, compact and time video transformers that prune tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseflow.cli.options import (
    BatchSizeOption,
    CompileOption,
    ConfigOption,
    DeviceOption,
    HalfDtypeOption,
    JsonOption,
    ModelNamesOption,
    OptionalBudgetMsOption,
    OptionalConfigOption,
    OutDirOption,
    OutFileOption,
    RoundsOption,
    SeedsOption,
    SetOption,
    WorkersOption,
    check_out_file,
    get_command_line,
    open_device,
    split_list,
)
from sparseflow.cli.output import emit, make_table
from sparseflow.cli.progress import progress_bar

app = typer.Typer(add_completion=False, no_args_is_help=True)

ModelArgument = Annotated[
    Path, typer.Argument(help="Model of a training (model.safetensors), or a compact one.")
]


@app.callback()
def pruning() -> None:
    """Pruning: token, head and channel pruning for video transformers.

    Shipped configurations: moving_digits, moving_objects, video_tasks, ast2_ucf101.
    """


@app.command()
def train(
    config: ConfigOption,
    out: OutDirOption,
    overrides: SetOption = None,
    distill: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", help="Learn the class probabilities of a trained model, such as a dense one."
        ),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train a model; with torchrun on several GPUs."""
    from sparseflow.pruning.training.task import MODEL_FILE
    from sparseflow.pruning.training.train import train as run_training

    settings = _read_settings(config, overrides, teacher=distill)
    torch_device = open_device(device)
    with progress_bar() as progress:
        result = run_training(settings, out, device=torch_device, progress=progress)
    if result.accuracy is None:
        return  # Only the first process of torchrun prints the result.
    model, report = out / MODEL_FILE, out / "report.html"
    accuracy = result.accuracy.to_dict()
    emit(
        {"model": str(model), "report": str(report), **accuracy, **result.stats},
        as_json,
        _format_accuracy(accuracy),
        *(
            f"{name}: {value:.1%}"
            for name, value in result.stats.items()
            if name.startswith("sparsity_") and value
        ),
        f"model: {model}",
        f"report: {report}",
    )


@app.command("eval")
def evaluate(
    model: ModelArgument,
    config: ConfigOption,
    overrides: SetOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on the test split, by clips and by videos."""
    from sparseflow.pruning.api import evaluate_model

    settings = _read_settings(config, overrides)
    torch_device = open_device(device)
    with progress_bar() as progress:
        result = evaluate_model(model, settings, device=torch_device, progress=progress)
    record = result.to_dict()
    emit(record | {"videos": len(result.correct)}, as_json, _format_accuracy(record))


@app.command()
def compact(model: ModelArgument, out: OutFileOption, as_json: JsonOption = False) -> None:
    """Remove the pruned heads, channels and stages of a model and save the smaller model."""
    from sparseflow.pruning.api import compact_file

    result = compact_file(model, out)
    emit(
        result.to_dict(),
        as_json,
        f"{result.gflops:.3f} GFLOP per clip, {result.dense_gflops:.3f} before",
        f"{result.num_parameters:,} parameters, {result.num_parameters_before:,} before",
        f"model: {result.path}",
    )


@app.command()
def patch(
    model: Annotated[str, typer.Argument(help="Hugging Face model on disk, as hf:FOLDER.")],
    keep: Annotated[
        float, typer.Option(help="Share of tokens that is kept from a quarter of the depth on, 0 to 1.")
    ] = 0.5,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BLOCK=SHARE",
            help="Share of all tokens of a block, instead of --keep. Repeatable.",
        ),
    ] = None,
    selector: Annotated[str, typer.Option(help="Token selector, such as ast, attention or tome.")] = "ast",
    budget_ms: OptionalBudgetMsOption = None,
    batch_size: BatchSizeOption = 8,
    dtype: HalfDtypeOption = "float32",
    compile_models: CompileOption = False,
    rounds: RoundsOption = 20,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Show what `sparseflow.pruning.patch` makes of a model: tokens, FLOPs and latency.

    The folder is not modified. Latencies are those of the vision encoder on random inputs.
    """
    import torch

    from sparseflow.pruning.patching.patch import patch as patch_model
    from sparseflow.pruning.patching.profile import profile_patch

    torch_device, torch_dtype = open_device(device), getattr(torch, dtype)
    module = _load_hf_folder(model).to(torch_device, torch_dtype)
    result = patch_model(
        module,
        keep=keep,
        stages=dict(_parse_stage(text) for text in stage) if stage else None,
        selector=selector,
        budget_ms=budget_ms,
    )
    with progress_bar() as progress:
        profile = profile_patch(
            module,
            batch_size=batch_size,
            device=torch_device,
            dtype=torch_dtype,
            compiled=compile_models,
            rounds=rounds,
            progress=progress,
        )
    record = profile.to_dict()
    tokens = [f"{count} from block {block}" for block, count in result.list_changes()]
    emit(
        result.to_dict() | record,
        as_json,
        f"{result.family}: {', '.join(tokens)} (tokens of the grid {'x'.join(map(str, result.grid))})",
        make_table(
            ("encoder", ">latency, ms", ">GFLOP per sample"),
            [
                (name, f"{record['latency_ms'][name]:.3f}", f"{record['gflops'][name]:.3f}")
                for name in record["latency_ms"]
            ],
        ),
        "speedup: {median:.2f}x ({low:.2f} to {high:.2f})".format_map(record["speedup"]),
    )


def _load_hf_folder(model: str) -> Any:
    """Load a model of transformers from `hf:FOLDER`."""
    from sparseflow.errors import InputError
    from sparseflow.latency.graph.huggingface import load_folder
    from sparseflow.latency.graph.sources import HF_PREFIX

    if not model.startswith(HF_PREFIX):
        raise InputError(f"{model!r} is not supported; expected {HF_PREFIX}FOLDER")
    module: Any = load_folder(Path(model.removeprefix(HF_PREFIX)))
    if module._supports_sdpa:  # the folder is loaded with the attention that can be exported
        module.set_attn_implementation("sdpa")
    return module


def _parse_stage(text: str) -> tuple[int, float]:
    from sparseflow.errors import InputError

    block, _, share = text.partition("=")
    try:
        return int(block), float(share)
    except ValueError:
        raise InputError(f"`--stage {text}` must be BLOCK=SHARE, such as 3=0.5") from None


@app.command()
def profile(
    model: Annotated[
        Path | None, typer.Argument(help="Model of a training; without it, --config and random weights.")
    ] = None,
    config: OptionalConfigOption = None,
    overrides: SetOption = None,
    batch_size: BatchSizeOption = 8,
    dtype: HalfDtypeOption = "float32",
    compile_models: CompileOption = False,
    rounds: RoundsOption = 20,
    fit: Annotated[
        Path | None,
        typer.Option(
            callback=check_out_file,
            help="Also fit a latency model for the budget loss and write it to this file.",
        ),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Time a model dense, masked and compact."""
    from sparseflow.errors import InputError
    from sparseflow.pruning.api import profile_model

    if overrides and config is None:
        raise InputError(f"`--set {overrides[0]}` needs `--config`; a saved model has fixed settings")
    settings = None if config is None else _read_settings(config, overrides)
    torch_device = open_device(device)
    with progress_bar() as progress:
        result = profile_model(
            model,
            settings,
            batch_size=batch_size,
            device=torch_device,
            dtype=dtype,
            compiled=compile_models,
            rounds=rounds,
            latency_model_path=fit,
            progress=progress,
        )
    table = make_table(
        ("model", ">clips/s", "speedup (95 %)", ">GFLOP per clip"),
        [
            (
                row["model"],
                f"{row['clips_per_s']:.1f}",
                "{median:.2f}x ({low:.2f} to {high:.2f})".format_map(row["speedup"]),
                f"{row['gflops']:.3f}",
            )
            for row in result.rows()
        ],
    )
    emit(
        result.to_dict(),
        as_json,
        table,
        f"largest difference of the compact model's scores: {result.profile.error:.1e} of the largest score",
        *(
            []
            if result.latency_model is None
            else [f"latency model: {fit}; median error {result.latency_model.error:.1%} on held-out models"]
        ),
    )


@app.command()
def compare(
    context: typer.Context,
    config: ConfigOption,
    out: OutDirOption,
    overrides: SetOption = None,
    seeds: SeedsOption = 5,
    models: ModelNamesOption = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of tokens after the last stage; by default that of the configuration. Repeatable.",
        ),
    ] = None,
    training_free: Annotated[
        bool,
        typer.Option("--training-free", help="Also evaluate selectors with the weights of the dense model."),
    ] = False,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Also train AST without each of its parts, and on one frame.")
    ] = False,
    workers: WorkersOption = 1,
    batch_size: BatchSizeOption = 8,
    rounds: RoundsOption = 20,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train AST and its baselines at an equal number of kept tokens; compare accuracy and latency."""
    from sparseflow.pruning.api import compare_models
    from sparseflow.pruning.training.comparison import TRAINING_FREE

    settings = _read_settings(config, overrides)
    open_device(device)  # Fails early; the trainings open it by name.
    with progress_bar() as progress:
        result = compare_models(
            settings,
            out,
            num_seeds=seeds,
            names=split_list(models),
            shares=share or (),
            training_free=training_free,
            ablations=ablations,
            workers=workers,
            batch_size=batch_size,
            rounds=rounds,
            device=device,
            command=get_command_line(context),
            progress=progress,
        )
    timings = {row.model: row for row in result.latency}
    rows = []
    for row in result.models:
        timing = timings.get(row.model.removesuffix(TRAINING_FREE))
        rows.append(
            (
                row.model,
                f"{row.accuracy:.2%} ({row.accuracy_low:.2%} to {row.accuracy_high:.2%})",
                f"{timing.speedup:.2f}x" if timing else "–",
                f"{timing.gflops:.3f}" if timing else "–",
            )
        )
    emit(
        result.to_dict(),
        as_json,
        make_table(("model", "accuracy (95 %)", ">speedup over dense", ">GFLOP per clip"), rows),
        f"report: {result.page}",
    )


def _read_settings(config: str, overrides: list[str] | None, *, teacher: Path | None = None) -> Any:
    from sparseflow.core.config import parse_overrides
    from sparseflow.pruning.config import read_config

    settings = parse_overrides(overrides or [], extra="pruning")
    return read_config(config, settings if teacher is None else settings | {"distill.teacher": str(teacher)})


def _format_accuracy(accuracy: Mapping[str, Any]) -> str:
    return (
        f"{accuracy['video_top1']:.2%} top-1 accuracy over videos ({accuracy['video_top5']:.2%} top-5), "
        f"{accuracy['clip_top1']:.2%} over clips"
    )
