"""`sparseflow adaptive demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseflow.cli.adaptive.base import ArchivesOption, app, silence_transformers
from sparseflow.cli.options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    OutDirOption,
    SeedOption,
    open_device,
)
from sparseflow.cli.output import emit, make_table
from sparseflow.cli.progress import progress_bar


@app.command()
def demo(
    model: ModelOption = "digits",
    out: OutDirOption = Path("runs"),
    num_questions: Annotated[
        int | None, typer.Option(min=1, help="Questions for each budget; by default 40, or fewer if slow.")
    ] = None,
    num_budgets: Annotated[int, typer.Option(min=2, help="Number of budgets, at equal ratios.")] = 5,
    archives: ArchivesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Answer questions about images within latency budgets, with plans measured on this machine.

    A model is the directory of a Grid-VQA model, or a shipped one: digits, cifar. Writes a run with an HTML
    report into a new directory under the output directory.
    """
    from sparseflow.adaptive.demo import run_demo

    silence_transformers()
    torch_device = open_device(device)
    with progress_bar() as progress:
        result = run_demo(
            model,
            out_dir=out,
            num_questions=num_questions,
            num_budgets=num_budgets,
            archives=archives or (),
            device=torch_device,
            seed=seed,
            progress=progress,
        )
    rows = []
    for row in result.budgets:
        fractions = (row.in_time, row.goodput, row.full_model_goodput, row.fastest_plan_goodput)
        rows.append((f"{row.budget_ms:.3g}", *(f"{100 * fraction:.0f}" for fraction in fractions), row.plan))
    columns = (
        ">budget, ms",
        ">in time, %",
        ">correct and in time, %",
        ">full model, %",
        ">fastest plan, %",
        "most used plan",
    )
    emit(
        result.to_dict(),
        as_json,
        make_table(columns, rows),
        f"{result.num_questions} questions: the full model takes {result.full_model_ms:.1f} ms (accuracy "
        f"{result.full_model_accuracy:.0%}), the fastest plan {result.fastest_plan_ms:.1f} ms (accuracy "
        f"{result.fastest_plan_accuracy:.0%}); {result.in_time:.1%} of requests met their budget",
        f"report: {result.report}",
    )
