"""The whole path on a few networks: export, extract, collect, train, evaluate, report; all resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.environment import collect_environment
from sparseflow.errors import RunError
from sparseflow.latency import session, validate, zoo
from sparseflow.latency.campaign import Config
from sparseflow.latency.collect import collect
from sparseflow.latency.evaluate import Evaluation, evaluate
from sparseflow.latency.extract import extract
from sparseflow.latency.report import write_report
from sparseflow.latency.train import train

Progress = Callable[[str, float], None]

LEVEL = 0.6
"""The load beside which the quick start evaluates."""

NOTE = (
    "The predictor was trained on these very models and their kernels; this shows that the path works and "
    "what load does. How it does on networks that it never saw stands below, under what was held out, and "
    "gets better with more networks than four."
)
"""What a reader of the quick start's page must know."""

_SHARES = {"export": 0.12, "extract": 0.08, "rest": 0.25, "load": 0.30, "train": 0.10, "evaluate": 0.15}
"""How the time is spent, about."""


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """What the quick start leaves.

    Attributes:
        folder: Where everything is.
        predictor_path: The predictor.
        report_path: The page.
        evaluation: Predicted against measured.
        quality: What training said of the predictor on what was held out.
    """

    folder: Path
    predictor_path: Path
    report_path: Path
    evaluation: Evaluation
    quality: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The outcome in JSON's types."""
        return {
            "folder": str(self.folder),
            "predictor": str(self.predictor_path),
            "report": str(self.report_path),
            "evaluation": self.evaluation.to_dict(),
            "quality": self.quality,
        }


def quickstart(
    out: Path | str,
    *,
    zoo_config: zoo.ZooConfig | Path | str = "quickstart",
    provider: str = "cpu",
    progress: Progress | None = None,
) -> Quickstart:
    """Run every step, or what is missing of them.

    Args:
        out: Folder that gets everything; what is whole in it is kept.
        zoo_config: Networks to learn from and to evaluate.
        provider: `"cpu"` or `"cuda"`.
        progress: Called with (what is done, fraction done).

    Raises:
        RunError: No network could be exported, or a load was not reached.
        DeviceError: The provider or its readings are not there.
        MissingExtraError: A package of the latency extra is missing.
    """
    root = Path(out)
    steps = _Steps(progress)
    tell = steps.begin("export")
    exported = zoo.export(
        zoo_config,
        root / "models",
        provider=provider,
        progress=lambda what, done, total: tell(f"exporting {what}", done / total),
    )
    good = [result for result in exported if result.path is not None]
    if not good:
        raise RunError(f"no model could be exported: {exported[0].problem}")
    tell = steps.begin("extract")
    folders = []
    for place, result in enumerate(good):
        assert result.path is not None
        folder = root / "graphs" / result.name
        tell(f"extracting the kernels of {result.name}", place / len(good))
        if not (folder / "done").is_file():
            extract(result.path, folder, provider=provider, check=False, threads=1)
            (folder / "done").touch()
        folders.append(folder)
    models = [result.path for result in good if result.path is not None]
    common: dict[str, Any] = {
        "provider": provider,
        "max_time_s": 2.0,
        "loops": 5,
        "warmup": 3,
        "keep": 100,
    }
    # On a GPU one visit times a kernel a dozen times in a stream, which takes its time.
    rounds = 1 if session.short_name(provider) == "cuda" else 3
    rest = Config(
        kernels=folders, models=models, levels=[0.0], rounds=rounds, min_time_s=0.1, max_samples=200, **common
    )
    collect(rest, root / "rest", progress=steps.begin("rest"))
    # Names that stand for a network are enough beside loads: kernels of one kind respond alike.
    one_each = list({validate.family(path.stem): path for path in models}.values())
    beside = Config(
        models=one_each, levels=[0.0, 0.3, LEVEL, 0.9], rounds=3, min_time_s=0.6, max_samples=1000, **common
    )
    collect(beside, root / "load", progress=steps.begin("load"))
    predictor = train([root / "rest", root / "load"], progress=steps.begin("train"))
    path = predictor.save(root / "predictor.json")
    found = evaluate(
        one_each,
        predictor,
        levels=[0.0, LEVEL],
        rounds=2,
        out=root / "evaluation",
        progress=steps.begin("evaluate"),
    )
    page = write_report(
        found,
        root,
        quality=predictor.quality,
        environment=collect_environment("cuda:0" if provider == "cuda" else "cpu"),
        reproduce=f"sparseflow latency quickstart --provider {provider}",
        note=NOTE,
    )
    return Quickstart(
        folder=root,
        predictor_path=path,
        report_path=page,
        evaluation=found,
        quality=dict(predictor.quality),
    )


class _Steps:
    """Progress over steps of unequal length."""

    def __init__(self, progress: Progress | None) -> None:
        self._tell = progress or (lambda what, done: None)

    def begin(self, step: str) -> Progress:
        """What to call while `step` runs."""
        names = list(_SHARES)
        before = sum(_SHARES[name] for name in names[: names.index(step)])
        return lambda what, done: self._tell(f"{step}: {what}", before + _SHARES[step] * done)
