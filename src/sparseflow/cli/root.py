"""The root of the command line: options that every command shares, the list of wings, and what errors become.

A wing's module is imported when one of its commands runs, so that `sparseflow --help` stays quick. To add a
wing, write `sparseflow/cli/<wing>.py` with a `typer.Typer` named `app` and name it in `LAZY`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sparseflow import __version__
from sparseflow.errors import InputError, MissingExtraError, SparseFlowError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Lazy:
    """A command, or a group of them, that is imported when it runs.

    Attributes:
        target: `"module:name"` of a `typer.Typer` or of a function.
        help: The line that `sparseflow --help` shows for it.
    """

    target: str
    help: str


LAZY = {
    "adaptive": Lazy(
        target="sparseflow.cli.adaptive:app",
        help="Adaptive: a multimodal mixture of experts that keeps latency budgets.",
    ),
    "codesign": Lazy(
        target="sparseflow.cli.codesign:app",
        help="Co-design: choose chips, partition a model over them, and run it.",
    ),
    "demo": Lazy(
        target="sparseflow.cli.demo:demo",
        help="Measure the shipped network on this machine, dense and optimised, and write a report.",
    ),
    "doctor": Lazy(
        target="sparseflow.cli.doctor:doctor",
        help="Show what hardware and packages are here, what works and what to do about the rest.",
    ),
    "latency": Lazy(
        target="sparseflow.cli.latency:app",
        help="Latency: what an ONNX model takes on a loaded device.",
    ),
    "pruning": Lazy(
        target="sparseflow.cli.pruning:app",
        help="Pruning: a video transformer that drops what says little.",
    ),
    "spiking": Lazy(
        target="sparseflow.cli.spiking:app",
        help="Spiking networks: skip what does not fire.",
    ),
    "tune": Lazy(
        target="sparseflow.cli.tune:tune",
        help="Tuning: the fastest kernel for a sparse matrix.",
    ),
    "tuning": Lazy(
        target="sparseflow.cli.tuning:app",
        help="Tuning: labels for a cost model of sparse kernels.",
    ),
}


class LazyGroup(TyperGroup):
    """Shows every command of `LAZY` from its line of help, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(LAZY)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in LAZY:
            stand_in = typer.Typer(add_completion=False)
            stand_in.command(name=cmd_name, help=LAZY[cmd_name].help)(_nothing)
            return typer.main.get_command(stand_in)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in LAZY and args[0] not in self.commands:
            self.add_command(_load(args[0]), args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="sparseflow",
    cls=LazyGroup,
    help="Turn sparsity into latency that you can measure, predict and promise.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sparseflow {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to standard error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
) -> None:
    from sparseflow.core import logging

    logging.configure_console(verbose=verbose, quiet=quiet)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code.

    0 is success. 2 is bad usage, bad input or a missing extra; 1 a job that failed; 130 an interrupt.
    Messages go to standard error. With `--json` among the arguments an error is also one JSON object on
    standard output: `{"error": {"type": ..., "message": ...}}`.

    Args:
        arguments: What follows `sparseflow` on the command line.
    """
    as_json = "--json" in arguments
    try:
        command = typer.main.get_command(app)
        code = command.main(args=list(arguments), prog_name="sparseflow", standalone_mode=False)
        # Typer turns a KeyboardInterrupt into this code, without a word.
        if code == EXIT_INTERRUPTED:
            return _report("Interrupted", "stopped from the keyboard", EXIT_INTERRUPTED, as_json)
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _report("Aborted", "nothing was done", EXIT_FAILED, as_json)
    except SparseFlowError as error:
        usage = isinstance(error, InputError | MissingExtraError)
        return _report(type(error).__name__, str(error), EXIT_USAGE if usage else EXIT_FAILED, as_json)
    except Exception as error:
        # Typer's own usage errors are told by the message that they would print.
        message = getattr(error, "format_message", None)
        if message is not None:
            # Without a command the help has been shown, and the message is empty.
            return _report("UsageError", message() or "no command was given", EXIT_USAGE, as_json)
        traceback.print_exc()
        return _report(type(error).__name__, str(error) or "no message", EXIT_FAILED, as_json)


def _report(kind: str, message: str, code: int, as_json: bool) -> int:
    typer.secho(f"sparseflow: {message}", err=True, fg=typer.colors.RED)
    if as_json:
        typer.echo(json.dumps({"error": {"type": kind, "message": message}}, ensure_ascii=False))
    return code


def _load(name: str) -> Any:
    module, _, attribute = LAZY[name].target.partition(":")
    found = getattr(import_module(module), attribute)
    # Under a root of its own, since a Typer that is itself the root grows options for shell completion.
    holder = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
        holder.callback()(_nothing)
        return typer.main.get_group(holder).commands[name]
    holder.command(name=name)(found)
    return typer.main.get_command(holder)


def _nothing() -> None:
    """Does nothing, where Typer wants a function and there is nothing to do."""
