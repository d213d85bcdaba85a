"""The command that shows the main job on this machine: `demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparseflow.cli.adaptive.base import Archives, Device, Json, app


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="A Grid-VQA model's folder, or one that is shipped: digits, cifar.")
    ] = "digits",
    out: Annotated[Path, typer.Option(help="Folder that gets the run's own folder.")] = Path("runs"),
    questions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Asked under every budget; by default 40, or fewer where these would take minutes."
        ),
    ] = None,
    budgets: Annotated[int, typer.Option(min=2, help="How many, at equal ratios.")] = 5,
    archives: Archives = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Answer questions about images within budgets, by plans that are measured on this machine."""
    from sparseflow.adaptive.demo import run_demo
    from sparseflow.cli.adaptive.base import quiet
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar

    quiet()
    with progress_bar() as progress:
        found = run_demo(
            model, out=out, questions=questions, budgets=budgets, archives=archives or (),
            device=open_device(device), seed=seed, progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "budget, ms", "in time, %", "right in time, %", "whole model, %", "quickest, %", "plan, mostly"
    )
    for each in found.budgets:
        shares = (each.in_time, each.goodput, each.whole, each.quickest)
        table.add_row(f"{each.budget_ms:.3g}", *(f"{100 * share:.0f}" for share in shares), each.plan)
    console = Console()
    # Where output goes to a file, there is no edge to break lines at.
    (console if console.is_terminal else Console(width=160)).print(table)
    console.print(
        f"{found.questions} questions: the whole model takes {found.whole_ms:.1f} ms and is right in "
        f"{found.whole_right:.0%}, the quickest plan {found.quickest_ms:.1f} ms and "
        f"{found.quickest_right:.0%}; {found.in_time:.1%} of requests with a budget kept it",
        highlight=False,
    )
    typer.echo(f"report: {found.report}")
