"""The page: what it holds, what it escapes, and how a browser takes it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sparseflow.core import report
from sparseflow.core.environment import collect_environment
from sparseflow.errors import InputError

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)


def page(**changes: Any) -> report.Report:
    layers = [
        f"layer{stage}.{block}.conv{part}" for stage in (1, 2, 3, 4) for block in (0, 1) for part in (1, 2)
    ]
    before = [3.0 + index % 5 for index in range(len(layers))]
    after = [value / (1.0 + index % 3 / 2) for index, value in enumerate(before)]
    table = report.Table(
        title="Layers",
        columns=(
            report.Column(key="layer", title="Layer"),
            report.Column(key="rate", title="Firing rate, %", digits=1),
            report.Column(key="before", title="Before, ms", digits=2),
            report.Column(key="after", title="After, ms", digits=2),
            report.Column(key="why", title="Why"),
        ),
        rows=[
            {
                "layer": layer,
                "rate": None if index == 3 else 2.0 + index,
                "before": before[index],
                "after": after[index],
                "why": "a rather long reason why this backend was chosen for this layer",
            }
            for index, layer in enumerate(layers)
        ],
    )
    given: dict[str, Any] = {
        "title": "Spiking ResNet-18 <on> CIFAR-10 & a_long_word_that_would_widen_the_page_if_it_were_let_to",
        "summary": "One sentence.",
        "headlines": (
            report.Headline(value="1.47×", label="End to end", note="1.44 to 1.50", tone="good"),
            report.Headline(value="256 / 256", label="Predictions identical"),
        ),
        "sections": (
            report.Section(
                title="Layer by layer",
                text=("<script>alert(1)</script>",),
                items=(report.plot_before_after("Time", layers, before, after, unit="ms"), table),
            ),
            report.Section(
                title="Samples",
                items=(report.plot_samples("All", {"dense": [1.0, 2.0], "ours": [0.5, 0.7]}),),
            ),
        ),
        "environment": collect_environment("cpu", seed=0),
        "reproduce": "sparseflow demo --seed 0 " + "--option value " * 30,
        "created": datetime(2026, 11, 21, 9, 5, tzinfo=UTC),
        **changes,
    }
    return report.Report(**given)


def test_the_page_holds_what_it_was_given() -> None:
    text = page().html()
    for part in (
        "1.47×",
        "256 / 256",
        "Layer by layer",
        "sparseflow demo --seed 0",
        "21 November 2026, 09:05 UTC",
    ):
        assert part in text
    assert text.count("<table>") == 1 and text.count("<svg") == 2
    assert ">–</td>" in text, "what is missing shows as a dash"


def test_text_is_escaped() -> None:
    text = page().html()
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "&lt;on&gt;" in text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page().html()
    assert "://" not in text
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_ids_are_used_once() -> None:
    ids = re.findall(r'\bid="([^"]+)"', page().html())
    assert len(ids) == len(set(ids))


def test_a_bare_page_can_be_made(tmp_path: Path) -> None:
    path = report.Report(title="Nothing yet").write(tmp_path / "report.html")
    assert "Nothing yet" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("columns", "rows", "words"),
    [
        ((), [], "at least one column"),
        ((report.Column(key="a", title="A"),), [{"a": 1, "b": 2}], "no column for: b"),
    ],
)
def test_a_table_must_show_what_it_holds(columns: Any, rows: Any, words: str) -> None:
    section = report.Section(title="S", items=(report.Table(title="T", columns=columns, rows=rows),))
    with pytest.raises(InputError, match=words):
        page(sections=(section,)).html()


def test_numbers_are_shown_as_asked() -> None:
    columns = (report.Column(key="a", title="A", digits=1), report.Column(key="b", title="B"))
    rows = [{"a": 1.26, "b": 12345.678}, {"a": True, "b": 1234567}, {"a": float("inf"), "b": "x"}]
    table = report.Table(title="T", columns=columns, rows=rows)
    text = page(sections=(report.Section(title="S", items=(table,)),)).html()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text)
    assert cells == ["1.3", "1.23e+04", "yes", "1\u202f234\u202f567", "inf", "x"]


PROBE = """
<!doctype html><meta charset="utf-8"><body><pre id="found">nothing</pre><script>
const page = {page};
const found = {{errors: [], widths: {{}}}};
function look(width) {{
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
      const up = column(2);
      heads[1].click();
      const down = column(2), sorted = inside.querySelectorAll("th")[1].getAttribute("aria-sort");
      found.widths[width] = {{
        page: root.scrollWidth, view: root.clientWidth,
        tables: all("table").filter((table) => box(table).height > 100).length,
        figures: all("svg").filter((svg) => box(svg).height > 60 && box(svg).width > 300).length,
        ink: getComputedStyle(inside.querySelector("svg text")).fill,
        up, down, sorted,
      }};
      done();
    }};
    document.body.append(frame);
  }});
}}
window.onerror = (message) => found.errors.push(message);
Promise.all([400, 1400].map(look)).then(() => {{
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What headless Chromium says of the page, in frames 400 and 1400 pixels wide."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    folder = tmp_path_factory.mktemp("page")
    text = json.dumps(page().html()).replace("</", "<\\/")
    (folder / "probe.html").write_text(PROBE.format(page=text), encoding="utf-8")
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            (folder / "probe.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    result = json.loads(html.unescape(found.group(1)))
    result["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return result


def test_a_browser_finds_nothing_to_complain_about(seen: dict[str, Any]) -> None:
    assert seen["errors"] == [] and seen["console"] == []


@pytest.mark.parametrize("width", ["400", "1400"])
def test_the_page_fits_narrow_and_wide_windows(seen: dict[str, Any], width: str) -> None:
    found = seen["widths"][width]
    assert found["page"] <= found["view"] <= int(width)
    assert found["tables"] == 1 and found["figures"] == 2


def test_figures_take_the_colours_of_the_page(seen: dict[str, Any]) -> None:
    assert re.fullmatch(r"rgb\(\d+, \d+, \d+\)", seen["widths"]["1400"]["ink"])
    assert seen["widths"]["1400"]["ink"] != "rgb(0, 0, 0)"


def test_a_click_sorts_by_value_and_a_second_turns_it_round(seen: dict[str, Any]) -> None:
    found = seen["widths"]["1400"]
    up, down = found["up"], found["down"]
    assert up[-1] == down[-1] == "–", "what is missing stands last"
    numbers = [float(cell) for cell in up[:-1]]
    assert numbers == sorted(numbers) and numbers[0] < 10.0 <= numbers[-1]
    assert down[:-1] == up[-2::-1]
    assert found["sorted"] == "descending"
