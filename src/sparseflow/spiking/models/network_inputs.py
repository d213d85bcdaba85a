"""Inputs of a network from files of tensors, or random ones of any shape."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparseflow.errors import FileFormatError, InputError
from sparseflow.spiking.backends.precision import get_model_dtype

SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".safetensors")
_MAX_ELEMENTS = 2**32


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Where the inputs of a network come from.

    Attributes:
        files: Files of tensors, as `FILE` or `FILE:KEY`; see `load_tensors`. A file with several tensors
            gives several inputs.
        shapes: Shapes of random inputs, if there are no files.
        event_rate: Random inputs are 1 with this probability and otherwise 0, as frames of events are; None
            for normally distributed ones.
        seed: Seed of random inputs.
    """

    files: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    event_rate: float | None = None
    seed: int = 0

    def read(self) -> list[torch.Tensor]:
        """Read or sample the inputs.

        Raises:
            InputError: There is neither a file nor a shape, both, or a shape or rate is out of range.
            FileFormatError: A file contains no tensors.
        """
        if bool(self.files) == bool(self.shapes):
            raise InputError("give either `files` or `shapes` of inputs")
        return [tensor for file in self.files for tensor in load_tensors(file)] or self._sample()

    def load(self, model: nn.Module) -> tuple[torch.Tensor, ...]:
        """Read or sample the inputs, in the precision of the network's parameters.

        Floating-point numbers, Booleans and integers of up to 16 bits are cast; larger integers may be
        indices and are not.

        Raises:
            InputError, FileFormatError: See `read`.
        """
        dtype = get_model_dtype(model)
        return tuple(x.to(dtype) if x.dtype not in (torch.int32, torch.int64) else x for x in self.read())

    def _sample(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        if self.event_rate is not None and not 0 < self.event_rate < 1:
            raise InputError(f"`event_rate` (={self.event_rate}) must be above 0 and below 1")
        for shape in self.shapes:
            if not shape or min(shape) < 1 or math.prod(shape) > _MAX_ELEMENTS:
                raise InputError(f"shape {shape} must have positive sizes and at most 2^32 elements")
        if self.event_rate is None:
            return [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [(torch.rand(shape, generator=generator) < self.event_rate).float() for shape in self.shapes]


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as `4,2,48,48`.

    Raises:
        InputError: The text has another form.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise InputError(f"shape {text!r} must be sizes separated by commas, such as 4,2,48,48") from None


def load_tensors(name: str) -> list[torch.Tensor]:
    """Load the tensors of a file, in order. Nothing in a file is executed.

    Args:
        name: A `.pt` or `.pth` file with a tensor, or a list, tuple or dictionary of tensors; a `.npy` or
            `.npz` file; or a `.safetensors` file. `FILE:KEY` selects one tensor by its name or position.

    Raises:
        InputError: The file does not exist, its kind is unknown, or it has no such tensor.
        FileFormatError: The file is damaged or contains something else than tensors.
    """
    path, key = Path(name), None
    if path.suffix not in SUFFIXES and ":" in path.name:
        text, _, key = name.rpartition(":")
        path = Path(text)
    if path.suffix not in SUFFIXES:
        raise InputError(f"{name}: expected a file of kind {', '.join(SUFFIXES)}")
    tensors = _list_tensors(path, read_tensor_file(path))
    if key is None:
        return list(tensors.values())
    if key not in tensors:
        raise InputError(f"{path} has no tensor {key!r}; it has {', '.join(tensors)}")
    return [tensors[key]]


def read_tensor_file(path: Path) -> Any:
    """Read a file of tensors or arrays, as saved. Nothing in it is executed.

    Raises:
        InputError: The file does not exist or cannot be read.
        FileFormatError: The file is damaged or contains other objects.
    """
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix in (".npy", ".npz"):
            with path.open("rb") as stream:
                content = np.load(stream, allow_pickle=False)
                return content if isinstance(content, np.ndarray) else dict(content)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"file not found: {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise FileFormatError(
            f"{path} is damaged or contains other objects than tensors; save tensors with torch.save"
        ) from error
    except Exception as error:  # the libraries raise many types for damaged files
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileFormatError(f"{path} cannot be read: {first}") from error


def _list_tensors(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name or position."""
    if isinstance(content, (torch.Tensor, np.ndarray)):
        content = [content]
    items = content.items() if isinstance(content, dict) else _enumerate(content)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in items:
        try:
            tensors[str(key)] = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        except TypeError:
            raise FileFormatError(
                f"{path}: entry {key!r} is of type {type(value).__name__}, expected a tensor of numbers"
            ) from None
    if not tensors:
        raise FileFormatError(f"{path} contains no tensors")
    return tensors


def _enumerate(content: Any) -> Sequence[tuple[int, Any]]:
    return list(enumerate(content)) if isinstance(content, (list, tuple)) else [(0, content)]
