"""Sites of runs and claims: pages, links, downloads, robustness, and layout in a browser."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from sparseflow.core.report.site import build_site
from sparseflow.core.run import Run
from sparseflow.errors import InputError, OutputError
from tests.browser import probe_page
from tests.core.report.site.conftest import HOSTILE


def check_links(site: Path) -> int:
    """Check that each link of each page leads to a file of the site; return the number of links."""
    count = 0
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for href in re.findall(r'<a href="([^"#]+)"', text):
            assert (page.parent / os.fsdecode(unquote_to_bytes(href))).is_file(), (page, href)
            count += 1
        assert not re.search(r"""(?:src|href)=["']\w+:(?!,)""", text) and "default-src 'none'" in text
    return count


def test_build_site_of_runs_and_claims(
    tmp_path: Path, write_run: Callable[..., Run], claims_dir: Path, environment: dict[str, Any]
) -> None:
    write_run(tmp_path / "runs", 1.0)
    environment["git"] = "2222"
    write_run(tmp_path / "runs", 0.5)
    result = build_site([tmp_path / "runs"], tmp_path / "site", claims_dir=claims_dir)
    assert (result.runs, result.comparisons, result.claims, result.problems) == (2, 1, 2, {})
    assert check_links(tmp_path / "site") > 20
    front = result.index.read_text(encoding="utf-8")
    assert "Headline claims" in front and "What we lose at" in front
    assert "3.2x" in front and "0.8x" in front and "3 to 3.4" in front and "another CPU" in front
    assert "not met" in front and "Measured" not in front
    (compared,) = (tmp_path / "site" / "compare").iterdir()
    text = compared.read_text(encoding="utf-8")
    assert (
        "demo: better" in text
        and "These settings differ: factor." in text
        and '<tr class="highlight">' in text
        and "2222" in text
    )
    runs = sorted((tmp_path / "site" / "runs").glob("*/index.html"))
    assert len(runs) == 2
    for page in runs:
        text = page.read_text(encoding="utf-8")
        assert "sparseflow demo --rounds 8" in text and "claim spiking/1-speedup" in text
        assert HOSTILE not in text and "&lt;img" in text
        assert (page.parent / "samples.parquet").stat().st_size > 100


def test_build_site_without_claims_says_so(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    write_run(tmp_path / "runs")
    result = build_site([tmp_path / "runs"], tmp_path / "site")
    text = result.index.read_text(encoding="utf-8")
    assert "--claims" in text and 'class="columns"' not in text and result.claims == 0
    check_links(tmp_path / "site")


def test_build_site_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert build_site([tmp_path / "runs"], tmp_path / "site").runs == 0
    check_links(tmp_path / "site")


def test_build_site_lists_bad_entries_with_reasons(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    root = tmp_path / "runs"
    no_page = write_run(root / "a", page=False)
    damaged = write_run(root / f"b {HOSTILE.replace('/', '')} #1%")
    (damaged.path / "run.json").write_text("[]")
    broken = write_run(root / "c", page=False)
    (broken.path / "samples.parquet").write_bytes(b"PAR1")
    tampered = write_run(root / "d")
    text = (tampered.path / "report.html").read_text()
    (tampered.path / "report.html").write_text(text.replace("<h2>", "<script>alert(1)</script><h2>"))
    undecodable = write_run(Path(os.fsdecode(os.fsencode(root) + b"/\xff")), page=False)
    (undecodable.path / "run.json").write_bytes(b"\xff")
    Path(os.fsdecode(os.fsencode(undecodable.path) + b"/\xfe.csv")).write_bytes(b"1,2")
    surrogate = write_run(root / "f", page=False)
    info = json.loads((surrogate.path / "run.json").read_text()) | {"command": "a\ud800b"}
    (surrogate.path / "run.json").write_text(json.dumps(info))
    open_run = Run.start(root / "e", HOSTILE, {HOSTILE: HOSTILE})
    result = build_site([root], tmp_path / "site")
    open_run.finish()
    assert result.runs == 7
    json.dumps(result.to_dict()).encode()
    assert len(result.problems) == 5
    assert {str(run.path) for run in (damaged, tampered, open_run)} < result.problems.keys()
    check_links(tmp_path / "site")
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text and "<img" not in text
    pages = {
        run: next((tmp_path / "site" / "runs").glob(f"{run.id}*/index.html")) for run in (no_page, broken)
    }
    assert "<svg" in pages[no_page].read_text() and "cannot be read" in pages[broken].read_text()


def test_build_site_replaces_only_a_site(tmp_path: Path, write_run: Callable[..., Run]) -> None:
    write_run(tmp_path / "runs")
    out = tmp_path / "site"
    out.mkdir()
    build_site([tmp_path / "runs"], out)
    (out / "old.html").write_text("")
    build_site([tmp_path], out)
    assert not (out / "old.html").exists()
    assert len(json.loads((out / "site.json").read_text())["runs"]) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for other in (tmp_path / "runs", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="something else"):
            build_site([tmp_path / "runs"], other)
    with pytest.raises(OutputError):
        build_site([tmp_path / "runs"], tmp_path / "file" / "site")


def test_predicted_page_is_not_called_measured(tmp_path: Path) -> None:
    from sparseflow.core.report import Page

    page = Page(
        "Plan", reproduce="sparseflow codesign plan", prediction="An analytic model predicts the times."
    )
    page.section("Result")
    (tmp_path / "runs").mkdir()
    page.write(tmp_path / "runs" / "report.html")
    result = build_site([tmp_path / "runs"], tmp_path / "site")
    (run,) = (tmp_path / "site" / "runs").glob("*/index.html")
    for text in (run.read_text(), result.index.read_text()):
        assert "predict" in text and not re.search("measured", text, re.IGNORECASE)


PROBE = """
<!doctype html><meta charset="utf-8"><body><pre id="result">none</pre><script>
const result = {errors: [], pages: {}};
window.onerror = (message) => result.errors.push(message);
function inspect([name, page]) {
  return new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.style.cssText = "width: 360px; height: 900px; border: 0";
    frame.srcdoc = page;
    frame.onload = () => {
      const root = frame.contentDocument.documentElement;
      result.pages[name] = {
        page: root.scrollWidth, view: root.clientWidth, height: root.scrollHeight,
        buttons: root.querySelectorAll("th button").length, heads: root.querySelectorAll("th").length,
      };
      done();
    };
    document.body.append(frame);
  });
}
Promise.all(Object.entries(PAGES).map(inspect)).then(() => {
  document.getElementById("result").textContent = JSON.stringify(result);
});
</script>
"""


def test_pages_fit_a_phone(tmp_path: Path, write_run: Callable[..., Run], claims_dir: Path) -> None:
    for factor in (1.0, 0.5):
        write_run(tmp_path / "runs", factor)
    site = build_site([tmp_path / "runs"], tmp_path / "site", claims_dir=claims_dir).index.parent
    pages = {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    literal = json.dumps(pages).replace("</", "<\\/")
    result = probe_page(PROBE.replace("PAGES", literal), tmp_path)
    assert result["errors"] == [] and result["console"] == []
    assert result["pages"].keys() == pages.keys()
    for name, layout in result["pages"].items():
        assert layout["page"] <= layout["view"] <= 360 and layout["height"] > 500, name
        assert layout["buttons"] == layout["heads"], "the script of the page runs"
