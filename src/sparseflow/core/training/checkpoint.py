"""Where a training stands, in one file, so that it goes on after it was stopped."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

CHECKPOINT_FILE = "checkpoint.pt"


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the folder's checkpoint.

    Args:
        folder: Must exist.
        state: Tensors, numbers, texts, lists and dictionaries of these; `"of"` says what it is a state of.

    Raises:
        OSError: The file cannot be written; the one before is still there.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomic(folder / CHECKPOINT_FILE, buffer.getvalue())


def load(folder: Path, of: Mapping[str, Any]) -> dict[str, Any] | None:
    """The folder's checkpoint, on the CPU; None where there is none.

    Args:
        folder: Where to look.
        of: What it must be a state of.

    Raises:
        InputError: It is of something else.
        FileFormatError: It is damaged.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        if not zipfile.is_zipfile(path):  # which torch would else take for one of its old formats
            raise ValueError("not an archive as torch writes them")
        state = torch.load(path, map_location="cpu", weights_only=True)
        found = state["fingerprint"]
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        OSError,
    ) as error:
        text = next(iter(str(error).splitlines()), repr(error))
        raise FileFormatError(f"{path} is not a checkpoint that can be read: {text}; remove it") from error
    if found != of:
        one, other = dict(_flat(found)), dict(_flat(of))
        differ = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
        raise InputError(
            f"{path} is of another training, with other {', '.join(differ)}; name another folder, or remove "
            "this one"
        )
    return state


def _flat(of: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for name, value in of.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
