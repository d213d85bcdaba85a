"""How long a request will take: its median, and what 99 in 100 stay below.

A request takes what it waited, its prefill, and a step for each token after the first. The prefill and a step
of each stretch (`stretches.py`) are tables (`table.py`) that were fitted to a profile; the margin between the
median and the 99th percentile is of whole requests (`margins.py`). As requests end, `observe` moves both
(`online.py`).

Why no boosted trees: with the same monotone constraints they err more on lengths and plans that were not
profiled, as `benchmarks/adaptive/predictor.py` shows, since a tree knows no straight line.

Nothing predicted falls when text, images, new tokens, blocks, top-k, the batch or the load grow. Loads beyond
the highest of the profile count as that one.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.adaptive.kernels import policy_inference
from sparseflow.adaptive.plan.space import PlanSpace, Tier
from sparseflow.adaptive.predictor.cache import CorrectionState, PlanLatencyCache
from sparseflow.adaptive.predictor.calibration import (
    FLOOR,
    FOLDS,
    Calibration,
    PhaseTables,
    calibrate,
    condensed,
    margin,
    rest_of,
    scatter,
)
from sparseflow.adaptive.predictor.features import (
    AFTERS,
    After,
    FeatureBuilder,
    LatencyQuery,
    PaddingBuckets,
    RequestFeatures,
    check_sizes,
    width,
)
from sparseflow.adaptive.predictor.online import WINDOW, ConformalMargin, DriftCorrection
from sparseflow.adaptive.predictor.table import LatencyTable, shares
from sparseflow.adaptive.profile.metadata import ProfileMetadata
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import torch

LEVEL = 0.99
"""Share of requests that shall take no longer than the higher prediction."""
Times = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Prefill, one step of the last stretch, and all steps together, at each load: each [n, L], milliseconds."""
_FORMAT = "sparseflow-adaptive-predictor-3"


class PlanLatencyPredictor:
    """Predicts latencies. Make one with `fit` or `load`; it may be used by several threads.

    Attributes:
        about: Of which model, and on which device.
        space: The plans that `predict_all` is about.
        level: Share of requests that shall take no longer than the higher prediction.
        held_out: How far off medians were for plans and lengths that a fit had not seen: mean of relative
            errors, a share.
        tiers: Those that were measured; what is predicted for others is a guess.
    """

    def __init__(
        self,
        *,
        about: ProfileMetadata,
        space: PlanSpace,
        tables: PhaseTables,
        spreads: np.ndarray,
        step_margins: np.ndarray,
        margins: Sequence[ConformalMargin],
        factors: tuple[DriftCorrection, DriftCorrection],
        level: float = LEVEL,
        held_out: float,
        tiers: Sequence[Tier],
    ) -> None:
        self.tiers = tuple(tiers)
        self.about, self.space, self.level, self.held_out = about, space, level, held_out
        self._tables, self._spreads, self._step_margins = tables, spreads, step_margins
        self._margins, self._factors = list(margins), factors
        self._loads = tables.prefill.loads
        filling, plans = PaddingBuckets.of(about.how), space.plans
        self._describe = FeatureBuilder(
            space.geometry, about.vision_tokens, plans, filling, len(tables.steps)
        )
        self._sheets = PlanLatencyCache(tables, space.geometry, plans, about.vision_tokens, filling)
        self._places = {plan: at for at, plan in enumerate(plans)}
        self._expected = policy_inference.kernels().expected
        self._lock = threading.Lock()
        self._now = self._settled()

    @property
    def loads(self) -> tuple[float, ...]:
        """Those that times are told at, ascending: those of the profile, and some between them."""
        return tuple(self._loads.tolist())

    @classmethod
    def fit(
        cls, profile: PlanProfile, space: PlanSpace | None = None, *, level: float = LEVEL, seed: int = 0
    ) -> PlanLatencyPredictor:
        """Learn from a profile.

        Args:
            profile: At least five plans or lengths.
            space: Plans to predict; by default those of the profile. Others of the same geometry will do.
            level: Share of requests that shall take no longer than the higher prediction.
            seed: What plans and lengths are held out is drawn from.

        Raises:
            InputError: The profile has too little, or is of another geometry.
            MissingExtraError: SciPy or Numba is missing.
        """
        space = space or profile.space
        if space.geometry != profile.space.geometry:
            raise InputError(f"`space` is of {space.geometry}, the profile of {profile.space.geometry}")
        return cls.of(calibrate(profile, folds=FOLDS, seed=seed), profile.about, space, level=level)

    @classmethod
    def of(
        cls, found: Calibration, about: ProfileMetadata, space: PlanSpace, *, level: float = LEVEL
    ) -> PlanLatencyPredictor:
        """From what a profile told; see `fit`.

        Raises:
            InputError: `level` is out of range.
        """
        if not 0.5 < level < 1.0:
            raise InputError(f"`level` (={level}) must lie between 0.5 and 1")
        predicted, measured = found.held_out.T
        return cls(
            about=about,
            space=space,
            tables=found.tables,
            spreads=found.spreads,
            step_margins=np.array([margin(scores, 1.0 - level) for scores in found.step_scores]),
            margins=[
                ConformalMargin(1.0 - level, _mixed(condensed(scores, WINDOW))) for scores in found.scores
            ],
            factors=(DriftCorrection(len(found.scores)), DriftCorrection(len(found.scores))),
            level=level,
            held_out=float(np.mean(np.abs(predicted / measured - 1.0))),
            tiers=found.tiers,
        )

    def check(self, model_id: str, device: torch.device | str) -> None:
        """That it was made for this model on this device.

        Raises:
            InputError: It was not.
        """
        self.about.check(model_id, device)

    def predict(self, asks: Sequence[LatencyQuery]) -> tuple[np.ndarray, np.ndarray]:
        """Median and higher prediction of each: milliseconds, float64 [n].

        Raises:
            PlanError: The model cannot run a plan.
            InputError: Nothing is asked, or images of a model that was profiled without.
        """
        requests = self._describe.of(asks)
        weights = shares(requests.load, self._loads)
        p50, p99 = self._predicted(self._times(requests), weights, self._now)
        return p50 + requests.queued_ms, p99 + requests.queued_ms

    def predict_all(
        self,
        *,
        text_tokens: int,
        images: float,
        new_tokens: int,
        batch: int = 1,
        load: float = 0.0,
        queued_ms: float = 0.0,
        after: After = "receipt",
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `predict`, for one request by every plan of the space, in its order.

        Arguments are those of `LatencyQuery`. Without images the tiers of plans do not matter.

        Raises:
            InputError: A figure is out of range.
        """
        check_sizes(text_tokens, images, new_tokens, batch, load, queued_ms)
        if after not in AFTERS:
            raise InputError(f"`after` (={after!r}) must be one of {', '.join(AFTERS)}")
        sheet = self._sheets.of((text_tokens, images, new_tokens, batch, after))
        low, way = self._sheets.between(load)
        now = self._now
        p50, p99 = self._expected(
            sheet.prefill, sheet.step, sheet.rest, now.prefill, now.step, now.margins, self._spreads, FLOOR,
            low, float(way), float(queued_ms),
        )  # fmt: skip
        return p50, p99

    def phases(self, asks: Sequence[LatencyQuery]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """As `predict`, for `"prefill"` and one `"decode"` step, as far on as any was measured; what was
        waited is not in it."""
        now, requests = self._now, self._describe.of(asks)
        prefill, step, _ = self._times(requests)
        none, weights = np.zeros_like(prefill), shares(requests.load, self._loads)
        found = {}
        for name, times, margins in (
            ("prefill", (prefill, none, none), now.margins),
            ("decode", (none, step, step), self._step_margins),
        ):  # fmt: skip
            found[name] = self._predicted(times, weights, replace(now, margins=margins))
        return found

    def observe(self, ask: LatencyQuery, measured_ms: float, *, prefill_ms: float | None = None) -> None:
        """Learn from a request that ended.

        Args:
            ask: What was asked of it, with what it really waited and how many tokens it really made; `after`
                is `"receipt"`.
            measured_ms: From receipt to the last token.
            prefill_ms: From the end of its wait to the first token, where that is known: the phases are then
                corrected each by its own error.

        Raises:
            InputError: A time is NaN, negative or contradicts another.
        """
        worked = measured_ms - ask.queued_ms
        if not (math.isfinite(measured_ms) and worked > 0.0):
            raise InputError(
                f"`measured_ms` (={measured_ms}) must be a finite time above the {ask.queued_ms} ms that the "
                "request waited"
            )
        if prefill_ms is not None and not 0.0 < prefill_ms <= worked:
            raise InputError(
                f"`prefill_ms` (={prefill_ms}) must be above 0 and at most {worked} ms, the whole request"
            )
        if ask.after != "receipt":
            raise InputError(f"`after` (={ask.after!r}) must be 'receipt': a measured request is a whole one")
        times, weights = self._times_of(ask), shares(np.array([ask.load]), self._loads)
        with self._lock:
            now = self._now
            (p50,), (p99,) = self._predicted(times, weights, now)
            (prefill, step, rest), (here,) = (weights[0] @ each[0] for each in times), weights
            factor = here @ now.step
            scale = scatter(
                here @ self._spreads, prefill * (here @ now.prefill), step * factor, rest * factor
            )
            nearest = int(here.argmax())
            self._margins[nearest].add(float((worked - p50) / scale), missed=worked > p99)
            for other in (*self._margins[:nearest], *self._margins[nearest + 1 :]):
                other.elsewhere()
            self._correct(here, float(prefill), float(rest), worked, prefill_ms)
            self._now = self._settled()

    def forget(self, share: float) -> None:
        """Go back towards what was known before any observation.

        For whoever refuses requests by these predictions and sees none end any more: nothing else would show
        that they have become too high.

        Args:
            share: Of what was learnt, from 0 to 1.

        Raises:
            InputError: It is out of range.
        """
        if not 0.0 <= share <= 1.0:
            raise InputError(f"`share` (={share}) must lie between 0 and 1")
        with self._lock:
            for each in (*self._margins, *self._factors):
                each.forget(share)
            self._now = self._settled()

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it, with what was learnt from observations."""
        with self._lock:
            return {
                "format": _FORMAT,
                "about": self.about.to_dict(),
                "space": self.space.to_dict(),
                "level": self.level,
                "tiers": list(self.tiers),
                "held_out": self.held_out,
                "prefill": self._tables.prefill.to_dict(),
                "steps": [table.to_dict() for table in self._tables.steps],
                "spreads": self._spreads.tolist(),
                "step_margins": self._step_margins.tolist(),
                "margins": [each.to_dict() for each in self._margins],
                "factors": [phase.to_dict() for phase in self._factors],
            }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PlanLatencyPredictor:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is something else, or a figure of it is NaN, negative or out of range.
        """
        if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
            raise FileFormatError(
                "this is no predictor of this version of SparseFlow; `sparseflow adaptive profile` into the "
                "same profile fits one again"
            )
        try:
            about, space = ProfileMetadata.from_dict(record["about"]), PlanSpace.from_dict(record["space"])
            columns, tiers, level = width(space.geometry), len(space.geometry.tiers), float(record["level"])
            prompts, *steps = (
                LatencyTable.from_dict(each, columns, tiers) for each in (record["prefill"], *record["steps"])
            )
            tables = PhaseTables(prefill=prompts, steps=tuple(steps))
            spreads = np.asarray(record["spreads"], dtype=np.float64)
            step_margins = np.asarray(record["step_margins"], dtype=np.float64)
            held_out = float(record["held_out"])
            measured: list[Tier] = [tier for tier in space.geometry.tiers if tier in record["tiers"]]
            margins = [ConformalMargin.from_dict(each, 1.0 - level) for each in record["margins"]]
            first, later = map(DriftCorrection.from_dict, record["factors"])
        except FileFormatError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"a predictor cannot be read: {error!r}") from error
        loads = tables.prefill.loads.tolist()
        parts = [len(spreads), len(step_margins), len(margins), len(first.values), len(later.values)]
        alike = all(each.loads.tolist() == loads for each in steps)
        if not (steps and alike) or set(parts) != {len(loads)} or spreads.shape[1:] != (4,):
            raise FileFormatError(
                f"a predictor has tables for {len(loads)} loads, and other parts for others"
            )
        figures = np.concatenate([spreads.ravel(), step_margins, [held_out]])
        if not (np.isfinite(figures).all() and (figures >= 0.0).all() and 0.5 < level < 1.0):
            raise FileFormatError("a predictor's figures must be finite and not negative")
        if space.geometry != about.space.geometry:
            raise FileFormatError("a predictor's plans are of another geometry than its model")
        return cls(
            about=about, space=space, tables=tables, spreads=spreads, step_margins=step_margins,
            margins=margins, factors=(first, later), level=level, held_out=held_out, tiers=measured,
        )  # fmt: skip

    def save(self, path: Path | str) -> None:
        """Write it as JSON, in place of what is there.

        Raises:
            OSError: The file cannot be written.
        """
        write_atomic(Path(path), json.dumps(self.to_dict(), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> PlanLatencyPredictor:
        """What `save` wrote.

        Raises:
            InputError: There is no such file.
            FileFormatError: It holds something else.
        """
        file = Path(path)
        if not file.is_file():
            raise InputError(f"there is no predictor {file}")
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FileFormatError(f"{file} is not JSON: {error}") from error
        return cls.from_dict(record)

    def _times(self, requests: RequestFeatures) -> Times:
        """By the tables."""
        prefill = self._tables.prefill.at(
            requests.prompt, requests.batch, requests.prefill_terms, requests.images, requests.tier
        )
        steps = [
            table.at(context, requests.batch, requests.step_terms, requests.images, requests.tier)
            for table, context in zip(self._tables.steps, requests.contexts, strict=True)
        ]
        return prefill, steps[-1], rest_of(steps, requests.steps[:, None])

    def _times_of(self, ask: LatencyQuery) -> Times:
        """The same of one, from a sheet where there may be one."""
        at = self._places.get(ask.plan)
        if at is None:
            return self._times(self._describe.of([ask]))
        sheet = self._sheets.of((ask.text_tokens, ask.images, ask.new_tokens, ask.batch, ask.after))
        return sheet.prefill[None, :, at], sheet.step[None, :, at], sheet.rest[None, :, at]

    def _predicted(
        self, times: Times, weights: np.ndarray, now: CorrectionState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Median and higher prediction, [n], at loads that lie between those of the tables by `weights`,
        [n, L]; more load is never less."""
        prefill, step, rest = times[0] * now.prefill, times[1] * now.step, times[2] * now.step
        middle = prefill + rest
        high = middle + now.margins * scatter(self._spreads, prefill, step, rest)
        middle, high = np.maximum.accumulate(middle, axis=1), np.maximum.accumulate(high, axis=1)
        return (middle * weights).sum(axis=1), (high * weights).sum(axis=1)

    def _correct(
        self, weights: np.ndarray, prefill: float, rest: float, worked: float, prefill_ms: float | None
    ) -> None:
        """Move the factors by what the tables were off; `weights` says at which loads, [L]."""
        first, later = self._factors
        if prefill_ms is None:
            # Nobody knows which phase it was: each is told in the share of it.
            whole = prefill + rest
            first.add(worked / whole, weights * (prefill / whole))
            if rest:
                later.add(worked / whole, weights * (rest / whole))
            return
        first.add(prefill_ms / prefill, weights)
        if rest and worked > prefill_ms:
            later.add((worked - prefill_ms) / rest, weights)

    def _settled(self) -> CorrectionState:
        first, later = self._factors
        margins = np.array([each.value for each in self._margins])
        return CorrectionState(prefill=first.values, step=later.values, margins=margins)


def _mixed(ordered: np.ndarray) -> np.ndarray:
    """In an order that tells nothing, lest the first to be replaced be the lowest."""
    return np.random.default_rng(0).permutation(ordered)
