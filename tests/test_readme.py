"""Tests of README: its example prints what it says, and its links and pictures exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SITE = "https://sparseflow.github.io/sparseflow/"
REPOSITORY = re.compile(
    r"https://(?:github\.com|raw\.githubusercontent\.com)/sparseflow/sparseflow/(?:(?:blob|tree)/)?main/"
)


def _mask(text: str) -> str:
    """Replace numbers; remove the note that `explain` adds on a machine that is not idle."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r" \(measured while .*?\)", "", text)).strip()


def test_example_prints_its_output(tmp_path: Path) -> None:
    pytest.importorskip("spikingjelly")
    code, output = (re.search(rf"```{name}\n(.*?)```", TEXT, re.DOTALL) for name in ("python", "text"))
    assert code and output
    process = subprocess.run(
        [sys.executable, "-c", code[1]],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    printed = _mask(process.stdout)
    # Beside other work, the gain may be lost in the noise.
    assert printed == _mask(output[1]) or printed.startswith("unchanged: no candidate")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_link_is_absolute_and_exists(target: str) -> None:
    address, _, anchor = target.partition("#")
    if REPOSITORY.match(address):
        assert (ROOT / REPOSITORY.sub("", address)).exists()
        return
    assert address.startswith(SITE)
    page = re.sub(r"(^|/)$", r"\1index.html", address.removeprefix(SITE)).removesuffix(".html")
    if page.startswith("tutorials/") and not page.endswith("index"):
        assert (ROOT / "examples" / f"{Path(page).name}.py").exists()
    elif not page.startswith("reference/"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_figures_are_up_to_date() -> None:
    assert figures.main(["--check"]) == 0, "run `make tables`"
