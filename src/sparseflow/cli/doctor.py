"""`sparseflow doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sparseflow.cli.options import JsonOption
from sparseflow.cli.output import emit, make_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from sparseflow.core.device.doctor import Check


def doctor(
    extra: Annotated[
        str | None, typer.Option("--extra", help="Exit with 1 if this extra is not installed, e.g. adaptive.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show available hardware, packages and backends, and how to fix what is missing."""
    from sparseflow.core.device.doctor import diagnose
    from sparseflow.errors import InputError

    diagnosis = diagnose()
    installed = {check.name: check.ok for check in diagnosis.extras}
    if extra is not None and extra not in installed:
        raise InputError(f"`--extra {extra}` must be one of: {', '.join(installed)}")
    rows = []
    for info in diagnosis.devices:
        name = info.kind if info.index is None else f"{info.kind}:{info.index}"
        features = f"compute {info.compute_capability}" if info.compute_capability else " ".join(info.flags)
        rows.append((name, info.name, f"{info.memory_bytes / 2**30:.0f} GiB", str(info.cores), features))
    emit(
        diagnosis.to_json(),
        as_json,
        make_table(("device", "name", "memory", "cores", "features"), rows, title="Devices"),
        _check_table("Backends", diagnosis.backends),
        _check_table("Extras", diagnosis.extras),
    )
    if extra is not None and not installed[extra]:
        raise typer.Exit(1)


def _check_table(title: str, checks: Iterable[Check]) -> Table:
    rows = [("ok" if check.ok else "missing", check.name, check.detail, check.fix) for check in checks]
    return make_table(("status", "name", "details", "fix"), rows, title=title)
