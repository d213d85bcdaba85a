"""Pretrained Grid-VQA models of the package, one directory each."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from sparseflow.adaptive.grid_vqa.model import SETTINGS
from sparseflow.errors import InputError

DEFAULT_MODEL = "digits"
"""The smallest model; a request takes milliseconds on a CPU."""

IMPORTANCE_FILE = "importance.json"
"""Importance of the blocks of a model, in its directory."""
PLAN_QUALITY_FILE = "plan_quality.json"
"""Accuracy of the plans of a model, in its directory."""


def list_pretrained() -> list[str]:
    """Return the names of the pretrained models."""
    return sorted(path.name for path in _data_dir().iterdir() if (path / SETTINGS).is_file())


def get_pretrained_dir(name: str = DEFAULT_MODEL) -> Path:
    """Return the directory of a pretrained model.

    Raises:
        InputError: The name is unknown.
    """
    if name not in list_pretrained():
        raise InputError(f"unknown model {name!r}; available: {', '.join(list_pretrained())}")
    return _data_dir() / name


def resolve_model_dir(model: Path | str) -> Path:
    """Return the directory of a model.

    Args:
        model: Name of a pretrained model, or a directory.

    Raises:
        InputError: The name is unknown and the directory does not exist.
    """
    if str(model) in list_pretrained():
        return get_pretrained_dir(str(model))
    model_dir = Path(model)
    try:
        exists = model_dir.is_dir()
    except OSError:  # The name is too long for a path.
        exists = False
    if not exists:
        raise InputError(f"{model_dir} is not a directory; pretrained models: {', '.join(list_pretrained())}")
    return model_dir


def _data_dir() -> Path:
    return Path(str(resources.files(__name__)))
