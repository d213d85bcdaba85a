"""Tests of plots: self-contained, themed, described and reproducible."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from sparseflow.core import metrics, report
from sparseflow.errors import InputError


def make_figures() -> list[report.Figure]:
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
            "Loss", {"a": ([1, 2], [0.5, 0.25]), "b": ([1], [0.4])}, x="step", y="loss", log_x=True
        ),
        report.plot_stacked_bars(
            "Where", ["with", "without"], {"run": [1.0, 8.0], "compile": [0.5, 2.0]}, unit="s"
        ),
    ]


@pytest.fixture(scope="module")
def figures() -> dict[str, report.Figure]:
    return {figure.title: figure for figure in make_figures()}


each_figure = pytest.mark.parametrize("title", ["Time", "Speed", "Samples", "Right", "Loss", "Where"])


@each_figure
def test_figure_is_one_self_contained_svg(title: str, figures: dict[str, report.Figure]) -> None:
    figure = figures[title]
    root = ElementTree.fromstring(figure.svg)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("viewBox")
    assert "http" not in figure.svg and "#0102" not in figure.svg
    assert "var(--ink)" in figure.svg or "var(--muted)" in figure.svg
    ids = re.findall(r'\bid="([^"]+)"', figure.svg)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="|url\()#([^")]+)', figure.svg):
        assert target in ids


@each_figure
def test_figure_has_text_alternative_with_values(title: str, figures: dict[str, report.Figure]) -> None:
    figure = figures[title]
    element = ElementTree.fromstring(figure.svg).find("title")
    assert element is not None and element.text == figure.alt
    assert re.search(r"\d", figure.alt)


def test_plots_are_reproducible_with_unique_ids(figures: dict[str, report.Figure]) -> None:
    first, second = list(figures.values()), make_figures()
    assert [figure.svg for figure in first] == [figure.svg for figure in second]
    ids = [set(re.findall(r'\bid="([^"]+)"', figure.svg)) for figure in first]
    assert not any(first_ids & second_ids for first_ids, second_ids in itertools.combinations(ids, 2))


def test_plot_intervals_colors_good_and_bad(figures: dict[str, report.Figure]) -> None:
    svg = figures["Speed"].svg
    assert "var(--good)" in svg and "var(--bad)" in svg


def read_texts(figure: report.Figure) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(figure.svg).iter("text")]


def test_plot_predicted_vs_measured_labels() -> None:
    groups = {"seen": [(1.0, 1.05), (20.0, 15.0)], "new": [(3.0, 3.0)], "empty": []}
    figure = report.plot_predicted_vs_measured("T", groups, unit="us", band=0.2, caption="Over all.")
    assert {"seen", "new", "±20 %", "measured, us", "predicted, us"} <= set(read_texts(figure))
    assert figure.alt == "seen: 1 of 2 within 20 %; new: 1 of 1 within 20 %."
    assert (figure.title, figure.caption) == ("T", "Over all.")
    assert report.plot_predicted_vs_measured("T", groups, alt="Text.").alt == "Text."


def test_plot_predicted_vs_measured_reuses_colors() -> None:
    groups = {f"g{index}": [(1.0 + index, 1.2 + index)] for index in range(7)}
    figure = report.plot_predicted_vs_measured("T", groups)
    assert set(groups) <= set(read_texts(figure))
    assert all(f"var(--{name})" in figure.svg for name in ("after", "before", "good", "bad", "ink", "line"))


@pytest.mark.parametrize("pairs", [[(5.0, 5.0)], [(1.0, 9.0), (2.0, 2.1)], [(1e-4, 2e-4), (3e3, 2e3)]])
def test_plot_predicted_vs_measured_has_plain_ticks(pairs: list[tuple[float, float]]) -> None:
    labels = set(read_texts(report.plot_predicted_vs_measured("T", {"a": pairs})))
    numbers = labels - {"a", "±10 %", "measured, ms", "predicted, ms"}
    assert numbers and all(float(number.replace("−", "-")) > 0.0 for number in numbers)


def test_plot_predicted_vs_measured_counts_like_fraction_within() -> None:
    pairs = [(100.0, 110.0), (100.0, 90.0), (100.0, 110.1), (100.0, 89.9), (1.0, 1.1), (30.0, 33.0)]
    count = round(len(pairs) * metrics.fraction_within([p for _, p in pairs], [m for m, _ in pairs]))
    assert report.plot_predicted_vs_measured("T", {"a": pairs}).alt == f"a: {count} of 6 within 10 %."


def test_plot_curves_merges_curves_that_cannot_be_told_apart() -> None:
    steps = [1.0, 2.0, 3.0]
    series = {"heads": (steps, [0.0] * 3), "tokens": (steps, [0.0, 0.2, 0.5]), "blocks": (steps, [0.001] * 3)}
    figure = report.plot_curves("T", series | {"other": ([1.0, 2.0], [0.0, 0.0])}, x="step", y="share")
    assert {"heads, blocks", "tokens", "other"} <= set(read_texts(figure))
    assert all(f"{name} ends at" in figure.alt for name in series)
    same = report.plot_curves("T", {"a": (steps, [1.0] * 3), "b": (steps, [1.0] * 3)}, x="step", y="share")
    assert "a, b" in read_texts(same)


def test_plot_curves_marks_single_points() -> None:
    figure = report.plot_curves("T", {"a": ([1.0], [0.5]), "b": ([1.0, 2.0], [0.1, 0.2])}, x="step", y="loss")
    assert figure.svg.count("<use") >= 3


def test_plot_curves_has_integer_ticks_for_integers() -> None:
    figure = report.plot_curves("T", {"a": ([1.0, 2.0], [0.5, 0.25])}, x="epoch", y="loss")
    assert {"1", "2"} <= set(read_texts(figure)) and not {"1.2", "1.25", "1.50", "1.5"} & set(
        read_texts(figure)
    )


def test_plot_stacked_bars_remainder_has_its_own_color() -> None:
    figure = report.plot_stacked_bars("T", ["a"], {"run": [1.0], "idle": [2.0]}, unit="ms", remainder="idle")
    other = report.plot_stacked_bars("T", ["a"], {"run": [1.0], "wait": [0.0]}, unit="ms")
    assert "wait" not in read_texts(other) and "wait 0" in other.alt
    assert "fill: var(--line)" in figure.svg and "fill: var(--before)" not in figure.svg


@pytest.mark.parametrize("channels", [(), (3,)])
def test_plot_frames_draws_one_image_per_frame(channels: tuple[int, ...]) -> None:
    clips, masks = np.zeros((2, 3, 8, 4, *channels)), np.zeros((2, 3, 2, 1), bool)
    masks[0, :, 0] = True
    figure = report.plot_frames("T", list(clips), list(masks))
    assert figure.svg.count('href="data:image/png;base64,') == 6 and len(figure.svg) < 20_000
    assert "clip 1: 50%; clip 2: 0%" in figure.alt


def test_plot_history_shows_values_intervals_and_target() -> None:
    figure = report.plot_history(
        "T", ["one\na1", "two\nb2"], [1.0, 2.0], [(None, None), (1.8, 2.2)], unit="x", target=1.5
    )
    assert {"one", "a1", "two", "b2", "target"} <= set(read_texts(figure))
    assert figure.alt == "In x: one, a1: 1; two, b2: 2."


def test_labels_are_escaped() -> None:
    figure = report.plot_before_after("T", ["<b>&"], [1.0], [1.0], unit="ms", alt="a < b & c")
    assert "<b>&" in read_texts(figure)


@pytest.mark.parametrize(
    "plot",
    [
        lambda: report.plot_before_after("T", [], [], [], unit="ms"),
        lambda: report.plot_before_after("T", ["a"], [1.0], [], unit="ms"),
        lambda: report.plot_intervals("T", ["a"], [1.0], [1.0], [], unit="x"),
        lambda: report.plot_samples("T", {}),
        lambda: report.plot_samples("T", {"a": []}),
        lambda: report.plot_curves("T", {}, x="x", y="y"),
        lambda: report.plot_curves("T", {"a": ([], [])}, x="x", y="y"),
        lambda: report.plot_curves("T", {"a": ([1.0], [])}, x="x", y="y"),
        lambda: report.plot_frames("T", [], []),
        lambda: report.plot_frames("T", [np.zeros((1, 4, 4))], []),
        lambda: report.plot_frames("T", [np.zeros((1, 4, 4))], [np.zeros((1, 3, 4))]),
        lambda: report.plot_frames("T", [np.zeros((1, 4, 4, 2))], [np.zeros((1, 2, 2))]),
        lambda: report.plot_history("T", ["a"], [1.0], [(None, None)], unit="x"),
        lambda: report.plot_history("T", ["a", "b"], [1.0, 2.0], [], unit="x"),
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
def test_plots_without_data_raise(plot: Callable[[], report.Figure]) -> None:
    with pytest.raises(InputError, match="T: "):
        plot()
