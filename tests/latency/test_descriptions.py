"""Descriptions beside a collection: what is written once, read back, and refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import FileFormatError
from sparseflow.latency import descriptions
from sparseflow.latency.campaign import Config, Item, find_items
from sparseflow.latency.extract import extract
from sparseflow.latency.graph import Graph, analyze
from tests.latency.onnx_models import convnet, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model; its kernels are beside it."""
    folder = tmp_path_factory.mktemp("model")
    path = save(convnet(), folder, "small.onnx")
    extract(path, folder / "extracted", check=False, threads=1)
    return path


def items(model: Path, *, kernels: bool = True, models: bool = True) -> list[Item]:
    return find_items(
        Config(kernels=[model.parent / "extracted"] if kernels else [], models=[model] if models else [])
    )


def essence(graph: Graph) -> tuple[object, ...]:
    """What does not differ from one optimisation to the next, as names of nodes do."""
    return graph.provider, graph.ort_version, graph.inputs, [node.kernel for node in graph.nodes]


@pytest.mark.parametrize("kernels", [True, False])
def test_kernels_and_graphs_are_read_back(model: Path, tmp_path: Path, kernels: bool) -> None:
    told: list[tuple[str, float]] = []
    descriptions.describe(
        items(model, kernels=kernels), tmp_path, "cpu", lambda what, done: told.append((what, done))
    )
    graph = analyze(model)
    # A model brings the kernels that it runs, measured alone or not.
    assert descriptions.read_kernels(tmp_path) == {kernel.id: kernel for kernel in graph.kernels}
    found = descriptions.read_graphs(tmp_path)
    assert list(found) == ["small"] and essence(found["small"]) == essence(graph)
    assert told == [("describing small", 0.0)]


def test_kernels_alone_need_no_model(model: Path, tmp_path: Path) -> None:
    descriptions.describe(items(model, models=False), tmp_path, "cpu")
    assert {kernel.id for kernel in analyze(model).kernels} == set(descriptions.read_kernels(tmp_path))
    assert descriptions.read_graphs(tmp_path) == {}


def test_what_is_described_is_not_described_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptions.describe(items(model), tmp_path, "cpu")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    monkeypatch.setattr(descriptions, "analyze", lambda *_: pytest.fail("it was analysed again"))
    descriptions.describe(items(model), tmp_path, "cpu")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before


def test_a_folder_without_descriptions_holds_none(tmp_path: Path) -> None:
    assert descriptions.read_kernels(tmp_path) == {} and descriptions.read_graphs(tmp_path) == {}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"op": "Conv"}'])
@pytest.mark.parametrize("side", [descriptions.KERNELS, descriptions.GRAPHS])
def test_a_damaged_description_is_refused_by_name(
    model: Path, tmp_path: Path, side: str, damage: bytes
) -> None:
    descriptions.describe(items(model), tmp_path, "cpu")
    victim = sorted((tmp_path / side).glob("*.json"))[0]
    victim.write_bytes(damage)
    read = descriptions.read_kernels if side == descriptions.KERNELS else descriptions.read_graphs
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path)
    assert victim.name in str(caught.value)


def test_an_edited_kernel_is_refused(model: Path, tmp_path: Path) -> None:
    descriptions.describe(items(model), tmp_path, "cpu")
    victim = sorted((tmp_path / descriptions.KERNELS).glob("*.json"))[0]
    record = json.loads(victim.read_text())
    victim.write_text(json.dumps(record | {"opset": record["opset"] + 1}))
    with pytest.raises(FileFormatError, match="it was edited"):
        descriptions.read_kernels(tmp_path)
