"""Options that several commands share: one name, type and help text for each concept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparseflow.errors import DeviceError, InputError

if TYPE_CHECKING:
    import torch


def _check_out_dir(path: Path | None) -> Path | None:
    from sparseflow.core.files import check_output

    if path is not None:
        check_output(path, directory=True)
    return path


def check_out_file(path: Path | None) -> Path | None:
    """Test an output file for writing, as the callback of an option."""
    from sparseflow.core.files import check_output

    if path is not None:
        check_output(path)
    return path


_DEVICE = typer.Option(
    "--device", help="Device: cpu, cuda, cuda:N, or auto for the GPU with the most free memory."
)
_OUT_DIR = typer.Option(
    "--out", metavar="DIR", callback=_check_out_dir, help="Output directory; a run in it is resumed."
)
_OUT_FILE = typer.Option("--out", metavar="FILE", callback=check_out_file, help="Output file.")
_SEED = typer.Option("--seed", min=0, help="Random seed.")
_CONFIG = typer.Option("--config", metavar="NAME|FILE", help="Configuration: a YAML file or a shipped name.")
_LOAD = typer.Option("--load", min=0.0, max=1.0, help="Share of the device that other work uses, 0 to 1.")
_MODEL = typer.Option("--model", metavar="MODEL", help="Model: a file, a directory or a shipped name.")
_BUDGET_S = typer.Option("--budget-s", min=0.0, help="Time budget, seconds.")
_BUDGET_MS = typer.Option("--budget-ms", min=0.0, help="Latency budget, ms.")
_DTYPE = typer.Option("--dtype", help="Data type.")
_BATCH_SIZE = typer.Option("--batch-size", min=1, help="Batch size.")

DeviceOption = Annotated[str, _DEVICE]
"""Device to compute on; the default is `cpu`."""
InferredDeviceOption = Annotated[str | None, _DEVICE]
"""As `DeviceOption`, where an input file or a kind of load implies the device; the default is None."""

OutDirOption = Annotated[Path, _OUT_DIR]
OptionalOutDirOption = Annotated[Path | None, _OUT_DIR]
OutFileOption = Annotated[Path, _OUT_FILE]
OptionalOutFileOption = Annotated[Path | None, _OUT_FILE]

SeedOption = Annotated[int, _SEED]
"""Random seed; the default is 0."""
OptionalSeedOption = Annotated[int | None, _SEED]
"""As `SeedOption`, where a configuration or a plan holds a seed; the default is None."""
ModelNamesOption = Annotated[
    str | None,
    typer.Option("--models", help="Models to compare, separated by commas; by default all."),
]

SeedsOption = Annotated[int, typer.Option("--seeds", min=1, help="Number of runs, with seeds from 0.")]

ConfigOption = Annotated[str, _CONFIG]
OptionalConfigOption = Annotated[str | None, _CONFIG]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, such as train.epochs=3. Repeatable."
    ),
]

MethodOption = Annotated[str, typer.Option("--method", help="Search method.")]
BudgetSOption = Annotated[float, _BUDGET_S]
OptionalBudgetSOption = Annotated[float | None, _BUDGET_S]
"""As `BudgetSOption`; None is unlimited."""
OptionalBudgetMsOption = Annotated[float | None, _BUDGET_MS]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; all by default, 1 for a predictor.")
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="Parallel processes.")]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="ADDRESS", help="Ray cluster to run on; auto is this machine's."),
]

BatchSizeOption = Annotated[int, _BATCH_SIZE]
BatchSizesOption = Annotated[list[int] | None, _BATCH_SIZE]
"""As `BatchSizeOption`, for commands that measure several batch sizes; repeatable."""

LoadOption = Annotated[float | None, _LOAD]
LoadsOption = Annotated[list[float] | None, _LOAD]
"""As `LoadOption`, for commands that create or measure several loads; repeatable."""

HostOption = Annotated[
    str, typer.Option("--host", help="Address to listen on; 0.0.0.0 accepts other machines.")
]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 selects a free one.")
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Timing rounds.")]
PairedRoundsOption = Annotated[int, typer.Option("--rounds", min=4, help="Timing rounds.")]
"""As `RoundsOption`, for paired comparisons, whose intervals need at least four rounds."""
CompileOption = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile models with torch.compile.")
]
DtypeOption = Annotated[Literal["float32", "float64"], _DTYPE]
HalfDtypeOption = Annotated[Literal["float32", "bfloat16", "float16"], _DTYPE]
"""As `DtypeOption`, for models that run in half precision."""
AnyDtypeOption = Annotated[Literal["float32", "float64", "float16", "bfloat16"], _DTYPE]
"""As `DtypeOption`, where a GPU also computes in half precision."""
Fp16DtypeOption = Annotated[Literal["float32", "float16"], _DTYPE]
CacheOption = Annotated[bool, typer.Option("--cache/--no-cache", help="Cache decisions on disk.")]

ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        help="Shape of an input, such as 1,3,224,224; for an input of an ONNX model name=1,3,224,224. "
        "Repeatable.",
    ),
]

InputValuesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="Value of an input of an ONNX model: a number, a list such as 1,64, or a .npy file; by default "
        "random. Repeatable.",
    ),
]

ModelOption = Annotated[str, _MODEL]
ModelsOption = Annotated[list[str] | None, _MODEL]
"""As `ModelOption`, for commands that measure several models; repeatable."""
OptionalModelOption = Annotated[Path | None, _MODEL]


def split_list(text: str | None) -> list[str] | None:
    """Split a comma-separated option; None stays None."""
    return None if text is None else [item.strip() for item in text.split(",")]


def get_command_line(context: typer.Context) -> str:
    """Return the command line of the current invocation, quoted for a shell."""
    return context.obj


def parse_device(name: str) -> tuple[str, int | None]:
    """Parse the value of `--device` without looking for the device.

    Returns:
        Kind (`"cpu"`, `"cuda"` or `"auto"`) and index; None without an index.

    Raises:
        InputError: The name has another form.
    """
    kind, colon, index = name.partition(":")
    if kind == "cuda" and colon and index.isascii() and index.isdigit():
        return kind, int(index)
    if name not in ("cpu", "cpu:0", "cuda", "auto"):
        raise InputError(f"`--device {name}` must be cpu, cuda, cuda:N or auto")
    return kind, None


def open_device(name: str) -> torch.device:
    """Return the device that `--device` names.

    Args:
        name: `cpu`, `cuda`, `cuda:N`, or `auto`: the GPU with the most free memory, else the CPU.

    Raises:
        InputError: The name has another form.
        DeviceError: torch sees no such CUDA device.
    """
    import torch

    from sparseflow.core.device import select_device

    kind, index = parse_device(name)
    if kind == "auto":
        return select_device(None)
    count = torch.cuda.device_count()
    if kind == "cuda" and (index or 0) >= count:
        raise DeviceError(f"`--device {name}`: torch sees {count} CUDA devices; use another one or cpu")
    return torch.device(kind) if index is None else torch.device(kind, index)
