"""`sparseflow report`: one static site of all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseflow.cli.options import JsonOption, OutDirOption
from sparseflow.cli.output import emit

app = typer.Typer(name="report", help="Reports: one static site of all runs.", no_args_is_help=True)


@app.callback()
def report() -> None:
    """Reports: one static site of all runs."""


@app.command()
def site(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Directories of runs and reports.")],
    out: OutDirOption,
    claims: Annotated[
        Path | None,
        typer.Option("--claims", metavar="DIR", help="Directory of claims, such as results/ of a checkout."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build a static site: all runs, comparisons of runs of one kind, and the history of claims.

    The site opens from disk, without a server; an existing site is replaced. Damaged and unfinished runs are
    listed with the reason.
    """
    from sparseflow.core.report.site import build_site

    result = build_site(runs, out, claims_dir=claims)
    emit(
        result.to_dict(),
        as_json,
        *(f"{path}: {problem}" for path, problem in result.problems.items()),
        f"{result.runs} runs, {result.comparisons} comparisons, {result.claims} claims",
        f"site: {result.index}",
    )
