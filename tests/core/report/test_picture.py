"""Figures as picture files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from sparseflow.core.report import plot_curves, plot_predicted_vs_measured, save_picture
from sparseflow.errors import InputError


def test_save_picture_as_svg_and_png(tmp_path: Path) -> None:
    figure = plot_curves("Latency", {"mean": ([1, 2, 4], [1.0, 2.0, 4.0])}, x="batch", y="ms")
    assert "var(--after)" in figure.svg
    for name in ("a.svg", "a.png"):
        save_picture(figure, tmp_path / name)
    svg = (tmp_path / "a.svg").read_text()
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg and "Latency" in svg and "batch" in svg
    assert "#0b7fab" in svg and "#01020" not in svg and "var(" not in svg
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG") and min(struct.unpack(">II", content[16:24])) > 100


def test_save_picture_recolors_areas(tmp_path: Path) -> None:
    save_picture(plot_predicted_vs_measured("T", {"a": [(1.0, 2.0)]}), tmp_path / "a.svg")
    assert "#01020" not in (tmp_path / "a.svg").read_text()


def test_save_picture_other_suffix_raises(tmp_path: Path) -> None:
    figure = plot_curves("T", {"a": ([1], [1.0])}, x="x", y="y")
    with pytest.raises(InputError, match=r"a\.jpg must end in \.png or \.svg"):
        save_picture(figure, tmp_path / "a.jpg")
