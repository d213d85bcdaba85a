"""Sources of graphs: modules of torch, folders of Hugging Face, ONNX files by dimension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

from sparseflow.errors import FileFormatError, InputError, MissingExtraError, RunError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.sources import open_source
from tests.latency.onnx_models import convnet, save


class Scaled(nn.Module):
    """Network with two inputs and nested outputs; batch norm and dropout differ between the modes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, Any]:
        y = self.dropout(self.norm(self.conv(x)).relu())
        mean = y.mean((2, 3))
        return {"features": y, "pooled": [mean if scale is None else mean * scale]}


class Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


def shapes_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {value.name: value.shape for value in graph.inputs}


def test_module_is_exported_in_eval_mode_and_restored() -> None:
    module = Scaled().train()
    module.norm.eval()
    graph = open_source(module, example=torch.randn(2, 3, 8, 8)).analyze("cpu", {})
    # The batch norm is a part of the convolution, and the dropout is removed.
    assert graph.count_ops()["Conv_Relu"] == 1 and graph.model_path == "Scaled"
    assert not {"BatchNormalization", "Dropout"} & graph.count_ops().keys()
    assert shapes_of(graph) == {"x": (2, 3, 8, 8)} and len(graph.outputs) == 2
    assert module.training and module.dropout.training and not module.norm.training


def test_module_at_other_shapes() -> None:
    source = open_source(Scaled(), example={"scale": torch.ones(2, 8), "x": torch.randn(2, 3, 8, 8)})
    assert shapes_of(source.analyze("cpu", {})) == {"scale": (2, 8), "x": (2, 3, 8, 8)}
    assert shapes_of(source.analyze("cpu", {"batch": (4,)})) == {"scale": (4, 8), "x": (4, 3, 8, 8)}
    assert shapes_of(source.analyze("cpu", {"x": (2, 3, 6, 6)})) == {"scale": (2, 8), "x": (2, 3, 6, 6)}


def test_module_with_invalid_example_raises(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(InputError, match=r"`example` is required .*Scaled"):
        open_source(Scaled())
    for example in ("text", [x, x, x], {"x": 1.0}, {}):
        with pytest.raises(InputError, match="example"):
            open_source(Scaled(), example=example)
    with pytest.raises(InputError, match="example"):
        open_source(tmp_path / "model.onnx", example=x)
    with pytest.raises(InputError, match="int"):
        open_source(3)  # type: ignore[arg-type]


def test_module_that_torch_cannot_export_raises(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match=r"Untraceable .*torchscript.*svd.*; try the exporter dynamo"):
        open_source(Untraceable(), example=torch.randn(3, 3)).analyze("cpu", {})
    with pytest.raises(RunError, match=r"Scaled.*torchscript"):
        open_source(Scaled(), example=torch.randn(1, 4, 8, 8)).analyze("cpu", {})
    assert capfd.readouterr().out == ""


def test_module_by_dynamo() -> None:
    source = open_source(Scaled(), example=torch.randn(2, 3, 8, 8), exporter="dynamo")
    try:
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(MissingExtraError, match="onnxscript"):
            source.analyze("cpu", {})
    else:
        assert source.analyze("cpu", {}).count_ops()["Conv_Relu"] == 1


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, pad_token_id=0,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_hugging_face_folder(bert: Path) -> None:
    source = open_source(f"hf:{bert}")
    assert source.name == f"hf:{bert}"
    graph = source.analyze("cpu", {})
    assert shapes_of(graph) == {"input_ids": (1, 24), "attention_mask": (1, 24)}
    assert graph.outputs[0].shape == (1, 2)
    assert shapes_of(source.analyze("cpu", {"batch": (2,), "sequence": (8,)})) == {
        "input_ids": (2, 8),
        "attention_mask": (2, 8),
    }
    with pytest.raises(InputError, match=r"no open dimension `height`.*input_ids"):
        source.analyze("cpu", {"height": (8,)})


def test_hugging_face_folder_that_is_incomplete_raises(bert: Path, tmp_path: Path) -> None:
    def open_with(config: object, weights: str | None = "model.safetensors") -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if weights is not None:
            (folder / weights).write_bytes(b"no weights")
        open_source(f"hf:{folder}").analyze("cpu", {})

    config = json.loads((bert / "config.json").read_text())
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        open_source(f"hf:{tmp_path}").analyze("cpu", {})
    for weights in (None, "pytorch_model.bin"):
        with pytest.raises(InputError, match=r"no \*\.safetensors; pickled weights are not loaded"):
            open_with(config, weights)
    with pytest.raises(InputError, match="'NoSuchModel'"):
        open_with(config | {"architectures": ["NoSuchModel"]})
    with pytest.raises(InputError, match="code of its own"):
        open_with(config | {"auto_map": {"AutoModel": "code.Model"}})
    with pytest.raises(FileFormatError, match="must contain an object"):
        open_with([])
    with pytest.raises(FileFormatError, match="transformers cannot load"):
        open_with(config)


def test_onnx_file_by_dimension(tmp_path: Path) -> None:
    source = open_source(save(convnet(batch="batch_size", size="side"), tmp_path))
    assert shapes_of(source.analyze("cpu", {"batch": (2,), "side": (12,)})) == {"x": (2, 3, 12, 12)}
    with pytest.raises(InputError, match=r"open dimensions.*side"):
        source.analyze("cpu", {"batch": (2,)})
    with pytest.raises(InputError, match=r"`width`.*x \['batch_size', 3, 'side', 'side'\]"):
        source.analyze("cpu", {"width": (2,)})
