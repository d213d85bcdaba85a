"""Checkpoint file of a training."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

CHECKPOINT_FILE = "checkpoint.pt"


def save(out_dir: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint of a directory, replacing the previous one atomically.

    Args:
        out_dir: Existing directory.
        state: Tensors, numbers, strings, lists and dicts of these. `state["fingerprint"]` identifies the
            training.

    Raises:
        OSError: The file cannot be written; the previous checkpoint is kept.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomic(out_dir / CHECKPOINT_FILE, buffer.getvalue())


def load(out_dir: Path, fingerprint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the checkpoint of a directory onto the CPU; None if there is none.

    Args:
        out_dir: Directory of the training.
        fingerprint: Expected `state["fingerprint"]`.

    Raises:
        InputError: The checkpoint has another fingerprint; the message names the settings that differ.
        FileFormatError: The file is damaged.
    """
    path = out_dir / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        # torch.load would treat other files as one of its legacy formats.
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a PyTorch zip archive")
        state = torch.load(path, map_location="cpu", weights_only=True)
        old, new = dict(_flatten(state["fingerprint"])), dict(_flatten(fingerprint))
        differing = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    except Exception as error:  # PyTorch raises errors of any type for a damaged file
        reason = next(iter(str(error).splitlines()), repr(error))
        raise FileFormatError(f"{path} is not a readable checkpoint ({reason}); remove it") from error
    if differing:
        raise InputError(
            f"{path} belongs to a training with different settings: {', '.join(differing)}; choose another "
            "directory, or remove this one"
        )
    return state


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
