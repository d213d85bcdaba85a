"""`sparseflow runs`: list the runs on disk and remove interrupted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseflow.cli.options import JsonOption
from sparseflow.cli.output import emit, make_table

app = typer.Typer(name="runs", help="Runs: list the runs on disk and remove interrupted ones.")

RootArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of the runs.")]


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, as_json: JsonOption = False) -> None:
    """Runs: list the runs on disk and remove interrupted ones. Without a command: `list runs`."""
    if context.invoked_subcommand is None:
        list_(Path("runs"), as_json)


@app.command("list")
def list_(root: RootArgument = Path("runs"), as_json: JsonOption = False) -> None:
    """List the runs of a directory: running, finished, failed, interrupted or damaged."""
    from sparseflow.core.run import list_runs

    summaries = list_runs(root)
    emit(
        {"runs": [run.to_dict() for run in summaries]},
        as_json,
        make_table(
            ("state", "started", "command", "directory", "error"),
            [(run.state, run.started, run.command, str(run.path), run.error or "") for run in summaries],
            title=f"{len(summaries)} runs",
        ),
    )


@app.command()
def clean(
    root: RootArgument = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Remove without a question.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the interrupted runs of a directory, with their measurements."""
    from sparseflow.core.run import list_runs, remove_interrupted

    paths = [run.path for run in list_runs(root) if run.state == "interrupted"]
    if paths and not yes:
        for path in paths:
            typer.echo(str(path), err=True)
        typer.confirm(f"remove {len(paths)} interrupted runs?", abort=True, err=True)
    for path in paths:
        remove_interrupted(path)
    emit({"removed": [str(path) for path in paths]}, as_json, f"{len(paths)} interrupted runs removed")
