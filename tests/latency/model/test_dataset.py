"""Datasets of the synthetic device: drift correction and combination."""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.core.journal import Journal
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.measure import collection
from sparseflow.latency.measure.plan import Target
from sparseflow.latency.model.dataset import load_dataset
from tests.latency.synthetic import (
    NOISE,
    SyntheticBench,
    item_ms,
    make_collection,
    make_networks,
    rest_ms,
    slowdown,
)

Facts = Mapping[str, Any]
Files = tuple[list[Path], list[Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_networks(tmp_path_factory.mktemp("files"), 2)


@pytest.fixture(scope="module")
def collection_dir(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_collection(tmp_path_factory.mktemp("whole"), *files)


@pytest.fixture
def damaged_dir(collection_dir: Path, tmp_path: Path) -> Path:
    """Copy of the collection, to be damaged."""
    return Path(shutil.copytree(collection_dir, tmp_path / "mine"))


class Drifting(SyntheticBench):
    """Device that slows down to half of its speed."""

    def pace(self, number: int) -> float:
        return 1.0 + number / 350.0


class Failing(SyntheticBench):
    """Device on which one model always fails and another one fails under load."""

    def fails(self, target: Target, level: float) -> bool:
        return target.id == "net0_b1_8" or (target.id == "net0_b1_12" and level > 0.0)


class Shared(SyntheticBench):
    """Busy CPU: a run takes on average three times its CPU time, and other work is always there."""

    def pace(self, number: int) -> float:
        return 3.0

    @contextmanager
    def block(self, level: float) -> Iterator[Facts]:
        with super().block(level) as facts:
            yield {**facts, "before_others": 0.97}

    def measure(self, target: Target) -> dict[str, Any]:
        threads = self.config.threads
        return super().measure(target) | {
            "provider": "CPUExecutionProvider", "threads": threads, "cpu_ratio": 1.0 / 3.0,
        }  # fmt: skip


class Unread(SyntheticBench):
    """Device without readings of `others`."""

    @contextmanager
    def block(self, level: float) -> Iterator[Facts]:
        with super().block(level) as facts:
            yield {name: value for name, value in facts.items() if name != "before_others"}


def test_dataset_contains_measurements(files: Files, collection_dir: Path) -> None:
    data = load_dataset([collection_dir])
    assert data.list_models() == sorted(path.stem for path in files[0]) == sorted(data.graphs)
    assert (
        set(data.list_kernels())
        == set(data.kernels)
        == {k.id for g in data.graphs.values() for k in g.kernels}
    )
    assert data.idle_load == {"busy": 0.0, "others": 0.0} and data.failed == 0
    for name in data.list_kernels():
        assert data.idle_ms[name] == pytest.approx(rest_ms(data.kernels[name]), rel=4 * NOISE)
    for path in files[0]:
        assert data.idle_ms[path.stem] == pytest.approx(item_ms(str(path), True, "cpu"), rel=4 * NOISE)
    for name, medians_ms in data.measurements_ms.items():
        assert len(medians_ms) == 2 and statistics.median(medians_ms) == data.idle_ms[name]
        assert len(data.jitter[name]) == 40 and statistics.fmean(data.jitter[name]) == pytest.approx(
            1.0, rel=0.03
        )


def test_slowdowns_relative_to_idle(collection_dir: Path) -> None:
    data = load_dataset([collection_dir])
    assert len(data.loaded) == 2 * 2 * len(data.idle_ms)
    for measurement in data.loaded:
        assert measurement.is_model == (measurement.target in data.graphs)
        assert (
            measurement.load == {"busy": measurement.level, "others": measurement.level}
            and measurement.achieved == measurement.level
        )
        assert measurement.slowdown == pytest.approx(slowdown(measurement.level), rel=4 * NOISE)
        assert statistics.fmean(measurement.ratios) == pytest.approx(measurement.slowdown, rel=1e-3)
    assert {measurement.level for measurement in data.loaded} == {0.4, 0.8}


def test_drift_corrected_by_reference(files: Files, tmp_path: Path) -> None:
    folder = make_collection(tmp_path, *files, reference_every=3, rounds=4, bench=Drifting)
    paces = [
        row["p50_ms"]
        for row in collection.read_rows(folder)
        if row["role"] == "reference" and not row["level"]
    ]
    assert max(paces) > 1.5 * min(paces)
    data = load_dataset([folder])
    true = {name: rest_ms(data.kernels[name]) for name in data.list_kernels()}
    scale = [data.idle_ms[name] / ms for name, ms in true.items()]
    assert max(scale) / min(scale) < 1.06
    assert all(max(medians_ms) / min(medians_ms) < 1.1 for medians_ms in data.measurements_ms.values())
    # The reference counts only while idle, so a block under load uses the pace of its neighbors.
    off = [measurement.slowdown / slowdown(measurement.level) for measurement in data.loaded]
    assert statistics.fmean(off) == pytest.approx(1.0, rel=0.05)
    assert min(off) > 0.8 and max(off) < 1.2


def test_busy_machine_gives_cpu_times(files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_collection(tmp_path, *files, bench=Shared, levels=[0.0, 0.4])
    assert "97 %" in caplog.text and "CPU times" in caplog.text
    data = load_dataset([folder])
    for name in data.list_kernels():
        assert data.idle_ms[name] == pytest.approx(rest_ms(data.kernels[name]), rel=4 * NOISE)
    assert data.other_load == 0.97
    # Neither the spread of runs nor the reading is that of an idle machine.
    assert data.jitter == {} and data.idle_load == {}
    stressed = [measurement for measurement in data.loaded if measurement.level == 0.4]
    assert {round(measurement.slowdown / slowdown(0.4)) for measurement in stressed} == {3}
    # The idle runs of models ran under the load of the other work.
    idle_runs = [measurement for measurement in data.loaded if measurement not in stressed]
    assert len(idle_runs) == 2 * len(files[0]) and all(measurement.is_model for measurement in idle_runs)
    for measurement in idle_runs:
        assert measurement.level == 1.0 and measurement.load["others"] == 0.97
        assert measurement.slowdown == pytest.approx(3.0, rel=4 * NOISE)


def test_busy_machine_with_several_threads_is_flagged(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_collection(tmp_path, files[0][:1], [], bench=Shared, levels=[0.0], threads=2)
    assert "97 %" in caplog.text and "6 of 6 idle latencies are too high" in caplog.text
    data = load_dataset([folder])
    # At most the time for which the calling thread used a CPU.
    assert data.idle_ms == {"net0_b1_8": pytest.approx(item_ms(str(files[0][0]), True, "cpu"), rel=0.1)}
    assert data.other_load == 0.97 and data.loaded == () and data.jitter == {}


def test_undisturbed_rows_replace_disturbed_ones(files: Files, tmp_path: Path) -> None:
    class Burst(Shared):
        """Other work that starts after the reading of the load and disturbs the second round."""

        @contextmanager
        def block(self, level: float) -> Iterator[Facts]:
            yield {"stress_alone": level, "before_others": 0.02}

        def pace(self, number: int) -> float:
            return 1.0 if number < 3 else 3.0

        def measure(self, target: Target) -> dict[str, Any]:
            return super().measure(target) | {"cpu_ratio": 1.0 / self.pace(self.measured - 1)}

    folder = make_collection(tmp_path, files[0][:1], [], bench=Burst, levels=[0.0], threads=2)
    data = load_dataset([folder])
    assert len(data.measurements_ms["net0_b1_8"]) == 1 and data.other_load == 0.02


def test_quiet_machine_gives_wall_times(files: Files, tmp_path: Path) -> None:
    class Quiet(Shared):
        def pace(self, number: int) -> float:
            return 1.0

        @contextmanager
        def block(self, level: float) -> Iterator[Facts]:
            yield {"stress_alone": level, "before_others": 0.02}

        def measure(self, target: Target) -> dict[str, Any]:
            return super().measure(target) | {"cpu_ratio": 0.999}

    data = load_dataset([make_collection(tmp_path, files[0][:1], [], bench=Quiet, levels=[0.0], rounds=1)])
    (row,) = (r for r in collection.read_rows(tmp_path / "collection") if r["role"] == "item")
    expected = min(row["p50_ms"], 0.999 * row["latency_ms"])
    assert data.idle_ms == {row["kernel_id"]: pytest.approx(expected, rel=1e-9)}
    assert data.idle_load == {"others": 0.02} and data.other_load == 0.02 and len(data.jitter) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("p50_ms", None), ("p50_ms", -1.0), ("latency_ms", "fast"), ("samples_ns", []), ("level", 2.0),
        ("role", "other"), ("kernel_id", 5), ("cpu_ratio", -1.0), ("before_others", 57.0), ("start_s", None),
    ],
)  # fmt: skip
def test_dataset_damaged_row_raises(damaged_dir: Path, name: str, value: object) -> None:
    rows = collection.read_rows(damaged_dir)
    (damaged_dir / collection.TABLE).unlink()
    with Journal(damaged_dir / collection.ROWS, dict) as journal:
        for row in [rows[0] | {name: value}, *rows[1:]]:
            journal.append(row)
    with pytest.raises(FileFormatError, match=f"{collection.ROWS} is damaged"):
        load_dataset([damaged_dir])


def test_dataset_combines_collections(files: Files, collection_dir: Path, tmp_path: Path) -> None:
    models, kernels = files
    parts = [
        make_collection(tmp_path, models[:2], kernels[:2], out="a", rounds=1),
        make_collection(tmp_path, models[2:], kernels[1:], out="b", rounds=3, levels=[0.0, 0.5], seed=1),
    ]
    data, both = load_dataset([collection_dir]), load_dataset(parts)
    assert (both.fingerprint, both.kernels) == (data.fingerprint, data.kernels)
    assert (both.idle_ms.keys(), both.graphs.keys()) == (data.idle_ms.keys(), data.graphs.keys())
    assert set(map(len, both.measurements_ms.values())) == {1, 3, 4}
    assert {measurement.level for measurement in both.loaded} == {0.4, 0.5, 0.8}
    assert load_dataset(reversed(parts)).idle_ms == both.idle_ms


def test_dataset_partial_collection(collection_dir: Path, damaged_dir: Path) -> None:
    rows = collection.read_rows(damaged_dir)
    half = [row for row in rows if row["round"] == 0]
    (damaged_dir / collection.TABLE).unlink()
    with Journal(damaged_dir / collection.ROWS, dict) as journal:
        for row in half:
            journal.append(row)
    dataset = load_dataset([damaged_dir])
    assert dataset.idle_ms.keys() == load_dataset([collection_dir]).idle_ms.keys()
    assert {len(medians_ms) for medians_ms in dataset.measurements_ms.values()} == {1}


def test_dataset_counts_failures(files: Files, tmp_path: Path) -> None:
    data = load_dataset([make_collection(tmp_path, *files, bench=Failing)])
    # One model at three levels, one at two, in two rounds each.
    assert data.failed == 2 * 3 + 2 * 2
    assert "net0_b1_8" not in data.idle_ms and "net0_b1_12" in data.idle_ms
    assert not {"net0_b1_8", "net0_b1_12"} & {measurement.target for measurement in data.loaded}
    assert "net0_b1_8" not in data.list_models()


@pytest.mark.parametrize(
    ("change", "settings", "value"),
    [
        ({"name": "Other"}, {}, "name.*'Other'.*'Made Up'"),
        ({"flags": []}, {}, r"flags.*\(\)"),
        ({}, {"threads": 2}, "threads.*2.*1"),
    ],
)
def test_dataset_other_device_raises(
    files: Files, collection_dir: Path, tmp_path: Path, change: Facts, settings: dict[str, Any], value: str
) -> None:
    other = make_collection(tmp_path, files[0][:1], [], device=change, levels=[0.0], rounds=1, **settings)
    with pytest.raises(InputError, match=rf"{other}.*{value}"):
        load_dataset([collection_dir, other])


def test_dataset_without_idle_rows_raises(files: Files, tmp_path: Path) -> None:
    loaded = make_collection(tmp_path, files[0][:1], [], levels=[0.5], rounds=1)
    with pytest.raises(InputError, match=r"0"):
        load_dataset([loaded])
    with pytest.raises(InputError):
        load_dataset([])


def test_fit_missing_load_metric_raises(files: Files, tmp_path: Path) -> None:
    pytest.importorskip("xgboost")
    pytest.importorskip("scipy")
    from sparseflow.latency.model.fitting import fit_predictor

    with pytest.raises(InputError):
        fit_predictor(load_dataset([make_collection(tmp_path, *files, rounds=1, bench=Unread)]))


def test_dataset_damaged_collection_raises(damaged_dir: Path) -> None:
    contents = {path: path.read_bytes() for path in damaged_dir.rglob("*") if path.is_file()}
    table, plan = damaged_dir / collection.TABLE, damaged_dir / collection.PLAN
    graph, kernel = (sorted((damaged_dir / side).glob("*.json"))[0] for side in ("graphs", "kernels"))
    for path, content in (
        (table, contents[table][:-100]),
        (table, b""),
        (plan, contents[plan][:-100]),
        (plan, b"{}"),
        (plan, re.sub(rb'"targets": \[\d+', b'"targets": [99', contents[plan], count=1)),
        (plan, contents[plan].replace(b'"reference": [true, ', b'"reference": [')),
        (graph, contents[graph][:-100]),
        (kernel, b"{}"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileFormatError):
            load_dataset([damaged_dir])
        path.write_bytes(contents[path])
    assert load_dataset([damaged_dir]).idle_ms
    with pytest.raises(InputError):
        load_dataset([damaged_dir / "graphs"])


@pytest.mark.parametrize("side", ["graphs", "kernels"])
def test_dataset_missing_description_raises(damaged_dir: Path, side: str) -> None:
    victim = sorted((damaged_dir / side).glob("*.json"))[0]
    victim.unlink()
    with pytest.raises(FileFormatError, match=victim.stem):
        load_dataset([damaged_dir])
