"""All steps on a few networks: export, extract, collect, train, evaluate and report. Can be resumed.

Other work on the machine is a part of the load, see `measure.idle` and `core.load`. What cannot be measured
is missing in the predictor and named in `QuickstartResult.problems`, and a later run resumes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.checks import check_at_least, check_between
from sparseflow.core.environment import collect_environment
from sparseflow.core.progress import Progress, subrange
from sparseflow.errors import DeviceError, RunError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.graph.synthetic_kernels import SyntheticKernelsConfig
from sparseflow.latency.graph.zoo import ZooConfig, export_zoo
from sparseflow.latency.measure.collection import PLAN, collect
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.model.evaluation import PredictorEvaluation, evaluate
from sparseflow.latency.model.predictor import Predictor
from sparseflow.latency.model.training import train
from sparseflow.latency.model.validation import get_network
from sparseflow.latency.report import write_report

LOADS = (0.3, 0.6, 0.9)
"""Loads to measure by default; the middle one is evaluated."""

STEADY_TIMEOUT_S = 5.0
"""Maximum time to reach a load. Other work that varies keeps a load from being steady for longer."""

NOTE = (
    "The predictor was trained on these models and their kernels, so this shows the steps and the effect "
    "of load. Errors on networks that were not trained on are in the section on held-out data; they "
    "decrease with more than four networks."
)

_STEPS = {
    "export": (0.0, 0.12), "extract": (0.12, 0.20), "idle": (0.20, 0.40), "synthetic": (0.40, 0.55),
    "load": (0.55, 0.75), "train": (0.75, 0.85), "evaluate": (0.85, 1.0),
}  # fmt: skip
"""Step -> fraction of the total time at its start and end."""


@dataclass(frozen=True, kw_only=True)
class QuickstartResult:
    """Outcome of the quick start.

    Attributes:
        folder: Output directory.
        threads: Threads within an operator for which the predictor is valid.
        predictor_path: File of the predictor.
        report_path: Report page.
        evaluation: Predictions and measurements.
        quality: `Predictor.quality`.
        problems: Sentences that say what is missing or inexact.
    """

    folder: Path
    threads: int
    predictor_path: Path
    report_path: Path
    evaluation: PredictorEvaluation
    quality: Mapping[str, Any]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "folder": str(self.folder),
            "threads": self.threads,
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
    loads: Sequence[float] = LOADS,
    threads: int = 1,
    progress: Progress | None = None,
) -> QuickstartResult:
    """Run every step that is not complete.

    Args:
        out_dir: Output directory; complete steps in it are kept.
        zoo_config: Networks to train on and to evaluate.
        provider: `"cpu"` or `"cuda"`.
        loads: Loads to measure and learn, shares in (0, 1]; empty for an idle device only.
        threads: Threads within an operator, for which the predictor is valid.
        progress: Receives a message and the fraction done.

    Raises:
        InputError: A load or `threads` is out of range, or `out_dir` contains measurements with others.
        RunError: No network could be exported or measured.
        DeviceError: The provider or its readings are not available.
        MissingExtraError: A package of the latency extra is missing.
    """
    check_at_least(1, threads=threads)
    for load in loads:
        check_between(0.01, 1.0, loads=load)
    root = Path(out_dir)
    models, kernel_dirs = _prepare_models(root, zoo_config, provider, progress)
    common: dict[str, Any] = {
        "provider": provider, "threads": threads, "max_time_s": 2.0, "loops": 5, "warmup": 3, "keep": 100,
    }  # fmt: skip
    idle_config = CollectionConfig(
        kernels=kernel_dirs,
        models=models,
        levels=[0.0],
        # On a GPU one measurement takes a dozen samples of a stream.
        rounds=1 if session.get_device_type(provider) == "cuda" else 2,
        min_time_s=0.1,
        max_samples=200,
        **common,
    )
    # Synthetic kernels cover operators that the networks lack.
    synthetic_config = CollectionConfig(
        synthetic=SyntheticKernelsConfig(), levels=[0.0], rounds=1, min_time_s=0.1, max_samples=200, **common
    )
    collections = [root / "rest", root / "synthetic"]
    collect(idle_config, collections[0], progress=_get_step_progress(progress, "idle"))
    collect(synthetic_config, collections[1], progress=_get_step_progress(progress, "synthetic"))
    # One model per network suffices under load, since kernels of the same kind respond equally.
    network_models = list({get_network(path.stem): path for path in models}.values())
    problems: list[str] = []
    if loads:
        load_config = CollectionConfig(
            models=network_models,
            levels=[0.0, *sorted(set(loads))],
            rounds=2,
            min_time_s=0.6,
            max_samples=1000,
            steady_timeout_s=STEADY_TIMEOUT_S,
            **common,
        )
        try:
            collect(load_config, root / "load", progress=_get_step_progress(progress, "load"))
        except (RunError, DeviceError) as error:
            problems.append(f"measurements under load are missing: {error}; run the same command to resume")
        if (root / "load" / PLAN).is_file():
            collections.append(root / "load")
    predictor = train(collections, progress=_get_step_progress(progress, "train"))
    problems += predictor.list_training_notes()
    # Saved before the evaluation, which can fail.
    predictor_path = predictor.save(root / "predictor.json")
    evaluate_progress = _get_step_progress(progress, "evaluate")
    level = sorted(loads)[len(loads) // 2] if loads and predictor.contention.samples else 0.0
    evaluation = _evaluate(network_models, predictor, level, root, problems, evaluate_progress)
    return QuickstartResult(
        folder=root,
        threads=threads,
        predictor_path=predictor_path,
        report_path=write_report(
            evaluation,
            root,
            quality=predictor.quality,
            environment=collect_environment("cuda:0" if provider == "cuda" else "cpu"),
            reproduce=f"sparseflow latency quickstart --device {provider} --threads {threads} "
            f"--loads {','.join(map(str, loads)) or 'none'}",
            note=" ".join([NOTE, *problems]),
        ),
        evaluation=evaluation,
        quality=predictor.quality,
        problems=tuple(problems),
    )


def _evaluate(
    models: list[Path],
    predictor: Predictor,
    level: float,
    root: Path,
    problems: list[str],
    progress: Progress | None,
) -> PredictorEvaluation:
    """Evaluate idle and at a level; without what cannot be measured, which adds to `problems`."""
    folders = {"evaluation": [0.0, level]} if level else {}
    for name, levels in {**folders, "evaluation-idle": [0.0]}.items():
        try:
            return evaluate(
                models,
                predictor,
                levels=levels,
                rounds=3,
                min_time_s=0.3,
                out_dir=root / name,
                progress=progress,
            )
        except (RunError, DeviceError) as error:
            problems.append(f"no evaluation at load {levels[-1]:g}: {error}")
    fingerprint = predictor.fingerprint
    return PredictorEvaluation(
        rows=(), device=fingerprint.name, provider=fingerprint.provider, threads=fingerprint.threads
    )


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
