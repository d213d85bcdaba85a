"""Models that come with SparseFlow: folders of `data/`, each with all that the demo uses of a model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from sparseflow.adaptive.grid_vqa.model import SETTINGS
from sparseflow.errors import InputError

DEFAULT = "digits"
"""The model that is small: seconds on a CPU."""

IMPORTANCE, WORTH = "importance.json", "worth.json"
"""Beside a model: which blocks can be skipped, and how good its plans are."""


def shipped_names() -> list[str]:
    """Names of the models."""
    return sorted(each.name for each in _data().iterdir() if (each / SETTINGS).is_file())


def shipped(name: str = DEFAULT) -> Path:
    """Folder of a model.

    Raises:
        InputError: None of this name comes with SparseFlow.
    """
    if name not in shipped_names():
        raise InputError(f"no model {name!r} comes with SparseFlow; these do: {', '.join(shipped_names())}")
    return _data() / name


def model_folder(model: Path | str) -> Path:
    """Folder of a model.

    Args:
        model: The name of one that comes with SparseFlow, or a folder.

    Raises:
        InputError: It is neither.
    """
    if str(model) in shipped_names():
        return shipped(str(model))
    folder = Path(model)
    try:
        there = folder.is_dir()
    except OSError:  # a name that no folder can have
        there = False
    if not there:
        raise InputError(
            f"there is no folder {folder}; these come with SparseFlow: {', '.join(shipped_names())}"
        )
    return folder


def _data() -> Path:
    return Path(str(resources.files(__name__)))
