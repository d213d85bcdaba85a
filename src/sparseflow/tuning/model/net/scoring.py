"""Scoring of schedules with a network, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from sparseflow.tuning.model.net.coarsen import coarsen
from sparseflow.tuning.model.net.network import AutoSparseNet, TokenBatch
from sparseflow.tuning.model.net.statistics import compute_pattern_statistics, compute_task_statistics
from sparseflow.tuning.model.net.tokenizer import ScheduleTokenizer, TokenTable
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

_BATCH_SIZE = {"cpu": 512, "cuda": 16384}
"""Schedules of a batch; on a CPU they fit its caches."""


def make_scorer(
    net: AutoSparseNet, problem: SparseProblem, threads: int
) -> Callable[[Sequence[Schedule]], np.ndarray]:
    """Create a scorer of the schedules of one problem; the pattern is embedded once.

    Args:
        net: Network on its device.
        problem: Problem.
        threads: Maximum number of threads of a schedule.

    Returns:
        A function from schedules to scores, float32, shape [schedules]; higher is faster. It raises
        InputError for a schedule that does not fit the operator.
    """
    with _use_one_thread():
        context, encoder = embed_problem(net, problem, threads), ScheduleTokenizer()
    operator, extents = problem.operator, problem.extents

    def score(schedules: Sequence[Schedule]) -> np.ndarray:
        ids = encoder.encode(schedules, operator, extents)
        with _use_one_thread():
            return score_token_ids(net, ids, encoder.table, context)

    return score


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Run torch in one thread: on busy CPUs several threads wait for each other for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def embed_problem(net: AutoSparseNet, problem: SparseProblem, threads: int) -> Tensor:
    """Build the context of a problem, shape [1, c, w]; see `make_scorer`."""
    matrix, config = problem.matrix, net.config.pattern
    features = compute_task_statistics(
        operator=problem.operator.name,
        shape=matrix.shape,
        nnz=matrix.nnz,
        n_cols=problem.n_cols,
        dtype=str(problem.dtype),
        threads=threads,
        pattern=compute_pattern_statistics(matrix.rows, matrix.cols, matrix.shape),
    )
    device = net.head.device
    cells = None
    if config is not None:
        cells = coarsen(matrix.rows, matrix.cols, matrix.shape, max_cells=config.max_cells, device=device)
    return net.embed_task(cells, features)


def score_token_ids(net: AutoSparseNet, ids: np.ndarray, table: TokenTable, context: Tensor) -> np.ndarray:
    """Score tokenized schedules of one task.

    Args:
        net: Network on its device.
        ids: Result of a tokenizer, int32, shape [n, length].
        table: Table of the tokenizer.
        context: Result of `net.embed_task`.

    Returns:
        Shape [n], float32; higher is faster.
    """
    device = context.device
    step = _BATCH_SIZE.get(device.type, _BATCH_SIZE["cuda"])
    scores = np.empty(len(ids), np.float32)
    lengths = (ids > 0).sum(1)
    by_length = np.argsort(lengths, kind="stable")  # to reduce padding
    was_training = net.training
    net.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(ids), step):
                rows = by_length[start : start + step]
                tokens = TokenBatch.from_ids(ids[rows, : lengths[rows[-1]]], table, device=device)
                scores[rows] = net(tokens, context).cpu().numpy()
    finally:
        net.train(was_training)
    return scores
