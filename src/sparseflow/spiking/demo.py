"""The main job, shown on real input: the shipped network, dense at its strongest against optimised.

Everything is measured on this machine in this process: accuracy and predictions on all shipped images, then
the time of one batch, dense and optimised in turn, every round on the same images. The result is kept as a
run (`run.json`, `samples.parquet`) with a page to look at (`report.html`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.core import timing
from sparseflow.core.report import (
    Column,
    Headline,
    Report,
    Section,
    Table,
    plot_before_after,
    plot_intervals,
    plot_samples,
)
from sparseflow.core.run import Run
from sparseflow.errors import InputError
from sparseflow.spiking.api import optimize
from sparseflow.spiking.explanation import Explanation, explain
from sparseflow.spiking.graph import analyze
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.profile.baselines import Forward, dense_forms, from_rest
from sparseflow.spiking.profile.bench import OPTIMISED, in_turn, warmed

MAX_BATCH_SIZE = 256

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the demo that is over."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo found.

    Attributes:
        speedup: Strongest dense form's time over the optimised network's: median of the paired ratios, with
            its 95 % interval.
        baseline: Name of that strongest dense form.
        ms: Median milliseconds a batch, by form.
        predictions_identical: On every shipped image, before and after.
        accuracy_before, accuracy_after: Fraction right on the shipped images.
        batch, images, threads: Images a batch, images in all, CPU threads used.
        explanation: What was done to each layer.
        report: The page.
    """

    speedup: timing.Interval
    baseline: str
    ms: dict[str, float]
    predictions_identical: bool
    accuracy_before: float
    accuracy_after: float
    batch: int
    images: int
    threads: int
    explanation: Explanation
    run: Path
    report: Path

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "speedup": self.speedup.median,
            "speedup_interval": [self.speedup.low, self.speedup.high],
            "baseline": self.baseline,
            "latency_ms": self.ms,
            "predictions_identical": self.predictions_identical,
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "batch": self.batch,
            "images": self.images,
            "threads": self.threads,
            "layers": self.explanation.to_dict()["layers"],
            "run": str(self.run),
            "report": str(self.report),
        }


def run_demo(
    *,
    out: Path = Path("runs"),
    network: str = pretrained.DEFAULT,
    batch: int = 32,
    rounds: int = 16,
    compiled: bool = True,
    cache: bool = True,
    progress: Progress = lambda what, fraction: None,
) -> DemoResult:
    """Load the shipped network and images, measure, optimise, measure again, and write the run.

    Args:
        out: Folder that gets the run's own folder.
        network: Which shipped network.
        batch: Images a batch.
        rounds: Paired timing rounds.
        compiled: Let the dense side use `torch.compile` too.
        cache: Remember the optimiser's decisions on disk.
        progress: Told what is being done.

    Raises:
        InputError: `batch` is out of range.
        MissingExtraError: A package of the `spiking` extra is missing.
    """
    if not 1 <= batch <= MAX_BATCH_SIZE:
        raise InputError(f"`batch` (={batch}) must be in [1, {MAX_BATCH_SIZE}]")
    settings = {"network": network, "batch": batch, "rounds": rounds, "compiled": compiled}
    with Run.start(out, "sparseflow demo", settings, seed=0) as run:
        progress("loading the network and the images", 0.0)
        model = pretrained.load(network)
        pixels, labels_array = pretrained.images()
        images, labels = pretrained.normalize(pixels, network), torch.from_numpy(labels_array)
        parts = images.split(batch)
        # Predictions count on every image; only whole batches are timed.
        batches = [b for b in parts if len(b) == batch] or [images]

        progress("accuracy of the network as it is", 0.03)
        before = _predictions(from_rest(model), parts)
        graph = analyze(model)
        forms = dense_forms(copy.deepcopy(model), graph, batches[0], compiled=compiled)
        forms = warmed(
            forms, batches[0], lambda name, part: progress(f"preparing dense: {name}", 0.08 + 0.32 * part)
        )

        progress("measuring each layer", 0.40)
        optimize(
            model,
            batches[0],
            cache=cache,
            progress=lambda what, done, total: progress(
                f"measuring {what}", 0.40 + 0.25 * done / max(total, 1)
            ),
        )
        optimised = from_rest(model)
        after = _predictions(optimised, parts)
        progress("dense and optimised in turn", 0.68)
        comparison = in_turn({**forms, OPTIMISED: optimised}, batches, rounds)
        run.extend(comparison.to_rows(batch=batch))  # type: ignore[arg-type]
        baseline = min(forms, key=lambda name: comparison.samples(name).median_ms)
        result = DemoResult(
            speedup=comparison.speedup(OPTIMISED, baseline=baseline),
            baseline=baseline,
            ms={name: comparison.samples(name).median_ms for name in (*forms, OPTIMISED)},
            predictions_identical=bool((before == after).all()),
            accuracy_before=(before == labels).float().mean().item(),
            accuracy_after=(after == labels).float().mean().item(),
            batch=len(batches[0]),
            images=len(before),
            threads=torch.get_num_threads(),
            explanation=explain(model),
            run=run.path,
            report=run.path / "report.html",
        )
        progress("writing the report", 0.97)
        run.update_results(**{k: v for k, v in result.to_dict().items() if k not in ("run", "report")})
        demo_page(result, comparison, run, pretrained.card(network))
    progress("done", 1.0)
    return result


def _predictions(forward: Forward, batches: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([forward(b).argmax(dim=-1) for b in batches])


_LAYER_COLUMNS = (
    Column(key="name", title="layer"),
    Column(key="fed_by", title="fed by"),
    Column(key="firing", title="firing rate, %", digits=2),
    Column(key="blocks", title="zero blocks, %", digits=1),
    Column(key="backend", title="backend"),
    Column(key="before", title="ms before", digits=3),
    Column(key="after", title="ms after", digits=3),
    Column(key="why", title="why"),
)


def demo_page(result: DemoResult, comparison: timing.Comparison, run: Run, card: dict[str, Any]) -> None:
    """Write the demo's page to `result.report`."""
    layers = result.explanation.layers
    rows = [
        {
            "name": layer.name,
            "fed_by": ", ".join(layer.fed_by) or None,
            "firing": None if layer.firing_rate is None else 100 * layer.firing_rate,
            "blocks": None if layer.zero_block_ratio is None else 100 * layer.zero_block_ratio,
            "backend": layer.backend,
            "before": layer.ms_before if layer.group == layer.name else None,
            "after": layer.ms_after if layer.group == layer.name else None,
            "why": layer.why if layer.group in (layer.name, None) else f"runs inside {layer.group}",
        }
        for layer in layers
    ]
    timed = [row for row in rows if row["before"] is not None and row["after"] is not None]
    dense = [name for name in result.ms if name != "optimised"]
    speedups = {name: comparison.speedup("optimised", baseline=name) for name in dense}
    speed = result.speedup
    Report(
        title="A spiking network, dense and optimised",
        summary=(
            f"{card['network'].get('residual', 'spiking')} ResNet-{card['network']['depth']} on CIFAR-10 "
            f"images, batches of {result.batch}, {result.threads} threads. Both sides ran in turn in one "
            f"process; the dense side is the fastest of {len(dense)} settings."
        ),
        headlines=(
            Headline(
                value=f"{speed.median:.2f}×",
                label="faster than the fastest dense setting",
                note=f"95 % interval {speed.low:.2f}–{speed.high:.2f}; against '{result.baseline}'",
                tone="good" if speed.low > 1 else "bad",
            ),
            Headline(
                value=f"{result.ms[result.baseline]:.1f} → {result.ms['optimised']:.1f} ms",
                label=f"a batch of {result.batch} images",
            ),
            Headline(
                value=f"{100 * result.accuracy_after:.2f} %",
                label=f"accuracy on {result.images} images",
                note=f"before: {100 * result.accuracy_before:.2f} %; predictions "
                + ("identical" if result.predictions_identical else "differ"),
                tone="good" if result.predictions_identical else "bad",
            ),
        ),
        sections=(
            Section(
                title="End to end",
                text=("Every dot is one batch. In each round all settings ran once, on the same images.",),
                items=(
                    plot_samples(
                        "Time of one batch",
                        {name: comparison.samples(name).times_ms for name in result.ms},
                        unit="ms",
                    ),
                    plot_intervals(
                        "Speed-up of the optimised network over each dense setting",
                        list(speedups),
                        [s.median for s in speedups.values()],
                        [s.low for s in speedups.values()],
                        [s.high for s in speedups.values()],
                        unit="×",
                        reference=1.0,
                    ),
                ),
            ),
            Section(
                title="Layer by layer",
                text=(
                    "A group is a convolution with its BatchNorm, its residual and the neuron behind it; its "
                    "time stands in the row of its first convolution.",
                ),
                items=(
                    plot_before_after(
                        "Time of each group",
                        [str(row["name"]) for row in timed],
                        [float(row["before"]) for row in timed],
                        [float(row["after"]) for row in timed],
                        unit="ms",
                    ),
                    Table(title="Layers", columns=_LAYER_COLUMNS, rows=rows),
                ),
            ),
        ),
        environment=run.info["environment"],
        reproduce="sparseflow demo",
    ).write(result.report)
