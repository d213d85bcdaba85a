"""Results of commands on standard output: one JSON object, or tables and lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_FILE_WIDTH = 160
"""Columns of tables where standard output is no terminal."""


def emit(record: Mapping[str, Any], as_json: bool, *text: RenderableType) -> None:
    """Print the result of a command.

    Args:
        record: The result in JSON types.
        as_json: Print `record` as one line of JSON, and nothing else.
        text: Lines and Rich tables for a reader; by default one line for each entry of `record`.
    """
    if as_json:
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    for item in text or format_entries(record):
        if isinstance(item, str):
            typer.echo(item)
        else:
            _print_rich(item)


def fail(message: str, *, code: int) -> NoReturn:
    """Report a failure after the result was printed, and exit."""
    typer.secho(f"sparseflow: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code)


def format_entries(record: Mapping[str, Any]) -> list[str]:
    """Format each entry of a record as `name: value`."""
    return [
        f"{name.replace('_', ' ')}: {f'{value:.6g}' if isinstance(value, float) else value}"
        for name, value in record.items()
    ]


def format_speedup(speedup: Mapping[str, float]) -> str:
    """Format a speedup with its interval: `median`, `low` and `high`."""
    text = f"{speedup['median']:.2f}x ({speedup['low']:.2f}–{speedup['high']:.2f})"
    return f"{text}, not significant" if speedup["low"] <= 1 <= speedup["high"] else text


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", no_wrap: Iterable[str] = ()
) -> Table:
    """Build a table whose cells are plain text.

    Args:
        columns: Headings; a leading `>` aligns the column to the right.
        rows: Cells, one for each column.
        title: Text above the table.
        no_wrap: Headings of columns that a narrow screen must not wrap.
    """
    from rich.table import Table
    from rich.text import Text

    # Strings would be read as markup: `[extra]` would vanish, and `:x:` would become a symbol.
    table = Table(title=Text(title, style="table.title") if title else None, title_justify="left")
    fixed = set(no_wrap)
    for column in columns:
        heading = column.removeprefix(">")
        table.add_column(
            Text(heading),
            justify="right" if column.startswith(">") else "left",
            no_wrap=heading in fixed,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _print_rich(item: RenderableType) -> None:
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=_FILE_WIDTH)).print(item)
