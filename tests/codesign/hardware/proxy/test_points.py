"""Files of layer measurements: resume after a kill, duplicates, and damaged content."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from sparseflow.codesign.hardware.proxy import LayerPoint, LayerPointFile, read_points
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.codesign.hardware.proxy.made_up import GPU, change, points
from tests.conformance import check_journal_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "points.jsonl"


def write(file: Path, measured: list[LayerPoint]) -> None:
    with LayerPointFile(file) as opened:
        for point in measured:
            opened.add(point)


def test_read_points_returns_what_was_added(file: Path) -> None:
    measured = points(6)
    with LayerPointFile(file) as opened:
        name = opened.add_environment({"seed": 1})
        assert opened.add_environment({"seed": 1}) == name != opened.add_environment({"seed": 2})
    write(file, measured[:3])
    write(file, measured[3:])
    content = read_points(file)
    assert list(content.points) == measured and content.environments[name] == {"seed": 1}
    assert content.devices == {"made-up": GPU} and measured[1].power_w is None


def test_read_points_without_a_file(file: Path) -> None:
    assert read_points(file, missing_ok=True).points == ()
    with pytest.raises(InputError, match="codesign profile"):
        read_points(file)


def test_points_file_conforms(file: Path) -> None:
    write(file, points(3))

    def open_rows() -> list[LayerPoint]:
        with LayerPointFile(file) as opened:
            return opened.points

    check_journal_file(open_rows, file)


WRITER = """
import sys, time
from sparseflow.codesign.hardware.proxy.points import LayerPointFile
from tests.codesign.hardware.proxy.made_up import points
file = LayerPointFile(sys.argv[1])
for point in points(5):
    file.add(point)
print("added", flush=True)
time.sleep(60)
"""


def test_killed_writer_loses_no_point(file: Path) -> None:
    root = str(Path(__file__).parents[4])
    path = os.pathsep.join([root, os.path.join(root, "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"added\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with file.open("ab") as torn:
        torn.write(b'{"layer": {"torn')
    assert list(read_points(file).points) == points(5)
    write(file, points(6)[5:])
    assert list(read_points(file).points) == points(6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lat_ms", math.nan), ("lat_ms", 0.0), ("lat_ms", -1.0), ("mem_mb", math.inf), ("power_w", 0.0),
        ("samples_ms", [1.0, -1.0]), ("mode", "fast"), ("provenance", "guessed"),
        ("mem_provenance", "guessed"), ("more", 1), ("layer", {"id": 0}), ("device", {"name": "half"}),
    ],
)  # fmt: skip
def test_invalid_point_is_refused(file: Path, name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        change(points(1)[0], **{name: value})
    write(file, points(1))
    header, line = file.read_text().splitlines()
    file.write_text(f"{header}\n{json.dumps(json.loads(line) | {name: value})}\n")
    for read in (read_points, LayerPointFile):
        with pytest.raises(FileFormatError, match="line 2"):
            read(file)


def test_duplicate_point_is_refused(file: Path) -> None:
    first, second = points(2)
    with LayerPointFile(file) as opened:
        opened.add(first)
        with pytest.raises(InputError, match="already"):
            opened.add(change(first, lat_ms=5.0))
        # In another mode, or as a layer of another name, it is another point.
        opened.add(change(first, mode="eager"))
        opened.add(change(first, layer=replace(first.layer, name="blocks.0.mlp")))
        with pytest.raises(InputError, match="another device"):
            opened.add(change(second, device=replace(GPU, tdp_w=400.0)))
    with pytest.raises(RunError, match="closed"):
        opened.add(second)
    assert len(read_points(file).points) == 3


def test_two_devices_with_one_name_are_refused(file: Path) -> None:
    first, second = points(2)
    write(file, [first])
    other = change(second, device=replace(GPU, tdp_w=400.0))
    with file.open("a") as lines:
        lines.write(other.model_dump_json() + "\n")
    with pytest.raises(FileFormatError, match="made-up"):
        read_points(file)


def test_config_key_excludes_name_and_id() -> None:
    first, second = points(2)
    renamed = change(first, layer=replace(first.layer, name="blocks.0.mlp", id=7))
    assert first.config_key == renamed.config_key != second.config_key
    assert first.key != renamed.key


def test_gated_layers_are_written_as_numbers(file: Path) -> None:
    first = points(1)[0]
    flops = torch.tensor(float(first.layer.flops), requires_grad=True)
    write(file, [change(first, layer=replace(first.layer, flops=flops))])
    (point,) = read_points(file).points
    assert point.layer.flops == pytest.approx(float(first.layer.flops), rel=1e-6)
