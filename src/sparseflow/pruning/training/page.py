"""The page of a training: losses, accuracy, and what is closed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseflow.core.report import Column, Figure, Report, Section, Table, plot_curves, plot_intervals
from sparseflow.core.training.history import read_history, smooth_curve

PAGE = "report.html"

_CLOSED = {
    "tokens": "sparsity_token",
    "heads": "sparsity_head",
    "channels": "sparsity_ch",
    "blocks": "sparsity_block",
}


def write_page(folder: Path | str, environment: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into a training's folder; gives its path.

    Args:
        folder: Where the history is.
        environment: Circumstances, as `core.environment` writes them.

    Raises:
        FileFormatError: The history is damaged.
    """
    root = Path(folder)
    rows = list(read_history(root))
    train = [row for row in rows if row["kind"] == "train"]
    test = [row for row in rows if row["kind"] == "test"]
    columns = {"epoch": "epoch", "clip_top1": "clips right", "video_top1": "videos right", "loss": "loss"}
    table = Table(
        title="Accuracy on test clips",
        columns=[Column(key=key, title=title, digits=4) for key, title in columns.items()]
        + [Column(key=name, title=f"{name} dropped", digits=3) for name in _CLOSED],
        rows=[
            {"epoch": at, **{key: row[key] for key in columns if key != "epoch"}}
            | {name: row.get(key) for name, key in _CLOSED.items()}
            for at, row in enumerate(test, start=1)
        ],
    )
    closed = {name: smooth_curve(train, key) for name, key in _CLOSED.items()}
    figures: list[Figure] = [
        plot_curves("Loss in training", {name: smooth_curve(train, name) for name in ("loss", "task")},
               x="step", y="loss"),
        plot_curves("Accuracy", {"training clips": smooth_curve(train, "right"),
                            "test videos": ([float(row["step"]) for row in test],
                                            [float(row["video_top1"]) for row in test])},
               x="step", y="share that is right"),
        plot_curves("What is dropped or closed", closed, x="step", y="share"),
    ]  # fmt: skip
    last = f"{test[-1]['video_top1']:.2%} of test videos are right" if test else "no epoch is done yet"
    page = Report(
        title="VideoViT: a training",
        summary=f"After {train[-1]['step'] if train else 0} steps, {last}.",
        sections=[Section(title="Training", items=figures), Section(title="Epochs", items=[table])],
        environment=environment or {},
        reproduce="sparseflow pruning train --config settings.json --out …",
    )
    return page.write(root / PAGE)


def write_comparison(folder: Path | str, told: Mapping[str, Any]) -> Path:
    """Write `report.html` into a comparison's folder; gives its path.

    Args:
        folder: Where to write.
        told: What `compare.write_results` gave.
    """
    models, times = told["models"], {line["model"]: line for line in told["latency"]}
    names = [line["model"] for line in models]
    figure = plot_intervals(
        "Accuracy on test videos",
        names,
        [line["accuracy"] for line in models],
        [line["accuracy_low"] for line in models],
        [line["accuracy_high"] for line in models],
        unit="share that is right",
        caption="Mean over seeds, with 95 % bootstrap intervals.",
    )
    titles = {
        "model": "model", "seeds": "seeds", "accuracy": "accuracy", "accuracy_low": "from",
        "accuracy_high": "to", "over_dense": "over dense", "over_dense_low": "from", "over_dense_high": "to",
        "over_ast": "over AST", "over_ast_low": "from", "over_ast_high": "to",
    }  # fmt: skip
    accuracy = Table(
        title="Accuracy",
        columns=[
            Column(key=key, title=title, digits=None if key in ("model", "seeds") else 4)
            for key, title in titles.items()
        ],
        rows=[{key: line.get(key) for key in titles} for line in models],
    )
    heads = {"model": "model", "gflops": "GFLOP a clip", "latency_ms": "ms a clip", "speedup": "over dense",
             "speedup_low": "from", "speedup_high": "to"}  # fmt: skip
    speed = Table(
        title="What each costs, compact",
        columns=[
            Column(key=key, title=title, digits=None if key == "model" else 3) for key, title in heads.items()
        ],
        rows=[{key: line[key] for key in heads} for line in times.values()],
    )
    best = max(models, key=lambda line: line["accuracy"])
    page = Report(
        title="Which tokens to keep: AST2.0-lite v2 and its rivals",
        summary=f"Highest accuracy: {best['model']}, {best['accuracy']:.2%}.",
        sections=[
            Section(
                title="Accuracy",
                text=[
                    "All models were trained alike and keep as many tokens, but for the dense one. "
                    "Differences are those of the same seed."
                ],
                items=[figure, accuracy],
            ),
            Section(title="Cost", items=[speed]),
        ],
        environment=told["environment"],
        reproduce=told["command"],
    )
    return page.write(Path(folder) / PAGE)
