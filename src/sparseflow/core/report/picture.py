"""Figures as picture files of their own: SVG or PNG in the light theme of the pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.files import write_atomic
from sparseflow.core.report.svg import AFTER, BAD, BEFORE, GOOD, GRID, INK, MUTED, PAPER, STYLE, Figure
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

SUFFIXES = (".png", ".svg")

_LIGHT_THEME: Mapping[str, str] = {
    INK: "#14181f", MUTED: "#5b6472", GRID: "#e2e5ea", PAPER: "#ffffff",
    BEFORE: "#a9b2bf", AFTER: "#0b7fab", GOOD: "#12805c", BAD: "#b93a32",
}  # fmt: skip
"""Placeholder color -> color of the light theme in page.css."""

_DPI = 150


def check_picture_path(path: Path) -> None:
    """Check that a file name has the suffix of a picture.

    Raises:
        InputError: It is neither `.png` nor `.svg`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"the picture {path} must end in {' or '.join(SUFFIXES)}")


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by the suffix of the path.

    Raises:
        InputError: The suffix is another one.
        OutputError: The file cannot be written.
    """
    check_picture_path(path)
    import matplotlib as mpl

    picture = figure.picture
    _recolor(picture)
    stream = io.BytesIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": "sparseflow"}):
        picture.savefig(
            stream, format=path.suffix.lower()[1:], bbox_inches="tight", dpi=_DPI,
            facecolor=_LIGHT_THEME[PAPER], metadata={"Title": figure.title, "Description": figure.alt},
        )  # fmt: skip
    write_atomic(path, stream.getvalue())


def _recolor(picture: MatplotlibFigure) -> None:
    """Replace the placeholder colors of all artists."""
    for artist in picture.findobj():
        for kind in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get: Callable[[], Any] | None = getattr(artist, f"get_{kind}", None)
            if get is not None and hasattr(artist, f"set_{kind}"):
                color = _convert_color(get())
                if color is not None:
                    getattr(artist, f"set_{kind}")(color)


def _convert_color(value: Any) -> Any:
    """Return the color of the light theme for a placeholder color, or for rows of them; None for others."""
    from matplotlib.colors import to_hex, to_rgba

    if getattr(value, "ndim", 0) == 2:
        converted = [_convert_color(tuple(row)) for row in value]
        return converted if converted and None not in converted else None
    try:
        light = _LIGHT_THEME.get(to_hex(value))
        return None if light is None else to_rgba(light, to_rgba(value)[3])
    except (ValueError, TypeError):
        return None
