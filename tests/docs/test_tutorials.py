"""Every example runs, prints what its notebook holds, and becomes a page of the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from mkdocs.exceptions import PluginError

from docs.hooks import tutorials

EXAMPLES = tutorials.list_examples()
_NUMBER = re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")


def _mask(text: str) -> str:
    """Replace numbers, and collapse white space, which depends on their width."""
    return " ".join(_NUMBER.sub("#", text).split())


@pytest.mark.parametrize(
    "path",
    # `make site` runs all of them.
    [path if path.stem == "spiking" else pytest.param(path, marks=pytest.mark.slow) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example_prints_the_output_of_its_notebook(path: Path) -> None:
    notebook = tutorials.read_notebook(path)  # raises if its cells differ from the script
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    expected = "".join(output.text for output in outputs if output.output_type == "stream")
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "2"}
    process = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert process.returncode == 0, process.stderr
    assert _mask(process.stdout) == _mask(expected), "run `make notebooks`"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_page_has_a_title_pictures_with_texts_and_downloads(path: Path) -> None:
    page, pictures = tutorials.write_page(path.stem, tutorials.read_notebook(path))
    assert page.startswith("# ")
    captions = re.findall(r"!\[(.+)\]\(", page)
    assert len(captions) == len(pictures) > 0
    assert f"({path.stem}.py)" in page and f"({path.stem}.ipynb)" in page


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_notebook_does_not_hold_paths_or_links_of_one_machine(path: Path) -> None:
    text = (tutorials.NOTEBOOKS / f"{path.stem}.ipynb").read_text(encoding="utf-8")
    assert str(tutorials.ROOT) not in text and "/tmp/" not in text
    assert "](../" not in text, "links of notebooks are absolute"


def test_every_notebook_has_an_example() -> None:
    assert {path.stem for path in tutorials.NOTEBOOKS.glob("*.ipynb")} == {path.stem for path in EXAMPLES}


def _write_example(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "example.py"
    path.write_text(f"# %% [markdown]\n# # Title\n#\n# See [guides](../how-to/index.md).\n\n# %%\n{code}\n")
    return path


def test_execute_records_output(tmp_path: Path) -> None:
    (notebook,) = tutorials.execute([_write_example(tmp_path, "print(6 * 7)")])
    page, _ = tutorials.write_page("example", notebook)
    assert "```{ .text .output }\n42\n```" in page


@pytest.mark.parametrize("code", ["1 / 0", "import sys; print('careful', file=sys.stderr)"])
def test_execute_failing_or_warning_example_raises(tmp_path: Path, code: str) -> None:
    with pytest.raises(PluginError, match=r"example\.py"):
        tutorials.execute([_write_example(tmp_path, code)])


def test_read_notebook_of_another_script_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutorials, "NOTEBOOKS", tmp_path)
    path = _write_example(tmp_path, "print(1)")
    nbformat.write(tutorials.make_links_absolute(tutorials.read_example(path)), tmp_path / "example.ipynb")
    assert tutorials.read_notebook(path).cells[1].source == "print(1)"
    with pytest.raises(PluginError, match="make notebooks"):
        tutorials.read_notebook(_write_example(tmp_path, "print(2)"))


@pytest.mark.parametrize(
    ("markdown", "caption"),
    [
        ("## Title\n\nFirst. Second.", "First."),
        ("A.\n\nThe `chart` of [losses](x.md):\n\n- item", "The chart of losses"),
        ("# Title", ""),
    ],
)
def test_get_caption(markdown: str, caption: str) -> None:
    assert tutorials.get_caption(markdown) == caption
