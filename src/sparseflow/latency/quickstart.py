"""All steps on a few networks: export, extract, collect, train, evaluate and report. Can be resumed.

Where other work prevents a load, the predictor is trained on the rows that were measured before, at least the
idle ones, and is evaluated while idle. A later run resumes at the missing load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.environment import collect_environment
from sparseflow.core.progress import Progress, subrange
from sparseflow.errors import DeviceError, RunError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.graph.sweep import SweepConfig
from sparseflow.latency.graph.zoo import ZooConfig, export_zoo
from sparseflow.latency.measure.collection import collect
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.model.evaluation import PredictorEvaluation, evaluate
from sparseflow.latency.model.predictor import Predictor
from sparseflow.latency.model.training import train
from sparseflow.latency.model.validation import get_network
from sparseflow.latency.report import write_report

LEVEL = 0.6
"""Load of the evaluation."""

NOTE = (
    "The predictor was trained on these models and their kernels, so this shows the steps and the effect "
    "of load. Errors on networks that were not trained on are in the section on held-out data; they "
    "decrease with more than four networks."
)

_STEPS = {
    "export": (0.0, 0.12), "extract": (0.12, 0.20), "idle": (0.20, 0.40), "sweep": (0.40, 0.55),
    "load": (0.55, 0.75), "train": (0.75, 0.85), "evaluate": (0.85, 1.0),
}  # fmt: skip
"""Step -> fraction of the total time at its start and end."""


@dataclass(frozen=True, kw_only=True)
class QuickstartResult:
    """Outcome of the quick start.

    Attributes:
        folder: Output directory.
        predictor_path: File of the predictor.
        report_path: Report page.
        evaluation: Predictions and measurements.
        quality: `Predictor.quality`.
        problems: Sentences that say which loads are missing.
    """

    folder: Path
    predictor_path: Path
    report_path: Path
    evaluation: PredictorEvaluation
    quality: Mapping[str, Any]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "folder": str(self.folder),
            "predictor": str(self.predictor_path),
            "report": str(self.report_path),
            "evaluation": self.evaluation.to_dict(),
            "quality": dict(self.quality),
            "problems": list(self.problems),
        }


def run_quickstart(
    out_dir: Path | str,
    *,
    zoo_config: ZooConfig | Path | str = "quickstart",
    provider: str = "cpu",
    progress: Progress | None = None,
) -> QuickstartResult:
    """Run every step that is not complete.

    Args:
        out_dir: Output directory; complete steps in it are kept.
        zoo_config: Networks to train on and to evaluate.
        provider: `"cpu"` or `"cuda"`.
        progress: Receives a message and the fraction done.

    Raises:
        RunError: No network could be exported or measured.
        DeviceError: The provider or its readings are not available.
        MissingExtraError: A package of the latency extra is missing.
    """
    root = Path(out_dir)
    models, kernel_dirs = _prepare_models(root, zoo_config, provider, progress)
    common: dict[str, Any] = {"provider": provider, "max_time_s": 2.0, "loops": 5, "warmup": 3, "keep": 100}
    idle_config = CollectionConfig(
        kernels=kernel_dirs,
        models=models,
        levels=[0.0],
        # On a GPU one measurement takes a dozen samples of a stream.
        rounds=1 if session.get_device_type(provider) == "cuda" else 3,
        min_time_s=0.1,
        max_samples=200,
        **common,
    )
    collect(idle_config, root / "rest", progress=_get_step_progress(progress, "idle"))
    # The sweep covers operators that the networks lack.
    sweep_config = CollectionConfig(
        sweep=SweepConfig(), levels=[0.0], rounds=1, min_time_s=0.1, max_samples=200, **common
    )
    collect(sweep_config, root / "sweep", progress=_get_step_progress(progress, "sweep"))
    # One model per network suffices under load, since kernels of the same kind respond equally.
    network_models = list({get_network(path.stem): path for path in models}.values())
    load_config = CollectionConfig(
        models=network_models,
        levels=[0.0, 0.3, LEVEL, 0.9],
        rounds=3,
        min_time_s=0.6,
        max_samples=1000,
        **common,
    )
    problems: list[str] = []
    try:
        collect(load_config, root / "load", progress=_get_step_progress(progress, "load"))
    except (RunError, DeviceError) as error:
        problems.append(f"measurements under load are missing: {error}; run the same command to resume")
    predictor = train(
        [root / name for name in ("rest", "sweep", "load")], progress=_get_step_progress(progress, "train")
    )
    # Saved before the evaluation, which can fail.
    predictor_path = predictor.save(root / "predictor.json")
    evaluate_progress = _get_step_progress(progress, "evaluate")
    evaluation = _evaluate(network_models, predictor, root, problems, evaluate_progress)
    return QuickstartResult(
        folder=root,
        predictor_path=predictor_path,
        report_path=write_report(
            evaluation,
            root,
            quality=predictor.quality,
            environment=collect_environment("cuda:0" if provider == "cuda" else "cpu"),
            reproduce=f"sparseflow latency quickstart --device {provider}",
            note=" ".join([NOTE, *problems]),
        ),
        evaluation=evaluation,
        quality=predictor.quality,
        problems=tuple(problems),
    )


def _evaluate(
    models: list[Path], predictor: Predictor, root: Path, problems: list[str], progress: Progress | None
) -> PredictorEvaluation:
    """Evaluate idle and under load; only idle if a load is missing, which adds to `problems`."""
    if not problems:
        try:
            return evaluate(
                models,
                predictor,
                levels=[0.0, LEVEL],
                rounds=2,
                out_dir=root / "evaluation",
                progress=progress,
            )
        except (RunError, DeviceError) as error:
            problems.append(f"the evaluation is of an idle device only: {error}")
    return evaluate(models, predictor, rounds=2, out_dir=root / "evaluation-idle", progress=progress)


def _prepare_models(
    root: Path, zoo_config: ZooConfig | Path | str, provider: str, progress: Progress | None
) -> tuple[list[Path], list[Path]]:
    """Export the models and extract their kernels; return the files and the directories."""
    exports = export_zoo(
        zoo_config, root / "models", provider=provider, progress=_get_step_progress(progress, "export")
    )
    models = {result.name: result.path for result in exports if result.path is not None}
    if not models:
        raise RunError(f"no model could be exported: {exports[0].problem}")
    extract_progress = _get_step_progress(progress, "extract")
    kernel_dirs = []
    for index, (name, path) in enumerate(models.items()):
        folder = root / "graphs" / name
        if extract_progress is not None:
            extract_progress(name, index / len(models))
        if not (folder / "done").is_file():
            extract(path, folder, provider=provider, check=False, threads=1)
            (folder / "done").touch()
        kernel_dirs.append(folder)
    return list(models.values()), kernel_dirs


def _get_step_progress(progress: Progress | None, step: str) -> Progress | None:
    return subrange(progress, *_STEPS[step], f"{step}: ")
