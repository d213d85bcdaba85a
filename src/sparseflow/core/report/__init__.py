"""A run's page: headline numbers, tables and figures in one HTML file that needs nothing else.

::

    page = Report(title=..., headlines=(...), sections=(Section(title=..., items=(Table(...), figure)),), ...)
    page.write(run.path / "report.html")
"""

from sparseflow.core.report.figures import (
    plot_before_after,
    plot_curves,
    plot_intervals,
    plot_predicted_vs_measured,
    plot_samples,
    plot_stacked_bars,
)
from sparseflow.core.report.page import Column, Headline, Report, Section, Table
from sparseflow.core.report.svg import Figure, from_matplotlib

__all__ = [
    "Column",
    "Figure",
    "Headline",
    "Report",
    "Section",
    "Table",
    "from_matplotlib",
    "plot_before_after",
    "plot_curves",
    "plot_intervals",
    "plot_predicted_vs_measured",
    "plot_samples",
    "plot_stacked_bars",
]
