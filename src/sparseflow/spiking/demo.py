"""Demo: the pretrained network on real images, its fastest dense baseline against the optimized network.

Everything is measured on this machine in this process: accuracy and predictions on all shipped images, then
the latency of one batch, dense and optimized, interleaved on the same images. The result is a run
(`run.json`, `samples.parquet`) with a report (`report.html`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.checks import check_between
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.report import Page, plot_before_after, plot_intervals
from sparseflow.core.run import Run
from sparseflow.spiking.explanation import Explanation
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.profile.bench import OPTIMIZED, BenchResult, bench

MAX_BATCH_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class DemoResult(BenchResult):
    """Result of the demo.

    Attributes:
        batch_size: Images per batch.
        num_images: Images in total.
        num_threads: CPU threads used.
        run_dir: Directory of the run.
        report: The report page.
    """

    accuracy_before: float
    accuracy_after: float
    batch_size: int
    num_images: int
    num_threads: int
    run_dir: Path
    report: Path

    @property
    def predictions_identical(self) -> bool:
        """Whether all predictions on the shipped images are the same before and after."""
        return self.top1_agreement == 1.0

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "speedup": self.speedup.median,
            "speedup_interval": [self.speedup.low, self.speedup.high],
            "baseline": self.baseline,
            "latency_ms": self.latency_ms,
            "predictions_identical": self.predictions_identical,
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "batch": self.batch_size,
            "images": self.num_images,
            "threads": self.num_threads,
            "layers": self.explanation.to_dict()["layers"],
            "run": str(self.run_dir),
            "report": str(self.report),
        }


def run_demo(
    *,
    out_dir: Path = Path("runs"),
    network: str = pretrained.DEFAULT_NETWORK,
    batch_size: int = 32,
    rounds: int = 16,
    compile_baselines: bool = True,
    cache: bool = True,
    progress: Progress | None = None,
) -> DemoResult:
    """Measure the pretrained network dense and optimized, and write the run.

    Args:
        out_dir: Directory in which the run's own directory is created.
        network: Name of the pretrained network.
        batch_size: Images per batch.
        rounds: Paired timing rounds.
        compile_baselines: Let the dense baselines use `torch.compile` too.
        cache: Cache the autotuner's decisions on disk.
        progress: Called with a message and the fraction done.

    Raises:
        InputError: The batch size is too large.
        MissingExtraError: A package of the `spiking` extra is missing.
    """
    check_between(1, MAX_BATCH_SIZE, batch_size=batch_size)
    settings = {"network": network, "batch": batch_size, "rounds": rounds, "compiled": compile_baselines}
    with Run.start(out_dir, "sparseflow demo", settings, seed=0) as run:
        report = progress or (lambda message, fraction: None)
        report("loading the network and images", 0.0)
        model = pretrained.load_network(network)
        pixels, labels = pretrained.load_images()
        images = pretrained.normalize(pixels, network)
        measured = bench(
            model,
            [(batch,) for batch in images.split(batch_size)],
            labels=torch.from_numpy(labels),
            rounds=rounds,
            compile_baselines=compile_baselines,
            cache=cache,
            progress=subrange(progress, 0.03, 0.95),
        )
        run.extend(measured.comparison.to_rows(batch=batch_size))  # type: ignore[arg-type]
        result = DemoResult(
            **vars(measured),
            batch_size=min(batch_size, len(images)),
            num_images=len(images),
            num_threads=torch.get_num_threads(),
            run_dir=run.path,
            report=run.path / "report.html",
        )
        report("writing the report", 0.97)
        run.update_results(**{k: v for k, v in result.to_dict().items() if k not in ("run", "report")})
        write_report(result, run, pretrained.load_card(network))
    report("done", 1.0)
    return result


def write_report(result: DemoResult, run: Run, card: dict[str, Any]) -> None:
    """Write the demo's report to `result.report`."""
    comparison = result.comparison
    baselines = [name for name in comparison.times_ms if name != OPTIMIZED]
    network = card["network"]
    page = Page(
        "A spiking network, dense and optimized",
        f"{network.get('residual', 'spiking')} ResNet-{network['depth']} on CIFAR-10 images, batches of "
        f"{result.batch_size}, {result.num_threads} threads. Both sides were interleaved in one process; the "
        f"dense side is the fastest of {len(baselines)} settings.",
        environment=run.info["environment"],
        reproduce=_format_command(run.info["config"]),
    )
    _add_headlines(page, result)
    page.section(
        "End to end", "Each dot is one batch. In each round all settings ran once, on the same images."
    )
    page.samples("Latency of one batch", comparison.times_ms)
    speedups = [comparison.speedup(OPTIMIZED, baseline=name) for name in baselines]
    page.figure(
        plot_intervals(
            "Speedup of the optimized network over each dense setting",
            baselines,
            [speedup.median for speedup in speedups],
            [speedup.low for speedup in speedups],
            [speedup.high for speedup in speedups],
            unit="×",
            reference=1.0,
        )
    )
    _add_layers(page, result.explanation)
    page.write(result.report)


def _format_command(config: Mapping[str, Any]) -> str:
    compiles = "--compile" if config["compiled"] else "--no-compile"
    return f"sparseflow demo --batch-size {config['batch']} --rounds {config['rounds']} {compiles}"


def _add_headlines(page: Page, result: DemoResult) -> None:
    speedup, identical = result.speedup, result.predictions_identical
    page.headline(
        f"{speedup.median:.2f}×",
        "faster than the fastest dense setting",
        note=f"95 % interval {speedup.low:.2f}–{speedup.high:.2f}; against '{result.baseline}'",
        tone="good" if speedup.low > 1 else "bad",
    )
    before_ms, after_ms = result.latency_ms[result.baseline], result.latency_ms[OPTIMIZED]
    page.headline(f"{before_ms:.1f} → {after_ms:.1f} ms", f"a batch of {result.batch_size} images")
    page.headline(
        f"{100 * result.accuracy_after:.2f} %",
        f"accuracy on {result.num_images} images",
        note=f"before: {100 * result.accuracy_before:.2f} %; predictions "
        + ("identical" if identical else "differ"),
        tone="good" if identical else "bad",
    )


def _add_layers(page: Page, explanation: Explanation) -> None:
    page.section(
        "Layer by layer",
        "A group is a convolution with its BatchNorm, its residual and its neuron; its latency is in the row "
        "of its first convolution.",
    )
    timed = [
        layer
        for layer in explanation.layers
        if layer.group == layer.name
        and layer.latency_before_ms is not None
        and layer.latency_after_ms is not None
    ]
    if timed:  # empty if the network's own code was faster than the plan
        page.figure(
            plot_before_after(
                "Latency of each group",
                [layer.name for layer in timed],
                [float(layer.latency_before_ms or 0.0) for layer in timed],
                [float(layer.latency_after_ms or 0.0) for layer in timed],
                unit="ms",
            )
        )
    rows = [
        {
            "layer": layer.name,
            "fed by": ", ".join(layer.fed_by) or None,
            "firing rate, %": None if layer.firing_rate is None else 100 * layer.firing_rate,
            "zero blocks, %": None if layer.zero_block_ratio is None else 100 * layer.zero_block_ratio,
            "backend": layer.backend,
            "before, ms": layer.latency_before_ms if layer.group == layer.name else None,
            "after, ms": layer.latency_after_ms if layer.group == layer.name else None,
            "reason": layer.reason if layer.group in (layer.name, None) else f"part of {layer.group}",
        }
        for layer in explanation.layers
    ]
    digits = {"firing rate, %": 2, "zero blocks, %": 1, "before, ms": 3, "after, ms": 3}
    page.table("Layers", rows, digits=digits)
