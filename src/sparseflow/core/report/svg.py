"""Turning what Matplotlib draws into inline SVG that suits a light page and a dark one.

Matplotlib draws with stand-in colours; the SVG that it writes is stripped of what only a file needs
(prologue, metadata, namespaces), its ids are made the figure's own, and each stand-in becomes a CSS variable.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseflow.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

INK, MUTED, GRID, PAPER = "#010203", "#010204", "#010205", "#010206"
BEFORE, AFTER, GOOD, BAD = "#010207", "#010208", "#010209", "#01020a"

_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    PAPER: "--paper",
    BEFORE: "--before",
    AFTER: "--after",
    GOOD: "--good",
    BAD: "--bad",
}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture and what it says in words.

    Attributes:
        title: Its heading.
        svg: One `<svg>` element, coloured by the page's CSS variables.
        alt: What a reader who cannot see it must know.
        caption: A sentence below it; may be empty.
    """

    title: str
    svg: str
    alt: str
    caption: str = ""


def from_matplotlib(figure: MatplotlibFigure, *, title: str, alt: str, caption: str = "") -> Figure:
    """Turn a drawn figure into one for the page.

    Colours equal to `INK`, `MUTED`, `GRID`, `PAPER`, `BEFORE`, `AFTER`, `GOOD` and `BAD` follow the page's
    theme; any other colour stays as it is.

    Raises:
        InputError: `alt` is empty.
    """
    if not alt.strip():
        raise InputError(f"figure {title!r} needs a text for readers who cannot see it")
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": "sparseflow"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True)
    drawn = stream.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", drawn).replace("xlink:href", "href")
    width, height = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', drawn).groups()  # pyright: ignore[reportOptionalMemberAccess]
    drawn = re.sub(r"^<svg[^>]*>", "", drawn)
    for colour, variable in _VARIABLES.items():
        drawn = drawn.replace(colour, f"var({variable})")
    # Matplotlib names the parts of every figure alike; on one page ids must differ.
    own = "f" + hashlib.sha256((title + drawn).encode()).hexdigest()[:8]
    drawn = re.sub(r'\bid="([^"]+)"', rf'id="{own}-\1"', drawn)
    drawn = re.sub(r'(href="|url\()#', rf"\1#{own}-", drawn)
    # The page's own font, instead of a list of what this machine happens to have.
    drawn = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", drawn)
    head = f'<svg role="img" aria-labelledby="{own}-alt" viewBox="0 0 {width} {height}">'
    return Figure(
        title=title,
        svg=f'{head}<title id="{own}-alt">{_escape(alt)}</title>{drawn}',
        alt=alt,
        caption=caption,
    )


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
