"""Optional packages: the table of extras, and imports that name the missing extra."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from importlib import metadata, util
from types import ModuleType

from sparseflow.errors import MissingExtraError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "spiking": ("spikingjelly", "loguru", "tqdm", "h5py", "numba", "nvidia-ml-py"),
    "latency": (
        "onnx",
        "onnxruntime",
        "onnxscript",
        "transformers",
        "pyyaml",
        "nvidia-ml-py",
        "xgboost-cpu",
        "scipy",
        "prometheus-client",
    ),
    "openvino": ("openvino",),
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
    "docs": (
        "mkdocs",
        "mkdocs-material",
        "mkdocs-awesome-nav",
        "mkdocstrings-python",
        "jupytext",
        "nbclient",
        "ipykernel",
        "latex2mathml",
    ),
    "dev": ("atheris", "pytest", "pytest-xdist", "hypothesis", "openai", "ruff", "pyright", "import-linter"),
}
"""Extra -> packages by their names on the package index; pyproject.toml lists all but `SEPARATE_PACKAGES`."""

SEPARATE_PACKAGES: Mapping[str, str] = {"spikingjelly": "spikingjelly>=2.0"}
"""Packages whose own requirements replace torch, so that an extra cannot install them."""


def get_install_command(extra: str, packages: Iterable[str]) -> str:
    """Return the command that installs `packages` of an extra and keeps the installed torch."""
    separate = [
        f" && pip install --no-deps '{SEPARATE_PACKAGES[p]}'" for p in packages if p in SEPARATE_PACKAGES
    ]
    return f"pip install 'sparseflow[{extra}]'" + "".join(separate)


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: Import name, such as `"numba"` or `"spikingjelly.activation_based"`.
        extra: SparseFlow extra that provides it.

    Raises:
        MissingExtraError: The package, or one of the same extra that it imports, is not installed. Another
            ImportError inside an installed package is not converted, since installing the extra again would
            not help.
    """
    top = package.partition(".")[0]
    if util.find_spec(top) is None:
        raise MissingExtraError(top, extra, get_install_command(extra, [top]))
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS.get(extra, ()):
            raise
        raise MissingExtraError(error.name, extra, get_install_command(extra, [error.name])) from error


def get_version(distribution: str) -> str | None:
    """Return the version of an installed distribution without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
