"""`sparseflow doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Show what hardware and packages are here, what works and what to do about the rest."""
    from sparseflow.core.doctor import Check, diagnose

    found = diagnose()
    if as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False))
        return

    from rich.console import Console
    from rich.table import Table

    console = Console()
    devices = Table(title="Devices", title_justify="left")
    for heading in ("device", "name", "memory", "cores", "can"):
        devices.add_column(heading)
    for info in found.devices:
        able = f"compute {info.compute_capability}" if info.compute_capability else " ".join(info.flags)
        place = info.kind if info.index is None else f"{info.kind}:{info.index}"
        devices.add_row(place, info.name, f"{info.memory_bytes / 2**30:.0f} GiB", str(info.cores), able)
    console.print(devices)

    def show(title: str, checks: tuple[Check, ...]) -> None:
        table = Table(title=title, title_justify="left")
        for heading in ("", "what", "found", "to do"):
            table.add_column(heading)
        for check in checks:
            table.add_row(
                "[green]ok[/]" if check.ok else "[yellow]no[/]", check.name, check.detail, check.fix
            )
        console.print(table)

    show("Backends", found.backends)
    show("Extras", found.extras)
