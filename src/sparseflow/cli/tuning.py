"""`sparseflow tuning`: autotune sparse kernels, collect labels, train and evaluate cost models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparseflow.cli.options import (
    ClusterOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelNamesOption,
    OptionalBudgetSOption,
    OptionalConfigOption,
    OutDirOption,
    SeedOption,
    SeedsOption,
    SetOption,
    ThreadsOption,
    WorkersOption,
    get_command_line,
    open_device,
    split_list,
)
from sparseflow.cli.output import emit, make_table
from sparseflow.cli.progress import progress_bar
from sparseflow.cli.tune import NetOption, NumColumnsOption, TrialsOption, tune

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    name="tuning",
    help="Tuning: autotune sparse kernels and train cost models for them.",
    no_args_is_help=True,
)

LabelSetsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="LABELS...", help="Label sets, as written by `collect` and `import`."),
]
OperatorsOption = Annotated[
    str | None, typer.Option("--operators", help="Operators to learn, e.g. spmm,spmv; by default all.")
]
WorkloadsOption = Annotated[
    str, typer.Option("--workloads", help="Operators and columns of the dense operands.")
]
FamiliesOption = Annotated[
    Path | None,
    typer.Option(
        "--families",
        help='JSON file {"net100": "net"} of matrix families; by default derived from the names.',
    ),
]


@app.callback()
def tuning() -> None:
    """Tuning: autotune sparse kernels and train cost models for them."""


app.command("tune")(tune)


@app.command()
def export(
    kernel: Annotated[Path, typer.Argument(help="Kernel, as written by `tune`: kernel.sfk.")],
    folder: Annotated[Path, typer.Argument(help="Directory to create.")],
    prefix: Annotated[str, typer.Option(help="Start of the names of files and C symbols.")] = "sparseflow",
    as_json: JsonOption = False,
) -> None:
    """Write a kernel as C code and data, with a test program, for C and C++ programs.

    The kernel may have been tuned on another CPU.
    """
    from sparseflow.tuning.codegen.kernel import load

    result = load(kernel, any_cpu=True).export_c(folder, prefix=prefix)
    emit(
        result.to_dict(),
        as_json,
        f"schedule: {result.schedule}",
        *(
            []
            if result.preset is None
            else [f"in Python, scipy computes this kernel; the C code is the preset {result.preset}"]
        ),
        f"files: {folder}; README.md says how to build them",
    )


@app.command()
def collect(
    out: OutDirOption,
    matrices: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MATRIX]...", help="Matrix files, or directories of them."),
    ] = None,
    synthetic: Annotated[int, typer.Option(min=0, help="Number of synthetic patterns.")] = 0,
    workloads: WorkloadsOption = "spmm:64,spmm:256,spmv,sddmm:64",
    schedules: Annotated[int, typer.Option(min=1, help="Schedules to measure for each task.")] = 128,
    budget_s: OptionalBudgetSOption = None,
    dtype: DtypeOption = "float32",
    families: FamiliesOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure schedules on real and synthetic sparsity patterns and write a label set."""
    from sparseflow.tuning.measure import collection
    from sparseflow.tuning.measure.families import read_families
    from sparseflow.tuning.schedule.operators import parse_workloads
    from sparseflow.tuning.search.evolutionary import COLLECTION_STRATEGY

    targets = collection.generate_targets(
        matrices or [],
        parse_workloads(workloads),
        num_synthetic=synthetic,
        dtype=dtype,
        families=None if families is None else read_families(families),
        seed=seed,
    )
    with progress_bar() as progress:
        result = collection.collect(
            targets,
            out,
            strategy=COLLECTION_STRATEGY,
            schedules=schedules,
            budget_s=budget_s,
            seed=seed,
            threads=threads,
            cluster=cluster,
            progress=progress,
        )
    rate = f", {result.added / result.seconds:.1f} per second" if result.added else ""
    emit(
        result.to_dict(),
        as_json,
        f"{result.tasks} tasks with at least {result.min_rows} rows each",
        f"{result.rows} rows ({result.added} new{rate}), {result.failed} failed, "
        f"{result.disturbed} disturbed",
        *(f"skipped: {task}: {reason}" for task, reason in result.failed_references.items()),
        f"labels: {result.out_dir}",
    )


@app.command("import")
def import_labels(
    file: Annotated[
        Path,
        typer.Argument(help="Table of matrix, schedule and latency_ms, or AutoSparse's lines; also .gz."),
    ],
    operator: Annotated[str, typer.Option(help="Operator: spmm, spmv or sddmm.")],
    out: OutDirOption,
    n_cols: NumColumnsOption = None,
    matrix: Annotated[str | None, typer.Option(help="Name of the matrix, for lines without one.")] = None,
    matrices: Annotated[Path | None, typer.Option(help="Directory of the matrices' files.")] = None,
    families: FamiliesOption = None,
    processor: Annotated[
        str | None, typer.Option(help="Processor of the measurements; by default the file's name.")
    ] = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Convert AutoSparse's measurements to a label set; invalid lines are counted and listed.

    The number of columns is by default what the splits of the schedules cover.
    """
    from sparseflow.tuning.measure import label_import
    from sparseflow.tuning.measure.families import read_families

    with progress_bar() as progress:
        result = label_import.import_labels(
            file,
            out,
            operator=operator,
            n_cols=n_cols,
            matrix=matrix,
            matrices=matrices,
            families=None if families is None else read_families(families),
            device=processor,
            dtype=dtype,
            progress=progress,
        )
    record = result.to_dict()
    emit(
        record,
        as_json,
        f"{result.rows} rows of {len(result.tasks)} tasks, {result.patterns} with a known pattern",
        *(
            f"rejected: {group['rows']} rows, {reason}; line {group['first_line']}: {group['first_reason']}"
            for reason, group in record["rejected"].items()
        ),
        *(f"warning: {doubt}" for doubt in result.warnings),
        f"labels: {result.out_dir}; rejected lines: {result.out_dir / label_import.REJECTED_FILE}",
    )


@app.command()
def screen(
    matrices: Annotated[list[Path], typer.Argument(help="Matrix files, or directories of them.")],
    out: OutDirOption,
    config: OptionalConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = "cpu",
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Memory limit, GiB; by default 0.8 times the free memory of the machine, or the full GPU.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the matrices that do not fit into memory when a network is trained on them.

    One training step of the configuration runs for each matrix, in a child process. The list is the file
    excluded.txt, for `sparseflow tuning train --exclude`.
    """
    from sparseflow.core.config import parse_overrides
    from sparseflow.tuning.model.screening import screen_matrices
    from sparseflow.tuning.model.training import TrainConfig

    with progress_bar() as progress:
        result = screen_matrices(
            matrices,
            TrainConfig.read(config, parse_overrides(overrides or [], extra="tuning")),
            out,
            device=str(open_device(device)),
            memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
            progress=progress,
        )
    failed = [row for row in result.rows if not row.fits]
    table = make_table(
        ("matrix", ">elements", "error"),
        [
            (row.matrix, "unknown" if row.elements is None else str(row.elements), str(row.error))
            for row in failed
        ],
        title="Matrices that do not fit or cannot be read",
        no_wrap=("matrix",),
    )
    emit(
        result.to_dict(),
        as_json,
        *([table] if failed else []),
        f"{len(result.rows) - len(failed)} of {len(result.rows)} matrices fit",
        f"list: {result.excluded}",
    )


@app.command()
def train(
    label_sets: LabelSetsArgument,
    out: OutDirOption,
    operators: OperatorsOption = None,
    hold_out: Annotated[
        str | None, typer.Option(help="Matrix families to evaluate on instead of training, e.g. Trec,net.")
    ] = None,
    exclude: Annotated[
        Path | None, typer.Option(help="List of matrices to leave out, as written by `screen`.")
    ] = None,
    config: OptionalConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = "cpu",
    remarks: Annotated[str, typer.Option(help="Remarks in the log.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Train AutoSparse Net on labels; with torchrun on several GPUs.

    `sparseflow tuning plot` shows the log and the losses of all trainings in a directory.

    Shipped configuration: autosparse, the default. `--set init=shipped` fine-tunes the shipped network.
    """
    from sparseflow.core.config import parse_overrides
    from sparseflow.tuning.model import training
    from sparseflow.tuning.model.dataset import load_dataset
    from sparseflow.tuning.model.ranking import summarize_scores
    from sparseflow.tuning.model.screening import read_excluded

    settings = training.TrainConfig.read(config, parse_overrides(overrides or [], extra="tuning"))
    torch_device = open_device(device)
    with progress_bar() as progress:
        data, held_out = load_dataset(
            label_sets,
            operators=split_list(operators),
            hold_out=split_list(hold_out),
            exclude=() if exclude is None else read_excluded(exclude),
            progress=progress,
        )
        result = training.train(
            settings,
            data,
            out,
            held_out=held_out,
            device=torch_device,
            remarks=remarks,
            progress=progress,
        )
    scores = summarize_scores(result.scores) if result.scores else None
    net = out / training.NETWORK_FILE
    emit(
        {
            "net": str(net),
            "tasks": len(data.groups),
            "labels": data.num_schedules,
            "held_out": scores,
            "limits": dict(result.limits),
        },
        as_json,
        f"trained on {data.num_schedules} labels of {len(data.groups)} tasks",
        *([] if scores is None else [_score_table([{"model": "net", "operator": "all", **scores}])]),
        *(
            f"out of memory: the pattern of {data.list_matrix_names(digest)} is limited to {max_cells} cells"
            for digest, max_cells in result.limits.items()
        ),
        f"network: {net}",
    )


@app.command("eval")
def evaluate(
    context: typer.Context,
    label_sets: LabelSetsArgument,
    out: OutDirOption,
    suite: Annotated[
        Literal["named", "ablation", "both"],
        typer.Option(help="Models: AutoSparse's networks and boosted trees (named), the ablation, or both."),
    ] = "named",
    models: ModelNamesOption = None,
    operators: OperatorsOption = None,
    folds: Annotated[int, typer.Option(min=2, help="Folds over matrix families.")] = 4,
    seeds: SeedsOption = 1,
    config: OptionalConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = 1,
    search_matrix: Annotated[
        list[Path] | None,
        typer.Option(help="Matrix file to search schedules for. Repeatable."),
    ] = None,
    workloads: WorkloadsOption = "spmm:64,spmv",
    trials: TrialsOption = 100,
    net: NetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cross-validate cost models over matrix families and write a report.

    The report shows losses and scores. With --search-matrix it also shows how much search time a model saves;
    the network of guided searches must not be trained on these matrices.
    """
    from sparseflow.core.config import parse_overrides
    from sparseflow.tuning.evaluation import evaluate_models
    from sparseflow.tuning.model.training import TrainConfig
    from sparseflow.tuning.schedule.operators import parse_workloads

    with progress_bar() as progress:
        result = evaluate_models(
            TrainConfig.read(config, parse_overrides(overrides or [], extra="tuning")),
            label_sets,
            out,
            suite=suite,
            models=split_list(models),
            operators=split_list(operators),
            folds=folds,
            seeds=seeds,
            device=device,
            workers=workers,
            matrices=search_matrix or [],
            workloads=parse_workloads(workloads),
            max_trials=trials,
            net=net,
            command=get_command_line(context),
            progress=progress,
        )
    emit(result.to_dict(), as_json, _score_table(result.scores), f"report: {result.page}")


@app.command()
def plot(
    evaluation: Annotated[Path, typer.Argument(help="Directory of an evaluation, or of trainings.")],
    as_json: JsonOption = False,
) -> None:
    """Write the report of an evaluation again, or a report of trainings."""
    from sparseflow.tuning.evaluation import write_page

    emit({"page": str(write_page(evaluation))}, as_json)


def _score_table(scores: Iterable[Mapping[str, Any]]) -> Table:
    from sparseflow.tuning.model.ranking import TOP_K

    return make_table(
        ("model", "operator", *(f">top-{k}" for k in TOP_K)),
        [
            (
                row["model"],
                row["operator"],
                *(f"{row[f'top{k}']['mean']:.3f} ({row[f'top{k}']['random']:.3f})" for k in TOP_K),
            )
            for row in scores
        ],
        title="Scores on held-out matrices; in brackets the score of a random choice",
        no_wrap=("model",),
    )
