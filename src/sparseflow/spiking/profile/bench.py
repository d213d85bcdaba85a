"""Whole networks against their dense forms, in one run on one device.

`bench` measures one network at one batch size: every dense form that can run, then the optimised network, all
in turn, every round on the same input. The baseline is whichever dense form was fastest.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from sparseflow.core import timing
from sparseflow.core.run import Run
from sparseflow.errors import RunError, SparseFlowError
from sparseflow.spiking.api import optimize
from sparseflow.spiking.autotune.candidates import GPU_CALLS
from sparseflow.spiking.explanation import Explanation, explain
from sparseflow.spiking.graph import analyze
from sparseflow.spiking.models.model_zoo import Case
from sparseflow.spiking.profile.baselines import EAGER, OUR_DENSE, Forward, dense_forms, from_rest

OPTIMISED = "optimised"

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One network, one batch size, one device.

    Attributes:
        comparison: All samples of all forms, paired by round.
        baseline: The fastest dense form.
        speedup, speedup_eager: Its time, and eager's, over the optimised network's; medians with intervals.
        top1_agreement: Fraction of inputs on which the optimised network and eager agree about the class.
        accuracy_before, accuracy_after: Against the labels, where labels were given.
        firing_rate: Mean over spike-fed convolutions of their input's fraction of non-zeros.
        zero_block_ratio: Likewise.
        nearly_silent: Names of layers that fire under 0.1 %.
        energy_j: Energy of one call, by form, in joules, where the device tells; else empty.
        explanation: What was done to each layer.
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
    explanation: Explanation

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the samples."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("comparison", "explanation")}
        times = {name: self.comparison.samples(name).median_ms for name in self.comparison.times_ms}
        return {**plain, "latency_ms": times, "layers": self.explanation.to_dict()["layers"]}


def warmed(
    forms: dict[str, Forward], sample: torch.Tensor, progress: Callable[[str, float], None]
) -> dict[str, Forward]:
    """Run each form once; one that cannot run here (no compiler, say) is left out with a warning."""
    usable: dict[str, Forward] = {}
    for i, (name, form) in enumerate(forms.items()):
        progress(name, i / len(forms))
        try:
            form(sample)
        except Exception as error:
            # Compilers fail in many ways; the other forms remain, and the reader is told.
            first = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"the dense form '{name}' cannot run here: {first}", stacklevel=2)
            continue
        usable[name] = form
    if not usable:
        raise RunError("no dense form of this network can run here")
    return usable


def in_turn(
    forms: dict[str, Forward], batches: Sequence[torch.Tensor], rounds: int, *, warmup: int = 1
) -> timing.Comparison:
    """Time all forms in turn; in each round all of them see the same batch."""

    def cycling(form: Forward) -> Callable[[], object]:
        calls = 0

        def work() -> object:
            nonlocal calls
            calls += 1
            return form(batches[calls % len(batches)])

        return work

    return timing.compare(
        {name: cycling(form) for name, form in forms.items()},
        baseline=EAGER,
        rounds=rounds,
        warmup=warmup,
        device=str(batches[0].device),
        seed=0,
        # On a GPU batches queue up, as they do when a network serves: what the host does hides behind the
        # device's work unless there is more of it.
        calls_per_sample=GPU_CALLS if batches[0].is_cuda else 1,
    )


def bench(
    model: nn.Module,
    x: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    rounds: int = 20,
    compiled: bool = True,
    cache: bool = True,
    progress: Progress = lambda what, fraction: None,
) -> BenchResult:
    """Measure `model` on `x`, dense and optimised.

    Args:
        model: In eval mode, on the device of `x`; it is left optimised.
        x: One batch.
        labels: int64 [N], for accuracy.
        dtype: As for `optimize`.
        rounds: Paired timing rounds.
        compiled: Let the dense side use `torch.compile` too.
        cache: Remember the optimiser's decisions on disk.
        progress: Told what is being done.
    """
    before = from_rest(model)(x)
    forms = dense_forms(copy.deepcopy(model), analyze(model), x, compiled=compiled)
    forms = warmed(forms, x, lambda name, part: progress(f"preparing dense: {name}", 0.4 * part))
    optimize(
        model,
        x,
        dtype=dtype,
        cache=cache,
        progress=lambda what, done, total: progress(f"measuring {what}", 0.4 + 0.3 * done / max(total, 1)),
    )
    forms[OPTIMISED] = from_rest(model)
    after = forms[OPTIMISED](x)
    progress("dense and optimised in turn", 0.7)
    comparison = in_turn(forms, [x], rounds, warmup=3)
    baseline = min(
        (n for n in forms if n not in (OPTIMISED, OUR_DENSE)), key=lambda n: comparison.samples(n).median_ms
    )
    explanation = explain(model)
    fed = [layer for layer in explanation.layers if layer.firing_rate is not None and layer.fed_by]
    result = BenchResult(
        comparison=comparison,
        baseline=baseline,
        speedup=comparison.speedup(OPTIMISED, baseline=baseline),
        speedup_eager=comparison.speedup(OPTIMISED, baseline=EAGER),
        top1_agreement=_fraction(before.argmax(-1) == after.argmax(-1)),
        accuracy_before=None if labels is None else _fraction(before.argmax(-1) == labels),
        accuracy_after=None if labels is None else _fraction(after.argmax(-1) == labels),
        firing_rate=_mean([layer.firing_rate for layer in fed]),
        zero_block_ratio=_mean([layer.zero_block_ratio for layer in fed]),
        nearly_silent=tuple(layer.name for layer in fed if layer.flag),
        energy_j=energy_per_call({n: forms[n] for n in (EAGER, baseline, OPTIMISED)}, x),
        explanation=explanation,
    )
    progress("done", 1.0)
    return result


def bench_grid(
    cases: Sequence[Case],
    run: Run,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    rounds: int = 20,
    compiled: bool = True,
    cache: bool = True,
    progress: Progress = lambda what, fraction: None,
) -> dict[str, Any]:
    """Measure every case and keep all samples in `run`; cases that `run` holds already are not repeated.

    A case that fails is recorded with its error, and the others go on.

    Returns:
        Case -> what `BenchResult.to_dict` says, or `{"error": ...}`.
    """
    done: dict[str, Any] = dict(run.info.get("results", {}))
    for i, case in enumerate(cases):
        if case.name in done and "error" not in done[case.name]:
            continue
        part = i / len(cases)
        try:
            model, x, labels = case.build()
            result = bench(
                model.to(device),
                x.to(device),
                labels=None if labels is None else labels.to(device),
                dtype=dtype,
                rounds=rounds,
                compiled=compiled,
                cache=cache,
                progress=lambda what, f, part=part, name=case.name: progress(
                    f"{name}: {what}", part + f / len(cases)
                ),
            )
        except (SparseFlowError, RuntimeError) as error:
            done[case.name] = {"error": f"{type(error).__name__}: {error}"}
        else:
            run.extend(result.comparison.to_rows(case=case.name))  # type: ignore[arg-type]
            done[case.name] = result.to_dict()
        run.update_results(**{case.name: done[case.name]})
    progress("done", 1.0)
    return done


def _fraction(hits: torch.Tensor) -> float:
    return hits.float().mean().item()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def energy_per_call(forms: dict[str, Forward], x: torch.Tensor, *, seconds: float = 2.0) -> dict[str, float]:
    """Joules a call by NVML's counter, each form running alone for about `seconds`."""
    if x.device.type != "cuda":
        return {}
    from sparseflow.core.telemetry import nvml

    found: dict[str, float] = {}
    for name, form in forms.items():
        calls = max(
            10, int(seconds * 1e3 / max(timing.measure(lambda f=form: f(x), device=x.device).median_ms, 1e-3))
        )
        torch.cuda.synchronize(x.device)
        start = nvml.read_energy_j(x.device)
        for _ in range(calls):
            form(x)
        torch.cuda.synchronize(x.device)
        end = nvml.read_energy_j(x.device)
        if start is None or end is None:
            return {}
        found[name] = (end - start) / calls
    return found
