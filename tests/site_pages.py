"""The pages of the documentation site, for tests of links to them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from docs.hooks import reference, tutorials

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
ADDRESS, SOURCE_ADDRESS = _URLS["Documentation"], f"{_URLS['Repository']}/"


def list_site_pages() -> set[str]:
    """List the paths of all pages relative to `docs/`, also of those that the build generates."""
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    generated = {f"tutorials/{path.stem}.md" for path in tutorials.list_examples()}
    return written | generated | set(reference.list_pages())


def find_page(address: str) -> str:
    """Return the path of the page at an address of the site, relative to `docs/`.

    Raises:
        LookupError: The site has no such page.
    """
    path = address.removeprefix(ADDRESS).partition("#")[0]
    page = f"{path}index.md" if path.endswith("/") or not path else f"{path.removesuffix('.html')}.md"
    if page not in list_site_pages():
        raise LookupError(f"{address}: no page {page}")
    return page
