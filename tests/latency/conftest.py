"""A predictor of the made-up device, trained once for every file of tests that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sparseflow.latency.dataset import Dataset
    from sparseflow.latency.graph import Graph
    from sparseflow.latency.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """What there is of the made-up device.

    Attributes:
        models: Files of three networks at two sizes.
        kernels: Folders of their kernels.
        rest: Collection of kernels and models at rest.
        load: Collection of models beside loads.
        data: Both collections.
        predictor: What was learned from them.
    """

    models: list[Path]
    kernels: list[Path]
    rest: Path
    load: Path
    data: Dataset
    predictor: Predictor

    @property
    def graphs(self) -> list[Graph]:
        """Graphs of the models that were measured."""
        return [self.data.graphs[name] for name in self.data.models()]


@contextmanager
def few_tries() -> Iterator[None]:
    """Learning how load shares the device tries one length of wait and two of cycles, not a whole grid."""
    from sparseflow.latency import sharing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_WAITS_MS", (1.0,))
        patch.setattr(sharing, "_CYCLES_MS", (50.0, 100.0))
        yield


def make(folder: Path) -> MadeUp:
    """Collect on the made-up device, and learn."""
    from sparseflow.latency.dataset import load
    from sparseflow.latency.train import train
    from tests.latency.synthetic import collection, networks

    models, kernels = networks(folder)
    rest = collection(folder, models, kernels, out="rest", levels=[0.0])
    beside = collection(folder, models, [], out="load", levels=[0.0, 0.4, 0.8], rounds=1)
    with few_tries():
        predictor = train([rest, beside])
    return MadeUp(
        models=models,
        kernels=kernels,
        rest=rest,
        load=beside,
        data=load([rest, beside]),
        predictor=predictor,
    )


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    for package in ("onnx", "onnxruntime", "xgboost", "scipy"):
        pytest.importorskip(package)
    return make(tmp_path_factory.mktemp("made_up"))


def of_this_machine(predictor: Predictor) -> Predictor:
    """The predictor with this machine's fingerprint."""
    import onnxruntime

    from sparseflow.core.device import describe_device

    here = describe_device("cpu")
    mark = replace(
        predictor.fingerprint,
        name=here.name,
        cores=here.cores,
        flags=here.flags,
        ort_version=onnxruntime.__version__,
    )
    return replace(predictor, fingerprint=mark)


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine passes for the made-up device."""
    pytest.importorskip("onnxruntime")
    from sparseflow.latency.fingerprint import Fingerprint

    monkeypatch.setattr(Fingerprint, "check_here", lambda self, gpu=0: None)


@pytest.fixture
def quick() -> Iterator[None]:
    """Training takes a fraction of its time."""
    pytest.importorskip("scipy")
    with few_tries():
        yield
