"""Grid-VQA as a task of a study.

Controllers do not learn from the split that the model learnt from, whose answers it half knows, so that cheap
plans look better than they are. The samples of the validation split that come first are learnt from, those
after them choose margins and weights, and the test split judges.
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
from sparseflow.adaptive.grid_vqa.evaluate import VqaScorer, outcomes
from sparseflow.adaptive.grid_vqa.images import ImageBank
from sparseflow.adaptive.grid_vqa.model import IMAGES, SETTINGS, load
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
    """Questions about grids of images, as a model was trained on.

    Attributes:
        model: On the device of `data`.
        data: Where samples come from.
        name: As `StudyTask`, as the others.
    """

    model: Any
    data: VqaDataset
    name: str = "Grid-VQA, validation split"
    kinds: Sequence[str] = KINDS
    chunk_size: int = CHUNK
    description: str = (
        "Right is an answer that greedy decoding gives word for word. What was learnt from and matched on "
        "are questions about images that the model had not learnt from; the test has images of its own."
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
        """Of a model's folder.

        Args:
            folder: What `model.save` wrote.
            device: Where to compute.
            dtype: Of the weights.
            archives: Of images, if they are elsewhere now than when the model was trained; see `placed`.
            bank: Images in place of those that the model's settings name.

        Raises:
            InputError: There is no such folder, or images are missing.
            FileFormatError: It holds something else.
        """
        if not (folder / SETTINGS).is_file():
            raise InputError(
                f"{folder} holds no model of Grid-VQA, which knows what to ask: there is no {SETTINGS}; give "
                "another model questions of your own with `--questions FILE.jsonl`"
            )
        model, _, settings = load(folder, device=device, dtype=dtype)
        return cls(model=model, data=VqaDataset(placed(settings, archives, folder), device, bank=bank))

    def identity(self) -> Mapping[str, Any]:
        """As `StudyTask`."""
        told = self.data.settings.model_dump(
            mode="json", include={"images": {"digits", "asked", "seed"}, "scene": True, "test_shares": True}
        )
        return told | {"names": list(self.data.bank.names), "images_in_all": len(self.data.bank.images)}

    def select_samples(self, counts: SampleCounts, progress: Progress | None = None) -> SplitRanges:
        """As `StudyTask`; samples are drawn, so there are as many as wanted."""
        return SplitRanges(
            train=SampleRange(split="val", count=counts.train),
            validation=SampleRange(split="val", first=counts.train, count=counts.validation),
            test=SampleRange(split="test", count=counts.test),
        )

    def evaluate_plans(
        self, space: PlanSpace, *, split: Split, first: int, count: int, progress: Progress | None = None
    ) -> PlanOutcomes:
        """As `StudyTask`; a chunk is quick, so nothing is told within."""
        return outcomes(self.model, self.data, space, split=split, first=first, count=count)

    def make_scorer(self, count: int) -> Callable[[tuple[int, ...]], np.ndarray]:
        """What scores sets of blocks, at the highest tier, by the first samples of the validation split."""
        right = VqaScorer(self.model, self.data, split="val", count=count)
        geometry = get_adapter(self.model).geometry

        def score(blocks: tuple[int, ...]) -> np.ndarray:
            plan = Plan(tier=TIERS[-1], insertion_position=1, top_k=geometry.top_k, blocks=blocks)
            return right([plan])[:, 0].numpy()

        return score


def placed(settings: VqaConfig, archives: Sequence[Path] | None, folder: Path) -> VqaConfig:
    """Settings of a task whose archives may be elsewhere now.

    Args:
        settings: Of the model.
        archives: Those to read, whatever else there is.
        folder: Of the model. Images that lie in it (`IMAGES`) go before those of the training.
    """
    if not archives:
        if not (folder / IMAGES).is_file():
            return settings
        archives = [folder / IMAGES]
    images = settings.images.model_copy(update={"archives": tuple(archives)})
    return settings.model_copy(update={"images": images})
