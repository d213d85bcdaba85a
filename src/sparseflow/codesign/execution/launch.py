"""Starts processes on this host, or joins those of torchrun."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessException, spawn

from sparseflow.codesign.execution.links import LinkError
from sparseflow.core.checks import check_at_least
from sparseflow.core.files import write_atomic
from sparseflow.errors import DeviceError, InputError, RunError

Result = TypeVar("Result")

TIMEOUT_S = 120.0

_GRACE_PERIOD_S = 10.0
"""Time for the process that failed first to report, before processes that lost it exit."""


@contextmanager
def join_processes(
    device: torch.device | str = "cpu", *, timeout_s: float = TIMEOUT_S
) -> Iterator[torch.device]:
    """Join the processes started by torchrun, or use an existing process group.

    Args:
        device: `"cuda"` is the GPU of each process.
        timeout_s: Timeout of unresponsive processes, s.

    Yields:
        The device of this process.

    Raises:
        InputError: There are no processes to join.
        DeviceError: There is no GPU for this process.
    """
    owns_group = not distributed.is_initialized()
    if owns_group and "RANK" not in os.environ:
        raise InputError("there are no processes to join; start them with torchrun, or use `launch`")
    target = torch.device(device)
    if target.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if target.index is None else target.index
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"there are {torch.cuda.device_count()} GPUs, but process {index} needs its own"
            )
        target = torch.device("cuda", index)
        # The warning does not apply: each channel has its own group.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        torch.cuda.set_device(target)
    if owns_group:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield target
    finally:
        if owns_group:
            distributed.destroy_process_group()


def launch(
    job: Callable[[torch.device], Result],
    processes: int,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> list[Result]:
    """Run a job in several connected processes on this host.

    CPU processes share the cores equally.

    Args:
        job: Called with the device in each process; a module-level function or `functools.partial` of one. It
            creates a `RankExecutor`.
        processes: Number of processes: that of the slots used by the plan.
        device: `"cuda"` is the GPU of each process.
        timeout_s: Timeout of unresponsive processes, s.

    Returns:
        The result of each process, by rank; must be picklable.

    Raises:
        InputError: `processes` is below 1.
        RunError: The job failed in a process, which ended the others.
    """
    check_at_least(1, processes=processes)
    with tempfile.TemporaryDirectory(prefix="sparseflow-") as name:
        folder = Path(name)
        try:
            spawn(_run_process, (job, processes, str(device), timeout_s, folder), processes)
        except ProcessException as error:
            raise _find_cause(folder, processes, error) from error
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(processes)]


def _run_process(
    rank: int,
    job: Callable[[torch.device], object],
    processes: int,
    device: str,
    timeout_s: float,
    folder: Path,
) -> None:
    """Entry point of the processes of `launch`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    if torch.device(device).type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        with join_processes(device, timeout_s=timeout_s) as process_device:
            result = job(process_device)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        # Finished processes keep their channels open for the others.
        distributed.barrier()
        distributed.destroy_process_group()
    except Exception as error:
        kind = "lost" if isinstance(error, LinkError) else "failed"
        details = [f"{type(error).__name__}: {error}", traceback.format_exc()]
        # Atomic, because the process may be terminated while it writes.
        write_atomic(folder / f"{rank}.{kind}", json.dumps(details))
        if kind == "lost":
            time.sleep(_GRACE_PERIOD_S)
        # Exit immediately; pending messages would block a regular exit.
        os._exit(1)


def _find_cause(folder: Path, processes: int, ended: ProcessException) -> RunError:
    """Error of the first process that failed; otherwise of one that died or lost its connection."""
    failure = _read_failure(folder, processes, "failed")
    if failure is None and getattr(ended, "exit_code", 1) == 1:
        failure = _read_failure(folder, processes, "lost")
    return failure or RunError(f"a process ended: {ended}")


def _read_failure(folder: Path, processes: int, kind: str) -> RunError | None:
    """Error of the first process with a failure file of this kind, with its traceback as a note."""
    for rank in range(processes):
        file = folder / f"{rank}.{kind}"
        if file.is_file():
            message, trace = json.loads(file.read_text("utf-8"))
            failure = RunError(f"process {rank} of {processes} failed: {message}")
            failure.add_note(trace)
            return failure
    return None
