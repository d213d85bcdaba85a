"""Evaluation of rankings on pools of schedules with known latencies.

A higher score predicts a faster schedule; only the order of scores matters. Ties are broken at random, and
the metrics are the exact expectation over that order. A model that cannot distinguish schedules therefore
scores like a random ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import InputError
from sparseflow.tuning.model.dataset import CellLimits, RankingDataset, TaskGroup, is_out_of_memory
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.net.scoring import score_token_ids

TOP_K = (1, 5, 20)
_MAX_PAIRS_IN_MEMORY = 2**22

GroupScorer = Callable[[TaskGroup], np.ndarray]
"""Group -> score of each schedule, shape [n]; higher is faster."""


@dataclass(frozen=True, kw_only=True)
class RankingScore:
    """Scores of the ranking of one task's pool.

    Attributes:
        operator: Operator name.
        matrix: Matrix name.
        family: Family of the matrix.
        pattern_known: Whether the pattern is known.
        pool: Number of ranked schedules.
        top_k: k -> `top_k_score`.
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


def top_k_score(scores: ArrayLike, latency_ms: ArrayLike, k: int) -> float:
    """Lowest latency of the pool divided by the lowest latency among the top `k`: 1 is perfect.

    It is the fraction of the best speed that remains if the top `k` schedules are measured and the fastest
    is used. A pool of at most `k` schedules gives 1.

    Args:
        scores: Predicted scores, shape [n].
        latency_ms: True latencies, above 0, shape [n].
        k: Number of schedules that are measured, at least 1.

    Raises:
        InputError: The shapes differ, the pool is empty, a score is NaN, or a value is out of range.
    """
    predicted, latency = _check_pool(scores, latency_ms)
    if k < 1:
        raise InputError(f"`k` (={k}) must be at least 1")
    min_latency = latency.min()
    if k >= len(latency):
        return 1.0
    threshold = np.partition(predicted, -k)[-k]
    selected = latency[predicted > threshold]
    tied = np.sort(latency[predicted == threshold])
    fastest = np.minimum(tied, selected.min(initial=np.inf))
    return float(min_latency * (_first_draw_probability(len(tied), k - len(selected)) / fastest).sum())


def random_top_k_score(latency_ms: ArrayLike, k: int) -> float:
    """Expected `top_k_score` of a random ranking."""
    return top_k_score(np.zeros(np.shape(latency_ms)), latency_ms, k)


def pair_accuracy(scores: ArrayLike, latency_ms: ArrayLike) -> float:
    """Fraction of pairs with different latencies that are ranked correctly; tied scores count half.

    A random ranking gives 0.5, and so does a pool with equal latencies.

    Args:
        scores: Predicted scores, shape [n].
        latency_ms: True latencies, above 0, shape [n].

    Raises:
        InputError: The shapes differ, the pool is empty, a score is NaN, or a value is out of range.
    """
    predicted, latency = _check_pool(scores, latency_ms)
    order = np.argsort(latency, kind="stable")
    predicted, latency = predicted[order], latency[order]
    first_slower = np.searchsorted(latency, latency, side="right")
    num_pairs, num_correct, count = 0, 0.0, len(latency)
    step = max(_MAX_PAIRS_IN_MEMORY // count, 1)
    for start in range(0, count, step):
        rows = slice(start, start + step)
        faster, slower = predicted[rows, None], predicted[None, start:]
        differs = np.arange(start, count)[None, :] >= first_slower[rows, None]
        num_pairs += int(differs.sum())
        num_correct += ((faster > slower) & differs).sum() + 0.5 * ((faster == slower) & differs).sum()
    return num_correct / num_pairs if num_pairs else 0.5


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
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
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


def _first_draw_probability(count: int, num_drawn: int) -> np.ndarray:
    """Probability of each of `count` sorted items to be the first of `num_drawn` drawn, shape [count]."""
    num_skipped = np.arange(count - num_drawn + 1)
    skip_probability = 1.0 - num_drawn / (count - num_skipped[:-1])
    probability = np.zeros(count)
    probability[: len(num_skipped)] = (
        np.concatenate(([1.0], np.cumprod(skip_probability))) * num_drawn / (count - num_skipped)
    )
    return probability


def _check_pool(scores: ArrayLike, latency_ms: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    predicted, latency = np.asarray(scores, dtype=float), np.asarray(latency_ms, dtype=float)
    if predicted.ndim != 1 or predicted.shape != latency.shape or not latency.size:
        raise InputError(
            "expected scores and latencies of the same shape [n], n at least 1; got "
            f"{list(predicted.shape)} and {list(latency.shape)}"
        )
    if np.isnan(predicted).any():
        raise InputError(f"{int(np.isnan(predicted).sum())} of {predicted.size} scores are NaN")
    if not (np.isfinite(latency) & (latency > 0.0)).all():
        raise InputError("latencies must be finite and above 0; leave out candidates that failed")
    return predicted, latency
