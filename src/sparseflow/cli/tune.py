"""`sparseflow tune`: the fastest kernel for a sparse matrix."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def tune(
    operator: Annotated[str, typer.Argument(help="spmm, spmv or sddmm.")],
    matrix: Annotated[Path, typer.Argument(help="A Matrix Market file, .mtx or .mtx.gz.")],
    n_cols: Annotated[int | None, typer.Option(help="Columns of the dense operands; none for spmv.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds that it may take, about.")] = 60.0,
    trials: Annotated[int | None, typer.Option(min=0, help="Schedules to measure at most.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help="How to search: random, evolutionary, annealing or qlearning; guided-… lets a model choose."
        ),
    ] = "guided-evolutionary",
    net: Annotated[
        Path | None,
        typer.Option(help="An AutoSparse Net that a guided method begins with; by default the one shipped."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default all CPUs.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="What the search draws from.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Keeps every trial; a search that was stopped goes on from there.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Measure on a Ray cluster; auto is the one of this machine.")
    ] = None,
    machines: Annotated[int, typer.Option(min=1, help="Machines of the cluster to keep busy.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Save the kernel here, such as kernel.sfk.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Search the fastest schedule for a sparse matrix and compare it with scipy and with expert schedules.

    The reference, which every ratio is to, is CSR with sums in registers for spmm and CSR otherwise.
    """
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError
    from sparseflow.tuning.matrices import read_matrix
    from sparseflow.tuning.tuner import explore

    if dtype not in ("float32", "float64"):
        raise InputError(f"`dtype` (={dtype!r}) must be float32 or float64")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} to write {out.name} to")
    prior = None
    if net is not None:
        from sparseflow.tuning.net.saved import load
        from sparseflow.tuning.net.scoring import scorer

        prior = partial(scorer, load(net))
    given = read_matrix(matrix, dtype=np.dtype(dtype))
    with progress_bar() as progress:
        found = explore(
            operator, given, n_cols=n_cols, budget_s=budget, trials=trials, method=method, prior=prior,
            threads=threads, seed=seed, folder=folder, cluster=cluster, machines=machines, progress=progress,
        )  # fmt: skip
    if out is not None:
        found.kernel.save(out)
    if as_json:
        typer.echo(json.dumps(found.to_dict() | {"saved": None if out is None else str(out)}))
        return
    console = Console()
    rows, cols = given.shape
    width = "" if n_cols is None else f", {n_cols} columns"
    table = Table(title=escape(f"{operator}, {matrix.name}: {rows} x {cols}, {given.nnz} elements{width}"))
    table.title_justify = "left"
    table.add_column("what")
    table.add_column("time / reference", justify="right")
    for name, ratio in sorted(found.baselines.items(), key=lambda one: -one[1]):
        table.add_row(name, f"{ratio:.3f}")
    table.add_row("[bold]tuned", f"[bold]{found.best:.3f}")
    console.print(table)
    failed = sum(trial.error is not None for trial in found.trials)
    spent = ", ".join(f"{part} {took:.1f} s" for part, took in found.seconds.items())
    typer.echo(f"{len(found.trials)} schedules, {failed} of them failed; {spent}")
    typer.echo(f"{found.kernel.speedup or 1.0:.2f}x the best of the others")
    typer.echo(f"schedule: {found.kernel.schedule or 'none, scipy computes'}")
    if out is not None:
        typer.echo(f"kernel: {out}")
