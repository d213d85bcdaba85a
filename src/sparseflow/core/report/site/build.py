"""Write a site of runs and claims into a directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sparseflow.core.files import write_json
from sparseflow.core.report.site.claims import Claim, load_claims, load_history, select_headlines
from sparseflow.core.report.site.compare import compare_rows
from sparseflow.core.report.site.pages import (
    Comparison,
    build_compare_index,
    build_compare_page,
    build_front,
    build_history_page,
    build_run_page,
)
from sparseflow.core.report.site.records import SITE_FILE, Entry, find_entries
from sparseflow.errors import InputError, OutputError, SparseFlowError

MAX_COMPARED = 10
"""Latest runs of a kind that are compared with each other."""

_INDEX = "index.html"


@dataclass(frozen=True, kw_only=True)
class SiteResult:
    """A site on disk.

    Attributes:
        index: Front page.
        runs: Number of runs and report pages.
        problems: Name -> why a run has no results, or not all of them.
        comparisons: Number of comparisons.
        claims: Number of claims.
    """

    index: Path
    runs: int
    problems: Mapping[str, str]
    comparisons: int
    claims: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**vars(self), "index": str(self.index)}


def build_site(roots: Sequence[Path], out_dir: Path, *, claims_dir: Path | None = None) -> SiteResult:
    """Build the site of all runs below `roots`. An earlier site in `out_dir` is replaced.

    Args:
        roots: Directories that contain runs or report pages.
        out_dir: Directory of the site: a new or empty one, or an earlier site.
        claims_dir: Directory with `<wing>/claims.json`; the history of the claims is read from its git
            checkout. None for a site of runs only.

    Raises:
        InputError: A directory does not exist, or `out_dir` contains something else than a site.
        FileFormatError: The claims cannot be read.
        OutputError: The site cannot be written.
    """
    is_site = (out_dir / SITE_FILE).is_file()
    if out_dir.exists() and not is_site and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise InputError(f"{out_dir} contains something else than a site; name a new or an empty directory")
    claims: list[Claim] = []
    headlines: list[Claim] = []
    history: dict[str, list[Claim]] = {}
    if claims_dir is not None:
        claims = load_claims(claims_dir)
        headlines = select_headlines(claims_dir, claims)
        history = load_history(claims_dir)
    entries = find_entries(roots)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as name:
            site_dir = Path(name) / "site"
            comparisons = _write_site(site_dir, entries, claims, headlines, history, claims_dir)
            if out_dir.exists():
                shutil.rmtree(out_dir)
            site_dir.rename(out_dir)
    except OSError as error:
        raise OutputError(f"cannot write {error.filename or out_dir}: {error.strerror}") from error
    return SiteResult(
        index=out_dir / _INDEX,
        runs=len(entries),
        problems={_clean(entry.path): _clean(entry.problem) for entry in entries if entry.problem},
        comparisons=len(comparisons),
        claims=len(claims),
    )


def _write_site(
    site_dir: Path,
    entries: Sequence[Entry],
    claims: Sequence[Claim],
    headlines: Sequence[Claim],
    history: Mapping[str, Sequence[Claim]],
    claims_dir: Path | None,
) -> list[Comparison]:
    comparisons = _compare_entries(entries)
    for folder in ("compare", "runs"):
        (site_dir / folder).mkdir(parents=True)
    build_front(entries, claims, headlines).write(site_dir / _INDEX)
    build_compare_index(comparisons).write(site_dir / "compare.html")
    build_history_page(claims, headlines, history).write(site_dir / "history.html")
    for comparison in comparisons:
        build_compare_page(comparison).write(site_dir / comparison.href)
    for entry in entries:
        run_dir = site_dir / "runs" / entry.name
        run_dir.mkdir()
        for file in entry.samples:
            shutil.copyfile(file, run_dir / file.name, follow_symlinks=False)
        related = [comparison for comparison in comparisons if entry in (comparison.old, comparison.new)]
        build_run_page(entry, related, [*headlines, *claims], claims_dir).write(run_dir / _INDEX)
    runs = [
        {
            "name": entry.name,
            "path": _clean(entry.path),
            "command": _clean(entry.command),
            "state": entry.state,
            "started": _clean(entry.started),
            "problem": _clean(entry.problem),
        }
        for entry in entries
    ]
    write_json(site_dir / SITE_FILE, {"format": "sparseflow.site", "version": 1, "runs": runs}, indent=2)
    return comparisons


def _compare_entries(entries: Sequence[Entry]) -> list[Comparison]:
    """Compare the latest runs of each kind with each other."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.state != "damaged" and (entry.body or entry.state != "page"):
            kinds.setdefault(entry.kind, []).append(entry)
    comparisons = []
    for members in kinds.values():
        latest = members[:MAX_COMPARED]
        rows = {entry.name: _read_rows(entry) for entry in latest} if len(latest) > 1 else {}
        for new, old in combinations(latest, 2):
            series = compare_rows(rows[old.name], rows[new.name])
            comparisons.append(Comparison(old=old, new=new, series=series))
    return comparisons


def _read_rows(entry: Entry) -> list[dict[str, Any]]:
    try:
        return entry.read_rows()
    except SparseFlowError:
        return []  # The page of the run states the problem.


def _clean(text: str | Path) -> str:
    """Replace characters that UTF-8 does not have, such as those of undecodable names of files."""
    return str(text).encode("utf-8", "replace").decode()
