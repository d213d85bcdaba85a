"""Figures: self-contained, themed, described, and alike whenever they are drawn alike."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest

from sparseflow.core import metrics, report
from sparseflow.errors import InputError


def all_kinds() -> list[report.Figure]:
    return [
        report.plot_before_after("Time", ["a", "b"], [2.0, 3.0], [1.0, 0.0], unit="ms"),
        report.plot_intervals(
            "Speed", ["a", "b"], [2.0, 0.5], [1.8, 0.4], [2.2, 0.6], unit="x", reference=1.0
        ),
        report.plot_samples("Samples", {"dense": [1.0, 1.1, 1.2], "ours": [0.5]}),
        report.plot_predicted_vs_measured(
            "Right", {"seen": [(1.0, 1.05), (20.0, 15.0)], "new": [(3.0, 3.0)]}
        ),
        report.plot_curves(
            "Loss", {"a": ([1, 2], [0.5, 0.25]), "b": ([1], [0.4])}, x="step", y="loss", log_y=True
        ),
        report.plot_stacked_bars(
            "Where", ["with", "without"], {"run": [1.0, 8.0], "compile": [0.5, 2.0]}, unit="s"
        ),
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
    assert not any(one & other for one, other in itertools.combinations(ids, 2))


def test_better_and_worse_have_their_colours() -> None:
    svg = all_kinds()[1].svg
    assert "var(--good)" in svg and "var(--bad)" in svg


def texts(figure: report.Figure) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(figure.svg).iter("text")]


def test_predicted_over_measured_names_its_groups_axes_and_band() -> None:
    groups = {"seen": [(1.0, 1.05), (20.0, 15.0)], "new": [(3.0, 3.0)], "empty": []}
    figure = report.plot_predicted_vs_measured("T", groups, unit="us", band=0.2, caption="Over all.")
    assert {"seen", "new", "±20 %", "measured, us", "predicted, us"} <= set(texts(figure))
    assert figure.alt == "seen: 1 of 2 within 20 %; new: 1 of 1 within 20 %."
    assert (figure.title, figure.caption) == ("T", "Over all.")
    assert report.plot_predicted_vs_measured("T", groups, alt="As drawn.").alt == "As drawn."


def test_each_group_of_dots_has_a_colour_and_more_groups_than_colours_are_drawn() -> None:
    groups = {f"g{place}": [(1.0 + place, 1.2 + place)] for place in range(7)}
    figure = report.plot_predicted_vs_measured("T", groups)
    assert set(groups) <= set(texts(figure))
    assert all(f"var(--{name})" in figure.svg for name in ("after", "before", "good", "bad", "ink", "line"))


@pytest.mark.parametrize("dots", [[(5.0, 5.0)], [(1.0, 9.0), (2.0, 2.1)], [(1e-4, 2e-4), (3e3, 2e3)]])
def test_ticks_of_predicted_over_measured_are_numbers_in_plain_text(dots: list[tuple[float, float]]) -> None:
    labels = set(texts(report.plot_predicted_vs_measured("T", {"a": dots})))
    numbers = labels - {"a", "±10 %", "measured, ms", "predicted, ms"}
    assert numbers and all(float(number.replace("−", "-")) > 0.0 for number in numbers)


def test_the_words_of_predicted_over_measured_count_as_the_metric_does() -> None:
    dots = [(100.0, 110.0), (100.0, 90.0), (100.0, 110.1), (100.0, 89.9), (1.0, 1.1), (30.0, 33.0)]
    right = round(len(dots) * metrics.fraction_within([p for _, p in dots], [m for m, _ in dots]))
    assert report.plot_predicted_vs_measured("T", {"a": dots}).alt == f"a: {right} of 6 within 10 %."


def test_text_is_text_and_escaped() -> None:
    figure = report.plot_before_after("T", ["<b>&"], [1.0], [1.0], unit="ms", alt="a < b & c")
    assert "<b>&" in texts(figure)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: report.plot_before_after("T", [], [], [], unit="ms"),
        lambda: report.plot_before_after("T", ["a"], [1.0], [], unit="ms"),
        lambda: report.plot_intervals("T", ["a"], [1.0], [1.0], [], unit="x"),
        lambda: report.plot_samples("T", {}),
        lambda: report.plot_samples("T", {"a": []}),
        lambda: report.plot_curves("T", {}, x="x", y="y"),
        lambda: report.plot_curves("T", {"a": ([], [])}, x="x", y="y"),
        lambda: report.plot_curves("T", {"a": ([1.0], [])}, x="x", y="y"),
        lambda: report.plot_stacked_bars("T", [], {"a": []}, unit="s"),
        lambda: report.plot_stacked_bars("T", ["one"], {}, unit="s"),
        lambda: report.plot_stacked_bars("T", ["one"], {"a": [1.0, 2.0]}, unit="s"),
        lambda: report.plot_predicted_vs_measured("T", {}),
        lambda: report.plot_predicted_vs_measured("T", {"a": []}),
        lambda: report.plot_predicted_vs_measured("T", {"a": [(1.0, 2.0), (0.0, 1.0)]}),
        lambda: report.plot_predicted_vs_measured("T", {"a": [(1.0, -2.0)]}),
        lambda: report.plot_predicted_vs_measured("T", {"a": [(1.0, float("nan"))]}),
        lambda: report.plot_predicted_vs_measured("T", {"a": [(1.0, float("inf"))]}),
    ],
)
def test_nothing_to_draw_is_an_error(draw) -> None:
    with pytest.raises(InputError, match="T: "):
        draw()
