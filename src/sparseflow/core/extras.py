"""The optional packages: which extra brings which, and asking for one that may be absent."""

from __future__ import annotations

import importlib
from importlib import metadata, util
from types import MappingProxyType, ModuleType

from sparseflow.errors import MissingExtraError

EXTRAS: MappingProxyType[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "spiking": (
            ("spikingjelly", "spikingjelly"),
            ("numba", "numba"),
            ("nvidia-ml-py", "pynvml"),
        ),
        "latency": (
            ("onnx", "onnx"),
            ("onnxruntime", "onnxruntime"),
            ("transformers", "transformers"),
            ("pyyaml", "yaml"),
            ("nvidia-ml-py", "pynvml"),
            ("xgboost-cpu", "xgboost"),
            ("scipy", "scipy"),
        ),
        "tuning": (("scipy", "scipy"), ("xgboost-cpu", "xgboost")),
        "pruning": (
            ("av", "av"),
            ("scikit-learn", "sklearn"),
            ("pyyaml", "yaml"),
            ("tensorboard", "tensorboard"),
        ),
        "adaptive": (
            ("transformers", "transformers"),
            ("xgboost-cpu", "xgboost"),
            ("scikit-learn", "sklearn"),
            ("pyyaml", "yaml"),
            ("pillow", "PIL"),
            ("fastapi", "fastapi"),
            ("uvicorn", "uvicorn"),
            ("prometheus-client", "prometheus_client"),
            ("numba", "numba"),
        ),
        "codesign": (
            ("ortools", "ortools"),
            ("numba", "numba"),
            ("scipy", "scipy"),
            ("pyyaml", "yaml"),
        ),
        "distributed": (("ray", "ray"),),
        "dev": (
            ("pytest", "pytest"),
            ("pytest-xdist", "xdist"),
            ("hypothesis", "hypothesis"),
            ("openai", "openai"),
            ("ruff", "ruff"),
            ("pyright", "pyright"),
            ("import-linter", "importlinter"),
        ),
    }
)
"""Extra -> its packages, each as (name on the package index, name to import). The same as pyproject.toml."""


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package, or say how to get it.

    Args:
        package: Name to import, such as `"numba"` or `"spikingjelly.activation_based"`.
        extra: The SparseFlow extra that brings it.

    Raises:
        MissingExtraError: The package is not installed. An ImportError from inside an installed
            package is passed on as it is: reinstalling the extra would not help.
    """
    top = package.partition(".")[0]
    if util.find_spec(top) is None:
        raise MissingExtraError(top, extra)
    return importlib.import_module(package)


def get_version(distribution: str) -> str | None:
    """Installed version of a distribution, or None where it is not installed. Imports nothing of it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
