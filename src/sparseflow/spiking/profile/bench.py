"""Benchmarks of whole networks against their dense baselines, in one run on one device.

`bench` measures one network at one batch size: all dense baselines that can run and the optimized network,
interleaved, on the same inputs. The fastest dense one is the baseline of the speedup. `run_grid` measures
networks by dataset, time steps and batch size in one resumable run.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from sparseflow.core import timing
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.run import Run
from sparseflow.errors import RunError, SparseFlowError
from sparseflow.spiking.api import optimize
from sparseflow.spiking.autotune.candidates import GPU_CALLS_PER_SAMPLE
from sparseflow.spiking.explanation import Explanation, explain
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.models.model_zoo import BenchCase, NetworkConfig
from sparseflow.spiking.profile.baselines import EAGER, FUSED_DENSE, Forward, build_baselines, make_stateless
from sparseflow.spiking.profile.memory import measure_memory_mb

Inputs = tuple[torch.Tensor, ...]
"""Positional arguments of a network's forward."""

OPTIMIZED = "optimised"

Dataset = Literal["cifar10", "cifar100"]
_NUM_CLASSES: dict[Dataset, int] = {"cifar10": 10, "cifar100": 100}
_GRID_MODELS = tuple(f"spiking_resnet{depth}" for depth in (18, 34, 50, 101, 152))


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Benchmark of one network at one batch size on one device.

    Attributes:
        comparison: All samples, paired by round.
        baseline: Name of the fastest dense baseline.
        speedup: Latency of the baseline over the optimized network's: median of the paired ratios and its
            interval.
        speedup_eager: The same for the eager network.
        top1_agreement: Fraction of inputs for which the optimized network and eager predict the same class.
        accuracy_before: Accuracy of the eager network; None without labels.
        accuracy_after: Accuracy of the optimized network; None without labels.
        firing_rate: Mean over spike-fed convolutions of their input's fraction of non-zeros.
        zero_block_ratio: Mean over spike-fed convolutions of their input's fraction of zero blocks.
        nearly_silent: Names of layers that fire under 0.1 %.
        energy_j: Energy per call by setting, in joules; empty if the device does not report it.
        memory_mb: Peak memory of the eager and the optimized network; see `measure_memory_mb`. Empty if it is
            not counted.
        explanation: Result of `explain`.
    """

    comparison: timing.Comparison
    baseline: str
    speedup: timing.Interval
    speedup_eager: timing.Interval
    top1_agreement: float
    accuracy_before: float | None
    accuracy_after: float | None
    firing_rate: float | None
    zero_block_ratio: float | None
    nearly_silent: tuple[str, ...]
    energy_j: dict[str, float]
    memory_mb: dict[str, float]
    explanation: Explanation

    @property
    def latency_ms(self) -> dict[str, float]:
        """Median latency of one batch by setting."""
        return {name: self.comparison.samples(name).median_ms for name in self.comparison.times_ms}

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, without the samples."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("comparison", "explanation")}
        return {**plain, "latency_ms": self.latency_ms, "layers": self.explanation.to_dict()["layers"]}


def warm_up(
    baselines: dict[str, Forward], sample: Inputs, progress: Progress | None = None
) -> dict[str, Forward]:
    """Run each baseline once; drop those that cannot run (no compiler, for example) with a warning."""
    usable: dict[str, Forward] = {}
    for i, (name, baseline) in enumerate(baselines.items()):
        if progress:
            progress(name, i / len(baselines))
        try:
            baseline(*sample)
        except Exception as error:
            # Compilers fail in many ways; the other baselines remain.
            first = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"the dense baseline '{name}' cannot run: {first}", stacklevel=2)
            continue
        usable[name] = baseline
    if not usable:
        raise RunError("no dense baseline of this network can run")
    return usable


def compare_interleaved(
    candidates: dict[str, Forward], batches: Sequence[Inputs], rounds: int, *, warmup: int = 1
) -> timing.Comparison:
    """Time all candidates interleaved; in each round all of them get the same batch."""

    def cycle_batches(forward: Forward) -> Callable[[], object]:
        remaining = itertools.cycle(batches)
        return lambda: forward(*next(remaining))

    return timing.compare(
        {name: cycle_batches(forward) for name, forward in candidates.items()},
        baseline=EAGER,
        rounds=rounds,
        warmup=warmup,
        device=str(batches[0][0].device),
        seed=0,
        # On a GPU calls are queued, as in serving, so that host work overlaps with device work.
        calls_per_sample=GPU_CALLS_PER_SAMPLE if batches[0][0].is_cuda else 1,
    )


def bench(
    model: nn.Module,
    batches: Sequence[Inputs],
    *,
    labels: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    rounds: int = 20,
    compile_baselines: bool = True,
    freeze: bool = False,
    offload_weights: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure `model` dense and optimized.

    Args:
        model: In eval mode, on the device of `batches`; it is optimized in place.
        batches: Inputs of the calls. All of them count for predictions; those of the first one's shapes are
            timed.
        labels: int64 [N] for all batches, for accuracy.
        dtype: See `optimize`.
        rounds: Paired timing rounds.
        compile_baselines: Let the dense baselines use `torch.compile` too.
        freeze, offload_weights: See `optimize`.
        cache: Cache the autotuner's decisions on disk.
        progress: Called with a message and the fraction done.
    """
    report = progress or (lambda message, fraction: None)
    report("accuracy of the original network", 0.0)
    reference = copy.deepcopy(model)
    before = _predict(make_stateless(model), batches)
    timed = [inputs for inputs in batches if get_shapes(inputs) == get_shapes(batches[0])]
    graph = analyze(model, timed[0])
    candidates = build_baselines(reference, graph, *timed[0], compile=compile_baselines)
    candidates = warm_up(candidates, timed[0], subrange(progress, 0.05, 0.4, "preparing dense: "))
    optimize(
        model,
        timed[0],
        dtype=dtype,
        freeze=freeze,
        offload_weights=offload_weights,
        cache=cache,
        progress=subrange(progress, 0.4, 0.7),
    )
    candidates[OPTIMIZED] = make_stateless(model)
    after = _predict(candidates[OPTIMIZED], batches)
    report("dense and optimized, interleaved", 0.7)
    comparison = compare_interleaved(candidates, timed, rounds, warmup=3)
    baseline = min(
        (n for n in candidates if n not in (OPTIMIZED, FUSED_DENSE)),
        key=lambda n: comparison.samples(n).median_ms,
    )
    explanation = explain(model)
    memory_mb = measure_memory_mb(reference, model, timed[0])
    spike_fed = [layer for layer in explanation.layers if layer.firing_rate is not None and layer.fed_by]
    result = BenchResult(
        comparison=comparison,
        baseline=baseline,
        speedup=comparison.speedup(OPTIMIZED, baseline=baseline),
        speedup_eager=comparison.speedup(OPTIMIZED, baseline=EAGER),
        top1_agreement=_compute_fraction(before == after) if before.shape == after.shape else 0.0,
        accuracy_before=None if labels is None else _compute_fraction(before == labels),
        accuracy_after=None if labels is None else _compute_fraction(after == labels),
        firing_rate=_compute_mean([layer.firing_rate for layer in spike_fed]),
        zero_block_ratio=_compute_mean([layer.zero_block_ratio for layer in spike_fed]),
        nearly_silent=tuple(layer.name for layer in spike_fed if layer.warning),
        energy_j=measure_energy({n: candidates[n] for n in (EAGER, baseline, OPTIMIZED)}, timed[0]),
        memory_mb=dict(zip((EAGER, OPTIMIZED), memory_mb, strict=True)) if memory_mb else {},
        explanation=explanation,
    )
    report("done", 1.0)
    return result


def _predict(forward: Forward, batches: Sequence[Inputs]) -> torch.Tensor:
    """Return the classes that the first output predicts, of all batches, in one dimension."""
    outputs = [next(iter(tree_leaves(forward(*inputs)))) for inputs in batches]
    return torch.cat([output.argmax(dim=-1).flatten() for output in outputs])


def get_shapes(inputs: Inputs) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a network's inputs."""
    return tuple(tuple(x.shape) for x in inputs)


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
                time_steps=steps, num_classes=_NUM_CLASSES[name], image_size=image_size, width=width
            ),
            batch_size=batch_size,
        )
        for model, name, steps, batch_size in itertools.product(
            models or (_GRID_MODELS if full_grid else (pretrained.DEFAULT_NETWORK,)),
            _NUM_CLASSES if full_grid else (dataset,),
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
    weights: Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Measure all cases in a new run below `out_dir`, or resume the run at `out_dir`.

    Finished cases are skipped. A case that fails is recorded with its error, and the others continue. The
    names of all networks and their inputs are checked before the run starts.

    Args:
        cases: Networks, inputs and batch sizes.
        out_dir: Directory of runs, or the directory of a run to resume.
        device: Device of the measurements.
        dtype, rounds, compile_baselines, cache, progress: See `bench`.
        weights: Weights of the networks; see `build_network`.

    Returns:
        The finished run. Its results are, by case name, `BenchResult.to_dict()` or `{"error": message}`.

    Raises:
        InputError: The name of a network is unknown, or its inputs cannot be read.
        FileFormatError: The run to resume is damaged.
        RunError: Another process writes the run.
    """
    for case in cases:
        case.check()
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
        for i, case in enumerate(cases):
            if "error" not in run.info.get("results", {}).get(case.name, {"error": "not measured"}):
                continue
            try:
                model, inputs, labels = case.build(weights)
                result = bench(
                    model.to(device),
                    [tuple(x.to(device) for x in inputs)],
                    labels=None if labels is None else labels.to(device),
                    dtype=dtype,
                    rounds=rounds,
                    compile_baselines=compile_baselines,
                    cache=cache,
                    progress=subrange(progress, i / len(cases), (i + 1) / len(cases), f"{case.name}: "),
                )
            except SparseFlowError as error:
                run.update_results(**{case.name: {"error": str(error)}})
            except Exception as error:  # of the network's own code
                run.update_results(**{case.name: {"error": f"{type(error).__name__}: {error}"}})
            else:
                run.extend(result.comparison.to_rows(case=case.name))  # type: ignore[arg-type]
                run.update_results(**{case.name: result.to_dict()})
        if progress:
            progress("done", 1.0)
    return run


def _compute_fraction(hits: torch.Tensor) -> float:
    return hits.float().mean().item()


def _compute_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def measure_energy(forwards: dict[str, Forward], inputs: Inputs, *, seconds: float = 2.0) -> dict[str, float]:
    """Measure joules per call with NVML's counter, each candidate running alone for about `seconds`."""
    device = inputs[0].device
    if device.type != "cuda":
        return {}
    from sparseflow.core.telemetry import nvml

    energy_j: dict[str, float] = {}
    for name, forward in forwards.items():
        latency_ms = timing.measure(lambda forward=forward: forward(*inputs), device=device).median_ms
        calls = max(10, int(seconds * 1e3 / max(latency_ms, 1e-3)))
        torch.cuda.synchronize(device)
        start = nvml.read_energy_j(device)
        for _ in range(calls):
            forward(*inputs)
        torch.cuda.synchronize(device)
        end = nvml.read_energy_j(device)
        if start is None or end is None:
            return {}
        energy_j[name] = (end - start) / calls
    return energy_j
