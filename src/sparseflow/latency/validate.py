"""How good a predictor is on what it has not seen: whole kernels, whole networks and whole levels held out.

Nothing that is judged was learned from: not the kernel's other measurements, and of a network neither a
measurement of any of its cases nor the kernels that only it has. `leaky` stands beside that to show what a
split by rows would pretend, where other measurements of the same kernel give the answer away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparseflow.core import metrics
from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.core.costmodel.splits import Fold, split_group_k_fold, split_k_fold, split_leave_one_group_out
from sparseflow.latency.dataset import Dataset, Loaded
from sparseflow.latency.learn import alone_ms, learn
from sparseflow.latency.model import KernelModel
from sparseflow.latency.predictor import Predictor

FOLDS = 5
_CASE = re.compile(r"_b\d+_\d+$")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One prediction of something held out.

    Attributes:
        name: The kernel's id or the model's name.
        predicted_ms: What was expected, milliseconds.
        measured_ms: What it took.
        level: Load beside it.
    """

    name: str
    predicted_ms: float
    measured_ms: float
    level: float = 0.0


def family(name: str) -> str:
    """The network that a zoo's model is a case of: `resnet18` of `resnet18_b16_224`."""
    return _CASE.sub("", name)


def networks(data: Dataset) -> list[str]:
    """Networks whose cases were measured, each once."""
    return list(dict.fromkeys(family(name) for name in data.models()))


def scores(judged: Sequence[Judged]) -> dict[str, float]:
    """`mape`, `within_10` and `count` of predictions."""
    predicted, measured = [j.predicted_ms for j in judged], [j.measured_ms for j in judged]
    return {
        "mape": metrics.mape(predicted, measured),
        "within_10": metrics.fraction_within(predicted, measured),
        "count": len(judged),
    }


def interval(judged: Sequence[Judged]) -> ConformalInterval:
    """The interval that these errors make."""
    return ConformalInterval.fit([j.predicted_ms for j in judged], [j.measured_ms for j in judged])


def coverage(judged: Sequence[Judged]) -> float:
    """Share within intervals that are made without the judged one's own network."""
    holds: list[bool] = []
    for _, (learned, held) in split_leave_one_group_out([family(j.name) for j in judged]):
        around = interval([judged[n] for n in learned]).bounds
        for one in (judged[n] for n in held):
            low, high = around(one.predicted_ms)
            holds.append(low <= one.measured_ms <= high)
    return sum(holds) / len(holds)


def kernels_by_kernel(data: Dataset, kind: str, seed: int = 0) -> list[Judged]:
    """Each kernel judged by a regressor that saw none of its measurements."""
    names = data.working_ids()
    return _cross(data, names, split_group_k_fold(names, min(FOLDS, len(names)), seed), kind, seed)


def kernels_by_network(data: Dataset, kind: str, seed: int = 0) -> list[Judged]:
    """Each network's own kernels judged by a regressor that saw none of them."""
    names = data.working_ids()
    judged: list[Judged] = []
    for network in networks(data):
        own = own_kernels(data, network)
        fold = (
            [n for n, name in enumerate(names) if name not in own],
            [n for n, name in enumerate(names) if name in own],
        )
        if fold[0] and fold[1]:
            judged += _cross(data, names, [fold], kind, seed)
    return judged


def kernels_leaky(data: Dataset, kind: str, seed: int = 0) -> list[Judged]:
    """Kernels judged by a regressor that saw other visits to them: what not to do."""
    visits = [(name, ms) for name in data.working_ids() for ms in data.visits_ms[name]]
    judged: list[Judged] = []
    for learned, held in split_k_fold(len(visits), FOLDS, seed):
        model = KernelModel.fit(
            [data.kernels[visits[n][0]] for n in learned], [visits[n][1] for n in learned], kind, seed=seed
        )
        found = alone_ms({visits[n][0]: data.kernels[visits[n][0]] for n in held}, {}, model)
        judged += [
            Judged(name=name, predicted_ms=ms, measured_ms=data.rest_ms[name]) for name, ms in found.items()
        ]
    return judged


def without_each(
    data: Dataset,
    kind: str,
    *,
    mode: str | None = None,
    strict: bool = False,
    levels: Sequence[float] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Predictor]:
    """Network -> a predictor that was learned without it; of those that leave kernels to learn from.

    Args:
        data: What was measured.
        kind: Regressor, one of `model.KINDS`.
        mode: How kernels compose; by default as `learn` has it.
        strict: Leave out also the kernels that other networks share with it.
        levels: Levels of load to learn from; by default all.
        seed: What trees draw from.
        progress: Called with (network, fraction done).
    """
    listed = networks(data)
    found: dict[str, Predictor] = {}
    for place, network in enumerate(listed):
        if progress is not None:
            progress(f"without {network}", place / len(listed))
        held = kernels_of(data, cases(data, network)) if strict else own_kernels(data, network)
        left = set(data.kernel_ids()) - held
        if not left.intersection(data.working_ids()):
            continue
        found[network] = learn(
            data,
            kind,
            kernels=left,
            models=set(data.models()) - set(cases(data, network)),
            levels=levels,
            mode=mode,
            seed=seed,
        )
    return found


def at_rest(data: Dataset, predictors: dict[str, Predictor]) -> list[Judged]:
    """Each model at rest, judged by the predictor that was learned without its network."""
    return [
        Judged(
            name=name,
            predicted_ms=predictors[family(name)].predict(data.graphs[name]).mean_ms,
            measured_ms=data.rest_ms[name],
        )
        for name in data.models()
        if family(name) in predictors
    ]


def beside_loads(data: Dataset, predictors: dict[str, Predictor], *, blind: bool = False) -> list[Judged]:
    """Each measurement of a model beside a load, judged likewise; `blind` leaves the load out."""
    return [
        Judged(
            name=one.item,
            predicted_ms=predictors[family(one.item)]
            .predict(data.graphs[one.item], None if blind else one.load)
            .mean_ms,
            measured_ms=one.slowdown * one.rest_ms,
            level=one.level,
        )
        for one in loaded_models(data)
        if family(one.item) in predictors
    ]


def loaded_models(data: Dataset) -> list[Loaded]:
    """Measurements of whole models beside loads."""
    return [one for one in data.loaded if one.model]


def cases(data: Dataset, network: str) -> list[str]:
    """Models that are cases of a network."""
    return [name for name in data.models() if family(name) == network]


def kernels_of(data: Dataset, models: Iterable[str]) -> set[str]:
    """Ids of the kernels that any of these models runs."""
    return {kernel.id for name in models for kernel in data.graphs[name].kernels}


def own_kernels(data: Dataset, network: str) -> set[str]:
    """Ids of the kernels that only cases of this network run."""
    own = cases(data, network)
    return kernels_of(data, own) - kernels_of(data, set(data.graphs) - set(own))


def _cross(data: Dataset, names: Sequence[str], folds: Iterable[Fold], kind: str, seed: int) -> list[Judged]:
    judged: list[Judged] = []
    for learned, held in folds:
        seen = [names[n] for n in learned]
        model = KernelModel.fit(
            [data.kernels[n] for n in seen], [data.rest_ms[n] for n in seen], kind, seed=seed
        )
        found: dict[str, Any] = alone_ms({names[n]: data.kernels[names[n]] for n in held}, {}, model)
        judged += [Judged(name=n, predicted_ms=ms, measured_ms=data.rest_ms[n]) for n, ms in found.items()]
    return judged
