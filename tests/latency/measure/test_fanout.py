"""Collections in parts, also on a local Ray cluster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import InputError
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.measure import fanout
from sparseflow.latency.measure.collection import CollectionSummary, collect, count_rows
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.fanout import fan_out, split_config
from sparseflow.latency.measure.plan import find_targets
from sparseflow.latency.model.dataset import load_dataset
from tests.latency.fake_bench import FakeBench
from tests.latency.onnx_models import convnet, save


@pytest.fixture
def config(tmp_path: Path) -> CollectionConfig:
    models = [save(convnet(width=w), tmp_path / "models", f"net{w}_b1_12.onnx") for w in (4, 8)]
    extract(models[0], tmp_path / "kernels", check=False, threads=1)
    return CollectionConfig(
        kernels=[tmp_path / "kernels"], models=models, levels=[0.0], rounds=1, min_time_s=0.1, loops=1
    )


def test_split_config_covers_targets_and_reference(config: CollectionConfig) -> None:
    target_ids = {item.id for item in find_targets(config)}
    parts = split_config(config, 3)
    part_ids = [{item.id for item in find_targets(part)} for part in parts]
    assert set.union(*part_ids) == target_ids
    (reference,) = {part.reference for part in parts}
    assert all(reference in ids for ids in part_ids)
    shared = set.union(*(a & b for a in part_ids for b in part_ids if a is not b))
    assert shared <= {reference}
    # Each part has the shapes of its own models.
    shaped = config.model_copy(update={"shapes": {"x": [1, 3, 12, 12]}})
    assert {bool(part.models): bool(part.shapes) for part in split_config(shaped, 3)}.items() <= {
        True: True,
        False: False,
    }.items()


def test_fan_out_one_part_per_gpu(
    config: CollectionConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, Path]] = []

    def map_locally(function: Any, items: Any, **options: Any) -> Any:
        assert options["workers"] == 2
        yield from ((index, function(item)) for index, item in reversed(list(enumerate(items))))

    def measured(part: CollectionConfig, folder: Path) -> CollectionSummary:
        calls.append((part.gpu, folder))
        return CollectionSummary(
            path=folder, rows=1, added=1, failed=0, targets=1, drift=None, levels=(), other_load=None
        )

    monkeypatch.setattr(fanout, "map_unordered", map_locally)
    monkeypatch.setattr(fanout, "collect", measured)
    on_gpus = config.model_copy(update={"provider": "cuda"})
    summaries = fan_out(on_gpus, tmp_path, gpus=[0, 3])
    assert sorted(calls) == [(0, tmp_path / "part-00"), (3, tmp_path / "part-01")]
    assert [part.path.name for part in summaries] == ["part-00", "part-01"]


def test_fan_out_reports_progress(
    config: CollectionConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[tuple[str, float]] = []
    enough = threading.Event()

    def report(message: str, fractions: float) -> None:
        reports.append((message, fractions))
        if fractions == 0.5:
            enough.set()

    def map_locally(function: Any, items: Any, **options: Any) -> Any:
        for index, item in enumerate(items):
            yield index, function(item)
            assert index or enough.wait(60.0)

    monkeypatch.setattr(fanout, "map_unordered", map_locally)
    monkeypatch.setattr(fanout, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(
        fanout, "collect", lambda part, folder: collect(part, folder, instruments=FakeBench(part))
    )
    fan_out(config, tmp_path / "out", cluster="here", parts=2, progress=report)
    fractions = [share for _, share in reports]
    assert 0.5 in fractions and max(fractions) == fractions[-1] == 1.0
    assert (
        reports[-1][0]
        == f"{sum(count_rows(tmp_path / 'out' / f'part-0{n}')[0] for n in (0, 1))} rows in 2 parts"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "`gpus`"),
        ({"gpus": [0], "cluster": "auto", "parts": 2}, "`gpus`"),
        ({"cluster": "auto"}, "`parts`"),
        ({"gpus": [0]}, "provider: cuda"),
        ({"cluster": "auto", "parts": 100}, "100"),
    ],
)
def test_fan_out_invalid_arguments_raise(
    config: CollectionConfig, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fan_out(config, tmp_path / "out", **wrong)


@pytest.mark.slow
def test_fan_out_cluster_parts_train_together(config: CollectionConfig, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    summaries = fan_out(config, tmp_path / "out", cluster="local", parts=2)
    data = load_dataset([part.path for part in summaries])
    collect(config, tmp_path / "whole")
    assert data.list_models() == load_dataset([tmp_path / "whole"]).list_models()
    assert data.list_kernels() == load_dataset([tmp_path / "whole"]).list_kernels()
