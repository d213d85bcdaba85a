"""Runs and report pages on disk, as the site lists them.

A directory is an entry if it contains `run.json` or `report.html`. Nothing in it is trusted: a damaged,
foreign or unfinished entry gets a reason instead of results, links are not followed, and results
of a page are copied only if they consist of the elements that `Page` writes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sparseflow.core.files import parse_json, read_bounded, read_json
from sparseflow.core.report.page import PAGE_FORMAT, RESULTS_END, RESULTS_START
from sparseflow.core.run import INFO_FILE, Run, RunSummary, list_runs
from sparseflow.errors import FileFormatError, SparseFlowError

PAGE_FILE = "report.html"
SITE_FILE = "site.json"
"""Marks the directory of a site; it is not searched for runs."""

MAX_PAGE_BYTES = 64 * 2**20
MAX_SAMPLES_BYTES = 64 * 2**20
_SAMPLE_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")

_HTML_TAGS = ("b", "div", "figcaption", "figure", "h2", "h3", "li", "p", "section", "span", "strong", "ul")
_TABLE_TAGS = ("table", "tbody", "td", "th", "thead", "tr")
_SVG_TAGS = (
    "svg", "title", "defs", "g", "path", "rect", "use", "text", "tspan", "clippath", "style", "image",
    "circle", "line", "polygon", "polyline", "ellipse",
)  # fmt: skip
_RECORD = re.compile(r'<script type="application/json" id="page-record">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run or a report page.

    Attributes:
        path: Directory.
        name: Name of the entry in the site: unique, of lower-case letters, digits and hyphens.
        command: Command that creates the entry again; may be empty.
        state: State of the run (see `RunSummary`); `"page"` for a report page without a run.
        started: Start of the run or time of the page in ISO 8601; may be empty.
        problem: Why the entry has no results, or not all of them; empty otherwise.
        title: Title of the page; the command if there is no page.
        summary: Summary of the page.
        prediction: How the numbers of the page were predicted; empty for measured numbers.
        environment: Measurement conditions.
        config: Settings of the run.
        headlines: Headline numbers of the page, as `Page.to_dict` lists them.
        body: Results of the page as checked HTML; may be empty.
        samples: Files that the site offers for download.
    """

    path: Path
    name: str
    command: str = ""
    state: str = "page"
    started: str = ""
    problem: str = ""
    title: str = ""
    summary: str = ""
    prediction: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    headlines: Sequence[Mapping[str, str]] = ()
    body: str = ""
    samples: Sequence[Path] = ()

    @property
    def kind(self) -> str:
        """Command without options and arguments, such as `spiking bench`; runs of one kind are compared."""
        words = self.command.removeprefix("sparseflow").split()[:2]
        names = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
        return " ".join(names if names == words else names[:1]) or self.title

    def read_rows(self) -> list[dict[str, Any]]:
        """Read the rows of the run; empty for a page.

        Raises:
            SparseFlowError: The rows are damaged.
        """
        if self.state in ("page", "damaged"):
            return []
        return Run(self.path, {"status": self.state}, None).read_rows()


def find_entries(roots: Sequence[Path]) -> list[Entry]:
    """Find all runs and pages in directories and below, newest first.

    Raises:
        InputError: A directory does not exist.
    """
    summaries = {run.path.absolute(): run for root in roots for run in list_runs(root)}
    pages = {
        Path(directory).absolute()
        for root in roots
        for directory, _, names in os.walk(root)
        if PAGE_FILE in names
    }
    entries = [
        _read_entry(path, summaries.get(path))
        for path in sorted({*summaries, *pages})
        if not any((parent / SITE_FILE).exists() for parent in (path, *path.parents))
    ]
    return sorted(entries, key=lambda entry: entry.started, reverse=True)


def read_page(path: Path) -> tuple[dict[str, Any], str]:
    """Read the metadata and the results of a report page.

    Returns:
        The metadata as `Page.to_dict` returns it, and the results as HTML.

    Raises:
        FileFormatError: The file is no page of SparseFlow, too large, or contains elements that no page has.
    """
    text = read_bounded(path, MAX_PAGE_BYTES).decode("utf-8", "replace")
    match = _RECORD.search(text)
    if match is None:
        raise FileFormatError(f"{path} contains no record of a page; create it again with this version")
    try:
        record = parse_json(match[1])
    except ValueError as error:
        raise FileFormatError(f"{path}: the record is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != PAGE_FORMAT or record.get("version") != 1:
        raise FileFormatError(f"{path}: the record is not of format {PAGE_FORMAT!r}, version 1")
    texts = ("title", "summary", "command", "created", "prediction")
    headlines, environment = record.get("headlines"), record.get("environment")
    if (
        not all(isinstance(record.get(name), str) for name in texts)
        or not isinstance(environment, dict)
        or not isinstance(headlines, list)
        or not all(
            isinstance(item, dict) and all(isinstance(x, str) for x in item.values()) for item in headlines
        )
    ):
        raise FileFormatError(f"{path}: the record has other fields than a page")
    body = text.partition(RESULTS_START)[2].partition(RESULTS_END)[0]
    check_fragment(body, path)
    return record, body


def check_fragment(fragment: str, path: Path) -> None:
    """Check that HTML consists of the elements that pages have.

    Raises:
        FileFormatError: It contains another element, a script, a link to another file, or an open element.
    """
    checker = _FragmentChecker(path)
    checker.feed(fragment)
    checker.close()
    if checker.open_tags:
        raise FileFormatError(f"{path}: the element <{checker.open_tags[-1]}> is not closed")


class _FragmentChecker(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.open_tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._check(tag, attrs)
        self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._check(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self.open_tags or self.open_tags.pop() != tag:
            raise FileFormatError(f"{self.path}: the element </{tag}> was not opened")

    def handle_decl(self, decl: str) -> None:
        raise FileFormatError(f"{self.path}: unexpected declaration in the results")

    def _check(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _HTML_TAGS + _TABLE_TAGS + _SVG_TAGS:
            raise FileFormatError(f"{self.path}: no page contains the element <{tag}>")
        for name, value in attrs:
            local = value is not None and value.startswith(("#", "data:image/png;base64,"))
            if name.startswith("on") or (name in ("href", "src", "xlink:href") and not local):
                raise FileFormatError(f"{self.path}: no page contains the attribute {name}={value!r}")


def _read_entry(path: Path, run: RunSummary | None) -> Entry:
    fields: dict[str, Any] = {"path": path, "name": _make_name(path), "samples": _list_samples(path)}
    problems: list[str] = []
    if run is not None:
        fields |= {"state": run.state, "command": run.command, "started": run.started, "title": run.command}
        if run.state != "damaged":
            info = read_json(path / INFO_FILE)
            for name in ("environment", "config"):
                fields[name] = info[name] if isinstance(info.get(name), dict) else {}
        if run.state != "finished":
            problems.append(run.error or f"the run is {run.state}")
    page = path / PAGE_FILE
    if page.is_file() and not page.is_symlink():
        try:
            record, fields["body"] = read_page(page)
        except (SparseFlowError, OSError) as error:
            problems.append(str(error))
        else:
            fields |= {name: record[name] for name in ("title", "summary", "prediction", "headlines")}
            fields["command"] = record["command"] or fields.get("command", "")
            if run is None:
                fields |= {"started": record["created"], "environment": record["environment"]}
    return Entry(**{**fields, "title": fields.get("title") or path.name, "problem": "; ".join(problems)})


def _list_samples(path: Path) -> list[Path]:
    files = sorted(path.iterdir()) if os.access(path, os.R_OK | os.X_OK) else []
    return [
        file
        for file in files
        if file.suffix in _SAMPLE_SUFFIXES
        and file.is_file()
        and not file.is_symlink()
        and file.stat().st_size <= MAX_SAMPLES_BYTES
    ]


def _make_name(path: Path) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:60] or "run"
    return f"{slug}-{hashlib.sha256(str(path).encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"
