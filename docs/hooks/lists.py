"""Lists of pages: `<!-- pages -->` in the index of a folder becomes a table of its pages."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

_MARKER = "<!-- pages -->"


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Replace the marker by the titles and the first sentences of the other pages of the folder."""
    if _MARKER not in markdown:
        return markdown
    folder = page.file.src_uri.rpartition("/")[0]
    siblings = [
        file
        for file in files.documentation_pages()
        if file.src_uri.rpartition("/")[0] == folder and file is not page.file
    ]
    rows = [_describe(file) for file in sorted(siblings, key=lambda file: file.src_uri)]
    return markdown.replace(_MARKER, "\n".join(["| page | content |", "| --- | --- |", *rows]))


def _describe(file: File) -> str:
    title, *paragraphs = [text for text in file.content_string.split("\n\n") if text.strip()]
    prose = [text for text in paragraphs if not text.startswith(("Download:", "<", "#", "!"))]
    text = " ".join(prose[0].split()).removeprefix("**Goal:** ") if prose else ""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    sentence = re.split(r"(?<=\.)\s", text)[0]
    name = file.src_uri.rpartition("/")[2]
    return f"| [{title.removeprefix('# ').strip()}]({name}) | {sentence[:1].upper()}{sentence[1:]} |"
