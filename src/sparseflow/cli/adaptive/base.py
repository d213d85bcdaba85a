"""Application and options that the adaptive commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True)

_PROFILE = typer.Option("--profile", help="Profile (Parquet) or predictor (JSON) of the model.")
_MAX_BATCH_SIZE = typer.Option("--max-batch-size", min=1, help="Maximum concurrent requests of the engine.")


def _find_model(model: Path) -> Path:
    """Return the directory of a shipped model if there is no such path."""
    if model.exists():
        return model
    from sparseflow.adaptive.data import get_pretrained_dir, list_pretrained

    return get_pretrained_dir(str(model)) if str(model) in list_pretrained() else model


ModelArgument = Annotated[
    Path,
    typer.Argument(
        callback=_find_model,
        help="Directory of a model in transformers' format, or a shipped one: digits, cifar.",
    ),
]
ProfileOption = Annotated[Path, _PROFILE]
OptionalProfileOption = Annotated[Path | None, _PROFILE]
MaxBatchSizeOption = Annotated[int, _MAX_BATCH_SIZE]
OptionalMaxBatchSizeOption = Annotated[int | None, _MAX_BATCH_SIZE]
ControllerOption = Annotated[
    Path | None, typer.Option("--controller", help="Trained controllers, a safetensors file.")
]
PlanQualityOption = Annotated[
    Path | None, typer.Option("--plan-quality", help="Accuracy of plans, as written by `eval`.")
]
QuestionsOption = Annotated[
    Path | None,
    typer.Option("--questions", help="JSON lines with prompt, answer and images; by default Grid-VQA's."),
]
ArchivesOption = Annotated[
    list[Path] | None,
    typer.Option("--archive", help="Image archive of Grid-VQA, if it was moved. Repeatable."),
]


@app.callback()
def adaptive() -> None:
    """Adaptive inference: keep latency budgets with a multimodal mixture-of-experts model."""


def silence_transformers() -> None:
    """Hide progress bars and hints of transformers; errors stay visible."""
    from sparseflow.core.extras import require

    logging = require("transformers.utils.logging", "adaptive")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
