"""Learning every part of a predictor from what was measured, or from some of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.errors import InputError
from sparseflow.latency.compose import QUEUE, Composition
from sparseflow.latency.dataset import Dataset, Loaded
from sparseflow.latency.graph import Graph
from sparseflow.latency.issue import Issue
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.model import RATIO, KernelModel
from sparseflow.latency.overlap import SUM
from sparseflow.latency.predictor import Predictor
from sparseflow.latency.sharing import PRINCIPAL, Observed, Sharing

UNJUDGED = ConformalInterval(low=0.5, high=2.0, coverage=0.9, samples=0)
"""The interval of a predictor that nothing was held out for."""


def learn(
    data: Dataset,
    kind: str = RATIO,
    *,
    kernels: Collection[str] | None = None,
    models: Collection[str] | None = None,
    levels: Collection[float] | None = None,
    mode: str | None = None,
    seed: int = 0,
) -> Predictor:
    """A predictor, its intervals not yet judged.

    Args:
        data: What was measured.
        kind: Regressor, one of `model.KINDS`.
        kernels: Ids to learn from; by default all.
        models: Names of models to learn from; by default all.
        levels: Levels of load to learn from; by default all.
        mode: How kernels compose, one of `compose.MODES`; by default a queue where kernels were measured in
            a stream, else a sum.
        seed: What trees draw from.

    Raises:
        InputError: There is nothing to learn from.
        MissingExtraError: XGBoost or scipy is missing.
    """
    names = [n for n in data.working_ids() if kernels is None or n in kernels]
    nets = [n for n in data.models() if models is None or n in models]
    known = {name: data.rest_ms[name] for name in names}
    model = KernelModel.fit(
        [data.kernels[n] for n in names], list(known.values()), kind, nothing=data.nothing, seed=seed
    )
    issued = [n for n in data.host_ms if kernels is None or n in kernels]
    issue = None
    if issued:
        issue = Issue.fit([data.kernels[n] for n in issued], [data.host_ms[n] for n in issued], seed=seed)
    graphs = [data.graphs[name] for name in nets]
    needed = {kernel.id: kernel for graph in graphs for kernel in graph.kernels}
    composition = Composition.fit(
        graphs,
        alone_ms(needed, known, model),
        [data.rest_ms[name] for name in nets],
        mode or usual_mode(data),
        None if issue is None else issue.ms(needed.values()),
    )
    chosen = {*names, *nets}
    rows = [one for one in data.loaded if one.item in chosen and (levels is None or one.level in levels)]
    return Predictor(
        fingerprint=data.fingerprint,
        model=model,
        known_ms=known,
        composition=composition,
        issue=issue,
        sharing=_fit_sharing(data, rows, nets, model, known, composition, issue, seed),
        kernel_interval=UNJUDGED,
        rest_interval=UNJUDGED,
        loaded_interval=UNJUDGED,
        quality={},
    )


def usual_mode(data: Dataset) -> str:
    """How kernels compose by what was measured of them: a queue of host and device, or a sum."""
    return QUEUE if data.host_ms else SUM


def alone_ms(
    needed: Mapping[str, Kernel], known_ms: Mapping[str, float], model: KernelModel
) -> dict[str, float]:
    """Kernel's id -> latency alone at rest, milliseconds: measured, learned or by roofline."""
    return {name: ms for name, (ms, _) in model.alone(needed, known_ms).items()}


def _fit_sharing(
    data: Dataset,
    rows: list[Loaded],
    models: list[str],
    model: KernelModel,
    known_ms: Mapping[str, float],
    composition: Composition,
    issue: Issue | None,
    seed: int,
) -> Sharing:
    metric = PRINCIPAL[data.fingerprint.kind]
    blind = [one for one in rows if metric not in one.load]
    if blind:
        raise InputError(
            f"{len(blind)} of {len(rows)} measurements beside loads lack the reading `{metric}`, which tells "
            f"how busy the device was: collect with a `telemetry` that tells it"
        )
    waits = {
        one.item: _model_waits(data.graphs[one.item], model, known_ms, composition, issue)
        if one.model
        else model.roofline.waits(data.kernels[one.item], one.rest_ms)
        for one in {one.item: one for one in rows}.values()
    }
    observed = [
        Observed(
            rest_ms=one.rest_ms,
            waits=waits[one.item],
            load=one.load[metric],
            alone=one.alone,
            mean_ms=one.slowdown * one.rest_ms,
            ratios=one.ratios,
            whole=one.model,
        )
        for one in rows
    ]
    jitter = [ratio for name in models for ratio in data.jitter[name]]
    return Sharing.fit(observed, metric, data.calm.get(metric, 0.0), jitter, seed=seed)


def _model_waits(
    graph: Graph,
    model: KernelModel,
    known_ms: Mapping[str, float],
    composition: Composition,
    issue: Issue | None,
) -> tuple[float, ...]:
    """What a model waits for: its kernels' waits, weighted by what they add to it; a call is a launch."""
    kernels = {kernel.id: kernel for kernel in graph.kernels}
    alone = alone_ms(kernels, known_ms, model)
    composed = composition.compose(graph, alone, None if issue is None else issue.ms(kernels.values()))
    totals = [0.0, 0.0, composed.call_ms]
    for name, part in composed.parts.items():
        waits = model.roofline.waits(kernels[name], alone[name])
        totals = [t + part.count * part.ms * w for t, w in zip(totals, waits, strict=True)]
    whole = sum(totals)
    return tuple(t / whole for t in totals) if whole else (0.0, 0.0, 1.0)
