"""Sources of a graph: an ONNX file, an analyzed directory, a module of torch, a folder of Hugging Face."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparseflow.errors import InputError
from sparseflow.latency.graph import huggingface, onnx_file, torch_export
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.dimensions import BATCH, Extents, resolve_shapes
from sparseflow.latency.graph.inputs import list_extents
from sparseflow.latency.graph.torch_export import Exporter

if TYPE_CHECKING:
    import torch
    from torch import nn

HF_PREFIX = "hf:"
"""Prefix of a folder of Hugging Face."""


class ModelSource(Protocol):
    """A model whose graph can be analyzed at several shapes."""

    name: str

    def analyze(
        self, provider: str, sizes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Any] | None = None
    ) -> Graph:
        """Return the graph that a provider executes.

        Args:
            provider: onnxruntime's name of the provider.
            sizes: Input -> shape, or open dimension -> its extent as a shape of one entry.
            inputs: Input of an ONNX file -> value, as `inputs.read_value` takes it.

        Raises:
            InputError: A file is missing, a shape or value is missing or does not fit, or a model of another
                kind has values.
            FileFormatError, ModelError: A file or model is invalid.
            RunError: torch cannot export the module.
        """
        ...


def open_source(
    model: Path | str | nn.Module, *, example: Any = None, exporter: Exporter = "torchscript"
) -> ModelSource:
    """Return the source of a model.

    Args:
        model: ONNX file, directory of an analyzed model, module of torch, or `hf:FOLDER`.
        example: Inputs of a module: a tensor, a sequence of tensors, or argument of `forward` -> tensor.
        exporter: Exporter of torch for a module or folder.

    Raises:
        InputError: The model is of another type, or `example` is missing or does not belong to it.
        FileFormatError: The folder is damaged.
    """
    is_path = isinstance(model, str | os.PathLike)
    if example is not None and is_path:
        raise InputError(f"`example` is for a module of torch, got the model {model}; use `shapes` instead")
    if is_path and str(model).startswith(HF_PREFIX):
        return _HuggingFaceSource(Path(str(model).removeprefix(HF_PREFIX)), exporter)
    if not is_path and hasattr(model, "state_dict") and hasattr(model, "forward"):
        if example is None:
            raise InputError(
                f"`example` is required for a module of torch ({type(model).__name__}): a tensor, a sequence "
                "of tensors, or a mapping from arguments of `forward` to tensors"
            )
        return _ModuleSource(model, torch_export.name_inputs(model, example), exporter)
    path = onnx_file.check_path(model)
    if path.suffix == ".onnx" or (path.is_file() and path.suffix != ".json"):
        return _OnnxSource(path)
    return AnalyzedSource(path)


class _OnnxSource:
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    @cached_property
    def _inputs(self) -> dict[str, Extents]:
        return list_extents(onnx_file.load_model(self._path))

    def analyze(
        self, provider: str, sizes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Any] | None = None
    ) -> Graph:
        shapes = resolve_shapes(self._inputs, sizes) if sizes else {}
        return analyze(self._path, provider, shapes=shapes, inputs=inputs)


class AnalyzedSource:
    """Directory of an analyzed model, which can be of another provider or version of onnxruntime."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def analyze(
        self, provider: str, sizes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Any] | None = None
    ) -> Graph:
        if sizes or inputs:
            raise InputError(
                f"{self._path} was analyzed with fixed shapes and values; analyze the model again for others"
            )
        return Graph.load(self._path)


class _ModuleSource:
    def __init__(self, module: Any, example: Mapping[str, torch.Tensor], exporter: Exporter) -> None:
        self.name = type(module).__name__
        self._module, self._example = module, example
        self._exporter: Exporter = exporter

    def analyze(
        self, provider: str, sizes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Any] | None = None
    ) -> Graph:
        _refuse_values(inputs, self.name)
        extents: dict[str, Extents] = {
            name: (BATCH, *value.shape[1:]) if value.dim() else () for name, value in self._example.items()
        }
        shapes = resolve_shapes(extents, sizes)
        example = {
            # Repeated values are valid ones, such as token ids of the vocabulary.
            name: value if name not in shapes else _repeat(value, shapes[name])
            for name, value in self._example.items()
        }
        return _export_and_analyze(self._module, example, self._exporter, provider)


class _HuggingFaceSource:
    def __init__(self, folder: Path, exporter: Exporter) -> None:
        self.name = f"{HF_PREFIX}{folder}"
        self._folder = folder
        self._exporter: Exporter = exporter

    @cached_property
    def _module(self) -> Any:
        return huggingface.load_folder(self._folder)

    def analyze(
        self, provider: str, sizes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Any] | None = None
    ) -> Graph:
        _refuse_values(inputs, self.name)
        defaults = huggingface.get_default_extents(self._module)
        shapes = resolve_shapes(huggingface.list_inputs(self._module), sizes, defaults)
        example = {name: huggingface.make_example(name, shape) for name, shape in shapes.items()}
        return _export_and_analyze(self._module, example, self._exporter, provider)


def _refuse_values(inputs: Mapping[str, Any] | None, name: str) -> None:
    if inputs:
        raise InputError(
            f"values of inputs ({', '.join(inputs)}) are for ONNX files; {name} is exported with its example"
        )


def _repeat(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Fill a shape with the values of a tensor."""
    import torch

    count = math.prod(shape)
    if not value.numel():
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    flat = value.detach().reshape(-1)
    return flat.repeat(-(-count // flat.numel()))[:count].reshape(shape)


def _export_and_analyze(
    module: nn.Module, example: Mapping[str, torch.Tensor], exporter: Exporter, provider: str
) -> Graph:
    name = type(module).__name__
    with tempfile.TemporaryDirectory(prefix="sparseflow-") as folder:
        path = Path(folder) / f"{name}.onnx"
        torch_export.export_module(module, example, path, exporter=exporter)
        graph = analyze(path, provider)
    return graph.model_copy(update={"model_path": name})
