"""The site builds strictly, without a warning, and is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.hooks import formulas, reference
from sparseflow.cli import root
from tests.site_pages import ADDRESS, ROOT, find_page, list_site_pages


class PageParser(HTMLParser):
    """Collects the ids, the requested addresses and the faults of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.requests: list[str] = []
        self.pictures: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "img":
            self.pictures.append(values.get("alt", ""))
        requested = (
            values.get("href") if tag == "link" and values.get("rel") != "canonical" else values.get("src")
        )
        self.requests += [requested] if requested else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "EXECUTE": "0", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(directory)]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    assert not process.stdout + process.stderr
    return directory


def _parse(site: Path, page: str) -> PageParser:
    return PageParser((site / page).with_suffix(".html").read_text(encoding="utf-8"))


def test_every_page_is_built_without_foreign_requests_and_with_texts_of_pictures(site: Path) -> None:
    for page in list_site_pages():
        parser = _parse(site, page)
        assert not [address for address in parser.requests if "//" in address], page
        assert all(parser.pictures), f"{page} has a picture without a text"


def test_reference_describes_every_public_name(site: Path) -> None:
    for page in (*reference.WINGS, "core", "errors"):
        names = set(reference.list_names(page))
        assert names and names <= _parse(site, f"reference/python/{page}.md").ids


def test_reference_describes_every_command(site: Path) -> None:
    for name in root.COMMANDS:
        text = reference.write_command_page(name)
        commands = re.findall(r"^#+ `(.+)`$", text, re.MULTILINE)
        ids = _parse(site, f"reference/cli/{name}.md").ids
        assert commands and {command.replace(" ", "-") for command in commands} <= ids


def test_search_works_from_disk(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = ")


def test_formulas_are_mathml() -> None:
    html = formulas.on_page_content(r'<span class="arithmatex">\(a &lt; b_i\)</span>')
    assert html.startswith("<math") and "<mo>&#x0003C;</mo>" in html


def test_find_page_unknown_address_raises() -> None:
    assert find_page(f"{ADDRESS}how-to/") == "how-to/index.md"
    assert find_page(f"{ADDRESS}faq.html#do-i-need-a-gpu") == "faq.md"
    with pytest.raises(LookupError):
        find_page(f"{ADDRESS}absent.html")
