"""Reference pages: the public names of each wing, and every command of the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from sparseflow.cli import root

WINGS = ("spiking", "tuning", "latency", "pruning", "codesign", "adaptive")

_CORE_NAMES = (
    "sparseflow.core.layers.LayeredModel",
    "sparseflow.core.layers.LayerNode",
    "sparseflow.core.layers.Splittable",
    "sparseflow.core.timing.measure",
    "sparseflow.core.timing.compare",
    "sparseflow.core.timing.Samples",
    "sparseflow.core.timing.Comparison",
    "sparseflow.core.timing.Interval",
)
"""Names of the core that a model of a user implements, or that a measurement of a user needs."""

_HELP_OPTION = "* `--help`: Show this message and exit.\n"


def list_pages() -> list[str]:
    """List the paths of the generated pages, relative to `docs/`."""
    return [
        *(f"reference/python/{page}.md" for page in (*WINGS, "core", "errors")),
        *(f"reference/cli/{command}.md" for command in root.COMMANDS),
    ]


def list_names(page: str) -> list[str]:
    """List the names that a page of the Python reference describes."""
    if page == "core":
        return list(_CORE_NAMES)
    module = import_module(f"sparseflow.{page}")
    if page == "errors":
        names = [name for name, value in vars(module).items() if isinstance(value, type)]
    else:
        names = sorted(module.__all__, key=lambda name: (name[0].isupper(), name))
    return [f"{module.__name__}.{name}" for name in names]


def write_python_page(page: str, handler: Any) -> str:
    """Write a page of the Python reference: a table of the names, and a description of each.

    Args:
        page: Name of the page.
        handler: Handler of mkdocstrings, which reads the docstrings.
    """
    options = handler.get_options({})

    def summarize(name: str) -> str:
        return handler.collect(name, options).docstring.value.partition("\n")[0]

    lines = [
        f"# sparseflow.{page}",
        "",
        summarize(f"sparseflow.{page}"),
        "",
        "| name | description |",
        "| --- | --- |",
    ]
    names = list_names(page)
    lines += [f"| [`{name.rpartition('.')[2]}`][{name}] | {summarize(name)} |" for name in names]
    lines += ["", *(f"::: {name}" for name in names), ""]
    return "\n".join(lines)


def write_command_page(name: str) -> str:
    """Write the page of a command, or of a group with a table of its commands and a section for each."""
    root_group = typer.main.get_command(root.app)
    _, command, _ = root_group.resolve_command(typer.Context(root_group), [name])  # type: ignore[attr-defined]
    commands = getattr(command, "commands", None)
    if commands is None:
        text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=f"sparseflow {name}")
        return text.replace(_HELP_OPTION, "")
    lines = [f"# `sparseflow {name}`", "", command.help, "", "| command | description |", "| --- | --- |"]
    sections = []
    for subname, subcommand in commands.items():
        summary = " ".join(subcommand.help.partition("\n\n")[0].split())
        lines.append(f"| [`{subname}`](#sparseflow-{name}-{subname}) | {summary} |")
        context = typer.Context(subcommand)
        section = get_docs_for_click(obj=subcommand, ctx=context, indent=1, call_prefix=f"sparseflow {name}")
        sections.append(section.replace(_HELP_OPTION, ""))
    return "\n".join([*lines, "", *sections])


def on_files(files: Files, config: Any) -> Files:
    """Add the reference pages."""
    handler = config.plugins["mkdocstrings"].get_handler("python")
    for path in list_pages():
        _, kind, name = path.removesuffix(".md").split("/")
        text = write_command_page(name) if kind == "cli" else write_python_page(name, handler)
        files.append(File.generated(config, path, content=text))
    return files
