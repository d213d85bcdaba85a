"""Audit of the built documentation site in headless Chromium.

::

    python -m tests.harness.site [--site DIR] [--out DIR]

Opens a page of each kind from disk, in both themes and at two widths. A page fails if axe-core reports a
violation, such as low contrast, a picture without a text or a skipped level of headings; if it scrolls
horizontally; if it requests a file of another host; or if the search finds nothing. Screenshots are in the
output directory. Exits with 1 if a page fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index.html",
    "tutorials/spiking.html",
    "explanation/latency.html",
    "reference/python/latency.html",
    "reference/cli/latency.html",
    "benchmarks/index.html",
    "benchmarks/latency.html",
)
THEMES = ("light", "dark")
WIDTHS = (1280, 360)
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"],
    # The theme gives a folder and its navigation the same name.
    "rules": {"landmark-unique": {"enabled": False}},
}


def find_faults(page: Page) -> Iterator[str]:
    """Yield the faults of an open page."""
    for violation in Axe().run(page, options=RULES).response["violations"]:
        targets = ", ".join(str(node["target"][0]) for node in violation["nodes"][:3])
        yield f"{violation['id']}: {violation['help']} ({len(violation['nodes'])}: {targets})"
    width, available = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
    if width > available:
        yield f"the page is {width} px wide, the window {available} px"


def audit_page(browser: Browser, path: Path, theme: str, width: int, screenshot: Path) -> list[str]:
    """Open a page, save a screenshot and list the faults."""
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    page = context.new_page()
    faults: list[str] = []
    page.on(
        "request",
        lambda request: faults.append(f"requests {request.url}") if _is_foreign(request.url) else None,
    )
    page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
    page.goto(path.as_uri(), wait_until="load")
    faults += find_faults(page)
    page.screenshot(path=screenshot, full_page=True)
    context.close()
    return faults


def search(browser: Browser, path: Path, query: str) -> list[str]:
    """Search from a page, and list the faults."""
    page = browser.new_page()
    page.goto(path.as_uri())
    try:
        # The theme reads the field when a key is released, and clears it when the search is ready.
        page.click("input[name=query]")
        page.get_by_text("Type to start searching").wait_for(state="attached")
        page.locator("input[name=query]").press_sequentially(query)
        page.wait_for_selector(".md-search-result__link")
    except TimeoutError as error:
        return [f"the search finds no page with {query!r}: {error}"]
    finally:
        page.close()
    return []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.site", description=__doc__)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="built site")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site-audit", help="output directory")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, theme, width in product(PAGES, THEMES, WIDTHS):
            picture = args.out / f"{name.removesuffix('.html').replace('/', '-')}-{theme}-{width}.png"
            faults = audit_page(browser, (args.site / name).absolute(), theme, width, picture)
            print(f"{name} {theme} {width}: {'ok' if not faults else ''}", *faults, sep="\n  ")
            failed |= bool(faults)
        faults = search(browser, (args.site / "index.html").absolute(), "predictor")
        print("search:", *faults or ["ok"])
        browser.close()
    return int(failed or bool(faults))


def _is_foreign(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:"))


if __name__ == "__main__":
    sys.exit(main())
