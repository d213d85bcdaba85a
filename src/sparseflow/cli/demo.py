"""`sparseflow demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    out: Annotated[Path, typer.Option(help="Folder that gets the run's own folder.")] = Path("runs"),
    batch: Annotated[int, typer.Option(min=1, max=256, help="Images a batch.")] = 32,
    rounds: Annotated[int, typer.Option(min=4, help="Paired timing rounds.")] = 16,
    compiled: Annotated[
        bool, typer.Option(help="Let the dense side use torch.compile too (needs a C++ compiler).")
    ] = True,
    cache: Annotated[bool, typer.Option(help="Remember the optimiser's decisions on disk.")] = True,
) -> None:
    """Measure the shipped network on this machine, dense and optimised, and write a report."""
    from rich.console import Console

    from sparseflow.cli.progress import progress_bar
    from sparseflow.spiking.demo import run_demo

    with progress_bar() as progress:
        result = run_demo(
            out=out, batch=batch, rounds=rounds, compiled=compiled, cache=cache, progress=progress
        )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    console = Console()
    console.print(result.explanation.table(brief=True))
    speed = result.speedup
    same = "all predictions identical" if result.predictions_identical else "PREDICTIONS DIFFER"
    console.print(
        f"accuracy on {result.images} images: {100 * result.accuracy_before:.2f} % before, "
        f"{100 * result.accuracy_after:.2f} % after; {same}"
    )
    for name, ms in sorted(result.ms.items(), key=lambda item: -item[1]):
        console.print(f"  {ms:9.2f} ms  {name}", highlight=False)
    console.print(
        f"[bold]{speed.median:.2f}x[/] end to end (95 %: {speed.low:.2f}–{speed.high:.2f}) against the "
        f"fastest dense setting, '{result.baseline}', {result.threads} threads, batches of {result.batch}"
    )
    console.print(f"report: {result.report}")
