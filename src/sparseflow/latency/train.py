"""Training: a predictor from collections, and how good it is on what was held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparseflow.errors import InputError
from sparseflow.latency import validate
from sparseflow.latency.compose import MODES, QUEUE
from sparseflow.latency.dataset import Dataset, load
from sparseflow.latency.learn import UNJUDGED, learn
from sparseflow.latency.model import KINDS
from sparseflow.latency.predictor import Predictor

Progress = Callable[[str, float], None]

FEWEST_KERNELS = 10
"""Fewer say nothing about others."""


def train(
    collections: Iterable[Path | str],
    *,
    kind: str | None = None,
    mode: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """Learn from collections of one device.

    Its `quality` holds `kind` (the regressor chosen), `kernels` (regressor -> split -> scores; the splits are
    `by_kernel`, `by_network` and `leaky`), `models` (`rest`, `loaded` and `loaded_blind`: networks held out,
    the last without being told the load) and `counts`. Scores are `mape`, `within_10` and `count`.

    Args:
        collections: Folders that `latency collect` wrote.
        kind: Regressor to predict with, one of `model.KINDS`; by default the best on kernels held out.
        mode: `"sum"`, `"critical_path"` where `overlap` says so, or `"queue"`; by default the last where
            kernels were measured in a stream, else a sum.
        seed: What splits and trees are drawn from.
        progress: Called with (what is learned, fraction done).

    Raises:
        InputError: The collections are of several devices, or hold too little.
        FileFormatError: One of them is damaged.
        MissingExtraError: XGBoost or scipy is missing.
    """
    tell = progress or (lambda what, done: None)
    tell("reading the collections", 0.0)
    if kind is not None and kind not in KINDS:
        raise InputError(f"`kind` (={kind!r}) must be one of: {', '.join(KINDS)}")
    if mode is not None and mode not in MODES:
        raise InputError(f"`mode` (={mode!r}) must be one of: {', '.join(MODES)}")
    data = load(collections)
    if mode == QUEUE and not data.host_ms:
        raise InputError(
            "no kernel of the collections was measured in a stream, which a queue is made of: collect with "
            "`copies` on a GPU, or choose another mode"
        )
    if len(data.working_ids()) < FEWEST_KERNELS:
        raise InputError(
            f"the collections hold {len(data.working_ids())} kernels at rest, and at least {FEWEST_KERNELS} "
            f"are needed; list more under `kernels`"
        )
    kernels, judged = _judge_kernels(data, seed, lambda what, done: tell(what, 0.5 * done))
    chosen = kind or min(KINDS, key=lambda one: kernels[one]["by_kernel"]["mape"])
    models: dict[str, Any] = {}
    rest: list[validate.Judged] = []
    loaded: list[validate.Judged] = []
    if len(validate.networks(data)) > 1:
        held = validate.without_each(
            data, chosen, mode=mode, seed=seed, progress=lambda what, done: tell(what, 0.5 + 0.4 * done)
        )
        rest = validate.at_rest(data, held)
        if rest:
            models["rest"] = validate.scores(rest)
        loaded = validate.beside_loads(data, held)
        if loaded:
            models["loaded"] = validate.scores(loaded)
            models["loaded_blind"] = validate.scores(validate.beside_loads(data, held, blind=True))
    tell("learning from everything", 0.9)
    predictor = learn(data, chosen, mode=mode, seed=seed)
    tell("done", 1.0)
    return replace(
        predictor,
        kernel_interval=validate.interval(judged[chosen]),
        rest_interval=validate.interval(rest) if rest else UNJUDGED,
        loaded_interval=validate.interval(loaded or rest) if rest else UNJUDGED,
        quality={
            "kind": chosen,
            "kernels": kernels,
            "models": models,
            "counts": {
                "kernels": len(data.kernel_ids()),
                "models": len(data.models()),
                "networks": len(validate.networks(data)),
                "beside_loads": len(data.loaded),
                "failed": data.failed,
            },
        },
    )


def _judge_kernels(
    data: Dataset, seed: int, tell: Progress
) -> tuple[dict[str, Any], dict[str, list[validate.Judged]]]:
    """Kind of regressor -> split -> scores, and the predictions of the split by kernel."""
    splits = {"by_kernel": validate.kernels_by_kernel, "leaky": validate.kernels_leaky}
    if len(validate.networks(data)) > 1:
        splits["by_network"] = validate.kernels_by_network
    found: dict[str, Any] = {}
    judged: dict[str, list[validate.Judged]] = {}
    for kind in KINDS:
        found[kind] = {}
        for split, judge in splits.items():
            tell(f"{kind}: {split.replace('_', ' ')}", (len(found) - 1 + len(found[kind]) / 3) / len(KINDS))
            result = judge(data, kind, seed)
            if result:
                found[kind][split] = validate.scores(result)
            if split == "by_kernel":
                judged[kind] = result
    return found, judged
