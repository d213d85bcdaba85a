"""Processes for slots: started on this host, or by torchrun."""

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
from sparseflow.core.files import write_atomic
from sparseflow.errors import DeviceError, InputError, RunError

Result = TypeVar("Result")

TIMEOUT_S = 120.0

_GRACE_S = 10.0
"""That a process which lost another leaves it to say what happened, and to end first."""


@contextmanager
def joined(device: torch.device | str = "cpu", *, timeout_s: float = TIMEOUT_S) -> Iterator[torch.device]:
    """Join the processes that torchrun started, or that have been joined already.

    Args:
        device: `"cuda"` is each process' own GPU.
        timeout_s: Seconds after which a process that does not answer is given up.

    Yields:
        This process' device.

    Raises:
        InputError: Nobody started processes.
        DeviceError: There is no GPU for it.
    """
    own = not distributed.is_initialized()
    if own and "RANK" not in os.environ:
        raise InputError("this process is none of several: start them with torchrun, or use `launch`")
    wanted = torch.device(device)
    if wanted.type == "cuda":
        number = int(os.environ.get("LOCAL_RANK", "0")) if wanted.index is None else wanted.index
        if number >= torch.cuda.device_count():
            raise DeviceError(f"there are {torch.cuda.device_count()} GPUs; process {number} needs its own")
        wanted = torch.device("cuda", number)
        # Each link is a group of its own, which is what the warning asks for.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        torch.cuda.set_device(wanted)
    if own:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield wanted
    finally:
        if own:
            distributed.destroy_process_group()


def launch(
    job: Callable[[torch.device], Result],
    processes: int,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> list[Result]:
    """Run a job in several joined processes of this host.

    On CPUs each gets its share of the cores.

    Args:
        job: Called with the process' device in each; a function of a module, or a `functools.partial` of one.
            It makes a `RankExecutor`.
        processes: As many as slots that the plan uses.
        device: `"cuda"` is each process' own GPU.
        timeout_s: Seconds after which a process that does not answer is given up.

    Returns:
        What it returned in each, by rank; what can be pickled.

    Raises:
        InputError: `processes` is below 1.
        RunError: It failed in one of them, which ended the others; says in which and how.
    """
    if processes < 1:
        raise InputError(f"`processes` (={processes}) must be at least 1")
    with tempfile.TemporaryDirectory(prefix="sparseflow-") as name:
        folder = Path(name)
        try:
            spawn(_enter, (job, processes, str(device), timeout_s, folder), processes)
        except ProcessException as error:
            raise _cause(folder, processes, error) from error
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(processes)]


def _enter(
    rank: int,
    job: Callable[[torch.device], object],
    processes: int,
    device: str,
    timeout_s: float,
    folder: Path,
) -> None:
    """One process of `launch`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    if torch.device(device).type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        with joined(device, timeout_s=timeout_s) as mine:
            found = job(mine)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(found))
        # Whoever is done first must not take its links away from the others.
        distributed.barrier()
        distributed.destroy_process_group()
    except Exception as error:
        kind = "lost" if isinstance(error, LinkError) else "failed"
        told = [f"{type(error).__name__}: {error}", traceback.format_exc()]
        # Whole or not at all: it may be terminated while it writes.
        write_atomic(folder / f"{rank}.{kind}", json.dumps(told))
        if kind == "lost":
            time.sleep(_GRACE_S)
        # At once: what still waits for a message would hold the end of the process up.
        os._exit(1)


def _cause(folder: Path, processes: int, ended: ProcessException) -> RunError:
    """Of the first process that failed; else that one died, or only lost another, without a word of why."""
    told = _told(folder, processes, "failed")
    if told is None and getattr(ended, "exit_code", 1) == 1:
        told = _told(folder, processes, "lost")
    return told or RunError(f"a process ended: {ended}")


def _told(folder: Path, processes: int, kind: str) -> RunError | None:
    """By the first process that left a word of this kind; with its traceback as a note."""
    for rank in range(processes):
        file = folder / f"{rank}.{kind}"
        if file.is_file():
            what, trace = json.loads(file.read_text("utf-8"))
            found = RunError(f"process {rank} of {processes} failed: {what}")
            found.add_note(trace)
            return found
    return None
