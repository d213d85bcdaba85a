"""Optional packages: the table of extras, and imports that name the missing extra."""

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
            ("prometheus-client", "prometheus_client"),
        ),
        "tuning": (("scipy", "scipy"), ("xgboost-cpu", "xgboost"), ("pyyaml", "yaml")),
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
"""Extra -> packages as (name on the package index, import name); identical to pyproject.toml."""


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
