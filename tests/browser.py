"""Probes of HTML pages in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
    None,
)


def probe_page(content: str, directory: Path) -> dict[str, Any]:
    """Load a page that writes JSON into `<pre id="result">`; skip the test without Chromium.

    Args:
        content: HTML of the page.
        directory: Directory for the page and the profile of the browser.

    Returns:
        The JSON, with the messages of the console as `console`.
    """
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    (directory / "probe.html").write_text(content, encoding="utf-8")
    process = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={directory / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            (directory / "probe.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'<pre id="result">(.*?)</pre>', process.stdout, re.DOTALL)
    assert match is not None, process.stderr[-2000:]
    result = json.loads(html.unescape(match.group(1)))
    result["console"] = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    return result
