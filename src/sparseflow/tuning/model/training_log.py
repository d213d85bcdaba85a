"""Log of trainings: each training writes one record into its directory."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import ClassVar

from sparseflow.core.artifact import Artifact
from sparseflow.tuning.model.dataset import RankingDataset
from sparseflow.tuning.model.net.network import NetConfig

RECORD_FILE = "training.json"


class TrainingRecord(Artifact):
    """Record of a finished training.

    Attributes:
        date: Local time of the end.
        model: Name of the model.
        structure: Description of the network and its loss.
        dataset: Description of the training data and the held-out data.
        steps: Updates of the weights.
        train_loss: Training loss, averaged over the last steps.
        validation_loss: Last loss on held-out data; None without held-out data.
        top1: Mean top-1 score on held-out data; None without held-out data.
        top5: Mean top-5 score on held-out data; None without held-out data.
        remarks: Free text.
    """

    FORMAT: ClassVar[str] = "sparseflow.tuning.training"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "remove the file; the next `sparseflow tuning train` writes it again"

    date: datetime
    model: str
    structure: str
    dataset: str
    steps: int
    train_loss: float
    validation_loss: float | None
    top1: float | None
    top5: float | None
    remarks: str


def read_training_log(root: Path) -> list[tuple[Path, TrainingRecord]]:
    """Read the records in a directory and all directories below it, oldest first.

    Returns:
        Directory and record of each training.

    Raises:
        FileFormatError: A record is damaged.
    """
    records = [(path.parent, TrainingRecord.load(path)) for path in sorted(root.glob(f"**/{RECORD_FILE}"))]
    return sorted(records, key=lambda item: item[1].date)


def describe_network(config: NetConfig) -> str:
    """Describe pattern branch and scoring, such as `"hdc, concat; input, 2 layers, width 64"`."""
    pattern = config.pattern
    branch = "no pattern" if pattern is None else f"{pattern.kind}, {pattern.pooling}"
    layers = "" if config.context_mode == "mlp" else f", {config.layers} layers"
    return f"{branch}; {config.context_mode}{layers}, width {config.width}"


def describe_data(data: RankingDataset, held_out: RankingDataset | None) -> str:
    """Describe operators and sizes of the training data, and the held-out families."""
    operators = ", ".join(dict.fromkeys(group.task.operator for group in data.groups))
    matrices = len({group.matrix for group in data.groups})
    text = f"{operators}: {data.num_schedules} labels of {len(data.groups)} tasks, {matrices} matrices"
    return text if held_out is None else f"{text}; held out: {', '.join(held_out.families)}"
