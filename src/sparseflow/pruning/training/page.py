"""Report page of a training: losses, accuracy and sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseflow.core.report import Page
from sparseflow.core.training.history import read_history, smooth_curve

PAGE_FILE = "report.html"

_SPARSITY = {
    "tokens": "sparsity_token",
    "heads": "sparsity_head",
    "channels": "sparsity_ch",
    "blocks": "sparsity_block",
}


def write_training_page(out_dir: Path | str, environment: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` of a training and return its path.

    Args:
        out_dir: Directory of the training.
        environment: Environment of the training, from `collect_environment`.

    Raises:
        FileFormatError: The history is damaged.
    """
    root = Path(out_dir)
    rows = list(read_history(root))
    train = [row for row in rows if row["kind"] == "train"]
    test = [row for row in rows if row["kind"] == "test"]
    accuracy = f"{test[-1]['video_top1']:.2%} top-1 accuracy over videos" if test else "not evaluated yet"
    page = Page(
        "VideoViT training",
        f"After {train[-1]['step'] if train else 0} steps: {accuracy}.",
        environment=environment,
        reproduce="sparseflow pruning train --config settings.json --out …",
    )
    page.section("Training")
    losses = {name: smooth_curve(train, name) for name in ("loss", "task")}
    page.curves("Training loss", losses, x="step", y="loss")
    test_curve = [float(row["step"]) for row in test], [float(row["video_top1"]) for row in test]
    curves = {"training clips": smooth_curve(train, "accuracy"), "test videos": test_curve}
    page.curves("Accuracy", curves, x="step", y="top-1 accuracy")
    sparsity = {name: smooth_curve(train, key) for name, key in _SPARSITY.items()}
    page.curves("Sparsity", sparsity, x="step", y="fraction removed")
    page.section("Epochs")
    columns = {"epoch": "epoch", "clip_top1": "clip accuracy", "video_top1": "video accuracy", "loss": "loss"}
    sparsity_columns = {key: f"sparsity of {name}" for name, key in _SPARSITY.items()}
    page.table(
        "Accuracy on test clips",
        [{"epoch": epoch, **row} for epoch, row in enumerate(test, start=1)],
        columns=columns | sparsity_columns,
        digits=dict.fromkeys(columns, 4) | dict.fromkeys(sparsity_columns, 3),
    )
    return page.write(root / PAGE_FILE)
