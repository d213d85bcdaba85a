"""Grid-VQA as the task of a study.

Controllers are not trained on the model's training split, where the model knows part of the answers and cheap
plans look too good. They are trained on the first samples of the validation split, calibrated on the samples
after them, and evaluated on the test split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.grid_vqa.config import KINDS, VqaConfig
from sparseflow.adaptive.grid_vqa.dataset import CHUNK, VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import VqaScorer, evaluate_plans
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.model import IMAGES, SETTINGS, load_vqa_model
from sparseflow.adaptive.plan.space import TIERS, Plan, PlanSpace
from sparseflow.adaptive.questions.task import (
    PlanOutcomes,
    SampleCounts,
    SampleRange,
    Split,
    SplitRanges,
)
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class GridVqaTask:
    """Grid-VQA of a trained model. Implements `StudyTask`.

    Attributes:
        model: Model, on the device of `data`.
        data: Samples.
        name: As in `StudyTask`, like the others.
    """

    model: Any
    data: VqaDataset
    name: str = "Grid-VQA, validation split"
    kinds: Sequence[str] = KINDS
    chunk_size: int = CHUNK
    description: str = (
        "An answer is correct if greedy decoding gives it word for word. Controllers were trained and "
        "calibrated on images that the model was not trained on; the test has other images."
    )

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        archives: Sequence[Path] = (),
        bank: ImageBank | None = None,
    ) -> GridVqaTask:
        """Open the directory of a model.

        Args:
            folder: Directory written by `save_vqa_model`.
            device: Device.
            dtype: Number format of the weights.
            archives: Image archives, if they were moved since the training; see `locate_archives`.
            bank: Images that replace those of the config.

        Raises:
            InputError: The directory does not exist, or images are missing.
            FileFormatError: It is damaged or foreign.
        """
        if not (folder / SETTINGS).is_file():
            raise InputError(
                f"{folder} is not a Grid-VQA model: {SETTINGS} is missing; pass questions for other models "
                "with `--questions FILE.jsonl`"
            )
        model, _, config = load_vqa_model(folder, device=device, dtype=dtype)
        return cls(model=model, data=VqaDataset(locate_archives(config, archives, folder), device, bank=bank))

    def identity(self) -> Mapping[str, Any]:
        record = self.data.config.model_dump(
            mode="json",
            include={"images": {"digits", "question_names", "seed"}, "scene": True, "test_shares": True},
        )
        return record | {"names": list(self.data.bank.names), "images_in_all": len(self.data.bank.images)}

    def select_samples(self, counts: SampleCounts, progress: Progress | None = None) -> SplitRanges:
        """Select the samples; as they are generated, there are as many as requested."""
        return SplitRanges(
            train=SampleRange(split="val", count=counts.train),
            validation=SampleRange(split="val", first=counts.train, count=counts.validation),
            test=SampleRange(split="test", count=counts.test),
        )

    def evaluate_plans(
        self, space: PlanSpace, *, split: Split, first: int, count: int, progress: Progress | None = None
    ) -> PlanOutcomes:
        """Evaluate plans; a chunk is fast, so progress is not reported."""
        return evaluate_plans(self.model, self.data, space, split=split, first=first, count=count)

    def make_scorer(self, max_samples: int) -> Callable[[tuple[int, ...]], np.ndarray]:
        """Make the score function of block importance: the first validation samples at the highest tier."""
        scorer = VqaScorer(self.model, self.data, split="val", count=max_samples)
        geometry = get_adapter(self.model).geometry

        def score(blocks: tuple[int, ...]) -> np.ndarray:
            plan = Plan(tier=TIERS[-1], insertion_position=1, top_k=geometry.top_k, blocks=blocks)
            return scorer([plan])[:, 0].numpy()

        return score


def locate_archives(config: VqaConfig, archives: Sequence[Path] | None, folder: Path) -> VqaConfig:
    """Replace the image archives of a configuration.

    Args:
        config: Configuration of the model.
        archives: Archives to read; take precedence over all others.
        folder: Directory of the model; its own images (`IMAGES`) take precedence over those of the training.
    """
    if not archives:
        if not (folder / IMAGES).is_file():
            return config
        archives = [folder / IMAGES]
    images = config.images.model_copy(update={"archives": tuple(archives)})
    return config.model_copy(update={"images": images})
