"""A predictor: everything that was learned of one device, in one file.

::

    predictor.json    format, version, fingerprint, regressor, known kernels, composition, how load shares the
                      device, intervals, and how good all of that was on what was held out

Only JSON is read, and of XGBoost only its JSON. A predictor of another format, version or device is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.compose import QUEUE, Composition
from sparseflow.latency.fingerprint import Fingerprint
from sparseflow.latency.graph import Graph
from sparseflow.latency.issue import Issue
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.model import LEARNED, ROOFLINE, KernelModel
from sparseflow.latency.runner import quantile
from sparseflow.latency.sharing import Sharing

FORMAT, VERSION = "sparseflow.latency.predictor", 2

CALM = 1.03
"""Up to this slowdown the interval is that of models at rest."""


@dataclass(frozen=True, kw_only=True)
class KernelPrediction:
    """What one kernel is expected to take inside the graph, each time it runs.

    Attributes:
        kernel_id: Its id.
        op: Its canonical name.
        count: Nodes that run it and whose time counts.
        rest_ms: Mean latency at rest, milliseconds.
        mean_ms: Mean latency beside the load, milliseconds.
        low_ms: Lower end of its interval at rest, milliseconds.
        high_ms: Upper end of it.
        source: `"measured"`, `"learned"` or `"roofline"`.
    """

    kernel_id: str
    op: str
    count: int
    rest_ms: float
    mean_ms: float
    low_ms: float
    high_ms: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model is expected to take.

    Attributes:
        mean_ms: Mean latency, milliseconds.
        p50_ms: Median of runs.
        p95_ms: 95th percentile of runs.
        interval: Ends of the interval around `mean_ms`, milliseconds.
        interval_coverage: Share of such intervals that should hold what is measured.
        coverage: Share of `mean_ms` from kernels whose operator was measured; below 1 the rest is roofline.
        rest_ms: Mean latency without load.
        slowdown: `mean_ms` over `rest_ms`.
        load: Metric -> share that was reckoned with; empty for a device at rest.
        mode: `"sum"`, `"critical_path"` or `"queue"`.
        call_ms: Part of `rest_ms` that belongs to no kernel.
        per_kernel: One entry a kernel, the costliest first.
    """

    mean_ms: float
    p50_ms: float
    p95_ms: float
    interval: tuple[float, float]
    interval_coverage: float
    coverage: float
    rest_ms: float
    slowdown: float
    load: Mapping[str, float]
    mode: str
    call_ms: float
    per_kernel: tuple[KernelPrediction, ...]

    def to_dict(self) -> dict[str, Any]:
        """The prediction in JSON's types."""
        return {**asdict(self), "interval": list(self.interval), "load": dict(self.load)}


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """What was learned of one device. `train.train` makes one.

    Attributes:
        fingerprint: The device and what ran there.
        model: The regressor of kernels.
        known_ms: Kernel's id -> latency at rest that was measured, milliseconds.
        composition: From kernels to a graph.
        issue: What the host takes for a kernel; None where host and device are one.
        sharing: What load does.
        kernel_interval: Around a kernel that was learned.
        rest_interval: Around a model at rest.
        loaded_interval: Around a model beside a load.
        quality: How good it was on what was held out, in JSON's types.
    """

    fingerprint: Fingerprint
    model: KernelModel
    known_ms: Mapping[str, float]
    composition: Composition
    issue: Issue | None
    sharing: Sharing
    kernel_interval: ConformalInterval
    rest_interval: ConformalInterval
    loaded_interval: ConformalInterval
    quality: Mapping[str, Any]

    def kernels_ms(self, kernels: Mapping[str, Kernel]) -> dict[str, tuple[float, float, float, str]]:
        """Kernel's id -> (latency alone at rest, lower end, upper end, source), milliseconds."""
        found: dict[str, tuple[float, float, float, str]] = {}
        for name, (ms, source) in self.model.alone(kernels, self.known_ms).items():
            low, high = ms, ms
            if source == LEARNED:
                low, high = self.kernel_interval.bounds(ms)
            elif source == ROOFLINE:
                _, low, high = self.model.roofline.guess_ms(kernels[name])
            found[name] = (ms, low, high, source)
        return found

    def predict(self, graph: Graph, load: Mapping[str, float] | None = None, *, seed: int = 0) -> Prediction:
        """What a graph takes beside a load.

        Args:
            graph: As onnxruntime runs it on this device.
            load: Metric -> share; None for a device at rest.
            seed: What runs are drawn from.

        Raises:
            DeviceError: The load lacks the metric that is reckoned with.
        """
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        alone = self.kernels_ms(kernels)
        composed = self.composition.compose(
            graph,
            {name: each[0] for name, each in alone.items()},
            None if self.issue is None else self.issue.ms(graph.kernels),
        )
        parts, rest = composed.parts, composed.total_ms
        delays = {
            name: self.sharing.delay_ms(part.ms, self.model.roofline.waits(kernels[name], alone[name][0]))
            for name, part in parts.items()
        }
        waited = sum(part.count * delays[name] for name, part in parts.items())
        delay = waited + self.sharing.delay_ms(composed.call_ms, (0.0, 0.0, 1.0))
        level = self.sharing.load_of(load) if load is not None else 0.0
        mean = self.sharing.mean_ms(rest, delay, level)
        # What the load adds is spread over the kernels by what each is kept waiting.
        added = {
            name: (mean - rest) * (delays[name] / waited if waited else part.ms / (rest - composed.call_ms))
            for name, part in parts.items()
        }
        scales = {
            name: (low / ms, high / ms) if ms else (1.0, 1.0) for name, (ms, low, high, _) in alone.items()
        }
        each = tuple(
            KernelPrediction(
                kernel_id=name,
                op=kernels[name].op,
                count=part.count,
                rest_ms=part.ms,
                mean_ms=part.ms + added[name],
                low_ms=part.ms * scales[name][0],
                high_ms=part.ms * scales[name][1],
                source=alone[name][3],
            )
            for name, part in parts.items()
        )
        runs = [float(run) for run in self.sharing.runs(rest, delay, level, seed=seed)]
        interval = self.rest_interval if mean <= CALM * rest else self.loaded_interval
        guessed = [k for k in each if k.source == ROOFLINE]
        told = mean - sum(k.count * k.mean_ms for k in guessed)
        return Prediction(
            mean_ms=mean,
            p50_ms=quantile(runs, 0.5),
            p95_ms=quantile(runs, 0.95),
            interval=(
                told * interval.low + sum(k.count * k.low_ms * k.mean_ms / k.rest_ms for k in guessed),
                told * interval.high + sum(k.count * k.high_ms * k.mean_ms / k.rest_ms for k in guessed),
            ),
            interval_coverage=interval.coverage,
            coverage=told / mean,
            rest_ms=rest,
            slowdown=mean / rest,
            load=dict(load or {}),
            mode=self.composition.mode,
            call_ms=composed.call_ms,
            per_kernel=tuple(sorted(each, key=lambda k: -k.count * k.mean_ms)),
        )

    def save(self, path: Path | str) -> Path:
        """Write the predictor to a file; gives its path."""
        record = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint.to_dict(),
            "model": self.model.to_dict(),
            "known_ms": dict(self.known_ms),
            "composition": self.composition.to_dict(),
            "issue": None if self.issue is None else self.issue.to_dict(),
            "sharing": self.sharing.to_dict(),
            "kernel_interval": self.kernel_interval.to_dict(),
            "rest_interval": self.rest_interval.to_dict(),
            "loaded_interval": self.loaded_interval.to_dict(),
            "quality": dict(self.quality),
        }
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        return file

    @classmethod
    def load(cls, path: Path | str) -> Predictor:
        """Read a predictor.

        Raises:
            InputError: There is no such file.
            FileFormatError: It is no predictor, a damaged one, or of another version.
            MissingExtraError: XGBoost is missing.
        """
        file = Path(path)
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"{file} cannot be read ({error.strerror}); make a predictor with: sparseflow latency train"
            ) from error
        except ValueError as error:
            raise FileFormatError(f"{file} is no predictor: it is not JSON ({error})") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise FileFormatError(f"{file} is no predictor; make one with: sparseflow latency train")
        if record.get("version") != VERSION:
            raise FileFormatError(
                f"{file} is a predictor of version {record.get('version')}, and {VERSION} is read here; "
                f"train it again from its collections"
            )
        try:
            known = {str(name): float(ms) for name, ms in record["known_ms"].items()}
            if not all(math.isfinite(ms) and ms > 0.0 for ms in known.values()):
                raise ValueError("a latency that was measured must be above 0")
            found = cls(
                fingerprint=Fingerprint.from_dict(record["fingerprint"]),
                model=KernelModel.from_dict(record["model"]),
                known_ms=known,
                composition=Composition.from_dict(record["composition"]),
                issue=None if record["issue"] is None else Issue.from_dict(record["issue"]),
                sharing=Sharing.from_dict(record["sharing"]),
                kernel_interval=ConformalInterval.from_dict(record["kernel_interval"]),
                rest_interval=ConformalInterval.from_dict(record["rest_interval"]),
                loaded_interval=ConformalInterval.from_dict(record["loaded_interval"]),
                quality=dict(record["quality"]),
            )
            if found.composition.mode == QUEUE and found.issue is None:
                raise ValueError("a queue without what the host takes")
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"{file} is a damaged predictor: {error}") from error
