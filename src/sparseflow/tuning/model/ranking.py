"""Evaluation of rankings on pools of schedules with known latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.costmodel.ranking import pair_accuracy, random_top_k_score, top_k_score
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import InputError
from sparseflow.tuning.model.dataset import CellLimits, RankingDataset, TaskGroup
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.net.scoring import score_token_ids

TOP_K = (1, 5, 20)

GroupScorer = Callable[[TaskGroup], np.ndarray]
"""Group -> score of each schedule, shape [n]; higher is faster."""


@dataclass(frozen=True, kw_only=True)
class RankingScore:
    """Scores of the ranking of one task's pool; `core.costmodel.ranking` defines them.

    Attributes:
        operator: Operator name.
        matrix: Matrix name.
        family: Family of the matrix.
        pattern_known: Whether the pattern is known.
        pool: Number of ranked schedules.
        top_k: k -> score.
        random_top_k: k -> expected score of a random pick from the pool.
        pair_accuracy: Fraction of pairs in the correct order.
    """

    operator: str
    matrix: str
    family: str
    pattern_known: bool
    pool: int
    top_k: Mapping[int, float]
    random_top_k: Mapping[int, float]
    pair_accuracy: float


def evaluate_ranking(groups: Iterable[TaskGroup], score: GroupScorer) -> tuple[RankingScore, ...]:
    """Rank all schedules of every group and score the rankings.

    Raises:
        InputError: A score is NaN.
    """
    scores = []
    for group in groups:
        predictions, task = score(group), group.task
        scores.append(
            RankingScore(
                operator=task.operator,
                matrix=task.matrix,
                family=task.family,
                pattern_known=task.pattern is not None,
                pool=len(group),
                top_k={k: top_k_score(predictions, group.latency, k) for k in TOP_K},
                random_top_k={k: random_top_k_score(group.latency, k) for k in TOP_K},
                pair_accuracy=pair_accuracy(predictions, group.latency),
            )
        )
    return tuple(scores)


def summarize_scores(scores: Sequence[RankingScore], *, seed: int = 0) -> dict[str, Any]:
    """Compute means over tasks with 95 % bootstrap intervals over matrices, in JSON types.

    Args:
        scores: At least one score.
        seed: Random seed of the bootstrap.

    Returns:
        `"tasks"`, `"matrices"`, `"pool"` (median size), and for `"top1"`, `"top5"`, `"top20"` and
        `"pair_accuracy"` a dict `{"mean", "low", "high", "random"}`; `"random"` is the mean of a random pick.

    Raises:
        InputError: There are no scores.
    """
    if not scores:
        raise InputError("`scores` is empty")
    matrices = [score.matrix for score in scores]

    def summarize(values: list[float], random: float) -> dict[str, float]:
        low, high = bootstrap_mean(values, matrices, seed=seed)
        return {"mean": float(np.mean(values)), "low": low, "high": high, "random": random}

    return {
        "tasks": len(scores),
        "matrices": len(set(matrices)),
        "pool": float(np.median([score.pool for score in scores])),
        **{
            f"top{k}": summarize(
                [score.top_k[k] for score in scores],
                float(np.mean([score.random_top_k[k] for score in scores])),
            )
            for k in TOP_K
        },
        "pair_accuracy": summarize([score.pair_accuracy for score in scores], 0.5),
    }


def make_network_scorer(
    net: AutoSparseNet, data: RankingDataset, limits: CellLimits | None = None
) -> GroupScorer:
    """Create a scorer that embeds each pattern once.

    Args:
        net: Network.
        data: Dataset of the groups.
        limits: Cell limits; updated for patterns that do not fit into memory.
    """
    embedded: dict[str, Tensor | None] = {}
    config, device = net.config.pattern, net.head.device
    limits = limits or CellLimits(data, 1 if config is None else config.max_cells)

    def embed(digest: str) -> Tensor | None:
        while (cells := limits.get_cells(digest)) is not None:
            try:
                return net.embed_patterns([cells])
            except torch.OutOfMemoryError:
                limits.shrink([digest])
        return None

    def score(group: TaskGroup) -> np.ndarray:
        digest = group.task.pattern
        with torch.inference_mode():
            if config is not None and digest is not None and digest not in embedded:
                embedded[digest] = embed(digest)
            statistics = torch.from_numpy(group.statistics).to(device)[None]
            pattern = None if digest is None else embedded.get(digest)
            pattern_index = None if pattern is None else torch.zeros(1, dtype=torch.int64, device=device)
            context = net.build_context(statistics, pattern, pattern_index)
        return score_token_ids(net, group.ids, data.encoder.table, context)

    return score
