"""Entry points of the tuning wing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparseflow.core.progress import Progress
from sparseflow.tuning.codegen.kernel import Kernel
from sparseflow.tuning.schedule.matrices import is_tensor
from sparseflow.tuning.search.methods import DEFAULT_METHOD, Prior
from sparseflow.tuning.search.session import TuneResult, TuningSession

_GPU_OPTIONS = ("n_cols", "budget_s", "max_trials", "seed", "progress")


def tune(
    operator: str,
    matrix: Any,
    *,
    n_cols: int | None = None,
    budget_s: float = 60.0,
    max_trials: int | None = None,
    method: str = DEFAULT_METHOD,
    prior: Prior | None = None,
    threads: int | None = None,
    dtype: Any = None,
    device: str | None = None,
    seed: int = 0,
    out_dir: Path | str | None = None,
    cache_dir: Path | None = None,
    cluster: str | None = None,
    num_machines: int = 1,
    warm_start: bool = True,
    progress: Progress | None = None,
) -> Kernel:
    """Search for the fastest kernel of a sparse operator on one matrix.

    `TuningSession` describes the arguments and the errors; `TuningSession(...).run()` also returns all
    measurements.

    Example::

        kernel = tune("spmm", A, n_cols=256, budget_s=60)
        C = kernel(B)

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: scipy.sparse matrix, sparse torch tensor or 2-D numpy array.
        n_cols: Columns of the dense operands; None for SpMV.
        budget_s: Time budget, seconds. With 0, nothing is measured: the fill of blocks or the cost
            model selects one of the hand-written schedules.
        max_trials: Maximum number of schedules to measure besides the baselines.
        method: Search method.
        prior: Initial scores of a guided method.
        threads: Number of threads; by default all CPUs, or one for tiny products.
        dtype: float32 or float64, on a GPU also torch.float16 or torch.bfloat16; by default the dtype of the
            matrix.
        device: `"cpu"`, or a GPU such as `"cuda"`; by default that of a tensor, or the CPU. SpMM and SDDMM
            have GPU kernels, which take half precision with float32 sums. Of the other arguments, only
            `n_cols`, `budget_s`, `max_trials`, `dtype`, `seed` and `progress` apply to a GPU.
        seed: Random seed.
        out_dir: Directory of the trial log; an existing log is resumed.
        cache_dir: Directory of compiled code.
        cluster: Address of a Ray cluster that measures.
        num_machines: Machines of the cluster to use.
        warm_start: Whether to start from the fastest schedules of similar matrices.
        progress: Progress callback.
    """
    return run_search(
        operator,
        matrix,
        n_cols=n_cols,
        budget_s=budget_s,
        max_trials=max_trials,
        dtype=dtype,
        device=device,
        seed=seed,
        progress=progress,
        method=method,
        prior=prior,
        threads=threads,
        out_dir=out_dir,
        cache_dir=cache_dir,
        cluster=cluster,
        num_machines=num_machines,
        warm_start=warm_start,
    ).kernel


def run_search(
    operator: str, matrix: Any, *, dtype: Any = None, device: str | None = None, **options: Any
) -> TuneResult:
    """Search as `tune` does, and return all measurements.

    Args:
        operator, matrix, dtype, device: See `tune`.
        options: Other arguments of `tune`, of which a GPU takes those in `_GPU_OPTIONS`.
    """
    device = device or (str(matrix.device) if is_tensor(matrix) else "cpu")
    if device == "cpu":
        return TuningSession(operator, matrix, dtype=dtype, **options).run()
    from sparseflow.tuning.search.gpu_session import read_dtype, tune_on_gpu

    options = {name: value for name, value in options.items() if name in _GPU_OPTIONS}
    return tune_on_gpu(operator, matrix, device, dtype=read_dtype(matrix, dtype), **options)
