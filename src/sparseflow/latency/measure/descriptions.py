"""Descriptions of all measured targets, stored with a collection so that training does not need the models.

::

    kernels/ID.json    each measured kernel, and each kernel of a measured model
    graphs/NAME.json   graph of each measured model, as onnxruntime executes it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseflow.core.files import read_json, write_json
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, OutputError, RunError
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.extraction import read_kernel
from sparseflow.latency.graph.kernels import KernelSpec, parse_kernel
from sparseflow.latency.measure.plan import MODEL_OP, Target

KERNELS, GRAPHS = "kernels", "graphs"


def write_descriptions(
    targets: Sequence[Target],
    folder: Path,
    provider: str,
    progress: Progress | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Write the missing descriptions of all targets.

    Args:
        targets: Kernels and models of a collection.
        folder: Directory of the collection.
        provider: Provider whose graphs are described.
        progress: Receives the target and 0.0, since nothing has been measured.
        inputs: Input -> value, for the models that have this input.

    Returns:
        File of a model that cannot be analyzed -> message.

    Raises:
        OSError: The directory cannot be written.
        InputError, FileFormatError, ModelError, RunError: The only target cannot be analyzed.
    """
    problems: dict[str, str] = {}
    for name in (KERNELS, GRAPHS):
        (folder / name).mkdir(exist_ok=True)
    for target in targets:
        if target.op != MODEL_OP:
            _write_kernel(folder, read_kernel(target.path))
            continue
        if progress is not None:
            progress(f"describing {target.id}", 0.0)
        path = folder / GRAPHS / f"{target.id}.json"
        if path.is_file():
            continue
        try:
            graph = analyze(
                target.path,
                provider,
                shapes=target.shapes,
                inputs=target.select_values(inputs or {}),
            )
        except OutputError:
            raise
        except (InputError, RunError) as error:
            if len(targets) == 1:
                raise
            problems[target.path] = str(error)
            continue
        for kernel in graph.kernels:
            _write_kernel(folder, kernel)
        write_json(path, graph.to_dict())
    return problems


def read_kernels(folder: Path | str) -> dict[str, KernelSpec]:
    """Read kernel id -> kernel.

    Raises:
        FileFormatError: A file is damaged.
    """
    kernels: dict[str, KernelSpec] = {}
    for path in sorted((Path(folder) / KERNELS).glob("*.json")):
        kernel = parse_kernel(read_json(path), path)
        kernels[kernel.id] = kernel
    return kernels


def read_graphs(folder: Path | str) -> dict[str, Graph]:
    """Read model name -> graph.

    Raises:
        FileFormatError: A file is damaged.
    """
    return {path.stem: Graph.load(path) for path in sorted((Path(folder) / GRAPHS).glob("*.json"))}


def _write_kernel(folder: Path, kernel: KernelSpec) -> None:
    path = folder / KERNELS / f"{kernel.id}.json"
    if not path.is_file():
        write_json(path, kernel.model_dump(mode="json"))
