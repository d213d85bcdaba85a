"""Searching on a cluster: what is sent, and what comes back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import DeviceError
from sparseflow.tuning import explore
from sparseflow.tuning.measure.cluster import LOT


class Cluster:
    """Calls what would be sent to a cluster, the last first."""

    def __init__(self) -> None:
        self.lots: list[int] = []
        self.options: dict[str, Any] = {}

    def __call__(
        self, function: Callable[[Any], Any], items: Sequence[Any], **options: Any
    ) -> Iterator[tuple[int, Any]]:
        self.options = options
        for place in reversed(range(len(items))):
            sent = pickle.loads(pickle.dumps((function, items[place])))
            self.lots.append(len(sent[1].schedules))
            yield place, pickle.loads(pickle.dumps(sent[0](sent[1])))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    found = Cluster()
    monkeypatch.setattr("sparseflow.tuning.measure.cluster.map_unordered", found)
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path))
    return found


def explored(**options: Any):
    matrix = np.eye(9, dtype=np.float32)
    return explore("spmv", matrix, threads=1, method="random", cluster="10.0.0.1:6379", **options)


def test_a_cluster_measures_what_is_proposed(cluster: Cluster) -> None:
    tuned = explored(trials=LOT + 3, machines=2)
    assert cluster.lots == [3, LOT], "two machines are kept busy"
    assert cluster.options == {"cluster": "10.0.0.1:6379", "cpus_per_task": 1.0}
    asked = [trial.schedule for trial in tuned.trials]
    assert len(asked) == len(set(asked)) == len(tuned.baselines) - 1 + LOT + 3
    assert all(trial.error is None for trial in tuned.trials)


def test_machines_of_another_kind_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["ours", "another"])
    monkeypatch.setattr("sparseflow.tuning.measure.cluster.describe_cpu", lambda: next(told))
    with pytest.raises(DeviceError, match=r"another processor \(another\) than this one \(ours\)"):
        explored(trials=2, machines=1)
