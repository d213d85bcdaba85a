"""A run's page: headline numbers, tables and figures in one HTML file that needs nothing else.

::

    page = Report(title=..., headlines=(...), sections=(Section(title=..., items=(Table(...), figure)),), ...)
    page.write(run.path / "report.html")
"""

from sparseflow.core.report.figures import (
    before_after,
    curves,
    intervals,
    predicted_measured,
    samples,
    stacked,
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
    "before_after",
    "curves",
    "from_matplotlib",
    "intervals",
    "predicted_measured",
    "samples",
    "stacked",
]
