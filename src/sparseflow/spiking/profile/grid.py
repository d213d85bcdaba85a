"""Benchmark grids: networks by dataset, time steps and batch size, measured in one resumable run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sparseflow.core.progress import Progress
from sparseflow.core.run import Run
from sparseflow.spiking.models.model_zoo import BenchCase, NetworkConfig
from sparseflow.spiking.profile.bench import bench_grid

Dataset = Literal["cifar10", "cifar100"]

NUM_CLASSES: dict[Dataset, int] = {"cifar10": 10, "cifar100": 100}
DEFAULT_MODEL = "cifar10-sew-resnet18"
GRID_MODELS = tuple(f"spiking_resnet{depth}" for depth in (18, 34, 50, 101, 152))


@dataclass(frozen=True, kw_only=True)
class GridResult:
    """Results of a benchmark grid.

    Attributes:
        run: Directory of the run.
        cases: Case name -> `BenchResult.to_dict()`, or `{"error": message}`.
    """

    run: Path
    cases: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {"run": str(self.run), "cases": self.cases}


def build_cases(
    *,
    models: Sequence[str] | None = None,
    dataset: Dataset = "cifar10",
    time_steps: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    image_size: int = 32,
    width: int = 64,
    full_grid: bool = False,
) -> list[BenchCase]:
    """Build the cases of a benchmark.

    Args:
        models: Networks by name; by default the shipped one, or with `full_grid` every depth.
        dataset: Sets the number of classes; `full_grid` uses both.
        time_steps: Numbers of time steps; by default 4, or with `full_grid` 4 and 16.
        batch_sizes: By default 32, or with `full_grid` 1, 8 and 32.
        image_size: Height and width of the input, pixels.
        width: Channels of the first stage.
        full_grid: Use the defaults of the full grid.
    """
    return [
        BenchCase(
            model=model,
            config=NetworkConfig(
                time_steps=steps, num_classes=NUM_CLASSES[name], image_size=image_size, width=width
            ),
            batch_size=batch_size,
        )
        for model, name, steps, batch_size in itertools.product(
            models or (GRID_MODELS if full_grid else (DEFAULT_MODEL,)),
            NUM_CLASSES if full_grid else (dataset,),
            time_steps or ((4, 16) if full_grid else (4,)),
            batch_sizes or ((1, 8, 32) if full_grid else (32,)),
        )
    ]


def run_grid(
    cases: Sequence[BenchCase],
    out_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    rounds: int = 20,
    compile_baselines: bool = True,
    cache: bool = True,
    progress: Progress | None = None,
) -> GridResult:
    """Measure all cases in a new run below `out_dir`, or resume the run at `out_dir`.

    Args:
        cases: Networks, inputs and batch sizes.
        out_dir: Directory of runs, or the directory of a run to resume.
        device: Device of the measurements.
        dtype: Data type of the optimized networks; None for float32.
        rounds: Paired timing rounds.
        compiled: Let the dense baselines use `torch.compile` too.
        cache: Cache the autotuner's decisions on disk.
        progress: Called with a message and the fraction done.

    Raises:
        FileFormatError: The run to resume is damaged.
        RunError: Another process writes the run.
    """
    if (out_dir / "run.json").is_file():
        run = Run.open(out_dir)
    else:
        config = {
            "cases": [case.name for case in cases],
            "half": dtype == torch.float16,
            "rounds": rounds,
            "compiled": compile_baselines,
        }
        run = Run.start(out_dir, "sparseflow spiking bench", config, 0, device=device)
    with run:
        results = bench_grid(
            cases,
            run,
            device=device,
            dtype=dtype,
            rounds=rounds,
            compile_baselines=compile_baselines,
            cache=cache,
            progress=progress,
        )
    return GridResult(run=run.path, cases=results)
