"""Descriptions of a collection's targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import FileFormatError
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.measure import descriptions
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.plan import Target, find_targets
from tests.latency.onnx_models import convnet, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its extracted kernels."""
    folder = tmp_path_factory.mktemp("model")
    path = save(convnet(), folder, "small.onnx")
    extract(path, folder / "extracted", check=False, threads=1)
    return path


def items(model: Path, *, kernels: bool = True, models: bool = True) -> list[Target]:
    return find_targets(
        CollectionConfig(
            kernels=[model.parent / "extracted"] if kernels else [], models=[model] if models else []
        )
    )


def essence(graph: Graph) -> tuple[object, ...]:
    """Return the parts of a graph that are equal for every optimization, without node names."""
    return graph.provider, graph.ort_version, graph.inputs, [node.kernel for node in graph.nodes]


@pytest.mark.parametrize("kernels", [True, False])
def test_descriptions_round_trip(model: Path, tmp_path: Path, kernels: bool) -> None:
    reports: list[tuple[str, float]] = []
    descriptions.write_descriptions(
        items(model, kernels=kernels),
        tmp_path,
        "cpu",
        lambda message, fraction: reports.append((message, fraction)),
    )
    graph = analyze(model)
    # The kernels of a model are described even if they are not measured.
    assert descriptions.read_kernels(tmp_path) == {kernel.id: kernel for kernel in graph.kernels}
    graphs = descriptions.read_graphs(tmp_path)
    assert list(graphs) == ["small"] and essence(graphs["small"]) == essence(graph)
    assert reports == [("describing small", 0.0)]


def test_descriptions_of_kernels_only(model: Path, tmp_path: Path) -> None:
    descriptions.write_descriptions(items(model, models=False), tmp_path, "cpu")
    assert {kernel.id for kernel in analyze(model).kernels} == set(descriptions.read_kernels(tmp_path))
    assert descriptions.read_graphs(tmp_path) == {}


def test_existing_descriptions_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptions.write_descriptions(items(model), tmp_path, "cpu")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    monkeypatch.setattr(descriptions, "analyze", lambda *_: pytest.fail("the model was analyzed again"))
    descriptions.write_descriptions(items(model), tmp_path, "cpu")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before


def test_missing_descriptions_are_empty(tmp_path: Path) -> None:
    assert descriptions.read_kernels(tmp_path) == {} and descriptions.read_graphs(tmp_path) == {}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"op": "Conv"}'])
@pytest.mark.parametrize("side", [descriptions.KERNELS, descriptions.GRAPHS])
def test_damaged_description_raises(model: Path, tmp_path: Path, side: str, damage: bytes) -> None:
    descriptions.write_descriptions(items(model), tmp_path, "cpu")
    victim = sorted((tmp_path / side).glob("*.json"))[0]
    victim.write_bytes(damage)
    read = descriptions.read_kernels if side == descriptions.KERNELS else descriptions.read_graphs
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path)
    assert victim.name in str(caught.value)


def test_edited_kernel_raises(model: Path, tmp_path: Path) -> None:
    descriptions.write_descriptions(items(model), tmp_path, "cpu")
    victim = sorted((tmp_path / descriptions.KERNELS).glob("*.json"))[0]
    record = json.loads(victim.read_text())
    victim.write_text(json.dumps(record | {"opset": record["opset"] + 1}))
    with pytest.raises(FileFormatError):
        descriptions.read_kernels(tmp_path)
