"""Screening of matrices: which patterns do not fit into memory when a network is trained on them.

One training step runs for each matrix, on a batch of random schedules of this matrix. The steps run in a
child process with limited memory, because a process that exceeds the memory of the machine is killed.

::

    screening.jsonl   one row for each matrix; a later call skips these matrices
    excluded.txt      names of the matrices that do not fit, for `load_dataset`
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_at_least
from sparseflow.core.files import write_atomic
from sparseflow.core.journal import Journal
from sparseflow.core.progress import Progress
from sparseflow.core.telemetry.procfs import read_memory_used
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.model.dataset import is_out_of_memory
from sparseflow.tuning.model.net.coarsen import coarsen
from sparseflow.tuning.model.net.losses import ranking_loss
from sparseflow.tuning.model.net.network import AutoSparseNet, TokenBatch
from sparseflow.tuning.model.net.statistics import compute_pattern_statistics, compute_task_statistics
from sparseflow.tuning.model.net.tokenizer import ScheduleTokenizer
from sparseflow.tuning.model.training import TrainConfig
from sparseflow.tuning.schedule.matrices import SparsityPattern, read_memory_bytes
from sparseflow.tuning.schedule.matrix_files import find_matrix_files, parse_matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.space import ScheduleSpace

SCREENING_FILE = "screening.jsonl"
EXCLUDED_FILE = "excluded.txt"

_FREE_SHARE = 0.8
"""Default limit of the child process: share of the memory that is free at the start."""

_OPERATOR, _NUM_COLS, _THREADS = "spmm", 64, 2
"""Workload of the schedules; their number determines the memory, not their kind."""

_SMALL_PATTERN = SparsityPattern.from_coords(np.arange(64), np.arange(64), (64, 64))


class ScreeningHeader(Artifact):
    """Header of a screening: the settings that the results depend on."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.screening"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "choose another directory"

    config: dict[str, Any]
    device: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ScreeningRow:
    """Result of one matrix.

    Attributes:
        matrix: Name of the matrix.
        elements: Number of elements; None if the matrix could not be read.
        fits: Whether a training step fits into memory.
        error: Error of the step, or of the file; None for success.
    """

    matrix: str
    elements: int | None
    fits: bool
    error: str | None


@dataclass(frozen=True, kw_only=True)
class ScreeningResult:
    """Result of a screening.

    Attributes:
        rows: Rows of the matrices, in the order of the files.
        excluded: File with the names of the matrices that do not fit, one on each line.
    """

    rows: tuple[ScreeningRow, ...]
    excluded: Path

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {"rows": [asdict(row) for row in self.rows], "excluded": str(self.excluded)}


def screen_matrices(
    paths: Sequence[Path],
    config: TrainConfig,
    out_dir: Path | str,
    *,
    device: str = "cpu",
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> ScreeningResult:
    """Run one training step on each matrix, and list the matrices that do not fit into memory.

    Matrices that cannot be read do not fit either.

    Args:
        paths: Matrix files, or directories of them.
        config: Configuration of the training.
        out_dir: Output directory; an existing screening is resumed.
        device: Device of the training.
        memory_bytes: Memory limit, bytes: of the child process on a CPU, of the GPU memory otherwise. By
            default 0.8 times the free memory of a machine, and all memory of a GPU.
        progress: Progress callback.

    Raises:
        InputError: A path does not exist, two files have the same name, the network has no pattern branch,
            or `out_dir` has a screening with other settings.
        FileFormatError: A line of the results is damaged.
        RunError: Another process writes into the directory.
    """
    if config.net.pattern is None:
        raise InputError("the network has no pattern branch (`net.pattern` is None), so every matrix fits")
    if memory_bytes is not None:
        check_at_least(1, memory_bytes=memory_bytes)
    all_files = find_matrix_files(paths)
    files = {parse_matrix_name(file): file for file in all_files}
    if len(files) < len(all_files):
        raise InputError(f"{len(all_files)} files have {len(files)} different names; rename the duplicates")
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    header = ScreeningHeader(config=config.model_dump(mode="json"), device=device, memory_bytes=memory_bytes)
    with (
        Journal(root / SCREENING_FILE, ScreeningRow, header=header, key=_get_name) as journal,
        _StepProcess(config, device, memory_bytes) as process,
    ):
        for index, (name, file) in enumerate(files.items(), start=1):
            if name not in journal:
                journal.append(process.screen(name, file))
            if progress is not None:
                progress(name, index / len(files))
        rows = {row.matrix: row for row in journal.rows}
    names = [row.matrix for row in rows.values() if not row.fits]
    write_atomic(root / EXCLUDED_FILE, "".join(f"{name}\n" for name in names))
    return ScreeningResult(rows=tuple(rows[name] for name in files), excluded=root / EXCLUDED_FILE)


def read_excluded(path: Path | str) -> tuple[str, ...]:
    """Read the names of a list such as `excluded.txt`.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not text.
    """
    try:
        return tuple(filter(None, map(str.strip, Path(path).read_text(encoding="utf-8").splitlines())))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InputError(f"file not found: {path}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not a list of names: {error}") from error


def _get_name(row: ScreeningRow) -> str:
    return row.matrix


class _StepProcess:
    """A child process that runs training steps; it is started again after its death."""

    def __init__(self, *settings: Any) -> None:
        self._settings = settings
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _StepProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def screen(self, name: str, file: Path) -> ScreeningRow:
        elements: int | None = None
        try:
            if self._pool is None:
                # A forked process would share the threads of this process.
                self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
                self._pool.submit(_start_child, *self._settings).result()
            elements, error = self._pool.submit(_load_pattern, file).result()
            if error is None:
                error = self._pool.submit(_try_step).result()
        except BrokenProcessPool:
            error = "the process was killed"
            self._pool = None
        return ScreeningRow(matrix=name, elements=elements, fits=error is None, error=error)


class _Child:
    """State of the child process."""

    config: TrainConfig
    net: AutoSparseNet
    device: torch.device
    pattern: SparsityPattern


def _start_child(config: TrainConfig, device: str, memory_bytes: int | None) -> None:
    _Child.config, _Child.device = config, torch.device(device)
    _Child.net = AutoSparseNet(config.net).to(_Child.device)
    if _Child.device.type == "cuda":
        if memory_bytes is not None:
            total = torch.cuda.get_device_properties(_Child.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), _Child.device)
        return
    _Child.pattern = _SMALL_PATTERN
    _run_step()  # starts the threads and loads the libraries that need memory for any matrix
    if memory_bytes is None:
        memory_bytes = int(_FREE_SHARE * (1.0 - read_memory_used()) * read_memory_bytes())
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * page_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # If the machine has less memory than expected, this process is killed first.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _load_pattern(file: Path) -> tuple[int | None, str | None]:
    """Read a matrix; return its number of elements and the error."""
    _Child.pattern = _SMALL_PATTERN  # frees the last matrix
    try:
        _Child.pattern = read_matrix(file).pattern
    except (InputError, FileFormatError) as error:
        return None, str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, _describe(error)
    return _Child.pattern.nnz, None


def _try_step() -> str | None:
    """Run a training step; return the error if it does not fit into memory."""
    message = None
    try:
        _run_step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = _describe(error)
    # Outside of `except`, because the error keeps references to tensors that did not fit.
    _Child.net.zero_grad()
    gc.collect()
    if _Child.device.type == "cuda":
        torch.cuda.empty_cache()
    return message


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['out of memory'])[0]}"


def _run_step() -> None:
    """Compute the gradients of one batch, whose schedules are all of this matrix."""
    config, net, pattern, device = _Child.config, _Child.net, _Child.pattern, _Child.device
    assert config.net.pattern is not None
    operator, rng = get_operator(_OPERATOR), np.random.default_rng(config.seed)
    num_rows, num_cols = pattern.shape
    extents = {"i": num_rows, "k": num_cols, "j": _NUM_COLS}
    space = ScheduleSpace(operator, extents, threads=[1, _THREADS])
    count = config.sampling.max_schedules
    tokenizer = ScheduleTokenizer()
    ids = tokenizer.encode([space.sample(rng) for _ in range(count)], operator, extents)
    statistics = compute_task_statistics(
        operator=operator.name,
        shape=pattern.shape,
        nnz=pattern.nnz,
        n_cols=_NUM_COLS,
        dtype="float32",
        threads=_THREADS,
        pattern=compute_pattern_statistics(pattern.rows, pattern.cols, pattern.shape),
    )
    cells = coarsen(pattern.rows, pattern.cols, pattern.shape, max_cells=config.net.pattern.max_cells)
    labels = torch.from_numpy(rng.uniform(0.1, 1.0, (1, count)).astype(np.float32)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        context = net.build_context(
            torch.from_numpy(statistics)[None].to(device),
            net.embed_patterns([cells]),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        scores = net(TokenBatch.from_ids(ids, tokenizer.table, device=device), context)
    ranking_loss(config.loss, scores[None].float(), labels).backward()
