"""`sparseflow demo`."""

from __future__ import annotations

from pathlib import Path

from sparseflow.cli.options import (
    BatchSizeOption,
    CacheOption,
    CompileOption,
    JsonOption,
    OutDirOption,
    PairedRoundsOption,
)
from sparseflow.cli.output import emit


def demo(
    out: OutDirOption = Path("runs"),
    batch_size: BatchSizeOption = 32,
    rounds: PairedRoundsOption = 16,
    compile_dense: CompileOption = True,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Benchmark the shipped spiking network on this machine, dense and optimized.

    Writes a run with an HTML report into a new directory under the output directory.
    """
    from sparseflow.cli.progress import progress_bar
    from sparseflow.spiking.demo import run_demo

    with progress_bar() as progress:
        result = run_demo(
            out_dir=out,
            batch_size=batch_size,
            rounds=rounds,
            compile_baselines=compile_dense,
            cache=cache,
            progress=progress,
        )
    speedup = result.speedup
    agreement = "all predictions identical" if result.predictions_identical else "PREDICTIONS DIFFER"
    latencies = sorted(result.latency_ms.items(), key=lambda item: -item[1])
    emit(
        result.to_dict(),
        as_json,
        result.explanation.make_table(brief=True),
        f"accuracy on {result.num_images} images: {100 * result.accuracy_before:.2f} % before, "
        f"{100 * result.accuracy_after:.2f} % after; {agreement}",
        *(f"  {latency_ms:9.2f} ms  {name}" for name, latency_ms in latencies),
        f"{speedup.median:.2f}x end to end (95 %: {speedup.low:.2f}–{speedup.high:.2f}) against the fastest "
        f"dense setting, '{result.baseline}', {result.num_threads} threads, batch size {result.batch_size}",
        f"report: {result.report}",
    )
