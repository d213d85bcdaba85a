"""Tests of the conversion of Matplotlib figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from sparseflow.core.report import from_matplotlib, svg
from sparseflow.errors import InputError


def make_figure(color: str) -> Figure:
    figure = Figure()
    figure.add_subplot().plot([0, 1], [0, 1], color=color, label="line")
    return figure


def test_placeholder_colors_become_css_variables() -> None:
    assert "var(--good)" in from_matplotlib(make_figure(svg.GOOD), title="T", alt="a").svg
    assert "#ff8800" in from_matplotlib(make_figure("#ff8800"), title="T", alt="a").svg


def test_placeholder_colors_and_variables_are_unique() -> None:
    assert len(set(svg._VARIABLES)) == len(set(svg._VARIABLES.values())) == 8


def test_file_metadata_is_removed() -> None:
    text = from_matplotlib(make_figure("#ff8800"), title="T", alt="a").svg
    assert not re.search("<metadata|<!DOCTYPE|<[?]xml|xmlns|xlink", text)


def test_alt_is_escaped() -> None:
    svg_text = from_matplotlib(make_figure("#ff8800"), title="T", alt="a < b & c").svg
    title = ElementTree.fromstring(svg_text).find("title")
    assert title is not None and title.text == "a < b & c"


def test_missing_alt_raises() -> None:
    with pytest.raises(InputError, match="`alt`"):
        from_matplotlib(Figure(), title="T", alt=" ")
