"""`sparseflow tune`, also available as `sparseflow tuning tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseflow.cli.options import (
    AnyDtypeOption,
    BudgetSOption,
    ClusterOption,
    DeviceOption,
    JsonOption,
    MethodOption,
    OptionalOutDirOption,
    SeedOption,
    ThreadsOption,
    open_device,
)
from sparseflow.cli.output import emit, make_table
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from sparseflow.tuning.search.session import TuneResult

_TRIALS = typer.Option("--trials", min=0, help="Maximum number of schedules to measure.")
TrialsOption = Annotated[int, _TRIALS]
OptionalTrialsOption = Annotated[int | None, _TRIALS]
NumColumnsOption = Annotated[
    int | None, typer.Option("--n-cols", help="Columns of the dense operands; not for spmv.")
]
NetOption = Annotated[
    Path | None, typer.Option("--net", help="AutoSparse Net of guided searches; the shipped one by default.")
]

KERNEL_FILE = "kernel.sfk"
"""Name of the kernel in the output directory."""


def tune(
    operator: Annotated[str, typer.Argument(help="Operator: spmm, spmv or sddmm.")],
    matrix: Annotated[
        Path,
        typer.Argument(
            help="Matrix: a Matrix Market file, also compressed; an archive of SuiteSparse; or .npz."
        ),
    ],
    n_cols: NumColumnsOption = None,
    method: MethodOption = "guided-evolutionary",
    trials: OptionalTrialsOption = None,
    budget_s: BudgetSOption = 60.0,
    net: NetOption = None,
    dtype: AnyDtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    cluster: ClusterOption = None,
    machines: Annotated[int, typer.Option(min=1, help="Machines of the cluster to measure on.")] = 1,
    warm_start: Annotated[
        bool,
        typer.Option(
            "--warm-start/--no-warm-start", help="Start from the fastest schedules of similar matrices."
        ),
    ] = True,
    seed: SeedOption = 0,
    out: OptionalOutDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest schedule for a sparse matrix; compare it with libraries and expert schedules.

    Methods are random, evolutionary, annealing and qlearning; with the prefix guided-, a cost model selects
    the candidates. All ratios are relative to the reference: for spmm, CSR with sums in registers; otherwise
    CSR. The output directory receives all trials and the kernel, kernel.sfk.

    On a GPU (--device cuda), spmm and sddmm are compared with cuSPARSE, float16 and bfloat16 are possible,
    and of the options of the search only --trials, --budget-s and --seed apply.
    """
    import numpy as np
    import torch

    from sparseflow.cli.progress import progress_bar
    from sparseflow.tuning.api import run_search
    from sparseflow.tuning.model.net.pretrained import load_prior
    from sparseflow.tuning.schedule.matrix_files import read_matrix

    target = open_device(device)
    is_half = dtype in ("float16", "bfloat16")
    if is_half and target.type == "cpu":
        raise InputError(f"`--dtype {dtype}` is for GPUs; kernels for CPUs compute in float32 or float64")
    coo = read_matrix(matrix, dtype=np.dtype("float32" if is_half else dtype))
    with progress_bar() as progress:
        result = run_search(
            operator,
            coo,
            n_cols=n_cols,
            dtype=None if target.type == "cpu" else getattr(torch, dtype),
            device=str(target),
            budget_s=budget_s,
            max_trials=trials,
            method=method,
            prior=None if net is None else load_prior(net),
            threads=threads,
            seed=seed,
            out_dir=out,
            cluster=cluster,
            num_machines=machines,
            warm_start=warm_start,
            progress=progress,
        )
    library = "scipy" if target.type == "cpu" else "cuSPARSE"
    kernel = None if out is None else out / KERNEL_FILE
    if kernel is not None:
        kernel.parent.mkdir(parents=True, exist_ok=True)
        result.kernel.save(kernel)
    baselines = sorted(result.baselines.items(), key=lambda item: -item[1])
    num_failed = sum(trial.error is not None for trial in result.trials)
    num_disturbed = sum(trial.disturbed for trial in result.trials)
    rows, cols = coo.shape
    emit(
        result.to_dict() | {"kernel": None if kernel is None else str(kernel)},
        as_json,
        make_table(
            ("schedule", ">time / reference"),
            [
                (name, "not measured" if ratio is None else f"{ratio:.3f}")
                for name, ratio in (*baselines, ("tuned", result.best_ratio))
            ],
            title=f"{operator}, {matrix.name}: {rows} x {cols}, {coo.nnz} elements"
            + ("" if n_cols is None else f", {n_cols} columns"),
        ),
        f"{len(result.trials)} schedules, {num_failed} of them failed, {num_disturbed} disturbed; "
        + ", ".join(f"{phase} {duration_s:.1f} s" for phase, duration_s in result.seconds.items()),
        *([] if result.best_ratio is None else _describe_gain(result, library)),
        *(f"started from the schedule of a similar matrix: {schedule}" for schedule in result.similar),
        f"schedule: {result.kernel.schedule or f'none, {library} computes'}",
        *([] if kernel is None else [f"kernel: {kernel}"]),
    )


def _describe_gain(result: TuneResult, library: str) -> list[str]:
    """Describe the speedup of a tuned kernel and when it has paid for the search."""
    gain = f"speedup over the best baseline: {result.kernel.speedup or 1.0:.2f}x"
    if result.break_even is None:
        return [gain, f"break-even: none, {library} is as fast"]
    return [gain, f"break-even against {library}, with the time of this run: {result.break_even:,} calls"]
