"""Convert Matplotlib figures to inline SVG that follows the light or dark theme of the page.

Figures use placeholder colors. The conversion removes the parts that only files need (prologue,
metadata, namespaces), makes ids unique to the figure, and replaces each placeholder color by a CSS variable.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass, field
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
    """A figure with a text alternative.

    Attributes:
        title: Heading.
        svg: One `<svg>` element, colored by the CSS variables of the page.
        alt: Text alternative for readers who cannot see the figure.
        picture: The Matplotlib figure, with placeholder colors.
        caption: Sentence below the heading; may be empty.
    """

    kind = "figure"
    title: str
    svg: str
    alt: str
    picture: MatplotlibFigure = field(repr=False, compare=False)
    caption: str = ""


def from_matplotlib(figure: MatplotlibFigure, *, title: str, alt: str, caption: str = "") -> Figure:
    """Convert a Matplotlib figure to a figure of a page.

    The colors `INK`, `MUTED`, `GRID`, `PAPER`, `BEFORE`, `AFTER`, `GOOD` and `BAD` follow the theme of the
    page; other colors are unchanged.

    Raises:
        InputError: `alt` is empty.
    """
    if not alt.strip():
        raise InputError(f"figure {title!r} needs a text alternative: pass `alt`")
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": "sparseflow"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    width, height = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', svg).groups()  # pyright: ignore[reportOptionalMemberAccess]
    svg = re.sub(r"^<svg[^>]*>", "", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    # Matplotlib uses the same ids in every figure, but ids must be unique on a page.
    prefix = "f" + hashlib.sha256((title + svg).encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    # Use the font of the page instead of the fonts of this machine.
    svg = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", svg)
    head = f'<svg role="img" aria-labelledby="{prefix}-alt" viewBox="0 0 {width} {height}">'
    return Figure(
        title=title,
        svg=f'{head}<title id="{prefix}-alt">{_escape(alt)}</title>{svg}',
        alt=alt,
        picture=figure,
        caption=caption,
    )


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
