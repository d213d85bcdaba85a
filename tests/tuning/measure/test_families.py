"""Families of matrices."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.families import infer_family, read_families


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("net100", "net"),
        ("net150", "net"),
        ("Trec6_16x16_9", "Trec"),
        ("conf5_0-4x4-18", "conf"),
        ("mhd4800a", "mhd"),
        ("encoder.layer.10.output.dense.weight", "encoder.layer"),
        ("1138_bus", "bus"),
        ("cca", "cca"),
        ("power_rows-100x200-300-0a1b2c", "power_rows"),
        ("123", "123"),
    ],
)
def test_infer_family_rule(name: str, family: str) -> None:
    assert infer_family(name) == family


def test_read_families_overrides_rule(tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    path.write_text('{"net100": "graphs"}')
    known = read_families(path)
    assert infer_family("net100", known) == "graphs" and infer_family("net150", known) == "net"


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": ""}', "\xff"])
def test_read_families_invalid_file_raises(content: str, tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    with pytest.raises(InputError):
        read_families(path)
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(FileFormatError):
        read_families(path)
