"""Base of datasets whose clips are generated on access, in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class GeneratedClips(Dataset[dict[str, Any]], ABC):
    """Clips by index; items are `{"clip", "label", "video"}`.

    Attributes:
        classes: Class names by label.
        num_clips: Number of clips.
    """

    classes: ClassVar[tuple[str, ...]]
    num_clips: int

    @abstractmethod
    def make_batch(
        self, indices: Sequence[int] | np.ndarray, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Generate several clips: `clip`, `label` and `video`, each with one entry for each index."""

    def check_indices(self, indices: Sequence[int] | np.ndarray) -> None:
        """Raise IndexError if an index is out of range."""
        for index in indices:
            if not 0 <= index < self.num_clips:
                raise IndexError(f"clip {index} does not exist; there are {self.num_clips}")

    def __len__(self) -> int:
        return self.num_clips

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        # A DataLoader calls this with all indices of a batch.
        batch = self.make_batch(indices)
        labels, videos = batch["label"].tolist(), batch["video"].tolist()
        return [
            {"clip": clip, "label": label, "video": video}
            for clip, label, video in zip(batch["clip"], labels, videos, strict=True)
        ]
