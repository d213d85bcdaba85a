"""Search on a Ray cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import DeviceError
from sparseflow.tuning import TuningSession
from sparseflow.tuning.measure.evaluator import BATCH_SIZE


class Cluster:
    """Replacement of a cluster that runs the last batch first."""

    def __init__(self) -> None:
        self.lots: list[int] = []
        self.options: dict[str, Any] = {}

    def __call__(
        self, function: Callable[[Any], Any], items: Sequence[Any], **options: Any
    ) -> Iterator[tuple[int, Any]]:
        self.options = options
        for position in reversed(range(len(items))):
            sent = pickle.loads(pickle.dumps((function, items[position])))
            self.lots.append(len(sent[1].schedules))
            yield position, pickle.loads(pickle.dumps(sent[0](sent[1])))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    result = Cluster()
    monkeypatch.setattr("sparseflow.tuning.measure.evaluator.map_unordered", result)
    return result


def explored(**options: Any):
    matrix = np.eye(9, dtype=np.float32)
    return TuningSession("spmv", matrix, threads=1, method="random", cluster="10.0.0.1:6379", **options).run()


def test_cluster_measures_proposals(cluster: Cluster) -> None:
    tuned = explored(max_trials=BATCH_SIZE + 3, num_machines=2)
    assert cluster.lots == [3, BATCH_SIZE], "there is a batch for each machine"
    assert cluster.options == {"cluster": "10.0.0.1:6379", "cpus_per_task": 1.0}
    proposals = [trial.schedule for trial in tuned.trials]
    assert len(proposals) == len(set(proposals)) == len(tuned.baselines) - 1 + BATCH_SIZE + 3
    assert all(trial.error is None for trial in tuned.trials)


def test_cluster_other_processor_raises(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = iter(["ours", "another"])
    monkeypatch.setattr("sparseflow.tuning.measure.evaluator.describe_cpu", lambda: next(messages))
    with pytest.raises(DeviceError):
        explored(max_trials=2, num_machines=1)
