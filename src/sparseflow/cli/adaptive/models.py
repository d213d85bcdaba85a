"""`grid-vqa` and `importance`: train a model, and measure the importance of its blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from sparseflow.cli.adaptive.base import (
    ArchivesOption,
    ModelArgument,
    QuestionsOption,
    app,
    silence_transformers,
)
from sparseflow.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutDirOption,
    OutFileOption,
    SetOption,
    open_device,
)
from sparseflow.cli.output import emit
from sparseflow.cli.progress import progress_bar


@app.command("grid-vqa")
def grid_vqa(
    out: OutDirOption,
    config: ConfigOption = "digits",
    overrides: SetOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train a small model that answers questions about images, under random plans.

    Shipped configurations: digits, demo, gpu, large.
    """
    from sparseflow.adaptive.grid_vqa.config import load_vqa_config
    from sparseflow.adaptive.grid_vqa.train import train
    from sparseflow.core.config import parse_overrides

    settings = load_vqa_config(config, parse_overrides(overrides or [], extra="adaptive"))
    silence_transformers()
    torch_device = open_device(device)
    with progress_bar() as progress:
        result = train(settings, out, device=torch_device, progress=progress)
    if result.report is None:
        return  # Only the first process of torchrun prints the result.
    emit(
        {"folder": str(result.folder), **result.report},
        as_json,
        f"accuracy of the full plan: {result.report['accuracy']:.1%}",
        f"model: {result.folder}",
    )


@app.command()
def importance(
    model: ModelArgument,
    out: OutFileOption,
    questions: QuestionsOption = None,
    max_samples: Annotated[int, typer.Option(min=1, help="Maximum questions for each set of blocks.")] = 512,
    beam: Annotated[int, typer.Option(min=1, help="Sets of each size that are extended.")] = 4,
    archives: ArchivesOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure which blocks of a model can be skipped, alone and together, by the accuracy without them.

    A journal next to the output file allows an interrupted search to resume.
    """
    from sparseflow.adaptive.study.tasks import measure_model_importance

    silence_transformers()
    torch_device = open_device(device)
    with progress_bar() as progress:
        result = measure_model_importance(
            model,
            out,
            questions=questions,
            archives=archives or (),
            max_samples=max_samples,
            beam=beam,
            device=torch_device,
            progress=progress,
        )
    emit(
        result.to_dict(),
        as_json,
        f"all blocks: accuracy {result.full_score:.1%} on {result.samples} questions; "
        f"{result.evaluations} sets evaluated",
        *(
            f"without block {drop.blocks[0]}: {-drop.drop:+.1%} ({-drop.high:+.1%} to {-drop.low:+.1%})"
            for drop in result.single_drops
        ),
        f"importance: {out}",
    )
