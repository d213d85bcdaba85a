"""Checks of predicted latencies for continuous integration: budgets, regressions and guesses.

A baseline file contains the latencies of an earlier check. Latencies of different predictors differ although
the models do not, so a baseline is valid for one predictor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveFloat

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_one_of
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, RunError
from sparseflow.latency.api import predict
from sparseflow.latency.graph import onnx_file
from sparseflow.latency.graph.analysis import GRAPH_FILE
from sparseflow.latency.graph.dimensions import is_size, list_names, select_for_model
from sparseflow.latency.graph.inputs import list_extents
from sparseflow.latency.measure.plan import list_models
from sparseflow.latency.model.kernel_estimates import COMPOSED
from sparseflow.latency.model.kernel_regressor import ROOFLINE
from sparseflow.latency.model.predictor import Prediction, Predictor

PASSED, FAILED, ERROR = "passed", "failed", "error"
"""Status of a model: within all limits, beyond one, or without a prediction."""

STATISTICS: Mapping[str, str] = {
    "mean": "the mean latency",
    "p95": "the 95th percentile",
    "high": "the high end of the interval",
}
"""Latency that a budget limits -> its description."""

MAX_REGRESSION = 0.05
"""Default increase over a baseline that is no regression."""


class LatencyBaseline(Artifact):
    """Predicted latencies of an earlier check.

    Attributes:
        predictor_sha256: Digest of the predictor.
        mean_ms: Case, see `ModelCheck.name` -> mean latency.
    """

    FORMAT: ClassVar[str] = "sparseflow.latency.baseline"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "write one with `sparseflow latency check --update-baseline`"

    predictor_sha256: str
    mean_ms: Mapping[str, PositiveFloat]


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """Result for one model.

    Attributes:
        name: Path of the model, with the requested shapes, values and load.
        prediction: The prediction; None if there is none.
        baseline_ms: Mean latency in the baseline; None without one.
        problems: One sentence for each limit that is exceeded, or why there is no prediction.
    """

    name: str
    prediction: Prediction | None
    baseline_ms: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """`"passed"`, `"failed"` or `"error"`."""
        if self.prediction is None:
            return ERROR
        return FAILED if self.problems else PASSED

    @property
    def change(self) -> float | None:
        """Relative change of the mean since the baseline; None without one."""
        if self.prediction is None or self.baseline_ms is None:
            return None
        return self.prediction.mean_ms / self.baseline_ms - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        fields = ("mean_ms", "p50_ms", "p95_ms", "interval", "coverage")
        prediction = {} if self.prediction is None else self.prediction.to_dict()
        return {
            "name": self.name,
            "status": self.status,
            **{name: prediction.get(name) for name in fields},
            "baseline_ms": self.baseline_ms,
            "change": self.change,
            "problems": list(self.problems),
        }


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Results for all models.

    Attributes:
        models: One result for each model, in the order of the arguments.
        predictor_sha256: Digest of the predictor.
    """

    models: tuple[ModelCheck, ...]
    predictor_sha256: str

    @property
    def counts(self) -> dict[str, int]:
        """Status -> number of models."""
        counts = Counter(model.status for model in self.models)
        return {status: counts[status] for status in (PASSED, FAILED, ERROR)}

    def make_baseline(self, previous: LatencyBaseline | None = None) -> LatencyBaseline:
        """Return a baseline of these latencies, and of the other models of `previous` by this predictor."""
        mean_ms = {} if previous is None else dict(previous.mean_ms)
        if previous is not None and previous.predictor_sha256 != self.predictor_sha256:
            mean_ms = {}
        mean_ms |= {m.name: m.prediction.mean_ms for m in self.models if m.prediction is not None}
        return LatencyBaseline(predictor_sha256=self.predictor_sha256, mean_ms=dict(sorted(mean_ms.items())))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {"counts": self.counts, "models": [model.to_dict() for model in self.models]}


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Limits of `check_models`; None is unlimited."""

    budget_ms: float | None
    statistic: str
    max_guess: float | None
    baseline: LatencyBaseline | None
    max_regression: float

    def list_problems(self, name: str, prediction: Prediction) -> Iterator[str]:
        """Yield one sentence for each limit that a prediction exceeds."""
        value_ms = {
            "mean": prediction.mean_ms, "p95": prediction.p95_ms, "high": prediction.interval[1]
        }[self.statistic]  # fmt: skip
        if self.budget_ms is not None and value_ms > self.budget_ms:
            text = "unbounded," if math.isinf(value_ms) else f"{value_ms:.3f} ms,"
            yield f"{STATISTICS[self.statistic]}, {text} exceeds the budget of {self.budget_ms:g} ms"
        guess_share = 1.0 - prediction.coverage
        if self.max_guess is not None and guess_share > self.max_guess:
            names = ", ".join(
                sorted({k.op for k in prediction.per_kernel if k.source in (ROOFLINE, COMPOSED)})
            )
            yield (
                f"{100 * guess_share:.0f} % of the latency is a guess, at most {100 * self.max_guess:g} % is "
                f"allowed: the training did not measure {names}"
            )
        if self.max_guess is not None and math.isinf(prediction.interval[1]):
            yield "nothing bounds the latency: the work of an operator is unknown"
        if self.baseline is not None:
            yield from self._find_regression(name, prediction.mean_ms, self.baseline.mean_ms.get(name))

    def _find_regression(self, name: str, mean_ms: float, baseline_ms: float | None) -> Iterator[str]:
        if baseline_ms is None:
            yield f"the baseline does not contain {name}; add it with --update-baseline"
        elif mean_ms > baseline_ms * (1.0 + self.max_regression):
            yield (
                f"the mean latency, {mean_ms:.3f} ms, is {100 * (mean_ms / baseline_ms - 1.0):.1f} % above "
                f"the baseline of {baseline_ms:.3f} ms; at most {100 * self.max_regression:g} % is allowed"
            )


def check_models(
    models: Sequence[Path | str],
    predictor: Predictor | Path | str,
    *,
    budget_ms: float | None = None,
    statistic: str = "mean",
    max_guess: float | None = None,
    baseline: LatencyBaseline | None = None,
    max_regression: float = MAX_REGRESSION,
    load: float | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    gpu: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> CheckResult:
    """Compare the predicted latencies of models with limits, without running them.

    A model that cannot be predicted has the status `"error"` and does not stop the others.

    Args:
        models: ONNX files, directories of them, or directories of analyzed models.
        predictor: A predictor or its file, of this device.
        budget_ms: Maximum latency of each model, milliseconds.
        statistic: Latency that the budget limits, one of `STATISTICS`: the mean, the 95th percentile of runs,
            or the high end of the interval.
        max_guess: Maximum share of the mean from operators that were not measured, in [0, 1]; the interval
            must then also have a high end.
        baseline: Latencies of an earlier check by the same predictor.
        max_regression: Maximum relative increase of the mean over the baseline.
        load: Share of the device that other work uses; None for an idle device.
        shapes: Input -> shape, or open dimension -> its extent as a shape of one entry, for each model that
            has it, or MODEL:NAME -> shape for one of them.
        inputs: Likewise, input -> value: a number, a list or the path of a `.npy` file.
        gpu: Index of the GPU.
        seed: Random seed of the quantiles.
        progress: Receives each model and the fraction done.

    Raises:
        InputError: A directory has no model, no model has an input of `shapes` or `inputs`, the predictor is
            of another device or another one than that of the baseline, or was trained on idle measurements
            only.
        FileFormatError: The predictor is invalid.
        DeviceError: The device is not available.
    """
    check_one_of(STATISTICS, statistic=statistic)
    fitted = predictor if isinstance(predictor, Predictor) else Predictor.load(predictor)
    fitted.fingerprint.check_local_device(gpu)
    if load is not None:
        fitted.contention.check_fitted()
    digest = hashlib.sha256(json.dumps(fitted.to_dict(), sort_keys=True).encode()).hexdigest()
    if baseline is not None and baseline.predictor_sha256 != digest:
        raise InputError(
            "the baseline was written with another predictor, whose latencies are not comparable; write a "
            "new one with --update-baseline"
        )
    limits = _Limits(
        budget_ms=budget_ms,
        statistic=statistic,
        max_guess=max_guess,
        baseline=baseline,
        max_regression=max_regression,
    )
    cases = _select_entries(list(_iter_models(models)), shapes or {}, inputs or {})
    results = []
    for index, (path, model_shapes, values) in enumerate(cases):
        if progress is not None:
            progress(path.name, index / len(cases))
        name = _format_name(path, model_shapes | values, load)
        baseline_ms = None if baseline is None else baseline.mean_ms.get(name)
        try:
            prediction = predict(
                path,
                fitted,
                load=None if load is None else {fitted.contention.metric: load},
                shapes=model_shapes,
                inputs=values,
                gpu=gpu,
                seed=seed,
            )
            problems = tuple(limits.list_problems(name, prediction))
        except (InputError, RunError) as error:
            prediction, problems = None, (str(error),)
        results.append(
            ModelCheck(name=name, prediction=prediction, baseline_ms=baseline_ms, problems=problems)
        )
    return CheckResult(models=tuple(results), predictor_sha256=digest)


def _iter_models(paths: Sequence[Path | str]) -> Iterator[Path]:
    """Yield ONNX files and directories of analyzed models."""
    for value in paths:
        path = onnx_file.check_path(value)
        if not path.is_dir() or (path / GRAPH_FILE).is_file():
            yield path
            continue
        files = list_models([path])
        if not files:
            raise InputError(f"{path} contains no .onnx file")
        yield from files


def _select_entries(
    paths: Sequence[Path], shapes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Any]
) -> list[tuple[Path, dict[str, tuple[int, ...]], dict[str, Any]]]:
    """Return each path with the shapes of its inputs and dimensions, and the values of its inputs.

    A model that cannot be read gets all of them; its prediction reports the error.
    """
    cases, used = [], set[str]()
    for path in paths:
        model = path.stem
        names = list_names([*shapes, *inputs], model)
        if names and path.is_file():
            with suppress(InputError):
                extents = list_extents(onnx_file.load_model(path))
                names = [name for name in names if is_size(name, extents)]
        used |= {*names, *(f"{model}:{name}" for name in names)}
        cases.append((path, select_for_model(shapes, model, names), select_for_model(inputs, model, names)))
    unknown = sorted({*shapes, *inputs} - used)
    if unknown:
        raise InputError(
            f"no model has an input or open dimension {', '.join(unknown)}; correct `--shape` or `--input`"
        )
    return cases


def _format_name(path: Path, entries: Mapping[str, Any], load: float | None) -> str:
    parts = [path.as_posix(), *(f"{name}={_format_entry(entry)}" for name, entry in sorted(entries.items()))]
    return " ".join(parts if load is None else [*parts, f"load={load:g}"])


def _format_entry(entry: Any) -> str:
    return str(entry) if isinstance(entry, str | int | float) else ",".join(map(str, entry))
