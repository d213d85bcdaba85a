"""Build one HTML page from rows and figures.

All text is escaped; only the SVG of a figure, which `svg.py` generates, is inserted as it is. The
Content-Security-Policy of the page forbids every request and every script but the one that sorts tables, so
the file works offline. The page contains its metadata as JSON, from which `site` lists it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sparseflow.core.files import write_atomic
from sparseflow.core.report.figures import format_value, plot_curves, plot_samples
from sparseflow.core.report.svg import Figure
from sparseflow.errors import InputError

Tone = Literal["neutral", "good", "bad"]
PAGE_FORMAT = "sparseflow.report-page"
RESULTS_START, RESULTS_END = "<!-- results -->", "<!-- /results -->"
"""Comments around the headlines and sections of a page."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link to another page; a value of a table or an entry of the navigation.

    Attributes:
        text: Text of the link.
        href: Relative address; empty for the current page.
    """

    text: str
    href: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """A number with the facts that a reader needs to judge it.

    Attributes:
        label: Name of the number.
        value: Formatted number with its unit.
        text: Sentence that states what the number is; may be empty.
        facts: Name -> text, such as the interval, the baseline and the device.
        tone: Color: whether the number is a good or a bad result.
    """

    label: str
    value: str
    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    tone: Tone = "neutral"


class Page:
    """An HTML page that is built from top to bottom.

    ::

        page = Page("Sparse and dense inference", "The sparse network is 1.43x faster.")
        page.headline("1.43×", "faster than dense", note="95 % interval 1.40 to 1.46", tone="good")
        page.section("Layers", "Each time is the median of 200 samples.")
        page.table("Time of each layer", [{"layer": "conv1", "time, ms": 1.2}], digits={"time, ms": 2})
        page.write(out_dir / "report.html")

    Args:
        title: Heading of the page.
        summary: One or two sentences that summarize the page.
        environment: Measurement conditions, as `collect_environment` returns them. Nested mappings are
            flattened; None values are left out.
        reproduce: Command line that creates the page again.
        prediction: Sentence about how the numbers were predicted, for a page whose numbers were not measured.
        collection: Sentence about where the numbers come from, for a page that collects results of others.
        navigation: Links to the other pages of a site.
        body: Results of another page as HTML, which is inserted as it is; see `site.records.read_page`.
    """

    def __init__(
        self,
        title: str,
        summary: str = "",
        *,
        environment: Mapping[str, Any] | None = None,
        reproduce: str = "",
        prediction: str = "",
        collection: str = "",
        navigation: Sequence[Link] = (),
        body: str = "",
    ) -> None:
        self.title = title
        self.summary = summary
        self.environment: Mapping[str, Any] = environment or {}
        self.reproduce = reproduce
        self.prediction = prediction
        self.collection = collection
        self.navigation = navigation
        self.body = body
        self.created = datetime.now(UTC)
        self.headlines: list[_Headline] = []
        self.sections: list[_Section] = []

    def headline(self, value: str, label: str, *, note: str = "", tone: Tone = "neutral") -> None:
        """Add a number to the top of the page.

        Args:
            value: Formatted number with its unit, such as `"1.43×"`.
            label: Name of the number.
            note: Line below it, such as the interval or the baseline.
            tone: Color: whether the number is a good or a bad result.
        """
        self.headlines.append(_Headline(value=value, label=label, note=note, tone=tone))

    def section(self, title: str, *paragraphs: str) -> None:
        """Start a section. Tables and figures that follow belong to it."""
        self.sections.append(_Section(title=title, paragraphs=paragraphs))

    def table(
        self,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        columns: Mapping[str, str] | None = None,
        digits: int | Mapping[str, int] | None = None,
        highlight: str = "",
        caption: str = "",
    ) -> None:
        """Add a table that the reader can sort by any column.

        Args:
            title: Heading.
            rows: One mapping per row; values are text, numbers, booleans or None (shown as a dash).
            columns: Heading of each row key that is shown, left to right. By default all keys are shown in
                the order of their first use, and a key is its own heading.
            digits: Digits after the decimal point of floats: one number for all columns, or a number per
                row key. Floats of other columns are shown with three significant digits.
            highlight: Key of a boolean that marks the rows to highlight; the key need not be a column.
            caption: Sentence below the heading.

        Raises:
            InputError: The table has no column, no row has a key of `columns`, or there is no section yet.
        """
        if columns is None:
            columns = {key: key for row in rows for key in row}
        if not columns:
            raise InputError(f"table {title!r} has no columns; pass rows or `columns`")
        missing = [key for key in columns if rows and not any(key in row for row in rows)]
        if missing:
            raise InputError(f"table {title!r}: no row has the keys {missing}; rows have {list(rows[0])}")
        self._add(
            _Table(
                title=title,
                headings=list(columns.values()),
                digits=[digits.get(key) if isinstance(digits, Mapping) else digits for key in columns],
                rows=[[row.get(key) for key in columns] for row in rows],
                highlights=[bool(row.get(highlight)) for row in rows],
                caption=caption,
            )
        )

    def cards(self, columns: Mapping[str, Sequence[Card]]) -> None:
        """Add columns of cards, side by side with equal weight.

        Args:
            columns: Heading -> cards of the column.

        Raises:
            InputError: There is no section yet.
        """
        self._add(_Cards(title=", ".join(columns), columns=columns))

    def figure(self, figure: Figure) -> None:
        """Add a figure, as the `plot_*` functions return it.

        Raises:
            InputError: There is no section yet.
        """
        self._add(figure)

    def curves(
        self,
        title: str,
        series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        *,
        x: str,
        y: str,
        log_x: bool = False,
        caption: str = "",
    ) -> None:
        """Add curves as a figure, or as a table if no curve has more than one point.

        Args:
            title: Heading.
            series: x and y values of each curve; curves without values are left out.
            x: Label of the horizontal axis with its unit.
            y: Label of the vertical axis with its unit.
            log_x: Whether the horizontal axis is logarithmic.
            caption: Sentence below the heading.

        Raises:
            InputError: A curve has different numbers of x and y values, or there is no section yet.
        """
        filled = {name: curve for name, curve in series.items() if len(curve[0]) or len(curve[1])}
        if any(len(xs) > 1 for xs, _ in filled.values()):
            self.figure(plot_curves(title, filled, x=x, y=y, log_x=log_x, caption=caption))
        elif filled:
            rows = [{"series": name, x: xs[0], y: ys[0]} for name, (xs, ys) in filled.items()]
            self.table(title, rows, caption=caption)

    def samples(
        self, title: str, times: Mapping[str, Sequence[float]], *, unit: str = "ms", caption: str = ""
    ) -> None:
        """Add a figure of all samples per candidate; see `plot_samples`.

        Raises:
            InputError: A candidate has no samples, or there is no section yet.
        """
        self._add(plot_samples(title, times, unit=unit, caption=caption))

    def to_dict(self) -> dict[str, Any]:
        """Metadata of the page as JSON types."""
        return {
            "format": PAGE_FORMAT,
            "version": 1,
            "title": self.title,
            "summary": self.summary,
            "command": self.reproduce,
            "created": self.created.isoformat(timespec="seconds"),
            "prediction": self.prediction,
            "environment": self.environment,
            "headlines": [vars(headline) for headline in self.headlines],
        }

    def render(self) -> str:
        """Render the page as HTML."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        jinja = Environment(
            loader=PackageLoader("sparseflow.core.report", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        jinja.filters["cell"] = _format_cell
        jinja.filters["sort_key"] = _format_sort_key
        jinja.tests["link"] = lambda value: isinstance(value, Link)
        package = resources.files("sparseflow.core.report")
        script = (package / "page.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        text = jinja.get_template("page.html.j2").render(
            page=self,
            facts=flatten(self.environment),
            style=(package / "page.css").read_text(encoding="utf-8"),
            script=script,
            script_hash=f"sha256-{digest}",
            results_start=RESULTS_START,
            results_end=RESULTS_END,
        )
        # Names of files and texts of damaged records may contain characters that UTF-8 does not have.
        return text.encode("utf-8", "replace").decode()

    def write(self, path: Path) -> Path:
        """Write the page to `path` atomically and return the path."""
        write_atomic(path, self.render())
        return path

    def _add(self, item: _Item) -> None:
        if not self.sections:
            raise InputError(f"{item.title!r} has no section; call `section` first")
        self.sections[-1].items.append(item)


@dataclass(frozen=True, kw_only=True)
class _Headline:
    value: str
    label: str
    note: str
    tone: Tone


@dataclass(frozen=True, kw_only=True)
class _Table:
    """A sortable table; `digits` and each row have one entry per heading."""

    kind = "table"
    title: str
    headings: Sequence[str]
    digits: Sequence[int | None]
    rows: Sequence[Sequence[Any]]
    highlights: Sequence[bool]
    caption: str


@dataclass(frozen=True, kw_only=True)
class _Cards:
    kind = "cards"
    title: str
    columns: Mapping[str, Sequence[Card]]


_Item = _Table | _Cards | Figure


@dataclass(frozen=True, kw_only=True)
class _Section:
    title: str
    paragraphs: Sequence[str]
    items: list[_Item] = field(default_factory=list)


def _format_cell(value: Any, digits: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.{digits}f}" if digits is not None else format_value(value)
    return str(value)


def _format_sort_key(value: Any) -> str:
    """Format a value for the sort script: numbers sort by value, not by their display."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Link):
        return value.text
    return "" if value is None else str(value)


def flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested facts to pairs of a name and a formatted value; None values are left out."""
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if value is None:
            continue
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += flatten(value, f"{key}: ")
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(_format_cell(item, None) for item in value) or "–"))
        elif isinstance(value, int) and not isinstance(value, bool) and key.endswith("_bytes"):
            rows.append((name.removesuffix(" bytes"), f"{value / 2**30:.1f} GiB"))
        else:
            rows.append((name, f"{value:.4g}" if isinstance(value, float) else _format_cell(value, None)))
    return rows
