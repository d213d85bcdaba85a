"""The root command: global options, lazily imported subcommands and exit codes.

A wing's module is imported when one of its commands runs, which keeps `sparseflow --help` fast. To add a
wing, write `sparseflow/cli/<wing>.py` with a `typer.Typer` named `app` and add it to `COMMANDS`.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sparseflow import __version__
from sparseflow.cli.guidance import find_help_page, find_next_command
from sparseflow.errors import DeviceError, InputError, MissingExtraError, SparseFlowError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""Parts of the messages of torch, which has no common error class for it."""


@dataclass(frozen=True, kw_only=True)
class LazyCommand:
    """A command or command group that is imported when it runs.

    Attributes:
        target: `"module:name"` of a `typer.Typer` or of a function.
        help: Summary that `sparseflow --help` shows.
    """

    target: str
    help: str


COMMANDS = {
    "adaptive": LazyCommand(
        target="sparseflow.cli.adaptive:app",
        help="Adaptive inference: keep latency budgets with a mixture-of-experts model.",
    ),
    "codesign": LazyCommand(
        target="sparseflow.cli.codesign:app",
        help="Co-design: choose chips, partition a model over them and run it.",
    ),
    "demo": LazyCommand(
        target="sparseflow.cli.demo:demo",
        help="Benchmark the shipped spiking network on this machine, dense and optimized.",
    ),
    "doctor": LazyCommand(
        target="sparseflow.cli.doctor:doctor",
        help="Show available hardware, packages and backends, and how to fix what is missing.",
    ),
    "latency": LazyCommand(
        target="sparseflow.cli.latency:app",
        help="Latency: predict the latency of ONNX models on idle and loaded devices.",
    ),
    "pruning": LazyCommand(
        target="sparseflow.cli.pruning:app",
        help="Pruning: token, head and channel pruning for video transformers.",
    ),
    "report": LazyCommand(
        target="sparseflow.cli.report:app",
        help="Reports: one static site of all runs.",
    ),
    "runs": LazyCommand(
        target="sparseflow.cli.runs:app",
        help="Runs: list the runs on disk and remove interrupted ones.",
    ),
    "spiking": LazyCommand(
        target="sparseflow.cli.spiking:app",
        help="Spiking networks: faster inference by skipping zero activations.",
    ),
    "tune": LazyCommand(
        target="sparseflow.cli.tune:tune",
        help="Find the fastest kernel for a sparse matrix; short for `tuning tune`.",
    ),
    "tuning": LazyCommand(
        target="sparseflow.cli.tuning:app",
        help="Tuning: autotune sparse kernels and train cost models for them.",
    ),
}


FIRST_COMMANDS = {
    "spiking networks, faster": "sparseflow demo",
    "tuning of sparse kernels": "sparseflow tune spmm A.mtx",
    "latency prediction": "sparseflow latency quickstart",
    "pruning of video models": "sparseflow pruning train --config moving_digits --out p",
    "codesign with chiplets": "sparseflow codesign plan --config version_c --out c",
    "adaptive model serving": "sparseflow adaptive demo",
}
"""What each wing is for, and its first command."""


class LazyGroup(TyperGroup):
    """Lists the commands of `COMMANDS` without importing them; imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            placeholder = typer.Typer(add_completion=False)
            placeholder.command(name=cmd_name, help=COMMANDS[cmd_name].help)(_do_nothing)
            return typer.main.get_command(placeholder)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS and args[0] not in self.commands:
            self.add_command(_import_command(args[0]), args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="sparseflow",
    cls=LazyGroup,
    help="Turn sparsity into latency that you can measure, predict and promise.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        from sparseflow.core.environment import get_git_revision

        typer.echo(f"sparseflow {__version__} (revision {get_git_revision() or 'unknown'})")
        raise typer.Exit()


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and the git revision."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to standard error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
) -> None:
    configure_logging(verbose=verbose, quiet=quiet)
    if context.invoked_subcommand is None:
        for purpose, command in FIRST_COMMANDS.items():
            typer.echo(f"{purpose:25}{command}")
        typer.echo("All commands: sparseflow --help. What works on this machine: sparseflow doctor.")


def configure_logging(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send SparseFlow's log messages to standard error, replacing an earlier configuration.

    Args:
        verbose: Show messages from DEBUG up, instead of INFO.
        quiet: Show warnings and errors only; wins over `verbose`.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    logger = logging.getLogger("sparseflow")
    for handler in [handler for handler in logger.handlers if isinstance(handler, RichHandler)]:
        logger.removeHandler(handler)
    handler = RichHandler(
        console=Console(stderr=True), show_path=False, show_time=verbose, rich_tracebacks=False
    )
    handler.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    # The handler filters; the logger passes everything, for handlers of the application.
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Messages go to standard error; an unexpected error shows its traceback only with `--verbose`. With
    `--json` among the arguments, an error is also one JSON object on standard output:
    `{"error": {"type": ..., "message": ...}}`.

    Args:
        arguments: Arguments after `sparseflow` on the command line.

    Returns:
        Exit code: 0 for success, 1 for a failed job or an output that cannot be written, 2 for bad usage, bad
        input or a missing extra, 130 for an interrupt.
    """
    as_json = "--json" in arguments
    try:
        command = typer.main.get_command(app)
        # Reports show this command line; see `options.get_command_line`.
        command_line = shlex.join(["sparseflow", *arguments])
        code = command.main(
            args=list(arguments), prog_name="sparseflow", standalone_mode=False, obj=command_line
        )
        # Typer turns a KeyboardInterrupt into this code and prints nothing.
        if code == EXIT_INTERRUPTED:
            return _report_error("Interrupted", "stopped by the user", EXIT_INTERRUPTED, as_json)
        if code in (0, None) and not as_json and "--help" not in arguments:
            _show_next_command(arguments)
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _report_error("Aborted", "nothing was changed", EXIT_FAILED, as_json)
    except SparseFlowError as error:
        usage = isinstance(error, InputError | MissingExtraError)
        code = EXIT_USAGE if usage else EXIT_FAILED
        page = find_help_page(arguments, error) if usage or isinstance(error, DeviceError) else None
        return _report_error(type(error).__name__, str(error), code, as_json, page)
    except SystemExit:
        if "_SPARSEFLOW_COMPLETE" in os.environ:
            return 0  # the shell asked for completions
        # Typer and Rich exit on a broken pipe.
        message = "broken pipe: the reader of the output, or a process of the job, has gone"
        return _report_error("BrokenPipeError", message, EXIT_FAILED, as_json)
    except Exception as error:
        # Usage errors of Typer format their own message.
        message = getattr(error, "format_message", None)
        if message is not None:
            # Without a command a group has shown its help, and the message is empty.
            return _report_error("UsageError", message() or "no command was given", EXIT_USAGE, as_json)
        logging.getLogger("sparseflow").debug("the command failed", exc_info=True)
        return _report_error(type(error).__name__, _describe_foreign_error(error), EXIT_FAILED, as_json)


def report_thread_error(arguments: threading.ExceptHookArgs) -> None:
    """Log an error of a background thread in one line; a hook for `threading.excepthook`."""
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        logger = logging.getLogger("sparseflow")
        logger.warning("a background thread failed: %s", _describe_foreign_error(arguments.exc_value))
        logger.debug("the thread failed", exc_info=arguments.exc_value)


def _describe_foreign_error(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY):
        return f"out of memory: {text}; use a smaller input or a machine with more memory"
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{error.filename}: "
        return f"{name}{error.strerror or text}"
    kind = type(error).__name__
    return f"internal error: {kind}: {text}; report it with the output of `sparseflow --verbose ...`"


def _show_next_command(arguments: Sequence[str]) -> None:
    command = find_next_command(arguments) if arguments else None
    if command is not None:
        with suppress(OSError):
            typer.echo(f"next: {command}")


def _report_error(kind: str, message: str, code: int, as_json: bool, page: str | None = None) -> int:
    # The error can be that one of the two streams is not writable.
    with suppress(OSError):
        typer.secho(f"sparseflow: {message}", err=True, fg=typer.colors.RED)
        if page is not None:
            typer.echo(f"see {page}", err=True)
    with suppress(OSError):
        if as_json:
            typer.echo(json.dumps({"error": {"type": kind, "message": message}}, ensure_ascii=False))
    return code


def _import_command(name: str) -> Any:
    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(module), attribute)
    # Typer adds options for shell completion to its root, so the command gets a root without them.
    parent = typer.Typer(add_completion=False)
    if isinstance(target, typer.Typer):
        parent.add_typer(target, name=name)
        parent.callback()(_do_nothing)
        command = typer.main.get_group(parent).commands[name]
    else:
        parent.command(name=name)(target)
        command = typer.main.get_command(parent)
    _join_help_lines(command)
    return command


def _join_help_lines(command: Any) -> None:
    """Join the lines of each paragraph of help texts, which Typer would break where the source does."""
    if command.help is not None:
        command.help = "\n\n".join(" ".join(text.split()) for text in command.help.split("\n\n"))
    for subcommand in getattr(command, "commands", {}).values():
        _join_help_lines(subcommand)


def _do_nothing() -> None:
    """Placeholder where Typer requires a function."""
