"""How well schedules are ranked: task by task on pools whose latencies are known, and over tasks."""

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
from sparseflow.tuning.model.dataset import Dataset, Group, Room
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.net.scoring import score_ids

TOP = (1, 5, 20)

Scorer = Callable[[Group], np.ndarray]
"""A group -> a score for each of its schedules, (n,); higher is faster."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A ranking of one task's pool; `core.costmodel.ranking` defines the numbers.

    Attributes:
        operator: What it computes.
        matrix: The matrix's name.
        family: Its family.
        known: Whether its pattern is known.
        pool: Schedules that were ranked.
        top_k: k -> score.
        random_top_k: k -> what a random pick from the same pool is expected to get.
        pair_accuracy: Share of pairs in the right order.
    """

    operator: str
    matrix: str
    family: str
    known: bool
    pool: int
    top_k: Mapping[int, float]
    random_top_k: Mapping[int, float]
    pair_accuracy: float


def judge(groups: Iterable[Group], score: Scorer) -> tuple[Judged, ...]:
    """Rank the schedules of every group, all of them, and judge that.

    Raises:
        InputError: A score is not a number.
    """
    found = []
    for group in groups:
        scores, task = score(group), group.task
        found.append(
            Judged(
                operator=task.operator,
                matrix=task.matrix,
                family=task.family,
                known=task.pattern is not None,
                pool=len(group),
                top_k={k: top_k_score(scores, group.latency, k) for k in TOP},
                random_top_k={k: random_top_k_score(group.latency, k) for k in TOP},
                pair_accuracy=pair_accuracy(scores, group.latency),
            )
        )
    return tuple(found)


def summary(judged: Sequence[Judged], *, seed: int = 0) -> dict[str, Any]:
    """Means over tasks, each with its 95 % bootstrap interval over matrices; in JSON's types.

    Args:
        judged: At least one.
        seed: What the bootstrap draws from.

    Returns:
        `"tasks"`, `"matrices"`, `"pool"` (median size), and for `"top1"`, `"top5"`, `"top20"` and
        `"pair_accuracy"` a `{"mean", "low", "high", "random"}`; `"random"` is the mean of a random pick.

    Raises:
        InputError: There is nothing to judge by.
    """
    if not judged:
        raise InputError("no task was judged: there is nothing to summarise")
    matrices = [one.matrix for one in judged]

    def told(values: list[float], random: float) -> dict[str, float]:
        low, high = bootstrap_mean(values, matrices, seed=seed)
        return {"mean": float(np.mean(values)), "low": low, "high": high, "random": random}

    return {
        "tasks": len(judged),
        "matrices": len(set(matrices)),
        "pool": float(np.median([one.pool for one in judged])),
        **{
            f"top{k}": told(
                [one.top_k[k] for one in judged], float(np.mean([one.random_top_k[k] for one in judged]))
            )
            for k in TOP
        },
        "pair_accuracy": told([one.pair_accuracy for one in judged], 0.5),
    }


def by_net(net: AutoSparseNet, data: Dataset, room: Room | None = None) -> Scorer:
    """Scores by a network; a pattern is embedded once.

    Args:
        net: The network.
        data: What the groups are of.
        room: How many cells of each pattern fit into memory; it learns of those that do not.
    """
    embedded: dict[str, Tensor | None] = {}
    config, device = net.config.pattern, net.head.device
    room = room or Room(data, 1 if config is None else config.most_cells)

    def embed(digest: str) -> Tensor | None:
        while (found := room.cells(digest)) is not None:
            try:
                return net.embed_patterns([found])
            except torch.OutOfMemoryError:
                room.shrink([digest])
        return None

    def score(group: Group) -> np.ndarray:
        digest = group.task.pattern
        with torch.inference_mode():
            if config is not None and digest is not None and digest not in embedded:
                embedded[digest] = embed(digest)
            told = torch.from_numpy(group.statistics).to(device)[None]
            pattern = None if digest is None else embedded.get(digest)
            which = None if pattern is None else torch.zeros(1, dtype=torch.int64, device=device)
            context = net.context(told, pattern, which)
        return score_ids(net, group.ids, data.encoder.table, context)

    return score
