"""Optional packages: the table of extras, and imports that name the missing extra."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata, util
from types import ModuleType

from sparseflow.errors import MissingExtraError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "spiking": ("spikingjelly", "numba", "nvidia-ml-py"),
    "latency": (
        "onnx",
        "onnxruntime",
        "transformers",
        "pyyaml",
        "nvidia-ml-py",
        "xgboost-cpu",
        "scipy",
        "prometheus-client",
    ),
    "tuning": ("scipy", "xgboost-cpu", "pyyaml"),
    "pruning": ("av", "scikit-learn", "pyyaml", "tensorboard"),
    "adaptive": (
        "transformers",
        "xgboost-cpu",
        "scikit-learn",
        "pyyaml",
        "pillow",
        "fastapi",
        "uvicorn",
        "prometheus-client",
        "numba",
    ),
    "codesign": ("ortools", "numba", "scipy", "pyyaml"),
    "distributed": ("ray",),
    "dev": ("atheris", "pytest", "pytest-xdist", "hypothesis", "openai", "ruff", "pyright", "import-linter"),
}
"""Extra -> packages by their names on the package index; identical to pyproject.toml."""


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: Import name, such as `"numba"` or `"spikingjelly.activation_based"`.
        extra: SparseFlow extra that provides it.

    Raises:
        MissingExtraError: The package is not installed. An ImportError inside an installed package is not
            converted, since installing the extra again would not help.
    """
    top = package.partition(".")[0]
    if util.find_spec(top) is None:
        raise MissingExtraError(top, extra)
    return importlib.import_module(package)


def get_version(distribution: str) -> str | None:
    """Return the version of an installed distribution without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
