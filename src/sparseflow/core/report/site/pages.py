"""Pages of a site: front, run, comparison and history."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sparseflow.core.files import read_json
from sparseflow.core.report.figures import plot_history, plot_intervals, plot_samples
from sparseflow.core.report.page import Card, Link, Page, Tone, flatten
from sparseflow.core.report.site.claims import Claim
from sparseflow.core.report.site.compare import MIN_PAIRS, Series, Verdict, group_times, summarize
from sparseflow.core.report.site.records import Entry
from sparseflow.errors import SparseFlowError

_TONES: Mapping[str, Tone] = {"better": "good", "worse": "bad", "inconclusive": "neutral"}
_VOLATILE = ("time", "load average", "clocks mhz")
"""Facts that differ between any two runs."""
_MAX_SERIES = 12


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of one kind and the series that both contain."""

    old: Entry
    new: Entry
    series: Sequence[Series]

    @property
    def href(self) -> str:
        """Address relative to the site; it names both runs."""
        return f"compare/{self.new.name}--{self.old.name}.html"

    @property
    def verdict(self) -> Verdict:
        return summarize(self.series)


def build_front(entries: Sequence[Entry], claims: Sequence[Claim], headlines: Sequence[Claim]) -> Page:
    """Build the front: headline claims beside missed targets, then all runs."""
    page = _make_page("Results", f"{len(entries)} runs and {len(claims)} claims.", current="index.html")
    if claims:
        page.section("Claims")
        lost = [claim for claim in claims if not claim.met]
        first_lost = {claim.wing: claim for claim in reversed(lost)}.values()
        visible = sorted(lost, key=lambda claim: claim not in first_lost)[: len(headlines)]
        page.cards(
            {
                "Headline claims": [_make_card(claim) for claim in headlines],
                "What we lose at": [_make_card(claim) for claim in visible],
            }
        )
        page.table(
            "All claims that miss their target",
            [_make_claim_row(claim) for claim in lost],
            columns=_CLAIM_COLUMNS,
        )
        page.table("Targets", _count_targets(claims))
    else:
        page.section(
            "Claims", "This site shows runs only. The option --claims adds the claims of a results directory."
        )
    page.section("Runs", *(() if entries else ("The directories contain no run and no report page.",)))
    if entries:
        rows = [_make_run_row(entry) for entry in entries]
        page.table("All runs, newest first", rows)
    return page


def build_run_page(
    entry: Entry, comparisons: Sequence[Comparison], claims: Sequence[Claim], claims_dir: Path | None
) -> Page:
    """Build the page of a run: its results, command, samples, environment and comparisons."""
    page = Page(
        entry.title,
        entry.summary,
        reproduce=entry.command,
        prediction=entry.prediction,
        navigation=_make_navigation("", "../../"),
        body=entry.body,
    )
    if entry.started:
        page.created = _parse_time(entry.started) or page.created
    if entry.problem:
        page.section("Problem", f"The results are missing or incomplete: {entry.problem}.")
    if not entry.body:
        _add_samples(page, entry)
    if comparisons:
        page.section("Comparisons")
        page.table("With other runs of this kind", [_make_pair_row(pair, "../../") for pair in comparisons])
    if entry.samples:
        page.section("Samples")
        page.table(
            "Files",
            [
                {
                    "file": Link(text=file.name, href=quote(os.fsencode(file.name))),
                    "kB": file.stat().st_size / 1e3,
                }
                for file in entry.samples
            ],
        )
    references = {f"run {pair.old.name}": pair.old.environment for pair in comparisons if pair.new == entry}
    claim = next((claim for claim in claims if _is_same_command(claim, entry)), None)
    if claim is not None:
        references = {f"claim {claim.id}": _read_claim_environment(claim, claims_dir), **references}
    _add_environment(page, entry.environment, dict(list(references.items())[:2]))
    return page


def build_compare_index(comparisons: Sequence[Comparison]) -> Page:
    """Build the list of all comparisons."""
    page = _make_page(
        "Comparisons", "Each pair of runs of one kind, the latest runs first.", current="compare.html"
    )
    kinds = Counter(pair.new.kind for pair in comparisons)
    if not kinds:
        page.section("Pairs", "There are no two runs of one kind.")
    for kind in kinds:
        page.section(kind)
        page.table(
            "Pairs", [_make_pair_row(pair, "") for pair in comparisons if pair.new.kind == kind], columns=None
        )
    return page


def build_compare_page(comparison: Comparison) -> Page:
    """Build the comparison of two runs."""
    old, new, series = comparison.old, comparison.new, comparison.series
    settings = [dict(flatten(entry.config)) for entry in (new, old)]
    changed = [name for name in dict.fromkeys(key for items in settings for key in items)
               if settings[0].get(name) != settings[1].get(name)]  # fmt: skip
    page = _make_page(
        f"{new.kind}: {comparison.verdict}",
        f"{new.name} against {old.name}. A ratio above 1 states that the newer run is faster."
        + (f" These settings differ: {', '.join(changed)}." if changed else ""),
        prefix="../",
    )
    counts = Counter(item.verdict for item in series)
    page.headline(
        comparison.verdict,
        "verdict",
        note=", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no common samples",
        tone=_TONES[comparison.verdict],
    )
    if series:
        page.section(
            "Paired ratio",
            "The ratio is the time of the older run over that of the newer run, the median of all pairs with "
            "its 95 % bootstrap interval. The verdict is inconclusive if the interval contains 1 or if there "
            f"are fewer than {MIN_PAIRS} pairs.",
            "The runs did not alternate. A change of the machine between them, such as its load or clock, "
            "changes the ratio too; compare a candidate with a baseline of the same run to exclude it.",
            *(
                ("All series changed in the same direction, which a change of the machine also causes.",)
                if len(series) > 1 and len(counts) == 1 and comparison.verdict != "inconclusive"
                else ()
            ),
        )
        page.figure(
            plot_intervals(
                "Speed of the newer run relative to the older run",
                [item.name for item in series],
                [item.speedup.median for item in series],
                [item.speedup.low for item in series],
                [item.speedup.high for item in series],
                unit="×",
                reference=1.0,
            )
        )
        page.table(
            "Series",
            [
                {
                    "series": item.name,
                    "older, ms": item.old_ms,
                    "newer, ms": item.new_ms,
                    "ratio": item.speedup.median,
                    "low": item.speedup.low,
                    "high": item.speedup.high,
                    "pairs": item.pairs,
                    "verdict": item.verdict,
                }
                for item in series
            ],
            digits={"ratio": 3, "low": 3, "high": 3},
        )
    else:
        page.section("Paired ratio", "The runs contain no samples that can be paired, so there is no ratio.")
    _add_headline_comparison(page, old, new)
    page.section("Runs")
    page.table("Runs", [_make_run_row(new, "../"), _make_run_row(old, "../")])
    _add_differences(page, "Settings", new.config, old.config)
    _add_environment(page, new.environment, {"older run": old.environment})
    return page


def build_history_page(
    claims: Sequence[Claim], headlines: Sequence[Claim], history: Mapping[str, Sequence[Claim]]
) -> Page:
    """Build the history of each claim: charts of claims that changed, and a table of all values."""
    page = _make_page("History", "The values of each claim over revisions.", current="history.html")
    if not claims:
        page.section("Claims", "This site shows runs only. The option --claims adds the history of claims.")
        return page
    points = {claim.id: history.get(claim.id) or [claim] for claim in claims}
    changes = {id: [_compare_claims(*pair) for pair in pairwise(values)] for id, values in points.items()}
    selected = {claim.id for claim in headlines} | {claim.id for claim in claims if not claim.met}
    selected |= {id for id, verdicts in changes.items() if {"better", "worse"} & set(verdicts)}
    for wing in dict.fromkeys(claim.wing for claim in claims):
        page.section(wing)
        members = [claim for claim in claims if claim.wing == wing]
        for claim in members:
            numbers = [point for point in points[claim.id] if not isinstance(point.value, bool | str)]
            if claim.id in selected and len(numbers) > 1:
                page.figure(
                    plot_history(
                        claim.id,
                        [f"{point.date}\n{point.git}" for point in numbers],
                        [float(point.value) for point in numbers],
                        [(point.low, point.high) for point in numbers],
                        unit=claim.unit or "value",
                        target=claim.bound,
                        caption=claim.claim,
                    )
                )
        page.table(
            "Values",
            [
                {
                    "claim": claim.id,
                    "date": point.date,
                    "revision": point.git,
                    "value": point.formatted_value,
                    "95 % interval": point.interval or None,
                    "target": point.target,
                    "change": change,
                }
                for claim in members
                for point, change in zip(points[claim.id], [None, *changes[claim.id]], strict=True)
            ],
            caption="A change is better or worse if the two intervals do not overlap.",
        )
    return page


_CLAIM_COLUMNS = {
    "id": "claim",
    "text": "statement",
    "value": "value",
    "interval": "95 % interval",
    "target": "target",
    "baseline": "baseline",
    "device": "device",
    "date": "date",
}


def _make_page(title: str, summary: str, *, current: str = "", prefix: str = "") -> Page:
    return Page(
        title,
        summary,
        collection="The pages of the runs state how each number was obtained.",
        navigation=_make_navigation(current, prefix),
    )


def _make_navigation(current: str, prefix: str) -> list[Link]:
    pages = {"Front": "index.html", "Compare": "compare.html", "History": "history.html"}
    return [Link(text=text, href="" if file == current else prefix + file) for text, file in pages.items()]


def _make_card(claim: Claim) -> Card:
    facts = {
        "95 %": claim.interval,
        "target": f"{claim.target}, {'met' if claim.met else 'not met'}" if claim.target else "",
        "baseline": claim.baseline or "",
        "device": claim.device,
        "date": claim.date,
    }
    return Card(
        label=claim.wing,
        value=claim.formatted_value,
        text=claim.claim,
        facts={name: text for name, text in facts.items() if text},
        tone="bad" if not claim.met else "good" if claim.target else "neutral",
    )


def _make_claim_row(claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "text": claim.claim,
        "value": claim.formatted_value,
        "interval": claim.interval or None,
        "target": claim.target,
        "baseline": claim.baseline,
        "device": claim.device,
        "date": claim.date,
    }


def _count_targets(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    rows = []
    for wing in dict.fromkeys(claim.wing for claim in claims):
        members = [claim for claim in claims if claim.wing == wing]
        targets = [claim.met for claim in members if claim.target is not None]
        rows.append(
            {
                "wing": wing,
                "claims": len(members),
                "targets": len(targets),
                "met": sum(targets),
                "not met": len(targets) - sum(targets),
            }
        )
    return rows


def _make_run_row(entry: Entry, prefix: str = "") -> dict[str, Any]:
    headline = entry.headlines[0] if entry.headlines else {}
    numbers = f"{headline.get('value', '')} {headline.get('label', '')}".strip()
    device = entry.environment.get("device")
    return {
        "run": Link(text=entry.title, href=f"{prefix}runs/{entry.name}/index.html"),
        "directory": entry.path.name,
        "kind": entry.kind,
        "state": entry.state,
        "started": entry.started.replace("T", " ")[:16] or None,
        "result": numbers or None,
        "numbers are": "predicted" if entry.prediction else None if entry.problem else "measured",
        "device": str(device.get("name", "")) if isinstance(device, dict) else None,
        "problem": entry.problem or None,
    }


def _make_pair_row(pair: Comparison, prefix: str) -> dict[str, Any]:
    ratios = [item.speedup.median for item in pair.series]
    return {
        "newer": Link(text=pair.new.path.name, href=prefix + pair.href),
        "older": pair.old.path.name,
        "verdict": pair.verdict,
        "ratios": f"{min(ratios):.3g} to {max(ratios):.3g}" if ratios else None,
        "series": len(ratios),
    }


def _add_samples(page: Page, entry: Entry) -> None:
    """Add the samples of a run that has no report page of its own."""
    try:
        times = group_times(entry.read_rows())
    except SparseFlowError as error:
        page.section("Results", f"The samples cannot be read: {error}.")
        return
    page.section("Results", *(() if times else ("The run contains no timed samples.",)))
    if times:
        visible = {name: list(series.values()) for name, series in list(times.items())[:_MAX_SERIES]}
        hidden = len(times) - len(visible)
        page.figure(
            plot_samples(
                "Samples", visible, caption=f"{hidden} further series are in the file." if hidden else ""
            )
        )


def _add_headline_comparison(page: Page, old: Entry, new: Entry) -> None:
    before = {headline.get("label"): headline.get("value") for headline in old.headlines}
    rows = [
        {"number": headline["label"], "newer": headline.get("value"), "older": before[headline["label"]]}
        for headline in new.headlines
        if headline.get("label") in before
    ]
    if rows:
        page.section("Headline numbers", "These numbers are copied from the pages of the runs.")
        page.table("Both runs", rows)


def _add_differences(page: Page, title: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    if new or old:
        page.section(title)
        _add_facts(page, title, {"newer run": new, "older run": old})


def _add_environment(
    page: Page, environment: Mapping[str, Any], references: Mapping[str, Mapping[str, Any]]
) -> None:
    if environment:
        page.section("Environment", *(("Rows that differ are highlighted.",) if references else ()))
        _add_facts(page, "Environment", {"this run": environment, **references})


def _add_facts(page: Page, title: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    flat = {name: dict(flatten(facts)) for name, facts in columns.items()}
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(key for facts in flat.values() for key in facts):
        values = {name: facts.get(key) for name, facts in flat.items()}
        present = {value for value in values.values() if value is not None}
        differs = len(present) > 1 and not key.startswith(_VOLATILE)
        rows.append({"fact": key, **values, "differs": differs})
    names = {"fact": "fact", **{name: name for name in columns}}
    if len(columns) > 1:
        names["differs"] = "differs"
    page.table(title, rows, columns=names, highlight="differs")


def _is_same_command(claim: Claim, entry: Entry) -> bool:
    return bool(entry.kind) and f"{claim.command} ".startswith(f"sparseflow {entry.kind} ")


def _read_claim_environment(claim: Claim, claims_dir: Path | None) -> dict[str, Any]:
    """Environment of the record of a claim; device, revision and day if the record has none."""
    facts: dict[str, Any] = {"time": claim.date, "device": {"name": claim.device}, "git": claim.git}
    try:
        record = read_json((claims_dir or Path()) / claim.samples) if claim.samples.endswith(".json") else {}
    except SparseFlowError:
        record = {}
    environment = record.get("environment") if isinstance(record, dict) else None
    return environment if isinstance(environment, dict) else facts


def _compare_claims(old: Claim, new: Claim) -> Verdict:
    """Compare two measurements of a claim by their intervals."""
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return "inconclusive"
    larger = new.larger_is_better
    if larger is None or (new.low <= old.high and old.low <= new.high):
        return "inconclusive"
    return "better" if (new.low > old.high) == larger else "worse"


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
