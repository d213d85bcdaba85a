"""`train`, `eval` and `plot`: train controllers and compare policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseflow.cli.adaptive.base import (
    ArchivesOption,
    ControllerOption,
    ModelArgument,
    OptionalProfileOption,
    PlanQualityOption,
    ProfileOption,
    QuestionsOption,
    app,
    silence_transformers,
)
from sparseflow.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OptionalOutFileOption,
    OutDirOption,
    SeedsOption,
    SetOption,
    get_command_line,
    open_device,
)
from sparseflow.cli.output import emit, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparseflow.adaptive.study import StudyConfig

MaxTrainSamplesOption = Annotated[
    int, typer.Option("--max-train-samples", min=1, help="Maximum questions to train on.")
]
MaxValidationSamplesOption = Annotated[
    int, typer.Option("--max-validation-samples", min=1, help="Maximum questions to select margins on.")
]
MaxTestSamplesOption = Annotated[
    int, typer.Option("--max-test-samples", min=1, help="Maximum questions to evaluate on.")
]
NumBudgetsOption = Annotated[
    int, typer.Option("--num-budgets", min=3, help="Number of budgets, at equal ratios.")
]
AttainmentOption = Annotated[
    float | None, typer.Option("--attainment", help="Required fraction of answers within their budget.")
]

_RECORD_KEYS = ("policies", "compared", "verdict", "attainment", "budgets_ms", "samples", "judged_at")


@app.command()
def train(
    context: typer.Context,
    model: ModelArgument,
    profile: ProfileOption,
    out: OutDirOption,
    questions: QuestionsOption = None,
    config: ConfigOption = "grpo",
    overrides: SetOption = None,
    seeds: SeedsOption = 3,
    max_train_samples: MaxTrainSamplesOption = 2048,
    max_validation_samples: MaxValidationSamplesOption = 1024,
    max_test_samples: MaxTestSamplesOption = 2048,
    num_budgets: NumBudgetsOption = 24,
    attainment: AttainmentOption = None,
    archives: ArchivesOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train controllers with GRPO and compare them with baselines; with torchrun on several GPUs.

    Shipped configuration: grpo.
    """
    from sparseflow.adaptive.study import train as train_controllers
    from sparseflow.adaptive.training.config import read_config
    from sparseflow.core.config import parse_overrides

    settings = read_config(config, parse_overrides(overrides or [], extra="adaptive"))
    study = _make_study(
        context, device, (max_train_samples, max_validation_samples, max_test_samples), model=model,
        profile=profile, out=out, questions=questions, num_budgets=num_budgets, attainment=attainment,
        archives=archives or (),
    )  # fmt: skip
    with progress_bar() as progress:
        results = train_controllers(study, settings, num_seeds=seeds, progress=progress)
    if results is not None:  # Only the first process of torchrun prints the result.
        _emit_results(results, out, as_json)


@app.command("eval")
def evaluate(
    context: typer.Context,
    model: ModelArgument,
    profile: ProfileOption,
    out: OutDirOption,
    questions: QuestionsOption = None,
    controller: ControllerOption = None,
    max_train_samples: MaxTrainSamplesOption = 2048,
    max_validation_samples: MaxValidationSamplesOption = 1024,
    max_test_samples: MaxTestSamplesOption = 2048,
    num_budgets: NumBudgetsOption = 24,
    attainment: AttainmentOption = None,
    archives: ArchivesOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Evaluate plans, training-free baselines and, optionally, controllers."""
    from sparseflow.adaptive.study import evaluate as evaluate_policies

    study = _make_study(
        context, device, (max_train_samples, max_validation_samples, max_test_samples), model=model,
        profile=profile, out=out, questions=questions, num_budgets=num_budgets, attainment=attainment,
        archives=archives or (),
    )  # fmt: skip
    with progress_bar() as progress:
        results = evaluate_policies(study, controllers=controller, progress=progress)
    if results is not None:
        _emit_results(results, out, as_json)


@app.command()
def plot(
    context: typer.Context,
    study: Annotated[
        Path | None, typer.Argument(help="Directory of a study; without it, --profile and --plan-quality.")
    ] = None,
    profile: OptionalProfileOption = None,
    plan_quality: PlanQualityOption = None,
    out: OptionalOutFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a study again, or a report of a profile and its plans' accuracy.

    The default output file is report.html, in the directory of the study if there is one.
    """
    from sparseflow.adaptive.profile import PlanProfile
    from sparseflow.adaptive.profile.plan_quality import PlanQuality
    from sparseflow.adaptive.study.page import PAGE_FILE, write_page, write_results_page
    from sparseflow.adaptive.study.results import make_plan_results
    from sparseflow.errors import InputError

    if (study is None) == (profile is None and plan_quality is None) or (profile is None) != (
        plan_quality is None
    ):
        raise InputError("give the directory of a study, or both --profile and --plan-quality")
    path = out or (Path(PAGE_FILE) if study is None else study / PAGE_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    if study is not None:
        page = write_page(study, path)
    else:
        assert profile is not None and plan_quality is not None
        results = make_plan_results(PlanProfile.load(profile), PlanQuality.load(plan_quality))
        page = write_results_page(results | {"command": get_command_line(context)}, path)
    emit({"page": str(page)}, as_json)


def _make_study(
    context: typer.Context, device: str, max_samples: tuple[int, int, int], **settings: Any
) -> StudyConfig:
    from sparseflow.adaptive.study import SampleCounts, StudyConfig

    silence_transformers()
    train, validation, test = max_samples
    return StudyConfig(
        device=open_device(device),
        counts=SampleCounts(train=train, validation=validation, test=test),
        command=get_command_line(context),
        **settings,
    )


def _emit_results(results: Mapping[str, Any], out: Path, as_json: bool) -> None:
    from sparseflow.adaptive.study.page import PAGE_FILE
    from sparseflow.adaptive.study.results import RESULTS_FILE
    from sparseflow.adaptive.study.run import PLAN_QUALITY_FILE
    from sparseflow.adaptive.training.train import CONTROLLERS

    names = {
        "controllers": CONTROLLERS,
        "plan_quality": PLAN_QUALITY_FILE,
        "results": RESULTS_FILE,
        "page": PAGE_FILE,
    }
    files = {name: str(out / file) for name, file in names.items() if (out / file).exists()}
    rows = []
    for policy in results["policies"]:
        metrics = (policy[name] for name in ("goodput", "accuracy", "attainment", "regret"))
        rows.append(
            (
                policy["name"] + ("" if policy["met"] is not False else " (misses the target)"),
                *(
                    f"{100 * metric['mean']:.1f} ({100 * metric['low']:.1f} to {100 * metric['high']:.1f})"
                    for metric in metrics
                ),
                f"{policy['latency_ms']:.3g}",
            )
        )
    columns = (
        "policy",
        "correct and in time, %",
        "accuracy, %",
        "in time, %",
        "regret, points",
        ">mean, ms",
    )
    targets: list[str] = []
    if (source := results.get("judged_at")) is not None:
        targets.append(
            f"target: {results['attainment']:.1%} in time ({source['attainment']}), budgets from "
            f"{results['budgets_ms'][0]:.3g} to {results['budgets_ms'][-1]:.3g} ms ({source['budgets']})"
        )
    emit(
        {name: results[name] for name in _RECORD_KEYS if name in results} | files,
        as_json,
        make_table(columns, rows),
        *results["verdict"],
        *targets,
        *(f"{name}: {path}" for name, path in files.items()),
    )
