"""Files of points: what is added is there, whatever happens to the writer."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparseflow.codesign.hardware.proxy import LayerPoint, LayerPointFile, read_points, write_points
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.codesign.hardware.proxy.made_up import GPU, points


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "points.parquet"


def test_points_are_read_back(file: Path) -> None:
    subset = points(6)
    with LayerPointFile(file) as opened:
        name = opened.add_environment({"seed": 1})
        assert opened.add_environment({"seed": 1}) == name != opened.add_environment({"seed": 2})
        for point in subset:
            opened.add(point)
    assert os.listdir(file.parent) == ["points.parquet"]
    result = read_points(file)
    assert list(result.points) == subset and result.environments[name] == {"seed": 1}
    assert result.devices == {"made-up": GPU} and subset[1].power_w is None


def test_more_can_be_added_later(file: Path) -> None:
    subset = points(6)
    write_points(file, subset[:3], {"a": {"seed": 0}})
    with LayerPointFile(file) as opened:
        assert subset[0] in opened and subset[3] not in opened
        for point in subset[3:]:
            opened.add(point)
        opened.close()
        with pytest.raises(RunError, match="closed"):
            opened.add(points(7)[6])
    result = read_points(file)
    assert list(result.points) == subset and result.environments == {"a": {"seed": 0}}


def test_a_closed_file_without_points_leaves_nothing(file: Path) -> None:
    LayerPointFile(file).close()
    assert os.listdir(file.parent) == [] and read_points(file, missing_ok=True).points == ()
    with pytest.raises(InputError):
        read_points(file)
    with pytest.raises(InputError):
        write_points(file, [])


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


def test_a_killed_writer_loses_nothing(file: Path) -> None:
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
    with (file.parent / "points.jsonl").open("ab") as journal:
        journal.write(b'{"point": {"torn')
    assert list(read_points(file).points) == points(5)
    with LayerPointFile(file) as opened:
        assert list(opened.points) == points(5)
        opened.add(points(6)[5])
    assert list(read_points(file).points) == points(6) and not (file.parent / "points.jsonl").exists()


def test_a_kill_between_the_two_files_counts_nothing_twice(file: Path) -> None:
    subset = points(4)
    opened = LayerPointFile(file)
    for point in subset:
        opened.add(point)
    write_points(file, subset)  # as closing does, before the journal goes
    assert list(read_points(file).points) == subset
    opened.close()
    assert list(read_points(file).points) == subset


@pytest.mark.usefixtures("refused_at_once")
def test_only_one_process_writes(file: Path) -> None:
    with LayerPointFile(file), pytest.raises(RunError):
        LayerPointFile(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lat_ms", math.nan), ("lat_ms", 0.0), ("lat_ms", -1.0), ("mem_mb", math.inf), ("power_w", 0.0),
        ("samples_ms", (1.0, math.nan)), ("mode", "fast"), ("provenance", "guessed"),
        ("mem_provenance", "guessed"),
    ],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(file: Path, name: str, value: object) -> None:
    good, other = points(2)
    wrong = replace(other, **{name: value})  # pyright: ignore[reportArgumentType]
    with LayerPointFile(file) as opened:
        opened.add(good)
        with pytest.raises(InputError, match=rf"1.*`{name}"):
            opened.add(wrong)
    write_points(file, [good, wrong])
    with pytest.raises(InputError, match=rf"1.*`{name}"):
        read_points(file)


def test_nothing_is_there_twice(file: Path) -> None:
    first, two = points(2)
    with LayerPointFile(file) as opened:
        opened.add(first)
        with pytest.raises(InputError, match="already"):
            opened.add(replace(first, lat_ms=5.0))
        # In another mode, or as a layer of another name, it is another point.
        opened.add(replace(first, mode="eager"))
        opened.add(replace(first, layer=replace(first.layer, name="blocks.0.mlp")))
        with pytest.raises(InputError):
            opened.add(replace(two, device=replace(GPU, tdp_w=400.0)))
    assert len(read_points(file).points) == 3


def test_a_configuration_has_no_name() -> None:
    first, two = points(2)
    renamed = replace(first, layer=replace(first.layer, name="blocks.0.mlp", id=7))
    assert first.config_key == renamed.config_key != two.config_key
    assert first.key != renamed.key


def test_other_files_are_refused(file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.write_bytes(b"no table")
    with pytest.raises(FileFormatError):
        read_points(file)
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(FileFormatError):
        LayerPointFile(file)
    metadata = json.dumps({"format": "sparseflow-layer-points-1", "devices": [], "environments": {}})
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"sparseflow": metadata}), file)
    with pytest.raises(FileFormatError):
        read_points(file)
    # A file that was refused is not locked.
    file.unlink()
    LayerPointFile(file).close()


def test_gated_layers_are_kept_as_numbers(file: Path) -> None:
    import torch

    first = points(1)[0]
    gated = replace(first.layer, flops=torch.tensor(float(first.layer.flops), requires_grad=True))
    with LayerPointFile(file) as opened:
        opened.add(replace(first, layer=gated))
    (result,) = read_points(file).points
    assert isinstance(result, LayerPoint) and result.layer.flops == pytest.approx(
        float(first.layer.flops), rel=1e-6
    )
