"""Training: quality, selection of the regressor and insufficient collections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.model.fitting import DEFAULT_INTERVAL
from sparseflow.latency.model.kernel_regressor import KINDS
from sparseflow.latency.model.predictor import Predictor
from sparseflow.latency.model.training import train
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import convnet, lookup, save
from tests.latency.synthetic import make_collection

pytestmark = pytest.mark.usefixtures("quick")


def cases(folder: Path, network: str) -> tuple[list[Path], list[Path]]:
    """Build one network at four sizes: (models, kernel directories)."""
    models, kernels = [], []
    for size in (8, 10, 12, 16):
        name = f"{network}_b1_{size}"
        models.append(save(convnet(width=4, size=size), folder / "models", f"{name}.onnx"))
        kernels.append(folder / "graphs" / name)
        extract(models[-1], kernels[-1], check=False, threads=1)
    return models, kernels


def test_train_quality(made_up: MadeUp) -> None:
    predictor, data = made_up.predictor, made_up.data
    quality = predictor.quality
    assert json.loads(json.dumps(quality)) == quality
    assert set(quality["kernels"]) == set(KINDS)
    for splits in quality["kernels"].values():
        assert set(splits) == {"by_kernel", "by_network", "leaky"}
        assert all(0.0 <= scores["within_10"] <= 1.0 and scores["mape"] > 0.0 for scores in splits.values())
        assert splits["by_kernel"]["count"] == len(data.list_kernels())
    assert set(quality["models"]) == {"rest", "loaded", "loaded_blind"}
    assert quality["models"]["rest"]["count"] == len(data.list_models())
    assert quality["models"]["loaded"]["count"] == len(data.loaded)
    assert quality["models"]["loaded"]["mape"] < 0.5 * quality["models"]["loaded_blind"]["mape"]
    assert quality["counts"] == {
        "kernels": len(data.list_kernels()),
        "models": 6,
        "networks": 3,
        "beside_loads": 12,
        "failed": 0,
    }
    assert predictor.kernel_intervals.frequent.samples == len(data.list_kernels())
    assert predictor.idle_interval.samples == len(data.list_models())
    assert predictor.loaded_interval.samples == len(data.loaded)


def test_train_selects_best_regressor(made_up: MadeUp) -> None:
    quality = made_up.predictor.quality
    errors = {kind: splits["by_kernel"]["mape"] for kind, splits in quality["kernels"].items()}
    assert quality["kind"] == made_up.predictor.regressor.kind == min(KINDS, key=errors.__getitem__)


def test_train_single_network_default_intervals(tmp_path: Path) -> None:
    models, kernels = cases(tmp_path, "net")
    folder = make_collection(tmp_path, models, kernels, levels=[0.0], rounds=1)
    messages: list[float] = []
    predictor = train(
        [folder], kind="random_forest", progress=lambda message, fraction: messages.append(fraction)
    )
    assert messages == sorted(messages) and (messages[0], messages[-1]) == (0.0, 1.0)
    # Requested, although it is not the best one.
    quality = predictor.quality
    assert quality["kind"] == predictor.regressor.kind == "random_forest"
    assert quality["models"] == {} and quality["counts"]["networks"] == 1
    assert all(set(splits) == {"by_kernel", "leaky"} for splits in quality["kernels"].values())
    assert predictor.idle_interval == predictor.loaded_interval == DEFAULT_INTERVAL
    assert predictor.kernel_intervals.rare.samples == quality["counts"]["kernels"]


def test_train_kernels_only_deterministic(tmp_path: Path, made_up: MadeUp) -> None:
    folder = make_collection(tmp_path, [], made_up.kernels[:2], levels=[0.0], rounds=1)
    first, second = (train([folder], kind="ratio").save(tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    predictor = Predictor.load(first)
    assert predictor.quality["counts"] | {"kernels": 0} == {
        "kernels": 0, "models": 0, "networks": 0, "beside_loads": 0, "failed": 0,
    }  # fmt: skip
    graph = made_up.graphs[0]
    with pytest.raises(InputError, match="idle measurements only"):
        predictor.predict(graph, {"others": 0.9})
    prediction = predictor.predict(graph)
    known = [predictor.measured_ms.get(node.kernel_id) for node in graph.nodes]
    assert None not in known
    assert prediction.mean_ms == pytest.approx(sum(ms for ms in known if ms is not None))


def test_train_shared_kernels_no_network_split(tmp_path: Path) -> None:
    models, kernels = cases(tmp_path, "one")
    twins, _ = cases(tmp_path, "other")
    folder = make_collection(tmp_path, [*models, *twins], kernels, levels=[0.0], rounds=1)
    quality = train([folder], kind="ratio").quality
    assert list(quality["kernels"]) == ["ratio"]
    assert quality["counts"]["networks"] == 2
    assert all("by_network" not in splits for splits in quality["kernels"].values())
    assert quality["models"]["rest"]["count"] == 8


def test_train_unmeasured_network_ignored(
    tmp_path: Path,
) -> None:
    models, kernels = cases(tmp_path, "measured")
    other_names = [
        save(lookup(tokens=tokens), tmp_path / "models", f"other_b1_{tokens}.onnx")
        for tokens in (7, 9, 11, 13)
    ]
    folder = make_collection(tmp_path, [*models, *other_names], kernels, levels=[0.0], rounds=1)
    predictor = train([folder], kind="ratio")
    assert predictor.quality["counts"]["networks"] == 2
    assert predictor.composition.models == 8
    # Without the network that has all kernels nothing remains to learn, so it is not evaluated.
    assert predictor.quality["models"]["rest"]["count"] == 4


def test_train_too_few_kernels_raises(tmp_path: Path, made_up: MadeUp) -> None:
    files = sorted((made_up.kernels[0] / "kernels").glob("*.onnx"))[:4]
    folder = make_collection(tmp_path, made_up.models, files, levels=[0.0], rounds=1)
    with pytest.raises(InputError, match=r"4.*10.*`kernels`"):
        train([folder])


def test_train_several_devices_raises(tmp_path: Path, made_up: MadeUp) -> None:
    other = make_collection(
        tmp_path, [], made_up.kernels[:1], out="elsewhere", levels=[0.0], rounds=1, device={"name": "Other"}
    )
    with pytest.raises(InputError, match=r"elsewhere.*name.*'Other'"):
        train([made_up.idle_dir, other])


def test_train_invalid_settings_raise(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"`kind` \(='forest'\) must be one of: ratio, xgboost, random_forest"
    ):
        train([tmp_path / "absent"], kind="forest")
    with pytest.raises(InputError, match=r"`mode`.*'fastest'.*critical_path"):
        train([tmp_path / "absent"], mode="fastest")
    with pytest.raises(InputError):
        train([])
    with pytest.raises(InputError):
        train([tmp_path / "absent"])
