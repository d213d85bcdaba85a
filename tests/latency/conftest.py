"""Fixtures of the latency tests: a predictor of the synthetic device, trained once per file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sparseflow.latency.graph.analysis import Graph
    from sparseflow.latency.model.dataset import LatencyDataset
    from sparseflow.latency.model.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """The synthetic device.

    Attributes:
        models: Files of three networks at two sizes.
        kernels: Directories of their kernels.
        idle_dir: Collection of idle kernels and models.
        load: Collection of models under load.
        data: Both collections.
        predictor: Predictor trained on them.
    """

    models: list[Path]
    kernels: list[Path]
    idle_dir: Path
    load: Path
    data: LatencyDataset
    predictor: Predictor

    @property
    def graphs(self) -> list[Graph]:
        """Graphs of the measured models."""
        return [self.data.graphs[name] for name in self.data.list_models()]


@contextmanager
def few_tries() -> Iterator[None]:
    """Reduce the parameter grid of contention models and the number of boosted trees."""
    from sparseflow.core.costmodel import trees
    from sparseflow.latency.model import contention

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(trees._NUM_ROUNDS, trees.BOOSTED, 150)
        patch.setattr(contention, "_SLICES_MS", (1.0,))
        patch.setattr(contention, "_CYCLES_MS", (50.0, 100.0))
        yield


def make(folder: Path) -> MadeUp:
    """Collect on the synthetic device and train."""
    from sparseflow.latency.model.dataset import load_dataset
    from sparseflow.latency.model.training import train
    from tests.latency.synthetic import make_collection, make_networks

    models, kernels = make_networks(folder)
    idle_dir = make_collection(folder, models, kernels, out="rest", levels=[0.0])
    load_dir = make_collection(folder, models, [], out="load", levels=[0.0, 0.4, 0.8], rounds=1)
    with few_tries():
        predictor = train([idle_dir, load_dir])
    return MadeUp(
        models=models,
        kernels=kernels,
        idle_dir=idle_dir,
        load=load_dir,
        data=load_dataset([idle_dir, load_dir]),
        predictor=predictor,
    )


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    for package in ("onnx", "onnxruntime", "xgboost", "scipy"):
        pytest.importorskip(package)
    return make(tmp_path_factory.mktemp("made_up"))


def of_this_machine(predictor: Predictor) -> Predictor:
    """Return the predictor with this machine's fingerprint."""
    import onnxruntime

    from sparseflow.core.device import describe_device

    device = describe_device("cpu")
    fingerprint = replace(
        predictor.fingerprint,
        name=device.name,
        cores=device.cores,
        flags=device.flags,
        ort_version=onnxruntime.__version__,
    )
    return predictor.model_copy(update={"fingerprint": fingerprint})


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept this machine as the synthetic device."""
    pytest.importorskip("onnxruntime")
    from sparseflow.latency.measure.fingerprint import DeviceFingerprint

    monkeypatch.setattr(DeviceFingerprint, "check_local_device", lambda self, gpu=0: None)


@pytest.fixture
def quick() -> Iterator[None]:
    """Reduce the training time."""
    pytest.importorskip("scipy")
    with few_tries():
        yield
