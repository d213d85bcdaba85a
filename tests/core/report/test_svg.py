"""What becomes of a drawing on its way into the page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from sparseflow.core.report import from_matplotlib, svg
from sparseflow.errors import InputError


def drawn(colour: str) -> Figure:
    figure = Figure()
    figure.add_subplot().plot([0, 1], [0, 1], color=colour, label="line")
    return figure


def test_stand_in_colours_follow_the_page_and_others_stay() -> None:
    assert "var(--good)" in from_matplotlib(drawn(svg.GOOD), title="T", alt="a").svg
    assert "#ff8800" in from_matplotlib(drawn("#ff8800"), title="T", alt="a").svg


def test_every_stand_in_has_its_own_colour_and_variable_of_the_page() -> None:
    assert len(set(svg._VARIABLES)) == len(set(svg._VARIABLES.values())) == 8


def test_what_only_a_file_needs_is_left_out() -> None:
    text = from_matplotlib(drawn("#ff8800"), title="T", alt="a").svg
    assert not re.search("<metadata|<!DOCTYPE|<[?]xml|xmlns|xlink", text)


def test_words_are_escaped() -> None:
    title = ElementTree.fromstring(from_matplotlib(drawn("#ff8800"), title="T", alt="a < b & c").svg).find(
        "title"
    )
    assert title is not None and title.text == "a < b & c"


def test_a_figure_without_words_is_refused() -> None:
    with pytest.raises(InputError, match="cannot see"):
        from_matplotlib(Figure(), title="T", alt=" ")
