"""Tests of README and docs: generated tables are up to date, and links exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.claims import Claim, check_claim, load_claims, merge_claims
from sparseflow.errors import FileFormatError
from tests.site_pages import ADDRESS, DOCS, SOURCE_ADDRESS, find_page, list_site_pages

ROOT = Path(__file__).parents[1]
PAGES = [*tables.list_pages(ROOT), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
CLAIMS = sorted((ROOT / "results").glob("*/claims.json"))


def _get_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", tables.list_pages(ROOT), ids=_get_id)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.render_tables(text, ROOT / "results") == text, "run `make tables`"


@pytest.mark.parametrize("page", PAGES, ids=_get_id)
def test_links_exist(page: Path) -> None:
    site_pages = {DOCS / path for path in list_site_pages()}
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if target.startswith(ADDRESS):
            find_page(target)
        elif target.startswith(SOURCE_ADDRESS) and "/main/" in target:
            assert (ROOT / target.partition("/main/")[2]).exists(), f"{page.name} links to {target}"
        elif "://" not in target:
            path = (page.parent / target).resolve()
            assert path in site_pages or path.exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.parent.name)
def test_every_claim_is_complete(path: Path) -> None:
    claims = load_claims(path)
    assert claims
    for claim in claims:
        assert claim.wing == path.parent.name
        check_claim(claim, ROOT / "results")


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.parent.name)
def test_every_claim_is_on_the_page_of_its_wing(path: Path) -> None:
    page = (DOCS / "benchmarks" / f"{path.parent.name}.md").read_text(encoding="utf-8")
    assert [claim.id for claim in load_claims(path) if claim.id not in page] == []


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "spiking").mkdir()
    (tmp_path / "spiking" / "s.json").write_text("[1]")
    common: dict[str, Any] = {
        "unit": "x",
        "baseline": "dense",
        "device": "a GPU",
        "command": "c",
        "samples": "spiking/s.json",
        "git": "abcdef1",
        "date": "2026-01-02",
    }
    claims = [
        Claim(
            id="spiking/2-a",
            claim="Quick | quicker.",
            value=1.42857,
            target=">= 1.4",
            details={"low": 1.4, "high": 1.5},
            **common,
        ),
        Claim(id="spiking/1-b", claim="Slow.", value=0.9, target=">= 1", **common),
        Claim(id="spiking/3-c", claim="Speedup that is a slowdown.", value=0.9, **common),
    ]
    merge_claims(claims, tmp_path)
    return tmp_path


def test_render_tables_counts_targets_per_wing(results: Path) -> None:
    counts = tables.render_tables("<!-- table:wings -->\n<!-- /table -->\n", results)
    assert "| [spiking](spiking.md) | 3 | 2 | 1 | 1 |\n" in counts
    assert "| [adaptive](adaptive.md) | 0 | 0 | 0 | 0 |\n" in counts


def test_render_tables_lists_missed_targets_and_slowdowns(results: Path) -> None:
    text = tables.render_tables("<!-- table:lost -->\n<!-- /table -->\n", results)
    assert "Slow." in text and "slowdown." in text and "quicker." not in text


def test_render_tables_selects_ids(results: Path) -> None:
    text = tables.render_tables("<!-- table:ids\nspiking/2-a -->\n<!-- /table -->\n", results)
    assert "quicker." in text and "Slow." not in text


def test_render_tables_replaces_text_between_markers(results: Path) -> None:
    text = tables.render_tables("before\n<!-- table:spiking -->\nold\n<!-- /table -->\nafter\n", results)
    assert text.startswith("before\n<!-- table:spiking -->\n")
    assert text.endswith("<!-- /table -->\nafter\n")
    assert "| Slow. | **0.9**x | >= 1 ✗ not met | dense | a GPU | 2026-01-02 | 1 |\n" in text
    assert (
        "| Quick \\| quicker. | **1.429**x (1.4–1.5) | >= 1.4 ✓ | dense | a GPU | 2026-01-02 | 1 |\n" in text
    )
    assert "\n1. `c`\n" in text
    assert text.index("Slow.") < text.index("Quick") and "old" not in text
    assert tables.render_tables(text, results) == text


def test_render_tables_fills_in_the_value_of_a_claim(results: Path) -> None:
    text = tables.render_tables("a <!-- claim:spiking/2-a -->old<!-- /claim --> b", results)
    assert text == "a <!-- claim:spiking/2-a -->1.43x<!-- /claim --> b"


def test_render_tables_without_claims(tmp_path: Path) -> None:
    text = "<!-- table:tuning -->\n<!-- /table -->\n"
    assert "Nothing has been measured yet." in tables.render_tables(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table:spiking -->\n",
        "<!-- table:cooking -->\n<!-- /table -->",
        "<!-- table:spiking all -->\n<!-- /table -->",
        "<!-- table:ids spiking/9-absent -->\n<!-- /table -->",
        "<!-- table:ids -->\n<!-- /table -->",
        "<!-- claim:spiking/9-absent --><!-- /claim -->",
        "<!-- claim:spiking/2-a -->\n<!-- /claim -->",
    ],
)
def test_render_tables_unknown_marker_raises(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileFormatError):
        tables.render_tables(text, tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(True, "yes"), (256, "256"), (1.0, "1"), (0.123456, "0.1235"), ("conv1", "conv1")]
)
def test_format_value(value: bool | float | str, text: str) -> None:
    assert tables.format_value(value) == text
