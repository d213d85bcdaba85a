"""The page itself: what it consists of, and its rendering.

Everything that comes in is text and is escaped; only a figure's SVG, which `svg.py` made, goes in as it
is. The page forbids itself every request (Content-Security-Policy), so it stays whole wherever it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sparseflow.core.files import write_atomic
from sparseflow.core.report.svg import Figure
from sparseflow.errors import InputError

Tone = Literal["neutral", "good", "bad"]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One number that the reader must not miss.

    Attributes:
        value: As it is shown, with its unit: `"1.43×"`.
        label: What it is.
        note: A line below: the interval, the baseline.
        tone: Whether it is good news.
    """

    value: str
    label: str
    note: str = ""
    tone: Tone = "neutral"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        key: Name in the rows.
        title: Heading, with the unit.
        digits: Digits after the point for floats; None writes three significant ones.
    """

    key: str
    title: str
    digits: int | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader can sort by any column.

    Attributes:
        title: Its heading.
        columns: Left to right.
        rows: Mappings from column keys to text, numbers, booleans or None (shown as a dash).
        caption: A sentence below it; may be empty.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, some paragraphs, then tables and figures."""

    title: str
    text: Sequence[str] = ()
    items: Sequence[Table | Figure] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """One page.

    Attributes:
        title: What was done.
        summary: One or two sentences that stand for the whole page.
        headlines: Numbers at the top.
        sections: The body.
        environment: Circumstances, as `core.environment` writes them; nested mappings are flattened and
            what is None is left out.
        reproduce: The command line that makes this page again.
        created: When; now, when left out.
    """

    title: str
    summary: str = ""
    headlines: Sequence[Headline] = ()
    sections: Sequence[Section] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    reproduce: str = ""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    def html(self) -> str:
        """The whole page as one string.

        Raises:
            InputError: A row holds a key that its table has no column for, or a table has no column.
        """
        from jinja2 import Environment, PackageLoader, StrictUndefined

        jinja = Environment(
            loader=PackageLoader("sparseflow.core.report", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        jinja.filters["cell"] = _cell
        jinja.filters["sort_key"] = _sort_key
        jinja.tests["table"] = lambda item: isinstance(item, Table)
        for section in self.sections:
            for item in section.items:
                if isinstance(item, Table):
                    _check(item)
        folder = resources.files("sparseflow.core.report")
        return jinja.get_template("page.html.j2").render(
            page=self,
            facts=_flatten(self.environment),
            style=(folder / "page.css").read_text(encoding="utf-8"),
            script=(folder / "page.js").read_text(encoding="utf-8"),
        )

    def write(self, path: Path) -> Path:
        """Write the page to `path`, whole or not at all, and return the path."""
        write_atomic(path, self.html())
        return path


def _check(table: Table) -> None:
    keys = {column.key for column in table.columns}
    if not keys:
        raise InputError(f"table {table.title!r} needs at least one column")
    unknown = sorted({key for row in table.rows for key in row} - keys)
    if unknown:
        raise InputError(f"table {table.title!r} has no column for: {', '.join(unknown)}")


def _cell(value: Any, digits: int | None) -> str:
    """A value as it is shown."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.{digits}f}" if digits is not None else f"{value:.3g}"
    return str(value)


def _sort_key(value: Any) -> str:
    """What the page's script sorts by: numbers as numbers whatever their display."""
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if value is None:
            continue
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{key}: ")
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(_cell(one, None) for one in value) or "–"))
        elif isinstance(value, int) and not isinstance(value, bool) and key.endswith("_bytes"):
            rows.append((name.removesuffix(" bytes"), f"{value / 2**30:.1f} GiB"))
        else:
            rows.append((name, f"{value:.4g}" if isinstance(value, float) else _cell(value, None)))
    return rows
