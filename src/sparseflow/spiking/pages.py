"""The page of a demo run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from sparseflow.core.timing import Comparison

if TYPE_CHECKING:
    from sparseflow.spiking.demo import DemoResult

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


def demo_page(result: DemoResult, comparison: Comparison, run: Run, card: dict[str, Any]) -> None:
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
