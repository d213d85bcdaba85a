"""Training: what a predictor says of itself, what is chosen, and collections that do not suffice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency.extract import extract
from sparseflow.latency.learn import UNJUDGED
from sparseflow.latency.model import KINDS
from sparseflow.latency.predictor import Predictor
from sparseflow.latency.train import train
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import convnet, lookup, save
from tests.latency.synthetic import collection

pytestmark = pytest.mark.usefixtures("quick")


def cases(folder: Path, network: str) -> tuple[list[Path], list[Path]]:
    """One network at four sizes; gives (models, folders of their kernels)."""
    models, kernels = [], []
    for size in (8, 10, 12, 16):
        name = f"{network}_b1_{size}"
        models.append(save(convnet(width=4, size=size), folder / "models", f"{name}.onnx"))
        kernels.append(folder / "graphs" / name)
        extract(models[-1], kernels[-1], check=False, threads=1)
    return models, kernels


def test_quality_says_how_good_it_was_on_what_was_held_out(made_up: MadeUp) -> None:
    predictor, data = made_up.predictor, made_up.data
    quality = predictor.quality
    assert json.loads(json.dumps(quality)) == quality
    assert set(quality["kernels"]) == set(KINDS)
    for splits in quality["kernels"].values():
        assert set(splits) == {"by_kernel", "by_network", "leaky"}
        assert all(0.0 <= one["within_10"] <= 1.0 and one["mape"] > 0.0 for one in splits.values())
        assert splits["by_kernel"]["count"] == len(data.kernel_ids())
    assert set(quality["models"]) == {"rest", "loaded", "loaded_blind"}
    assert quality["models"]["rest"]["count"] == len(data.models())
    assert quality["models"]["loaded"]["count"] == len(data.loaded)
    assert quality["models"]["loaded"]["mape"] < 0.5 * quality["models"]["loaded_blind"]["mape"]
    assert quality["counts"] == {
        "kernels": len(data.kernel_ids()),
        "models": 6,
        "networks": 3,
        "beside_loads": 12,
        "failed": 0,
    }
    assert predictor.kernel_interval.samples == len(data.kernel_ids())
    assert predictor.rest_interval.samples == len(data.models())
    assert predictor.loaded_interval.samples == len(data.loaded)


def test_the_regressor_that_is_best_on_kernels_held_out_is_chosen(made_up: MadeUp) -> None:
    quality = made_up.predictor.quality
    errors = {kind: splits["by_kernel"]["mape"] for kind, splits in quality["kernels"].items()}
    assert quality["kind"] == made_up.predictor.model.kind == min(KINDS, key=errors.__getitem__)


def test_one_network_alone_is_learned_and_its_intervals_stay_unjudged(tmp_path: Path) -> None:
    models, kernels = cases(tmp_path, "net")
    folder = collection(tmp_path, models, kernels, levels=[0.0], rounds=1)
    told: list[float] = []
    predictor = train([folder], kind="random_forest", progress=lambda what, done: told.append(done))
    assert told == sorted(told) and (told[0], told[-1]) == (0.0, 1.0)
    # Asked for, though it is not the best.
    quality = predictor.quality
    assert quality["kind"] == predictor.model.kind == "random_forest"
    assert quality["models"] == {} and quality["counts"]["networks"] == 1
    assert all(set(splits) == {"by_kernel", "leaky"} for splits in quality["kernels"].values())
    assert predictor.rest_interval == predictor.loaded_interval == UNJUDGED
    assert predictor.kernel_interval.samples == quality["counts"]["kernels"]


def test_kernels_alone_are_enough_and_the_same_ones_make_the_same_predictor(
    tmp_path: Path, made_up: MadeUp
) -> None:
    folder = collection(tmp_path, [], made_up.kernels[:2], levels=[0.0], rounds=1)
    first, second = (train([folder], kind="ratio").save(tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    predictor = Predictor.load(first)
    assert predictor.quality["counts"] | {"kernels": 0} == {
        "kernels": 0, "models": 0, "networks": 0, "beside_loads": 0, "failed": 0,
    }  # fmt: skip
    graph = made_up.graphs[0]
    found = predictor.predict(graph, {"others": 0.9})
    # Nothing was learned of what a graph adds, nor of what a load does.
    assert found.mean_ms == pytest.approx(found.rest_ms)
    known = [predictor.known_ms.get(node.kernel_id) for node in graph.nodes]
    assert None not in known
    assert found.mean_ms == pytest.approx(sum(ms for ms in known if ms is not None))


def test_networks_that_run_the_same_kernels_leave_out_the_split_between_them(tmp_path: Path) -> None:
    models, kernels = cases(tmp_path, "one")
    twins, _ = cases(tmp_path, "other")
    folder = collection(tmp_path, [*models, *twins], kernels, levels=[0.0], rounds=1)
    quality = train([folder], kind="ratio").quality
    assert quality["counts"]["networks"] == 2
    assert all("by_network" not in splits for splits in quality["kernels"].values())
    assert quality["models"]["rest"]["count"] == 8


def test_a_network_whose_kernels_were_not_measured_does_not_keep_the_others_from_being_learned(
    tmp_path: Path,
) -> None:
    models, kernels = cases(tmp_path, "measured")
    others = [
        save(lookup(tokens=tokens), tmp_path / "models", f"other_b1_{tokens}.onnx")
        for tokens in (7, 9, 11, 13)
    ]
    folder = collection(tmp_path, [*models, *others], kernels, levels=[0.0], rounds=1)
    predictor = train([folder], kind="ratio")
    assert predictor.quality["counts"]["networks"] == 2
    assert predictor.composition.models == 8
    # Without the network that has all kernels nothing is left to learn from, so it is not judged.
    assert predictor.quality["models"]["rest"]["count"] == 4


def test_too_few_kernels_are_refused_with_how_many_there_are(tmp_path: Path, made_up: MadeUp) -> None:
    files = sorted((made_up.kernels[0] / "kernels").glob("*.onnx"))[:4]
    folder = collection(tmp_path, made_up.models, files, levels=[0.0], rounds=1)
    with pytest.raises(InputError, match=r"hold 4 kernels at rest, and at least 10 .* under `kernels`"):
        train([folder])


def test_collections_of_several_devices_are_refused(tmp_path: Path, made_up: MadeUp) -> None:
    other = collection(
        tmp_path, [], made_up.kernels[:1], out="elsewhere", levels=[0.0], rounds=1, device={"name": "Other"}
    )
    with pytest.raises(
        InputError, match=r"elsewhere is of another device.*name is 'Other' and not 'Made Up'"
    ):
        train([made_up.rest, other])


def test_settings_that_cannot_be_used_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"`kind` \(='forest'\) must be one of: ratio, xgboost, random_forest"
    ):
        train([tmp_path / "absent"], kind="forest")
    with pytest.raises(InputError, match=r"`mode` \(='fastest'\) must be one of: sum, critical_path"):
        train([tmp_path / "absent"], mode="fastest")
    with pytest.raises(InputError, match="at least one collection"):
        train([])
    with pytest.raises(InputError, match="holds no collection"):
        train([tmp_path / "absent"])
