"""Entries of a site: runs and pages on disk, also damaged, foreign and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparseflow.core.report import Page
from sparseflow.core.report.site.records import Entry, check_fragment, find_entries, read_page
from sparseflow.core.run import Run
from sparseflow.errors import FileFormatError


def write_page(path: Path, title: str = "Plan", **options: str) -> Path:
    page = Page(title, **options)  # pyright: ignore[reportArgumentType]
    page.section("Results", "One sentence.")
    path.mkdir(parents=True)
    return page.write(path / "report.html")


def test_find_entries_reads_runs_and_pages(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    run = write_run(tmp_path)
    write_page(
        tmp_path / "plan", reproduce="sparseflow codesign plan --chips 4", prediction="Analytic model."
    )
    entries = {entry.kind: entry for entry in find_entries([tmp_path])}
    assert entries.keys() == {"demo", "codesign plan"}
    demo, plan = entries["demo"], entries["codesign plan"]
    assert demo.state == "finished" and demo.command == "sparseflow demo --rounds 8" and not demo.problem
    assert demo.title == "A demo" and demo.headlines[0]["value"] == "2.00×" and "<svg" in demo.body
    assert [file.name for file in demo.samples] == ["run.json", "samples.parquet"]
    assert len(demo.read_rows()) == len(run.read_rows()) == 16
    assert plan.state == "page" and plan.prediction == "Analytic model." and plan.read_rows() == []


def test_find_entries_states_why_a_run_has_no_results(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    interrupted = Run.start(tmp_path / "a", "sparseflow demo", {})
    interrupted._journal.close()  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ZeroDivisionError), Run.start(tmp_path / "b", "sparseflow demo", {}):
        raise ZeroDivisionError("a reason")
    damaged = write_run(tmp_path / "c")
    (damaged.path / "run.json").write_text("{")
    foreign = tmp_path / "d"
    foreign.mkdir()
    (foreign / "report.html").write_text("<h1>404</h1>")
    problems = {entry.path.parent.name: entry.problem for entry in find_entries([tmp_path])}
    assert "interrupted" in problems["a"] and "a reason" in problems["b"] and "JSON" in problems["c"]
    assert "no record" in problems[tmp_path.name]


def test_find_entries_lists_a_directory_once(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    write_run(tmp_path / "runs")
    assert len(find_entries([tmp_path, tmp_path / "runs"])) == 1


def test_find_entries_skips_sites_and_links(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    run = write_run(tmp_path / "runs")
    (run.path / "samples.parquet").rename(tmp_path / "elsewhere.parquet")
    (run.path / "samples.parquet").symlink_to(tmp_path / "elsewhere.parquet")
    write_page(tmp_path / "site" / "runs" / "a")
    (tmp_path / "site" / "site.json").write_text("{}")
    (entry,) = find_entries([tmp_path])
    assert [file.name for file in entry.samples] == ["run.json"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("sparseflow demo --rounds 8", "demo"),
        ("sparseflow latency evaluate models/ --json", "latency evaluate"),
        ("sparseflow tune spmv ./A.mtx", "tune spmv"),
        ("sparseflow", "T"),
        ("", "T"),
    ],
)
def test_kind_is_the_command_without_arguments(command: str, kind: str) -> None:
    assert Entry(path=Path(), name="a", title="T", command=command).kind == kind


@pytest.mark.parametrize(
    "fragment",
    [
        "<script>alert(1)</script>",
        '<p onclick="alert(1)">a</p>',
        '<svg><use href="https://example.org/a.svg#b"/></svg>',
        '<meta http-equiv="refresh" content="0">',
        "<form></form>",
        "</main>",
        "<p>open",
        "<!DOCTYPE html>",
        '<svg><a href="javascript:alert(1)"></a></svg>',
    ],
)
def test_check_fragment_refuses_what_no_page_contains(fragment: str) -> None:
    with pytest.raises(FileFormatError):
        check_fragment(fragment, Path("report.html"))


@pytest.mark.parametrize(
    "change",
    [{"version": 9}, {"title": 1}, {"headlines": [1]}, {"headlines": [{"a": 1}]}, {"environment": []}],
)
def test_read_page_refuses_another_record(tmp_path: Path, change: dict[str, object]) -> None:
    path = write_page(tmp_path / "a")
    record, body = read_page(path)
    assert "One sentence." in body
    text = path.read_text()
    start = text.index("{", text.index("page-record"))
    end = text.index("</script>", start)
    path.write_text(text[:start] + json.dumps(record | change) + text[end:])
    with pytest.raises(FileFormatError):
        read_page(path)
