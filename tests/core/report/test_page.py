"""Tests of report pages: content, escaping, and layout in a browser."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sparseflow.core import report
from sparseflow.core.report import Page
from sparseflow.core.report.page import Link
from sparseflow.errors import InputError
from tests.browser import probe_page

LAYERS = [f"layer{stage}.{block}.conv{part}" for stage in (1, 2, 3, 4) for block in (0, 1) for part in (1, 2)]
BEFORE_MS = [3.0 + index % 5 for index in range(len(LAYERS))]
AFTER_MS = [value / (1.0 + index % 3 / 2) for index, value in enumerate(BEFORE_MS)]
ROWS = [
    {
        "layer": layer,
        "rate": None if index == 3 else 2.0 + index,
        "before": BEFORE_MS[index],
        "after": AFTER_MS[index],
        "why": "a rather long reason why this backend was chosen for this layer",
    }
    for index, layer in enumerate(LAYERS)
]
HEADINGS = {
    "layer": "Layer",
    "rate": "Firing rate, %",
    "before": "Before, ms",
    "after": "After, ms",
    "why": "Why",
}
DIGITS = {"rate": 1, "before": 2, "after": 2}
TITLE = "Spiking ResNet-18 <on> CIFAR-10 & a_long_word_that_would_widen_the_page_if_it_were_let_to"
CREATED = datetime(2026, 11, 21, 9, 5, tzinfo=UTC)
REPRODUCE = "sparseflow demo --seed 0 " + "--option value " * 30


def build_page() -> Page:
    page = Page(
        TITLE,
        "One sentence.",
        environment={"device": {"name": "a CPU", "memory_bytes": 2**35}, "seed": 0, "git": None},
        reproduce=REPRODUCE,
    )
    page.created = CREATED
    page.headline("1.47×", "End to end", note="1.44 to 1.50", tone="good")
    page.headline("256 / 256", "Predictions identical")
    page.section("Layer by layer", "<script>alert(1)</script>")
    page.figure(report.plot_before_after("Time", LAYERS, BEFORE_MS, AFTER_MS, unit="ms"))
    page.table("Layers", ROWS, columns=HEADINGS, digits=DIGITS)
    page.section("Samples")
    page.samples("All", {"dense": [1.0, 2.0], "ours": [0.5, 0.7]})
    return page


def render_table(rows: list[dict[str, Any]], **options: Any) -> str:
    page = Page("P")
    page.section("S")
    page.table("T", rows, **options)
    return page.render()


def read_cells(text: str) -> list[str]:
    return re.findall(r"<td[^>]*>([^<]*)</td>", text)


@pytest.fixture(scope="module")
def text() -> str:
    """HTML of a page with every part."""
    return build_page().render()


def test_render_contains_every_part(text: str) -> None:
    for part in (
        "1.47×",
        "256 / 256",
        "Layer by layer",
        "sparseflow demo --seed 0",
        "21 November 2026, 09:05 UTC",
    ):
        assert part in text
    assert text.count("<table>") == 1 and text.count("<svg") == 2
    assert ">–</td>" in text, "None is shown as a dash"
    assert (
        "<dt>device: name</dt><dd>a CPU</dd>" in text
        and "<dd>32.0 GiB</dd>" in text
        and "<dt>git" not in text
    )


def test_render_escapes_text(text: str) -> None:
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "&lt;on&gt;" in text


def test_render_references_no_external_resource(text: str) -> None:
    assert "://" not in text
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_render_ids_are_unique(text: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_write_page_without_content(tmp_path: Path) -> None:
    path = Page("Nothing yet").write(tmp_path / "report.html")
    assert "Nothing yet" in path.read_text(encoding="utf-8")


def test_table_without_columns_uses_row_keys_as_headings() -> None:
    text = render_table([{"model": "a", "time, ms": 1.5}, {"model": "b", "speedup": 2.0}])
    assert re.findall(r'<th scope="col">([^<]*)</th>', text) == ["model", "time, ms", "speedup"]
    assert read_cells(text) == ["a", "1.5", "–", "b", "–", "2"]


def test_table_columns_select_and_order_keys() -> None:
    text = render_table([{"a": 1, "b": 2, "c": 3}], columns={"c": "C", "a": "A"})
    assert read_cells(text) == ["3", "1"]


@pytest.mark.parametrize(
    ("rows", "columns", "value"),
    [([], None, "T"), ([], {}, "T"), ([{"a": 1}], {"a": "A", "b": "B"}, "'b'")],
)
def test_table_without_matching_columns_raises(rows: Any, columns: Any, value: str) -> None:
    with pytest.raises(InputError, match=value):
        render_table(rows, columns=columns)


def test_curves_of_one_point_are_a_table() -> None:
    page = Page("P")
    page.section("S")
    page.curves("T", {"a": ([1.0], [0.5]), "empty": ([], [])}, x="step", y="loss")
    page.curves("U", {"empty": ([], [])}, x="step", y="loss")
    text = page.render()
    assert "<svg" not in text and read_cells(text) == ["a", "1", "0.5"]
    page.curves("V", {"a": ([1.0, 2.0], [0.5, 0.25])}, x="step", y="loss")
    assert page.render().count("<svg") == 1


def test_table_highlights_rows_and_links() -> None:
    rows = [{"a": Link(text="<b>", href="b.html"), "new": True}, {"a": "c", "new": False}]
    text = render_table(rows, columns={"a": "A"}, highlight="new")
    assert text.count('<tr class="highlight">') == 1 and '<a href="b.html">&lt;b&gt;</a>' in text


def test_table_before_first_section_raises() -> None:
    with pytest.raises(InputError, match="'T'"):
        Page("P").table("T", [{"a": 1}])


def test_table_formats_numbers() -> None:
    rows = [{"a": 1.26, "b": 12345.678}, {"a": True, "b": 1234567}, {"a": float("inf"), "b": "x"}]
    cells = ["1.3", "12\u202f346", "yes", "1\u202f234\u202f567", "inf", "x"]
    assert read_cells(render_table(rows, digits={"a": 1})) == cells
    assert read_cells(render_table(rows[:1], digits=2)) == ["1.26", "12345.68"]


PROBE = """
<!doctype html><meta charset="utf-8"><body><pre id="result">none</pre><script>
const page = {page};
const result = {{errors: [], widths: {{}}}};
function inspect(width) {{
  return new Promise((done) => {{
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${{width}}px; height: 900px; border: 0`;
    frame.srcdoc = page;
    frame.onload = () => {{
      const inside = frame.contentDocument, root = inside.documentElement;
      const box = (element) => element.getBoundingClientRect();
      const all = (selector) => [...inside.querySelectorAll(selector)];
      const column = (index) => all(`tbody td:nth-child(${{index}})`).map((cell) => cell.textContent);
      const heads = inside.querySelectorAll("th button");
      heads[1].click();
      const ascending = column(2);
      heads[1].click();
      const descending = column(2), order = inside.querySelectorAll("th")[1].getAttribute("aria-sort");
      result.widths[width] = {{
        page: root.scrollWidth, view: root.clientWidth,
        tables: all("table").filter((table) => box(table).height > 100).length,
        figures: all("svg").filter((svg) => box(svg).height > 60 && box(svg).width > 300).length,
        ink: getComputedStyle(inside.querySelector("svg text")).fill,
        ascending, descending, order,
      }};
      done();
    }};
    document.body.append(frame);
  }});
}}
window.onerror = (message) => result.errors.push(message);
Promise.all([400, 1400].map(inspect)).then(() => {{
  document.getElementById("result").textContent = JSON.stringify(result);
}});
</script>
"""


@pytest.fixture(scope="module")
def browser_result(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Layout of the page in headless Chromium, in frames 400 and 1400 pixels wide."""
    literal = json.dumps(text).replace("</", "<\\/")
    return probe_page(PROBE.format(page=literal), tmp_path_factory.mktemp("page"))


def test_page_in_browser_logs_no_error(browser_result: dict[str, Any]) -> None:
    assert browser_result["errors"] == [] and browser_result["console"] == []


@pytest.mark.parametrize("width", ["400", "1400"])
def test_page_fits_window(browser_result: dict[str, Any], width: str) -> None:
    layout = browser_result["widths"][width]
    assert layout["page"] <= layout["view"] <= int(width)
    assert layout["tables"] == 1 and layout["figures"] == 2


def test_figures_use_theme_colors(browser_result: dict[str, Any]) -> None:
    assert re.fullmatch(r"rgb\(\d+, \d+, \d+\)", browser_result["widths"]["1400"]["ink"])
    assert browser_result["widths"]["1400"]["ink"] != "rgb(0, 0, 0)"


def test_click_on_heading_sorts_by_value(browser_result: dict[str, Any]) -> None:
    layout = browser_result["widths"]["1400"]
    up, down = layout["ascending"], layout["descending"]
    assert up[-1] == down[-1] == "–", "missing values come last"
    numbers = [float(cell) for cell in up[:-1]]
    assert numbers == sorted(numbers) and numbers[0] < 10.0 <= numbers[-1]
    assert down[:-1] == up[-2::-1]
    assert layout["order"] == "descending"
