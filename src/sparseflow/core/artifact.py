"""Weights in one file: safetensors, with what they are of in the metadata. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    from torch import Tensor


def save_tensors(path: Path | str, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write weights in place of what is there.

    Args:
        path: Ends in `.safetensors`, by custom. Its folder must exist.
        weights: Name -> tensor, on any device.
        metadata: What else the file says.

    Raises:
        OSError: The file cannot be written.
    """
    from safetensors.torch import save

    ready = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    write_atomic(Path(path), save(ready, metadata=dict(metadata)))


def load_tensors(
    path: Path | str, mark: Mapping[str, str], what: str
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the weights of a file that `save_tensors` wrote; on the CPU.

    Args:
        path: The file.
        mark: What its metadata must say.
        what: What it should be, as a message names it.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is something else, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if any(metadata.get(name) != value for name, value in mark.items()):
                raise FileFormatError(f"{file} holds no {what} of this version of SparseFlow")
            return metadata, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileFormatError(f"{file} is not a {what} that can be read: {error}") from error
