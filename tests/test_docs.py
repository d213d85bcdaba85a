"""README and docs/: tables as `make tables` writes them, links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import tables
from sparseflow.core import claims
from sparseflow.errors import FileFormatError

ROOT = Path(__file__).parents[1]
PAGES = [*tables.pages(ROOT), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
CLAIMS = sorted((ROOT / "results").glob("*/claims.json"))


@pytest.mark.parametrize("page", tables.pages(ROOT), ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.render(text, ROOT / "results") == text, "run `make tables`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_wing_has_its_page() -> None:
    assert all((ROOT / "docs" / f"{wing}.md").is_file() for wing in claims.WINGS)


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.parent.name)
def test_every_claim_has_its_samples(path: Path) -> None:
    found = claims.load(path)
    assert found
    for claim in found:
        assert claim.wing == path.parent.name
        claims.check_samples(claim, ROOT / "results")


def test_a_table_is_written_between_its_markers(tmp_path: Path) -> None:
    (tmp_path / "spiking").mkdir()
    (tmp_path / "spiking" / "s.json").write_text("[1]")
    common = {
        "unit": "x",
        "baseline": "dense",
        "device": "a GPU",
        "command": "c",
        "samples": "spiking/s.json",
        "git": "abcdef1",
        "date": "2026-11-21",
    }
    claims.update(
        tmp_path,
        {
            "id": "spiking/2-a",
            "claim": "Quick | quicker.",
            "value": 1.42857,
            "target": ">= 1.4",
            "met": True,
            **common,
        },
    )
    claims.update(
        tmp_path,
        {"id": "spiking/1-b", "claim": "Slow.", "value": 0.9, "target": ">= 1", "met": False, **common},
    )
    counts = tables.render("<!-- table:wings -->\n<!-- /table -->\n", tmp_path)
    assert "| [spiking](docs/spiking.md) | 2 | 1 | 1 |\n" in counts
    assert "| [adaptive](docs/adaptive.md) | – | – | – |\n" in counts
    some = tables.render("<!-- table:ids\nspiking/2-a -->\n<!-- /table -->\n", tmp_path)
    assert "quicker." in some and "Slow." not in some
    text = "before\n<!-- table:spiking -->\nold\n<!-- /table -->\nafter\n"
    written = tables.render(text, tmp_path)
    assert written.startswith("before\n<!-- table:spiking -->\n") and written.endswith(
        "<!-- /table -->\nafter\n"
    )
    assert "| Slow. | **0.9**x | >= 1 ✗ not met | dense | a GPU |\n" in written
    assert "| Quick \\| quicker. | **1.429**x | >= 1.4 ✓ | dense | a GPU |\n" in written
    assert written.index("Slow.") < written.index("Quick") and "old" not in written
    assert tables.render(written, tmp_path) == written


def test_without_results_a_table_says_so(tmp_path: Path) -> None:
    text = "<!-- table:tuning -->\n<!-- /table -->\n"
    assert "Nothing has been measured yet." in tables.render(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table:spiking -->\n",
        "<!-- table:cooking -->\n<!-- /table -->",
        "<!-- table:spiking all -->\n<!-- /table -->",
        "<!-- table:ids spiking/9-absent -->\n<!-- /table -->",
        "<!-- table:ids -->\n<!-- /table -->",
    ],
)
def test_a_marker_that_makes_no_sense_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileFormatError):
        tables.render(text, tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(True, "yes"), (256, "256"), (1.0, "1"), (0.123456, "0.1235"), ("conv1", "conv1")]
)
def test_values_are_short(value: bool | float | str, text: str) -> None:
    assert tables.shown(value) == text
