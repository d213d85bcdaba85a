"""`sparseflow tuning`: what a cost model of schedules is made from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sparseflow.tuning.collect import Wanted

app = typer.Typer(
    name="tuning", help="Tuning: labels for a cost model of sparse kernels.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Families = Annotated[
    Path | None,
    typer.Option(help='JSON file {"net100": "net", …}: what to hold out together; by default names tell.'),
]

_SUFFIXES = (".mtx", ".mtx.gz")


@app.callback()
def tuning() -> None:
    """Tuning: labels for a cost model of sparse kernels."""


@app.command()
def collect(
    out: Annotated[Path, typer.Option(help="Folder of the labels; what is in it is gone on with.")],
    matrices: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MATRIX]...", help="Matrix Market files, .mtx or .mtx.gz, or folders of them."
        ),
    ] = None,
    synthetic: Annotated[int, typer.Option(min=0, help="Patterns to draw besides.")] = 0,
    operators: Annotated[
        str, typer.Option(help="What to measure on each, with the columns of dense operands.")
    ] = "spmm:64,spmm:256,spmv,sddmm:64",
    schedules: Annotated[int, typer.Option(min=1, help="Schedules to measure of each task.")] = 128,
    budget: Annotated[float | None, typer.Option(help="Seconds after which to stop.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    families: Families = None,
    seed: Annotated[int, typer.Option(min=0, help="What patterns and schedules are drawn from.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default all CPUs.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Measure on a Ray cluster; auto is the one of this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure schedules on real and drawn patterns, and write a label set.

    The same command goes on with a collection that was stopped, by whatever: no row is lost or repeated.
    """
    from sparseflow.cli.progress import bar
    from sparseflow.errors import InputError
    from sparseflow.tuning.collect import collect as gather
    from sparseflow.tuning.families import read_families

    wanted_operators = _operators(operators)
    files = list(_files(matrices or []))
    if not files and not synthetic:
        raise InputError("there is nothing to measure on; name .mtx files or folders, or give --synthetic")
    known = {} if families is None else read_families(families)
    wanted = _wanted(files, synthetic, seed, wanted_operators, dtype, known)
    with bar() as tell:
        found = gather(
            wanted, out, schedules=schedules, budget_s=budget, seed=seed, threads=threads, cluster=cluster,
            progress=tell,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return
    rate = f", {found.added / found.seconds:.1f} a second" if found.added else ""
    typer.echo(f"{found.tasks} tasks, {found.fewest} rows or more of each")
    typer.echo(
        f"{found.rows} rows ({found.added} new{rate}), {found.failed} of them failed, {found.disturbed} were "
        "disturbed"
    )
    for where, why in found.broken.items():
        typer.echo(f"passed over: {where}: {why}")
    typer.echo(f"labels: {found.folder}")


@app.command("import")
def import_labels(
    file: Annotated[
        Path,
        typer.Argument(help="A table of matrix, schedule and latency_ms, or AutoSparse's lines; or .gz."),
    ],
    operator: Annotated[str, typer.Option(help="What was measured: spmm, spmv or sddmm.")],
    out: Annotated[Path, typer.Option(help="Folder that the labels are written to.")],
    n_cols: Annotated[
        int | None, typer.Option(help="Columns of dense operands; by default what schedules' splits cover.")
    ] = None,
    matrix: Annotated[str | None, typer.Option(help="Name of the matrix that plain lines are of.")] = None,
    matrices: Annotated[
        Path | None, typer.Option(help="Folder of the matrices' .mtx or .mtx.gz files, for their patterns.")
    ] = None,
    families: Families = None,
    device: Annotated[
        str | None, typer.Option(help="What it was measured on; by default the file's name.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    as_json: Json = False,
) -> None:
    """Make a label set of what AutoSparse measured; lines that are no label are counted and listed."""
    from sparseflow.cli.progress import bar
    from sparseflow.tuning import importing
    from sparseflow.tuning.families import read_families

    known = None if families is None else read_families(families)
    with bar() as tell:
        found = importing.import_labels(
            file, out, operator=operator, n_cols=n_cols, matrix=matrix, matrices=matrices, families=known,
            device=device, dtype=dtype, progress=tell,
        )  # fmt: skip
    told = found.to_dict()
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    typer.echo(f"{found.rows} rows of {len(found.tasks)} tasks, of {found.patterns} the pattern is known")
    for kind, of in told["rejected"].items():
        typer.echo(f"rejected: {of['rows']} rows, {kind}; line {of['first_line']}: {of['first_reason']}")
    for doubt in found.doubts:
        typer.echo(f"in doubt: {doubt}")
    typer.echo(f"labels: {found.folder}; rejected lines: {found.folder / importing.REJECTED}")


def _operators(given: str) -> list[tuple[str, int | None]]:
    """`"spmm:64,spmv"` as names and columns."""
    from sparseflow.errors import InputError
    from sparseflow.tuning.operators import operator

    found: list[tuple[str, int | None]] = []
    for text in given.split(","):
        name, colon, width = text.partition(":")
        wide = bool(operator(name).dense_axes)
        if wide != bool(colon) or (wide and not (width.isascii() and width.isdigit() and int(width) > 0)):
            expected = f"{name}:64, with its columns" if wide else f"{name} alone"
            raise InputError(f"`--operators {given}`: {text!r} must be {expected}")
        found.append((name, int(width) if wide else None))
    return list(dict.fromkeys(found))


def _files(given: Iterable[Path]) -> Iterator[Path]:
    """The Matrix Market files that are named, and those in folders that are."""
    from sparseflow.errors import InputError

    for path in given:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
            if not inside:
                raise InputError(f"{path} holds no {' or '.join(_SUFFIXES)} file")
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise InputError(f"there is no file {path}")


def _wanted(
    files: Iterable[Path],
    synthetic: int,
    seed: int,
    operators: list[tuple[str, int | None]],
    dtype: str,
    families: dict[str, str],
) -> Iterator[Wanted]:
    """What labels are wanted of, read and drawn one pattern after the other."""
    import numpy as np

    from sparseflow.tuning.collect import Wanted
    from sparseflow.tuning.families import family_of
    from sparseflow.tuning.matrices import Pattern, read_matrix
    from sparseflow.tuning.synthetic import KINDS, draw

    def patterns() -> Iterator[tuple[str, Pattern]]:
        for file in files:
            yield file.name.removesuffix(".gz").removesuffix(".mtx"), read_matrix(file).pattern
        kinds = tuple(KINDS)
        for number in range(synthetic):
            # Each has a generator of its own: more of them begin with the same ones.
            rng = np.random.default_rng([seed, number])
            yield draw(rng, kind=kinds[number % len(kinds)])

    for name, pattern in patterns():
        for operator, n_cols in operators:
            yield Wanted(
                operator=operator,
                matrix=name,
                pattern=pattern,
                n_cols=n_cols,
                dtype=dtype,
                family=family_of(name, families),
            )
