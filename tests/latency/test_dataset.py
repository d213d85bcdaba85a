"""Datasets: what collections of a made-up device tell, set right for drift and put together."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency import collect
from sparseflow.latency.campaign import Item
from sparseflow.latency.dataset import load
from tests.latency.synthetic import (
    NOISE,
    SyntheticBench,
    collection,
    item_ms,
    networks,
    rest_ms,
    slowdown,
)

Facts = Mapping[str, Any]
Files = tuple[list[Path], list[Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return networks(tmp_path_factory.mktemp("files"), 2)


@pytest.fixture(scope="module")
def whole(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collection(tmp_path_factory.mktemp("whole"), *files)


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    """A copy of the collection to damage."""
    return Path(shutil.copytree(whole, tmp_path / "mine"))


class Drifting(SyntheticBench):
    """Gets slower and slower, until it takes twice as long."""

    def pace(self, number: int) -> float:
        return 1.0 + number / 350.0


class Failing(SyntheticBench):
    """Cannot run one model at all, and another one beside loads."""

    def fails(self, item: Item, level: float) -> bool:
        return item.id == "net0_b1_8" or (item.id == "net0_b1_12" and level > 0.0)


class Unread(SyntheticBench):
    """Its source of load readings does not tell `others`."""

    @contextmanager
    def block(self, level: float) -> Iterator[Facts]:
        with super().block(level) as facts:
            yield {name: value for name, value in facts.items() if name != "before_others"}


def test_a_collection_tells_what_was_measured(files: Files, whole: Path) -> None:
    data = load([whole])
    assert data.models() == sorted(path.stem for path in files[0]) == sorted(data.graphs)
    assert (
        set(data.kernel_ids()) == set(data.kernels) == {k.id for g in data.graphs.values() for k in g.kernels}
    )
    assert data.calm == {"busy": 0.0, "others": 0.0} and data.failed == 0
    for name in data.kernel_ids():
        assert data.rest_ms[name] == pytest.approx(rest_ms(data.kernels[name]), rel=4 * NOISE)
    for path in files[0]:
        assert data.rest_ms[path.stem] == pytest.approx(item_ms(str(path), True, "cpu"), rel=4 * NOISE)
    for name, visits in data.visits_ms.items():
        assert len(visits) == 2 and statistics.median(visits) == data.rest_ms[name]
        assert len(data.jitter[name]) == 40 and statistics.fmean(data.jitter[name]) == pytest.approx(
            1.0, rel=0.03
        )


def test_slowdowns_are_relative_to_rest(whole: Path) -> None:
    data = load([whole])
    assert len(data.loaded) == 2 * 2 * len(data.rest_ms)
    for one in data.loaded:
        assert one.model == (one.item in data.graphs)
        assert one.load == {"busy": one.level, "others": one.level} and one.alone == one.level
        assert one.slowdown == pytest.approx(slowdown(one.level), rel=4 * NOISE)
        assert statistics.fmean(one.ratios) == pytest.approx(one.slowdown, rel=1e-3)
    assert {one.level for one in data.loaded} == {0.4, 0.8}


def test_drift_is_set_right_by_the_reference(files: Files, tmp_path: Path) -> None:
    folder = collection(tmp_path, *files, reference_every=3, rounds=4, bench=Drifting)
    paces = [row["p50_ms"] for row in collect.read(folder) if row["role"] == "reference" and not row["level"]]
    assert max(paces) > 1.5 * min(paces)
    data = load([folder])
    true = {name: rest_ms(data.kernels[name]) for name in data.kernel_ids()}
    scale = [data.rest_ms[name] / ms for name, ms in true.items()]
    assert max(scale) / min(scale) < 1.06
    assert all(max(visits) / min(visits) < 1.1 for visits in data.visits_ms.values())
    # The reference is seen at rest only, so a loaded block borrows the pace of its neighbours.
    off = [one.slowdown / slowdown(one.level) for one in data.loaded]
    assert statistics.fmean(off) == pytest.approx(1.0, rel=0.05)
    assert min(off) > 0.8 and max(off) < 1.2


def test_collections_of_one_device_are_put_together(files: Files, whole: Path, tmp_path: Path) -> None:
    models, kernels = files
    parts = [
        collection(tmp_path, models[:2], kernels[:2], out="a", rounds=1),
        collection(tmp_path, models[2:], kernels[1:], out="b", rounds=3, levels=[0.0, 0.5], seed=1),
    ]
    data, both = load([whole]), load(parts)
    assert (both.fingerprint, both.kernels) == (data.fingerprint, data.kernels)
    assert (both.rest_ms.keys(), both.graphs.keys()) == (data.rest_ms.keys(), data.graphs.keys())
    assert set(map(len, both.visits_ms.values())) == {1, 3, 4}
    assert {one.level for one in both.loaded} == {0.4, 0.5, 0.8}
    assert load(reversed(parts)).rest_ms == both.rest_ms


def test_an_interrupted_collection_counts_as_far_as_it_came(whole: Path, mine: Path) -> None:
    rows = collect.read(mine)
    half = [row for row in rows if row["round"] == 0]
    (mine / collect.TABLE).unlink()
    writer = collect.JsonLinesWriter(mine / collect.ROWS)
    for row in half:
        writer.write(row)
    writer.close()
    found = load([mine])
    assert found.rest_ms.keys() == load([whole]).rest_ms.keys()
    assert {len(visits) for visits in found.visits_ms.values()} == {1}


def test_what_failed_is_counted_and_what_has_no_rest_is_left_out(files: Files, tmp_path: Path) -> None:
    data = load([collection(tmp_path, *files, bench=Failing)])
    # One model at three levels, one at two, in two rounds each.
    assert data.failed == 2 * 3 + 2 * 2
    assert "net0_b1_8" not in data.rest_ms and "net0_b1_12" in data.rest_ms
    assert not {"net0_b1_8", "net0_b1_12"} & {one.item for one in data.loaded}
    assert "net0_b1_8" not in data.models()


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        ({"name": "Other"}, {}, "name is 'Other' and not 'Made Up'"),
        ({"flags": []}, {}, r"flags is \(\) and not"),
        ({}, {"threads": 2}, "threads is 2 and not 1"),
    ],
)
def test_a_collection_of_another_device_or_setting_is_refused(
    files: Files, whole: Path, tmp_path: Path, change: Facts, settings: dict[str, Any], says: str
) -> None:
    other = collection(tmp_path, files[0][:1], [], device=change, levels=[0.0], rounds=1, **settings)
    with pytest.raises(InputError, match=rf"the collection {other} is of another device.*{says}"):
        load([whole, other])


def test_nothing_at_rest_and_nothing_at_all_are_refused(files: Files, tmp_path: Path) -> None:
    loaded = collection(tmp_path, files[0][:1], [], levels=[0.5], rounds=1)
    with pytest.raises(InputError, match="must hold 0"):
        load([loaded])
    with pytest.raises(InputError, match="sparseflow latency collect"):
        load([])


def test_readings_that_lack_the_principal_metric_are_refused_with_its_name(
    files: Files, tmp_path: Path
) -> None:
    pytest.importorskip("xgboost")
    pytest.importorskip("scipy")
    from sparseflow.latency.learn import learn

    with pytest.raises(InputError, match="others"):
        learn(load([collection(tmp_path, *files, rounds=1, bench=Unread)]))


def test_a_damaged_collection_is_refused(mine: Path) -> None:
    whole = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    table, plan = mine / collect.TABLE, mine / collect.PLAN
    graph, kernel = (sorted((mine / side).glob("*.json"))[0] for side in ("graphs", "kernels"))
    for path, content in (
        (table, whole[table][:-100]),
        (table, b""),
        (plan, whole[plan][:-100]),
        (plan, b"{}"),
        (graph, whole[graph][:-100]),
        (kernel, b"{}"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileFormatError):
            load([mine])
        path.write_bytes(whole[path])
    assert load([mine]).rest_ms
    with pytest.raises(FileFormatError, match="holds no collection"):
        load([mine / "graphs"])


@pytest.mark.parametrize("side", ["graphs", "kernels"])
def test_a_collection_that_lost_a_description_is_refused(mine: Path, side: str) -> None:
    victim = sorted((mine / side).glob("*.json"))[0]
    victim.unlink()
    with pytest.raises(FileFormatError, match=victim.stem):
        load([mine])
