"""Predicting on the device that is here: which one it is, which files, and the load that is there now."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

import onnxruntime

import sparseflow.latency
import sparseflow.latency.predicting
from sparseflow.core.device import describe_device
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.errors import DeviceError, FileFormatError, InputError, SparseFlowError
from sparseflow.latency import Prediction, Predictor, predict
from sparseflow.latency.campaign import Telemetry
from sparseflow.latency.graph import analyze
from tests.latency.conftest import MadeUp, of_this_machine
from tests.latency.onnx_models import convnet, save


@pytest.fixture
def file(made_up: MadeUp, tmp_path: Path) -> Path:
    return made_up.predictor.save(tmp_path / "predictor.json")


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of a reader that tells the load of `shares`."""
    asked: list[Any] = []

    class Reader:
        shares: Mapping[str, float] = {"busy": 0.9, "others": 0.6}

        def read(self, window_s: float = 1.0) -> LoadReading:
            asked.append(window_s)
            return LoadReading(
                timestamp_s=1.0, interval_s=1.0, source="host", device="cpu", shares=self.shares
            )

    def opened(source: str, **settings: Any) -> Reader:
        asked.append((source, settings))
        return Reader()

    monkeypatch.setattr(sparseflow.latency.predicting, "open_reader", opened)
    return asked


def test_predict_is_a_function_of_the_wing_whatever_was_imported_before() -> None:
    assert inspect.isfunction(sparseflow.latency.predict)
    assert sparseflow.latency.predict is sparseflow.latency.predicting.predict
    assert Predictor.__module__ == "sparseflow.latency.predictor"
    assert all(hasattr(sparseflow.latency, name) for name in sparseflow.latency.__all__)
    with pytest.raises(AttributeError, match="no attribute 'prediction'"):
        sparseflow.latency.prediction  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.usefixtures("at_home")
def test_a_file_and_a_predictor_and_its_graph_say_the_same(
    made_up: MadeUp, file: Path, tmp_path: Path
) -> None:
    path = made_up.models[0]
    found = predict(path, file, load={"others": 0.5})
    assert isinstance(found, Prediction)
    assert found == predict(str(path), made_up.predictor, load={"others": 0.5})
    assert found == made_up.predictor.predict(made_up.data.graphs[path.stem], {"others": 0.5})
    # An analysed folder is of this onnxruntime, which the made-up device's then must be too.
    mark = replace(made_up.predictor.fingerprint, ort_version=onnxruntime.__version__)
    same = replace(made_up.predictor, fingerprint=mark)
    analyze(path, out=tmp_path / "graph")
    for analysed in (tmp_path / "graph", tmp_path / "graph" / "graph.json"):
        assert predict(analysed, same, load={"others": 0.5}) == found


def test_a_predictor_of_another_device_is_refused_with_what_differs(made_up: MadeUp, file: Path) -> None:
    here = describe_device("cpu")
    with pytest.raises(InputError, match="this machine is of another device") as caught:
        predict(made_up.models[0], file)
    assert f"name is {here.name!r} and not 'Made Up'" in str(caught.value)
    assert f"ort_version is {onnxruntime.__version__!r} and not '1.0'" in str(caught.value)
    assert "collect and train on the device" in str(caught.value)
    own = of_this_machine(made_up.predictor)
    assert predict(made_up.models[0], own).mean_ms > 0.0
    fewer = replace(made_up.predictor, fingerprint=replace(own.fingerprint, cores=here.cores + 1))
    with pytest.raises(InputError, match=f"cores is {here.cores} and not {here.cores + 1};"):
        predict(made_up.models[0], fewer)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("change", ["provider", "ort_version"])
def test_an_analysed_graph_of_another_provider_or_version_is_refused(
    made_up: MadeUp, tmp_path: Path, change: str
) -> None:
    analyze(made_up.models[0], out=tmp_path)
    mark = replace(made_up.predictor.fingerprint, ort_version=onnxruntime.__version__)
    other = {"provider": "CUDAExecutionProvider", "ort_version": "1.0"}[change]
    predictor = replace(made_up.predictor, fingerprint=replace(mark, **{change: other}))
    with pytest.raises(
        InputError, match=r"analysed for CPUExecutionProvider.*analyse the model again"
    ) as caught:
        predict(tmp_path, predictor)
    assert other in str(caught.value) and onnxruntime.__version__ in str(caught.value)


@pytest.mark.usefixtures("at_home")
def test_the_load_is_read_where_and_as_long_as_asked(made_up: MadeUp, readings: list[Any]) -> None:
    live = Telemetry(source="prometheus", url="http://127.0.0.1:9", labels={"gpu": "0"}, max_age_s=3.0)
    found = predict(made_up.models[0], made_up.predictor, live=live, window_s=2.5)
    ((source, settings), window_s) = readings
    assert (source, window_s) == ("prometheus", 2.5)
    assert settings["labels"] == {"gpu": "0"} and settings["max_age_s"] == 3.0
    assert found.load == {"busy": 0.9, "others": 0.6}
    told = predict(made_up.models[0], made_up.predictor, load={"others": 0.6})
    assert (found.mean_ms, found.p95_ms, found.interval) == (told.mean_ms, told.p95_ms, told.interval)


@pytest.mark.usefixtures("at_home")
def test_a_source_that_lacks_the_metric_or_what_it_needs_is_refused(made_up: MadeUp) -> None:
    path, predictor = made_up.models[0], made_up.predictor
    with pytest.raises(DeviceError, match=r"needs the metric `others`.*holds busy"):
        predict(path, predictor, live=Telemetry(metrics=["busy"]), window_s=0.1)
    with pytest.raises(InputError, match="needs the server's `url`"):
        predict(path, predictor, live=Telemetry(source="prometheus"))
    with pytest.raises(InputError, match=r"'dcgm'.* must be one of"):
        predict(path, predictor, live=Telemetry(source="dcgm"))
    with pytest.raises(InputError, match="window_s"):
        predict(path, predictor, live=Telemetry(), window_s=0.0)


def test_two_loads_are_one_too_many(made_up: MadeUp) -> None:
    with pytest.raises(InputError, match="`load` or `live`, not both"):
        predict(made_up.models[0], made_up.predictor, load={"others": 0.0}, live=Telemetry())


@pytest.mark.usefixtures("at_home")
def test_open_extents_need_a_shape(made_up: MadeUp, tmp_path: Path) -> None:
    path = save(convnet(batch="N", width=4, size=8), tmp_path)
    with pytest.raises(InputError, match="x"):
        predict(path, made_up.predictor)
    small, large = (
        predict(path, made_up.predictor, shapes={"x": (batch, 3, 8, 8)}).mean_ms for batch in (1, 16)
    )
    assert small < large
    analyze(path, shapes={"x": (1, 3, 8, 8)}, out=tmp_path / "graph")
    mark = replace(made_up.predictor.fingerprint, ort_version=onnxruntime.__version__)
    predictor = replace(made_up.predictor, fingerprint=mark)
    # What was analysed has the shapes that it has.
    with pytest.raises(InputError, match=r"shapes.*analyse the model again"):
        predict(tmp_path / "graph", predictor, shapes={"x": (16, 3, 8, 8)})


@pytest.mark.usefixtures("at_home")
def test_files_that_cannot_be_used_are_refused(made_up: MadeUp, tmp_path: Path) -> None:
    whole = made_up.models[0].read_bytes()
    graph = tmp_path / "graph"
    analyze(made_up.models[0], out=graph)
    record = json.loads((graph / "graph.json").read_text())
    cases: list[tuple[str, bytes | None, type[SparseFlowError]]] = [
        ("text.onnx", b"no model", FileFormatError),
        ("text", b"no model", FileFormatError),
        ("cut.onnx", whole[: len(whole) // 2], FileFormatError),
        ("empty.onnx", b"", FileFormatError),
        ("absent.onnx", None, InputError),
        ("absent", None, InputError),
        ("cut.json", json.dumps(record).encode()[:100], FileFormatError),
        ("other.json", b"{}", FileFormatError),
    ]
    for name, content, kind in cases:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(kind) as caught:
            predict(path, made_up.predictor)
        assert name in str(caught.value) or name == "other.json", name
    with pytest.raises(InputError, match="sparseflow latency train"):
        predict(made_up.models[0], tmp_path / "absent.json")
    with pytest.raises(FileFormatError, match="is not JSON"):
        predict(made_up.models[0], made_up.models[0])
