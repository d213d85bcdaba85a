"""Tutorials: run the examples, and write them as notebooks and as pages of the site.

::

    python docs/hooks/tutorials.py    write examples/notebooks

A build of the site runs the examples. With `EXECUTE=0` in the environment it takes the outputs of the
notebooks.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import yaml
from jupyter_client.manager import AsyncKernelManager
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = EXAMPLES / "notebooks"

_KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",  # two kernels share two cores
    "MATPLOTLIBRC": str(Path(__file__).with_name("matplotlibrc")),
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm looks for widgets when it is imported in a kernel
}
_TIMEOUT_S = 600
_SITE_LINK = re.compile(r"\]\(\.\./([^)#]+)\.md")


def list_examples() -> list[Path]:
    """List the scripts of `examples/`."""
    return sorted(EXAMPLES.glob("*.py"))


def read_example(path: Path) -> NotebookNode:
    """Read a script as a notebook without outputs, with stable metadata and cell ids."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(_KERNEL)
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index}", nbformat.from_dict({})
    return notebook


def read_notebook(path: Path) -> NotebookNode:
    """Read the saved outputs of a script.

    Raises:
        PluginError: The notebook is missing, or its cells differ from the script.
    """
    notebook = read_example(path)
    saved_path = NOTEBOOKS / f"{path.stem}.ipynb"
    saved = nbformat.read(saved_path, as_version=4) if saved_path.exists() else None
    if saved is None or _get_sources(saved) != _get_sources(make_links_absolute(notebook)):
        raise PluginError(f"{saved_path.name} does not match {path.name}; run `make notebooks`")
    for cell, saved_cell in zip(notebook.cells, saved.cells, strict=True):
        cell.update({key: saved_cell[key] for key in ("outputs", "execution_count") if key in saved_cell})
    return notebook


def make_links_absolute(notebook: NotebookNode) -> NotebookNode:
    """Copy a notebook and replace links to pages by their addresses, for readers outside the site."""
    address = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["site_url"]
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _SITE_LINK.sub(rf"]({address}\1.html", cell.source)
    return notebook


def execute(paths: Sequence[Path]) -> list[NotebookNode]:
    """Execute scripts as notebooks, two at a time.

    Raises:
        PluginError: A cell fails or writes to standard error.
    """

    async def execute_one(path: Path, slots: asyncio.Semaphore, sockets: str) -> NotebookNode:
        notebook = read_example(path)
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/{path.stem}")
        client = NotebookClient(notebook, km=manager, timeout=_TIMEOUT_S, record_timing=False)
        async with slots:
            try:
                await client.async_execute(env={**os.environ, **_ENVIRONMENT}, cleanup_kc=True)
            except CellExecutionError as error:
                raise PluginError(f"{path.name} failed: {error}") from error
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if output.output_type == "stream" and output.name == "stderr":
                    raise PluginError(f"{path.name} writes to standard error: {output.text}")
        notebook.metadata = nbformat.from_dict(_KERNEL)
        return notebook

    async def execute_all() -> list[NotebookNode | BaseException]:
        slots = asyncio.Semaphore(2)
        with tempfile.TemporaryDirectory() as sockets:
            jobs = [execute_one(path, slots, sockets) for path in paths]
            return await asyncio.gather(*jobs, return_exceptions=True)

    notebooks = []
    for result in asyncio.run(execute_all()):
        if isinstance(result, BaseException):
            raise result
        notebooks.append(result)
    return notebooks


def write_page(name: str, notebook: NotebookNode) -> tuple[str, dict[str, bytes]]:
    """Write an executed notebook as Markdown.

    Returns:
        The page, and its pictures by file name. The text of a picture is the first sentence of the last
        paragraph above its cell.
    """
    title, _, introduction = notebook.cells[0].source.partition("\n")
    downloads = f'[Notebook]({name}.ipynb){{ download="" }} · [script]({name}.py){{ download="" }}'
    parts, pictures = [title, f"Download: {downloads}", introduction.strip()], {}
    caption = title.removeprefix("# ")
    for cell in notebook.cells[1:]:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            caption = get_caption(cell.source) or caption
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            text = output.get("text", data.get("text/plain", "")).rstrip()
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![{caption}]({picture})")
            elif text:
                parts.append(f"```{{ .text .output }}\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


def get_caption(markdown: str) -> str:
    """Return the first sentence of the last paragraph of prose, without markup; empty if there is none."""
    paragraphs = [text for text in markdown.split("\n\n") if text.strip() and not text.startswith(("#", "-"))]
    if not paragraphs:
        return ""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[-1].split()))
    return re.split(r"(?<=[.:])\s", re.sub(r"[`*$]", "", text))[0].rstrip(":")


def on_files(files: Files, config: Any) -> Files:
    """Add a page, its pictures, the notebook and the script of each example."""
    paths = list_examples()
    run = os.environ.get("EXECUTE", "1") != "0"
    notebooks = execute(paths) if run else [read_notebook(path) for path in paths]
    for path, notebook in zip(paths, notebooks, strict=True):
        page, pictures = write_page(path.stem, notebook)
        contents: dict[str, str | bytes] = {
            f"{path.stem}.md": page,
            f"{path.stem}.py": path.read_bytes(),
            f"{path.stem}.ipynb": nbformat.writes(make_links_absolute(notebook)),
            **pictures,
        }
        for name, content in contents.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def _get_sources(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def main() -> None:
    """Execute all examples and write their notebooks."""
    NOTEBOOKS.mkdir(exist_ok=True)
    paths = list_examples()
    for path, notebook in zip(paths, execute(paths), strict=True):
        nbformat.write(make_links_absolute(notebook), NOTEBOOKS / f"{path.stem}.ipynb")


if __name__ == "__main__":
    main()
