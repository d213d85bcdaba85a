"""Scoring schedules with a network, as many at a time as its device likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparseflow.tuning.model.net.coarsen import coarsen
from sparseflow.tuning.model.net.network import AutoSparseNet, Tokens
from sparseflow.tuning.model.net.statistics import pattern_statistics, statistics
from sparseflow.tuning.model.net.tokenizer import Encoder, TokenTable
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

_AT_ONCE = {"cpu": 512, "cuda": 16384}
"""Schedules at a time: on a CPU, what its caches hold."""


def scorer(net: AutoSparseNet, problem: Problem, threads: int) -> Callable[[Sequence[Schedule]], np.ndarray]:
    """What scores the schedules of one problem; its pattern is embedded here, once.

    Args:
        net: On the device where it is to run.
        problem: What is computed.
        threads: Threads that schedules may use.

    Returns:
        A function from schedules to float32, (schedules,); higher is faster.
    """
    context, encoder = embedded(net, problem, threads), Encoder()
    operator, extents = problem.operator, problem.extents
    return lambda schedules: score(net, schedules, operator, extents, context, encoder=encoder)


def embedded(net: AutoSparseNet, problem: Problem, threads: int) -> Tensor:
    """What `net` knows of a problem before it sees a schedule, (1, c, w); arguments are `scorer`'s."""
    matrix, config = problem.matrix, net.config.pattern
    told = statistics(
        operator=problem.operator.name,
        shape=matrix.shape,
        nnz=matrix.nnz,
        n_cols=problem.n_cols,
        dtype=str(problem.dtype),
        threads=threads,
        pattern=pattern_statistics(matrix.rows, matrix.cols, matrix.shape),
    )
    device = net.head.device
    cells = None
    if config is not None:
        cells = coarsen(matrix.rows, matrix.cols, matrix.shape, most=config.most_cells, device=device)
    return net.embed(cells, told)


def score(
    net: AutoSparseNet,
    schedules: Sequence[Schedule],
    operator: Operator,
    extents: Mapping[str, int],
    context: Tensor,
    *,
    encoder: Encoder | None = None,
) -> np.ndarray:
    """Scores of schedules of one task; higher is faster.

    Args:
        net: On the device where it is to run.
        schedules: They need not be able to run.
        operator: What they compute.
        extents: Axis -> extent.
        context: What `net.embed` gave for the task.
        encoder: One that saw schedules before, to save some time.

    Returns:
        float32, (len(schedules),).

    Raises:
        InputError: A schedule is not one of this operator.
    """
    encoder = encoder or Encoder()
    ids = encoder.encode(schedules, operator, extents)
    return score_ids(net, ids, encoder.table, context)


def score_ids(net: AutoSparseNet, ids: np.ndarray, table: TokenTable, context: Tensor) -> np.ndarray:
    """As `score`, for schedules that are encoded: int32, (n, length)."""
    device = context.device
    step = _AT_ONCE.get(device.type, _AT_ONCE["cuda"])
    found = np.empty(len(ids), np.float32)
    lengths = (ids > 0).sum(1)
    by_length = np.argsort(lengths, kind="stable")  # so that little is padding
    learning = net.training
    net.eval()
    try:
        with torch.inference_mode():
            for begin in range(0, len(ids), step):
                some = by_length[begin : begin + step]
                tokens = Tokens.of(ids[some, : lengths[some[-1]]], table, device=device)
                found[some] = net(tokens, context).cpu().numpy()
    finally:
        net.train(learning)
    return found
