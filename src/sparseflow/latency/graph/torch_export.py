"""Export of torch modules to ONNX by either exporter of torch."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparseflow.core.extras import require
from sparseflow.errors import InputError, RunError
from sparseflow.latency.graph import onnx_file, session

if TYPE_CHECKING:
    import torch
    from torch import nn

Exporter = Literal["torchscript", "dynamo"]
EXPORTERS: tuple[Exporter, ...] = ("torchscript", "dynamo")

OPSET = 17
"""Default ONNX opset of an export."""

_NATIVE_OPSETS: Mapping[Exporter, int] = {"torchscript": OPSET, "dynamo": 18}
"""Exporter -> opset that it writes without a conversion, which fails for some operators."""


def name_inputs(module: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """Return input name -> tensor of an example: a tensor, a sequence of tensors, or such a mapping.

    Raises:
        InputError: The example has another type, or more tensors than `forward` has arguments.
    """
    import torch

    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, list | tuple):
        parameters = list(inspect.signature(module.forward).parameters.values())
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            names = [f"input_{position}" for position in range(len(example))]
        else:
            names = [parameter.name for parameter in parameters][: len(example)]
        if len(names) < len(example):
            raise InputError(
                f"the example has {len(example)} tensors, `{type(module).__name__}.forward` takes "
                f"{len(names)}"
            )
        example = dict(zip(names, example, strict=True))
    if not isinstance(example, Mapping) or not example:
        raise InputError(
            f"the example must be a tensor, a sequence of tensors, or a mapping from names of arguments of "
            f"`forward` to tensors; got {type(example).__name__}"
        )
    for name, value in example.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"the example of the argument `{name}` must be a tensor, got {type(value).__name__}"
            )
    return dict(example)


def export_module(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], path: Path, *, exporter: Exporter = "torchscript"
) -> None:
    """Export a module in eval mode; its modes are restored.

    Args:
        module: Module whose outputs are tensors, also inside of mappings and sequences.
        inputs: Argument of `forward` -> tensor; also the inputs of the ONNX model.
        path: ONNX file to write.
        exporter: `"torchscript"` or `"dynamo"`.

    Raises:
        ModelError: The weights exceed 2 GB.
        RunError: torch cannot export the module.
        MissingExtraError: onnxscript is missing.
    """
    num_bytes = sum(w.numel() * w.element_size() for w in (*module.parameters(), *module.buffers()))
    onnx_file.check_weight_bytes(num_bytes, type(module).__name__)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        export_onnx(
            _return_tensors(module, list(inputs)),
            tuple(inputs.values()),
            path,
            name=type(module).__name__,
            exporter=exporter,
            opset=_NATIVE_OPSETS[exporter],
            input_names=list(inputs),
        )
    finally:
        for part, training in modes.items():
            part.training = training


def export_onnx(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    path: Path,
    *,
    name: str,
    exporter: Exporter,
    opset: int = OPSET,
    input_names: Sequence[str],
    output_names: Sequence[str] | None = None,
) -> None:
    """Write a module as one ONNX file.

    Args:
        module: Module in eval mode.
        args: Positional arguments of `forward`.
        path: ONNX file to write.
        name: Name of the module in errors.
        exporter: `"torchscript"` or `"dynamo"`.
        opset: ONNX opset.
        input_names: Names of the inputs.
        output_names: Names of the outputs; None leaves them to torch.

    Raises:
        RunError: torch cannot export the module.
        MissingExtraError: onnxscript is missing.
    """
    import torch

    if exporter == "dynamo":
        require("onnxscript", "latency")
    exporter_options: dict[str, Any] = {"dynamo": False}
    if exporter == "dynamo":
        exporter_options = {"dynamo": True, "external_data": False, "verbose": False}
    with warnings.catch_warnings(), _silence_loggers(), _silence_stdout(), torch.no_grad():
        # torch deprecates the exporter that is four times faster, and warns about every traced constant.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                module,
                args,
                str(path),
                input_names=list(input_names),
                output_names=None if output_names is None else list(output_names),
                opset_version=opset,
                **exporter_options,
            )
        except Exception as error:
            reason = re.sub(r"\x1b\[\d*m", "", session.format_first_line(error.__cause__ or error))
            other = next(kind for kind in EXPORTERS if kind != exporter)
            raise RunError(
                f"torch cannot export {name} with the exporter {exporter} and opset {opset}: {reason}; try "
                f"the exporter {other}"
            ) from error


def _return_tensors(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Wrap a module to take tensors by position and to return a flat tuple of tensors."""
    from torch import nn

    parameters = inspect.signature(module.forward).parameters.values()
    by_position = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)

    class TensorOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: torch.Tensor) -> Any:
            if by_position:
                outputs = self.module(*tensors)
            else:
                outputs = self.module(**dict(zip(names, tensors, strict=True)))
            return tuple(_iter_tensors(outputs))

    return TensorOutputs().eval()


def _iter_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _iter_tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _iter_tensors(value)


@contextmanager
def _silence_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Discard what is written to standard output, also by C++: the exporters print graphs when they fail."""
    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
