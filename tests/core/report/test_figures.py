"""Figures: self-contained, themed, described, and alike whenever they are drawn alike."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from sparseflow.core import report
from sparseflow.errors import InputError


def all_kinds() -> list[report.Figure]:
    return [
        report.before_after("Time", ["a", "b"], [2.0, 3.0], [1.0, 0.0], unit="ms"),
        report.intervals("Speed", ["a", "b"], [2.0, 0.5], [1.8, 0.4], [2.2, 0.6], unit="x", reference=1.0),
        report.samples("Samples", {"dense": [1.0, 1.1, 1.2], "ours": [0.5]}),
    ]


@pytest.mark.parametrize("figure", all_kinds(), ids=lambda figure: figure.title)
def test_a_figure_is_one_svg_that_needs_nothing_else(figure: report.Figure) -> None:
    root = ElementTree.fromstring(figure.svg)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("viewBox")
    assert "http" not in figure.svg and "#0102" not in figure.svg
    assert "var(--ink)" in figure.svg or "var(--muted)" in figure.svg
    ids = re.findall(r'\bid="([^"]+)"', figure.svg)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="|url\()#([^")]+)', figure.svg):
        assert target in ids


@pytest.mark.parametrize("figure", all_kinds(), ids=lambda figure: figure.title)
def test_a_figure_says_in_words_what_it_shows(figure: report.Figure) -> None:
    title = ElementTree.fromstring(figure.svg).find("title")
    assert title is not None and title.text == figure.alt
    assert re.search(r"\d", figure.alt)


def test_ids_of_two_figures_differ_and_drawing_is_repeatable() -> None:
    first, second = all_kinds(), all_kinds()
    assert [figure.svg for figure in first] == [figure.svg for figure in second]
    ids = [set(re.findall(r'\bid="([^"]+)"', figure.svg)) for figure in first]
    assert not ids[0] & ids[1] and not ids[1] & ids[2]


def test_better_and_worse_have_their_colours() -> None:
    svg = all_kinds()[1].svg
    assert "var(--good)" in svg and "var(--bad)" in svg


def test_text_is_text_and_escaped() -> None:
    figure = report.before_after("T", ["<b>&"], [1.0], [1.0], unit="ms", alt="a < b & c")
    labels = [element.text for element in ElementTree.fromstring(figure.svg).iter("text")]
    assert "<b>&" in labels


@pytest.mark.parametrize(
    "draw",
    [
        lambda: report.before_after("T", [], [], [], unit="ms"),
        lambda: report.before_after("T", ["a"], [1.0], [], unit="ms"),
        lambda: report.intervals("T", ["a"], [1.0], [1.0], [], unit="x"),
        lambda: report.samples("T", {}),
        lambda: report.samples("T", {"a": []}),
    ],
)
def test_nothing_to_draw_is_an_error(draw) -> None:
    with pytest.raises(InputError, match="T: "):
        draw()
