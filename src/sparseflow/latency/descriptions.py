"""What a collection measured, described beside its rows: one may learn from it without the models.

::

    kernels/ID.json    every kernel that was measured, or that a measured model runs
    graphs/NAME.json   every model that was measured, as onnxruntime runs it there
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError
from sparseflow.latency.campaign import MODEL_OP, Item
from sparseflow.latency.extract import read_kernel
from sparseflow.latency.graph import Graph, analyze
from sparseflow.latency.kernels import Kernel

KERNELS, GRAPHS = "kernels", "graphs"

Progress = Callable[[str, float], None]


def describe(items: Iterable[Item], folder: Path, provider: str, progress: Progress | None = None) -> None:
    """Write the description of every item that has none yet.

    Args:
        items: Kernels and models of a collection.
        folder: The collection's.
        provider: What runs them: a model's graph is the one that onnxruntime makes for it.
        progress: Called with (item, 0.0): nothing has been measured yet.

    Raises:
        OSError: The folder cannot be written.
        FileFormatError, ModelError, RunError: A model cannot be analysed.
    """
    for name in (KERNELS, GRAPHS):
        (folder / name).mkdir(exist_ok=True)
    for item in items:
        if item.op != MODEL_OP:
            _write_kernel(folder, read_kernel(item.path))
            continue
        if progress is not None:
            progress(f"describing {item.id}", 0.0)
        path = folder / GRAPHS / f"{item.id}.json"
        if not path.is_file():
            graph = analyze(item.path, provider)
            for kernel in graph.kernels:
                _write_kernel(folder, kernel)
            write_atomic(path, json.dumps(graph.to_dict(), ensure_ascii=False) + "\n")


def read_kernels(folder: Path | str) -> dict[str, Kernel]:
    """Kernel's id -> its description.

    Raises:
        FileFormatError: One of them is damaged.
    """
    found: dict[str, Kernel] = {}
    for path in sorted((Path(folder) / KERNELS).glob("*.json")):
        try:
            kernel = Kernel.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise FileFormatError(f"{path} cannot be read: {error}") from error
        found[kernel.id] = kernel
    return found


def read_graphs(folder: Path | str) -> dict[str, Graph]:
    """Name of a measured model -> its graph.

    Raises:
        FileFormatError: One of them is damaged.
    """
    return {path.stem: Graph.load(path) for path in sorted((Path(folder) / GRAPHS).glob("*.json"))}


def _write_kernel(folder: Path, kernel: Kernel) -> None:
    path = folder / KERNELS / f"{kernel.id}.json"
    if not path.is_file():
        write_atomic(path, json.dumps(kernel.to_dict(), ensure_ascii=False) + "\n")
