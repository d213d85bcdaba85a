"""A collection in parts: who measures what, and a real cluster of one machine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import InputError
from sparseflow.latency import fanout
from sparseflow.latency.campaign import Config, find_items
from sparseflow.latency.collect import Collected, collect, rows_of
from sparseflow.latency.dataset import load
from sparseflow.latency.extract import extract
from sparseflow.latency.fanout import fan_out, split
from tests.latency.fake_bench import FakeBench
from tests.latency.onnx_models import convnet, save


@pytest.fixture
def config(tmp_path: Path) -> Config:
    models = [save(convnet(width=w), tmp_path / "models", f"net{w}_b1_12.onnx") for w in (4, 8)]
    extract(models[0], tmp_path / "kernels", check=False, threads=1)
    return Config(
        kernels=[tmp_path / "kernels"], models=models, levels=[0.0], rounds=1, min_time_s=0.1, loops=1
    )


def test_parts_hold_every_item_and_all_the_reference(config: Config) -> None:
    whole = {item.id for item in find_items(config)}
    parts = split(config, 3)
    held = [{item.id for item in find_items(part)} for part in parts]
    assert set.union(*held) == whole
    (reference,) = {part.reference for part in parts}
    assert all(reference in ids for ids in held)
    shared = set.union(*(a & b for a in held for b in held if a is not b))
    assert shared <= {reference}


def test_each_gpu_gets_a_part(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Path]] = []

    def here(function: Any, items: Any, **options: Any) -> Any:
        assert options["workers"] == 2
        yield from ((place, function(item)) for place, item in reversed(list(enumerate(items))))

    def measured(part: Config, folder: Path) -> Collected:
        asked.append((part.gpu, folder))
        return Collected(path=folder, rows=1, added=1, failed=0, items=1, drift=None, levels=())

    monkeypatch.setattr(fanout, "map_unordered", here)
    monkeypatch.setattr(fanout, "collect", measured)
    on_gpus = config.model_copy(update={"provider": "cuda"})
    found = fan_out(on_gpus, tmp_path, gpus=[0, 3])
    assert sorted(asked) == [(0, tmp_path / "part-00"), (3, tmp_path / "part-01")]
    assert [part.path.name for part in found] == ["part-00", "part-01"]


def test_rows_are_told_while_parts_are_measured(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []
    enough = threading.Event()

    def tell(what: str, done: float) -> None:
        told.append((what, done))
        if done == 0.5:
            enough.set()

    def here(function: Any, items: Any, **options: Any) -> Any:
        for place, item in enumerate(items):
            yield place, function(item)
            assert place or enough.wait(60.0)

    monkeypatch.setattr(fanout, "map_unordered", here)
    monkeypatch.setattr(fanout, "_EVERY_S", 0.01)
    monkeypatch.setattr(
        fanout, "collect", lambda part, folder: collect(part, folder, instruments=FakeBench(part))
    )
    fan_out(config, tmp_path / "out", cluster="here", parts=2, progress=tell)
    done = [share for _, share in told]
    assert 0.5 in done and max(done) == done[-1] == 1.0
    assert (
        told[-1][0] == f"{sum(rows_of(tmp_path / 'out' / f'part-0{n}')[0] for n in (0, 1))} rows in 2 parts"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "name either"),
        ({"gpus": [0], "cluster": "auto", "parts": 2}, "name either"),
        ({"cluster": "auto"}, "how many `parts`"),
        ({"gpus": [0]}, "provider: cuda"),
        ({"cluster": "auto", "parts": 100}, "cannot be split into 100 parts"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    config: Config, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fan_out(config, tmp_path / "out", **wrong)


@pytest.mark.slow
def test_parts_measured_on_a_cluster_are_learned_from_together(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = fan_out(config, tmp_path / "out", cluster="local", parts=2)
    data = load([part.path for part in found])
    collect(config, tmp_path / "whole")
    assert data.models() == load([tmp_path / "whole"]).models()
    assert data.kernel_ids() == load([tmp_path / "whole"]).kernel_ids()
