"""Collections: plans, rows and interruptions."""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("yaml")

import numpy as np
import pyarrow.parquet as pq

from sparseflow.core.journal import read_journal
from sparseflow.errors import FileFormatError, InputError, RunError, SparseFlowError
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.graph.synthetic_kernels import SyntheticKernelsConfig
from sparseflow.latency.measure import collection as module
from sparseflow.latency.measure.collection import collect, read_plan, read_rows
from sparseflow.latency.measure.config import CollectionConfig, load_collection_config
from sparseflow.latency.measure.fanout import split_config
from sparseflow.latency.measure.plan import CollectionPlan, find_targets, make_plan
from tests.latency.fake_bench import FakeBench
from tests.latency.onnx_models import branching, convnet, save

ROOT = Path(__file__).parents[3]
MEASURED_THEN = ("session",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of a small network, and two models."""
    folder = tmp_path_factory.mktemp("files")
    for name, width in (("small", 4), ("wide", 8)):
        save(convnet(width=width), folder / "models", f"{name}.onnx")
    extract(folder / "models" / "small.onnx", folder / "extracted", check=False, threads=1)
    return folder


def config_of(files: Path, **settings: Any) -> CollectionConfig:
    defaults: dict[str, Any] = {
        "kernels": files / "extracted", "models": files / "models", "levels": [0.0, 0.6], "rounds": 2,
        "reference_every": 3,
    }  # fmt: skip
    return CollectionConfig(**(defaults | settings))


def keys(rows: list[dict[str, Any]]) -> list[str]:
    return [row["key"] for row in rows]


def test_synthetic_kernels_measured_beside_kernels(files: Path, tmp_path: Path) -> None:
    config = config_of(files, synthetic={"kernels": 5, "operators": ["unary"]}, levels=[0.0], rounds=1)
    summary = collect(config, tmp_path, instruments=FakeBench(config))
    records = (tmp_path / "synthetic" / "kernels").glob("*.json")
    synthetic = {json.loads(path.read_text())["id"] for path in records}
    measured = {row["kernel_id"] for row in read_rows(tmp_path)}
    assert len(synthetic) >= 5 and synthetic < measured and "small" in measured
    assert collect(config, tmp_path, instruments=FakeBench(config)).added == 0 < summary.added
    synthetic_only = CollectionConfig(synthetic=SyntheticKernelsConfig(kernels=3), levels=[0.0])
    summary = collect(synthetic_only, tmp_path / "only", instruments=FakeBench(synthetic_only))
    assert summary.targets >= 3


def test_plan_blocks_contain_each_target_once(files: Path) -> None:
    plan = make_plan(config_of(files, rounds=5), {})
    names = [item.id for item in plan.targets]
    assert len(set(names)) == len(names) and {"small", "wide"} < set(names)
    assert {item.op for item in plan.targets} >= {"Model", "Conv_Relu"}
    orders = set()
    for block in plan.blocks:
        block_targets = [
            index for index, reference in zip(block.targets, block.reference, strict=True) if not reference
        ]
        assert sorted(block_targets) == list(range(len(names)))
        orders.add(tuple(block_targets))
        assert block.reference[0] and block.reference[-1]
        assert sum(block.reference) == 2 + (len(names) - 1) // 3
        assert len({i for i, r in zip(block.targets, block.reference, strict=True) if r}) == 1
    assert len(orders) == len(plan.blocks) == 10
    # Each round has its own order of levels, so that drift affects all of them.
    by_round = [[b.level for b in plan.blocks if b.round == n] for n in range(5)]
    assert all(sorted(levels) == [0.0, 0.6] for levels in by_round) and len(set(map(tuple, by_round))) == 2
    unique = [step.key for step in plan.iter_steps()]
    assert unique == sorted(set(unique))


def test_plan_depends_on_seed_and_round_trips(files: Path) -> None:
    config = config_of(files)
    plan = make_plan(config, {"device_key": "a"})
    assert plan == make_plan(config, {"device_key": "a"})
    assert plan.blocks != make_plan(config_of(files, seed=1), {}).blocks
    assert CollectionPlan.from_dict(json.loads(json.dumps(plan.to_dict())), "plan") == plan


def test_collect_complete(files: Path, tmp_path: Path) -> None:
    config = config_of(files)
    bench = FakeBench(config)
    fractions: list[float] = []
    summary = collect(
        config, tmp_path, instruments=bench, progress=lambda message, fraction: fractions.append(fraction)
    )
    plan = read_plan(tmp_path)
    rows = read_rows(tmp_path)
    assert keys(rows) == [step.key for step in plan.iter_steps()]
    assert [(row["level"], row["kernel_id"]) for row in rows] == bench.measured
    assert (summary.rows, summary.added, summary.failed, summary.targets) == (
        len(rows),
        len(rows),
        0,
        len(plan.targets),
    )
    assert fractions == sorted(fractions) and 0.9 < fractions[-1] < 1.0
    assert summary.drift == 0.0
    assert [level["slowdown"] for level in summary.levels] == pytest.approx([1.0, 1.6], abs=0.01)
    assert bench.visited == [block.level for block in plan.blocks]
    assert not (tmp_path / module.ROWS).exists()
    table = pq.read_table(tmp_path / module.TABLE)
    assert table.column("samples_ns").to_pylist()[0] == rows[0]["samples_ns"]
    assert str(table.schema.field("error").type) == "string"
    with (tmp_path / module.CSV).open(newline="") as stream:
        lines = list(csv.reader(stream))
    assert lines[0] == ["Kernel_ID", "OpType", "Input_Shape", "busy", "Latency_ms"]
    assert len(lines) - 1 == sum(row["role"] == "item" for row in rows)
    assert Counter(line[0] for line in lines[1:]) == {item.id: 4 for item in plan.targets}
    # A complete collection is not measured again.
    idle = FakeBench(config)
    assert collect(config, tmp_path, instruments=idle).to_dict() == summary.to_dict() | {"added": 0}
    assert idle.measured == []


def test_collect_failing_target_gives_error_row(files: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("broken", "good"):
        save(convnet(width=4), models, f"{name}.onnx")
    config = config_of(files, kernels=[], models=models, levels=[0.0], reference="good")
    summary = collect(config, tmp_path / "out", instruments=FakeBench(config))
    assert summary.failed == 2
    failed = [row for row in read_rows(tmp_path / "out") if row["error"] is not None]
    assert {row["kernel_id"] for row in failed} == {"broken"}
    assert all(row["latency_ms"] is None and row["samples_ns"] is None for row in failed)
    assert "broken" not in (tmp_path / "out" / module.CSV).read_text()


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in MEASURED_THEN} for row in rows]


def test_collect_killed_ten_times_gives_same_rows(files: Path, tmp_path: Path) -> None:
    settings = tmp_path / "collect.yaml"
    settings.write_text(
        f"kernels: {files / 'extracted'}\nmodels: {files / 'models'}\n"
        "levels: [0, 0.3, 0.6, 0.9]\nrounds: 4\nreference_every: 3\n"
    )
    config = load_collection_config(settings)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    collect(config, unbroken, instruments=FakeBench(config))
    expected = read_rows(unbroken)
    generator = random.Random(0)
    command = [sys.executable, "-m", "tests.latency.fake_bench", str(settings), str(broken), "0.005", "16"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    file = broken / module.ROWS

    def size() -> int:
        return file.stat().st_size if file.exists() else 0

    kills = 0
    while kills < 10:
        # Some processes are killed at the start, others within a row.
        at_start = kills % 5 == 0
        before, num_bytes = size(), generator.randint(1, 5000)
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        end = time.monotonic() + (generator.uniform(0.0, 0.4) if at_start else 120.0)
        while time.monotonic() < end and process.poll() is None and (at_start or size() < before + num_bytes):
            time.sleep(0.0005)
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(generator.uniform(0.0, 0.006))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        saved_rows = read_journal(file, dict)[1]
        assert keys(saved_rows) == keys(expected)[: len(saved_rows)]
    assert 0 < len(read_journal(file, dict)[1]) < len(expected)
    # A torn line.
    with file.open("a") as stream:
        stream.write('{"key": "0001-000')
    summary = collect(config, broken, instruments=FakeBench(config))
    assert summary.added < summary.rows == len(expected)
    rows = read_rows(broken)
    assert comparable(rows) == comparable(expected)
    assert (broken / module.CSV).read_bytes() == (unbroken / module.CSV).read_bytes()
    assert len({row["session"] for row in rows}) > 5


def test_collect_interrupted_at_end_resumes(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the table and the rows exist between the two last steps."""
    config = config_of(files)
    write = module._write_table

    def write_and_die(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_table", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        collect(config, tmp_path, instruments=FakeBench(config))
    monkeypatch.undo()
    assert (tmp_path / module.ROWS).exists() and (tmp_path / module.TABLE).exists()
    summary = collect(config, tmp_path, instruments=FakeBench(config))
    assert (
        summary.added == 0
        and summary.rows == len(read_rows(tmp_path))
        and not (tmp_path / module.ROWS).exists()
    )


def test_collect_finished_beside_torn_rows(files: Path, tmp_path: Path) -> None:
    config = config_of(files)
    rows = collect(config, tmp_path, instruments=FakeBench(config)).rows
    expected = read_rows(tmp_path)
    (tmp_path / module.ROWS).write_text('{"half')
    assert read_rows(tmp_path) == expected and module.count_rows(tmp_path) == (rows, rows)
    bench = FakeBench(config)
    summary = collect(config, tmp_path, instruments=bench)
    assert (summary.added, summary.rows, bench.measured) == (0, rows, [])
    assert not (tmp_path / module.ROWS).exists() and read_rows(tmp_path) == expected


def test_collect_full_disk_keeps_rows(files: Path, tmp_path: Path) -> None:
    config = config_of(files, rounds=12)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    complete_dir = tmp_path / "whole"
    collect(config, complete_dir, instruments=FakeBench(config))
    before_the_rows = [complete_dir / module.PLAN, *complete_dir.glob("*/*.json")]
    largest = max(file.stat().st_size for file in before_the_rows)
    out = tmp_path / "out"
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 1000, hard))
    try:
        with pytest.raises(RunError):
            collect(config, out, instruments=FakeBench(config))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    safe = len(read_rows(out))
    assert 0 < safe < len(read_rows(tmp_path / "whole"))
    summary = collect(config, out, instruments=FakeBench(config))
    assert summary.added == summary.rows - safe
    assert comparable(read_rows(out)) == comparable(read_rows(tmp_path / "whole"))


def test_collect_full_disk_before_plan_raises(files: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(RunError):
            collect(config_of(files), tmp_path, instruments=FakeBench(config_of(files)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_collect_missed_level_keeps_rows(files: Path, tmp_path: Path) -> None:
    config = config_of(files)

    class Weak(FakeBench):
        def block(self, level: float) -> Any:
            if len(self.visited) == 2:
                raise RunError("asked for 0.60 and achieved 0.41")
            return super().block(level)

    with pytest.raises(RunError, match=r"0.*.41"):
        collect(config, tmp_path, instruments=Weak(config))
    safe = len(read_rows(tmp_path))
    assert safe > 0
    assert collect(config, tmp_path, instruments=FakeBench(config)).added > safe / 2


@pytest.mark.parametrize("change", ["settings", "file", "device"])
def test_collect_other_settings_raises(files: Path, tmp_path: Path, change: str) -> None:
    models = tmp_path / "models"
    save(convnet(width=4), models, "one.onnx")
    config = config_of(files, kernels=[], models=models, levels=[0.0])
    collect(config, tmp_path / "out", instruments=FakeBench(config))
    if change == "settings":
        config = config.model_copy(update={"loops": 99})
    elif change == "file":
        save(convnet(width=8), models, "one.onnx")
    bench = FakeBench(config)
    bench.device_key = "fake-1" if change == "device" else "fake-0"
    named = {"settings": "other settings: loops", "file": "one", "device": "fake-1"}[change]
    with pytest.raises(InputError, match=named):
        collect(config, tmp_path / "out", instruments=bench)


@pytest.mark.usefixtures("refused_at_once")
def test_collect_concurrently_raises(files: Path, tmp_path: Path) -> None:
    config = config_of(files)

    class Second(FakeBench):
        def measure(self, target: Any) -> Any:
            with pytest.raises(RunError):
                collect(config, tmp_path, instruments=FakeBench(config))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(config, tmp_path, instruments=Second(config))


@pytest.mark.parametrize("damage", ["double", "foreign", "list"])
def test_collect_edited_rows_raises(files: Path, tmp_path: Path, damage: str) -> None:
    config = config_of(files)

    class Stop(FakeBench):
        def measure(self, target: Any) -> Any:
            if len(self.measured) == 3:
                raise KeyboardInterrupt
            return super().measure(target)

    with pytest.raises(KeyboardInterrupt):
        collect(config, tmp_path, instruments=Stop(config))
    file = tmp_path / module.ROWS
    line = file.read_text().splitlines()[0]
    added = {"double": line, "foreign": '{"key": "9999"}', "list": '{"key": [1]}'}[damage]
    file.write_text(file.read_text() + added + "\n")
    with pytest.raises(FileFormatError):
        collect(config, tmp_path, instruments=FakeBench(config))
    if damage != "double":
        with pytest.raises(FileFormatError):
            module.read_rows(tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("levels: [0]\n", "`kernels` or `models`"),
        ("models: m.onnx\nlevels: [0, 1.5]\n", "levels.1"),
        ("models: m.onnx\nlevels: [0, 0]\n", "0.0, 0.0"),
        ("models: m.onnx\nlevel: [0]\n", "level"),
        ("models: m.onnx\nstressor: gpu-fma\n", "stressor"),
        ("models: m.onnx\nmin_time_s: 0.01\n", "min_time_s"),
        ("models: m.onnx\nmin_time_s: 2\nmax_time_s: 1\n", "max_time_s"),
        ("models: m.onnx\nprovider: tpu\n", "tpu"),
        ("models: m.onnx\ntelemetry: {sauce: host}\n", "telemetry.sauce"),
        ("- 1\n", "list"),
        ("a: [\n", "collect.yaml"),
    ],
)
def test_collection_config_invalid_raises(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "collect.yaml"
    file.write_text(text)
    with pytest.raises(FileFormatError, match=named):
        load_collection_config(file)


def test_collect_unusable_files_raises(files: Path, tmp_path: Path) -> None:
    def refused(kind: type[SparseFlowError], named: str, **settings: Any) -> None:
        with pytest.raises(kind, match=named):
            make_plan(config_of(files, **settings), {})

    refused(InputError, "absent", models=tmp_path / "absent")
    refused(InputError, "`kernels` and `models`", kernels=[], models=tmp_path)
    refused(InputError, "absent", reference="absent")
    refused(InputError, "list it under `models`", kernels=files / "models", models=[])
    save(convnet(batch="n"), tmp_path / "open")
    refused(InputError, "open dimensions", kernels=[], models=tmp_path / "open")
    save(convnet(width=16), tmp_path / "other", "small.onnx")
    refused(InputError, "small.onnx", models=[files / "models", tmp_path / "other"])
    with pytest.raises(InputError):
        load_collection_config(tmp_path / "absent.yaml")
    with pytest.raises(InputError):
        read_rows(tmp_path)
    (tmp_path / module.PLAN).write_text("{}")
    with pytest.raises(FileFormatError):
        read_rows(tmp_path)


def test_collect_failing_files_do_not_stop_others(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    save(convnet(), folder, "good.onnx")
    (folder / "cut.onnx").write_bytes((folder / "good.onnx").read_bytes()[:200])
    # Valid for a reader, but onnxruntime refuses it.
    refused = convnet()
    refused.graph.node[0].op_type = "NoSuchOperator"
    save(refused, folder, "refused.onnx")
    config = config_of(files, models=folder)
    first = collect(config, tmp_path / "out", instruments=FakeBench(config))
    assert {Path(name).name for name in first.problems} == {"cut.onnx", "refused.onnx"}
    assert first.rows and first.failed == 0
    # A resumed collection reports the same files.
    (tmp_path / "out" / module.TABLE).unlink()
    resumed = collect(config, tmp_path / "out", instruments=FakeBench(config))
    assert resumed.problems == first.problems and resumed.added == first.rows
    for name in ("good.onnx", "cut.onnx"):
        (folder / name).unlink()
    save(refused, folder, "again.onnx")
    config = config_of(files, models=folder, kernels=[])
    with pytest.raises(InputError, match=r"none of 2 files.*NoSuchOperator"):
        collect(config, tmp_path / "none", instruments=FakeBench(config))


def test_shapes_and_values_of_collections(tmp_path: Path) -> None:
    save(convnet(batch="n"), tmp_path / "models", "open.onnx")
    save(branching(), tmp_path / "models", "branch.onnx")
    np.save(tmp_path / "h.npy", np.ones(4, np.float32))
    file = tmp_path / "collect.yaml"
    text = "models: models\nshapes: {x: [3, 3, 12, 12]}\ninputs: {flag: true}\nrounds: 1\nlevels: [0]\n"
    # `x` of the other model has a fixed shape.
    for key in ("x", "open:x"):
        file.write_text(text.replace("x: [3", f"{key}: [3"))
        plan = make_plan(load_collection_config(file), {})
        assert {target.id: target.input_shape for target in plan.targets} == {
            "open": "3x3x12x12",
            "branch": "4;scalar",
        }
    file.write_text(text.replace("models: models", "models: models/branch.onnx"))
    with pytest.raises(InputError, match=r"\[3, 3, 12, 12\] of `x` fits no model; .*: \[4\]"):
        make_plan(load_collection_config(file), {})
    file.write_text("models: models/branch.onnx\ninputs: {flag: true, x: h.npy}\nrounds: 1\nlevels: [0]\n")
    config = load_collection_config(file)
    (target,) = make_plan(config, {}).targets
    assert target.select_values({**config.inputs, "absent": 1}) == config.inputs
    summary = collect(config, tmp_path / "out", instruments=FakeBench(config))
    assert summary.rows and not summary.problems
    file.write_text("models: models/branch.onnx\ninputs: {flags: true}\n")
    with pytest.raises(InputError, match=r"no model has an input or open dimension flags; .* are: flag, x"):
        make_plan(load_collection_config(file), {})


def test_extents_of_open_dimensions(tmp_path: Path) -> None:
    save(convnet(batch="n"), tmp_path / "models", "open.onnx")
    save(convnet(batch="n"), tmp_path / "models", "other.onnx")
    save(convnet(), tmp_path / "models", "fixed.onnx")
    file = tmp_path / "collect.yaml"
    file.write_text("models: models\nshapes: {batch: [3], 'other:n': [2]}\nrounds: 1\nlevels: [0]\n")
    config = load_collection_config(file)
    shapes = {target.id: target.shapes["x"][0] for target in make_plan(config, {}).targets}
    assert shapes == {"open": 3, "other": 2, "fixed": 1}
    parts = [find_targets(part) for part in split_config(config, 3)]
    assert {target.id: target.shapes["x"][0] for part in parts for target in part} == shapes
    file.write_text("models: models\nshapes: {batch: [3, 4]}\n")
    problems = make_plan(load_collection_config(file), {}).problems
    assert len(problems) == 2 and all(
        "`batch` has one extent, got [3, 4]" in text for text in problems.values()
    )
