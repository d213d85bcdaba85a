"""Report pages: headline numbers, tables and figures in one self-contained HTML file.

`page` builds a page from rows, `figures` plots the kinds of figure that pages use, `svg` converts a
Matplotlib figure into SVG that follows the light or dark theme of the page, and `picture` writes a figure as
a file of its own.
"""

from sparseflow.core.report.figures import (
    plot_before_after,
    plot_curves,
    plot_frames,
    plot_history,
    plot_intervals,
    plot_predicted_vs_measured,
    plot_samples,
    plot_stacked_bars,
)
from sparseflow.core.report.page import Page
from sparseflow.core.report.picture import check_picture_path, save_picture
from sparseflow.core.report.svg import Figure, from_matplotlib

__all__ = [
    "Figure",
    "Page",
    "check_picture_path",
    "from_matplotlib",
    "plot_before_after",
    "plot_curves",
    "plot_frames",
    "plot_history",
    "plot_intervals",
    "plot_predicted_vs_measured",
    "plot_samples",
    "plot_stacked_bars",
    "save_picture",
]
